"""Gaussian noise for a sum of clipped gradients, in proportion to its sensitivity."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.typing import ArrayLike

from .._arguments.checks import check_key, check_number, shown
from .._devices.mesh import device_count
from .._devices.mesh_types import has_types, manual_axes, varying
from .._trees import PyTree
from ._clipped_grad import DIVISOR_CHANGES, ClippedGrad
from ._grid_noise import LARGEST_SUM, ROUNDING, with_grid_noise

# Folded into the key, so that the noise has no key that a user gets by `split`, or by
# `fold_in` of a small number. It is the CRC-32 of b"optaxclip.add_noise".
SALT = 0xAA98C44C
# With a deviation outside these, the steps of the grid would leave float32's range.
LEAST_SIGMA = 1e-25
MOST_SIGMA = 1e30


def add_noise(
    result: PyTree,
    noise_multiplier: ArrayLike,
    key: Array,
    *,
    sensitivity: ArrayLike | None = None,
) -> PyTree:
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
        as a norm of all leaves. Must be left out if `result` is a ClippedGrad.

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
        `mask=`, of `max_norm=None`, inf or below 1e-5, of `private=False`, of random
        numbers from keys other than threefry's, or of a shrink of your own or
        `normalize`. A tree without `sensitivity=`. Noise of 0, outside 1e-25 to 1e30,
        or below 2^-20 of what the sum may be. A multiplier of 2^26 / sqrt(d) or more,
        for d numbers. A leaf of more numbers than its counters count, or several keys.
        A call in pmap, or in shard_map with check_vma=False, where it cannot be known
        which leaves are split.
      TypeError: a noise multiplier that is not a number, a key that is none, or leaves
        that are not floats or complex.

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
    check_number("add_noise: noise_multiplier", noise_multiplier, is_scalar=True)
    check_key("add_noise: key", key)
    manual = manual_axes()
    if manual and not has_types(manual):
        raise ValueError("add_noise: must be called outside pmap and check_vma=False.")
    leaves, treedef = jax.tree.flatten(sum_in(result, "add_noise"))
    sensitivity, longest = _bounds_of(result, sensitivity)
    check_number("add_noise: sensitivity", sensitivity, is_scalar=True)
    multiplier = jnp.asarray(noise_multiplier, float)
    change = jnp.asarray(sensitivity, float)
    # Rounding to the grid adds this share of sigma to the sensitivity, so that sigma =
    # multiplier (change + rounding sigma).
    rounding = ROUNDING * count_of_numbers(leaves) ** 0.5
    # No noise is enough for a multiplier of 1 / rounding, 2^26 / sqrt(d).
    share_left = jnp.maximum(1 - multiplier * rounding, 0)
    sigma = multiplier * change / share_left
    is_private = (sigma >= LEAST_SIGMA) & (sigma <= MOST_SIGMA)
    is_private &= longest <= LARGEST_SUM * sigma
    if not isinstance(is_private, Tracer) and not is_private:
        raise ValueError(
            f"add_noise: noise_multiplier={shown(noise_multiplier)}, with the "
            f"sensitivity {change:g}, gives noise of deviation {sigma:g}. It must "
            f"be between {LEAST_SIGMA:g} and {MOST_SIGMA:g}, and at least "
            f"{longest / LARGEST_SUM:.2g}, 2^-20 of what the sum may be. To go without "
            "noise, leave add_noise out, as in grads = result.grads."
        )
    # A traced number cannot be refused, but no sum may go out without noise.
    sigma = jnp.where(is_private, sigma, jnp.nan)
    keys = jax.random.split(jax.random.fold_in(key, SALT), len(leaves))
    noisy_leaves = [noisy_leaf(leaf, sigma, key) for leaf, key in zip(leaves, keys)]
    return treedef.unflatten(noisy_leaves)


def sum_in(result: PyTree, call: str) -> PyTree:
    """The sum of gradients in a result of `clipped_grad`, or the tree itself."""
    if not isinstance(result, ClippedGrad):
        return result
    if result.divisor is not None:
        raise ValueError(f"{call}: {DIVISOR_CHANGES}")
    return result.grads


def _bounds_of(
    result: PyTree, sensitivity: ArrayLike | None
) -> tuple[ArrayLike, ArrayLike]:
    """By how much one example changes a result at most, and how long the result is at
    most. How long a tree is, is not known, and counts as 0.
    """
    if not isinstance(result, ClippedGrad):
        if sensitivity is None:
            raise ValueError(
                "add_noise: sensitivity must be given with a tree of gradients: by how "
                "much one example changes them. A result of clipped_grad(..., "
                "mean=False) has its own."
            )
        return sensitivity, 0.0
    if sensitivity is not None:
        raise ValueError(
            "add_noise: sensitivity is for a tree of gradients, but result has its "
            "own. Leave it out, or give result.grads."
        )
    if result.sensitivity is None:
        raise ValueError(f"add_noise: result has no sensitivity: {result.obstacle}")
    return result.sensitivity, result.longest


def count_of_numbers(leaves: list[Array]) -> int:
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
        # One number for all axes. Keys of unsafe_rbg are the same in whatever order
        # numbers are folded in: devices (0, 1) and (1, 0) would draw the same noise.
        key = jax.random.fold_in(key, lax.axis_index(mesh_axes))
    real_key, imaginary_key = jax.random.split(key)
    wide_leaf = leaf.astype(np.promote_types(leaf.dtype, np.float32))
    if jnp.iscomplexobj(leaf):
        noisy = lax.complex(
            with_grid_noise(wide_leaf.real, sigma, real_key),
            with_grid_noise(wide_leaf.imag, sigma, imaginary_key),
        )
    else:
        noisy = with_grid_noise(wide_leaf, sigma, real_key)
    return noisy.astype(leaf.dtype)
