"""Known bugs of norms and clips, and which of them a run shows.

A right step has

    norm = |gradient|, factor = min(1, limit / norm), update = factor * gradient

A bug gives another norm. Some steps return it, some clip by it. The norm that a step
clips by is read from its update: factor = limit / norm, so norm = limit / factor. The
first bug whose norm agrees is named. Other bugs give another gradient or factor.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from .runs import Run, factors_of, norm_of, norms_of

# ------------------------------------------------------ what bugs give: the longer ones


def norms_after_clip(run: Run) -> list[float]:
    """Norms of clipped gradients: clipped rightly, and as the step clipped them."""
    if run.norm > run.limit:
        return [run.limit, norm_of(run.update)]
    return [run.norm]


def norms_of_weights(run: Run) -> list[float]:
    """Norms of the weights before the step, and after it."""
    # One weight of each leaf is the limit. It has no gradient.
    before = run.limit * math.sqrt(run.leaf_norms.size)
    return [before, math.hypot(before, run.norm * run.factor)]


def norms_in_bfloat16(run: Run) -> np.ndarray:
    """Norms without the squares of some small leaves, or of all."""
    if run.setting.dtype != jnp.bfloat16:
        return np.array([])
    counts = np.arange(run.leaf_norms.size)
    return np.sqrt(run.leaf_norms.max() ** 2 + counts * run.leaf_norms.min() ** 2)


def gradients_of_parts(run: Run, count: int) -> np.ndarray:
    """[gradients, numbers]: what steps use that take parts of a batch one by one.

    The first is the mean of parts that are clipped separately. The others are the
    parts themselves.
    """
    parts = run.batch.reshape(count, -1, run.gradient.size).mean(axis=1)
    factors = np.minimum(1.0, run.limit / norms_of(parts))
    clipped = factors[:, None] * parts
    return np.vstack([clipped.mean(axis=0), parts])


def gradients_of_microbatches(run: Run) -> np.ndarray:
    return gradients_of_parts(run, run.setting.microbatches)


def gradients_of_devices(run: Run) -> np.ndarray:
    return gradients_of_parts(run, run.setting.mesh.shape["data"])


def norms_of_parts(gradients: np.ndarray) -> np.ndarray:
    """Norms of `gradients_of_parts`, and the mean of the norms of parts."""
    norms = norms_of(gradients)
    return np.append(norms, norms[1:].mean())


def norms_of_devices(run: Run) -> np.ndarray:
    """Norms of the gradients of each device's own batch, and their mean."""
    norms = norms_of(run.batch_means)
    return np.hstack([norms, norms.mean(), norms_of_parts(gradients_of_devices(run))])


def split_norms(run: Run) -> tuple[float, float]:
    """The norm of leaves that all devices hold, and that of leaves that are split."""
    is_split = [any(spec) for spec in jax.tree.leaves(run.setting.specs)]
    split = norm_of(run.leaf_norms[is_split])
    return math.sqrt(run.norm**2 - split**2), split


def roots_of_copies(run: Run) -> np.ndarray:
    """Roots of the numbers of devices that squares may be added over."""
    data, experts = run.setting.mesh_shape
    return np.sqrt([data, experts, data * experts])


def norms_with_whole_leaves_repeated(run: Run) -> np.ndarray:
    whole, split = split_norms(run)
    return np.hypot(whole * roots_of_copies(run), split)


def norms_with_split_leaves_repeated(run: Run) -> np.ndarray:
    whole, split = split_norms(run)
    return np.hypot(whole, split * roots_of_copies(run))


# ------------------------------------------------------------------------ the catalogue


class Bug(NamedTuple):
    """A bug, what it means and what to do, and what it gives."""

    kind: str
    meaning: str
    # The norms that steps with this bug return or clip by.
    norms: Callable[[Run], ArrayLike] = lambda run: []
    # [gradients, numbers]: the gradients that they use.
    gradients: Callable[[Run], Sequence[np.ndarray] | np.ndarray] = lambda run: []
    # The norm over the right one is the same in all settings, as with a loss scale.
    has_constant_ratio: bool = False


# The first whose norm agrees is named. Those without norms and gradients are told by
# the functions below.
BUGS = [
    Bug("nan_on_one_device", "a NaN is seen by some devices only: replicas part"),
    Bug(
        "nan_hidden", "the update has a NaN and the norm has none: let the norm be NaN"
    ),
    Bug(
        "zero_norm",
        "the norm is 0: it is of a state before its update, or of no gradient",
        norms=lambda run: 0.0,
        has_constant_ratio=True,
    ),
    Bug(
        "after_clip",
        "the norm that is returned is that of clipped gradients",
        norms=norms_after_clip,
    ),
    Bug(
        "norm_of_weights",
        "the norm is that of the weights: pass the gradients",
        norms=norms_of_weights,
    ),
    Bug(
        "clipped_below_limit",
        "gradients below the limit are changed",
        norms=lambda run: run.limit,
    ),
    Bug(
        "weights_added",
        "weights are in the update: leave weight decay and penalties out",
        norms=lambda run: math.hypot(run.norm, norm_of(run.drift)),
    ),
    Bug(
        "low_precision_sum",
        "squares are added in bfloat16: add them in float32",
        norms=norms_in_bfloat16,
    ),
    Bug(
        "squares_overflow",
        "squares in float16 are inf: convert to float32 first",
        norms=lambda run: math.inf if run.setting.dtype == jnp.float16 else [],
    ),
    Bug(
        "microbatches_apart",
        "micro-batches are clipped or measured one by one: average all of them first",
        norms=lambda run: norms_of_parts(gradients_of_microbatches(run)),
        gradients=gradients_of_microbatches,
    ),
    Bug(
        "local_norm",
        "each device uses the gradient of its own batch: average first",
        norms=norms_of_devices,
        gradients=gradients_of_devices,
    ),
    Bug(
        "own_shard",
        "squares of split leaves are not added (lax.psum)",
        norms=lambda run: norms_of(run.shards),
    ),
    Bug(
        "averaged_norms",
        "norms or squares of shards are averaged: add squares",
        norms=lambda run: [
            np.mean(norms_of(run.shards)),
            np.sqrt(np.mean(norms_of(run.shards) ** 2)),
        ],
    ),
    Bug(
        "leaves_left_out",
        "only some leaves count, such as those that are split",
        norms=lambda run: [*run.leaf_norms, *np.sqrt(run.norm**2 - run.leaf_norms**2)],
    ),
    Bug(
        "once_per_replica",
        "each replica counts: do not add squares of equal gradients",
        norms=lambda run: run.norm * roots_of_copies(run),
    ),
    Bug(
        "whole_leaves_repeated",
        "leaves that all devices hold count once for each",
        norms=norms_with_whole_leaves_repeated,
    ),
    Bug(
        "split_leaves_repeated",
        "split leaves (experts) count once for each copy",
        norms=norms_with_split_leaves_repeated,
    ),
    Bug(
        "all_leaves_repeated",
        "leaves count once for each device with the same part",
        norms=lambda run: norm_of(run.shards),
    ),
    Bug(
        "sum_of_norms",
        "norms of leaves are added: add their squares, then take the root",
        norms=lambda run: run.leaf_norms.sum(),
    ),
    Bug(
        "largest_element",
        "it is the largest element: take the root of the sum of squares",
        norms=lambda run: abs(run.gradient).max(),
    ),
    Bug(
        "rms",
        "squares are averaged: add them",
        norms=lambda run: run.norm / math.sqrt(run.gradient.size),
        has_constant_ratio=True,
    ),
    Bug(
        "squared",
        "the root of the sum of squares is missing",
        norms=lambda run: run.norm**2,
    ),
    Bug(
        "clipped_twice",
        "the factor of one norm multiplies twice",
        norms=lambda run: run.norm**2 / run.limit,
        has_constant_ratio=True,
    ),
    Bug(
        "eps",
        "the limit is divided by norm + eps: updates are below the limit",
        norms=lambda run: run.norm + np.array([1e-5, 1e-6, 1e-7, 1e-8, 1e-9]),
    ),
    Bug(
        "gradients_summed",
        "gradients of devices are added: average them (lax.pmean)",
        norms=lambda run: run.norm * run.setting.mesh.shape["data"],
    ),
    Bug(
        "accumulation_summed",
        "gradients of micro-batches are added: average them",
        norms=lambda run: run.norm * run.setting.microbatches,
    ),
    Bug(
        "averaged_twice",
        "averaged gradients are divided by a number of parts again",
        norms=lambda run: [
            run.norm / run.setting.mesh.shape["data"],
            run.norm / run.setting.microbatches,
        ],
    ),
    Bug(
        "scaled", "gradients carry a scale, as of a loss: divide by it before the clip"
    ),
    Bug("own_factor", "each device clips by a factor of its own: replicas part"),
    Bug("groups_apart", "leaves have different factors: clip all of them together"),
    Bug(
        "clipped_by_value",
        "elements are clipped, and not the norm",
        gradients=lambda run: [np.clip(run.gradient, -run.limit, run.limit)],
    ),
    Bug(
        "other_direction",
        "the gradient is changed before the clip, or not by one factor",
    ),
    Bug("not_clipped", "gradients above the limit are not clipped"),
    Bug("other_limit", "the norm of updates is held at another limit"),
    Bug(
        "other_rate",
        "updates are multiplied: is the optimizer optax.sgd(1.0), run once?",
    ),
    Bug("unknown", "no known bug gives this number"),
]
MEANINGS = {bug.kind: bug.meaning for bug in BUGS}

# ------------------------------------------------------------------ which of them it is


def bug_of_norm(run: Run, peers: Sequence[Run]) -> str:
    """The kind of bug of the norm that the step returned."""
    return _first_bug(run, run.norms_found, peers, Run.norm_ratio)


# The norm of a factor of 0 is inf.
@np.errstate(divide="ignore")
def bug_of_update(run: Run, peers: Sequence[Run]) -> str:
    """The kind of bug of the update. Empty where it is right."""
    if not np.isfinite(run.update).all():
        return "unknown"
    if math.isnan(run.factor_ratio()):
        return _bug_of_direction(run)
    if run.drift.any():
        return "weights_added"
    if run.close(run.factor_ratio(), 1.0):
        return ""
    if _is_constant(run, peers, Run.factor_ratio):
        return "other_rate"
    is_above = run.case == "above"
    factor = run.factors_found[0, 0]
    if is_above and run.close(factor, 1.0):
        return "not_clipped"
    # A gradient that is not clipped is as long as the update.
    norm = run.norm * factor
    if is_above and factor < 1.0:
        # factor = limit / norm.
        norm = run.limit / factor
    if run.close(run.norms_found, norm).all():
        return bug_of_norm(run, peers)
    peers_of_case = [peer for peer in peers if peer.case == run.case]
    kind = _first_bug(run, np.array([norm]), peers_of_case, Run.factor_ratio)
    # Above the limit a scale of gradients cancels, so only another limit remains.
    if is_above and kind in ("scaled", "averaged_twice"):
        return "other_limit"
    return kind


def _bug_of_direction(run: Run) -> str:
    """The kind of bug of an update that is no multiple of the gradient."""
    is_multiple_in_leaves = np.isfinite(run.factors_found).all()
    if run.replicas_differ:
        return "own_factor" if is_multiple_in_leaves else "local_norm"
    for bug in BUGS:
        for gradient in bug.gradients(run):
            # A bug that gives the right direction here does not explain another one.
            is_right = math.isfinite(_factor(gradient, run.gradient))
            # Clipped gradients have the factor 1, and new params have -1.
            factor = abs(_factor(run.update, gradient))
            if run.close(factor, 1.0) and not is_right:
                return bug.kind
    return "groups_apart" if is_multiple_in_leaves else "other_direction"


def _factor(update: np.ndarray, gradient: np.ndarray) -> float:
    (factor,) = factors_of(update[None], gradient[None])
    return factor


def _first_bug(
    run: Run, norms: np.ndarray, peers: Sequence[Run], ratio: Callable[[Run], float]
) -> str:
    """The first kind of bug that gives the norms of devices. Without one it is a scale,
    if all peers have the same ratio: of the norm, or the factor, to the right one.
    """
    is_constant = _is_constant(run, peers, ratio)
    # No number of devices is a ratio on meshes of 4 and of 8.
    mesh_sizes = {peer.setting.mesh.size for peer in peers}
    is_scale = is_constant and len(mesh_sizes) > 1
    for bug in BUGS:
        is_coincidence = is_scale and not bug.has_constant_ratio
        is_equal = run.close(norms[:, None], bug.norms(run))
        if is_equal.any(axis=1).all() and not is_coincidence:
            return bug.kind
    return "scaled" if is_constant else "unknown"


def _is_constant(run: Run, peers: Sequence[Run], ratio: Callable[[Run], float]) -> bool:
    """Whether a ratio of this run is that of all peers. One run shows nothing."""
    ratios = [ratio(peer) for peer in peers]
    return len(peers) > 1 and bool(run.close(ratios, ratio(run)).all())
