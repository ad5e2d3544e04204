"""Rules that learn, beside the float64 oracle of their equations, over histories that are steady, noisy, spiked, broken, growing, tiny and huge; at every scope."""

import math
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip
from tests import oracle_rules as oracle

STEPS = 400
HISTORIES = {name: norms[:STEPS] for name, norms in oracle.histories().items()}
EPS = float(np.finfo(np.float32).eps)


def f(number):
    """The number that a float32 program gets."""
    return float(np.float32(number))


# name: (rule, oracle, tolerance in float32 eps). A running average forgets rounding at its rate, so its error is about eps / (1 - decay); a logarithm of large norms multiplies it by
# log(norm); the tracker multiplies 400 factors.
RULES = {
    "quantile of the past": (optaxclip.windowed_quantile(0.9, 100), oracle.windowed_quantile(f(0.9), 100), 32),
    "percentile of all": (optaxclip.windowed_quantile(0.1, 1000, current=True), oracle.windowed_quantile(f(0.1), 1000, current=True), 32),
    "median, clipped": (
        optaxclip.windowed_quantile(0.5, 64, factor=2.0, remember="clipped", warmup=10),
        oracle.windowed_quantile(0.5, 64, factor=2.0, remember="clipped", warmup=10),
        32,
    ),
    "Levanter": (optaxclip.windowed_mean(3, 128, floor=1e-6, warmup=64), oracle.windowed_mean(3, 128, floor=f(1e-6), warmup=64), 32),
    "OLMo-core": (optaxclip.windowed_mean(6, 128, ddof=1, warmup=63), oracle.windowed_mean(6, 128, ddof=1, warmup=63), 32),
    "mean with the current": (
        optaxclip.windowed_mean(1.5, 20, current=True, remember="clipped", warmup=5),
        oracle.windowed_mean(1.5, 20, current=True, remember="clipped", warmup=5),
        64,
    ),
    "z-score": (optaxclip.z_score(), oracle.z_score(decay=f(0.97), eps=f(1e-6)), 128),
    "z-score to the mean": (optaxclip.z_score(target="mean", eps=0.0), oracle.z_score(decay=f(0.97), target="mean", eps=0.0), 128),
    "z-score to the edge": (optaxclip.z_score(2.0, 0.9, target="max", warmup=1), oracle.z_score(2.0, f(0.9), 1, "max", f(1e-6)), 128),
    "log-norm": (optaxclip.log_z_score(warmup=50), oracle.log_z_score(decay=f(0.995), floor=f(0.01), spread=f(1e-3), warmup=50), 512),
    "ratio": (optaxclip.ema_ratio(1.5, 0.98), oracle.ema_ratio(1.5, f(0.98)), 64),
    "two rates": (
        optaxclip.ema_ratio(2.0, 0.99, target=1.1, target_decay=0.9, corrected=True),
        oracle.ema_ratio(2.0, f(0.99), f(1.1), f(0.9), corrected=True),
        128,
    ),
    "raw ratio": (optaxclip.ema_ratio(1.5, 0.9, remember="raw", warmup=20), oracle.ema_ratio(1.5, f(0.9), remember="raw", warmup=20), 64),
    "growth": (optaxclip.growth(1.01, floor=0.5), oracle.growth(f(1.01), 0.5), 64),
    "tracker": (optaxclip.quantile_tracker(0.9, 0.2), oracle.quantile_tracker(f(0.9), f(0.2), f(0.1)), 128),
    "band": (optaxclip.ema_band(), oracle.ema_band(f(0.95), f(0.6), f(0.95), f(0.01), f(1.1), f(0.9)), 64),
    "lifting band": (optaxclip.ema_band(0.5, 1.5, raise_small=True), oracle.ema_band(0.5, 1.5, f(0.95), f(0.01), f(1.1), f(0.9), raise_small=True), 64),
    "average": (optaxclip.ema(0.99), oracle.adaclip(f(0.99)), 64),
    "quotient of moments": (optaxclip.moments_ratio(), oracle.adagn(f(0.7), f(0.9)), 64),
    "capped": (optaxclip.least(optaxclip.z_score(), 1.0), oracle.least(oracle.z_score(decay=f(0.97), eps=f(1e-6)), oracle.constant(1.0)), 128),
    "floored": (optaxclip.at_least(optaxclip.growth(), 0.7), oracle.at_least(oracle.growth(f(1.01)), f(0.7)), 64),
    "warmed up": (
        optaxclip.warm_up(20, 1.0, optaxclip.ema_ratio(1.5, 0.98)),
        oracle.warm_up(20, oracle.constant(1.0), oracle.ema_ratio(1.5, f(0.98))),
        64,
    ),
}
every_rule = pytest.mark.parametrize("name", RULES)


def assert_limits(ours, theirs, norms, tolerance):
    """Equal wherever a norm is finite and not 0, and infinite in the same places."""
    norms, ours, theirs = (np.asarray(x, np.float64) for x in (norms, ours, theirs))
    counted = np.isfinite(norms) & (norms > 0)
    np.testing.assert_array_equal(np.isinf(ours[counted]), np.isinf(theirs[counted]))
    np.testing.assert_allclose(ours[counted], theirs[counted], rtol=tolerance)


# Good norms, and the same with bad ones in between; what stands behind them makes both columns equally long.
BAD_STEPS = 25
GOOD = np.asarray(HISTORIES["spikes"][: STEPS - BAD_STEPS], np.float32)
MIXED = np.insert(GOOD, np.sort(np.random.default_rng(3).choice(80, BAD_STEPS)), np.resize([np.nan, np.inf, 0.0], BAD_STEPS).astype(np.float32))


@cache
def replayed(name):
    """The limits of a rule over all histories, side by side in one program: float32[steps, histories + 2]."""
    columns = [*HISTORIES.values(), np.concatenate([GOOD, np.ones(BAD_STEPS)]), MIXED]
    return np.asarray(optaxclip.replay(RULES[name][0], np.stack(columns, axis=1).astype(np.float32)).limits)


@every_rule
def test_a_rule_gives_the_limits_of_its_equation(name):
    _, equation, tolerance = RULES[name]
    for ours, history in zip(replayed(name).T, HISTORIES.values()):
        assert_limits(ours, oracle.limits(equation, history), history, tolerance * EPS)


IN_FLOAT64 = {
    "quantile of the past": oracle.windowed_quantile(0.9, 100),
    "z-score": oracle.z_score(),
    "log-norm": oracle.log_z_score(warmup=50),
    "tracker": oracle.quantile_tracker(0.9, 0.2),
    "quotient of moments": oracle.adagn(),
}


@pytest.mark.parametrize("name", IN_FLOAT64)
def test_in_float64_a_rule_keeps_its_precision(name):
    """All numbers are those of a float64 program here; what is left is the order of operations."""
    history = HISTORIES["spikes"][:150]
    with jax.enable_x64(True):
        limits = optaxclip.replay(RULES[name][0], np.asarray(history)).limits
        assert limits.dtype == jnp.float64
        assert_limits(limits, oracle.limits(IN_FLOAT64[name], history), history, 1e-10)


@every_rule
def test_a_step_of_zero_nan_or_inf_leaves_no_trace(name):
    """Bit for bit: with bad norms in between, the limits of the good ones are those of the good ones alone."""
    alone, mixed = replayed(name).T[-2:]
    kept = np.isfinite(MIXED) & (MIXED > 0)
    assert kept.sum() == GOOD.size
    np.testing.assert_array_equal(mixed[kept], alone[: GOOD.size])


SCOPES = {
    "global": (lambda rule: optaxclip.clip_by_global_norm(rule), lambda tree: [list(tree)]),
    "tensor": (lambda rule: optaxclip.clip_by_tensor_norm(rule), lambda tree: [[name] for name in tree]),
    "group": (
        lambda rule: optaxclip.clip_by_group_norm(rule, {"lognormal": "a", "spikes": "b", "broken": "c", "falling": "a"}),
        lambda tree: [["lognormal", "falling"], ["spikes"], ["broken"]],
    ),
}


def gradients(names, shape=(3, 2), steps=120):
    """Random directions, as long as the histories say: {name: float32[steps, *shape]}."""
    random = np.random.default_rng(0)
    tree = {}
    for name in names:
        directions = random.standard_normal((steps, *shape))
        directions /= np.sqrt(np.sum(directions**2, axis=(1, 2), keepdims=True))
        with np.errstate(invalid="ignore"):
            tree[name] = np.asarray(directions * np.asarray(HISTORIES[name][:steps]).reshape(-1, 1, 1), np.float32)
    return tree


def run(clipper, grads):
    """The clipped gradients of a whole run, and the states."""
    first = jax.tree.map(lambda x: x[0], grads)

    def step(state, grads):
        clipped, state = clipper.update(grads, state)
        return state, (clipped, state)

    return jax.jit(lambda grads: jax.lax.scan(step, clipper.init(first), grads)[1])(jax.tree.map(jnp.asarray, grads))


def assert_clipped_together(grads, clipped, parts, equation, tolerance):
    for names in parts:
        norms = np.sqrt(sum(np.sum(np.asarray(grads[name], np.float64) ** 2, axis=(1, 2)) for name in names))
        limits = np.asarray(oracle.limits(equation, norms))
        scale = np.where(np.isfinite(norms), np.minimum(1, limits / np.where(norms > 0, norms, 1)), np.nan)
        for name in names:
            np.testing.assert_allclose(clipped[name], grads[name].astype(np.float64) * scale[:, None, None], rtol=tolerance, atol=1e-30)


# A window and a running average at every scope; one scope for each of the others, to which the kernel gives norms in the same way.
AT_SCOPES = [
    *((scope, name) for scope in SCOPES for name in ("quantile of the past", "z-score")),
    ("tensor", "OLMo-core"),
    ("group", "two rates"),
    ("tensor", "growth"),
    ("global", "tracker"),
    ("group", "capped"),
]


@pytest.mark.parametrize(("scope", "name"), AT_SCOPES)
def test_a_rule_clips_at_every_scope(scope, name):
    build, parts = SCOPES[scope]
    rule, equation, tolerance = RULES[name]
    grads = gradients(["lognormal", "spikes", "broken", "falling"])
    clipped, _ = run(build(rule), grads)
    assert_clipped_together(grads, clipped, parts(grads), equation, (tolerance + 16) * EPS)


NAMED = {
    "autoclip": (partial(optaxclip.autoclip, window=50), oracle.windowed_quantile(f(0.1), 50, current=True)),
    "zclip": (optaxclip.zclip, oracle.z_score(decay=f(0.97), eps=f(1e-6))),
    "zclip capped": (partial(optaxclip.zclip, cap=1.0), oracle.least(oracle.z_score(decay=f(0.97), eps=f(1e-6)), oracle.constant(1.0))),
}


NAMED_SCOPES = [*((scope, "zclip") for scope in SCOPES), ("global", "autoclip"), ("group", "autoclip"), ("tensor", "zclip capped")]


@pytest.mark.parametrize(("scope", "name"), NAMED_SCOPES)
def test_a_named_clipper_is_its_rule_at_every_scope(scope, name):
    grads = gradients(["lognormal", "spikes", "broken", "falling"])
    build, equation = NAMED[name]
    labels = {"lognormal": "a", "spikes": "b", "broken": "c", "falling": "a"}
    clipped, _ = run(build(scope=labels if scope == "group" else scope), grads)
    assert_clipped_together(grads, clipped, SCOPES[scope][1](grads), equation, 256 * EPS)


def test_adagc_is_global_while_it_warms_up_and_per_tensor_afterwards():
    names = ["lognormal", "spikes", "broken", "zeros"]
    grads = gradients(names, steps=200)
    norms = {name: np.sqrt(np.sum(np.asarray(grads[name], np.float64) ** 2, axis=(1, 2))) for name in names}
    limits = oracle.adagc(norms, max_norm=1.0, ratio=f(1.05), decay=f(0.98), warmup=30)
    clipped, _ = run(optaxclip.adagc(warmup=30), grads)
    for name in names:
        limit = np.asarray(limits[name])
        scale = np.where(np.isfinite(norms[name]), np.minimum(1, limit / np.where(norms[name] > 0, norms[name], 1)), np.nan)
        scale = np.where(norms[name] == 0, np.where(np.isnan(limit), np.nan, 1), scale)
        np.testing.assert_allclose(clipped[name], grads[name] * scale[:, None, None], rtol=128 * EPS, atol=1e-30)


@pytest.mark.parametrize("raise_small", [False, True])
def test_aggc_holds_each_group_in_its_band(raise_small):
    names, labels = ["lognormal", "spikes", "growing"], {"lognormal": "a", "spikes": "b", "growing": "b"}
    grads = gradients(names, steps=200)
    equation = oracle.ema_band(0.5, 1.5, f(0.95), f(0.01), f(1.1), f(0.9), raise_small=raise_small)
    clipped, _ = run(optaxclip.aggc(0.5, 1.5, scope=labels, raise_small=raise_small), grads)
    for group in (["lognormal"], ["spikes", "growing"]):
        norms = np.sqrt(sum(np.sum(np.asarray(grads[name], np.float64) ** 2, axis=(1, 2)) for name in group))
        scale = np.asarray(oracle.limits(equation, norms)) / norms
        for name in group:
            np.testing.assert_allclose(clipped[name], grads[name] * scale[:, None, None], rtol=128 * EPS)


def test_the_bands_edges_follow_schedules():
    low, high = (lambda step: 0.5 + 0.001 * step), (lambda step: 1.5 - 0.002 * step)
    history = HISTORIES["broken"][:120]
    limits = optaxclip.replay(optaxclip.ema_band(low, high, raise_small=True), history).limits
    equation = oracle.ema_band(low, high, f(0.95), f(0.01), f(1.1), f(0.9), raise_small=True)
    assert_limits(limits, oracle.limits(equation, history), history, 64 * EPS)


def test_adagn_gives_each_tensor_the_quotient_of_its_moments():
    names = ["lognormal", "spikes", "zeros"]
    grads = gradients(names)
    clipped, _ = run(optaxclip.adagn(), grads)
    for name in names:
        norms = np.sqrt(np.sum(np.asarray(grads[name], np.float64) ** 2, axis=(1, 2)))
        wanted = np.where(norms > 0, oracle.limits(oracle.adagn(f(0.7), f(0.9), 1e-8), norms), 0)
        np.testing.assert_allclose(np.sqrt(np.sum(np.asarray(clipped[name], np.float64) ** 2, axis=(1, 2))), wanted, rtol=64 * EPS)


def spiked(steps=120, shape=(4, 3)):
    random = np.random.default_rng(1)
    return np.asarray(random.standard_normal((steps, *shape)) * np.where(random.random((steps, *shape)) < 0.03, 1e3, 1.0), np.float32)


def test_adaclip_shortens_only_the_coordinates_over_the_limit():
    grads = spiked()
    clipped, _ = run(optaxclip.adaclip(0.9), {"w": grads})
    wanted = np.asarray(oracle.adaclip_values(list(grads), f(0.9)))
    np.testing.assert_allclose(clipped["w"], wanted, rtol=64 * EPS)
    untouched = wanted == grads
    assert 0.5 < untouched.mean() < 1
    np.testing.assert_array_equal(np.asarray(clipped["w"])[untouched], grads[untouched])


def test_spam_cuts_spikes_down_to_a_multiple_of_their_usual_square():
    grads = spiked()
    grads[50, 0, 0], grads[61, 1, 1] = np.nan, np.inf
    clipped, _ = run(optaxclip.spam(50.0, decay=0.99, warmup=10, every=40), {"w": grads})
    wanted = np.asarray(oracle.spam(list(grads), 50.0, f(0.99), 10, 40))
    np.testing.assert_allclose(clipped["w"], wanted, rtol=128 * EPS)
    assert np.sum(wanted != grads) > 20


def test_spam_takes_a_second_moment_from_elsewhere():
    clipper = optaxclip.spam(4.0, warmup=0)
    grads = {"w": jnp.array([1.0, -10.0, 10.0]), "index": jnp.arange(2)}
    state = clipper.init(grads)
    clipped, after = jax.jit(clipper.update)(grads, state, second_moment={"w": jnp.array([1.0, 4.0, 0.0]), "index": None})
    np.testing.assert_allclose(clipped["w"], [1.0, -4.0, 10.0], rtol=2 * EPS)
    np.testing.assert_array_equal(after.second_moment["w"], state.second_moment["w"])
    np.testing.assert_array_equal(clipped["index"], grads["index"])


BAD = {
    "windowed_quantile: quantile must be at most 1, got 1.5.": lambda: optaxclip.windowed_quantile(1.5),
    "windowed_quantile: quantile must be at least 0, got -0.1.": lambda: optaxclip.windowed_quantile(-0.1),
    "windowed_quantile: window must be at least 1, got 0.": lambda: optaxclip.windowed_quantile(0.5, 0),
    "windowed_mean: window must be a whole number, got 2.5.": lambda: optaxclip.windowed_mean(3, 2.5),
    "windowed_mean: remember must be 'raw' or 'clipped', got 'both'.": lambda: optaxclip.windowed_mean(remember="both"),
    "autoclip: percentile must be at most 100, got 101.": lambda: optaxclip.autoclip(101),
    "autoclip: scope must be 'global', 'tensor', or labels as in clip_by_group_norm, got 'layer'.": lambda: optaxclip.autoclip(scope="layer"),
    "z_score: target must be 'adaptive', 'mean' or 'max', got 'median'.": lambda: optaxclip.zclip(target="median"),
    "z_score: z must not be NaN, got nan.": lambda: optaxclip.z_score(math.nan),
    "z_score: warmup must be at least 1, got 0.": lambda: optaxclip.zclip(warmup=0),
    "ema_ratio: decay must be at most 1, got 2.": lambda: optaxclip.ema_ratio(1.0, 2),
    "growth: rate must be at least 0, got -1.": lambda: optaxclip.growth(-1),
    "quantile_tracker: start must be at least 0, got -1.": lambda: optaxclip.quantile_tracker(start=-1),
    "adagc: max_norm must be at least 0, got -1.0.": lambda: optaxclip.adagc(max_norm=-1.0),
    "aggc: scope must be 'global', 'tensor', or labels as in clip_by_group_norm, got None.": lambda: optaxclip.aggc(scope=None),
    "ema_band: up must be at least 1, got 0.5.": lambda: optaxclip.ema_band(up=0.5),
    "spam: every must be at least 1, got 0.": lambda: optaxclip.spam(every=0),
    "reset_momentum: warmup must be at least 0, got -1.": lambda: optaxclip.reset_momentum(None, warmup=-1),
    "least: rules must be at least one, got none.": lambda: optaxclip.least(),
    "least: rules[1] must be at least 0, got -1.": lambda: optaxclip.least(1.0, -1),
    "warm_up: steps must be at least 0, got -5.": lambda: optaxclip.warm_up(-5, 1.0, 2.0),
    "smooth: power must be at least 1, got 0.5.": lambda: optaxclip.smooth(0.5),
}


@pytest.mark.parametrize("text", BAD)
def test_bad_input_is_named(text):
    with pytest.raises(ValueError) as error:
        BAD[text]()
    assert str(error.value) == text


@pytest.mark.parametrize("bad", [True, "3", 1j])
def test_what_is_no_number_is_refused(bad):
    for build in (optaxclip.z_score, optaxclip.growth, optaxclip.windowed_mean, optaxclip.autoclip):
        with pytest.raises(TypeError, match="must be a real number"):
            build(bad)


def test_a_window_that_only_the_traced_program_knows_is_refused():
    with pytest.raises(TypeError, match="windowed_quantile: window must be known when the state is made"):
        jax.jit(lambda window: optaxclip.autoclip(window=window).init(jnp.zeros(2)))(10)
