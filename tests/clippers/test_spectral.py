"""Clipping of singular values, beside singular value decompositions in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip
from optaxclip import clip_by_spectral_norm, spectral_norm
from tests import oracles
from tests.clippers.matrices import (
    FORMS,
    METHODS,
    SMOOTH,
    SQUARE,
    WIDE,
    both,
    both_forms,
    clip,
    error,
    expected,
    longest,
    matrix,
)


@pytest.mark.parametrize(
    ("shape", "method", "form"),
    [
        *((WIDE, method, form) for method in METHODS for form in FORMS),
        (SQUARE, "svd", "smooth"),
        (SQUARE, "newton_schulz", "hard"),
        ((128, 8), "svd", "smooth"),
        ((128, 8), "newton_schulz", "hard"),
        ((4, 256), "svd", "hard"),
        ((4, 256), "newton_schulz", "smooth"),
    ],
    ids=str,
)
def test_singular_values_are_shrunk_and_vectors_kept(method, form, shape):
    x = matrix(shape, 10.0, 0.1)
    updates, state = clip(x, 1.0, method=method, shrink=FORMS[form][0])
    assert error(updates, expected(x, 1.0, form)) <= 4e-6
    np.testing.assert_allclose(state.norm, longest(x), rtol=4e-6)
    assert updates.dtype == x.dtype and updates.shape == x.shape


@both_forms
@pytest.mark.parametrize(
    ("method", "errors"),
    [("svd", (5e-6, 2e-3, 2e-2, 1.0)), ("newton_schulz", (4e-6, 2e-4, 2e-3, 0.2))],
)
def test_ill_conditioned_matrices_have_the_documented_error(method, errors, form):
    for ratio, most in zip((10.0, 1e3, 1e4, 1e6), errors):
        even, low = matrix(WIDE, ratio), matrix(WIDE, 0.9, 1e-3)
        for x in (
            even,
            matrix(WIDE, ratio, ratio, rank=16) + low,
            matrix(WIDE, ratio, rank=1) + low,
        ):
            updates, _ = clip(x, 1.0, method=method, shrink=FORMS[form][0])
            assert error(updates, expected(x, 1.0, form)) <= most
            assert longest(updates) <= 1 + 3e-6


@both
@pytest.mark.parametrize("rank", [1, 2, 11, 32])
def test_any_rank(method, rank):
    x = matrix(WIDE, 7.0, 0.5, rank)
    updates, _ = clip(x, 1.5, method=method)
    assert error(updates, expected(x, 1.5)) <= 4e-6 * 1.5


@both
def test_equal_singular_values(method):
    x = matrix(WIDE, 3.0, 3.0)
    updates, state = clip(x, 1.0, method=method)
    assert error(updates, expected(x, 1.0)) <= 4e-6
    np.testing.assert_allclose(state.norm, 3.0, rtol=4e-6)


def test_nearly_tied_singular_values_are_never_overrated():
    x = matrix(SQUARE, 1.0, 1 - 1e-4)
    assert (
        longest(x) * (1 - 32 ** (1 / 2**17) + 1 - 4e-6)
        <= clip(x, math.inf, "newton_schulz")[1].norm
        <= longest(x) * (1 + 4e-6)
    )


@both
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.slow
def test_low_precision_is_rounded_once(method, dtype):
    x = matrix((16, 48), 20.0, 0.1, dtype=dtype)
    updates, state = clip(x, 1.0, method=method)
    exact = expected(x, 1.0)
    rounding = oracles.eps_of(dtype) / 2 * np.linalg.norm(exact)
    assert updates.dtype == x.dtype and state.norm.dtype == jnp.float32
    assert error(updates, exact) <= 4e-6 + rounding
    assert longest(updates) <= 1 + 3e-6 + rounding


@pytest.mark.slow
@both
def test_float64_and_complex(method):
    with jax.enable_x64(True):
        x = jnp.asarray(matrix((8, 20), 1e3, dtype="float64"))
        assert error(clip(x, 1.0, method=method)[0], expected(x, 1.0)) <= 1e-11
    z = (matrix((8, 20), 5.0, 0.1) + 1j * matrix((8, 20), 4.0, 0.1, seed=1)).astype(
        np.complex64
    )
    assert error(clip(z, 1.0, method=method)[0], expected(z, 1.0)) <= 4e-6


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("steps", [1, 2, 4, 6, 10, 16, 24, 32])
def test_with_fewer_steps_no_singular_value_is_too_large(steps, dtype):
    eps = np.finfo(dtype).eps
    with jax.enable_x64(True):
        for ratio in (1.5, 7.0, 100.0, 1e4):
            x = jnp.asarray(matrix(WIDE, ratio, dtype="float64"), dtype)
            updates, _ = clip(x, 1.0, method="newton_schulz", steps=steps)
            found, known = (
                np.linalg.svd(np.float64(x), compute_uv=False) for x in (updates, x)
            )
            most = np.minimum(known, 1)
            assert (found <= most + 16 * eps * ratio).all()
            # The largest come out as they should, so the limit is not missed by much.
            assert found[0] >= 0.7


@both
def test_at_or_below_the_limit_nothing_changes(method):
    x = matrix(WIDE, 2.0, 0.01)
    limit = float(jax.jit(lambda x: spectral_norm(x, method=method))(x))
    for above in (limit, 2 * limit, 1e30, math.inf, None):
        updates, state = clip(x, above, method=method)
        assert oracles.same_bits(updates, x)
        assert state.factor == 1 and state.clipped == 0


@both
def test_smooth_far_below_the_limit_is_relatively_exact(method):
    x = matrix(WIDE, 1e-3, 1e-5)
    for limit in (0.1, 1e4, 1e30):
        updates, _ = clip(x, limit, method=method, shrink=SMOOTH)
        assert error(updates, expected(x, limit, "smooth")) <= 4e-6 * longest(x)


@pytest.mark.slow
def test_every_shrink_fits_singular_values():
    x = matrix((9, 12), 4.0, 0.5)
    u, s, v = np.linalg.svd(oracles.wide(x), full_matrices=False)
    for shrink, values in (
        (optaxclip.shrinks.normalize, np.ones_like(s)),
        (optaxclip.shrinks.drop, np.where(s > 1, 0, s)),
        (optaxclip.shrinks.smooth(1), s / (1 + s)),
    ):
        assert error(clip(x, 1.0, shrink=shrink)[0], (u * values) @ v) <= 4e-6


@pytest.mark.slow
@both
def test_the_ends_of_the_range_of_float32(method):
    for unit in (2.0**-124, 1e-30, 1e30, 2.0**126):
        unit = np.float32(unit)
        x = unit * np.float32([[2 - 2**-20, 0, 0], [0, 1, 0]])
        updates, _ = clip(x, unit, method=method)
        wanted = [[1, 0, 0], [0, 1, 0]]
        np.testing.assert_allclose(updates / unit, wanted, rtol=4e-6, atol=4e-6)


def test_the_squares_of_large_matrices_do_not_overflow():
    x = np.full((300, 200), 3e33, np.float32)
    updates, state = clip(x, longest(x) / 2, "newton_schulz")
    # One product sums 300 equal terms, each of which may round the same way.
    rounding = 300 * 2.0**-24
    np.testing.assert_allclose(updates, x / 2, rounding)
    np.testing.assert_allclose(state.norm, longest(x), rounding)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1e300, 1e190, 1e-190, 1e-290])
def test_newton_schulz_has_the_range_of_float64(size):
    with jax.enable_x64(True):
        grads = jnp.diag(jnp.array([3.0, 1.0])) * size
        clipper = clip_by_spectral_norm(0.5 * size, method="newton_schulz")
        updates, state = clipper.update(grads, clipper.init(grads))
        np.testing.assert_allclose(state.norm, 3 * size, rtol=1e-9)
        np.testing.assert_allclose(
            updates, np.diag([0.5, 0.5]) * size, rtol=1e-6, atol=1e-6 * size
        )
