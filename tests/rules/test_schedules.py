"""Schedules count steps from 0, in every number of a rule. Some leave the range of
their number.
"""

import gc
import pickle
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip import rules
from tests.helpers import FEW_STEPS

# (rule, parameter, up to step 5, afterwards, does it act on the limit of its own step,
# or of the next?, others)
SCHEDULED = [
    (rules.windowed_quantile, "quantile", 0.3, 0.8, "own", {}),
    (rules.windowed_quantile, "factor", 1.5, 0.5, "own", {}),
    (rules.windowed_mean, "sigmas", 1.0, 2.0, "own", {}),
    (rules.windowed_mean, "floor", 5.0, 1.0, "own", {}),
    (rules.z_score, "z", 0.1, 2.0, "own", {"warmup": 2}),
    (rules.log_z_score, "z", 0.5, 2.0, "own", {"warmup": 2}),
    (rules.log_z_score, "spread", 1.0, 2.0, "own", {"warmup": 2}),
    (rules.ema_ratio, "ratio", 1.1, 2.0, "own", {}),
    (rules.ema_ratio, "decay", 0.9, 0.5, "next", {"ratio": 4.0}),
    (rules.growth, "rate", 1.1, 2.0, "own", {}),
    (rules.growth, "floor", 9.0, 10.0, "own", {}),
    (rules.quantile_tracker, "quantile", 0.9, 0.1, "next", {}),
    (rules.quantile_tracker, "rate", 0.2, 0.7, "next", {}),
    (rules.ema_band, "high", 0.8, 0.7, "own", {"down": 0.0}),
    (rules.ema_band, "down", 0.99, 0.9, "own", {"high": 0.1}),
    (rules.ema, "decay", 0.9, 0.2, "own", {}),
    (rules.moments_ratio, "decay1", 0.9, 0.2, "own", {}),
]


@pytest.mark.parametrize(
    ("build", "name", "before", "after", "acts", "others"),
    SCHEDULED,
    ids=[f"{case[0].__name__} {case[1]}" for case in SCHEDULED],
)
def test_a_schedule_counts_steps_from_0(build, name, before, after, acts, others):
    norms = np.exp(0.3 * np.random.default_rng(0).standard_normal(FEW_STEPS)).astype(
        np.float32
    )
    same = 6 if acts == "own" else 7  # as many limits can not know of the change
    values = before, lambda step: jnp.where(step < 6, before, after)
    both = jax.jit(
        lambda norms: [
            optaxclip.replay.run(build(**others, **{name: value}), norms).limits
            for value in values
        ]
    )
    constant_limits, limits = map(np.asarray, both(norms))
    np.testing.assert_allclose(limits[:same], constant_limits[:same], rtol=1e-6)
    assert abs(limits[same] - constant_limits[same]) > 1e-3 * constant_limits[same]


def test_autoclips_percentile_follows_its_schedule_from_step_0():
    clipper = optaxclip.autoclip(lambda step: jnp.where(step < 2, 75.0, 20.0))
    state, norms = clipper.init(jnp.zeros(1)), [1.0, 2.0, 3.0, 7.0]
    for seen, percentile in enumerate((75, 75, 20, 20), 1):
        _, state = clipper.update(jnp.array([norms[seen - 1]]), state)
        wanted = np.percentile(norms[:seen], percentile)
        np.testing.assert_allclose(state.limit, wanted, rtol=1e-6)


NORMS = np.array([1.0, 4.0, 2.0, 9.0, 3.0, 0.5, 7.0, 2.0])


def history(rule):
    found = optaxclip.replay.run(rule, NORMS)
    return np.asarray(found.limits), np.asarray(found.factors)


def falling(step):
    return 1.5 - 0.5 * step  # 1.5, 1, 0.5, 0, -0.5, ...


SHARES = jnp.array([0.5, 0.75, 1.5, 0.5, 2.0, -0.5, 0.25, -1.0])


def leaving(step):
    return SHARES[step]


def held(step):
    return jnp.clip(leaving(step), 0.0, 1.0)


def not_negative(step):
    return jnp.maximum(falling(step), 0.0)


DECAYS = {
    "ema": rules.ema,
    "ema_band": lambda decay: rules.ema_band(0.5, 1.0, decay),
    "ema_ratio": lambda decay: rules.ema_ratio(1.1, decay),
    "ema_ratio target": lambda decay: rules.ema_ratio(1.1, target_decay=decay),
    "log_z_score": lambda decay: rules.log_z_score(1.0, decay, warmup=1),
    "moments_ratio": lambda decay: rules.moments_ratio(decay, decay),
    "windowed_quantile": lambda share: rules.windowed_quantile(share, 3),
    "z_score": lambda decay: rules.z_score(1.0, decay, warmup=2),
    "quantile_tracker": rules.quantile_tracker,
}
NUMBERS = {
    "growth": lambda number: rules.growth(number, floor=0.5),
    "ema_ratio": rules.ema_ratio,
    "ema_band": lambda number: rules.ema_band(number, number),
    "windowed_mean": lambda number: rules.windowed_mean(number, 3),
    "z_score": lambda number: rules.z_score(number, warmup=2),
}


def test_a_share_that_leaves_0_to_1_stays_at_its_end():
    @jax.jit
    def limits_of_all(norms):
        limits = {}
        for name, build in DECAYS.items():
            both = [optaxclip.replay.run(build(x), norms) for x in (leaving, held)]
            limits[name] = [found.limits for found in both]
        return limits

    for name, (limits, wanted) in limits_of_all(NORMS).items():
        np.testing.assert_array_equal(limits, wanted, name)
        assert not np.isnan(limits).any(), name


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_falls_below_0_counts_as_0(name):
    both = history(NUMBERS[name](falling)), history(NUMBERS[name](not_negative))
    for found, wanted in zip(*both):
        np.testing.assert_array_equal(found, wanted)
        assert not np.isnan(found).any()


def test_a_growth_that_was_negative_grows_again():
    def rate(step):
        return jnp.where(step == 2, -1.0, 2.0)

    limits, _ = history(rules.growth(rate, floor=0.5))
    # Of the norms 1, 4, 2, 9, 3 it lets through 1, 2, 0, 4, 3. After 0 the 2 grows.
    np.testing.assert_allclose(limits[:6], [np.inf, 2.0, 0.0, 4.0, 8.0, 6.0])


def test_a_wide_number_of_a_schedule_is_still_a_limit():
    rule = rules.share_of_params(lambda step: 1e39)
    grads, params = jnp.full(2, jnp.inf), jnp.ones(2)
    _, state = optaxclip.clip_by_global_norm(rule).update(
        grads, optaxclip.clip_by_global_norm(rule).init(params), params
    )
    assert state.limit == np.inf or state.limit == np.finfo(np.float32).max


def test_rules_built_anew_share_one_program():
    schedule, count = optax.constant_schedule(0.5), []

    @jax.jit
    def limit(rule, norm):
        count.append(1)
        return rule.update(norm, rule.init(norm), jnp.int32(0))[0]

    for _ in range(3):
        limit(rules.ema(schedule), jnp.float32(2.0))
    assert len(count) == 1


def test_a_rule_with_a_schedule_can_be_pickled():
    rule = pickle.loads(pickle.dumps(rules.ema(held)))
    np.testing.assert_array_equal(history(rule), history(rules.ema(held)))


def test_a_schedule_in_jit_is_not_kept():
    """A method holds its object, such as a trainer with a model."""
    owner = type("Trainer", (), {"rate": lambda self, step: 1.0})()
    inner = optax.chain(optaxclip.zclip(owner.rate, scope="tensor"), optax.trace(0.9))
    optimizer, kept = optaxclip.skip_spikes(inner, owner.rate), weakref.ref(owner)
    jax.jit(optimizer.update)(jnp.ones(2), optimizer.init(jnp.ones(2)))
    del owner, inner, optimizer
    gc.collect()
    assert kept() is None
