"""Mesh axes that contradict types, meshes or specs are refused."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optaxclip
from tests import oracles, sharded
from tests.helpers import apply
from tests.norms.modes import FULL
from tests.sharded import (
    LABELS,
    SPECS,
    STACKED,
    UPDATES,
    assert_close,
    mesh_of,
    on_each_part,
)


def tried(build, specs=SPECS, **options):
    """Traces one step in shard_map, where all that can be wrong must be seen."""

    def body(updates, params):
        return apply(build(), updates, params)[0]

    updates = {name: UPDATES[name] for name in specs}
    program = on_each_part(body, mesh_of((2, 2)), (specs, specs), specs, **options)
    jax.eval_shape(program, updates, updates)


by_norm = optaxclip.clip_by_global_norm
by_tensor = optaxclip.clip_by_tensor_norm
by_unit = optaxclip.clip_by_unitwise_norm
by_group = partial(optaxclip.clip_by_group_norm, labels=LABELS)
REFUSED = {
    "a name where a leaf is replicated": (
        partial(by_norm, mesh_axes=("x", "y")),
        r"mesh_axes=\('x', 'y'\).*'bias' is the same on all devices along 'x', 'y'",
    ),
    "a spec where a leaf is replicated": (
        partial(by_norm, mesh_axes=SPECS | {"bias": P("y")}),
        r"mesh_axes=P\w*\('y',?\).*'bias' is the same on all devices along 'y'",
    ),
    "an axis that is left out": (
        partial(by_tensor, mesh_axes=SPECS | {"grid": P(None, "x")}),
        r"'grid' also differs along 'y'",
    ),
    "a leaf that is called replicated": (
        partial(by_group, mesh_axes=SPECS | {"folded": P()}),
        r"folded' also differs along 'x', 'y'",
    ),
    "units without specs": (
        by_unit,
        r"'columns'.*not which of its dimensions.*tree of PartitionSpecs",
    ),
    "layers without specs": (
        partial(optaxclip.clip_by_tensor_rms, stacked=STACKED),
        r"'layers'.*tree of PartitionSpecs",
    ),
    "a spec with too many dimensions": (
        partial(by_unit, mesh_axes=SPECS | {"gain": P(None, "x")}),
        r"mesh_axes=P.*has more entries than a leaf of shape \(\) has dimensions",
    ),
    "a None for a split leaf, which means P()": (
        partial(by_norm, mesh_axes=SPECS | {"columns": None}),
        r"'columns' also differs along 'x'",
    ),
    "a leaf without a spec": (
        partial(by_norm, mesh_axes={"bias": P()}),
        r"axes has no value for the leaf 'columns'",
    ),
    "a spec without a leaf": (
        partial(by_norm, mesh_axes=SPECS | {"head": P()}),
        r"axes has a value for 'head'",
    ),
    "an axis that is not there": (
        partial(by_norm, mesh_axes=("x", "model")),
        r"mesh_axes='model': there is no such axis",
    ),
    "an axis twice": (
        partial(by_norm, mesh_axes=("x", "x")),
        r"mesh_axes=\('x', 'x'\) names a mesh axis twice",
    ),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_axes_that_contradict_the_types_are_refused(wrong):
    build, text = REFUSED[wrong]
    with pytest.raises(ValueError, match=text):
        tried(partial(build, 0.5))


@pytest.mark.parametrize("axis", ["model", ("x", "model")])
def test_a_spec_that_names_no_axis_of_the_mesh_is_refused(axis):
    build = partial(by_norm, 0.5, mesh_axes=SPECS | {"folded": P(axis)})
    with pytest.raises(ValueError, match=r"'model'.*there is no such axis"):
        tried(build, check_vma=False)


def test_units_that_are_summed_whole_need_no_specs():
    tried(lambda: by_unit(0.5, axis=(0, 1)), FULL)
    tried(lambda: optaxclip.adaptive_grad_clip(0.5), {"bias": P(), "gain": P()})
    with pytest.raises(ValueError, match="tree of PartitionSpecs"):
        tried(lambda: by_unit(0.5, axis=0, mesh_axes="x"), FULL, check_vma=False)


@pytest.mark.parametrize("check_vma", [True, False], ids=["typed", "untyped"])
def test_a_vector_is_one_over_all_devices(check_vma):
    """A device's part of a matrix may be a single row, the leaf is none."""
    specs = {"matrix": P("x", None), "row": P(None, "x"), "split": P("x", None)}
    tree = sharded.random_tree(3, {"matrix": (4, 6), "row": (1, 8), "split": (8, 1)})
    measure = partial(optaxclip.unitwise_norm, mesh_axes=specs)
    norms = on_each_part(
        measure, mesh_of((4,), ("x",)), (specs,), P(), check_vma=check_vma
    )(tree)
    assert [x.shape for x in norms.values()] == [(1, 6), (1, 1), (1, 1)]
    assert_close(norms, {name: oracles.unitwise_norm(x) for name, x in tree.items()})


def test_values_that_wait_for_their_sum_are_refused():
    mesh = mesh_of((2, 2), kind=AxisType.Explicit)
    specs = {"left": P(None, "y"), "right": P("y", None)}
    with jax.set_mesh(mesh):
        ones = dict.fromkeys(specs, np.ones((4, 4), np.float32))
        factors = sharded.place(ones, mesh, specs)

        def body(left, right):
            waits = P(None, None, unreduced={"y"})
            product = jnp.einsum("ij,jk->ik", left, right, out_sharding=waits)
            clipper = by_norm(0.5)
            return clipper.update({"w": product}, clipper.init({"w": left}))[0]

        text = r"the leaf 'w' is not yet summed over 'y'"
        with pytest.raises(ValueError, match=text):
            jax.eval_shape(body, **factors)
