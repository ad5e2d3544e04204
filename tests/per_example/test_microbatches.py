"""How a batch is cut into microbatches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from optaxclip.per_example import clipped_grad, explain_clipped_grad


def widths(size, microbatch):
    """The sizes of the microbatches that a batch is cut into."""
    seen = set()

    def look(x):
        seen.add(x.size)
        return np.zeros_like(x)

    def loss(w, x):
        kind = jax.ShapeDtypeStruct((), np.float32)
        # Called once for all examples that are processed at once.
        zero = jax.pure_callback(
            look, kind, lax.stop_gradient(x), vmap_method="expand_dims"
        )
        return w * x + zero

    batch = np.arange(size, dtype=np.float32)
    grad = clipped_grad(
        loss, None, mean=False, method="one_pass", microbatch=microbatch
    )
    found = jax.jit(grad)(jnp.float32(1.0), batch)
    np.testing.assert_array_equal(found.values, batch)
    assert found.grads == size * (size - 1) / 2
    return seen


@pytest.mark.parametrize(
    "size, microbatch, width",
    [(32, 9, 8), (10, 6, 5), (10, 4, 4), (7, 7, 7), (7, 8, 7), (5, 1, 1), (9, None, 9)],
)
def test_microbatches_are_filled_up_as_little_as_can_be(size, microbatch, width):
    assert widths(size, microbatch) == {width}


def long_sequence(w, x):
    """Which has more positions than one pass takes time for."""
    return jnp.sum(jnp.tanh(x @ w) ** 2)


def test_auto_chooses_microbatches_that_fill_the_batch():
    args = jnp.ones((32, 32)), jnp.ones((32, 36, 32))
    choice = explain_clipped_grad(long_sequence)(*args)
    # A quarter of 32 inputs and outputs of 36 x 32 has room for 18 gradients.
    assert (choice.method, choice.microbatch) == ("one_pass", 16)


@pytest.mark.parametrize("method", ["auto", "one_pass"])
def test_costs_of_all_methods_are_shown(method):
    def loss(w, x):
        return jnp.sum((x @ w) ** 2)

    # Ghost clipping: |x| |c|, of 30 and 20 numbers. 32 multiplications for each of 600.
    # A gradient: three products.
    found = explain_clipped_grad(loss, method=method)(
        jnp.ones((30, 20)), jnp.ones((4, 30))
    )
    expected = {"ghost": 50, "one_pass": 19200, "two_pass": 19200 + 1800}
    assert found.costs == expected
    assert "ghost 50, " in str(found) or ", ghost 50" in str(found)
