"""The share of recent steps stands beside the share since the start."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip


def moving_average(flags):
    """The mean of at most 100 steps, after that a moving average, in float64."""
    average = 0.0
    for step, flag in enumerate(flags):
        average += (flag - average) / min(step + 1, 100)
    return average


def last_state(transformation, grads):
    def step(state, grad):
        return transformation.update(grad, state)[1], None

    return jax.lax.scan(step, transformation.init(grads[0]), grads)[0]


@pytest.mark.parametrize("steps", [1, 7, 100, 350])
def test_clipped_steps_are_a_moving_average(steps):
    norms = np.random.default_rng(steps).uniform(0, 2, steps).astype(np.float32)
    norms[: steps // 2] = 2.0
    state = last_state(optaxclip.clip_by_global_norm(1.0), jnp.asarray(norms)[:, None])
    found = optaxclip.metrics(state)
    wanted = moving_average(norms > 1), np.mean(norms > 1)
    np.testing.assert_allclose(found["clip/clipped_share_recent"], wanted[0], rtol=1e-5)
    np.testing.assert_allclose(found["clip/clipped_share"], wanted[1], rtol=1e-6)


def test_each_tensor_has_its_own():
    clipper = optaxclip.clip_by_tensor_norm(1.0)
    state = clipper.init({"a": jnp.zeros(1), "b": jnp.zeros(1)})
    for a in (2.0, 0.5):
        grads = {"a": jnp.array([a]), "b": jnp.array([2.0])}
        _, state = clipper.update(grads, state)
    found = optaxclip.metrics(state, only="clipped_share_recent", floats=True)
    assert found == {
        "clip/clipped_share_recent/a": 0.5,
        "clip/clipped_share_recent/b": 1.0,
    }


def test_a_broken_step_counts_as_one_that_was_not_clipped():
    grads = jnp.array([[2.0], [jnp.nan], [2.0], [0.5]])
    state = last_state(optaxclip.clip_by_global_norm(1.0), grads)
    assert optaxclip.metrics(state)["clip/clipped_share_recent"] == 0.5


def test_skipped_steps_are_a_moving_average():
    flags = np.arange(300) % 3 == 0
    grads = jnp.where(flags, jnp.nan, 1.0)[:, None]
    state = last_state(optaxclip.skip_nonfinite(optax.sgd(0.1)), grads)
    found = optaxclip.metrics(state)
    np.testing.assert_allclose(
        found["skip/skipped_share_recent"], moving_average(flags), rtol=1e-5
    )
