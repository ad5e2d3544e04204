"""An axis that is named twice, once from the front and once from the back."""

import jax.numpy as jnp
import pytest

import optaxclip


@pytest.mark.parametrize("axis", [(0, -2), (1, 1)])
def test_an_axis_that_is_named_twice_raises(axis):
    with pytest.raises(ValueError, match=r"unitwise_norm: axis=\(.*the leaf 'w'"):
        optaxclip.unitwise_norm({"w": jnp.ones((2, 3))}, axis=axis)
