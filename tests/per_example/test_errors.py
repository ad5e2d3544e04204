"""Calls of per-example clipping that are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip
from optaxclip.per_example import (
    clipped_grad,
    per_example_global_norm_clip,
    per_example_layer_norm_clip,
)
from optaxclip.shrinks import auto_s


def add(p, x):
    return p * x


def noisy(p, key):
    return p * jax.random.normal(key)


WRONG = {
    "negative": (
        lambda: clipped_grad(add, -1.0),
        ValueError,
        r"clipped_grad: max_norm must be at least 0, got -1.0\.",
    ),
    "a string in a tree": (
        lambda: clipped_grad(add, {"w": "1"}),
        TypeError,
        r"clipped_grad: max_norm for 'w' must be a real number, got '1'\.",
    ),
    "a rule": (
        lambda: clipped_grad(add, {"w": optaxclip.rules.z_score()}),
        TypeError,
        r"clipped_grad: max_norm for 'w' must be a real number, got z_score\(",
    ),
    "two passes with keys of another kind": (
        lambda: clipped_grad(noisy, 1.0, method="two_pass")(
            1.0, jax.random.split(jax.random.key(0, impl="rbg"), 3)
        ),
        ValueError,
        r"clipped_grad: method must be \"one_pass\", \"ghost\" or \"auto\" for random "
        r"numbers of keys that are not of threefry, got \"two_pass\"\.",
    ),
    "an array": (
        lambda: clipped_grad(add, jnp.ones(3)),
        ValueError,
        r"clipped_grad: max_norm must be a scalar, got an array of shape \(3,\)\.",
    ),
    "nothing": (
        lambda: clipped_grad(add, {}),
        ValueError,
        r"clipped_grad: max_norm has no limit in it, got {}\.",
    ),
    "microbatch": (
        lambda: clipped_grad(add, 1.0, microbatch=0),
        ValueError,
        r"clipped_grad: microbatch must be at least 1, got 0\.",
    ),
    "two passes": (
        lambda: clipped_grad(add, {"a": 1.0, "b": 2.0}, method="two_pass"),
        ValueError,
        r"clipped_grad: method='two_pass' has one factor for an example, but max_norm "
        r"has 2 limits: use another method, or one limit\.",
    ),
    "no such part": (
        lambda: clipped_grad(lambda p, x: p["b"] * x, {"a": 1.0})(
            {"b": jnp.ones(())}, jnp.ones(2)
        ),
        ValueError,
        r"clipped_grad: max_norm has no value for the leaf 'b': it has 'a'\.",
    ),
    "by name": (
        lambda: clipped_grad(add, 1.0)(1.0, x=jnp.ones(3)),
        TypeError,
        r"clipped_grad.* got an unexpected keyword argument 'x'",
    ),
    "no new norm": (
        lambda: clipped_grad(add, 1.0, shrink=lambda norm, limit: None)(
            1.0, jnp.ones(3)
        ),
        TypeError,
        r"clipped_grad: shrink must return the new norm of each norm, in the shape "
        r"\(3, 1\), got None\.",
    ),
    "mask": (
        lambda: clipped_grad(add, 1.0)(1.0, jnp.ones(3), mask=jnp.ones(2, bool)),
        ValueError,
        r"clipped_grad: mask must be bool\[3\], one for each example, got bool\[2\]\.",
    ),
    "mask of numbers": (
        lambda: clipped_grad(add, 1.0)(1.0, jnp.ones(3), mask=jnp.ones(3)),
        ValueError,
        r"must be bool\[3\], one for each example, got float32\[3\]\.",
    ),
    "gamma": (
        lambda: auto_s(-1),
        ValueError,
        r"auto_s: gamma must be at least 0, got -1\.",
    ),
    "optax limit": (
        lambda: per_example_global_norm_clip([jnp.ones((2, 3))], -1.0),
        ValueError,
        r"per_example_global_norm_clip: l2_norm_clip must be at least 0, got -1.0\.",
    ),
    "optax layers": (
        lambda: per_example_layer_norm_clip([jnp.ones(2)], "1"),
        TypeError,
        r"per_example_layer_norm_clip: global_l2_norm_clip must be a real number, got "
        r"'1'\.",
    ),
    "optax scalar": (
        lambda: per_example_global_norm_clip([jnp.ones(())], 1.0),
        ValueError,
        r"per_example_global_norm_clip: grads must be arrays whose first axis counts "
        r"examples, of one size, got the shapes {'0': \(\)}\.",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_say_what_was_wrong(name):
    call, error, text = WRONG[name]
    with pytest.raises(error, match=text):
        call()


def test_per_example_limits_are_named_by_their_function():
    for text, call in {
        "per_example_global_norm_clip: l2_norm_clip": lambda: (
            per_example_global_norm_clip(jnp.ones((2, 3)), -1.0)
        ),
        "per_example_layer_norm_clip: global_l2_norm_clip": lambda: (
            per_example_layer_norm_clip(jnp.ones((2, 3)), -1.0)
        ),
        "clipped_grad: max_norm": lambda: optaxclip.clipped_grad(
            lambda w, x: w * x, -1.0
        ),
        "clipped_grad: max_norm for 'w'": lambda: optaxclip.clipped_grad(
            lambda w, x: w * x, {"w": -1.0}
        ),
        "auto_s: gamma": lambda: optaxclip.shrinks.auto_s(-1.0),
        "psac: r": lambda: optaxclip.shrinks.psac(-1.0),
    }.items():
        with pytest.raises(ValueError, match=rf"^{text} must be at least 0, got -1.0"):
            call()


METHODS = ("one_pass", "ghost", "two_pass", "auto")


def with_clipped_cotangent(w, x):
    h = optaxclip.clip_cotangent(x @ w, max_norm=0.1)
    return jnp.sum(jnp.sin(h))


@pytest.mark.parametrize("method", METHODS)
def test_a_clipped_cotangent_keeps_the_limit_or_is_refused(method):
    w, x = jnp.full((4, 5), 0.3), jnp.linspace(-1, 2, 12).reshape(3, 4)
    grad = clipped_grad(jax.jit(with_clipped_cotangent), 0.05, method=method)
    if method == "two_pass":
        text = r"clipped_grad: method must be .* with clip_cotangent, got \"two_pass\""
        with pytest.raises(ValueError, match=text):
            jax.jit(grad)(w, x)
        return
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


def test_a_clipped_cotangent_is_seen_where_jax_knows_its_derivative():
    loss = jax.jit(with_clipped_cotangent)
    w, x = jnp.full((4, 5), 0.3), jnp.linspace(-1, 2, 12).reshape(3, 4)
    _, pull = jax.vjp(lambda w: jax.vmap(loss, (None, 0))(w, x), w)
    pull(jnp.ones(3))
    for _ in range(2):
        with pytest.raises(ValueError, match="for a loss with clip_cotangent"):
            clipped_grad(loss, 0.05, method="two_pass")(w, x)
