"""Recorders change nothing, and count what they say they count."""

import jax.numpy as jnp
import numpy as np
import optax

import optaxclip
from tests.core.steps import same_bits
from tests.helpers import after, apply, with_rows

GRADS = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([jnp.nan, 0.0])}


def test_a_recorder_keeps_norms_and_all_bits():
    updates, state = apply(optaxclip.record_norm(optaxclip.tensor_norm), GRADS)
    same_bits(updates, GRADS)
    np.testing.assert_array_equal(state.norm, [5.0, np.nan])
    np.testing.assert_array_equal(state.limit, np.inf)
    np.testing.assert_array_equal(state.nonfinite, [0, 1])


def test_a_limit_of_the_chain_is_not_for_a_recorder():
    clipper = optaxclip.clip_by_global_norm(10.0)
    chain = optax.chain(optaxclip.record_norm(), clipper)
    grads = GRADS["a"]
    updates, state = chain.update(grads, chain.init(grads), limit=1.0)
    np.testing.assert_allclose(updates, [0.6, 0.8], rtol=1e-6)
    assert (state[0].norm, state[0].limit, state[0].clipped) == (5.0, np.inf, 0)
    assert (state[1].limit, state[1].clipped) == (1.0, 1)


def test_spikes_are_counted_from_a_whole_window_on():
    recorder = optaxclip.record_spikes(2.0, window=4)
    grads = [jnp.array([norm]) for norm in (1.0, 9.0, 1.0, 2.0, 1e6, 2.0)]
    states = [after(recorder, *grads[:count]) for count in range(1, 7)]
    assert [int(state.spiked) for state in states] == [0, 0, 0, 0, 1, 0]
    assert states[-1].spikes == 1
    state = after(recorder, *jnp.array([[1.0], [jnp.nan], [jnp.inf], [1.0]]))
    assert (state.step, state.spikes, state.spiked) == (4, 2, 0)


def test_the_share_of_recent_spikes_is_of_about_10_000_steps():
    recorder = optaxclip.record_spikes()
    start = with_rows(recorder.init(jnp.ones(1)), spiked_recently=0.5)
    for step, reach in ((49, 50), (4_999, 5_000), (20_000, 10_000)):
        state = with_rows(start, step=step)
        _, calm = recorder.update(jnp.ones(1), state)
        _, spike = recorder.update(jnp.array([jnp.nan]), state)
        shares = calm.spiked_recently, spike.spiked_recently
        np.testing.assert_allclose(shares, 0.5 + np.array([-0.5, 0.5]) / reach, 1e-6)


def test_a_norm_given_to_the_chain_is_not_for_a_recorder():
    recorder = optaxclip.record_norm(optaxclip.tensor_norm)
    chain = optax.chain(recorder, optaxclip.clip_by_global_norm(1.0))
    grads = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([2.0])}
    updates, state = chain.update(grads, chain.init(grads), grad_norm=10.0)
    np.testing.assert_array_equal(state[0].norm, [5.0, 2.0])
    np.testing.assert_allclose(updates["a"], [0.3, 0.4], rtol=1e-6)
