"""Clippers that learn under scan and vmap, inside wrappers, and over devices."""

from functools import partial

import chex
import jax
import numpy as np
import optax
import pytest

import optaxclip
from tests.core.steps import compiled_step
from tests.helpers import only_by_a_cpu, random_tree, scanned
from tests.methods import METHODS
from tests.rules.learning import CLIPPERS, built, history, run, some_clippers, times


def stacked(trees):
    return jax.tree.map(lambda *x: jax.device_put(np.stack(x)), *trees)


def assert_close(found, wanted, rtol=1e-5):
    chex.assert_trees_all_equal_shapes_and_dtypes(found, wanted)
    chex.assert_trees_all_close(found, wanted, rtol=rtol)


@some_clippers
@pytest.mark.slow
def test_scan_vmap_and_strict_promotion(name):
    """All three in one program: two runs side by side, each a scan."""
    grads = history("float32", 5, name)
    both = grads, grads[::-1]
    with jax.numpy_dtype_promotion("strict"):
        several = jax.jit(jax.vmap(partial(scanned, built(name)[0])))
        state, updates = several(stacked([stacked(each) for each in both]))
    alone = [run(name, each) for each in both]
    assert_close(updates, stacked([stacked([u for u, _ in each]) for each in alone]))
    assert_close(state, stacked([each[-1][1] for each in alone]))


@some_clippers
def test_inside_the_wrappers_of_optax(name):
    clipper, grads = built(name)[0], stacked(history("float32", 4, name))
    _, wanted = scanned(clipper, grads)
    everything = jax.tree.map(lambda _: "all", grads)
    for wrapped in (
        optax.masked(clipper, jax.tree.map(bool, everything)),
        optax.apply_if_finite(clipper, 3),
        optax.partition({"all": clipper}, everything),
    ):
        state, updates = scanned(wrapped, grads)
        assert_close(updates, wanted)
        assert any("norm_before" in key for key in optaxclip.metrics(state))


@pytest.mark.slow
@pytest.mark.parametrize(
    "factory",
    [
        optaxclip.autoclip,
        optaxclip.zclip,
        optaxclip.adagc,
        optaxclip.adagn,
        optaxclip.adaclip,
        optaxclip.spam,
    ],
)
def test_inject_hyperparams_takes_them_with_all_defaults(factory):
    grads = stacked(history("bfloat16", 4, "autoclip"))
    _, plain = scanned(factory(), grads)
    _, injected = scanned(optax.inject_hyperparams(factory)(), grads)
    assert_close(injected, plain, rtol=0.01)


@some_clippers
@pytest.mark.slow
def test_derivatives_are_finite(name):
    clipper, grads = built(name)[0], history("float32", 4, name)
    state = run(name, grads)[-1][1]

    @jax.jit
    def pulled_back(point):
        out, transpose = jax.vjp(lambda tree: clipper.update(tree, state)[0], point)
        return transpose(out)

    for factor in (1.0, 0.0, 100.0):
        assert all(
            np.isfinite(x).all()
            for x in jax.tree.leaves(pulled_back(times(factor, grads[3])))
        )


@only_by_a_cpu
@pytest.mark.parametrize(
    "name", ["autoclip", "zclip", "adagc", "adagn", "adaclip", "ratio, drop"]
)
def test_a_train_step_holds_no_copy_of_the_gradients(name):
    assert compiled_step(CLIPPERS[name][0]()) <= 0.01


@only_by_a_cpu
@pytest.mark.parametrize(
    "wrapped",
    [
        optaxclip.skip_spikes(
            optax.chain(optaxclip.clip_by_global_norm(1.0), optax.scale_by_adam()),
            optaxclip.rules.z_score(),
        ),
        optaxclip.skip_step(optax.adamw(1e-3), on_loss=False),
        optaxclip.reset_momentum(optax.scale_by_adam()),
    ],
    ids=["skip_spikes", "skip_step", "reset_momentum"],
)
def test_wrapped_optimizers_copy_neither_gradients_nor_moments(
    wrapped,
):
    assert compiled_step(wrapped, then=optax.identity()) <= 0.01


@pytest.mark.parametrize("name", METHODS)
def test_a_fresh_state_can_be_donated(name):
    """No two fields share a buffer, which an executed program would refuse."""
    leaves = jax.tree.leaves(METHODS[name].make().init(random_tree("float32")))
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


def test_a_memory_is_a_few_numbers_for_each_norm():
    for build, _ in CLIPPERS.values():
        state = build().init(random_tree("float32"))
        norms = sum(x.size for x in jax.tree.leaves(state.norm))
        assert sum(x.size for x in jax.tree.leaves(state.memory)) <= norms * (
            2 * 16 + 2
        )
