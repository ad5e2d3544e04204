"""Every clipper inside the wrappers of optax, scan, vmap and donation."""

import pickle
from functools import partial

import chex
import jax
import numpy as np
import optax
import pytest

import optaxclip
from tests.core.steps import apply, every_clipper, few, programs, same_bits, stepped
from tests.helpers import CLIPPERS, assert_scaled, random_tree
from tests.methods import ALONE, METHODS


@every_clipper
@pytest.mark.parametrize("dtype", ["float32", "mixed", "float64"])
def test_the_state_keeps_its_structure_shapes_and_dtypes(name, dtype):
    clipper, updates = CLIPPERS[name].build(0.5), random_tree(dtype)
    first = clipper.init(updates)
    same_bits(first, clipper.init(jax.eval_shape(lambda: updates)))
    traced = second = jax.eval_shape(clipper.update, updates, first, updates)[1]
    if dtype != "float64":  # what is executed there has the types that were traced
        _, second = clipper.update(updates, first, updates)
        same_bits(second, pickle.loads(pickle.dumps(second)))
    chex.assert_trees_all_equal_shapes_and_dtypes(first, second, traced)
    wide = np.float64 if dtype == "float64" else np.float32
    assert second.numbers.dtype == wide


@every_clipper
@pytest.mark.slow
def test_works_inside_every_wrapper_of_optax(name):
    (_, updates, *_), found = programs(name)
    wrapped = {"inject_hyperparams": found["inject_hyperparams"]}
    if name == "clip_by_global_norm":  # the others come from the same kernel
        wrapped |= wrapped_in_others(updates, random_tree("float32", 3))
    wanted, _ = stepped(name, 0.125, updates, updates)
    for wrapper, (clipped, state, new_state) in wrapped.items():
        chex.assert_trees_all_equal_shapes_and_dtypes(clipped, updates)
        chex.assert_trees_all_equal_shapes_and_dtypes(new_state, state)
        same_bits(clipped, wanted)
        assert any(
            key.endswith("norm_before") or "norm_before/" in key
            for key in optaxclip.metrics(new_state)
        ), wrapper


def wrapped_in_others(updates, params):
    clip = optaxclip.clip_by_global_norm
    constant = optax.constant_schedule(0.125)
    others = {
        "chain": optax.chain(clip(0.125), optax.identity()),
        "beside float32 weights": optax.inject_hyperparams(clip)(constant),
        "apply_if_finite": optax.apply_if_finite(clip(0.125), 3),
        "named_chain": optax.named_chain(("clip", clip(0.125))),
    }
    found = {}
    for wrapper, optimizer in others.items():
        first = optimizer.init(params)
        clipped, state = jax.jit(optimizer.update)(updates, first, params)
        found[wrapper] = clipped, first, state
    return found


@every_clipper
def test_multi_steps_clips_the_mean_and_counts_real_steps(name):
    (_, _, first, second, params), found = programs(name)
    clipped, state = found["multi_steps"]
    mean = jax.tree.map(lambda a, b: (np.asarray(a) + np.asarray(b)) / 2, first, second)
    assert_scaled(CLIPPERS[name], clipped, mean, 0.5, params)
    assert int(state.inner_opt_state.step) == 1


@pytest.mark.parametrize("name", [name for name in CLIPPERS if "group" not in name])
def test_masked_leaves_are_neither_counted_nor_touched(name):
    (_, _, updates, _, params), found = programs(name)
    clipped = found["masked"][0]
    trees = [{"kernel": tree["kernel"]} for tree in (clipped, updates, params)]
    assert_scaled(CLIPPERS[name], trees[0], trees[1], 0.5, trees[2])
    same_bits(clipped["bias"], updates["bias"])


@pytest.mark.parametrize("name", [name for name in CLIPPERS if "group" not in name])
def test_partition_clips_each_part_by_itself(name):
    (_, _, updates, _, params), found = programs(name)
    clipped, _, state = found["partition"]
    for limit, key in ((0.5, "kernel"), (0.25, "bias")):
        trees = [{key: tree[key]} for tree in (clipped, updates, params)]
        assert_scaled(CLIPPERS[name], trees[0], trees[1], limit, trees[2])
    names = optaxclip.metrics(state)
    assert any(key.startswith("clip/one/norm_before") for key in names)


@every_clipper
def test_scan_vmap_and_donation(name):
    """All three in one program: two runs side by side, of two steps each, into the
    memory of their gradients and first states.
    """
    clipper, params = CLIPPERS[name].build(0.5), few(name, random_tree("float32", 3))
    trees = [few(name, random_tree("float32", seed, 4.0)) for seed in range(4)]

    def four(*x):
        return jax.device_put(np.stack(x).reshape(2, 2, *x[0].shape))

    def two(x):
        return jax.device_put(np.stack([x, x]))

    @partial(jax.jit, donate_argnums=(0, 1))
    @jax.vmap
    def run(state, updates):
        def step(state, each):
            return clipper.update(each, state, params)[::-1]

        return jax.lax.scan(step, state, updates)

    many, starts = jax.tree.map(four, *trees), jax.tree.map(two, clipper.init(params))
    state, clipped = run(starts, many)
    assert all(x.is_deleted() for x in jax.tree.leaves((many, starts)))
    np.testing.assert_array_equal(state.step, [2, 2])
    for place, updates in enumerate(trees):
        own = jax.tree.map(partial(step_of, place), clipped)
        assert_scaled(CLIPPERS[name], own, updates, 0.5, params)


def step_of(place, leaf):
    return np.asarray(leaf)[divmod(place, 2)]


MADE = {name: m.make() for name, m in METHODS.items() if m.leaves != ALONE}
MADE["larc that decays"] = optaxclip.larc(0.1, weight_decay=0.5)
# Updates meet weights of another dtype in them.
MEETING = ("constrain", "record_health")


@pytest.mark.parametrize("name", [name for name in MADE if name not in MEETING])
def test_works_under_strict_dtype_promotion(name):
    updates, params = random_tree("mixed"), random_tree("float32", 3)
    # It is judged while the program is traced.
    with jax.numpy_dtype_promotion("strict"):
        step = partial(apply, MADE[name])
        clipped, _ = jax.eval_shape(step, updates, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(clipped, updates)
