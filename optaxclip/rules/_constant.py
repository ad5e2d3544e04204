"""Limits that do not learn: a number, an array or a schedule."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, TypeAlias

import jax
import numpy as np
import optax
from jax.typing import ArrayLike

from .._checks import (
    as_partial,
    check_limit,
    check_schedule,
    is_function,
    number_for_jit,
    shown,
)
from ..shrinks import is_ours
from ._rule import Number, Rule, Schedule, call_name, is_rule, unchecked

# What a norm can be held against. None is no limit.
Limit = Number | Rule | None
LimitTree: TypeAlias = "Limit | Mapping[Any, LimitTree] | Sequence[LimitTree]"


def checked_limit(argument: str, limit: Any) -> ArrayLike | Schedule:
    """A limit that JAX can carry into a compiled call, inf for None.

    Raises:
      TypeError: what cannot be a limit, with the rule that may be meant.
    """
    if limit is None:
        return np.inf
    # The mistake `clip_by_global_norm(zclip())`.
    if isinstance(limit, optax.GradientTransformation):
        raise TypeError(
            f"{argument} must be a number, a schedule or a rule, got a transformation. "
            "The limit of zclip, for example, is optaxclip.rules.z_score()."
        )
    if isinstance(limit, str):
        rule = " A rule is given as optaxclip.rules.z_score(), without quotes."
        # "z_score" may be meant as a rule, and "1.0" is not.
        rule = rule if limit.isidentifier() else ""
        raise TypeError(
            f"{argument} must be a real number, got {shown(limit)}.{rule}"
        )
    # JAX takes no bare function as an argument of a compiled call.
    if callable(limit):
        # A function of a leaf's path, as it goes for labels and axes.
        hint = "Limits of parts are a tree, and optax.masked leaves parts out."
        check_schedule(argument, limit, hint)
        return as_partial(limit)
    check_limit(argument, limit)
    # All ints become floats, so that 1 and 1.0 share a program.
    return float(limit) if isinstance(limit, int) else number_for_jit(limit)


class Constant(Rule):
    """The same limit in every step, or a schedule of limits.

    Wherever a rule is wanted, a number, an array, a schedule or None stands for the
    constant rule of it.

    Args:
      limit: a number at least 0, an array whose shape broadcasts to the norm's, a
        schedule from step to number, or None. 0 turns updates into zeros. None and inf
        are no limit.

    Raises:
      TypeError: a bool, a string, or something else that is not a real number.
      ValueError: a number that is negative, NaN, or finite and above the largest of
        float32 (of float64 where `jax_enable_x64` is set). A schedule or a traced limit
        above the largest of the norm's dtype counts as the largest.

    Example:
      >>> rule = optaxclip.rules.constant(lambda step: 1.0 + step)
      >>> print(optaxclip.replay.run(rule, [5.0, 5.0, 5.0]).limits)
      [1. 2. 3.]
    """

    limit: Number | None = field(metadata={"check": checked_limit})

    def update(self, norm: jax.Array, memory: Any, step: jax.Array) -> Any:
        # `limit_of` brings what a schedule returns to the norm's dtype and shape.
        return self.limit(step) if callable(self.limit) else self.limit, memory


def rule_of(limit: Any, argument: str) -> Rule:
    """The rule itself, or the constant rule of a number, an array, a schedule, None.

    A rule without parentheses is the rule with its defaults.
    """
    if isinstance(limit, Rule):
        return limit
    # `clip_by_global_norm(rules.growth)`, without parentheses.
    if isinstance(limit, type) and issubclass(limit, Rule):
        return _with_defaults(limit, argument)
    if callable(limit):
        _check_no_other(argument, limit)
    # Its own check would be the same one again, under another name.
    return unchecked(Constant, [("limit", checked_limit(argument, limit))])


def _check_no_other(argument: str, function: Any) -> None:
    """Raises for functions of ours that would pass for schedules."""
    if is_ours(function):
        raise TypeError(
            f"{argument} must be a limit, got a shrink: give it as shrink=, beside a "
            "limit."
        )
    # minimum, maximum and warm_up.
    if str(getattr(function, "__module__", "")).startswith(f"{__package__}"):
        name = function.__name__
        raise TypeError(
            f"{argument} must be a rule, got the function {name}: call it, as in "
            f"optaxclip.rules.{name}(...)."
        )


def _with_defaults(kind: type[Rule], argument: str) -> Rule:
    empty = inspect.Parameter.empty
    parameters = inspect.signature(kind).parameters.values()
    needed = ", ".join(x.name for x in parameters if x.default is empty)
    if needed:
        name = call_name(kind)
        raise TypeError(
            f"{argument} must be a rule, got {name} without its numbers: call it, as "
            f"in optaxclip.rules.{name}({needed})."
        )
    return kind()


def rules_of(limits: Any, argument: str) -> Any:
    """The rules of a tree of limits."""

    def is_limit(x: Any) -> bool:
        # All of these but functions are nodes to JAX, and would be taken apart.
        is_clipper = isinstance(x, optax.GradientTransformation)
        return x is None or is_function(x) or is_rule(x) or is_clipper

    def named(limit: Any) -> Rule:
        return rule_of(limit, argument)

    rules = jax.tree.map(named, limits, is_leaf=is_limit)
    # One rule at two places becomes two, as it does in a compiled call. Rules are told
    # apart by identity, so `init` and `update` would disagree otherwise.
    return jax.tree.map(lambda number: number, rules)
