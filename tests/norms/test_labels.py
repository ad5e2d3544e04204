"""Labels of groups, where their order by value is not that of their texts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip

GRADS = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([30.0, 40.0])}
LABELS = {"a": 2, "b": 10}


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_norms_of_numbered_groups_are_their_own(wrap):
    found = wrap(lambda grads: optaxclip.group_norm(grads, LABELS))(GRADS)
    assert {label: float(norm) for label, norm in found.items()} == {2: 5.0, 10: 50.0}


def test_limits_of_numbered_groups_are_their_own():
    clipper = optaxclip.clip_by_group_norm({2: 1.0, 10: 100.0}, LABELS)
    clipped, state = clipper.update(GRADS, clipper.init(GRADS))
    np.testing.assert_allclose(clipped["a"], [0.6, 0.8], rtol=1e-6)
    np.testing.assert_array_equal(clipped["b"], GRADS["b"])
    found = {name: float(entry.norm) for name, entry in state.by_name().items()}
    assert found == {"2": 5.0, "10": 50.0}


def test_norms_and_limits_given_to_numbered_groups_are_their_own():
    clipper = optaxclip.clip_by_group_norm(None, LABELS)
    given = {"grad_norm": {2: 10.0, 10: 50.0}, "limit": {2: 5.0, 10: 100.0}}
    clipped, _ = clipper.update(GRADS, clipper.init(GRADS), **given)
    np.testing.assert_allclose(clipped["a"], [1.5, 2.0], rtol=1e-6)
    np.testing.assert_array_equal(clipped["b"], GRADS["b"])
