"""Trains a transformer by gradient release, which never holds all gradients, and by the
usual step, and shows that with two passes both are the same run.

What it shows. The network reads the English prose of Python's own help pages. The usual
step makes all gradients, clips their global norm and hands them to Adam. A released
step does that for one layer at a time, for the same loss.

What it prints. The last loss and the time of a step: of the usual step, of the usual
one with jax.checkpoint, and of released ones in one backward pass and in two, which
are exactly the global clip.
"""

import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _shared import cross_entropy, read_text, run

import optaxclip

LIMIT, HEADS, LENGTH = 0.5, 4, 64
ADAM = optax.adam(2e-3)
USUAL = optax.chain(optaxclip.clip_by_global_norm(LIMIT), ADAM)
OPTIONS = {
    "one pass": {"max_norm": LIMIT},
    "two passes": {"max_norm": LIMIT, "passes": 2},
}


def main(steps: int = 100) -> dict[str, Any]:
    """Returns the losses of each way to train."""
    text, losses = read_text(), {}
    random = np.random.default_rng(0)
    starts = random.integers(len(text.training) - LENGTH - 1, size=(steps, 16, 1))
    for name in ("usual", "remat", *OPTIONS):
        params, timed = new_params(len(text.alphabet), 4, 64), []
        init, step = training(name)
        windows = text.training[starts[0] + np.arange(LENGTH + 1)]
        state = init(params, windows)
        step = jax.jit(step, donate_argnums=(0, 1))
        for start in starts:
            begin = time.perf_counter()
            windows = text.training[start + np.arange(LENGTH + 1)]
            params, state, loss = step(params, state, windows)
            timed.append((float(loss), time.perf_counter() - begin))
        losses[name], seconds = np.transpose(timed)
        milliseconds = 1000 * np.median(seconds)
        print(f"{name:10} loss {timed[-1][0]:.4f}  {milliseconds:.1f} ms", flush=True)
    return losses


def new_params(words: int, layers: int, width: int) -> Any:
    """The weights. Those of all layers are stacked."""
    random = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(random.normal(size=shape) / width**0.5, jnp.float32)

    shapes = {"qkv": (1, 3), "out": (1, 1), "up": (1, 4), "down": (4, 1)}
    return {
        "layers": {
            k: normal(layers, a * width, b * width) for k, (a, b) in shapes.items()
        },
        "words": normal(words, width),
        "places": normal(LENGTH, width),
    }


def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
    qkv = jax.nn.standardize(x) @ weights["qkv"]
    qkv = jnp.split(qkv.reshape(*x.shape[:2], 3 * HEADS, -1), 3, axis=2)
    mixed = jax.nn.dot_product_attention(*qkv, is_causal=True)
    x = x + mixed.reshape(x.shape) @ weights["out"]
    x = x + jax.nn.gelu(jax.nn.standardize(x) @ weights["up"]) @ weights["down"]
    return x, None


def loss_of(params: Any, windows: jax.Array, name: str = "remat") -> jax.Array:
    """The loss, with layers that are run as the name says."""
    x = params["words"][windows[:, :-1]] + params["places"]
    run = layer if name == "usual" else jax.checkpoint(layer)
    layers = params["layers"]["qkv"].shape[0]
    unroll = layers if name == "unrolled remat" else 1
    x, _ = jax.lax.scan(run, x, params["layers"], unroll=unroll)
    logits = jax.nn.standardize(x) @ params["words"].T
    return cross_entropy(logits, windows[:, 1:])


def training(name: str) -> tuple[Any, Any]:
    """The init and the step of a way to train."""
    if name in OPTIONS:
        trainer = optaxclip.release(loss_of, ADAM, **OPTIONS[name])
        return trainer.init, trainer.step
    grad = jax.value_and_grad(partial(loss_of, name=name))

    def init(params: Any, windows: jax.Array) -> Any:
        return USUAL.init(params)

    def step(params: Any, state: Any, windows: jax.Array) -> Any:
        loss, grads = grad(params, windows)
        updates, state = USUAL.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return init, step


if __name__ == "__main__":
    run(main)
