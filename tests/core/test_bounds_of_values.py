"""The bounds of `clip_by_value`: of every dtype, at both ends, and by modulus."""

import cProfile
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip
from tests.helpers import apply


def test_both_bounds_follow_schedules_from_step_0():
    clipper = optaxclip.clip_by_value(lambda step: 1.0 + step, lambda step: -3.0 - step)
    grads = jnp.array([-9.0, 9.0])
    state = clipper.init(grads)
    for step in range(3):
        updates, state = clipper.update(grads, state)
        np.testing.assert_array_equal(updates, [-3.0 - step, 1.0 + step])
        assert state.step == step + 1


@pytest.mark.parametrize("make", [optaxclip.clip_by_value, optaxclip.clip])
def test_none_is_no_bound(make):
    grads = {"w": jnp.array([-3e38, jnp.inf, 2.0]), "i": jnp.array([7, -8])}
    for bound in (None, {"w": None, "i": None}, math.inf):
        updates, _ = apply(make(bound), grads)
        jax.tree.map(np.testing.assert_array_equal, updates, grads)
    updates, _ = apply(make({"w": None, "i": 2}), grads)
    np.testing.assert_array_equal(updates["w"], grads["w"])
    np.testing.assert_array_equal(updates["i"], [2, -2])


def test_none_above_leaves_the_lower_bound():
    updates, _ = apply(optaxclip.clip_by_value(None, 0.0), jnp.array([-1.0, 3e38]))
    np.testing.assert_array_equal(updates, np.float32([0.0, 3e38]))


def test_clip_by_value_rounds_integer_bounds_inwards():
    whole = jnp.array([-128, -3, -2, 2, 3, 127], jnp.int8)
    for bounds, wanted in (
        ((2.5,), [-2, -2, -2, 2, 2, 2]),
        ((2.5, -3.5), [-3, -3, -2, 2, 2, 2]),
        ((2.5, 0.5), [1, 1, 1, 2, 2, 2]),
        ((-2.5, -3.5), [-3, -3, -3, -3, -3, -3]),
        ((1e9,), [-128, -3, -2, 2, 3, 127]),
    ):
        updates, _ = apply(optaxclip.clip_by_value(*bounds), whole)
        assert updates.dtype == jnp.int8
        np.testing.assert_array_equal(updates, wanted)


INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32"]
GIVEN = {
    "NumPy": lambda bound: bound,
    "JAX": jnp.asarray,
    "schedule": lambda bound: lambda step: jnp.asarray(bound),
}


def ends_of(dtype):
    """Numbers at both ends of a dtype, or beyond all integers of 32 bits."""
    if "int" in dtype:
        return [np.iinfo(dtype).min, 0, 1, 100, np.iinfo(dtype).max]
    return [0 if dtype == "complex64" else -(2**40), 0, 1, 100, 2**40]


def as_leaf(values, dtype):
    return np.array(values, "float64").astype(jnp.dtype(dtype))


def clips_all_leaves(make, bound_dtype, high, low):
    values = {name: ends_of(name) for name in (*INTEGERS, "float32", "bfloat16")}
    if low is None:
        values["complex64"] = ends_of("complex64")
    leaves = {name: jnp.asarray(as_leaf(values[name], name)) for name in values}
    bounds = [high] if low is None else [high, low]
    bounds = [make(np.dtype(bound_dtype).type(bound)) for bound in bounds]
    updates, _ = apply(optaxclip.clip_by_value(*bounds), leaves)
    # Integers in an array of JAX are read as floats.
    if not isinstance(bounds[0], np.generic):
        high = float(np.float32(high))
    for dtype, numbers in values.items():
        wanted = np.clip(numbers, -high if low is None else low, high, dtype="float64")
        assert updates[dtype].dtype == dtype
        np.testing.assert_array_equal(updates[dtype], as_leaf(wanted, dtype))


def test_bounds_of_any_integer_dtype_clip_any_leaf():
    for bound_dtype in INTEGERS:
        least, most = np.iinfo(bound_dtype).min, np.iinfo(bound_dtype).max
        for make in GIVEN.values():
            for high in (0, 5, most):
                clips_all_leaves(make, bound_dtype, high, None)
                clips_all_leaves(make, bound_dtype, high, least)


@pytest.mark.parametrize(
    "bound",
    [3_000_000_001, np.int64(3_000_000_001), np.array([3_000_000_001], "uint64")],
    ids=["int", "NumPy", "array"],
)
def test_known_integer_bounds_beyond_32_bits_are_exact(bound):
    whole = jnp.array([2**32 - 1, 2, 3_000_000_001], jnp.uint32)
    updates, _ = apply(optaxclip.clip_by_value(bound), whole)
    np.testing.assert_array_equal(updates, np.minimum(whole, 3_000_000_001))
    x = jnp.array([4e9, -4e9, 1.0])
    updates, _ = apply(optaxclip.clip_by_value(bound), x)
    np.testing.assert_array_equal(updates, np.float32([3e9, -3e9, 1]))


@pytest.mark.parametrize("bound", [math.inf, 2.0**63, 1e30, 2**70])
@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_bounds_beyond_64_bits_clip_no_integer(bound, dtype):
    # float64 has no 2^63 - 1, and rounds it to 2^63, which int64 does not have.
    with jax.enable_x64(True):
        info = jnp.iinfo(dtype)
        leaf = jnp.array([info.min, 1, min(info.max, 2**63)], dtype)
        for given in (bound, jnp.asarray(float(bound))):
            np.testing.assert_array_equal(clipped(leaf, given), leaf)
            lower = -math.inf if info.min < 0 else 0
            np.testing.assert_array_equal(clipped(leaf, given, lower), leaf)


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint8", "uint32"])
def test_a_float_array_beyond_an_integer_leaf_clips_nothing(dtype):
    info = np.iinfo(dtype)
    leaf = jnp.array([info.min, 1, info.max], dtype)
    for bound in (2.0**7, 2.0**8, 2.0**31, 2.0**32, 1e30, math.inf):
        if bound > info.max:
            for clipper in (
                optaxclip.clip_by_value(jnp.float32(bound)),
                optaxclip.clip_by_value(jnp.float32(bound), jnp.float32(-bound)),
            ):
                np.testing.assert_array_equal(apply(clipper, leaf)[0], leaf)


def test_key_leaves_pass_clippers_by_value():
    tree = {"key": jax.random.key(0), "x": jnp.array([2.0, -0.5])}
    for clipper in (optaxclip.clip_by_value(1.0), optaxclip.clip(1.0)):
        for run in (apply, jax.jit(apply, static_argnums=0)):
            updates, _ = run(clipper, tree)
            assert updates["key"].dtype == tree["key"].dtype
            np.testing.assert_array_equal(
                jax.random.key_data(updates["key"]), jax.random.key_data(tree["key"])
            )
            np.testing.assert_array_equal(updates["x"], [1.0, -0.5])


def test_clip_by_value_passes_bools_and_takes_equal_bounds():
    flags = np.array([True, False])
    updates, _ = apply(
        optaxclip.clip_by_value(0.5, 0.5), {"flags": flags, "x": jnp.array([0.1, 0.9])}
    )
    assert updates["flags"] is flags
    np.testing.assert_array_equal(updates["x"], [0.5, 0.5])


def test_clip_by_value_limits_the_modulus_of_complex_numbers():
    with jax.enable_x64(True):
        z = np.array([3 + 4j, 0.3 - 0.4j, 0j])
        updates, _ = apply(optaxclip.clip_by_value(1.0 / 3.0), jnp.asarray(z))
        np.testing.assert_allclose(
            updates, [(3 + 4j) / 15, (0.3 - 0.4j) / 1.5, 0], rtol=1e-15
        )
        np.testing.assert_array_equal(
            apply(optaxclip.clip_by_value(2.0), jnp.asarray(z))[0][1:], z[1:]
        )


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_clip_by_value_keeps_directions_of_largest_complex(dtype):
    with jax.enable_x64(True):
        most = 0.9 * float(jnp.finfo(dtype).max)
        broken = [complex(np.inf, 1), complex(np.inf, -np.inf), complex(np.nan, 1)]
        x = np.array([most + most * 1j, -most, *broken, 0.1j])
        updates, _ = apply(optaxclip.clip_by_value(2.0), jnp.asarray(x, dtype))
        half = 2**0.5
        np.testing.assert_allclose(updates[:2], [half + half * 1j, -2], rtol=1e-6)
        assert np.isnan(updates[2:5]).all() and updates[5] == jnp.asarray(0.1j, dtype)


@pytest.mark.parametrize(
    "bounds", [(1.0, 2.0), (1.0, {"a": 2.0}), ({"a": 1.0}, 2.0), ({"a": 1}, {"a": [2]})]
)
def test_bounds_that_leave_no_room_are_refused_at_any_depth(bounds):
    with pytest.raises(ValueError, match="clip_by_value: min_value must be at most"):
        optaxclip.clip_by_value(*bounds)


def test_bounds_of_different_leaves_are_not_compared():
    optaxclip.clip_by_value({"w": 1.0, "v": 3.0}, {"w": 0.0, "v": 2.0})
    optaxclip.clip_by_value(lambda step: 1.0, 2.0)
    optaxclip.clip_by_value(np.ones(3), np.full(2, 2.0))  # no leaf has both shapes


@pytest.mark.slow
def test_clip_by_value_of_a_complex_zero_has_a_derivative():
    clipper = optaxclip.clip_by_value(1.0)
    z = jnp.array([0j, 3 + 4j, complex(jnp.finfo("float32").max, 1e38)])
    slope = jax.grad(lambda z: jnp.sum(jnp.real(apply(clipper, z)[0] * (2 - 1j))))(z)
    # The first is untouched: the derivative of the sum itself.
    assert np.isfinite(slope).all() and slope[0] == 2 - 1j


@pytest.mark.parametrize("limit", [None, np.inf])
def test_without_a_limit_a_complex_number_keeps_its_derivative(limit):
    """Although infinity times its direction would be NaN."""
    clipper = optaxclip.clip_by_value(limit)
    z = jnp.array([0j, 3 + 4j])
    _, pullback = jax.vjp(lambda z: apply(clipper, z)[0], z)
    np.testing.assert_array_equal(pullback(z)[0], z)


@pytest.mark.slow
@pytest.mark.parametrize("bound_dtype", INTEGERS)
def test_a_traced_bound_of_any_integer_dtype_clips(bound_dtype):
    def clipped(bound, leaf):
        return apply(optaxclip.clip_by_value(bound), leaf)[0]

    bound = jnp.asarray(5, bound_dtype)
    for dtype in ("float32", "int8", "int32"):
        np.testing.assert_array_equal(
            jax.jit(clipped)(bound, jnp.array([-9, 3, 7], dtype)), [-5, 3, 5]
        )
    grid = jax.vmap(clipped, (0, None))(jnp.arange(3).astype(bound_dtype), 2.0)
    np.testing.assert_array_equal(grid, [0.0, 1.0, 2.0])


# Bounds that only a run knows, and bounds beyond a leaf's range.

GRADS = np.array([-3.0, 0.0, 3.0], np.float32)


def clipped(grads, *bounds):
    return apply(optaxclip.clip_by_value(*bounds), grads)[0]


@pytest.mark.parametrize("bound", [-0.5, -5, jnp.float32(-0.5), np.int8(-5)])
@pytest.mark.parametrize("dtype", ["float32", "int32", "complex64"])
def test_a_schedule_below_zero_counts_as_zero(bound, dtype):
    grads = jnp.asarray(GRADS, dtype)
    found = clipped(grads, lambda step: bound)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, np.zeros(3))


@pytest.mark.parametrize("bound", [-5, jnp.int32(-5), np.int64(-5)])
def test_a_schedule_below_zero_is_zero_for_unsigned(bound):
    grads = jnp.array([0, 3, 250], jnp.uint8)
    found = clipped(grads, lambda step: bound)
    np.testing.assert_array_equal(found, [0, 0, 0])


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_a_schedule_bounds_floats_of_few_bits(dtype):
    found = clipped(jnp.asarray([-2.0, 1.0, 0.5], dtype), lambda step: 1.0 - step)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found.astype("float32"), [-1.0, 1.0, 0.5])


def test_a_traced_bound_below_zero_counts_as_zero():
    found = jax.jit(lambda bound: clipped(jnp.asarray(GRADS), bound))(-0.5)
    np.testing.assert_array_equal(found, np.zeros(3))


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_the_upper_bound_wins_where_late_bounds_cross(dtype):
    grads = jnp.asarray(GRADS, dtype)
    found = clipped(grads, lambda step: -1.0, lambda step: 1.0)
    np.testing.assert_array_equal(found, np.clip(GRADS, 1.0, -1.0))


@pytest.mark.parametrize("bound", [1e5, 100_000, jnp.float32(1e5)])
def test_inf_becomes_the_largest_float16_below_a_bound(bound):
    grads = jnp.array([-np.inf, 1.0, np.inf], jnp.float16)
    largest = np.finfo(np.float16).max
    np.testing.assert_array_equal(clipped(grads, bound), [-largest, 1.0, largest])
    both = clipped(grads, bound, -bound)
    np.testing.assert_array_equal(both, [-largest, 1.0, largest])


@pytest.mark.parametrize("bound", [np.inf, jnp.float32(np.inf)])
def test_a_bound_of_inf_leaves_inf_in_float16(bound):
    grads = jnp.array([-np.inf, 1.0, np.inf], jnp.float16)
    np.testing.assert_array_equal(clipped(grads, bound), grads)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int4", "uint4"])
def test_a_bound_may_have_few_bits(dtype):
    clipper = optaxclip.clip_by_value(jnp.asarray(1, dtype))
    grads = jnp.array([-3.0, 0.5, 3.0])
    np.testing.assert_array_equal(apply(clipper, grads)[0], [-1.0, 0.5, 1.0])


@pytest.mark.parametrize("bound", [math.nan, jnp.array(jnp.nan)], ids=["float", "JAX"])
def test_a_schedule_of_nan_makes_integers_zero(bound):
    grads = jnp.array([-9, 3, 100], jnp.int8)
    updates, _ = apply(optaxclip.clip_by_value(lambda step: bound), grads)
    np.testing.assert_array_equal(updates, [0, 0, 0])


def test_a_schedule_of_bounds_must_return_numbers():
    clipper = optaxclip.clip_by_value(lambda step: None)
    with pytest.raises(
        TypeError, match=r"clip_by_value: max_value: what a schedule returns.*got None"
    ):
        apply(clipper, jnp.array([3.0]))


WITHOUT_INF = ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2fnuz"]


@pytest.mark.parametrize("dtype", WITHOUT_INF)
def test_no_bound_is_no_nan_where_the_dtype_has_no_inf(dtype):
    grads = jnp.array([-192.0, 2.0], "float32").astype(dtype)
    numbers = grads.astype("float32")
    for bounds in ((None,), (math.inf,), (math.inf, -math.inf)):
        updates, _ = apply(optaxclip.clip_by_value(*bounds), grads)
        np.testing.assert_array_equal(updates.astype("float32"), numbers)
    updates, _ = apply(optaxclip.clip_by_value(math.inf, -1.0), grads)
    np.testing.assert_array_equal(updates.astype("float32"), [-1.0, 2.0])
    _, pull = jax.vjp(lambda x: optaxclip.clip_cotangent(x, max_value=math.inf), grads)
    np.testing.assert_array_equal(pull(grads)[0].astype("float32"), numbers)


def test_no_lower_bound_in_a_tree_is_that_of_the_upper_one():
    grads = {name: jnp.array([-3.0, 3.0]) for name in "ab"} | {"z": jnp.array([-3j])}
    found = clipped(
        grads, {"a": 1.0, "b": 1.0, "z": 2.0}, {"a": -0.5, "b": None, "z": None}
    )
    np.testing.assert_array_equal(found["a"], [-0.5, 1.0])
    np.testing.assert_array_equal(found["b"], [-1.0, 1.0])
    np.testing.assert_array_equal(found["z"], [-2j])


def calls_for_bounds(count):
    """How many functions are called to compare two trees of bounds."""
    names = range(count)
    bounds = dict.fromkeys(names, 1.0), dict.fromkeys(names, -1.0)
    profile = cProfile.Profile()
    profile.runcall(optaxclip.clip_by_value, *bounds)
    return sum(entry.callcount for entry in profile.getstats())


def test_many_bounds_take_time_in_proportion():
    assert calls_for_bounds(400) < 3 * calls_for_bounds(200)


def test_a_box_of_an_array_is_clipped():
    class Box:
        def __init__(self, array):
            self.array = array

        def __jax_array__(self):
            return self.array

    clipper = optaxclip.clip_by_value(1.0, count=True)
    grads = {"w": Box(jnp.array([-3.0, 0.5])), "hole": Box(None)}
    updates, state = clipper.update(grads, clipper.init(grads))
    np.testing.assert_array_equal(updates["w"], [-1.0, 0.5])
    assert updates["hole"] is grads["hole"] and state.elements[0] == 0.5
