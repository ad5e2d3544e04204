"""The three bins of sums on accelerators, in one compiled program."""

import jax
import numpy as np
import pytest

from optaxclip._norms._bins import EDGE, bins_of_leaf, root, sum_on_tpu

# The lower bin holds most of the norm, though its values are each the smaller ones.
LENGTHS = [0, 1, 1000, 100_000]


def norm_in_bins(leaf):
    return root(bins_of_leaf(sum_on_tpu, None, leaf))


@pytest.mark.parametrize("count", LENGTHS)
@pytest.mark.parametrize("edge", [EDGE, 1 / EDGE])
def test_values_on_both_sides_of_an_edge_add_up(edge, count):
    leaf = np.float32([1.01 * edge] + [0.99 * edge] * count)
    expected = np.sqrt(np.sum(np.square(leaf, dtype=np.float64)))
    np.testing.assert_allclose(jax.jit(norm_in_bins)(leaf), expected, 1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_broken_value_is_seen_beside_a_large_one(value):
    leaf = np.float32([3e38, value, 1.0, 1e-30])
    np.testing.assert_equal(float(jax.jit(norm_in_bins)(leaf)), value)


def test_nan_is_seen_beside_inf():
    assert np.isnan(jax.jit(norm_in_bins)(np.float32([np.inf, np.nan])))


def test_bins_of_zeros_have_norm_0():
    assert jax.jit(norm_in_bins)(np.zeros(3, np.float32)) == 0
