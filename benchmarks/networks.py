"""The networks whose training steps are measured: perceptrons of an agent, a decoder,
convolutions.
"""

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from examples._shared import cross_entropy, perceptron

Params = dict[str, Any]
Batch = tuple[np.ndarray, ...]


class Network(NamedTuple):
    """A loss, and what it takes."""

    params: Params  # the weights, described
    loss: Callable[..., Array]  # (weights, *batch) -> float32[]
    draw: Callable[[np.random.Generator], Batch]


class Sizes(NamedTuple):
    """Of a decoder."""

    layers: int
    width: int
    heads: int
    length: int  # tokens of an example that are predicted
    words: int  # in the vocabulary
    batch: int


def at_hand(quick: bool) -> dict[str, Network]:
    """Those that train on the device at hand, by name."""
    if quick:
        return {"actor and critic": actor_critic(width=8)}
    networks = {"actor and critic": COMPILED[SMALL]}
    if jax.default_backend() == "cpu":
        small = Sizes(layers=4, width=256, heads=4, length=64, words=1024, batch=8)
        networks["transformer"] = decoder(small)
        networks["convolutions"] = convolutions()
    else:
        networks["decoder"] = COMPILED[UNROLLED]
    return networks


def started(params: Params, seed: int = 0) -> Params:
    """Random weights, scales of 1 and biases of 0."""
    generator = np.random.default_rng(seed)

    def start(path: Any, leaf: jax.ShapeDtypeStruct) -> Array:
        shape = leaf.shape
        if len(shape) == 1:
            return jnp.full(shape, float(path[-1].key.startswith("scale")))
        weights = generator.standard_normal(shape) / math.prod(shape[:-1]) ** 0.5
        return jnp.asarray(weights, jnp.float32)

    return jax.tree.map_with_path(start, params)


def _described(shapes: Params) -> Params:
    describe = partial(jax.ShapeDtypeStruct, dtype=np.float32)
    return jax.tree.map(describe, shapes, is_leaf=lambda x: isinstance(x, tuple))


def actor_critic(width: int) -> Network:
    """An actor and a critic as in RL, 12 tensors: the actor learns given actions, the
    critic given returns.
    """
    shapes = {
        "actor": _perceptron_shapes(64, width, width, 6),
        "critic": _perceptron_shapes(64, width, width, 1),
    }

    def loss(
        params: Params, observations: Array, actions: Array, returns: Array
    ) -> Array:
        values = perceptron(params["critic"], observations)[:, 0]
        logits = perceptron(params["actor"], observations)
        return cross_entropy(logits, actions) + jnp.mean((values - returns) ** 2)

    def draw(generator: np.random.Generator) -> Batch:
        observations = generator.standard_normal((64, 64), np.float32)
        return observations, generator.integers(6, size=64), observations[:, 0]

    return Network(_described(shapes), loss, draw)


def convolutions() -> Network:
    """Three convolutions of 3 x 3, two of which halve the image, and 10 classes."""
    channels = (3, 32, 64, 128)
    shapes: Params = {}
    for number, (inputs, outputs) in enumerate(pairwise(channels)):
        weight = 3, 3, inputs, outputs
        shapes[f"layer{number}"] = {"weight": weight, "bias": (outputs,)}
    shapes["head"] = {"weight": (channels[-1], 10), "bias": (10,)}

    def loss(params: Params, images: Array, labels: Array) -> Array:
        x = images
        for number, stride in enumerate((1, 2, 2)):
            layer = params[f"layer{number}"]
            x = lax.conv_general_dilated(
                x,
                layer["weight"],
                window_strides=(stride, stride),
                padding="SAME",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )
            x = jax.nn.relu(x + layer["bias"])
        head = params["head"]
        logits = jnp.mean(x, (1, 2)) @ head["weight"] + head["bias"]
        return cross_entropy(logits, labels)

    def draw(generator: np.random.Generator) -> Batch:
        images = generator.standard_normal((32, 32, 32, 3), np.float32)
        return images, generator.integers(10, size=32)

    return Network(_described(shapes), loss, draw)


def decoder(
    sizes: Sizes, *, is_scanned: bool = False, dtype: str = "float32"
) -> Network:
    """A language model like GPT-2, with weights of float32 that are cast to `dtype`.

    Scanned, its layers are stacked on leading axes and computed anew on the way back,
    as in most large trainers.
    """
    width = sizes.width
    layer = _layer_shapes(width)
    if is_scanned:
        layers = {name: (sizes.layers, *shape) for name, shape in layer.items()}
    else:
        layers = [layer] * sizes.layers
    shapes = {
        "words": (sizes.words, width),
        "places": (sizes.length, width),
        "layers": layers,
        "scale": (width,),
        "bias": (width,),
    }

    def apply(x: Array, weights: Params) -> tuple[Array, None]:
        return _layer(weights, x, sizes.heads), None

    def loss(params: Params, ids: Array) -> Array:
        params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
        x = params["words"][ids[:, :-1]] + params["places"]
        if is_scanned:
            x, _ = lax.scan(jax.checkpoint(apply), x, params["layers"])
        else:
            for weights in params["layers"]:
                x, _ = apply(x, weights)
        x = _layer_norm(x, params["scale"], params["bias"])
        logits = x @ params["words"].T
        return cross_entropy(logits.astype(jnp.float32), ids[:, 1:])

    def draw(generator: np.random.Generator) -> Batch:
        shape = (sizes.batch, sizes.length + 1)
        return (generator.integers(sizes.words, size=shape, dtype=np.int32),)

    return Network(_described(shapes), loss, draw)


def decoder_of_128_tensors() -> list[tuple[int, ...]]:
    """The shapes of its tensors: two tables, ten layers, three more layer norms. 16
    devices can divide all of them.
    """
    width = GPT2.width
    layers = [*_layer_shapes(width).values()] * 10
    norms = [(width,)] * 6
    return [(GPT2.words, width), (1024, width), *layers, *norms]


def _layer_shapes(width: int) -> dict[str, tuple[int, ...]]:
    return {
        "scale1": (width,),
        "bias1": (width,),
        "attend": (width, 3 * width),
        "attend_bias": (3 * width,),
        "out": (width, width),
        "out_bias": (width,),
        "scale2": (width,),
        "bias2": (width,),
        "up": (width, 4 * width),
        "up_bias": (4 * width,),
        "down": (4 * width, width),
        "down_bias": (width,),
    }


def _layer(weights: Params, x: Array, heads: int) -> Array:
    y = _layer_norm(x, weights["scale1"], weights["bias1"])
    y = y @ weights["attend"] + weights["attend_bias"]
    query, key, value = jnp.split(y.reshape(*x.shape[:2], 3 * heads, -1), 3, axis=2)
    y = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    x = x + y.reshape(x.shape) @ weights["out"] + weights["out_bias"]
    y = _layer_norm(x, weights["scale2"], weights["bias2"])
    y = jax.nn.gelu(y @ weights["up"] + weights["up_bias"])
    return x + y @ weights["down"] + weights["down_bias"]


def _layer_norm(x: Array, scale: Array, bias: Array) -> Array:
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale + bias


def _perceptron_shapes(*sizes: int) -> list[Params]:
    layers = []
    for inputs, outputs in pairwise(sizes):
        layers.append({"w": (inputs, outputs), "b": (outputs,)})
    return layers


# Like GPT-2 small, with a vocabulary that 16 devices can divide.
GPT2 = Sizes(layers=4, width=768, heads=12, length=512, words=50304, batch=8)
LARGER = GPT2._replace(layers=8)
TOY = Sizes(layers=1, width=128, heads=4, length=16, words=256, batch=4)

SMALL = "actor and critic"
UNROLLED = "4 layers, unrolled"
SCANNED = "8 layers, scanned"
# Networks that are compiled for described devices.
COMPILED = {
    SMALL: actor_critic(width=256),
    UNROLLED: decoder(GPT2, dtype="bfloat16"),
    SCANNED: decoder(LARGER, is_scanned=True, dtype="bfloat16"),
    "toy": decoder(TOY, is_scanned=True, dtype="bfloat16"),
}
