"""Layers on axis 1 give on several devices what they give on one, wherever the leaf is
split: along its layers, along a tensor's own axes, or both.
"""

from functools import cache, partial

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import optaxclip
from tests import sharded
from tests.helpers import apply
from tests.sharded import mesh_of, on_each_part

pytestmark = pytest.mark.slow

# Inputs, layers, outputs, and experts beside the layers. The leaves are split along
# different axes.
SHAPES = {
    "wi": (8, 4, 6),
    "wo": (6, 4, 8),
    "scale": (8, 4),
    "experts": (4, 2, 6, 8),
    "table": (10, 8),
}
SPECS = {
    "wi": P("x", "y"),
    "wo": P(None, "y", "x"),
    "scale": P(None, "y"),
    "experts": P("y", "x"),
    "table": P("x"),
}
STACKED = {"wi": (1,), "wo": (1,), "scale": (1,), "experts": 2, "table": None}
OPTIONS = {"scope": "tensor", "stacked": STACKED}
STEPS = 3
CLIPPERS = {
    "tensor norms": partial(optaxclip.clip_by_tensor_norm, 0.5, stacked=STACKED),
    "units": partial(optaxclip.clip_by_unitwise_norm, 0.5, stacked=STACKED),
    "agc": partial(optaxclip.adaptive_grad_clip, 0.5, per_tensor=True, stacked=STACKED),
    "larc": partial(optaxclip.larc, 0.1, stacked=STACKED),
    "clippy": partial(optaxclip.clippy, 0.1, 0.1, stacked=STACKED),
    # Two steps under the global limit, whose norm is that of all layers everywhere.
    "adagc": partial(optaxclip.adagc, warmup=2, **OPTIONS),
    "zclip": partial(optaxclip.zclip, 0.5, warmup=2, **OPTIONS),
    "autoclip": partial(optaxclip.autoclip, 50.0, 4, **OPTIONS),
    "autoclip of all": partial(optaxclip.autoclip, 50.0, 4),
    "adaclip": partial(optaxclip.adaclip, 0.9, stacked=STACKED),
    "adagn": partial(optaxclip.adagn, **OPTIONS),
}


def random_tree(seed, *steps):
    random = np.random.default_rng(seed)
    drawn = {k: random.standard_normal((*steps, *s)) for k, s in SHAPES.items()}
    return {name: np.float32(x) for name, x in drawn.items()}


PARAMS, GRADS = random_tree(1), random_tree(2, STEPS)


def scanned(clipper, params, grads):
    """The updates of all steps."""

    def step(state, tree):
        updates, state = clipper.update(tree, state, params)
        return state, updates

    return jax.lax.scan(step, clipper.init(params), grads)[1]


@cache
def on_one_device(name):
    return jax.jit(partial(scanned, CLIPPERS[name]()))(PARAMS, GRADS)


def assert_alike(have, name):
    for leaf, want in on_one_device(name).items():
        np.testing.assert_allclose(have[leaf], want, 2e-6)


@pytest.mark.parametrize("typed", [True, False], ids=["typed", "untyped"])
@pytest.mark.parametrize("name", CLIPPERS)
def test_layers_in_shard_map_equal_those_on_one_device(name, typed):
    mesh = mesh_of((2, 4), ("x", "y"))
    clipper = CLIPPERS[name](mesh_axes=SPECS)
    of_steps = {leaf: P(None, *spec) for leaf, spec in SPECS.items()}
    body = partial(scanned, clipper)
    specs = (SPECS, of_steps), of_steps
    have = on_each_part(body, mesh, *specs, check_vma=typed)(PARAMS, GRADS)
    assert_alike(have, name)


@pytest.mark.parametrize("name", ["tensor norms", "units", "larc", "zclip"])
def test_layers_in_shard_map_are_the_same_with_x64(name):
    with jax.enable_x64(True):
        test_layers_in_shard_map_equal_those_on_one_device(name, typed=True)


@pytest.mark.parametrize("name", CLIPPERS)
def test_layers_under_jit_equal_those_on_one_device(name):
    mesh = mesh_of((2, 4), ("x", "y"))
    of_steps = {leaf: P(None, *spec) for leaf, spec in SPECS.items()}
    params = sharded.place(PARAMS, mesh, SPECS)
    grads = sharded.place(GRADS, mesh, of_steps)
    have = jax.jit(partial(scanned, CLIPPERS[name]()))(params, grads)
    assert_alike(have, name)


@pytest.mark.parametrize("typed", [True, False], ids=["typed", "untyped"])
def test_constraints_in_shard_map_equal_those_on_one_device(typed):
    def body(params, updates, mesh_axes=SPECS):
        units = optaxclip.clip_by_unitwise_norm(
            0.5, stacked=STACKED, nonfinite="zero", mesh_axes=mesh_axes
        )
        return apply(optaxclip.constrain(units), updates, params)[0]

    updates = {name: x[0] for name, x in GRADS.items()}
    updates["table"] = np.full_like(updates["table"], np.nan)
    mesh = mesh_of((2, 4), ("x", "y"))
    program = on_each_part(body, mesh, (SPECS, SPECS), SPECS, check_vma=typed)
    have, want = program(PARAMS, updates), body(PARAMS, updates, "auto")
    for leaf, x in want.items():
        np.testing.assert_allclose(have[leaf], x, 2e-6, 2e-7)
    assert not np.any(have["table"])


def test_layers_are_counted_over_all_devices():
    # Each of the two devices has four layers of one leaf and all four of the other.
    tree = {"split": np.ones((8, 3), np.float32), "whole": np.ones((4, 3), np.float32)}
    specs = {"split": P("x"), "whole": P()}
    for norm in (optaxclip.tensor_norm, optaxclip.unitwise_norm):
        measure = partial(norm, stacked=1, mesh_axes=specs)
        with pytest.raises(ValueError, match="8 in 'split' and 4 in 'whole'"):
            on_each_part(measure, mesh_of((2,), ("x",)), (specs,), specs)(tree)
