"""Known bugs of norms and clips, and which of them a run shows.

A right step has

    norm = |gradient|, factor = min(1, limit / norm), update = factor * gradient

Most bugs give another norm. Some steps return it, and some clip by it. The norm that a
step clips by is read from its update: norm = limit / factor. Few bugs give another
gradient, or another factor.

    BUGS                       each bug with the norms or gradients that it gives
    bug_of_norm                the first bug that gives the norm which was returned
    bug_of_update              the first bug that gives the norm of the factor, or the
                               gradient that the update is a multiple of
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from .runs import Run, norm_of, norms_of

# ------------------------------------------------------------- norms that bugs give


def norms_after_clip(run: Run) -> list[float]:
    """Norms of clipped gradients: clipped rightly, and as the step clipped them."""
    if run.norm <= run.limit:
        return [run.norm]
    length = norm_of(run.update)
    # A clip makes no update longer.
    return [run.limit, length] if length < run.norm else [run.limit]


def norms_of_weights(run: Run) -> list[float]:
    """Norms of the weights before the step, and after it."""
    # Each leaf has one weight that is not 0. It is the limit, and has no gradient.
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


def gradients_of_parts(run: Run, count: int) -> np.ndarray:
    """[1 + parts, numbers]: gradients of steps that clip before they average.

    The first row is the mean of parts that are clipped separately. The other rows are
    the parts, for steps that do not average at all.
    """
    parts = run.batch.reshape(count, -1, run.gradient.size).mean(axis=1)
    factors = np.minimum(1.0, run.limit / norms_of(parts))
    clipped_mean = np.mean(factors[:, None] * parts, axis=0)
    return np.vstack([clipped_mean, parts])


def norms_of_parts(run: Run, count: int) -> np.ndarray:
    """Norms of the gradients of parts, and the mean of the norms of all parts."""
    norms = norms_of(gradients_of_parts(run, count))
    return np.hstack([norms, norms[1:].mean()])


def norms_of_devices(run: Run) -> np.ndarray:
    """Norms of steps that do not average over devices, or clip before they do."""
    norms = norms_of(run.batch_means)
    return np.hstack([norms, norms.mean(), norms_of_parts(run, run.data_devices)])


def norms_of_shards(run: Run) -> np.ndarray:
    """[devices]: the norm of what each device holds."""
    return norms_of(run.shards)


def averages_over_shards(run: Run) -> list[np.floating]:
    """The mean of the norms of shards, and the root of the mean of their squares."""
    norms = norms_of_shards(run)
    return [np.mean(norms), np.sqrt(np.mean(norms**2))]


def norms_of_whole_and_split(run: Run) -> tuple[float, float]:
    """The norm of leaves that are whole on all devices, and that of split leaves."""
    is_split = [any(spec) for spec in jax.tree.leaves(run.setting.specs)]
    split_norm = norm_of(run.leaf_norms[is_split])
    return math.sqrt(run.norm**2 - split_norm**2), split_norm


def roots_of_copies(run: Run) -> np.ndarray:
    """Roots of the numbers of copies that a sum over mesh axes may count."""
    data, experts = run.setting.mesh_shape
    return np.sqrt([data, experts, data * experts])


def norms_with_whole_leaves_repeated(run: Run) -> np.ndarray:
    whole_norm, split_norm = norms_of_whole_and_split(run)
    return np.hypot(whole_norm * roots_of_copies(run), split_norm)


def norms_with_split_leaves_repeated(run: Run) -> np.ndarray:
    whole_norm, split_norm = norms_of_whole_and_split(run)
    return np.hypot(whole_norm, split_norm * roots_of_copies(run))


# ------------------------------------------------------------------------- all bugs


class Bug(NamedTuple):
    """A bug, and the wrong numbers of a step that has it."""

    name: str
    meaning: str  # what is wrong, and what to do
    # The norms that such steps return or clip by.
    norms: Callable[[Run], ArrayLike] = lambda run: []
    # The gradients that their updates are multiples of.
    gradients: Callable[[Run], Iterable[np.ndarray]] = lambda run: []


# If several bugs give a number, the first is named. Bugs without norms and gradients
# show in other ways, which are read below, and in `check_step` after a NaN.
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
        norms=lambda run: norms_of_parts(run, run.microbatches),
        gradients=lambda run: gradients_of_parts(run, run.microbatches),
    ),
    Bug(
        "local_norm",
        "each device uses the gradient of its own batch: average first",
        norms=norms_of_devices,
        gradients=lambda run: gradients_of_parts(run, run.data_devices),
    ),
    Bug(
        "own_shard",
        "squares of split leaves are not added (lax.psum)",
        norms=norms_of_shards,
    ),
    Bug(
        "averaged_norms",
        "norms or squares of shards are averaged: add squares",
        norms=averages_over_shards,
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
        norms=lambda run: run.norm**2 / run.limit if run.norm > run.limit else [],
    ),
    Bug(
        "eps",
        "the limit is divided by norm + eps: updates are below the limit",
        norms=lambda run: run.norm + np.array([1e-5, 1e-6, 1e-7, 1e-8, 1e-9]),
    ),
    Bug(
        "gradients_summed",
        "gradients of devices are added: average them (lax.pmean)",
        norms=lambda run: run.norm * run.data_devices,
    ),
    Bug(
        "accumulation_summed",
        "gradients of micro-batches are added: average them",
        norms=lambda run: run.norm * run.microbatches,
    ),
    Bug(
        "averaged_twice",
        "averaged gradients are divided by a number of parts again",
        norms=lambda run: [run.norm / run.data_devices, run.norm / run.microbatches],
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
        "the gradient is changed by more than a factor, as by Adam, noise or rounding",
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

# -------------------------------------------------------------------- which bug it is

# A norm that the step of a run used: [devices], or [1] if all devices agree.
NormsOf = Callable[[Run], np.ndarray]


def norms_in_log(run: Run) -> np.ndarray:
    """[devices]: the norm that the step returned."""
    return run.step_norms


def norm_if_clipped(run: Run) -> np.ndarray:
    """[1]: the norm of a step that clips: limit / factor."""
    return run.limit / np.array([run.same_or_nan(run.step_factors)])


def norm_from_factor(run: Run) -> np.ndarray:
    """[1]: the norm that a clip used, or the norm of an update that was not clipped."""
    factor = run.same_or_nan(run.step_factors)
    if run.case == "above" and factor < 1.0:
        return norm_if_clipped(run)
    return np.array([run.norm * factor])


def peers_of(runs: Sequence[Run]) -> list[Run]:
    """The runs that are compared with each other: in float32, without a NaN.

    If a wrong number over the right one is equal in all of them, one reason must
    explain all of them. A number of devices does not: it is 4 on one mesh and 8 on
    another.
    """
    peers = []
    for run in runs:
        if run.case != "nan" and run.setting.dtype == jnp.float32:
            peers.append(run)
    return peers


def bug_of_norm(run: Run, peers: Sequence[Run]) -> str:
    """The name of the bug of the norm that the step returned."""
    return _first_bug(run, peers, norms_in_log)


# limit / 0 is inf.
@np.errstate(divide="ignore")
def bug_of_update(run: Run, peers: Sequence[Run]) -> str:
    """The name of the bug of the update. Empty where it is right."""
    if not np.isfinite(run.update).all():
        return "unknown"
    if math.isnan(run.factor_ratio()):
        return _bug_of_direction(run)
    if run.drift.any():
        return "weights_added"
    if run.is_close(run.factor_ratio(), 1.0):
        return ""
    return _bug_of_factor(run, peers)


def _bug_of_direction(run: Run) -> str:
    """The bug of an update that is no multiple of the gradient."""
    is_multiple_in_leaves = np.isfinite(run.step_factors).all()
    if run.replicas_differ:
        return "own_factor" if is_multiple_in_leaves else "local_norm"
    for bug in BUGS:
        for gradient in bug.gradients(run):
            # Some gradients are parallel to the right one in this run. They explain no
            # other direction.
            if math.isfinite(run.factor_along(gradient, run.gradient)):
                continue
            # New params have a negative factor.
            factor = abs(run.factor_along(run.update, gradient))
            clip_factor = min(1.0, run.limit / norm_of(gradient))
            if run.is_close(factor, [1.0, clip_factor]).any():
                return bug.name
    return "groups_apart" if is_multiple_in_leaves else "other_direction"


def _bug_of_factor(run: Run, peers: Sequence[Run]) -> str:
    """The bug of an update with one wrong factor."""
    if _is_constant(run, peers, Run.factor_ratio):
        return "other_rate" if run.update.any() else "zero_update"
    is_above = run.case == "above"
    if is_above and run.is_close(run.step_factors, 1.0).all():
        return "not_clipped"
    if run.is_close(run.step_norms, norm_from_factor(run)).all():
        # The step clips by the norm that it returns.
        return bug_of_norm(run, peers)
    peers_of_case = [peer for peer in peers if peer.case == run.case]
    bug = _first_bug(run, peers_of_case, norm_from_factor)
    # Above the limit a clip cancels the scale of gradients. So the limit is wrong.
    if is_above and bug in ("scaled", "averaged_twice"):
        return "other_limit"
    # Below the limit, the step may have clipped by a norm that is above it.
    if not is_above and bug in ("scaled", "unknown"):
        return _first_bug(run, peers_of_case, norm_if_clipped)
    return bug


def _first_bug(run: Run, peers: Sequence[Run], norms_of_run: NormsOf) -> str:
    """The first bug that gives the norms of all devices.

    If the norm over the right norm is equal in all peers, the bug must give the norms
    of all of them. If no bug does, gradients are "scaled".
    """

    def ratio(peer: Run) -> float:
        return peer.same_or_nan(norms_of_run(peer)) / peer.norm

    is_constant = _is_constant(run, peers, ratio)
    runs = [run, *peers] if is_constant else [run]
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
