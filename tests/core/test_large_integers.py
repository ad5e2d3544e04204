"""Integers beyond 32 bits, as limits and as numbers of rules."""

import jax.numpy as jnp
import numpy as np
import optax
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


def test_a_finite_bound_beyond_float32_is_refused_everywhere():
    x = jnp.ones(2)
    for build in (
        lambda: optaxclip.clip_by_value(1e39),
        lambda: optaxclip.clip_by_value(1.0, -1e39),
        lambda: optaxclip.clip(1e39),
        lambda: optaxclip.clip_cotangent(x, max_value=1e39),
        lambda: optaxclip.clip_cotangent(x, max_norm=1e39),
        lambda: optaxclip.scale_cotangent(x, 1e39),
        lambda: optaxclip.scale_cotangent(x, -1e39),
        lambda: rules.quantile_tracker(start=1e39),
        lambda: rules.log_z_score(floor=np.inf),
    ):
        with pytest.raises(ValueError, match=r"must be at most 3\.40282e\+38"):
            build()


@pytest.mark.parametrize("number", LARGE)
def test_norms_and_losses_that_are_given_may_be_large(number):
    skipping = optaxclip.skip_spikes(optax.sgd(1.0), rules.windowed_mean())
    _, state = skipping.update(GRADS, skipping.init(GRADS), grad_norm=number)
    assert state.norm == np.float32(number)
    recorder = optaxclip.record_spikes()
    _, state = recorder.update(
        GRADS, recorder.init(GRADS), grad_norm=number, value=number
    )
    assert (state.norm, state.loss) == (np.float32(number), np.float32(number))


def test_a_loss_that_is_no_number_is_named():
    recorder = optaxclip.record_spikes()
    with pytest.raises(TypeError, match="record_spikes: value must be a real number"):
        recorder.update(GRADS, recorder.init(GRADS), value="1.0")
