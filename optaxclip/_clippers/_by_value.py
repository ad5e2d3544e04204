"""Clipping by value: every element by itself, between bounds."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .. import _trees as prefix
from .._arguments import broadcasts_to, check_limit, check_order, is_function
from .._exported import exported
from .._inputs import begins_anew
from .._modulus import with_modulus
from .._optimizers import check_state
from .._other_names import with_our_names
from .._shares import ClippedElements, count_clipped, no_elements_clipped
from .._trees import check_leaves
from ..rules._rule import Number, call_name, is_rule
from ._bounds_in_dtype import (
    held_exactly,
    is_known_whole,
    python_ints,
    whole_bounds,
    within_range,
)

# A bound, or a tree prefix of bounds. None is no bound.
Bounds: TypeAlias = "Number | Mapping[Any, Bounds] | Sequence[Bounds] | None"


@exported
class ClipByValueState(NamedTuple):
    """The state of `clip_by_value`."""

    step: jax.Array  # int32[]: updates seen, for bounds that follow a schedule
    elements: ClippedElements  # which share of them was clipped


@with_our_names
def clip_by_value(
    max_value: Bounds, min_value: Bounds = None
) -> optax.GradientTransformation:
    """Clips every element to [min_value, max_value], or to [-max_value, max_value].

    Complex elements are limited by modulus and take one bound. NaN stays NaN. An
    infinite element becomes the bound (a complex one in the direction of its infinite
    part). Integer leaves keep their dtype: the bounds are rounded inwards. Bools and
    keys pass. The direction of the gradient changes. No collective is needed.

    Args:
      max_value: the upper bound: a number, a schedule, an array that broadcasts to each
        leaf, or a tree prefix of these, of any real dtype. None for no bound. At least
        0 when it stands alone. A schedule that falls below counts as 0 then.
      min_value: the lower bound, likewise. None for -max_value. Where schedules cross,
        the upper bound wins.

    Returns:
      A transformation with a `ClipByValueState`.

    Raises:
      ValueError: NaN, bounds that are known to leave no room between them, or a bound
        that does not fit a leaf.
      TypeError: a bound that is not a real number, such as a rule, or two bounds for a
        complex leaf.

    Example:
      >>> clipper = optaxclip.clip_by_value(1.0, -0.5)
      >>> grads = jnp.array([-3.0, 0.25, 2.0])
      >>> print(clipper.update(grads, clipper.init(grads))[0])
      [-0.5   0.25  1.  ]

    Reference: Mikolov, Statistical language models based on neural networks, 2012.
    """
    call = "clip_by_value"
    _check_one_bound(call, max_value, min_value)
    low = None if min_value is None else ("min_value", min_value)
    high = "max_value", _inf_for_none(max_value)
    return value_clipper(call, high, low)


def value_clipper(
    call: str, high: tuple[str, Any], low: tuple[str, Any] | None = None
) -> optax.GradientTransformation:
    """The clipper of two bounds. `call` and their names are what errors call them."""
    # Alone the upper bound limits the modulus. Beside a lower one any sign is right.
    lowest = 0.0 if low is None else -math.inf
    upper = _bounds(call, *high, lowest)
    lower = None
    if low is not None:
        lower = _bounds(call, *low, lowest)
        # Prefixes may be of different depths. Only bounds of one leaf are compared.
        for below, above in prefix.overlaps(lower, upper):
            check_order(call, (low[0], below), (high[0], above))

    def init(params: Any) -> ClipByValueState:
        step = jnp.zeros((), jnp.int32)
        return ClipByValueState(step, no_elements_clipped())

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        # A checkpoint of `optax.clip` has EmptyState here. Fixed bounds need no more.
        if begins_anew(call, state, (upper, lower)):
            state = init(params)
        check_state(call, state, ClipByValueState)
        check_leaves(updates, f"{call}: ")
        uppers = prefix.lookup(upper, updates, f"{call}: {high[0]}")
        if low is None or lower is None:
            lowers = [None] * len(uppers)
        else:
            lowers = prefix.lookup(lower, updates, f"{call}: {low[0]}")
        paths, treedef = jax.tree_util.tree_flatten_with_path(updates)

        def now(bound: Any) -> Any:
            return bound(state.step) if callable(bound) else bound

        clipped = [
            _limit(call, path, leaf, now(above), now(below))
            for (path, leaf), above, below in zip(paths, uppers, lowers)
        ]
        # Leaves without numbers are the same objects as before.
        pairs = [(x, y) for (_, x), y in zip(paths, clipped) if x is not y]
        elements = count_clipped(state.elements, state.step, pairs)
        step = jnp.asarray(optax.safe_increment(state.step))
        clipped = jax.tree.unflatten(treedef, clipped)
        return clipped, ClipByValueState(step, elements)

    return optax.GradientTransformation(init, update)


@with_our_names
def clip(max_delta: Bounds) -> optax.GradientTransformation:
    """Clips every element to [-max_delta, max_delta], as `optax.clip`.

    Args:
      max_delta: a bound at least 0, or anything else that `clip_by_value` takes for
        its upper bound.

    Returns:
      A transformation with a `ClipByValueState`.

    Raises:
      ValueError: a bound that is negative or NaN, or does not fit its leaf.
      TypeError: a bound that is not a number.

    Example:
      >>> clipper = optaxclip.clip(1.0)
      >>> grads = jnp.array([-3.0, 0.25])
      >>> print(clipper.update(grads, clipper.init(grads))[0])
      [-1.    0.25]
    """
    return value_clipper("clip", ("max_delta", _inf_for_none(max_delta)))


def _bounds(call: str, name: str, bound: Any, lowest: float) -> prefix.Prefix:
    for rule in filter(is_rule, jax.tree.leaves(bound, is_leaf=is_rule)):
        raise TypeError(
            f"{call}: {name} must be a number or a schedule, got the rule "
            f"{call_name(type(rule))}: rules limit norms, and no norm is measured here."
        )
    table = prefix.freeze(bound, is_function)
    for _, value in table.entries:
        if not callable(value):
            check_limit(f"{call}: {name}", value, lowest=lowest)
    return table


def _inf_for_none(bound: Any) -> Any:
    """Upper bounds, with inf where there is none."""
    return jax.tree.map(
        lambda x: math.inf if x is None else x,
        bound,
        is_leaf=lambda x: x is None or is_function(x) or is_rule(x),
    )


def _check_one_bound(call: str, bound: Any, other: Any) -> None:
    """Raises for both bounds in a tuple, which would be bounds for two leaves."""
    if (
        other is not None
        or not isinstance(bound, (tuple, list))
        or len(bound) != 2
    ):
        return
    low, high = bound
    numbers = isinstance(low, (int, float)) and isinstance(high, (int, float))
    # (-1, 1) is meant as both bounds of each leaf. As a prefix for two leaves it is
    # refused as well, but without a hint.
    if numbers and low < 0 <= high:
        raise ValueError(
            f"{call}: max_value must be the upper bound alone, got {bound!r}: write "
            f"{call}({high!r}, {low!r})."
        )


def _limit(call: str, path: Any, leaf: Any, high: Any, low: Any) -> Any:
    """One leaf between its bounds."""
    # A Python number is a leaf too, and has no dtype of its own.
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    if not jnp.issubdtype(dtype, jnp.number):  # bool, float0 or a key
        return leaf
    x = jnp.asarray(leaf)
    for bound in (high, low):
        if bound is not None and not broadcasts_to(jnp.shape(bound), x.shape):
            raise ValueError(
                f"{call}: a bound of shape {jnp.shape(bound)} does not fit the leaf "
                f"{prefix.name(path)!r} of shape {x.shape}."
            )
    if low is not None and jnp.iscomplexobj(x):
        raise TypeError(
            f"{call}: the leaf {prefix.name(path)!r} is complex and has no order: give "
            "one bound, for its modulus."
        )
    if low is None and is_known_whole(high):
        # A schedule may fall below 0, which counts as 0.
        high = np.maximum(python_ints(high), 0)
        # -np.uint8(5) is 251, so the bound is negated as a Python int.
        low = None if jnp.iscomplexobj(x) else -high
    return _between(x, held_exactly(high, x.dtype), held_exactly(low, x.dtype))


@jax.jit
def _between(x: jax.Array, high: jax.Array, low: Any) -> jax.Array:
    """Selected, so that what lies inside stays bit for bit, in one jitted pass."""
    if low is None:
        high = jnp.maximum(high, 0)
    if jnp.iscomplexobj(x):
        # The modulus of the largest complex numbers is inf, and so above the limit.
        size = jnp.abs(x)
        high = within_range(size.dtype, high).astype(size.dtype)
        return jnp.where(size > high, with_modulus(high, x), x)
    if jnp.issubdtype(x.dtype, jnp.integer):
        high, low = whole_bounds(x.dtype, high, low)
    high = _filled_like(x, high)
    # Negated in the leaf's dtype: in that of an unsigned bound it would wrap.
    low = -high if low is None else _filled_like(x, low)
    # One after the other, so that the upper bound wins where schedules cross.
    raised = jnp.where(x < low, low, x)
    return jnp.where(raised > high, high, raised)


def _filled_like(x: jax.Array, bound: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jnp.floating):
        bound = within_range(x.dtype, bound)
    if jnp.ndim(bound) == 0:
        return jax.lax.full_like(x, bound)
    return jnp.broadcast_to(bound, x.shape).astype(x.dtype)
