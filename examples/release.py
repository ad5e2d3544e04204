"""Trains a transformer by gradient release, which never holds all gradients, and by the
usual step, and shows that with the same global limit both are the same run.

What it shows. The network reads the English prose of Python's own help pages. The usual
step makes all gradients, clips their global norm and hands them to Adam. A released
step does that for one layer at a time.

What it prints. The last loss and the time of a step: of the usual step, and of released
ones that clip each tensor, the global norm, or both, the latter with the global factor
of the step before. With --device, temporary memory and GFLOP of a larger network:

    PYTHONPATH=. .venv-tpu/bin/python examples/release.py --device v5e
"""

import os
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
TENSORS = {"layer_clip": optaxclip.clip_by_tensor_norm(LIMIT / 5)}
GLOBAL = {"max_norm": LIMIT}
OPTIONS = {"tensors": TENSORS, "global": GLOBAL}
OPTIONS["delayed"] = TENSORS | GLOBAL | {"delayed": True}


def main(steps: int = 100, device: str = "") -> dict[str, Any]:
    """Returns the losses of each way to train, or its temporary bytes."""
    if device:
        from benchmarks.compiled.targets import environment_of

        # Read when JAX looks for devices, which it has not done yet.
        os.environ |= environment_of(device).variables
        jax.config.update("jax_platforms", "cpu")
        return {name: compiled(name, device) for name in ("usual", "remat", *OPTIONS)}
    text, losses = read_text(), {}
    random = np.random.default_rng(0)
    starts = random.integers(len(text.training) - LENGTH - 1, size=(steps, 16, 1))
    for name in ("usual", *OPTIONS):
        params, seen = new_params(len(text.alphabet), 4, 64), []
        init, step = training(name)
        state, step = init(params), jax.jit(step, donate_argnums=(0, 1))
        for start in starts:
            begin = time.perf_counter()
            windows = text.training[start + np.arange(LENGTH + 1)]
            params, state, loss = step(params, state, windows)
            seen.append((float(loss), time.perf_counter() - begin))
        losses[name], seconds = np.transpose(seen)
        milliseconds = 1000 * np.median(seconds)
        print(f"{name:8} loss {seen[-1][0]:.4f}  {milliseconds:.1f} ms", flush=True)
    return losses


def new_params(words: int, layers: int, width: int) -> Any:
    """The stack of layers, and all other weights."""
    random = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(random.normal(size=shape) / width**0.5, jnp.float32)

    shapes = {"qkv": (1, 3), "out": (1, 1), "up": (1, 4), "down": (4, 1)}
    stack = {k: normal(layers, a * width, b * width) for k, (a, b) in shapes.items()}
    return stack, {"words": normal(words, width), "places": normal(LENGTH, width)}


def embed(rest: Any, windows: jax.Array) -> jax.Array:
    return rest["words"][windows[:, :-1]] + rest["places"]


def layer(weights: Any, x: jax.Array, windows: jax.Array) -> jax.Array:
    qkv = jax.nn.standardize(x) @ weights["qkv"]
    qkv = jnp.split(qkv.reshape(*x.shape[:2], 3 * HEADS, -1), 3, axis=2)
    mixed = jax.nn.dot_product_attention(*qkv, is_causal=True)
    x = x + mixed.reshape(x.shape) @ weights["out"]
    return x + jax.nn.gelu(jax.nn.standardize(x) @ weights["up"]) @ weights["down"]


def head(rest: Any, x: jax.Array, windows: jax.Array) -> jax.Array:
    return cross_entropy(jax.nn.standardize(x) @ rest["words"].T, windows[:, 1:])


def loss_of(params: Any, windows: jax.Array, layer: Any) -> jax.Array:
    x = embed(params[1], windows)
    x, _ = jax.lax.scan(lambda x, own: (layer(own, x, windows), None), x, params[0])
    return head(params[1], x, windows)


def training(name: str) -> tuple[Any, Any]:
    """The init and the step of a way to train."""
    if name in OPTIONS:
        trainer = optaxclip.release(embed, layer, head, ADAM, **OPTIONS[name])
        return trainer.init, trainer.step
    own = jax.checkpoint(layer) if name == "remat" else layer
    grad = jax.value_and_grad(partial(loss_of, layer=own))

    def step(params: Any, state: Any, windows: jax.Array) -> Any:
        loss, grads = grad(params, windows)
        updates, state = USUAL.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return USUAL.init, step


def compiled(name: str, device: str) -> int:
    from benchmarks.compiled.step import compiled_for, described
    from benchmarks.compiled.targets import placement

    init, step = training(name)
    params = jax.eval_shape(lambda: new_params(512, 16, 1024))
    batch = jax.ShapeDtypeStruct((16, LENGTH + 1), np.int32)
    own = described((params, jax.eval_shape(init, params), batch), placement(device))
    program, _ = compiled_for(device, step, *own, donate=(0, 1))
    temporary = program.memory_analysis().temp_size_in_bytes
    flops = (program.cost_analysis() or {}).get("flops", np.nan)
    print(f"{name:8} {temporary / 1e6:5.0f} MB  {flops / 1e9:.1f} GFLOP", flush=True)
    return temporary


if __name__ == "__main__":
    run(main, device="compile for this device instead: h100 or v5e")
