"""Every clipper inside the wrappers of optax, scan, vmap and donation."""

import pickle
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from tests.core.steps import apply, every_clipper, few, programs, same_bits, stepped
from tests.helpers import CLIPPERS, assert_scaled, random_tree


@every_clipper
@pytest.mark.parametrize("dtype", ["float32", "mixed", "float64"])
def test_the_state_keeps_its_structure_shapes_and_dtypes(name, dtype):
    clipper, updates = CLIPPERS[name].build(0.5), random_tree(dtype)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), updates)
    first = clipper.init(updates)
    same_bits(first, clipper.init(abstract))
    second = jax.eval_shape(clipper.update, updates, first, updates)[1]
    if (
        dtype != "float64"
    ):  # what is executed there has the types that were traced; here they are compared
        _, second = clipper.update(updates, first, updates)
    chex.assert_trees_all_equal_shapes_and_dtypes(first, second)
    chex.assert_trees_all_equal_shapes_and_dtypes(
        first, jax.eval_shape(clipper.update, updates, first, updates)[1]
    )
    wide = np.float64 if dtype == "float64" else np.float32
    assert {
        x.dtype for x in jax.tree.leaves((second.norm, second.limit, second.factor))
    } == {np.dtype(wide)}
    saved = first if dtype == "float64" else second
    same_bits(saved, pickle.loads(pickle.dumps(saved)))


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
    build = optaxclip.clip_by_global_norm
    others = {
        "chain": optax.chain(build(0.125), optax.identity()),
        "inject_hyperparams beside float32 weights": optax.inject_hyperparams(build)(
            optax.constant_schedule(0.125)
        ),
        "apply_if_finite": optax.apply_if_finite(build(0.125), 3),
        "named_chain": optax.named_chain(("clip", build(0.125))),
    }
    states = {wrapper: optimizer.init(params) for wrapper, optimizer in others.items()}
    steps = jax.jit(
        lambda updates, params: {
            wrapper: optimizer.update(updates, states[wrapper], params)
            for wrapper, optimizer in others.items()
        }
    )
    return {
        wrapper: (clipped, states[wrapper], state)
        for wrapper, (clipped, state) in steps(updates, params).items()
    }


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
    assert_scaled(
        CLIPPERS[name],
        {"kernel": clipped["kernel"]},
        {"kernel": updates["kernel"]},
        0.5,
        {"kernel": params["kernel"]},
    )
    same_bits(clipped["bias"], updates["bias"])


@pytest.mark.parametrize("name", [name for name in CLIPPERS if "group" not in name])
def test_partition_clips_each_part_by_itself(name):
    (_, _, updates, _, params), found = programs(name)
    clipped, _, state = found["partition"]
    for limit, key in ((0.5, "kernel"), (0.25, "bias")):
        assert_scaled(
            CLIPPERS[name],
            {key: clipped[key]},
            {key: updates[key]},
            limit,
            {key: params[key]},
        )
    assert any(
        key.startswith("clip/one/norm_before") for key in optaxclip.metrics(state)
    )


@every_clipper
def test_scan_vmap_and_donation(name):
    """All three in one program: two runs side by side, of two steps each, into the
    memory of their gradients and first states.
    """
    clipper, params = CLIPPERS[name].build(0.5), few(name, random_tree("float32", 3))
    trees = [few(name, random_tree("float32", seed, 4.0)) for seed in range(4)]
    many = jax.tree.map(
        lambda *x: jax.device_put(np.stack(x).reshape(2, 2, *x[0].shape)), *trees
    )
    starts = jax.tree.map(
        lambda x: jax.device_put(np.stack([x, x])), clipper.init(params)
    )

    @partial(jax.jit, donate_argnums=(0, 1))
    @jax.vmap
    def run(state, updates):
        return jax.lax.scan(
            lambda state, each: clipper.update(each, state, params)[::-1],
            state,
            updates,
        )

    state, clipped = run(starts, many)
    assert all(x.is_deleted() for x in jax.tree.leaves((many, starts.norm)))
    np.testing.assert_array_equal(state.step, [2, 2])
    for place, updates in enumerate(trees):
        assert_scaled(
            CLIPPERS[name],
            jax.tree.map(partial(step_of, place), clipped),
            updates,
            0.5,
            params,
        )


def step_of(place, leaf):
    return np.asarray(leaf)[divmod(place, 2)]


@pytest.mark.parametrize("name", ["global", "tensor", "unitwise"])
def test_weak_type_is_kept(name):
    clipper = getattr(optaxclip, f"clip_by_{name}_norm")(1.0)
    for value in (3.0, jnp.full((3, 2), 2.0), jnp.asarray(0.5), jnp.float32(3.0)):
        value = jnp.asarray(value)
        clipped, _ = apply(clipper, value)
        assert clipped.weak_type == value.weak_type and clipped.dtype == value.dtype


@every_clipper
def test_works_under_strict_dtype_promotion(name):
    with jax.numpy_dtype_promotion(
        "strict"
    ):  # which is judged while the program is traced
        clipped, _ = jax.eval_shape(
            partial(apply, CLIPPERS[name].build(0.5)),
            random_tree("mixed"),
            random_tree("float32", 3),
        )
    chex.assert_trees_all_equal_shapes_and_dtypes(clipped, random_tree("mixed"))
