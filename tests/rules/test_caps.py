"""A cap above a learned limit, and ratios with which such a limit can only fall."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip import rules

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


@pytest.mark.parametrize("name", CAPPED)
def test_without_a_cap_the_first_step_passes(name):
    clipper = CAPPED[name](cap=None)
    updates, _ = clipper.update(HUGE, clipper.init(HUGE))
    np.testing.assert_array_equal(updates, HUGE)


@pytest.mark.parametrize("name", CAPPED)
def test_a_cap_below_zero_is_refused_by_its_name(name):
    with pytest.raises(ValueError, match=f"^{name}: cap must be at least 0, got -1"):
        CAPPED[name](cap=-1.0)


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


@pytest.mark.parametrize("ratio", [1.0, 1, 0.5])
@pytest.mark.parametrize("name", FALLING)
def test_a_ratio_with_which_norms_only_fall_is_warned_of(name, ratio):
    text = f"^{name} should be above 1, got {ratio}: "
    with pytest.warns(UserWarning, match=text) as caught:
        FALLING[name](ratio)
    # The line that a user wrote.
    assert caught[0].filename == __file__
    assert len(caught) == 1


@pytest.mark.parametrize("name", FALLING)
def test_ratios_above_1_and_schedules_are_not_warned_of(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FALLING[name](1.01)
        FALLING[name](lambda step: 0.5)
        jax.eval_shape(lambda ratio: jnp.zeros(()) * bool(FALLING[name](ratio)), 0.5)
        rules.growth(1.0, floor=0.1)
        rules.ema_ratio(0.9, remember="raw")
        rules.windowed_quantile(factor=1.0)
