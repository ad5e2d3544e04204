"""Trains a transformer by gradient release, which never holds all gradients, and by the
usual step, and shows that with two passes both are the same run.

What it shows. The network reads the English prose of Python's own help pages. The usual
step makes all gradients, clips their global norm and hands them to Adam. A released
step does that for one layer at a time, for the same loss.

What it prints. The last loss and the time of a step: of the usual step, of the usual
one with jax.checkpoint, and of released ones in one backward pass and in two. Two
passes give exactly the global clip. With one pass no step is longer than the limit.

From `_shared.py` come text, loss and command line.

    python examples/release.py --steps 100
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _shared import Text, cross_entropy, read_text, run
from jax import Array

import optaxclip

LIMIT = 0.5
HEADS = 4
LENGTH = 64  # characters of a window that the network predicts
BATCH = 16
ADAM = optax.adam(2e-3)

Params = dict[str, Any]
Losses = np.ndarray  # float[steps]


class Trainer(NamedTuple):
    """A way to train."""

    init: Callable[..., Any]  # (params, windows) -> state
    step: Callable[..., Any]  # (params, state, windows) -> (params, state, loss)


def main(steps: int = 100) -> dict[str, Losses]:
    """Returns the losses of each way to train."""
    text = read_text()
    random = np.random.default_rng(0)
    size = steps, BATCH, 1
    start_count = len(text.training) - LENGTH - 1
    starts = random.integers(start_count, size=size)
    losses = {}
    for name in TRAINERS:
        losses[name] = train(name, text, starts)
    return losses


def train(name: str, text: Text, starts: np.ndarray) -> Losses:
    trainer = TRAINERS[name]
    step = jax.jit(trainer.step, donate_argnums=(0, 1))
    places = starts + np.arange(LENGTH + 1)
    batches = list(text.training[places])
    words = len(text.alphabet)
    params = new_params(words, layers=4, width=64)
    state = trainer.init(params, batches[0])
    losses = []
    seconds = []
    for windows in batches:
        begin = time.perf_counter()
        params, state, loss = step(params, state, windows)
        losses.append(float(loss))
        end = time.perf_counter()
        seconds.append(end - begin)
    milliseconds = 1000 * np.median(seconds)
    print(f"{name:10} loss {losses[-1]:.4f}  {milliseconds:.1f} ms", flush=True)
    return np.array(losses)


def new_params(words: int, layers: int, width: int) -> Params:
    """The weights. Those of all layers are stacked."""
    random = np.random.default_rng(0)

    def normal(*shape: int) -> Array:
        weights = random.normal(size=shape) / width**0.5
        return jnp.asarray(weights, jnp.float32)

    layer_weights = {
        "qkv": normal(layers, width, 3 * width),
        "out": normal(layers, width, width),
        "up": normal(layers, width, 4 * width),
        "down": normal(layers, 4 * width, width),
    }
    return {
        "layers": layer_weights,
        "words": normal(words, width),
        "places": normal(LENGTH, width),
    }


def layer(x: Array, weights: Params) -> tuple[Array, None]:
    batch, length, _ = x.shape
    inputs = jax.nn.standardize(x)
    qkv = inputs @ weights["qkv"]
    heads = 3 * HEADS
    qkv = qkv.reshape(batch, length, heads, -1)
    query, key, value = jnp.split(qkv, 3, axis=2)
    mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    mixed = mixed.reshape(x.shape)
    x = x + mixed @ weights["out"]
    inputs = jax.nn.standardize(x)
    hidden = jax.nn.gelu(inputs @ weights["up"])
    return x + hidden @ weights["down"], None


REMAT_LAYER = jax.checkpoint(layer)  # computes activations anew on the way back


def loss_of(
    params: Params,
    windows: Array,
    layer: Callable[..., Any] = REMAT_LAYER,
    unroll: int = 1,
) -> Array:
    """The mean loss of int[batch, LENGTH + 1]. `unroll` is that of `jax.lax.scan`."""
    words = params["words"]
    inputs = windows[:, :-1]
    labels = windows[:, 1:]
    x = words[inputs] + params["places"]
    layers = params["layers"]
    x, _ = jax.lax.scan(layer, x, layers, unroll=unroll)
    outputs = jax.nn.standardize(x)
    logits = outputs @ words.T
    return cross_entropy(logits, labels)


def usual(**options: Any) -> Trainer:
    """The usual step, with options of the loss."""
    clipper = optaxclip.clip_by_global_norm(LIMIT)
    optimizer = optax.chain(clipper, ADAM)
    loss_and_grads = jax.value_and_grad(loss_of)

    def init(params: Params, windows: Array) -> Any:
        return optimizer.init(params)

    def step(params: Params, state: Any, windows: Array) -> Any:
        loss, grads = loss_and_grads(params, windows, **options)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return Trainer(init, step)


TRAINERS = {
    "usual": usual(layer=layer),
    "remat": usual(),
    "one pass": optaxclip.release(loss_of, ADAM, max_norm=LIMIT),
    "two passes": optaxclip.release(loss_of, ADAM, max_norm=LIMIT, passes=2),
}


if __name__ == "__main__":
    run(main)
