"""`replay.spike_score` and `record_spikes` count as OLMo-core does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip
from optaxclip.replay import spike_score


def spikes(values, sigmas, window):
    """Which values are more than some deviations above the mean of those before."""
    values = np.asarray(values, np.float64)
    found, past = [], []
    for value in values:
        broken = not np.isfinite(value)
        over = len(past) == window and (value > np.mean(past) + sigmas * np.std(past))
        found.append(broken or over)
        if not broken:
            past = [*past, value][-window:]
    return np.array(found)


def history(seed, steps=400):
    random = np.random.default_rng(seed)
    values = random.lognormal(sigma=0.3, size=steps)
    values[random.integers(0, steps, 12)] *= 8
    return values.astype(np.float32)


@pytest.mark.parametrize(("sigmas", "window"), [(6.0, 128), (3.0, 16), (7.0, 100)])
def test_the_score_is_that_of_the_definition(sigmas, window):
    values = history(window)
    wanted = spikes(values, sigmas, window)
    assert wanted.any()
    found = spike_score(values, sigmas=sigmas, window=window)
    np.testing.assert_allclose(found, wanted.mean(), rtol=1e-6)


def test_a_step_counts_once_if_norm_and_loss_stand_out():
    norms, losses = history(1), -history(2)
    losses[200], norms[200] = 50.0, 50.0
    wanted = spikes(norms, 6, 128) | spikes(losses, 6, 128)
    assert wanted[200]
    np.testing.assert_allclose(spike_score(norms, losses), wanted.mean(), rtol=1e-6)


def test_nothing_is_a_spike_before_the_window_is_full():
    assert spike_score([1.0, 2.0, 1.0, 900.0], window=4) == 0


def recorded(norms, losses=None, **options):
    """The metrics after a run with these norms and losses."""
    recorder = optaxclip.record_spikes(**options)
    extra = {} if losses is None else {"value": jnp.asarray(losses)}

    def step(state, xs):
        norm, rest = xs
        updates, state = recorder.update(norm[None], state, **rest)
        return state, updates

    xs = jnp.asarray(norms), extra
    state, updates = jax.lax.scan(step, recorder.init(jnp.zeros(1)), xs)
    np.testing.assert_array_equal(updates[:, 0], norms)
    return optaxclip.metrics(state)


@pytest.mark.parametrize("with_loss", [False, True])
def test_the_recorder_counts_what_replay_counts(with_loss):
    norms, losses = history(4), -history(5)
    losses[300] = 50.0
    series = [norms, losses] if with_loss else [norms]
    found = recorded(*series)
    wanted = np.any([spikes(each, 6, 128) for each in series], axis=0)
    assert found["spike/spiked_count"] == wanted.sum() > 0
    np.testing.assert_allclose(found["spike/score"], wanted.mean(), rtol=1e-6)
    np.testing.assert_allclose(found["spike/score_recent"], wanted.mean(), rtol=1e-5)
    np.testing.assert_allclose(spike_score(*series), wanted.mean(), rtol=1e-6)


def test_the_recorder_reports_the_last_step():
    norms = np.array([1.0, 2.0, 1.0, 2.0, 9.0], np.float32)
    found = recorded(norms, [1.0, 3.0, 1.0, 3.0, 2.0], sigmas=2.0, window=4)
    wanted = {
        "spike/norm": 9.0,
        "spike/limit": 2.5,
        "spike/loss": 2.0,
        "spike/loss_limit": 4.0,
        "spike/spiked": 1.0,
        "spike/score": 0.2,
        "spike/score_recent": 0.2,
        "spike/spiked_count": 1.0,
    }
    assert {name: float(value) for name, value in found.items()} == pytest.approx(
        wanted
    )


def test_the_recent_score_forgets_after_10_000_steps():
    norms = np.ones(20_000, np.float32)
    norms[:10_000:2] = np.nan
    found = recorded(norms, window=1)
    np.testing.assert_allclose(found["spike/score"], 0.25, rtol=1e-5)
    wanted = 0.5 * (1 - 1e-4) ** 10_000
    np.testing.assert_allclose(found["spike/score_recent"], wanted, rtol=1e-3)


def test_nan_and_inf_are_spikes_and_are_not_remembered():
    """Also before the window is full."""
    values = history(3)
    broken = [3, 5, 150, 160]
    values[broken] = np.nan, np.inf, np.nan, np.inf
    wanted = spikes(values, 6, 128)
    assert wanted[broken].all() and wanted[:128].sum() == 2
    np.testing.assert_allclose(spike_score(values), wanted.mean(), rtol=1e-6)
