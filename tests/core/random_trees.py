"""Random trees, limits and clippers, and the norms of their parts in float64.

Tolerances: float32 arithmetic takes at most 8 eps off a result (5 of them on purpose,
see `factor_between`, the rest for norm, limit, roots and products), 2 more where the
limit is itself a product. Rounding to the leaf's dtype changes it by half an eps of
that dtype, or by what its subnormal range loses (`oracles.floor_of`).
"""

import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings

import optaxclip
from tests import oracles

LABELS = ("even", "odd")
properties = settings(deadline=None, max_examples=30, derandomize=True, database=None)
ALL_DTYPES = [
    ("float32", ()),
    ("bfloat16", (7,)),
    ("float16", (2, 3, 4)),
    ("complex64", (1,)),
    ("float32", (0, 3)),
]


def values(random, shape, middle, spread, lowest, highest):
    exponents = np.clip(middle + spread * random.uniform(-1, 1, shape), lowest, highest)
    return (
        random.choice([-1, 1], shape)
        * random.uniform(1, 2, shape)
        * 2.0 ** np.floor(exponents)
    )


def units_of(leaves):
    """[(leaf number, index)] for each unit."""
    for i, leaf in enumerate(leaves):
        axes = oracles.unit_axes(leaf)
        kept = [size if axis not in axes else 1 for axis, size in enumerate(leaf.shape)]
        for index in np.ndindex(*kept):
            yield (
                i,
                tuple(
                    slice(None) if axis in axes else at for axis, at in enumerate(index)
                ),
            )


def everything(leaves):
    return [[(i, ...) for i in range(len(leaves))]]


def each(leaves):
    return [[(i, ...)] for i in range(len(leaves))]


def by_label(leaves):
    return [[(i, ...) for i in range(start, len(leaves), 2)] for start in (0, 1)]


def unit(leaves):
    return [[place] for place in units_of(leaves)]


def labels(leaves):
    return [LABELS[i % 2] for i in range(len(leaves))]


CLIPPERS = {
    "global": (
        lambda limit, _: optaxclip.clip_by_global_norm(limit),
        everything,
        lambda leaves, limit, _: oracles.clip_global(leaves, limit),
    ),
    "tensor": (
        lambda limit, _: optaxclip.clip_by_tensor_norm(limit),
        each,
        lambda leaves, limit, _: oracles.clip_tensors(leaves, limit),
    ),
    "unit": (
        lambda limit, _: optaxclip.clip_by_unitwise_norm(limit),
        unit,
        lambda leaves, limit, _: oracles.clip_units(leaves, limit),
    ),
    "group": (
        lambda limit, leaves: optaxclip.clip_by_group_norm(limit, labels(leaves)),
        by_label,
        lambda leaves, limit, _: oracles.clip_groups(leaves, labels(leaves), limit),
    ),
    "rms": (
        lambda limit, _: optaxclip.clip_by_tensor_rms(limit),
        each,
        lambda leaves, limit, _: oracles.clip_rms(leaves, limit),
    ),
    "agc": (
        lambda limit, _: optaxclip.adaptive_grad_clip(limit, 1e-3),
        unit,
        lambda leaves, limit, params: oracles.clip_adaptively(leaves, params, limit),
    ),
}
every_clipper = pytest.mark.parametrize("name", CLIPPERS)


def order(name):
    return "rms" if name == "rms" else 2


def parts(name, leaves):
    """The parts of the tree that are measured together, each a list of float64 arrays
    with its leaf's dtype beside it.
    """
    return [
        [
            (oracles.wide(leaves[i])[index], leaves[i].dtype)
            for i, index in part
            if leaves[i].size
        ]
        for part in CLIPPERS[name][1](leaves)
    ]


def lengths(name, leaves):
    return [
        oracles.norm([x for x, _ in part], order(name)) for part in parts(name, leaves)
    ]


def weights(leaves, name):
    """Weights of moderate size, some shorter than the least that counts."""
    random = np.random.default_rng(1)
    return (
        [
            jnp.asarray(
                random.standard_normal(leaf.shape) * 10.0 ** random.uniform(-4, 1),
                leaf.dtype,
            )
            for leaf in leaves
        ]
        if name == "agc"
        else None
    )


def limits(name, leaves, limit, params):
    """What each part is held against."""
    if name != "agc":
        return [limit] * len(parts(name, leaves))
    return [limit * max(length, 1e-3) for length in lengths(name, params)]


def clip(name, leaves, limit, params=None):
    clipper = CLIPPERS[name][0](limit, leaves)
    return clipper.update(
        leaves,
        first_state(name, tuple((leaf.dtype, leaf.shape) for leaf in leaves)),
        params,
    )


@cache
def first_state(name, structure):
    leaves = [jax.ShapeDtypeStruct(shape, dtype) for dtype, shape in structure]
    return CLIPPERS[name][0](1.0, leaves).init(leaves)


def assert_bound(name, leaves, clipped, limit, params):
    for _before, after, most in zip(
        parts(name, leaves),
        parts(name, clipped),
        limits(name, leaves, limit, params),
        strict=True,
    ):
        eps = max((oracles.eps_of(dtype) for _, dtype in after), default=0)
        count = sum(x.size for x, _ in after)
        lost = (
            math.sqrt(
                sum(x.size * oracles.floor_of(dtype) ** 2 for x, dtype in after)
                / (count if name == "rms" else 1)
            )
            if count
            else 0
        )
        assert (
            oracles.norm([x for x, _ in after], order(name)) <= most * (1 + eps) + lost
        )
