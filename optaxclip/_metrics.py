"""What the clippers did, as numbers for a logger.

Every clipper keeps its last norm, limit and scale in its state, so reading them costs
no second pass over the gradients, inside jit or outside.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from . import prefix
from ._core._kernel import ClipState
from ._norms._leaves import unboxed
from ._wrappers._skip import SkipState


class _ClipNumbers(NamedTuple):
    """What `metrics` tells of one norm: float32 scalars."""

    norm_before: jax.Array
    limit: jax.Array
    scale: jax.Array
    norm_after: jax.Array
    clipped: jax.Array
    clipped_share: jax.Array
    clipped_count: jax.Array
    nonfinite_count: jax.Array


class _SkipNumbers(NamedTuple):
    """What `metrics` tells of an optimizer that skips steps: float32 scalars."""

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
    """The numbers of every clipper in an optimizer state, at any depth: in chain,
    masked, partition, MultiSteps, inject_hyperparams, apply_if_finite.

    Args:
      opt_state: the state of any optimizer that has a clipper in it; concrete or
        traced.

    Returns:
      A flat dict of float32 scalars:

        clip/norm_before      the norm before clipping: it may well lie above the limit,
                              and does not mean that clipping failed
        clip/limit            what it was held against; inf where there is none
        clip/scale            what the updates were multiplied by: 1 where nothing was
                              done, never below 1.2e-38 unless they were made 0
        clip/norm_after       the norm after clipping: 0 where a broken step was made
                              zero, NaN where it was made NaN
        clip/clipped          1 if the last step was clipped, else 0, as where its norm
                              was NaN or inf
        clip/clipped_share    clipped steps over all steps, in [0, 1]
        clip/clipped_count    steps that were clipped
        clip/nonfinite_count  steps whose norm was NaN or inf

      and of every optimizer that skips steps (`skip_spikes`):

        skip/norm, skip/limit               of the last gradient, whether skipped or not
        skip/value, skip/value_limit        of the last loss; 0 and inf without a rule
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
      >>> import optax, optaxclip
      >>> optimizer = optax.chain(optaxclip.clip_by_global_norm(1.0), optax.sgd(0.1))
      >>> grads = jnp.array([3.0, 4.0])
      >>> _, state = optimizer.update(grads, optimizer.init(grads))
      >>> found = optaxclip.metrics(state)
      >>> print({name: float(found[name]) for name in found if "norm" in name})
      {'clip/norm_before': 5.0, 'clip/norm_after': 1.0}
    """
    found = list(_clip_states(unboxed(opt_state), ()))
    report = {}
    for place, (title, state) in enumerate(found):
        same = [
            i
            for i, (other, at) in enumerate(found)
            if other == title and type(at) is type(state)
        ]
        number = f"_{same.index(place)}" if len(same) > 1 else ""
        kind, rows = (
            ("skip", _skip_rows(state))
            if isinstance(state, SkipState)
            else ("clip", _rows(state))
        )
        for name, where, value in rows:
            report[
                "/".join(
                    part for part in (f"{kind}{number}", title, name, where) if part
                )
            ] = value
    return report


def _clip_states(opt_state: Any, path: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """(title, state) of every clipper and skipping optimizer; the title is made of the
    keys on the way there.
    """
    for own, state in jax.tree_util.tree_flatten_with_path(
        opt_state, is_leaf=_is_reported
    )[0]:
        if _is_reported(state):
            yield (
                "/".join(
                    str(key.key)
                    for key in (*path, *own)
                    if isinstance(key, jax.tree_util.DictKey)
                ),
                state,
            )
        if isinstance(state, SkipState):
            yield from _clip_states(state.inner_state, (*path, *own))


def _skip_rows(state: SkipState) -> Iterator[tuple[str, str, jax.Array]]:
    for name, value in (
        _skip_numbers(state._replace(inner_state=None))._asdict().items()
    ):
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


def _rows(state: ClipState) -> Iterator[tuple[str, str, jax.Array]]:
    """(name, place, value) for each norm of one clipper."""
    places = prefix.names(
        [path for path, _ in jax.tree_util.tree_flatten_with_path(state.norm)[0]]
    )
    for place, *fields in zip(
        places, *(jax.tree.leaves(field) for field in state[1:6])
    ):
        for name, value in _clip_numbers(state.step, *fields)._asdict().items():
            yield name, place, value


@jax.jit
def _clip_numbers(
    step: jax.Array,
    norm: jax.Array,
    limit: jax.Array,
    scale: jax.Array,
    clipped: jax.Array,
    nonfinite: jax.Array,
) -> _ClipNumbers:
    """Of one norm, or of the worst of several units. Jitted, since without jit each
    operation would be a call.
    """
    # An infinite limit would hide all differences, so it counts as merely huge.
    worst = jnp.argmax(norm / jnp.clip(limit, 2.0**-60, 2.0**60))
    norm, limit, scale = (x.reshape(-1)[worst] for x in (norm, limit, scale))
    # At the ends of its range the scale is not the whole quotient. So far from its
    # limit what a shrink leaves is the limit.
    info = jnp.finfo(scale.dtype)
    held = (scale == info.tiny) | (scale == info.max)
    after = jnp.where(held, limit, jnp.where(scale == 0, 0.0, norm * scale))
    shown = jnp.finfo(jnp.float32)
    steps = jnp.maximum(step, 1).astype(jnp.float32)
    numbers = _ClipNumbers(
        norm_before=norm,
        limit=limit,
        scale=jnp.where(scale == 0, 0.0, jnp.clip(scale, shown.tiny, shown.max)),
        norm_after=after,
        clipped=(scale != 1) & jnp.isfinite(norm),
        clipped_share=jnp.mean(clipped.astype(jnp.float32) / steps),
        clipped_count=jnp.max(clipped),
        nonfinite_count=jnp.max(nonfinite),
    )
    return _in_float32(numbers)


def _in_float32(numbers: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32), numbers)


def _is_reported(x: Any) -> bool:
    return isinstance(x, (ClipState, SkipState))
