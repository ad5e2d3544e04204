"""A use of a parameter that has nothing in it, such as the rest of a short sequence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optaxclip import clipped_grad

pytestmark = pytest.mark.slow

W = np.arange(6.0).reshape(3, 2)
# Four examples of one position each: nothing is left of the positions before the last.
X = np.linspace(-1.0, 1.0, 12).reshape(4, 1, 3)


def product(w, x):
    return jnp.sum(x[:-1] @ w)


def scan(w, x):
    def turn(total, row):
        return total + jnp.sum(row @ w), None

    return jax.lax.scan(turn, 0.0, x[:-1])[0]


def convolution(w, x):
    # A window of 3 does not fit into 1 position.
    image, kernel = x[None, :, 0], w.T[:, None]
    return jnp.sum(jax.lax.conv_general_dilated(image[None], kernel, (1,), "VALID"))


@pytest.mark.parametrize("loss", [product, scan, convolution])
@pytest.mark.parametrize("method", ["auto", "ghost"])
def test_an_empty_use_has_the_gradient_zero(loss, method):
    found = clipped_grad(loss, 1.0, method=method)(jnp.array(W), jnp.array(X))
    np.testing.assert_array_equal(found.norms, np.zeros(4))
    np.testing.assert_array_equal(found.grads, np.zeros((3, 2)))


@pytest.mark.parametrize("empty", [product, scan, convolution])
def test_an_empty_use_adds_nothing_to_another(empty):
    def loss(w, x):
        return empty(w, x) + jnp.sum(x[-1] @ w)

    found = clipped_grad(loss, 1.0, method="ghost")(jnp.array(W), jnp.array(X))
    # The gradient of sum(x w) by w has the rows x_i (1, 1).
    each = np.repeat(X[:, 0, :, None], 2, axis=2)
    norms = np.sqrt(np.sum(each**2, axis=(1, 2)))
    factors = np.minimum(1.0, 1.0 / norms)
    wanted = np.mean(factors[:, None, None] * each, axis=0)
    np.testing.assert_allclose(found.norms, norms, rtol=1e-6)
    np.testing.assert_allclose(found.grads, wanted, rtol=1e-5, atol=1e-7)
