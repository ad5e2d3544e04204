"""Norms of every order by each platform, with their derivatives and extremes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optaxclip._norms import _powers
from optaxclip._norms._collectives import Split
from optaxclip._norms._groups import Group
from optaxclip._norms._powers import norms_of as norms_of_groups
from tests.ways import norm

pytestmark = pytest.mark.slow

ORDERS = [0.5, 1.0, 2.0, 3.0, 4.0, 5.0, np.inf]
every_order = pytest.mark.parametrize("p", ORDERS)
every_platform = pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])


def leaf(seed, shape, dtype="float32"):
    real, imag = np.random.default_rng(seed).standard_normal((2, *shape))
    return jnp.asarray(real + 1j * imag if dtype.startswith("complex") else real, dtype)


CASES = [
    ([leaf(1, (3, 2)), leaf(2, (4,), "bfloat16"), leaf(3, (2, 2), "complex64")], None),
    ([leaf(4, (5, 3))], (0,)),
    ([leaf(5, (2, 3), "complex64")], (1,)),
]


def norms_of(p, cases):
    groups = [Group(x, dims, [Split()] * len(x)) for x, dims in cases]
    return norms_of_groups(groups, p)[0]


def norm_of_one(p, dims, leaf):
    return norms_of(p, [([leaf], dims)])[0]


@pytest.fixture
def on(monkeypatch):
    """Makes the platform the one whose way is taken."""

    def take(platform):
        def call(*operands, **ways):
            assert set(ways) == {"cpu", "gpu", "tpu"}
            return ways[platform](*operands)

        monkeypatch.setattr(_powers, "per_platform", call)

    return take


@every_platform
@every_order
def test_a_norm_has_its_order_on_every_platform(on, p, platform):
    on(platform)
    found = norms_of(p, CASES)
    for each, (leaves, dims) in zip(found, CASES):
        assert each.dtype == np.float32
        np.testing.assert_allclose(each.ravel(), np.ravel(norm(p, leaves, dims)), 2e-6)


@every_platform
@pytest.mark.parametrize("size", [1e-37, 1e37])
@pytest.mark.parametrize("p", ORDERS[1:])
def test_no_power_leaves_the_range_on_any_platform(on, p, size, platform):
    on(platform)
    leaves = [np.float32([size, 3 * size]), np.float32([size])]
    expected = size * norm(p, [np.array([1.0, 3.0, 1.0])], None)
    np.testing.assert_allclose(norms_of(p, [(leaves, None)])[0], expected, 1e-6)


@every_platform
@pytest.mark.parametrize("p", [2.0, 3.0, 5.0, np.inf])
@pytest.mark.parametrize("value", [0.0, np.inf, np.nan])
def test_zeros_and_broken_numbers_are_norms(on, value, p, platform):
    on(platform)
    leaves = [np.float32([0, value]), np.zeros(3, np.float32)]
    found = norms_of(p, [(leaves, None)])[0]
    np.testing.assert_array_equal(found, value)


@every_order
def test_leaves_of_64_bits_have_such_norms(p):
    with jax.enable_x64(True):
        cases = [([leaf(6, (4, 3), "float64")], None)]
        found = norms_of(p, cases)[0]
        assert found.dtype == np.float64
        expected = norm(p, *cases[0])
    np.testing.assert_allclose(found, expected, 1e-14)


@every_order
def test_a_norm_has_the_derivative_of_its_order(p):
    x, change = np.float64(leaf(7, (4, 3))), np.float64(leaf(8, (4, 3)))
    for dims in (None, (0,)):
        measure = partial(norm_of_one, p, dims)
        _, found = jax.jvp(measure, (jnp.float32(x),), (jnp.float32(change),))
        whole = norm(p, [x], dims)
        weight = np.abs(x) == whole if p == np.inf else (np.abs(x) / whole) ** (p - 1)
        terms = weight * np.sign(x) * change
        expected = np.sum(terms, dims, keepdims=dims is not None)
        np.testing.assert_allclose(found, expected, 1e-5)


def test_the_derivative_of_a_mean_is_divided_by_its_count():
    x = leaf(9, (6,))
    slope = jax.grad(lambda x: norms_of("rms", [([x], None)])[0])(x)
    # norm = |x| / sqrt(6), whose derivative is x / (6 norm)
    wanted = x / (np.sqrt(6) * np.linalg.norm(x))
    np.testing.assert_allclose(slope, wanted, 1e-6)
