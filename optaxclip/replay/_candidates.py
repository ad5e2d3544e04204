"""Candidate rules for recorded norms, and what each would have done."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..rules import windowed_quantile, z_score
from ..rules._constant import rule_of
from ..rules._rule import Rule
from ..rules._windowed_mean import step_rule
from ..shrinks import hard
from ._replay import Replay, array_of_norms, first_memory, replayed


class Suggestion(NamedTuple):
    """One candidate rule.

    Attributes:
      rule: Python that makes it after `import optaxclip`. `skip_step` is wrapped around
        an optimizer, which is called so.
      limit: at the last step, in units of the norm.
      clip_rate: the share of steps clipped, in [0, 1].
      mean_factor: what the clipped steps would have been multiplied by, on average: 0
        where they are skipped, and 1 without any.
      recommended: whether to start with it. One candidate is marked.
    """

    rule: str
    limit: float
    clip_rate: float
    mean_factor: float
    recommended: bool = False


# The share of steps that the recommended limit clips: what stands out, and no other.
RECOMMENDED_RATE = 0.01
# Times the median. Where more steps than that are broken, a limit that clips so few of
# them lies among their norms and holds nothing back.
HIGHEST = 20
SKIP_STEP = "optaxclip.skip_step(optimizer, on_loss=False)"


def suggest(norms: ArrayLike) -> list[Suggestion]:
    """Candidate rules for a history of norms, each with the share of steps that it
    would have clipped.

    It counts on the norms as they were recorded. Clipping changes a run, so this is a
    place to start, not a forecast.

    Args:
      norms: the history, [steps]. Norms that are NaN, 0, negative, or beyond the
        range of float32 are left out, also of the shares.

    Returns:
      Fixed limits first, from quantiles of the norms (Pascanu et al. take half to ten
      times the usual norm), then rules that learn. Each is a `Suggestion`: the rule as
      it is written in a program, its limit at the last step, the share of steps that it
      clips, their mean factor, and whether it is recommended: of the fixed limits up to
      twenty times the median, the one that clips nearest to 1 % of the steps.

    Raises:
      ValueError: fewer than two finite norms above 0.
      TypeError: a history that is not made of numbers.

    Example:
      >>> for each in optaxclip.replay.suggest([1.0, 2.0, 3.0, 4.0])[:2]:
      ...     print(each.rule, each.clip_rate, round(each.mean_factor, 4))
      optaxclip.clip_by_global_norm(2.5) 0.5 0.7292
      optaxclip.clip_by_global_norm(3.7) 0.25 0.925
    """
    finite = array_of_norms("suggest", norms).astype(np.float64).reshape(-1)
    finite = finite[np.isfinite(finite) & (finite > 0)]
    if finite.size < 2:
        raise ValueError(
            "suggest: norms must hold at least two finite norms above 0, got "
            f"{finite.size}."
        )
    fixed, history = _fixed_limits(finite), jnp.asarray(finite)
    candidates = fixed | _rules_that_learn()
    rules = [rule_of(rule, "suggest: rule") for rule in candidates.values()]
    memories = [first_memory(rule, history) for rule in rules]
    found = jax.device_get(_all_replayed(rules, memories, history))
    suggestions = [_suggestion(*each) for each in zip(candidates, found)]
    # Five times the median is always among them.
    highest = HIGHEST * float(np.median(finite))
    among = sum(limit <= highest for limit in fixed.values())
    return _with_recommendation(suggestions, among)


# One program for all, since compiling is what takes time.
@jax.jit
def _all_replayed(
    rules: list[Rule], memories: list[Any], norms: jax.Array
) -> list[Replay]:
    return [replayed(hard, *each, norms) for each in zip(rules, memories)]


def _fixed_limits(norms: np.ndarray) -> dict[str, float]:
    """Fixed limits, by the text that makes a clipper of them."""
    # Five times the median may be beyond the range of a limit.
    largest = float(jnp.finfo(jnp.result_type(float)).max)
    limits = [
        *np.quantile(norms, (0.5, 0.9, 0.95, 0.99)),
        5 * np.median(norms),
    ]
    rounded = {float(f"{limit:.3g}") for limit in limits if limit <= largest}
    return {
        f"optaxclip.clip_by_global_norm({limit:g})": limit
        for limit in sorted(rounded)
    }


def _rules_that_learn() -> dict[str, Rule]:
    """Rules, by the text that makes a clipper or a wrapper of them."""
    quantile = "windowed_quantile(0.9, 1000)"
    median = "windowed_quantile(0.5, 100, factor=2.0)"
    clip = "optaxclip.clip_by_global_norm(optaxclip.rules.{})"
    return {
        "optaxclip.autoclip(10)": windowed_quantile(0.1, 10_000, current=True),
        clip.format(quantile): windowed_quantile(0.9, 1000),
        clip.format(median): windowed_quantile(0.5, 100, factor=2.0),
        "optaxclip.zclip()": z_score(),
        SKIP_STEP: step_rule(),
    }


def _with_recommendation(
    rows: list[Suggestion], among: int
) -> list[Suggestion]:
    """Marks the one of the first rows that clips nearest to 1 %."""
    distances = [abs(row.clip_rate - RECOMMENDED_RATE) for row in rows[:among]]
    best = int(np.argmin(distances))
    return [row._replace(recommended=i == best) for i, row in enumerate(rows)]


def _suggestion(name: str, found: Replay) -> Suggestion:
    clipped, limit = np.asarray(found.clipped), float(found.limits[-1])
    factors = np.asarray(found.factors)[clipped]
    if name == SKIP_STEP:
        factors = np.zeros_like(factors)
    mean_factor = float(factors.mean()) if factors.size else 1.0
    return Suggestion(name, limit, float(clipped.mean()), mean_factor)
