"""spam where its average of squares leaves the range of float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip

HUGE = jnp.array([2.0**80, 2.0**80], jnp.float32)


@pytest.mark.slow
def test_a_huge_first_gradient_does_not_end_clipping():
    # Its squares are 2^160. As inf, the average would be inf in all steps that follow.
    clipper = optaxclip.spam(threshold=2.0, decay=0.5, warmup=0)
    _, state = clipper.update(HUGE, clipper.init(HUGE))
    largest = float(jnp.finfo(jnp.float32).max)
    np.testing.assert_array_equal(state.second_moment, [largest, largest])
    updates, _ = clipper.update(HUGE, state)
    np.testing.assert_allclose(updates, np.sqrt([2 * largest] * 2), rtol=1e-6)


@pytest.mark.slow
def test_an_infinite_average_is_no_nan_for_debug_nans():
    clipper = optaxclip.spam(threshold=2.0, warmup=0)
    grads = jnp.array([1.0, 0.0])
    state = clipper.init(grads)._replace(second_moment=jnp.full(2, jnp.inf))
    with jax.debug_nans(True):
        updates, _ = clipper.update(grads, state)
    np.testing.assert_array_equal(updates, grads)


@pytest.mark.slow
def test_a_decay_of_1_learns_nothing_from_a_huge_gradient():
    def decay(step):
        return jnp.where(step == 0, 1.0, 0.9)

    clipper = optaxclip.spam(threshold=4.0, decay=decay, warmup=0)
    _, state = clipper.update(HUGE, clipper.init(HUGE))
    np.testing.assert_array_equal(state.second_moment, 0)
    _, state = clipper.update(jnp.ones(2), state)
    np.testing.assert_allclose(state.second_moment, 0.1, rtol=1e-6)
