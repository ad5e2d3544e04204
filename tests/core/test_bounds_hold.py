"""Clipped updates are never longer than the limit: trees made to exceed it."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import optaxclip
from tests import oracles
from tests.core.random_trees import (
    ALL_DTYPES,
    CLIPPERS,
    assert_bound,
    clip,
    every_clipper,
    lengths,
    limits,
    order,
    parts,
    properties,
    values,
    weights,
)
from tests.norms.leaves import not_in_turn

DTYPES = ("float32", "bfloat16", "float16", "complex64")


@pytest.mark.slow
@every_clipper
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("limit", [1.0, 0.3, 1e-2])
def test_equal_values_that_all_round_up_stay_within_the_bound(limit, dtype, name):
    leaves = [jnp.asarray(np.full((64, 3), value), dtype) for value in (1.0, 1.1, 7.77)]
    params = weights(leaves, name)
    assert_bound(name, leaves, clip(name, leaves, limit, params)[0], limit, params)


@every_clipper
def test_one_huge_leaf_among_tiny_ones_stays_within_the_bound(name):
    values = (3e38, [1e-38, 2e-38], [1.5, 2e-7], 1e-20j, 0)  # over and over
    leaves = [
        jnp.asarray(np.resize(x, shape), dtype)
        for x, (dtype, shape) in zip(values, ALL_DTYPES, strict=True)
    ]
    for limit in (1e30, 1.0, 1e-3, 1e-30):
        params = weights(leaves, name)
        assert_bound(name, leaves, clip(name, leaves, limit, params)[0], limit, params)


@pytest.mark.slow
def test_2000_bfloat16_leaves_of_ones_stay_within_the_bound():
    leaves = [jnp.ones((3,), jnp.bfloat16)] * 2000
    # What the clipper does, op by op: compiling two thousand leaves is not what is
    # tested.
    norm = optaxclip.global_norm(leaves)
    np.testing.assert_allclose(norm, math.sqrt(6000), 1e-6)
    clipped = optaxclip.rescale(leaves, norm, jnp.minimum(norm, 1.0))
    assert oracles.norm(clipped) <= 1 + oracles.eps_of("bfloat16")
    assert oracles.norm(clipped) >= 1 - oracles.eps_of("bfloat16")


@pytest.mark.parametrize("count", [1, 10, 100, pytest.param(10_000, marks=not_in_turn)])
@pytest.mark.slow
def test_any_number_of_leaves_stays_within_the_bound(count):
    random = np.random.default_rng(count)
    kinds = [
        jnp.asarray(random.standard_normal(shape), dtype)
        for shape in ((), (3,), (2, 2))
        for dtype in DTYPES
    ]
    leaves = [kinds[i] for i in random.integers(0, len(kinds), count)]
    norm = optaxclip.global_norm(leaves)
    clipped = optaxclip.rescale(leaves, norm, jnp.minimum(norm, 0.5))
    np.testing.assert_allclose(norm, oracles.norm(leaves), 1e-6)
    lost = math.sqrt(count * 4) * 2.0**-25
    assert oracles.norm(clipped) <= 0.5 * (1 + oracles.eps_of("bfloat16")) + lost


@pytest.mark.slow
@every_clipper
def test_64_bit_updates_up_to_1e200_are_those_of_the_equation(name):
    eps = oracles.eps_of("float64")

    @properties
    @given(
        st.integers(0, 2**32 - 1),
        st.integers(-660, 660),
        st.sampled_from([0, 10, 600]),
        st.floats(-60, 2),
    )
    def check(seed, middle, spread, share):
        random = np.random.default_rng(seed)
        leaves = [
            jnp.asarray(values(random, shape, middle, spread, -660, 660))
            for shape in ((5, 3), ())
        ]
        leaves.append(
            jnp.asarray(
                values(random, (7,), middle, spread, -660, 660)
                + 1j * values(random, (7,), middle, spread, -660, 660)
            )
        )
        params = weights(leaves, name)
        limit = max(lengths(name, leaves)) * 2.0**share
        clipped, _ = clip(name, leaves, limit, params)
        for ours, expected, leaf in zip(
            clipped, CLIPPERS[name][2](leaves, limit, params), leaves, strict=True
        ):
            assert ours.dtype == leaf.dtype
            # The sum of 23 squares adds 12 eps to the norm of the weights and of the
            # gradient, each.
            assert (
                np.abs(oracles.wide(ours) - expected) <= 36 * eps * np.abs(expected)
            ).all()
        assert_bound_64(leaves, clipped, limit, params)

    def assert_bound_64(leaves, clipped, limit, params):
        for after, most in zip(
            parts(name, clipped), limits(name, leaves, limit, params), strict=True
        ):
            assert oracles.norm([x for x, _ in after], order(name)) <= most * (1 + eps)

    with jax.enable_x64(True):
        check()
