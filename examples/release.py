"""Trains a transformer by gradient release, which never holds all gradients, and by the
usual step, and shows that with two passes both are the same run.

What it shows. The network reads the English prose of Python's own help pages. The usual
step makes all gradients, clips their global norm and hands them to Adam. A released
step does that for one layer at a time, for the same loss.

What it prints. The last loss and the time of a step: of the usual step, of the usual
one with jax.checkpoint, and of released ones in one backward pass and in two. Two
passes give exactly the global clip. With one pass no step is longer than the limit.

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
    starts = random.integers(len(text.training) - LENGTH - 1, size=(steps, BATCH, 1))
    return {name: train(name, text, starts) for name in TRAINERS}


def train(name: str, text: Text, starts: np.ndarray) -> Losses:
    trainer = TRAINERS[name]
    step = jax.jit(trainer.step, donate_argnums=(0, 1))
    batches = [text.training[start + np.arange(LENGTH + 1)] for start in starts]
    params = new_params(len(text.alphabet), layers=4, width=64)
    state = trainer.init(params, batches[0])
    losses = []
    seconds = []
    for windows in batches:
        begin = time.perf_counter()
        params, state, loss = step(params, state, windows)
        losses.append(float(loss))
        seconds.append(time.perf_counter() - begin)
    milliseconds = 1000 * np.median(seconds)
    print(f"{name:10} loss {losses[-1]:.4f}  {milliseconds:.1f} ms", flush=True)
    return np.array(losses)


def new_params(words: int, layers: int, width: int) -> Params:
    """The weights. Those of all layers are stacked."""
    random = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(random.normal(size=shape) / width**0.5, jnp.float32)

    return {
        "layers": {
            "qkv": normal(layers, width, 3 * width),
            "out": normal(layers, width, width),
            "up": normal(layers, width, 4 * width),
            "down": normal(layers, 4 * width, width),
        },
        "words": normal(words, width),
        "places": normal(LENGTH, width),
    }


def layer(x: jax.Array, weights: Params) -> tuple[jax.Array, None]:
    qkv = jax.nn.standardize(x) @ weights["qkv"]
    qkv = qkv.reshape(*x.shape[:2], 3 * HEADS, -1)
    query, key, value = jnp.split(qkv, 3, axis=2)
    mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    x = x + mixed.reshape(x.shape) @ weights["out"]
    hidden = jax.nn.gelu(jax.nn.standardize(x) @ weights["up"])
    return x + hidden @ weights["down"], None


REMAT_LAYER = jax.checkpoint(layer)  # computes activations anew on the way back


def loss_of(
    params: Params,
    windows: jax.Array,
    layer: Callable[..., Any] = REMAT_LAYER,
    unroll: int = 1,
) -> jax.Array:
    """The mean loss of int[batch, LENGTH + 1]. `unroll` is that of `jax.lax.scan`."""
    x = params["words"][windows[:, :-1]] + params["places"]
    x, _ = jax.lax.scan(layer, x, params["layers"], unroll=unroll)
    logits = jax.nn.standardize(x) @ params["words"].T
    return cross_entropy(logits, windows[:, 1:])


def usual(**options: Any) -> Trainer:
    """The usual step, with options of the loss."""
    optimizer = optax.chain(optaxclip.clip_by_global_norm(LIMIT), ADAM)

    def init(params: Params, windows: jax.Array) -> Any:
        return optimizer.init(params)

    def step(params: Params, state: Any, windows: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, windows, **options)
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
