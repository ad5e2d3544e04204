"""How much of a gradient is noise, from the norms of its parts."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .._arguments.checks import check_real
from .._numbers import divided


def noise_share(norms_of_parts: ArrayLike, norm: ArrayLike) -> jax.Array:
    """Estimates which share of a squared norm is noise, from the norms of k parts of
    the batch:

        s^2      = (sum_i |g_i|^2 - k |g|^2) / (k (k - 1))
        share    = s^2 / |g|^2

    with the mean gradients g_i of parts of equal size, and their mean g. s^2 is what
    chance adds to |g|^2, and |g|^2 - s^2 estimates the square of the gradient over all
    data. Both are unbiased.

    It tells one loud part from a loud batch, without a history:

    - 1: one part alone makes the gradient.
    - Near 0: all parts agree.
    - Unchanged by a factor that all parts have, such as a loss scale.

    From few parts it is rough, and may be above 1. Look at it in a step whose norm
    stands out, or average s^2 and |g|^2 over steps.
    `python -m optaxclip.replay log.jsonl --batch 32 --to 512` needs it in the log, as
    "noise_share", and says what a limit becomes at another batch size.

    Args:
      norms_of_parts: float[k]: norms before any clip, of microbatches, of the batches
        of devices, or of examples, such as `norms` of `clipped_grad`, without those of
        masked examples: `norms[mask]`. At least 2.
      norm: float[]: the norm of the mean of their gradients, before any clip.

    Returns:
      float[]: at least 0. inf where `norm` is 0, but not all parts are. NaN where a
        norm is NaN or inf, or all are 0.

    Raises:
      ValueError: fewer than two parts, norms that are not [k], or a norm that is not
        one number. TypeError: something that is not a number.

    Example:
      >>> share = optaxclip.per_example.noise_share
      >>> print(share([8.0, 0.0, 0.0, 0.0], 2.0))  # one part of four
      1.0
      >>> print(share([2.0, 2.0, 2.0, 2.0], 2.0))  # all agree
      0.0

    Reference: McCandlish, Kaplan, Amodei and others, An empirical model of large-batch
    training, 2018 (arXiv 1812.06162), appendix A.1.
    """
    norms = jnp.asarray(norms_of_parts)
    check_real("noise_share: norms_of_parts", norms)
    check_real("noise_share: norm", norm, is_scalar=True)
    if norms.ndim != 1 or norms.size < 2:
        raise ValueError(
            "noise_share: norms_of_parts must be norms [k] of at least two parts, got "
            f"an array of shape {norms.shape}."
        )
    # Ratios, since the squares of large norms leave the range of float32.
    norm = jnp.asarray(norm, jnp.promote_types(norms.dtype, jnp.float32))
    ratios = jnp.where(norms == 0, 0.0, divided(norms, norm))
    # Rounding alone may make it negative.
    share = jnp.maximum(jnp.mean(ratios**2) - 1, 0) / (norms.size - 1)
    is_finite = jnp.isfinite(norm) & jnp.all(jnp.isfinite(norms))
    are_all_0 = (norm == 0) & jnp.all(norms == 0)
    return jnp.where(is_finite & ~are_all_0, share, jnp.nan)
