"""Exported programs may take arrays of any size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optaxclip import clipped_grad

(SIZE,) = jax.export.symbolic_shape("size")
GRADIENTS = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)


def loss(w, gradient):
    return jnp.sum(w * gradient)


def exported(grad):
    shapes = [jax.ShapeDtypeStruct(x, jnp.float32) for x in ((SIZE,), (4, SIZE))]
    return jax.export.export(jax.jit(lambda *args: grad(*args).grads))(*shapes)


@pytest.mark.parametrize("method", ["one_pass", "two_pass", "auto"])
@pytest.mark.slow
def test_it_can_be_exported_for_any_size(method):
    grad = clipped_grad(loss, 2.0, method=method)
    found = exported(grad).call(jnp.zeros(6), GRADIENTS)
    np.testing.assert_allclose(found, grad(jnp.zeros(6), GRADIENTS).grads, 1e-6, 1e-7)


def test_ghost_clipping_says_that_it_cannot():
    with pytest.raises(ValueError, match=r"for sizes that are not known, here \(size"):
        exported(clipped_grad(loss, 2.0, method="ghost"))
