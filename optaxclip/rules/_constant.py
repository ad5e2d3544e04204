"""Limits that do not learn: a number, an array, a schedule, a share of the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, field, fields
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
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
from ._rule import (
    Answer,
    Number,
    Rule,
    Schedule,
    at_step,
    call_name,
    is_rule,
    multiple,
    number,
    unchecked,
)

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
        raise TypeError(f"{argument} must be a real number, got {shown(limit)}.{rule}")
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

    def update(self, norm: Array, memory: Any, step: Array) -> Any:
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
        call = f"optaxclip.rules.{call_name(limit)}"
        needed = [x.name for x in fields(limit) if x.default is MISSING]
        if needed:
            raise TypeError(
                f"{argument} must be a rule, got {call_name(limit)} without its "
                f"numbers: call it, as in {call}({', '.join(needed)})."
            )
        return limit()
    if is_ours(limit):
        raise TypeError(
            f"{argument} must be a limit, got a shrink: give it as shrink=, beside a "
            "limit."
        )
    # minimum, maximum and warm_up.
    if str(getattr(limit, "__module__", "")).startswith(f"{__package__}"):
        name = limit.__name__
        raise TypeError(
            f"{argument} must be a rule, got the function {name}: call it, as in "
            f"optaxclip.rules.{name}(...)."
        )
    # Its own check would be the same one again, under another name.
    return unchecked(Constant, [("limit", checked_limit(argument, limit))])


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


class ShareOfParams(Rule):
    """limit = share * max(norm of the weights, floor).

    Updates stay short against the weights that they change. `adaptive_grad_clip` is
    this rule on unit norms. The clipper's `update` needs params.

    Args:
      share: how long an update may be, relative to the weights. At least 0. A number,
        an array or a schedule.
      floor: weights shorter than this count as this long, so that weights that start
        at 0 can leave it. At least 0.

    Raises:
      ValueError: a negative or NaN number, or `update` without params.
      TypeError: something that is not a number.

    Example:
      >>> grads, params = jnp.array([3.0, 4.0]), jnp.array([0.0, 2.0])
      >>> rule = optaxclip.rules.share_of_params(0.5)
      >>> clipper = optaxclip.clip_by_global_norm(rule)
      >>> updates, state = clipper.update(grads, clipper.init(params), params)
      >>> print(updates, state.limit)
      [0.6 0.8] 1.0
    """

    share: Number = number()
    floor: Number = number(default=0.0)

    @property
    def needs_params(self) -> bool:
        # `limit_of` then hands over the norm of the weights.
        return True

    def update(
        self, norm: Array, memory: Any, step: Array, params_norm: Array
    ) -> Answer:
        share, floor = at_step(step, norm, self.share, self.floor)
        # Weights may have 64 bits where updates have 32.
        weights = jnp.maximum(params_norm.astype(norm.dtype), floor)
        return multiple(share, weights), memory


def rule_without_params(limit: Any, argument: str) -> Rule:
    """The rule of a limit, asked without the norm of the weights or of all norms.

    Raises:
      ValueError: a rule that needs one of these.
    """
    rule = rule_of(limit, argument)
    # Refused when it is built. In the first step its fourth argument would be missing.
    if rule.needs_params:
        raise ValueError(
            f"{argument} must not compare norms with those of weights, since there "
            f"are no weights here, got {shown(rule)}."
        )
    if rule.needs_total:
        raise ValueError(
            f"{argument} must not compare norms with that of all norms, since each "
            f"norm is judged alone here, got {shown(rule)}."
        )
    return rule
