"""Batches and noise for privacy, an audit of what the noise must hide, and noise that
is in gradients.

draw          a batch by Poisson sampling, each example at a random place
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

from .._checks import check_length, check_number, number_for_jit, shown
from .._mesh import device_count
from .._mesh_types import has_types, manual_axes, varying
from .._norms import global_norm
from .._sums import divided
from ._clipped_grad import ClippedGrad
from ._grid_noise import REACH, ROUNDING, with_grid_noise
from ._problem import check_function

# The CRC-32 of b"optaxclip.add_noise". Keys that are split off, or that small numbers
# are folded into, are never those of the noise.
SALT = 0xAA98C44C
TRIED = 16  # examples, and tokens of each array, of the audit
# Beyond these deviations steps of the grid would leave the range of float32.
LEAST_SIGMA = 1e-25
MOST_SIGMA = 1e30


class Drawn(NamedTuple):
    """A padded batch.

    Attributes:
      chosen: for each place, the number of an example in the data.
      mask: whether an example was drawn for this place, for `mask=`.
    """

    chosen: Array  # int32[places]
    mask: Array  # bool[places]


def draw(key: Array, share: float, *, examples: int, places: int) -> Drawn:
    """Draws a batch by Poisson sampling: each example joins with the same probability,
    whoever else does, and gets a random place of a padded batch.

    Where an example stands tells nothing of who else is there. So the batch without it
    is the batch in which `mask` leaves out its place, and the gradients of all others
    keep their bits: `sensitivity` of `clipped_grad` is proved for that.

    Args:
      key: a key of `jax.random`, another one for each step.
      share: the probability that an example joins, above 0 and at most 1.
      examples: how many examples the data have.
      places: the size of the batch. If more are drawn, the last are left out, which the
        account must add to delta: take so many that it is as good as impossible.

    Returns:
      A `Drawn`: `x[chosen]` is the batch, and `mask` goes to `clipped_grad`.

    Raises:
      ValueError: a share outside 0 to 1, fewer than one place, or more places than
        examples.
      TypeError: a share that is not a number, or examples or places that are no int.

    Example:
      >>> from optaxclip.per_example import draw
      >>> chosen, mask = draw(jax.random.key(0), 0.5, examples=6, places=5)
      >>> print(mask.sum(), chosen[mask])
      4 [1 4 2 3]

    Reference: Mironov, Talwar, Zhang, Renyi differential privacy of the sampled
    Gaussian mechanism, 2019 (arXiv 1908.10530).
    """
    check_number("draw: share", share, highest=1.0, is_scalar=True)
    check_length("draw: examples", examples)
    check_number("draw: places", places, lowest=1, highest=examples, is_scalar=True)
    for name, count in {"examples": examples, "places": places}.items():
        # A float would be refused as the shape of an array, without its name.
        if not isinstance(count, (int, np.integer)):
            raise TypeError(
                f"draw: {name} must be an int, got {shown(count)}. Round it: "
                f"{name}=int({shown(count)})."
            )
    of_examples, of_places = jax.random.split(key)
    # The words have 32 bits. The threshold is rounded down, so that no example joins
    # more often than `share` says.
    threshold = np.uint32(min(int(share * 2**32), 2**32 - 1))
    is_drawn = jax.random.bits(of_examples, (examples,), np.uint32) < threshold
    chosen = jnp.argsort(~is_drawn, stable=True)[:places]
    chosen = jax.random.permutation(of_places, chosen)
    return Drawn(chosen, is_drawn[chosen])


def add_noise(
    result: Any,
    noise_multiplier: ArrayLike,
    key: Array,
    *,
    sensitivity: ArrayLike | None = None,
) -> Any:
    """Adds Gaussian noise to a sum of clipped gradients: g + sigma N(0, I), with
    sigma = noise_multiplier * sensitivity.

    The account is `GaussianDpEvent(noise_multiplier)` of dp-accounting. It holds for an
    observer of every bit: sum and noise are whole numbers in steps of sigma / 2^26, and
    sigma is longer by what the rounding to them adds, 1 + 2^-26 noise_multiplier
    sqrt(d) for d numbers. docs/numerics.md has the proof. Noise is added once, to the
    sum over all devices and microbatches, before it is divided by the expected number
    of examples.

    Args:
      result: of `clipped_grad(..., mean=False)` with `mask=`, which has a sensitivity
        of its own, or a tree of gradients.
      noise_multiplier: the deviation of the noise in units of the sensitivity, above 0.
        A complex number gets such noise in its real and its imaginary part.
      key: a key of `jax.random`, another one for each step, from which nothing else is
        drawn. The first key should come from the system: an observer may guess
        `jax.random.key(0)`.
      sensitivity: of a tree of gradients, by how much one example changes them at most,
        as a norm of all leaves. Not of a result.

    Returns:
      The tree of gradients with noise, in the dtypes and the sharding that they had.
      Noise is drawn and added in float32 or wider, and reaches 11 standard deviations.
      It has the same bits however leaves are split under `jit`. Inside shard_map
      devices that hold different parts of a leaf draw different noise, so add up
      devices' gradients (`lax.psum`) before. Numbers beyond 2^20 sigma are cut to that.
      Norms, factors and values of a result are not private, and are not returned. All
      is NaN where only a traced program knows that sigma is out of range.

    Raises:
      ValueError: a result without a sensitivity, such as a mean, one of a batch without
        `mask=`, of `max_norm=None` or inf, or of `private=False`. A tree without
        `sensitivity=`. Noise of 0, outside 1e-25 to 1e30, or below 2^-20 of what the
        sum may be. A leaf of more numbers than its counters count. A call in pmap, or
        in shard_map with check_vma=False, where it cannot be known which leaves are
        split.
      TypeError: a noise multiplier that is not a number, a key that is none, or
        several, or leaves that are not floats or complex.

    Example:
      >>> grads = {"w": jnp.zeros(100_000), "b": jnp.zeros(3, jnp.bfloat16)}
      >>> key = jax.random.key(0)
      >>> noisy = optaxclip.add_noise(grads, 0.5, key, sensitivity=4.0)
      >>> print(noisy["w"].std().round(1), noisy["b"].dtype)
      2.0 bfloat16

    Reference: Abadi et al., Deep learning with differential privacy, 2016 (arXiv
    1607.00133). Canonne, Kamath, Steinke, The discrete Gaussian for differential
    privacy, 2020 (arXiv 2004.00010).
    """
    check_number(
        "add_noise: noise_multiplier", noise_multiplier, lowest=-np.inf, is_scalar=True
    )
    manual = manual_axes()
    if manual and not has_types(manual):
        raise ValueError("add_noise: must be called outside pmap and check_vma=False.")
    leaves, treedef = jax.tree.flatten(sum_in(result, "add_noise"))
    longest: Any = 0.0
    if isinstance(result, ClippedGrad):
        if sensitivity is not None:
            raise ValueError(
                "add_noise: sensitivity is for a tree of gradients, but result has its "
                "own. Leave it out, or give result.grads."
            )
        if result.sensitivity is None:
            raise ValueError(
                "add_noise: result has no sensitivity that noise could hide. "
                "clipped_grad proves one with a finite max_norm, private=True, and a "
                "batch that is padded to one size, with mask= for what is real "
                "(per_example.draw makes both)."
            )
        sensitivity = result.sensitivity
        longest = result.longest
    elif sensitivity is None:
        raise ValueError(
            "add_noise: sensitivity must be given with a tree of gradients: by how "
            "much one example changes them. A result of clipped_grad(..., mean=False) "
            "has its own."
        )
    check_number("add_noise: sensitivity", sensitivity, is_scalar=True)
    multiplier = jnp.asarray(number_for_jit(noise_multiplier), float)
    change = jnp.asarray(number_for_jit(sensitivity), float)
    # What rounding to the grid adds to the sensitivity, in units of sigma
    rounding = ROUNDING * _count_of(leaves) ** 0.5
    sigma = multiplier * change / (1 - multiplier * rounding)
    is_private = (multiplier > 0) & (sigma >= LEAST_SIGMA) & (sigma <= MOST_SIGMA)
    is_private &= longest <= REACH * sigma
    if not isinstance(is_private, Tracer) and not is_private:
        raise ValueError(
            f"add_noise: noise_multiplier={shown(noise_multiplier)}, with the "
            f"sensitivity {change:g}, gives noise of deviation {sigma:g}. It must "
            f"be between {LEAST_SIGMA:g} and {MOST_SIGMA:g}, and at least "
            f"{longest / REACH:.2g}, 2^-20 of what the sum may be. To go without "
            "noise, leave add_noise out, as in grads = result.grads."
        )
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


def _count_of(leaves: list[Array]) -> int:
    """How many real numbers the leaves have, over all devices."""
    count = 0
    for leaf in leaves:
        parts = 2 if jnp.iscomplexobj(leaf) else 1
        count += parts * jnp.size(leaf) * device_count(varying(leaf))
    return count


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
    real_key, imaginary_key = jax.random.split(key)
    wide = leaf.astype(np.promote_types(leaf.dtype, np.float32))
    if jnp.iscomplexobj(leaf):
        noisy = lax.complex(
            with_grid_noise(wide.real, sigma, real_key),
            with_grid_noise(wide.imag, sigma, imaginary_key),
        )
    else:
        noisy = with_grid_noise(wide, sigma, real_key)
    return noisy.astype(leaf.dtype)


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
    broken numbers, numbers that cancel, all alike or of random sizes, single tokens,
    and the other examples of the batch. For each it compares the sum with the one in
    which `mask=` leaves out the first place. It finds faults, such as a parameter that
    is not clipped, or rounding that is not measured. It proves nothing: the `change` of
    `explain_clipped_grad` is proved.

    Args:
      grad_fn: what training uses, `grad_fn(params, *batch, mask=mask)`, best jitted: it
        is called ten times for each array of an example. It returns a sum, before noise
        is added: a result of `clipped_grad(..., mean=False)` or a tree of gradients.
      params: the parameters. Random ones will do.
      batch: arguments with at least two examples, pytrees whose first axes count them.
        Floats and integers are replaced, one array at a time, integers by values that
        the batch has. Sequences should have at least 16 positions.
      limit: the largest change that is allowed: `max_norm`, the root of the sum of
        squares for several.

    Returns:
      A `Sensitivity`: the largest `change`, and the `pattern` that makes it.

    Raises:
      ValueError: a mean instead of a sum.
      TypeError: a `grad_fn` that is not a function, or takes no `mask=`.

    Example:
      >>> def loss(w, x):
      ...     return 0.5 * (w - x) ** 2
      >>> grad = optaxclip.clipped_grad(loss, 1.0, mean=False)
      >>> batch = jnp.array([2.5, 1.0, 4.0, 3.0])
      >>> found = optaxclip.sensitivity(jax.jit(grad), 3.0, batch, limit=1.0)
      >>> print(f"{found.change:.3f}")
      1.000
      >>> def no_clip(w, x, mask):
      ...     return jnp.sum(jnp.where(mask, w - x, 0))
      >>> optaxclip.sensitivity(no_clip, 3.0, batch, limit=1.0)
      Sensitivity(change=inf, pattern='nan in batch[0]', limit=1.0)
    """
    check_function("sensitivity: grad_fn", grad_fn)
    # On one device, also where a mesh has split it.
    batch = jax.tree.map(lambda x: jnp.asarray(jax.device_get(x)), batch)
    is_present = np.ones(len(jax.tree.leaves(batch)[0]), bool)

    def total(batch: Any, mask: np.ndarray) -> list[np.ndarray]:
        sums = sum_in(grad_fn(params, *batch, mask=mask), "sensitivity")
        return [np.asarray(x).astype(np.complex128) for x in jax.tree.leaves(sums)]

    # In its place, since the gradients of others have other bits in a shorter batch.
    sums_without = total(batch, np.arange(is_present.size) > 0)
    results = []
    with np.errstate(all="ignore"):
        for pattern, example in _patterns(batch):
            tried = jax.tree.map(lambda x, row: x.at[0].set(row), batch, example)
            norms = []
            for sum_with, sum_without in zip(total(tried, is_present), sums_without):
                norms.append(np.linalg.norm(sum_with - sum_without))
            change = float(np.linalg.norm(norms))
            if not np.isfinite(change):
                change = np.inf
            results.append(Sensitivity(change, pattern, limit))
    return max(results)


def _patterns(batch: Any) -> Iterator[tuple[str, Any]]:
    """The examples that are tried, with their names."""
    entries, treedef = jax.tree.flatten_with_path(batch)
    for index in range(min(TRIED, len(entries[0][1]))):
        rows = [array[index] for _, array in entries]
        yield f"example {index}", treedef.unflatten(rows)
    examples = [array[0] for _, array in entries]
    alike = [jnp.broadcast_to(x[:1], x.shape) if x.ndim else x for x in examples]
    yield "all positions alike", treedef.unflatten(alike)
    random = np.random.default_rng(0)
    for index, (path, array) in enumerate(entries):
        patterns: dict[str, Any] = {}
        if jnp.issubdtype(array.dtype, jnp.inexact):
            patterns = _numbers(array[0], random)
        elif jnp.issubdtype(array.dtype, jnp.integer):
            tokens = np.unique(array)
            for token in random.choice(tokens, min(TRIED, tokens.size), replace=False):
                patterns[str(token)] = np.full(array.shape[1:], token)
        for pattern, tried in patterns.items():
            arrays = list(alike)
            arrays[index] = jnp.asarray(tried, array.dtype)
            yield f"{pattern} in batch{keystr(path)}", treedef.unflatten(arrays)


def _numbers(array: jax.Array, random: np.random.Generator) -> dict[str, np.ndarray]:
    """Floats for an array of one example, by the names of patterns."""
    count = array.shape[0] if array.ndim else 1
    half = count // 2
    top = int(jnp.finfo(array.dtype).maxexp)
    direction = random.standard_normal(array.shape[1:])
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
    arrays = {}
    for name, numbers in patterns.items():
        of_positions = np.resize([*numbers, *zeros], count)
        arrays[name] = np.multiply.outer(of_positions, direction).reshape(array.shape)
    return arrays


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
