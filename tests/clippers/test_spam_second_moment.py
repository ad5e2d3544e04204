"""A second moment from elsewhere, in other dtypes than spam's own."""

import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_spam_takes_a_second_moment_in_16_bits(dtype):
    clipper = optaxclip.spam(5000.0, warmup=0)
    grads = jnp.array([70.5, 70.9, -70.9])
    given = grads, clipper.init(grads)
    updates, _ = clipper.update(*given, second_moment=jnp.ones(3, dtype))
    limit = np.sqrt(5000.0)  # 70.711
    np.testing.assert_allclose(updates, np.clip(grads, -limit, limit), rtol=2e-7)
