"""The gradient noise scale against float64 NumPy from the gradients of examples, and
against its true value for a linear model with Gaussian data.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optaxclip.per_example import clipped_grad, noise_scale
from optaxclip.shrinks import normalize

EPS = float(np.finfo(np.float32).eps)
PARAMS = {"w": np.array([1.0, -2.0, 0.5], np.float32), "b": np.float32(0.25)}
random = np.random.default_rng(0)
IMAGES = random.standard_normal((9, 3)).astype(np.float32)
TARGETS = (random.standard_normal(9) - 2).astype(np.float32)


def loss(params, x, y):
    return 0.5 * (x @ params["w"] + params["b"] - y) ** 2


def of_each(images=IMAGES, targets=TARGETS):
    """The gradient of each example, float64[examples, 4]."""
    images, targets = images.astype(np.float64), targets.astype(np.float64)
    residuals = images @ PARAMS["w"] + PARAMS["b"] - targets
    return residuals[:, None] * np.column_stack([images, np.ones(len(images))])


def expected(grads):
    """Noise scale, tr(Sigma) and |G|^2, from the sample covariance."""
    noise = np.trace(np.cov(grads, rowvar=False))
    signal = np.sum(grads.mean(0) ** 2) - noise / len(grads)
    return noise / signal, noise, signal


def close(found, grads):
    """Each norm and sum is within 64 eps, and differences lose what cancels in them."""
    wanted = expected(grads)
    square = np.mean(np.sum(grads**2, 1))
    eps = 64 * EPS * square / min(wanted[1], abs(wanted[2]))
    np.testing.assert_allclose(found, wanted, rtol=2 * eps)


LIMITS = [None, np.inf, 1e6, {"w": None, "b": np.inf}]


@pytest.mark.parametrize("limit", LIMITS, ids=str)
@pytest.mark.slow
def test_it_is_noise_over_signal_of_the_gradients(limit):
    def scale(params):
        return noise_scale(clipped_grad(loss, limit)(params, IMAGES, TARGETS))

    close(scale(PARAMS), of_each())
    close(jax.jit(scale)(PARAMS), of_each())


def test_masked_and_broken_examples_are_left_out():
    images, targets = IMAGES.copy(), TARGETS.copy()
    images[2], targets[5], images[7] = np.nan, np.inf, 1e30
    # Only the gradient by "w" is inf.
    images[4] = 1e25
    mask, kept = np.arange(9) != 7, [0, 1, 3, 6, 8]
    for mean in (True, False):
        grad = jax.jit(clipped_grad(loss, {"w": None, "b": None}, mean=mean))
        result = grad(PARAMS, images, targets, mask=mask)
        assert int(result.nonfinite) == 3
        assert np.isfinite(result.norms["b"][4]) and np.isinf(result.norms["w"][4])
        close(jax.jit(noise_scale)(result), of_each(IMAGES[kept], TARGETS[kept]))
        assert not mean or result.divisor == 8


@pytest.mark.slow
def test_an_example_with_gradient_zero_counts():
    targets = TARGETS.copy()
    images = IMAGES.copy()
    images[0], targets[0] = 0, PARAMS["b"]
    result = clipped_grad(loss, None)(PARAMS, images, targets)
    assert result.norms[0] == 0
    close(noise_scale(result), of_each(images, targets))


def test_clipped_gradients_raise():
    """Also those that one of two limits clips."""
    for limit in (1.0, 0.0, {"w": 1.0, "b": None}):
        result = clipped_grad(loss, limit)(PARAMS, IMAGES, TARGETS)
        text = r"noise_scale: .* clipped .*max_norm=None"
        with pytest.raises(ValueError, match=text):
            noise_scale(result)


def test_gradients_of_a_new_length_raise():
    result = clipped_grad(loss, 1e3, shrink=normalize)(PARAMS, IMAGES, TARGETS)
    with pytest.raises(ValueError, match="9 of 9"):
        noise_scale(result)


def test_under_jit_clipped_gradients_give_nan():
    result = clipped_grad(loss, 1.0)(PARAMS, IMAGES, TARGETS)
    assert np.isnan(jax.jit(noise_scale)(result)).all()


def test_fewer_than_two_examples_give_nan():
    grad = jax.jit(clipped_grad(loss, None))
    for count in (0, 1):
        result = grad(PARAMS, IMAGES, TARGETS, mask=np.arange(9) < count)
        assert np.isnan(jax.jit(noise_scale)(result)).all()


@pytest.mark.slow
def test_a_gradient_lost_in_noise_gives_inf():
    def pulled(w, x):
        return 0.5 * (w - x) ** 2

    result = clipped_grad(pulled, None)(jnp.array(0.0), jnp.array([1.0, -1.0]))
    # |G_B| is 0, so that the estimate of |G|^2 is below 0.
    assert noise_scale(result) == (np.inf, 2.0, -1.0)


def test_gradients_of_zero_give_inf():
    result = clipped_grad(lambda w, x: 0 * w * x, None)(jnp.array(0.0), jnp.ones(3))
    assert noise_scale(result) == (np.inf, 0.0, 0.0)


@pytest.mark.slow
def test_equal_gradients_have_no_noise():
    images, targets = IMAGES[[0] * 4], TARGETS[[0] * 4]
    found = noise_scale(clipped_grad(loss, None)(PARAMS, images, targets))
    assert 0 <= found.noise <= 64 * EPS * found.signal


def test_averages_over_batches_approach_the_true_values():
    """g = x (x . d - s e) with x and e normal: G = d, and the fourth moments of a
    normal give tr(Sigma) = (n + 1) |d|^2 + n s^2.
    """
    batches, size, n, s = 4000, 8, 3, 0.5
    draws = np.random.default_rng(1)
    x = draws.standard_normal((batches, size, n)).astype(np.float32)
    y = (s * draws.standard_normal((batches, size))).astype(np.float32)
    params = {"w": PARAMS["w"] / 4}

    def linear(params, x, y):
        return 0.5 * (x @ params["w"] - y) ** 2

    def of_batch(x, y):
        result = clipped_grad(linear, None)(params, x, y)
        return noise_scale(result), jnp.sum(result.grads["w"] ** 2)

    found, naive = jax.device_get(jax.jit(jax.vmap(of_batch))(x, y))
    signal = float(np.sum(params["w"].astype(np.float64) ** 2))
    noise = (n + 1) * signal + n * s**2

    def deviations(values, truth):
        values = values.astype(np.float64)
        return abs(values.mean() - truth) / (values.std() / np.sqrt(batches))

    assert deviations(found.noise, noise) < 3
    assert deviations(found.signal, signal) < 3
    assert deviations(naive, signal) > 10  # |G_B|^2 itself is too large by noise / B
    ratio = found.noise.mean() / found.signal.mean()
    assert ratio == pytest.approx(noise / signal, rel=0.1)
