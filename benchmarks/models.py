"""The trees that are clipped: shapes of GPT-2 small, many small leaves, and equal
leaves, filled with random normal numbers.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def gpt2(quick: bool) -> dict[str, Any]:
    """Shapes of GPT-2 small: 148 leaves, 124 M parameters. The quick one is two equal
    matrices, since every other shape costs compile time.
    """
    if quick:
        return _described({"wte": (128, 32), "wpe": (128, 32)}, jnp.float32)
    vocabulary, context, width, depth = 50257, 1024, 768, 12
    shapes = {
        "wte": (vocabulary, width),
        "wpe": (context, width),
        "blocks": [_block(width) for _ in range(depth)],
        "ln": {"weight": (width,), "bias": (width,)},
    }
    return _described(shapes, jnp.float32)


def small_leaves(count: int) -> list[jax.ShapeDtypeStruct]:
    """`count` leaves of a few thousand numbers at most, in four shapes."""
    kinds = [(64, 32), (32,), (32, 128), (128,)]
    return _described([kinds[i % len(kinds)] for i in range(count)], jnp.float32)


def equal_leaves(parameters: int, count: int) -> list[jax.ShapeDtypeStruct]:
    """`count` vectors with `parameters` float32 numbers in all."""
    return _described([(parameters // count,)] * count, jnp.float32)


def normal(tree: Any, scale: float = 1.0) -> Any:
    """Arrays of random normal numbers with the shapes and dtypes of `tree`, the same in
    every run.

    A large leaf repeats a million of them, since drawing a billion takes long.
    """
    generator = np.random.default_rng(0)

    def fill(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        block = np.float32(scale) * generator.standard_normal(
            min(leaf.size, 10**6), np.float32
        )
        # A copy: JAX may share memory with NumPy, and memory that is shared cannot be
        # donated.
        return jnp.array(np.resize(block, leaf.shape), leaf.dtype, copy=True)

    return jax.tree.map(fill, tree)


def size_in_bytes(tree: Any) -> int:
    """The bytes of all leaves together."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _block(width: int) -> dict[str, Any]:
    def linear(fan_in: int, fan_out: int) -> dict[str, tuple[int, ...]]:
        return {"weight": (fan_in, fan_out), "bias": (fan_out,)}

    norm = {"weight": (width,), "bias": (width,)}
    return {
        "ln_1": norm,
        "qkv": linear(width, 3 * width),
        "proj": linear(width, width),
        "ln_2": norm,
        "fc": linear(width, 4 * width),
        "fc_proj": linear(4 * width, width),
    }


def _described(shapes: Any, dtype: Any) -> Any:
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, dtype),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )
