"""First and second derivatives of norms and of clipped updates: the equation, at zero,
and by finite differences.
"""

import math
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip
from tests import oracles
from tests.helpers import apply
from tests.norms.leaves import EPS, ORDERS, at_every_order, random_leaf, slope


def gradient(leaf, ord):
    """d norm / d|x_i| * sign x_i, with 0 at zero."""
    x = oracles.wide(leaf)
    p = 2 if ord in ("rms", "average") else ord
    whole, size = oracles.norm([leaf], p), np.abs(x)
    divisor = {"rms": math.sqrt(x.size), "average": x.size}.get(ord, 1)
    if p == math.inf:
        return np.sign(x) * (size == whole)
    share = np.where(size > 0, size / whole, 1) ** (p - 1)
    return np.sign(x) * share / divisor


def gradient_tolerance(ord):
    """The p-1st power magnifies the error of a quotient of two float32 (2 eps), and is
    itself within 4 eps.
    """
    power = abs(ord - 1) if isinstance(ord, int | float) and ord < math.inf else 0
    return (2 * power + 8) * EPS


@cache
def slopes_at_zero(dtype):
    return at_every_order(slope, (np.zeros((2, 3), dtype), np.ones((2, 3), dtype)))


@pytest.mark.parametrize("real", ["float32", "bfloat16", "float16"])
def test_derivative_at_zero_is_finite_forward_and_reverse(real):
    for dtype in (real, "complex64"):
        for tangent, pulled_back in slopes_at_zero(jnp.dtype(dtype)).values():
            assert tangent == 0
            np.testing.assert_array_equal(pulled_back, np.zeros((2, 3)))


@pytest.mark.parametrize("largest", [2.0, 3.0, 7.0, 2.0**90, 3e38])
def test_derivative_of_a_small_number_is_not_flushed(largest):
    # x / norm is a normal number, whatever x and the norm are.
    smallest = 1.125 * largest * float(np.finfo(np.float32).tiny)
    leaf = np.array([largest, -smallest, 64 * smallest], np.float32)
    slope_of_norm = jax.jit(jax.grad(optaxclip.global_norm))(leaf)
    wide = np.float64(leaf)
    wanted = wide / np.linalg.norm(wide)
    np.testing.assert_allclose(slope_of_norm, wanted, 4 * EPS)


@cache
def slopes(scale):
    random = np.random.default_rng(14)
    leaf = np.array(random_leaf(random, (3, 4), "float32", scale))
    leaf[1, 2] = 0.0
    direction = np.asarray(random.standard_normal((3, 4)), np.float32)
    return leaf, direction, at_every_order(slope, (leaf, direction))


@pytest.mark.parametrize("scale", [1.0, 1e-36, 1e34])
def test_derivative_is_the_equation_forward_and_reverse(scale):
    leaf, direction, found = slopes(scale)
    for ord, (tangent, pulled_back) in found.items():
        expected, rtol = gradient(leaf, ord), gradient_tolerance(ord)
        np.testing.assert_allclose(pulled_back, expected, rtol, atol=1e-37)
        terms = expected * oracles.wide(direction)
        atol = (rtol + 12 * EPS) * np.abs(terms).sum()
        np.testing.assert_allclose(tangent, terms.sum(), 0, atol=atol)


def leaf_nearly_too_large(ord):
    start = random_leaf(np.random.default_rng(14), (3, 4), "float32")
    longest = max(oracles.norm([start], ord), oracles.norm([start]))
    return jnp.asarray(oracles.wide(start) * 3e38 / longest, jnp.float32)


@cache
def slopes_nearly_too_large():
    def slope(leaf, ord):
        return jax.grad(partial(optaxclip.global_norm, ord=ord))(leaf)

    return at_every_order(slope, *map(leaf_nearly_too_large, ORDERS))


def test_derivative_near_the_largest_float32_is_the_equation():
    for ord, found in slopes_nearly_too_large().items():
        expected = gradient(leaf_nearly_too_large(ord), ord)
        np.testing.assert_allclose(found, expected, gradient_tolerance(ord), atol=1e-37)


def test_derivative_of_a_complex_leaf_is_its_direction():
    x = jnp.asarray([3 + 4j, 0, -1j], jnp.complex64)
    v = jnp.asarray([1 - 2j, 1, 3 + 1j], jnp.complex64)
    with jax.numpy_dtype_promotion("strict"):
        tangent, pulled_back = jax.jit(partial(slope, ord=2))((x, v))
    # JAX's convention for a real function of a complex variable is the conjugate.
    wanted = np.conj(oracles.wide(x)) / math.sqrt(26)
    np.testing.assert_allclose(pulled_back, wanted, 8 * EPS)
    along = np.real(wanted * oracles.wide(v)).sum()
    np.testing.assert_allclose(tangent, along, 8 * EPS)


@cache
def slopes_of_units():
    leaf = random_leaf(np.random.default_rng(18), (4, 3), "float32")

    def slope(leaf, ord):
        return jax.grad(lambda x: jnp.sum(optaxclip.unitwise_norm(x, ord=ord)))(leaf)

    return leaf, at_every_order(slope, leaf)


def test_derivative_of_each_unit_is_its_own():
    leaf, found = slopes_of_units()
    for ord, ours in found.items():
        expected = np.stack([gradient(column, ord) for column in leaf.T], 1)
        np.testing.assert_allclose(ours, expected, gradient_tolerance(ord))


def test_the_largest_share_their_derivative():
    x = jnp.array([2.0, 1.0, -2.0, 0.0])
    slope = jax.grad(lambda x: optaxclip.global_norm(x, ord=np.inf))(x)
    np.testing.assert_allclose(slope, [0.5, 0.0, -0.5, 0.0])


@pytest.mark.parametrize("ord", [2, 3])
def test_second_derivatives_hold_at_norms_of_any_size(ord):
    norm = partial(optaxclip.global_norm, ord=ord)
    twice = jax.jit(lambda x: (jax.hessian(norm)(x), reverse_twice(norm)(x)))
    for size in (1e-37, 1e-30, 1e-20, 1e-19, 1.0, 1e19, 1e30):
        x = np.float32([2.0, -1.0, 0.5]) * np.float32(size)
        length = np.sum(np.abs(oracles.wide(x)) ** ord) ** (1 / ord)
        unit = np.abs(oracles.wide(x)) / length
        slope = unit ** (ord - 1) * np.sign(x)
        curve = (ord - 1) * (np.diag(unit ** (ord - 2)) - np.outer(slope, slope))
        for found in twice(x):
            np.testing.assert_allclose(
                oracles.wide(found) * length, curve, 0, 16 * EPS, err_msg=size
            )


@pytest.mark.parametrize("size", [0.0, 1e-37, 1e-30, 1e-20, 1e-19, 1e-3])
@pytest.mark.slow
def test_what_is_not_clipped_has_the_second_derivative_of_itself(size):
    clippers = [
        optaxclip.clip_by_global_norm(1.0),
        optaxclip.clip_by_unitwise_norm(1.0),
        optaxclip.clip_by_global_norm(1.0, ord=3),
    ]
    if size < 1e-4:  # where smooth(2) changes nothing either
        smooth = optaxclip.shrinks.smooth(2)
        clippers.append(optaxclip.clip_by_global_norm(1.0, shrink=smooth))

    def all_of(x):
        def total(x):
            return jnp.stack([jnp.sum(jnp.sin(apply(c, x)[0])) for c in clippers])

        return *jax.hessian(total)(x), *reverse_twice(total)(x)

    x = np.full(2, size, np.float32)
    wanted = np.diag(-np.sin(np.float64(x)))
    for found in jax.jit(all_of)(x):
        np.testing.assert_allclose(found, wanted, rtol=4 * EPS)


TWICE = (0.5, 1, 2, 3, np.inf)


@cache
def second_derivatives(twice):
    """{order: second derivatives at zero, and where one coordinate is not}."""
    points = np.float32([[0, 0, 0], [0, 2, 0]])
    norms = [partial(optaxclip.global_norm, ord=ord) for ord in TWICE]
    found = jax.jit(lambda x: [twice(norm)(x) for norm in norms])
    return dict(zip(TWICE, zip(*map(found, points)), strict=True))


def reverse_twice(function):
    return jax.jacrev(jax.jacrev(function))


@pytest.mark.parametrize("twice", [jax.hessian, reverse_twice])
def test_second_derivatives_are_finite_at_zero(twice):
    for ord, found in second_derivatives(twice).items():
        assert all(np.isfinite(x).all() for x in found), ord


@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
def test_second_derivatives_hold_where_an_element_is_0(dtype):
    """Of |x|: (1 - x x^T / |x|^2) / |x|, also in rows whose element is 0."""
    x = np.array([0.0, 3.0, -4.0])
    wanted = (np.eye(3) - np.outer(x, x) / 25) / 5

    def norm(real):
        return optaxclip.global_norm(real.astype(dtype))

    found = jax.hessian(norm)(jnp.float32(x))
    np.testing.assert_allclose(found, wanted, atol=1e-6)
