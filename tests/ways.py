"""The ways in which platforms compute the norms of groups, to be called on this CPU."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from optaxclip._norms import _maxima, _powers


class Way(NamedTuple):
    ord: float
    # (layout, the leaves of each group, counts or None) -> blocks
    norms: Callable[[Any, Any, Any], Any]


def norm(ord, leaves, dims):
    """The norm of some leaves in float64 NumPy. None: all dimensions are summed."""
    sizes = [np.abs(np.asarray(leaf).astype(np.complex128)) for leaf in leaves]
    over = {"axis": dims, "keepdims": dims is not None}
    if ord == math.inf:
        return np.max([np.max(x, **over) for x in sizes], 0, initial=0)
    return sum(np.sum(x**ord, **over) for x in sizes) ** (1 / ord)


def largest(layout, groups, counts):
    return _maxima.largest_moduli(np.float32, layout, groups)


def largest_by_bits(layout, groups, counts):
    return _maxima.largest_moduli_by_bits(layout, groups)


ON_CPU = {
    "float64": Way(2, partial(_powers._roots, 2.0, np.float64, np.float32)),
    "largest": Way(math.inf, largest),
}
ON_ACCELERATORS = {
    "gpu": Way(2, _powers._norms_on_gpu),
    "tpu": Way(2, _powers._norms_on_tpu),
    "shares": Way(2, partial(_powers._by_shares, 2.0, np.float32)),
    "cubes": Way(3, partial(_powers._by_shares, 3.0, np.float32)),
    "largest by bits": Way(math.inf, largest_by_bits),
}
WAYS = ON_CPU | ON_ACCELERATORS
