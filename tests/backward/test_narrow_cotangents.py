"""Cotangents in 8 bits, and axes that are NumPy's ints."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_a_cotangent_in_8_bits_is_scaled(dtype):
    x = jnp.ones(3, dtype)
    _, pull = jax.vjp(lambda x: optaxclip.scale_cotangent(x, 0.5), x)
    (found,) = pull(jnp.array([1.0, -3.0, 0.25], dtype))
    assert found.dtype == x.dtype
    assert found.astype(np.float32).tolist() == [0.5, -1.5, 0.125]


@pytest.mark.parametrize("axis", [np.int64(-1), (np.int32(1),)])
def test_an_axis_may_be_an_int_of_numpy(axis):
    def loss(x):
        clipped = optaxclip.clip_cotangent(x, max_norm=1.0, axis=axis)
        return jnp.sum(jnp.array([[3.0, 4.0], [0.3, 0.4]]) * clipped)

    expected = np.array([[0.6, 0.8], [0.3, 0.4]])
    np.testing.assert_allclose(jax.grad(loss)(jnp.ones((2, 2))), expected, rtol=2e-6)
