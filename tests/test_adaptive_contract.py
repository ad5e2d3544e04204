"""The promises of every clipper, for those that learn: what is tested for fixed limits in test_contract holds with a memory too."""

import pickle
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optaxclip
from tests.clippers import LABELS, exact, random_tree
from tests.test_contract import compiled_step, count_compilations, same_bits

# name: (build(**options), does it never lengthen?)
CLIPPERS = {
    "autoclip": (partial(optaxclip.autoclip, 50, 16), True),
    "zclip": (partial(optaxclip.zclip, 1.0, 0.9, warmup=3), True),
    "zclip of groups": (partial(optaxclip.zclip, 1.0, 0.9, warmup=3, scope=LABELS), True),
    "adagc": (partial(optaxclip.adagc, 0.9, max_norm=3.0, warmup=2), True),
    "aggc": (partial(optaxclip.aggc, 0.9, 1.1, scope=LABELS, raise_small=True), False),
    "adaclip": (partial(optaxclip.adaclip, 0.9), True),
    "adagn": (optaxclip.adagn, False),
    "log-norm": (lambda **options: optaxclip.clip_by_tensor_norm(optaxclip.log_z_score(0.5, 0.9, warmup=2), **options), True),
    "units that may grow": (lambda **options: optaxclip.clip_by_unit_norm(optaxclip.growth(), **options), True),
    "ratio, drop": (lambda **options: optaxclip.clip_by_tensor_norm(optaxclip.ema_ratio(1.2), shrink=optaxclip.drop, **options), True),
    "deviation, smooth": (lambda **options: optaxclip.clip_by_global_norm(optaxclip.windowed_mean(1.0, 16), shrink=optaxclip.smooth(), **options), True),
    "tracker under a cap": (lambda **options: optaxclip.clip_by_global_norm(optaxclip.least(optaxclip.quantile_tracker(), 1.0), **options), True),
}
every_clipper = pytest.mark.parametrize("name", CLIPPERS)
# One of each kind: a window, running averages of groups, two measures in one, another multiplication, one that lengthens.
some_clippers = pytest.mark.parametrize("name", ["autoclip", "zclip of groups", "adagc", "adaclip", "adagn"])
KEPT_WHOLE = [name for name in CLIPPERS if name not in ("adaclip", "deviation, smooth")]  # the norm of what comes out is the limit or the norm that came


def history(dtype, steps=8):
    """Gradients whose norms jump up and down by factors up to 50."""
    return [random_tree(dtype, seed, scale) for seed, scale in zip(range(steps), [1.0, 0.7, 1.3, 0.9, 20.0, 1.1, 0.4, 2.0])]


def run(clipper, grads, state=None):
    """The updates and states of a run under jit."""
    update, found = jax.jit(clipper.update), []
    state = clipper.init(grads[0]) if state is None else state
    for each in grads:
        updates, state = update(each, state)
        found.append((updates, state))
    return found


@every_clipper
@pytest.mark.parametrize("dtype", ["mixed", "float32"])
def test_updates_and_state_keep_their_kinds_and_no_norm_is_above_its_limit(name, dtype):
    build, shortens = CLIPPERS[name]
    grads = history(dtype)
    clipper = build()
    first = clipper.init(grads[0])
    chex.assert_trees_all_equal_structs(first, clipper.init(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), grads[0])))
    touched = 0
    for before, (after, state) in zip(grads, run(clipper, grads)):
        chex.assert_trees_all_equal_shapes_and_dtypes(after, before)
        chex.assert_trees_all_equal_shapes_and_dtypes(state, first)
        one, other = exact(before), exact(after)
        for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other)):
            assert np.isfinite(y).all()
            assert not shortens or np.linalg.norm(y) <= np.linalg.norm(x) * (1 + 1e-6)
        touched += sum(not np.array_equal(x, y) for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other)))
        norms, limits, scales = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(field)]) for field in (state.norm, state.limit, state.scale))
        if name in KEPT_WHOLE:
            assert np.all(norms * scales <= limits * (1 + 1e-6))
    assert touched > 0


@every_clipper
@pytest.mark.parametrize("nonfinite", ["propagate", "zero"])
def test_a_broken_or_zero_step_leaves_the_memory_bit_for_bit_also_in_the_warm_up(name, nonfinite):
    clipper = CLIPPERS[name][0](nonfinite=nonfinite)
    grads = history("float32", 5)
    broken = [jax.tree.map(partial(jnp.full_like, fill_value=bad), grads[0]) for bad in (jnp.nan, jnp.inf, 0.0)]
    alone = run(clipper, grads)
    mixed = run(clipper, [*broken, grads[0], grads[1], *broken, *grads[2:]])
    for place, (updates, state) in zip((3, 4, 8, 9, 10), alone):
        same_bits(mixed[place][0], updates)
        same_bits(mixed[place][1].memory, state.memory)
    for place in (0, 1, 5, 6):
        wanted = np.isnan if nonfinite == "propagate" else lambda x: np.asarray(x) == 0
        assert all(wanted(leaf).all() for leaf in jax.tree.leaves(mixed[place][0]))
    for place in (2, 7):
        same_bits(mixed[place][0], broken[2])
    assert all((np.asarray(count) == 4).all() for count in jax.tree.leaves(mixed[-1][1].nonfinite))


@pytest.mark.parametrize("name", [name for name in CLIPPERS if name not in ("aggc", "zclip of groups")])
def test_leaves_that_cannot_be_clipped_pass_through_and_an_empty_tree_is_one(name):
    clipper = CLIPPERS[name][0]()
    assert run(clipper, [{}, {}])[-1][0] == {}
    others = {"int": jnp.arange(3), "bool": jnp.array([True, False]), "none": None, "masked": optax.MaskedNode(), "empty": jnp.zeros((0, 3))}
    for updates, state in run(clipper, [{"w": jnp.full((2, 2), norm / 2), **others} for norm in (1.0, 3.0, 9.0)]):
        same_bits({key: updates[key] for key in others}, others)
        assert updates["w"].shape == (2, 2) and len(jax.tree.leaves(state.norm)) == 1


@pytest.mark.parametrize(
    "name", ["autoclip", "zclip", "adagc", "adaclip", "adagn", "log-norm", "units that may grow", "deviation, smooth", "tracker under a cap"]
)
@pytest.mark.parametrize("size", [1e38, 1e-30])
def test_the_largest_and_smallest_numbers_are_learned_from_like_others(name, size):
    """The norms of ten steps, multiplied by 1e38 or 1e-30: nothing becomes NaN, inf or 0, in the memory neither."""
    clipper = CLIPPERS[name][0]()
    factors = jnp.asarray([0.5, 0.7, 0.4, 1.0, 0.6, 0.8, 0.5, 0.9, 0.3, 1.0])
    shape = {"w": jnp.asarray([[1.0, 0.0], [0.5, 0.0]]), "b": jnp.asarray([0.0, 1.0])}
    for updates, state in run(clipper, [jax.tree.map(partial(jnp.multiply, factor * size), shape) for factor in factors]):
        for leaf, pattern in zip(jax.tree.leaves(updates), jax.tree.leaves(shape)):
            assert np.isfinite(leaf).all() and np.array_equal(np.asarray(leaf) != 0, np.asarray(pattern) != 0)
        assert not any(np.isnan(x).any() for x in jax.tree.leaves(state))


@pytest.mark.parametrize("name", ["autoclip", "zclip", "adagc", "adaclip", "tracker under a cap"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "complex64"])
def test_within_the_limit_the_bits_are_kept_and_above_it_the_bound(name, dtype):
    grads = history(dtype)
    for before, (after, state) in zip(grads, run(CLIPPERS[name][0](), grads)):
        eps = float(jnp.finfo(dtype).eps)
        scales = jax.tree.leaves(state.scale)
        if len(scales) == 1:
            scales *= len(jax.tree.leaves(before))
        for x, y, scale in zip(jax.tree.leaves(before), jax.tree.leaves(after), scales):
            if float(scale) == 1:
                same_bits(x, y)
            elif name != "adaclip":
                np.testing.assert_allclose(
                    np.asarray(y, complex), np.asarray(x, complex) * float(scale), rtol=8 * eps if eps < 1e-3 else eps, atol=6e-8 if dtype == "float16" else 0
                )


@some_clippers
def test_a_run_that_was_saved_goes_on_bit_for_bit(name):
    clipper = CLIPPERS[name][0]()
    grads = history("mixed")
    whole = run(clipper, grads)
    saved = pickle.dumps(jax.tree.map(np.asarray, whole[3][1]))
    for one, other in zip(run(clipper, grads[4:], jax.tree.map(jnp.asarray, pickle.loads(saved))), whole[4:]):
        same_bits(one, other)


@some_clippers
def test_scan_vmap_and_strict_promotion(name):
    clipper, grads = CLIPPERS[name][0](), history("float32", 5)
    each = run(clipper, grads)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *grads)
    with jax.numpy_dtype_promotion("strict"):
        last, scanned = jax.lax.scan(lambda state, grads: clipper.update(grads, state)[::-1], clipper.init(grads[0]), stacked)
    chex.assert_trees_all_close(scanned, jax.tree.map(lambda *x: jnp.stack(x), *(updates for updates, _ in each)), rtol=1e-5)
    chex.assert_trees_all_close(last, each[-1][1], rtol=1e-5)
    state = jax.tree.map(lambda x: jnp.stack([x, x]), each[-2][1])
    both = jax.vmap(clipper.update)(jax.tree.map(lambda x, y: jnp.stack([x, y]), grads[-1], grads[0]), state)
    chex.assert_trees_all_close(jax.tree.map(lambda x: x[0], both), each[-1], rtol=1e-5)


@some_clippers
def test_inside_the_wrappers_of_optax(name):
    build, grads = CLIPPERS[name][0], history("float32", 4)
    params = grads[0]
    wanted = [jax.tree.map(lambda u: -0.1 * u, updates) for updates, _ in run(build(), grads)]
    mask = jax.tree.map(lambda _: True, params)
    for wrapped in (
        optax.chain(optax.masked(build(), mask), optax.sgd(0.1)),
        optax.chain(optax.apply_if_finite(build(), 3), optax.sgd(0.1)),
        optax.partition({"all": optax.chain(build(), optax.sgd(0.1))}, jax.tree.map(lambda _: "all", params)),
    ):
        state = wrapped.init(params)
        update = jax.jit(wrapped.update)
        for each, expected in zip(grads, wanted):
            updates, state = update(each, state, params)
            chex.assert_trees_all_close(updates, expected, rtol=1e-5, atol=1e-9)
        assert any(key.startswith("clip") and "norm_before" in key for key in optaxclip.metrics(state))


@pytest.mark.parametrize("factory", [optaxclip.autoclip, optaxclip.zclip, optaxclip.adagc, optaxclip.adagn, optaxclip.adaclip, optaxclip.spam])
def test_inject_hyperparams_takes_them_with_all_defaults(factory):
    params = history("float32", 1)[0]
    grads = [jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree) for tree in history("float32", 4)]
    plain, injected = factory(), optax.inject_hyperparams(factory)()
    state, other = plain.init(params), injected.init(params)
    one, two = jax.jit(plain.update), jax.jit(injected.update)
    for each in grads:
        updates, state = one(each, state, params)
        same, other = two(each, other, params)
        chex.assert_trees_all_equal_shapes_and_dtypes(same, each)
        chex.assert_trees_all_close(same, updates, rtol=0.01)


@some_clippers
def test_the_second_eager_step_compiles_nothing(name):
    clipper, grads = CLIPPERS[name][0](), history("float32", 4)
    state = clipper.init(grads[0])
    for each in grads[:2]:
        _, state = clipper.update(each, state)
    with count_compilations() as compiled:
        clipper.update(grads[2], state)
    assert compiled == []


@some_clippers
def test_derivatives_are_finite(name):
    clipper, grads = CLIPPERS[name][0](), history("float32", 4)
    state = run(clipper, grads)[-1][1]

    @jax.jit
    def pulled_back(point):
        out, transpose = jax.vjp(lambda tree: clipper.update(tree, state)[0], point)
        return transpose(out)

    for point in (grads[3], jax.tree.map(jnp.zeros_like, grads[3]), jax.tree.map(lambda x: 100 * x, grads[3])):
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(pulled_back(point)))


SHARDED = ["autoclip", "zclip of groups", "adagc", "adaclip", "adagn", "log-norm"]


@pytest.mark.parametrize("mode", ["jit", "shard_map"])
@pytest.mark.parametrize("name", SHARDED)
def test_sharded_gradients_give_what_one_device_gives(name, mode):
    build = CLIPPERS[name][0]
    grads = [
        {**tree, "kernel": jnp.tile(tree["kernel"], (8, 1)), "block": {**tree["block"], "conv": jnp.tile(tree["block"]["conv"], (1, 1, 2))}}
        for tree in history("float32", 5)
    ]
    specs = {"kernel": P("x"), "bias": P(), "block": {"conv": P(None, None, "x"), "gain": P()}}
    mesh = Mesh(np.asarray(jax.devices()), ("x",))
    alone = run(build(), grads)
    placed = [jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), tree, specs) for tree in grads]
    clipper = build()
    state = clipper.init(placed[0])
    update = jax.jit(clipper.update)
    if mode == "shard_map":
        state_specs = jax.tree.map(lambda _: P(), state)
        update = jax.jit(jax.shard_map(lambda g, s: clipper.update(g, s), mesh=mesh, in_specs=(specs, state_specs), out_specs=(specs, state_specs)))
    for each, (updates, wanted) in zip(placed, alone):
        clipped, state = update(each, state)
        chex.assert_trees_all_close(jax.tree.map(np.asarray, clipped), updates, rtol=2e-5)
        chex.assert_trees_all_close(jax.tree.map(np.asarray, state.limit), jax.tree.map(np.asarray, wanted.limit), rtol=2e-5)


@pytest.mark.parametrize("name", ["autoclip", "zclip", "adagc", "adagn", "adaclip", "ratio, drop"])
def test_a_train_step_holds_no_copy_of_the_gradients(name):
    assert compiled_step(CLIPPERS[name][0]()) <= 0.01


@pytest.mark.parametrize(
    "wrapped",
    [
        optaxclip.skip_spikes(optax.chain(optaxclip.clip_by_global_norm(1.0), optax.scale_by_adam()), optaxclip.z_score()),
        optaxclip.skip_step(optax.adamw(1e-3), on_loss=False),
        optaxclip.reset_momentum(optax.scale_by_adam()),
    ],
    ids=["skip_spikes", "skip_step", "reset_momentum"],
)
def test_an_optimizer_whose_state_may_be_kept_copies_neither_gradients_nor_moments(wrapped):
    assert compiled_step(wrapped, then=optax.identity()) <= 0.01


def test_a_fresh_state_can_be_donated():
    """No two fields share a buffer, which an executed program would refuse."""
    params = random_tree("float32")
    wrapped = [
        optaxclip.skip_step(optax.adam(0.1)),
        optaxclip.carry_clipped(optaxclip.zclip()),
        optaxclip.reset_momentum(optax.scale_by_adam()),
        optaxclip.spam(),
    ]
    for optimizer in [*(build() for build, _ in CLIPPERS.values()), *wrapped]:
        leaves = jax.tree.leaves(optimizer.init(params))
        assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


def test_a_memory_is_a_few_numbers_for_each_norm():
    for build, _ in CLIPPERS.values():
        state = build().init(random_tree("float32"))
        norms = sum(x.size for x in jax.tree.leaves(state.norm))
        assert sum(x.size for x in jax.tree.leaves(state.memory)) <= norms * (2 * 16 + 2)
