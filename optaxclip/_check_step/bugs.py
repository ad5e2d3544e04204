"""Known bugs of norms and clips, and which of them a run shows.

A right step has

    norm = |gradient|, factor = min(1, limit / norm), update = factor * gradient

A bug gives another norm. Some steps return it, some clip by it. The norm that a step
clips by is read from its update: factor = limit / norm, so norm = limit / factor. The
first bug whose norm agrees is named. Other bugs give another gradient or factor.

The peers of a run are all runs in float32 without a NaN. If the ratio of a wrong norm
to the right one is equal in all peers, a bug must give the norms of all of them. If no
bug does, the ratio is a scale.
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


# drift / 0 is inf, or NaN.
@np.errstate(divide="ignore", invalid="ignore")
def norm_with_weights(run: Run) -> float:
    """The norm of gradients with weights added, before the clip."""
    weights = run.drift / run.same_or_nan(run.step_factors)
    return math.hypot(run.norm, norm_of(weights))


def norms_in_bfloat16(run: Run) -> np.ndarray:
    """Norms without the squares of some small leaves, or of all but the largest."""
    if run.setting.dtype != jnp.bfloat16:
        return np.array([])
    counts = np.arange(run.leaf_norms.size)
    return np.sqrt(run.leaf_norms.max() ** 2 + counts * run.leaf_norms.min() ** 2)


def gradients_of_parts(run: Run, count: int) -> tuple[np.ndarray, np.ndarray]:
    """What steps use that take parts of a batch one by one.

    Returns:
      [numbers]: the mean of parts that are clipped separately.
      [parts, numbers]: the parts themselves.
    """
    parts = run.batch.reshape(count, -1, run.gradient.size).mean(axis=1)
    factors = np.minimum(1.0, run.limit / norms_of(parts))
    clipped_mean = np.mean(factors[:, None] * parts, axis=0)
    return clipped_mean, parts


def gradients_of_microbatches(run: Run) -> list[np.ndarray]:
    clipped_mean, microbatches = gradients_of_parts(run, run.setting.microbatches)
    return [clipped_mean, *microbatches]


def gradients_of_devices(run: Run) -> list[np.ndarray]:
    clipped_mean, batches = gradients_of_parts(run, run.setting.mesh.shape["data"])
    return [clipped_mean, *batches]


def norms_of_parts(run: Run, count: int) -> np.ndarray:
    """Norms of the mean of clipped parts, and of each part, and the mean over parts."""
    clipped_mean, parts = gradients_of_parts(run, count)
    norms = norms_of(parts)
    return np.hstack([norm_of(clipped_mean), norms, norms.mean()])


def norms_of_devices(run: Run) -> np.ndarray:
    """Norms of the mean of each device's batch, and their mean. Then the same of the
    parts along "data", also clipped separately.
    """
    norms = norms_of(run.batch_means)
    norms_along_data = norms_of_parts(run, run.setting.mesh.shape["data"])
    return np.hstack([norms, norms.mean(), norms_along_data])


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

    name: str
    meaning: str
    # The norms that steps with this bug return or clip by.
    norms: Callable[[Run], ArrayLike] = lambda run: []
    # The gradients that they use.
    gradients: Callable[[Run], Sequence[np.ndarray]] = lambda run: []


# The first whose norm agrees is named. The functions below name bugs without norms and
# gradients. `check_step` names the two of a NaN.
BUGS = [
    Bug("nan_on_one_device", "a NaN is seen by some devices only: replicas diverge"),
    Bug(
        "nan_hidden", "the update has a NaN and the norm has none: let the norm be NaN"
    ),
    Bug(
        "zero_norm",
        "the norm is 0: it is of a state before its update, or of no gradient",
        norms=lambda run: 0.0,
    ),
    Bug(
        "zero_update",
        "the update is 0: are params returned as they were, or is no update due?",
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
        norms=norm_with_weights,
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
        norms=lambda run: norms_of_parts(run, run.setting.microbatches),
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
    Bug("own_factor", "each device clips by a factor of its own: replicas diverge"),
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
MEANINGS = {bug.name: bug.meaning for bug in BUGS}

# ------------------------------------------------------------------ which of them it is

# What a step takes for the norm of a run: [devices].
NormsOf = Callable[[Run], np.ndarray]


def norms_in_log(run: Run) -> np.ndarray:
    return run.step_norms


def norm_from_factor(run: Run) -> np.ndarray:
    """The norm that gives the factor of the step. Without a clip, the update's norm."""
    factor = run.same_or_nan(run.step_factors)
    if run.case == "above" and factor < 1.0:
        return norm_if_clipped(run)
    return np.array([run.norm * factor])


def norm_if_clipped(run: Run) -> np.ndarray:
    """The norm of factor = limit / norm."""
    return run.limit / np.array([run.same_or_nan(run.step_factors)])


def bug_of_norm(run: Run, peers: Sequence[Run]) -> str:
    """The bug of the norm that the step returned."""
    return _first_bug(run, peers, norms_in_log)


# limit / 0 is inf.
@np.errstate(divide="ignore")
def bug_of_update(run: Run, peers: Sequence[Run]) -> str:
    """The bug of the update. Empty where it is right."""
    if not np.isfinite(run.update).all():
        return "unknown"
    if math.isnan(run.factor_ratio()):
        return _bug_of_direction(run)
    if run.drift.any():
        return "weights_added"
    if run.is_close(run.factor_ratio(), 1.0):
        return ""
    if _is_constant(run, peers, Run.factor_ratio):
        return "other_rate" if run.update.any() else "zero_update"
    is_above = run.case == "above"
    if is_above and run.is_close(run.step_factors, 1.0).all():
        return "not_clipped"
    if run.is_close(run.step_norms, norm_from_factor(run)).all():
        return bug_of_norm(run, peers)
    peers_of_case = [peer for peer in peers if peer.case == run.case]
    bug = _first_bug(run, peers_of_case, norm_from_factor)
    # Above the limit a scale of gradients cancels, so only another limit remains.
    if is_above and bug in ("scaled", "averaged_twice"):
        return "other_limit"
    # Below the limit, a norm above it may have shortened the gradient.
    if not is_above and bug in ("scaled", "unknown"):
        return _first_bug(run, peers_of_case, norm_if_clipped)
    return bug


def _bug_of_direction(run: Run) -> str:
    """The bug of an update that is no multiple of the gradient."""
    is_multiple_in_leaves = np.isfinite(run.step_factors).all()
    if run.replicas_differ:
        return "own_factor" if is_multiple_in_leaves else "local_norm"
    for bug in BUGS:
        for gradient in bug.gradients(run):
            # Skip bugs whose gradient is parallel to the right one in this run.
            if math.isfinite(_factor_along(gradient, run.gradient)):
                continue
            # New params have a negative factor.
            factor = abs(_factor_along(run.update, gradient))
            clip_factor = min(1.0, run.limit / norm_of(gradient))
            if run.is_close(factor, [1.0, clip_factor]).any():
                return bug.name
    return "groups_apart" if is_multiple_in_leaves else "other_direction"


def _factor_along(update: np.ndarray, gradient: np.ndarray) -> float:
    (factor,) = factors_of(update[None], gradient[None])
    return factor


def _first_bug(run: Run, peers: Sequence[Run], norms_of_run: NormsOf) -> str:
    """The first bug that gives the norms of devices. If none does, "scaled"
    when the ratio to the right norm is equal in all peers, else "unknown".
    """

    def ratio(peer: Run) -> float:
        return peer.same_or_nan(norms_of_run(peer)) / peer.norm

    is_constant = _is_constant(run, peers, ratio)
    runs = [run]
    if is_constant:
        # One reason explains all of them. A number of devices does not, since it is
        # 4 on one mesh and 8 on another.
        runs += peers
    for bug in BUGS:
        if all(_gives(bug, peer, norms_of_run(peer)) for peer in runs):
            return bug.name
    return "scaled" if is_constant else "unknown"


def _gives(bug: Bug, run: Run, norms: np.ndarray) -> bool:
    """Whether the norm of every device is a norm of the bug."""
    is_equal = run.is_close(norms[:, None], bug.norms(run))
    return bool(is_equal.any(axis=1).all())


def _is_constant(run: Run, peers: Sequence[Run], ratio: Callable[[Run], float]) -> bool:
    """Whether a ratio of this run is equal in all peers. One run shows nothing."""
    ratios = [ratio(peer) for peer in peers]
    return len(peers) > 1 and bool(run.is_close(ratios, ratio(run)).all())
