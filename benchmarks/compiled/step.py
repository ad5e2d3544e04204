"""An optimizer step, compiled for a described device and counted."""

import math
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jax
import optax

import optaxclip

from . import program, targets

Shapes = list[tuple[int, ...]]
Make = Callable[[], optax.GradientTransformation]


def _before_adam(make_clipper: Make) -> Make:
    return lambda: optax.chain(make_clipper(), optax.adam(1e-3))


def _after_adam(make_clipper: Make) -> Make:
    return lambda: optax.chain(
        optax.scale_by_adam(), make_clipper(), optax.scale(-1e-3)
    )


def _newton_schulz() -> optax.GradientTransformation:
    return optaxclip.clip_by_spectral_norm(1.0, method="newton_schulz")


# Those with a name of optax's are compared with the one of ours that stands before.
STEPS: dict[str, Make] = {
    "none": lambda: optax.adam(1e-3),
    "global norm": _before_adam(lambda: optaxclip.clip_by_global_norm(1.0)),
    "optax, global norm": _before_adam(lambda: optax.clip_by_global_norm(1.0)),
    "tensor norm": _before_adam(lambda: optaxclip.clip_by_tensor_norm(0.1)),
    "tensor RMS": _before_adam(lambda: optaxclip.clip_by_tensor_rms(1.0)),
    "optax, tensor RMS": _before_adam(lambda: optax.clip_by_block_rms(1.0)),
    "tensor RMS, after Adam": _after_adam(lambda: optaxclip.clip_by_tensor_rms(1.0)),
    "optax, tensor RMS, after Adam": _after_adam(lambda: optax.clip_by_block_rms(1.0)),
    "AGC": _before_adam(lambda: optaxclip.adaptive_grad_clip(0.01)),
    "optax, AGC": _before_adam(lambda: optax.adaptive_grad_clip(0.01)),
    "skip_nonfinite": lambda: optaxclip.skip_nonfinite(optax.adam(1e-3)),
    "optax, apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-3), 5),
    "autoclip": _before_adam(lambda: optaxclip.autoclip(10)),
    "zclip": _before_adam(optaxclip.zclip),
    "adagc": _before_adam(optaxclip.adagc),
    "global norm, order inf": _before_adam(
        lambda: optaxclip.clip_by_global_norm(1.0, ord=math.inf)
    ),
    "clippy, after Adam": lambda: optax.chain(optax.adam(1e-3), optaxclip.clippy()),
    "spectral norm, Newton-Schulz": _before_adam(_newton_schulz),
}


def gpt2(layers: int, width: int = 768, words: int = 50304) -> Shapes:
    """The shapes of GPT-2, with a vocabulary that 16 devices can divide."""
    block: Shapes = [
        (width,),
        (width,),
        (width, 3 * width),
        (3 * width,),
        (width, width),
        (width,),
        (width,),
        (width,),
        (width, 4 * width),
        (4 * width,),
        (4 * width, width),
        (width,),
    ]
    return [(words, width), (1024, width), *block * layers, (width,), (width,)]


def llama(layers: int) -> Shapes:
    """The shapes of Llama 3 8B without its last matrix, attention as in flax."""
    width, heads, keys, size, inner = 4096, 32, 8, 128, 14336
    block: Shapes = [
        (width, heads, size),
        (width, keys, size),
        (width, keys, size),
        (heads, size, width),
        (width, inner),
        (width, inner),
        (inner, width),
        (width,),
        (width,),
    ]
    return [(128256, width), *block * layers, (width,)]


def actor_critic() -> Shapes:
    """An actor and a critic as in PPO: 12 small tensors."""
    return [shape for outputs in (6, 1) for shape in _perceptron(64, 256, 256, outputs)]


def _perceptron(*sizes: int) -> Shapes:
    found: Shapes = []
    for fan_in, fan_out in pairwise(sizes):
        found += [(fan_in, fan_out), (fan_out,)]
    return found


MODELS: dict[str, Callable[[], Shapes]] = {
    "GPT-2 small": lambda: gpt2(12),
    "GPT-2, 4 layers": lambda: gpt2(4),
    "GPT-2, 2 layers": lambda: gpt2(2),
    "Llama 3 8B, 1 layer": lambda: llama(1),
    "actor and critic": actor_critic,
    "toy": lambda: [(128, 128), (128,), (128, 128), (128,)],
}


def compiled(
    transformation: optax.GradientTransformation,
    shapes: Shapes,
    target: str,
    dtype: str,
) -> tuple[Any, float]:
    """Compiles a jitted and donated step: (the program, processor seconds)."""
    place = targets.placement(target)

    def array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place(shape))

    params = [array(shape, "float32") for shape in shapes]
    grads = [array(shape, dtype) for shape in shapes]
    state = jax.eval_shape(transformation.init, params)
    state = jax.tree.map(lambda leaf: array(leaf.shape, leaf.dtype), state)

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = transformation.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    jax.clear_caches()
    start = time.process_time()
    traced = jax.jit(step, donate_argnums=(0, 1)).trace(params, state, grads)
    # Named, since JAX looks for the platform of a GPU among devices that are there.
    lowered = traced.lower(lowering_platforms=(targets.platform_of(target),))
    return lowered.compile(), time.process_time() - start


def row(name: str, model: str, target: str, dtype: str) -> dict[str, Any]:
    """What one step becomes on one target."""
    transformation, shapes = STEPS[name](), MODELS[model]()
    found, seconds = compiled(transformation, shapes, target, dtype)
    counts = program.counts_of(found.as_text())
    elements = sum(math.prod(shape) for shape in shapes)
    temporary = found.memory_analysis().temp_size_in_bytes
    params = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    state = jax.eval_shape(transformation.init, params)
    return {
        "device": target,
        "model": model,
        "gradients": dtype,
        "clipped by": name,
        "kernels": counts.kernels,
        "scalars": counts.scalars,
        "GB": round(counts.gigabytes, 3),
        "collectives": counts.collectives,
        "float64": counts.float64,
        "temporary": temporary / elements / jax.numpy.dtype(dtype).itemsize,
        "temporary_bytes": temporary,
        "state": len(jax.tree.leaves(state)),
        "compile": round(seconds, 1),
    }
