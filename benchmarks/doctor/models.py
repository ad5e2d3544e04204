"""A perceptron for a regression, and a decoder for next tokens."""

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from .loops import STEPS, Params, Problem, float32, generator

SIZE = 32  # examples in a batch
TOKENS = 32  # in the vocabulary
LENGTH = 12  # tokens of a text that are predicted
WIDTH = 16


# -------------------------------------------------------------------------- regression


def mlp(seed: int, widths: tuple[int, ...] = (8, 32, 32, 1)) -> Params:
    draw = generator(seed)
    params: Params = {}
    for number, (fan_in, fan_out) in enumerate(pairwise(widths)):
        weights = draw.normal(size=(fan_in, fan_out)) / fan_in**0.5
        params[f"layer_{number}/w"] = float32(weights)
        params[f"layer_{number}/b"] = np.zeros(fan_out, np.float32)
    return params


def outputs(params: Params, x: Any, activation: Any = jnp.tanh) -> Array:
    last = len(params) // 2 - 1
    for number in range(last + 1):
        weights = params[f"layer_{number}/w"]
        x = x.astype(weights.dtype) @ weights + params[f"layer_{number}/b"]
        if number < last:
            x = activation(x)
    return x.astype(jnp.float32)


def squared(params: Params, x: Any, y: Any, activation: Any = jnp.tanh) -> Array:
    errors = outputs(params, x, activation)[:, 0] - y
    return jnp.mean(errors**2)


def regression(seed: int, size: int = SIZE, noise: float = 0.3) -> Problem:
    draw = generator(seed + 1000)
    x = draw.normal(size=(STEPS, size, 8))
    y = np.sin(2 * x[..., 0]) + x[..., 1] * x[..., 2]
    y += noise * draw.normal(size=(STEPS, size))
    return Problem(squared, mlp(seed), (float32(x), float32(y)))


# -------------------------------------------------------------------------- next token


def decoder(seed: int, blocks: int = 2) -> Params:
    draw = generator(seed)

    def matrix(*shape):
        return float32(draw.normal(size=shape) / shape[-2] ** 0.5)

    params = {
        "embed": float32(0.5 * draw.normal(size=(TOKENS, WIDTH))),
        "place": float32(0.1 * draw.normal(size=(LENGTH, WIDTH))),
    }
    for block in range(blocks):
        for name in ("query", "key", "value", "out"):
            params[f"block_{block}/attention/{name}"] = matrix(WIDTH, WIDTH)
        params[f"block_{block}/up"] = matrix(WIDTH, 2 * WIDTH)
        params[f"block_{block}/down"] = matrix(2 * WIDTH, WIDTH)
    params["head"] = matrix(WIDTH, TOKENS)
    return params


def normed(x: Any) -> Array:
    squares = x.astype(jnp.float32) ** 2
    return x / jnp.sqrt(jnp.mean(squares, -1, keepdims=True) + 1e-5)


def attention_scores(params: Params, x: Any, block: int) -> Array:
    query = x @ params[f"block_{block}/attention/query"]
    key = x @ params[f"block_{block}/attention/key"]
    return jnp.einsum("btd,bsd->bts", query, key) / WIDTH**0.5


def next_token(params: Params, tokens: Any, frozen: int = -1) -> Array:
    """The cross entropy of a decoder without biases. `frozen`: a block that gets no
    gradient.
    """
    tokens = tokens.astype(jnp.int32)
    x = params["embed"][tokens[:, :-1]] + params["place"]
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    blocks = sum(name.endswith("/up") for name in params)
    for block in range(blocks):
        weights = params
        if block == frozen:
            weights = jax.tree.map(lax.stop_gradient, params)
        scores = attention_scores(weights, normed(x), block)
        shares = jax.nn.softmax(jnp.where(mask, scores, -1e9))
        mixed = shares @ normed(x)
        value = mixed @ weights[f"block_{block}/attention/value"]
        x += value @ weights[f"block_{block}/attention/out"]
        hidden = jax.nn.gelu(normed(x) @ weights[f"block_{block}/up"])
        x += hidden @ weights[f"block_{block}/down"]
    logits = (normed(x) @ params["head"]).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return jnp.mean(losses)


def texts(
    seed: int, size: int = SIZE, tokens: int = TOKENS, chain: int = 0
) -> np.ndarray:
    """Tokens of a Markov chain, in which four tokens follow each."""
    draw = generator(seed + 2000)
    followers = np.random.default_rng(chain).integers(tokens, size=(TOKENS, 4))
    text = np.zeros((STEPS, size, LENGTH + 1), np.int32)
    text[..., 0] = draw.integers(tokens, size=(STEPS, size))
    for place in range(LENGTH):
        choice = draw.choice(4, p=[0.7, 0.2, 0.05, 0.05], size=(STEPS, size))
        text[..., place + 1] = followers[text[..., place], choice]
    return text


def language(seed: int, blocks: int = 2) -> Problem:
    return Problem(next_token, decoder(seed, blocks), (texts(seed),))
