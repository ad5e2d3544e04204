"""Second derivatives of norms and of clipped updates."""

import itertools
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip
from tests import oracles
from tests.helpers import apply
from tests.norms.leaves import EPS


@pytest.mark.parametrize("size", [1e-37, 1e-30, 1e-20, 1e-19, 1.0, 1e19, 1e30])
@pytest.mark.parametrize("ord", [2, 3])
def test_second_derivatives_hold_at_norms_of_any_size(ord, size):
    x = np.float32([2.0, -1.0, 0.5]) * np.float32(size)
    hessian = jax.hessian(partial(optaxclip.global_norm, ord=ord))
    found, reverse = jax.jit(lambda x: (hessian(x), reverse_twice_of(ord)(x)))(x)
    norm = np.sum(np.abs(oracles.wide(x)) ** ord) ** (1 / ord)
    unit = np.abs(oracles.wide(x)) / norm
    slope = unit ** (ord - 1) * np.sign(x)
    curve = (ord - 1) * (np.diag(unit ** (ord - 2)) - np.outer(slope, slope))
    for each in (found, reverse):
        np.testing.assert_allclose(oracles.wide(each) * norm, curve, 0, atol=16 * EPS)


def reverse_twice_of(ord):
    return reverse_twice(partial(optaxclip.global_norm, ord=ord))


@pytest.mark.parametrize("size", [0.0, 1e-37, 1e-30, 1e-20, 1e-19, 1e-3])
@pytest.mark.slow
def test_what_is_not_clipped_has_the_second_derivative_of_itself(size):
    clippers = [
        optaxclip.clip_by_global_norm(1.0),
        optaxclip.clip_by_unitwise_norm(1.0),
        optaxclip.clip_by_global_norm(1.0, ord=3),
    ]
    if size < 1e-4:  # where smooth(2) changes nothing either
        clippers.append(
            optaxclip.clip_by_global_norm(1.0, shrink=optaxclip.shrinks.smooth(2))
        )

    def second(twice, clipper, x):
        return twice(lambda x: jnp.sum(jnp.sin(apply(clipper, x)[0])))(x)

    def all_of(x):
        ways = itertools.product((jax.hessian, reverse_twice), clippers)
        return [second(*way, x) for way in ways]

    x = np.full(2, size, np.float32)
    wanted = np.diag(-np.sin(np.float64(x)))
    for found in jax.jit(all_of)(x):
        np.testing.assert_allclose(found, wanted, rtol=4 * EPS)


@pytest.mark.slow
def test_second_derivative_is_the_equation_forward_and_reverse():
    x = np.asarray(np.random.default_rng(17).standard_normal(5) * 3, np.float32)
    unit = oracles.wide(x) / oracles.norm([x])
    ways = [
        first(second(lambda x: optaxclip.global_norm([x[:4].reshape(2, 2), x[4]])))
        for first, second in itertools.product((jax.jacfwd, jax.jacrev), repeat=2)
    ]
    for found in jax.jit(lambda x: [way(x) for way in ways])(x):
        np.testing.assert_allclose(
            found,
            (np.eye(5) - np.outer(unit, unit)) / oracles.norm([x]),
            0,
            atol=8 * EPS / oracles.norm([x]),
        )


TWICE = (0.5, 1, 2, 3, np.inf)


@cache
def second_derivatives(twice):
    """{order: those at zero, and where one coordinate is not}, of all orders by one
    program.
    """
    program = jax.jit(
        lambda x: [twice(partial(optaxclip.global_norm, ord=ord))(x) for ord in TWICE]
    )
    return dict(
        zip(
            TWICE,
            zip(*(program(np.float32(x)) for x in ([0, 0, 0], [0, 2, 0]))),
            strict=True,
        )
    )


def reverse_twice(function):
    return jax.jacrev(jax.jacrev(function))


@pytest.mark.slow
@pytest.mark.parametrize("ord", TWICE)
def test_second_derivatives_are_finite_at_zero(ord):
    assert all(np.isfinite(x).all() for x in second_derivatives(jax.hessian)[ord])


@pytest.mark.slow
@pytest.mark.parametrize("ord", TWICE)
def test_second_derivatives_by_reverse_mode_are_finite_at_zero(ord):
    assert all(np.isfinite(x).all() for x in second_derivatives(reverse_twice)[ord])


@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
@pytest.mark.slow
def test_second_derivatives_hold_where_an_element_is_0(dtype):
    """Of |x|: (1 - x x^T / |x|^2) / |x|, also in rows whose element is 0."""
    x = np.array([0.0, 3.0, -4.0])
    wanted = (np.eye(3) - np.outer(x, x) / 25) / 5

    def norm(real):
        return optaxclip.global_norm(real.astype(dtype))

    found = jax.hessian(norm)(jnp.float32(x))
    np.testing.assert_allclose(found, wanted, atol=1e-6)
