"""Arguments that are NumPy integers, limits in 16 bits, dtypes under strict promotion,
and exported programs for any size.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optaxclip import clipped_grad, shrinks
from optaxclip.per_example import noise_scale
from tests.per_example.batches import normal

W, X = jnp.ones(3), jnp.arange(12.0).reshape(4, 3)


def loss(x, w):
    return jnp.sum(w * x)


def test_argnums_may_be_numpy_ints():
    wanted = np.mean(np.asarray(X), axis=0)
    for places in (np.int64(1), np.int32(-1), [np.int64(1)]):
        found = jax.jit(clipped_grad(loss, None, argnums=places))(X, W).grads
        # As in jax.grad: a tree for an int, and a tuple for a list.
        expected = (wanted,) if isinstance(places, list) else wanted
        jax.tree.map(np.testing.assert_allclose, found, expected)


@pytest.mark.slow
def test_other_arguments_may_be_numpy_ints():
    def scaled(w, x, scale):
        return scale * jnp.sum(w * x)

    options = {"shared_argnums": np.int64(2), "microbatch": np.int64(2)}
    grad = clipped_grad(scaled, None, **options)
    np.testing.assert_allclose(grad(W, X, 2.0).grads, 2 * np.mean(X, axis=0))


@pytest.mark.slow
def test_noise_scale_takes_strict_promotion():
    result = clipped_grad(loss, None, argnums=1)(X, W)
    with jax.numpy_dtype_promotion("strict"):
        found = noise_scale(result)
    # tr(Sigma) of the rows of X, unbiased.
    np.testing.assert_allclose(found.noise, np.var(X, axis=0, ddof=1).sum(), rtol=1e-6)


ONES, Y = jnp.ones((4, 3)), jnp.arange(4.0)


def narrow_loss(w, x, y):
    rows = jnp.stack([x, x]).astype(w.dtype)
    return jnp.real(jnp.sum(rows @ w)).astype(jnp.float32) * y


@pytest.mark.parametrize("method", ["ghost", "one_pass", "auto"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "complex64"])
def test_every_method_works_under_strict_promotion(method, dtype):
    w = jnp.zeros((3, 8), dtype)
    grad = clipped_grad(narrow_loss, 1.0, method=method, microbatch=2)
    wanted = grad(w, ONES, Y)
    with jax.numpy_dtype_promotion("strict"):
        found = grad(w, ONES, Y, mask=jnp.ones(4, bool))
    assert found.grads.dtype == w.dtype
    np.testing.assert_array_equal(found.grads, wanted.grads)
    np.testing.assert_array_equal(found.norms, wanted.norms)


def complex_normal(seed, *shape):
    return normal(seed, *shape) + 1j * normal(seed + 1, *shape)


def test_complex_gradients_are_clipped_by_their_norm():
    """Of one position and of more: products of complex factors need conjugates."""

    def loss(w, x):
        return jnp.sum(jnp.abs(x @ w) ** 2)

    w = complex_normal(0, 6, 8)
    for positions in (1, 3, 5):
        x = complex_normal(2, 4, positions, 6)
        each = np.complex128(jax.vmap(jax.grad(loss), (None, 0))(w, x)).reshape(4, -1)
        norms = np.linalg.norm(each, axis=1)
        limit = float(np.median(norms))
        wanted = np.minimum(1, limit / norms) @ each / 4
        for method in ("ghost", "one_pass"):
            found = jax.jit(clipped_grad(loss, limit, method=method))(w, x)
            np.testing.assert_allclose(found.norms, norms, rtol=1e-6)
            error = np.linalg.norm(np.ravel(found.grads) - wanted)
            assert error <= 1e-6 * np.linalg.norm(wanted)


@pytest.mark.slow
@pytest.mark.parametrize("shrink", [shrinks.auto_s(), shrinks.psac(), shrinks.smooth()])
def test_every_shrink_works_under_strict_promotion(shrink):
    with jax.numpy_dtype_promotion("strict"):
        found = clipped_grad(narrow_loss, 1.0, shrink=shrink)(W[:, None], ONES, Y)
    assert np.isfinite(found.grads).all()


(SIZE,) = jax.export.symbolic_shape("size")
GRADIENTS = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)


def exported(grad):
    shapes = [jax.ShapeDtypeStruct(x, jnp.float32) for x in ((SIZE,), (4, SIZE))]
    return jax.export.export(jax.jit(lambda *args: grad(*args).grads))(*shapes)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["one_pass", "auto"])
def test_it_can_be_exported_for_any_size(method):
    grad = clipped_grad(loss, 2.0, method=method)
    found = exported(grad).call(jnp.zeros(6), GRADIENTS)
    np.testing.assert_allclose(found, grad(jnp.zeros(6), GRADIENTS).grads, 1e-6, 1e-7)


def test_it_can_be_exported_for_any_batch():
    (batch,) = jax.export.symbolic_shape("batch")
    shapes = [jax.ShapeDtypeStruct(x, jnp.float32) for x in ((6,), (batch, 6))]
    grad = clipped_grad(loss, 2.0)
    program = jax.export.export(jax.jit(lambda *args: grad(*args).grads))(*shapes)
    found = program.call(jnp.zeros(6), GRADIENTS)
    np.testing.assert_allclose(found, grad(jnp.zeros(6), GRADIENTS).grads, 1e-6, 1e-7)


@pytest.mark.slow
def test_ghost_clipping_says_that_it_cannot():
    with pytest.raises(ValueError, match="for symbolic sizes"):
        exported(clipped_grad(loss, 2.0, method="ghost"))
