"""The shrink `psac` at the ends of the range of r."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optaxclip import clip_by_global_norm, shrinks

NORMS = np.array([0.0, 1e-30, 0.5, 3.0, 1e30])


@pytest.mark.parametrize("r", [math.inf, 1e300, 1e38])
def test_with_a_large_r_it_is_auto_s_of_1(r):
    found = shrinks.psac(r)(jnp.float32(NORMS), jnp.float32(2.0))
    np.testing.assert_allclose(found, 2 * NORMS / (NORMS + 1), rtol=1e-6)


@pytest.mark.parametrize("r", [1e-300, 1e-40])
def test_with_a_tiny_r_it_normalizes(r):
    found = shrinks.psac(r)(jnp.float32(NORMS), jnp.float32(2.0))
    np.testing.assert_allclose(found, [0, 2, 2, 2, 2], rtol=1e-6)


@pytest.mark.parametrize("r", [math.inf, 1e38, 0.1, 1e-30, 1e-300])
def test_its_derivative_is_finite_at_zero(r):
    clipper = clip_by_global_norm(1.0, shrink=shrinks.psac(r))

    def total(grads):
        return clipper.update(grads, clipper.init(grads))[0].sum()

    for grads in (jnp.zeros(2), jnp.array([3.0, 4.0])):
        assert np.isfinite(jax.grad(total)(grads)).all()
