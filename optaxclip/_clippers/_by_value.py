"""Clipping by value: every element by itself, between bounds."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from .. import _checks as checks
from .. import _trees as trees
from .._checks import broadcasts_to, can_begin_anew, is_function
from .._elements import Shares, count_clipped, no_elements_clipped
from .._exported import exported
from .._moduli import with_modulus
from .._prefixes import Prefix, lookup, prefix_table
from .._trees import PyTree
from ..rules._memory import count_up
from ..rules._rule import Number, is_rule

# A bound, or a tree prefix of bounds. None is no bound.
Bounds: TypeAlias = "Number | Mapping[Any, Bounds] | Sequence[Bounds] | None"


@exported
class ClipByValueState(NamedTuple):
    """The state of `clip_by_value`."""

    step: Array  # int32[]: updates seen, for bounds that follow a schedule
    # Which share of them was clipped, where that is counted, else ().
    elements: Shares


def clip_by_value(
    max_value: Bounds, min_value: Bounds = None, *, count: bool = False
) -> optax.GradientTransformation:
    """Clips every element to [min_value, max_value], or to [-max_value, max_value].

    | element            | becomes                                                |
    |--------------------|--------------------------------------------------------|
    | between its bounds | itself, bit for bit                                    |
    | NaN                | NaN                                                    |
    | infinite           | the bound. A complex one becomes NaN                   |
    | complex            | limited by modulus. It takes one bound                 |
    | integer            | an integer of its dtype. Bounds are rounded inwards    |
    | bool, key          | itself                                                 |

    The direction of the gradient changes. No collective is needed.

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
    # Alone, the upper bound limits the modulus, so it is at least 0. With a lower bound
    # too, either may be negative.
    if low is None:
        upper = _bounds(call, *high, lowest=0.0, no_bound=math.inf)
        lower = Prefix((((), None),))
    else:
        upper = _bounds(call, *high, lowest=-math.inf, no_bound=math.inf)
        lower = _bounds(call, *low, lowest=-math.inf, no_bound=-math.inf)
        for low_path, low_bound in lower.entries:
            for high_path, high_bound in upper.entries:
                # Two bounds are compared if both are for the same leaves, or one is for
                # a part of the leaves of the other.
                length = min(len(low_path), len(high_path))
                if low_path[:length] == high_path[:length]:
                    checks.check_order(call, (low[0], low_bound), (high[0], high_bound))

    def init(params: PyTree) -> ClipByValueState:
        elements = no_elements_clipped() if count else ()
        return ClipByValueState(jnp.zeros((), jnp.int32), elements)

    # A chain hands every argument to all of its links. This clipper takes none.
    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra: object
    ) -> Any:
        # A checkpoint of `optax.clip` has EmptyState in this place. Fixed bounds need
        # no count of steps, so it begins anew.
        if can_begin_anew(call, state, (upper, lower)):
            state = init(params)
        checks.check_state(call, state, ClipByValueState)
        trees.check_leaves(updates, f"{call}: ")
        trees.check_sparse(updates, f"{call}: ")
        high_argument = f"{call}: {high[0]}"
        low_argument = f"{call}: {low[0]}" if low else ""
        high_bounds = lookup(upper, updates, high_argument)
        low_bounds = lookup(lower, updates, low_argument)
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
            # A leaf without numbers, such as a key, is the same object as before.
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
    call: str, name: str, bound: ArrayLike, lowest: float, no_bound: float
) -> Prefix:
    # A rule is taken as one value. The check then says that it is no number.
    table = prefix_table(bound, lambda x: is_function(x) or is_rule(x))
    entries = []
    for path, value in table.entries:
        if value is None:
            value = no_bound
        if callable(value):
            checks.check_schedule(f"{call}: {name}", value)
        else:
            checks.check_limit(f"{call}: {name}", value, lowest=lowest)
        entries.append((path, value))
    return Prefix(tuple(entries))


def _bound_at(step: Array, bound: ArrayLike, argument: str) -> Any:
    """A bound at a step, which a schedule follows."""
    if not callable(bound):
        return bound
    value = bound(step)
    checks.check_real(f"{argument}: what a schedule returns", value)
    return value


def _clipped(call: str, name: str, leaf: Array, high: ArrayLike, low: ArrayLike) -> Any:
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
    # Where schedules cross the upper bound wins, as in `optax.clip`.
    return jnp.clip(x, low, high).astype(x.dtype)


def _bound_in_dtype(
    bound: ArrayLike, dtype: DTypeLike, *, sign: int = 0, up: bool = False
) -> Any:
    """A bound in the dtype of a leaf. Beyond its range a bound is the end of it, and
    inf stays inf where the dtype has it. For integers a bound is rounded down, or up
    for `up` and a `sign` of -1.

    `sign`: 1 or -1 for one bound of both sides, which is max(bound, 0) with this sign.
    0 for a bound of one side, which stays as it is.
    """
    is_for_integers = bool(jnp.issubdtype(dtype, jnp.integer))
    number = _with_sign(_exact(bound, dtype, is_for_integers), sign)
    if not is_for_integers:
        return checks.kept_finite(dtype, number).astype(dtype)
    if jnp.issubdtype(number.dtype, jnp.floating):
        numpy = jnp if isinstance(number, Array) else np
        number = numpy.ceil(number) if up or sign < 0 else numpy.floor(number)
    return _held_in_integers(number, dtype)


def _exact(bound: ArrayLike, dtype: DTypeLike, is_for_integers: bool) -> Any:
    """A bound before it is rounded, for a leaf of this dtype. Whole numbers for a leaf
    of integers stay whole numbers.
    """
    if not isinstance(bound, Array):
        array = np.asarray(bound)
        # Python's ints have any size.
        is_whole = is_for_integers and array.dtype.kind in "iuO"
        return array.astype(object if is_whole else np.float64)
    if is_for_integers and bound.dtype.kind in "iu":
        return bound
    # JAX promotes no floats of 8 bits, and no numbers of 4. float32 holds them all.
    itemsize = max(bound.dtype.itemsize, np.dtype(dtype).itemsize)
    return bound.astype(np.float64 if itemsize > 4 else np.float32)


def _with_sign(number: Array | np.ndarray, sign: int) -> Any:
    """A bound that stands alone, on the side of `sign`. With 0 it is not alone."""
    if not sign:
        return number
    numpy = jnp if isinstance(number, Array) else np
    size = numpy.asarray(numpy.maximum(number, 0))
    if sign > 0:
        return size
    if number.dtype.kind != "u":
        return numpy.asarray(-size)
    # Unsigned numbers have no negative. Beyond the largest signed number the bound is
    # below all leaves.
    signed = jnp.iinfo(jnp.result_type(int))
    most = min(signed.max, jnp.iinfo(number.dtype).max)
    return jnp.where(number > most, signed.min, -number.astype(signed.dtype))


def _held_in_integers(number: Array | np.ndarray, dtype: DTypeLike) -> Any:
    """A whole number in a dtype of integers, beyond whose range it becomes an end."""
    info = jnp.iinfo(dtype)
    # JAX would cut numbers of 64 bits to 32. Python's ints do not wrap.
    if not isinstance(number, Array):
        number = np.clip(number.astype(object), int(info.min), int(info.max))
        return np.asarray(number).astype(dtype)
    is_float = jnp.issubdtype(number.dtype, jnp.floating)
    number_info = jnp.finfo(number.dtype) if is_float else jnp.iinfo(number.dtype)
    integers = number.astype(dtype)
    # The ends are selected: what a conversion makes of larger numbers is not defined.
    # float32 rounds 2^31 - 1 to 2^31, which is beyond the range too.
    if number_info.max > info.max:
        is_above = number >= np.array(info.max, number.dtype)
        integers = jnp.where(is_above, np.array(info.max, dtype), integers)
    if number_info.min < info.min:
        is_below = number <= np.array(info.min, number.dtype)
        integers = jnp.where(is_below, np.array(info.min, dtype), integers)
    return integers
