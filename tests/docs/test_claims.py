"""What the papers prove, and what public code gets wrong, as tests of the rules."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from tests import oracle_rules as oracle
from tests.core.steps import same_bits
from tests.helpers import scanned

EPS = float(np.finfo(np.float32).eps)
NORMS = np.asarray(oracle.histories()["spikes"][:300], np.float32)


# Bugs of public code.


def test_a_band_about_a_young_average_is_not_next_to_nothing():
    """An average from 0 without correction is 1/20 of the norm in the first steps."""
    rule, norms = optaxclip.rules.ema_band(0.5, 1.5), np.full(50, 2.0, np.float32)
    shrink = optaxclip.shrinks.normalize
    factors = optaxclip.replay.run(rule, norms, shrink=shrink).factors
    np.testing.assert_array_equal(factors, 1.0)


# What papers prove.


def test_adagc_bounds_growth_and_touches_only_what_spikes():
    """Growth of the average is at most 1 + (1 - decay)(ratio - 1) a step; other tensors
    pass bit for bit.
    """
    ratio, decay = 1.05, 0.98
    grads = {
        "calm": jnp.full((200, 3), 0.1),
        "wild": jnp.full((200, 4), 0.1).at[50:].mul(100.0),
    }
    clipper = optaxclip.adagc(ratio, decay, warmup=20)

    def step(state, each):
        updates, state = clipper.update(each, state)
        return state, (updates, state.by_name()["wild"].memory.average)

    _, (updates, average) = jax.lax.scan(
        step, clipper.init(jax.tree.map(lambda x: x[0], grads)), grads
    )
    same_bits(updates["calm"], grads["calm"])
    growth = (
        np.asarray(average, np.float64)[51:] / np.asarray(average, np.float64)[50:-1]
    )
    assert growth.max() <= 1 + (1 - decay) * (ratio - 1) + 4 * EPS and growth.min() > 1
    assert np.linalg.norm(updates["wild"][50]) <= 0.2 * ratio * (1 + 4 * EPS)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [2.0**-20, 2.0**12])
def test_autoclip_decides_alike_whatever_scales_the_loss(factor):
    """By a power of 2, so that nothing is rounded: limits scale exactly, decisions are
    the same.
    """
    rule = optaxclip.rules.windowed_quantile(0.1, 1000, current=True)
    scaled = optaxclip.replay.run(rule, NORMS * np.float32(factor))
    plain = optaxclip.replay.run(rule, NORMS)
    np.testing.assert_array_equal(plain.clipped, scaled.clipped)
    np.testing.assert_array_equal(plain.limits * np.float32(factor), scaled.limits)


@pytest.mark.slow
def test_adagn_gives_the_same_updates_whatever_scales_the_loss():
    grads = jnp.asarray(
        np.random.default_rng(0).standard_normal((60, 5)) * NORMS[:60, None],
        jnp.float32,
    )
    clipper = optaxclip.adagn(eps=0.0)
    plain, scaled = (scanned(clipper, grads * c)[1] for c in (1.0, 2.0**18))
    np.testing.assert_allclose(plain, scaled, rtol=8 * EPS)
    # Cauchy-Schwarz over the weights of both averages: (sum w n)^2 <= sum w^2 / u * sum
    # u n^2.
    age = [np.arange(steps) for steps in range(1, 61)]
    most = max(
        np.sum(
            (0.3 * 0.7**k / (1 - 0.7 ** len(k))) ** 2
            / (0.1 * 0.9**k / (1 - 0.9 ** len(k)))
        )
        for k in age
    )
    assert 1.1 < np.linalg.norm(plain, axis=1).max() <= np.sqrt(most) * (1 + 16 * EPS)


@pytest.mark.parametrize("start", [1e-6, 1e6])
def test_the_tracker_finds_the_quantile_from_a_wrong_start(start):
    norms = np.float32(np.exp(np.random.default_rng(0).standard_normal(3000) * 0.3))
    rule = optaxclip.rules.quantile_tracker(0.8, 0.1, start=start)
    result = optaxclip.replay.run(rule, norms)
    steps = int(np.log(1e6) / (0.1 * min(0.8, 0.2))) + 200
    below = np.asarray(result.norms <= result.limits)[steps:]
    assert np.mean(below) == pytest.approx(0.8, abs=0.02)
    found = np.median(result.limits[steps:])
    assert found == pytest.approx(np.quantile(norms, 0.8), rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("power", [1.0, 1.5, 2.0, 8.0])
def test_smooth_is_monotone_and_within_its_factor_of_hard(power):
    """min(n, c) / 2^(1/p) <= n / (1 + (n/c)^p)^(1/p) <= min(n, c)."""
    norm = np.float32(np.concatenate([[0.0], np.geomspace(1e-30, 1e30, 4001)]))
    shrink, small = optaxclip.shrinks.smooth(power), norm < 1e25
    for limit in (1e-3, 1.0, 37.0):
        limits = jnp.full_like(norm, limit)
        soft = np.asarray(shrink(jnp.asarray(norm), limits), np.float64)
        hard = np.minimum(np.float64(norm), np.float32(limit))
        # Beyond, the power leaves float64.
        ratio = norm[small].astype(np.float64) / np.float32(limit)
        exact = norm[small] / (1 + ratio**power) ** (1 / power)
        np.testing.assert_allclose(soft[small], exact, rtol=16 * EPS)
        assert np.all(soft <= hard * (1 + EPS))
        assert np.all(soft >= hard / 2 ** (1 / power) * (1 - 8 * EPS))
        assert np.all(np.diff(soft) >= -4 * EPS * soft[1:])
    assert shrink(jnp.float32(3.0), jnp.float32(np.inf)) == 3.0
    assert shrink(jnp.float32(0.0), jnp.float32(0.0)) == 0.0


def test_spam_recovers_where_adam_is_slowed_for_long():
    """One spike of a thousand times the size: Adam's second moment shrinks the steps
    after it, SPAM's does not.
    """
    grads = jnp.ones((400, 3)).at[100].mul(1000.0)
    adam, protected = (
        optax.scale_by_adam(),
        optax.chain(optaxclip.spam(50.0, every=None), optax.scale_by_adam()),
    )
    slow, quick = (scanned(optimizer, grads)[1] for optimizer in (adam, protected))
    assert float(slow[150, 0]) < 0.2 < 0.8 < float(quick[150, 0])


@pytest.mark.slow
def test_norms_that_never_change_are_not_outliers():
    """A mean of equal numbers that rounds a hair below them makes every step an outlier
    of no deviation.
    """
    for level in (0.1, 1 / 3, 7.3e-5, 1.1e7):
        for rule in (
            optaxclip.rules.windowed_mean(6, 128),
            optaxclip.rules.windowed_mean(3, 100, ddof=1, current=True),
            optaxclip.rules.log_z_score(warmup=5),
            optaxclip.rules.ema_ratio(1.0, remember="raw"),
            optaxclip.rules.ema(),
        ):
            result = optaxclip.replay.run(rule, np.full(300, level, np.float32))
            assert not np.asarray(result.clipped).any()
