"""Arrays inside objects, as flax NNX, haliax and equinox have them.

The optimizer of NNX gives boxes to `init`, arrays to `update`, and puts the state into
boxes of another kind.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

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
    """A node around one array. JAX never asks a node for it, and haliax's raises."""

    def __init__(self, value):
        self.value = value

    def __jax_array__(self):
        raise ValueError("Please use `x.array` instead.")


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


@jax.tree_util.register_dataclass
@dataclass
class Bounded:
    """A weight that equinox's users write: a node that computes from its one leaf."""

    original: Any

    def __jax_array__(self):
        return jnp.tanh(self.original)


@jax.tree_util.register_dataclass
@dataclass
class LowRank:
    """A node of two leaves, as LoRA has it."""

    a: Any
    b: Any

    def __jax_array__(self):
        return self.a @ self.b


ADAPTERS = [
    (Bounded(np.float32([3.0, 4.0])), ["w"]),
    (Bounded({"x": np.float32([3.0]), "y": np.float32([4.0])}), ["w/x", "w/y"]),
    (LowRank(np.float32([[3.0], [0.0]]), np.float32([[4.0, 0.0]])), ["w/a", "w/b"]),
    # A frozen factor has no update, and the other one keeps its name.
    (LowRank(None, np.float32([[3.0, 4.0]])), ["w/b"]),
]


@pytest.mark.parametrize("grad, names", ADAPTERS)
def test_a_node_is_clipped_by_its_leaves_as_in_optax(grad, names):
    grads = {"w": jax.tree.map(jnp.asarray, grad)}
    optaxs, ours = optax.clip_by_global_norm(1.0), optaxclip.clip_by_global_norm(1.0)
    wanted, _ = optaxs.update(grads, optaxs.init(grads))
    clipped, state = ours.update(grads, ours.init(grads))
    assert state.norm == 5.0
    assert jax.tree.structure(clipped) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(clipped), jax.tree.leaves(wanted)):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    clipper = optaxclip.clip_by_tensor_norm(1.0)
    reported = optaxclip.metrics(clipper.init(grads))
    assert [name for name in names if f"clip/norm_before/{name}" in reported] == names


def test_a_frozen_leaf_of_a_node_of_params_is_left_out():
    params = {"w": LowRank(jnp.ones((2, 1)), jnp.ones((1, 2)))}
    grads = {"w": LowRank(None, jnp.full((1, 2), 3.0))}
    clipper = optaxclip.adaptive_grad_clip(0.1, axis=None)
    clipped, _ = clipper.update(grads, clipper.init(params), params)
    # The norm of the weight is root 2, so each of two equal numbers becomes 0.1.
    np.testing.assert_allclose(clipped["w"].b, np.full((1, 2), 0.1), rtol=1e-6)
    assert clipped["w"].a is None
