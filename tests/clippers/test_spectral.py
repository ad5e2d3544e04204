"""Clipping of singular values, beside singular value decompositions in float64, and
leaves of every kind: zeros, broken ones, vectors, layers, columns, and limits.
"""

import math
from functools import cache, partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import optaxclip
from optaxclip import clip_by_spectral_norm, spectral_norm
from tests import oracles
from tests.helpers import apply

METHODS = ("svd", "newton_schulz")
both = pytest.mark.parametrize("method", METHODS)
SMOOTH = optaxclip.shrinks.smooth(2)
FORMS = {
    "hard": (optaxclip.shrinks.hard, lambda s, c: np.minimum(s, c)),
    "smooth": (SMOOTH, lambda s, c: s / np.sqrt(1 + (s / c) ** 2)),
}
both_forms = pytest.mark.parametrize("form", FORMS)


def matrix(shape, longest, shortest=1.0, rank=None, seed=0, dtype="float32"):
    """Random singular vectors, singular values spread evenly in their logarithm, none
    beyond the rank.
    """
    random = np.random.default_rng(seed)
    small = min(shape)
    rows, columns = (
        np.linalg.qr(random.standard_normal((size, small)))[0] for size in shape
    )
    values = np.geomspace(longest, shortest, small)
    values[small if rank is None else rank :] = 0
    return ((rows * values) @ columns.T).astype(jnp.dtype(dtype))


# Few shapes, so that most tests run the same few programs.
WIDE, SQUARE = (32, 64), (32, 32)


@cache
def program(**options):
    """Clips to a limit that is traced, so that one program serves every limit."""

    def run(x, limit):
        return apply(clip_by_spectral_norm(limit, **options), x)

    return jax.jit(run)


def clip(x, limit, method="svd", shrink=optaxclip.shrinks.hard, **options):
    return program(method=method, shrink=shrink, **options)(x, limit)


def expected(x, limit, form="hard"):
    u, s, v = np.linalg.svd(oracles.wide(x), full_matrices=False)
    return u * FORMS[form][1](s, limit)[..., None, :] @ v


def longest(x):
    return np.linalg.norm(oracles.wide(x), 2, (-2, -1))


def error(ours, theirs):
    return longest(oracles.wide(ours) - theirs)


@pytest.mark.parametrize("shape", [WIDE, SQUARE, (128, 8), (4, 256)], ids=str)
def test_singular_values_are_shrunk_and_vectors_kept(shape):
    x = matrix(shape, 10.0, 0.1)
    for method, form in product(METHODS, FORMS):
        updates, state = clip(x, 1.0, method=method, shrink=FORMS[form][0])
        assert error(updates, expected(x, 1.0, form)) <= 4e-6
        np.testing.assert_allclose(state.norm, longest(x), rtol=4e-6)
        assert updates.dtype == x.dtype and updates.shape == x.shape


RATIOS = (10.0, 1e3, 1e4, 1e6)
# As shares of the limit, of matrices whose longest singular value is RATIOS times it.
ERRORS = {"svd": (5e-6, 2e-3, 2e-2, 1.0), "newton_schulz": (4e-6, 2e-4, 2e-3, 0.2)}


def test_ill_conditioned_matrices_have_the_documented_error():
    for (method, errors), form in product(ERRORS.items(), FORMS):
        assert_errors(method, errors, form)


def assert_errors(method, errors, form):
    for ratio, most in zip(RATIOS, errors):
        even, low = matrix(WIDE, ratio), matrix(WIDE, 0.9, 1e-3)
        for x in (
            even,
            matrix(WIDE, ratio, ratio, rank=16) + low,
            matrix(WIDE, ratio, rank=1) + low,
        ):
            updates, _ = clip(x, 1.0, method=method, shrink=FORMS[form][0])
            assert error(updates, expected(x, 1.0, form)) <= most
            assert longest(updates) <= 1 + 3e-6


def test_any_rank():
    for method, rank in product(METHODS, (1, 2, 11, 32)):
        x = matrix(WIDE, 7.0, 0.5, rank)
        updates, _ = clip(x, 1.5, method=method)
        assert error(updates, expected(x, 1.5)) <= 4e-6 * 1.5


def test_a_norm_from_elsewhere_does_not_stand_for_singular_values():
    x = matrix(SQUARE, 3.0, 0.5)
    clipper = clip_by_spectral_norm(1.0)
    state = clipper.init(x)
    wanted, _ = clipper.update(x, state)
    for norm in (0.1, 100.0):
        updates, new = clipper.update(x, state, grad_norm=jnp.float32(norm))
        np.testing.assert_array_equal(updates, wanted)
        np.testing.assert_allclose(new.norm, 3.0, rtol=4e-6)


def test_equal_singular_values():
    x = matrix(WIDE, 3.0, 3.0)
    for method in METHODS:
        updates, state = clip(x, 1.0, method=method)
        assert error(updates, expected(x, 1.0)) <= 4e-6
        np.testing.assert_allclose(state.norm, 3.0, rtol=4e-6)


def test_nearly_tied_singular_values_are_never_overrated():
    x = matrix(SQUARE, 1.0, 1 - 1e-4)
    assert (
        longest(x) * (1 - 32 ** (1 / 2**17) + 1 - 4e-6)
        <= clip(x, math.inf, "newton_schulz")[1].norm
        <= longest(x) * (1 + 4e-6)
    )


@both
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_is_rounded_once(method, dtype):
    x = matrix((16, 48), 20.0, 0.1, dtype=dtype)
    updates, state = clip(x, 1.0, method=method)
    exact = expected(x, 1.0)
    rounding = oracles.eps_of(dtype) / 2 * np.linalg.norm(exact)
    assert updates.dtype == x.dtype and state.norm.dtype == jnp.float32
    assert error(updates, exact) <= 4e-6 + rounding
    assert longest(updates) <= 1 + 3e-6 + rounding


def test_float64_and_complex():
    # Complex matrices are conjugated where they are turned, so wide and tall ones.
    parts = matrix((8, 20), 5.0, 0.1), matrix((8, 20), 4.0, 0.1, seed=1)
    z = np.complex64(parts[0] + 1j * parts[1])
    for method in METHODS:
        with jax.enable_x64(True):
            x = jnp.asarray(matrix((8, 20), 1e3, dtype="float64"))
            assert error(clip(x, 1.0, method=method)[0], expected(x, 1.0)) <= 1e-11
        for y in (z, z.T):
            updates, state = clip(y, 1.0, method=method)
            assert error(updates, expected(y, 1.0)) <= 4e-6
            np.testing.assert_allclose(state.norm, longest(y), rtol=4e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("steps", [1, 2, 4, 6, 10, 16, 24, 32])
def test_with_fewer_steps_no_singular_value_is_too_large(steps, dtype):
    eps = np.finfo(dtype).eps
    with jax.enable_x64(True):
        for ratio in (1.5, 7.0, 100.0, 1e4):
            x = jnp.asarray(matrix(WIDE, ratio, dtype="float64"), dtype)
            updates, _ = clip(x, 1.0, method="newton_schulz", steps=steps)
            found, known = (
                np.linalg.svd(np.float64(x), compute_uv=False) for x in (updates, x)
            )
            most = np.minimum(known, 1)
            assert (found <= most + 16 * eps * ratio).all()
            # The largest come out as they should, so the limit is not missed by much.
            assert found[0] >= 0.7


@both
def test_at_or_below_the_limit_nothing_changes(method):
    x = matrix(WIDE, 2.0, 0.01)
    # Exactly the norm in the state: what is at its limit is not over it.
    limit = float(clip(x, math.inf, method=method)[1].norm)
    for above in (limit, 2 * limit, 1e30, math.inf, None):
        updates, state = clip(x, above, method=method)
        assert oracles.same_bits(updates, x)
        assert state.factor == 1 and state.clipped == 0


def test_smooth_far_below_the_limit_is_relatively_exact():
    x = matrix(WIDE, 1e-3, 1e-5)
    for method, limit in product(METHODS, (0.1, 1e4, 1e30)):
        updates, _ = clip(x, limit, method=method, shrink=SMOOTH)
        assert error(updates, expected(x, limit, "smooth")) <= 4e-6 * longest(x)


@pytest.mark.parametrize("limit", [1.0, 1e5, 1e9, 1e200])
def test_smooth_far_below_the_limit_is_exact_in_float64(limit):
    with jax.enable_x64(True):
        x = jnp.asarray(matrix((8, 5), 3.0, 0.1, dtype="float64"))
        updates, _ = clip(x, limit, "newton_schulz", SMOOTH)
        assert error(updates, expected(x, limit, "smooth")) <= 2e-14 * longest(x)


def test_singular_values_at_the_limit_are_exact_in_float64():
    # There the root that hard needs has its smallest eigenvalue, 1/2.
    with jax.enable_x64(True):
        x = jnp.asarray(matrix((8, 5), 1.5, 0.5, dtype="float64"))
        for limit in np.linalg.svd(x, compute_uv=False)[1:-1]:
            updates, _ = clip(x, limit, "newton_schulz")
            assert error(updates, expected(x, limit)) <= 2e-14 * limit


def test_every_shrink_fits_singular_values():
    x = matrix((9, 12), 4.0, 0.5)
    u, s, v = np.linalg.svd(oracles.wide(x), full_matrices=False)
    for shrink, values in (
        (optaxclip.shrinks.normalize, np.ones_like(s)),
        (optaxclip.shrinks.drop, np.where(s > 1, 0, s)),
        (optaxclip.shrinks.smooth(1), s / (1 + s)),
    ):
        assert error(clip(x, 1.0, shrink=shrink)[0], (u * values) @ v) <= 4e-6


def test_the_ends_of_the_range_of_float32():
    for method, unit in product(METHODS, (2.0**-124, 1e-30, 1e30, 2.0**126)):
        unit = np.float32(unit)
        x = unit * np.float32([[2 - 2**-20, 0, 0], [0, 1, 0]])
        updates, _ = clip(x, unit, method=method)
        wanted = [[1, 0, 0], [0, 1, 0]]
        np.testing.assert_allclose(updates / unit, wanted, rtol=4e-6, atol=4e-6)


def test_a_power_of_2_changes_no_digit():
    x = matrix((8, 5), 3.0, 0.1)
    for method in METHODS:
        wanted, state = clip(x, 1.0, method=method)
        for unit in np.float32([2.0**-100, 2.0**-7, 2.0**50, 2.0**101]):
            updates, state_of_unit = clip(unit * x, unit, method=method)
            np.testing.assert_array_equal(updates, unit * wanted)
            assert state_of_unit.norm == unit * state.norm


def test_the_squares_of_large_matrices_do_not_overflow():
    x = np.full((300, 200), 3e33, np.float32)
    updates, state = clip(x, longest(x) / 2, "newton_schulz")
    # One product sums 300 equal terms, each of which may round the same way.
    rounding = 300 * 2.0**-24
    np.testing.assert_allclose(updates, x / 2, rounding)
    np.testing.assert_allclose(state.norm, longest(x), rounding)


def test_newton_schulz_has_the_range_of_float64():
    for size in (1e300, 1e190, 1e-190, 1e-290):
        with jax.enable_x64(True):
            grads = jnp.diag(jnp.array([3.0, 1.0])) * size
            clipper = clip_by_spectral_norm(0.5 * size, method="newton_schulz")
            updates, state = clipper.update(grads, clipper.init(grads))
            np.testing.assert_allclose(state.norm, 3 * size, rtol=1e-9)
            np.testing.assert_allclose(
                updates, np.diag([0.5, 0.5]) * size, rtol=1e-6, atol=1e-6 * size
            )


@both
def test_zero_stays_zero_and_limit_0_gives_zeros(method):
    zero, x = np.zeros(WIDE, np.float32), matrix(WIDE, 3.0)
    for limit, shrink in (
        (0.0, optaxclip.shrinks.hard),
        (1.0, optaxclip.shrinks.hard),
        (None, optaxclip.shrinks.hard),
        (0.0, SMOOTH),
        (1.0, SMOOTH),
        (math.inf, SMOOTH),
    ):
        assert not np.any(clip(zero, limit, method=method, shrink=shrink)[0])
    updates, state = clip(x, 0.0, method=method)
    assert not np.any(updates) and state.factor == 0 and state.clipped == 1
    assert not np.any(clip(x, 0.0, method=method, shrink=SMOOTH)[0])


def test_a_shrink_that_divides_by_the_limit_gives_zeros_at_0():
    def bent(norm, limit):
        return limit * jnp.tanh(norm / limit)

    # The second singular value is 0, and 0 / 0 is NaN.
    x = np.float32([[3.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    np.testing.assert_array_equal(clip(x, 0.0, shrink=bent)[0], np.zeros((2, 3)))


def test_a_shrink_that_divides_by_the_norm_keeps_zeros():
    def divides(norm, limit):
        return jnp.minimum(norm, norm * (limit / norm))

    # The second singular value is 0, and 0 * (1 / 0) is NaN.
    x = np.float32([[3.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    updates, _ = clip(x, 1.0, shrink=divides)
    np.testing.assert_allclose(updates, x / 3, rtol=4e-6)


@pytest.mark.parametrize("rank", [1, 3])
def test_normalize_does_not_lengthen_rounding_noise(rank):
    x = matrix((16, 8), 5.0, 2.0, rank)
    updates, _ = clip(x, 1.0, shrink=optaxclip.shrinks.normalize)
    values = np.linalg.svd(oracles.wide(updates), compute_uv=False)
    wanted = np.where(np.arange(8) < rank, 1.0, 0.0)
    np.testing.assert_allclose(values, wanted, atol=2e-5)


@both
def test_a_broken_matrix_becomes_nan_and_is_counted(method):
    for broken in (math.nan, math.inf):
        tree = {"a": matrix((6, 9), 3.0), "b": matrix((6, 9), 3.0)}
        tree["a"][2, 3] = broken
        updates, state = clip(tree, 1.0, method=method)
        assert np.isnan(updates["a"]).all() and np.isfinite(updates["b"]).all()
        counts = {name: entry.nonfinite for name, entry in state.by_name().items()}
        assert counts == {"a": 1, "b": 0}
        assert not np.any(clip(tree, 1.0, method=method, nonfinite="zero")[0]["a"])


@both
def test_vectors_and_scalars_are_clipped_by_their_length(method):
    tree = {
        "v": np.float32([3.0, 4.0, 12.0]),
        "s": np.float32(-5.0),
        "row": np.float32([[6.0, 8.0]]),
        "i": np.arange(3, dtype=np.int32),
        "none": None,
    }
    updates, state = clip(tree, 1.0, method=method)
    for name, length in (("v", 13.0), ("s", 5.0), ("row", 10.0)):
        np.testing.assert_allclose(updates[name], tree[name] / length, rtol=1e-6)
        assert state.by_name()[name].norm == length
    assert oracles.same_bits(updates["i"], tree["i"]) and updates["none"] is None


# Several leaves of one shape, wide ones, tall ones, and layers.
SHAPES = {
    **{f"layer_{number}": (6, 10) for number in range(3)},
    "wide": (6, 40),
    "tall": (40, 6),
    "layers": (3, 6, 10),
    "vector": (1, 9),
}


@both
@both_forms
@pytest.mark.slow
def test_leaves_of_one_shape_and_of_others_are_clipped_each(method, form):
    tree = {
        name: np.random.default_rng(seed).standard_normal(shape).astype("float32")
        for seed, (name, shape) in enumerate(SHAPES.items())
    }
    tree["half"] = jnp.asarray(2 * tree["layer_0"], jnp.bfloat16)
    stacked = {name: int(name == "layers") for name in tree}
    options = {"method": method, "shrink": FORMS[form][0], "stacked": stacked}
    clipper = clip_by_spectral_norm(1.5, **options)
    updates, state = jax.jit(clipper.update)(tree, clipper.init(tree))
    for name, x in tree.items():
        exact = expected(x, 1.5, form)
        rounding = 2.0**-9 * np.linalg.norm(exact) if name == "half" else 0
        assert updates[name].dtype == x.dtype
        assert np.all(error(updates[name], exact) <= 4e-6 * 1.5 + rounding)
        norm = state.by_name()[name].norm
        np.testing.assert_allclose(norm.ravel(), np.ravel(longest(x)), rtol=4e-6)


@both
def test_a_program_grows_with_shapes_and_not_with_leaves(method):
    clipper = clip_by_spectral_norm(1.0, method=method)

    def products(count):
        tree = [np.ones((8 + number % 3, 4), np.float32) for number in range(count)]
        text = jax.jit(clipper.update).lower(tree, clipper.init(tree)).as_text()
        return text.count("gesdd") + text.count("dot_general")

    assert products(12) == products(3)


@both
def test_limits_may_differ_between_devices_that_share_a_matrix(method):
    x = matrix((30, 24), 5.0)
    clipper = clip_by_spectral_norm(None, method=method)

    def on_each(x, limit):
        return clipper.update(x, clipper.init(x), limit=limit[0])[0]

    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": (P(), P("x")), "out_specs": P("x")}
    split = jax.shard_map(on_each, mesh=mesh, **specs)
    have = np.split(jax.jit(split)(x, jnp.array([1.0, 2.0])), 2)
    for own, limit in zip(have, (1.0, 2.0)):
        assert error(own, expected(x, limit)) <= 4e-6 * limit


@both
def test_devices_may_hold_different_layers(method):
    x = jnp.stack([matrix((8, 6), 3.0 + number) for number in range(4)])
    clipper = clip_by_spectral_norm(1.0, method=method, stacked=1)

    def own(x):
        return clipper.update(x, clipper.init(x))[0]

    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.shard_map(own, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    np.testing.assert_allclose(jax.jit(split)(x), own(x), atol=1e-6)


@both
def test_vectors_beside_stacked_leaves_are_joined_over_devices(method):
    tree = {"w": jnp.ones((4, 3, 2)), "b": jnp.arange(8.0)}
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    for stacked in (None, {"w": 1, "b": None}):
        # Without layers the matrix is whole on every device.
        specs = {"w": P("x") if stacked else P(), "b": P("x")}

        def clipped(tree, stacked=stacked):
            clipper = clip_by_spectral_norm(1.0, method=method, stacked=stacked)
            return clipper.update(tree, clipper.init(tree))[0]["b"]

        split = jax.shard_map(clipped, mesh=mesh, in_specs=(specs,), out_specs=P("x"))
        wanted = np.arange(8.0) / np.linalg.norm(np.arange(8.0))
        np.testing.assert_allclose(jax.jit(split)(tree), wanted, rtol=1e-6)


def test_layers_of_vectors_keep_their_norms_beside_a_split_vector():
    tree = {"gain": jnp.arange(1.0, 9).reshape(4, 2), "bias": jnp.arange(8.0)}

    def clipped(tree):
        clipper = clip_by_spectral_norm(1.0, stacked={"gain": 1, "bias": None})
        return clipper.update(tree, clipper.init(tree))[0]["gain"]

    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.shard_map(clipped, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    np.testing.assert_allclose(jax.jit(split)(tree), clipped(tree), rtol=1e-6)


@both
@pytest.mark.parametrize("form", FORMS)
def test_complex_matrices_need_no_promotion_of_dtypes(method, form):
    parts = matrix((8, 20), 5.0, 0.1), matrix((8, 20), 4.0, 0.1, seed=1)
    z = np.complex64(parts[0] + 1j * parts[1])
    with jax.numpy_dtype_promotion("strict"):
        updates, _ = clip(z, 1.0, method=method, shrink=FORMS[form][0])
    assert error(updates, expected(z, 1.0, form)) <= 4e-6


@both
def test_columns_say_how_a_kernel_is_a_matrix(method):
    for shape, columns, folded in (
        ((3, 3, 4, 8), np.int64(1), (36, 8)),
        ((12, 4, 5), 2, (12, 20)),
        ((4, 5, 12), 1, (20, 12)),
    ):
        flat = matrix(folded, 4.0, 0.1)
        x, by_leaf = flat.reshape(shape), partial(lambda number, *_: number, columns)
        updates, _ = clip(x, 1.0, method=method, columns=by_leaf)
        assert updates.shape == shape
        assert error(updates.reshape(folded), expected(flat, 1.0)) <= 4e-6
    # One number for all leaves, and none is 1.
    for columns, folded in ((2, (12, 20)), (None, (48, 5))):
        flat = matrix(folded, 4.0, 0.1)
        norm = spectral_norm(flat.reshape(12, 4, 5), columns=columns, method=method)
        np.testing.assert_allclose(norm, longest(flat), rtol=4e-6)


@pytest.mark.parametrize("columns", [1.0, lambda *_: 1.0])
def test_columns_that_are_not_a_whole_number_are_refused(columns):
    with pytest.raises(ValueError, match="columns must be a whole number from 1 to 2"):
        spectral_norm(np.ones((12, 4, 5), np.float32), columns=columns)


def test_svd_takes_no_steps():
    text = r"^clip_by_spectral_norm: steps=3 is for method='newton_schulz'"
    for options in ({}, {"method": "svd"}):
        with pytest.raises(ValueError, match=text):
            clip_by_spectral_norm(1.0, steps=3, **options)


@pytest.mark.slow
@both_forms
def test_newton_schulz_has_a_finite_derivative_everywhere(form):
    def total(x):
        return jnp.sum(
            clip(x, 1.0, method="newton_schulz", shrink=FORMS[form][0])[0]
            * jnp.arange(12.0).reshape(3, 4)
        )

    derivative = jax.jit(jax.grad(total))
    for x in (
        np.zeros((3, 4), np.float32),
        matrix((3, 4), 3.0, 3.0),
        matrix((3, 4), 3.0, 1.0),
        matrix((3, 4), 0.5, 0.1),
    ):
        assert np.isfinite(derivative(x)).all()


@pytest.mark.slow
def test_matrices_that_are_not_shrunk_have_a_derivative():
    """Although their singular values are equal, so that the decomposition has none."""
    shapes = [(3, 4), (4, 3), (3, 3)]
    zeros = [jnp.zeros(shape) for shape in shapes]
    within = [0.5 * jnp.eye(*shape) for shape in shapes]
    cotangents = [
        jnp.arange(float(math.prod(shape))).reshape(shape) for shape in shapes
    ]
    for method, form in product(METHODS, FORMS):
        shrink = FORMS[form][0]
        for tree in [zeros, within] if form == "hard" else [zeros]:
            run = partial(clip, limit=1.0, method=method, shrink=shrink)
            _, pullback = jax.vjp(lambda tree, run=run: run(tree)[0], tree)
            jax.tree.map(
                np.testing.assert_array_equal, pullback(cotangents)[0], cotangents
            )


# Relative errors in float32.
ERRORS_OF_DERIVATIVES = {"smooth": 1e-5, "hard": 1e-3}


@pytest.mark.slow
def test_derivatives_by_products_have_the_documented_error():
    for ratio, (form, most) in product((1.5, 10, 1e3), ERRORS_OF_DERIVATIVES.items()):
        for seed in range(3):
            # No singular value is near the limit, where `hard` has no derivative.
            values = np.geomspace(ratio, ratio / 1e3, 8)
            values[abs(values - 1) < 0.1] = 1.1
            u, _, v = np.linalg.svd(matrix((8, 8), 1.0, seed=seed))
            x = np.float32((u * values) @ v)
            tangent = np.random.default_rng(seed).standard_normal(x.shape)
            tangent = np.float32(tangent)
            step = 1e-6 * oracles.wide(tangent)
            above = expected(oracles.wide(x) + step, 1.0, form)
            below = expected(oracles.wide(x) - step, 1.0, form)
            wanted = (above - below) / 2e-6
            run = partial(
                clip, limit=1.0, method="newton_schulz", shrink=FORMS[form][0]
            )
            _, found = jax.jvp(lambda x, run=run: run(x)[0], (x,), (tangent,))
            assert abs(found - wanted).max() <= most * abs(wanted).max()


def test_measured_alone_it_scales_whole_matrices():
    x = matrix((6, 9), 4.0, 0.1)
    clipper = optaxclip.clip_by(spectral_norm, optaxclip.rules.constant(1.0))
    updates, _ = jax.jit(lambda x: clipper.update(x, clipper.init(x)))(x)
    np.testing.assert_allclose(updates, x / 4, rtol=4e-6)


@both
def test_layers_of_very_different_size_do_not_meet(method):
    x = np.stack([matrix((6, 10), 8e-30, 1e-30), matrix((6, 10), 8e30, 1e30)])
    updates, _ = clip({"w": x}, 2e-30, method=method, stacked=1)
    errors = error(updates["w"], expected(x, 2e-30))
    assert errors[0] <= 4e-6 * 2e-30
    # By products what is eps of the longest is lost.
    assert errors[1] <= 4e-6 * (2e-30 if method == "svd" else 8e30)


def test_stacked_numbers_are_layers_too():
    updates, _ = clip({"gain": np.float32([3, -5, 0.5])}, 1.0, stacked=1)
    np.testing.assert_allclose(updates["gain"], [1, -1, 0.5], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shrink",
    [
        optaxclip.shrinks.hard,
        SMOOTH,
        optaxclip.shrinks.normalize,
        optaxclip.shrinks.drop,
    ],
    ids=["hard", "smooth", "normalize", "drop"],
)
def test_without_a_limit_no_shrink_touches_anything(shrink):
    x = matrix(SQUARE, 4.0)
    for method in METHODS if shrink in (optaxclip.shrinks.hard, SMOOTH) else ("svd",):
        assert oracles.same_bits(clip(x, math.inf, method=method, shrink=shrink)[0], x)


def test_without_a_limit_only_the_norm_is_computed():
    """Half of the decompositions of a clip."""
    grads = {"w": jnp.ones((3, 4))}
    programs = {}
    for limit in (None, 1.0):
        clipper = optaxclip.clip_by_spectral_norm(limit)
        state = clipper.init(grads)
        programs[limit] = str(jax.make_jaxpr(clipper.update)(grads, state))
    assert programs[None].count("= svd[") < programs[1.0].count("= svd[")
    unclipped, _ = optaxclip.clip_by_spectral_norm(None).update(grads, state)
    assert unclipped["w"] is grads["w"]
