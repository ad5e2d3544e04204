"""Every argument that is neither differentiated nor shared is a batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optaxclip.per_example import clipped_grad
from tests.per_example.batches import EPS, mean_of_clipped, near

pytestmark = pytest.mark.slow


def squared_error(w, x, y):
    return 0.5 * (x @ w - y) ** 2


def arrays():
    rng = np.random.default_rng(0)
    shapes = (3,), (5, 3), (5,)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def close(found, w, x, y, limit):
    """That it is the mean of clipped g_i = (x_i w - y_i) x_i, within 8 roundings."""
    w, x, y = (np.asarray(each, np.float64) for each in (w, x, y))
    near(found, mean_of_clipped((x @ w - y)[:, None] * x, limit), 8 * EPS)


@pytest.mark.parametrize("place", [2, (-1,)])
def test_a_shared_argument_is_the_same_for_all_examples(place):
    w, x, _ = arrays()
    grad = clipped_grad(squared_error, 0.7, shared_argnums=place)
    close(grad(w, x, 0.25).grads, w, x, np.full(5, 0.25), 0.7)


def test_a_shared_argument_may_be_a_function():
    w, x, y = arrays()

    def loss(w, x, y, predict):
        return 0.5 * (predict(w, x) - y) ** 2

    grad = clipped_grad(loss, 0.7, shared_argnums=3)
    result = grad(w, x, y, lambda w, x: x @ w)
    close(result.grads, w, x, y, 0.7)


def test_each_example_has_its_own_key():
    w, x, y = arrays()
    keys = jax.random.split(jax.random.key(0), 5)

    def loss(w, x, y, key):
        return squared_error(w, x * jax.random.bernoulli(key, 0.5, x.shape), y)

    kept = np.stack([jax.random.bernoulli(key, 0.5, (3,)) for key in keys])
    result = clipped_grad(loss, 0.7, microbatch=2)(w, x, y, keys)
    close(result.grads, w, x * kept, y, 0.7)


@pytest.mark.parametrize("name", ["argnums", "shared_argnums"])
@pytest.mark.parametrize("places", [0.5, "w", (0, "w")])
def test_places_that_are_no_ints_raise(name, places):
    with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
        clipped_grad(squared_error, 0.7, **{name: places})(jnp.ones(3), jnp.ones(3))
