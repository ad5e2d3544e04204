"""NaN, inf, complex numbers, 64 bits, zeros, and nothing to measure."""

import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from tests import oracles
from tests.norms.leaves import at_every_order, every_order, random_leaves, tolerance


@cache
def norms_of_64_bits():
    random = np.random.default_rng(11)
    leaves = [
        random.standard_normal((3, 5)) * 1e200,
        random.standard_normal(4) * 1e199 * (1 - 2j),
        np.ones(3, jnp.bfloat16),
    ]
    return leaves, at_every_order(optaxclip.global_norm, leaves)


@every_order
def test_64_bit_leaves_give_64_bit_norms(ord):
    with jax.enable_x64(True):
        leaves, results = norms_of_64_bits()
        result = results[ord]
        assert result.dtype == jnp.float64
        # A quotient, a product, a root and its magnified power of 2 eps, and a sum of
        # 22 terms.
        np.testing.assert_allclose(
            result,
            oracles.norm(leaves, ord),
            (24 / min(1, ord if isinstance(ord, float) else 1)) * 2.0**-52,
        )


@every_order
def test_complex_values_count_by_modulus(ord):
    leaf = jnp.asarray([[3 + 4j, -5j], [12 - 5j, 0]], jnp.complex64)
    modulus = np.array([5.0, 5.0, 13.0, 0.0])
    np.testing.assert_allclose(
        optaxclip.global_norm(leaf, ord=ord),
        oracles.norm([modulus], ord),
        tolerance(ord),
    )


@every_order
@pytest.mark.parametrize("position", range(9))
def test_nan_survives_in_any_position(position, ord):
    values = np.random.default_rng(12).standard_normal(9)
    values[position] = math.nan
    leaves = [
        jnp.asarray(values[:4].reshape(2, 2), jnp.float32),
        jnp.asarray(values[4], jnp.bfloat16),
        jnp.asarray(values[5:8], jnp.float16),
        jnp.asarray(values[8:], jnp.complex64),
    ]
    assert math.isnan(optaxclip.global_norm(leaves, ord=ord))
    assert [math.isnan(norm) for norm in optaxclip.tensor_norm(leaves, ord=ord)] == [
        any(map(np.isnan, np.ravel(leaf))) for leaf in leaves
    ]


@every_order
def test_nan_wins_over_inf(ord):
    assert math.isnan(
        optaxclip.global_norm(
            [jnp.array([math.inf, 1.0]), jnp.array([2.0, math.nan])], ord=ord
        )
    )
    assert math.isnan(
        optaxclip.global_norm(
            [jnp.array([math.nan, 1.0]), jnp.array([2.0, -math.inf])], ord=ord
        )
    )


@every_order
@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_an_infinite_leaf_gives_inf(value, ord):
    leaves = [jnp.array([[1.0, 2.0, 3.0]]), jnp.asarray([4.0, value], jnp.bfloat16)]
    assert optaxclip.global_norm(leaves, ord=ord) == math.inf
    assert [math.isinf(norm) for norm in optaxclip.tensor_norm(leaves, ord=ord)] == [
        False,
        True,
    ]


def test_a_broken_unit_does_not_touch_its_neighbours():
    leaf = jnp.asarray([[3.0, math.nan, 1.0], [4.0, 1.0, math.inf]], jnp.float32)
    np.testing.assert_array_equal(
        optaxclip.unitwise_norm(leaf), [[5.0, math.nan, math.inf]]
    )
    np.testing.assert_array_equal(
        optaxclip.unitwise_norm(leaf, ord=math.inf), [[4.0, math.nan, math.inf]]
    )


@every_order
@pytest.mark.parametrize(
    "tree",
    [
        {},
        None,
        [],
        [None],
        {"a": None, "b": ()},
        jnp.zeros((0, 3)),
        [jnp.arange(5)],
        jnp.array([True, False]),
        optax.MaskedNode(),
        np.zeros(3, jax.dtypes.float0),
    ],
    ids=[
        "dict",
        "None",
        "list",
        "list of None",
        "dict of None",
        "zero-size",
        "int",
        "bool",
        "MaskedNode",
        "float0",
    ],
)
def test_nothing_to_measure_has_norm_0(tree, ord):
    result = optaxclip.global_norm(tree, ord=ord)
    assert result == 0 and result.dtype == jnp.float32 and result.shape == ()
    assert jax.tree.leaves(optaxclip.tensor_norm(tree, ord=ord)) == []


@every_order
def test_what_is_not_measured_does_not_count(ord):
    leaves = random_leaves("mixed", 13)
    others = [
        None,
        jnp.arange(7),
        jnp.zeros((3, 0), jnp.bfloat16),
        optax.MaskedNode(),
        jnp.array(True),
    ]
    np.testing.assert_allclose(
        optaxclip.global_norm([*others, *leaves], ord=ord),
        oracles.norm(leaves, ord),
        tolerance(ord),
    )


@every_order
def test_zero_has_norm_0(ord):
    assert (
        optaxclip.global_norm([jnp.zeros((2, 3)), jnp.zeros((), jnp.bfloat16)], ord=ord)
        == 0
    )


@pytest.mark.slow
def test_one_leaf_of_64_bits_makes_the_norm_of_all_64_bits():
    with jax.enable_x64(True):
        norm = optaxclip.global_norm(
            [np.ones(2, np.float32), np.full(2, 1e200), np.ones(1, np.float16)]
        )
        assert norm.dtype == jnp.float64
        np.testing.assert_allclose(norm, np.sqrt(2) * 1e200, rtol=1e-14)
