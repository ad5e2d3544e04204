"""On sharded gradients every clipper gives what it gives on one device, and devices say
no more to each other than they must, counted in the compiled programs.
"""

import math
import re
from contextlib import nullcontext
from functools import partial

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optaxclip
from tests import sharded
from tests.helpers import only_by_a_cpu
from tests.norms.modes import NO_TYPES, typed_or_not
from tests.sharded import (
    CASES,
    PARAMS,
    SIZES,
    SPECS,
    UPDATES,
    mesh_of,
    on_each_part,
    only,
    place,
    replicas_agree,
    wanted,
)


def steps(mesh_axes, names):
    """Several clippers in one program: (updates, params) -> {name: clipped updates}."""
    return lambda updates, params: {
        name: sharded.clip(name, mesh_axes(CASES[name]), updates, params)[0]
        for name in names
    }


def under_jit(sizes, names, kind=AxisType.Auto):
    mesh = mesh_of(sizes, kind=kind)
    return jax.jit(steps(lambda case: "auto", names)), [
        place(tree, mesh, SPECS) for tree in (UPDATES, PARAMS)
    ]


def in_shard_map(sizes, names, mesh_axes, specs=SPECS, **options):
    mesh, body = mesh_of(sizes), steps(mesh_axes, names)
    of_names = dict.fromkeys(names, specs)
    program = on_each_part(body, mesh, (specs, specs), of_names, **options)
    return program, [place(tree, mesh, SPECS) for tree in (UPDATES, PARAMS)]


def in_pmap(sizes, names):
    count, specs = math.prod(sizes), only(("x",), SPECS)
    body, devices = steps(lambda case: specs, names), jax.devices()[:count]
    program = jax.pmap(body, axis_name="x", devices=devices)
    return program, [sharded.parts(tree, specs, count) for tree in (UPDATES, PARAMS)]


def auto_or(specs):
    return lambda case: specs if case.keeps else "auto"


MODES = {
    "jit": under_jit,
    "jit explicit": partial(under_jit, kind=AxisType.Explicit),
    "shard_map": partial(in_shard_map, mesh_axes=auto_or(SPECS)),
    "shard_map specs": partial(in_shard_map, mesh_axes=lambda case: SPECS),
    "shard_map untyped": partial(
        in_shard_map, mesh_axes=lambda case: SPECS, check_vma=False
    ),
    "shard_map over x": partial(
        in_shard_map,
        mesh_axes=auto_or(only(("x",), SPECS)),
        specs=only(("x",), SPECS),
        axis_names={"x"},
    ),
    "pmap": in_pmap,
}
# Tracing and compiling are what takes time. So each clipper runs once in each kind of
# program (arrays typed by their shardings, devices' parts with types and without), on
# two of the three meshes in turn; half of them in each mode that is like one of these,
# where XLA partitions alone, over one of two axes, and in pmap; and the others of the
# table in one mode. Those that keep dimensions take specs in each shard_map.
HALVES = {
    "jit": sharded.CLIPPERS[::2],
    "shard_map over x": sharded.CLIPPERS[1::2],
    "pmap": sharded.CLIPPERS[:2] + sharded.CLIPPERS[4:6],
}
RUNS = [
    (mode, SIZES[(i + j) % 3], HALVES.get(mode, sharded.CLIPPERS)[j::2])
    for i, mode in enumerate(MODES)
    if mode != "shard_map specs"
    for j in range(2)
]
RUNS += [
    (
        "shard_map specs",
        (3, 2),
        [name for name in CASES if name not in sharded.CLIPPERS or "group" in name],
    )
]


@pytest.fixture(
    scope="module", params=RUNS, ids=lambda x: f"{x[0]} {x[1][0]}x{x[1][1]} {x[2][-1]}"
)
def run(request):
    """(mode, the compiled program's text, {name: clipped updates}) for each mode and
    mesh.
    """
    mode, sizes, names = request.param
    mesh = mesh_of(sizes, kind=AxisType.Explicit)
    with jax.set_mesh(mesh) if "explicit" in mode else nullcontext():
        program, arguments = MODES[mode](sizes, names)
        compiled = program.lower(*arguments).compile()
        return mode, compiled.as_text(), compiled(*arguments)


def largest_change(have, want):
    """The largest relative difference of an element."""
    assert have.keys() == want.keys()
    ratios = [np.asarray(have[leaf], np.float64) / want[leaf] for leaf in want]
    return max(float(np.max(np.abs(ratio - 1))) for ratio in ratios)


def test_every_clipper_gives_what_it_gives_on_one_device(run):
    mode, _, results = run
    wrong = {}
    for name, clipped in results.items():
        if mode == "pmap":
            clipped = sharded.joined(clipped, only(("x",), SPECS))
        wrong[name] = largest_change(clipped, wanted(name))
        # There is something to clip.
        assert largest_change(wanted(name), sharded.exact(UPDATES)) > 0.1
    missed = {name: error for name, error in wrong.items() if not error < 1e-6}
    assert missed == {}


def test_all_devices_hold_the_same_bits_of_what_is_replicated(run):
    mode, _, results = run
    for clipped in results.values():
        if mode != "pmap":
            assert all(map(replicas_agree, clipped.values()))
            continue
        for leaf in ("bias", "gain"):
            assert len({np.asarray(row).tobytes() for row in clipped[leaf]}) == 1


TRAVELS = "all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast"


@only_by_a_cpu
def test_no_gradient_travels_between_devices(run):
    assert not re.search(f" ({TRAVELS})", run[1])


@pytest.mark.slow
def test_clipped_updates_stay_where_the_updates_were(run):
    mode, _, results = run
    for clipped in results.values():
        for name, x in clipped.items():
            spec = P("x") if mode == "pmap" else SPECS[name]
            there = NamedSharding(x.sharding.mesh, spec)
            assert x.sharding.is_equivalent_to(there, x.ndim)


COLLECTIVES = f"all-reduce|{TRAVELS}"

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


def one_step_in_shard_map(clipper, tree=MANY, specs=MANY_SPECS, **options):
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
    program = one_step_in_shard_map(build(0.5, mesh_axes=axes), **options)
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
    assert not re.search(TRAVELS.replace("-", "_"), text)


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
def test_norms_of_what_every_device_holds_are_not_sent():
    specs = {"a": P("x"), "b": P(), "c": P("x")}
    tree = {name: np.ones(4, np.float32) for name in specs}
    program = on_each_part(optaxclip.tensor_norm, mesh_of((2, 2)), (specs,), P())
    text = program.lower(tree).as_text()
    assert text.count("stablehlo.all_reduce") == 1 and "tensor<2xf64>" in text
    norms = {name: float(x) for name, x in program(tree).items()}
    assert norms == dict.fromkeys(specs, 2.0)


@pytest.mark.parametrize("name", ["spam", "carry_clipped"])
def test_buffers_are_split_as_weights_outside_jit_are(name):
    inner = () if name == "spam" else (optaxclip.clip_by_global_norm(1.0),)
    where = NamedSharding(mesh_of((2, 4)), P("x", "y"))
    weights = jax.device_put(np.ones((4, 8), np.float32), where)
    state = getattr(optaxclip, name)(*inner).init(weights)
    (buffer,) = (x for x in jax.tree.leaves(state) if x.shape == weights.shape)
    assert buffer.sharding == where


# Of norms that each device has for itself, and the factor of seven ones.
LAYERS = {"a": 1, "b": None}
ALONE = {
    "spectral": (optaxclip.clip_by_spectral_norm(1.0, stacked=LAYERS), 7**-0.5),
    "AGC": (optaxclip.adaptive_grad_clip(0.5, per_tensor=True, mesh_axes=None), 0.5),
}


@pytest.mark.parametrize("name", ALONE)
def test_leaves_that_all_devices_hold_stay_the_same_on_all(name):
    (clipper, factor), specs = ALONE[name], {"a": P("x"), "b": P()}
    tree = {"a": np.ones((4, 5, 3), np.float32), "b": np.ones(7, np.float32)}

    def clip(tree):
        return clipper.update(tree, clipper.init(tree), tree)[0]

    found = on_each_part(clip, mesh_of((4, 2)), (specs,), specs)(tree)
    np.testing.assert_allclose(found["b"], factor, rtol=1e-6)


def test_layers_that_no_device_splits_are_not_cut_out():
    leaf, spec = np.ones((3, 4, 5), np.float32), P(None, "x")
    measure = partial(optaxclip.tensor_norm, stacked=1, mesh_axes=spec)
    program = on_each_part(measure, mesh_of((2, 2)), (spec,), P()).lower(leaf)
    text = program.as_text()
    assert text.count("stablehlo.all_reduce") == 1
    assert "stablehlo.dynamic" not in text
