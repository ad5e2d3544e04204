"""Noise on a grid: the law of its integers, and that a sum has nothing but rounded
integers to tell. Expected laws are those of decimal and SciPy, in 40 digits or float64.
"""

import math
from decimal import Decimal, localcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from optaxclip.per_example._grid_noise import (
    LARGEST_SUM,
    ROUNDING,
    STEPS_PER_SIGMA,
    alias_table,
    discrete_gaussian,
    integer_noise,
    on_grid,
    random_words,
    steps_per_unit,
    threefry,
    with_grid_noise,
    with_noise,
)
from optaxclip.per_example._noise import LEAST_SIGMA, MOST_SIGMA

KEY = jax.random.key(0)
DRAWS = 4_000_000
# Key, counters and words, from kat_vectors of Random123.
KNOWN_WORDS = [
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((2**32 - 1,) * 2, (2**32 - 1,) * 2, (0x1CB996FC, 0xBB002BE7)),
    ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
]


def test_words_are_those_of_threefry():
    for key, counters, words in KNOWN_WORDS:
        found = threefry(jnp.array(key, np.uint32), *map(np.uint32, counters))
        assert tuple(map(int, found)) == words


def test_eight_words_of_a_number_are_all_of_its_own():
    for shape in ((), (0,), (60,), (12, 5), (3, 4, 5), (1, 5, 2, 2, 3)):
        words = np.stack(random_words(KEY, jnp.zeros(shape)))
        assert words.shape == (8, *shape)
        assert len(np.unique(words)) == words.size


def masses():
    """What the table gives to each value, of 2^96."""
    first, second, third = alias_table().astype(object)
    found = [0] * 2048
    for column in range(2048):
        threshold = first[column] >> 11 << 64 | second[column] << 32 | third[column]
        assert threshold < 2**85
        found[column] += threshold
        found[first[column] & 2047] += 2**85 - threshold
    return found


def test_the_table_is_a_discrete_gaussian_of_64():
    found = masses()
    assert sum(found) == 2**96
    with localcontext(prec=40):
        exact = [(-Decimal(j * j) / 8192).exp() for j in range(-3000, 3001)]
        whole = sum(exact)
        law = [Decimal(0)] * 6001
        law[3000 - 1024 : 3000 + 1024] = [Decimal(n) / 2**96 for n in found]
        differences = [abs(p - q / whole) for p, q in zip(law, exact)]
        # 2,048 masses are rounded to 2^-96, and the tails are cut off.
        assert sum(differences) / 2 < 2.5e-27
    # It ends where a mass is below 2^-97.
    assert max(j for j in range(2048) if found[j]) - 1024 > 11.1 * 64


def test_a_number_below_the_threshold_stays_in_its_column():
    first, second, third = alias_table()
    columns = np.arange(2048, dtype=np.uint32)
    high = columns << 21 | first >> 11
    # The threshold itself, and one less, as far as there is less.
    at = discrete_gaussian(high, second, third)
    np.testing.assert_array_equal(at, (first & 2047).astype(np.int32) - 1024)
    for less in (
        (high, second, third - np.uint32(1)),
        (high, second - np.uint32(1), third | np.uint32(2**32 - 1)),
        (high - np.uint32(1), second, third),
    ):
        usable = (third > 0) & (second > 0) & (first >> 11 > 0)
        below = np.asarray(discrete_gaussian(*less))
        np.testing.assert_array_equal(below[usable], columns[usable].astype(int) - 1024)
        assert usable.sum() > 700


@pytest.fixture(scope="module")
def drawn():
    """J and Z of so many numbers."""
    leaf = jnp.zeros(DRAWS)

    @jax.jit
    def draw():
        words = random_words(KEY, leaf)
        return discrete_gaussian(*words[:3]), integer_noise(words)

    return [np.asarray(x) for x in draw()]


def uniform(counts):
    return stats.chisquare(counts).pvalue


def test_draws_of_j_follow_the_law(drawn):
    weights = np.exp(-(np.arange(-1024, 1024.0) ** 2) / 8192)
    expected = weights / weights.sum() * DRAWS
    counts = np.bincount(drawn[0] + 1024, minlength=2048)
    many = expected > 20
    total = counts[many].sum()
    expected = expected[many] / expected[many].sum() * total
    assert stats.chisquare(counts[many], expected).pvalue > 1e-4


def test_draws_of_z_follow_the_normal_law(drawn):
    cuts = stats.norm.ppf(np.arange(1, 512) / 512) * STEPS_PER_SIGMA
    bins = np.searchsorted(cuts, drawn[1])
    assert uniform(np.bincount(bins, minlength=512)) > 1e-4
    # No low bit is rarer than another one, nor tells the bin, nor does a neighbour.
    assert uniform(np.bincount(drawn[1] & 1023, minlength=1024)) > 1e-4
    low = bins // 16 * 32 + (drawn[1] & 31)
    assert uniform(np.bincount(low, minlength=1024)) > 1e-4
    neighbours = bins[1:] // 16 * 32 + bins[:-1] // 16
    assert uniform(np.bincount(neighbours, minlength=1024)) > 1e-4


def test_its_moments_are_those_of_its_parts(drawn):
    # 64^2, five uniforms of 2^20 and five of 2^12 values, in units of 2^20.
    variance = 64**2 + 5 / 12 * (1 - 2.0**-40) + 5 / 12 * (1 - 2.0**-24)
    z = drawn[1] / 2.0**20
    assert abs(z.mean()) < 5 * np.sqrt(variance / DRAWS)
    assert abs(z.var() / variance - 1) < 5 * np.sqrt(2 / DRAWS)
    assert abs(stats.kurtosis(z)) < 5 * np.sqrt(24 / DRAWS)


def test_as_many_lie_beyond_as_the_normal_law_says(drawn):
    for deviations in (1.0, 3.0, 4.0, 4.5):
        share = stats.norm.sf(deviations / 1.0001)
        expected = stats.binom(DRAWS, share)
        for side in (drawn[1], -drawn[1]):
            beyond = np.sum(side > deviations * STEPS_PER_SIGMA)
            assert expected.ppf(1e-5) <= beyond <= expected.isf(1e-5)


def test_the_extreme_words_give_the_ends():
    words = [np.full(2, word, np.uint32) for word in (0, 0, 0)]
    for fill in (0, 2**32 - 1):
        rest = [np.full(2, fill, np.uint32)] * 5
        z = int(integer_noise([*words, *rest])[0])
        j = int(discrete_gaussian(*words)[0])
        uniforms = 5 * (fill >> 12) + 5 * ((fill & 0xFFF) << 8)
        assert z == j * 2**20 + uniforms - (5 * 2**20 - 642)
    # All of J and the uniforms fit an int32, beside a rounded low half.
    assert (713 + 10) * 2**20 + 2**25 < 2**31


def spectrum(u, count, step):
    """The characteristic function of a uniform number, in size."""
    half = step * u / 2
    if abs(math.sin(half)) < 1e-300:
        return 1.0
    return abs(math.sin(count * half) / (count * math.sin(half)))


def test_ten_uniforms_fill_the_gaps_as_is_proved():
    """Lines 4 to 8 of the proof in docs/numerics.md, from the characteristic function
    itself: the comb of step 2^20 adds less than 1e-21 to the law.
    """
    sigma, h = 2.0**26, 2.0**20
    total = 0.0
    points = np.linspace(-8, 8, 4001)
    weights = np.exp(-(points**2) / 2)
    weights /= weights.sum()
    for sign in (1, -1):
        for n, weight in zip(points, weights):
            u = n / sigma - sign * 2 * math.pi / h
            term = spectrum(u, 2**20, 1) ** 5 * spectrum(u, 2**12, 2**8) ** 5
            total += weight * term
    bound = 2 * 2**5 * math.factorial(5) / (128 * math.pi) ** 10
    assert total < 1.01 * bound < 1e-22


def gaps_seen(deviations, parts, width, h):
    """The most that steps of h in J of this width may change the law of Z, over the
    law, so many deviations from 0: lines 5 to 7 of the proof. `parts` are the (count,
    step) of the uniform numbers.
    """
    points = np.linspace(-9, 9, 2001)
    weights = stats.norm.pdf(points)
    weights /= weights.sum()
    w = (points + 1j * deviations) / (width * h)
    total = 0.0
    for multiple in range(1, h):
        u = w - 2 * math.pi * multiple / h
        size = np.ones(points.size)
        for n, t in parts:
            size *= np.abs(np.sin(n * t * u / 2) / (n * np.sin(t * u / 2)))
        total += np.sum(weights * size)
    # Uniform numbers alone lower the law of the ideal.
    variance = sum((n**2 - 1) * t**2 for n, t in parts) / 12
    return total * math.exp(variance / (2 * (width * h) ** 2))


def test_steps_of_j_show_no_more_than_is_proved():
    """Both laws in full, of small numbers: J of deviation 4 in steps of 256, and six
    uniform numbers.
    """
    width, h, parts = 4, 256, [(256, 1)] * 3 + [(16, 16)] * 3
    sigma = width * h
    of_uniforms = np.ones(1)
    for n, t in parts:
        law = np.zeros((n - 1) * t + 1)
        law[::t] = 1 / n
        of_uniforms = np.convolve(of_uniforms, law)
    integers = np.arange(-10 * sigma, 10 * sigma + 1)
    ideal = np.exp(-(integers**2) / (2 * sigma**2))
    real = np.where(integers % h == 0, ideal, 0)
    laws = [np.convolve(law / law.sum(), of_uniforms) for law in (ideal, real)]
    errors = np.abs(laws[1] / laws[0] - 1)
    center = errors.size // 2
    for deviations in (0, 2, 4):
        place = center + deviations * sigma
        seen = np.max(errors[place - h // 2 : place + h // 2])
        # Within the step a is up to 1/8 more.
        bound = gaps_seen(deviations + 1 / 8, parts, width, h)
        assert 0.05 * bound < seen < bound < 1e-4


def test_the_numbers_of_the_proof_are_those_of_its_formulas():
    """Lines 7 to 11 of docs/numerics.md."""
    # Nodes and weights of a Gaussian mean, exact for polynomials up to order 59
    nodes, weights = np.polynomial.hermite_e.hermegauss(30)
    weights = weights / weights.sum()

    def error(deviations):
        moment = weights @ (nodes**2 + deviations**2) ** 5
        return 2.001 * moment / (128 * math.pi) ** 10

    square = weights @ np.array([error(a) ** 2 for a in nodes])
    assert error(0) == pytest.approx(1.7e-23, rel=0.03)
    assert error(10) == pytest.approx(1.9e-16, rel=0.03)
    assert square == pytest.approx(4.3e-43, rel=0.03)
    of_gaps = math.sqrt(1e14 * square / 2)
    of_table = 1e14 * 2.4e-27
    assert of_gaps == pytest.approx(4.7e-15, rel=0.03)
    assert of_gaps + of_table < 2.5e-13


def test_rounding_at_random_tells_nothing_of_the_fraction():
    """Line 3 of the proof: a discrete Gaussian of 2 has the same total around every
    number, within 2^-111.
    """
    with localcontext(prec=50):
        totals = []
        for eighths in range(9):
            y = Decimal(eighths) / 8
            weights = [(-((k - y) ** 2) / 8).exp() for k in range(-40, 42)]
            totals.append(sum(weights))
        spread = max(totals) / min(totals) - 1
        assert 0 < spread < Decimal(2) ** -111


SIGMAS = [LEAST_SIGMA, 1e-3, 0.3, 1.0, 7.7, MOST_SIGMA]


def random_numbers(sigma):
    """Float32 numbers from 1e-12 to 1e6 sigma, and with them 0 and the ends."""
    random = np.random.default_rng(0)
    sizes = 10.0 ** random.uniform(-7, 6, 100_000)
    numbers = random.standard_normal(sizes.size) * sizes * sigma
    return np.concatenate([numbers, [0.0, LARGEST_SUM / 2 * sigma]]).astype(np.float32)


@pytest.mark.parametrize("sigma", SIGMAS)
def test_numbers_are_rounded_to_the_grid_once(sigma):
    x = random_numbers(sigma)
    per_unit = steps_per_unit(jnp.float32(sigma))
    top, low = jax.jit(on_grid)(x, per_unit)
    steps = np.asarray(top).astype(np.longdouble) * 2**24 + np.asarray(low)
    exact = x.astype(np.longdouble) * np.longdouble(per_unit)
    error = np.max(np.abs(steps - exact))
    assert 0.49 < error <= 0.5 + 2.0**-24
    assert error * 2 <= ROUNDING * STEPS_PER_SIGMA


@pytest.mark.parametrize("sigma", SIGMAS)
def test_the_step_is_never_shorter_than_sigma_says(sigma):
    per_unit = np.float64(steps_per_unit(jnp.float32(sigma)))
    per_sigma = per_unit * np.float64(np.float32(sigma))
    assert 1 <= STEPS_PER_SIGMA / per_sigma < 1 + 2.0**-10


@pytest.mark.parametrize(("one", "other"), [(0, 1), (0, 0.37), (3.7, 4.7), (400, 401)])
def test_two_sums_have_the_same_outputs(one, other):
    """Of ordinary float32 noise on 0, a sum of 1 gives no more than a ninth."""
    sigma = jnp.float32(0.7)
    per_unit = steps_per_unit(sigma)
    z = jnp.asarray(jax.random.randint(KEY, (100_000,), -(2**29), 2**29))
    here, there = (on_grid(jnp.float32(x), per_unit) for x in (one, other))
    distance = int(here.top - there.top) * 2**24 + int(here.low) - int(there.low)
    for x, y in zip(with_noise(here, z), with_noise(there, z + distance)):
        np.testing.assert_array_equal(x, y)


def test_an_output_of_float32_is_one_rounded_integer():
    """So the same integer, of whatever sum, gives the same bits."""
    sigma = jnp.float32(0.7)
    x = jnp.asarray(np.linspace(-3000, 3000, 50_001), np.float32)
    noisy = np.asarray(jax.jit(with_grid_noise)(x, sigma, KEY))
    per_unit = steps_per_unit(sigma)
    top, low = (np.asarray(part, np.int64) for part in on_grid(x, per_unit))
    z = np.asarray(integer_noise(random_words(KEY, x)), np.int64)
    step = np.float32(1) / np.asarray(per_unit)
    wanted = np.float32(top * 2**24 + low + z) * step
    np.testing.assert_array_equal(noisy, wanted)
    assert np.max(np.abs(top)) > 10_000


def test_an_output_of_float64_is_an_integer_without_rounding():
    with jax.enable_x64(True):
        sigma = jnp.float64(0.7)
        x = jnp.asarray(np.linspace(-3000, 3000, 50_001) * np.pi)
        noisy = np.asarray(jax.jit(with_grid_noise)(x, sigma, KEY))
        z = np.asarray(integer_noise(random_words(KEY, x)), np.int64)
        per_unit = np.float64(steps_per_unit(sigma))
    steps = np.asarray(x, np.longdouble) * np.longdouble(per_unit)
    integers = np.round(noisy * per_unit).astype(np.int64)
    np.testing.assert_array_equal(noisy, integers * (1 / per_unit))
    error = np.max(np.abs(integers - z - steps))
    assert 0.49 < error <= 0.5 + 2.0**-7


def test_numbers_beyond_the_reach_are_cut():
    x = jnp.array([1e38, -1e38, jnp.inf, jnp.nan])
    noisy = np.asarray(with_grid_noise(x, jnp.float32(1.0), KEY))
    np.testing.assert_allclose(noisy[:3], LARGEST_SUM * np.array([1, -1, 1]), rtol=1e-3)
    assert np.isnan(noisy[3])


def test_a_program_of_float32_has_no_float64_and_no_loop():
    # GPUs are slow in float64, and TPUs have none.
    with jax.enable_x64(True):
        leaf = jnp.zeros((5, 3), np.float32)
        program = str(jax.make_jaxpr(with_grid_noise)(leaf, jnp.float32(1), KEY))
    assert "f64" not in program
    assert "while" not in program.partition("random_bits")[2]
