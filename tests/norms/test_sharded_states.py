"""States inside and outside shard_map: types, scans, and accumulation."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import optaxclip
from tests import sharded
from tests.norms.modes import kind, norm_of, typed_or_not
from tests.sharded import (
    CASES,
    PARAMS,
    SHAPES,
    SPECS,
    UPDATES,
    assert_close,
    exact,
    mesh_of,
    on_each_part,
    on_four_devices,
    replicas_agree,
    wanted,
)


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


def test_a_state_can_be_made_outside_shard_map():
    state = optaxclip.clip_by_global_norm(1.0, mesh_axes=("x", "y")).init(jnp.ones(3))
    assert state.norm.shape == ()


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


@pytest.mark.parametrize("layers", [8, 16])
@pytest.mark.parametrize("leaves", [("kernel", "bias"), ("kernel",)])
def test_a_device_may_hold_a_single_layer_of_a_stack(leaves, layers):
    shapes = {"kernel": (layers, 3, 2), "bias": (layers, 3)}
    random = np.random.default_rng(0)
    grads = {x: jnp.asarray(random.normal(size=shapes[x]), jnp.float32) for x in leaves}
    mesh, spec = jax.sharding.Mesh(np.array(jax.devices()), ("pipe",)), P("pipe")
    clipper = optaxclip.clip_by_tensor_norm(0.5, stacked=1, mesh_axes=spec)
    whole = optaxclip.clip_by_tensor_norm(0.5, stacked=1)
    expected, of_whole = whole.update(grads, whole.init(grads))
    state = clipper.init(grads)
    # Each device knows the norms of all layers.
    split = jax.shard_map(
        clipper.update, mesh=mesh, in_specs=(spec, P()), out_specs=(spec, P())
    )
    clipped, found = jax.jit(split)(grads, state)
    chex.assert_trees_all_close((clipped, found), (expected, of_whole), rtol=1e-6)
