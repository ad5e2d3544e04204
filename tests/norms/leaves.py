"""Leaves to measure, norms of every order at once, and what their error may be."""

import itertools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip
from tests import oracles
from tests.helpers import FORCED

EPS = oracles.eps_of("float32")
ORDERS = (0.3, 1, 2, 3, 10, math.inf, "rms", "average")
DTYPES = {
    "float32": ("float32",),
    "bfloat16": ("bfloat16",),
    "float16": ("float16",),
    "complex64": ("complex64",),
    "mixed": ("bfloat16", "float32", "complex64", "float16"),
}
SHAPES = [(5, 3), (), (17,), (2, 3, 4)]
EVERY_RANK = [*SHAPES, (2, 1, 3, 2), (2, 3, 1, 2, 2)]
SUMMED = ORDERS[:5]  # where powers are summed
every_order = pytest.mark.parametrize("ord", ORDERS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
# XLA on a CPU adds up the three operands of a GPU's reduction one element after
# another, where a GPU adds up many at a time.
not_in_turn = pytest.mark.skipif(
    FORCED == "gpu", reason="a CPU adds up one element after another"
)


def tolerance(ord):
    """1e-6. Below order 1 the root magnifies the power's error, 2 eps, by 1/p;
    quotient, product and rounding take half an eps each.
    """
    return (
        max(1e-6, (2 / ord + 1.5) * EPS) if isinstance(ord, float) and ord < 1 else 1e-6
    )


def random_leaf(random, shape, dtype, scale=1.0):
    values = (
        random.standard_normal(shape) * np.exp(random.standard_normal(shape)) * scale
    )
    if dtype == "complex64":
        values = values + 1j * random.standard_normal(shape) * scale
    return jnp.asarray(values, dtype)


def random_leaves(dtype, seed=0, scale=1.0, shapes=SHAPES):
    random = np.random.default_rng(seed)
    return [
        random_leaf(random, shape, DTYPES[dtype][i % len(DTYPES[dtype])], scale)
        for i, shape in enumerate(shapes)
    ]


def at_every_order(measure, *trees, orders=ORDERS):
    """{order: measure(tree, ord=order)} by one program, since compiling is what takes
    time; of one tree, or of one for each order.
    """
    program = jax.jit(
        lambda trees: [
            measure(tree, ord=ord) for ord, tree in zip(orders, itertools.cycle(trees))
        ]
    )
    return dict(zip(orders, program(trees), strict=True))


def slope(point, ord):
    """(forward, reverse): the derivative along a direction, and along all."""
    leaf, direction = point
    norm = partial(optaxclip.global_norm, ord=ord)
    return jax.jvp(norm, (leaf,), (direction,))[1], jax.grad(norm)(leaf)


def module_for(platform, function, *arguments):
    export = jax.export.export(jax.jit(function), platforms=[platform])
    return export(*arguments).mlir_module()
