"""Numbers of rules at the ends of their ranges: decays of 1, which forget no norm, and
of 0, which remember the last; rates of 0; infinite numbers; windows that are shorter
than their warm-up.
"""

import math

import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip
from optaxclip import rules
from tests.helpers import scanned
from tests.parts import RULES

NORMS = np.array([1.0, 4.0, 2.0, 9.0, 3.0, 0.5])
MEANS = np.cumsum(NORMS) / np.arange(1, 7)


def limits(rule, norms=NORMS):
    return np.asarray(optaxclip.replay.run(rule, norms).limits, np.float64)


@pytest.mark.parametrize("decay", [1.0, lambda step: 1.0, jnp.bfloat16(0.999)])
def test_a_corrected_average_is_the_mean_of_all(decay):
    np.testing.assert_allclose(limits(rules.ema(decay)), MEANS, rtol=1e-6)


def test_a_long_mean_of_all_stays_a_mean():
    norms = np.random.default_rng(0).lognormal(size=20_000).astype(np.float32)
    found = limits(rules.ema(1.0), norms)[-1]
    # Each step rounds once, by half an eps of float32 at most.
    np.testing.assert_allclose(found, norms.mean(dtype=np.float64), rtol=1e-4)


def test_a_band_of_0_is_left_again():
    rule = rules.ema_band(
        0.0, lambda step: jnp.where(step < 2, 0.0, 0.5), 0.0, floor=0.0, down=0.0
    )
    # Half of the first norm, then half of the limits before.
    wanted = [1.0, 0.0, 0.5, 0.25, 0.125, 0.0625]
    np.testing.assert_allclose(limits(rule), wanted)


def then_1(step):
    return jnp.where(step < 2, 0.5, 1.0)


HALVED = (0.25 * 9 + 0.5 * 3 + 0.5) / 1.75
ROOTS = np.sqrt(np.cumsum(NORMS**2) / np.arange(1, 7))
OF_DECAYS = {
    "a ratio is of the mean of all": (
        rules.ema_ratio(2.0, 1.0, corrected=True, remember="raw"),
        [np.inf, *2 * MEANS[:-1]],
    ),
    "moments are means of all": (rules.moments_ratio(1.0, 1.0, eps=0.0), MEANS / ROOTS),
    "an uncorrected average keeps the first norm": (
        rules.ema_ratio(2.0, 1.0, remember="raw"),
        [np.inf, *[2.0] * 5],
    ),
    "a decay that becomes 1 keeps the average": (rules.ema(then_1), [1, 3, 3, 3, 3, 3]),
    # The weights of the first three are those of a decay of 1, which is none.
    "a decay below 1 forgets what one of 1 saw": (
        rules.ema(lambda step: jnp.where(step < 3, 1.0, 0.5)),
        [*MEANS[:3], 9, (0.5 * 9 + 3) / 1.5, HALVED],
    ),
}


def test_decays_of_1_weigh_all_norms_alike():
    for name, (rule, wanted) in OF_DECAYS.items():
        np.testing.assert_allclose(limits(rule), wanted, rtol=1e-6, err_msg=name)


def test_logarithms_have_the_deviation_of_all():
    # Falling norms, since those over their limit would be remembered as shorter.
    norms = np.sort(NORMS)[::-1]
    logs = np.log1p(norms)
    past = [logs[:n] for n in range(1, 6)]
    wanted = [np.expm1(x.mean() + 4 * max(x.std(), 1e-3)) for x in past]
    rule = rules.log_z_score(4.0, 1.0, warmup=1)
    # An exponent of up to 6 has an error of some eps of float32.
    np.testing.assert_allclose(limits(rule, norms)[1:], wanted, rtol=1e-5)


def test_a_decay_that_becomes_1_keeps_moments_from_any_norm():
    rule = rules.moments_ratio(then_1, then_1, eps=0.0)
    # The mean and the mean square of 1 and 4, with the weights 1/3 and 2/3.
    wanted = [1, 3 / np.sqrt(11), 3 / np.sqrt(11), 3 / np.sqrt(11)]
    np.testing.assert_allclose(limits(rule, [1.0, 4.0, 1e15, 1e-3]), wanted, rtol=1e-6)


FALLING = np.array([1e8, 1.0, 1.0, 1e-6, 2e-6])
LAST = FALLING[:-1]  # what a decay of 0 knows before each later norm


@pytest.mark.parametrize("decay", [0.0, 1e-9, lambda step: 0.0])
def test_a_decay_of_0_takes_the_last_norm_however_small_it_is(decay):
    # Beside 1e8 a float32 sum would lose a norm of 1.
    found = limits(rules.ema(decay), FALLING)
    np.testing.assert_allclose(found, FALLING, rtol=1e-6)
    found = limits(rules.ema_ratio(3.0, decay, remember="raw"), FALLING)
    np.testing.assert_allclose(found[1:], 3 * LAST, rtol=1e-6)
    found = limits(rules.moments_ratio(decay, decay, eps=0.0), FALLING)
    np.testing.assert_allclose(found, 1.0, rtol=1e-6)


@pytest.mark.parametrize("decay", [0.01, 0.3, 0.49, 0.51, 0.9])
def test_an_average_is_right_beside_a_much_larger_one(decay):
    found, mean, weight = limits(rules.ema(decay), FALLING), 0.0, 0.0
    for norm, average in zip(FALLING, found):
        mean = decay * mean + (1 - decay) * norm
        weight = decay * weight + 1 - decay
        # In each of 5 steps the decay is right to 2^-24, and some numbers are rounded.
        tolerance = 5 * 2.0**-24 * (1 / decay + 4)
        np.testing.assert_allclose(average, mean / weight, rtol=tolerance)


def test_a_deviation_of_one_norm_is_about_that_norm():
    rule = rules.z_score(2.0, 0.0, warmup=2, eps=0.0)
    found = limits(rule, [1e8, 1e8, 1.0, 1.0, 1.0])
    np.testing.assert_allclose(found[2:], [1e8, 1.0, 1.0], rtol=1e-6)


def test_clippers_with_a_decay_of_0_zero_no_update():
    adagc = optaxclip.adagc(3.0, 0.0, warmup=1, max_norm=1e9)
    for clipper in (adagc, optaxclip.adaclip(0.0)):
        assert all(scanned(clipper, jnp.float32(FALLING)[:, None])[1] > 0)


def off_at_first(step):
    return jnp.where(step < 4, 0.0, 2.0)


@pytest.mark.parametrize(
    "rule",
    [
        rules.growth(off_at_first),
        rules.windowed_quantile(0.5, 3, factor=off_at_first, remember="clipped"),
        rules.ema_ratio(off_at_first, 0.0),
    ],
)
def test_a_limit_of_0_is_left_where_its_factor_rises(rule):
    found = limits(rule, np.ones(6))
    np.testing.assert_array_equal(found, [np.inf, 0.0, 0.0, 0.0, 2.0, 2.0])


EQUAL = [5.0, 5.0, 5.0, 9.0]


def test_infinite_sigmas_are_no_limit_for_equal_norms():
    # Equal norms have a deviation of 0, and inf * 0 is NaN.
    for rule in (
        rules.windowed_mean(math.inf),
        rules.windowed_mean(lambda step: math.inf),
        rules.log_z_score(math.inf, warmup=1, spread=0),
        rules.z_score(math.inf, warmup=1, eps=0),
    ):
        np.testing.assert_array_equal(limits(rule, EQUAL), np.inf)


@pytest.mark.filterwarnings("ignore:.*should be above 1:UserWarning")
def test_no_number_at_an_end_of_its_range_makes_a_limit_nan():
    norms = [0.0, 1.0, 0.0, 4.0, np.nan, 2.0, np.inf, 9.0]
    for build, part in RULES.items():
        for name, (lowest, highest) in part.numbers.items():
            ends = [lowest, math.inf if highest is None else highest]
            # What must be finite: a window has a length.
            if highest == math.inf or name == "window":
                ends.pop()
            for end in ends:
                found = limits(build(**{name: end}), norms)
                assert not np.isnan(found).any(), (build, name, end)


def test_a_warmup_counts_norms_that_left_the_window_too():
    for build in (rules.windowed_quantile, rules.windowed_mean):
        share = 0.5 if build is rules.windowed_quantile else 0.0
        past, current = (build(share, 2, warmup=4, current=x) for x in (False, True))
        np.testing.assert_array_equal(limits(past), [np.inf] * 4 + [5.5, 6.0])
        # With the norm of the step itself the warm-up ends one step earlier.
        wanted = [np.inf] * 3 + [5.5, 6.0, 1.75]
        np.testing.assert_array_equal(limits(current), wanted)
