"""The error of nonfinite="raise": which norm is broken, and in which leaves."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._trees import PyTree, path_name
from .state import ClipState


def raise_nonfinite(
    call: str, measure: Any, old_state: ClipState, new_state: ClipState, updates: PyTree
) -> None:
    """Raises FloatingPointError for the first broken norm. If the norm is NaN or inf,
    the error names the leaves. Otherwise its limit is NaN, or a shrink returned no
    norm.

    Under jit it is a `checkify.check`.
    """
    # Counters are compared, not norms: a leaf that is missing keeps its old norm, which
    # may be NaN.
    is_broken = new_state.nonfinite != old_state.nonfinite
    broken_norm = "the norm of the updates is not finite"
    if hasattr(measure, "ord"):
        # None means 2.
        order = measure.ord or 2
        broken_norm = f"the norm of order {order} of the updates is not finite"
    # A traced value is not known, so only a check of the running program can fail.
    if isinstance(is_broken, Tracer):
        from jax.experimental import checkify

        text = f"{call}: {broken_norm}, its limit is NaN, or shrink returns no norm"
        checkify.check(~jnp.any(is_broken), text)
        return
    if not jnp.any(is_broken):
        return
    index = jnp.argmax(is_broken)
    norm = jnp.ravel(new_state.norm)[index]
    if jnp.isfinite(norm):
        limit = jnp.ravel(new_state.limit)[index]
        if jnp.isnan(limit):
            raise FloatingPointError(f"{call}: the limit of the norm {norm} is NaN.")
        raise FloatingPointError(
            f"{call}: shrink must return a finite number of at least 0, and does not "
            f"for the norm {norm} and the limit {limit}."
        )
    raise FloatingPointError(f"{call}: {broken_norm}. {_broken_leaves(updates)}")


def _broken_leaves(updates: PyTree) -> str:
    """The leaves with values that are NaN or inf, and how many these are."""
    broken_leaves = []
    for path, leaf in jax.tree.leaves_with_path(updates):
        # int waits for each leaf, which only a step that failed has to do.
        with jax.enable_x64(True):
            count = int(jnp.sum(~jnp.isfinite(leaf), dtype=np.int64))
        if count:
            name = path_name(path)
            broken_leaves.append(
                f"{name!r}: {count} of {jnp.size(leaf)} values are NaN or inf"
            )
    all_finite = (
        "All values are finite: the norm is too large for its dtype, or was not finite "
        "when it was given."
    )
    return "; ".join(broken_leaves) or all_finite
