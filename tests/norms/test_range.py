"""Norms from the smallest to the largest numbers of each dtype."""

import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip
from tests import oracles
from tests.helpers import SMALL_FLOATS
from tests.norms.leaves import (
    ORDERS,
    SUMMED,
    at_every_order,
    every_order,
    random_leaves,
    tolerance,
)


def nearly_too_large(dtype, ord):
    start = random_leaves(dtype, 9, shapes=[(3,), (2, 2)])
    factor = 3e38 / max(oracles.norm(start, ord), oracles.norm(start, math.inf))
    return [jnp.asarray(oracles.wide(leaf) * factor, leaf.dtype) for leaf in start]


@cache
def norms_nearly_too_large(dtype):
    return at_every_order(
        optaxclip.global_norm, *(nearly_too_large(dtype, ord) for ord in ORDERS)
    )


@every_order
@pytest.mark.parametrize(
    ("compiled", "dtype"),
    [(False, "float32"), (True, "float32"), (True, "bfloat16"), (True, "complex64")],
    ids=["eager-float32", "jit-float32", "jit-bfloat16", "jit-complex64"],
)
def test_norms_just_below_the_largest_float32_are_right(compiled, dtype, ord):
    leaves = nearly_too_large(dtype, ord)
    result = (
        norms_nearly_too_large(dtype)[ord]
        if compiled
        else optaxclip.global_norm(leaves, ord=ord)
    )
    np.testing.assert_allclose(result, oracles.norm(leaves, ord), tolerance(ord))


def nearly_too_small(dtype, ord):
    random = np.random.default_rng(10)
    # The average of seven is below what float32 holds normally, so it starts higher.
    smallest = 1.2e-38 * (8 if ord in ("rms", "average") else 1)
    return [
        jnp.asarray(smallest * (1 + random.random(shape)), dtype)
        for shape in [(3,), (2, 2)]
    ]


@cache
def norms_nearly_too_small(dtype):
    return at_every_order(
        optaxclip.global_norm, *(nearly_too_small(dtype, ord) for ord in ORDERS)
    )


@pytest.mark.parametrize("dtype", SMALL_FLOATS)
def test_the_largest_of_small_floats_may_have_no_square(dtype):
    most = jnp.finfo(dtype).max
    leaf = jnp.full(3, most, dtype)
    assert optaxclip.global_norm(leaf, ord=math.inf) == np.float32(most)


@pytest.mark.parametrize("ord", ["rms", "average"])
@pytest.mark.parametrize("tree", [0, [0], [0, 0], {"a": [0, 0]}])
def test_a_mean_is_finite_where_the_norm_is_not(tree, ord):
    tree = jax.tree.map(lambda _: jnp.full((2, 8), 3e38, jnp.float32), tree)
    mean = 3e38 if ord == "rms" else 3e38 / 4
    for norm in jax.tree.leaves(optaxclip.tensor_norm(tree, ord=ord)):
        np.testing.assert_allclose(norm, mean, rtol=1e-6)
    columns = optaxclip.unitwise_norm(tree, ord=ord)
    mean = 3e38 if ord == "rms" else 3e38 / math.sqrt(2)
    for norms in jax.tree.leaves(columns):
        np.testing.assert_allclose(norms, np.full((1, 8), mean), rtol=1e-6)


@every_order
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_just_above_the_smallest_normal_are_not_lost(dtype, ord):
    np.testing.assert_allclose(
        norms_nearly_too_small(dtype)[ord],
        oracles.norm(nearly_too_small(dtype, ord), ord),
        tolerance(ord),
    )


PARTS = 1.2e-38 * 8 * (1 + np.random.default_rng(10).random((2, 7)))
AT_THE_ENDS = {
    "small complex": [np.asarray(PARTS[0] - 1j * PARTS[1], np.complex64)],
    "large float16": [
        np.full((3, 2), 65504, np.float16),
        np.asarray([-65504, 60000, 1], np.float16),
    ],
    "small float16": [
        np.asarray([2.0**-24, -(2.0**-23), 3 * 2.0**-24], np.float16),
        np.asarray([[2.0**-20, -(2.0**-24)]], np.float16),
    ],
    # Three orders of magnitude short of the largest, for the orders below 1.
    "both": [
        np.asarray([1e34, -3e33], np.float32),
        np.asarray([[1e-30], [2e-38]], jnp.bfloat16),
        np.asarray([2.0**-24], np.float16),
    ],
}


@cache
def norms_at_the_ends():
    def norms(trees, ord):
        return {
            name: optaxclip.global_norm(leaves, ord=ord)
            for name, leaves in trees.items()
        }

    return at_every_order(norms, AT_THE_ENDS)


def assert_right_at_the_ends(name, ord):
    np.testing.assert_allclose(
        norms_at_the_ends()[ord][name],
        oracles.norm(AT_THE_ENDS[name], ord),
        tolerance(ord),
    )


@pytest.mark.slow
@every_order
def test_small_complex_values_are_not_lost(ord):
    assert_right_at_the_ends("small complex", ord)


@every_order
@pytest.mark.slow
def test_float16_at_its_largest_is_right(ord):
    assert_right_at_the_ends("large float16", ord)


@every_order
def test_float16_subnormals_are_not_lost(ord):
    assert_right_at_the_ends("small float16", ord)


@every_order
def test_huge_and_tiny_leaves_together_are_right(ord):
    assert_right_at_the_ends("both", ord)


def test_a_norm_too_large_for_float32_is_inf():
    leaves = [np.full((50,), 3.3e38, np.float32), np.ones((2, 3), jnp.bfloat16)]
    norms = at_every_order(optaxclip.global_norm, leaves, orders=SUMMED)
    assert norms == dict.fromkeys(SUMMED, math.inf)
