"""An audit: how much can one example change a sum of gradients, at the worst of what is
tried?

Each pattern takes the place of the first example. In cancelling ones the entries of an
array, along its first axis, are +-2^k, and all others are repeated, so that what the
positions add to a gradient cancels and leaves its rounding behind.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from .._checks import check_limit
from ._noise import sum_in


class Sensitivity(NamedTuple):
    """How much one example changes a sum, at the worst of what was tried.

    Attributes:
      change: the norm of the sum with the example, less the sum without it. inf where
        this is not finite.
      pattern: what the example was, such as "nan in batch[0]".
      limit: what the change should not exceed but for rounding, as it was given.
    """

    change: float
    pattern: str
    limit: float


def sensitivity(
    grad_fn: Callable[..., Any], params: Any, *batch: Any, limit: float
) -> Sensitivity:
    """Tries examples that may change a sum of clipped gradients by more than the limit,
    and returns the largest change.

    In the place of the first example of the batch it puts others: its own, large, small
    and broken numbers, and numbers that cancel, all alike or of random sizes. For each
    it computes the sum with and without that example. It finds faults, such as a
    parameter that is not clipped, or rounding that is not measured. It proves nothing:
    the `change` of `explain_clipped_grad` is proved.

    Args:
      grad_fn: what training uses, `grad_fn(params, *batch)`, best jitted: it is called
        ten times for each array of an example. It returns a sum, before noise is added:
        a result of `clipped_grad(..., mean=False)` or a tree of gradients.
      params: the parameters. Random ones will do.
      batch: arguments with at least two examples, pytrees whose first axes count them.
        Floats are replaced, one array at a time. Of integers, such as tokens, only
        values of the first example are used. Sequences should have at least 16
        positions.
      limit: the largest change that is allowed: `max_norm`, the root of the sum of
        squares for several.

    Returns:
      A `Sensitivity`: the largest `change`, and the `pattern` that makes it.

    Raises:
      ValueError: a mean instead of a sum, or a limit that is negative or NaN.
      TypeError: a limit that is not a number.

    Example:
      >>> def loss(w, x):
      ...     return 0.5 * (w - x) ** 2
      >>> grad = optaxclip.clipped_grad(loss, 1.0, mean=False)
      >>> batch = jnp.array([2.5, 1.0, 4.0, 3.0])
      >>> found = optaxclip.sensitivity(jax.jit(grad), 3.0, batch, limit=1.0)
      >>> print(f"{found.change:.3f}")
      1.000
      >>> def no_clip(w, x):
      ...     return jnp.sum(w - x)
      >>> optaxclip.sensitivity(no_clip, 3.0, batch, limit=1.0)
      Sensitivity(change=inf, pattern='nan in batch[0]', limit=1.0)
    """
    check_limit("sensitivity: limit", limit, is_scalar=True)
    batch = jax.tree.map(jnp.asarray, batch)

    def total(batch: Any) -> list[np.ndarray]:
        sums = sum_in(grad_fn(params, *batch), "sensitivity")
        return [np.asarray(x).astype(np.complex128) for x in jax.tree.leaves(sums)]

    others = total(jax.tree.map(lambda x: x[1:], batch))
    found = []
    with np.errstate(all="ignore"):
        for pattern, example in _patterns(batch):
            tried = jax.tree.map(lambda x, row: x.at[0].set(row), batch, example)
            pairs = zip(total(tried), others)
            change = np.linalg.norm([np.linalg.norm(x - y) for x, y in pairs])
            change = float(change) if np.isfinite(change) else np.inf
            found.append(Sensitivity(change, pattern, limit))
    return max(found)


def _patterns(batch: Any) -> Iterator[tuple[str, Any]]:
    """The examples that are tried, and what they are called."""
    entries, treedef = tree_flatten_with_path(jax.tree.map(lambda x: x[0], batch))
    rows = [row for _, row in entries]
    alike = [jnp.broadcast_to(x[:1], x.shape) if x.ndim else x for x in rows]
    yield "its own numbers", treedef.unflatten(rows)
    yield "all positions alike", treedef.unflatten(alike)
    random = np.random.default_rng(0)
    for place, (path, row) in enumerate(entries):
        if jnp.issubdtype(row.dtype, jnp.inexact):
            direction = random.standard_normal(row.shape[1:])
            for pattern, line in _lines(row, random).items():
                own = np.multiply.outer(line, direction).reshape(row.shape)
                tried = [*alike[:place], own.astype(row.dtype), *alike[place + 1 :]]
                yield f"{pattern} in batch{keystr(path)}", treedef.unflatten(tried)


def _lines(row: jax.Array, random: np.random.Generator) -> dict[str, np.ndarray]:
    """Numbers for the positions of an array, by what they are called."""
    count = row.shape[0] if row.ndim else 1
    half, top = count // 2, int(jnp.finfo(row.dtype).maxexp)
    pairs = np.exp2(random.integers(top // 12, top // 2, half))
    lines: dict[str, Any] = {"random +-2^k": random.permutation([*pairs, *-pairs])}
    lines["random +-1e9"] = random.permutation(np.repeat([1e9, -1e9], half))
    for power in (top // 4, top // 2, 3 * top // 4):
        lines[f"aligned +-2^{power}"] = [2.0**power, -(2.0**power), 12.3]
    for size in (np.nan, np.inf, 1e-30, 1e9, 1e30):
        lines[f"{size:g}"] = np.full(count, size)
    # The rest of the positions is 0.
    return {name: np.resize([*x, *np.zeros(count)], count) for name, x in lines.items()}
