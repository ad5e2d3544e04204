"""Clipped cotangents: the identity forward, and the equation backward."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import optaxclip
from optaxclip import clip_cotangent, scale_cotangent
from tests.backward.cotangents import (
    EPS,
    INF,
    NAN,
    close,
    normal,
    pulled_back,
    shortened,
)


@pytest.mark.parametrize("axis", [None, 0, -1, (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("ord", [1, 2, 3, INF])
def test_norms_follow_the_equation(axis, ord):
    cotangent = normal(0, 3, 4, 5)
    limit = 2.0
    ours = pulled_back(
        functools.partial(clip_cotangent, max_norm=limit, axis=axis, ord=ord),
        normal(1, 3, 4, 5),
        cotangent,
    )
    close(ours, shortened(cotangent, limit, axis, ord))


def test_values_follow_the_equation():
    cotangent = normal(0, 3, 4)
    ours = pulled_back(
        functools.partial(clip_cotangent, max_value=0.5), normal(1, 3, 4), cotangent
    )
    np.testing.assert_array_equal(
        ours, np.clip(cotangent, np.float32(-0.5), np.float32(0.5))
    )


@pytest.mark.parametrize(
    "limits",
    [
        {"max_value": 10.0},
        {"max_norm": 50.0},
        {"max_norm": 20.0, "axis": -1},
        {"max_norm": INF},
        {"max_value": INF},
    ],
)
def test_what_is_within_the_limit_stays_bit_for_bit(limits):
    cotangent = normal(0, 6, 7)
    np.testing.assert_array_equal(
        pulled_back(
            functools.partial(clip_cotangent, **limits), normal(1, 6, 7), cotangent
        ),
        cotangent,
    )


def test_a_cotangent_at_the_limit_keeps_its_bits():
    cotangent = normal(0, 6, 7)
    limit = optaxclip.global_norm(cotangent)
    np.testing.assert_array_equal(
        pulled_back(
            functools.partial(clip_cotangent, max_norm=limit), cotangent, cotangent
        ),
        cotangent,
    )


@pytest.mark.parametrize(
    "limits", [{"max_value": 0}, {"max_norm": 0.0}, {"max_norm": 0, "axis": 0}]
)
def test_a_limit_of_zero_gives_zeros(limits):
    for cotangent in (normal(0, 2, 3), np.zeros((2, 3), np.float32)):
        assert not pulled_back(
            functools.partial(clip_cotangent, **limits), normal(1, 2, 3), cotangent
        ).any()


@pytest.mark.slow
@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_broken_cotangent_is_seen(bad):
    cotangent = np.array([[0.1, bad], [0.1, 0.1]], np.float32)

    def pull(**limits):
        return pulled_back(
            functools.partial(clip_cotangent, **limits),
            np.zeros((2, 2), np.float32),
            cotangent,
        )

    assert np.isnan(pull(max_norm=1.0)).all()
    np.testing.assert_array_equal(
        np.isnan(pull(max_norm=1.0, axis=-1)), [[True, True], [False, False]]
    )
    np.testing.assert_array_equal(
        pull(max_value=1.0),
        np.array([[0.1, 1.0 if bad == INF else NAN], [0.1, 0.1]], np.float32),
    )
    np.testing.assert_array_equal(pull(max_norm=INF), cotangent)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
@pytest.mark.parametrize(
    "limits", [{"max_norm": 1.0}, {"max_norm": 1.0, "axis": -1}, {"max_value": 0.25}]
)
def test_dtypes_are_kept_and_low_precision_is_right(dtype, limits):
    cotangent = jnp.asarray(
        300
        * (normal(0, 2, 400) + (1j * normal(1, 2, 400) if dtype == "complex64" else 0)),
        dtype,
    )
    out, pull = jax.vjp(
        functools.partial(clip_cotangent, **limits), jnp.ones((2, 400), dtype)
    )
    (ours,) = pull(cotangent)
    assert out.dtype == ours.dtype == dtype
    wide = np.asarray(cotangent).astype(
        np.complex128 if dtype == "complex64" else np.float64
    )
    exact = (
        wide * np.minimum(1, 0.25 / np.abs(wide))
        if "max_value" in limits
        else wide
        * np.minimum(
            1, 1 / np.linalg.norm(wide, axis=limits.get("axis"), keepdims=True)
        )
    )
    np.testing.assert_allclose(
        np.asarray(ours).astype(wide.dtype),
        exact,
        8 * float(jnp.finfo(dtype).eps),
        atol=float(jnp.finfo(dtype).smallest_subnormal),
    )


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
        return (
            jnp.sum(weights["h"] * tree["h"])
            + jnp.sum(weights["c"] * tree["c"][0])
            + 0.5 * tree["c"][1]
        )

    grads = jax.grad(loss, allow_int=True)(tree)
    close(grads["h"], shortened(weights["h"], 1.0))
    close(grads["c"][0], shortened(weights["c"], 1.0))
    assert grads["c"][1] == 0.5 and grads["steps"].dtype == jax.dtypes.float0


@pytest.mark.slow
@pytest.mark.parametrize("limits", [{"max_norm": 1.0}, {"max_value": 0.5}])
def test_vmap_clips_each_example_by_itself(limits):
    x, weights = normal(0, 5, 3, 2), normal(1, 5, 3, 2)
    grad = jax.grad(lambda x, w: jnp.sum(w * clip_cotangent(x, **limits)))
    np.testing.assert_allclose(
        jax.vmap(grad)(x, weights),
        np.stack([grad(*pair) for pair in zip(x, weights)]),
        2 * EPS,
    )
    if "max_norm" in limits:
        close(jax.vmap(grad)(x, weights), shortened(weights, 1.0, (1, 2)))


@pytest.mark.slow
def test_limits_of_examples_may_be_traced_and_differ():
    weights, limits = normal(0, 3, 4), jnp.array([0.5, 1.0, 100.0])

    def loss(x, w, limit):
        return jnp.sum(w * clip_cotangent(x, max_norm=limit))

    by_x, by_limit = jax.jit(jax.vmap(jax.grad(loss, (0, 2))))(
        jnp.zeros((3, 4)), weights, limits
    )
    close(by_x, shortened(weights, np.asarray(limits)[:, None], 1))
    assert not by_limit.any()


@pytest.mark.parametrize("name", ["max_norm", "max_value"])
@pytest.mark.parametrize("dtype", ["int32", "bfloat16", "float32"])
def test_the_dtype_of_a_limit_does_not_matter(name, dtype):
    grad = jax.jit(
        lambda limit: jax.grad(
            lambda x: jnp.sum(3 * clip_cotangent(x, **{name: limit}))
        )(jnp.ones((), jnp.float16))
    )(jnp.asarray(1, dtype))
    assert grad.dtype == "float16" and grad == 1


@pytest.mark.parametrize("limits", [{"max_norm": -1.0}, {"max_value": -1.0}])
def test_a_negative_traced_limit_counts_as_zero(limits):
    ((name, limit),) = limits.items()
    assert not jax.jit(
        lambda limit: jax.grad(lambda x: jnp.sum(clip_cotangent(x, **{name: limit})))(
            jnp.ones(3)
        )
    )(limit).any()


@pytest.mark.slow
def test_gradients_of_gradients_are_those_of_the_clipped_one():
    """d/dx of clip(x^2) at one element: 2x within the limit, 0 beyond it."""
    grad = jax.grad(lambda x: clip_cotangent(x, max_value=2.0) ** 3 / 3)
    assert jax.grad(grad)(1.0) == 2.0
    assert jax.grad(grad)(3.0) == 0.0
    assert jax.jacfwd(grad)(1.0) == 2.0


def test_forward_mode_is_refused_by_jax():
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(
            functools.partial(clip_cotangent, max_norm=1.0),
            (jnp.ones(2),),
            (jnp.ones(2),),
        )


@pytest.mark.slow
def test_rows_of_a_split_batch_take_no_collective():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    weights = normal(0, 8, 3)
    spec = PartitionSpec("data")

    def grads(axis, axes):
        def local(w):
            return jax.grad(
                lambda x: jnp.sum(
                    w * clip_cotangent(x, max_norm=1.0, axis=axis, mesh_axes=axes)
                )
            )(jnp.zeros_like(w))

        return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec))(
            weights
        )

    close(grads(-1, None), shortened(weights, 1.0, -1))
    close(grads(-1, spec), shortened(weights, 1.0, -1))
    close(grads(None, "auto"), shortened(weights, 1.0))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (
            {},
            ValueError,
            "clip_cotangent: give one of max_value and max_norm, got max_value=None "
            "and max_norm=None",
        ),
        (
            {"max_value": 1.0, "max_norm": 2.0},
            ValueError,
            "got max_value=1.0 and max_norm=2.0",
        ),
        (
            {"max_norm": -1.0},
            ValueError,
            r"clip_cotangent: max_norm must be at least 0, got -1.0",
        ),
        (
            {"max_value": NAN},
            ValueError,
            "clip_cotangent: max_value must not be NaN, got nan",
        ),
        (
            {"max_norm": "1"},
            TypeError,
            "clip_cotangent: max_norm must be a real number, got '1'",
        ),
        (
            {"max_norm": True},
            TypeError,
            "clip_cotangent: max_norm must be a real number, got True",
        ),
        (
            {"max_norm": np.ones(2)},
            ValueError,
            r"clip_cotangent: max_norm must be a scalar, got an array of shape \(2,\)",
        ),
        (
            {"max_norm": 1.0, "ord": 0},
            ValueError,
            "clip_cotangent: ord must be a number above 0",
        ),
        (
            {"max_norm": 1.0, "axis": 2},
            ValueError,
            r"clip_cotangent: axis=2 does not fit the leaf 'h', a tensor of rank 2",
        ),
        (
            {"max_norm": 1.0, "axis": 1.5},
            ValueError,
            "clip_cotangent: axis=1.5 does not fit",
        ),
        (
            {"max_value": 1.0, "axis": 1},
            ValueError,
            "clip_cotangent: axis=1 and ord=None belong to max_norm",
        ),
    ],
)
def test_bad_arguments_are_named(arguments, error, text):
    with pytest.raises(error, match=text):
        clip_cotangent({"h": jnp.ones((2, 3))}, **arguments)


@pytest.mark.parametrize(
    ("scale", "error", "text"),
    [
        (NAN, ValueError, "must not be NaN"),
        ("x", TypeError, "must be a real number, got 'x'"),
        (np.ones(3), ValueError, "must be a scalar"),
    ],
)
def test_bad_scales_are_named(scale, error, text):
    with pytest.raises(error, match=f"scale_cotangent: scale {text}"):
        scale_cotangent(jnp.ones(2), scale)


def test_cotangents_by_value_have_no_order_and_one_rounding():
    with pytest.raises(
        ValueError, match=r"clip_cotangent: axis=None and ord=2 belong to max_norm"
    ):
        optaxclip.clip_cotangent(jnp.ones(2), max_value=1.0, ord=2)
    x = jnp.asarray(np.random.default_rng(0).standard_normal(1000), jnp.bfloat16)
    (grad,) = jax.vjp(lambda x: optaxclip.scale_cotangent(x, 0.1), x)[1](x)
    exact = np.asarray(x).astype(np.float64) * float(np.float32(0.1))
    assert (
        np.abs(np.asarray(grad).astype(np.float64) - exact)
        <= 2.0**-8 * np.abs(exact) * (1 + 1e-3)
    ).all()


@pytest.mark.slow
def test_integer_cotangent_limits_under_strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        grad = jax.grad(
            lambda x: jnp.sum(optaxclip.clip_cotangent(x, max_norm=np.int32(1)))
        )(jnp.zeros(4))
    np.testing.assert_allclose(grad, np.full(4, 0.5), rtol=1e-6)
