"""Clipping each example mixes no dtypes by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optaxclip import clipped_grad, shrinks

X, Y = jnp.ones((4, 3)), jnp.arange(4.0)


def loss(w, x, y):
    return jnp.real(jnp.sum(w * x.astype(w.dtype))).astype(jnp.float32) * y


@pytest.mark.parametrize("method", ["ghost", "one_pass", "two_pass", "auto"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "complex64"])
@pytest.mark.slow
def test_every_method_works_under_strict_promotion(method, dtype):
    w = jnp.zeros(3, dtype)
    grad = clipped_grad(loss, 1.0, method=method, microbatch=2)
    wanted = grad(w, X, Y)
    with jax.numpy_dtype_promotion("strict"):
        found = grad(w, X, Y, mask=jnp.ones(4, bool))
    assert found.grads.dtype == w.dtype
    np.testing.assert_array_equal(found.grads, wanted.grads)
    np.testing.assert_array_equal(found.norms, wanted.norms)


@pytest.mark.parametrize("shrink", [shrinks.auto_s(), shrinks.psac(), shrinks.smooth()])
@pytest.mark.slow
def test_every_shrink_works_under_strict_promotion(shrink):
    with jax.numpy_dtype_promotion("strict"):
        found = clipped_grad(loss, 1.0, shrink=shrink)(jnp.zeros(3), X, Y)
    assert np.isfinite(found.grads).all()
