"""Scaled cotangents, and clipped ones in recurrences, whose gradients are bounded."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optaxclip import clip_cotangent, scale_cotangent
from tests import oracles
from tests.backward.cotangents import EPS, close, normal, pulled_back


def unrolled(factor, bias, steps, clip):
    return jax.lax.scan(
        lambda h, _: (factor * clip(h) + bias, None), jnp.float32(1.0), length=steps
    )[0]


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["max_value", "max_norm"])
@pytest.mark.parametrize("steps", [1, 10, 100])
def test_gradients_of_a_growing_recurrence_are_bounded(steps, limit):
    """h <- 1.2 h + b: dh_T/db is the sum of 1.2^k over T steps; with what goes back
    limited to 0.5 it is 1 + 0.5 (T - 1).
    """

    def grad(clip):
        return float(jax.grad(lambda bias: unrolled(1.2, bias, steps, clip))(0.0))

    free, limited = sum(1.2**k for k in range(steps)), 1 + 0.5 * (steps - 1)
    np.testing.assert_allclose(grad(lambda h: h), free, 1e-4)
    clip = functools.partial(clip_cotangent, **{limit: 0.5})
    np.testing.assert_allclose(grad(clip), limited, 4 * steps * EPS)


@pytest.mark.parametrize("remat", [False, True], ids=["plain", "remat"])
def test_gradients_through_a_spectral_radius_of_2_are_bounded(remat):
    matrix = normal(0, 16, 16)
    matrix *= 2 / np.max(np.abs(np.linalg.eigvals(matrix)))  # spectral radius 2

    def length(clip):
        def cell(h, _):
            return matrix @ clip(h), None

        def total(h):
            step = jax.checkpoint(cell) if remat else cell
            return jnp.sum(jax.lax.scan(step, h, length=50)[0])

        return float(jnp.linalg.norm(jax.jit(jax.grad(total))(normal(1, 16))))

    assert length(lambda h: h) > 1e12
    clipped = length(functools.partial(clip_cotangent, max_norm=1.0))
    assert 1 - 8 * EPS <= clipped <= 1.0


DTYPES = ["float16", "bfloat16", "float32", "complex64"]


@pytest.mark.parametrize("scale", [0.0, 0.5, 1.0, -1.0])
def test_scale_scales_derivatives_in_both_modes(scale):
    for dtype in DTYPES:
        check_scaled(scale, dtype)


def test_a_scale_is_not_rounded_to_the_dtype():
    for dtype in DTYPES:
        check_scaled(0.1, dtype)


def check_scaled(scale, dtype):
    x, other = (jnp.asarray(normal(seed, 100, 2), dtype) for seed in (0, 1))
    scaled = pulled_back(lambda x: scale_cotangent(x, scale), x, other)
    value, tangent = jax.jvp(lambda x: scale_cotangent(x, scale), (x,), (other,))
    assert scaled.dtype == value.dtype == tangent.dtype == dtype
    np.testing.assert_array_equal(value, x)
    exact = np.float64(np.float32(scale)) * oracles.wide(other)
    # Rounded once: the scale itself is not rounded to the dtype.
    np.testing.assert_array_equal(scaled, exact.astype(scaled.dtype))
    np.testing.assert_array_equal(tangent, exact.astype(scaled.dtype))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_a_cotangent_in_8_bits_is_scaled(dtype):
    x = jnp.ones(3, dtype)
    cotangent = jnp.array([1.0, -3.0, 0.25], dtype)
    found = pulled_back(lambda x: scale_cotangent(x, 0.5), x, cotangent)
    assert found.dtype == x.dtype
    assert found.astype(np.float32).tolist() == [0.5, -1.5, 0.125]


def test_scale_may_be_traced_and_trees_keep_their_structure():
    tree = {"x": jnp.ones(2), "n": jnp.arange(2), "none": None}
    assert jax.tree.structure(scale_cotangent(tree, 0.5)) == jax.tree.structure(tree)

    def loss(x, scale):
        return jnp.sum(scale_cotangent({**tree, "x": x}, scale)["x"] ** 2)

    by_x, by_scale = jax.jit(jax.vmap(jax.grad(loss, (0, 1))))(
        jnp.ones((3, 2)), jnp.array([0.1, 0.5, 1.0])
    )
    close(by_x, np.array([[0.2, 0.2], [1, 1], [2, 2]]))
    assert not by_scale.any()
