"""Twelve models on which no estimate of "auto" was set."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .losses import (
    Case,
    Params,
    block,
    convolved,
    convolved_by,
    cross_entropy,
    dense,
    head_loss,
    layer_norm,
    lstm_layer,
    matrix,
    normed,
    small_case,
    weight,
)

ROUTES = 2  # experts for each token


def tables(params: Params, rows: Array) -> Array:
    """A click model: a row of each of 20 tables, and a perceptron."""
    x = [weight(params, f"table{n}", 5000, 16)[row] for n, row in enumerate(rows)]
    x = jax.nn.relu(dense(params, "hidden", jnp.concatenate(x), 256))
    x = jax.nn.relu(dense(params, "1", x, 128))
    return cross_entropy(dense(params, "head", x, 2))


def patches(params: Params, image: Array) -> Array:
    """A vision transformer whose patches are a convolution."""
    kernel = weight(params, "patches.weight", 4, 4, image.shape[-1], 96)
    x = convolved_by(image, kernel, stride=4, padding="VALID").reshape(-1, 96)
    for n in range(2):
        x = block(params, f"{n}.", x, is_causal=False)
    return head_loss(params, jnp.mean(x, 0))


def routed(params: Params, x: Array) -> Array:
    """A mixture of experts, whose weights are looked up for each token."""
    shares, experts = lax.top_k(jax.nn.softmax(matrix(params, "router", x, 8)), ROUTES)
    up = weight(params, "up", 8, 64, 128)[experts]
    down = weight(params, "down", 8, 128, 64)[experts]
    hidden = jax.nn.relu(jnp.einsum("td,tedh->teh", x, up))
    x = x + jnp.einsum("te,teh,tehd->td", shares, hidden, down)
    return head_loss(params, jnp.mean(x, 0))


def einsums(params: Params, x: Array) -> Array:
    """A mixture of experts, of which each token takes two by a mask."""
    shares = jax.nn.softmax(matrix(params, "router", x, 8))
    least = lax.top_k(shares, ROUTES)[0][:, -1:]
    shares = jnp.where(shares >= least, shares, 0)
    hidden = jax.nn.relu(jnp.einsum("td,edh->teh", x, weight(params, "up", 8, 64, 128)))
    x = x + jnp.einsum(
        "te,teh,ehd->td", shares, hidden, weight(params, "down", 8, 128, 64)
    )
    return head_loss(params, jnp.mean(x, 0))


def wavenet(params: Params, x: Array) -> Array:
    """Gated convolutions of a sequence, each with twice the dilation."""
    x = dense(params, "first", x, 32)
    for n in range(6):
        kernel = weight(params, f"{n}.weight", 2, 32, 64)
        step = 2**n
        y = convolved_by(x, kernel, padding=((step, 0),), rhs_dilation=(step,))
        gate, value = jnp.split(y, 2, -1)
        x = x + dense(params, f"{n}.out", jax.nn.sigmoid(gate) * jnp.tanh(value), 32)
    return jnp.mean(dense(params, "head", x, 16) ** 2)


def two_lstms(params: Params, x: Array) -> Array:
    _, x = lstm_layer(params, "first", x, 96)
    _, x = lstm_layer(params, "second", x, 96)
    return head_loss(params, x[-1])


def ode(params: Params, x: Array) -> Array:
    """A neural differential equation, by twelve steps of Runge and Kutta."""

    def slope(x: Array) -> Array:
        return dense(params, "out", jnp.tanh(dense(params, "in", x, 128)), 32)

    def step(x: Array, _: None) -> Any:
        one = slope(x)
        two = slope(x + one / 24)
        three = slope(x + two / 24)
        four = slope(x + three / 12)
        return x + (one + 2 * two + 2 * three + four) / 72, None

    return head_loss(params, lax.scan(step, x, length=12)[0])


def rotary(params: Params, words: Array) -> Array:
    """A decoder whose four queries share a key, with a vocabulary of 8,000."""
    x = weight(params, "words", 8000, 128)[words]
    length = len(words)
    angles = np.arange(length)[:, None] / 100.0 ** np.linspace(0, 1, 16)

    def turned(x: Array) -> Array:
        real, imaginary = jnp.split(x, 2, -1)
        cos, sin = np.float32(np.cos(angles)), np.float32(np.sin(angles))
        parts = real * cos - imaginary * sin, real * sin + imaginary * cos
        return jnp.concatenate(parts, -1)

    for n in range(2):
        y = layer_norm(params, f"{n}.norm1", x)
        query = matrix(params, f"{n}.query", y, 128).reshape(length, 4, 32)
        query = turned(jnp.moveaxis(query, 1, 0))
        key = turned(matrix(params, f"{n}.key", y, 32))
        scores = jnp.einsum("htk,sk->hts", query, key) / 6
        scores = jnp.where(np.tril(np.ones((length, length), bool)), scores, -1e9)
        value = matrix(params, f"{n}.value", y, 32)
        mixed = jnp.einsum("hts,sk->thk", jax.nn.softmax(scores), value)
        x = x + matrix(params, f"{n}.mix", mixed.reshape(length, 128), 128)
        y = layer_norm(params, f"{n}.norm2", x)
        gate = jax.nn.silu(matrix(params, f"{n}.gate", y, 256))
        hidden = gate * matrix(params, f"{n}.up", y, 256)
        x = x + matrix(params, f"{n}.down", hidden, 128)
    return jnp.mean(jax.vmap(cross_entropy)(matrix(params, "head", x, 8000), words))


def denoiser(params: Params, image: Array) -> Array:
    """A U-Net that is told the time."""
    time = jnp.mean(image)
    first = normed(params, "first", image, 32)
    middle = normed(params, "down", first, 64, 2)
    time = jax.nn.silu(dense(params, "time1", time[None], 64))
    middle = middle + dense(params, "time2", time, 64)
    low = normed(params, "middle", normed(params, "down2", middle, 128, 2), 128)
    low = low.repeat(2, 0).repeat(2, 1)
    up = normed(params, "up2", jnp.concatenate([middle, low], -1), 64)
    up = up.repeat(2, 0).repeat(2, 1)
    up = normed(params, "up", jnp.concatenate([first, up], -1), 32)
    return jnp.mean((convolved(params, "last", up, 3) - image) ** 2)


def hypernetwork(params: Params, x: Array) -> Array:
    """Weights for an example, made of a code of it."""
    code = jax.nn.relu(dense(params, "code", x, 32))
    w = dense(params, "make", code, 64 * 32).reshape(64, 32)
    return head_loss(params, jnp.tanh(x @ w))


def graph(params: Params, x: Array) -> Array:
    """Messages along 96 edges of a graph of 32 nodes, in three rounds."""
    generator = np.random.default_rng(0)
    start, end = generator.integers(0, 32, (2, 96))
    x = dense(params, "first", x, 64)
    for n in range(3):
        pairs = jnp.concatenate([x[start], x[end]], -1)
        message = jax.nn.relu(dense(params, f"{n}.message", pairs, 64))
        received = jax.ops.segment_sum(message, end, 32)
        both = jnp.concatenate([x, received], -1)
        x = x + jax.nn.relu(dense(params, f"{n}.node", both, 64))
    return head_loss(params, jnp.mean(x, 0))


def fourier(params: Params, x: Array) -> Array:
    """A Fourier neural operator on a line: weights by frequency."""
    x = dense(params, "first", x, 32)
    for n in range(4):
        waves = jnp.fft.rfft(x, axis=0)[:16]
        real = weight(params, f"{n}.real", 16, 32, 32)
        imaginary = weight(params, f"{n}.imaginary", 16, 32, 32)
        mixed = jnp.einsum("fi,fio->fo", waves, lax.complex(real, imaginary))
        y = jnp.fft.irfft(mixed, len(x), axis=0)
        x = jax.nn.gelu(y + dense(params, f"{n}.skip", x, 32))
    return jnp.mean(dense(params, "head", x, 1) ** 2)


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
    if quick:
        loss, shape, most, _ = MODELS["20 tables"]
        return [small_case("20 tables", loss, shape, most, batch=2)]
    return [small_case(name, *model) for name, model in MODELS.items()]
