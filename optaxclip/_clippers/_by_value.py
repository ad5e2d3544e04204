"""Clipping by value: every element by itself, between bounds."""

import math
from collections.abc import Mapping, Sequence
from itertools import product
from operator import eq
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .. import _checks as checks
from .. import _trees as trees
from .._checks import begins_anew, broadcasts_to, is_function
from .._elements import ClippedElements, count_clipped, no_elements_clipped
from .._exported import exported
from .._sums import with_modulus
from ..rules._memory import count_up
from ..rules._rule import Number, is_rule

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
    infinite element becomes the bound, and a complex one NaN. Integer leaves keep their
    dtype: the bounds are rounded inwards. Bools and keys pass. The direction of the
    gradient changes. No collective is needed.

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
    low = None if min_value is None else ("min_value", min_value)
    checks.check_flag(f"{call}: count", count)
    return value_clipper(call, ("max_value", max_value), low, count=count)


def value_clipper(
    call: str,
    high: tuple[str, Any],
    low: tuple[str, Any] | None = None,
    *,
    count: bool = False,
) -> optax.GradientTransformation:
    """The clipper of two bounds. `call` and their names are what errors call them."""
    # Alone the upper bound limits the modulus. Beside a lower one any sign is right.
    upper = _bounds(call, *high, 0.0 if low is None else -math.inf, math.inf)
    lower = trees.Prefix((((), None),))
    if low is not None:
        lower = _bounds(call, *low, -math.inf, -math.inf)
        for (path, below), (other, above) in product(lower.entries, upper.entries):
            # Where one of both is for a part of the other's.
            if all(map(eq, path, other)):
                checks.check_order(call, (low[0], below), (high[0], above))

    def init(params: Any) -> ClipByValueState:
        elements = no_elements_clipped() if count else ()
        return ClipByValueState(jnp.zeros((), jnp.int32), elements)

    # A chain hands every argument to all of its links. Those are of other clippers.
    def update(updates: Any, state: Any, params: Any = None, **others: Any) -> Any:
        # A checkpoint of `optax.clip` has EmptyState here. Fixed bounds need no more.
        if begins_anew(call, state, (upper, lower)):
            state = init(params)
        checks.check_state(call, state, ClipByValueState)
        trees.check_leaves(updates, f"{call}: ")
        uppers = trees.lookup(upper, updates, f"{call}: {high[0]}")
        lowers = trees.lookup(lower, updates, f"{call}: {low and low[0]}")
        paths, treedef = jax.tree.flatten_with_path(updates)
        clipped = []
        for (path, leaf), *bounds in zip(paths, uppers, lowers):
            now = [x(state.step) if callable(x) else x for x in bounds]
            for own, bound, value in zip((high, low), bounds, now):
                if own and callable(bound):
                    what = f"{call}: {own[0]}: what a schedule returns"
                    checks.check_real(what, value)
            clipped.append(_clipped((call, trees.name(path)), leaf, *now))
        step, elements = count_up(state.step), state.elements
        if count:
            # Leaves without numbers are the same objects as before.
            pairs = [(x, y) for (_, x), y in zip(paths, clipped) if x is not y]
            elements = count_clipped(elements, step, pairs)
        new = ClipByValueState(step, elements)
        return jax.tree.unflatten(treedef, clipped), new

    return optax.GradientTransformationExtraArgs(init, update)


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
    return value_clipper("clip", ("max_delta", max_delta))


def _bounds(
    call: str, name: str, bound: Any, lowest: float, no_bound: float
) -> trees.Prefix:
    # A rule is one value, of which the check says that it is no number.
    table = trees.freeze(bound, lambda x: is_function(x) or is_rule(x))
    entries = []
    for path, value in table.entries:
        if value is None:
            value = no_bound
        if callable(value):
            checks.check_schedule(f"{call}: {name}", value)
        else:
            checks.check_limit(f"{call}: {name}", value, lowest=lowest)
        entries.append((path, value))
    return trees.Prefix(tuple(entries))


def _clipped(own: tuple[str, str], leaf: Any, high: Any, low: Any) -> Any:
    """One leaf between its bounds. `own` is the call, and the name of the leaf."""
    dtype = jnp.result_type(leaf)
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
    if jnp.iscomplexobj(x):
        if low is not None:
            raise TypeError(
                f"{own[0]}: the leaf {own[1]!r} is complex and has no order: give one "
                "bound, for its modulus."
            )
        most = _held(high, jnp.finfo(dtype).dtype, sign=1)
        # The modulus of the largest complex numbers is inf, and so above the limit.
        return jnp.where(jnp.abs(x) > most, with_modulus(most, x), x)
    if low is None:
        bounds = _held(high, dtype, sign=-1), _held(high, dtype, sign=1)
    else:
        bounds = _held(low, dtype, up=True), _held(high, dtype)
    # As `optax.clip`. The upper bound wins where schedules cross.
    low, high = (jnp.broadcast_to(bound, x.shape) for bound in bounds)
    return jnp.clip(x, low, high).astype(x.dtype)


def _held(bound: Any, dtype: Any, *, sign: int = 0, up: bool = False) -> Any:
    """A bound in the dtype of a leaf. Beyond its range a bound is the end of it, and
    inf stays inf. For integers bounds are rounded inwards, to above for `up`. With a
    `sign` the bound stands alone, on the other side as well: below 0 it counts as 0.
    """
    # No number may wrap. What is known is computed with NumPy and Python's ints, since
    # JAX would cut numbers of 64 bits to 32.
    is_known = not isinstance(bound, jax.Array)
    numpy, number = (np, np.asarray(bound)) if is_known else (jnp, bound)
    is_float = not jnp.issubdtype(dtype, jnp.integer)
    # Unsigned numbers of a run have no negative, so they become floats.
    is_whole = number.dtype.kind in ("iuO" if is_known else "i") and not is_float
    wide = np.dtype(np.float64)
    if not is_known:
        # JAX promotes no numbers of 4 and 8 bits. float32 holds them all.
        long = [x for x in (number.dtype, dtype) if x.itemsize > 4]
        wide = jnp.result_type(jnp.float32, *long)
    whole = object if is_known else number.dtype
    number = number.astype(whole if is_whole else wide)
    if sign:
        number = numpy.asarray(sign * numpy.maximum(number, 0))
    if is_float:
        return checks.kept_finite(dtype, number).astype(dtype)
    if not is_whole:
        number = numpy.ceil(number) if up or sign < 0 else numpy.floor(number)
    ends = int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max)
    if is_known:
        return np.asarray(np.clip(number.astype(object), *ends)).astype(dtype)
    # The ends of an int32 leaf would wrap in the dtype of an int8 bound.
    info = jnp.iinfo(whole) if is_whole else jnp.finfo(wide)
    inner = max(ends[0], int(info.min)), min(ends[1], int(info.max))
    return jnp.clip(number, *np.array(inner, number.dtype)).astype(dtype)
