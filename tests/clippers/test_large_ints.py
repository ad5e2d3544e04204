"""Numbers that are ints beyond int32 are what they say."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from tests.helpers import apply

pytestmark = pytest.mark.slow

GRADS = jnp.array([3e9, 4e9])  # of norm 5e9
LIMIT = 4_000_000_000
KINDS = [int, np.int64, np.uint32, np.array]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "make",
    [
        *(optaxclip.clip_by_global_norm, optaxclip.clip_by_tensor_norm),
        optaxclip.clip_by_spectral_norm,
        lambda limit: optaxclip.adagc(max_norm=limit),
    ],
)
def test_a_limit_beyond_int32_is_the_limit(make, kind):
    updates, _ = apply(make(kind(LIMIT)), GRADS)
    np.testing.assert_allclose(updates, np.array([2.4e9, 3.2e9]), rtol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_clippy_takes_ints_beyond_int32(kind):
    updates, _ = apply(optaxclip.clippy(0, kind(LIMIT)), 2 * GRADS, GRADS)
    np.testing.assert_allclose(updates, np.array([3e9, 4e9]), rtol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_larc_takes_ints_beyond_int32(kind):
    clipper = optaxclip.larc(kind(LIMIT), trust=1.0, eps=kind(LIMIT))
    updates, state = clipper.update(GRADS, clipper.init(GRADS), GRADS)
    # limit = 1 * |p| / rate, and the norm that is divided by is |g| + eps.
    np.testing.assert_allclose(state.limit, 5e9 / 4e9, rtol=2e-6)
    np.testing.assert_allclose(updates, np.array([3.0, 4.0]) / 9 * 1.25, rtol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_decay_beyond_int32_is_added(kind):
    ones = jnp.ones(2)
    updates, _ = apply(optaxclip.larc(1e-30, weight_decay=kind(LIMIT)), ones, ones)
    np.testing.assert_allclose(updates, [4e9 + 1] * 2, rtol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_spike_limit_beyond_int32_is_the_limit(kind):
    _, state = apply(optaxclip.skip_spikes(optax.sgd(1.0), kind(LIMIT)), GRADS)
    assert int(state.skipped) == 1
    np.testing.assert_allclose(state.limit, 4e9, rtol=2e-7)
