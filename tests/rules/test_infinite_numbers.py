"""Numbers of rules that are infinite: no limit, also where they multiply 0."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip
from optaxclip import rules

pytestmark = pytest.mark.slow

NORMS = [5.0, 5.0, 5.0, 9.0]


def limits(rule):
    return np.asarray(optaxclip.replay.run(rule, NORMS).limits)


def test_infinite_sigmas_are_no_limit_for_equal_norms():
    # Equal norms have a deviation of 0, and inf * 0 is NaN.
    for rule in (
        rules.windowed_mean(math.inf),
        rules.windowed_mean(lambda step: math.inf),
        rules.log_z_score(math.inf, warmup=1, spread=0),
        rules.z_score(math.inf, warmup=1, eps=0),
    ):
        np.testing.assert_array_equal(limits(rule), np.inf)


def test_a_share_of_0_of_an_infinite_floor_is_no_limit():
    for rule in (
        rules.growth(0.0, floor=math.inf),
        rules.windowed_mean(0.0, 4, floor=math.inf),
        rules.log_z_score(0.0, spread=math.inf, warmup=1),
    ):
        np.testing.assert_array_equal(limits(rule)[1:], np.inf)


def test_an_infinite_share_is_no_limit_for_weights_of_zero():
    grads = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([6.0, 8.0])}
    params = {"a": jnp.zeros(2), "b": jnp.ones(2)}
    for rule in (
        rules.share_of_params(math.inf),
        rules.minimum(rules.share_of_params(math.inf), 100.0),
    ):
        clipper = optaxclip.clip_by_tensor_norm(rule)
        updates, _ = clipper.update(grads, clipper.init(params), params)
        for name in grads:
            np.testing.assert_array_equal(updates[name], grads[name])
