"""Clippers that learn under scan and vmap, inside wrappers, and over devices."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optaxclip
from tests.core.steps import compiled_step, count_compilations
from tests.helpers import only_by_a_cpu, random_tree
from tests.rules.learning import CLIPPERS, built, history, run, some_clippers, times


def stacked(trees):
    return jax.tree.map(lambda *x: jax.device_put(np.stack(x)), *trees)


def at(place, tree):
    return jax.tree.map(lambda x: np.asarray(x)[place], tree)


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
