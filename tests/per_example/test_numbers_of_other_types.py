"""Arguments that are NumPy integers, and limits in 16 bits or of several numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optaxclip import clipped_grad
from optaxclip.per_example import noise_scale, per_example_layer_norm_clip

pytestmark = pytest.mark.slow

W, X = jnp.ones(3), jnp.arange(12.0).reshape(4, 3)


def loss(x, w):
    return jnp.sum(w * x)


@pytest.mark.parametrize("places", [np.int64(1), np.int32(-1), [np.int64(1)]], ids=repr)
def test_argnums_may_be_numpy_ints(places):
    # As in jax.grad: a tree for an int, and a tuple for a list.
    found = clipped_grad(loss, None, argnums=places)(X, W).grads
    wanted = np.mean(np.asarray(X), axis=0)
    expected = (wanted,) if isinstance(places, list) else wanted
    jax.tree.map(np.testing.assert_allclose, found, expected)


def test_shared_argnums_may_be_numpy_ints():
    def scaled(w, x, scale):
        return scale * jnp.sum(w * x)

    grad = clipped_grad(scaled, None, shared_argnums=np.int64(2))
    np.testing.assert_allclose(grad(W, X, 2.0).grads, 2 * np.mean(X, axis=0))


def test_microbatch_may_be_a_numpy_int():
    grad = clipped_grad(loss, None, argnums=1, microbatch=np.int64(2))
    np.testing.assert_allclose(grad(X, W).grads, np.mean(X, axis=0))


def test_noise_scale_takes_strict_promotion():
    result = clipped_grad(loss, None, argnums=1)(X, W)
    with jax.numpy_dtype_promotion("strict"):
        found = noise_scale(result)
    # tr(Sigma) of the rows of X, unbiased.
    np.testing.assert_allclose(found.noise, np.var(X, axis=0, ddof=1).sum(), rtol=1e-6)


@pytest.mark.parametrize("limit", [np.float16(1.0), jnp.bfloat16(1.0)], ids=repr)
def test_all_leaves_stay_within_a_16_bit_limit(limit):
    # 1 / sqrt(3) is 0.578 in bfloat16, which is more. The limit is for all of them.
    grads = [jnp.ones((1, 2))] * 3
    total, _ = per_example_layer_norm_clip(grads, limit)
    norm = np.sqrt(sum(np.sum(np.float64(x) ** 2) for x in total))
    assert 1 - 1e-5 < norm <= 1


def test_an_integer_limit_takes_strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        total, _ = per_example_layer_norm_clip([jnp.ones((1, 4))], jnp.int32(1))
    np.testing.assert_allclose(total[0], np.full(4, 0.5), rtol=1e-6)
