"""What devices say to each other, counted in the compiled programs."""

import re
from functools import partial

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optaxclip
from tests import oracles, sharded
from tests.helpers import only_by_a_cpu
from tests.sharded import (
    CASES,
    PARAMS,
    SPECS,
    UPDATES,
    mesh_of,
    on_each_part,
    on_four_devices,
    place,
)

COLLECTIVES = (
    "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|"
    "collective-broadcast"
)

# 64 leaves over both axes of a mesh, over one, over none, most of them split on the
# last dimension.
KINDS = [
    ((6, 16), P(None, "x")),
    ((16, 6), P("x", None)),
    ((8, 16), P("y", "x")),
    ((6, 16), P(None, ("x", "y"))),
    ((7,), P()),
    ((), P()),
]
MANY = {
    f"w{place:02}": np.full(KINDS[place % 6][0], 1 + place / 7, np.float32)
    for place in range(64)
}
MANY_SPECS = {f"w{place:02}": KINDS[place % 6][1] for place in range(64)}


def collectives(text):
    """(kind, operands) of every collective in a compiled program."""
    return [
        (kind, operands.count("%"))
        for kind, operands in re.findall(rf" ({COLLECTIVES})(?:-start)?\((.*?)\)", text)
    ]


def compiled(program, *arguments):
    return collectives(program.lower(*arguments).compile().as_text())


def one_step(clipper, updates):
    """Without the state: what is not asked for is not computed, as in a train step that
    does not log.
    """
    return clipper.update(updates, clipper.init(updates), updates)[0]


def in_shard_map(clipper, tree=MANY, specs=MANY_SPECS, **options):
    return on_each_part(
        partial(one_step, clipper), mesh_of((2, 4)), (specs,), specs, **options
    )


@pytest.mark.parametrize(
    ("axes", "options", "build"),
    [
        ("auto", {}, optaxclip.clip_by_global_norm),
        (MANY_SPECS, {"check_vma": False}, optaxclip.clip_by_global_norm),
        ("auto", {}, optaxclip.clip_by_tensor_norm),
    ],
    ids=[
        "typed-clip_by_global_norm",
        "untyped-clip_by_global_norm",
        "typed-clip_by_tensor_norm",
    ],
)
@pytest.mark.slow
def test_a_clip_of_64_leaves_is_one_all_reduce_of_one_array(build, axes, options):
    assert compiled(in_shard_map(build(0.5, mesh_axes=axes), **options), MANY) == [
        ("all-reduce", 1)
    ]


@pytest.mark.parametrize("name", CASES)
@only_by_a_cpu
def test_every_clipper_asks_other_devices_as_seldom_as_can_be(name):
    # Units that stay split over x can not share a collective with those that are summed
    # over it. Weights are measured apart from gradients.
    case = CASES[name]
    most = (2 if case.keeps else 1) * (2 if case.relative else 1)
    program = on_each_part(
        lambda *trees: sharded.clip(name, SPECS, *trees)[0],
        mesh_of((2, 4)),
        (SPECS, SPECS),
        SPECS,
    )
    text = program.lower(UPDATES, PARAMS).as_text()
    assert 1 <= text.count("stablehlo.all_reduce") <= most
    assert not re.search(
        "all_gather|all_to_all|collective_permute|collective_broadcast|reduce_scatter",
        text,
    )


WHOLE = dict.fromkeys(SPECS, P())


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ("auto", {}),
        ("auto", {"check_vma": False}),
        (WHOLE, {"check_vma": False}),
        (None, {}),
    ],
    ids=str,
)
@pytest.mark.slow
def test_where_nothing_is_split_nothing_is_asked(axes, options):
    def body(*trees):
        return [sharded.clip(name, axes, *trees)[0] for name in sharded.CLIPPERS]

    program = on_each_part(
        body,
        mesh_of((2, 4)),
        (WHOLE, WHOLE),
        [WHOLE] * len(sharded.CLIPPERS),
        **options,
    )
    assert "all_reduce" not in program.lower(UPDATES, PARAMS).as_text()


def test_after_pmean_pmap_asks_no_more():
    clipper = optaxclip.clip_by_global_norm(0.5)
    program = jax.pmap(partial(one_step, clipper), axis_name="i")
    assert (
        compiled(program, {name: np.stack([x] * 8) for name, x in UPDATES.items()})
        == []
    )


@pytest.mark.parametrize(
    "kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"]
)
@pytest.mark.slow
@only_by_a_cpu
def test_under_jit_there_are_no_more_all_reduces_than_in_optax(kind):
    mesh = mesh_of((2, 4), kind=kind)
    with jax.set_mesh(mesh):
        tree = place(MANY, mesh, MANY_SPECS)
        ours, theirs = (
            compiled(jax.jit(partial(one_step, clip(0.5))), tree)
            for clip in (optaxclip.clip_by_global_norm, optax.clip_by_global_norm)
        )
    assert 1 <= len(ours) <= len(theirs)
    assert {kind for kind, _ in ours} == {"all-reduce"}


@pytest.mark.parametrize(
    "kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"]
)
@pytest.mark.slow
@only_by_a_cpu
def test_large_gradients_do_not_travel(kind):
    """A CPU may sum these twice, and each sum may ask."""
    mesh = mesh_of((2, 4), kind=kind)
    specs = {"a": P("x", None), "b": P(None, "y"), "c": P("x", "y")}
    with jax.set_mesh(mesh):
        tree = place(
            {name: np.ones((256, 256), np.float32) for name in specs}, mesh, specs
        )
        asked = {
            kind
            for build in (
                optaxclip.clip_by_global_norm,
                optaxclip.clip_by_unitwise_norm,
            )
            for kind, _ in compiled(jax.jit(partial(one_step, build(0.5))), tree)
        }
    assert asked == {"all-reduce"}


@only_by_a_cpu
def test_a_large_leaf_on_a_mesh_is_right_at_every_size():
    mesh, spec = mesh_of((2, 4)), {"w": P("x", "y")}
    for scale in (1e-30, 1.0, 1e30):
        values = np.full((256, 256), scale, np.float32)
        leaf = place({"w": values}, mesh, spec)
        norm = jax.jit(optaxclip.global_norm)(leaf)
        np.testing.assert_allclose(norm, oracles.norm([values]), 1e-6)


def test_the_count_sees_gradients_that_travel():
    mesh = mesh_of((2, 4))
    x = place({"w": np.ones((6, 16), np.float32)}, mesh, {"w": P(None, "x")})
    assert "all-gather" in dict(
        compiled(jax.jit(lambda tree: jax.numpy.vdot(tree["w"], tree["w"])), x)
    )


def test_units_summed_over_different_axes_share_one_collective():
    specs = {"a": P("x", None), "b": P("y", None)}
    tree = {"a": np.ones((4, 4), np.float32), "b": np.ones((4, 3), np.float32)}
    text = (
        jax.jit(
            on_four_devices(
                lambda x: optaxclip.unitwise_norm(x, mesh_axes=specs),
                (specs,),
                {"a": P(), "b": P()},
            )
        )
        .lower(tree)
        .as_text()
    )
    assert text.count("stablehlo.all_reduce") == 1


@only_by_a_cpu
def test_what_every_device_holds_counts_once_in_the_one_vector():
    specs = {"a": P("x"), "b": P(), "c": P("x")}
    tree = {name: np.ones(4, np.float32) for name in specs}
    program = jax.jit(
        on_four_devices(optaxclip.tensor_norm, (specs,), {"a": P(), "b": P(), "c": P()})
    )
    text = program.lower(tree).as_text()
    assert text.count("stablehlo.all_reduce") == 1 and "tensor<9xf32>" in text
    assert {name: float(x) for name, x in program(tree).items()} == dict.fromkeys(
        specs, 2.0
    )
