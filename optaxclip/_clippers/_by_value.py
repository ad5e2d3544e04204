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
from .._prefixes import Prefix, beginnings, lookup, prefix_table
from .._trees import PyTree
from ..rules._memory import count_up
from ..rules._rule import Number, is_rule

# A bound, or a tree prefix of bounds. None is no bound.
Bounds: TypeAlias = "Number | Mapping[Any, Bounds] | Sequence[Bounds] | None"


@exported
class ClipByValueState(NamedTuple):
    """The state of `clip_by_value`."""

    step: Array  # int32[]: updates seen, for bounds that follow a schedule
    # With count=True the shares of elements that were clipped, else ().
    elements: Shares


def clip_by_value(
    max_value: Bounds, min_value: Bounds = None, *, count: bool = False
) -> optax.GradientTransformationExtraArgs:
    """Clips every element to [min_value, max_value], or to [-max_value, max_value].

    | element            | becomes                                                |
    |--------------------|--------------------------------------------------------|
    | between its bounds | itself, bit for bit                                    |
    | NaN                | NaN                                                    |
    | infinite           | the bound. A complex one becomes NaN                   |
    | complex            | limited by modulus. It takes one bound                 |
    | float              | limited by the bound, rounded to its dtype, maybe      |
    |                    | outwards: 0.1 is 0.1001 in bfloat16                    |
    | integer            | an integer of its dtype. Bounds become floats, and are |
    |                    | rounded inwards                                        |
    | bool, key          | itself                                                 |

    The direction of the gradient changes. No collective is needed.

    Args:
      max_value: the upper bound: a number, a schedule, an array that broadcasts to each
        leaf, or a tree prefix of these, of any real dtype. None for no bound. At least
        0 when it stands alone. A schedule that falls below counts as 0 then.
      min_value: the lower bound, likewise. None for -max_value, also in a tree, where a
        complex leaf needs it. Where schedules cross, the upper bound wins.
      count: whether to count which share of the elements is clipped, for `metrics`.
        On a CPU that takes memory for a copy of the gradients, and the time of an Adam
        step.

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
) -> optax.GradientTransformationExtraArgs:
    """The clipper of two bounds, each (name, bound). Errors name the call and these."""
    high_name, high_bound = high
    low_name, low_bound = low or ("", None)
    upper = _bounds(call, high_name, high_bound, no_bound=math.inf)
    lower = _bounds(call, low_name, low_bound, no_bound=None)
    _check_room(call, low_name, lower, high_name, upper)
    high_argument = f"{call}: {high_name}"
    low_argument = f"{call}: {low_name}"

    def init(params: PyTree) -> ClipByValueState:
        elements = no_elements_clipped() if count else ()
        return ClipByValueState(jnp.zeros((), jnp.int32), elements)

    # A chain hands every argument to all of its links. This clipper takes none.
    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: object
    ) -> Any:
        # A checkpoint of `optax.clip` has EmptyState in this place. Fixed bounds need
        # no count of steps, so it begins anew.
        if can_begin_anew(call, state, (upper, lower)):
            state = init(params)
        checks.check_state(call, state, ClipByValueState)
        trees.check_leaves(updates, f"{call}: ")
        trees.check_sparse(updates, f"{call}: ")
        high_bounds = lookup(upper, updates, high_argument)
        low_bounds = lookup(lower, updates, low_argument)
        entries, treedef = jax.tree.flatten_with_path(updates)
        results = []
        for (path, leaf), high_of_leaf, low_of_leaf in zip(
            entries, high_bounds, low_bounds
        ):
            high_value = _bound_at(state.step, high_of_leaf, high_argument)
            low_value = _bound_at(state.step, low_of_leaf, low_argument)
            clipped = _clipped(call, trees.path_name(path), leaf, high_value, low_value)
            results.append(clipped)
        step = count_up(state.step)
        elements = state.elements
        if count:
            # A leaf without numbers, such as a key, is the same object as before.
            before_and_after = []
            for (_, leaf), clipped in zip(entries, results):
                if clipped is not leaf:
                    before_and_after.append((trees.unbox(leaf), clipped))
            elements = count_clipped(call, elements, step, before_and_after)
        new_state = ClipByValueState(step, elements)
        return jax.tree.unflatten(treedef, results), new_state

    return optax.GradientTransformationExtraArgs(init, update)


def clip(max_delta: Bounds) -> optax.GradientTransformationExtraArgs:
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


def _bounds(call: str, name: str, bound: Bounds, *, no_bound: float | None) -> Prefix:
    """The bounds of all leaves, checked. `no_bound` takes the place of None."""
    # A rule is taken as one value. The check then says that it is no number.
    table = prefix_table(bound, lambda x: is_function(x) or is_rule(x))
    entries = []
    for path, value in table.entries:
        if value is None:
            value = no_bound
        elif callable(value):
            checks.check_schedule(f"{call}: {name}", value)
        else:
            checks.check_limit(f"{call}: {name}", value, lowest=-math.inf)
        entries.append((path, value))
    return Prefix(tuple(entries))


def _check_room(
    call: str, low_name: str, lower: Prefix, high_name: str, upper: Prefix
) -> None:
    """Raises ValueError for bounds of the same leaves that leave no room between them,
    and for a negative upper bound that stands alone.
    """
    low_bounds = dict(lower.entries)
    high_bounds = dict(upper.entries)
    # One of two bounds of the same leaves may be for more leaves: its path is then a
    # beginning of the other path.
    for path in low_bounds | high_bounds:
        starts = list(beginnings(path))
        # One of each at most, since a leaf has one bound.
        lows = [low_bounds[start] for start in starts if start in low_bounds]
        highs = [high_bounds[start] for start in starts if start in high_bounds]
        for low, high in zip(lows, highs):
            if low is not None:
                checks.check_order(call, (low_name, low), (high_name, high))
            elif not callable(high):
                # Alone, it limits the modulus.
                checks.check_limit(f"{call}: {high_name}", high)


def _bound_at(step: Array, bound: Number | None, argument: str) -> Any:
    """A bound at a step, which a schedule follows."""
    if not callable(bound):
        return bound
    value = bound(step)
    checks.check_real(f"{argument}: what a schedule returns", value)
    return value


def _clipped(
    call: str, name: str, leaf: Any, high: ArrayLike, low: ArrayLike | None
) -> Any:
    """One leaf between its bounds. Errors name the leaf."""
    x = trees.unbox(leaf)
    if trees.is_hole(x):
        return leaf
    dtype = jnp.result_type(x)
    if not jnp.issubdtype(dtype, jnp.number):  # bool, float0 or a key
        return leaf
    x = jnp.asarray(x)
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
        _, largest = _bounds_in(None, high, jnp.finfo(dtype).dtype)
        # The modulus of the largest complex numbers is inf, and so above the limit.
        return jnp.where(jnp.abs(x) > largest, with_modulus(largest, x), x)
    lower, upper = _bounds_in(low, high, dtype)
    lower = jnp.broadcast_to(lower, x.shape)
    upper = jnp.broadcast_to(upper, x.shape)
    # Where schedules cross the upper bound wins, as in `optax.clip`.
    return jnp.clip(x, lower, upper).astype(x.dtype)


def _bounds_in(
    low: ArrayLike | None, high: ArrayLike, dtype: DTypeLike
) -> tuple[Any, Any]:
    """Both bounds in the dtype of a leaf. Beyond its range a bound is the end of it."""
    upper = _as_float(high)
    if low is None:
        numpy = jnp if isinstance(upper, Array) else np
        # A schedule below 0 counts as 0.
        upper = numpy.maximum(upper, 0)
        lower = -upper
    else:
        lower = _as_float(low)
    if jnp.issubdtype(dtype, jnp.integer):
        return (
            _in_integers(dtype, lower, is_lower=True),
            _in_integers(dtype, upper, is_lower=False),
        )
    # inf stays inf where the dtype has it.
    return (
        checks.kept_finite(dtype, lower).astype(dtype),
        checks.kept_finite(dtype, upper).astype(dtype),
    )


def _as_float(bound: ArrayLike) -> Any:
    """A bound as a float: in 64 bits, or 32 for arrays of JAX in 32 bits or fewer."""
    if not isinstance(bound, Array):
        return np.asarray(bound).astype(np.float64)
    # JAX promotes no floats of 8 bits, and no numbers of 4. float32 holds them all.
    return bound.astype(np.float64 if bound.dtype.itemsize > 4 else np.float32)


def _in_integers(dtype: DTypeLike, bound: Any, *, is_lower: bool) -> Any:
    """A bound, rounded inwards to a dtype of integers."""
    numpy = jnp if isinstance(bound, Array) else np
    rounded = numpy.ceil(bound) if is_lower else numpy.floor(bound)
    if isinstance(bound, Array):
        # XLA converts numbers beyond the range to the ends of it.
        return rounded.astype(dtype)
    # NumPy does not. Python compares its own floats exactly: 2^63 is above 2^63 - 1,
    # which float64 does not have.
    info = jnp.iinfo(dtype)
    numbers = np.array(rounded.tolist(), object)
    return np.asarray(np.clip(numbers, info.min, info.max), dtype)
