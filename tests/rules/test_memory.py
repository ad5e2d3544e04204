"""Counters, averages and multiples that all rules share."""

import jax
import jax.numpy as jnp
import numpy as np

from optaxclip.rules import _memory as memory

MOST = np.iinfo(np.int32).max


def test_a_counter_stays_at_the_largest_number():
    for count, happened, wanted in (
        (0, True, 1),
        (5, False, 5),
        (MOST - 1, True, MOST),
        (MOST, True, MOST),
    ):
        assert memory.count_up(jnp.int32(count), happened) == wanted


def test_a_moving_average_is_the_mean_until_its_reach():
    flags, average, wanted = np.arange(40) % 3 == 0, jnp.float32(0), 0.0
    for step, flag in enumerate(flags, 1):
        new = jnp.asarray(flag)
        average = memory.moving_average(average, new, jnp.int32(step), reach=10)
        wanted += (flag - wanted) / min(step, 10)
        np.testing.assert_allclose(average, wanted, rtol=1e-6)


def test_an_average_is_right_at_any_share():
    for keep in (0.0, 0.25, 0.5, 0.75, 1.0):
        for old, new in ((1e8, 1.0), (1.0, 1e8), (3.0, 3.0)):
            found = memory.exponential_average(*map(jnp.float32, (old, new, keep)))
            np.testing.assert_allclose(found, keep * old + (1 - keep) * new, rtol=1e-6)


def test_roots_have_a_derivative_of_0_at_0():
    zero, four = jnp.float32(0), jnp.float32(4)
    assert memory.root(four) == 2 and jax.grad(memory.root)(four) == 0.25
    assert memory.root(zero) == jax.grad(memory.root)(zero) == 0
    assert memory.hypot(jnp.float32(3), four) == 5 and memory.hypot(zero, zero) == 0
    assert jax.grad(memory.hypot, (0, 1))(zero, zero) == (0, 0)
    # Squares of both leave the range of float32.
    for size in (1e-30, 1e30):
        found = memory.hypot(jnp.float32(3 * size), jnp.float32(4 * size))
        np.testing.assert_allclose(found, 5 * size, rtol=1e-6)


def test_no_limit_stays_none_at_a_factor_of_0():
    for factor, norm, wanted in (
        (2.0, 3.0, 6.0),
        (0.0, 3.0, 0.0),
        (0.0, np.inf, np.inf),
        (np.inf, 0.0, np.inf),
    ):
        assert memory.multiple(jnp.float32(factor), jnp.float32(norm)) == wanted


def test_what_was_let_through_is_remembered_unless_it_is_0():
    norm, limit = jnp.array([1.0, 5.0, 5.0]), jnp.array([2.0, 2.0, 0.0])
    old = jnp.arange(6.0).reshape(3, 2)
    for remember, values, kept in (
        ("raw", [1.0, 5.0, 5.0], [9, 9, 9]),
        ("clipped", [1.0, 2.0, 0.0], [9, 9, 4]),
    ):
        value = memory.remembered(remember, norm, limit)
        np.testing.assert_array_equal(value, values)
        new = memory.new_unless_zero(remember, value, jnp.full((3, 2), 9.0), old)
        np.testing.assert_array_equal(new[:, 0], kept)
