"""Skipped steps: what is decided, what stays, and what metrics tell."""

import warnings
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
from tests.helpers import own_rule
from tests.rules.histories import f
from tests.sharded import on_two_devices

PARAMS = {
    "w": jnp.array([[1.0, -2.0, 0.5], [0.3, 0.1, -1.0]]),
    "b": jnp.array([0.1, 0.2, 0.3], jnp.bfloat16),
}

CLIP = optaxclip.clip_by_global_norm(1.0)


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
    return jax.jit(optimizer.update)


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

    seen = {"grad_norm": jnp.asarray(norms, jnp.float32)}
    if values is not None:
        seen["value"] = jnp.asarray(values)
    grads = {"w": jnp.ones(1)}

    def step(state, seen):
        _, state = optimizer.update(grads, state, **seen)
        return state, state.skipped

    counts = jax.lax.scan(step, optimizer.init(grads), seen)[1]
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


def test_metrics_tell_skips_and_reach_inner_clippers():
    inner = optax.chain(optaxclip.clip_by_global_norm(1.0), optax.adam(0.1))
    optimizer = optaxclip.skip_spikes(inner, 10.0, 3.0)
    grads = [grads_of_norm(norm) for norm in (2.0, 20.0, np.nan)]
    state = train(optimizer, grads, [1.0, 2.0, 2.5])[-1][0]
    found = {name: float(value) for name, value in optaxclip.metrics(state).items()}
    wanted = {
        "skip/norm": np.nan,
        "skip/limit": 10.0,
        "skip/loss": 2.5,
        "skip/loss_limit": 3.0,
        "skip/skipped": 1.0,
        "skip/skipped_count": 2.0,
        "skip/skipped_share": 2 / 3,
        "skip/nonfinite_count": 1.0,
        "skip/consecutive_count": 2.0,
        "clip/norm_before": 2.0,
        "clip/clipped_count": 1.0,
    }
    found = {name: found[name] for name in wanted}
    assert found == pytest.approx(wanted, nan_ok=True)
    state = train(optimizer, [*grads, grads[0]], [1.0, 2.0, 2.5, 1.0])[-1][0]
    found = optaxclip.metrics(state, only=("skipped", "consecutive_count"), floats=True)
    assert found == {"skip/skipped": 0.0, "skip/consecutive_count": 0.0}


@pytest.mark.slow
def test_no_branch_surrounds_the_collectives():
    mesh = Mesh(np.asarray(jax.devices()[:4]), ("x",))
    optimizer = optaxclip.skip_spikes(
        optax.chain(optaxclip.clip_by_global_norm(1.0), optax.adam(0.1)), 10.0
    )
    params = {"w": jnp.zeros((8, 3))}
    state = optimizer.init(params)
    # Moments are split like the weights. Every device has the same counts and numbers.
    specs = jax.tree.map(lambda x: P("x") if x.shape == (8, 3) else P(), state)
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


def test_after_so_many_in_a_row_the_next_is_let_through():
    norms = [1.0, np.nan, 50.0, np.nan, 50.0, np.nan, 1.0, np.nan, 1.0]
    for most, skipped in (
        (2, [0, 1, 1, 0, 1, 1, 0, 1, 0]),
        (0, [0, 0, 0, 0, 0, 0, 0, 0, 0]),
        (None, [0, 1, 1, 1, 1, 1, 0, 1, 0]),
    ):
        optimizer = optaxclip.skip_spikes(optax.sgd(0.1), 2.0, max_consecutive=most)
        np.testing.assert_array_equal(run(optimizer, norms), skipped)


def test_under_vmap_and_scan_each_run_skips_for_itself():
    optimizer = optaxclip.skip_spikes(optax.adam(0.1), 10.0)
    grads = jnp.asarray([[[1.0, 2.0], [100.0, 0.0]], [[100.0, 0.0], [1.0, 2.0]]])

    def last_state(grads):
        def step(state, grad):
            return optimizer.update(grad, state)[::-1]

        return jax.lax.scan(step, optimizer.init(jnp.zeros(2)), grads)[0]

    last = jax.vmap(last_state)(grads)
    np.testing.assert_array_equal(last.skipped, [1, 1])
    np.testing.assert_array_equal(last.consecutive, [1, 0])
    np.testing.assert_array_equal(last.inner_state[0].count, [1, 1])


def last(optimizer, norms, **extra):
    """The state after a run over gradients of these norms."""
    state = optimizer.init(jnp.zeros(1))
    for norm in norms:
        _, state = optimizer.update(jnp.array([norm]), state, jnp.zeros(1), **extra)
    return state


def test_skip_step_starts_at_half_a_window():
    norms = [1.0, 1.5, 0.5, 2.0]
    optimizer = optaxclip.skip_step(optax.sgd(0.1), window=8, on_loss=False)
    # Number 4 is the first that can be skipped.
    skipped = [int(last(optimizer, [*norms[:n], 1e6]).skipped) for n in (2, 3, 4)]
    assert skipped == [0, 1, 1]
    limit = np.mean(norms) + 6 * np.std(norms, ddof=1)
    np.testing.assert_allclose(last(optimizer, [*norms, 1e6]).limit, limit, rtol=1e-6)


@pytest.mark.slow
def test_skipping_measures_64_bits_in_64_bits():
    optimizer = optaxclip.skip_spikes(optax.sgd(0.1), 1.0)
    with jax.enable_x64(True):
        for dtype in (jnp.float64, jnp.float32):
            params = jnp.ones(2, dtype)
            state = optimizer.init(params)
            given = {"grad_norm": np.float32(3.0)} if dtype == jnp.float64 else {}
            _, after = optimizer.update(params, state, params, **given)
            assert state.norm.dtype == after.norm.dtype == after.limit.dtype == dtype
            assert state.loss.dtype == dtype


def test_skipping_measures_over_the_axes_that_it_is_given():
    optimizer = optaxclip.skip_spikes(optax.sgd(1.0), 3.0, mesh_axes="x")
    grads = np.float32([2.5, 2.5])  # one on each device: too long together only
    specs = (P("x"), P()), (P("x"), P())
    given = grads, optimizer.init(grads)
    updates, state = on_two_devices(optimizer.update, *specs, *given, check_vma=False)
    assert state.skipped == 1 and not updates.any()


def test_what_is_exactly_at_its_limit_is_let_through():
    optimizer = optaxclip.skip_spikes(optax.sgd(0.1), 2.0, 3.0)
    for norm, loss, skipped in ((2.0, 3.0, 0), (2.1, 3.0, 1), (2.0, 3.1, 1)):
        state = last(optimizer, [norm], value=loss)
        assert state.skipped == state.consecutive == skipped
        assert (state.limit, state.loss_limit, state.nonfinite) == (2.0, 3.0, 0)


def test_skipping_learns_from_finite_losses_of_any_sign():
    remembers = own_rule(
        lambda norm: jnp.full_like(norm, 9.0),
        lambda norm, memory, step: (jnp.full_like(norm, np.inf), norm),
    )
    optimizer = optaxclip.skip_spikes(optax.sgd(0.1), None, remembers)
    for loss, remembered in ((-2.0, -2.0), (0.0, 0.0), (np.nan, 9.0), (np.inf, 9.0)):
        state = last(optimizer, [1.0], value=loss)
        assert state.memories[1] == remembered
        assert state.skipped == state.nonfinite == (not np.isfinite(loss))


def test_a_limit_of_the_loss_may_be_below_zero():
    below_0 = own_rule(lambda norm: (), lambda norm, memory, step: (-3.0, memory))
    optimizer = optaxclip.skip_spikes(optax.sgd(0.1), None, below_0)
    skipped = [last(optimizer, [1.0], value=loss).skipped for loss in (-4, -3, -2)]
    assert skipped == [0, 0, 1]


@pytest.mark.parametrize("wrap", [optaxclip.skip_nonfinite, optaxclip.reset_momentum])
def test_weights_may_be_a_model_with_functions(wrap):
    optimizer, holes = wrap(optax.adamw(0.1)), PARAMS | {"activation": None}
    model = PARAMS | {"activation": jax.nn.relu}
    found, _ = optimizer.update(holes, optimizer.init(holes), model)
    own, _ = optimizer.update(PARAMS, optimizer.init(PARAMS), PARAMS)
    chex.assert_trees_all_equal(found, own | {"activation": None})


@pytest.mark.parametrize(
    "clipper",
    [
        CLIP,
        optax.chain(optaxclip.record_norm(), CLIP),
        optaxclip.clip_by_value(1.0),
        optaxclip.spam(2.0),
        optaxclip.carry_clipped(CLIP),
    ],
    ids=["norm", "chain", "value", "spam", "carry"],
)
def test_a_warning_tells_that_only_a_clipper_is_skipped(clipper):
    skipping = optaxclip.skip_nonfinite(clipper)
    with pytest.warns(UserWarning, match="^skip_nonfinite: inner has only ") as caught:
        skipping.init(PARAMS)
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("last", [optax.sgd(0.1), optax.scale(-0.1), optax.adam(0.1)])
def test_an_optimizer_with_a_clipper_is_skipped_without_a_warning(last):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optaxclip.skip_nonfinite(optax.chain(CLIP, last)).init(PARAMS)
        optaxclip.skip_nonfinite(last).init(PARAMS)
