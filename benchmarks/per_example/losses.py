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
from jax import Array, lax
from jax.typing import ArrayLike

Params = dict[str, Any]
HEADS = 4
WORDS = 96


class Case(NamedTuple):
    """A model with a batch, whose examples are clipped."""

    name: str
    kind: str  # of which function below it is
    sizes: dict[str, Any]  # the arguments of that function
    loss: Callable[..., Array]  # of the parameters and one example
    params: Params
    batch: tuple[Array, ...]  # inputs, and labels
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

    def loss(params: Params, x: Array, label: Array) -> Array:
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
    cases = []
    for name, model in MODELS.items():
        for batch in (16, 256):
            cases.append(small_case(name, *model, batch))
    return [small_case("MLP", *MODELS["MLP"], batch=2)] if quick else cases


def small_case(
    name: str, loss: Callable[..., Any], shape: tuple[int, ...], most: int, batch: int
) -> Case:
    """A model whose loss has no label. The arguments are those of `drawn`."""
    examples = (drawn(shape, batch, most),)
    return Case(name, name, {}, loss, started(loss, examples), examples, 1.0)


def drawn(shape: tuple[int, ...], batch: int, most: int = 0) -> Array:
    """Random numbers for each example, or integers below a number."""
    generator = np.random.default_rng(1)
    shape = batch, *shape
    if most:
        return jnp.asarray(generator.integers(0, most, shape))
    return jnp.asarray(generator.standard_normal(shape), jnp.float32)


def started(loss: Callable[..., Any], examples: tuple[Any, ...]) -> Params:
    params: Params = {}
    jax.eval_shape(partial(loss, params), *(x[0] for x in examples))
    return jax.tree.map(jnp.asarray, params)


def weight(params: Params, name: str, *shape: int) -> Array:
    """A weight. Where there is none of that name, a random one, a scale of 1, or a bias
    of 0.
    """
    if name not in params:
        start = np.full(shape, float(name.endswith("weight")))
        if len(shape) > 1:
            generator = np.random.default_rng(len(params))
            start = generator.standard_normal(shape) / np.prod(shape[:-1]) ** 0.5
        params[name] = start.astype(np.float32)
    return jnp.asarray(params[name])


def matrix(params: Params, name: str, x: Array, width: int) -> Array:
    """A layer of weights."""
    return x @ weight(params, f"{name}.weight", x.shape[-1], width)


def dense(params: Params, name: str, x: Array, width: int) -> Array:
    """A layer of weights and bias."""
    return matrix(params, name, x, width) + weight(params, f"{name}.bias", width)


def layer_norm(params: Params, name: str, x: Array, over: Any = -1) -> Array:
    """The layer norm with scale and bias, or one over other axes of groups."""
    shape, width = x.shape, x.shape[-1]
    if over != -1:
        x = x.reshape(*shape[:-1], 4, -1)
    x = x - jnp.mean(x, over, keepdims=True)
    x = x * lax.rsqrt(jnp.mean(x * x, over, keepdims=True) + 1e-5)
    x = x.reshape(shape) * weight(params, f"{name}.weight", width)
    return x + weight(params, f"{name}.bias", width)


def convolved(
    params: Params, name: str, x: Array, width: int, stride: int = 1
) -> Array:
    """A convolution of 3 x 3 without bias."""
    kernel = weight(params, f"{name}.weight", 3, 3, x.shape[-1], width)
    return convolved_by(x, kernel, stride, padding=[(1, 1), (1, 1)])


def convolved_by(image: Array, kernel: Array, stride: int = 1, **options: Any) -> Array:
    """A convolution of one image, or of one sequence, with options of `lax`."""
    dims = len(kernel.shape) - 2
    names = ("NHC", "HIO", "NHC") if dims == 1 else ("NHWC", "HWIO", "NHWC")
    out = lax.conv_general_dilated(
        image[None], kernel, (stride,) * dims, dimension_numbers=names, **options
    )
    return out[0]


def normed(params: Params, name: str, x: Array, width: int, stride: int = 1) -> Array:
    """A convolution and group norm."""
    x = convolved(params, name, x, width, stride)
    return jax.nn.silu(layer_norm(params, f"{name}.norm", x, over=(0, 1, 3)))


def block(params: Params, at: str, x: Array, is_causal: bool = True) -> Array:
    """Attention and a perceptron, each behind a layer norm."""
    length, width = x.shape
    y = layer_norm(params, f"{at}norm1", x)
    query, key, value = (
        matrix(params, f"{at}{name}", y, width).reshape(length, HEADS, -1)
        for name in ("query", "key", "value")
    )
    scores = jnp.einsum("thk,shk->hts", query, key) / np.sqrt(width // HEADS)
    if is_causal:
        scores = jnp.where(np.tril(np.ones((length, length), bool)), scores, -1e9)
    mixed = jnp.einsum("hts,shk->thk", jax.nn.softmax(scores), value)
    x = x + matrix(params, f"{at}out", mixed.reshape(length, width), width)
    y = dense(params, f"{at}up", layer_norm(params, f"{at}norm2", x), 4 * width)
    return x + dense(params, f"{at}down", jax.nn.gelu(y), width)


def cross_entropy(logits: Array, label: ArrayLike = 0) -> Array:
    """The loss of one label."""
    return -jax.nn.log_softmax(logits)[label]


def head_loss(params: Params, features: Array) -> Array:
    """The cross entropy of a linear layer with 10 classes."""
    return cross_entropy(dense(params, "head", features, 10))


def perceptron(
    params: Params, x: Array, label: ArrayLike = 0, *, width: int, layers: int = 2
) -> Array:
    """Hidden layers, and 10 classes."""
    for layer in range(layers):
        x = jax.nn.relu(dense(params, f"{2 * layer}", x, width))
    return cross_entropy(dense(params, f"{2 * layers}", x, 10), label)


def convolution(
    params: Params, x: Array, label: Array, *, size: int, channels: Any
) -> Array:
    """Three convolutions of 3 x 3, the second and third with stride 2, a mean over the
    image, 10 classes.
    """
    for name, width, stride in zip("024", channels[1:], (1, 2, 2)):
        out = convolved(params, name, x, width, stride)
        x = jax.nn.relu(out + weight(params, f"{name}.bias", width))
    return cross_entropy(dense(params, "8", jnp.mean(x, (0, 1)), 10), label)


def transformer(
    params: Params, words: Array, label: Array, *, width: int, length: int, layers: int
) -> Array:
    """A causal language model."""
    x = weight(params, "words.weight", WORDS, width)[words]
    x = x + weight(params, "places.weight", length, width)
    for number in range(layers):
        x = block(params, f"blocks.{number}.", x)
    return jnp.mean(jax.vmap(cross_entropy)(matrix(params, "head", x, WORDS), label))


def lstm_layer(params: Params, name: str, x: Array, width: int) -> tuple[Array, Array]:
    """The last state, and all of them."""

    def turn(carry: Any, x: Array) -> Any:
        state, cell = carry
        gates = dense(params, name, jnp.concatenate([x, state]), 4 * width)
        enter, forget, leave, value = jnp.split(gates, 4)
        cell = jax.nn.sigmoid(forget) * cell + jax.nn.sigmoid(enter) * jnp.tanh(value)
        state = jax.nn.sigmoid(leave) * jnp.tanh(cell)
        return (state, cell), state

    (state, _), states = lax.scan(turn, (jnp.zeros(width), jnp.zeros(width)), x)
    return state, states


def lstm(params: Params, x: Array) -> Array:
    state, _ = lstm_layer(params, "gates", x, 64)
    return cross_entropy(state)


def gru(params: Params, x: Array) -> Array:
    def turn(state: Array, x: Array) -> Any:
        inputs = jnp.split(dense(params, "in", x, 288), 3)
        states = jnp.split(dense(params, "state", state, 288), 3)
        reset = jax.nn.sigmoid(inputs[0] + states[0])
        update = jax.nn.sigmoid(inputs[1] + states[1])
        new = jnp.tanh(inputs[2] + reset * states[2])
        return update * state + (1 - update) * new, None

    return cross_entropy(lax.scan(turn, jnp.zeros(96), x)[0])


def mamba(params: Params, x: Array) -> Array:
    """A selective state space model with 8 numbers for each of 64 channels."""
    decay = -jnp.exp(weight(params, "decay", 64, 8))
    x = dense(params, "in", x, 64)
    step = jax.nn.softplus(dense(params, "step", x, 64))

    def turn(state: Array, now: Any) -> Any:
        x, step, write, read = now
        state = state * jnp.exp(step[:, None] * decay) + (step * x)[:, None] * write
        return state, state @ read + weight(params, "skip.weight", 64) * x

    turns = x, step, dense(params, "write", x, 8), dense(params, "read", x, 8)
    return jnp.mean(
        dense(params, "out", lax.scan(turn, jnp.zeros((64, 8)), turns)[1], 16) ** 2
    )


def unet(params: Params, x: Array) -> Array:
    top = normed(params, "first", x, 16)
    low = normed(params, "middle", normed(params, "down", top, 32, 2), 32)
    both = jnp.concatenate([top, low.repeat(2, 0).repeat(2, 1)], -1)
    return jnp.mean(normed(params, "last", normed(params, "up", both, 16), 4) ** 2)


def resnet(params: Params, x: Array) -> Array:
    x = normed(params, "first", x, 24)
    for layer in range(4):
        x = x + normed(params, f"{layer}", x, 24)
    return head_loss(params, jnp.mean(x, (0, 1)))


def vit(params: Params, x: Array) -> Array:
    x = dense(params, "patches", x, 96) + weight(params, "places", len(x), 96)
    for number in range(2):
        x = block(params, f"{number}.", x, is_causal=False)
    return head_loss(params, jnp.mean(x, 0))


def tied(params: Params, words: Array) -> Array:
    table = weight(params, "words", 512, 64)
    x = block(params, "1.", block(params, "0.", table[words]))
    return jnp.mean(jax.vmap(cross_entropy)(x @ table.T, words))


def experts(params: Params, x: Array) -> Array:
    """Each token goes to all of four experts, with the shares of a router."""
    share = jax.nn.softmax(dense(params, "router", x, 4))
    hidden = jnp.einsum("td,edh->teh", x, weight(params, "up", 4, 64, 128))
    down = weight(params, "down", 4, 128, 64)
    hidden = jax.nn.relu(hidden)
    x = x + jnp.einsum("te,teh,ehd->td", share, hidden, down)
    return head_loss(params, jnp.mean(x, 0))


def lora(params: Params, x: Array) -> Array:
    for layer in range(4):
        frozen: Params = {}
        low = matrix(params, f"b{layer}", matrix(params, f"a{layer}", x, 4), 256)
        x = jnp.tanh(matrix(frozen, "frozen", x, 256) + low)
    return jnp.mean(x**2)


def recommender(params: Params, rows: Array) -> Array:
    """Three rows of each of two tables, one by one, and a perceptron."""
    tables = [weight(params, name, 20000, 32) for name in ("users", "items")]
    x = [tables[k % 2][row] for k, row in enumerate(rows)]
    return perceptron(params, jnp.concatenate(x), width=64)


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
