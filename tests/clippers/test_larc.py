"""LARC beside its equation in float64 NumPy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip
from optaxclip import larc
from tests import oracles
from tests.helpers import apply

EPS = oracles.eps_of("float32")


def clip(grads, params, *args, **options):
    clipper = larc(*args, **options)
    return clipper.update(grads, clipper.init(params), params)


def expected(grad, weight, rate, trust=0.02, decay=0.0, eps=1e-8):
    """(g + wd p) * min(1, trust |p| / (|g| + wd |p| + eps) / lr), or g where either is
    0.
    """
    grad, weight = oracles.wide(grad), oracles.wide(weight)
    length, size = np.linalg.norm(weight), np.linalg.norm(grad)
    if length == 0 or size == 0:
        return grad
    return (grad + decay * weight) * min(
        1.0, trust * length / (size + decay * length + eps) / rate
    )


@pytest.mark.parametrize("decay", [0.0, 0.5])
@pytest.mark.parametrize("rate", [0.001, 0.1, 10.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_tensor_follows_the_equation(dtype, rate, decay):
    random = np.random.default_rng(0)
    shapes = {"w": (5, 3), "b": (7,)}
    params = {
        name: jnp.asarray(random.standard_normal(shape), dtype)
        for name, shape in shapes.items()
    }
    grads = {
        name: jnp.asarray(random.standard_normal(shape) * 3, dtype)
        for name, shape in shapes.items()
    }
    clipped, _ = jax.jit(lambda g, p: clip(g, p, rate, weight_decay=decay))(
        grads, params
    )
    for name in shapes:
        exact = expected(grads[name], params[name], rate, decay=decay)
        # The sum with weight decay is rounded once, the product once; the sum may
        # cancel, hence the absolute part.
        most = oracles.eps_of(dtype) + 16 * EPS
        np.testing.assert_allclose(
            oracles.wide(clipped[name]),
            exact,
            rtol=most,
            atol=most * np.abs(exact).max(),
        )
        assert clipped[name].dtype == jnp.dtype(dtype)


@pytest.mark.slow
def test_zero_weights_and_zero_gradients_are_untouched():
    grads = {"new": jnp.array([100.0, 1.0]), "still": jnp.zeros(2)}
    params = {"new": jnp.zeros(2), "still": jnp.array([3.0, 4.0])}
    clipped, state = clip(grads, params, 0.1, weight_decay=0.1)
    assert oracles.same_bits(clipped["new"], grads["new"]) and oracles.same_bits(
        clipped["still"], grads["still"]
    )
    assert state.by_name()["new"].limit == math.inf


def test_the_limit_follows_the_schedule_of_the_learning_rate():
    params, grads = jnp.array([3.0, 4.0]), jnp.array([0.0, 100.0])
    clipper = larc(lambda step: 0.1 * step)
    state, limits = clipper.init(params), []
    for _ in range(3):
        _, state = clipper.update(grads, state, params)
        limits.append(float(state.limit))
    np.testing.assert_allclose(limits, [math.inf, 1.0, 0.5], rtol=4 * EPS)


def test_larc_adds_eps_to_the_norm_that_it_divides_by():
    grads, params = jnp.array([3.0, 4.0]), jnp.array([1.0, 0.0])
    updates, state = apply(optaxclip.larc(0.1, 0.1, eps=5.0), grads, params)
    assert state.limit == 1.0
    np.testing.assert_allclose(updates, [0.3, 0.4], rtol=1e-6)


@pytest.mark.parametrize(
    ("weight", "decay"), [(0.0, 0.5), (1.0, 0.0)], ids=["no weights", "no decay"]
)
def test_larc_keeps_the_sign_of_zero_where_nothing_decays(weight, decay):
    grads = jnp.array([-0.0, 1e-3])
    updates, _ = apply(
        optaxclip.larc(0.1, weight_decay=decay), grads, jnp.array([0.0, weight])
    )
    assert np.asarray(updates).tobytes() == np.asarray(grads).tobytes()


def test_larc_rounds_a_decayed_gradient_of_16_bits_once():
    random = np.random.default_rng(0)
    grads, params = (
        jnp.asarray(random.standard_normal(1000), jnp.bfloat16) for _ in range(2)
    )
    exact = np.asarray(grads).astype(np.float64) + float(np.float32(0.3)) * np.asarray(
        params
    ).astype(np.float64)
    updates, _ = apply(optaxclip.larc(1e-6, weight_decay=0.3), grads, params)
    assert (
        np.abs(np.asarray(updates).astype(np.float64) - exact)
        <= 2.0**-8 * np.abs(exact) * (1 + 1e-3) + 1e-6
    ).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_decayed_gradient_may_leave_the_range(dtype):
    # 6e4 + 0.5 * 6e4 is no float16, and what it is clipped to is one.
    grads = {"w": jnp.array([6e4, 1.0], dtype)}
    updates, _ = clip(grads, grads, 1.0, 0.02, weight_decay=0.5)
    wanted = expected(grads["w"], grads["w"], 1.0, 0.02, 0.5)
    assert updates["w"].dtype == dtype
    found, eps = updates["w"].astype("float32"), float(jnp.finfo(dtype).eps)
    # The factor ends a few eps of float32 below the quotient.
    np.testing.assert_allclose(found, wanted, rtol=eps / 2 + 8 * EPS)
