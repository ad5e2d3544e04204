"""The share of recent steps stands beside the share since the start."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from tests.helpers import after, scanned


def moving_average(flags):
    """The mean of at most 100 steps, after that a moving average, in float64."""
    average = 0.0
    for step, flag in enumerate(flags):
        average += (flag - average) / min(step + 1, 100)
    return average


def test_clipped_steps_are_a_moving_average():
    clipper = optaxclip.clip_by_global_norm(1.0)
    for steps in (1, 7, 100, 350):
        norms = np.random.default_rng(steps).uniform(0, 2, steps).astype(np.float32)
        norms[: steps // 2] = 2.0
        found = optaxclip.metrics(scanned(clipper, jnp.asarray(norms)[:, None])[0])
        recent, share = (found[f"clip/clipped_share{x}"] for x in ("_recent", ""))
        np.testing.assert_allclose(recent, moving_average(norms > 1), rtol=1e-5)
        np.testing.assert_allclose(share, np.mean(norms > 1), rtol=1e-6)


def test_each_tensor_has_its_own():
    grads = [{"a": jnp.array([a]), "b": jnp.array([2.0])} for a in (2.0, 0.5)]
    state = after(optaxclip.clip_by_tensor_norm(1.0), *grads)
    found = optaxclip.metrics(state, only="clipped_share_recent", floats=True)
    name = "clip/clipped_share_recent"
    assert found == {f"{name}/a": 0.5, f"{name}/b": 1.0}


def test_skipped_steps_are_a_moving_average():
    flags = np.arange(300) % 3 == 0
    grads = jnp.where(flags, jnp.nan, 1.0)[:, None]
    state, _ = scanned(optaxclip.skip_nonfinite(optax.sgd(0.1)), grads)
    found = optaxclip.metrics(state)["skip/skipped_share_recent"]
    np.testing.assert_allclose(found, moving_average(flags), rtol=1e-5)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_step_without_a_leaf_clips_nothing(is_first):
    grads = {"w": jnp.array([3.0, 4.0]), "u": jnp.ones((2, 3))}
    for clipper in (
        optaxclip.clip_by_tensor_norm(0.1),
        optaxclip.clip_by_unitwise_norm(0.1),
    ):
        absent = [{"w": None, "u": grads["u"]}] * 10
        steps = [grads, *absent] if is_first else [*absent, grads]
        state = clipper.init(grads)
        for step in steps:
            _, state = clipper.update(step, state)
        found = optaxclip.metrics(state, floats=True)
        assert found["clip/clipped_share/w"] == pytest.approx(1 / 11)
        assert found["clip/clipped_share_recent/w"] == pytest.approx(1 / 11)
        assert found["clip/clipped_share_recent/u"] == 1
        assert found["clip/norm_before/w"] == 5
