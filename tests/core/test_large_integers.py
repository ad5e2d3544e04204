"""Integers beyond 32 bits, as limits and as numbers of rules."""

import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip
from optaxclip import rules

pytestmark = pytest.mark.slow

GRADS = jnp.array([3.0, 4.0])  # norm 5
LARGE = [2**33, np.int64(2**33), np.array(2**33), np.uint32(2**32 - 1)]


def last_limit(limit, **options):
    clipper = optaxclip.clip_by_global_norm(limit, **options)
    _, state = clipper.update(GRADS, clipper.init(GRADS), GRADS)
    updates, state = clipper.update(GRADS, state, GRADS)
    return updates, state.limit


@pytest.mark.parametrize("large", LARGE, ids=lambda x: type(x).__name__)
def test_a_large_integer_limit_keeps_its_value(large):
    # JAX keeps the lowest 32 bits of a NumPy integer: of 2^33 that is 0.
    updates, limit = last_limit(large)
    np.testing.assert_array_equal(limit, np.float32(large))
    np.testing.assert_array_equal(updates, GRADS)


@pytest.mark.parametrize("large", LARGE, ids=lambda x: type(x).__name__)
def test_a_large_integer_in_a_rule_keeps_its_value(large):
    expected = {
        rules.growth(1.0, floor=large): np.float32(large),
        rules.share_of_params(large): 5 * np.float32(large),
        rules.ema_ratio(warmup=large): np.inf,
        rules.warm_up(large, 1.0, 2.0): 1.0,
        rules.minimum(large, np.inf): np.float32(large),
    }
    for rule, wanted in expected.items():
        np.testing.assert_array_equal(last_limit(rule)[1], np.float32(wanted))


def test_a_large_integer_eps_keeps_its_value():
    # g * min(1, 1 / (5 + eps))
    for large in LARGE[:3]:
        updates, _ = last_limit(1.0, eps=large)
        expected = np.float64([3.0, 4.0]) / (5 + 2.0**33)
        np.testing.assert_allclose(updates, expected, rtol=1e-6)
