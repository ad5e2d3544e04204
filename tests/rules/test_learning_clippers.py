"""Clippers with limits that learn keep the promises of tests/core/test_contract.py with
a memory too, under scan and vmap, and inside wrappers.
"""

import math
from functools import cache, partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip import rules
from optaxclip.shrinks import drop, smooth
from tests.core.steps import same_bits
from tests.helpers import LABELS, exact, random_tree, scanned
from tests.methods import METHODS

by_norm, by_tensor = optaxclip.clip_by_global_norm, optaxclip.clip_by_tensor_norm
by_unit, zclip = optaxclip.clip_by_unitwise_norm, optaxclip.zclip
deviation = rules.windowed_mean(1.0, 16)
capped_tracker = rules.minimum(rules.quantile_tracker(), 1.0)

# name: (build(**options), does it never lengthen?)
CLIPPERS = {
    "autoclip": (partial(optaxclip.autoclip, 50, 16), True),
    "zclip": (partial(zclip, 1.0, 0.9, warmup=3), True),
    "zclip of groups": (partial(zclip, 1.0, 0.9, warmup=3, scope=LABELS), True),
    "adagc": (partial(optaxclip.adagc, 1.05, max_norm=3.0, warmup=2), True),
    "aggc": (partial(optaxclip.aggc, 0.9, 1.1, scope=LABELS, raise_small=True), False),
    "adaclip": (partial(optaxclip.adaclip, 0.9), True),
    "adagn": (optaxclip.adagn, False),
    "log-norm": (partial(by_tensor, rules.log_z_score(0.5, 0.9, warmup=2)), True),
    "units that may grow": (partial(by_unit, rules.growth()), True),
    "ratio, drop": (partial(by_tensor, rules.ema_ratio(1.2), shrink=drop), True),
    "deviation, smooth": (partial(by_norm, deviation, shrink=smooth()), True),
    "tracker under a cap": (partial(by_norm, capped_tracker), True),
}
OF_PAPERS = ["autoclip", "zclip", "adagc", "adagn", "adaclip", "spam"]
# One of each kind: a window, running averages of groups, two measures in one, another
# multiplication, one that lengthens.
some_clippers = pytest.mark.parametrize(
    "name", ["autoclip", "zclip of groups", "adagc", "adaclip", "adagn"]
)


def history(dtype, steps=8, name=None):
    """Gradients whose norms jump up and down by factors up to 50: of a kernel and a
    bias; of the whole tree for groups, for no clipper by name, and in mixed dtypes.
    """
    trees = [
        random_tree(dtype, seed, scale)
        for seed, scale in zip(range(steps), [1.0, 0.7, 1.3, 0.9, 20.0, 1.1, 0.4, 2.0])
    ]
    if name in (None, "zclip of groups", "aggc") or dtype == "mixed":
        return trees
    return [{"kernel": tree["kernel"], "bias": tree["bias"]} for tree in trees]


@cache
def built(name, **options):
    """(the clipper, its jitted update): one of each kind, so that what one test has
    compiled serves the others.
    """
    clipper = CLIPPERS[name][0](**options)
    return clipper, jax.jit(clipper.update)


def run(name, grads, state=None, **options):
    """The updates and states of a run under jit."""
    clipper, update = built(name, **options)
    found = []
    state = clipper.init(grads[0]) if state is None else state
    for each in grads:
        updates, state = update(each, state)
        found.append((updates, state))
    return found


def times(factor, tree):
    return jax.tree.map(lambda x: jnp.float32(np.asarray(x) * factor), tree)


every_clipper = pytest.mark.parametrize("name", CLIPPERS)
OF_GROUPS = ["zclip of groups", "aggc"]  # of a tree that has all labels
# The norm of what comes out is the limit or the norm that came.
KEPT_WHOLE = [x for x in CLIPPERS if x not in ("adaclip", "deviation, smooth")]


def filled(tree, value):
    return jax.tree.map(lambda x: jax.device_put(np.full_like(x, value)), tree)


@every_clipper
@pytest.mark.parametrize("dtype", ["mixed", "float32"])
def test_updates_and_state_keep_kinds_and_norms_their_limit(name, dtype):
    shortens = CLIPPERS[name][1]
    grads = history(dtype, name=name)
    clipper, _ = built(name)
    first = clipper.init(grads[0])
    shapes = jax.eval_shape(lambda: grads[0])
    chex.assert_trees_all_equal_structs(first, clipper.init(shapes))
    touched = 0
    for before, (after, state) in zip(grads, run(name, grads)):
        chex.assert_trees_all_equal_shapes_and_dtypes(after, before)
        chex.assert_trees_all_equal_shapes_and_dtypes(state, first)
        for x, y in zip(*map(jax.tree.leaves, (exact(before), exact(after)))):
            assert np.isfinite(y).all()
            assert not shortens or np.linalg.norm(y) <= np.linalg.norm(x) * (1 + 1e-6)
            touched += not np.array_equal(x, y)
        norms, limits, factors = (
            np.concatenate([np.ravel(x) for x in jax.tree.leaves(field)])
            for field in (state.norm, state.limit, state.factor)
        )
        if name in KEPT_WHOLE:
            assert np.all(norms * factors <= limits * (1 + 1e-6))
        # One factor for everything, or one for each leaf.
        known, paths = state.by_name(), jax.tree_util.tree_leaves_with_path(before)
        for (path, x), y in zip(paths, jax.tree.leaves(after)):
            entry = known.get("/".join(key.key for key in path), known.get(""))
            if entry is not None and np.all(entry.factor == 1):
                same_bits(x, y)
    assert touched > 0


@every_clipper
@pytest.mark.parametrize("nonfinite", ["propagate", "zero"])
def test_a_broken_or_zero_step_keeps_the_bits_of_the_memory(name, nonfinite):
    grads = history("float32", 5, name)
    broken = [filled(grads[0], bad) for bad in (math.nan, math.inf, 0.0)]
    alone = run(name, grads, nonfinite=nonfinite)
    steps = [*broken, *grads[:2], *broken, *grads[2:]]
    mixed = run(name, steps, nonfinite=nonfinite)
    for place, (updates, state) in zip((3, 4, 8, 9, 10), alone):
        same_bits(mixed[place][0], updates)
        same_bits(mixed[place][1].memory, state.memory)
    for place in (0, 1, 5, 6):
        wanted = np.isnan if nonfinite == "propagate" else lambda x: np.asarray(x) == 0
        assert all(wanted(leaf).all() for leaf in jax.tree.leaves(mixed[place][0]))
    for place in (2, 7):
        same_bits(mixed[place][0], broken[2])
    np.testing.assert_array_equal(mixed[-1][1].nonfinite, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in CLIPPERS if name not in (*OF_GROUPS, "ratio, drop")]
)
@pytest.mark.parametrize("size", [1e38, 1e-30])
def test_extreme_numbers_are_learned_from_like_others(name, size):
    """The norms of ten steps, multiplied by 1e38 or 1e-30: nothing becomes NaN, inf or
    0, in the memory neither.
    """
    factors = [0.5, 0.7, 0.4, 1.0, 0.6, 0.8, 0.5, 0.9, 0.3, 1.0]
    shape = {"w": np.asarray([[1.0, 0.0], [0.5, 0.0]]), "b": np.asarray([0.0, 1.0])}
    grads = [times(factor * size, shape) for factor in factors]
    for updates, state in run(name, grads):
        for leaf, pattern in zip(jax.tree.leaves(updates), jax.tree.leaves(shape)):
            assert np.isfinite(leaf).all()
            np.testing.assert_array_equal(np.asarray(leaf) != 0, pattern != 0)
        assert not any(np.isnan(x).any() for x in jax.tree.leaves(state))


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
@pytest.mark.parametrize("name", OF_PAPERS)
def test_inject_hyperparams_takes_them_with_all_defaults(name):
    factory = METHODS[name].function
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
        for x in jax.tree.leaves(pulled_back(times(factor, grads[3]))):
            assert np.isfinite(x).all()


DECAYS = {
    "adaclip": optaxclip.adaclip,
    "adagc": lambda decay: optaxclip.adagc(decay=decay, warmup=2),
    "zclip": lambda decay: optaxclip.zclip(decay=decay, warmup=2),
    "spam": lambda decay: optaxclip.spam(threshold=2.0, decay=decay, warmup=0),
    "ema": lambda decay: by_tensor(rules.ema(decay)),
    "ema_ratio": lambda decay: by_tensor(rules.ema_ratio(1.2, decay)),
    "moments_ratio": lambda decay: by_tensor(rules.moments_ratio(decay)),
}


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("name", DECAYS)
def test_a_broken_step_leaves_no_trace_in_the_derivative_by_a_decay(name, broken):
    @jax.jit
    @jax.grad
    def slope(decay, norms):
        clipper = DECAYS[name](decay)
        _, updates = scanned(clipper, norms[:, None])
        return jnp.nansum(jnp.where(jnp.isfinite(norms), updates[:, 0], 0))

    found = slope(0.9, jnp.array([1.0, 2.0, broken, 30.0, 3.0]))
    assert found == slope(0.9, jnp.array([1.0, 2.0, 30.0, 3.0])) != 0


@pytest.mark.parametrize("name", METHODS)
def test_a_fresh_state_can_be_donated(name):
    """No two fields share a buffer, which an executed program would refuse."""
    leaves = jax.tree.leaves(METHODS[name].make().init(random_tree("float32")))
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


def test_a_memory_is_a_few_numbers_for_each_norm():
    for build, _ in CLIPPERS.values():
        state = build().init(random_tree("float32"))
        kept = sum(x.size for x in jax.tree.leaves(state.memory))
        assert kept <= (2 * 16 + 2) * state.norm.size
