"""Whether norms were logged after a clip."""

import numpy as np


def clipped_share(values: np.ndarray) -> float:
    """The share of norms that are the largest, or 0 if norms do not look clipped."""
    norms = values[np.isfinite(values) & (values > 0)]
    if len(norms) < 5:
        return 0.0
    is_largest = are_largest(norms)
    share = float(is_largest.mean())
    # Norms that are logged with few digits are often equal, also below the largest.
    _, counts = np.unique(norms[~is_largest], return_counts=True)
    largest_other_share = counts.max(initial=0) / len(norms)
    looks_clipped = share >= 0.05 and share > 3 * largest_other_share
    return share if looks_clipped else 0.0


def are_largest(norms: np.ndarray) -> np.ndarray:
    """Which norms are within 0.1 % of the largest: bfloat16 has two to three digits."""
    return norms >= norms.max() * (1 - 1e-3)
