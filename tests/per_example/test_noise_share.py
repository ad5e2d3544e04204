"""The share of noise in a squared norm, against float64 NumPy from the gradients of
parts, and what it says of loud parts and loud batches.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optaxclip.per_example import clipped_grad, noise_scale, noise_share
from tests.per_example.test_noise_scale import IMAGES, PARAMS, TARGETS, loss

PARTS = np.random.default_rng(0).normal(0.5, 1.0, (8, 30))


def expected(parts):
    """From the covariance of parts: tr(cov) / k estimates E |g|^2 - |E g|^2."""
    noise = np.trace(np.cov(parts, rowvar=False)) / len(parts)
    return noise / np.sum(parts.mean(axis=0) ** 2)


def share_of(parts, function=noise_share):
    norms = np.linalg.norm(parts, axis=1)
    return function(np.float32(norms), np.linalg.norm(parts.mean(axis=0)))


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30, 4e37])
def test_it_is_the_variance_of_the_mean_over_its_square(scale):
    # Norms are rounded to float32, and 8 squares are added.
    for function in (noise_share, jax.jit(noise_share)):
        share = share_of(scale * PARTS, function)
        np.testing.assert_allclose(share, expected(PARTS), rtol=1e-5)


def test_one_part_that_makes_the_gradient_has_share_one():
    parts = np.zeros((8, 30))
    parts[3] = PARTS[3]
    assert share_of(parts) == 1
    # A part that is 1000 times as long as the others.
    loud = PARTS.copy()
    loud[3] *= 1000
    assert abs(share_of(loud) - 1) < 0.01


def test_it_is_unchanged_where_all_parts_are_longer():
    np.testing.assert_allclose(share_of(64 * PARTS), share_of(PARTS), rtol=1e-5)


def test_parts_that_agree_have_no_noise():
    assert share_of(np.repeat(PARTS[:1], 8, axis=0)) < 1e-6


def test_examples_give_the_noise_scale():
    result = clipped_grad(loss, None)(PARAMS, IMAGES, TARGETS)
    scale, noise, signal = noise_scale(result)
    norm = np.sqrt(noise / len(IMAGES) + signal)
    share = noise_share(result.norms, norm)
    # s^2 B / S is tr(Sigma) / |G|^2.
    np.testing.assert_allclose(share / (1 - share) * len(IMAGES), scale, rtol=1e-4)


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_broken_norm_has_no_share(broken):
    assert np.isnan(noise_share([1.0, broken], broken))
    assert np.isnan(noise_share([1.0, 2.0], broken))
    assert np.isnan(noise_share([1.0, broken], 1.0))
    assert np.isnan(noise_share([0.0, 0.0], 0.0))


def test_parts_that_cancel_are_all_noise():
    assert noise_share([1.0, 1.0], 0.0) == np.inf
    assert noise_share([1.0, 1.0, 0.0], 0.0) == np.inf


def test_wrong_norms_are_refused():
    with pytest.raises(ValueError, match=r"at least two parts, got .* shape \(1,\)"):
        noise_share([1.0], 1.0)
    with pytest.raises(ValueError, match=r"norms \[k\] .* shape \(2, 2\)"):
        noise_share(jnp.ones((2, 2)), 1.0)
    with pytest.raises(ValueError, match="norm must be a scalar"):
        noise_share([1.0, 2.0], jnp.ones(2))
    with pytest.raises(TypeError, match="norm must be a real number"):
        noise_share([1.0, 2.0], "1")
