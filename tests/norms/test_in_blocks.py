"""Which norms are the rows of one block, without measuring any."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optaxclip._norms._in_blocks import (
    Row,
    places_of,
    stack_by_selects,
    stacked,
)


def test_scalars_are_rows_and_a_lone_array_is_not():
    wide, long = ((1, 4),), ((1, 9),)
    found = places_of([wide, (), long, wide])
    assert found == [(0, 0), (1, 0), (2, None), (0, 1)]


def test_arrays_go_into_blocks_of_at_most_two():
    wide = ((1, 4),)
    assert places_of([()] * 7) == [(0, row) for row in range(7)]
    assert places_of([wide] * 2) == [(0, 0), (0, 1)]
    assert places_of([wide] * 5) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, None)]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("shape", [(), (3,), (1, 4)])
def test_selects_make_the_rows_that_a_stack_has(shape, count):
    rows = [jnp.full(shape, i + 1.0) for i in range(count)]
    np.testing.assert_array_equal(stack_by_selects(rows), np.stack(rows))


def operations(numbers_of, *arrays):
    """What XLA is asked to do to stack the numbers."""
    made = jax.make_jaxpr(lambda *x: stacked(numbers_of(*x)))(*arrays)
    return {str(equation.primitive) for equation in made.eqns}


def test_rows_of_a_vector_in_order_are_that_vector():
    vector = jnp.arange(3.0)
    assert stacked([Row(vector, row) for row in range(3)]) is vector


@pytest.mark.parametrize("rows", [[2, 0, 1], [0, 1], [1]])
def test_other_rows_of_a_vector_are_taken_out_together(rows):
    vector = jnp.arange(3.0)
    found = stacked([Row(vector, row) for row in rows])
    np.testing.assert_array_equal(found, rows)

    def numbers(x):
        return [Row(x, row) for row in rows]

    assert "concatenate" not in operations(numbers, vector)


def test_rows_of_several_vectors_and_numbers_are_stacked():
    one, other = jnp.arange(3.0), 10 + jnp.arange(3.0)
    found = stacked([Row(other, 2), jnp.float32(7), Row(one, 1)])
    np.testing.assert_array_equal(found, [12, 7, 1])
    np.testing.assert_array_equal(stacked([Row(one, 1), Row(other, 1)]), [1, 11])
