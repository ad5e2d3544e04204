"""Arrays inside objects, as flax NNX has them: its optimizer gives boxes to `init`,
arrays to `update`, and puts the state into boxes of another kind.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from tests.helpers import random_tree
from tests.methods import ALONE, METHODS

WITH_METRICS = [
    name
    for name, method in METHODS.items()
    if method.leaves != ALONE and name not in ("clip_grads", "reset_momentum")
]


class Box:
    """One array, and how it becomes one."""

    def __init__(self, value):
        self.value = value

    def __jax_array__(self):
        return self.value


jax.tree_util.register_pytree_with_keys(
    Box,
    lambda box: (((jax.tree_util.GetAttrKey("value"), box.value),), None),
    lambda _, values: Box(*values),
)


def two_leaves(seed, scale=1.0):
    tree = random_tree("float32", seed, scale)
    return {"kernel": tree["kernel"], "bias": tree["bias"]}


def boxed(tree):
    return jax.tree.map(Box, tree)


@cache
def plainly(name):
    """(the clipper's jitted update, [(updates, clipped, state) of each step]) without
    any box.
    """
    clipper, params = METHODS[name].make(), two_leaves(9)
    update, state, steps = jax.jit(clipper.update), clipper.init(params), []
    for seed in (1, 2):
        updates = two_leaves(seed, 3.0)
        clipped, state = update(updates, state, params)
        steps.append((updates, clipped, state))
    return clipper, update, steps


@pytest.mark.parametrize("boxes_in_update", [False, True])
@pytest.mark.parametrize("name", WITH_METRICS)
def test_boxes_change_nothing(name, boxes_in_update):
    (clipper, update, steps), params = plainly(name), two_leaves(9)
    state, put = clipper.init(boxed(params)), boxed if boxes_in_update else lambda x: x
    for updates, wanted, _ in steps:
        clipped, state = update(put(updates), state, put(params))
        jax.tree.map(np.testing.assert_array_equal, clipped, put(wanted))
    one, other = optaxclip.metrics(boxed(state)), optaxclip.metrics(steps[-1][2])
    jax.tree.map(np.testing.assert_array_equal, one, other)


class Opaque:
    """A box that JAX takes for a leaf."""

    def __init__(self, value):
        self.value = value

    def __jax_array__(self):
        return self.value


def test_a_box_that_holds_no_leaf_comes_back_as_it_is():
    tree = {"a": Opaque(optax.MaskedNode()), "b": jnp.array([3.0, 4.0])}
    clipped, norm = optaxclip.clip_grads(tree, 1.0)
    assert norm == 5.0
    np.testing.assert_allclose(clipped["b"], [0.6, 0.8], rtol=1e-6)
    assert clipped["a"] is tree["a"]
