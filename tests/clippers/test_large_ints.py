"""Numbers that are ints beyond int32 are what they say."""

import jax.numpy as jnp
import numpy as np
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
