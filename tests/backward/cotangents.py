"""Cotangents that are pulled back through a clip, and what they should be."""

import math

import jax
import numpy as np

from optaxclip import clip_cotangent

EPS = float(np.finfo(np.float32).eps)
NAN, INF = math.nan, math.inf


def normal(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def pulled_back(function, x, cotangent):
    """What the function makes of a cotangent of its output."""
    out, pull = jax.vjp(function, x)
    jax.tree.map(np.testing.assert_array_equal, out, x)
    return pull(cotangent)[0]


def clipped(cotangent, **limits):
    """What `clip_cotangent` makes of a cotangent."""
    x = jax.numpy.zeros_like(cotangent)
    return pulled_back(lambda x: clip_cotangent(x, **limits), x, cotangent)


def shortened(cotangent, limit, axis=None, ord=2):
    """The equation in float64."""
    x = np.asarray(cotangent, np.float64)
    if ord == INF:
        norm = np.max(np.abs(x), axis=axis, keepdims=True)
    else:
        norm = np.sum(np.abs(x) ** ord, axis=axis, keepdims=True) ** (1 / ord)
    return x * np.minimum(1, limit / norm)


def close(ours, exact, eps=EPS, rtol=8):
    np.testing.assert_allclose(np.asarray(ours, np.float64), exact, rtol * eps)
