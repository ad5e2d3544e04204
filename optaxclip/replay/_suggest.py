"""Candidate rules for recorded norms, and what each would have done."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..rules import windowed_quantile, z_score
from ..rules._windows import step_rule
from ..shrinks import drop
from ._run import history_of, run


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
# Rules that learn, by the text that makes a clipper or a wrapper of them.
CLIP = "optaxclip.clip_by_global_norm(optaxclip.rules.{})"
QUANTILE = CLIP.format("windowed_quantile(0.9, 1000)")
MEDIAN = CLIP.format("windowed_quantile(0.5, 100, factor=2.0)")
LEARNING = {
    "optaxclip.autoclip(10)": windowed_quantile(0.1, 10_000, current=True),
    QUANTILE: windowed_quantile(0.9, 1000),
    MEDIAN: windowed_quantile(0.5, 100, factor=2.0),
    "optaxclip.zclip()": z_score(),
    SKIP_STEP: step_rule(),
}


def suggest(norms: ArrayLike) -> list[Suggestion]:
    """Candidate rules for a history of norms, each with the share of steps that it
    would have clipped.

    It counts on the norms as they were recorded. Clipping changes a run, so this is a
    place to start, not a forecast.

    Args:
      norms: the history, [steps]. Norms that are NaN, 0, or beyond the range of float32
        are left out, also of the shares.

    Returns:
      Fixed limits first, from quantiles of the norms (Pascanu et al. take half to ten
      times the usual norm), then rules that learn. Each is a `Suggestion`: the rule as
      it is written in a program, its limit at the last step, the share of steps that it
      clips, their mean factor, and whether it is recommended: of the fixed limits up to
      twenty times the median, the one that clips nearest to 1 % of the steps.

    Raises:
      ValueError: a negative norm, or fewer than two finite norms above 0.
      TypeError: a history that is not made of numbers.

    Example:
      >>> for each in optaxclip.replay.suggest([1.0, 2.0, 3.0, 4.0])[:2]:
      ...     print(each.rule, each.clip_rate, round(each.mean_factor, 4))
      optaxclip.clip_by_global_norm(2.5) 0.5 0.7292
      optaxclip.clip_by_global_norm(3.7) 0.25 0.925
    """
    history = history_of("suggest", norms)
    finite = np.asarray(history, np.float64).reshape(-1)
    finite = finite[np.isfinite(finite) & (finite > 0)]
    if finite.size < 2:
        must = "norms must hold at least two finite norms above 0"
        raise ValueError(f"suggest: {must}, got {finite.size}.")
    median = float(np.median(finite))
    limits = [*np.quantile(finite, (0.5, 0.9, 0.95, 0.99)), 5 * median]
    rounded = sorted({float(f"{limit:.3g}") for limit in limits})
    # Five times the median may be beyond the range of a limit.
    largest = float(jnp.finfo(history.dtype).max)
    clip = "optaxclip.clip_by_global_norm({:g})"
    fixed = {clip.format(x): x for x in rounded if x <= largest}
    rules = (fixed | LEARNING).items()
    rows = [_suggestion(text, rule, finite) for text, rule in rules]
    guards = [row for row in rows[: len(fixed)] if row.limit <= HIGHEST * median]
    best = min(guards, key=lambda row: abs(row.clip_rate - RECOMMENDED_RATE))
    return [row._replace(recommended=row is best) for row in rows]


def _suggestion(text: str, rule: Any, norms: np.ndarray) -> Suggestion:
    shrink = drop if text == SKIP_STEP else None
    found = jax.device_get(run(rule, norms, shrink=shrink))
    factors = found.factors[found.clipped]
    mean_factor = float(factors.mean()) if factors.size else 1.0
    clip_rate = float(found.clipped.mean())
    return Suggestion(text, float(found.limits[-1]), clip_rate, mean_factor)
