"""Every public method of optaxclip once: how to build it, what it measures and keeps.

    METHODS["clippy"].make()              with settings that act within a few steps
    METHODS["clip_by_value"].make(0.5)    with a limit of your own

A new method is one entry here. Tables that need a property ask for it:
`[name for name, method in METHODS.items() if method.learns]`.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import optaxclip
from optaxclip import clip_by_global_norm, clip_by_tensor_norm
from tests.as_clippers import (
    around,
    bounds,
    by_group,
    carried,
    constrained,
    cotangent,
    example,
    labels_by_rank,
    once,
)

BITS = "bits"  # what is within the limit keeps its bits
BOUND = "bound"  # nothing comes out longer than its limit
DIRECTION = "direction"  # one factor for all that is measured together
LENGTH = "length"  # nothing comes out longer than it came
NORM = frozenset({BITS, BOUND, DIRECTION, LENGTH})
SHORTENS = frozenset({BITS, LENGTH})

SHARE = (0, 1)
POSITIVE = (0, None)
FINITE = (0, math.inf)  # inf itself is refused
COUNT = (1, None)

FLOATS = "floats"  # integer, bool and key leaves pass through untouched
ORDERED = "ordered"  # integer leaves are clipped as well
ALONE = "alone"  # there may be no others: they are differentiated by

WEIGHTS = "weights"  # update needs params


class Method(NamedTuple):
    """One public method, as the tests see it."""

    build: Callable[..., Any]  # (limit, **options), or (**options) without a limit
    function: Callable[..., Any]  # the public function, whose defaults are checked
    norm: str  # measured together: "all", "tensor", "unit", "group", "element"
    keeps: frozenset[str] = NORM
    limit: float | None = None  # one that clips gradients of size 1; None: takes none
    ord: Any = 2  # of the norm: a number, inf, "rms", "average", or "spectral"
    floor: float | None = None  # limit * max(|weights|, floor) is the limit
    numbers: Mapping[str, tuple[Any, Any]] = {}  # name: (lowest, highest)
    defaults: Mapping[str, Any] = {}  # those of the papers
    quick: Mapping[str, Any] = {}  # options with which it acts within a few steps
    learns: bool = False  # has a memory of what it saw
    needs: str | None = None  # WEIGHTS
    leaves: str = FLOATS
    mesh_axes: bool = True  # takes names of mesh axes
    shrinks: bool = False  # takes `shrink`
    schedules: bool = True  # the limit may also be a schedule or None
    wraps: str | None = None  # built around a "clipper" or an "optimizer"

    def make(self, *limit: Any, **options: Any) -> Any:
        """Builds it, with a limit or with its usual settings."""
        usual = () if self.limit is None else (self.limit,)
        return self.build(*(limit or usual), **{**self.quick, **options})


def of(function: Callable[..., Any], norm: str, **fields: Any) -> Method:
    """A method that is built by its public function."""
    return Method(function, function, norm, **fields)


def by_norm(function: Callable[..., Any], norm: str, **fields: Any) -> Method:
    """A clipper by norm, with all that these have in common."""
    return of(function, norm, limit=1.0, shrinks=True, **fields)


AGC = {"clipping": 0.01, "eps": 1e-3}
KERNEL = {"ord": None, "eps": 0.0, "nonfinite": "propagate", "mesh_axes": "auto"}
SPECTRAL = {"method": "svd", "steps": None, "columns": None}
Z_SCORE = {"z": 2.5, "decay": 0.97, "target": "adaptive", "warmup": 25, "eps": 1e-6}
BAND = {"low": 0.95, "high": 0.6, "decay": 0.95, "floor": 0.01, "up": 1.1, "down": 0.9}
ADAGC = {"ratio": 1.05, "decay": 0.98, "max_norm": 1.0, "warmup": 100}
SPAM = {"threshold": 5000.0, "decay": 0.999, "warmup": 20, "every": 500}
ADAGN = {"decay1": 0.7, "decay2": 0.9, "eps": 1e-8, "scope": "tensor"}

LARC_NUMBERS = {"learning_rate": POSITIVE, "trust": POSITIVE, "weight_decay": FINITE}
SPAM_NUMBERS = {"threshold": POSITIVE, "decay": SHARE, "warmup": POSITIVE}
ADAGC_NUMBERS = {"ratio": POSITIVE, "decay": SHARE, "max_norm": POSITIVE}

Fields = dict[str, Any]
OF_ELEMENTS: Fields = {"limit": 1.0, "leaves": ORDERED, "mesh_axes": False}
OF_ELEMENTS |= {"keeps": SHORTENS | {BOUND}}
OF_RULES: Fields = {"keeps": SHORTENS | {DIRECTION}, "learns": True}
OF_WEIGHTS: Fields = {"floor": 1e-3, "needs": WEIGHTS}
AROUND_CLIPPERS: Fields = {"keeps": frozenset(), "limit": 1.0, "wraps": "clipper"}
AROUND_OPTIMIZERS: Fields = {"keeps": frozenset({LENGTH}), "wraps": "optimizer"}
OF_DERIVATIVES: Fields = {"limit": 1.0, "leaves": ALONE, "mesh_axes": False}
OF_DERIVATIVES |= {"schedules": False}

METHODS: dict[str, Method] = {
    "clip_by_global_norm": by_norm(clip_by_global_norm, "all", defaults=KERNEL),
    "clip_by_tensor_norm": by_norm(clip_by_tensor_norm, "tensor"),
    "clip_by_unitwise_norm": by_norm(optaxclip.clip_by_unitwise_norm, "unit"),
    "clip_by_group_norm": by_norm(optaxclip.clip_by_group_norm, "group")._replace(
        build=by_group
    ),
    "clip_by_tensor_rms": by_norm(optaxclip.clip_by_tensor_rms, "tensor", ord="rms"),
    "clip_by_block_rms": of(
        optaxclip.clip_by_block_rms, "tensor", ord="rms", limit=1.0, mesh_axes=False
    ),
    "clip_by_average_norm": by_norm(
        optaxclip.clip_by_average_norm, "tensor", ord="average"
    ),
    "adaptive_grad_clip": by_norm(
        optaxclip.adaptive_grad_clip, "unit", defaults=AGC, **OF_WEIGHTS
    ),
    "adaptive_grad_clip per tensor": by_norm(
        optaxclip.adaptive_grad_clip, "tensor", quick={"per_tensor": True}, **OF_WEIGHTS
    ),
    "clip_by_spectral_norm": of(
        optaxclip.clip_by_spectral_norm,
        "tensor",
        ord="spectral",
        keeps=SHORTENS | {BOUND},
        limit=1.0,
        defaults=SPECTRAL,
        mesh_axes=False,
        shrinks=True,
    ),
    "clip_by_value": Method(bounds, optaxclip.clip_by_value, "element", **OF_ELEMENTS),
    "clip": of(optaxclip.clip, "element", **OF_ELEMENTS),
    "clippy": of(
        optaxclip.clippy,
        "tensor",
        needs=WEIGHTS,
        numbers={"relative": POSITIVE, "absolute": POSITIVE},
        defaults={"relative": 0.1, "absolute": 1e-7},
    ),
    "larc": of(
        optaxclip.larc,
        "tensor",
        needs=WEIGHTS,
        quick={"learning_rate": 0.1},
        numbers=LARC_NUMBERS,
        defaults={"trust": 0.02, "weight_decay": 0.0, "eps": 1e-8},
    ),
    "record_norm": of(optaxclip.record_norm, "all", mesh_axes=False),
    "record_health": of(
        optaxclip.record_health,
        "all",
        learns=True,
        needs=WEIGHTS,
        defaults={"weights": True, "values": True, "patience": 100},
    ),
    "record_spikes": of(
        optaxclip.record_spikes,
        "all",
        learns=True,
        quick={"window": 4},
        numbers={"sigmas": POSITIVE},
        defaults={"sigmas": 6.0, "window": 128},
    ),
    "autoclip": of(
        optaxclip.autoclip,
        "all",
        **OF_RULES,
        quick={"percentile": 50.0, "window": 8},
        numbers={"percentile": (0, 100)},
        defaults={"percentile": 10.0, "window": 10_000, "cap": None},
    ),
    "zclip": of(
        optaxclip.zclip,
        "all",
        **OF_RULES,
        quick={"z": 1.0, "decay": 0.9, "warmup": 2},
        defaults={**Z_SCORE, "cap": None, "scope": "global"},
    ),
    "adagc": of(
        optaxclip.adagc,
        "tensor",
        **OF_RULES,
        quick={"warmup": 1},
        numbers={**ADAGC_NUMBERS, "warmup": COUNT},
        defaults={**ADAGC, "scope": "tensor"},
    ),
    "aggc": of(
        optaxclip.aggc,
        "group",
        keeps=frozenset({DIRECTION}),
        learns=True,
        quick={"scope": labels_by_rank, "raise_small": True},
        defaults={**BAND, "raise_small": False},
    ),
    "adaclip": of(
        optaxclip.adaclip,
        "element",
        keeps=SHORTENS,
        learns=True,
        quick={"decay": 0.9},
        defaults={"decay": 0.999},
    ),
    "adagn": of(
        optaxclip.adagn,
        "tensor",
        keeps=frozenset({DIRECTION}),
        learns=True,
        defaults=ADAGN,
    ),
    "spam": of(
        optaxclip.spam,
        "element",
        keeps=SHORTENS,
        learns=True,
        quick={"threshold": 0.5, "warmup": 0},
        numbers={**SPAM_NUMBERS, "every": COUNT},
        defaults=SPAM,
        mesh_axes=False,
    ),
    "carry_clipped": Method(
        carried, optaxclip.carry_clipped, "all", learns=True, **AROUND_CLIPPERS
    ),
    "constrain": Method(
        constrained, optaxclip.constrain, "all", needs=WEIGHTS, **AROUND_CLIPPERS
    ),
    "skip_nonfinite": Method(
        around(optaxclip.skip_nonfinite),
        optaxclip.skip_nonfinite,
        "all",
        defaults={"max_consecutive": 100},
        **AROUND_OPTIMIZERS,
    ),
    "skip_spikes": Method(
        around(optaxclip.skip_spikes, rule=10.0),
        optaxclip.skip_spikes,
        "all",
        **AROUND_OPTIMIZERS,
    ),
    "skip_step": Method(
        around(optaxclip.skip_step, window=4, on_loss=False),
        optaxclip.skip_step,
        "all",
        learns=True,
        defaults={"sigmas": 6.0, "window": 128, "on_loss": None},
        **AROUND_OPTIMIZERS,
    ),
    "reset_momentum": Method(
        around(optaxclip.reset_momentum, every=2, warmup=4),
        optaxclip.reset_momentum,
        "element",
        learns=True,
        defaults={"every": 500, "warmup": 150},
        mesh_axes=False,
        **AROUND_OPTIMIZERS,
    ),
    "clip_grads": Method(
        once, optaxclip.clip_grads, "all", limit=1.0, schedules=False, defaults=KERNEL
    ),
    "clip_cotangent": Method(
        cotangent, optaxclip.clip_cotangent, "tensor", **OF_DERIVATIVES
    ),
    "clipped_grad": Method(
        example,
        optaxclip.clipped_grad,
        "all",
        keeps=NORM - {BITS},
        **OF_DERIVATIVES,
        shrinks=True,
        defaults={
            "argnums": 0,
            "shared_argnums": (),
            "method": "auto",
            "mean": True,
            "mesh_axes": "auto",
        },
    ),
}
