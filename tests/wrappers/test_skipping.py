"""The transformation that skips by any rule of norms or of the loss."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optaxclip
from optaxclip.rules import Rule
from tests.sharded import on_two_devices


def skipping(optimizer, norms, **extra):
    """The states after each step of a run over gradients of these norms."""
    state, states = optimizer.init(jnp.zeros(1)), []
    for norm in norms:
        _, state = optimizer.update(jnp.array([norm]), state, jnp.zeros(1), **extra)
        states.append(state)
    return states


def test_skip_step_starts_at_half_a_window():
    norms = [1.0, 1.5, 0.5, 2.0, 1e6]
    optimizer = optaxclip.skip_step(optax.sgd(0.1), window=8, on_loss=False)
    assert [int(state.skipped) for state in skipping(optimizer, norms)] == [
        0,
        0,
        0,
        0,
        1,
    ]
    assert (
        int(skipping(optimizer, [1.0, 1.5, 0.5, 1e6])[-1].skipped) == 1
    )  # number 4 is the first that can be skipped
    assert int(skipping(optimizer, [1.0, 1.5, 1e6])[-1].skipped) == 0
    limit = skipping(optimizer, norms)[-1].limit
    np.testing.assert_allclose(
        limit, np.mean(norms[:4]) + 6 * np.std(norms[:4], ddof=1), rtol=1e-6
    )


def test_skipping_names_its_rules():
    for text, build in {
        "skip_spikes: rule must be at least 0": lambda: optaxclip.skip_spikes(
            optax.sgd(0.1), -1.0
        ),
        "skip_spikes: loss_rule must be at least 0": lambda: optaxclip.skip_spikes(
            optax.sgd(0.1), 1.0, -1.0
        ),
        "skip_spikes: max_consecutive must be at least 0": lambda: (
            optaxclip.skip_spikes(optax.sgd(0.1), 1.0, max_consecutive=-1)
        ),
    }.items():
        with pytest.raises(ValueError, match=rf"^{text}"):
            build()
    assert (
        int(
            skipping(
                optaxclip.skip_spikes(optax.sgd(0.1), 1.0, max_consecutive=0), [5.0]
            )[0].skipped
        )
        == 0
    )


@pytest.mark.slow
def test_skipping_measures_64_bits_in_64_bits():
    with jax.enable_x64(True):
        optimizer = optaxclip.skip_spikes(optax.sgd(0.1), 1.0)
        params = {"w": jnp.ones(2)}
        state = optimizer.init(params)
        _, after = optimizer.update(params, state, params, grad_norm=np.float32(3.0))
        assert state.norm.dtype == after.norm.dtype == after.limit.dtype == jnp.float64

        narrow = jax.tree.map(lambda x: x.astype(jnp.float32), params)
        state = optimizer.init(narrow)
        _, after = optimizer.update(narrow, state, narrow)
        assert state.norm.dtype == after.norm.dtype == after.limit.dtype == jnp.float32


def test_skipping_measures_over_the_axes_that_it_is_given():
    optimizer = optaxclip.skip_spikes(optax.sgd(1.0), 3.0, mesh_axes="x")
    grads = np.float32([2.5, 2.5])  # one on each device: too long together only
    updates, state = on_two_devices(
        optimizer.update,
        (P("x"), P()),
        (P("x"), P()),
        grads,
        optimizer.init(grads),
        check_vma=False,
    )
    assert state.skipped == 1 and not updates.any()


def test_skipping_shows_limits_after_the_first_step():
    optimizer = optaxclip.skip_spikes(optax.sgd(0.1), 10.0, 3.0)
    state = optimizer.init(jnp.zeros(1))
    assert state.limit == state.loss_limit == np.inf
    (state,) = skipping(optimizer, [1.0], value=2.0)
    assert (state.limit, state.loss_limit, state.loss, state.step) == (
        10.0,
        3.0,
        2.0,
        1,
    )


def test_skipping_lets_through_what_is_exactly_at_its_limits():
    optimizer = optaxclip.skip_spikes(optax.sgd(0.1), 2.0, 3.0)
    assert int(skipping(optimizer, [2.0], value=3.0)[0].skipped) == 0
    assert int(skipping(optimizer, [2.1], value=3.0)[0].skipped) == 1
    assert int(skipping(optimizer, [2.0], value=3.1)[0].skipped) == 1


def test_a_passed_step_restarts_the_count_in_a_row():
    optimizer = optaxclip.skip_spikes(optax.sgd(0.1), 2.0, max_consecutive=2)
    states = skipping(optimizer, [5.0, 5.0, 5.0, 5.0, 1.0, 5.0, np.nan, np.nan])
    assert [int(state.consecutive) for state in states] == [1, 2, 0, 1, 0, 1, 2, 0]
    assert [int(state.skipped) for state in states] == [1, 2, 2, 3, 3, 4, 5, 5]
    assert [int(state.nonfinite) for state in states] == [0, 0, 0, 0, 0, 0, 1, 2]


def test_skipping_learns_from_finite_losses_of_any_sign():
    class Last(Rule):
        def init(self, norm):
            return jnp.full_like(norm, 9.0)

        def update(self, norm, memory, step):
            return jnp.full_like(norm, np.inf), norm

    optimizer = optaxclip.skip_spikes(optax.sgd(0.1), None, Last())
    for value, remembered in ((-2.0, -2.0), (0.0, 0.0), (np.nan, 9.0), (np.inf, 9.0)):
        (state,) = skipping(optimizer, [1.0], value=value)
        assert state.loss_memory == remembered
        assert int(state.skipped) == int(not np.isfinite(value))


def test_a_rule_of_the_loss_needs_no_loss_where_there_is_none():
    optimizer = optaxclip.skip_step(optax.sgd(0.1), on_loss=False)
    assert skipping(optimizer, [1.0])[0].loss_limit == np.inf


def test_a_rule_of_the_loss_is_one_number_and_has_no_weights():
    for rule, text in (
        (jnp.ones(2), r"^skip_spikes: loss_rule must be a number for each norm"),
        (optaxclip.rules.share_of_params(0.1), "no weights here"),
    ):
        with pytest.raises(ValueError, match=text):
            skipping(
                optaxclip.skip_spikes(optax.sgd(0.1), None, rule), [1.0], value=2.0
            )


def test_a_limit_of_the_loss_may_be_below_zero():
    class BelowZero(Rule):
        def update(self, norm, memory, step):
            return -3.0, memory

    optimizer = optaxclip.skip_spikes(optax.sgd(0.1), None, BelowZero())
    assert [
        int(skipping(optimizer, [1.0], value=value)[0].skipped)
        for value in (-4.0, -3.0, -2.0)
    ] == [0, 0, 1]
