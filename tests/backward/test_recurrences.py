"""Gradients through growing recurrences are bounded."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optaxclip import clip_cotangent
from tests.backward.cotangents import EPS, normal, shortened


def unrolled(factor, bias, steps, clip):
    return jax.lax.scan(
        lambda h, _: (factor * clip(h) + bias, None), jnp.float32(1.0), length=steps
    )[0]


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 10, 100])
def test_gradients_of_a_growing_recurrence_are_bounded(steps):
    """h <- 1.2 h + b: dh_T/db is the sum of 1.2^k over T steps; with what goes back
    limited to 0.5 it is 1 + 0.5 (T - 1).
    """

    def grad(clip):
        return float(jax.grad(lambda bias: unrolled(1.2, bias, steps, clip))(0.0))

    np.testing.assert_allclose(
        grad(lambda h: h), sum(1.2**k for k in range(steps)), 1e-4
    )
    # The cotangent of the last h is 1, and that of each earlier one min(1.2 * the next,
    # 0.5).
    limited = grad(functools.partial(clip_cotangent, max_value=0.5))
    np.testing.assert_allclose(limited, 1 + 0.5 * (steps - 1), 4 * steps * EPS)
    np.testing.assert_allclose(
        grad(functools.partial(clip_cotangent, max_norm=0.5)),
        1 + 0.5 * (steps - 1),
        4 * steps * EPS,
    )
    assert limited <= 1 + 0.5 * steps


def cell_inputs():
    matrix = normal(0, 16, 16)
    matrix *= 2 / np.max(np.abs(np.linalg.eigvals(matrix)))  # spectral radius 2
    return jnp.asarray(matrix), jnp.asarray(normal(1, 16))


def gradient_by_start(steps, clip, remat=False):
    matrix, start = cell_inputs()

    def cell(h, _):
        return (matrix @ clip(h), None)

    cell = jax.checkpoint(cell) if remat else cell
    return jax.jit(jax.grad(lambda h: jnp.sum(jax.lax.scan(cell, h, length=steps)[0])))(
        start
    )


@pytest.mark.parametrize("remat", [False, True], ids=["plain", "remat"])
def test_gradients_through_a_spectral_radius_of_2_are_bounded(remat):
    free, long = (
        float(jnp.linalg.norm(gradient_by_start(50, clip, remat)))
        for clip in (lambda h: h, functools.partial(clip_cotangent, max_norm=1.0))
    )
    assert free > 1e12
    assert long <= 1.0
    np.testing.assert_allclose(long, 1.0, 8 * EPS)


def test_backpropagation_equals_its_equation_in_float64():
    matrix, _ = cell_inputs()
    cotangent = np.ones(16)
    for _ in range(20):
        cotangent = shortened(np.asarray(matrix, np.float64).T @ cotangent, 3.0)
    # Each step rounds 16 products of at most 3, and what is clipped in every step
    # forgets the size of earlier errors.
    np.testing.assert_allclose(
        gradient_by_start(20, functools.partial(clip_cotangent, max_norm=3.0)),
        cotangent,
        atol=3.0 * 20 * 16 * EPS,
    )
