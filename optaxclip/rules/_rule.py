"""What every rule is: a frozen dataclass that is a pytree, with `init` and `update`.

A subclass of `Rule` lists its parameters as fields, each with its default and range:

    class Growth(Rule):
        rate: Number = number_field(default=1.01)

        def update(self, norm, memory, step): ...   # -> limit, memory

Numbers are leaves of the pytree, so a changed number compiles nothing anew.
"""

import dataclasses
import re
from collections.abc import Callable
from dataclasses import field, fields
from functools import partial
from typing import Any, NamedTuple, TypeGuard, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.tree_util import Partial
from jax.typing import ArrayLike, DTypeLike

from .._arguments import checks
from .._arguments.functions import as_partial
from .._arguments.helpful_errors import with_argument_errors
from .._arguments.reprs import call_repr, short_repr
from .._devices.mesh_types import typed_as
from .._numbers import in_norm_dtype, number_for_jit
from .._trees import PyTree
from ._memory import new_where

SomeRule = TypeVar("SomeRule", bound="Rule")
Schedule = Callable[[ArrayLike], ArrayLike]
Number = ArrayLike | Schedule
# What a rule returns: the limit of a norm, and the new memory.
LimitAndMemory = tuple[ArrayLike, Any]


# ---------------------------------------------------------------- fields of a rule

# The metadata of a field have a check, which is called with the name of the field in
# errors, such as "ema: decay", and its value. The check raises, or returns the value in
# the form that the field keeps. If it returns None, the field keeps the value as it is.


def checked_number(
    argument: str,
    value: Any,
    *,
    lowest: float = 0.0,
    highest: float = np.inf,
    may_be_schedule: bool = True,
    may_be_none: bool = False,
    is_scalar: bool = False,
) -> Any:
    """A number in a range, in the form in which JAX carries it into a compiled call.

    Args:
      argument: the name in errors, such as "ema: decay".
      value: the number.
      lowest, highest: the range.
      may_be_schedule: whether a schedule from step to number is allowed.
      may_be_none: whether None is allowed.
      is_scalar: whether an array with axes is refused.
    """
    if may_be_none and value is None:
        return None
    # The numbers of a schedule are known only in the steps, which clip them.
    if may_be_schedule and callable(value):
        checks.check_schedule(argument, value)
        clipped_schedule = _ClippedSchedule(argument, lowest, highest)
        return Partial(clipped_schedule, as_partial(value))
    checks.check_limit(
        argument, value, lowest=lowest, highest=highest, is_scalar=is_scalar
    )
    return number_for_jit(value)


def number_field(default: Any = dataclasses.MISSING, **options: Any) -> Any:
    """A field that is a number, with the options of `checked_number`."""
    check = partial(checked_number, **options)
    return field(default=default, metadata={"check": check})


class _ClippedSchedule(NamedTuple):
    """Returns the number of a schedule at a step, clipped to a range.

    Tuples with equal fields are equal, so rules with equal ranges share a program.
    """

    argument: str
    lowest: float
    highest: float

    def __call__(self, schedule: Schedule, step: ArrayLike) -> ArrayLike:
        value = schedule(step)
        checks.check_real(f"{self.argument}: what a schedule returns", value)
        if isinstance(value, Array):
            return jnp.clip(value, self.lowest, self.highest)
        # JAX would turn a Python number of 1e39 into inf.
        return np.clip(value, self.lowest, self.highest)


def length_field(default: int) -> Any:
    """A field that is a whole number of at least 1, such as the length of a window."""
    return field(default=default, metadata={"check": checked_length})


def checked_length(argument: str, value: Any) -> Any:
    """A whole number of at least 1, as an int: a config may say 1e2."""
    checks.check_whole_number(argument, value)
    return value if isinstance(value, Tracer) else int(value)


# Flags and choices belong to the structure of the pytree: a changed one compiles anew.


def flag_field(default: bool) -> Any:
    """A field that is True or False."""
    return field(default=default, metadata={"check": checked_flag, "static": True})


def checked_flag(argument: str, value: Any) -> bool:
    """True or False. 1, 0 and the bools of NumPy are allowed too."""
    checks.check_flag(argument, value)
    return bool(value)


def choice_field(*allowed: str, default: str) -> Any:
    """A field that is one of some strings."""
    check = partial(checks.check_choice, allowed=allowed)
    return field(default=default, metadata={"check": check, "static": True})


# Attributes that tell a clipper how to use the rule. They are never traced.
TRAITS = ("needs_params", "needs_total", "inf_is_off")


def is_static(rule_field: dataclasses.Field[Any]) -> bool:
    """Whether a field belongs to the structure of the rule, and is not a leaf."""
    # An annotated trait, as in `needs_params: bool = True`, is a field.
    return rule_field.metadata.get("static", False) or rule_field.name in TRAITS


# ------------------------------------------------------------------------- the rule


# Tells type checkers that every subclass is a dataclass of its annotated fields.
@dataclass_transform(
    frozen_default=True,
    field_specifiers=(field, number_field, length_field, flag_field, choice_field),
)
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Rule:
    """Computes the limit of a norm, and may remember past norms.

    A rule is written for one norm. A clipper uses it elementwise for all of its norms.
    So the limit has the shape of the norm. Each array of a memory has that shape too,
    or further axes behind it.

    A subclass lists its parameters as annotated fields. They are numbers, arrays or
    trees of arrays, and traced in `update`. A string, a function, or a number that
    gives a shape is a static field, `dataclasses.field(metadata={"static": True})`. It
    has two methods:

    * `init(norm) -> memory`: what the rule remembers before the first norm, from a
      norm of zeros. `()` for nothing.
    * `update(norm, memory, step) -> (limit, memory)`: `step` is an int32 scalar, the
      number of updates before this one. An update without a state counts as the first.
      A rule whose `needs_params` is True gets the norm of the weights as a further
      argument. After it, a rule whose `needs_total` is True gets the norm of all norms
      of the clipper together.

    A norm that is NaN, inf or 0 leaves the memory as it was. A zero is not remembered
    because an absent gradient says nothing about the usual norm, and because a limit
    that is a multiple of past norms could never leave 0. `step` counts these updates
    too. A rule that needs the number of remembered norms counts them in its memory. The
    limit has no derivative by updates.

    A limit of inf clips no finite norm. Updates whose norm is NaN or inf become what
    `nonfinite` of the clipper says, as under any other limit. A rule whose `inf_is_off`
    is True lets them pass too, as the limits None and inf of a user do.

    Example:
      >>> class Median(optaxclip.rules.Rule):
      ...     factor: float = 2.0
      ...
      ...     def init(self, norm):
      ...         return jnp.zeros((*norm.shape, 3))
      ...
      ...     def update(self, norm, last, step):
      ...         limit = self.factor * jnp.median(last, axis=-1)
      ...         limit = jnp.where(last[..., 0] == 0, jnp.inf, limit)
      ...         return limit, jnp.append(last[..., 1:], norm[..., None], axis=-1)
      >>> norms = jnp.array([1.0, 2.0, 3.0, 9.0, 1.0])
      >>> print(optaxclip.replay.run(Median(), norms).limits)
      [inf inf inf  4.  6.]
    """

    # Whether `update` takes the norm of the weights as a fourth argument, and the norm
    # of all norms as its last.
    needs_params = False
    needs_total = False
    # Whether a limit of inf switches the clipper off, so that even NaN passes.
    inf_is_off = False

    def __init_subclass__(cls) -> None:
        # eq=False: == of arrays is not a bool, and rules are hashed by identity.
        dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
        # A wrong keyword would otherwise be an error about `ZScore.__init__`.
        cls.__init__ = with_argument_errors(cls.__init__, call_name(cls))
        static_names = [
            rule_field.name for rule_field in fields(cls) if is_static(rule_field)
        ]
        leaf_names = [
            rule_field.name for rule_field in fields(cls) if not is_static(rule_field)
        ]
        keys = [jax.tree_util.GetAttrKey(name) for name in leaf_names]

        def flatten(rule: Any) -> Any:
            keys_and_leaves = [(key, getattr(rule, key.name)) for key in keys]
            return keys_and_leaves, tuple(getattr(rule, name) for name in static_names)

        def unflatten(static: Any, leaves: Any) -> Any:
            # The fields are not checked: JAX also builds rules whose leaves are shapes,
            # axes or None.
            rule = object.__new__(cls)
            vars(rule).update(zip(leaf_names, leaves))
            vars(rule).update(zip(static_names, static))
            return rule

        jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)

    def __post_init__(self) -> None:
        check_fields(self, call_name(type(self)))

    def __repr__(self) -> str:
        values = {
            rule_field.name: getattr(self, rule_field.name)
            for rule_field in fields(self)
        }
        return call_repr(call_name(type(self)), values)

    def init(self, norm: Array) -> Any:
        """Returns the memory before the first norm."""
        return ()

    def update(self, *args: Any, **kwargs: Any) -> LimitAndMemory:
        """Returns the limit of this step, and the new memory."""
        raise NotImplementedError(f"{type(self).__name__}: a rule must have an update.")


# ------------------------------------------------------ the limit and the new memory


def limit_and_memory_of(
    rule: Rule,
    norm: Array,
    memory: PyTree,
    step: Array,
    *extra_norms: Any,
    argument: str,
    is_loss: bool = False,
) -> tuple[Array, Any]:
    """The limit of a norm by a rule, and the rule's new memory.

    `extra_norms_of` gives `extra_norms`. The limit has the norm's dtype and shape, and
    is at least 0. A norm of NaN, inf or 0 leaves the memory unchanged. With `is_loss`
    the value is a loss and not a norm, so it and its limit may be 0 or negative.

    Raises:
      ValueError: the memory of another rule, or a limit that does not fit the norm.
      TypeError: what `checked_update` refuses.
    """
    checked_memory = _checked_memory(rule, norm, memory, argument)
    # stop_gradient, since limits have no derivative by the updates. A broken norm is
    # replaced by 0. The memory made from it is thrown away below, but a NaN in that
    # memory would still spoil derivatives.
    finite_norm = jnp.where(jnp.isfinite(norm), lax.stop_gradient(norm), 0.0)
    limit, new_memory = checked_update(
        rule, finite_norm, checked_memory, step, *extra_norms, argument=argument
    )
    checks.check_shape(argument, jnp.shape(limit), norm.shape)
    # A finite limit beyond the range of the norm's dtype becomes its largest number:
    # inf would not clip.
    limit = in_norm_dtype(norm.dtype, limit)
    # A schedule may fall below 0, which counts as 0.
    if not is_loss:
        limit = jnp.maximum(limit, 0)
    limit = typed_as(jnp.broadcast_to(limit, norm.shape), jax.typeof(norm))
    # A memory without arrays is () or None. The state keeps its own, since the
    # structure of a state may not change.
    if not jax.tree.leaves(memory):
        return limit, memory
    # `limit == limit` is False for NaN only. `~isnan` is two operations on a TPU.
    is_remembered = jnp.isfinite(norm) & (limit == limit)
    if not is_loss:
        is_remembered = is_remembered & (norm > 0)
    return limit, new_where(is_remembered, new_memory, memory)


limit_and_memory_of_jitted = jax.jit(
    limit_and_memory_of, static_argnames=("argument", "is_loss")
)


def _checked_memory(rule: Rule, norm: Array, memory: PyTree, argument: str) -> Any:
    """The memory of the state, after checks. A memory without arrays is replaced by
    that of `init`: a rule whose memory is () also takes the state of one with None.

    Raises:
      ValueError: the memory of another rule, or of norms of another shape. The length
        of a window is not compared: under jit it is a traced number.
    """
    call = argument.partition(":")[0]
    memory_of_init = _abstract_memory(rule, norm)
    if not jax.tree.leaves((memory_of_init, memory)):
        return memory_of_init
    if jax.tree.structure(memory_of_init) != jax.tree.structure(memory):
        raise ValueError(
            f"{call}: state was made with another rule. "
            f"{call_name(type(rule))} remembers {_shown_memory(memory_of_init)}, and "
            f"the state has {_shown_memory(memory)}. {checks.BEGIN_ANEW}"
        )
    # The structure does not tell how many norms a memory is for.
    for leaf in jax.tree.leaves(memory):
        if leaf.shape[: norm.ndim] != norm.shape:
            raise ValueError(
                f"{call}: state was made for norms of shape "
                f"{leaf.shape[: norm.ndim]}, but the updates have norms of shape "
                f"{norm.shape}. {checks.BEGIN_ANEW}"
            )
    return memory


def _abstract_memory(rule: Rule, norm: Array) -> PyTree:
    """The shapes and dtypes of the memory that `init` of a rule returns. Under jit the
    length of a window may be traced. It cannot give a shape then, and counts as 1.
    """

    def without_traced_length(leaf: Any) -> Any:
        is_traced_scalar = isinstance(leaf, Tracer) and not leaf.ndim
        if is_traced_scalar and not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return 1
        return leaf

    rule_with_known_lengths = jax.tree.map(without_traced_length, rule)
    return jax.eval_shape(rule_with_known_lengths.init, norm)


def checked_update(
    rule: Rule,
    norm: Array,
    memory: PyTree,
    step: Array,
    *extra_norms: Any,
    argument: str,
) -> LimitAndMemory:
    """Calls `update` of a rule, and returns its limit and its new memory.

    Raises:
      TypeError: a limit that is not a number, or a memory whose shapes are not those of
        `memory`.
    """
    result = rule.update(norm, memory, step, *extra_norms)
    call = call_name(type(rule))
    # An array of two limits could be unpacked as well, into limit and memory.
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        raise TypeError(
            f"{call}: update must return (limit, memory), got {checks.shown(result)}."
        )
    limit, new_memory = result
    checks.check_real(f"{argument}: what a schedule or a rule returns", limit)
    # JAX would not notice a wrong memory. One number for each norm would broadcast to
    # a window for each norm. A memory that `init` did not make would be lost. () and
    # None are both no memory.
    has_memory = bool(jax.tree.leaves((memory, new_memory)))
    if has_memory and _shapes(new_memory) != _shapes(memory):
        raise TypeError(
            f"{call}: update must return a memory like that of init, "
            f"{_shown_memory(memory)}, got {_shown_memory(new_memory)}."
        )
    return limit, new_memory


def _shapes(memory: PyTree) -> Any:
    """The structure of a memory, with the shapes of its arrays."""
    leaves, treedef = jax.tree.flatten(memory)
    return treedef, [jnp.shape(leaf) for leaf in leaves]


def _shown_memory(memory: PyTree) -> str:
    """A memory as error texts show it."""
    return short_repr(memory) if jax.tree.leaves(memory) else "nothing"


def extra_norms_of(rule: Rule, params_norm: Any, total_norm: Any) -> list[Any]:
    """The norms that `update` of a rule takes after `step`.

    First the norm of the weights, if the rule needs it, then the norm of all norms, if
    the rule needs that.
    """
    extra_norms = []
    if rule.needs_params:
        extra_norms.append(params_norm)
    if rule.needs_total:
        extra_norms.append(total_norm)
    return extra_norms


# ----------------------------------------------------- names and numbers of a rule


def rule_for_clipper(call: str, rule_class: type[SomeRule], **numbers: Any) -> SomeRule:
    """The rule inside a clipper. Errors about its numbers name the clipper, `call`.

    Fields that are not in `numbers` have their defaults. The rule's own
    `__post_init__`, which warns of limits that can only fall, does not run.
    """
    # `__init__` would check the numbers under the name of the rule.
    rule = object.__new__(rule_class)
    for rule_field in fields(rule_class):
        vars(rule)[rule_field.name] = numbers.get(rule_field.name, rule_field.default)
    check_fields(rule, call)
    return rule


def check_fields(rule: Rule, call: str) -> None:
    """Checks the fields of a rule, and writes back those that a check returns in
    another form. Errors name the call.
    """
    # `rule.decay = ...` is an error for a frozen dataclass.
    values = vars(rule)
    for rule_field in fields(rule):
        if "check" in rule_field.metadata:
            check = rule_field.metadata["check"]
            value = check(f"{call}: {rule_field.name}", values[rule_field.name])
            # None keeps the value. A function becomes a Partial, a pytree node.
            if value is not None:
                values[rule_field.name] = value
        elif not is_static(rule_field):
            # A plain field, as rules of users have them.
            _check_traceable(f"{call}: {rule_field.name}", values[rule_field.name])


def call_name(cls: type) -> str:
    """The name by which users know a rule: their own, or `ema_ratio` for `EmaRatio`."""
    if not cls.__module__.startswith("optaxclip."):
        return cls.__name__
    # An underscore before each capital letter but the first.
    return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()


def is_rule(x: object) -> TypeGuard[Rule]:
    """Whether it is a rule."""
    return isinstance(x, Rule)


def is_inf(number: Number) -> bool:
    """Whether a number of a rule is inf, and neither a schedule nor traced."""
    if callable(number) or isinstance(number, Tracer):
        return False
    return bool(np.isinf(number).all())


def numbers_at_step(step: Array, dtype: DTypeLike, *numbers: Number) -> list[Array]:
    """The values of numbers and schedules at a step, in the dtype of the norm."""
    values = [value(step) if callable(value) else value for value in numbers]
    # A float64 number would make a limit and a memory of float64 from a float32 norm.
    return [in_norm_dtype(dtype, value) for value in values]


def is_at_most_1(number: Any) -> bool:
    """Whether a number of a rule is known to be at most 1. A schedule is not known, nor
    is an array of JAX: to read it would wait for the device.
    """
    return isinstance(number, (int, float, np.number)) and bool(number <= 1)


def warn_if_limits_fall(argument: str, ratio: Any) -> None:
    """Warns of a ratio of at most 1, with which a limit can only fall."""
    if is_at_most_1(ratio):
        checks.warn_user(
            f"{argument} should be above 1, got {ratio}: the limit is this multiple of "
            "norms that were already clipped to it, so it can only fall. A fixed limit "
            "is clip_by_global_norm(1.0) or clip_by_tensor_norm(1.0)."
        )


def _check_traceable(argument: str, value: PyTree) -> None:
    """Raises TypeError for a string or a function, which jit does not take."""
    for leaf in jax.tree.leaves(value):
        if isinstance(leaf, str) or callable(leaf):
            raise TypeError(
                f"{argument} must be a number, an array or a tree of arrays, got "
                f"{checks.shown(leaf)}: fields are traced. Make a string or a "
                "function a static field: dataclasses.field(metadata={'static': True})."
            )
