"""The axes that `tf.clip_by_norm` sums over."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _trees as prefix


def checked_axes(argument: str, axes: Any, tree: Any) -> tuple[int, ...]:
    """The axes, which all leaves have, as a tuple."""
    several = axes if isinstance(axes, (list, tuple)) else (axes,)
    for axis in several:
        if isinstance(axis, bool) or not isinstance(axis, (int, np.integer)):
            text = "must be an int, or a list or tuple of ints"
            raise TypeError(f"{argument} {text}, got {axes!r}.")
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        rank = jnp.ndim(leaf)
        fits = all(-rank <= axis < rank for axis in several)
        if not fits or len({axis % rank for axis in several}) < len(several):
            raise ValueError(
                f"{argument} must be different axes of the leaf {prefix.name(path)!r}, "
                f"a tensor of rank {rank}, got {axes!r}."
            )
    # A static argument of the jitted update, so a list must become a tuple.
    return tuple(int(axis) for axis in several)
