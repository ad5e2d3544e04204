"""Lookups beyond a table: the gradient leaves them out, and so must its norm."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from optaxclip import clipped_grad
from optaxclip.per_example import explain_clipped_grad

TABLE = np.arange(1.0, 7.0).reshape(3, 2)
# Row 1, and what is no row: 3 is beyond the end, and -4 before the beginning.
INDEX = np.array([[1, 3], [1, -4], [1, 1]])


def squares_of(read):
    return lambda table, index: jnp.sum(read(table, index) ** 2)


def by_index(table, index):
    return table[index]


def filled(table, index):
    return table.at[index].get(mode="fill", fill_value=0.0)


@pytest.mark.parametrize("method", ["auto", "ghost", "one_pass"])
def test_a_row_beyond_the_table_has_no_gradient(method):
    for read in (by_index, filled):
        grad = clipped_grad(squares_of(read), 1.0, method=method)
        found = jax.jit(grad)(jnp.array(TABLE), jnp.array(INDEX))
        # Row 1 is (3, 4). The gradient by it is 2 (3, 4) for each time that it is read.
        np.testing.assert_allclose(found.norms, [10.0, 10.0, 20.0], rtol=1e-6)
        # Three gradients of norm 1 in the direction of (3, 4), by 3 examples.
        np.testing.assert_allclose(found.grads[1], [0.6, 0.8], rtol=1e-5)


def clipped_index(table, index):
    return jnp.take(table, index, 0, mode="clip")


def slices_of(rows):
    def read(table, index):
        found = [lax.dynamic_slice_in_dim(table, k, rows) for k in index]
        return jnp.stack(found)

    return read


# How often each example reads each row, for an index of 0 and one beyond the table, and
# for twice the last row. A slice that would end beyond the table is moved.
READS = [
    (clipped_index, [[1, 0, 1], [0, 0, 2]]),
    (slices_of(1), [[1, 0, 1], [0, 0, 2]]),
    (slices_of(2), [[1, 2, 1], [0, 2, 2]]),
]


def test_what_is_moved_into_the_table_has_the_gradient_of_its_rows():
    for (read, reads), beyond in product(READS, (7, 2**32 - 3)):
        index = np.array([[0, beyond], [2, 2]], np.uint32)
        grad = clipped_grad(squares_of(read), None, mean=False, method="ghost")
        found = jax.jit(grad)(jnp.array(TABLE), index)
        # The gradient is 2 row for each time.
        grads = 2 * np.array(reads)[:, :, None] * TABLE
        norms = np.sqrt(np.sum(grads**2, (1, 2)))
        np.testing.assert_allclose(found.norms, norms, rtol=1e-6)
        np.testing.assert_allclose(found.grads, grads.sum(0), rtol=1e-6)


def test_a_row_of_a_large_table_is_not_a_gradient_of_all_rows():
    def loss(table, row):
        return jnp.sum(table[row] ** 2)

    explain = explain_clipped_grad(loss)(jnp.ones((1000, 4)), jnp.arange(50))
    assert (explain.method, explain.leaves[0].norm_by) == ("ghost", "rows")
    assert explain.costs["one_pass"] > 10 > explain.costs["ghost"]
