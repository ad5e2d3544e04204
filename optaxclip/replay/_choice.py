"""Which clipper to take, by the norms of a log: the usual limit, a guard, or a rule
that learns where norms fall far.
"""

from typing import NamedTuple

import numpy as np

from ..rules import minimum
from ..rules._rule import Rule
from ._run import MOST_MEDIANS, Suggestion, suggestion_of, z_score_of_zclip

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
      row: what it does to the norms.
      rule: for `run`: a number, or a rule that learns.
      guard: the fixed limit that clips about 1 %, whether it is taken or not.
      lines: what to take and why, in sentences.
    """

    row: Suggestion
    rule: float | Rule
    guard: Suggestion
    lines: list[str]


def choice_of(norms: np.ndarray, guard: Suggestion, every: int) -> Choice:
    """Chooses by the share of steps that the usual limit clips, and by how far the
    norms fall. `every`: how many steps lie between two norms.
    """
    usual = suggestion_of(
        f"optaxclip.clip_by_global_norm({USUAL_LIMIT})", USUAL_LIMIT, norms
    )
    share = float(np.mean(norms > USUAL_LIMIT))
    if 0 < share <= MOST_SHARE:
        choice = _usual_limit(usual, share, guard)
    else:
        choice = _guard(guard, share)
    first_norms, *_, last_norms = np.array_split(norms, 5)
    early = float(np.median(first_norms))
    late = float(np.median(last_norms))
    falls_far = early >= FAR_FALL * late
    if falls_far and choice.row.limit > MOST_MEDIANS * late:
        return _zclip(norms, guard, early=early, late=late, every=every)
    return choice


def _percent(share: float) -> str:
    """As in the table, but one step of a long run is not 0.0 %."""
    if 0 < share < 0.001:
        return f"{100 * share:.2g}%"
    return f"{share:.1%}"


def _usual_limit(usual: Suggestion, share: float, guard: Suggestion) -> Choice:
    advice = (
        f"Take {USUAL_LIMIT}, as most trainers do: it clips {_percent(share)} of these "
        "steps, some but at most half."
    )
    lines = [advice]
    # A tighter guard would clip more.
    if guard.limit > USUAL_LIMIT:
        lines.append(
            f"To clip only accidents, take {guard.rule}, a guard that clips "
            f"{guard.clip_rate:.1%}."
        )
    return Choice(row=usual, rule=USUAL_LIMIT, guard=guard, lines=lines)


def _guard(guard: Suggestion, share_of_usual: float) -> Choice:
    advice = (
        f"Take {guard.rule}, a guard that clips {guard.clip_rate:.1%} of these steps."
    )
    if share_of_usual == 0:
        lines = [f"{advice} The usual {USUAL_LIMIT} clips none."]
    else:
        lines = [
            f"{advice} The usual {USUAL_LIMIT} clips {_percent(share_of_usual)}.",
            f"With Adam you may keep {USUAL_LIMIT}: Adam cancels a constant factor, so "
            "a tight limit only keeps long gradients from counting more.",
        ]
    return Choice(row=guard, rule=guard.limit, guard=guard, lines=lines)


def _zclip(
    norms: np.ndarray, guard: Suggestion, *, early: float, late: float, every: int
) -> Choice:
    first_norms = norms[:FIRST_NORMS]
    is_healthy = first_norms <= MOST_MEDIANS * np.median(first_norms)
    cap = float(f"{CAP_FACTOR * first_norms[is_healthy].max():.2g}")
    rule = minimum(z_score_of_zclip(every), cap)
    row = suggestion_of(f"optaxclip.zclip(cap={cap:g})", rule, norms)
    lines = [
        f"Norms fall from a median of {early:.3g} in the first fifth of the log to "
        f"{late:.3g} in the last, so no fixed limit fits the whole run.",
        f"Take {row.rule}, whose limit follows the norms. It clips "
        f"{row.clip_rate:.1%} of these steps.",
    ]
    return Choice(row=row, rule=rule, guard=guard, lines=lines)
