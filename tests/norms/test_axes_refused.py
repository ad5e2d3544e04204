"""Mesh axes that contradict types, meshes or specs are refused."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
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
        clipper = build()
        return clipper.update(updates, clipper.init(params), params)[0]

    updates = {name: UPDATES[name] for name in specs}
    jax.eval_shape(
        jax.shard_map(
            body,
            mesh=mesh_of((2, 2)),
            in_specs=(specs, specs),
            out_specs=specs,
            **options,
        ),
        updates,
        updates,
    )


REFUSED = {
    "a name where a leaf is replicated": (
        partial(optaxclip.clip_by_global_norm, mesh_axes=("x", "y")),
        r"mesh_axes=\('x', 'y'\).*'bias' is the same on all devices along 'x', 'y'",
    ),
    "a spec where a leaf is replicated": (
        partial(optaxclip.clip_by_global_norm, mesh_axes=SPECS | {"bias": P("y")}),
        r"mesh_axes=P\w*\('y',?\).*'bias' is the same on all devices along 'y'",
    ),
    "an axis that is left out": (
        partial(
            optaxclip.clip_by_tensor_norm, mesh_axes=SPECS | {"grid": P(None, "x")}
        ),
        r"'grid' also differs along 'y'",
    ),
    "a leaf that is called replicated": (
        partial(
            optaxclip.clip_by_group_norm,
            labels=LABELS,
            mesh_axes=SPECS | {"folded": P()},
        ),
        r"folded' also differs along 'x', 'y'",
    ),
    "units without specs": (
        optaxclip.clip_by_unitwise_norm,
        r"'columns'.*not which of its dimensions.*tree of PartitionSpecs",
    ),
    "weights without specs": (
        partial(optaxclip.adaptive_grad_clip),
        r"'columns'.*tree of PartitionSpecs",
    ),
    "layers without specs": (
        partial(optaxclip.clip_by_tensor_rms, stacked=STACKED),
        r"'layers'.*tree of PartitionSpecs",
    ),
    "a spec with too many dimensions": (
        partial(optaxclip.clip_by_global_norm, mesh_axes=SPECS | {"gain": P("x")}),
        r"more entries than the leaf 'gain' of shape \(\) has dimensions",
    ),
    "a leaf without a spec": (
        partial(optaxclip.clip_by_global_norm, mesh_axes={"bias": P()}),
        r"axes has no value for the leaf 'columns'",
    ),
    "a spec without a leaf": (
        partial(optaxclip.clip_by_global_norm, mesh_axes=SPECS | {"head": P()}),
        r"axes has a value for 'head'",
    ),
    "an axis that is not there": (
        partial(optaxclip.clip_by_global_norm, mesh_axes="model"),
        r"mesh_axes='model': there is no such axis",
    ),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_axes_that_contradict_the_types_are_refused(wrong):
    build, text = REFUSED[wrong]
    with pytest.raises(ValueError, match=text):
        tried(partial(build, 0.5))


@pytest.mark.parametrize(
    "axes",
    [SPECS | {"folded": P("model")}, SPECS | {"folded": P(("x", "model"))}],
    ids=["alone", "beside another"],
)
def test_a_spec_that_names_no_axis_of_the_mesh_is_refused(axes):
    with pytest.raises(ValueError, match=r"'model'.*there is no such axis"):
        tried(
            partial(optaxclip.clip_by_global_norm, 0.5, mesh_axes=axes), check_vma=False
        )


def test_units_that_are_summed_whole_need_no_specs():
    tried(lambda: optaxclip.clip_by_unitwise_norm(0.5, axis=(0, 1)), FULL)
    tried(lambda: optaxclip.adaptive_grad_clip(0.5), {"bias": P(), "gain": P()})
    with pytest.raises(ValueError, match="tree of PartitionSpecs"):
        tried(
            lambda: optaxclip.clip_by_unitwise_norm(0.5, axis=0, mesh_axes="x"),
            FULL,
            check_vma=False,
        )


def test_an_optimizer_that_skips_names_itself_for_an_absent_axis():
    optimizer = optaxclip.skip_nonfinite(optax.sgd(1.0), mesh_axes="x")
    with pytest.raises(ValueError, match=r"^skip_nonfinite: mesh_axes='x'"):
        apply(optimizer, {"w": jnp.ones(2)})


@pytest.mark.parametrize("axes", ["x", ("x", "y"), {"w": "x"}], ids=str)
def test_names_of_absent_axes_are_refused_under_jit_and_pmap(axes):
    clipper = optaxclip.clip_by_global_norm(0.5, mesh_axes=axes)
    tree = {"w": jnp.ones((2, 3))}
    with pytest.raises(ValueError, match=r"mesh_axes='x'.*there is no such axis here"):
        jax.jit(clipper.update)(tree, optaxclip.clip_by_global_norm(0.5).init(tree))
    with pytest.raises(ValueError, match=r"mesh_axes='x'.*there is no such axis here"):
        jax.pmap(
            lambda tree: clipper.update(
                tree, optaxclip.clip_by_global_norm(0.5).init(tree)
            )[0],
            axis_name="i",
        )({"w": jnp.ones((1, 3))})
    with pytest.raises(ValueError, match=r"check_replicated.*'x'"):
        optaxclip.check_replicated(tree, "x")


@pytest.mark.parametrize("axes", [3, "", (), ("x", 2), {"w": 1.5}], ids=str)
def test_what_cannot_be_mesh_axes_is_refused(axes):
    with pytest.raises((TypeError, ValueError), match="axes"):
        clipper = optaxclip.clip_by_global_norm(0.5, mesh_axes=axes)
        clipper.update({"w": jnp.ones(3)}, clipper.init({"w": jnp.ones(3)}))


@pytest.mark.parametrize("check_vma", [True, False], ids=["typed", "untyped"])
def test_a_vector_is_one_over_all_devices(check_vma):
    """A device's part of a matrix may be a single row, the leaf is none."""
    specs = {"matrix": P("x", None), "row": P(None, "x"), "split": P("x", None)}
    shapes = {"matrix": (4, 6), "row": (1, 8), "split": (8, 1)}
    tree = sharded.random_tree(3, shapes)
    units = {"matrix": P(), "row": P(), "split": P()}
    norms = on_each_part(
        partial(optaxclip.unitwise_norm, mesh_axes=specs),
        mesh_of((4,), ("x",)),
        (specs,),
        units,
        check_vma=check_vma,
    )(tree)
    wanted = {name: oracles.unitwise_norm(x) for name, x in tree.items()}
    assert {name: x.shape for name, x in norms.items()} == {
        "matrix": (1, 6),
        "row": (1, 1),
        "split": (1, 1),
    }
    assert_close(norms, wanted)


def test_a_single_row_of_a_split_leaf_wants_its_spec():
    with pytest.raises(ValueError, match=r"not which of its dimensions"):
        on_each_part(
            optaxclip.unitwise_norm, mesh_of((4,), ("x",)), P("x", None), P(None, None)
        )(np.ones((4, 6), np.float32))


def test_values_that_wait_for_their_sum_are_refused():
    mesh = mesh_of((2, 2), kind=AxisType.Explicit)
    with jax.set_mesh(mesh):
        left, right = (
            jax.device_put(np.ones((4, 4), np.float32), NamedSharding(mesh, spec))
            for spec in (P(None, "y"), P("y", None))
        )

        def body(left, right):
            product = jnp.einsum(
                "ij,jk->ik", left, right, out_sharding=P(None, None, unreduced={"y"})
            )
            clipper = optaxclip.clip_by_global_norm(0.5)
            return clipper.update({"w": product}, clipper.init({"w": left}))[0]

        with pytest.raises(
            ValueError, match=r"the leaf 'w' is not yet summed over 'y'"
        ):
            jax.eval_shape(body, left, right)
