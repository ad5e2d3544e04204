"""The losses whose gradients are clipped, each of ONE example, in plain JAX.

A weight is drawn where a loss first asks for it. Those of the three kinds that PyTorch
has too have the names that they have there (in_torch.py).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Params = dict[str, Any]
HEADS = 4
WORDS = 96
NHWC = ("NHWC", "HWIO", "NHWC")


class Case(NamedTuple):
    """A model with a batch, whose examples are clipped."""

    name: str
    kind: str  # of which function below it is
    sizes: dict[str, Any]  # the arguments of that function
    loss: Callable[..., jax.Array]  # of the parameters and one example
    params: Params
    batch: tuple[jax.Array, ...]  # inputs, and labels
    limit: float  # about the median of the norms, so that half of them are clipped

    @property
    def size(self) -> int:
        """The number of examples."""
        return len(self.batch[0])


def cases(quick: bool) -> list[Case]:
    """The models that are raced against other packages. The quick ones are toys, one of
    each kind.
    """
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

    def cast(tree: Any) -> Any:
        return jax.tree.map(
            lambda x: x.astype(jnp.bfloat16) if x.dtype == np.float32 else x, tree
        )

    def loss(params: Params, x: jax.Array, label: jax.Array) -> jax.Array:
        return case.loss(cast(params), cast(x), label).astype(np.float32)

    return case._replace(name=f"{case.name}, in bfloat16", loss=loss)


def _case(kind: str, batch: int, limit: float, **sizes: Any) -> Case:
    # As "perceptron, width 512, batch 64".
    shown = [f"{key} {size}" for key, size in sizes.items() if key != "channels"]
    name = ", ".join([kind, *shown, f"batch {batch}"])
    labels = jnp.arange(batch) % 10
    if kind == "transformer":
        text = drawn((sizes["length"] + 1,), batch, WORDS)
        examples = text[:, :-1], text[:, 1:]
    elif kind == "perceptron":
        examples = drawn((784,), batch), labels
    else:
        size, channels = sizes["size"], sizes["channels"]
        examples = drawn((size, size, channels[0]), batch), labels
    loss = partial(KINDS[kind], **sizes)
    return Case(name, kind, sizes, loss, started(loss, examples), examples, limit)


def each_kind(quick: bool) -> list[Case]:
    """Small models of twelve kinds, with few and many examples."""
    found = []
    for name, (loss, shape, most) in list(MODELS.items())[: 1 if quick else None]:
        for size in (2,) if quick else (16, 256):
            examples = (drawn(shape, size, most),)
            params = started(loss, examples)
            found.append(Case(name, name, {}, loss, params, examples, 1.0))
    return found


def drawn(shape: tuple[int, ...], batch: int, most: int = 0) -> jax.Array:
    """Random numbers for each example, or integers below a number."""
    generator, shape = np.random.default_rng(1), (batch, *shape)
    if most:
        return jnp.asarray(generator.integers(0, most, shape))
    return jnp.asarray(generator.standard_normal(shape), jnp.float32)


def started(loss: Callable[..., Any], examples: tuple[Any, ...]) -> Params:
    params: Params = {}
    jax.eval_shape(partial(loss, params), *(x[0] for x in examples))
    return jax.tree.map(jnp.asarray, params)


def weight(p: Params, name: str, *shape: int) -> Any:
    """A weight. Where there is none of that name, a random one, a scale of 1, or a bias
    of 0.
    """
    if name not in p:
        start = np.full(shape, float(name.endswith("weight")))
        if len(shape) > 1:
            generator = np.random.default_rng(len(p))
            start = generator.standard_normal(shape) / np.prod(shape[:-1]) ** 0.5
        p[name] = start.astype(np.float32)
    return jnp.asarray(p[name])


def matrix(p: Params, name: str, x: Any, width: int) -> Any:
    """A layer of weights."""
    return x @ weight(p, f"{name}.weight", x.shape[-1], width)


def dense(p: Params, name: str, x: Any, width: int) -> Any:
    """A layer of weights and bias."""
    return matrix(p, name, x, width) + weight(p, f"{name}.bias", width)


def layer_norm(p: Params, name: str, x: Any, over: Any = -1) -> Any:
    """The layer norm with scale and bias, or one over other axes of groups."""
    shape, width = x.shape, x.shape[-1]
    if over != -1:
        x = x.reshape(*shape[:-1], 4, -1)
    x = x - jnp.mean(x, over, keepdims=True)
    x = x * lax.rsqrt(jnp.mean(x * x, over, keepdims=True) + 1e-5)
    x = x.reshape(shape) * weight(p, f"{name}.weight", width)
    return x + weight(p, f"{name}.bias", width)


def convolved(p: Params, name: str, x: Any, width: int, stride: int = 1) -> Any:
    """A convolution of 3 x 3 without bias."""
    kernel, edges = weight(p, f"{name}.weight", 3, 3, x.shape[-1], width), [(1, 1)] * 2
    steps = (stride, stride)
    return lax.conv_general_dilated(
        x[None], kernel, steps, edges, dimension_numbers=NHWC
    )[0]


def normed(p: Params, name: str, x: Any, width: int, stride: int = 1) -> Any:
    """A convolution and group norm."""
    x = convolved(p, name, x, width, stride)
    return jax.nn.silu(layer_norm(p, f"{name}.norm", x, over=(0, 1, 3)))


def block(p: Params, at: str, x: Any, is_causal: bool = True) -> Any:
    """Attention and a perceptron, each behind a layer norm."""
    length, width = x.shape
    y = layer_norm(p, f"{at}norm1", x)
    query, key, value = (
        matrix(p, f"{at}{name}", y, width).reshape(length, HEADS, -1)
        for name in ("query", "key", "value")
    )
    scores = jnp.einsum("thk,shk->hts", query, key) / np.sqrt(width // HEADS)
    if is_causal:
        scores = jnp.where(np.tril(np.ones((length, length), bool)), scores, -1e9)
    mixed = jnp.einsum("hts,shk->thk", jax.nn.softmax(scores), value)
    x = x + matrix(p, f"{at}out", mixed.reshape(length, width), width)
    y = dense(p, f"{at}up", layer_norm(p, f"{at}norm2", x), 4 * width)
    return x + dense(p, f"{at}down", jax.nn.gelu(y), width)


def cross_entropy(logits: jax.Array, label: Any = 0) -> jax.Array:
    """The loss of one label."""
    return -jax.nn.log_softmax(logits)[label]


def perceptron(
    p: Params, x: Any, label: Any = 0, *, width: int, layers: int = 2
) -> Any:
    """Hidden layers, and 10 classes."""
    for layer in range(layers):
        x = jax.nn.relu(dense(p, f"{2 * layer}", x, width))
    return cross_entropy(dense(p, f"{2 * layers}", x, 10), label)


def convolution(p: Params, x: Any, label: Any, *, size: int, channels: Any) -> Any:
    """Three convolutions of 3 x 3, the second and third with stride 2, a mean over the
    image, 10 classes.
    """
    for name, width, stride in zip("024", channels[1:], (1, 2, 2)):
        out = convolved(p, name, x, width, stride)
        x = jax.nn.relu(out + weight(p, f"{name}.bias", width))
    return cross_entropy(dense(p, "8", jnp.mean(x, (0, 1)), 10), label)


def transformer(
    p: Params, words: Any, label: Any, *, width: int, length: int, layers: int
) -> Any:
    """A causal language model."""
    x = weight(p, "words.weight", WORDS, width)[words]
    x = x + weight(p, "places.weight", length, width)
    for number in range(layers):
        x = block(p, f"blocks.{number}.", x)
    return jnp.mean(jax.vmap(cross_entropy)(matrix(p, "head", x, WORDS), label))


def lstm(p: Params, x: Any) -> Any:
    def turn(carry: Any, x: Any) -> Any:
        state, cell = carry
        gates = jnp.split(dense(p, "gates", jnp.concatenate([x, state]), 256), 4)
        first, forget, out = map(jax.nn.sigmoid, gates[:3])
        cell = forget * cell + first * jnp.tanh(gates[3])
        return (out * jnp.tanh(cell), cell), None

    (state, _), _ = lax.scan(turn, (jnp.zeros(64), jnp.zeros(64)), x)
    return cross_entropy(state)


def gru(p: Params, x: Any) -> Any:
    def turn(state: Any, x: Any) -> Any:
        ins = jnp.split(dense(p, "in", x, 288), 3)
        own = jnp.split(dense(p, "state", state, 288), 3)
        reset = jax.nn.sigmoid(ins[0] + own[0])
        update = jax.nn.sigmoid(ins[1] + own[1])
        new = jnp.tanh(ins[2] + reset * own[2])
        return update * state + (1 - update) * new, None

    return cross_entropy(lax.scan(turn, jnp.zeros(96), x)[0])


def mamba(p: Params, x: Any) -> Any:
    """A selective state space model with 8 numbers for each of 64 channels."""
    decay = -jnp.exp(weight(p, "decay", 64, 8))
    x = dense(p, "in", x, 64)
    step = jax.nn.softplus(dense(p, "step", x, 64))

    def turn(state: Any, now: Any) -> Any:
        x, step, write, read = now
        state = state * jnp.exp(step[:, None] * decay) + (step * x)[:, None] * write
        return state, state @ read + weight(p, "skip.weight", 64) * x

    turns = x, step, dense(p, "write", x, 8), dense(p, "read", x, 8)
    return jnp.mean(
        dense(p, "out", lax.scan(turn, jnp.zeros((64, 8)), turns)[1], 16) ** 2
    )


def unet(p: Params, x: Any) -> Any:
    top = normed(p, "first", x, 16)
    low = normed(p, "middle", normed(p, "down", top, 32, 2), 32)
    both = jnp.concatenate([top, low.repeat(2, 0).repeat(2, 1)], -1)
    return jnp.mean(normed(p, "last", normed(p, "up", both, 16), 4) ** 2)


def resnet(p: Params, x: Any) -> Any:
    x = normed(p, "first", x, 24)
    for layer in range(4):
        x = x + normed(p, f"{layer}", x, 24)
    return cross_entropy(dense(p, "head", jnp.mean(x, (0, 1)), 10))


def vit(p: Params, x: Any) -> Any:
    x = dense(p, "patches", x, 96) + weight(p, "places", len(x), 96)
    x = block(p, "1.", block(p, "0.", x, is_causal=False), is_causal=False)
    return cross_entropy(dense(p, "head", jnp.mean(x, 0), 10))


def tied(p: Params, words: Any) -> Any:
    table = weight(p, "words", 512, 64)
    x = block(p, "1.", block(p, "0.", table[words]))
    return jnp.mean(jax.vmap(cross_entropy)(x @ table.T, words))


def experts(p: Params, x: Any) -> Any:
    """Each token goes to all of four experts, with the shares of a router."""
    share = jax.nn.softmax(dense(p, "router", x, 4))
    hidden = jnp.einsum("td,edh->teh", x, weight(p, "up", 4, 64, 128))
    down, hidden = weight(p, "down", 4, 128, 64), jax.nn.relu(hidden)
    x = x + jnp.einsum("te,teh,ehd->td", share, hidden, down)
    return cross_entropy(dense(p, "head", jnp.mean(x, 0), 10))


def lora(p: Params, x: Any) -> Any:
    for layer in range(4):
        frozen: Params = {}
        low = matrix(p, f"b{layer}", matrix(p, f"a{layer}", x, 4), 256)
        x = jnp.tanh(matrix(frozen, "frozen", x, 256) + low)
    return jnp.mean(x**2)


def recommender(p: Params, rows: Any) -> Any:
    """Three rows of each of two tables, one by one, and a perceptron."""
    tables = [weight(p, name, 20000, 32) for name in ("users", "items")]
    x = [tables[k % 2][row] for k, row in enumerate(rows)]
    return perceptron(p, jnp.concatenate(x), width=64)


KINDS = {
    "perceptron": perceptron,
    "convolution": convolution,
    "transformer": transformer,
}
# The loss, the shape of an example, and, for integers, what they are below.
MODELS: dict[str, tuple[Callable[..., Any], tuple[int, ...], int]] = {
    "MLP": (partial(perceptron, width=256), (256,), 0),
    "deep narrow MLP": (partial(perceptron, width=32, layers=16), (32,), 0),
    "LSTM": (lstm, (32, 32), 0),
    "GRU": (gru, (40, 32), 0),
    "Mamba-like scan": (mamba, (64, 16), 0),
    "U-Net": (unet, (16, 16, 3), 0),
    "ResNet": (resnet, (16, 16, 3), 0),
    "ViT": (vit, (16, 48), 0),
    "decoder, tied table": (tied, (32,), 512),
    "mixture of experts": (experts, (16, 64), 0),
    "LoRA": (lora, (16, 256), 0),
    "recommender": (recommender, (6,), 20000),
}
