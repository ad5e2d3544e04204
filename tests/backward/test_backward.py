"""Clipped cotangents: the identity forward, and the equation backward."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import optaxclip
from optaxclip import clip_cotangent
from tests.backward.cotangents import EPS, INF, NAN, clipped, close, normal, shortened

# Of elements, between bounds that may have any sign.
ELEMENTS = np.float32([-3, -0.75, -0.25, 0.25, 0.75, 3, NAN, INF, -INF])


@pytest.mark.parametrize("ord", [1, 2, 3, INF])
def test_norms_follow_the_equation(ord):
    cotangent = normal(0, 3, 4, 5)
    for axis in (None, 0, -1, (0, 2), (0, 1, 2)):
        ours = clipped(cotangent, max_norm=2.0, axis=axis, ord=ord)
        close(ours, shortened(cotangent, 2.0, axis, ord))


def test_each_element_is_held_between_its_bounds():
    for low, high in (
        *((None, 0.5), (-0.5, 1.0), (-1.0, 0.5), (0.0, 1.0), (0.5, 1.0), (-INF, 0.5)),
        *((-1.0, -0.5), (-INF, INF)),
    ):
        wanted = np.clip(ELEMENTS, -high if low is None else low, high)
        ours = clipped(ELEMENTS, min_value=low, max_value=high)
        np.testing.assert_array_equal(ours, wanted)


def test_what_is_within_the_limit_stays_bit_for_bit():
    cotangent = normal(0, 6, 7)
    for limits in (
        {"max_value": 10.0},
        {"max_norm": 50.0},
        {"max_norm": 20.0, "axis": -1},
        {"max_norm": INF},
        {"max_value": INF},
        {"max_norm": optaxclip.global_norm(cotangent)},
    ):
        np.testing.assert_array_equal(clipped(cotangent, **limits), cotangent)


def test_a_limit_of_zero_gives_zeros():
    for limits in ({"max_value": 0}, {"max_norm": 0.0}, {"max_norm": 0, "axis": 0}):
        for cotangent in (normal(0, 2, 3), np.zeros((2, 3), np.float32)):
            assert not clipped(cotangent, **limits).any()


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_broken_cotangent_is_seen(bad):
    cotangent = np.array([[0.1, bad], [0.1, 0.1]], np.float32)
    assert np.isnan(clipped(cotangent, max_norm=1.0)).all()
    rows = np.isnan(clipped(cotangent, max_norm=1.0, axis=-1))
    np.testing.assert_array_equal(rows, [[True, True], [False, False]])
    np.testing.assert_array_equal(clipped(cotangent, max_norm=INF), cotangent)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
@pytest.mark.parametrize(
    "limits", [{"max_norm": 1.0}, {"max_norm": 1.0, "axis": -1}, {"max_value": 0.25}]
)
def test_dtypes_are_kept_and_low_precision_is_right(dtype, limits):
    imaginary = 1j * normal(1, 2, 400) if dtype == "complex64" else 0
    cotangent = jnp.asarray(300 * (normal(0, 2, 400) + imaginary), dtype)
    ours = clipped(cotangent, **limits)
    assert ours.dtype == dtype
    wide = np.asarray(cotangent).astype(np.complex128)
    size = np.abs(wide)
    if "max_norm" in limits:
        size = np.linalg.norm(wide, axis=limits.get("axis"), keepdims=True)
    exact = wide * np.minimum(1, limits.get("max_value", 1) / size)
    kind = jnp.finfo(dtype)
    tolerance = 8 * float(kind.eps), float(kind.smallest_subnormal)
    np.testing.assert_allclose(np.asarray(ours).astype(wide.dtype), exact, *tolerance)


@pytest.mark.slow
def test_arrays_are_clipped_separately_and_integers_pass():
    tree = {
        "h": normal(0, 3),
        "steps": jnp.arange(3),
        "empty": np.zeros((0, 2), np.float32),
        "none": None,
        "c": (normal(1, 2, 2), 1.5),
    }
    weights = {"h": normal(2, 3) * 9, "c": normal(3, 2, 2) * 9}
    out = clip_cotangent(tree, max_norm=1.0)
    assert jax.tree.structure(out) == jax.tree.structure(tree)
    assert out["steps"] is tree["steps"]

    def loss(tree):
        tree = clip_cotangent(tree, max_norm=1.0)
        sums = jnp.sum(weights["h"] * tree["h"]), jnp.sum(weights["c"] * tree["c"][0])
        return sum(sums) + 0.5 * tree["c"][1]

    grads = jax.grad(loss, allow_int=True)(tree)
    close(grads["h"], shortened(weights["h"], 1.0))
    close(grads["c"][0], shortened(weights["c"], 1.0))
    assert grads["c"][1] == 0.5 and grads["steps"].dtype == jax.dtypes.float0


@pytest.mark.parametrize("limits", [{"max_norm": 1.0}, {"max_value": 0.5}])
def test_vmap_clips_each_example_by_itself(limits):
    x, weights = normal(0, 5, 3, 2), normal(1, 5, 3, 2)
    grad = jax.grad(lambda x, w: jnp.sum(w * clip_cotangent(x, **limits)))
    each = np.stack([grad(*pair) for pair in zip(x, weights)])
    np.testing.assert_allclose(jax.vmap(grad)(x, weights), each, 2 * EPS)
    if "max_norm" in limits:
        close(each, shortened(weights, 1.0, (1, 2)))


def test_limits_of_examples_may_be_traced_and_differ():
    weights, limits = normal(0, 3, 4), jnp.array([0.5, 1.0, 100.0])

    def loss(x, w, limit):
        return jnp.sum(w * clip_cotangent(x, max_norm=limit))

    grads = jax.jit(jax.vmap(jax.grad(loss, (0, 2))))
    by_x, by_limit = grads(jnp.zeros((3, 4)), weights, limits)
    close(by_x, shortened(weights, np.asarray(limits)[:, None], 1))
    assert not by_limit.any()


def test_bounds_may_be_traced_and_differ_and_have_no_gradient():
    def loss(x, low, high):
        return jnp.sum(-2 * clip_cotangent(x, min_value=low, max_value=high))

    bounds = jnp.array([-1.0, -3.0]), jnp.array([1.0, 1.0])
    grads = jax.jit(jax.vmap(jax.grad(loss, (0, 1, 2))))(jnp.zeros(2), *bounds)
    assert [x.tolist() for x in grads] == [[-1.0, -2.0], [0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("name", ["max_norm", "max_value"])
def test_a_traced_limit_has_any_dtype_and_counts_as_zero_below(name):
    @jax.jit
    def grad(limit):
        x = jnp.ones((), jnp.float16)
        return jax.grad(lambda x: jnp.sum(3 * clip_cotangent(x, **{name: limit})))(x)

    for limit in (np.int32(1), jnp.bfloat16(1), np.float32(-1)):
        found = grad(limit)
        assert found.dtype == "float16" and found == max(limit, 0)


def test_rows_of_a_split_batch_take_no_collective():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    weights = normal(0, 8, 3)
    spec = PartitionSpec("data")

    def grads(axis, axes):
        def local(w):
            options = {"axis": axis, "mesh_axes": axes}
            clip = partial(clip_cotangent, max_norm=1.0, **options)
            return jax.vjp(clip, jnp.zeros_like(w))[1](w)[0]

        split = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)
        return jax.jit(split)(weights)

    close(grads(-1, None), shortened(weights, 1.0, -1))
    close(grads(-1, spec), shortened(weights, 1.0, -1))
    close(grads(None, "data"), shortened(weights, 1.0))
    for axis in (None, -1):
        with pytest.raises(ValueError, match=r"x differs over \['data'\], got 'auto'"):
            grads(axis, "auto")


@pytest.mark.slow
def test_gradients_of_gradients_are_those_of_the_clipped_one():
    """d/dx of clip(x^2) at one element: 2x within the limit, 0 beyond it."""
    grad = jax.grad(lambda x: clip_cotangent(x, max_value=2.0) ** 3 / 3)
    assert jax.grad(grad)(1.0) == 2.0
    assert jax.grad(grad)(3.0) == 0.0
    assert jax.jacfwd(grad)(1.0) == 2.0
