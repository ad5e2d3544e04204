"""What the clippers did, as numbers for a logger.

Every clipper keeps its last norm, limit and factor in its state, so reading them costs
no second pass over the gradients, inside jit or outside.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike

from ._core._state import ClipState, Entry, unpack
from ._norms._leaves import unboxed
from ._norms._platform import per_platform
from ._norms._types import gathered
from ._wrappers._skipping import SkipState


class _ClipNumbers(NamedTuple):
    """What `metrics` reports of one norm: float32 scalars."""

    norm_before: jax.Array
    limit: jax.Array
    factor: jax.Array
    norm_after: jax.Array
    clipped: jax.Array
    clipped_share: jax.Array
    clipped_count: jax.Array
    nonfinite_count: jax.Array


class _SkipNumbers(NamedTuple):
    """What `metrics` reports of an optimizer that skips steps: float32 scalars."""

    norm: jax.Array
    limit: jax.Array
    value: jax.Array
    value_limit: jax.Array
    skipped: jax.Array
    skipped_share: jax.Array
    skipped_count: jax.Array
    consecutive_count: jax.Array
    nonfinite_count: jax.Array


def metrics(opt_state: Any) -> dict[str, jax.Array]:
    """Returns the numbers of every clipper in an optimizer state, for a logger.

    Clippers are found at any depth: in chain, masked, partition, MultiSteps,
    inject_hyperparams, apply_if_finite.

    Args:
      opt_state: the state of any optimizer that has a clipper in it, concrete or
        traced.

    Returns:
      A flat dict of float32 scalars:

        clip/norm_before      the norm before clipping. It may be above the limit, which
                              does not mean that clipping failed
        clip/limit            what it was held against, inf where there is none
        clip/factor           what the updates were multiplied by: 1 where nothing was
                              done, never below 1.2e-38 unless they were made 0
        clip/norm_after       the norm after clipping: 0 where a broken step was made
                              zero, NaN where it was made NaN
        clip/clipped          1 if the last step was clipped, else 0, also where its
                              norm was NaN or inf
        clip/clipped_share    clipped steps over all steps, in [0, 1]
        clip/clipped_count    steps that were clipped
        clip/nonfinite_count  steps whose norm was NaN or inf

      and of every optimizer that skips steps (`skip_spikes`):

        skip/norm, skip/limit               of the last gradient, whether skipped or not
        skip/value, skip/value_limit        of the last loss, 0 and inf without a rule
                                            for it
        skip/skipped                        1 if the last step was skipped, else 0
        skip/skipped_share, skip/skipped_count, skip/consecutive_count,
        skip/nonfinite_count

      A clipper with one norm for each tensor or group adds the path:
      `clip/norm_before/blocks/w`. Of units and stacked layers the one furthest over its
      limit is shown, and the share is the mean over all. Several clippers are told
      apart by the keys on the way to them (of `named_chain`, `partition`) and by a
      number: `clip_0`, `clip_1`.

    Example:
      >>> optimizer = optax.chain(optaxclip.clip_by_global_norm(1.0), optax.sgd(0.1))
      >>> grads = jnp.array([3.0, 4.0])
      >>> _, state = optimizer.update(grads, optimizer.init(grads))
      >>> found = optaxclip.metrics(state)
      >>> print({name: float(found[name]) for name in found if "norm" in name})
      {'clip/norm_before': 5.0, 'clip/norm_after': 1.0}
    """
    found = list(_reported_states(unboxed(opt_state), ()))
    kinds = [(title, type(state)) for title, state in found]
    report = {}
    for place, (kind, (title, state)) in enumerate(zip(kinds, found)):
        number = f"_{kinds[:place].count(kind)}" if kinds.count(kind) > 1 else ""
        prefix = "skip" if isinstance(state, SkipState) else "clip"
        rows = _skip_rows(state) if isinstance(state, SkipState) else _clip_rows(state)
        for name, path, value in rows:
            parts = f"{prefix}{number}", title, name, path
            report["/".join(part for part in parts if part)] = value
    return report


def _reported_states(
    opt_state: Any, path: tuple[Any, ...]
) -> Iterator[tuple[str, Any]]:
    """(title, state) of every clipper and skipping optimizer. The title is made of the
    keys on the way there.
    """
    entries = jax.tree_util.tree_flatten_with_path(opt_state, is_leaf=_is_reported)[0]
    for own, state in entries:
        whole = (*path, *own)
        if _is_reported(state):
            keys = [key for key in whole if isinstance(key, jax.tree_util.DictKey)]
            yield "/".join(str(key.key) for key in keys), state
        if isinstance(state, SkipState):
            yield from _reported_states(state.inner_state, whole)


def _skip_rows(state: SkipState) -> Iterator[tuple[str, str, jax.Array]]:
    """(name, "", value) of one skipping optimizer."""
    numbers = _skip_numbers(state._replace(inner_state=None))
    for name, value in numbers._asdict().items():
        yield name, "", value


@jax.jit
def _skip_numbers(state: SkipState) -> _SkipNumbers:
    steps = jnp.maximum(state.step, 1).astype(jnp.float32)
    numbers = _SkipNumbers(
        norm=state.norm,
        limit=state.limit,
        value=state.value,
        value_limit=state.value_limit,
        skipped=state.consecutive > 0,
        skipped_share=state.skipped.astype(jnp.float32) / steps,
        skipped_count=state.skipped,
        consecutive_count=state.consecutive,
        nonfinite_count=state.nonfinite,
    )
    return _in_float32(numbers)


def _clip_rows(state: ClipState) -> Iterator[tuple[str, str, jax.Array]]:
    """(name, path, value) for each norm of one clipper."""
    names, entries = unpack(state)
    counts = tuple(len(block) for block in names)
    entries = [entry._replace(memory=()) for entry in entries]
    for block, found in zip(names, _clip_numbers(counts, state.step, entries)):
        for path, numbers in zip(block, _rows_of(found, len(block))):
            for name, value in numbers._asdict().items():
                yield name, path, value


def _rows_of(numbers: _ClipNumbers, count: int) -> Iterable[_ClipNumbers]:
    """The numbers of each norm of a block."""
    if count == 1:
        return [numbers]
    if not isinstance(numbers.limit, Tracer):
        return (_row(numbers, row) for row in range(count))
    # Without the barrier XLA computes all numbers again for each row.
    columns = [_unstacked(lax.optimization_barrier(x)) for x in numbers]
    return [_ClipNumbers(*row) for row in zip(*columns)]


def _unstacked(vector: jax.Array) -> list[jax.Array]:
    """The entries of a vector, as scalars.

    XLA on a CPU compiles each slice as a program of its own, and one reduction with
    many results as one.
    """
    count = vector.shape[0]

    def by_reduction(vector: jax.Array) -> list[jax.Array]:
        def add(one: Any, other: Any) -> Any:
            return [a + b for a, b in zip(one, other)]

        rows = np.arange(count)
        alone = [jnp.where(rows == row, vector, 0) for row in range(count)]
        return list(lax.reduce(alone, [np.float32(0)] * count, add, (0,)))

    def by_slices(vector: jax.Array) -> list[jax.Array]:
        return [vector[row] for row in range(count)]

    return per_platform(vector, cpu=by_reduction, gpu=by_slices, tpu=by_slices)


# Jitted, since without jit each operation would be a call. One call serves all norms of
# a clipper.
@partial(jax.jit, static_argnums=0)
def _clip_numbers(
    counts: tuple[int, ...], step: jax.Array, entries: list[Entry]
) -> list[_ClipNumbers]:
    """The numbers of each block: float32[count], or float32[] of a single norm."""
    found = []
    for count, entry in zip(counts, entries):
        numbers = _numbers_of_block(count, step, entry)
        found.append(_row(numbers, 0) if count == 1 else numbers)
    return found


# The row is traced: one program for all rows.
@jax.jit
def _row(numbers: _ClipNumbers, row: ArrayLike) -> _ClipNumbers:
    return _ClipNumbers(*(x[row] for x in numbers))


def _numbers_of_block(count: int, step: jax.Array, entry: Entry) -> _ClipNumbers:
    """float32[count]: for each norm, or for the worst where a norm is an array of
    units.
    """
    rows = [gathered(x, 0).reshape(count, -1) for x in entry[:5]]
    norm, limit, factor, clipped, nonfinite = rows
    # An infinite limit would hide all differences, so it counts as merely huge.
    worst = jnp.argmax(norm / jnp.clip(limit, 2.0**-60, 2.0**60), axis=1, keepdims=True)
    shown = [jnp.take_along_axis(x, worst, axis=1)[:, 0] for x in (norm, limit, factor)]
    norm, limit, factor = shown
    steps = jnp.maximum(step, 1).astype(jnp.float32)
    float32 = jnp.finfo(jnp.float32)
    numbers = _ClipNumbers(
        norm_before=norm,
        limit=limit,
        factor=jnp.where(factor == 0, 0.0, jnp.clip(factor, float32.tiny, float32.max)),
        norm_after=_norm_after(norm, limit, factor),
        clipped=(factor != 1) & jnp.isfinite(norm),
        clipped_share=jnp.mean(clipped.astype(jnp.float32) / steps, axis=1),
        clipped_count=jnp.max(clipped, axis=1),
        nonfinite_count=jnp.max(nonfinite, axis=1),
    )
    return _in_float32(numbers)


def _norm_after(norm: jax.Array, limit: jax.Array, factor: jax.Array) -> jax.Array:
    # At the ends of its range the factor is not the whole quotient. So far from its
    # limit, what a shrink leaves is the limit.
    info = jnp.finfo(factor.dtype)
    at_end = (factor == info.tiny) | (factor == info.max)
    product = jnp.where(factor == 0, 0.0, norm * factor)
    return jnp.where(at_end, limit, product)


def _in_float32(numbers: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32), numbers)


def _is_reported(x: Any) -> bool:
    return isinstance(x, (ClipState, SkipState))
