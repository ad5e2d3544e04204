"""Rules made of rules: the smallest limit, the largest, and one after the other."""

from __future__ import annotations

from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp

from .._checks import held_in
from ._constant import rule_of
from ._memory import count_up
from ._rule import Number, Rule, further_norms, number


class Joined(Rule):
    """Rules that are asked together. Each updates its memory by its own limit."""

    # Each may keep a memory, and the joined memory is the tuple of them.
    rules: tuple[Rule, ...]

    @property
    def needs_params(self) -> bool:
        return any(rule.needs_params for rule in self.rules)

    @property
    def needs_total(self) -> bool:
        return any(rule.needs_total for rule in self.rules)

    def init(self, norm: jax.Array) -> Any:
        return tuple(rule.init(norm) for rule in self.rules)

    def update(
        self, norm: jax.Array, memory: Any, step: jax.Array, *others: Any
    ) -> Any:
        # In the order of `further_norms`, each where one of the rules needs it.
        params = others[0] if self.needs_params else None
        total = others[-1] if self.needs_total else None
        limits, memories = [], []
        for rule, own in zip(self.rules, memory):
            asked = norm, own, step, *further_norms(rule, params, total)
            limit, own = rule.update(*asked)
            # Limits may be Python numbers or of any dtype, and jnp.minimum wants one.
            limits.append(held_in(norm.dtype, limit))
            memories.append(own)
        return self.joined(limits), tuple(memories)

    def joined(self, limits: list[jax.Array]) -> Any:
        """One limit of those of the rules."""
        return limits


class Minimum(Joined):
    """The smallest limit of several rules."""

    def joined(self, limits: list[jax.Array]) -> Any:
        return reduce(jnp.minimum, limits)


class Maximum(Joined):
    """The largest limit of several rules."""

    def joined(self, limits: list[jax.Array]) -> Any:
        return reduce(jnp.maximum, limits)


class WarmUp(Joined):
    """The first rule for some norms, the second from then on."""

    # Counts norms that were remembered. The step counts broken ones as well.
    steps: Number = number(schedule=False)

    def init(self, norm: jax.Array) -> Any:
        return jnp.zeros(norm.shape, jnp.int32), super().init(norm)

    def update(
        self, norm: jax.Array, memory: Any, step: jax.Array, *others: Any
    ) -> Any:
        seen, memory = memory
        # Both are asked in every step, so `after` has learnt when its limit counts.
        limits, memory = super().update(norm, memory, step, *others)
        limit = jnp.where(seen < self.steps, *limits)
        return limit, (count_up(seen), memory)


def minimum(*rules: Any) -> Rule:
    """The smallest limit of several rules: a rule that learns, under a fixed cap.

    Each rule updates its memory from the norm and its own limit, whatever the limits
    of the others are.

    Args:
      rules: at least one rule, number, array, schedule, or None for no limit.

    Raises:
      ValueError: no rule at all, or a number that is negative or NaN.
      TypeError: something that is no number, schedule or rule.

    Example:
      >>> rule = optaxclip.rules.minimum(optaxclip.rules.growth(2.0), 5.0)
      >>> print(optaxclip.replay.run(rule, [1.0, 9.0, 9.0, 9.0]).limits)
      [5. 2. 4. 5.]
    """
    # A function, since the fields of a dataclass cannot be *rules.
    return Minimum(_rules("minimum", rules))


def maximum(*rules: Any) -> Rule:
    """The largest limit of several rules: a rule that learns, above a fixed floor.

    Each rule updates its memory from the norm and its own limit, whatever the limits
    of the others are.

    Args:
      rules: at least one rule, number, array, schedule, or None for no limit.

    Raises:
      ValueError: no rule at all, or a number that is negative or NaN.
      TypeError: something that is no number, schedule or rule.

    Example:
      >>> rule = optaxclip.rules.maximum(optaxclip.rules.growth(2.0), 5.0)
      >>> print(optaxclip.replay.run(rule, [1.0, 9.0, 9.0, 9.0]).limits)
      [inf  5.  5.  8.]
    """
    return Maximum(_rules("maximum", rules))


def warm_up(steps: Number, before: Any, after: Any) -> Rule:
    """One rule for the first norms, and another from then on.

    Both learn from the first norm on.

    Args:
      steps: how many norms are held against `before`. At least 0. Norms that are NaN,
        inf or 0 do not count.
      before: a rule, number, array, schedule, or None for no limit.
      after: likewise.

    Raises:
      ValueError: a number that is negative or NaN.
      TypeError: something that is no number, schedule or rule.

    Example:
      >>> rule = optaxclip.rules.warm_up(2, 5.0, optaxclip.rules.growth(2.0))
      >>> print(optaxclip.replay.run(rule, [1.0, 9.0, 9.0, 9.0]).limits)
      [5. 5. 4. 8.]
    """
    first = rule_of(before, "warm_up: before")
    second = rule_of(after, "warm_up: after")
    return WarmUp((first, second), steps)


def _rules(call: str, rules: tuple[Any, ...]) -> tuple[Rule, ...]:
    # The smallest of no limits would be an error of `reduce` in the first step.
    if not rules:
        raise ValueError(f"{call}: rules must be at least one, got none.")
    # Errors read "minimum: rules[1] must be at least 0, got -1.".
    return tuple(rule_of(x, f"{call}: rules[{i}]") for i, x in enumerate(rules))
