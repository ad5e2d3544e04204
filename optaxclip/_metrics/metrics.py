"""What the clippers did, as numbers for a logger.

Every clipper keeps its last norm, limit and factor in its state, so reading them costs
no second pass over the gradients, inside jit or outside.
"""

import math
from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from .._arguments.checks import check_number, check_whole_number, shown
from .._trees import PyTree
from .rows import Options, WorstName
from .states import reported_rows


def metrics(
    opt_state: PyTree,
    *,
    only: str | Collection[str] | None = None,
    summary: bool = False,
    layers: bool = False,
    top: int | None = None,
    quantiles: float | Sequence[float] = (),
    floats: bool = False,
    json: bool = False,
) -> dict[str, Any]:
    """Returns the numbers of every clipper in an optimizer state, for a logger.

    Clippers are found at any depth: in chain, masked, partition, MultiSteps,
    inject_hyperparams, apply_if_finite, and in a train state.

    Args:
      opt_state: the state of any optimizer that has a clipper in it, concrete or
        traced. Also a tree that holds such a state: flax's `TrainState`, or an
        `nnx.Optimizer`. Its `nnx.state` has lost the types of states, and is refused.
      only: names of numbers, such as "norm_before" or ("norm_before", "clipped"), to
        leave out the others. None for all.
      summary: whether a clipper with one norm for each tensor or group reports one row
        for all of them, instead of one for each.
      layers: whether each layer of a stacked leaf has a row of its own, such as
        `clip/norm_before/blocks/w/0`. With `summary` it changes nothing.
      top: how many tensors or groups of a clipper are reported: those that are furthest
        above their limits, where NaN comes first. None for all. Only outside jit.
      quantiles: one share in [0, 1], or several. For each of them the quantile of the
        norms of a clipper is reported: `clip/norm_quantile/0.5` is the median. NaN
        norms are left out, and inf counts as the largest number of the dtype. In
        `only` they are "norm_quantile".
      floats: whether to return Python floats, NaN and inf included. Only outside jit.
      json: likewise, with None instead of NaN and inf, which JSON does not have.

    Returns:
      A flat dict of float32 scalars (float64 for norms of 64 bits), or of floats:

        clip/norm_before      the norm before clipping. It may be above the limit, which
                              does not mean that clipping failed
        clip/limit            what it was held against, inf where there is none
        clip/factor           what the updates were multiplied by: 1 where nothing was
                              done, never below 1.2e-38 unless they were made 0
        clip/norm_after       the norm after clipping: 0 where a broken step was made
                              zero, NaN where it was made NaN. The limit where the
                              factor leaves the range of float32, also with a shrink
                              of your own
        clip/clipped          1 if the last step that had the leaf was clipped, else 0.
                              A step whose norm is NaN or inf, or whose limit is NaN,
                              counts as 0
        clip/clipped_share    clipped steps over all steps, in [0, 1]. A step without
                              the leaf counts as not clipped
        clip/clipped_share_recent
                              the same of about the last 100 steps, a moving average
        clip/clipped_count    steps that were clipped
        clip/nonfinite_count  steps whose norm was NaN or inf, or whose limit was NaN

      Of a clipper of units, the unit furthest above its limit is shown, and a step
      counts as clipped if any unit was. There is also

        clip/units_clipped    the share of units that the last step clipped

      With `summary` the first five belong to the norm that is furthest over its limit
      (one that is NaN comes first), shares are means over all norms, counts the
      largest, and there are

        clip/norms_clipped    the mean of `clipped` over the norms: the share of those
                              that were clipped. With units the mean of `units_clipped`
                              over the leaves
        clip/worst_ratio      norm over limit of the norm that is furthest over
        clip/worst_index      its number, in the order of `state.by_name()`
        clip/worst_name       with `floats` or `json`: its name, a string

      Of clippers of elements (`clip_by_value`, `spam`) that have `count=True`:

        clip/elements_clipped         the share of elements clipped in the last step
        clip/elements_clipped_mean    its mean over all steps
        clip/elements_clipped_recent  its moving average, of about 100 steps

      Of `record_norm`, which clips nothing, and, with `summary`, the largest norm with
      its worst_index and worst_name as above:

        record/norm             the norm of the last step
        record/nonfinite_count  steps in which it was NaN or inf

      Of optimizers that skip steps (`skip_spikes`):

        skip/norm, skip/limit               of the last gradient as it came in, whether
                                            skipped or not
        skip/loss, skip/loss_limit          of the last loss, -inf and inf without one
        skip/skipped                        1 if the last step was skipped, else 0
        skip/skipped_share, skip/skipped_share_recent, skip/skipped_count,
        skip/consecutive_count, skip/nonfinite_count

      Of `record_spikes`:

        spike/norm, spike/limit, spike/loss, spike/loss_limit
                                      as of optimizers that skip steps
        spike/spiked                  1 if the last step was a spike, else 0
        spike/spiked_count            steps that were
        spike/score                   their share of all steps, in [0, 1]
        spike/score_recent            the same of about the last 10,000 steps

      Of `record_health`, of each tensor (with `summary` the largest of all):

        health/norm, health/weight_norm, health/ratio, health/rounding,
        health/zeros, health/subnormals, health/nonfinite, health/dead_rows

      A clipper with one norm for each tensor or group adds the path:
      `clip/norm_before/blocks/w`. A stacked leaf has one row: the layer furthest over
      its limit, with the mean share of all layers. With `layers` each layer has a row.

      The first clipper of a chain is `clip`, a second one `clip_2`. A name of your own
      comes from `optax.named_chain(("inner", clipper), ...)`: `clip/inner/norm_before`.
      Labels of `optax.partition` come into keys in the same way. A clipper named "clip"
      has keys `clip/...`, and not `clip/clip/...`.

    Raises:
      ValueError: a state without a clipper in it, a name in `only` that is not a number
        of this state, a `top` below 1, a quantile that is not a share, the state of an
        ensemble (`jax.vmap(metrics)` reads the state of each member), rows that
        `jax.shard_map` joined from several devices, or, with `layers`, a leaf with the
        name of a layer of another.
      TypeError: `floats`, `json` or `top` under jit.

    Example:
      >>> optimizer = optax.chain(optaxclip.clip_by_global_norm(1.0), optax.sgd(0.1))
      >>> grads = jnp.array([3.0, 4.0])
      >>> _, state = optimizer.update(grads, optimizer.init(grads))
      >>> print(optaxclip.metrics(state, only=("norm_before", "limit"), floats=True))
      {'clip/norm_before': 5.0, 'clip/limit': 1.0}
    """
    is_traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(opt_state))
    if is_traced and (floats or json or top is not None):
        raise TypeError(
            "metrics: floats, json and top must be left out under jit, where numbers "
            "are not known yet: return the state, and call metrics outside, or leave "
            "floats out and return the dict."
        )
    if top is not None:
        check_whole_number("metrics: top", top)
    levels = np.atleast_1d(quantiles)
    for level in levels.tolist():
        check_number("metrics: quantiles", level, highest=1.0)
    # `metric in "norm_before"` would find "norm" too.
    wanted = [only] if isinstance(only, str) else only
    options = Options(
        summary=summary,
        layers=layers,
        top=top,
        quantiles=levels,
        with_names=floats or json,
    )
    report: dict[str, Any] = {}
    available: list[str] = []
    for prefix, (metric, path, value) in reported_rows(opt_state, options):
        if metric not in available:
            available.append(metric)
        if wanted is None or metric in wanted:
            # "clip/a", "limit", "blocks/w" -> "clip/a/limit/blocks/w".
            key = f"{prefix}/{metric}/{path}" if path else f"{prefix}/{metric}"
            report[key] = value
    for name in wanted or ():
        if name not in available:
            raise ValueError(
                f"metrics: only={shown(only)} must name numbers that this state has, "
                f"which are {', '.join(available) or 'none'}. Those of all norms "
                "together come with summary=True, worst_name also needs floats=True "
                "or json=True, norm_quantile needs quantiles=, and those of elements "
                "count=True in the clipper."
            )
    if floats or json:
        return _in_floats(report, json)
    return report


def _in_floats(report: dict[str, Any], json: bool) -> dict[str, Any]:
    """The report in Python floats. With `json` None stands for NaN and inf."""
    # One call for all values starts every copy from the device before it waits for the
    # first. They are a list, because JAX sorts the keys of a dict.
    values = jax.device_get(list(report.values()))
    numbers: dict[str, Any] = {}
    for key, value in zip(report, values):
        if isinstance(value, WorstName):
            numbers[key] = value.chosen()
        elif json and not math.isfinite(value):
            numbers[key] = None
        else:
            numbers[key] = float(value)
    return numbers
