"""Losses of one example that use parameters in many ways."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.per_example.batches import normal

BATCH = 6


class Model(NamedTuple):
    loss: Callable[[Any, Any], jax.Array]
    params: Any
    batch: Any
    ways: dict[str, str]  # of each parameter


def weights(**shapes):
    """Random parameters of these shapes, of the size that layers start with."""
    params = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        size = 0.5 if len(shape) < 2 else shape[-2] ** -0.5
        params[name] = normal(seed, *shape) * np.float32(size)
    return params


def scaled(seed, *shape):
    """A batch whose examples have different sizes, so that some are clipped."""
    sizes = np.geomspace(0.1, 3, BATCH, dtype=np.float32)
    return normal(seed, BATCH, *shape) * sizes.reshape(-1, *(1,) * len(shape))


def perceptron():
    def loss(p, example):
        x, label = example
        x = jax.nn.relu(x @ p["first"] + p["bias"])
        return -jax.nn.log_softmax(p["last"] @ x)[label]

    params = weights(first=(9, 8), bias=(8,), last=(5, 8))
    ways = {"first": "product", "bias": "gradient", "last": "product"}
    return Model(loss, params, (scaled(9, 9), np.arange(BATCH) % 5), ways)


def convolution():
    kinds = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}

    def loss(p, image):
        x = lax.conv_general_dilated(
            image[None], p["first"], (1, 2), "SAME", rhs_dilation=(2, 1), **kinds
        )
        x = jax.nn.relu(x + p["bias"])
        x = lax.conv_general_dilated(
            x, p["groups"], (2, 1), "VALID", feature_group_count=2, **kinds
        )
        x = lax.conv_general_dilated(
            x, p["up"], (1, 1), [(2, 3), (2, 0)], (2, 1), (2, 1), **kinds
        )
        x = lax.conv_general_dilated(x[:, :2, :1], p["small"], (1, 1), "VALID", **kinds)
        return jnp.sum(jnp.tanh(x @ p["out"]) ** 2)

    params = weights(
        first=(3, 2, 1, 4),
        bias=(4,),
        groups=(2, 2, 2, 6),
        up=(2, 3, 6, 8),
        small=(2, 1, 8, 8),
        out=(8, 3),
    )
    ways = dict.fromkeys(params, "matrix")
    ways |= {"bias": "gradient", "small": "product", "out": "product"}
    return Model(loss, params, scaled(9, 8, 7, 1), ways)


def attention(p, x, heads=2):
    """With einsum over heads, and weights that are reshaped first."""
    size = x.shape[-1] // heads
    q = jnp.einsum("td,dhk->htk", x, p["query"])
    k = jnp.einsum("td,dhk->thk", x, p["key"].reshape(x.shape[-1], heads, size))
    v = (x @ p["value"]).reshape(len(x), heads, size)
    scores = jnp.einsum("htk,shk->hts", q, k) / np.sqrt(size)
    scores = jnp.where(np.tril(np.ones((len(x), len(x)), bool)), scores, -1e9)
    mixed = jnp.einsum("hts,shk->thk", jax.nn.softmax(scores), v)
    return jnp.einsum("thk,hkd->td", mixed, p["output"])


def layer_norm(x, scale):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def transformer():
    """Whose table is looked up in and multiplied by."""

    def loss(p, tokens):
        x = jnp.take(p["table"], tokens[:-1], axis=0) + p["places"]
        x = x + attention(p, layer_norm(x, p["scale"]))
        x = x + jax.nn.gelu(x @ p["up"] + p["bias"]) @ p["down"]
        logits = x @ p["table"].T
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[1:, None], 1)
        return -jnp.mean(picked)

    params = weights(
        table=(40, 8),
        places=(3, 8),
        scale=(8,),
        query=(8, 2, 4),
        key=(8, 8),
        value=(8, 8),
        output=(2, 4, 8),
        up=(8, 16),
        bias=(16,),
        down=(16, 8),
    )
    ways = dict.fromkeys(params, "gram")
    ways |= dict.fromkeys(["places", "scale", "bias"], "gradient")
    tokens = np.random.default_rng(9).integers(0, 40, (BATCH, 4), dtype=np.int32)
    return Model(loss, params, tokens, ways)


def small_table():
    """A table with fewer rows than words are looked up in it."""

    def loss(p, words):
        x = p["table"][words] @ p["in"]
        return jnp.sum(jnp.tanh(x) @ p["table"].T[:, :2]) ** 2

    params = weights(table=(5, 4), **{"in": (4, 4)})
    words = np.random.default_rng(9).integers(-5, 7, (BATCH, 9), dtype=np.int32)
    return Model(loss, params, words, {"table": "gradient", "in": "matrix"})


def lookups():
    """Words that are in an example twice, also in two lookups, and words beyond the
    table.
    """

    def loss(p, words):
        x = p["table"].at[words].get(mode="drop", fill_value=0)
        x = x + p["table"][words[::-1] % 30]
        y = jnp.take(p["other"].T, words[:3], axis=0, mode="clip")
        return jnp.sum(x**3) + jnp.sum(jnp.sin(y))

    params = weights(table=(30, 4), other=(3, 40))
    words = np.random.default_rng(9).integers(25, 35, (BATCH, 7), dtype=np.int32)
    return Model(loss, params, words, {"table": "rows", "other": "rows"})


def recurrent():
    """Weights that are shared over time in a scan, and a first state that is one."""

    def loss(p, sequence):
        def turn(h, x):
            return jnp.tanh(h @ p["again"] + x @ p["feed"] + p["bias"]), h @ p["out"]

        h, ys = lax.scan(turn, p["start"], sequence)
        return jnp.sum(ys**2) + jnp.sum(h)

    params = weights(again=(12, 12), feed=(3, 12), bias=(12,), start=(12,), out=(12, 1))
    ways = {
        "again": "gram",
        "feed": "matrix",
        "bias": "gradient",
        "start": "gradient",
        "out": "matrix",
    }
    return Model(loss, params, scaled(9, 5, 3), ways)


def deep():
    """A scan over stacked layers, each remembered by its input only."""

    def loss(p, x):
        @jax.checkpoint
        def layer(x, own):
            x = x + jax.nn.silu(x @ own["in"] + own["bias"]) @ own["out"]
            return x @ p["shared"], None

        x, _ = lax.scan(layer, x, {k: p[k] for k in ("in", "bias", "out")})
        return jnp.mean(x**2)

    shapes = {"in": (4, 8, 16), "bias": (4, 16), "out": (4, 16, 8), "shared": (8, 8)}
    params = weights(**shapes)
    ways = {"in": "gram", "bias": "gradient", "out": "gram", "shared": "matrix"}
    return Model(loss, params, scaled(9, 3, 8), ways)


def experts():
    """A mixture of experts: all of them for all tokens, and one of them by a switch."""

    def loss(p, x):
        gates = jax.nn.softmax(x @ p["gate"])
        inner = jax.nn.relu(jnp.einsum("td,edf->etf", x, p["in"]))
        x = jnp.einsum("te,etf,efd->td", gates, inner, p["out"])
        branches = [partial(jnp.dot, b=p["late"][k]) for k in range(2)]
        return jnp.sum(lax.switch((x[0, 0] > 0).astype(int), branches, x) ** 2)

    params = weights(gate=(6, 3), late=(2, 6, 6), out=(3, 8, 6), **{"in": (3, 6, 8)})
    ways = {"gate": "gram", "in": "gram", "out": "gram", "late": "gradient"}
    return Model(loss, params, scaled(9, 2, 6), ways)


def twice():
    """Uses that do not fit together, weights made of weights, a vector that is repeated
    as a matrix, and a loss by weights alone.
    """

    def loss(p, x):
        low = p["whole"] + p["down"] @ p["up"]
        y = jnp.tanh(low @ (p["whole"][0] * x)) / p["divisor"]
        y = jnp.concatenate([y, p["token"]]) @ p["tall"]
        y = y + p["rev"][::-1].T @ (p["rev"] @ y)
        y = y + jnp.broadcast_to(p["repeated"][:, None], (4, 4)) @ y
        return jnp.sum(y**2) + 0.1 * jnp.sum(p["whole"] ** 2) + jnp.sum(p["alone"])

    params = weights(
        whole=(5, 5),
        down=(5, 2),
        up=(2, 5),
        token=(2,),
        tall=(7, 4),
        rev=(3, 4),
        repeated=(4,),
    )
    params |= {
        "divisor": np.float32(1.5),
        "alone": normal(20, 2),
        "idle": normal(21, 2),
    }
    ways = dict.fromkeys(params, "gradient") | {"tall": "product", "idle": "unused"}
    return Model(loss, params, scaled(9, 5), ways)


def tied():
    """Tables that are multiplied by before they are looked up in, and a matrix that is
    read in another order.
    """

    def loss(p, example):
        x, words = example
        logits, mixed = x @ p["table"].T, x @ lax.reshape(p["square"], (8, 8), (1, 0))
        y = jnp.sin(p["table"][words]) + jnp.cos(p["other"].T[words])
        z = jnp.sum(jnp.tanh(logits)) + jnp.sum(jnp.tanh(x @ p["other"]))
        return z + jnp.sum(y) + jnp.sum(jnp.tanh(mixed) + x @ p["square"])

    params = weights(table=(60, 8), other=(8, 60), square=(8, 8))
    words = np.random.default_rng(9).integers(0, 60, (BATCH, 3), dtype=np.int32)
    ways = {"table": "gram", "other": "gram", "square": "gradient"}
    return Model(loss, params, (scaled(9, 2, 8), words), ways)


def chosen():
    """Parameters that choose a place by their values, and one that is held still."""

    def loss(p, x):
        def turn(total, row):
            return total + row[jnp.argmax(p["out"])] * p["out"][0], None

        total, _ = lax.scan(turn, 0.0, x)
        fixed = lax.stop_gradient(jnp.tanh(p["fixed"]))
        return total + jnp.sum(jnp.sin(x[:, jnp.argmin(p["in"])] * p["in"]) * fixed)

    params = weights(out=(4,), fixed=(3,), **{"in": (3,)})
    ways = {"out": "gradient", "fixed": "unused", "in": "gradient"}
    return Model(loss, params, scaled(9, 3, 4), ways)


def promoting(model):
    """The model, whose loss may add a bias to a matrix. The tests forbid it."""

    def loss(params, example):
        with jax.numpy_rank_promotion("allow"):
            return model.loss(params, example)

    return model._replace(loss=loss)


MODELS = {
    make.__name__: promoting(make())
    for make in (
        perceptron,
        convolution,
        transformer,
        small_table,
        lookups,
        recurrent,
        deep,
        experts,
        twice,
        tied,
        chosen,
    )
}
