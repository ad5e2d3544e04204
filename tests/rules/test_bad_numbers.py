"""What is no number of a rule is refused, and named."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip

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
    "windowed_mean: ddof must be at most 3, got 4.": lambda: (
        optaxclip.rules.windowed_mean(2.0, 4, ddof=4)
    ),
    "skip_step: window must be at least 2, got 1.": lambda: optaxclip.skip_step(
        optax.sgd(0.1), window=1
    ),
    "quantile_tracker: rate must be at most 3.402823466e+38, got inf.": lambda: (
        optaxclip.rules.quantile_tracker(0.5, math.inf)
    ),
    "windowed_mean: window must be a whole number, got 2.5.": lambda: (
        optaxclip.rules.windowed_mean(3, 2.5)
    ),
    "windowed_mean: remember must be one of 'raw', 'clipped', got 'both'.": lambda: (
        optaxclip.rules.windowed_mean(remember="both")
    ),
    "autoclip: percentile must be at most 100, got 101.": lambda: optaxclip.autoclip(
        101
    ),
    f"autoclip: {BAD_SCOPE}, got 'unit'.": lambda: optaxclip.autoclip(scope="unit"),
    "zclip: target must be one of 'adaptive', 'mean', 'max', got 'median'.": lambda: (
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
