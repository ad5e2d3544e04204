"""The norm-growth limiter where its numbers are extreme."""

import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip
from optaxclip import rules

pytestmark = pytest.mark.filterwarnings("ignore:growth. rate should be above 1")


def test_a_rate_of_0_has_no_limit_before_the_second_step():
    found = optaxclip.replay.run(rules.growth(0.0), [2.0, 3.0, 4.0])
    np.testing.assert_array_equal(found.limits, [np.inf, 0.0, 0.0])


def test_a_rate_of_0_leaves_the_first_update_as_it_is():
    clipper = optaxclip.clip_by_global_norm(rules.growth(0.0))
    grads = jnp.array([3.0, 4.0])
    first, state = clipper.update(grads, clipper.init(grads))
    np.testing.assert_array_equal(first, grads)
    np.testing.assert_array_equal(clipper.update(grads, state)[0], [0.0, 0.0])


def test_a_rate_of_0_in_one_step_is_over_after_it():
    rate = jnp.array([1.5, 1.5, 0.0, 1.5, 1.5])
    found = optaxclip.replay.run(rules.growth(lambda step: rate[step]), [1.0] * 5)
    np.testing.assert_array_equal(found.limits, [np.inf, 1.5, 0.0, 1.5, 1.5])


@pytest.mark.parametrize(
    "rule",
    [
        lambda factor: rules.growth(factor),
        lambda factor: rules.windowed_quantile(
            0.5, 3, factor=factor, remember="clipped"
        ),
        lambda factor: rules.ema_ratio(factor, 0.0),
    ],
)
def test_a_limit_of_0_is_left_where_its_factor_rises(rule):
    def off_at_first(step):
        return jnp.where(step < 4, 0.0, 2.0)

    found = optaxclip.replay.run(rule(off_at_first), np.ones(6)).limits
    np.testing.assert_array_equal(found, [np.inf, 0.0, 0.0, 0.0, 2.0, 2.0])
