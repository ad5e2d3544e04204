"""Tokens in 8 or 16 bits, whose dtype cannot hold the number of rows of a table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optaxclip import clipped_grad


@pytest.mark.slow
@pytest.mark.parametrize("dtype, rows", [("uint8", 256), ("uint8", 257), ("int8", 128)])
@pytest.mark.parametrize("mode", [None, "clip"])
def test_tokens_of_other_dtypes_find_their_rows(dtype, rows, mode):
    check(dtype, rows, mode)


def test_tokens_of_few_bits_find_their_rows():
    for mode in (None, "clip"):
        check("int16", 40_000, mode)


def check(dtype, rows, mode):
    def loss(table, tokens):
        # As flax's nn.Embed looks up.
        return jnp.sum(jnp.take(table, tokens, axis=0, mode=mode))

    table = jnp.zeros((rows, 4))
    tokens = jnp.array([[1, 99, 1], [0, 3, 99]], dtype)
    found = jax.jit(clipped_grad(loss, 1.0, method="ghost"))(table, tokens)
    # A row that is read n times has the gradient n (1, 1, 1, 1), of norm 2 n.
    norms = [2 * np.sqrt(2**2 + 1**2), 2 * np.sqrt(3)]
    np.testing.assert_allclose(found.norms, norms, rtol=1e-6)
    wanted = np.zeros((rows, 4))
    np.add.at(wanted, np.asarray(tokens[0], int), 0.5 / norms[0])
    np.add.at(wanted, np.asarray(tokens[1], int), 0.5 / norms[1])
    np.testing.assert_allclose(found.grads, wanted, rtol=1e-5)
