"""First derivatives of norms: the equation, at zero, and by finite differences."""

import math
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip
from tests import oracles
from tests.norms.leaves import (
    EPS,
    ORDERS,
    at_every_order,
    every_order,
    random_leaf,
    slope,
)


def gradient(leaf, ord):
    """d norm / d|x_i| * sign x_i, with 0 at zero."""
    x = oracles.wide(leaf)
    size, whole = (
        np.abs(x),
        oracles.norm([leaf], {"rms": 2, "average": 2}.get(ord, ord)),
    )
    p = {"rms": 2, "average": 2}.get(ord, ord)
    share = (
        (size == whole)
        if p == math.inf
        else np.where(size > 0, np.where(size > 0, size / whole, 1) ** (p - 1), 0)
    )
    return (
        np.sign(x) * share / {"rms": math.sqrt(x.size), "average": x.size}.get(ord, 1)
    )


def gradient_tolerance(ord):
    """The p-1st power magnifies the error of a quotient of two float32 (2 eps), and is
    itself within 4 eps.
    """
    return (
        (2 * abs(ord - 1) + 8) * EPS
        if isinstance(ord, int | float) and ord < math.inf
        else 8 * EPS
    )


@cache
def slopes_at_zero(dtype):
    return at_every_order(slope, (np.zeros((2, 3), dtype), np.ones((2, 3), dtype)))


@every_order
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "complex64"])
@pytest.mark.slow
def test_derivative_at_zero_is_finite_forward_and_reverse(dtype, ord):
    tangent, pulled_back = slopes_at_zero(jnp.dtype(dtype))[ord]
    assert tangent == 0
    np.testing.assert_array_equal(pulled_back, np.zeros((2, 3)))


@cache
def slopes(scale):
    random = np.random.default_rng(14)
    leaf = np.array(random_leaf(random, (3, 4), "float32", scale))
    leaf[1, 2] = 0.0
    direction = np.asarray(random.standard_normal((3, 4)), np.float32)
    return leaf, direction, at_every_order(slope, (leaf, direction))


@every_order
@pytest.mark.parametrize("scale", [1.0, 1e-36, 1e34])
def test_derivative_is_the_equation_forward_and_reverse(scale, ord):
    leaf, direction, found = slopes(scale)
    tangent, pulled_back = found[ord]
    expected = gradient(leaf, ord)
    np.testing.assert_allclose(
        pulled_back, expected, gradient_tolerance(ord), atol=1e-37
    )
    terms = expected * oracles.wide(direction)
    np.testing.assert_allclose(
        tangent,
        terms.sum(),
        0,
        atol=(gradient_tolerance(ord) + 12 * EPS) * np.abs(terms).sum(),
    )


def leaf_nearly_too_large(ord):
    start = random_leaf(np.random.default_rng(14), (3, 4), "float32")
    return jnp.asarray(
        oracles.wide(start)
        * 3e38
        / max(oracles.norm([start], ord), oracles.norm([start])),
        jnp.float32,
    )


@cache
def slopes_nearly_too_large():
    return at_every_order(
        lambda leaf, ord: jax.grad(partial(optaxclip.global_norm, ord=ord))(leaf),
        *map(leaf_nearly_too_large, ORDERS),
    )


def assert_slope_nearly_too_large(found, ord):
    np.testing.assert_allclose(
        found,
        gradient(leaf_nearly_too_large(ord), ord),
        gradient_tolerance(ord),
        atol=1e-37,
    )


@every_order
def test_derivative_near_the_largest_float32_is_the_equation(ord):
    assert_slope_nearly_too_large(slopes_nearly_too_large()[ord], ord)


@pytest.mark.parametrize("ord", [0.5, 2, 3, math.inf])
def test_eager_derivative_near_the_largest_is_the_equation(ord):
    assert_slope_nearly_too_large(
        jax.grad(partial(optaxclip.global_norm, ord=ord))(leaf_nearly_too_large(ord)),
        ord,
    )


STEP = 1e-5


def slope_and_difference(point, ord):
    """Derivatives along a direction, forward and reverse, and what the norm changes by
    along it.
    """
    leaves, direction = point
    forward, gradients = slope(point, ord)
    there, back = (
        optaxclip.global_norm([x + h * v for x, v in zip(leaves, direction)], ord=ord)
        for h in (STEP, -STEP)
    )
    return jnp.stack(
        [
            forward,
            sum(jnp.vdot(g, v) for g, v in zip(gradients, direction)),
            (there - back) / (2 * STEP),
        ]
    )


@cache
def slopes_and_differences():
    with jax.enable_x64(True):
        random = np.random.default_rng(15)
        # Away from 0 and from two equal largest values, where there is no derivative.
        leaves = [
            random.permuted(np.arange(1.0, 7.0)).reshape(2, 3)
            * random.choice([-1, 1], (2, 3)),
            random.uniform(0.5, 0.9, 4),
        ]
        direction = [random.standard_normal(x.shape) for x in leaves]
        return {
            ord: np.asarray(found)
            for ord, found in at_every_order(
                slope_and_difference, (leaves, direction)
            ).items()
        }


@pytest.mark.slow
@every_order
def test_derivative_equals_finite_differences(ord):
    *slopes, difference = slopes_and_differences()[ord]
    assert difference.dtype == np.float64
    np.testing.assert_allclose(slopes, difference, 1e-6)


def test_derivative_of_a_complex_leaf_is_its_direction():
    x = jnp.asarray([3 + 4j, 0, -1j], jnp.complex64)
    v = jnp.asarray([1 - 2j, 1, 3 + 1j], jnp.complex64)
    tangent, pulled_back = jax.jit(partial(slope, ord=2))((x, v))
    np.testing.assert_allclose(
        tangent,
        np.real(np.conj(oracles.wide(x)) * oracles.wide(v)).sum() / math.sqrt(26),
        8 * EPS,
    )
    # JAX's convention for a real function of a complex variable is the conjugate.
    np.testing.assert_allclose(
        pulled_back, np.conj(oracles.wide(x)) / math.sqrt(26), 8 * EPS
    )


@cache
def slopes_of_units():
    leaf = random_leaf(np.random.default_rng(18), (4, 3), "float32")
    return leaf, at_every_order(
        lambda leaf, ord: jax.grad(
            lambda x: jnp.sum(optaxclip.unitwise_norm(x, ord=ord))
        )(leaf),
        leaf,
    )


@every_order
def test_derivative_of_each_unit_is_its_own(ord):
    leaf, found = slopes_of_units()
    ours = found[ord]
    expected = np.stack([gradient(column, ord) for column in leaf.T], 1)
    np.testing.assert_allclose(ours, expected, gradient_tolerance(ord))


@pytest.mark.slow
def test_the_largest_share_their_derivative():
    x = jnp.array([2.0, 1.0, -2.0, 0.0])
    np.testing.assert_allclose(
        jax.grad(lambda x: optaxclip.global_norm(x, ord=np.inf))(x),
        [0.5, 0.0, -0.5, 0.0],
    )
