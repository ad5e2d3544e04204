"""Which norms are the rows of one block, without measuring any."""

import jax.numpy as jnp
import numpy as np
import pytest

from optaxclip._norms._in_blocks import places_of, stack_by_selects


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
