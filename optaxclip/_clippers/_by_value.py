"""Clipping by value: every element by itself, between bounds."""

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .. import _checks as checks
from .. import _trees as trees
from .._checks import begins_anew, broadcasts_to, is_function
from .._elements import Shares, count_clipped, no_elements_clipped
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
    elements: Shares


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
    if low is None:
        upper = _bounds(call, *high, lowest=0.0, no_bound=math.inf)
        lower = trees.Prefix((((), None),))
    else:
        upper = _bounds(call, *high, lowest=-math.inf, no_bound=math.inf)
        lower = _bounds(call, *low, lowest=-math.inf, no_bound=-math.inf)
        for (low_path, low_bound), (high_path, high_bound) in product(
            lower.entries, upper.entries
        ):
            # Both bounds are for the same leaves, or for a part of the other's.
            if all(a == b for a, b in zip(low_path, high_path)):
                checks.check_order(call, (low[0], low_bound), (high[0], high_bound))

    def init(params: Any) -> ClipByValueState:
        elements = no_elements_clipped() if count else ()
        return ClipByValueState(jnp.zeros((), jnp.int32), elements)

    # A chain hands every argument to all of its links. This clipper has none.
    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        # A checkpoint of `optax.clip` has EmptyState here. Fixed bounds need no more.
        if begins_anew(call, state, (upper, lower)):
            state = init(params)
        checks.check_state(call, state, ClipByValueState)
        trees.check_leaves(updates, f"{call}: ")
        trees.check_sparse(updates, f"{call}: ")
        high_argument = f"{call}: {high[0]}"
        low_argument = f"{call}: {low[0]}" if low else ""
        high_bounds = trees.lookup(upper, updates, high_argument)
        low_bounds = trees.lookup(lower, updates, low_argument)
        entries, treedef = jax.tree.flatten_with_path(updates)
        clipped_leaves = []
        for (path, leaf), high_bound, low_bound in zip(
            entries, high_bounds, low_bounds
        ):
            most = _bound_at(state.step, high_bound, high_argument)
            least = _bound_at(state.step, low_bound, low_argument)
            clipped = _clipped(call, trees.name(path), leaf, most, least)
            clipped_leaves.append(clipped)
        step = count_up(state.step)
        elements = state.elements
        if count:
            # Leaves without numbers are the same objects as before.
            pairs = []
            for (_, leaf), clipped in zip(entries, clipped_leaves):
                if clipped is not leaf:
                    pairs.append((leaf, clipped))
            elements = count_clipped(call, elements, step, pairs)
        new_state = ClipByValueState(step, elements)
        return jax.tree.unflatten(treedef, clipped_leaves), new_state

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


def _bound_at(step: jax.Array, bound: Any, argument: str) -> Any:
    """A bound at a step, which a schedule follows."""
    if not callable(bound):
        return bound
    value = bound(step)
    checks.check_real(f"{argument}: what a schedule returns", value)
    return value


def _clipped(call: str, name: str, leaf: Any, high: Any, low: Any) -> Any:
    """One leaf between its bounds. Errors name the leaf."""
    dtype = jnp.result_type(leaf)
    if not jnp.issubdtype(dtype, jnp.number):  # bool, float0 or a key
        return leaf
    x = jnp.asarray(leaf)
    for bound in (high, low):
        shape = () if bound is None else jnp.shape(bound)
        if not broadcasts_to(shape, x.shape):
            raise ValueError(
                f"{call}: a bound of shape {shape} does not fit the leaf {name!r} "
                f"of shape {x.shape}."
            )
    if jnp.iscomplexobj(x):
        if low is not None:
            raise TypeError(
                f"{call}: the leaf {name!r} is complex and has no order: give one "
                "bound, for its modulus."
            )
        most = _bound_in_dtype(high, jnp.finfo(dtype).dtype, sign=1)
        # The modulus of the largest complex numbers is inf, and so above the limit.
        return jnp.where(jnp.abs(x) > most, with_modulus(most, x), x)
    if low is None:
        low = _bound_in_dtype(high, dtype, sign=-1)
        high = _bound_in_dtype(high, dtype, sign=1)
    else:
        low = _bound_in_dtype(low, dtype, up=True)
        high = _bound_in_dtype(high, dtype)
    low = jnp.broadcast_to(low, x.shape)
    high = jnp.broadcast_to(high, x.shape)
    # As `optax.clip`. The upper bound wins where schedules cross.
    return jnp.clip(x, low, high).astype(x.dtype)


def _bound_in_dtype(bound: Any, dtype: Any, *, sign: int = 0, up: bool = False) -> Any:
    """A bound in the dtype of a leaf. Beyond its range a bound is the end of it, and
    inf stays inf. For integers bounds are rounded inwards, to above for `up`. With a
    `sign` the bound stands alone, on the other side as well: below 0 it counts as 0.
    """
    if jnp.issubdtype(dtype, jnp.integer):
        is_rounded_up = up or sign < 0
        if isinstance(bound, jax.Array):
            return _array_for_integers(bound, dtype, sign, is_rounded_up)
        return _number_for_integers(np.asarray(bound), dtype, sign, is_rounded_up)
    if isinstance(bound, jax.Array):
        number = bound.astype(_wide_dtype_of(bound, dtype))
    else:
        number = np.asarray(bound).astype(np.float64)
    return checks.kept_finite(dtype, _with_sign(number, sign)).astype(dtype)


def _number_for_integers(
    bound: np.ndarray, dtype: Any, sign: int, is_rounded_up: bool
) -> np.ndarray:
    """A bound that is known. No number may wrap, so NumPy and Python's ints compute it:
    JAX would cut numbers of 64 bits to 32.
    """
    if bound.dtype.kind in "iuO":
        number = _with_sign(bound.astype(object), sign)
    else:
        number = _with_sign(bound.astype(np.float64), sign)
        number = np.ceil(number) if is_rounded_up else np.floor(number)
    info = jnp.iinfo(dtype)
    number = np.clip(number.astype(object), int(info.min), int(info.max))
    return np.asarray(number).astype(dtype)


def _array_for_integers(
    bound: jax.Array, dtype: Any, sign: int, is_rounded_up: bool
) -> jax.Array:
    """A bound that only a running program knows."""
    # Unsigned numbers have no negative, so they become floats.
    if bound.dtype.kind == "i":
        number = _with_sign(bound, sign)
        number_info = jnp.iinfo(number.dtype)
    else:
        number = _with_sign(bound.astype(_wide_dtype_of(bound, dtype)), sign)
        number = jnp.ceil(number) if is_rounded_up else jnp.floor(number)
        number_info = jnp.finfo(number.dtype)
    info = jnp.iinfo(dtype)
    # The ends of an int32 leaf would wrap in the dtype of an int8 bound.
    least = max(int(info.min), int(number_info.min))
    most = min(int(info.max), int(number_info.max))
    ends = np.array([least, most], number.dtype)
    return jnp.clip(number, *ends).astype(dtype)


def _with_sign(number: Any, sign: int) -> Any:
    """A bound that stands alone, on the side of `sign`. 0 leaves it as it is."""
    if not sign:
        return number
    numpy = jnp if isinstance(number, jax.Array) else np
    return numpy.asarray(sign * numpy.maximum(number, 0))


def _wide_dtype_of(bound: jax.Array, dtype: Any) -> Any:
    """A float dtype for a bound of a run: float32, or wider."""
    # JAX promotes no numbers of 4 and 8 bits. float32 holds them all.
    wide = [x for x in (bound.dtype, np.dtype(dtype)) if x.itemsize > 4]
    return jnp.result_type(jnp.float32, *wide)
