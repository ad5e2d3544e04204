"""Gaussian noise on a grid, whose account holds for an observer of every bit.

    output = (round(x / s) + Z) s      the step s is sigma / 2^26, at most 2^-10 longer
    Z      = 2^20 J + U_1 + ... + U_10           an integer of deviation 2^26
    J      a discrete Gaussian, P(J = j) ~ exp(-j^2 / (2 64^2)): a table and 96 bits
    U_1 to U_5     uniform in 0, 1, ..., 2^20 - 1, so that no gap of 2^20 J is empty
    U_6 to U_10    uniform in 0, 2^8, ..., 2^20 - 2^8. The mean of all is taken away

So every sum of gradients has the same possible outputs, without a gap up to 11 sigma. Z
is as good as a discrete Gaussian of deviation 2^26, whose account is the same as for
continuous noise: docs/numerics.md has the proof.

An integer is two words, top 2^24 + low, since float32 has 24 bits. There is no float64,
no loop and no branch, so that one program serves CPU, GPU and TPU.
"""

import math
from decimal import Decimal, localcontext
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

WIDTH = 64  # the deviation of J
SHIFT = 20  # J counts in 2^SHIFT steps of the grid
STEPS_PER_SIGMA = WIDTH << SHIFT  # sigma in steps of the grid: 2^26
# Rounding two sums to the grid adds at most this, times sigma and the root of the count
# of numbers, to their difference. Each is rounded by at most 1/2 + 2^-7 of a step.
ROUNDING = (1 + 2**-6) / STEPS_PER_SIGMA
# Sums are cut to so many sigma before noise is added.
LARGEST_SUM = 2.0**20
COLUMNS = 2048  # of the table. J is in -1024, ..., 1023: 16 deviations
COLUMN_MASS = 2**96 // COLUMNS


@cache
def alias_table() -> np.ndarray:
    """Walker's alias table of the discrete Gaussian, uint32[3, COLUMNS].

    The masses of all values of J are integers that add up to 2^96. Each column has an
    equal part of that. Up to a threshold it belongs to the value with the column's
    number, and beyond to one other value, the alias. Row 0 has the first 21 bits of the
    threshold and the 11 bits of the alias, rows 1 and 2 have the other 64 bits of the
    threshold.
    """
    half = COLUMNS // 2
    with localcontext(prec=60):
        weights = []
        for j in range(-half, half):
            exponent = -Decimal(j * j) / (2 * WIDTH**2)
            weights.append(exponent.exp())
        unit = 2**96 / sum(weights)
        masses = [round(weight * unit) for weight in weights]
    # The rest that rounding left goes to J = 0, which has the largest mass.
    masses[half] += 2**96 - sum(masses)
    columns = range(COLUMNS)
    small = [column for column in columns if masses[column] < COLUMN_MASS]
    large = [column for column in columns if masses[column] >= COLUMN_MASS]
    # A column that needs no other value is its own alias.
    thresholds = [0] * COLUMNS
    aliases = list(columns)
    # Each small column is filled up with mass of a large one.
    while small:
        column = small.pop()
        alias = large[-1]
        thresholds[column] = masses[column]
        aliases[column] = alias
        masses[alias] -= COLUMN_MASS - masses[column]
        if masses[alias] < COLUMN_MASS:
            small.append(large.pop())
    # Python ints, since a threshold has 85 bits
    bits = np.array(thresholds, object)
    first = bits >> 64 << 11 | np.array(aliases)
    words = np.array([first, bits >> 32, bits]) & 0xFFFFFFFF
    return words.astype(np.uint32)


def discrete_gaussian(high: Array, middle: Array, low: Array) -> Array:
    """J, int32, of three random words: 11 bits choose a column of the table, and 85
    bits are compared with its threshold.
    """
    column = high >> 21
    sharding = explicit_sharding(column)

    def looked_up(row: np.ndarray) -> Array:
        # Eleven bits are never out of bounds.
        entries = jnp.asarray(row).at[column]
        return entries.get(mode="promise_in_bounds", out_sharding=sharding)

    first, second, third = map(looked_up, alias_table())
    alias = first & 0x7FF
    # (high, middle, low) < (first, second, third), as numbers of 21, 32 and 32 bits
    first = first >> 11
    high = high & 0x1FFFFF
    is_below = low < third
    is_below = (middle < second) | (middle == second) & is_below
    is_below = (high < first) | (high == first) & is_below
    value = jnp.where(is_below, column, alias)
    return value.astype(np.int32) - COLUMNS // 2


def integer_noise(words: list[Array]) -> Array:
    """Z, int32, of eight random words. It is below 2^29.6 in size."""
    high, middle, low, *words_of_uniforms = words
    # Each of five words gives two uniform numbers: its first 20 bits, and its last 12
    # bits in steps of 2^8.
    uniforms = jnp.zeros_like(high)
    for word in words_of_uniforms:
        first_bits = word >> 12
        last_bits = word & 0xFFF
        uniforms += first_bits + (last_bits << 8)
    # 5 (2^20 - 1) / 2 + 5 (2^20 - 2^8) / 2, rounded up to a whole number
    mean_of_uniforms = (5 << SHIFT) - 642
    j = discrete_gaussian(high, middle, low)
    return (j << SHIFT) + uniforms.astype(np.int32) - mean_of_uniforms


# ------------------------------------------------------------------------ random words


def threefry(key: Array, first: Array, second: Array) -> tuple[Array, Array]:
    """Two random words, uint32, of a key of two words and two counters, by the hash of
    `jax.random`.

    With `jax.random.bits` a word took 15 ns of a CPU. Here XLA makes one loop of all
    that a number needs, and a word took 0.6 ns.

    Reference: Salmon, Moraes, Dror, Shaw, Parallel random numbers: as easy as 1, 2, 3,
    2011. Threefry-2x32 with 20 rounds.
    """
    parity = key[0] ^ key[1] ^ np.uint32(0x1BD11BDA)
    keys = key[0], key[1], parity
    rotations = (13, 15, 26, 6), (17, 29, 16, 24)
    first = first + keys[0]
    second = second + keys[1]
    for block in range(5):
        for rotation in rotations[block % 2]:
            first = first + second
            second = first ^ (second << rotation | second >> 32 - rotation)
        first = first + keys[(block + 1) % 3]
        second = second + keys[(block + 2) % 3] + np.uint32(block + 1)
    return first, second


def random_words(key: Array, leaf: Array) -> list[Array]:
    """Eight random words for each number of a leaf.

    The two counters are the place of a number in the whole leaf, however the leaf is
    split over devices: its place along the first half of the axes, and along the other
    half.
    """
    half = (leaf.ndim + 1) // 2
    rows = math.prod(leaf.shape[:half])
    columns = math.prod(leaf.shape[half:])
    if max(rows, columns) > 2**32:
        raise ValueError(
            f"add_noise: a leaf of shape {leaf.shape} has more numbers along its first "
            "or last axes than are counted, 2^32. Give it as several leaves."
        )
    row = column = jnp.zeros_like(leaf, np.uint32)
    sharding = explicit_sharding(leaf)
    for axis, size in enumerate(leaf.shape):
        place = lax.broadcasted_iota(np.uint32, leaf.shape, axis, out_sharding=sharding)
        if axis < half:
            row = row * np.uint32(size) + place
        else:
            column = column * np.uint32(size) + place
    words: list[Array] = []
    for pair_key in jax.random.bits(key, (4, 2), np.uint32):
        words += threefry(pair_key, row, column)
    return words


def explicit_sharding(array: Array) -> Any:
    """The sharding of an array on a mesh with Explicit axes, else None."""
    sharding = jax.typeof(array).sharding
    return sharding if sharding.mesh.explicit_axes else None


# ---------------------------------------------------------------------------- the grid


class GridNumbers(NamedTuple):
    """Integers top 2^24 + low, in steps of the grid."""

    top: Array  # float32, whole numbers
    low: Array  # int32


def steps_per_unit(sigma: Array) -> Array:
    """1 / s as a float32 of 12 bits, so that products of two such numbers are exact.

    It is rounded down, so that sigma is never less than it should be, however roughly a
    TPU divides.
    """
    return cut_to_12_bits(STEPS_PER_SIGMA / (sigma.astype(np.float32) * (1 + 2.0**-20)))


def cut_to_12_bits(x: Array) -> Array:
    """Float32 with its last 12 bits set to 0."""
    bits = lax.bitcast_convert_type(x, np.uint32)
    first_bits = bits & np.uint32(0xFFFFF000)
    return lax.bitcast_convert_type(first_bits, np.float32)


def on_grid(x: Array, per_unit: Array) -> GridNumbers:
    """round(x / s) of float32. All is exact, but for the sum of two fractions."""
    high = cut_to_12_bits(x)
    tops = []
    lows = []
    fractions = []
    for part in (high, x - high):
        steps = part * per_unit
        top = jnp.round(steps * 2.0**-24)
        steps = steps - top * 2.0**24
        low = jnp.round(steps)
        tops.append(top)
        lows.append(low.astype(np.int32))
        fractions.append(steps - low)
    carry = jnp.round(fractions[0] + fractions[1])
    return GridNumbers(
        top=tops[0] + tops[1], low=lows[0] + lows[1] + carry.astype(np.int32)
    )


def with_noise(numbers: GridNumbers, noise: Array) -> GridNumbers:
    """The numbers plus integers, with low in [-2^23, 2^23). An integer has one such
    form, so that its rounding to float32 tells nothing but the integer.
    """
    low = numbers.low + noise
    carry = low + 2**23 >> 24
    return GridNumbers(
        top=numbers.top + carry.astype(np.float32), low=low - (carry << 24)
    )


def with_grid_noise(leaf: Array, sigma: Array, key: Array) -> Array:
    """A leaf of float32 or float64 plus noise of deviation sigma."""
    per_unit = steps_per_unit(sigma)
    largest = (LARGEST_SUM * STEPS_PER_SIGMA / per_unit).astype(leaf.dtype)
    leaf = jnp.clip(leaf, -largest, largest)
    words = random_words(key, leaf)
    noise = integer_noise(words)
    if leaf.dtype == np.float32:
        numbers = on_grid(leaf, per_unit)
        noisy = with_noise(numbers, noise)
        low = noisy.low.astype(np.float32)
        return (noisy.top * 2.0**24 + low) * (1 / per_unit)
    # Float64 holds all integers up to 2^53. A product of up to 2^46 is rounded by at
    # most 2^-7.
    per_unit = per_unit.astype(leaf.dtype)
    steps = jnp.round(leaf * per_unit)
    return (steps + noise.astype(leaf.dtype)) * (1 / per_unit)
