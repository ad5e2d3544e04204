"""Norms from elsewhere, and what compiled steps hold: no copy, no second read."""

import re
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip import rules
from tests.core.steps import apply, compiled_step, count_compilations
from tests.helpers import CLIPPERS, only_by_a_cpu, random_tree
from tests.methods import METHODS


def norms_of(state):
    """The norms in the structure that norm functions return."""
    known = state.by_name()
    if set(known) == {""}:
        return known[""].norm
    found = {}
    for name, entry in known.items():
        *path, last = name.split("/")
        inner = found
        for key in path:
            inner = inner.setdefault(key, {})
        inner[last] = entry.norm
    return found


@pytest.mark.parametrize(
    "name",
    [name for name, case in CLIPPERS.items() if not (case.numbers_only or case.clip)],
)
def test_a_norm_measured_elsewhere_is_used(name):
    updates, params = random_tree("float32", scale=10.0), random_tree("float32", 3)
    clipper = CLIPPERS[name].build(0.5)
    wanted, state = apply(clipper, updates, params)
    norms = norms_of(state)
    if jax.tree.leaves(state.units_clipped):
        norms = optaxclip.unitwise_norm(updates)
    clipped, _ = apply(clipper, updates, params, grad_norm=norms)
    chex.assert_trees_all_close(clipped, wanted, rtol=1e-6)
    twice = jax.tree.map(lambda norm: np.asarray(norm) * 2, norms)
    halved, _ = apply(clipper, updates, params, grad_norm=twice)
    half = np.asarray(wanted["bias"]) / 2
    np.testing.assert_allclose(halved["bias"], half, rtol=1e-5)
    with pytest.raises(ValueError, match="grad_norm must have the structure and shape"):
        apply(clipper, updates, params, grad_norm={"nowhere": 1.0})


# Decompositions need room, and clippy still holds copies of what it compares (see its
# docstring).
IN_PLACE = {
    name: case.build(0.5)
    for name, case in CLIPPERS.items()
    if "group" not in name and not case.clip and name != "clippy"
}
LEARN = ("autoclip", "zclip", "adagc", "adagn", "adaclip")
IN_PLACE |= {name: METHODS[name].make() for name in LEARN}
IN_PLACE["ratio, drop"] = optaxclip.clip_by_tensor_norm(
    rules.ema_ratio(1.2), shrink=optaxclip.shrinks.drop
)


@only_by_a_cpu
@pytest.mark.parametrize("name", IN_PLACE)
def test_a_train_step_holds_no_copy_of_the_gradients(name):
    assert compiled_step(IN_PLACE[name]) <= 0.01


clip_and_adam = optax.chain(IN_PLACE["clip_by_global_norm"], optax.scale_by_adam())
WRAPPED = {
    "skip_spikes": optaxclip.skip_spikes(clip_and_adam, rules.z_score()),
    "skip_step": optaxclip.skip_step(optax.adamw(1e-3), on_loss=False),
    "reset_momentum": optaxclip.reset_momentum(optax.scale_by_adam()),
}


@only_by_a_cpu
@pytest.mark.parametrize("name", WRAPPED)
def test_wrapped_optimizers_copy_neither_gradients_nor_moments(name):
    assert compiled_step(WRAPPED[name], then=optax.identity()) <= 0.01


@only_by_a_cpu
def test_the_largest_element_is_found_without_a_copy():
    assert compiled_step(optaxclip.clip_by_global_norm(0.5, ord=np.inf)) <= 0.01


@only_by_a_cpu
def test_bfloat16_gradients_are_copied_at_most_once():
    assert compiled_step(optaxclip.clip_by_global_norm(0.5), jnp.bfloat16) <= 1.01


@only_by_a_cpu
def test_float16_gradients_take_at_most_four_times_their_size():
    assert compiled_step(optaxclip.clip_by_global_norm(0.5), jnp.float16) <= 4.01


@only_by_a_cpu
def test_measuring_beside_a_global_clip_costs_no_second_read():
    grads = {f"w{i}": np.ones((64, 32 + i), np.float32) for i in range(3)}

    def reductions(*clippers):
        chain = optax.chain(*clippers)
        program = jax.jit(chain.update).lower(grads, chain.init(grads), grads)
        return program.compile().as_text().count(" reduce(")

    clip = optaxclip.clip_by_global_norm(1.0)
    record = optaxclip.record_norm(optaxclip.tensor_norm)
    assert reductions(record, clip) == reductions(clip) > 0


EAGER = {name: [method.make()] for name, method in METHODS.items() if method.learns}
for name, case in CLIPPERS.items():
    injected = optax.inject_hyperparams(case.build)
    EAGER[name] = [case.build(0.5), injected(lambda step: 0.5 / (1 + step))]


@pytest.mark.parametrize("name", EAGER)
def test_the_second_eager_step_compiles_nothing(name):
    updates, params = random_tree("float32"), random_tree("float32", 3)
    for clipper in EAGER[name]:
        state = clipper.init(params)
        for _ in range(2):
            _, state = clipper.update(updates, state, params)
        with count_compilations() as compiled:
            clipper.update(updates, state, params)
        assert compiled == []


def test_jit_writes_the_arrays_of_a_state_where_the_old_ones_were():
    """Else a CUDA graph, which holds addresses, is changed in each step."""
    params = random_tree("float32")
    # One of each kind of state that has arrays which a step does not read.
    for name in ("adaptive_grad_clip", "skip_step", "record_health", "record_spikes"):
        clipper = optax.with_extra_args_support(METHODS[name].make())
        state, step = clipper.init(params), partial(clipper.update, value=1.0)
        update = jax.jit(step, donate_argnums=1).lower(params, state, params)
        count = update.as_text().count("tf.aliasing_output")
        assert count == len(jax.tree.leaves(state)) > 0


def test_the_first_update_finds_the_norm_that_init_traced():
    calls = []

    def norm(tree):
        calls.append("norm")
        return optaxclip.global_norm(tree)

    def labels(tree):
        calls.append("labels")
        return "everything"

    grads = random_tree("float32", 0)
    clippers = optaxclip.clip_by(norm, 1.0), optaxclip.clip_by_group_norm(1.0, labels)
    for clipper in clippers:
        clipper.update(grads, clipper.init(grads))
    assert calls == ["norm", "labels"]


@pytest.mark.parametrize(("platform", "most"), [("cuda", 12), ("tpu", 64)])
def test_many_norms_share_one_root_on_an_accelerator(platform, most):
    for count, roots in ((most, most), (most + 1, 1)):
        leaves = [jnp.ones(2)] * count
        traced = jax.jit(optaxclip.tensor_norm).trace(leaves)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert text.count("stablehlo.sqrt") == roots


def test_parts_of_an_update_are_inlined():
    """A call in their place is another program to XLA: of AGC a TPU v5e ran a fifth
    more kernels.
    """
    clipper = optaxclip.adaptive_grad_clip(0.1)
    params = {"w": jnp.ones((3, 4)), "v": jnp.ones((3, 4)), "b": jnp.ones(4)}
    update = jax.jit(clipper.update)
    text = update.lower(params, clipper.init(params), params).as_text()
    called = set(re.findall(r"call @(\w+)", text))
    assert called and not called & {"measured", "_decide"}


def test_the_measure_of_copies_sees_the_copy_that_optax_makes():
    assert compiled_step(optax.clip_by_global_norm(0.5)) > 0.9
