"""Which clipper to take, by the norms of a log: the usual limit, a guard, or a rule
that learns where norms fall far.
"""

from typing import NamedTuple

import numpy as np

from ..rules import minimum
from ..rules._rule import Rule
from ._run import MOST_MEDIANS, Suggestion, suggest, suggestion_of, z_score_of_zclip

# Most trainers clip the global norm to it.
USUAL_LIMIT = 1.0
# A limit that clips more of the steps is no guard.
MOST_SHARE = 0.5
# Norms fall far if the median of the first fifth is this many times the median of the
# last: a limit of five late medians would then clip half of the first fifth.
FAR_FALL = 5.0
# "A good cap" of docs/choosing_a_clipper.md: this many times the largest healthy norm
# of the first hundred.
CAP_FACTOR = 10.0
FIRST_NORMS = 100


class Choice(NamedTuple):
    """The clipper to take.

    Attributes:
      rule: a number, or a rule that learns, for `run`.
      row: what it does to the norms.
      reasons: what to take and why, in sentences.
      guard: the fixed limit that clips about 1 %, whether it is taken or not.
      candidates: of `suggest`, with the guard.
    """

    rule: float | Rule
    row: Suggestion
    reasons: list[str]
    guard: Suggestion
    candidates: list[Suggestion]


def choice_of(norms: np.ndarray, every: int) -> Choice | None:
    """Chooses by the share of steps that the usual limit clips, and by how far the
    norms fall. None if the norms have no guard.

    Args:
      norms: float64[steps], finite and above 0.
      every: how many steps lie between two norms.
    """
    candidates = suggest(norms, every=every)
    guard = next((row for row in candidates if row.is_guard), None)
    if guard is None:
        return None
    share = float(np.mean(norms > USUAL_LIMIT))
    takes_usual = 0 < share <= MOST_SHARE
    rule = USUAL_LIMIT if takes_usual else guard.limit
    first_norms, *_, last_norms = np.array_split(norms, 5)
    early = float(np.median(first_norms))
    late = float(np.median(last_norms))
    if early >= FAR_FALL * late and rule > MOST_MEDIANS * late:
        cap = _cap(norms)
        rule = minimum(z_score_of_zclip(every), cap)
        row = suggestion_of(f"optaxclip.zclip(cap={cap:g})", rule, norms)
        reasons = _reasons_for_zclip(row, early, late)
    elif takes_usual:
        text = f"optaxclip.clip_by_global_norm({USUAL_LIMIT})"
        row = suggestion_of(text, rule, norms)
        reasons = _reasons_for_usual_limit(share, guard)
    else:
        row = guard
        reasons = _reasons_for_guard(share, guard)
    return Choice(rule, row, reasons, guard=guard, candidates=candidates)


def _cap(norms: np.ndarray) -> float:
    first_norms = norms[:FIRST_NORMS]
    is_healthy = first_norms <= MOST_MEDIANS * np.median(first_norms)
    return float(f"{CAP_FACTOR * first_norms[is_healthy].max():.2g}")


def _percent(share: float) -> str:
    """As in the table, but one step of a long run is not 0.0 %."""
    if 0 < share < 0.001:
        return f"{100 * share:.2g}%"
    return f"{share:.1%}"


def _reasons_for_zclip(zclip: Suggestion, early: float, late: float) -> list[str]:
    return [
        f"Norms fall from a median of {early:.3g} in the first fifth of the log to "
        f"{late:.3g} in the last, so no fixed limit fits the whole run.",
        f"Take {zclip.rule}, whose limit follows the norms. It clips "
        f"{zclip.clip_rate:.1%} of these steps.",
    ]


def _reasons_for_usual_limit(share: float, guard: Suggestion) -> list[str]:
    reasons = [
        f"Take {USUAL_LIMIT}, as most trainers do: it clips {_percent(share)} of these "
        "steps, some but at most half."
    ]
    # A tighter guard would clip more.
    if guard.limit > USUAL_LIMIT:
        reasons.append(
            f"To clip only accidents, take {guard.rule}, a guard that clips "
            f"{guard.clip_rate:.1%}."
        )
    return reasons


def _reasons_for_guard(share_of_usual: float, guard: Suggestion) -> list[str]:
    advice = (
        f"Take {guard.rule}, a guard that clips {guard.clip_rate:.1%} of these steps."
    )
    if share_of_usual == 0:
        return [f"{advice} The usual {USUAL_LIMIT} clips none."]
    return [
        f"{advice} The usual {USUAL_LIMIT} clips {_percent(share_of_usual)}.",
        f"With Adam you may keep {USUAL_LIMIT}: Adam cancels a constant factor, so "
        "a tight limit only keeps long gradients from counting more.",
    ]
