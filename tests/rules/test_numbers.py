"""A cap above a learned limit, ratios with which such a limit can only fall, and
derivatives by the numbers, forward and reverse.
"""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip import clip_by_global_norm, rules
from tests.rules.histories import RULES


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


@pytest.mark.parametrize("name", RULES)
def test_rules_work_under_strict_promotion(name):
    clipper, weights = clip_by_global_norm(RULES[name][0]), jnp.ones(2)
    with jax.numpy_dtype_promotion("strict"):
        # Dtypes are promoted while JAX traces, so nothing is compiled.
        state = jax.eval_shape(clipper.init, weights)
        jax.eval_shape(clipper.update, weights, state, weights)


# optax.inject_hyperparams gives every number the dtype of the gradients.
BFLOAT16_STEPS = jnp.asarray(2, jnp.bfloat16)


@pytest.mark.parametrize("steps", [2.0, BFLOAT16_STEPS], ids=["float", "bfloat16"])
@pytest.mark.parametrize(
    "clipper_of",
    [
        lambda steps: clip_by_global_norm(rules.warm_up(steps, 1.0, 2.0)),
        lambda steps: clip_by_global_norm(rules.ema_ratio(1.1, warmup=steps)),
        lambda steps: clip_by_global_norm(rules.log_z_score(warmup=steps)),
        lambda steps: clip_by_global_norm(rules.windowed_quantile(warmup=steps)),
        lambda steps: clip_by_global_norm(rules.windowed_mean(warmup=steps)),
        lambda steps: optaxclip.zclip(warmup=steps),
        lambda steps: optaxclip.adagc(warmup=steps),
        lambda steps: optaxclip.spam(warmup=steps),
        lambda steps: optaxclip.reset_momentum(optax.trace(0.9), steps, warmup=steps),
        lambda steps: optaxclip.skip_nonfinite(optax.trace(0.9), max_consecutive=steps),
        lambda steps: optaxclip.record_health(embeddings=["w"], patience=steps),
    ],
    ids=[
        *("warm_up", "ema_ratio", "log_z_score", "windowed_quantile", "windowed_mean"),
        *("zclip", "adagc", "spam", "reset_momentum", "skip_nonfinite", "health"),
    ],
)
def test_a_number_of_steps_may_be_a_float_under_strict_promotion(clipper_of, steps):
    weights = {"w": jnp.ones((2, 3), jnp.bfloat16)}
    with jax.numpy_dtype_promotion("strict"):
        clipper = clipper_of(steps)
        state = jax.eval_shape(clipper.init, weights)
        jax.eval_shape(clipper.update, weights, state, weights)


def test_ddof_may_have_16_bits_under_strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        rule = rules.windowed_mean(ddof=jnp.asarray(1, jnp.bfloat16))
        clipper = clip_by_global_norm(rule)
        state = jax.eval_shape(clipper.init, jnp.ones(2))
        jax.eval_shape(clipper.update, jnp.ones(2), state)


@pytest.mark.parametrize("rule", [rules.windowed_mean, rules.windowed_quantile])
def test_a_window_may_be_a_whole_float_of_a_config(rule):
    clippers = [clip_by_global_norm(rule(window=window)) for window in (3, 3.0)]
    states = [clipper.init(jnp.zeros(1)) for clipper in clippers]
    for norm in (1.0, 5.0, 2.0, 7.0):
        steps = [
            clipper.update(jnp.array([norm]), state)
            for clipper, state in zip(clippers, states)
        ]
        states = [state for _, state in steps]
        jax.tree.map(np.testing.assert_array_equal, *steps)


HUGE = jnp.array([1e14])
CAPPED = {
    "zclip": optaxclip.zclip,
    "autoclip": optaxclip.autoclip,
    "growth": lambda cap: optaxclip.clip_by_global_norm(rules.growth(cap=cap)),
}


@pytest.mark.parametrize("name", CAPPED)
def test_a_cap_holds_in_the_first_step(name):
    for cap in (10.0, np.float32(10), lambda step: 10.0 + step):
        clipper = CAPPED[name](cap=cap)
        updates, state = clipper.update(HUGE, clipper.init(HUGE))
        np.testing.assert_allclose(updates, [10.0], rtol=2e-6)
        assert float(state.limit) == 10
    clipper = CAPPED[name](cap=0.0)
    updates, state = clipper.update(HUGE, clipper.init(HUGE))
    assert float(updates[0]) == float(state.limit) == 0


@pytest.mark.parametrize("name", CAPPED)
def test_without_a_cap_the_first_step_passes(name):
    clipper = CAPPED[name](cap=None)
    updates, _ = clipper.update(HUGE, clipper.init(HUGE))
    np.testing.assert_array_equal(updates, HUGE)


@pytest.mark.parametrize("name", CAPPED)
def test_a_cap_may_be_a_hyperparameter(name):
    made = optax.inject_hyperparams(CAPPED[name])(cap=10.0)
    state = made.init(HUGE)
    updates, _ = jax.jit(made.update)(HUGE, state)
    np.testing.assert_allclose(updates, [10.0], rtol=2e-6)
    state.hyperparams["cap"] = jnp.float32(20.0)
    updates, _ = jax.jit(made.update)(HUGE, state)
    np.testing.assert_allclose(updates, [20.0], rtol=2e-6)


def test_the_percentile_is_that_of_norms_as_they_came():
    clipper = optaxclip.autoclip(50.0, 8, cap=3.0)
    state, norms = clipper.init(HUGE), [5.0, 1.0, 4.0, 2.0, 7.0]
    for seen in range(1, 6):
        _, state = clipper.update(jnp.array([norms[seen - 1]]), state)
        expected = min(3.0, np.percentile(norms[:seen], 50))
        np.testing.assert_allclose(state.limit, expected, rtol=1e-6)


def test_growth_is_from_what_the_cap_let_through():
    found = optaxclip.replay.run(rules.growth(1.5, cap=10.0), [1e14, 9.0, 2.0, 9.0])
    # min(10, inf), min(10, 1.5 * 10), min(10, 1.5 * 9), min(10, 1.5 * 2)
    np.testing.assert_allclose(found.limits, [10.0, 10.0, 10.0, 3.0])
    grown = optaxclip.replay.run(rules.growth(2.0, cap=5.0), [2.0, 9.0, 9.0])
    np.testing.assert_allclose(grown.limits, [5.0, 4.0, 5.0])


FALLING = {
    "adagc: ratio": lambda ratio: optaxclip.adagc(ratio),
    "growth: rate": lambda ratio: rules.growth(ratio),
    "ema_ratio: ratio": lambda ratio: rules.ema_ratio(ratio),
    "windowed_quantile: factor": lambda ratio: rules.windowed_quantile(
        factor=ratio, remember="clipped"
    ),
}


def test_a_ratio_with_which_norms_only_fall_is_warned_of():
    for name, build in FALLING.items():
        for ratio in (1.0, 1, 0.5):
            text = f"^{name} should be above 1, got {ratio}: "
            with pytest.warns(UserWarning, match=text) as caught:
                build(ratio)
            # The line that a user wrote.
            assert caught[0].filename == __file__
            assert len(caught) == 1


def test_a_floor_of_0_holds_no_norm_up_in_any_type():
    for floor in (0, 0.0, np.float32(0)):
        with pytest.warns(UserWarning, match="^growth: rate should be above 1"):
            rules.growth(1.0, floor=floor)


def as_an_array(build, ratio):
    return jnp.zeros(()) * bool(build(ratio))


def test_ratios_above_1_and_schedules_are_not_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for build in FALLING.values():
            build(1.01)
            build(lambda step: 0.5)
            jax.eval_shape(partial(as_an_array, build), 0.5)
        rules.growth(1.0, floor=0.1)
        rules.ema_ratio(0.9, remember="raw")
        rules.windowed_quantile(remember="clipped", current=True)


def test_a_target_above_1_lets_limits_rise_and_is_not_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rule = rules.ema_ratio(1.0, 0.5, target=2.0)
    limits = optaxclip.replay.run(rule, [1.0, 9.0, 9.0, 9.0]).limits
    np.testing.assert_allclose(limits, [np.inf, 2.0, 3.0, 4.5])
    for number in (1.0, np.float32(1.0)):
        with pytest.warns(UserWarning, match="^ema_ratio: ratio should be above 1"):
            rules.ema_ratio(number, target=number)


def test_a_percentile_below_one_percent_is_warned_of():
    for percentile in (1e-3, 0.1, 0.99):
        with pytest.warns(UserWarning, match=f"^autoclip: percentile={percentile} is"):
            optaxclip.autoclip(percentile)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # 0 clips to the shortest gradient.
        for percentile in (0, 0.0, 1, 1.0, 100, lambda step: 0.5):
            optaxclip.autoclip(percentile)


NORMS = (1.0, 2.0, 1.5, 4.0, 3.0, 9.0, 1.0, 2.0)
MAKERS = {
    "adagc ratio": (lambda x: optaxclip.adagc(x, 0.9, warmup=2), 1.05),
    "adagc decay": (lambda x: optaxclip.adagc(1.05, x, warmup=2), 0.9),
    "zclip z": (lambda x: optaxclip.zclip(x, 0.9, warmup=3), 1.0),
    "zclip decay": (lambda x: optaxclip.zclip(1.0, x, warmup=3), 0.9),
    "adagn decay": (lambda x: optaxclip.adagn(0.7, x), 0.9),
    "spam decay": (lambda x: optaxclip.spam(2.0, decay=x, warmup=1), 0.9),
    "log_z_score decay": (
        lambda x: clip_by_global_norm(rules.log_z_score(1.0, x, warmup=2)),
        0.9,
    ),
    "quantile": (lambda x: clip_by_global_norm(rules.windowed_quantile(x, 4)), 0.4),
    "factor": (
        lambda x: clip_by_global_norm(rules.windowed_quantile(0.5, 4, factor=x)),
        1.1,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_derivatives_are_those_of_differences(name):
    make, number = MAKERS[name]

    def moved(x):
        """The first coordinate after some steps. The gradient of the other is 0."""
        clipper, grads = make(x), jnp.array([1.0, 0.0])
        state, total = clipper.init(grads), 0.0
        for norm in NORMS:
            updates, state = clipper.update(norm * grads, state)
            total += updates[0]
        return total

    with jax.enable_x64(True):
        x, step = jnp.float64(number), 1e-4
        wanted = (moved(x + step) - moved(x - step)) / (2 * step)
        found = jax.grad(moved)(x), jax.jacfwd(moved)(x)
    np.testing.assert_allclose(found, (wanted, wanted), rtol=2e-3)


@pytest.mark.slow
def test_spam_has_derivatives_where_a_coordinate_is_0():
    def total(w):
        clipper = optaxclip.spam(100.0, warmup=0)
        state, total = clipper.init(w), 0.0
        for _ in range(2):
            updates, state = clipper.update(w * jnp.array([1.0, 0.0]), state)
            total += jnp.sum(updates)
        return total

    w = jnp.array([1.0, 2.0])
    found = jax.grad(total)(w)
    np.testing.assert_allclose(found, jax.jacfwd(total)(w), rtol=1e-5)
    assert found[1] == 0
