"""Clipping by value: every element by itself, between bounds."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from .. import _trees as trees
from .._arguments import checks
from .._arguments.checks import broadcasts_to, can_begin_anew
from .._arguments.functions import is_function
from .._arguments.prefixes import Prefix, covering_path, lookup, prefix_table
from .._norms.moduli import with_modulus
from .._numbers import kept_finite
from .._state.interop import exported
from .._trees import PyTree
from ..rules._memory import count_up
from ..rules._rule import Number, is_rule
from .elements import Shares, no_elements_clipped, shares_after

# A bound, or a tree prefix of bounds. None is no bound.
Bounds: TypeAlias = "Number | Mapping[Any, Bounds] | Sequence[Bounds] | None"


@exported
class ClipByValueState(NamedTuple):
    """The state of `clip_by_value`."""

    step: Array  # int32[]: updates seen, for bounds that follow a schedule
    # With count=True float32[3]: the shares of elements that were clipped, else ().
    elements: Shares


def clip_by_value(
    max_value: Bounds, min_value: Bounds = None, *, count: bool = False
) -> optax.GradientTransformationExtraArgs:
    """Clips every element to [min_value, max_value], or to [-max_value, max_value].

    | element            | becomes                                                |
    |--------------------|--------------------------------------------------------|
    | between its bounds | itself, bit for bit, but -0.0 at a bound of 0 may      |
    |                    | become 0.0                                             |
    | NaN                | NaN                                                    |
    | infinite           | the bound, or NaN if it is complex. Without a bound    |
    |                    | itself                                                 |
    | complex            | limited by modulus. It takes one bound                 |
    | float              | limited by the bound as its dtype holds it, which may  |
    |                    | be larger: 0.1 is 0.1001 in bfloat16                   |
    | integer            | limited by the bound rounded inwards, to a whole       |
    |                    | number of its dtype. NaN of a schedule counts as 0     |
    | bool, key          | itself                                                 |

    A bound becomes a float: float32 for a `jax.Array` of at most 32 bits, else float64.
    So an integer as bound is exact up to 2^24, or 2^53, and may be rounded outwards
    beyond. The direction of the gradient changes. No collective is needed.

    Args:
      max_value: the upper bound: a number, a schedule, an array that broadcasts to each
        leaf, or a tree prefix of these, of any real dtype. None for no bound. Without
        `min_value` it is at least 0, and where a schedule is negative, 0 is taken.
      min_value: the lower bound, likewise. None means -max_value, for all leaves or for
        one in a tree. A complex leaf must have None. Where schedules cross, the upper
        bound wins.
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
    checks.check_flag(f"{call}: count", count)
    return value_clipper(call, max_value, min_value, count=count)


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
    return value_clipper("clip", max_delta, upper_argument="max_delta")


def value_clipper(
    call: str,
    upper: Bounds,
    lower: Bounds = None,
    *,
    upper_argument: str = "max_value",
    lower_argument: str = "min_value",
    count: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """The clipper between two bounds. A lower bound of None is minus the upper one.
    Errors name the call and the argument of a bound.
    """
    upper_in_errors = f"{call}: {upper_argument}"
    lower_in_errors = f"{call}: {lower_argument}"
    upper_table = _checked_bounds(upper_in_errors, upper, no_bound=math.inf)
    lower_table = _checked_bounds(lower_in_errors, lower, no_bound=None)
    for lower_bound, upper_bound in _pairs_of_bounds(lower_table, upper_table):
        if lower_bound is not None:
            checks.check_order(
                call, (lower_argument, lower_bound), (upper_argument, upper_bound)
            )
        elif not callable(upper_bound):
            # Without a lower bound it limits the modulus.
            checks.check_limit(upper_in_errors, upper_bound)

    def init(params: PyTree) -> ClipByValueState:
        clipped_shares = no_elements_clipped() if count else ()
        return ClipByValueState(jnp.zeros((), jnp.int32), clipped_shares)

    # A chain hands every argument to all of its links. This clipper takes none.
    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: object
    ) -> Any:
        # A checkpoint of `optax.clip` has EmptyState in this place. Fixed bounds need
        # no count of steps, so it begins anew.
        if can_begin_anew(call, state, (upper_table, lower_table)):
            state = init(params)
        else:
            checks.check_state(call, state, ClipByValueState)
        trees.check_leaves(call, updates)
        trees.check_sparse(call, updates)
        leaves_with_path, treedef = jax.tree.flatten_with_path(updates)
        new_leaves = []
        before_and_after = []
        for (path, leaf), upper_bound, lower_bound in zip(
            leaves_with_path,
            _bounds_of_leaves(upper_in_errors, upper_table, updates, state.step),
            _bounds_of_leaves(lower_in_errors, lower_table, updates, state.step),
        ):
            leaf_name = trees.path_name(path)
            clipped = _clipped_leaf(call, leaf_name, leaf, lower_bound, upper_bound)
            new_leaves.append(clipped)
            # A leaf without numbers, such as a key, is returned as it is.
            if clipped is not leaf:
                before_and_after.append((trees.unbox(leaf), clipped))
        step = count_up(state.step)
        clipped_shares = state.elements
        if count:
            clipped_shares = shares_after(call, clipped_shares, step, before_and_after)
        new_state = ClipByValueState(step, clipped_shares)
        return jax.tree.unflatten(treedef, new_leaves), new_state

    return optax.GradientTransformationExtraArgs(init, update)


def _checked_bounds(argument: str, bounds: Bounds, *, no_bound: float | None) -> Prefix:
    """The bounds of an argument by path, with `no_bound` in the place of None.

    Raises:
      ValueError: NaN.
      TypeError: a bound that is not a number, an array or a schedule.
    """
    # A rule is one value of the tree, so that the check says that it is not a number.
    table = prefix_table(bounds, lambda x: is_function(x) or is_rule(x))
    entries = []
    for path, bound in table.entries:
        if bound is None:
            bound = no_bound
        elif callable(bound):
            checks.check_schedule(argument, bound)
        else:
            checks.check_limit(argument, bound, lowest=-math.inf)
        entries.append((path, bound))
    return Prefix(tuple(entries))


def _pairs_of_bounds(lower: Prefix, upper: Prefix) -> Iterator[tuple[Any, Any]]:
    """The lower and the upper bound of each part of a tree."""
    lower_by_path = dict(lower.entries)
    upper_by_path = dict(upper.entries)
    for path in lower_by_path | upper_by_path:
        lower_path = covering_path(path, lower_by_path)
        upper_path = covering_path(path, upper_by_path)
        # With max_value=1 and min_value={"w": 0} no lower bound covers the path of 1.
        # The two are paired at the path of 0.
        if lower_path is not None and upper_path is not None:
            yield lower_by_path[lower_path], upper_by_path[upper_path]


def _bounds_of_leaves(
    argument: str, table: Prefix, updates: PyTree, step: Array
) -> list[Any]:
    """The bound of each leaf at this step."""
    bounds = []
    for bound in lookup(table, updates, argument):
        if callable(bound):
            bound = bound(step)
            checks.check_real(f"{argument}: what a schedule returns", bound)
        bounds.append(bound)
    return bounds


def _clipped_leaf(
    call: str, leaf_name: str, leaf: Any, lower: ArrayLike | None, upper: ArrayLike
) -> Any:
    """The leaf, clipped between its bounds. A leaf without numbers is returned as it
    is.
    """
    x = trees.unbox(leaf)
    if trees.is_hole(x):
        return leaf
    dtype = jnp.result_type(x)
    if not jnp.issubdtype(dtype, jnp.number):  # bool, float0 or a key
        return leaf
    x = jnp.asarray(x)
    for bound in (lower, upper):
        shape = () if bound is None else jnp.shape(bound)
        if not broadcasts_to(shape, x.shape):
            raise ValueError(
                f"{call}: a bound of shape {shape} does not fit the leaf "
                f"{leaf_name!r} of shape {x.shape}."
            )
    if jnp.iscomplexobj(x):
        if lower is not None:
            raise TypeError(
                f"{call}: the leaf {leaf_name!r} is complex and has no order: give "
                "one bound, for its modulus."
            )
        _, largest = _bounds_in_dtype(None, upper, jnp.finfo(dtype).dtype)
        # The modulus of the largest complex numbers is inf, and so above the bound.
        is_above = jnp.abs(x) > largest
        # 1 where nothing is clipped: `largest` may be inf there, and inf * 0 in the
        # derivative is NaN.
        new_modulus = jnp.where(is_above, largest, jnp.ones_like(largest))
        return jnp.where(is_above, with_modulus(new_modulus, x), x)
    smallest, largest = _bounds_in_dtype(lower, upper, dtype)
    # JAX may be set to refuse arrays of different ranks (jax_numpy_rank_promotion).
    smallest = jnp.broadcast_to(smallest, x.shape)
    largest = jnp.broadcast_to(largest, x.shape)
    # Where schedules cross the upper bound wins, as in `optax.clip`.
    return jnp.clip(x, smallest, largest)


def _bounds_in_dtype(
    lower: ArrayLike | None, upper: ArrayLike, dtype: DTypeLike
) -> tuple[Any, Any]:
    """Both bounds in the dtype of a leaf. A lower bound of None is minus the upper one.
    A bound beyond the range of the dtype becomes its smallest or largest number.
    """
    largest = _as_float(upper)
    if lower is None:
        xp = jnp if isinstance(largest, Array) else np
        # Where a schedule is negative, 0 is taken.
        largest = xp.maximum(largest, 0)
        smallest = -largest
    else:
        smallest = _as_float(lower)
    if jnp.issubdtype(dtype, jnp.integer):
        return (
            _as_integer(dtype, smallest, is_lower=True),
            _as_integer(dtype, largest, is_lower=False),
        )
    # inf stays inf where the dtype has it.
    return (
        kept_finite(dtype, smallest).astype(dtype),
        kept_finite(dtype, largest).astype(dtype),
    )


def _as_float(bound: ArrayLike) -> Any:
    """A bound as a float: float32 for a JAX array of at most 32 bits, else float64."""
    if not isinstance(bound, Array):
        return np.asarray(bound).astype(np.float64)
    # JAX promotes neither floats of 8 bits nor numbers of 4 bits, so they are converted
    # here. float32 holds these, and rounds integers beyond 2^24.
    return bound.astype(np.float64 if bound.dtype.itemsize > 4 else np.float32)


def _as_integer(dtype: DTypeLike, bound: Any, *, is_lower: bool) -> Any:
    """A bound, rounded inwards to a dtype of integers."""
    xp = jnp if isinstance(bound, Array) else np
    rounded = xp.ceil(bound) if is_lower else xp.floor(bound)
    if isinstance(bound, Array):
        # XLA converts a number beyond the range to the end of the range, and NaN to 0.
        return rounded.astype(dtype)
    # NumPy does not, so the number is clipped. Python objects are compared exactly:
    # float64 would round the largest int64, 2^63 - 1, to 2^63.
    info = jnp.iinfo(dtype)
    rounded = np.where(np.isnan(rounded), 0.0, rounded)
    numbers = np.array(rounded.tolist(), object)
    return np.asarray(np.clip(numbers, info.min, info.max), dtype)
