"""An audit of what noise must hide: it tries how much one example can change a sum.

Each pattern takes the place of the first example. An example has positions, such as
those of tokens, along the first axis of each of its arrays. In a cancelling pattern one
array is +2^k or -2^k times one direction at each position, and every other array is the
same at all positions. So the terms of the positions cancel, and leave their rounding
behind.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import keystr

from .._trees import PyTree
from ._noise import sum_in

MOST_TRIED = 16  # examples, and tokens of each array


class Sensitivity(NamedTuple):
    """How much one example changes a sum, at the worst of what was tried.

    Attributes:
      change: |sum with - sum without| of the example. inf where this is not finite.
      pattern: what the example was, such as "nan in batch[0]".
      limit: what the change should not exceed but for rounding, as it was given.
    """

    change: float
    pattern: str
    limit: float


def sensitivity(
    grad_fn: Callable[..., Any], params: PyTree, *batch: PyTree, limit: float
) -> Sensitivity:
    """Tries examples that may change a sum of clipped gradients by more than the limit,
    and returns the largest change.

    In the place of the first example of the batch it puts others: large, small and
    broken numbers, numbers that cancel, all alike or of random sizes, single tokens,
    and the other examples of the batch. Each sum is compared with the sum in which
    `mask=` leaves out the first place. So it finds faults, such as a parameter that is
    not clipped, or rounding that no bound has in it. It proves nothing. What is
    proved is limit * (1 + change), with the `change` of `explain_clipped_grad`.

    Args:
      grad_fn: what training uses, `grad_fn(params, *batch, mask=mask)`, best jitted: it
        is called up to 18 times, and for each array 9 times more if it is of floats,
        and up to 16 if it is of integers. It returns a sum, before noise is added: a
        result of `clipped_grad(..., mean=False)` or a tree of gradients.
      params: the parameters. Random ones will do.
      batch: arguments with at least two examples, pytrees whose first axes count them.
        Floats and integers are replaced, one array at a time, integers by values that
        the batch has. Sequences should have at least 16 positions.
      limit: the largest change that is allowed: `max_norm`, the root of the sum of
        squares for several.

    Returns:
      A `Sensitivity`: the largest `change`, and the `pattern` that makes it.

    Raises:
      ValueError: a mean instead of a sum, or a batch of fewer than two examples.
      TypeError: a `grad_fn` that takes no `mask=`.

    Example:
      >>> def loss(w, x):
      ...     return 0.5 * (w - x) ** 2
      >>> grad = optaxclip.clipped_grad(loss, 1.0, mean=False)
      >>> batch = jnp.array([2.5, 1.0, 4.0, 3.0])
      >>> found = optaxclip.sensitivity(jax.jit(grad), 3.0, batch, limit=1.0)
      >>> print(f"{found.change:.3f}")
      1.000
      >>> def no_clip(w, x, mask):
      ...     return jnp.sum(jnp.where(mask, w - x, 0))
      >>> optaxclip.sensitivity(no_clip, 3.0, batch, limit=1.0)
      Sensitivity(change=inf, pattern='nan in batch[0]', limit=1.0)
    """
    # On one device, also where a mesh has split it.
    batch = jax.tree.map(lambda x: jnp.asarray(jax.device_get(x)), batch)
    arrays, treedef = jax.tree.flatten(batch)
    sizes = {len(array) if array.ndim else 0 for array in arrays}
    if len(sizes) != 1 or min(sizes) < 2:
        raise ValueError(
            "sensitivity: the arrays of the batch must share their first axis, of at "
            f"least two examples, got sizes {sorted(sizes)}. Give them after "
            "the parameters: sensitivity(grad_fn, params, x, y, limit=1.0)."
        )
    (size,) = sizes

    def sum_of(arrays: list[Array], mask: np.ndarray) -> np.ndarray:
        """The sum that a batch has, with all leaves in one vector."""
        result = grad_fn(params, *treedef.unflatten(arrays), mask=mask)
        leaves = jax.tree.leaves(sum_in(result, "sensitivity"))
        vectors = [np.ravel(leaf).astype(np.complex128) for leaf in leaves]
        return np.concatenate(vectors)

    # Masked in its place: in a shorter batch the gradients of others have other bits.
    sum_without = sum_of(arrays, mask=np.arange(size) > 0)
    results = []
    with np.errstate(all="ignore"):
        for pattern, rows in _examples_to_try(batch):
            arrays_with = [array.at[0].set(row) for array, row in zip(arrays, rows)]
            sum_with = sum_of(arrays_with, mask=np.ones(size, bool))
            change = float(np.linalg.norm(sum_with - sum_without))
            if not np.isfinite(change):
                change = np.inf
            results.append(Sensitivity(change, pattern, limit))
    return max(results, key=lambda result: result.change)


def _examples_to_try(batch: PyTree) -> Iterator[tuple[str, list[Array]]]:
    """Patterns, by their names, with a row for each array of the batch: examples of the
    batch, and examples in which one array is replaced and each other array is the same
    at all positions.
    """
    entries = jax.tree.leaves_with_path(batch)
    arrays = [array for _, array in entries]
    for index in range(min(MOST_TRIED, len(arrays[0]))):
        yield f"example {index}", [array[index] for array in arrays]
    constant_rows = []
    for array in arrays:
        first = array[0]
        if first.ndim:
            # Its first position, at all positions
            first = jnp.broadcast_to(first[:1], first.shape)
        constant_rows.append(first)
    yield "all positions alike", constant_rows
    random = np.random.default_rng(0)
    for index, (path, array) in enumerate(entries):
        replacements: dict[str, np.ndarray] = {}
        if jnp.issubdtype(array.dtype, jnp.inexact):
            replacements = _floats_to_try(array[0], random)
        elif jnp.issubdtype(array.dtype, jnp.integer):
            replacements = _tokens_to_try(array, random)
        for pattern, replacement in replacements.items():
            rows = list(constant_rows)
            rows[index] = jnp.asarray(replacement, array.dtype)
            yield f"{pattern} in batch{keystr(path)}", rows


def _tokens_to_try(array: Array, random: np.random.Generator) -> dict[str, np.ndarray]:
    """For integers, one token of the batch at all positions, by names of patterns."""
    chosen = random.permutation(np.unique(array))[:MOST_TRIED]
    shape = array.shape[1:]
    return {str(token): np.full(shape, token) for token in chosen}


def _floats_to_try(array: Array, random: np.random.Generator) -> dict[str, np.ndarray]:
    """Floats for an array of one example, by names of patterns: a number for each
    position, times a direction.
    """
    positions = array.shape[0] if array.ndim else 1
    direction = random.standard_normal(array.shape[1:])
    largest_power = int(jnp.finfo(array.dtype).maxexp)
    # Pairs that cancel. If the number of positions is odd, one of them is 0.
    pairs = positions // 2
    powers = random.integers(largest_power // 12, largest_power // 2, size=pairs)
    magnitudes = np.exp2(powers)
    cancelling = np.zeros(positions)
    cancelling[: 2 * pairs] = random.permutation([*magnitudes, *-magnitudes])
    factors_by_pattern = {"random +-2^k": cancelling}
    for quarters in (1, 2, 3):
        power = quarters * largest_power // 4
        large = 2.0**power
        aligned = np.zeros(positions)
        # The third number is what rounding loses beside the large ones.
        aligned[:3] = [large, -large, 12.3][:positions]
        factors_by_pattern[f"aligned +-2^{power}"] = aligned
    for number in (np.nan, np.inf, 1e-30, 1e9, 1e30):
        factors_by_pattern[f"{number:g}"] = np.full(positions, number)
    rows = {}
    for pattern, factors in factors_by_pattern.items():
        row = np.multiply.outer(factors, direction)
        rows[pattern] = row.reshape(array.shape)
    return rows
