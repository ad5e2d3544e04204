"""nonfinite="raise": an error that names the leaves with NaN or inf."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from .._norms import _prefix as prefix
from ._state import ClipState


def raise_nonfinite(
    call: str, measure: Any, state: ClipState, updates: Any
) -> None:
    """Raises FloatingPointError for a norm that is NaN or inf.

    Under jit it is a `checkify.check`.
    """
    finite = [
        jnp.all(jnp.isfinite(norm)) for norm in jax.tree.leaves(state.norm)
    ]
    # ord=None means 2.
    order = getattr(measure, "ord", None) or 2
    text = f"{call}: the norm of order {order} of the updates is not finite"
    # A traced value is not known, so only a check of the running program can fail.
    if any(isinstance(x, Tracer) for x in finite):
        from jax.experimental import checkify

        checkify.check(jnp.all(jnp.stack(finite)), text)
    elif not all(finite):
        raise FloatingPointError(f"{text}. {_guilty(updates)}")


def _guilty(updates: Any) -> str:
    parts = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(updates)[0]:
        # int waits for each leaf, which only a step that failed has to do.
        count = int(jnp.sum(~jnp.isfinite(leaf)))
        if count:
            name = prefix.name(path)
            parts.append(
                f"{name!r}: {count} of {leaf.size} values are NaN or inf"
            )
    all_finite = "All values are finite: the norm is too large for its dtype."
    return "; ".join(parts) or all_finite
