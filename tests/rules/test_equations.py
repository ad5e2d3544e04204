"""Rules that learn, beside the float64 oracle of their equation."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip
from optaxclip import rules
from tests import oracle_rules as oracle
from tests.helpers import limits_of
from tests.rules.histories import EPS, HISTORIES, RULES, STEPS, assert_limits

# Good norms, and the same with bad ones in between; what stands behind them makes both
# columns equally long.
BAD_STEPS = 25
GOOD = np.asarray(HISTORIES["spikes"][: STEPS - BAD_STEPS], np.float32)
MIXED = np.insert(
    GOOD,
    np.sort(np.random.default_rng(3).choice(80, BAD_STEPS)),
    np.resize([np.nan, np.inf, 0.0], BAD_STEPS).astype(np.float32),
)


@cache
def replayed(name):
    """The limits of a rule over all histories, side by side in one program:
    float32[steps, histories + 2].
    """
    columns = [*HISTORIES.values(), np.concatenate([GOOD, np.ones(BAD_STEPS)]), MIXED]
    norms = np.stack(columns, axis=1).astype(np.float32)
    return np.asarray(optaxclip.replay.run(RULES[name][0], norms).limits)


def test_a_rule_gives_the_limits_of_its_equation():
    for name, (_, equation, tolerance) in RULES.items():
        for ours, (kind, history) in zip(replayed(name).T, HISTORIES.items()):
            theirs = oracle.limits(equation, history)
            assert_limits(ours, theirs, history, tolerance * EPS, f"{name}, {kind}")


IN_FLOAT64 = {
    "quantile of the past": oracle.windowed_quantile(0.9, 100),
    "z-score": oracle.z_score(),
    "log-norm": oracle.log_z_score(warmup=50),
    "tracker": oracle.quantile_tracker(0.9, 0.2),
    "quotient of moments": oracle.adagn(),
}


@pytest.mark.parametrize("name", IN_FLOAT64)
def test_in_float64_a_rule_keeps_its_precision(name):
    """All numbers are those of a float64 program here; what is left is the order of
    operations.
    """
    history = HISTORIES["spikes"][:150]
    with jax.enable_x64(True):
        limits = optaxclip.replay.run(RULES[name][0], np.asarray(history)).limits
        assert limits.dtype == jnp.float64
        assert_limits(limits, oracle.limits(IN_FLOAT64[name], history), history, 1e-10)


def test_a_step_of_zero_nan_or_inf_leaves_no_trace():
    """Bit for bit: with bad norms in between, the limits of the good ones are those of
    the good ones alone.
    """
    kept = np.isfinite(MIXED) & (MIXED > 0)
    assert kept.sum() == GOOD.size
    for name in RULES:
        alone, mixed = replayed(name).T[-2:]
        np.testing.assert_array_equal(mixed[kept], alone[: GOOD.size], name)


def test_a_norm_exactly_at_the_edge_is_not_brought_to_the_target():
    two_rates = rules.ema_ratio(2.0, 0.5, target=1.5)
    np.testing.assert_array_equal(limits_of(two_rates, [1.0, 2.0]), [np.inf, 2.0])
    # Of 1 and 3 the mean is 2 and the deviation 1: the edge is 2 + (1 + 1).
    score = rules.z_score(1.0, 0.5, warmup=2, eps=1.0)
    limits = limits_of(score, [1.0, 3.0, 4.0])
    np.testing.assert_array_equal(limits, [np.inf, np.inf, 4.0])


@pytest.mark.parametrize("build", [rules.windowed_quantile, rules.ema_ratio])
def test_without_a_warmup_the_first_norm_has_no_limit_either(build):
    limits = limits_of(build(warmup=0), [2.0, 2.0])
    assert np.isinf(limits[0]) and np.isfinite(limits[1])


def test_a_deviation_of_a_sample_wants_two_norms():
    limits = limits_of(rules.windowed_mean(ddof=1, warmup=0), [2.0, 4.0, 4.0])
    assert np.isinf(limits[:2]).all()
    np.testing.assert_allclose(limits[2], 3 + 3 * 2**0.5, rtol=1e-6)


LITTLE_APART = 8192 + np.array([0, 3, 1, 5, 2, 4, 0]) * 2.0**-9
FAR_APART = np.array([1.0, 1.1, 1.2e38, 1.0, 1.0])


def test_norms_little_or_far_apart_keep_their_deviation():
    for norms, sigmas in ((LITTLE_APART, 1e6), (FAR_APART, 1.5)):
        limit = limits_of(rules.windowed_mean(sigmas, 16), norms)[-1]
        wanted = np.mean(norms[:-1]) + sigmas * np.std(norms[:-1])
        np.testing.assert_allclose(limit, wanted, rtol=1e-5)


@pytest.mark.parametrize("current", [False, True])
@pytest.mark.parametrize("quantile", [0.0, 0.3, 1.0])
def test_norms_that_tie_keep_their_order_in_the_window(quantile, current):
    norms = np.random.default_rng(0).integers(1, 4, 60).astype(np.float32)
    rule = rules.windowed_quantile(quantile, 5, current=current)
    limits = optaxclip.replay.run(rule, norms).limits
    for i, limit in enumerate(limits):
        held = norms[max(0, i - 5 + current) : i + current]
        wanted = np.quantile(held, quantile) if held.size else np.inf
        np.testing.assert_allclose(limit, wanted, rtol=1e-6)


def test_tracker_counts_its_limit_as_within_and_stays_in_range():
    tracker = rules.quantile_tracker
    limits = limits_of(tracker(0.5, 0.2, start=1.0), [1.0, 1.0])
    np.testing.assert_allclose(limits, [1.0, np.exp(-0.1)], rtol=1e-6)
    down = limits_of(tracker(0.0, 50.0, start=1e-20), [1e-38] * 3)
    assert down[-1] >= np.finfo(np.float32).tiny
    up = limits_of(tracker(1.0, 1.0, start=1e38), [3e38] * 3)
    assert np.isfinite(up).all()
    far = limits_of(tracker(0.5, 200.0, start=1.0), [2.0, 2.0])
    assert np.isfinite(far).all() and far[1] > 1e38
