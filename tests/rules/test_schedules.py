"""Schedules count steps from 0, in every number of a rule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip
from tests.helpers import FEW_STEPS

# (rule, parameter, up to step 5, afterwards, does it act on the limit of its own step,
# or of the next?, others)
SCHEDULED = [
    (optaxclip.rules.windowed_quantile, "quantile", 0.3, 0.8, "own", {}),
    (optaxclip.rules.windowed_quantile, "factor", 1.5, 0.5, "own", {}),
    (optaxclip.rules.windowed_mean, "sigmas", 1.0, 2.0, "own", {}),
    (optaxclip.rules.windowed_mean, "floor", 5.0, 1.0, "own", {}),
    (optaxclip.rules.z_score, "z", 0.1, 2.0, "own", {"warmup": 2}),
    (optaxclip.rules.log_z_score, "z", 0.5, 2.0, "own", {"warmup": 2}),
    (optaxclip.rules.log_z_score, "spread", 1.0, 2.0, "own", {"warmup": 2}),
    (optaxclip.rules.ema_ratio, "ratio", 1.1, 2.0, "own", {}),
    (optaxclip.rules.ema_ratio, "decay", 0.9, 0.5, "next", {"ratio": 4.0}),
    (optaxclip.rules.growth, "rate", 1.1, 2.0, "own", {}),
    (optaxclip.rules.growth, "floor", 9.0, 10.0, "own", {}),
    (optaxclip.rules.quantile_tracker, "quantile", 0.9, 0.1, "next", {}),
    (optaxclip.rules.quantile_tracker, "rate", 0.2, 0.7, "next", {}),
    (optaxclip.rules.ema_band, "high", 0.8, 0.7, "own", {"down": 0.0}),
    (optaxclip.rules.ema_band, "down", 0.99, 0.9, "own", {"high": 0.1}),
    (optaxclip.rules.ema, "decay", 0.9, 0.2, "own", {}),
    (optaxclip.rules.moments_ratio, "decay1", 0.9, 0.2, "own", {}),
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
    clipper = optaxclip.autoclip(lambda step: 100.0 * (step < 2))
    state = clipper.init(jnp.zeros(1))
    limits = []
    for norm in (1.0, 2.0, 3.0):
        _, state = clipper.update(jnp.array([norm]), state)
        limits.append(float(state.limit))
    assert limits == [1.0, 2.0, 1.0]
