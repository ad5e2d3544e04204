"""The option `mesh_axes`: names and specs, for norms, clippers, derivatives and broken
values; states inside and outside shard_map; and the check of replicas.
"""

import math
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import optaxclip
from tests import sharded
from tests.helpers import apply
from tests.norms.modes import FULL, NO_TYPES, mapped, norm_of, typed_or_not
from tests.sharded import (
    CASES,
    LABELS,
    PARAMS,
    SPECS,
    UPDATES,
    assert_close,
    exact,
    mesh_of,
    on_each_part,
    on_two_devices,
    replicas_agree,
)

FOUR = ((4,), ("x",))


@pytest.mark.slow
@typed_or_not
@pytest.mark.parametrize(
    "axes", ["x", ("x",), P("x"), {"columns": "x", "folded": P("x")}], ids=str
)
def test_names_of_axes_say_that_every_leaf_is_split_over_them(axes, options):
    updates = {name: UPDATES[name] for name in FULL}

    def body(updates):
        return apply(optaxclip.clip_by_global_norm(0.5, mesh_axes=axes), updates)[0]

    have = on_each_part(body, mesh_of(*FOUR), (FULL,), FULL, **options)(updates)
    norm = norm_of(exact(updates))
    assert_close(have, {name: x * (0.5 / norm) for name, x in exact(updates).items()})


@pytest.mark.parametrize("mesh_axes", ["d", P("d"), P(None, "d")], ids=str)
def test_an_axis_of_vmap_is_summed_by_name_and_by_spec(mesh_axes):
    def norm(x):
        return optaxclip.global_norm(x, mesh_axes=mesh_axes)

    norms = jax.vmap(norm, axis_name="d")(jnp.ones((2, 3, 1)))
    np.testing.assert_allclose(norms, np.sqrt(6), rtol=1e-6)


@pytest.mark.slow
@typed_or_not
def test_norms_and_record_norm_take_mesh_axes(options):
    of_tensors = partial(optaxclip.tensor_norm, mesh_axes=SPECS)

    def body(tree):
        updates, state = apply(optaxclip.record_norm(of_tensors), tree)
        return (
            optaxclip.global_norm(tree, mesh_axes=SPECS),
            updates,
            {name: entry.norm for name, entry in state.by_name().items()},
            optaxclip.group_norm(tree, LABELS, mesh_axes=SPECS),
        )

    specs = (SPECS,), (P(), SPECS, P(), P())
    program = on_each_part(body, mesh_of((3, 2)), *specs, **options)
    everything, updates, tensors, groups = program(UPDATES)
    tree = exact(UPDATES)
    whole = CASES["clip_by_global_norm"].norms(tree)["bias"]
    np.testing.assert_allclose(everything, whole, rtol=2e-7)
    assert all(np.array_equal(updates[leaf], UPDATES[leaf]) for leaf in UPDATES)
    assert_close(tensors, CASES["clip_by_tensor_norm"].norms(tree), 2e-7)
    of_group = CASES["clip_by_group_norm"].norms(tree)
    assert_close(groups, {"body": of_group["grid"], "head": of_group["bias"]}, 2e-7)


def test_the_derivative_of_a_sharded_norm_is_the_direction():
    orders = (2, 3, math.inf, "average")

    def slopes(tree):
        norms = [partial(optaxclip.global_norm, ord=ord) for ord in orders]
        return [jax.grad(norm)(tree) for norm in norms]

    found = on_each_part(slopes, mesh_of((3, 2)), (SPECS,), [SPECS] * 4)(UPDATES)
    tree = exact(UPDATES)
    count = sum(x.size for x in tree.values())
    norm, cubes, largest = (
        sharded.root(list(tree.values()), None, ord) for ord in (2, 3, math.inf)
    )
    equations = [
        lambda x: x / norm,
        lambda x: np.sign(x) * (x / cubes) ** 2,
        lambda x: np.sign(x) * (np.abs(x) == largest),
        lambda x: x / norm / count,
    ]
    for have, equation in zip(found, equations, strict=True):
        assert_close(have, {name: equation(x) for name, x in tree.items()})


# With a stack whose layers are split over both axes.
TREE = UPDATES | sharded.random_tree(5, {"stack": (16, 5, 3)})
TREE_SPECS = SPECS | {"stack": P(("x", "y"))}
STACKED = sharded.STACKED | {"stack": 1}
GROUPS = LABELS | {"stack": "body"}
# Which norms of which order: all pairs would take long to compile.
KINDS = [
    (2, "global tensor layer unit"),
    (3, "global unit"),
    (math.inf, "group layer"),
    ("rms", "group tensor layer unit"),
    ("average", "global layer"),
]


def layer(name, rank):
    return tuple(range(1, rank)) if STACKED[name] else None


def unit(name, rank):
    return (1,) if STACKED[name] else sharded.unit(name, rank)


def norms_of(tree, ord, kinds):
    options = {"ord": ord, "mesh_axes": TREE_SPECS}
    stacked = options | {"stacked": STACKED}
    norms = {
        "global": lambda: optaxclip.global_norm(tree, **options),
        "group": lambda: optaxclip.group_norm(tree, GROUPS, **options),
        "tensor": lambda: optaxclip.tensor_norm(tree, **options),
        "layer": lambda: optaxclip.tensor_norm(tree, **stacked),
        "unit": lambda: optaxclip.unitwise_norm(tree, **stacked),
    }
    return {kind: norms[kind]() for kind in kinds.split()}


def oracles_of(tree, ord, kinds):
    groups = {"body": [], "head": []}
    for name, x in tree.items():
        groups[GROUPS[name]].append(x)
    norms = {
        "global": sharded.root(list(tree.values()), None, ord),
        "group": {label: sharded.root(x, None, ord) for label, x in groups.items()},
        "tensor": sharded.each(sharded.whole, ord)(tree),
        "layer": sharded.each(layer, ord)(tree),
        "unit": sharded.each(unit, ord)(tree),
    }
    return {kind: norms[kind] for kind in kinds.split()}


def kept(dims):
    """How the norms over these dimensions are split."""
    specs = {}
    for name, spec in TREE_SPECS.items():
        over = dims(name, TREE[name].ndim)
        names = [None if dim in (over or ()) else x for dim, x in enumerate(spec)]
        specs[name] = P() if over is None else P(*names)
    return specs


@typed_or_not
def test_norms_of_split_leaves_are_those_of_whole_ones(options):
    specs = dict.fromkeys(["global", "group", "tensor"], P())
    specs |= {"layer": kept(layer), "unit": kept(unit)}
    out = []
    for _, kinds in KINDS:
        out.append({kind: specs[kind] for kind in kinds.split()})

    def body(tree):
        return [norms_of(tree, *each) for each in KINDS]

    mesh = mesh_of((2, 4))
    found = on_each_part(body, mesh, (TREE_SPECS,), out, **options)(TREE)
    wanted = [oracles_of(exact(TREE), *each) for each in KINDS]
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), found, wanted)


def test_units_that_all_devices_have_stay_theirs_beside_others():
    # Both are summed over y. Along x only those of `grid` differ.
    specs = {"grid": P("y", "x"), "rows": P("y")}
    tree = sharded.random_tree(5, {"grid": (8, 4), "rows": (8, 3)})
    measure = partial(optaxclip.unitwise_norm, mesh_axes=specs)
    out = {"grid": P(None, "x"), "rows": P()}
    norms = on_each_part(measure, mesh_of((2, 4)), (specs,), out)(tree)
    assert_close(norms, sharded.each(sharded.unit, 2)(exact(tree)))


@pytest.mark.slow
@typed_or_not
def test_sixteen_bit_shards_are_summed_without_overflow(options):
    specs = {"brain": P(None, "x"), "half": P("x")}
    updates = {
        "brain": jnp.asarray(UPDATES["layers"], jnp.bfloat16),
        "half": jnp.asarray(500 * np.clip(UPDATES["folded"], -9, 9), jnp.float16),
    }
    wide = {name: np.asarray(x).astype(np.float64) for name, x in updates.items()}
    measure = partial(optaxclip.global_norm, mesh_axes=specs)
    norm = on_each_part(measure, mesh_of(*FOUR), (specs,), P(), **options)(updates)
    np.testing.assert_allclose(norm, norm_of(wide), rtol=2e-7)


@pytest.mark.slow
@typed_or_not
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_bad_value_on_any_device_is_seen_by_all(bad, options):
    specs = {"bias": P(), "folded": P(("x", "y"))}

    def body(updates):
        clippers = [
            optaxclip.clip_by_global_norm(0.5, ord=math.inf, mesh_axes=specs),
            optaxclip.clip_by_global_norm(0.5, nonfinite="zero", mesh_axes=specs),
            optaxclip.clip_by_unitwise_norm(0.5, mesh_axes=specs),
        ]
        return [c.update(updates, c.init(updates))[0] for c in clippers]

    program = on_each_part(body, mesh_of((2, 4)), (specs,), [specs] * 3, **options)
    for row in range(1, 24, 3):  # each device has three rows
        updates = {name: UPDATES[name].copy() for name in specs}
        updates["folded"][row, 1] = bad
        largest, zeroed, units = program(updates)
        assert all(np.isnan(x).all() for x in largest.values())
        assert not any(np.any(x) for x in zeroed.values())
        assert np.isfinite(units["bias"]).all()
        broken = np.isnan(units["folded"])
        assert broken[:, 1].all() and not broken[:, [0, 2]].any()
        assert all(map(replicas_agree, jax.tree.leaves((largest, zeroed, units))))


def test_without_axes_each_device_measures_what_it_has():
    def measure(x):
        return optaxclip.global_norm(x, mesh_axes=None)[None]

    norms = on_two_devices(measure, P("x"), P("x"), np.float32([3.0, 4.0]))
    np.testing.assert_array_equal(norms, [3.0, 4.0])


@typed_or_not
def test_specs_may_name_axes_that_jit_looks_after(options):
    kinds = "global tensor layer unit"

    def body(tree):
        return norms_of(tree, 2, kinds)

    # Manual along x alone: along y the arrays are global.
    by_x = sharded.only(("x",), TREE_SPECS)
    out = dict.fromkeys(["global", "tensor"], P())
    out["layer"] = sharded.only(("x",), kept(layer))
    out["unit"] = sharded.only(("x",), kept(unit))
    program = on_each_part(
        body, mesh_of((2, 4)), (by_x,), out, axis_names={"x"}, **options
    )
    wanted = oracles_of(exact(TREE), 2, kinds)
    close = partial(np.testing.assert_allclose, rtol=1e-6)
    jax.tree.map(close, program(TREE), wanted)


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


@pytest.mark.parametrize("axes", ["x", {"columns": "x", "folded": ("x", "y")}], ids=str)
def test_a_state_is_made_outside_shard_map_whatever_names_come(axes):
    params = {name: UPDATES[name] for name in FULL}
    state = optaxclip.clip_by_tensor_norm(0.5, mesh_axes=axes).init(params)
    without = optaxclip.clip_by_tensor_norm(0.5).init(params)
    chex.assert_trees_all_equal(state, without)


def test_a_tree_of_names_that_misses_a_leaf_is_refused_by_init():
    clipper = optaxclip.clip_by_tensor_norm(0.5, mesh_axes={"columns": "x"})
    params = {name: UPDATES[name] for name in FULL}
    with pytest.raises(ValueError, match=r"mesh_axes has no value for .*folded"):
        clipper.init(params)


# Clippers that are in no table of `sharded`.


# States.


@typed_or_not
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["clip_by_global_norm ord=inf", "clip_by_group_norm", "clip_by_tensor_norm"]
)
def test_the_state_of_norms_of_whole_leaves_is_replicated(name, options):
    def body(updates, params):
        return sharded.clip(name, SPECS if options else "auto", updates, params)[1]

    program = on_each_part(body, mesh_of((3, 2)), (SPECS, SPECS), P(), **options)
    state = program(UPDATES, PARAMS)
    assert all(map(replicas_agree, jax.tree.leaves(state)))
    norms = sorted({float(x) for x in CASES[name].norms(exact(UPDATES)).values()})
    entries = state.by_name().values()
    found = sorted(float(entry.norm) for entry in entries)
    np.testing.assert_allclose(found, norms, rtol=2e-7)
    above = sum(norm > sharded.limit(name) for norm in norms)
    assert sum(int(entry.clipped) for entry in entries) == above > 0


@pytest.mark.parametrize("leaves", [("kernel", "bias"), ("kernel",)])
def test_a_device_may_hold_a_single_layer_of_a_stack(leaves):
    clip = partial(optaxclip.clip_by_tensor_norm, 0.5, stacked=1)
    spec = P(("x", "y"))
    split, whole = clip(mesh_axes=spec), clip()
    both = spec, P()
    step = on_each_part(split.update, mesh_of((2, 4)), both, both)
    for layers in (8, 16):
        shapes = {"kernel": (layers, 3, 2), "bias": (layers, 3)}
        grads = sharded.random_tree(0, {name: shapes[name] for name in leaves})
        # Each device knows the norms of all layers.
        found, wanted = (
            update(grads, whole.init(grads)) for update in (step, whole.update)
        )
        chex.assert_trees_all_close(found, wanted, rtol=1e-6)


@typed_or_not
def test_norms_and_limits_are_given_to_the_device_that_has_the_layer(options):
    spec = P(("x", "y"))
    tree = sharded.random_tree(0, {"kernel": (16, 3, 2), "bias": (16, 3)})
    clipper = optaxclip.clip_by_tensor_norm(None, stacked=1, mesh_axes=spec)

    def step(grads, norms, limits):
        state = clipper.init(grads)
        return clipper.update(grads, state, grad_norm=norms, limit=limits)

    # From 1 to 16, and limits that fall.
    numbers = np.arange(1.0, 17.0, dtype=np.float32)
    norms = {"kernel": numbers[:, None, None], "bias": numbers[:, None]}
    limits = {name: 9 / x for name, x in norms.items()}
    program = on_each_part(step, mesh_of((2, 4)), spec, (spec, P()), **options)
    updates, state = program(tree, norms, limits)
    factors = np.minimum(1, 9 / np.float64(numbers) ** 2)
    assert_close(
        updates,
        {
            "kernel": exact(tree)["kernel"] * factors[:, None, None],
            "bias": exact(tree)["bias"] * factors[:, None],
        },
    )
    for entry in state.by_name().values():
        np.testing.assert_array_equal(entry.norm, numbers)
        np.testing.assert_allclose(entry.factor, factors, rtol=1e-6)


# The check of replicas.

# A value, and one that differs from it by as little as can be.
SAME = {
    "brain": (jnp.bfloat16(1.5), jnp.bfloat16(1.5078125)),
    "complex": (jnp.complex64(1 - 2j), jnp.complex64(1 + 2j)),
    "flag": (jnp.array(True), jnp.array(False)),
    "four bits": (jnp.int4(-3), jnp.int4(-4)),
    "float": (jnp.float32(0.1), np.nextafter(np.float32(0.1), np.float32(1))),
    "int": (jnp.int32(-3), jnp.int32(-4)),
    "key": (jax.random.key(1), jax.random.key(2)),
    "nan": (jnp.float32(jnp.nan), jnp.float32(1)),
}


@pytest.mark.parametrize("mode", ["pmap", "typed", "untyped"])
def test_check_replicated_sees_one_bit_on_one_device(mode):
    same = {name: value for name, (value, _) in SAME.items()}

    def body(index):
        alone = jnp.reshape(index, ()) == 2
        trees = [same, {}]
        for name, (value, other) in SAME.items():
            trees.append({**same, name: jnp.where(alone, other, value)})
        return jnp.stack([optaxclip.check_replicated(tree, "i") for tree in trees])

    index = np.arange(4, dtype=np.int32)
    if mode == "pmap":
        every = mapped(body)(index)
    else:
        mesh, options = mesh_of((4,), ("i",)), NO_TYPES if mode == "untyped" else {}
        every = on_each_part(body, mesh, (P("i"),), P(), **options)(index)
        assert replicas_agree(every)
        every = every[None]
    for answers in every:
        assert answers.tolist() == [True, True] + [False] * len(SAME)


def test_check_replicated_takes_all_nans_for_equal():
    bits = np.array([0x7FC00000, 0xFFC00000], np.uint32)

    def body(bits):
        nan = jax.lax.bitcast_convert_type(bits, jnp.float32)
        tree = nan, jax.lax.complex(nan, 1.0), nan.astype(jnp.bfloat16)
        return jnp.stack([optaxclip.check_replicated(x, "i") for x in tree])

    assert mapped(body)(bits).all()


def test_check_replicated_passes_over_gradients_of_integers():
    def body(x):
        tree = {"x": x, "count": np.zeros(2, jax.dtypes.float0)}
        return optaxclip.check_replicated(tree, ("x", "y"))

    check = on_each_part(body, mesh_of((2, 3)), (P("y"),), P(), check_vma=False)
    assert not check(np.arange(3.0, dtype=np.float32))
    assert check(np.ones(3, np.float32))


def test_check_replicated_looks_along_the_axes_that_are_named():
    def body(x):
        along = "x", "y", ("x", "y")
        return jnp.stack([optaxclip.check_replicated(x, axes) for axes in along])

    check = on_each_part(body, mesh_of((2, 3)), (P("y"),), P(), check_vma=False)
    assert check(np.arange(3.0, dtype=np.float32)).tolist() == [True, False, False]
    assert check(np.ones(3, np.float32)).tolist() == [True, True, True]
