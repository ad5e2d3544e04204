"""The promises of every clipper, for those that learn: what is tested for fixed limits
in test_contract holds with a memory too.
"""

import math
import pickle
from functools import cache, partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optaxclip
from tests.core.test_contract import compiled_step, count_compilations, same_bits
from tests.helpers import LABELS, exact, random_tree

# name: (build(**options), does it never lengthen?)
CLIPPERS = {
    "autoclip": (partial(optaxclip.autoclip, 50, 16), True),
    "zclip": (partial(optaxclip.zclip, 1.0, 0.9, warmup=3), True),
    "zclip of groups": (
        partial(optaxclip.zclip, 1.0, 0.9, warmup=3, scope=LABELS),
        True,
    ),
    "adagc": (partial(optaxclip.adagc, 0.9, max_norm=3.0, warmup=2), True),
    "aggc": (partial(optaxclip.aggc, 0.9, 1.1, scope=LABELS, raise_small=True), False),
    "adaclip": (partial(optaxclip.adaclip, 0.9), True),
    "adagn": (optaxclip.adagn, False),
    "log-norm": (
        lambda **options: optaxclip.clip_by_tensor_norm(
            optaxclip.rules.log_z_score(0.5, 0.9, warmup=2), **options
        ),
        True,
    ),
    "units that may grow": (
        lambda **options: optaxclip.clip_by_unitwise_norm(
            optaxclip.rules.growth(), **options
        ),
        True,
    ),
    "ratio, drop": (
        lambda **options: optaxclip.clip_by_tensor_norm(
            optaxclip.rules.ema_ratio(1.2), shrink=optaxclip.shrinks.drop, **options
        ),
        True,
    ),
    "deviation, smooth": (
        lambda **options: optaxclip.clip_by_global_norm(
            optaxclip.rules.windowed_mean(1.0, 16),
            shrink=optaxclip.shrinks.smooth(),
            **options,
        ),
        True,
    ),
    "tracker under a cap": (
        lambda **options: optaxclip.clip_by_global_norm(
            optaxclip.rules.minimum(optaxclip.rules.quantile_tracker(), 1.0), **options
        ),
        True,
    ),
}
every_clipper = pytest.mark.parametrize("name", CLIPPERS)
# One of each kind: a window, running averages of groups, two measures in one, another
# multiplication, one that lengthens.
some_clippers = pytest.mark.parametrize(
    "name", ["autoclip", "zclip of groups", "adagc", "adaclip", "adagn"]
)
KEPT_WHOLE = [
    name for name in CLIPPERS if name not in ("adaclip", "deviation, smooth")
]  # the norm of what comes out is the limit or the norm that came


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


def stacked(trees):
    return jax.tree.map(lambda *x: jax.device_put(np.stack(x)), *trees)


def times(factor, tree):
    return jax.tree.map(
        lambda x: jnp.asarray(np.asarray(x) * factor, jnp.float32), tree
    )


def filled(tree, value):
    return jax.tree.map(lambda x: jax.device_put(np.full_like(x, value)), tree)


def at(place, tree):
    return jax.tree.map(lambda x: np.asarray(x)[place], tree)


@every_clipper
@pytest.mark.parametrize("dtype", ["mixed", "float32"])
def test_updates_and_state_keep_kinds_and_norms_their_limit(name, dtype):
    shortens = CLIPPERS[name][1]
    grads = history(dtype, name=name)
    clipper, _ = built(name)
    first = clipper.init(grads[0])
    chex.assert_trees_all_equal_structs(
        first,
        clipper.init(
            jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), grads[0])
        ),
    )
    touched = 0
    for before, (after, state) in zip(grads, run(name, grads)):
        chex.assert_trees_all_equal_shapes_and_dtypes(after, before)
        chex.assert_trees_all_equal_shapes_and_dtypes(state, first)
        one, other = exact(before), exact(after)
        for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other)):
            assert np.isfinite(y).all()
            assert not shortens or np.linalg.norm(y) <= np.linalg.norm(x) * (1 + 1e-6)
        touched += sum(
            not np.array_equal(x, y)
            for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other))
        )
        norms, limits, factors = (
            np.concatenate([np.ravel(x) for x in jax.tree.leaves(field)])
            for field in (state.norm, state.limit, state.factor)
        )
        if name in KEPT_WHOLE:
            assert np.all(norms * factors <= limits * (1 + 1e-6))
    assert touched > 0


# The memory is the same with both policies: "zero" meets one of each multiplication and
# of each scope.
POLICIES = [
    *(("propagate", name) for name in CLIPPERS),
    *(
        ("zero", name)
        for name in (
            "zclip of groups",
            "adagc",
            "adaclip",
            "adagn",
            "units that may grow",
            "ratio, drop",
            "deviation, smooth",
        )
    ),
]


@pytest.mark.parametrize(("nonfinite", "name"), POLICIES)
def test_a_broken_or_zero_step_keeps_the_bits_of_the_memory(name, nonfinite):
    options = {} if nonfinite == "propagate" else {"nonfinite": nonfinite}
    grads = history("float32", 5, name)
    broken = [filled(grads[0], bad) for bad in (math.nan, math.inf, 0.0)]
    alone = run(name, grads, **options)
    mixed = run(name, [*broken, grads[0], grads[1], *broken, *grads[2:]], **options)
    for place, (updates, state) in zip((3, 4, 8, 9, 10), alone):
        same_bits(mixed[place][0], updates)
        same_bits(mixed[place][1].memory, state.memory)
    for place in (0, 1, 5, 6):
        wanted = np.isnan if nonfinite == "propagate" else lambda x: np.asarray(x) == 0
        assert all(wanted(leaf).all() for leaf in jax.tree.leaves(mixed[place][0]))
    for place in (2, 7):
        same_bits(mixed[place][0], broken[2])
    assert all(
        (np.asarray(count) == 4).all()
        for count in jax.tree.leaves(mixed[-1][1].nonfinite)
    )


@pytest.mark.parametrize(
    "name", [name for name in CLIPPERS if name not in ("aggc", "zclip of groups")]
)
def test_empty_trees_and_other_leaves_pass_through(name):
    assert run(name, [{}, {}])[-1][0] == {}
    others = {
        "int": jnp.arange(3),
        "bool": jnp.array([True, False]),
        "none": None,
        "masked": optax.MaskedNode(),
        "empty": jnp.zeros((0, 3)),
    }
    for updates, state in run(
        name,
        [
            {"w": jnp.asarray(np.full((2, 2), norm / 2), jnp.float32), **others}
            for norm in (1.0, 3.0, 9.0)
        ],
    ):
        same_bits({key: updates[key] for key in others}, others)
        assert updates["w"].shape == (2, 2) and len(state.by_name()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "autoclip",
        "zclip",
        "adagc",
        "adaclip",
        "adagn",
        "log-norm",
        "units that may grow",
        "deviation, smooth",
        "tracker under a cap",
    ],
)
@pytest.mark.parametrize("size", [1e38, 1e-30])
def test_extreme_numbers_are_learned_from_like_others(name, size):
    """The norms of ten steps, multiplied by 1e38 or 1e-30: nothing becomes NaN, inf or
    0, in the memory neither.
    """
    factors = [0.5, 0.7, 0.4, 1.0, 0.6, 0.8, 0.5, 0.9, 0.3, 1.0]
    shape = {"w": np.asarray([[1.0, 0.0], [0.5, 0.0]]), "b": np.asarray([0.0, 1.0])}
    for updates, state in run(
        name, [times(factor * size, shape) for factor in factors]
    ):
        for leaf, pattern in zip(jax.tree.leaves(updates), jax.tree.leaves(shape)):
            assert np.isfinite(leaf).all() and np.array_equal(
                np.asarray(leaf) != 0, np.asarray(pattern) != 0
            )
        assert not any(np.isnan(x).any() for x in jax.tree.leaves(state))


# Each dtype with clippers of a global norm, of single tensors and of elements; together
# they are in the mixed tree above.
@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        *(("bfloat16", name) for name in ("autoclip", "adagc")),
        *(("float16", name) for name in ("zclip", "adaclip")),
        *(("complex64", name) for name in ("tracker under a cap", "adagc", "adaclip")),
    ],
)
def test_within_the_limit_bits_are_kept_and_above_it_the_bound(name, dtype):
    grads = history(dtype, name=name)
    for before, (after, state) in zip(grads, run(name, grads)):
        eps = float(jnp.finfo(dtype).eps)
        factors = [entry.factor for entry in state.by_name().values()]
        leaves, clipped = jax.tree.leaves(before), jax.tree.leaves(after)
        if len(factors) == 1:
            factors *= len(leaves)
        for x, y, factor in zip(leaves, clipped, factors, strict=True):
            if float(factor) == 1:
                same_bits(x, y)
            elif name != "adaclip":
                np.testing.assert_allclose(
                    np.asarray(y, complex),
                    np.asarray(x, complex) * float(factor),
                    rtol=8 * eps if eps < 1e-3 else eps,
                    atol=6e-8 if dtype == "float16" else 0,
                )


@some_clippers
def test_a_run_that_was_saved_goes_on_bit_for_bit(name):
    grads = history("mixed")
    whole = run(name, grads)
    saved = pickle.dumps(jax.tree.map(np.asarray, whole[3][1]))
    for one, other in zip(
        run(name, grads[4:], jax.tree.map(jnp.asarray, pickle.loads(saved))), whole[4:]
    ):
        same_bits(one, other)


@some_clippers
@pytest.mark.slow
def test_scan_vmap_and_strict_promotion(name):
    """All three in one program: two runs side by side, each a scan."""
    (clipper, _), grads = built(name), history("float32", 5, name)
    runs = [run(name, grads), run(name, grads[::-1])]
    start = clipper.init(grads[0])
    with jax.numpy_dtype_promotion("strict"):
        both = jax.jit(
            jax.vmap(
                lambda grads: jax.lax.scan(
                    lambda state, each: clipper.update(each, state)[::-1], start, grads
                )
            )
        )
        last, scanned = both(stacked([stacked(grads), stacked(grads[::-1])]))
    for place, each in enumerate(runs):
        chex.assert_trees_all_close(
            at(place, scanned),
            jax.tree.map(lambda *x: np.stack(x), *(updates for updates, _ in each)),
            rtol=1e-5,
        )
        chex.assert_trees_all_close(at(place, last), each[-1][1], rtol=1e-5)


@some_clippers
def test_inside_the_wrappers_of_optax(name):
    build, grads = CLIPPERS[name][0], history("float32", 4, name)
    params = grads[0]
    wanted = [
        jax.tree.map(lambda u: -0.1 * np.asarray(u), updates)
        for updates, _ in run(name, grads)
    ]
    wrappers = [
        optax.chain(
            optax.masked(build(), jax.tree.map(lambda _: True, params)), optax.sgd(0.1)
        ),
        optax.chain(optax.apply_if_finite(build(), 3), optax.sgd(0.1)),
        optax.partition(
            {"all": optax.chain(build(), optax.sgd(0.1))},
            jax.tree.map(lambda _: "all", params),
        ),
    ]
    states = [wrapped.init(params) for wrapped in wrappers]
    update = jax.jit(
        lambda grads, states: [
            wrapped.update(grads, state, params)
            for wrapped, state in zip(wrappers, states)
        ]
    )
    for each, expected in zip(grads, wanted):
        found = update(each, states)
        states = [state for _, state in found]
        for updates, _ in found:
            chex.assert_trees_all_close(updates, expected, rtol=1e-5, atol=1e-9)
    for state in states:
        assert any(
            key.startswith("clip") and "norm_before" in key
            for key in optaxclip.metrics(state)
        )


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
    params = history("float32", 1, "autoclip")[0]
    grads = [
        jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.bfloat16), tree)
        for tree in history("float32", 4, "autoclip")
    ]
    plain, injected = factory(), optax.inject_hyperparams(factory)()
    state, other = plain.init(params), injected.init(params)
    both = jax.jit(
        lambda grads, state, other: (
            plain.update(grads, state, params),
            injected.update(grads, other, params),
        )
    )
    for each in grads:
        (updates, state), (same, other) = both(each, state, other)
        chex.assert_trees_all_equal_shapes_and_dtypes(same, each)
        chex.assert_trees_all_close(same, updates, rtol=0.01)


@some_clippers
def test_the_second_eager_step_compiles_nothing(name):
    clipper, grads = built(name)[0], history("float32", 4, name)
    state = clipper.init(grads[0])
    for each in grads[:2]:
        _, state = clipper.update(each, state)
    with count_compilations() as compiled:
        clipper.update(grads[2], state)
    assert compiled == []


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


# Both ways with two measures in one and with another multiplication; what holds one
# norm for each part, one way.
SHARDED = [
    *((name, "jit") for name in ("zclip of groups", "adagc", "adaclip", "log-norm")),
    *((name, "shard_map") for name in ("autoclip", "adagc", "adaclip", "adagn")),
]


@pytest.mark.parametrize(("name", "mode"), SHARDED)
@pytest.mark.slow
def test_sharded_gradients_give_what_one_device_gives(name, mode):
    grads = [
        {
            "kernel": jnp.asarray(np.tile(tree["kernel"], (8, 1))),
            "bias": tree["bias"],
            "block": {
                "conv": jnp.asarray(np.tile(tree["block"]["conv"], (1, 1, 2))),
                "gain": tree["block"]["gain"],
            },
        }
        for tree in history("float32", 5)
    ]
    specs = {
        "kernel": P("x"),
        "bias": P(),
        "block": {"conv": P(None, None, "x"), "gain": P()},
    }
    mesh = Mesh(np.asarray(jax.devices()), ("x",))
    alone = run(name, grads)
    placed = [
        jax.tree.map(
            lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), tree, specs
        )
        for tree in grads
    ]
    clipper, update = built(name)
    state = clipper.init(placed[0])
    if mode == "shard_map":
        state_specs = jax.tree.map(lambda _: P(), state)
        update = jax.jit(
            jax.shard_map(
                lambda g, s: clipper.update(g, s),
                mesh=mesh,
                in_specs=(specs, state_specs),
                out_specs=(specs, state_specs),
            )
        )
    state = jax.device_put(
        state, NamedSharding(mesh, P())
    )  # where that of later steps is: one program serves all
    for each, (updates, wanted) in zip(placed, alone):
        clipped, state = update(each, state)
        chex.assert_trees_all_close(
            jax.tree.map(np.asarray, clipped), updates, rtol=2e-5
        )
        chex.assert_trees_all_close(
            jax.tree.map(np.asarray, state.limit),
            jax.tree.map(np.asarray, wanted.limit),
            rtol=2e-5,
        )


@pytest.mark.parametrize(
    "name", ["autoclip", "zclip", "adagc", "adagn", "adaclip", "ratio, drop"]
)
def test_a_train_step_holds_no_copy_of_the_gradients(name):
    assert compiled_step(CLIPPERS[name][0]()) <= 0.01


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
        assert sum(x.size for x in jax.tree.leaves(state.memory)) <= norms * (
            2 * 16 + 2
        )
