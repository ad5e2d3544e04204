"""Thresholds without a memory of their own: a number or schedule, a share of the
weights, and what joins rules to one.

    constant(c)                    c, or a schedule of the step
    share_of_params(share)         share * |weights|
    least(rule, 1.0)               the smallest limit of several rules: a rule that
                                   learns, under a fixed cap
    at_least(rule, 0.1)            never below a floor
    warm_up(100, 1.0, rule)        the first until 100 norms were seen, then the second,
                                   which has learned from the start

Where a rule is wanted, a number, an array, a schedule or None stands for `constant` of
it. Rules that learn are in `optaxclip.adaptive`.
"""

from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from .arguments import as_partial, check_limit, check_number, held_in


class Threshold(NamedTuple):
    """A rule for how long ONE norm may be. The kernel uses it for every norm that was
    measured.

    init(norm) -> memory: what the rule remembers before the first step; its arrays have
    the norm's shape, followed by axes of their own. update(norm, memory, step,
    params_norm) -> (limit, memory): `step` is an int32 scalar that counts from 0,
    `params_norm()` gives the norm of the
      weights at the same place.

    A norm that is NaN, inf or 0 is never remembered: `ask`, through which everyone
    consults a rule, keeps the old memory then. A 0 says nothing about the usual length
    (the part took no part in the step), and would hold any rule that multiplies at 0
    for ever. To the rule the norm is a number: limits have no derivative by the
    updates.

    Numbers that may change from build to build belong in a `jax.tree_util.Partial`, so
    that a changed number does not mean a new compilation.
    """

    init: Callable[[jax.Array], Any]
    update: Callable[
        [jax.Array, Any, jax.Array, Callable[[], jax.Array]], tuple[Any, Any]
    ]


def constant(limit: Any, *, argument: str = "constant: limit") -> Threshold:
    """The same limit in every step, or a schedule of limits.

    Args:
      limit: a number at least 0, an array, a schedule from step to number, or None for
        no limit. 0 turns updates into zeros, inf is no limit. An array must have a
        shape that broadcasts to the norm's. Its dtype does not matter.
      argument: how error messages name the limit.

    Raises:
      TypeError: a bool, a string, or another thing that is no real number.
      ValueError: a number that is negative, NaN, or finite and above the largest of
        float32 (of float64 where `jax_enable_x64` is set). A schedule or a traced limit
        above the largest of the norm's dtype counts as the largest.
    """
    if limit is None:
        limit = float("inf")
    if callable(limit):
        return Threshold(
            Partial(remember_nothing), Partial(_scheduled, as_partial(limit))
        )
    check_limit(argument, limit)
    limit = (
        float(limit) if isinstance(limit, int) else limit
    )  # as an int JAX has room for 2^31 only
    return Threshold(Partial(remember_nothing), Partial(_constant, limit))


def share_of_params(
    share: Any,
    floor: Any = 0.0,
    *,
    argument: str = "share_of_params: share",
    floor_argument: str = "share_of_params: floor",
) -> Threshold:
    """limit = share * max(norm of the weights, floor): updates stay short against what
    they change.

    Args:
      share: a number at least 0, an array, or a schedule.
      floor: weights shorter than this count as this long, so that weights that start at
        0 can leave it. At least 0.
      argument, floor_argument: how error messages name the two.

    Raises:
      TypeError, ValueError: as `constant`.
      ValueError: in `update`, when it is called without params.
    """
    check_limit(floor_argument, floor)
    if callable(share):
        return Threshold(
            Partial(remember_nothing), Partial(_share, as_partial(share), floor)
        )
    check_limit(argument, share)
    return Threshold(Partial(remember_nothing), Partial(_share, share, floor))


def rule_of(limit: Any, argument: str) -> Threshold:
    """The rule itself, with functions that JAX can carry into a compiled call, or the
    constant rule of a number, schedule or None.
    """
    return (
        Threshold(*map(as_partial, limit))
        if isinstance(limit, Threshold)
        else constant(limit, argument=argument)
    )


def rules_of(limits: Any, argument: str) -> Any:
    """The rule of a limit, or those of a tree of limits."""
    return jax.tree.map(
        lambda limit: rule_of(limit, argument),
        limits,
        is_leaf=lambda x: x is None or callable(x) or is_rule(x),
    )


def is_rule(x: Any) -> bool:
    """Is it a `Threshold`?"""
    return isinstance(x, Threshold)


def least(*rules: Any) -> Threshold:
    """The smallest limit of several rules. Each rule learns as if it were alone: what
    another one clips, it does not hear of.

    Args:
      rules: at least one `Threshold`, number, schedule or None.

    Example: `least(z_score(), 1.0)` is ZClip as its public code runs it, under a fixed
    cap.
    """
    if not rules:
        raise ValueError("least: rules must be at least one, got none.")
    return _joined(
        _least,
        *(rule_of(rule, f"least: rules[{place}]") for place, rule in enumerate(rules)),
    )


def at_least(rule: Any, floor: Any) -> Threshold:
    """The limit of a rule, but never below a floor.

    Args:
      rule: a `Threshold`, number, schedule or None.
      floor: likewise.
    """
    return _joined(
        _most, rule_of(rule, "at_least: rule"), rule_of(floor, "at_least: floor")
    )


def warm_up(steps: Any, before: Any, after: Any) -> Threshold:
    """One rule for the first norms, another from then on. Both learn from the first
    step.

    Args:
      steps: how many norms are needed before `after` is asked. At least 0. Norms that
        are NaN, inf or 0 are not counted.
      before: a `Threshold`, number, schedule or None for no limit.
      after: likewise.
    """
    check_number("warm_up: steps", steps)
    before, after = rule_of(before, "warm_up: before"), rule_of(after, "warm_up: after")
    return Threshold(
        Partial(_count_beside, before.init, after.init),
        Partial(_switch, steps, before.update, after.update),
    )


def _joined(choose: Callable[..., Any], *rules: Threshold) -> Threshold:
    return Threshold(
        Partial(_all_memories, *(rule.init for rule in rules)),
        Partial(_ask_all, Partial(choose), *(rule.update for rule in rules)),
    )


def _all_memories(*args):
    *inits, norm = args
    return tuple(init(norm) for init in inits)


def _ask_all(choose, *args):
    *updates, norm, memory, step, params_norm = args
    limits, memories = zip(
        *(update(norm, own, step, params_norm) for update, own in zip(updates, memory))
    )
    return choose([held_in(norm.dtype, limit) for limit in limits]), memories


def _least(limits):
    return reduce(jnp.minimum, limits)


def _most(limits):
    return reduce(jnp.maximum, limits)


def _count_beside(before, after, norm):
    return jnp.zeros(norm.shape, jnp.int32), before(norm), after(norm)


def _switch(steps, before, after, norm, memory, step, params_norm):
    seen, old, new = memory
    first, old = before(norm, old, step, params_norm)
    second, new = after(norm, new, step, params_norm)
    first, second = (held_in(norm.dtype, limit) for limit in (first, second))
    return jnp.where(seen < steps, first, second), (seen + 1, old, new)


def remember_nothing(norm: jax.Array) -> tuple[()]:
    """The memory of a rule that needs none."""
    return ()


def _constant(limit, norm, memory, step, params_norm):
    return limit, memory


def _scheduled(schedule, norm, memory, step, params_norm):
    return schedule(step), memory


def _share(share, floor, norm, memory, step, params_norm):
    return _share_of(
        norm.dtype, share(step) if callable(share) else share, params_norm(), floor
    ), memory


@partial(jax.jit, static_argnums=0)
def _share_of(dtype, share, weights, floor):
    share, weights, floor = (
        jnp.asarray(x).astype(dtype) for x in (share, weights, floor)
    )
    return share * jnp.maximum(weights, floor)
