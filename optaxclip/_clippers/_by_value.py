"""Clipping by value: every element by itself, between bounds."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .. import _trees as trees
from .._checks import (
    begins_anew,
    broadcasts_to,
    check_flag,
    check_limit,
    check_order,
    check_state,
    is_function,
    shown,
)
from .._exported import exported
from .._state import ClippedElements, count_clipped, no_elements_clipped
from .._sums import with_modulus
from ..rules._rule import Number, call_name, is_rule

# A bound, or a tree prefix of bounds. None is no bound.
Bounds: TypeAlias = "Number | Mapping[Any, Bounds] | Sequence[Bounds] | None"


@exported
class ClipByValueState(NamedTuple):
    """The state of `clip_by_value`."""

    step: jax.Array  # int32[]: updates seen, for bounds that follow a schedule
    # Which share of them was clipped, where that is counted, else ().
    elements: ClippedElements | tuple[()]


def clip_by_value(
    max_value: Bounds, min_value: Bounds = None, *, count: bool = False
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
      count: whether to count which share of the elements is clipped, for `metrics`.
        On a CPU that takes a copy of the gradients, and as long as Adam.

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
    if min_value is None:
        _check_one_bound(call, max_value)
    low = None if min_value is None else ("min_value", min_value)
    high = "max_value", _inf_for_none(max_value)
    check_flag(f"{call}: count", count)
    return value_clipper(call, high, low, count=count)


def value_clipper(
    call: str,
    high: tuple[str, Any],
    low: tuple[str, Any] | None = None,
    *,
    count: bool = False,
) -> optax.GradientTransformation:
    """The clipper of two bounds. `call` and their names are what errors call them."""
    # Alone the upper bound limits the modulus. Beside a lower one any sign is right.
    lowest = 0.0 if low is None else -math.inf
    upper = _bounds(call, *high, lowest)
    lower = None
    if low is not None:
        lower = _bounds(call, *low, lowest)
        _check_room(call, (low[0], lower), (high[0], upper))

    def init(params: Any) -> ClipByValueState:
        elements = no_elements_clipped() if count else ()
        return ClipByValueState(jnp.zeros((), jnp.int32), elements)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        # A checkpoint of `optax.clip` has EmptyState here. Fixed bounds need no more.
        if begins_anew(call, state, (upper, lower)):
            state = init(params)
        check_state(call, state, ClipByValueState)
        trees.check_leaves(updates, f"{call}: ")
        uppers = trees.lookup(upper, updates, f"{call}: {high[0]}")
        lowers: list[Any] = [None] * len(uppers)
        if low is not None and lower is not None:
            lowers = trees.lookup(lower, updates, f"{call}: {low[0]}")
        paths, treedef = jax.tree_util.tree_flatten_with_path(updates)

        def now(bound: Any) -> Any:
            return bound(state.step) if callable(bound) else bound

        clipped = []
        for (path, leaf), above, below in zip(paths, uppers, lowers):
            own = call, trees.name(path)
            clipped.append(_clipped(own, leaf, now(above), now(below)))
        elements = state.elements
        if count:
            # Leaves without numbers are the same objects as before.
            pairs = [(x, y) for (_, x), y in zip(paths, clipped) if x is not y]
            elements = count_clipped(elements, state.step, pairs)
        step = jnp.asarray(optax.safe_increment(state.step))
        new = ClipByValueState(step, elements)
        return jax.tree.unflatten(treedef, clipped), new

    return optax.GradientTransformation(init, update)


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


def _bounds(call: str, name: str, bound: Any, lowest: float) -> trees.Prefix:
    for rule in filter(is_rule, jax.tree.leaves(bound, is_leaf=is_rule)):
        raise TypeError(
            f"{call}: {name} must be a number or a schedule, got the rule "
            f"{call_name(type(rule))}: rules limit norms, and no norm is measured here."
        )
    table = trees.freeze(bound, is_function)
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


def _check_one_bound(call: str, bound: Any) -> None:
    """Raises for both bounds in a tuple, which would be bounds for two leaves."""
    is_pair = isinstance(bound, (tuple, list)) and len(bound) == 2
    # (-1, 1) is meant as both bounds of each leaf. As a prefix for two leaves it is
    # refused as well, but without a hint.
    if is_pair and all(isinstance(x, (int, float)) for x in bound):
        low, high = bound
        if low < 0 <= high:
            raise ValueError(
                f"{call}: max_value must be the upper bound alone, got {shown(bound)}: "
                f"write {call}({shown(high)}, {shown(low)})."
            )


def _check_room(
    call: str, low: tuple[str, trees.Prefix], high: tuple[str, trees.Prefix]
) -> None:
    """Raises for two bounds of one leaf that are known to cross."""
    for path, below in low[1].entries:
        for other, above in high[1].entries:
            depth = min(len(path), len(other))
            # One of both is at the other's place, or above it.
            if path[:depth] == other[:depth]:
                check_order(call, (low[0], below), (high[0], above))


def _clipped(own: tuple[str, str], leaf: Any, high: Any, low: Any) -> Any:
    """One leaf between its bounds. `own` is the call, and the name of the leaf."""
    # A Python number is a leaf too, and has no dtype of its own.
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    if not jnp.issubdtype(dtype, jnp.number):  # bool, float0 or a key
        return leaf
    x = jnp.asarray(leaf)
    for bound in (high, low):
        shape = () if bound is None else jnp.shape(bound)
        if not broadcasts_to(shape, x.shape):
            raise ValueError(
                f"{own[0]}: a bound of shape {shape} does not fit the leaf {own[1]!r} "
                f"of shape {x.shape}."
            )
    if low is not None and jnp.iscomplexobj(x):
        raise TypeError(
            f"{own[0]}: the leaf {own[1]!r} is complex and has no order: give one "
            "bound, for its modulus."
        )
    if jnp.iscomplexobj(x):
        most = _held(high, jnp.finfo(dtype).dtype, sign=1)
        # The modulus of the largest complex numbers is inf, and so above the limit.
        return jnp.where(jnp.abs(x) > most, with_modulus(most, x), x)
    if low is None:
        bounds = _held(high, dtype, sign=-1), _held(high, dtype, sign=1)
    else:
        bounds = _held(low, dtype, up=True), _held(high, dtype)
    return _between(x, *bounds)


# Jitted, so that it is one call without jit, which writes no broadcast bounds.
@jax.jit
def _between(x: jax.Array, low: Any, high: Any) -> jax.Array:
    low, high = (jnp.broadcast_to(bound, x.shape) for bound in (low, high))
    # As `optax.clip`. The upper bound wins where schedules cross.
    return jnp.clip(x, low, high).astype(x.dtype)


# ------------------------------------------------------- bounds in the dtype of a leaf
#
# Beyond the range of a dtype a bound is the end of it, and inf stays inf. For integers
# bounds are rounded inwards. With a `sign` the bound stands alone, on the other side as
# well: below 0 it counts as 0. No number may wrap, so what is known is computed in
# NumPy, with Python's ints. JAX would cut numbers of 64 bits to 32.


def _held(bound: Any, dtype: Any, *, sign: int = 0, up: bool = False) -> Any:
    is_late = isinstance(bound, jax.Array)
    kinds = [jnp.result_type(bound), dtype]
    if is_late and all(jnp.issubdtype(x, jnp.integer) for x in kinds):
        return _held_integer(bound, dtype, sign)
    numpy = jnp if is_late else np
    numbers = numpy.asarray(bound)
    is_whole = numbers.dtype.kind in "iuO" and not is_late
    wide = jnp.promote_types(bound.dtype, np.float32) if is_late else np.float64
    numbers = numbers.astype(object if is_whole else wide)
    if sign:
        # NumPy makes ints of Python of arrays without dimensions.
        numbers = numpy.asarray(sign * numpy.maximum(numbers, 0))
    if not jnp.issubdtype(dtype, jnp.integer):
        return _within_range(numpy, numbers.astype(wide), dtype)
    if not is_whole:
        is_lower = up or sign < 0
        numbers = numpy.ceil(numbers) if is_lower else numpy.floor(numbers)
    ends = int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max)
    if is_late:
        return jnp.clip(numbers, *map(float, ends)).astype(dtype)
    held = np.clip(numbers.astype(object), *ends)
    return np.asarray(held).astype(dtype)


def _held_integer(bound: jax.Array, dtype: Any, sign: int) -> jax.Array:
    """The same for integers that only a run knows."""
    own, info = jnp.iinfo(bound.dtype), jnp.iinfo(dtype)
    bound = jnp.maximum(bound, 0) if sign else bound
    if sign < 0:
        # 2^31 is no int32, but it wraps to -2^31, which is its own negative.
        end = np.array(min(own.max, -int(info.min)), own.dtype)
        return -jnp.minimum(bound, end).astype(dtype)
    # The ends of an int32 leaf would wrap in the dtype of an int8 bound.
    ends = max(own.min, info.min), min(own.max, info.max)
    return jnp.clip(bound, *np.array(ends, own.dtype)).astype(dtype)


def _within_range(numpy: Any, wide: Any, dtype: Any) -> Any:
    most = float(jnp.finfo(dtype).max)
    if most > float(jnp.finfo(wide.dtype).max):
        return wide.astype(dtype)
    held = numpy.clip(wide, -most, most)
    return numpy.where(numpy.isinf(wide), wide, held).astype(dtype)
