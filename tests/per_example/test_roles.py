"""Every argument that is neither differentiated nor shared is a batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optaxclip.per_example import clipped_grad

pytestmark = pytest.mark.slow


def squared_error(w, x, y):
    return 0.5 * (x @ w - y) ** 2


def arrays():
    rng = np.random.default_rng(0)
    shapes = (3,), (5, 3), (5,)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def mean_of_clipped(w, x, y, limit):
    """(1 / B) sum_i g_i min(1, C / |g_i|) with g_i = (x_i w - y_i) x_i."""
    w, x, y = (np.asarray(each, np.float64) for each in (w, x, y))
    grads = (x @ w - y)[:, None] * x
    norms = np.linalg.norm(grads, axis=1)
    return np.mean(grads * np.minimum(1, limit / norms)[:, None], 0)


def close(found, expected):
    """Within 8 roundings of the vector's norm."""
    error = np.linalg.norm(np.asarray(found, np.float64) - expected)
    assert error <= 8 * np.finfo(np.float32).eps * np.linalg.norm(expected)


def test_every_further_argument_is_a_batch():
    w, x, y = arrays()
    result = clipped_grad(squared_error, 0.7)(w, x, y)
    expected = mean_of_clipped(w, x, y, 0.7)
    close(result.grads, expected)


@pytest.mark.parametrize("place", [2, (-1,)])
def test_a_shared_argument_is_the_same_for_all_examples(place):
    w, x, _ = arrays()
    grad = clipped_grad(squared_error, 0.7, shared_argnums=place)
    expected = mean_of_clipped(w, x, np.full(5, 0.25), 0.7)
    close(grad(w, x, 0.25).grads, expected)


def test_a_shared_argument_may_be_a_function():
    w, x, y = arrays()

    def loss(w, x, y, predict):
        return 0.5 * (predict(w, x) - y) ** 2

    grad = clipped_grad(loss, 0.7, shared_argnums=3)
    result = grad(w, x, y, lambda w, x: x @ w)
    expected = mean_of_clipped(w, x, y, 0.7)
    close(result.grads, expected)


def test_each_example_has_its_own_key():
    w, x, y = arrays()
    keys = jax.random.split(jax.random.key(0), 5)

    def loss(w, x, y, key):
        return squared_error(w, x * jax.random.bernoulli(key, 0.5, x.shape), y)

    kept = np.stack([jax.random.bernoulli(key, 0.5, (3,)) for key in keys])
    result = clipped_grad(loss, 0.7, microbatch=2)(w, x, y, keys)
    expected = mean_of_clipped(w, x * kept, y, 0.7)
    close(result.grads, expected)


@pytest.mark.parametrize("name", ["argnums", "shared_argnums"])
@pytest.mark.parametrize("places", [0.5, "w", (0, "w")])
def test_places_that_are_no_ints_raise(name, places):
    with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
        clipped_grad(squared_error, 0.7, **{name: places})(jnp.ones(3), jnp.ones(3))
