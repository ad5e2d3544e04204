"""Known bugs of norms and clips, and which of them a run shows.

A right step has

    norm = |gradient|, factor = min(1, limit / norm), update = factor * gradient

Most bugs give another norm. Some steps return it, and some clip by it. The norm that a
step clips by is read from its update: norm = limit / factor. Few bugs give another
gradient, or another factor.

    MEANINGS         all bugs
    bug_of_norm      the first bug that gives the norm which was returned
    bug_of_update    the first bug that gives the norm of the factor, or the gradient
                     that the update is a multiple of
"""

import math
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from .runs import Run, factors_of, norm_of, norms_of

# ------------------------------------------------------------------------- all bugs

# Each bug by name: what is wrong, and what to do. Bugs that give neither a norm nor a
# gradient are found by `bug_of_update`, or after a NaN by `check_step`.
MEANINGS = {
    "nan_on_one_device": "a NaN is seen by some devices only: replicas diverge",
    "nan_hidden": "the update has a NaN and the norm has none: let the norm be NaN",
    "zero_norm": "the norm is 0: it is of a state before its update, or of no gradient",
    "zero_update": (
        "the update is 0: are params returned as they were, or is no update due?"
    ),
    "after_clip": "the norm that is returned is that of clipped gradients",
    "norm_of_weights": "the norm is that of the weights: pass the gradients",
    "clipped_below_limit": (
        "gradients below the limit are changed: multiply by min(1, limit / norm)"
    ),
    "weights_added": (
        "weights are in the update: leave weight decay and penalties out"
    ),
    "low_precision_sum": "squares are added in bfloat16: add them in float32",
    "squares_overflow": "squares in float16 are inf: convert to float32 first",
    "microbatches_apart": (
        "micro-batches are clipped or measured one by one: average all of them first"
    ),
    "local_norm": "each device uses the gradient of its own batch: average first",
    "own_shard": "squares of split leaves are not added (lax.psum)",
    "averaged_norms": "norms or squares of shards are averaged: add squares",
    "leaves_left_out": "only some leaves count, such as those that are split",
    "copies_counted": (
        "equal copies of a leaf count again: add its squares only over the mesh axes "
        "that split it"
    ),
    "sum_of_norms": "norms of leaves are added: add their squares, then take the root",
    "largest_element": (
        "it is the largest element: take the root of the sum of squares"
    ),
    "rms": "squares are averaged: add them",
    "squared": "the root of the sum of squares is missing",
    "clipped_twice": "the factor of one norm multiplies twice",
    "eps": "the limit is divided by norm + eps: updates are below the limit",
    "gradients_summed": (
        "gradients of devices, or their norms, are added: average them (lax.pmean)"
    ),
    "accumulation_summed": "gradients of micro-batches are added: average them",
    "averaged_twice": "averaged gradients are divided by a number of parts again",
    "scaled": "gradients carry a scale, as of a loss: divide by it before the clip",
    "own_factor": "each device clips by a factor of its own: replicas diverge",
    "groups_apart": "leaves have different factors: clip all of them together",
    "clipped_by_value": "elements are clipped, and not the norm",
    "other_direction": (
        "the gradient is changed by more than a factor, as by Adam, noise or rounding"
    ),
    "not_clipped": "gradients above the limit are not clipped",
    "other_limit": "the norm of updates is held at another limit",
    "other_rate": (
        "updates are multiplied: is the optimizer optax.sgd(1.0), run once?"
    ),
    "unknown": "no known bug gives this number",
}

# ------------------------------------------------------------- norms that bugs give


def norms_after_clip(run: Run) -> list[float]:
    """Norms of clipped gradients: clipped rightly, and as the step clipped them."""
    if run.norm <= run.limit:
        return []
    norms = [run.limit, norm_of(run.update)]
    # A clip makes no gradient longer.
    return [norm for norm in norms if norm < run.norm]


def norm_with_weights(run: Run) -> float:
    """The norm of gradients with weights added, before the clip. Weights are added to
    the markers only, whose gradient is 0, so the squares of both add up.
    """
    weights = run.drift / run.step_factors.mean()
    return math.hypot(run.norm, norm_of(weights))


def norms_without_small_leaves(run: Run) -> np.ndarray:
    """Norms without the squares of some small leaves, or of all but the largest. All
    small leaves have the same norm.
    """
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


def norms_of_some_leaves(run: Run) -> np.ndarray:
    """The norm of each leaf, and of all leaves but one."""
    squares = run.leaf_norms**2
    return np.sqrt([squares, run.norm**2 - squares]).ravel()


def norms_with_copies(run: Run) -> np.ndarray:
    """Norms of sums over mesh axes, in which equal copies of a leaf count again.

    These are copies of all leaves, or only of those that are whole on all devices, or
    only of those that are split.
    """
    data_size, expert_size = run.setting.mesh_shape
    # n equal copies make a norm sqrt(n) times as long.
    growths = np.sqrt([data_size, expert_size, data_size * expert_size])
    is_split = [any(spec) for spec in jax.tree.leaves(run.setting.specs)]
    split_norm = norm_of(run.leaf_norms[is_split])
    whole_norm = math.sqrt(run.norm**2 - split_norm**2)
    all_repeated = [*(run.norm * growths), norm_of(run.shards)]
    whole_repeated = np.hypot(whole_norm * growths, split_norm)
    split_repeated = np.hypot(whole_norm, split_norm * growths)
    return np.hstack([all_repeated, whole_repeated, split_repeated])


# drift / 0 is inf, or NaN.
@np.errstate(divide="ignore", invalid="ignore")
def norms_of_bugs(run: Run) -> dict[str, ArrayLike]:
    """The norms that a step with a bug returns or clips by, by the name of the bug.

    If several bugs give a norm, the first is named.
    """
    data_size, _ = run.setting.mesh_shape
    microbatches = run.setting.microbatches
    accumulates = microbatches > 1
    is_above = run.norm > run.limit
    is_bfloat16 = run.setting.dtype == jnp.bfloat16
    is_float16 = run.setting.dtype == jnp.float16
    shard_norms = norms_of(run.shards)
    return {
        "zero_norm": 0.0,
        "after_clip": norms_after_clip(run),
        # Each leaf has one weight that is not 0. It is the limit.
        "norm_of_weights": run.limit * math.sqrt(run.leaf_norms.size),
        "clipped_below_limit": run.limit,
        "weights_added": norm_with_weights(run),
        "low_precision_sum": norms_without_small_leaves(run) if is_bfloat16 else [],
        "squares_overflow": math.inf if is_float16 else [],
        "microbatches_apart": norms_of_parts(run, microbatches) if accumulates else [],
        "local_norm": norms_of_parts(run, data_size),
        "own_shard": shard_norms,
        "averaged_norms": [np.mean(shard_norms), np.sqrt(np.mean(shard_norms**2))],
        "leaves_left_out": norms_of_some_leaves(run),
        "copies_counted": norms_with_copies(run),
        "sum_of_norms": run.leaf_norms.sum(),
        "largest_element": abs(run.gradient).max(),
        "rms": run.norm / math.sqrt(run.gradient.size),
        "squared": run.norm**2,
        "clipped_twice": run.norm**2 / run.limit if is_above else [],
        "eps": run.norm + np.array([1e-5, 1e-6, 1e-7, 1e-8, 1e-9]),
        "gradients_summed": run.norm * data_size,
        "accumulation_summed": run.norm * microbatches,
        "averaged_twice": [run.norm / data_size, run.norm / microbatches],
    }


def gradients_of_bugs(run: Run) -> dict[str, Iterable[np.ndarray]]:
    """The gradients that updates are multiples of, by the name of the bug."""
    data_size, _ = run.setting.mesh_shape
    return {
        "microbatches_apart": gradients_of_parts(run, run.setting.microbatches),
        "local_norm": gradients_of_parts(run, data_size),
        "clipped_by_value": [np.clip(run.gradient, -run.limit, run.limit)],
    }


# -------------------------------------------------------------------- which bug it is

# A loss scale of 2^16 that is not undone lengthens updates by less. A clip without
# min(1, ...) lengthens the gradients of the case "below" by about 10^6.
LARGEST_SCALE = 1e5
# From a run to the norms that its step returned or used: [devices].
NormsOf = Callable[[Run], np.ndarray]


def returned_norms(run: Run) -> np.ndarray:
    """The norms that the step returned."""
    return run.step_norms


def norms_of_a_clip(run: Run) -> np.ndarray:
    """limit / factor: the norms that a clip divided by."""
    return run.limit / run.step_factors.mean(axis=1)


def norms_of_update(run: Run) -> np.ndarray:
    """The norms that explain an update: limit / factor if the norm is above the limit
    and the update is shortened. Otherwise norm * factor, of a gradient not clipped.
    """
    factors = run.step_factors.mean(axis=1)
    if run.case == "above" and (factors < 1.0).all():
        return norms_of_a_clip(run)
    return run.norm * factors


def peers_of(runs: Sequence[Run]) -> list[Run]:
    """The runs that are compared with each other: in float32, without a NaN.

    If wrong / right is the same number in all of them, one reason must explain them
    all. The number of devices cannot: it is 4 on one mesh and 8 on another.
    """
    in_float32 = [run for run in runs if run.setting.dtype == jnp.float32]
    return [run for run in in_float32 if run.case != "nan"]


def bug_of_norm(
    run: Run, peers: Sequence[Run], read_norms: NormsOf = returned_norms
) -> str:
    """The name of the first bug that gives the norms of a run on all devices.

    The wrong norm divided by the right one may be the same number in all peers. Then
    one bug must give the norms of all of them, and if none does, gradients are
    "scaled".
    """

    def ratio(peer: Run) -> float:
        return peer.same_or_nan(read_norms(peer)) / peer.norm

    runs_to_explain = [run]
    is_constant = _is_constant(run, peers, ratio)
    if is_constant:
        runs_to_explain += peers
    bugs = list(norms_of_bugs(run))
    for peer in runs_to_explain:
        norms = norms_of_bugs(peer)
        step_norms = read_norms(peer)
        bugs = [bug for bug in bugs if _are_among(peer, step_norms, norms[bug])]
    if bugs:
        return bugs[0]
    return "scaled" if is_constant else "unknown"


def _are_among(run: Run, step_norms: np.ndarray, norms: ArrayLike) -> bool:
    """Whether the norm of every device is one of the norms of a bug."""
    is_equal = run.is_close(step_norms[:, None], norms)
    return bool(is_equal.any(axis=1).all())


def _is_constant(run: Run, peers: Sequence[Run], ratio: Callable[[Run], float]) -> bool:
    """Whether a ratio of this run is equal in all peers. One run shows nothing."""
    ratios = [ratio(peer) for peer in peers]
    return len(peers) > 1 and bool(run.is_close(ratios, ratio(run)).all())


# limit / 0 is inf.
@np.errstate(divide="ignore")
def bug_of_update(run: Run, peers: Sequence[Run]) -> str:
    """The name of the bug of the update. Empty where it is right."""
    if not np.isfinite(run.update).all():
        return "unknown"
    # Leaves or devices have different factors, or none.
    if math.isnan(run.factor_ratio()):
        return _bug_of_direction(run)
    # The markers have changed, leaves without a gradient.
    if run.drift.any():
        return "weights_added"
    if run.is_close(run.factor_ratio(), 1.0):
        return ""
    return _bug_of_factor(run, peers)


def _bug_of_direction(run: Run) -> str:
    """The bug of an update that is not a multiple of the gradient."""
    is_multiple_in_leaves = np.isfinite(run.step_factors).all()
    if run.replicas_differ:
        return "own_factor" if is_multiple_in_leaves else "local_norm"
    for bug, gradients in gradients_of_bugs(run).items():
        for gradient in gradients:
            # A multiple of the right gradient explains no other direction. In some runs
            # a bug gives one: all parts may be below the limit.
            if np.isfinite(factors_of(gradient, run.gradient, run.rounding)):
                continue
            # New params and updates of SGD have a negative factor.
            factor = abs(factors_of(run.update, gradient, run.rounding))
            clip_factor = min(1.0, run.limit / norm_of(gradient))
            if run.is_close(factor, [1.0, clip_factor]).any():
                return bug
    return "groups_apart" if is_multiple_in_leaves else "other_direction"


def _bug_of_factor(run: Run, peers: Sequence[Run]) -> str:
    """The bug of an update with one wrong factor."""
    if _is_constant(run, peers, Run.factor_ratio):
        return "other_rate" if run.update.any() else "zero_update"
    is_above = run.case == "above"
    if is_above and run.is_close(run.step_factors, 1.0).all():
        return "not_clipped"
    if run.is_close(run.step_norms, norms_of_update(run)).all():
        # The step clips by the norm that it returns.
        return bug_of_norm(run, peers)
    if not is_above and (run.step_factors > LARGEST_SCALE).all():
        return "clipped_below_limit"
    peers_of_case = [peer for peer in peers if peer.case == run.case]
    bug = bug_of_norm(run, peers_of_case, norms_of_update)
    # No step clips by the norm of its own update. A factor may give this number, such
    # as the root of the right one.
    if bug == "after_clip":
        return "unknown"
    # Above the limit a clip cancels any scale of gradients, also 1 / devices. So the
    # limit is wrong.
    if is_above and bug in ("scaled", "averaged_twice"):
        return "other_limit"
    # Below the limit, the step may have clipped by a norm that is above it.
    if not is_above and bug in ("scaled", "unknown"):
        return bug_of_norm(run, peers_of_case, norms_of_a_clip)
    return bug
