"""What the library must compute, written from the equations in NumPy, with nothing of
the library in it.

    norm        (sum |x|^p)^(1/p), max |x|, sqrt(sum |x|^2 / N), sqrt(sum |x|^2) / N
    clipping    x * min(1, limit / (norm + eps)); 0 at a limit of 0; x at a limit of
                inf; NaN where the norm is not finite
    by value    min(max(x, low), high)

Leaves come as arrays of any dtype; results are float64 or complex128 and not yet
rounded to the leaf's dtype. Sums run in long double, of values that were divided by the
largest.
"""

import math

import ml_dtypes
import numpy as np

# The axes that feed one output, by rank (Brock et al., 2021), of leaves that do not
# squeeze to a vector.
UNIT_AXES = {0: (), 1: (0,), 2: (0,), 3: (0,), 4: (0, 1, 2), 5: (0, 1, 2, 3)}


def wide(leaf):
    """The leaf in float64 or complex128."""
    leaf = np.asarray(leaf)
    return leaf.astype(np.complex128 if leaf.dtype.kind == "c" else np.float64)


def moduli(leaf):
    x = wide(leaf)
    return np.abs(x.astype(np.clongdouble if x.dtype.kind == "c" else np.longdouble))


def norm(leaves, ord=2):
    """The norm of all leaves together, as a float."""
    sizes = [moduli(leaf).reshape(-1) for leaf in leaves]
    joined = np.concatenate(sizes) if sizes else np.zeros(0, np.longdouble)
    return float(norm_over(joined, (0,), ord)[0]) if joined.size else 0.0


def norm_over(leaf, axes, ord=2):
    """The norm over some axes, which stay with size 1."""
    size = moduli(leaf)
    count = math.prod(size.shape[axis] for axis in axes)
    largest = size.max(axis=axes, keepdims=True) if axes else size
    if ord == math.inf:
        return largest.astype(np.float64)
    p = 2 if ord in ("rms", "average", None) else ord
    unit = np.where((largest > 0) & np.isfinite(largest), largest, 1)
    total = unit * ((size / unit) ** p).sum(axis=axes, keepdims=True) ** (
        np.longdouble(1) / p
    )
    total = total / {"rms": np.sqrt(np.longdouble(count)), "average": count}.get(ord, 1)
    return total.astype(np.float64)


def shrink(leaf, norm, limit, eps=0.0):
    """The leaf, whose norm (or that of its units) is `norm`, after clipping to
    `limit`.
    """
    x = wide(leaf)
    norm, limit = np.broadcast_arrays(
        np.asarray(norm, np.longdouble), np.asarray(limit, np.longdouble)
    )
    long = norm + np.longdouble(eps)
    scale = np.where(long > limit, limit / np.where(long > limit, long, 1), 1)
    scale = np.where(np.isfinite(norm) | (limit == np.inf), scale, np.nan)
    scale = np.where(limit == np.inf, 1, scale)
    product = x.astype(np.clongdouble if x.dtype.kind == "c" else np.longdouble) * scale
    return np.where(scale == 1, x, product).astype(x.dtype)


def clip_global(leaves, limit, ord=2, eps=0.0):
    whole = norm(leaves, ord)
    return [shrink(leaf, whole, limit, eps) for leaf in leaves]


def clip_tensors(leaves, limit, ord=2, eps=0.0):
    return [
        shrink(leaf, norm([leaf], ord), limit, eps) if leaf.size else wide(leaf)
        for leaf in leaves
    ]


def clip_units(leaves, limit, ord=2, eps=0.0, axes=None):
    """Each unit by itself; `axes` are those to sum over, in every leaf."""
    return [
        shrink(leaf, unitwise_norm(leaf, ord, axes), limit, eps)
        if leaf.size
        else wide(leaf)
        for leaf in leaves
    ]


def unitwise_norm(leaf, ord=2, axes=None):
    return norm_over(leaf, unit_axes(leaf) if axes is None else axes, ord)


def unit_axes(leaf):
    """What squeezes to a vector is one unit."""
    every = tuple(range(leaf.ndim))
    return every if np.squeeze(leaf).ndim <= 1 else UNIT_AXES[leaf.ndim]


def eps_of(dtype):
    """The distance from 1 to the next number of this dtype. Rounding changes a normal
    number by at most half of that, relatively.
    """
    return float(ml_dtypes.finfo(dtype).eps)


def floor_of(dtype):
    """How much a number too small for the dtype may change. float16 rounds to a
    multiple of 2^-24; of the others XLA may flush all below 2^-126 to 0, of complex
    ones in both parts.
    """
    if dtype == np.float16:
        return 2.0**-25
    smallest = float(ml_dtypes.finfo(dtype).tiny)
    return smallest * math.sqrt(2) if np.dtype(dtype).kind == "c" else smallest


def same_bits(a, b):
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
