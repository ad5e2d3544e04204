"""Which clipper to take, by the norms of a log: the usual limit, a guard, or a rule
that learns where norms fall far.
"""

from typing import NamedTuple

import numpy as np

from .._logs.columns import Column
from ..rules import minimum
from ..rules._rule import Rule
from ._run import (
    GUARD_RATE,
    MAX_GUARD_IN_MEDIANS,
    MIN_NORMS,
    Suggestion,
    suggest,
    suggestion_of,
    z_score_of_zclip,
)

# Most trainers clip the global norm to it.
USUAL_LIMIT = 1.0
# The usual limit is taken only if it clips at most this share of the steps.
MAX_USUAL_SHARE = 0.5
# Norms fall far if the early median, of the first fifth, is this many times the late
# one, of the last fifth. A limit of five late medians would then clip at least half of
# the first fifth. They grow far if it is the other way round.
FAR = 5.0
# The cap of zclip is this many times the largest healthy norm of the first hundred, as
# docs/choosing_a_clipper.md advises under "A good cap".
CAP_FACTOR = 10.0
FIRST_NORMS = 100
# A run broke if at least so many rows at the end are broken. Fewer may be one accident,
# or evaluations: strict JSON writes null for NaN and for an empty cell.
LEAST_BROKEN_ROWS = 5


class Choice(NamedTuple):
    """The clipper to take.

    Attributes:
      rule: a number, or a rule that learns, for `run`.
      suggestion: the same rule as Python, and what it does to the norms.
      reasons: what to take and why, in sentences.
      guard: the fixed limit that clips about 1 %, whether it is taken or not. None
        if norms fall so far that there is none.
      candidates: all suggestions of `suggest`.
    """

    rule: float | Rule
    suggestion: Suggestion
    reasons: list[str]
    guard: Suggestion | None
    candidates: list[Suggestion]


def choice_of(column: Column, every: int) -> Choice | None:
    """Chooses between the usual limit, the guard, and zclip where norms fall far. None
    if `suggest` finds no guard, and norms do not fall far.

    Args:
      column: norms that are finite and above 0.
      every: how many steps lie between two norms.
    """
    norms = column.values
    candidates = suggest(norms, every=every)
    guard = next((row for row in candidates if row.is_guard), None)
    usual = suggestion_of(
        f"optaxclip.clip_by_global_norm({USUAL_LIMIT})", USUAL_LIMIT, norms
    )
    takes_usual = 0 < usual.clip_rate <= MAX_USUAL_SHARE
    fixed_limit = np.inf
    if takes_usual:
        fixed_limit = USUAL_LIMIT
    elif guard is not None:
        fixed_limit = guard.limit
    rule: float | Rule = fixed_limit
    first_norms, *_, last_norms = np.array_split(norms, 5)
    early = float(np.median(first_norms))
    late = float(np.median(last_norms))
    # Norms fall far, and few of the late norms come near the limit.
    if early >= FAR * late and fixed_limit > MAX_GUARD_IN_MEDIANS * late:
        cap = _cap(norms)
        rule = minimum(z_score_of_zclip(every), cap)
        suggestion = suggestion_of(f"optaxclip.zclip(cap={cap:g})", rule, norms)
        reasons = _reasons_for_zclip(suggestion, early, late)
    elif guard is None:
        return None
    elif takes_usual:
        suggestion = usual
        reasons = _reasons_for_usual_limit(usual.clip_rate, guard, column)
    else:
        suggestion = guard
        reasons = _reasons_for_guard(usual.clip_rate, guard, column)
    if late >= FAR * early:
        reasons.append(
            f"Norms grow from a median of {early:.3g} in the first fifth of the log to "
            f"{late:.3g} in the last. Unless bad batches did that, a clip hides it and "
            "cures nothing: python -m optaxclip.doctor looks for the cause."
        )
    return Choice(rule, suggestion, reasons, guard=guard, candidates=candidates)


def how_it_broke(column: Column) -> str | None:
    """Says how norms end, if the run broke: as NaN or inf, as 0, or mostly so long that
    no guard clips about 1 %. None for other runs.
    """
    is_norm = np.isfinite(column.values) & (column.values > 0)
    first_broken = np.flatnonzero(is_norm).max(initial=-1) + 1
    values_at_end = column.values[first_broken:]
    if len(values_at_end) >= LEAST_BROKEN_ROWS:
        values = "NaN or inf" if values_at_end.any() else "0"
        step = column.steps[first_broken]
        return f"from {column.unit} {step} to the end norms are {values}"
    norms = column.values[is_norm]
    if len(norms) < MIN_NORMS:
        return None
    usual_norm = np.median(norms)
    early = np.median(norms[: len(norms) // 5])
    # If the run broke in its first half, this is the median of broken norms.
    if usual_norm > MAX_GUARD_IN_MEDIANS * early:
        usual_norm = early
    is_long = column.values > MAX_GUARD_IN_MEDIANS * usual_norm
    count = is_long.sum()
    are_rare = count <= GUARD_RATE * len(norms)
    # Long norms elsewhere in the log are accidents.
    most_are_long = is_long[-count:].mean() > 0.5
    if count >= LEAST_BROKEN_ROWS and most_are_long and not are_rare:
        return (
            f"from {column.unit} {column.steps[-count]} to the end most norms are more "
            f"than {MAX_GUARD_IN_MEDIANS} times the usual norm"
        )
    return None


def _cap(norms: np.ndarray) -> float:
    """Ten times the largest healthy norm of the first hundred, to two digits."""
    first_norms = norms[:FIRST_NORMS]
    is_healthy = first_norms <= MAX_GUARD_IN_MEDIANS * np.median(first_norms)
    return float(f"{CAP_FACTOR * first_norms[is_healthy].max():.2g}")


def percent(share: float) -> str:
    """A share as the table prints it, but one step of a long run is not 0.0 %."""
    if 0 < share < 0.001:
        return f"{100 * share:.2g}%"
    return f"{share:.1%}"


def _reasons_for_zclip(zclip: Suggestion, early: float, late: float) -> list[str]:
    return [
        f"Take {zclip.rule}, whose limit follows the norms. It clips "
        f"{percent(zclip.clip_rate)} of the steps.",
        f"Norms fall from a median of {early:.3g} in the first fifth of the log to "
        f"{late:.3g} in the last, so no fixed limit fits the whole run.",
    ]


def _reasons_for_usual_limit(
    usual_share: float, guard: Suggestion, column: Column
) -> list[str]:
    reasons = [
        f"Take {USUAL_LIMIT}, as most trainers do: it clips {percent(usual_share)} of "
        "the steps, and up to half is fine."
    ]
    limit = USUAL_LIMIT
    # A guard that clips nearly as many steps is not another choice.
    if 2 * guard.clip_rate <= usual_share:
        limit = guard.limit
        reasons.append(
            f"To clip only accidents, take {guard.rule}, a guard that clips "
            f"{percent(guard.clip_rate)}."
        )
    return [*reasons, _steps_above(limit, column)]


def _reasons_for_guard(
    usual_share: float, guard: Suggestion, column: Column
) -> list[str]:
    reason = f"The usual {USUAL_LIMIT} clips none."
    if usual_share:
        reason = (
            f"The usual {USUAL_LIMIT} clips {percent(usual_share)}, more than half: "
            "you may keep it with Adam, which cancels a constant factor."
        )
    return [
        f"Take {guard.rule}, a guard that clips {percent(guard.clip_rate)} of the "
        "steps.",
        reason,
        _steps_above(guard.limit, column),
    ]


def _steps_above(limit: float, column: Column) -> str:
    """How many norms are above a limit, and where they lie."""
    # A limit of a rule was rounded to float32, perhaps below the norm that it equals.
    steps = column.steps[column.values > limit * (1 + 1e-6)]
    if not steps.size:
        return f"No {column.unit} is above {limit:g}."
    unit = column.unit
    count = f"{unit.capitalize()}s above {limit:g}: {steps.size}"
    return f"{count}, from {unit} {steps[0]} to {steps[-1]}."
