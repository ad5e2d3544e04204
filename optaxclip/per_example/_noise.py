"""Noise for privacy, an audit of what it must hide, and noise that is in gradients.

add_noise     adds Gaussian noise to a sum of clipped gradients
sensitivity   tries how much one example can change a sum. Each pattern takes the place
              of the first example. In cancelling patterns the entries of one array,
              along its first axis, are +-2^k, and all other arrays are repeated, so
              that the terms of the positions cancel and leave their rounding behind
noise_scale   the gradient noise scale, from a gradient and the norms of examples in it
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.tree_util import keystr
from jax.typing import ArrayLike

from .._checks import check_number, number_for_jit, shown
from .._mesh_types import has_types, manual_axes, resharded_as, varying
from .._norms import global_norm
from .._sums import divided
from ._clipped_grad import ClippedGrad
from ._problem import check_function

# The CRC-32 of b"optaxclip.add_noise". Keys that are split off, or that small numbers
# are folded into, are never those of the noise.
SALT = 0xAA98C44C
# With less, numbers of the noise would be subnormal in float32, and flushed to 0.
LEAST_SIGMA = 1e-30


def add_noise(result: Any, sigma: ArrayLike, key: Array) -> Any:
    """Adds Gaussian noise to a sum of clipped gradients: g + sigma N(0, I).

    For DP-SGD sigma is the noise multiplier of the account times the limit. Noise is
    added once, to the sum over all devices and microbatches, before it is divided by
    the expected number of examples.

    Args:
      result: of `clipped_grad(..., mean=False)`, or a tree of gradients, such as the
        sum of those of several microbatches.
      sigma: the standard deviation, at least 1e-30, since float32 loses smaller noise.
        A complex number gets noise of this deviation in its real and its imaginary
        part.
      key: a key of `jax.random`, another one for each step, from which nothing else is
        drawn.

    Returns:
      The tree of gradients with noise, in the dtypes and the sharding that they had.
      Noise is drawn and added in float32 or wider. Each number has 96 random bits and
      reaches 9.4 standard deviations on both sides. It is the same however leaves are
      split under `jit`. Inside shard_map devices that hold different parts of a leaf
      draw different noise, so add up devices' gradients (`lax.psum`) before. Norms,
      factors and values of a result are not private, and are not returned. All is NaN
      where only a traced program knows that sigma is too small, or the limit inf.

    Raises:
      ValueError: a mean, since its divisor depends on the data and it may be rounded to
        16 bits. A result without a limit, of `max_norm=None` or inf, or of
        `private=False`. A sigma that is below 1e-30 or NaN. A call in pmap, or in
        shard_map with check_vma=False, where it cannot be known which leaves are split.
      TypeError: a sigma that is not a number, a key that is none, or several, or leaves
        that are not floats or complex.

    Example:
      >>> grads = {"w": jnp.zeros(100_000), "b": jnp.zeros(3, jnp.bfloat16)}
      >>> noisy = optaxclip.add_noise(grads, 2.0, jax.random.key(0))
      >>> print(noisy["w"].std().round(1), noisy["b"].dtype)
      2.0 bfloat16

    Reference: Abadi et al., Deep learning with differential privacy, 2016 (arXiv
    1607.00133).
    """
    check_number(
        "add_noise: sigma",
        sigma,
        lowest=-np.inf,
        highest=float(np.finfo(np.float32).max),
        is_scalar=True,
    )
    is_known = not isinstance(sigma, Tracer)
    if is_known and np.asarray(sigma, np.float64) < LEAST_SIGMA:
        raise ValueError(
            f"add_noise: sigma must be at least {LEAST_SIGMA:g}, got {shown(sigma)}: "
            "smaller noise is lost in float32. To go without noise, leave add_noise "
            "out, as in grads = result.grads."
        )
    manual = manual_axes()
    if manual and not has_types(manual):
        raise ValueError("add_noise: must be called outside pmap and check_vma=False.")
    leaves, treedef = jax.tree.flatten(sum_in(result, "add_noise"))
    sigma = jnp.asarray(number_for_jit(sigma), float)
    is_private = sigma >= LEAST_SIGMA
    if isinstance(result, ClippedGrad):
        if result.limit is None:
            raise ValueError(
                "add_noise: result has no limit that noise could hide: clipped_grad "
                "got max_norm=None or inf, or private=False. Give it a number, such as "
                "max_norm=1.0, and leave private=True."
            )
        is_private &= jnp.all(jnp.isfinite(result.limit))
    # A traced number cannot be refused, but no sum may go out without noise.
    sigma = jnp.where(is_private, sigma, jnp.nan)
    try:
        salted = jax.random.fold_in(key, SALT)
        keys = jax.random.split(salted, len(leaves) + 1)
    except (TypeError, ValueError):
        must = "add_noise: key must be one key, such as jax.random.key(0)"
        raise TypeError(f"{must}, got {shown(key)}.") from None
    noisy_leaves = []
    for leaf, leaf_key in zip(leaves, keys):
        noisy_leaves.append(noisy_leaf(leaf, sigma, leaf_key))
    return treedef.unflatten(noisy_leaves)


def sum_in(result: Any, call: str) -> Any:
    """The sum of gradients in a result of `clipped_grad`, or the tree itself."""
    is_result = isinstance(result, ClippedGrad)
    if is_result and result.divisor is not None:
        raise ValueError(
            f"{call}: result must be a sum, got a mean, whose divisor changes with an "
            "example. Use mean=False, and divide by the expected number of examples."
        )
    return result.grads if is_result else result


@jax.jit
def noisy_leaf(leaf: Array, sigma: Array, key: Array) -> Array:
    """The leaf plus noise, in shard_map with noise of its own for each device."""
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        raise TypeError(f"add_noise: gradients must be floats, got {leaf.dtype}.")
    mesh_axes = tuple(sorted(varying(leaf)))
    if mesh_axes:
        # One number for all axes. Keys of unsafe_rbg forget in which order several are
        # folded in, and devices (0, 1) and (1, 0) would draw the same noise.
        key = jax.random.fold_in(key, lax.axis_index(mesh_axes))
    dtype = np.promote_types(leaf.dtype, np.float32)
    real = jnp.finfo(dtype).dtype
    real_key, imaginary_key = jax.random.split(key)
    noise = sigma.astype(real) * standard_normal(real_key, leaf.shape, real)
    if jnp.iscomplexobj(leaf):
        imaginary = standard_normal(imaginary_key, leaf.shape, real)
        noise = lax.complex(noise, sigma.astype(real) * imaginary)
    noise = resharded_as(noise, jax.typeof(leaf))
    return (leaf.astype(dtype) + noise).astype(leaf.dtype)


def standard_normal(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Normal numbers. `jax.random.normal` ends at 5.2 deviations in float32."""
    first_key, second_key = jax.random.bits(key, (2, 2), np.uint32)
    # Counters of 32 bits: the place along the first axes, and along the last axes. They
    # count places in the whole leaf, however it is split.
    row = column = jnp.zeros(shape, np.uint32)
    for axis, size in enumerate(shape):
        place = lax.broadcasted_iota(np.uint32, shape, axis)
        if axis < (len(shape) + 1) // 2:
            row = row * np.uint32(size) + place
        else:
            column = column * np.uint32(size) + place
    high, low = threefry(first_key, row, column)
    turn, _ = threefry(second_key, row, column)
    return normal_of_bits(high, low, turn, dtype)


def threefry(key: Array, first: Array, second: Array) -> tuple[Array, Array]:
    """Two random words, uint32, of a key of two words and two counters, by the hash of
    `jax.random`.

    With `jax.random.bits` three words take seven arrays of temporary memory for a leaf
    on a CPU. Here XLA makes one loop of all that a number needs.

    Reference: Salmon, Moraes, Dror, Shaw, Parallel random numbers: as easy as 1, 2, 3,
    2011. Threefry-2x32 with 20 rounds.
    """
    keys = key[0], key[1], key[0] ^ key[1] ^ np.uint32(0x1BD11BDA)
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


def normal_of_bits(high: Array, low: Array, turn: Array, dtype: Any) -> Array:
    """Normal numbers by Box and Muller, from three words each: 64 bits for the length
    of a vector in the plane, and 32 for its direction.
    """
    # The share of longer vectors. At least 2^-65, which is a length of 9.49.
    share = high.astype(dtype) * 2.0**-32 + (low.astype(dtype) + 0.5) * 2.0**-64
    # Rounded to 1, it would give no noise.
    share = jnp.minimum(share, 1 - jnp.finfo(dtype).epsneg)
    length = jnp.sqrt(-2 * jnp.log(share))
    # A bit of its own for the sign, so that both sides are alike in each bit.
    quarters = ((turn >> 1).astype(dtype) + 0.5) * 2.0**-31
    size = length * jnp.sin(np.pi / 2 * quarters)
    return jnp.where(turn & 1, -size, size)


class Sensitivity(NamedTuple):
    """How much one example changes a sum, at the worst of what was tried.

    Attributes:
      change: the norm of the sum with the example, less the sum without it. inf where
        this is not finite.
      pattern: what the example was, such as "nan in batch[0]".
      limit: what the change should not exceed but for rounding, as it was given.
    """

    change: float
    pattern: str
    limit: float


def sensitivity(
    grad_fn: Callable[..., Any], params: Any, *batch: Any, limit: float
) -> Sensitivity:
    """Tries examples that may change a sum of clipped gradients by more than the limit,
    and returns the largest change.

    In the place of the first example of the batch it puts others: large, small and
    broken numbers, and numbers that cancel, all alike or of random sizes. For each it
    computes the sum with and without that example. It finds faults, such as a
    parameter that is not clipped, or rounding that is not measured. It proves nothing:
    the `change` of `explain_clipped_grad` is proved.

    Args:
      grad_fn: what training uses, `grad_fn(params, *batch)`, best jitted: it is called
        ten times for each array of an example. It returns a sum, before noise is added:
        a result of `clipped_grad(..., mean=False)` or a tree of gradients.
      params: the parameters. Random ones will do.
      batch: arguments with at least two examples, pytrees whose first axes count them.
        Floats are replaced, one array at a time. Of integers, such as tokens, only
        values of the first example are used. Sequences should have at least 16
        positions.
      limit: the largest change that is allowed: `max_norm`, the root of the sum of
        squares for several.

    Returns:
      A `Sensitivity`: the largest `change`, and the `pattern` that makes it.

    Raises:
      ValueError: a mean instead of a sum.
      TypeError: a `grad_fn` that is not a function.

    Example:
      >>> def loss(w, x):
      ...     return 0.5 * (w - x) ** 2
      >>> grad = optaxclip.clipped_grad(loss, 1.0, mean=False)
      >>> batch = jnp.array([2.5, 1.0, 4.0, 3.0])
      >>> found = optaxclip.sensitivity(jax.jit(grad), 3.0, batch, limit=1.0)
      >>> print(f"{found.change:.3f}")
      1.000
      >>> def no_clip(w, x):
      ...     return jnp.sum(w - x)
      >>> optaxclip.sensitivity(no_clip, 3.0, batch, limit=1.0)
      Sensitivity(change=inf, pattern='nan in batch[0]', limit=1.0)
    """
    check_function("sensitivity: grad_fn", grad_fn)
    # On one device, also where a mesh has split it.
    batch = jax.tree.map(lambda x: jnp.asarray(jax.device_get(x)), batch)

    def total(batch: Any) -> list[np.ndarray]:
        sums = sum_in(grad_fn(params, *batch), "sensitivity")
        return [np.asarray(x).astype(np.complex128) for x in jax.tree.leaves(sums)]

    sums_without = total(jax.tree.map(lambda x: x[1:], batch))
    results = []
    with np.errstate(all="ignore"):
        for pattern, example in _patterns(batch):
            tried = jax.tree.map(lambda x, row: x.at[0].set(row), batch, example)
            norms = []
            for sum_with, sum_without in zip(total(tried), sums_without):
                norms.append(np.linalg.norm(sum_with - sum_without))
            change = float(np.linalg.norm(norms))
            if not np.isfinite(change):
                change = np.inf
            results.append(Sensitivity(change, pattern, limit))
    return max(results)


def _patterns(batch: Any) -> Iterator[tuple[str, Any]]:
    """The examples that are tried, with their names."""
    entries, treedef = jax.tree.flatten_with_path(jax.tree.map(lambda x: x[0], batch))
    alike = [jnp.broadcast_to(x[:1], x.shape) if x.ndim else x for _, x in entries]
    yield "all positions alike", treedef.unflatten(alike)
    random = np.random.default_rng(0)
    for index, (path, array) in enumerate(entries):
        if jnp.issubdtype(array.dtype, jnp.inexact):
            direction = random.standard_normal(array.shape[1:])
            for pattern, numbers in _numbers_of_positions(array, random).items():
                tried = np.multiply.outer(numbers, direction).reshape(array.shape)
                arrays = list(alike)
                arrays[index] = tried.astype(array.dtype)
                yield f"{pattern} in batch{keystr(path)}", treedef.unflatten(arrays)


def _numbers_of_positions(
    array: jax.Array, random: np.random.Generator
) -> dict[str, np.ndarray]:
    """Numbers for the positions of an array, by the names of patterns."""
    count = array.shape[0] if array.ndim else 1
    half = count // 2
    top = int(jnp.finfo(array.dtype).maxexp)
    powers = np.exp2(random.integers(top // 12, top // 2, half))
    patterns: dict[str, Any] = {}
    patterns["random +-2^k"] = random.permutation([*powers, *-powers])
    patterns["random +-1e9"] = random.permutation(np.repeat([1e9, -1e9], half))
    for power in (top // 4, top // 2, 3 * top // 4):
        patterns[f"aligned +-2^{power}"] = [2.0**power, -(2.0**power), 12.3]
    for size in (np.nan, np.inf, 1e-30, 1e9, 1e30):
        patterns[f"{size:g}"] = np.full(count, size)
    # All other positions are 0.
    zeros = np.zeros(count)
    return {name: np.resize([*x, *zeros], count) for name, x in patterns.items()}


class NoiseScale(NamedTuple):
    """How much gradients of examples differ, beside what they have in common.

    Attributes:
      scale: noise / signal. inf where signal is not above 0: the batch is too small to
        tell the gradient from noise.
      noise: tr(Sigma), of the covariance of examples' gradients.
      signal: |G|^2. By chance it may be negative.
    """

    scale: jax.Array  # float[]
    noise: jax.Array  # float[]
    signal: jax.Array  # float[]


def noise_scale(result: ClippedGrad) -> NoiseScale:
    """Estimates the simple gradient noise scale tr(Sigma) / |G|^2 from one batch:

        S        = mean of |g_i|^2 over the B examples
        noise    = (S - |G_B|^2) B / (B - 1)           estimates tr(Sigma)
        signal   = (B |G_B|^2 - S) / (B - 1)           estimates |G|^2
        scale    = noise / signal

    with the mean gradient G_B of the batch, and G that of all data. It is a batch size.
    Far below it, a batch twice as large halves the number of steps. Far above it, a
    larger batch only costs more.

    `noise` and `signal` are unbiased. Their quotient is not, and from one batch it is
    rough: average both over many steps, and then divide.

    Args:
      result: of `clipped_grad(loss, max_norm=None)`, or of a limit that clipped
        nothing. Examples that are masked, and those with NaN or inf in their gradient,
        are left out. Its `grads` may be the mean or the sum.

    Returns:
      A `NoiseScale` of numbers, float32 or wider. All are NaN with fewer than two
      examples, and, under jit, where gradients were clipped.

    Raises:
      ValueError: gradients that were clipped, whose mean is not the gradient. Under jit
        this cannot be raised, and the numbers are NaN.
      TypeError: something else than a result of `clipped_grad`.

    Example:
      >>> def loss(w, x):
      ...     return 0.5 * (w - x) ** 2
      >>> grad = optaxclip.per_example.clipped_grad(loss, max_norm=None)
      >>> result = grad(jnp.array(3.0), jnp.array([2.5, 1.0, 4.0, 0.5]))
      >>> found = optaxclip.per_example.noise_scale(result)
      >>> print(f"{found.noise:.3f} / {found.signal:.3f} = {found.scale:.3f}")
      2.500 / 0.375 = 6.667

    Reference: McCandlish, Kaplan, Amodei and others, An empirical model of large-batch
    training, 2018 (arXiv 1812.06162), appendix A. From the norms of examples: Gray,
    Tiwari, Bergsma, Hestness, Normalization layer per-example gradients are sufficient
    to predict gradient noise scale in transformers, 2024 (arXiv 2411.00999).
    """
    if not isinstance(result, ClippedGrad):
        must = "noise_scale: result must be what clipped_grad's function returns"
        raise TypeError(f"{must}, got {shown(result)}.")
    # [limits, batch]
    norms = jnp.stack(jax.tree.leaves(result.norms))
    factors = jnp.stack(jax.tree.leaves(result.factors))
    # Only where masked both are 0 for all limits, or in a gradient of zero, which a
    # shrink made 0.
    is_masked = jnp.all((norms == 0) & (factors == 0), 0)
    counts = jnp.all(jnp.isfinite(norms), 0) & ~is_masked
    clipped = counts & jnp.any(factors != 1, 0)
    if not isinstance(clipped, Tracer) and jnp.any(clipped):
        raise ValueError(
            f"noise_scale: {int(jnp.sum(clipped))} of {clipped.size} examples were "
            "clipped in result, so that its grads is not their mean gradient. Get "
            "result from clipped_grad(loss, max_norm=None)."
        )
    size = jnp.sum(counts, dtype=norms.dtype)
    # The mean of clipped_grad is divided by the number of broken examples as well.
    divisor = 1 if result.divisor is None else result.divisor.astype(size.dtype)
    mean = global_norm(result.grads) * (divisor / size)
    norms = jnp.where(counts, norms, 0)
    # Squares of norms beyond 1e19 or below 1e-19 leave the range of float32.
    longest = jnp.maximum(jnp.max(norms), jnp.finfo(norms.dtype).tiny)
    mean_square = jnp.sum(divided(norms, longest) ** 2) / size
    square_of_mean = divided(mean, longest) ** 2
    # By rounding alone it would be below 0.
    noise = jnp.maximum(mean_square - square_of_mean, 0) * size / (size - 1)
    signal = square_of_mean - noise / size
    scale = noise / jnp.maximum(signal, 0)
    estimate = NoiseScale(
        scale, noise=noise * longest * longest, signal=signal * longest * longest
    )
    is_known = (size > 1) & ~jnp.any(clipped)
    return NoiseScale(*(jnp.where(is_known, x, jnp.nan) for x in estimate))
