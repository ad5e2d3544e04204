"""Rules that learn, beside the float64 oracle of their equations, over histories that
are steady, noisy, spiked, broken, growing, tiny and huge; at every scope.
"""

import math
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from tests import oracle_rules as oracle
from tests.helpers import FEW_STEPS, SMALL_FLOATS, apply, limits_of, scanned

STEPS = 400
HISTORIES = {name: norms[:STEPS] for name, norms in oracle.histories().items()}
EPS = float(np.finfo(np.float32).eps)


def f(number):
    """The number that a float32 program gets."""
    return float(np.float32(number))


# name: (rule, oracle, tolerance in float32 eps). A running average forgets rounding at
# its rate, so its error is about eps / (1 - decay); a logarithm of large norms
# multiplies it by log(norm); the tracker multiplies 400 factors.
RULES = {
    "quantile of the past": (
        optaxclip.rules.windowed_quantile(0.9, 100),
        oracle.windowed_quantile(f(0.9), 100),
        32,
    ),
    "percentile of all": (
        optaxclip.rules.windowed_quantile(0.1, 1000, current=True),
        oracle.windowed_quantile(f(0.1), 1000, current=True),
        32,
    ),
    "median, clipped": (
        optaxclip.rules.windowed_quantile(
            0.5, 64, factor=2.0, remember="clipped", warmup=10
        ),
        oracle.windowed_quantile(0.5, 64, factor=2.0, remember="clipped", warmup=10),
        32,
    ),
    "Levanter": (
        optaxclip.rules.windowed_mean(3, 128, floor=1e-6, warmup=64),
        oracle.windowed_mean(3, 128, floor=f(1e-6), warmup=64),
        32,
    ),
    "OLMo-core": (
        optaxclip.rules.windowed_mean(6, 128, ddof=1, warmup=63),
        oracle.windowed_mean(6, 128, ddof=1, warmup=63),
        32,
    ),
    "mean with the current": (
        optaxclip.rules.windowed_mean(
            1.5, 20, current=True, remember="clipped", warmup=5
        ),
        oracle.windowed_mean(1.5, 20, current=True, remember="clipped", warmup=5),
        64,
    ),
    "z-score": (
        optaxclip.rules.z_score(),
        oracle.z_score(decay=f(0.97), eps=f(1e-6)),
        128,
    ),
    "z-score to the mean": (
        optaxclip.rules.z_score(target="mean", eps=0.0),
        oracle.z_score(decay=f(0.97), target="mean", eps=0.0),
        128,
    ),
    "z-score to the edge": (
        optaxclip.rules.z_score(2.0, 0.9, target="max", warmup=1),
        oracle.z_score(2.0, f(0.9), 1, "max", f(1e-6)),
        128,
    ),
    "log-norm": (
        optaxclip.rules.log_z_score(warmup=50),
        oracle.log_z_score(decay=f(0.995), floor=f(0.01), spread=f(1e-3), warmup=50),
        512,
    ),
    "ratio": (optaxclip.rules.ema_ratio(1.5, 0.98), oracle.ema_ratio(1.5, f(0.98)), 64),
    "two rates": (
        optaxclip.rules.ema_ratio(
            2.0, 0.99, target=1.1, target_decay=0.9, corrected=True
        ),
        oracle.ema_ratio(2.0, f(0.99), f(1.1), f(0.9), corrected=True),
        128,
    ),
    "raw ratio": (
        optaxclip.rules.ema_ratio(1.5, 0.9, remember="raw", warmup=20),
        oracle.ema_ratio(1.5, f(0.9), remember="raw", warmup=20),
        64,
    ),
    "growth": (
        optaxclip.rules.growth(1.01, floor=0.5),
        oracle.growth(f(1.01), 0.5),
        64,
    ),
    "tracker": (
        optaxclip.rules.quantile_tracker(0.9, 0.2),
        oracle.quantile_tracker(f(0.9), f(0.2), f(0.1)),
        128,
    ),
    "band": (
        optaxclip.rules.ema_band(),
        oracle.ema_band(f(0.95), f(0.6), f(0.95), f(0.01), f(1.1), f(0.9)),
        64,
    ),
    "lifting band": (
        optaxclip.rules.ema_band(0.5, 1.5, raise_small=True),
        oracle.ema_band(0.5, 1.5, f(0.95), f(0.01), f(1.1), f(0.9), raise_small=True),
        64,
    ),
    "average": (optaxclip.rules.ema(0.99), oracle.adaclip(f(0.99)), 64),
    "quotient of moments": (
        optaxclip.rules.moments_ratio(),
        oracle.adagn(f(0.7), f(0.9)),
        64,
    ),
    "capped": (
        optaxclip.rules.minimum(optaxclip.rules.z_score(), 1.0),
        oracle.least(oracle.z_score(decay=f(0.97), eps=f(1e-6)), oracle.constant(1.0)),
        128,
    ),
    "floored": (
        optaxclip.rules.maximum(optaxclip.rules.growth(), 0.7),
        oracle.at_least(oracle.growth(f(1.01)), f(0.7)),
        64,
    ),
    "warmed up": (
        optaxclip.rules.warm_up(20, 1.0, optaxclip.rules.ema_ratio(1.5, 0.98)),
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


# Good norms, and the same with bad ones in between; what stands behind them makes both
# columns equally long.
BAD_STEPS = 25
GOOD = np.asarray(HISTORIES["spikes"][: STEPS - BAD_STEPS], np.float32)
MIXED = np.insert(
    GOOD,
    np.sort(np.random.default_rng(3).choice(80, BAD_STEPS)),
    np.resize([np.nan, np.inf, 0.0], BAD_STEPS).astype(np.float32),
)


@cache
def replayed(name):
    """The limits of a rule over all histories, side by side in one program:
    float32[steps, histories + 2].
    """
    columns = [*HISTORIES.values(), np.concatenate([GOOD, np.ones(BAD_STEPS)]), MIXED]
    return np.asarray(
        optaxclip.replay.run(
            RULES[name][0], np.stack(columns, axis=1).astype(np.float32)
        ).limits
    )


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
    """All numbers are those of a float64 program here; what is left is the order of
    operations.
    """
    history = HISTORIES["spikes"][:150]
    with jax.enable_x64(True):
        limits = optaxclip.replay.run(RULES[name][0], np.asarray(history)).limits
        assert limits.dtype == jnp.float64
        assert_limits(limits, oracle.limits(IN_FLOAT64[name], history), history, 1e-10)


@every_rule
def test_a_step_of_zero_nan_or_inf_leaves_no_trace(name):
    """Bit for bit: with bad norms in between, the limits of the good ones are those of
    the good ones alone.
    """
    alone, mixed = replayed(name).T[-2:]
    kept = np.isfinite(MIXED) & (MIXED > 0)
    assert kept.sum() == GOOD.size
    np.testing.assert_array_equal(mixed[kept], alone[: GOOD.size])


SCOPES = {
    "global": (
        lambda rule: optaxclip.clip_by_global_norm(rule),
        lambda tree: [list(tree)],
    ),
    "tensor": (
        lambda rule: optaxclip.clip_by_tensor_norm(rule),
        lambda tree: [[name] for name in tree],
    ),
    "group": (
        lambda rule: optaxclip.clip_by_group_norm(
            rule, {"lognormal": "a", "spikes": "b", "broken": "c", "falling": "a"}
        ),
        lambda tree: [["lognormal", "falling"], ["spikes"], ["broken"]],
    ),
}


def gradients(names, shape=(3, 2), steps=120):
    """Random directions, as long as the histories say: {name: float32[steps,
    *shape]}.
    """
    random = np.random.default_rng(0)
    tree = {}
    for name in names:
        directions = random.standard_normal((steps, *shape))
        directions /= np.sqrt(np.sum(directions**2, axis=(1, 2), keepdims=True))
        with np.errstate(invalid="ignore"):
            tree[name] = np.asarray(
                directions * np.asarray(HISTORIES[name][:steps]).reshape(-1, 1, 1),
                np.float32,
            )
    return tree


def run(clipper, grads):
    """The clipped gradients of a whole run, and the states."""
    first = jax.tree.map(lambda x: x[0], grads)

    def step(state, grads):
        clipped, state = clipper.update(grads, state)
        return state, (clipped, state)

    return jax.jit(lambda grads: jax.lax.scan(step, clipper.init(first), grads)[1])(
        jax.tree.map(jnp.asarray, grads)
    )


def assert_clipped_together(grads, clipped, parts, equation, tolerance):
    for names in parts:
        norms = np.sqrt(
            sum(
                np.sum(np.asarray(grads[name], np.float64) ** 2, axis=(1, 2))
                for name in names
            )
        )
        limits = np.asarray(oracle.limits(equation, norms))
        scale = np.where(
            np.isfinite(norms),
            np.minimum(1, limits / np.where(norms > 0, norms, 1)),
            np.nan,
        )
        for name in names:
            np.testing.assert_allclose(
                clipped[name],
                grads[name].astype(np.float64) * scale[:, None, None],
                rtol=tolerance,
                atol=1e-30,
            )


# A window and a running average at every scope; one scope for each of the others, to
# which the kernel gives norms in the same way.
AT_SCOPES = [
    *(
        (scope, name)
        for scope in SCOPES
        for name in ("quantile of the past", "z-score")
    ),
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
    assert_clipped_together(
        grads, clipped, parts(grads), equation, (tolerance + 16) * EPS
    )


NAMED = {
    "autoclip": (
        partial(optaxclip.autoclip, window=50),
        oracle.windowed_quantile(f(0.1), 50, current=True),
    ),
    "zclip": (optaxclip.zclip, oracle.z_score(decay=f(0.97), eps=f(1e-6))),
    "zclip capped": (
        partial(optaxclip.zclip, cap=1.0),
        oracle.least(oracle.z_score(decay=f(0.97), eps=f(1e-6)), oracle.constant(1.0)),
    ),
}


NAMED_SCOPES = [
    *((scope, "zclip") for scope in SCOPES),
    ("global", "autoclip"),
    ("group", "autoclip"),
    ("tensor", "zclip capped"),
]


@pytest.mark.parametrize(("scope", "name"), NAMED_SCOPES)
def test_a_named_clipper_is_its_rule_at_every_scope(scope, name):
    grads = gradients(["lognormal", "spikes", "broken", "falling"])
    build, equation = NAMED[name]
    labels = {"lognormal": "a", "spikes": "b", "broken": "c", "falling": "a"}
    clipped, _ = run(build(scope=labels if scope == "group" else scope), grads)
    assert_clipped_together(
        grads, clipped, SCOPES[scope][1](grads), equation, 256 * EPS
    )


def test_adagc_is_global_in_its_warm_up_and_per_tensor_after():
    names = ["lognormal", "spikes", "broken", "zeros"]
    grads = gradients(names, steps=200)
    norms = {
        name: np.sqrt(np.sum(np.asarray(grads[name], np.float64) ** 2, axis=(1, 2)))
        for name in names
    }
    limits = oracle.adagc(norms, max_norm=1.0, ratio=f(1.05), decay=f(0.98), warmup=30)
    clipped, _ = run(optaxclip.adagc(warmup=30), grads)
    for name in names:
        limit = np.asarray(limits[name])
        scale = np.where(
            np.isfinite(norms[name]),
            np.minimum(1, limit / np.where(norms[name] > 0, norms[name], 1)),
            np.nan,
        )
        scale = np.where(norms[name] == 0, np.where(np.isnan(limit), np.nan, 1), scale)
        np.testing.assert_allclose(
            clipped[name],
            grads[name] * scale[:, None, None],
            rtol=128 * EPS,
            atol=1e-30,
        )


@pytest.mark.parametrize("raise_small", [False, True])
def test_aggc_holds_each_group_in_its_band(raise_small):
    names, labels = (
        ["lognormal", "spikes", "growing"],
        {"lognormal": "a", "spikes": "b", "growing": "b"},
    )
    grads = gradients(names, steps=200)
    equation = oracle.ema_band(
        0.5, 1.5, f(0.95), f(0.01), f(1.1), f(0.9), raise_small=raise_small
    )
    clipped, _ = run(
        optaxclip.aggc(0.5, 1.5, scope=labels, raise_small=raise_small), grads
    )
    for group in (["lognormal"], ["spikes", "growing"]):
        norms = np.sqrt(
            sum(
                np.sum(np.asarray(grads[name], np.float64) ** 2, axis=(1, 2))
                for name in group
            )
        )
        scale = np.asarray(oracle.limits(equation, norms)) / norms
        for name in group:
            np.testing.assert_allclose(
                clipped[name], grads[name] * scale[:, None, None], rtol=128 * EPS
            )


def test_the_bands_edges_follow_schedules():
    low, high = (lambda step: 0.5 + 0.001 * step), (lambda step: 1.5 - 0.002 * step)
    history = HISTORIES["broken"][:120]
    limits = optaxclip.replay.run(
        optaxclip.rules.ema_band(low, high, raise_small=True), history
    ).limits
    equation = oracle.ema_band(
        low, high, f(0.95), f(0.01), f(1.1), f(0.9), raise_small=True
    )
    assert_limits(limits, oracle.limits(equation, history), history, 64 * EPS)


def test_adagn_gives_each_tensor_the_quotient_of_its_moments():
    names = ["lognormal", "spikes", "zeros"]
    grads = gradients(names)
    clipped, _ = run(optaxclip.adagn(), grads)
    for name in names:
        norms = np.sqrt(np.sum(np.asarray(grads[name], np.float64) ** 2, axis=(1, 2)))
        wanted = np.where(
            norms > 0, oracle.limits(oracle.adagn(f(0.7), f(0.9), 1e-8), norms), 0
        )
        np.testing.assert_allclose(
            np.sqrt(np.sum(np.asarray(clipped[name], np.float64) ** 2, axis=(1, 2))),
            wanted,
            rtol=64 * EPS,
        )


def spiked(steps=120, shape=(4, 3)):
    random = np.random.default_rng(1)
    return np.asarray(
        random.standard_normal((steps, *shape))
        * np.where(random.random((steps, *shape)) < 0.03, 1e3, 1.0),
        np.float32,
    )


def test_adaclip_shortens_only_the_coordinates_over_the_limit():
    grads = spiked()
    clipped, _ = run(optaxclip.adaclip(0.9), {"w": grads})
    wanted = np.asarray(oracle.adaclip_values(list(grads), f(0.9)))
    np.testing.assert_allclose(clipped["w"], wanted, rtol=64 * EPS)
    untouched = wanted == grads
    assert 0.5 < untouched.mean() < 1
    np.testing.assert_array_equal(np.asarray(clipped["w"])[untouched], grads[untouched])


def test_spam_cuts_spikes_to_a_multiple_of_their_usual_square():
    grads = spiked()
    grads[50, 0, 0], grads[61, 1, 1] = np.nan, np.inf
    clipped, _ = run(
        optaxclip.spam(50.0, decay=0.99, warmup=10, every=40), {"w": grads}
    )
    wanted = np.asarray(oracle.spam(list(grads), 50.0, f(0.99), 10, 40))
    np.testing.assert_allclose(clipped["w"], wanted, rtol=128 * EPS)
    assert np.sum(wanted != grads) > 20


def test_spam_takes_a_second_moment_from_elsewhere():
    clipper = optaxclip.spam(4.0, warmup=0)
    grads = {"w": jnp.array([1.0, -10.0, 10.0]), "index": jnp.arange(2)}
    state = clipper.init(grads)
    clipped, after = jax.jit(clipper.update)(
        grads, state, second_moment={"w": jnp.array([1.0, 4.0, 0.0]), "index": None}
    )
    np.testing.assert_allclose(clipped["w"], [1.0, -4.0, 10.0], rtol=2 * EPS)
    np.testing.assert_array_equal(after.second_moment["w"], state.second_moment["w"])
    np.testing.assert_array_equal(clipped["index"], grads["index"])


BAD_SCOPE = "scope must be 'global', 'tensor', or labels as in clip_by_group_norm"
BAD = {
    "windowed_quantile: quantile must be at most 1, got 1.5.": lambda: (
        optaxclip.rules.windowed_quantile(1.5)
    ),
    "windowed_quantile: quantile must be at least 0, got -0.1.": lambda: (
        optaxclip.rules.windowed_quantile(-0.1)
    ),
    "windowed_quantile: window must be at least 1, got 0.": lambda: (
        optaxclip.rules.windowed_quantile(0.5, 0)
    ),
    "windowed_mean: window must be a whole number, got 2.5.": lambda: (
        optaxclip.rules.windowed_mean(3, 2.5)
    ),
    "windowed_mean: remember must be 'raw' or 'clipped', got 'both'.": lambda: (
        optaxclip.rules.windowed_mean(remember="both")
    ),
    "autoclip: percentile must be at most 100, got 101.": lambda: optaxclip.autoclip(
        101
    ),
    f"autoclip: {BAD_SCOPE}, got 'unit'.": lambda: optaxclip.autoclip(scope="unit"),
    "zclip: target must be 'adaptive', 'mean' or 'max', got 'median'.": lambda: (
        optaxclip.zclip(target="median")
    ),
    "z_score: z must not be NaN, got nan.": lambda: optaxclip.rules.z_score(math.nan),
    "zclip: warmup must be at least 1, got 0.": lambda: optaxclip.zclip(warmup=0),
    "ema_ratio: decay must be at most 1, got 2.": lambda: optaxclip.rules.ema_ratio(
        1.0, 2
    ),
    "growth: rate must be at least 0, got -1.": lambda: optaxclip.rules.growth(-1),
    "quantile_tracker: start must be at least 0, got -1.": lambda: (
        optaxclip.rules.quantile_tracker(start=-1)
    ),
    "adagc: max_norm must be at least 0, got -1.0.": lambda: optaxclip.adagc(
        max_norm=-1.0
    ),
    f"aggc: {BAD_SCOPE}, got None.": lambda: optaxclip.aggc(scope=None),
    "ema_band: up must be at least 1, got 0.5.": lambda: optaxclip.rules.ema_band(
        up=0.5
    ),
    "spam: every must be at least 1, got 0.": lambda: optaxclip.spam(every=0),
    "reset_momentum: warmup must be at least 0, got -1.": lambda: (
        optaxclip.reset_momentum(None, warmup=-1)
    ),
    "minimum: rules must be at least one, got none.": lambda: optaxclip.rules.minimum(),
    "minimum: rules[1] must be at least 0, got -1.": lambda: optaxclip.rules.minimum(
        1.0, -1
    ),
    "warm_up: steps must be at least 0, got -5.": lambda: optaxclip.rules.warm_up(
        -5, 1.0, 2.0
    ),
    "smooth: power must be at least 1, got 0.5.": lambda: optaxclip.shrinks.smooth(0.5),
}


@pytest.mark.parametrize("text", BAD)
def test_bad_input_is_named(text):
    with pytest.raises(ValueError) as error:
        BAD[text]()
    assert str(error.value) == text


@pytest.mark.parametrize("bad", [True, "3", 1j])
def test_what_is_no_number_is_refused(bad):
    for build in (
        optaxclip.rules.z_score,
        optaxclip.rules.growth,
        optaxclip.rules.windowed_mean,
        optaxclip.autoclip,
    ):
        with pytest.raises(TypeError, match="must be a real number"):
            build(bad)


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        ("windowed_mean", "current"),
        ("windowed_quantile", "current"),
        ("ema_ratio", "corrected"),
        ("ema_band", "raise_small"),
    ],
)
def test_what_is_neither_true_nor_false_is_refused(rule, name):
    build = getattr(optaxclip.rules, rule)
    with pytest.raises(TypeError) as error:
        build(**{name: "yes"})
    assert str(error.value) == f"{rule}: {name} must be True or False, got 'yes'."
    for flag in (np.bool_(True), jnp.array(True), 1):
        build(**{name: flag})


def test_a_window_that_only_the_traced_program_knows_is_refused():
    with pytest.raises(
        TypeError,
        match="autoclip: window must be known when the state is made",
    ):
        jax.jit(lambda window: optaxclip.autoclip(window=window).init(jnp.zeros(2)))(10)


# (rule, parameter, up to step 5, afterwards, does it act on the limit of its own step,
# or of the next?, others)
SCHEDULED = [
    (optaxclip.rules.windowed_quantile, "quantile", 0.3, 0.8, "own", {}),
    (optaxclip.rules.windowed_quantile, "factor", 1.5, 0.5, "own", {}),
    (optaxclip.rules.windowed_mean, "sigmas", 1.0, 2.0, "own", {}),
    (optaxclip.rules.windowed_mean, "floor", 5.0, 1.0, "own", {}),
    (optaxclip.rules.z_score, "z", 0.1, 2.0, "own", {"warmup": 2}),
    (optaxclip.rules.log_z_score, "z", 0.5, 2.0, "own", {"warmup": 2}),
    (optaxclip.rules.log_z_score, "spread", 1.0, 2.0, "own", {"warmup": 2}),
    (optaxclip.rules.ema_ratio, "ratio", 1.1, 2.0, "own", {}),
    (optaxclip.rules.ema_ratio, "decay", 0.9, 0.5, "next", {"ratio": 4.0}),
    (optaxclip.rules.growth, "rate", 1.1, 2.0, "own", {}),
    (optaxclip.rules.growth, "floor", 9.0, 10.0, "own", {}),
    (optaxclip.rules.quantile_tracker, "quantile", 0.9, 0.1, "next", {}),
    (optaxclip.rules.quantile_tracker, "rate", 0.2, 0.7, "next", {}),
    (optaxclip.rules.ema_band, "high", 0.8, 0.7, "own", {"down": 0.0}),
    (optaxclip.rules.ema_band, "down", 0.99, 0.9, "own", {"high": 0.1}),
    (optaxclip.rules.ema, "decay", 0.9, 0.2, "own", {}),
    (optaxclip.rules.moments_ratio, "decay1", 0.9, 0.2, "own", {}),
]


@pytest.mark.parametrize(
    ("build", "name", "before", "after", "acts", "others"),
    SCHEDULED,
    ids=[f"{case[0].__name__} {case[1]}" for case in SCHEDULED],
)
def test_a_schedule_counts_steps_from_0(build, name, before, after, acts, others):
    norms = np.exp(0.3 * np.random.default_rng(0).standard_normal(FEW_STEPS)).astype(
        np.float32
    )
    same = 6 if acts == "own" else 7  # as many limits can not know of the change
    values = before, lambda step: jnp.where(step < 6, before, after)
    both = jax.jit(
        lambda norms: [
            optaxclip.replay.run(build(**others, **{name: value}), norms).limits
            for value in values
        ]
    )
    constant_limits, limits = map(np.asarray, both(norms))
    np.testing.assert_allclose(limits[:same], constant_limits[:same], rtol=1e-6)
    assert abs(limits[same] - constant_limits[same]) > 1e-3 * constant_limits[same]


def test_the_first_value_is_the_average_whatever_the_decay():
    for rule in (optaxclip.rules.ema(1.0), optaxclip.rules.ema(0.0)):
        assert limits_of(rule, [2.0]) == 2.0
    np.testing.assert_array_equal(
        limits_of(optaxclip.rules.ema_ratio(1.5, 1.0), [2.0, 3.0, 3.0]),
        [np.inf, 3.0, 3.0],
    )


@pytest.mark.parametrize(
    "build", [optaxclip.rules.windowed_quantile, optaxclip.rules.ema_ratio]
)
def test_without_a_warmup_the_first_norm_has_no_limit_either(build):
    limits = limits_of(build(warmup=0), [2.0, 2.0])
    assert np.isinf(limits[0]) and np.isfinite(limits[1])


def test_a_deviation_of_a_sample_wants_two_norms():
    limits = limits_of(optaxclip.rules.windowed_mean(ddof=1, warmup=0), [2.0, 4.0, 4.0])
    assert np.isinf(limits[:2]).all()
    np.testing.assert_allclose(limits[2], 3 + 3 * 2**0.5, rtol=1e-6)


def test_norms_that_differ_by_little_keep_their_deviation():
    norms = 8192 + np.array([0, 3, 1, 5, 2, 4, 0]) * 2.0**-9
    limit = limits_of(optaxclip.rules.windowed_mean(1e6, 16), norms)[-1]
    np.testing.assert_allclose(
        limit, np.mean(norms[:-1]) + 1e6 * np.std(norms[:-1]), rtol=1e-5
    )


@pytest.mark.parametrize("current", [False, True])
@pytest.mark.parametrize("quantile", [0.0, 0.3, 1.0])
def test_norms_that_tie_keep_their_order_in_the_window(quantile, current):
    norms = np.random.default_rng(0).integers(1, 4, 60).astype(np.float32)
    limits = optaxclip.replay.run(
        optaxclip.rules.windowed_quantile(quantile, 5, current=current), norms
    ).limits
    wanted = [
        np.quantile(held, quantile)
        if (held := norms[max(0, i - 5 + current) : i + current]).size
        else np.inf
        for i in range(60)
    ]
    np.testing.assert_allclose(limits, wanted, rtol=1e-6)


def test_autoclips_percentile_follows_its_schedule_from_step_0():
    clipper = optaxclip.autoclip(lambda step: 100.0 * (step < 2))
    state = clipper.init(jnp.zeros(1))
    limits = []
    for norm in (1.0, 2.0, 3.0):
        _, state = clipper.update(jnp.array([norm]), state)
        limits.append(float(state.limit))
    assert limits == [1.0, 2.0, 1.0]


def test_tracker_counts_its_limit_as_within_and_stays_in_range():
    limits = limits_of(
        optaxclip.rules.quantile_tracker(0.5, 0.2, start=1.0), [1.0, 1.0]
    )
    np.testing.assert_allclose(limits, [1.0, np.exp(-0.1)], rtol=1e-6)
    down = limits_of(
        optaxclip.rules.quantile_tracker(0.0, 50.0, start=1e-20), [1e-38, 1e-38, 1e-38]
    )
    assert down[-1] >= np.finfo(np.float32).tiny
    up = limits_of(
        optaxclip.rules.quantile_tracker(1.0, 1.0, start=1e38), [3e38, 3e38, 3e38]
    )
    assert np.isfinite(up).all()
    far = limits_of(optaxclip.rules.quantile_tracker(0.5, 200.0, start=1.0), [2.0, 2.0])
    assert np.isfinite(far).all() and far[1] > 1e38


def run_of(clipper, norms, **extra):
    updates = jnp.zeros(1)
    state = clipper.init(updates)
    for norm in norms:
        updates, state = clipper.update(jnp.array([norm]), state, **extra)
    return float(updates[0]), state


SAME = {
    "zclip": (
        lambda: optaxclip.zclip(0.5, 0.8, target="max", warmup=2, eps=0.5),
        lambda: optaxclip.rules.z_score(0.5, 0.8, target="max", warmup=2, eps=0.5),
        None,
    ),
    "adagn": (
        lambda: optaxclip.adagn(0.5, 0.6, eps=0.3),
        lambda: optaxclip.rules.moments_ratio(0.5, 0.6, eps=0.3),
        optaxclip.shrinks.normalize,
    ),
    "adagn, global": (
        lambda: optaxclip.adagn(scope="global"),
        optaxclip.rules.moments_ratio,
        optaxclip.shrinks.normalize,
    ),
    "adagn, groups": (
        lambda: optaxclip.adagn(scope=lambda tree: "all"),
        optaxclip.rules.moments_ratio,
        optaxclip.shrinks.normalize,
    ),
    "autoclip": (
        lambda: optaxclip.autoclip(30, 3),
        lambda: optaxclip.rules.windowed_quantile(0.3, 3, current=True),
        None,
    ),
    "aggc": (
        lambda: optaxclip.aggc(
            0.9,
            0.8,
            scope="global",
            decay=0.5,
            floor=0.2,
            up=1.5,
            down=0.3,
            raise_small=True,
        ),
        lambda: optaxclip.rules.ema_band(
            0.9, 0.8, 0.5, floor=0.2, up=1.5, down=0.3, raise_small=True
        ),
        optaxclip.shrinks.normalize,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAME)
def test_a_named_clipper_hands_all_its_arguments_to_its_rule(name):
    build, rule, shrink = SAME[name]
    norms = [1.0, 1.4, 0.7, 3.0, 0.1]
    one, state = run_of(build(), norms)
    other, wanted = run_of(optaxclip.clip_by_global_norm(rule(), shrink=shrink), norms)
    np.testing.assert_allclose(one, other, rtol=1e-6)
    (limit,) = (entry.limit for entry in state.by_name().values())
    np.testing.assert_allclose(limit, wanted.limit, rtol=1e-6)


@pytest.mark.parametrize(
    "scope",
    ["global", "tensor", lambda tree: "all"],
    ids=["global", "tensor", "groups"],
)
def test_a_scope_hands_on_nonfinite_and_mesh_axes(scope):
    assert (
        run_of(optaxclip.zclip(scope=scope, nonfinite="zero"), [1.0, np.nan])[0] == 0.0
    )
    clipper = optaxclip.zclip(scope=scope, mesh_axes="nowhere")
    state = clipper.init(jnp.zeros(1))
    with pytest.raises(
        ValueError, match=r"mesh_axes='nowhere': there is no such axis here"
    ):
        clipper.update(jnp.ones(1), state)


@pytest.mark.slow
def test_adagc_takes_norms_from_elsewhere_and_limits_from_step_0():
    clipper = optaxclip.adagc(max_norm=lambda step: 1.0 + step)
    grads = {"a": jnp.array([3.0, 4.0])}
    updates, state = clipper.update(grads, clipper.init(grads))
    np.testing.assert_allclose(updates["a"], [0.6, 0.8], rtol=1e-6)
    updates, _ = clipper.update(grads, state, grad_norm={"a": jnp.float32(20.0)})
    np.testing.assert_allclose(updates["a"], [0.3, 0.4], rtol=1e-6)


@pytest.mark.slow
def test_adaclip_takes_stacked_grad_norm_and_nonfinite():
    grads = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    _, state = apply(optaxclip.adaclip(stacked=1), grads)
    np.testing.assert_array_equal(state.norm, [[2.0], [4.0]])
    _, state = apply(optaxclip.adaclip(), grads, grad_norm=jnp.float32(8.0))
    assert state.norm == 8.0
    updates, _ = apply(optaxclip.adaclip(nonfinite="zero"), grads.at[0, 0].set(jnp.nan))
    assert not updates.any()


@pytest.mark.slow
def test_adaclip_makes_a_broken_tensor_nan_and_keeps_what_fits():
    clipper = optaxclip.adaclip(0.5)
    _, first = clipper.update(jnp.array([1.0, 0.5]), clipper.init(jnp.zeros(2)))
    for bad in (jnp.nan, jnp.inf):
        updates, _ = clipper.update(jnp.array([bad, 0.5]), first)
        assert np.isnan(updates).all()
    _, second = clipper.update(jnp.array([3.0, 0.5]), first)
    updates, _ = clipper.update(jnp.array([3.0, second.limit]), first)
    assert updates[1] == second.limit and updates[0] < 3.0


@pytest.mark.slow
def test_spam_keeps_squares_wide_and_schedules_from_step_0():
    with jax.enable_x64(True):
        params = {
            "h": jnp.ones(1, jnp.bfloat16),
            "s": jnp.ones(1, jnp.complex64),
            "d": jnp.ones(1, jnp.float64),
            "z": jnp.ones(1, jnp.complex128),
        }
        moments = optaxclip.spam().init(params).second_moment
        assert {name: str(leaf.dtype) for name, leaf in moments.items()} == {
            "h": "float32",
            "s": "float32",
            "d": "float64",
            "z": "float64",
        }
    clipper = optaxclip.spam(
        lambda step: 4.0 + 5.0 * step, decay=lambda step: 0.75 * (step == 0), warmup=0
    )
    grads = jnp.array([-8.0, 1.0])
    _, state = clipper.update(grads, clipper.init(grads))
    np.testing.assert_allclose(state.second_moment, [16.0, 0.25])
    updates, state = clipper.update(
        4 * grads, state
    )  # the limit is 9 times the usual square
    np.testing.assert_allclose(updates, [-12.0, 1.5], rtol=1e-6)
    np.testing.assert_allclose(state.second_moment, [144.0, 2.25], rtol=1e-6)


@pytest.mark.slow
def test_spam_does_not_learn_from_broken_coordinates():
    clipper = optaxclip.spam(warmup=0)
    _, state = clipper.update(jnp.array([2.0, 2.0, 2.0]), clipper.init(jnp.zeros(3)))
    updates, after = clipper.update(jnp.array([jnp.nan, jnp.inf, 2.0]), state)
    np.testing.assert_array_equal(after.second_moment[:2], state.second_moment[:2])
    assert (
        after.second_moment[2] > state.second_moment[2]
        and np.isnan(updates[0])
        and np.isfinite(updates[1])
    )


@pytest.mark.slow
def test_spam_keeps_the_average_of_a_leaf_that_is_missing():
    clipper = optaxclip.spam(warmup=0)
    _, state = clipper.update(
        {"a": jnp.array([2.0]), "b": jnp.array([2.0])},
        clipper.init({"a": jnp.zeros(1), "b": jnp.zeros(1)}),
    )
    _, after = clipper.update({"a": None, "b": jnp.array([2.0])}, state)
    assert (
        after.second_moment["a"] == state.second_moment["a"] > 0
        and after.second_moment["b"] > state.second_moment["b"]
    )


@pytest.mark.slow
def test_spam_passes_on_leaves_that_are_not_clipped():
    tree = {"w": jnp.ones(2), "steps": jnp.ones(3, int), "key": jax.random.key(0)}
    clipper = optaxclip.spam(4.0, warmup=0)
    _, state = clipper.update(tree, clipper.init(tree))
    updates, _ = clipper.update({**tree, "w": jnp.full(2, 9.0)}, state)
    assert updates["key"] == tree["key"]
    np.testing.assert_array_equal(updates["steps"], tree["steps"])
    assert np.all(updates["w"] < 1)


@pytest.mark.slow
def test_spam_keeps_its_own_average_where_another_is_given():
    clipper = optaxclip.spam(every=1, warmup=0)
    _, state = clipper.update(jnp.array([2.0]), clipper.init(jnp.zeros(1)))
    _, after = clipper.update(jnp.array([2.0]), state, second_moment=jnp.array([1.0]))
    assert after.second_moment == state.second_moment > 0


@pytest.mark.slow
def test_spam_that_never_starts_anew_clips_after_its_warmup():
    clipper = optaxclip.spam(1.0, warmup=3, every=None)
    state = clipper.init(jnp.zeros(1))
    through = []
    for norm in (1.0, 1.0, 5.0):
        updates, state = clipper.update(jnp.array([norm]), state)
        through.append(float(updates[0]))
    assert through[:2] == [1.0, 1.0] and through[2] < 1.0


@pytest.mark.slow
def test_momentum_starts_anew_and_the_step_rises_along_a_cosine():
    optimizer = optaxclip.reset_momentum(optax.scale_by_adam(), every=10, warmup=4)
    grads = {
        "w": jnp.asarray(np.random.default_rng(0).standard_normal((25, 3)), jnp.float32)
    }
    _, updates = scanned(optimizer, grads)
    for start, end in ((0, 9), (9, 19), (19, 25)):
        _, wanted = scanned(optax.scale_by_adam(), {"w": grads["w"][start:end]})
        k = np.arange(end - start)
        scale = np.where(
            (start > 0) & (k < 4), 1 - 0.99 * (1 + np.cos(np.pi * k / 4)) / 2, 1.0
        )
        np.testing.assert_allclose(
            updates["w"][start:end], wanted["w"] * scale[:, None], rtol=1e-5
        )


@pytest.mark.slow
def test_reset_momentum_names_itself_and_restarts_from_weights():
    for text, build in {
        "reset_momentum: every must be at least 1": lambda: optaxclip.reset_momentum(
            optax.identity(), every=0
        ),
        "reset_momentum: every must be a whole number": lambda: (
            optaxclip.reset_momentum(optax.identity(), every=1.5)
        ),
        "spam: every must be a whole number": lambda: optaxclip.spam(every=1.5),
    }.items():
        with pytest.raises(ValueError, match=rf"^{text}"):
            build()
    keeps = optax.GradientTransformation(
        lambda params: params, lambda updates, state, params=None: (updates, state)
    )
    optimizer = optaxclip.reset_momentum(keeps, every=1)
    _, state = optimizer.update(
        jnp.array([5.0]), optimizer.init(jnp.array([0.0])), jnp.array([7.0])
    )
    assert state.inner_state == 7.0


# After 1 the average of squares is 1/4, so that the next bound is sqrt(16 / 4) = 2.
SPAM_TO_2 = {"threshold": 16.0, "decay": 0.75, "warmup": 0, "every": None}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", SMALL_FLOATS)
def test_spam_cuts_spikes_of_small_floats(dtype):
    clipper = optaxclip.spam(**SPAM_TO_2)
    _, state = clipper.update(jnp.ones(2, dtype), clipper.init(jnp.ones(2, dtype)))
    updates, state = clipper.update(jnp.array([4.0, 1.0], dtype), state)
    np.testing.assert_array_equal(updates.astype(jnp.float32), [2.0, 1.0])
    np.testing.assert_array_equal(state.second_moment, [1.1875, 0.4375])
    assert updates.dtype == dtype and state.second_moment.dtype == jnp.float32


@pytest.mark.slow
def test_spam_cuts_a_python_number():
    clipper = optaxclip.spam(**SPAM_TO_2)
    _, state = clipper.update(1.0, clipper.init(1.0))
    assert clipper.update(4.0, state)[0] == 2.0


@pytest.mark.parametrize(
    "clipper",
    [optaxclip.spam(), optaxclip.reset_momentum(optax.identity())],
    ids=["spam", "reset_momentum"],
)
def test_spam_and_reset_momentum_keep_weak_type(clipper):
    for grads in (jnp.full((3, 2), 2.0), jnp.ones((3, 2))):
        updates, _ = clipper.update(grads, clipper.init(grads))
        assert (updates.weak_type, updates.dtype) == (grads.weak_type, grads.dtype)


def test_reset_momentum_lets_only_floats_rise():
    grads = {
        "float": jnp.ones(2),
        "half": jnp.full(2, 3.0, jnp.bfloat16),
        "integer": jnp.arange(3),
        "bool": jnp.array([True, False]),
        "float0": np.zeros(2, jax.dtypes.float0),
        "key": jax.random.key(0),
    }
    optimizer = optaxclip.reset_momentum(optax.identity(), every=1, warmup=4)
    updates, _ = optimizer.update(grads, optimizer.init(grads))
    for name in ("integer", "bool", "float0", "key"):
        assert updates.pop(name) is grads[name]
    np.testing.assert_allclose(updates["float"], [0.01, 0.01], rtol=1e-5)
    np.testing.assert_array_equal(updates["half"], jnp.full(2, 0.03, jnp.bfloat16))


@pytest.mark.slow
def test_reset_momentum_takes_strict_promotion():
    optimizer = optaxclip.reset_momentum(optax.trace(0.9), every=2, warmup=4)
    grads = jnp.ones(2)
    with jax.numpy_dtype_promotion("strict"):
        _, state = optimizer.update(grads, optimizer.init(grads))
        updates, _ = optimizer.update(grads, state)
    np.testing.assert_allclose(updates, [0.01, 0.01], rtol=1e-5)


@pytest.mark.parametrize(
    "rule", [optaxclip.rules.windowed_mean, optaxclip.rules.windowed_quantile]
)
def test_a_restored_window_goes_on_with_its_own_length(rule):
    def clipper(window):
        return optaxclip.clip_by_global_norm(rule(window=window, current=True))

    old = clipper(3).init(jnp.zeros(1))
    kept = other = old
    for norm in (1.0, 5.0, 2.0, 7.0, 3.0):
        _, kept = clipper(3).update(jnp.array([norm]), kept)
        _, other = clipper(5).update(jnp.array([norm]), other)
    jax.tree.map(np.testing.assert_array_equal, other, kept)
