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
from tests import sharded
from tests.helpers import only_by_a_cpu
from tests.norms.modes import NO_TYPES, typed_or_not
from tests.sharded import (
    CASES,
    PARAMS,
    SPECS,
    UPDATES,
    mesh_of,
    on_each_part,
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

WHOLE = dict.fromkeys(SPECS, P())


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


ONE_VECTOR = {
    "typed, global": (optaxclip.clip_by_global_norm, "auto", {}),
    "untyped, global": (optaxclip.clip_by_global_norm, MANY_SPECS, NO_TYPES),
    "typed, tensors": (optaxclip.clip_by_tensor_norm, "auto", {}),
}


@pytest.mark.parametrize("name", ONE_VECTOR)
@pytest.mark.slow
def test_a_clip_of_64_leaves_is_one_all_reduce_of_one_array(name):
    build, axes, options = ONE_VECTOR[name]
    program = in_shard_map(build(0.5, mesh_axes=axes), **options)
    assert compiled(program, MANY) == [("all-reduce", 1)]


@pytest.mark.parametrize("name", CASES)
@only_by_a_cpu
def test_every_clipper_asks_other_devices_as_seldom_as_can_be(name):
    # Units that stay split over x can not share a collective with those that are summed
    # over it. Weights are measured apart from gradients.
    case = CASES[name]
    most = (2 if case.keeps else 1) * (2 if case.relative else 1)
    # These divide by the largest element first.
    most += name.endswith(("ord=1", "ord=3"))

    def body(*trees):
        return sharded.clip(name, SPECS, *trees)[0]

    program = on_each_part(body, mesh_of((2, 4)), (SPECS, SPECS), SPECS)
    text = program.lower(UPDATES, PARAMS).as_text()
    assert 1 <= text.count("stablehlo.all_reduce") <= most
    assert not re.search(COLLECTIVES.replace("-", "_").partition("|")[2], text)


@pytest.mark.parametrize("axes", ["auto", WHOLE, None], ids=["auto", "specs", "none"])
@typed_or_not
@pytest.mark.slow
def test_where_nothing_is_split_nothing_is_asked(axes, options):
    if axes is WHOLE and not options:
        pytest.skip("types say so already")

    def body(*trees):
        return [sharded.clip(name, axes, *trees)[0] for name in sharded.CLIPPERS]

    specs = (WHOLE, WHOLE), [WHOLE] * len(sharded.CLIPPERS)
    program = on_each_part(body, mesh_of((2, 4)), *specs, **options)
    assert "all_reduce" not in program.lower(UPDATES, PARAMS).as_text()


def test_after_pmean_pmap_asks_no_more():
    clipper = optaxclip.clip_by_global_norm(0.5)
    program = jax.pmap(partial(one_step, clipper), axis_name="i")
    replicas = {name: np.stack([x] * 8) for name, x in UPDATES.items()}
    assert compiled(program, replicas) == []


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
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


def test_the_count_sees_gradients_that_travel():
    mesh = mesh_of((2, 4))
    x = place({"w": np.ones((6, 16), np.float32)}, mesh, {"w": P(None, "x")})["w"]
    assert "all-gather" in dict(compiled(jax.jit(jax.numpy.vdot), x, x))


def test_units_summed_over_different_axes_share_one_collective():
    specs = {"a": P("x", None), "b": P("y", None)}
    tree = {"a": np.ones((4, 4), np.float32), "b": np.ones((4, 3), np.float32)}
    measure = partial(optaxclip.unitwise_norm, mesh_axes=specs)
    program = on_each_part(measure, mesh_of((2, 2)), (specs,), P())
    assert program.lower(tree).as_text().count("stablehlo.all_reduce") == 1


@only_by_a_cpu
def test_what_every_device_holds_counts_once_in_the_one_vector():
    specs = {"a": P("x"), "b": P(), "c": P("x")}
    tree = {name: np.ones(4, np.float32) for name in specs}
    program = on_each_part(optaxclip.tensor_norm, mesh_of((2, 2)), (specs,), P())
    text = program.lower(tree).as_text()
    assert text.count("stablehlo.all_reduce") == 1 and "tensor<9xf32>" in text
    norms = {name: float(x) for name, x in program(tree).items()}
    assert norms == dict.fromkeys(specs, 2.0)
