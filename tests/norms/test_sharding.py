"""On sharded gradients every clipper gives what it gives on one device: under jit, in
shard_map and in pmap, on 4, 6 and 8 devices.
"""

import itertools
import math
from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optaxclip
from tests import oracles, sharded
from tests.sharded import (
    CASES,
    LABELS,
    PARAMS,
    SHAPES,
    SIZES,
    SPECS,
    STACKED,
    UPDATES,
    assert_close,
    exact,
    mesh_of,
    on_each_part,
    on_four_devices,
    on_two_devices,
    only,
    place,
    replicas_agree,
    wanted,
)

NO_TYPES = {"check_vma": False}
typed_or_not = pytest.mark.parametrize(
    "options", [{}, NO_TYPES], ids=["typed", "untyped"]
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
    mesh = mesh_of(sizes)
    program = on_each_part(
        steps(mesh_axes, names),
        mesh,
        (specs, specs),
        dict.fromkeys(names, specs),
        **options,
    )
    return program, [place(tree, mesh, SPECS) for tree in (UPDATES, PARAMS)]


def in_pmap(sizes, names):
    count, specs = math.prod(sizes), only(("x",), SPECS)
    program = jax.pmap(
        steps(lambda case: specs, names), axis_name="x", devices=jax.devices()[:count]
    )
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
    with (
        jax.set_mesh(mesh_of(sizes, kind=AxisType.Explicit))
        if "explicit" in mode
        else nullcontext()
    ):
        program, arguments = MODES[mode](sizes, names)
        compiled = program.lower(*arguments).compile()
        return mode, compiled.as_text(), compiled(*arguments)


@pytest.mark.slow
def test_every_clipper_gives_what_it_gives_on_one_device(run):
    mode, _, results = run
    wrong = {}
    for name, clipped in results.items():
        have, want = (
            sharded.joined(clipped, only(("x",), SPECS)) if mode == "pmap" else clipped,
            wanted(name),
        )
        assert have.keys() == want.keys()
        wrong[name] = max(
            float(np.max(np.abs(np.asarray(have[leaf], np.float64) / want[leaf] - 1)))
            for leaf in want
        )
        assert (
            max(float(np.max(np.abs(want[leaf] / UPDATES[leaf] - 1))) for leaf in want)
            > 0.1
        )  # there is something to clip
    missed = {name: error for name, error in wrong.items() if not error < 1e-6}
    assert missed == {}


@pytest.mark.slow
def test_all_devices_hold_the_same_bits_of_what_is_replicated(run):
    mode, _, results = run
    for clipped in results.values():
        if mode == "pmap":
            assert all(
                len({np.asarray(row).tobytes() for row in clipped[leaf]}) == 1
                for leaf in ("bias", "gain")
            )
        else:
            assert all(replicas_agree(clipped[leaf]) for leaf in clipped)


def test_no_gradient_travels_between_devices(run):
    _, text, _ = run
    assert not [
        kind
        for kind in (
            "all-gather",
            "all-to-all",
            "collective-permute",
            "reduce-scatter",
            "collective-broadcast",
        )
        if f" {kind}" in text
    ]


@pytest.mark.slow
def test_clipped_updates_stay_where_the_updates_were(run):
    mode, _, results = run
    for clipped in results.values():
        for name, x in clipped.items():
            spec = P("x") if mode == "pmap" else SPECS[name]
            assert x.sharding.is_equivalent_to(
                NamedSharding(x.sharding.mesh, spec), x.ndim
            )


def norm_of(tree):
    return float(sharded.root(list(tree.values()), None, 2))


FULL = {
    "columns": P(None, "x"),
    "folded": P("x", None),
}  # fully sharded: no leaf is replicated


@pytest.mark.slow
@typed_or_not
def test_names_of_axes_say_that_every_leaf_is_split_over_them(options):
    updates = {name: UPDATES[name] for name in FULL}
    spellings = ["x", ("x",), P("x"), {"columns": "x", "folded": P("x")}]

    def body(updates):
        clippers = [
            optaxclip.clip_by_global_norm(0.5, mesh_axes=axes) for axes in spellings
        ] + [optax.clip_by_global_norm(0.5)]
        return [
            clipper.update(updates, clipper.init(updates))[0] for clipper in clippers
        ]

    norm = norm_of(exact(updates))
    want = {name: x * (0.5 / norm) for name, x in exact(updates).items()}
    *ours, theirs = on_each_part(
        body, mesh_of((4,), ("x",)), (FULL,), [FULL] * (len(spellings) + 1), **options
    )(updates)
    for have in ours:
        assert_close(have, want)
    # The comparison sees the error of a norm that forgets other devices.
    assert (
        norm_of({name: x - want[name] for name, x in exact(theirs).items()}) > 0.4
    )  # of a vector of length 0.5


STAGED = {"attention": (4, 10, 14), "experts": (4, 6, 10, 14), "router": (10, 6)}
STAGED_SPECS = {"attention": P("stage"), "experts": P("stage", "expert"), "router": P()}
STAGED_AXES = {
    "attention": ((1, 2), (1,)),
    "experts": ((2, 3), (2,)),
    "router": (None, (0,)),
}  # of one tensor, of one unit


@typed_or_not
@pytest.mark.slow
def test_stage_and_expert_axes_are_mesh_axes_like_others(options):
    updates, params = sharded.random_tree(3, STAGED), sharded.random_tree(4, STAGED)
    stacked = {"attention": 1, "experts": 2, "router": 0}
    auto = "auto" if not options else STAGED_SPECS
    clippers = {
        "global": optaxclip.clip_by_global_norm(0.5, mesh_axes=auto),
        "whole": optaxclip.clip_by_tensor_norm(0.5, mesh_axes=auto),
        "tensor": optaxclip.clip_by_tensor_norm(
            0.5, stacked=stacked, mesh_axes=STAGED_SPECS
        ),
        "unit": optaxclip.clip_by_unitwise_norm(
            0.5, stacked=stacked, mesh_axes=STAGED_SPECS
        ),
        "weights": optaxclip.adaptive_grad_clip(
            0.5, stacked=stacked, mesh_axes=STAGED_SPECS
        ),
    }

    def body(updates, params):
        return {
            name: clipper.update(updates, clipper.init(params), params)[0]
            for name, clipper in clippers.items()
        }

    mesh = mesh_of((2, 2, 2), ("data", "stage", "expert"))
    clipped = on_each_part(
        body,
        mesh,
        (STAGED_SPECS, STAGED_SPECS),
        dict.fromkeys(clippers, STAGED_SPECS),
        **options,
    )(updates, params)
    grads, weights = exact(updates), exact(params)
    everything = sharded.root(list(grads.values()), None, 2)
    for leaf, x in grads.items():
        of_tensor, of_unit = (sharded.root([x], dims, 2) for dims in STAGED_AXES[leaf])
        most = 0.5 * np.maximum(
            sharded.root([weights[leaf]], STAGED_AXES[leaf][1], 2), 1e-3
        )
        limits = {
            "global": 0.5 / everything,
            "whole": 0.5 / sharded.root([x], None, 2),
            "tensor": 0.5 / of_tensor,
            "unit": 0.5 / of_unit,
            "weights": most / of_unit,
        }
        for name, share in limits.items():
            assert_close(
                {leaf: clipped[name][leaf]}, {leaf: x * np.minimum(1.0, share)}
            )


def places(spec, leaf):
    """The spec of a leaf's norms over the dimensions that `unit_of_layer` sums."""
    over = sharded.unit_of_layer(leaf, len(SHAPES[leaf]))
    return (
        P()
        if over is None
        else P(*(None if dim in over else entry for dim, entry in enumerate(spec)))
    )


@pytest.mark.slow
@typed_or_not
def test_norms_and_record_norm_take_mesh_axes(options):
    units = {leaf: places(spec, leaf) for leaf, spec in SPECS.items()}

    def body(tree):
        unitwise_norm = partial(
            optaxclip.unitwise_norm, stacked=STACKED, mesh_axes=SPECS
        )
        measure = optaxclip.record_norm(partial(optaxclip.tensor_norm, mesh_axes=SPECS))
        updates, state = measure.update(tree, measure.init(tree))
        return (
            optaxclip.global_norm(tree, mesh_axes=SPECS),
            updates,
            {name: entry.norm for name, entry in state.by_name().items()},
            unitwise_norm(tree),
            optaxclip.group_norm(tree, LABELS, mesh_axes=SPECS),
        )

    out_specs = P(), SPECS, P(), units, P()
    everything, updates, tensors, unit, groups = on_each_part(
        body, mesh_of((3, 2)), (SPECS,), out_specs, **options
    )(UPDATES)
    tree = exact(UPDATES)
    np.testing.assert_allclose(
        everything, CASES["clip_by_global_norm"].norms(tree)["bias"], rtol=2e-7
    )
    assert all(np.array_equal(updates[leaf], UPDATES[leaf]) for leaf in UPDATES)
    assert_close(tensors, CASES["clip_by_tensor_norm"].norms(tree), 2e-7)
    assert_close(unit, CASES["clip_by_unitwise_norm stacked"].norms(tree), 2e-7)
    of_group = CASES["clip_by_group_norm"].norms(tree)
    assert_close(groups, {"body": of_group["grid"], "head": of_group["bias"]}, 2e-7)


@pytest.mark.slow
def test_the_derivative_of_a_sharded_norm_is_the_direction():
    def body(tree):
        return jax.grad(lambda x: optaxclip.global_norm(x))(tree)

    norm = CASES["clip_by_global_norm"].norms(exact(UPDATES))["bias"]
    assert_close(
        on_each_part(body, mesh_of((3, 2)), (SPECS,), SPECS)(UPDATES),
        {name: x / norm for name, x in exact(UPDATES).items()},
    )


BROKEN_SPECS = {"bias": P(), "folded": P(("x", "y"))}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["jit", "typed", "untyped"])
def test_one_bad_value_on_any_device_is_seen_by_all(mode):
    builds = {
        "two": partial(optaxclip.clip_by_global_norm, 0.5),
        "largest": partial(optaxclip.clip_by_global_norm, 0.5, ord=math.inf),
        "zeroed": partial(
            optaxclip.clip_by_global_norm, 0.5, ord=math.inf, nonfinite="zero"
        ),
        "tensor": partial(optaxclip.clip_by_tensor_norm, 0.5, ord=math.inf),
        "unit": partial(optaxclip.clip_by_unitwise_norm, 0.5, ord=math.inf),
    }

    def body(updates):
        clippers = {
            name: build(mesh_axes=BROKEN_SPECS) for name, build in builds.items()
        }
        results = {
            name: clipper.update(updates, clipper.init(updates))
            for name, clipper in clippers.items()
        }
        return {name: clipped for name, (clipped, _) in results.items()}, {
            name: results[name][1].norm for name in ("two", "largest", "tensor")
        }

    out_specs = dict.fromkeys(builds, BROKEN_SPECS), P()
    mesh = mesh_of((2, 4))
    program = (
        jax.jit(body)
        if mode == "jit"
        else on_each_part(
            body, mesh, (BROKEN_SPECS,), out_specs, check_vma=mode == "typed"
        )
    )
    for row, bad in itertools.product(
        range(0, 24, 3), (math.nan, math.inf)
    ):  # each device has three rows
        updates = {name: UPDATES[name].copy() for name in BROKEN_SPECS}
        updates["folded"][row + row // 3 % 3, 1] = bad
        clipped, norms = program(place(updates, mesh, BROKEN_SPECS))
        for name in ("two", "largest"):
            assert np.isnan(norms[name]) if math.isnan(bad) else np.isinf(norms[name])
            assert all(np.isnan(x).all() for x in clipped[name].values())
        assert not any(np.any(x) for x in clipped["zeroed"].values())
        for name in ("tensor", "unit"):
            assert np.isfinite(clipped[name]["bias"]).all()
        assert np.isnan(clipped["tensor"]["folded"]).all()
        assert np.isnan(clipped["unit"]["folded"]).all(0).tolist() == [
            False,
            True,
            False,
        ]
        assert np.isfinite(clipped["unit"]["folded"]).all(0).tolist() == [
            True,
            False,
            True,
        ]
        assert all(replicas_agree(x) for x in jax.tree.leaves((clipped, norms)))


@pytest.mark.slow
@typed_or_not
def test_sixteen_bit_shards_are_summed_without_overflow(options):
    specs = {"brain": P(None, "x"), "full": P(None, "x"), "half": P("x")}
    wide = {
        "brain": UPDATES["layers"],
        "full": UPDATES["columns"],
        "half": 500 * np.clip(UPDATES["folded"], -9, 9),
    }
    updates = {
        name: jnp.asarray(
            x, {"half": jnp.float16, "brain": jnp.bfloat16}.get(name, jnp.float32)
        )
        for name, x in wide.items()
    }

    def body(updates):
        clipper = optaxclip.clip_by_global_norm(10.0, mesh_axes=specs)
        clipped, state = clipper.update(updates, clipper.init(updates))
        return clipped, state.norm

    clipped, norm = on_each_part(
        body, mesh_of((4,), ("x",)), (specs,), (specs, P()), **options
    )(updates)
    exactly = {name: np.asarray(x).astype(np.float64) for name, x in updates.items()}
    length = sharded.root(list(exactly.values()), None, 2)
    np.testing.assert_allclose(norm, length, rtol=2e-7)
    for name, x in exactly.items():
        assert clipped[name].dtype == updates[name].dtype
        rounding = float(jnp.finfo(updates[name].dtype).eps)
        np.testing.assert_allclose(
            np.asarray(clipped[name]).astype(np.float64),
            x * 10 / length,
            rtol=max(rounding, 1e-6),
            atol=6e-8,
        )


def replicas():
    """Gradients of four data-parallel devices, one of them an outlier."""
    grads = [sharded.random_tree(seed) for seed in range(4)]
    grads[2] = {name: 100 * x for name, x in grads[2].items()}
    mean = {
        name: np.mean([exact(tree)[name] for tree in grads], axis=0) for name in SHAPES
    }
    return (
        {name: np.stack([tree[name] for tree in grads]) for name in SHAPES},
        [exact(tree) for tree in grads],
        mean,
    )


def mapped(body):
    """A pmap over four devices."""
    program = jax.pmap(body, axis_name="i", devices=jax.devices()[:4])
    return lambda x: program.lower(x).compile()(x)


@pytest.mark.slow
def test_in_pmap_the_mean_is_taken_before_clipping():
    local, _, mean = replicas()

    def body(grads):
        clipper = optaxclip.clip_by_global_norm(1.0)
        mean = lax.pmean(grads, "i")
        clipped, state = clipper.update(mean, clipper.init(grads))
        return mean, clipped, optaxclip.check_replicated(state, "i")

    means, clipped, same = mapped(body)(local)
    assert same.all()
    # Held against the mean as the devices have it: the summing of four numbers that
    # cancel is not the clipper's.
    first = exact({name: x[0] for name, x in means.items()})
    for row in range(4):
        assert_close(
            {name: x[row] for name, x in clipped.items()},
            {name: x / norm_of(first) for name, x in first.items()},
        )
    assert abs(norm_of(first) / norm_of(mean) - 1) < 1e-6


@pytest.mark.parametrize("mode", ["pmap", "typed", "untyped"])
def test_clipping_before_the_mean_is_another_algorithm(mode):
    local, each, mean = replicas()

    def body(grads):
        clipper = optaxclip.clip_by_global_norm(1.0, mesh_axes=None)
        grads = grads if mode == "pmap" else jax.tree.map(lambda x: x[0], grads)
        return lax.pmean(clipper.update(grads, clipper.init(grads))[0], "i")

    program = (
        mapped(body)
        if mode == "pmap"
        else on_each_part(
            body, mesh_of((4,), ("i",)), (P("i"),), P(), check_vma=mode == "typed"
        )
    )
    means = {name: x[0] if mode == "pmap" else x for name, x in program(local).items()}
    per_replica = {
        name: np.mean([tree[name] / norm_of(tree) for tree in each], axis=0)
        for name in SHAPES
    }
    for name, x in per_replica.items():
        np.testing.assert_allclose(means[name], x, rtol=1e-6, atol=1e-7)
    difference = {
        name: x - mean[name] / norm_of(mean) for name, x in exact(means).items()
    }
    assert norm_of(difference) > 0.3  # of a vector of length 1


@pytest.mark.slow
def test_stages_in_own_programs_are_clipped_by_a_common_norm():
    meshes = [
        jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=devices)
        for devices in (jax.devices()[:4], jax.devices()[4:])
    ]
    stages = [
        {"columns": UPDATES["columns"], "bias": UPDATES["bias"]},
        {"folded": UPDATES["folded"], "gain": UPDATES["gain"]},
    ]
    specs = [{name: only(("x",), SPECS)[name] for name in stage} for stage in stages]
    clipper = optaxclip.clip_by_global_norm(0.5)

    def shorten(updates, norm):
        return clipper.update(updates, clipper.init(updates), grad_norm=norm)

    norms = [
        on_each_part(optaxclip.global_norm, mesh, (spec,), P())(stage)
        for stage, spec, mesh in zip(stages, specs, meshes)
    ]
    norm = np.sqrt(sum(float(norm) ** 2 for norm in norms))
    everything = norm_of(exact({**stages[0], **stages[1]}))
    np.testing.assert_allclose(norm, everything, rtol=2e-7)
    for stage, spec, mesh in zip(stages, specs, meshes):
        clipped, state = on_each_part(shorten, mesh, (spec, P()), (spec, P()))(
            stage, np.float32(norm)
        )
        assert_close(
            clipped, {name: x * 0.5 / everything for name, x in exact(stage).items()}
        )
        assert float(state.norm) == np.float32(norm)


def kind(x):
    return x.shape, x.dtype, x.weak_type, jax.typeof(x).manual_axis_type


@typed_or_not
@pytest.mark.slow
def test_the_state_has_the_same_type_after_update_as_after_init(options):
    seen = []

    def body(updates, params):
        for name, case in CASES.items():
            clipper = case.build(
                sharded.limit(name),
                mesh_axes=SPECS if case.keeps or options else "auto",
            )
            first = clipper.init(params)
            second = clipper.update(updates, first, params)[1]
            assert jax.tree.structure(first) == jax.tree.structure(second)
            for before, after in zip(jax.tree.leaves(first), jax.tree.leaves(second)):
                assert kind(before) == kind(after), name
            seen.append(name)
        return updates

    jax.eval_shape(
        on_each_part(body, mesh_of((3, 2)), (SPECS, SPECS), SPECS, **options),
        UPDATES,
        PARAMS,
    )
    assert seen == list(CASES)


@typed_or_not
@pytest.mark.slow
def test_the_state_of_norms_of_whole_leaves_is_replicated(options):
    def body(names, updates, params):
        return {
            name: sharded.clip(name, SPECS if options else "auto", updates, params)[1]
            for name in names
        }

    def program(names):
        return on_each_part(
            partial(body, names), mesh_of((3, 2)), (SPECS, SPECS), P(), **options
        )

    jax.eval_shape(
        program([name for name, case in CASES.items() if not case.keeps]),
        UPDATES,
        PARAMS,
    )
    for name, state in program(
        ["clip_by_global_norm ord=inf", "clip_by_group_norm", "clip_by_tensor_norm"]
    )(UPDATES, PARAMS).items():
        assert all(replicas_agree(x) for x in jax.tree.leaves(state))
        norms = sorted(
            {float(norm) for norm in CASES[name].norms(exact(UPDATES)).values()}
        )
        entries = state.by_name().values()
        found = sorted(float(entry.norm) for entry in entries)
        np.testing.assert_allclose(found, norms, rtol=2e-7)
        above = sum(norm > sharded.limit(name) for norm in norms)
        assert sum(int(entry.clipped) for entry in entries) == above > 0
        assert int(state.step) == 1


@pytest.mark.slow
@pytest.mark.parametrize("axes", ["auto", SPECS], ids=["auto", "specs"])
def test_a_state_made_outside_shard_map_goes_in_and_comes_out(axes):
    clipper = optaxclip.clip_by_global_norm(0.5, mesh_axes=axes)
    state = clipper.init(PARAMS)
    step = on_each_part(clipper.update, mesh_of((3, 2)), (SPECS, P()), (SPECS, P()))
    norm = norm_of(exact(UPDATES))
    for count in (1, 2):
        clipped, state = step(UPDATES, state)
        assert_close(
            clipped, {name: x * 0.5 / norm for name, x in exact(UPDATES).items()}
        )
        assert int(state.step) == int(state.clipped) == count


@typed_or_not
@pytest.mark.slow
def test_scan_inside_shard_map(options):
    many = [sharded.random_tree(seed) for seed in (1, 5, 6)]
    clippers = {
        name: CASES[name].build(sharded.limit(name), mesh_axes=SPECS)
        for name in ("clip_by_global_norm", "clip_by_unitwise_norm stacked")
    }
    stacks = {name: P(None, *spec) for name, spec in SPECS.items()}

    def body(many, params):
        def step(states, updates):
            results = {
                name: clipper.update(updates, states[name], params)
                for name, clipper in clippers.items()
            }
            return {name: state for name, (_, state) in results.items()}, {
                name: clipped for name, (clipped, _) in results.items()
            }

        states, clipped = lax.scan(
            step,
            {name: clipper.init(params) for name, clipper in clippers.items()},
            many,
        )
        return (
            clipped,
            states["clip_by_global_norm"],
            [state.step for state in states.values()],
        )

    out_specs = dict.fromkeys(clippers, stacks), P(), P()
    stack = {name: np.stack([tree[name] for tree in many]) for name in SHAPES}
    clipped, state, counts = on_each_part(
        body, mesh_of((3, 2)), (stacks, SPECS), out_specs, **options
    )(stack, PARAMS)
    for name in clippers:
        for count, updates in enumerate(many):
            assert_close(
                {leaf: x[count] for leaf, x in clipped[name].items()},
                wanted(name, updates),
            )
    assert [int(count) for count in counts] == [3] * len(clippers)
    np.testing.assert_allclose(state.norm, norm_of(exact(many[-1])), rtol=2e-7)


@typed_or_not
@pytest.mark.slow
def test_multi_steps_inside_shard_map_clips_the_mean(options):
    names = ["clip_by_global_norm", "clip_by_unitwise_norm stacked"]

    def body(updates, params):
        results = {}
        for name in names:
            optimizer = optax.MultiSteps(
                CASES[name].build(sharded.limit(name), mesh_axes=SPECS), 2
            )
            state = optimizer.init(params)
            first, state = optimizer.update(updates, state, params)
            second, state = optimizer.update(
                jax.tree.map(lambda x: x * 3, updates), state, params
            )
            results[name] = first, second, state.inner_opt_state.step
        return results

    out_specs = {name: (SPECS, SPECS, P()) for name in names}
    results = on_each_part(body, mesh_of((3, 2)), (SPECS, SPECS), out_specs, **options)(
        UPDATES, PARAMS
    )
    for name, (first, second, count) in results.items():
        assert not any(np.any(x) for x in first.values())
        assert_close(
            second, wanted(name, {leaf: x * 2 for leaf, x in UPDATES.items()}), 2e-6
        )  # the mean itself is rounded
        assert int(count) == 1


@pytest.mark.parametrize("mode", ["pmap", "typed", "untyped"])
def test_check_replicated_sees_one_bit_on_one_device(mode):
    same = {
        "brain": jnp.bfloat16(1.5),
        "complex": jnp.complex64(1 - 2j),
        "flag": jnp.array(True),
        "float": jnp.float32(0.1),
        "int": jnp.int32(-3),
        "nan": jnp.float32(jnp.nan),
    }

    def body(index):
        index = index if mode == "pmap" else index[0]
        alone = index == 2
        changed = {
            "brain": jnp.where(alone, jnp.bfloat16(1.5078125), same["brain"]),
            "complex": jnp.where(alone, jnp.complex64(1 + 2j), same["complex"]),
            "flag": ~alone,
            "float": jnp.where(
                alone, jnp.nextafter(same["float"], jnp.float32(1)), same["float"]
            ),
            "int": jnp.where(alone, jnp.int32(-4), same["int"]),
            "nan": jnp.where(alone, jnp.float32(1), same["nan"]),
        }
        answers = [
            optaxclip.check_replicated(same, "i"),
            optaxclip.check_replicated({}, "i"),
        ]
        answers += [
            optaxclip.check_replicated({**same, name: x}, "i")
            for name, x in changed.items()
        ]
        assert all(answer.shape == () and answer.dtype == bool for answer in answers)
        return jnp.stack(answers)

    index = np.arange(4, dtype=np.int32)
    if mode == "pmap":
        answers = mapped(body)(index)
        assert all(np.array_equal(row, answers[0]) for row in answers)
        answers = answers[0]
    else:
        answers = on_each_part(
            body, mesh_of((4,), ("i",)), (P("i"),), P(), check_vma=mode == "typed"
        )(index)
        assert replicas_agree(answers)
    assert answers.tolist() == [True, True] + [False] * len(same)


def test_check_replicated_looks_along_the_axes_that_are_named():
    def body(x):
        return jnp.stack(
            [optaxclip.check_replicated(x, axes) for axes in ("x", "y", ("x", "y"))]
        )

    along = on_each_part(body, mesh_of((2, 3)), (P("y"),), P(), check_vma=False)
    assert along(np.arange(3.0, dtype=np.float32)).tolist() == [True, False, False]
    assert along(np.ones(3, np.float32)).tolist() == [True, True, True]


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


@pytest.mark.parametrize(
    "name", ["clip_by_global_norm", "clip_by_unitwise_norm stacked"]
)
@pytest.mark.slow
def test_specs_change_nothing_outside_shard_map(name):
    programs = [
        jax.jit(partial(sharded.clip, name, axes)).lower(UPDATES, PARAMS).as_text()
        for axes in (SPECS, "auto", None)
    ]
    assert programs[0] == programs[1] == programs[2]


@pytest.mark.slow
def test_clip_by_value_needs_no_axes():
    clipper = optaxclip.clip_by_value(0.25)
    for options in ({}, NO_TYPES):
        clipped, state = on_each_part(
            clipper.update, mesh_of((3, 2)), (SPECS, P()), (SPECS, P()), **options
        )(UPDATES, clipper.init(UPDATES))
        assert all(
            np.array_equal(clipped[name], np.clip(x, -0.25, 0.25))
            for name, x in UPDATES.items()
        )
        assert int(state.step) == 1


def test_a_state_can_be_made_outside_shard_map():
    state = optaxclip.clip_by_global_norm(1.0, mesh_axes=("x", "y")).init(jnp.ones(3))
    assert state.norm.shape == ()


@pytest.mark.parametrize("ord", ["rms", "average"])
def test_a_mean_over_devices_counts_the_elements_of_all(ord):
    x = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    length = np.linalg.norm(np.asarray(x, np.float64))
    norm = on_two_devices(lambda x: optaxclip.global_norm(x, ord=ord), P("x"), P(), x)
    np.testing.assert_allclose(
        norm, length / (np.sqrt(12) if ord == "rms" else 12), rtol=1e-6
    )


@pytest.mark.parametrize(
    "options", [{}, {"check_vma": False}], ids=["typed", "untyped"]
)
def test_a_group_over_devices_has_one_norm(options):
    specs = {"a": P("x"), "b": P(), "c": P("x")}
    grads = {"a": np.float32([3, 0]), "b": np.float32([4]), "c": np.float32([6, 8])}
    clipper = optaxclip.clip_by_group_norm(
        1.0, {"a": "z", "b": "z", "c": "y"}, mesh_axes=specs if options else "auto"
    )
    updates = on_two_devices(
        lambda g: clipper.update(g, clipper.init(g))[0],
        (specs,),
        specs,
        grads,
        **options,
    )
    for name, share in (("a", [0.6, 0]), ("b", [0.8]), ("c", [0.6, 0.8])):
        np.testing.assert_allclose(updates[name], share, rtol=1e-6)


# a tensor of two elements, one on each device: the clipper, and what becomes of its
# updates 1 and 4 beside weights of 2
OVER_TWO_DEVICES = {
    "clippy": (partial(optaxclip.clippy, 0.5, 0.0), [0.25, 1.0]),
    "larc": (
        partial(optaxclip.larc, 1.0, 0.25, eps=0.0),
        [0.5**0.5 / 17**0.5, 4 * 0.5**0.5 / 17**0.5],
    ),
}


@pytest.mark.parametrize(
    "options", [{}, {"check_vma": False}], ids=["typed", "untyped"]
)
@pytest.mark.parametrize("name", OVER_TWO_DEVICES)
def test_clippers_by_weights_scale_all_of_a_split_tensor_alike(name, options):
    build, clipped = OVER_TWO_DEVICES[name]
    clipper = build(mesh_axes=P("x") if options else "auto")
    grads, params = np.float32([1.0, 4.0]), np.float32([2.0, 2.0])
    updates = on_two_devices(
        lambda g, p: clipper.update(g, clipper.init(g), p)[0],
        (P("x"), P("x")),
        P("x"),
        grads,
        params,
        **options,
    )
    np.testing.assert_allclose(updates, clipped, rtol=1e-6)


def test_without_axes_each_device_measures_what_it_has():
    norms = on_two_devices(
        lambda x: optaxclip.global_norm(x, mesh_axes=None)[None],
        P("x"),
        P("x"),
        np.float32([3.0, 4.0]),
    )
    np.testing.assert_array_equal(norms, [3.0, 4.0])


@pytest.mark.parametrize(
    ("axes", "text"),
    [
        (("x", "model"), "mesh_axes='model': there is no such axis here"),
        (("x", "x"), r"mesh_axes=\('x', 'x'\) names a mesh axis twice"),
    ],
    ids=["absent", "twice"],
)
def test_each_of_several_axes_is_looked_at(axes, text):
    with pytest.raises(ValueError, match=text):
        on_two_devices(
            lambda x: optaxclip.global_norm(x, mesh_axes=axes),
            P("x"),
            P(),
            np.ones(2, np.float32),
            check_vma=False,
        )


def test_a_norm_differs_only_along_the_axes_that_split_its_units():
    specs = {"a": P("x", "y"), "b": P("x", None)}
    tree = {"a": np.ones((4, 4), np.float32), "b": np.ones((4, 3), np.float32)}
    norms = jax.jit(
        on_four_devices(
            lambda x: optaxclip.unitwise_norm(x, mesh_axes=specs),
            (specs,),
            {"a": P(None, "y"), "b": P()},
        )
    )(tree)
    for leaf in norms.values():
        np.testing.assert_array_equal(leaf, np.full_like(leaf, 2.0))
