"""Skipped steps: what is decided, what stays, and what metrics tell."""

from functools import cache

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import optaxclip
from tests import oracle_rules as oracle
from tests.core.steps import same_bits

PARAMS = {
    "w": jnp.array([[1.0, -2.0, 0.5], [0.3, 0.1, -1.0]]),
    "b": jnp.array([0.1, 0.2, 0.3], jnp.bfloat16),
}


def grads_of_norm(norm, seed=0):
    random = np.random.default_rng(seed)
    tree = {"w": random.standard_normal((2, 3)), "b": np.zeros(3)}
    size = np.sqrt(np.sum(tree["w"] ** 2))
    return {
        "w": jnp.asarray(tree["w"] / size * norm, jnp.float32),
        "b": jnp.asarray(tree["b"], jnp.bfloat16),
    }


@cache
def jitted(optimizer):
    """Its update, compiled once for all runs."""
    return jax.jit(
        lambda grads, state, params, **extra: optimizer.update(
            grads, state, params, **extra
        )
    )


def train(optimizer, grads, values=None):
    """States and parameters after each step."""
    update = jitted(optimizer)
    state, params, found = optimizer.init(PARAMS), PARAMS, []
    for place, each in enumerate(grads):
        extra = {} if values is None else {"value": jnp.float32(values[place])}
        updates, state = update(each, state, params, **extra)
        params = optax.apply_updates(params, updates)
        found.append((jax.tree.map(_bits_of_a_key, state), params))
    return found


def _bits_of_a_key(x):
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


OPTIMIZERS = {
    "adamw": optax.adamw(optax.linear_schedule(0.1, 0.0, 20), weight_decay=0.1),
    "momentum with a clipper": optax.chain(
        optaxclip.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9)
    ),
    "accumulation": optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "noise": optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)),
    "adafactor": optax.adafactor(0.1),
    "lookahead of state by state": optax.chain(
        optax.trace(0.9), optax.ema(0.5), optax.scale_by_rms(), optax.scale(-0.1)
    ),
}


@cache
def without_spikes(name):
    return optaxclip.skip_spikes(OPTIMIZERS[name], 10.0)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, 50.0])
def test_a_skipped_step_keeps_all_bits(name, bad):
    good = [grads_of_norm(1.0 + 0.1 * seed, seed) for seed in range(5)]
    optimizer = OPTIMIZERS[name]
    alone = train(optimizer, good)
    mixed = train(
        without_spikes(name),
        [good[0], grads_of_norm(bad), good[1], grads_of_norm(bad), *good[2:]],
    )
    for place, (state, params) in zip((0, 2, 4, 5, 6), alone):
        chex.assert_trees_all_close(mixed[place][1], params, rtol=1e-6)
        chex.assert_trees_all_close(
            mixed[place][0].inner_state, state, rtol=1e-6, atol=1e-9
        )
    for place in (1, 3):
        same_bits(mixed[place][1], mixed[place - 1][1])
        same_bits(mixed[place][0].inner_state, mixed[place - 1][0].inner_state)
    last = mixed[-1][0]
    assert (int(last.step), int(last.skipped), int(last.consecutive)) == (7, 2, 0)
    assert int(last.nonfinite) == (0 if bad == 50.0 else 2)


def test_without_a_skip_the_bits_are_those_of_the_optimizer():
    good = [grads_of_norm(1.0 + 0.1 * seed, seed) for seed in range(4)]
    for (state, params), (alone, wanted) in zip(
        train(optaxclip.skip_nonfinite(OPTIMIZERS["adamw"]), good),
        train(OPTIMIZERS["adamw"], good),
    ):
        same_bits(params, wanted)
        same_bits(state.inner_state, alone)


def history(steps=200):
    norms = np.asarray(oracle.histories()["spikes"][:steps])
    values = np.random.default_rng(2).standard_normal(steps) * 0.1 - 0.3
    values[[70, 71, 130, 180]] = [5.0, np.nan, 4.0, np.inf]
    return norms, values.astype(np.float32)


def run(optimizer, norms, values=None):
    """Which steps were skipped; one scan."""

    def step(state, seen):
        norm, value = seen
        _, state = optimizer.update(
            {"w": norm[None]}, state, **({} if values is None else {"value": value})
        )
        return state, state.skipped

    seen = (
        jnp.asarray(norms, jnp.float32),
        jnp.zeros(len(norms)) if values is None else jnp.asarray(values),
    )
    counts = jax.jit(
        lambda seen: jax.lax.scan(step, optimizer.init({"w": jnp.zeros(1)}), seen)[1]
    )(seen)
    return np.diff(np.asarray(counts), prepend=0).astype(bool)


def over(norms, limits):
    return ~(np.isfinite(norms) & (np.asarray(norms) <= np.asarray(limits)))


def test_skip_step_decides_as_olmo_core_does():
    """Norm or loss more than six deviations (ddof 1) above the mean of the 128 before;
    from the 64th step on; NaN is skipped and never remembered.
    """
    norms, values = history()
    wanted = np.zeros(len(norms), bool)
    past_norms, past_values = [], []
    for step, (norm, value) in enumerate(zip(norms, values)):
        for past, now in ((past_norms, norm), (past_values, value)):
            if not np.isfinite(now):
                wanted[step] = True
            elif len(past) >= 63:
                window = np.asarray(past[-128:], np.float64)
                wanted[step] |= now > window.mean() + 6 * window.std(ddof=1)
        past_norms += [norm] if np.isfinite(norm) else []
        past_values += [float(value)] if np.isfinite(value) else []
    np.testing.assert_array_equal(
        run(optaxclip.skip_step(optax.sgd(0.1)), norms, values), wanted
    )
    assert wanted[[70, 71, 130, 180]].all() and wanted.sum() < 20


@pytest.mark.parametrize("name", ["z-score", "log-norm", "quantile", "fixed"])
def test_any_rule_decides(name):
    norms = np.asarray(oracle.histories()["broken"][:200])

    def f(number):
        return float(np.float32(number))

    rule, equation = {
        "z-score": (
            optaxclip.rules.z_score(2.0),
            oracle.z_score(2.0, f(0.97), eps=f(1e-6)),
        ),
        "log-norm": (
            optaxclip.rules.log_z_score(1.0, warmup=30),
            oracle.log_z_score(1.0, f(0.995), f(0.01), f(1e-3), 30),
        ),
        "quantile": (
            optaxclip.rules.windowed_quantile(0.9, 50),
            oracle.windowed_quantile(f(0.9), 50),
        ),
        "fixed": (1.5, oracle.constant(1.5)),
    }[name]
    wanted = over(norms, oracle.limits(equation, norms))
    np.testing.assert_array_equal(
        run(optaxclip.skip_spikes(optax.sgd(0.1), rule), norms), wanted
    )
    assert np.sum(~np.isfinite(norms)) + 5 < wanted.sum() < 150


def test_after_so_many_skipped_in_a_row_the_next_is_let_through():
    norms = [1.0, np.nan, np.nan, np.nan, np.nan, np.nan, 1.0, np.nan, 1.0]
    np.testing.assert_array_equal(
        run(optaxclip.skip_nonfinite(optax.sgd(0.1), 2), norms),
        [0, 1, 1, 0, 1, 1, 0, 1, 0],
    )
    np.testing.assert_array_equal(
        run(optaxclip.skip_nonfinite(optax.sgd(0.1), 0), norms), np.zeros(9)
    )
    np.testing.assert_array_equal(
        run(optaxclip.skip_nonfinite(optax.sgd(0.1), None), norms), ~np.isfinite(norms)
    )


def test_metrics_tell_skips_and_reach_inner_clippers():
    optimizer = optaxclip.skip_spikes(
        optax.chain(optaxclip.clip_by_global_norm(1.0), optax.adam(0.1)), 10.0, 3.0
    )
    state = train(
        optimizer,
        [grads_of_norm(2.0), grads_of_norm(20.0), grads_of_norm(np.nan)],
        [1.0, 2.0, 2.5],
    )[-1][0]
    report = {name: float(value) for name, value in optaxclip.metrics(state).items()}
    assert (
        report["skip/skipped"] == 1
        and report["skip/skipped_count"] == 2
        and report["skip/nonfinite_count"] == 1
        and report["skip/consecutive_count"] == 2
    )
    assert report["skip/skipped_share"] == pytest.approx(2 / 3) and np.isnan(
        report["skip/norm"]
    )
    assert (report["skip/limit"], report["skip/loss"], report["skip/loss_limit"]) == (
        10.0,
        2.5,
        3.0,
    )
    assert (
        report["clip/norm_before"] == pytest.approx(2.0)
        and report["clip/clipped_count"] == 1
    )


@pytest.mark.slow
def test_no_branch_surrounds_the_collectives():
    mesh = Mesh(np.asarray(jax.devices()[:4]), ("x",))
    optimizer = optaxclip.skip_spikes(
        optax.chain(optaxclip.clip_by_global_norm(1.0), optax.adam(0.1)), 10.0
    )
    params = {"w": jnp.zeros((8, 3))}
    state = optimizer.init(params)
    specs = jax.tree.map(lambda x: P("x") if x.ndim else P(), state)
    step = jax.jit(
        jax.shard_map(
            optimizer.update,
            mesh=mesh,
            in_specs=({"w": P("x")}, specs),
            out_specs=({"w": P("x")}, specs),
        )
    )
    text = step.lower(params, state).compile().as_text()
    assert " conditional(" not in text and " all-gather(" not in text
    for norm, skipped in ((1.0, 0), (30.0, 1), (np.nan, 2)):
        grads = {"w": jnp.full((8, 3), norm / np.sqrt(24), jnp.float32)}
        updates, state = step(grads, state)
        assert int(state.skipped) == skipped
        assert bool(jnp.any(updates["w"] != 0)) == (norm == 1.0)


def test_unusual_new_states_are_kept_on_a_skip():
    def init(params):
        return {
            "last": params,
            "constant": jnp.float32(7),
            "twice": [jnp.float32(1), jnp.float32(2)],
        }

    def update(updates, state, params=None):
        total = state["twice"][0] + jnp.sum(updates)
        return updates, {
            "last": updates,
            "constant": jnp.float32(0),
            "twice": [total, total],
        }

    optimizer = optaxclip.skip_spikes(optax.GradientTransformation(init, update), 5.0)
    start = optimizer.init(jnp.array([5.0, 6.0]))
    _, skipped = optimizer.update(jnp.array([30.0, 40.0]), start)
    same_bits(skipped.inner_state, start.inner_state)
    _, taken = optimizer.update(jnp.array([3.0, 4.0]), start)
    same_bits(
        taken.inner_state,
        {
            "last": jnp.array([3.0, 4.0]),
            "constant": jnp.float32(0),
            "twice": [jnp.float32(8), jnp.float32(8)],
        },
    )


def test_a_loss_rule_wants_the_loss():
    optimizer = optaxclip.skip_step(optax.sgd(0.1), on_loss=True)
    with pytest.raises(
        ValueError,
        match=(
            r"skip_step: on_loss=True looks at the loss: call update\(grads, state, "
            r"params, value=loss\)"
        ),
    ):
        optimizer.update(PARAMS, optimizer.init(PARAMS))
    with pytest.raises(
        ValueError, match="skip_spikes: rule must be at least 0, got -1"
    ):
        optaxclip.skip_spikes(optax.sgd(0.1), -1)
    with pytest.raises(
        ValueError, match="skip_nonfinite: max_consecutive must be at least 0, got -1"
    ):
        optaxclip.skip_nonfinite(optax.sgd(0.1), -1)


def test_grad_norm_is_used_and_value_reaches_the_optimizer():
    def update(updates, state, params=None, *, value, **_):
        return jax.tree.map(lambda u: u * value, updates), state

    optimizer = optaxclip.skip_spikes(
        optax.GradientTransformationExtraArgs(optax.init_empty_state, update), 5.0
    )
    grads = {"w": jnp.ones(2)}
    updates, state = optimizer.update(
        grads, optimizer.init(grads), value=3.0, grad_norm=jnp.float32(4.0)
    )
    np.testing.assert_array_equal(updates["w"], [3.0, 3.0])
    updates, state = optimizer.update(
        grads, state, value=3.0, grad_norm=jnp.float32(6.0)
    )
    np.testing.assert_array_equal(updates["w"], [0.0, 0.0])


def test_under_vmap_and_scan_each_run_skips_for_itself():
    optimizer = optaxclip.skip_spikes(optax.adam(0.1), 10.0)
    grads = jnp.asarray([[[1.0, 2.0], [100.0, 0.0]], [[100.0, 0.0], [1.0, 2.0]]])
    state = jax.vmap(lambda _: optimizer.init(jnp.zeros(2)))(jnp.arange(2))
    last = jax.vmap(
        lambda state, grads: jax.lax.scan(
            lambda s, g: optimizer.update(g, s)[::-1], state, grads
        )[0]
    )(state, grads)
    np.testing.assert_array_equal(last.skipped, [1, 1])
    np.testing.assert_array_equal(last.consecutive, [1, 0])
    np.testing.assert_array_equal(last.inner_state[0].count, [1, 1])
