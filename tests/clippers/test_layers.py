"""Layers stacked on any axes are clipped as if they were leaves of their own.

Held for every method with `stacked`, over some steps, one of which spikes.
"""

import inspect
from functools import cache, partial

import chex
import jax
import numpy as np
import optax
import pytest

from optaxclip import clip_by_tensor_norm, rules
from tests.methods import METHODS

EPS = np.finfo(np.float32).eps
STEPS = 4

# name: (axes of the layers, shapes, with 3 layers, or 3 layers of 2 experts)
LAYOUTS = {
    "leading axis": (1, {"wi": (3, 4, 5), "wo": (3, 5, 4), "scale": (3, 4)}),
    "axis 1, as MaxText": ((1,), {"wi": (4, 3, 5), "wo": (5, 3, 4), "scale": (4, 3)}),
    "layers and experts": ((1, 2), {"wi": (4, 3, 2, 5), "wo": (5, 3, 2, 4)}),
    "experts behind": ((0, 2), {"wi": (3, 4, 2, 5), "wo": (3, 5, 2, 4)}),
}
METHODS_OF_LAYERS = {}
for name, method in METHODS.items():
    options = inspect.signature(method.function).parameters
    # Recorders clip nothing.
    if "stacked" in options and not name.startswith("record"):
        METHODS_OF_LAYERS[name] = {"scope": "tensor"} if "scope" in options else {}
LEARN = ["adaclip", "adagc", "adagn", "aggc", "autoclip", "zclip"]


def axes_of(stacked):
    return tuple(range(stacked)) if isinstance(stacked, int) else stacked


def layer_by_layer(tree, stacked):
    """Each layer as a leaf: {"wi": {"0": ..., "1": ...}}."""
    axes, found = axes_of(stacked), {}
    for name, x in tree.items():
        first = np.moveaxis(x, axes, range(len(axes)))
        layers = first.reshape(-1, *first.shape[len(axes) :])
        found[name] = {str(place): layer for place, layer in enumerate(layers)}
    return found


def random_trees(layout):
    """Weights, and gradients of some steps. One layer of one leaf explodes."""
    _, shapes = LAYOUTS[layout]
    random = np.random.default_rng(0)

    def tree():
        drawn = {name: random.standard_normal(shape) for name, shape in shapes.items()}
        return {name: np.float32(x) for name, x in drawn.items()}

    params, grads = tree(), [tree() for _ in range(STEPS)]
    grads[2]["wi"][..., 1, :] *= 100
    return params, grads


def run(clipper, params, grads):
    """The updates of each step, with one table that is never stacked."""
    table = np.float32([[3.0, 4.0, 0.5]])
    params = {"blocks": params, "table": table}
    state = clipper.init(params)
    update, found = jax.jit(clipper.update), []
    for tree in grads:
        updates, state = update({"blocks": tree, "table": table}, state, params)
        found.append(updates)
    return found


def made(name, **more):
    return METHODS[name].make(**METHODS_OF_LAYERS[name], **more)


@cache
def both(name, layout):
    """(updates of stacked leaves as layers, updates of layers that are leaves)."""
    stacked = LAYOUTS[layout][0]
    params, grads = random_trees(layout)
    clipper = made(name, stacked={"blocks": stacked, "table": None})
    together = run(clipper, params, grads)
    apart = run(
        made(name),
        layer_by_layer(params, stacked),
        [layer_by_layer(tree, stacked) for tree in grads],
    )
    for updates in together:
        blocks = {name: np.asarray(x) for name, x in updates["blocks"].items()}
        updates["blocks"] = layer_by_layer(blocks, stacked)
    return together, apart


def test_every_clipper_that_learns_takes_layers():
    assert set(LEARN) < set(METHODS_OF_LAYERS)
    learning = {name for name in METHODS_OF_LAYERS if METHODS[name].learns}
    # It remembers dead rows, and clips nothing.
    assert sorted(learning - {"record_health"}) == LEARN


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", METHODS_OF_LAYERS)
@pytest.mark.slow
def test_stacked_layers_are_clipped_as_leaves_are(name, layout):
    together, apart = both(name, layout)
    # The singular values of a matrix are as exact as those of the largest allow.
    rtol = 64 * EPS if "spectral" in name else 8 * EPS
    for have, want in zip(together, apart, strict=True):
        for one, other in zip(*map(jax.tree.leaves, (have, want)), strict=True):
            atol = rtol * float(np.max(np.abs(other))) if "spectral" in name else 0
            np.testing.assert_allclose(one, other, rtol, atol)


@pytest.mark.parametrize("name", METHODS_OF_LAYERS)
@pytest.mark.slow
def test_the_spike_of_one_layer_is_clipped(name):
    together, _ = both(name, "axis 1, as MaxText")
    _, grads = random_trees("axis 1, as MaxText")
    spike = np.linalg.norm(together[2]["blocks"]["wi"]["1"])
    assert spike < 0.9 * np.linalg.norm(grads[2]["wi"][:, 1])


RULES = {
    "share": rules.share_of_params,
    "minimum": lambda x: rules.minimum(rules.growth(1.2), x),
    "warm-up": lambda x: rules.warm_up(2, x, rules.z_score(0.5, 0.5, warmup=1)),
    "steps of a warm-up": lambda x: rules.warm_up(x, 0.5, rules.growth(1.2)),
    "z-score": lambda x: rules.z_score(x, 0.5, warmup=1),
}


@pytest.mark.parametrize("name", RULES)
def test_a_number_of_a_rule_may_be_one_for_each_layer(name):
    rule, numbers = RULES[name], np.float32([0.3, 1.7, 0.9])
    params, grads = random_trees("layers and experts")
    layers = partial(layer_by_layer, stacked=(1,))
    together = clip_by_tensor_norm(rule(numbers.reshape(1, 3, 1, 1)), stacked=(1,))
    apart = optax.partition(
        {str(layer): clip_by_tensor_norm(rule(x)) for layer, x in enumerate(numbers)},
        lambda tree: {name: {layer: layer for layer in tree[name]} for name in tree},
    )
    state, other = together.init(params), apart.init(layers(params))
    for tree in grads:
        updates, state = jax.jit(together.update)(tree, state, params)
        wanted, other = apart.update(layers(tree), other, layers(params))
        chex.assert_trees_all_close(layers(updates), wanted, rtol=8 * EPS)


def test_a_rule_that_learns_may_begin_with_a_number_for_each_layer():
    start = np.array([1.0, 2.0, 3.0], np.float32).reshape(3, 1, 1)
    clipper = clip_by_tensor_norm(rules.quantile_tracker(start=start), stacked=1)
    grads = {"w": np.ones((3, 2, 2), np.float32), "v": np.ones((3, 2, 4), np.float32)}
    _, state = clipper.update(grads, clipper.init(grads))
    np.testing.assert_array_equal(state.limit, [1, 2, 3, 1, 2, 3])


@pytest.mark.parametrize("depth", [None, 2], ids=["one tensor", "a second stack"])
def test_in_a_tree_of_limits_each_leaf_has_its_numbers(depth):
    limits = {"blocks": np.float32([[1.0], [2.0], [9.0]]), "head": 1.0}
    grads = {"blocks": np.full((3, 4), 2.0, np.float32), "head": np.float32([3.0, 4.0])}
    wanted = [1, 2, 9, 1]
    if depth:
        limits["head"] = np.full((depth, 1), 0.5, np.float32)
        grads["head"] = np.ones((depth, 4), np.float32)
        wanted = [1, 2, 9, 0.5, 0.5]
    stacked = {"blocks": 1, "head": depth and 1}
    clipper = clip_by_tensor_norm(limits, stacked=stacked)
    updates, state = clipper.update(grads, clipper.init(grads))
    np.testing.assert_array_equal(state.limit, wanted)
    # The layers have norms of 4: the last one is below its limit.
    blocks = np.repeat([[0.5], [1.0], [2.0]], 4, axis=1)
    np.testing.assert_allclose(updates["blocks"], blocks, rtol=8 * EPS)
