"""Lookups beyond a table: the gradient leaves them out, and so must its norm."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from optaxclip import clipped_grad
from optaxclip.per_example import explain_clipped_grad

pytestmark = pytest.mark.slow

TABLE = np.arange(1.0, 7.0).reshape(3, 2)
# Row 1, and what is no row: 3 is beyond the end, and -4 before the beginning.
INDEX = np.array([[1, 3], [1, -4], [1, 1]])


def by_index(table, index):
    return table[index]


def filled(table, index):
    return table.at[index].get(mode="fill", fill_value=0.0)


@pytest.mark.parametrize("read", [by_index, filled])
@pytest.mark.parametrize("method", ["auto", "ghost", "one_pass"])
def test_a_row_beyond_the_table_has_no_gradient(read, method):
    def loss(table, index):
        return jnp.sum(read(table, index) ** 2)

    grad = clipped_grad(loss, 1.0, method=method)
    found = grad(jnp.array(TABLE), jnp.array(INDEX))
    # Row 1 is (3, 4). The gradient by it is 2 (3, 4) for each time that it is read.
    np.testing.assert_allclose(found.norms, [10.0, 10.0, 20.0], rtol=1e-6)
    # Three gradients of norm 1 in the direction of (3, 4), by 3 examples.
    np.testing.assert_allclose(found.grads[1], [0.6, 0.8], rtol=1e-5)


@pytest.mark.parametrize("beyond", [7, 2**32 - 3])
def test_a_clipped_index_has_the_gradient_of_its_row(beyond):
    def loss(table, index):
        return jnp.sum(jnp.take(table, index, 0, mode="clip") ** 2)

    grad = clipped_grad(loss, None, method="ghost")
    found = grad(jnp.array(TABLE), np.array([[1, beyond]], np.uint32))
    np.testing.assert_allclose(found.norms, [2 * np.sqrt(86.0)], rtol=1e-6)
    np.testing.assert_array_equal(found.grads, [[0, 0], [6, 8], [10, 12]])


@pytest.mark.parametrize("beyond", [7, 2**32 - 3])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_slice_beyond_the_table_has_the_gradient_of_the_last_rows(rows, beyond):
    def loss(table, index):
        found = [lax.dynamic_slice_in_dim(table, k, rows) for k in index]
        return jnp.sum(jnp.stack(found) ** 2)

    table, index = jnp.array(TABLE), np.array([[0, beyond], [2, 2]], np.uint32)
    found = clipped_grad(loss, None, mean=False, method="ghost")(table, index)
    # How often each row is read by each example. The gradient is 2 row for each time.
    reads = {1: [[1, 0, 1], [0, 0, 2]], 2: [[1, 2, 1], [0, 2, 2]]}[rows]
    grads = 2 * np.array(reads)[:, :, None] * TABLE
    norms = np.sqrt(np.sum(grads**2, (1, 2)))
    np.testing.assert_allclose(found.norms, norms, rtol=1e-6)
    np.testing.assert_allclose(found.grads, grads.sum(0), rtol=1e-6)


def test_a_row_of_a_large_table_is_not_a_gradient_of_all_rows():
    def loss(table, row):
        return jnp.sum(table[row] ** 2)

    explain = explain_clipped_grad(loss)(jnp.ones((1000, 4)), jnp.arange(50))
    assert (explain.method, explain.leaves[0].way) == ("ghost", "rows")
    assert explain.costs["one_pass"] > 10 > explain.costs["ghost"]
    assert "more than ten plain gradients: one_pass" in str(explain)
