"""Derivatives of an update whose limit is infinite: those of the identity."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip import rules, shrinks

pytestmark = pytest.mark.slow

WEIGHTS = jnp.array([1.0, 2.0])
SHRINKS = {"auto_s": shrinks.auto_s(), "psac": shrinks.psac()}
LIMITS = {
    "inf": math.inf,
    "schedule": optax.constant_schedule(math.inf),
    "first norm": rules.growth(),
}


def derivative(clipper, x):
    def total(x):
        return jnp.sum(WEIGHTS * clipper.update(x, clipper.init(x))[0])

    return jax.grad(total)(x)


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("shrink", SHRINKS)
def test_an_update_without_limit_has_the_derivative_of_its_input(shrink, limit):
    clipper = optaxclip.clip_by_global_norm(LIMITS[limit], shrink=SHRINKS[shrink])
    for x in (jnp.array([3.0, 4.0]), jnp.zeros(2)):
        np.testing.assert_array_equal(derivative(clipper, x), WEIGHTS)


def test_the_sharpest_smooth_shrink_has_the_derivative_of_hard():
    x = jnp.array([3.0, 4.0])
    found = [
        derivative(optaxclip.clip_by_global_norm(1.0, shrink=shrink), x)
        for shrink in (shrinks.smooth(math.inf), shrinks.hard)
    ]
    # x / |x|: (w - u (u w)) / |x|, with u = (0.6, 0.8)
    np.testing.assert_allclose(found[0], [-0.064, 0.048], rtol=1e-5)
    np.testing.assert_array_equal(*found)
