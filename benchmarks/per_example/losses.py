"""The losses whose gradients are clipped, each of ONE example, in plain JAX.

Parameters have the names that they have in PyTorch, where in_torch.py builds the same
models.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Params = dict[str, jax.Array]


class Case(NamedTuple):
    """A model with a batch, whose examples are clipped."""

    name: str
    kind: str  # of which function below it is
    sizes: dict[str, Any]  # the arguments of that function
    loss: Callable[[Params, jax.Array, jax.Array], jax.Array]
    params: Params
    batch: tuple[jax.Array, jax.Array]  # inputs and labels
    limit: float  # about the median of the norms, so that half of them are clipped

    @property
    def size(self) -> int:
        """The number of examples."""
        return len(self.batch[0])


def cases(quick: bool) -> list[Case]:
    """All models. The quick ones are toys, one of each kind."""
    if quick:
        return [
            _case("perceptron", 8, 9.0, width=16),
            _case("transformer", 8, 6.0, width=16, length=4, layers=1),
            # Three colours: of images with one, PyTorch makes arrays in a memory layout
            # that Opacus 1.6.0 misreads, and its gradients are wrong.
            _case("convolution", 8, 3.0, size=8, channels=(3, 4, 4, 8)),
        ]
    return [
        _case("perceptron", 64, 20.7, width=512),
        _case("perceptron", 256, 20.7, width=512),
        _case("transformer", 32, 8.9, width=512, length=32, layers=1),
        _case("transformer", 32, 6.9, width=128, length=64, layers=2),
        _case("convolution", 32, 5.4, size=32, channels=(3, 32, 64, 128)),
    ]


def in_bfloat16(case: Case) -> Case:
    """The same model with weights of float32, which are cast to compute with them."""

    def loss(params: Params, x: jax.Array, label: jax.Array) -> jax.Array:
        return case.loss(_cast(params), _cast(x), label).astype(np.float32)

    return case._replace(name=f"{case.name}, in bfloat16", loss=loss)


def _cast(tree: Any) -> Any:
    return jax.tree.map(
        lambda x: x.astype(jnp.bfloat16) if x.dtype == np.float32 else x, tree
    )


def _case(kind: str, batch: int, limit: float, **sizes: Any) -> Case:
    loss, shapes, examples = KINDS[kind](batch, **sizes)
    # As "perceptron, width 512, batch 64".
    shown = [f"{key} {size}" for key, size in sizes.items() if key != "channels"]
    name = ", ".join([kind, *shown, f"batch {batch}"])
    return Case(name, kind, sizes, loss, _started(shapes), examples, limit)


def perceptron(batch: int, width: int) -> Any:
    """784 numbers, two hidden layers, 10 classes."""
    sizes = (784, width, width, 10)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, fan_in, fan_out in zip(("0", "2", "4"), sizes, sizes[1:]):
        shapes |= _dense_shapes(name, fan_in, fan_out)

    def loss(params: Params, x: jax.Array, label: jax.Array) -> jax.Array:
        x = jax.nn.relu(dense(params, "0", x))
        x = jax.nn.relu(dense(params, "2", x))
        return cross_entropy(dense(params, "4", x), label)

    return loss, shapes, (_normal(batch, 784), jnp.arange(batch) % 10)


def convolution(batch: int, size: int, channels: tuple[int, ...]) -> Any:
    """Three convolutions of 3 x 3, the second and third with stride 2, a mean over the
    image, 10 classes.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name, fan_in, fan_out in zip(("0", "2", "4"), channels, channels[1:]):
        shapes[f"{name}.weight"] = (3, 3, fan_in, fan_out)
        shapes[f"{name}.bias"] = (fan_out,)
    shapes |= _dense_shapes("8", channels[-1], 10)

    def loss(params: Params, x: jax.Array, label: jax.Array) -> jax.Array:
        for name, stride in (("0", 1), ("2", 2), ("4", 2)):
            x = jax.nn.relu(_convolved(params, name, x, stride))
        return cross_entropy(dense(params, "8", jnp.mean(x, (0, 1))), label)

    images = _normal(batch, size, size, channels[0])
    return loss, shapes, (images, jnp.arange(batch) % 10)


HEADS = 4
WORDS = 96


def transformer(batch: int, width: int, length: int, layers: int) -> Any:
    """A causal language model."""
    shapes: dict[str, tuple[int, ...]] = {
        "words.weight": (WORDS, width),
        "places.weight": (length, width),
        "head.weight": (width, WORDS),
    }
    for number in range(layers):
        shapes |= _block_shapes(f"blocks.{number}.", width)

    def loss(params: Params, words: jax.Array, label: jax.Array) -> jax.Array:
        x = params["words.weight"][words] + params["places.weight"]
        for number in range(layers):
            x = block(params, f"blocks.{number}.", x)
        logits = x @ params["head.weight"]
        return jnp.mean(jax.vmap(cross_entropy)(logits, label))

    text = np.random.default_rng(1).integers(0, WORDS, (batch, length + 1))
    return loss, shapes, (jnp.asarray(text[:, :-1]), jnp.asarray(text[:, 1:]))


KINDS: dict[str, Callable[..., Any]] = {
    "perceptron": perceptron,
    "convolution": convolution,
    "transformer": transformer,
}


def block(params: Params, at: str, x: jax.Array) -> jax.Array:
    """Attention and a perceptron, each behind a layer norm."""
    length, width = x.shape
    y = layer_norm(params, f"{at}norm1", x)
    query, key, value = (
        (y @ params[f"{at}{name}.weight"]).reshape(length, HEADS, -1)
        for name in ("query", "key", "value")
    )
    scores = jnp.einsum("thk,shk->hts", query, key) / np.sqrt(width // HEADS)
    seen = np.tril(np.ones((length, length), bool))
    scores = jax.nn.softmax(jnp.where(seen, scores, -1e9))
    mixed = jnp.einsum("hts,shk->thk", scores, value).reshape(length, width)
    x = x + mixed @ params[f"{at}out.weight"]
    y = jax.nn.gelu(dense(params, f"{at}up", layer_norm(params, f"{at}norm2", x)))
    return x + dense(params, f"{at}down", y)


def dense(params: Params, name: str, x: jax.Array) -> jax.Array:
    """A layer of weights and bias."""
    return x @ params[f"{name}.weight"] + params[f"{name}.bias"]


def layer_norm(params: Params, name: str, x: jax.Array) -> jax.Array:
    """The layer norm with scale and bias."""
    x = x - jnp.mean(x, -1, keepdims=True)
    x = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)
    return x * params[f"{name}.weight"] + params[f"{name}.bias"]


def cross_entropy(logits: jax.Array, label: jax.Array) -> jax.Array:
    """The loss of one label."""
    return -jax.nn.log_softmax(logits)[label]


def _convolved(params: Params, name: str, x: jax.Array, stride: int) -> jax.Array:
    kinds = ("NHWC", "HWIO", "NHWC")
    weight, strides, edges = params[f"{name}.weight"], (stride,) * 2, [(1, 1)] * 2
    out = lax.conv_general_dilated(
        x[None], weight, strides, edges, dimension_numbers=kinds
    )
    return out[0] + params[f"{name}.bias"]


def _dense_shapes(name: str, fan_in: int, fan_out: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (fan_in, fan_out), f"{name}.bias": (fan_out,)}


def _block_shapes(at: str, width: int) -> dict[str, tuple[int, ...]]:
    norms = {f"{at}{name}.weight": (width,) for name in ("norm1", "norm2")}
    biases = {f"{at}{name}.bias": (width,) for name in ("norm1", "norm2")}
    names = ("query", "key", "value", "out")
    square = {f"{at}{name}.weight": (width, width) for name in names}
    up = _dense_shapes(f"{at}up", width, 4 * width)
    return norms | biases | square | up | _dense_shapes(f"{at}down", 4 * width, width)


def _started(shapes: dict[str, tuple[int, ...]]) -> Params:
    """Random weights, scales of 1 and biases of 0."""
    generator = np.random.default_rng(0)
    params = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            start = np.full(shape, float(name.endswith("weight")))
        else:
            start = generator.standard_normal(shape) / np.prod(shape[:-1]) ** 0.5
        params[name] = jnp.asarray(start, jnp.float32)
    return params


def _normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).standard_normal(shape), jnp.float32)
