"""The budget of one backward pass: the bound, and where it is the global clip."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from optaxclip import release
from optaxclip._release.budget import (
    first_shares,
    limit_of_group,
    new_budget,
    next_shares,
)

GROUPS = 6
EPS = np.finfo(np.float32).eps
norms_of_any_size = st.lists(
    st.floats(0, 2.0**100, width=32), min_size=GROUPS, max_size=GROUPS
)
any_shares = st.lists(
    st.floats(2.0**-39, 1, width=32), min_size=GROUPS, max_size=GROUPS
)
limits = st.floats(2.0**-60, 2.0**60, width=32)


@jax.jit
def limits_of_groups(norms, shares, limit):
    """The limit of each group, from a backward pass over all of them."""
    budget, limits = new_budget(limit, shares), []
    for norm in norms:
        limit, budget = limit_of_group(budget, norm)
        limits.append(limit)
    return jnp.stack(limits), budget


def by_equation(norms, shares, limit):
    """The limits in float64, as the page writes them."""
    norms, shares = np.float64(norms), np.float64(shares)
    left, limits = limit**2, []
    for group, norm in enumerate(norms):
        square = left * shares[group] / shares[group:].sum()
        limits.append(np.sqrt(square))
        left = max(left - min(norm**2, square), 0)
    return np.array(limits)


def run(norms, shares, limit):
    arrays = [np.asarray(x, np.float32) for x in (norms, shares, limit)]
    group_limits, budget = limits_of_groups(*arrays)
    return np.asarray(group_limits, np.float64), budget


@settings(deadline=None)
@given(norms_of_any_size, any_shares, limits)
@example([3e38] * GROUPS, [1.0] * GROUPS, 1.0)
@example([0.0] * GROUPS, [1.0] * GROUPS, 1.0)
def test_all_groups_together_stay_within_the_limit(norms, shares, limit):
    group_limits, budget = run(norms, shares, limit)
    after = np.minimum(np.float64(norms), group_limits)
    total = np.sqrt(np.sum((after / limit) ** 2))
    # Each group rounds its limit, and what is left, once or twice.
    assert total <= 1 + 4 * GROUPS * EPS
    np.testing.assert_allclose(budget.norms_after, after, rtol=4 * EPS)


def product_with(params, grads):
    """A loss whose gradient is `grads`."""

    def layer(total, row):
        weights, grad = row
        return total + jnp.sum(weights * grad), None

    total, _ = jax.lax.scan(layer, 0.0, (params["layers"], grads["layers"]))
    return total + jnp.sum(params["rest"] * grads["rest"])


@jax.jit
def step_of_sgd(grads, shares, limit):
    """What the step lets through."""
    trainer = release(product_with, optax.sgd(-1.0), max_norm=limit)
    zeros = jax.tree.map(jnp.zeros_like, grads)
    state = trainer.init(zeros, grads)._replace(shares=shares)
    clipped, _, _ = trainer.step(zeros, state, grads)
    return clipped


def rows_of_norms(norms, dtype):
    """Gradients of five layers and of one other leaf, that have these norms. All
    numbers of a row are alike, so that all may be rounded up.
    """
    numbers = np.float64(norms)[:, None] / np.sqrt(8)
    rows = jnp.asarray(np.repeat(numbers, 8, axis=1), dtype)
    return {"layers": rows[:-1], "rest": rows[-1]}


def norm_of(tree):
    return np.sqrt(sum(np.sum(np.float64(leaf) ** 2) for leaf in tree.values()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_stays_within_the_limit_but_for_rounding(dtype):
    half_eps = float(jnp.finfo(dtype).eps) / 2

    @settings(deadline=None)
    @given(norms_of_any_size, any_shares, limits)
    def check(norms, shares, limit):
        clipped = step_of_sgd(
            rows_of_norms(norms, dtype), np.float32(shares), np.float32(limit)
        )
        assert norm_of(clipped) <= limit * (1 + half_eps + 4 * GROUPS * EPS)

    check()


def test_a_step_of_the_expected_shares_is_that_of_optax():
    grads = rows_of_norms([9.0, 1.0, 4.0, 0.5, 2.0, 7.0], "float32")
    squares = [*np.sum(grads["layers"] ** 2, axis=1)[::-1], np.sum(grads["rest"] ** 2)]
    clip = optax.clip_by_global_norm(0.7)
    wanted, _ = clip.update(grads, clip.init(grads))
    clipped = step_of_sgd(grads, np.float32(squares) / sum(squares), 0.7)
    for name in grads:
        np.testing.assert_allclose(clipped[name], wanted[name], 4 * GROUPS * EPS)


@settings(deadline=None)
@given(
    st.lists(st.floats(0, 1000), min_size=GROUPS, max_size=GROUPS),
    st.lists(st.floats(0.01, 1), min_size=GROUPS, max_size=GROUPS),
    st.floats(0.01, 1000),
)
def test_limits_are_those_of_the_equation(norms, shares, limit):
    norms, shares, limit = (np.asarray(x, np.float32) for x in (norms, shares, limit))
    group_limits, _ = run(norms, shares, limit)
    wanted = by_equation(norms, shares, np.float64(limit))
    # What is left is a difference from limit^2, whose roundings stay.
    least = float(limit) * np.sqrt(4 * GROUPS * EPS)
    np.testing.assert_allclose(group_limits, wanted, rtol=1e-4, atol=least)


@settings(deadline=None)
@given(any_shares, st.floats(1.01, 1e6), limits)
def test_with_the_expected_shares_it_is_the_global_clip(shares, excess, limit):
    shares = np.float64(np.float32(shares))
    norms = limit * excess * np.sqrt(shares / shares.sum())
    clip = optax.clip_by_global_norm(limit)
    grads = jnp.asarray(norms / limit, jnp.float32)
    wanted, _ = optax.clip_by_global_norm(1.0).update(grads, clip.init(grads))
    group_limits, _ = run(norms, shares, limit)
    after = np.minimum(norms, group_limits) / limit
    np.testing.assert_allclose(after, wanted, rtol=4 * GROUPS * EPS)


@pytest.mark.parametrize("small", [0, 3, 5, slice(1, 6)])
def test_a_group_with_a_tiny_share_keeps_its_part_of_the_limit(small):
    """Beside it, all other groups are clipped."""
    shares = np.full(GROUPS, 0.2)
    shares[small] = 1e-9
    shares /= shares.sum()
    norms = 96 * np.sqrt(shares)
    group_limits, _ = run(norms, shares, 1.0)
    wanted = by_equation(norms, shares, 1.0)
    np.testing.assert_allclose(group_limits, wanted, rtol=4 * GROUPS * EPS)


@settings(deadline=None)
@given(any_shares, st.floats(0.01, 1), limits)
def test_within_the_room_below_the_limit_nothing_is_touched(shares, most, limit):
    """With n = c / k every share may grow k^2 times, and with n < c all may shrink."""
    shares = np.float64(np.float32(shares))
    norms = 0.99 * limit * most * np.sqrt(shares / shares.sum())
    group_limits, budget = run(norms, shares, limit)
    assert (np.float32(norms) <= group_limits * (1 + 1e-3) + 1e-3 * limit).all()
    loose = np.float32(norms) > limit * 1e-3
    np.testing.assert_array_equal(
        np.asarray(budget.norms_after)[loose], np.asarray(budget.norms)[loose]
    )


def test_the_last_group_may_spend_all_that_is_left():
    shares = [0.2, 0.2, 0.2, 0.2, 0.1, 0.1]
    group_limits, _ = run([0.0] * 5 + [9.0], shares, 2.0)
    np.testing.assert_allclose(group_limits[-1], 2.0, rtol=4 * GROUPS * EPS)
    group_limits, _ = run([1.0] + [0.0] * 4 + [9.0], shares, 2.0)
    # The first spends 0.2 of the square of the limit.
    np.testing.assert_allclose(group_limits[-1], 2 * np.sqrt(0.8), rtol=1e-6)


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_broken_group_spends_nothing(broken):
    shares = [1 / GROUPS] * GROUPS
    with_broken, _ = run([9.0, broken, 9.0, 9.0, 9.0, 9.0], shares, 1.0)
    with_zero, _ = run([9.0, 0.0, 9.0, 9.0, 9.0, 9.0], shares, 1.0)
    np.testing.assert_array_equal(with_broken, with_zero)


@pytest.mark.parametrize(("limit", "wanted"), [(0.0, 0.0), (np.inf, np.inf)])
def test_limits_of_0_and_inf_are_those_of_every_group(limit, wanted):
    group_limits, _ = run([1.0, 0.0, 5.0, 2.0, 0.0, 3e38], [0.1] * GROUPS, limit)
    np.testing.assert_array_equal(group_limits, np.full(GROUPS, wanted))


@pytest.mark.parametrize("smallest", [1.0, 3e-5])
def test_shares_are_averages_of_the_squares(smallest):
    random = np.random.default_rng(0)
    sizes = np.geomspace(1.0, smallest, GROUPS)
    norms = (random.random((14, GROUPS)) * sizes).astype(np.float32)
    squares = np.float64(norms) ** 2
    seen = squares / squares.sum(1, keepdims=True)
    shares = first_shares(GROUPS)
    wanted = np.float64(shares)
    for step, row in enumerate(norms, 1):
        shares = next_shares(shares, row, jnp.int32(step))
        wanted = wanted + (seen[step - 1] - wanted) / min(step, 10)
        if step == 10:
            np.testing.assert_allclose(shares, seen[:10].mean(0), rtol=1e-5)
    np.testing.assert_allclose(shares, wanted, rtol=1e-5)


@pytest.mark.parametrize("norm", [np.nan, np.inf, 0.0])
def test_shares_do_not_learn_from_a_broken_step_or_one_without_gradients(norm):
    shares = jnp.asarray([0.7, 0.3])
    norms = jnp.asarray([norm, 0.0 if norm == 0 else 1.0])
    np.testing.assert_array_equal(next_shares(shares, norms, jnp.int32(3)), shares)


def test_groups_without_gradients_leave_portions_that_are_numbers():
    shares = first_shares(3)
    for step in range(1, 5):
        shares = next_shares(shares, jnp.array([1.0, 0.0, 0.0]), jnp.int32(step))
    group_limits, _ = run([1.0, 2.0, 3.0], shares, 1.0)
    assert np.isfinite(group_limits).all()
