"""Limits that are not learnt from norms, and rules made of other rules.

limits that do not learn   a number, an array, a schedule, a share of the weights
rules made of rules        the smallest limit, the largest, one after the other
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import partial, reduce
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from .._arguments import checks
from .._arguments.functions import as_partial, is_function
from .._numbers import in_norm_dtype, number_for_jit
from .._trees import PyTree, path_name
from ._memory import count_up, has_reached, multiple, new_where
from ._rule import (
    LimitAndMemory,
    Number,
    Rule,
    Schedule,
    call_name,
    checked_update,
    extra_norms_of,
    is_inf,
    is_rule,
    number_field,
    numbers_at_step,
)

# What a norm can be held against. None is no limit.
Limit = Number | Rule | None
# Rules in a tree must not learn.
LimitTree: TypeAlias = "Limit | Mapping[Any, LimitTree] | Sequence[LimitTree]"


def checked_limit(argument: str, limit: Any) -> ArrayLike | Schedule:
    """A limit that JAX can carry into a compiled call, inf for None.

    Raises:
      TypeError: what cannot be a limit.
    """
    if limit is None:
        return np.inf
    # JAX takes no bare function as an argument of a compiled call. A module of equinox
    # that holds limits is callable too, and is refused below.
    if is_function(limit):
        checks.check_schedule(argument, limit)
        return as_partial(limit)
    checks.check_limit(argument, limit)
    # All ints become floats, so that 1 and 1.0 share a program.
    if isinstance(limit, int):
        return float(limit)
    return number_for_jit(limit)


class Constant(Rule):
    """The same limit in every step, or a schedule of limits.

    Wherever a rule can be given, a number, an array, a schedule or None can be given
    too. It becomes this rule.

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

    # An inf of this rule was written by the user, who wants no limit.
    inf_is_off = True

    def update(self, norm: Array, memory: PyTree, step: Array) -> Any:
        # `limit_and_memory_of` brings the limit to the norm's dtype and shape.
        if callable(self.limit):
            return self.limit(step), memory
        return self.limit, memory


def rule_of(limit: LimitTree, argument: str) -> Rule:
    """The rule itself, or the constant rule of a number, an array, a schedule, None.

    A rule without parentheses is the rule with its defaults.
    """
    if isinstance(limit, Rule):
        return limit
    # `clip_by_global_norm(rules.growth)`, without parentheses.
    if isinstance(limit, type) and issubclass(limit, Rule):
        return limit()
    # `Constant` checks it as well, but its errors name `constant`.
    return Constant(checked_limit(argument, limit))


def rule_of_norm_alone(limit: Limit, argument: str) -> Rule:
    """The rule of a limit, for callers that have no weight norms and no total norm.

    Raises:
      ValueError: a rule that needs the norm of the weights or of all norms.
    """
    rule = rule_of(limit, argument)
    # Otherwise `update` of the rule would lack an argument in the first step.
    if rule.needs_params or rule.needs_total:
        raise ValueError(
            f"{argument} must not compare norms with the total norm or the weight "
            f"norms, which are not measured here, got {checks.shown(rule)}."
        )
    return rule


def tree_of_rules(limits: LimitTree, argument: str) -> PyTree:
    """The rules of a tree of limits.

    Raises:
      TypeError: a rule in a tree of several that remembers norms.
    """

    def is_limit(x: object) -> bool:
        # None and rules are pytree nodes, which `jax.tree.map` would take apart.
        return x is None or is_function(x) or is_rule(x)

    rules = jax.tree.map(partial(rule_of, argument=argument), limits, is_leaf=is_limit)
    for path, rule in jax.tree.leaves_with_path(rules, is_leaf=is_rule):
        # `clip_by_tensor_norm(rules.growth)` has one rule and no tree. It may learn.
        if not path:
            continue
        memory = jax.eval_shape(rule.init, jnp.zeros((), jnp.float32))
        if jax.tree.leaves(memory):
            raise TypeError(
                f"{argument} must be one rule for all norms, or a tree of numbers and "
                f"schedules, got {checks.shown(rule)} for {path_name(path)!r}: a rule "
                "that learns is for all norms of a clipper. optax.partition gives "
                "parts of a model their own clippers: optax.partition({'a': clipper_a,"
                " 'b': clipper_b}, labels)."
            )
    return rules


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

    share: Number = number_field()
    floor: Number = number_field(default=0.0)

    # `update` takes the norm of the weights.
    needs_params = True

    @property
    def inf_is_off(self) -> bool:
        # With a share or a floor of inf the user wants no limit. A limit of inf that
        # comes from the weights is an accident.
        return is_inf(self.share) or is_inf(self.floor)

    def update(
        self, norm: Array, memory: PyTree, step: Array, params_norm: Array
    ) -> LimitAndMemory:
        share, floor = numbers_at_step(step, norm.dtype, self.share, self.floor)
        # Weights may have 64 bits where updates have 32.
        weight_norm = jnp.maximum(params_norm.astype(norm.dtype), floor)
        return multiple(share, weight_norm), memory


# ---------------------------------------------------------------- rules made of rules


class Joined(Rule):
    """Several rules. Each updates its memory from the norm and its own limit, not from
    the joint one. The memory of the joined rule is the tuple of theirs.
    """

    rules: tuple[Rule, ...]

    @property
    def needs_params(self) -> bool:
        return any(rule.needs_params for rule in self.rules)

    @property
    def needs_total(self) -> bool:
        return any(rule.needs_total for rule in self.rules)

    @property
    def inf_is_off(self) -> bool:
        return all(rule.inf_is_off for rule in self.rules)

    def init(self, norm: Array) -> Any:
        return tuple(rule.init(norm) for rule in self.rules)

    def limits_and_memories(
        self, norm: Array, memories: PyTree, step: Array, *extra_norms: Array
    ) -> tuple[list[Array], tuple[Any, ...]]:
        """The limits of all rules, and their new memories."""
        # The norms that at least one of the rules needs: that of the weights comes
        # first, and the total norm last.
        params_norm = extra_norms[0] if self.needs_params else None
        total_norm = extra_norms[-1] if self.needs_total else None
        limits = []
        new_memories = []
        for index, (rule, memory) in enumerate(zip(self.rules, memories)):
            argument = f"{call_name(type(self))}: rules[{index}]"
            limit, new_memory = checked_update(
                rule,
                norm,
                memory,
                step,
                *extra_norms_of(rule, params_norm, total_norm),
                argument=argument,
            )
            # Limits may be Python numbers or of any dtype. Minimum and Maximum compare
            # them in one dtype.
            limit = in_norm_dtype(norm.dtype, limit)
            if jnp.ndim(limit):
                checks.check_shape(argument, jnp.shape(limit), norm.shape)
                limit = jnp.broadcast_to(limit, norm.shape)
            limits.append(limit)
            # Without arrays the state keeps its () or None, whichever the rule returns.
            if not jax.tree.leaves(memory):
                new_memories.append(memory)
                continue
            # Where the limit is NaN, the memory stays. `limit_and_memory_of` checks the
            # joined limit, which in WarmUp may be that of the other rule.
            new_memories.append(new_where(limit == limit, new_memory, memory))
        return limits, tuple(new_memories)


class Minimum(Joined):
    """The smallest limit of several rules."""

    def update(self, *arguments: Any) -> LimitAndMemory:
        limits, new_memories = self.limits_and_memories(*arguments)
        return reduce(jnp.minimum, limits), new_memories


class Maximum(Joined):
    """The largest limit of several rules."""

    def update(self, *arguments: Any) -> LimitAndMemory:
        limits, new_memories = self.limits_and_memories(*arguments)
        return reduce(jnp.maximum, limits), new_memories


class WarmUp(Joined):
    """The first rule for some norms, the second from then on."""

    # For so many remembered norms the first rule's limit counts. `step` of `update`
    # would not do: it counts norms of NaN, inf and 0 too.
    steps: ArrayLike = number_field(may_be_schedule=False)

    @property
    def inf_is_off(self) -> bool:
        # None in the warm-up means no limit yet, not that NaN may pass.
        return False

    def init(self, norm: Array) -> Any:
        return jnp.zeros(norm.shape, jnp.int32), super().init(norm)

    def update(
        self, norm: Array, memory: PyTree, step: Array, *extra_norms: Array
    ) -> LimitAndMemory:
        seen, memories = memory
        # Both rules learn in every step, so the second is ready when its limit counts.
        limits, new_memories = self.limits_and_memories(
            norm, memories, step, *extra_norms
        )
        first_limit, second_limit = limits
        is_past_warmup = has_reached(seen, self.steps)
        limit = jnp.where(is_past_warmup, second_limit, first_limit)
        return limit, (count_up(seen), new_memories)


def minimum(*rules: Limit) -> Rule:
    """The smallest limit of several rules: a rule that learns, under a fixed cap.

    Each rule updates its memory from the norm and its own limit, whatever the limits
    of the others are.

    Args:
      rules: at least one rule, number, array, schedule, or None for no limit.

    Raises:
      ValueError: no rule at all, or a number that is negative or NaN.
      TypeError: something that is not a number, schedule or rule.

    Example:
      >>> rule = optaxclip.rules.minimum(optaxclip.rules.growth(2.0), 5.0)
      >>> print(optaxclip.replay.run(rule, [1.0, 9.0, 9.0, 9.0]).limits)
      [5. 2. 4. 5.]
    """
    # A function, since the fields of a dataclass cannot be *rules.
    return Minimum(_rules_of("minimum", rules))


def maximum(*rules: Limit) -> Rule:
    """The largest limit of several rules: a rule that learns, above a fixed floor.

    Each rule updates its memory from the norm and its own limit, whatever the limits
    of the others are.

    Args:
      rules: at least one rule, number, array, schedule, or None for no limit.

    Raises:
      ValueError: no rule at all, or a number that is negative or NaN.
      TypeError: something that is not a number, schedule or rule.

    Example:
      >>> rule = optaxclip.rules.maximum(optaxclip.rules.growth(2.0), 5.0)
      >>> print(optaxclip.replay.run(rule, [1.0, 9.0, 9.0, 9.0]).limits)
      [inf  5.  5.  8.]
    """
    return Maximum(_rules_of("maximum", rules))


def warm_up(steps: ArrayLike, before: Limit, after: Limit) -> Rule:
    """One rule for the first norms, and another from then on.

    Both learn from the first norm on. Updates whose norm is NaN or inf become what
    `nonfinite` of the clipper says, also where `before` or `after` is None.

    Args:
      steps: how many norms are held against `before`. At least 0. Norms that are NaN,
        inf or 0 do not count.
      before: a rule, number, array, schedule, or None for no limit.
      after: likewise.

    Raises:
      ValueError: a number that is negative or NaN.
      TypeError: something that is not a number, schedule or rule.

    Example:
      >>> rule = optaxclip.rules.warm_up(2, 5.0, optaxclip.rules.growth(2.0))
      >>> print(optaxclip.replay.run(rule, [1.0, 9.0, 9.0, 9.0]).limits)
      [5. 5. 4. 8.]
    """
    first = rule_of(before, "warm_up: before")
    second = rule_of(after, "warm_up: after")
    return WarmUp((first, second), steps)


def _rules_of(call: str, limits: tuple[Limit, ...]) -> tuple[Rule, ...]:
    """The rule of each limit."""
    # The smallest of no limits would be an error of `reduce` in the first step.
    if not limits:
        raise ValueError(f"{call}: rules must be at least one, got none.")
    # Errors read "minimum: rules[1] must be at least 0, got -1."
    return tuple(
        rule_of(limit, f"{call}: rules[{index}]") for index, limit in enumerate(limits)
    )
