"""Every rule and shrink with numbers: the range of each, and the defaults of papers.

Rules and shrinks without numbers are not here.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from optaxclip import rules, shrinks
from tests.methods import BAND, COUNT, FINITE, POSITIVE, SHARE, Z_SCORE

# The lowest and the highest number: None for no end, and inf where it is refused.
Range = tuple[Any, Any]


class Part(NamedTuple):
    """A rule or a shrink, as the tests see it."""

    numbers: Mapping[str, Range]
    defaults: Mapping[str, Any]


WINDOW = {"current": False, "remember": "raw"}


def each(names: str, numbers: Range) -> dict[str, Range]:
    return dict.fromkeys(names.split(), numbers)


RULES: dict[Callable[..., Any], Part] = {
    rules.windowed_quantile: Part(
        {"quantile": SHARE, "window": COUNT, **each("factor warmup", POSITIVE)},
        {"quantile": 0.5, "window": 100, "factor": 1.0, "warmup": 1, **WINDOW},
    ),
    rules.windowed_mean: Part(
        {"window": COUNT, **each("sigmas floor warmup", POSITIVE), "ddof": SHARE},
        {"sigmas": 3.0, "window": 128, "ddof": 0, "floor": 0.0, "warmup": 2, **WINDOW},
    ),
    rules.z_score: Part(
        {"decay": SHARE, "warmup": COUNT, **each("z eps", POSITIVE)}, Z_SCORE
    ),
    rules.log_z_score: Part(
        {"floor": FINITE, **each("z spread", POSITIVE)}
        | {"decay": SHARE, "warmup": COUNT},
        {"z": 4.0, "decay": 0.995, "floor": 0.01, "spread": 1e-3, "warmup": 277},
    ),
    rules.ema_ratio: Part(
        each("ratio target warmup", POSITIVE) | each("decay target_decay", SHARE),
        {"ratio": 2.0, "decay": 0.99, "corrected": False, "warmup": 1}
        | {"remember": "clipped"},
    ),
    rules.growth: Part(
        each("rate floor cap", POSITIVE), {"rate": 1.01, "floor": 0.0, "cap": None}
    ),
    rules.quantile_tracker: Part(
        {"quantile": SHARE, "rate": FINITE, "start": POSITIVE},
        {"quantile": 0.5, "rate": 0.2, "start": 0.1},
    ),
    rules.ema: Part({"decay": SHARE}, {"decay": 0.999}),
    rules.moments_ratio: Part(
        {"eps": POSITIVE, **each("decay1 decay2", SHARE)},
        {"decay1": 0.7, "decay2": 0.9, "eps": 1e-8},
    ),
    rules.ema_band: Part(
        {"up": COUNT, **each("low high floor", POSITIVE), **each("decay down", SHARE)},
        {**BAND, "raise_small": False},
    ),
}
SHRINKS: dict[Callable[..., Any], Part] = {
    shrinks.smooth: Part({}, {"power": 1.0}),
    shrinks.auto_s: Part({}, {"gamma": 0.01}),
    shrinks.psac: Part({}, {"r": 0.1}),
}
