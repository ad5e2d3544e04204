"""Some of the losses that `python -m tests.per_example.random_programs` tries."""

import jax
import pytest

from tests.per_example.random_programs import check


@pytest.mark.parametrize("seed", range(4, 24, 4))
def test_clipped_gradients_of_random_losses_are_those_of_float64(seed):
    with jax.numpy_rank_promotion("allow"):
        check(seed)
