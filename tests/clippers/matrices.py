"""Matrices with known singular values, and what a clip of them should be."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip
from optaxclip import clip_by_spectral_norm
from tests import oracles

METHODS = ("svd", "newton_schulz")
both = pytest.mark.parametrize("method", METHODS)
SMOOTH = optaxclip.shrinks.smooth(2)
FORMS = {
    "hard": (optaxclip.shrinks.hard, lambda s, c: np.minimum(s, c)),
    "smooth": (SMOOTH, lambda s, c: s / np.sqrt(1 + (s / c) ** 2)),
}
both_forms = pytest.mark.parametrize("form", FORMS)


def matrix(shape, longest, shortest=1.0, rank=None, seed=0, dtype="float32"):
    """Random singular vectors, singular values spread evenly in their logarithm, none
    beyond the rank.
    """
    random = np.random.default_rng(seed)
    small = min(shape)
    rows, columns = (
        np.linalg.qr(random.standard_normal((size, small)))[0] for size in shape
    )
    values = np.geomspace(longest, shortest, small)
    values[small if rank is None else rank :] = 0
    return ((rows * values) @ columns.T).astype(jnp.dtype(dtype))


WIDE, SQUARE = (
    (32, 64),
    (32, 32),
)  # few shapes, so that most tests run the same few programs


@cache
def program(**options):
    """Clips to a limit that is traced, so that one program serves every limit."""

    def run(x, limit):
        clipper = clip_by_spectral_norm(limit, **options)
        return clipper.update(x, clipper.init(x))

    return jax.jit(run)


def clip(x, limit, method="svd", shrink=optaxclip.shrinks.hard, **options):
    return program(method=method, shrink=shrink, **options)(x, limit)


def expected(x, limit, form="hard"):
    u, s, v = np.linalg.svd(oracles.wide(x), full_matrices=False)
    return u * FORMS[form][1](s, limit)[..., None, :] @ v


def longest(x):
    return np.linalg.norm(oracles.wide(x), 2, (-2, -1))


def error(ours, theirs):
    return longest(oracles.wide(ours) - theirs)
