"""The gradient noise scale, from a gradient and the norms of the examples in it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer

from .._norms.norms import global_norm
from ._clipped_grad import ClippedGrad


class NoiseScale(NamedTuple):
    """How much gradients of examples differ, beside what they have in common.

    Attributes:
      scale: noise / signal. inf where signal is not above 0: the batch is too small to
        tell the gradient from noise, or all gradients are 0.
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
    # [groups, batch]
    norms = jnp.stack(jax.tree.leaves(result.norms))
    factors = jnp.stack(jax.tree.leaves(result.factors))
    # Factors of masked and of broken examples are 0. A masked one has norms of 0 too.
    is_counted = jnp.all(factors == 1, axis=0)
    is_broken = ~jnp.all(jnp.isfinite(norms), axis=0)
    is_clipped = jnp.any(norms > 0, axis=0) & ~is_broken & ~is_counted
    if not isinstance(is_clipped, Tracer) and jnp.any(is_clipped):
        raise ValueError(
            f"noise_scale: {int(jnp.sum(is_clipped))} of {is_clipped.size} examples "
            "were clipped in result, so that its grads is not their mean gradient. Get "
            "result from clipped_grad(loss, max_norm=None)."
        )
    size = jnp.sum(is_counted, dtype=norms.dtype)
    # `clipped_grad` divides a mean by the number of broken examples as well.
    divisor = 1 if result.divisor is None else result.divisor.astype(size.dtype)
    square_of_mean = (global_norm(result.grads) * divisor / size) ** 2
    mean_square = jnp.sum(jnp.where(is_counted, norms, 0) ** 2) / size
    # Rounding alone may make it negative.
    noise = jnp.maximum(mean_square - square_of_mean, 0) * size / (size - 1)
    signal = square_of_mean - noise / size
    # No division by 0, which `jax_debug_nans` would refuse.
    safe_signal = jnp.where(signal > 0, signal, 1)
    scale = jnp.where(signal > 0, noise / safe_signal, jnp.inf)
    estimate = NoiseScale(scale, noise, signal)
    is_known = (size > 1) & ~jnp.any(is_clipped)
    return jax.tree.map(lambda x: jnp.where(is_known, x, jnp.nan), estimate)
