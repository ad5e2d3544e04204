"""A state that was made for other rules, in a tree of limits."""

import jax.numpy as jnp
import pytest

import optaxclip
from optaxclip import rules

GRADS = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([6.0, 8.0])}
OTHERS = {
    "schedules": {"a": lambda step: 1.0, "b": 2.0},
    "shares": {"a": rules.share_of_params(0.1), "b": rules.share_of_params(0.2)},
    "joined": {"a": rules.minimum(1.0, 2.0), "b": 3.0},
    "growths": {"a": rules.growth(1.1), "b": rules.growth(1.2)},
}


@pytest.mark.parametrize("name", OTHERS)
def test_one_part_for_rules_of_their_own_raises(name):
    # The limits of rules that are no numbers were taken for NaN.
    state = optaxclip.clip_by_tensor_norm(1.0).init(GRADS)
    clipper = optaxclip.clip_by_tensor_norm(OTHERS[name])
    with pytest.raises(
        ValueError,
        match="clip_by_tensor_norm: state has one part for norms whose limits",
    ):
        clipper.update(GRADS, state, GRADS)
