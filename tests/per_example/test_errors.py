"""Calls of per-example clipping that are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip
from optaxclip.per_example import add_noise, clipped_grad, draw, explain_clipped_grad

METHODS = ("one_pass", "ghost", "auto")


def with_clipped_cotangent(w, x):
    h = optaxclip.clip_cotangent(x @ w, max_norm=0.1)
    return jnp.sum(jnp.sin(h))


@pytest.mark.parametrize("method", METHODS)
def test_a_clipped_cotangent_keeps_the_limit(method):
    w, x = jnp.full((4, 5), 0.3), jnp.linspace(-1, 2, 12).reshape(3, 4)
    grad = clipped_grad(jax.jit(with_clipped_cotangent), 0.05, method=method)
    grad_of_one = jax.jit(jax.grad(with_clipped_cotangent))
    each = [np.asarray(grad_of_one(w, one)) for one in x]
    factors = [min(1, 0.05 / float(np.linalg.norm(one))) for one in each]
    wanted = sum(f * one for f, one in zip(factors, each)) / 3
    found = jax.jit(grad)(w, x).grads
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-8)


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


def test_a_parameter_alone_has_no_name():
    text = "^clipped_grad: .* complex dtype, but they are int32"
    with pytest.raises(TypeError, match=text):
        clipped_grad(jnp.vdot, 1.0)(jnp.ones(2, int), jnp.ones((3, 2)))


def mean_over_a_batch(w, x, y):
    return jnp.mean(jnp.sum((x - w) ** 2, axis=1) * y)


def test_a_loss_that_wants_a_batch_gets_a_note():
    with pytest.raises(ValueError, match="axis 1 is out of bounds") as caught:
        clipped_grad(mean_over_a_batch, 1.0)(jnp.ones(3), jnp.ones((4, 3)), jnp.ones(4))
    note = (
        "clipped_grad: mean_over_a_batch gets one example, without the batch axis: "
        "arrays of shape [3], []. It must return one real number, or (value, aux) with "
        "has_aux=True."
    )
    assert note in caught.value.__notes__


def test_explain_takes_shapes_for_arrays():
    def loss(params, x, activation):
        return jnp.sum(activation(x @ params["w"]))

    explain = explain_clipped_grad(loss, shared_argnums=2)
    params, x = {"w": jnp.ones((4, 5))}, jnp.ones((3, 4))
    shapes = jax.eval_shape(lambda *arrays: arrays, params, x)
    assert explain(*shapes, jnp.tanh) == explain(params, x, jnp.tanh)
    # They may stand beside arrays.
    assert explain(params, shapes[1], jnp.tanh) == explain(params, x, jnp.tanh)


@pytest.mark.parametrize("key", [0, None, 1.5, "several"])
def test_what_is_no_key_is_named(key):
    if key == "several":
        key = jax.random.split(jax.random.key(0), 3)
    with pytest.raises((TypeError, ValueError), match=r"^add_noise: key must be one"):
        add_noise(jnp.ones(2), 1.0, key, sensitivity=1.0)
    with pytest.raises((TypeError, ValueError), match=r"^draw: key must be one"):
        draw(key, 0.5, examples=4, places=4)


def test_old_keys_are_keys():
    old = jax.random.PRNGKey(0)
    noisy = add_noise(jnp.ones(2), 1.0, old, sensitivity=1.0)
    typed = add_noise(jnp.ones(2), 1.0, jax.random.key(0), sensitivity=1.0)
    np.testing.assert_array_equal(noisy, typed)
