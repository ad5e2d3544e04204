"""Arrays inside objects, as flax NNX has them: its optimizer gives boxes to `init`,
arrays to `update`, and puts the state into boxes of another kind.
"""

from functools import cache

import jax
import numpy as np
import optax
import pytest

import optaxclip
from tests.helpers import random_tree


def by_path(tree):
    return jax.tree_util.tree_map_with_path(lambda path, x: str(path[-1]), tree)


by_global = optaxclip.clip_by_global_norm(0.5)
window = optaxclip.rules.windowed_quantile(0.5, 4)
z_score = optaxclip.rules.z_score(warmup=1)
CLIPPERS = {
    "clip_by_global_norm": by_global,
    "clip_by_tensor_norm of a rule": optaxclip.clip_by_tensor_norm(window),
    "clip_by_group_norm": optaxclip.clip_by_group_norm(0.5, by_path),
    "adaptive_grad_clip": optaxclip.adaptive_grad_clip(0.1),
    "clip_by_value": optaxclip.clip_by_value(0.1),
    "larc": optaxclip.larc(0.1),
    "clippy": optaxclip.clippy(),
    "adagc": optaxclip.adagc(warmup=1),
    "adaclip": optaxclip.adaclip(),
    "spam": optaxclip.spam(0.5, warmup=0),
    "carry_clipped": optaxclip.carry_clipped(by_global),
    "skip_spikes": optaxclip.skip_spikes(optax.sgd(1.0), z_score),
}


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
    clipper, params = CLIPPERS[name], two_leaves(9)
    update, state, steps = jax.jit(clipper.update), clipper.init(params), []
    for seed in (1, 2):
        updates = two_leaves(seed, 3.0)
        clipped, state = update(updates, state, params)
        steps.append((updates, clipped, state))
    return clipper, update, steps


@pytest.mark.parametrize("boxes_in_update", [False, True])
@pytest.mark.parametrize("name", CLIPPERS)
def test_boxes_change_nothing(name, boxes_in_update):
    (clipper, update, steps), params = plainly(name), two_leaves(9)
    state, put = clipper.init(boxed(params)), boxed if boxes_in_update else lambda x: x
    for updates, wanted, _ in steps:
        clipped, state = update(put(updates), state, put(params))
        jax.tree.map(np.testing.assert_array_equal, clipped, put(wanted))
    one, other = optaxclip.metrics(boxed(state)), optaxclip.metrics(steps[-1][2])
    jax.tree.map(np.testing.assert_array_equal, one, other)
