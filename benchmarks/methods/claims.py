"""What papers claim, and what the runs show of it."""

from typing import Any, NamedTuple

import numpy as np

from ..report import grid
from .scores import GLOBAL, best, mean_and_error, scores_of

SPAM = "spam(), reset_momentum()"
STABLE_SPAM = "adaclip(), adagn()"
HIGH = 2  # places above the best rate without a clip: 16 times as much
EQUAL = 0.01  # a score that is so much lower is as good


class Duel(NamedTuple):
    """Two methods of one task, of which the paper says that the first is better."""

    task: str
    method: str
    rival: str
    fault: int = 0
    is_high: bool = False  # at 16 times the best rate without a clip
    may_be_equal: bool = False


class Claim(NamedTuple):
    """One sentence of a paper, and the duels that would show it."""

    paper: str
    place: str
    text: str
    duels: list[Duel]


CLAIMS = [
    Claim(
        "ZClip, [2504.02507](https://arxiv.org/abs/2504.02507)",
        "figure 1",
        "at a high rate no clip and the limit 1.0 diverge, ZClip does not",
        [
            Duel("transformer", "zclip()", "none", is_high=True),
            Duel("transformer", "zclip()", GLOBAL, is_high=True),
        ],
    ),
    Claim(
        "AdaGC, [2502.11034](https://arxiv.org/abs/2502.11034)",
        "figure 1, abstract",
        "better than the global norm, and no spikes, such as those of broken data",
        [
            Duel("transformer", "adagc()", GLOBAL),
            Duel("transformer", "adagc()", GLOBAL, fault=1),
        ],
    ),
    Claim(
        "AGC, [2102.06171](https://arxiv.org/abs/2102.06171)",
        "abstract",
        "networks without normalisation are unstable at large rates, with AGC they are "
        "not",
        [Duel("digits", "adaptive_grad_clip(0.01)", "none", is_high=True)],
    ),
    Claim(
        "AutoClip, [2007.14469](https://arxiv.org/abs/2007.14469)",
        "abstract",
        "generalises better than without it (theirs: separation of sounds)",
        [
            Duel("recurrent", "autoclip(10)", "none"),
            Duel("transformer", "autoclip(10)", "none"),
        ],
    ),
    Claim(
        "SPAM, [2501.06842](https://arxiv.org/abs/2501.06842)",
        "table 1, figure 2",
        "better than Adam and its variants, since it counters spikes of 1,000 times",
        [Duel("transformer", SPAM, "none"), Duel("transformer", SPAM, GLOBAL, fault=2)],
    ),
    Claim(
        "Stable-SPAM, [2502.17055](https://arxiv.org/abs/2502.17055)",
        "figure 1, abstract",
        "in 4 bits better than Adam and than SPAM, above all at high rates",
        [
            Duel("4 bits", STABLE_SPAM, "none"),
            Duel("4 bits", STABLE_SPAM, SPAM),
            Duel("4 bits", STABLE_SPAM, "none", is_high=True),
        ],
    ),
    Claim(
        "Gorbunov, [2005.10785](https://arxiv.org/abs/2005.10785)",
        "section 2",
        "noise with heavy tails: SGD with a clip beats SGD",
        [Duel("regression", GLOBAL, "none")],
    ),
    Claim(
        "AUTO-S, [2206.07136](https://arxiv.org/abs/2206.07136)",
        "abstract",
        "as good as the best limit for each example, which matters much",
        [
            Duel("private", "auto_s", "hard, limit 0.1", may_be_equal=True),
            Duel("private", "auto_s", "hard, limit 1", may_be_equal=True),
            Duel("private", "auto_s", "hard, limit 10"),
        ],
    ),
]


def table(content: dict[str, Any]) -> str:
    """A line for each claim: what was run, and whether it appears."""
    lines = []
    for claim in CLAIMS:
        won = []
        results = []
        for duel in claim.duels:
            mean, error = difference(content, duel)
            won.append(wins(duel, mean, error))
            results.append(f"{described(duel)}: {mean:+.3f} ± {error:.3f}")
        row = [claim.paper, claim.place, claim.text, ". ".join(results), verdict(won)]
        lines.append(row)
    return grid(["paper", "where", "claim", "score here", "verdict"], lines)


def difference(content: dict[str, Any], duel: Duel) -> tuple[float, float]:
    """How much higher the first method scores, and the standard error."""
    tasks = content["tasks"] | {"private": content["private"]}
    row = tasks[duel.task]
    scores = scores_of(row)
    first = scores_at(scores, duel.method, duel, row["rates"])
    second = scores_at(scores, duel.rival, duel, row["rates"])
    return mean_and_error(first - second)


def scores_at(scores: Any, name: str, duel: Duel, rates: list[float]) -> np.ndarray:
    """float[seeds] at the best rate of the method, or at a high rate."""
    if not duel.is_high:
        return best(scores[name], rates).scores[duel.fault]
    place = best(scores["none"], rates).place + HIGH
    return scores[name][duel.fault, place]


def wins(duel: Duel, mean: float, error: float) -> bool:
    """Whether the first method is better by two standard errors, or as good."""
    return mean >= -EQUAL if duel.may_be_equal else mean > 2 * error


def verdict(won: list[bool]) -> str:
    if all(won):
        return "appears"
    return "in part" if any(won) else "does not"


def described(duel: Duel) -> str:
    rate = ", 16 times the rate" if duel.is_high else ""
    fault = ["", ", broken batches", ", elements x 1000"][duel.fault]
    rival = "no clip" if duel.rival == "none" else duel.rival
    return f"{duel.method} over {rival}, {duel.task}{rate}{fault}"
