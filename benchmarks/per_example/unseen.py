"""Twelve models on which no estimate of "auto" was set."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .losses import (
    Case,
    Params,
    block,
    convolved,
    cross_entropy,
    dense,
    drawn,
    layer_norm,
    matrix,
    normed,
    started,
    weight,
)

ROUTES = 2  # experts for each token


def tables(p: Params, rows: Any) -> Any:
    """A click model: a row of each of 20 tables, and a perceptron."""
    x = [weight(p, f"table{n}", 5000, 16)[row] for n, row in enumerate(rows)]
    x = jax.nn.relu(dense(p, "hidden", jnp.concatenate(x), 256))
    return cross_entropy(dense(p, "head", jax.nn.relu(dense(p, "1", x, 128)), 2))


def patches(p: Params, image: Any) -> Any:
    """A vision transformer whose patches are a convolution."""
    kernel = weight(p, "patches.weight", 4, 4, image.shape[-1], 96)
    x = convolved_by(image, kernel, stride=4).reshape(-1, 96)
    for n in range(2):
        x = block(p, f"{n}.", x, is_causal=False)
    return cross_entropy(dense(p, "head", jnp.mean(x, 0), 10))


def convolved_by(image: Any, kernel: Any, stride: int = 1, **options: Any) -> Any:
    """A convolution of one image, or of one sequence, of any window."""
    dims = ("NHWC", "HWIO", "NHWC") if image.ndim == 3 else ("NHC", "HIO", "NHC")
    strides = (stride,) * (image.ndim - 1)
    edges = "VALID" if stride > 1 else options.pop("padding", "SAME")
    out = lax.conv_general_dilated(
        image[None], kernel, strides, edges, dimension_numbers=dims, **options
    )
    return out[0]


def routed(p: Params, x: Any) -> Any:
    """A mixture of experts, whose weights are looked up for each token."""
    shares, experts = lax.top_k(jax.nn.softmax(matrix(p, "router", x, 8)), ROUTES)
    up = weight(p, "up", 8, 64, 128)[experts]
    down = weight(p, "down", 8, 128, 64)[experts]
    hidden = jax.nn.relu(jnp.einsum("td,tedh->teh", x, up))
    x = x + jnp.einsum("te,teh,tehd->td", shares, hidden, down)
    return cross_entropy(dense(p, "head", jnp.mean(x, 0), 10))


def einsums(p: Params, x: Any) -> Any:
    """A mixture of experts, of which each token takes two by a mask."""
    shares = jax.nn.softmax(matrix(p, "router", x, 8))
    least = lax.top_k(shares, ROUTES)[0][:, -1:]
    shares = jnp.where(shares >= least, shares, 0)
    hidden = jax.nn.relu(jnp.einsum("td,edh->teh", x, weight(p, "up", 8, 64, 128)))
    x = x + jnp.einsum("te,teh,ehd->td", shares, hidden, weight(p, "down", 8, 128, 64))
    return cross_entropy(dense(p, "head", jnp.mean(x, 0), 10))


def wavenet(p: Params, x: Any) -> Any:
    """Gated convolutions of a sequence, each with twice the dilation."""
    x = dense(p, "first", x, 32)
    for n in range(6):
        kernel = weight(p, f"{n}.weight", 2, 32, 64)
        step = 2**n
        y = convolved_by(x, kernel, padding=((step, 0),), rhs_dilation=(step,))
        gate, value = jnp.split(y, 2, -1)
        x = x + dense(p, f"{n}.out", jax.nn.sigmoid(gate) * jnp.tanh(value), 32)
    return jnp.mean(dense(p, "head", x, 16) ** 2)


def two_lstms(p: Params, x: Any) -> Any:
    def turn(name: str, carry: Any, x: Any) -> Any:
        state, cell = carry
        gates = dense(p, name, jnp.concatenate([x, state]), 4 * 96)
        enter, forget, leave, value = jnp.split(gates, 4)
        cell = jax.nn.sigmoid(forget) * cell + jax.nn.sigmoid(enter) * jnp.tanh(value)
        state = jax.nn.sigmoid(leave) * jnp.tanh(cell)
        return (state, cell), state

    for name in ("first", "second"):
        _, x = lax.scan(partial(turn, name), (jnp.zeros(96), jnp.zeros(96)), x)
    return cross_entropy(dense(p, "head", x[-1], 10))


def ode(p: Params, x: Any) -> Any:
    """A neural differential equation, by twelve steps of Runge and Kutta."""

    def slope(x: Any) -> Any:
        return dense(p, "out", jnp.tanh(dense(p, "in", x, 128)), 32)

    def step(x: Any, _: Any) -> Any:
        one = slope(x)
        two = slope(x + one / 24)
        three = slope(x + two / 24)
        four = slope(x + three / 12)
        return x + (one + 2 * two + 2 * three + four) / 72, None

    return cross_entropy(dense(p, "head", lax.scan(step, x, length=12)[0], 10))


def rotary(p: Params, words: Any) -> Any:
    """A decoder whose four queries share a key, with a vocabulary of 8,000."""
    x = weight(p, "words", 8000, 128)[words]
    length = len(words)
    angles = np.arange(length)[:, None] / 100.0 ** np.linspace(0, 1, 16)

    def turned(x: Any) -> Any:
        real, imaginary = jnp.split(x, 2, -1)
        cos, sin = np.float32(np.cos(angles)), np.float32(np.sin(angles))
        parts = real * cos - imaginary * sin, real * sin + imaginary * cos
        return jnp.concatenate(parts, -1)

    for n in range(2):
        y = layer_norm(p, f"{n}.norm1", x)
        query = matrix(p, f"{n}.query", y, 128).reshape(length, 4, 32)
        query = turned(jnp.moveaxis(query, 1, 0))
        key = turned(matrix(p, f"{n}.key", y, 32))
        scores = jnp.einsum("htk,sk->hts", query, key) / 6
        scores = jnp.where(np.tril(np.ones((length, length), bool)), scores, -1e9)
        value = matrix(p, f"{n}.value", y, 32)
        mixed = jnp.einsum("hts,sk->thk", jax.nn.softmax(scores), value)
        x = x + matrix(p, f"{n}.mix", mixed.reshape(length, 128), 128)
        y = layer_norm(p, f"{n}.norm2", x)
        gated = jax.nn.silu(matrix(p, f"{n}.gate", y, 256)) * matrix(
            p, f"{n}.up", y, 256
        )
        x = x + matrix(p, f"{n}.down", gated, 128)
    return jnp.mean(jax.vmap(cross_entropy)(matrix(p, "head", x, 8000), words))


def denoiser(p: Params, image: Any) -> Any:
    """A U-Net that is told the time."""
    time = jnp.mean(image)
    first = normed(p, "first", image, 32)
    middle = normed(p, "down", first, 64, 2)
    time = jax.nn.silu(dense(p, "time1", time[None], 64))
    middle = middle + dense(p, "time2", time, 64)
    low = normed(p, "middle", normed(p, "down2", middle, 128, 2), 128)
    low = low.repeat(2, 0).repeat(2, 1)
    up = normed(p, "up2", jnp.concatenate([middle, low], -1), 64)
    up = up.repeat(2, 0).repeat(2, 1)
    up = normed(p, "up", jnp.concatenate([first, up], -1), 32)
    return jnp.mean((convolved(p, "last", up, 3) - image) ** 2)


def hypernetwork(p: Params, x: Any) -> Any:
    """Weights for an example, made of a code of it."""
    code = jax.nn.relu(dense(p, "code", x, 32))
    w = dense(p, "make", code, 64 * 32).reshape(64, 32)
    return cross_entropy(dense(p, "head", jnp.tanh(x @ w), 10))


def graph(p: Params, x: Any) -> Any:
    """Messages along 96 edges of a graph of 32 nodes, in three rounds."""
    generator = np.random.default_rng(0)
    start, end = generator.integers(0, 32, (2, 96))
    x = dense(p, "first", x, 64)
    for n in range(3):
        pairs = jnp.concatenate([x[start], x[end]], -1)
        message = jax.nn.relu(dense(p, f"{n}.message", pairs, 64))
        received = jax.ops.segment_sum(message, end, 32)
        both = jnp.concatenate([x, received], -1)
        x = x + jax.nn.relu(dense(p, f"{n}.node", both, 64))
    return cross_entropy(dense(p, "head", jnp.mean(x, 0), 10))


def fourier(p: Params, x: Any) -> Any:
    """A Fourier neural operator on a line: weights by frequency."""
    x = dense(p, "first", x, 32)
    for n in range(4):
        waves = jnp.fft.rfft(x, axis=0)[:16]
        real = weight(p, f"{n}.real", 16, 32, 32)
        imaginary = weight(p, f"{n}.imaginary", 16, 32, 32)
        mixed = jnp.einsum("fi,fio->fo", waves, lax.complex(real, imaginary))
        y = jnp.fft.irfft(mixed, len(x), axis=0)
        x = jax.nn.gelu(y + dense(p, f"{n}.skip", x, 32))
    return jnp.mean(dense(p, "head", x, 1) ** 2)


# The loss, the shape of an example, what integers are below, and the batch.
MODELS = {
    "20 tables": (tables, (20,), 5000, 128),
    "ViT, patches by convolution": (patches, (32, 32, 3), 0, 32),
    "experts by lookup": (routed, (16, 64), 0, 32),
    "experts by mask": (einsums, (16, 64), 0, 32),
    "WaveNet": (wavenet, (256, 8), 0, 16),
    "two LSTMs": (two_lstms, (40, 32), 0, 32),
    "neural ODE": (ode, (32,), 0, 64),
    "decoder, vocabulary 8,000": (rotary, (64,), 8000, 8),
    "U-Net with time": (denoiser, (16, 16, 3), 0, 16),
    "hypernetwork": (hypernetwork, (64,), 0, 32),
    "graph network": (graph, (32, 16), 0, 32),
    "Fourier operator": (fourier, (128, 2), 0, 16),
}


def unseen(quick: bool) -> list[Case]:
    """The models, or the first one with two examples."""
    cases = []
    for name, (loss, shape, most, batch) in MODELS.items():
        examples = (drawn(shape, 2 if quick else batch, most),)
        params = started(loss, examples)
        cases.append(Case(name, name, {}, loss, params, examples, 1.0))
        if quick:
            break
    return cases
