"""Bounds of `clip_by_value` that only a run knows, and bounds beyond a leaf's range."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip

GRADS = np.array([-3.0, 0.0, 3.0], np.float32)


def clipped(grads, *bounds):
    clipper = optaxclip.clip_by_value(*bounds)
    return clipper.update(grads, clipper.init(grads))[0]


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
