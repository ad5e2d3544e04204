"""On sharded gradients every clipper gives what it gives on one device."""

import math
import re
from contextlib import nullcontext
from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests import sharded
from tests.helpers import only_by_a_cpu
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


@pytest.mark.slow
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


@pytest.mark.slow
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
