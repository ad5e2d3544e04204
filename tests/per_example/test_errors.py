"""Calls of per-example clipping that are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip
from optaxclip.per_example import clipped_grad

METHODS = ("one_pass", "ghost", "auto")


def with_clipped_cotangent(w, x):
    h = optaxclip.clip_cotangent(x @ w, max_norm=0.1)
    return jnp.sum(jnp.sin(h))


@pytest.mark.parametrize("method", METHODS)
def test_a_clipped_cotangent_keeps_the_limit(method):
    w, x = jnp.full((4, 5), 0.3), jnp.linspace(-1, 2, 12).reshape(3, 4)
    grad = clipped_grad(jax.jit(with_clipped_cotangent), 0.05, method=method)
    each = [jax.grad(with_clipped_cotangent)(w, one) for one in x]
    factors = [min(1, 0.05 / float(jnp.linalg.norm(one))) for one in each]
    wanted = sum(f * one for f, one in zip(factors, each)) / 3
    np.testing.assert_allclose(grad(w, x).grads, wanted, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "leaf, text",
    [
        (jnp.int32(0), "float or complex dtype, but the leaf 'step' is int32"),
        (jax.random.key(0), "float or complex dtype, but the leaf 'step' is key"),
        (jax.nn.relu, "the leaf 'step' must be an array or a number, got"),
    ],
    ids=["integer", "key", "function"],
)
def test_parameters_without_a_derivative_are_named(leaf, text, method):
    def loss(params, x):
        return jnp.sum(params["w"] * x)

    grad = clipped_grad(loss, 1.0, method=method)
    with pytest.raises(TypeError, match=f"clipped_grad: .*{text}"):
        grad({"w": jnp.ones(3), "step": leaf}, jnp.ones((2, 3)))
