"""How a batch is cut into microbatches."""

import jax.numpy as jnp
import numpy as np
import pytest

from optaxclip.per_example import explain_clipped_grad
from optaxclip.per_example._microbatches import in_microbatches


def widths(size, microbatch):
    """The sizes of the microbatches that a batch is cut into."""
    seen = []

    def step(total, is_real, x):
        seen.append(is_real.size)
        return total + jnp.sum(jnp.where(is_real, x, 0)), x

    batch = jnp.arange(size, dtype=jnp.float32)
    total, found = in_microbatches(step, jnp.zeros(()), (batch,), microbatch)
    np.testing.assert_array_equal(found, batch)
    assert total == size * (size - 1) / 2
    return set(seen)


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
