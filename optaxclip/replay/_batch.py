"""Norms at another batch size."""

import math

import numpy as np
from jax.typing import ArrayLike


def norm_ratio(
    norms: ArrayLike, noise_shares: ArrayLike, batch: int, other_batch: int
) -> float:
    """How long gradients are at another batch size, relative to those of the log.

        E |g|^2 = S + s^2          at batch size B
        E |g|^2 = S + s^2 B / B'   at batch size B'

    S is the square of the gradient over all data, and s^2 the noise at B: the mean over
    steps of noise share times squared norm.

    Args:
      norms: float[steps]. Steps without a finite norm and noise share are left out.
      noise_shares: float[steps]: of `per_example.noise_share`.
      batch: B, the examples in a batch of the log, at least 1.
      other_batch: B', at least 1.

    Raises:
      ValueError: no step counts.

    Reference: McCandlish, Kaplan, Amodei and others, An empirical model of large-batch
    training, 2018 (arXiv 1812.06162), appendix A.1.
    """
    norms = np.asarray(norms, np.float64)
    squares = norms**2
    shares = np.asarray(noise_shares, np.float64)
    is_known = np.isfinite(squares) & np.isfinite(shares)
    if not squares[is_known].any():
        raise ValueError("replay: no step has a norm above 0 and a noise share.")
    share = np.average(shares[is_known], weights=squares[is_known])
    # By chance the estimate may be above 1, where no gradient would remain.
    share = min(share, 1.0)
    return math.sqrt(1 - share + share * batch / other_batch)
