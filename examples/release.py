"""Trains a transformer by gradient release, without ever holding all gradients, and by
the usual step, and shows that both are the same run.

What it shows. The network reads the English prose of Python's own help pages. The usual
step makes all gradients, clips their global norm and hands them to Adam. A released step
does that for one layer at a time. It takes longer on a CPU, and needs less memory on an
accelerator.

What it prints. The last loss and the time of a step, or, with --device h100 or v5e, the
memory and the arithmetic of a larger network compiled for that device, which need not be
here. `python -m benchmarks --only whole_step_compiled` says how to make an environment
for that.

    python examples/release.py --steps 100
    PYTHONPATH=. .venv-tpu/bin/python examples/release.py --device v5e
"""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _shared import cross_entropy, read_text, run

import optaxclip

HEADS, LENGTH = 4, 64
ADAM = optax.adam(2e-3)
GLOBAL = optax.chain(optaxclip.clip_by_global_norm(0.5), ADAM)
TENSOR = optaxclip.clip_by_tensor_norm(0.1)
RELEASED = {
    "released, tensors": {"layer_clip": TENSOR},
    "released, global": {"max_norm": 0.5},
    "released, delayed": {"layer_clip": TENSOR, "max_norm": 0.5, "delayed": True},
}


def main(steps: int = 100, device: str = "") -> dict[str, Any]:
    """Returns the losses of every way to train, or its memory in bytes."""
    text = read_text()
    if device:
        return {name: compiled(device, name) for name in ("remat", "usual", *RELEASED)}
    starts = np.random.default_rng(0).integers(len(text.training) - 65, size=(steps, 16))
    losses = {}
    print("step               last loss  ms a step")
    for name in ("usual", *RELEASED):
        params, seen = new_params(len(text.alphabet), 4, 64), []
        init, step = training(name)
        state, step = init(params), jax.jit(step, donate_argnums=(0, 1))
        for places in starts:
            begin = time.perf_counter()
            windows = text.training[places[:, None] + np.arange(LENGTH + 1)]
            params, state, loss = step(params, state, windows)
            seen.append((float(loss), time.perf_counter() - begin))
        losses[name], seconds = np.transpose(seen)
        milliseconds = 1000 * np.median(seconds)
        print(f"{name:17}  {losses[name][-1]:9.4f}  {milliseconds:9.1f}", flush=True)
    return losses


def new_params(words: int, layers: int, width: int) -> Any:
    """The stack of layers, and all other weights."""
    random = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(random.normal(size=shape) / width**0.5, jnp.float32)

    qkv, up = normal(layers, width, 3 * width), normal(layers, width, 4 * width)
    out, down = normal(layers, width, width), normal(layers, 4 * width, width)
    stack = {"qkv": qkv, "out": out, "up": up, "down": down / 2}
    return stack, {"words": normal(words, width), "places": normal(LENGTH, width)}


def embed(rest: Any, windows: jax.Array) -> jax.Array:
    return rest["words"][windows[:, :-1]] + rest["places"]


def layer(weights: Any, x: jax.Array, windows: jax.Array) -> jax.Array:
    qkv = jax.nn.standardize(x) @ weights["qkv"]
    q, k, v = jnp.split(qkv.reshape(*x.shape[:2], 3 * HEADS, -1), 3, axis=2)
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + mixed.reshape(x.shape) @ weights["out"]
    return x + jax.nn.gelu(jax.nn.standardize(x) @ weights["up"]) @ weights["down"]


def head(rest: Any, x: jax.Array, windows: jax.Array) -> jax.Array:
    return cross_entropy(jax.nn.standardize(x) @ rest["words"].T, windows[:, 1:])


def training(name: str) -> tuple[Any, Any]:
    """The init and the step of one way to train."""
    if name in RELEASED:
        return optaxclip.release(embed, layer, head, ADAM, **RELEASED[name])
    body = jax.checkpoint(layer) if name == "remat" else layer

    def loss(params: Any, windows: jax.Array) -> jax.Array:
        stack, rest = params
        x = embed(rest, windows)
        x, _ = jax.lax.scan(lambda x, own: (body(own, x, windows), None), x, stack)
        return head(rest, x, windows)

    def step(params: Any, state: Any, windows: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, windows)
        updates, state = GLOBAL.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return GLOBAL.init, step


def compiled(device: str, name: str) -> int:
    """Prints what a step needs beside params and state. Returns its temporary bytes."""
    from benchmarks.compiled.step import compiled_for, described
    from benchmarks.compiled.targets import placement

    init, step = training(name)
    params = jax.eval_shape(lambda: new_params(512, 16, 1024))
    windows = jax.ShapeDtypeStruct((16, LENGTH + 1), np.int32)
    given = described((params, jax.eval_shape(init, params), windows), placement(device))
    program, _ = compiled_for(device, step, *given, donate=(0, 1))
    bytes = program.memory_analysis().temp_size_in_bytes
    print(f"{name:17} {bytes / 1e6:7.0f} MB", (program.cost_analysis() or {}).get("flops"))
    return bytes


if __name__ == "__main__":
    run(main, device="compile for this device instead: h100 or v5e")
