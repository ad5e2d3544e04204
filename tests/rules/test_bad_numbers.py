"""What is no number of a rule is refused, and named."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip import rules, shrinks

BAD_SCOPE = "scope must be 'global', 'tensor', or labels as in clip_by_group_norm"
BAD = {
    "windowed_mean: ddof must be at most 3, got 4.": lambda: rules.windowed_mean(
        2.0, 4, ddof=4
    ),
    "windowed_mean: remember must be one of 'raw', 'clipped', got 'both'.": lambda: (
        rules.windowed_mean(remember="both")
    ),
    "skip_step: window must be at least 2, got 1.": lambda: optaxclip.skip_step(
        optax.sgd(0.1), window=1
    ),
    "quantile_tracker: rate must be at most 3.402823466e+38, got inf.": lambda: (
        rules.quantile_tracker(0.5, math.inf)
    ),
    "larc: weight_decay must be at most 1.797693135e+308, got inf.": lambda: (
        optaxclip.larc(0.1, weight_decay=math.inf)
    ),
    f"autoclip: {BAD_SCOPE}, got 'unit'.": lambda: optaxclip.autoclip(scope="unit"),
    f"aggc: {BAD_SCOPE}, got None.": lambda: optaxclip.aggc(scope=None),
    "zclip: target must be one of 'adaptive', 'mean', 'max', got 'median'.": lambda: (
        optaxclip.zclip(target="median")
    ),
    "z_score: z must not be NaN, got nan.": lambda: rules.z_score(math.nan),
    "zclip: warmup must be at least 1, got 0.": lambda: optaxclip.zclip(warmup=0),
    "reset_momentum: every must be at least 1, got 0.": lambda: (
        optaxclip.reset_momentum(optax.identity(), every=0)
    ),
    "reset_momentum: every must be a whole number, got 1.5.": lambda: (
        optaxclip.reset_momentum(optax.identity(), every=1.5)
    ),
    "reset_momentum: warmup must be at least 0, got -1.": lambda: (
        optaxclip.reset_momentum(None, warmup=-1)
    ),
    "minimum: rules must be at least one, got none.": lambda: rules.minimum(),
    "minimum: rules[1] must be at least 0, got -1.": lambda: rules.minimum(1.0, -1),
    "warm_up: steps must be at least 0, got -5.": lambda: rules.warm_up(-5, 1.0, 2.0),
    "smooth: power must be at least 1, got 0.5.": lambda: shrinks.smooth(0.5),
}


@pytest.mark.parametrize("text", BAD)
def test_bad_input_is_named(text):
    with pytest.raises(ValueError) as error:
        BAD[text]()
    assert str(error.value) == text


@pytest.mark.parametrize("bad", [True, "3", 1j])
def test_what_is_no_number_is_refused(bad):
    for build in (
        rules.z_score,
        rules.growth,
        rules.windowed_mean,
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


@pytest.mark.parametrize("rule", [rules.windowed_mean, rules.windowed_quantile])
def test_a_restored_window_goes_on_with_its_own_length(rule):
    def clipper(window):
        return optaxclip.clip_by_global_norm(rule(window=window, current=True))

    old = clipper(3).init(jnp.zeros(1))
    kept = other = old
    for norm in (1.0, 5.0, 2.0, 7.0, 3.0):
        _, kept = clipper(3).update(jnp.array([norm]), kept)
        _, other = clipper(5).update(jnp.array([norm]), other)
    jax.tree.map(np.testing.assert_array_equal, other, kept)
