"""Schedules that leave the range of their number, or return none."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip import rules

NORMS = np.array([1.0, 4.0, 2.0, 9.0, 3.0, 0.5, 7.0, 2.0])


def history(rule):
    found = optaxclip.replay.run(rule, NORMS)
    return np.asarray(found.limits), np.asarray(found.factors)


def falling(step):
    return 1.5 - 0.5 * step  # 1.5, 1, 0.5, 0, -0.5, ...


def held(step):
    return jnp.clip(falling(step), 0.0, 1.0)


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


@pytest.mark.parametrize("name", DECAYS)
def test_a_share_that_leaves_0_to_1_stays_at_its_end(name):
    for found, wanted in zip(
        history(DECAYS[name](falling)), history(DECAYS[name](held))
    ):
        np.testing.assert_array_equal(found, wanted)
        assert not np.isnan(found).any()


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


def test_a_schedule_without_a_number_is_named():
    for wrong in (lambda step: None, lambda step: "0.9", optax.sgd):
        rule = rules.ema(wrong)
        with pytest.raises(
            TypeError, match=r"^ema: decay: a schedule, or a rule, must"
        ):
            history(rule)


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
