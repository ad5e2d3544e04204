"""What the clippers did, as numbers for a logger.

Every clipper keeps its last norm, limit and factor in its state, so reading them costs
no second pass over the gradients, inside jit or outside.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ._clippers._record_spikes import SpikeState
from ._health import HEALTH, HealthState, health_rows
from ._reported import reported_states
from ._state import ClipState, counts_of, is_vector, with_layers
from ._wrappers._skipping import SkipState

# The names of the numbers, in the order of a report.
CLIP = (
    "norm_before",
    "limit",
    "factor",
    "norm_after",
    "clipped",
    "clipped_share",
    "clipped_share_recent",
    "clipped_count",
    "nonfinite_count",
)
UNITS = ("units_clipped",)
SUMMARY = ("norms_clipped", "worst_ratio", "worst_index", "worst_name")
ELEMENTS = (
    "elements_clipped",
    "elements_clipped_mean",
    "elements_clipped_recent",
)
SKIP = (
    "norm",
    "limit",
    "loss",
    "loss_limit",
    "skipped",
    "skipped_share",
    "skipped_share_recent",
    "skipped_count",
    "consecutive_count",
    "nonfinite_count",
)
SPIKE = (
    "norm",
    "limit",
    "loss",
    "loss_limit",
    "spiked",
    "spiked_count",
    "score",
    "score_recent",
)
# A dict keeps their order for the error of `only`. Some kinds share names.
NAMES = dict.fromkeys(
    (*CLIP, *UNITS, *SUMMARY, *ELEMENTS, *SKIP, *SPIKE, *HEALTH)
)


class Row(NamedTuple):
    """One number of a report."""

    name: str
    path: str  # of the tensor, or ""
    value: Any


class Options(NamedTuple):
    """What `metrics` was asked for."""

    only: frozenset[str]
    summary: bool
    layers: bool
    top: int | None
    quantiles: tuple[float, ...]
    concrete: bool


def metrics(
    opt_state: Any,
    *,
    only: str | Collection[str] | None = None,
    summary: bool = False,
    layers: bool = False,
    top: int | None = None,
    quantiles: Sequence[float] = (),
    floats: bool = False,
    json: bool = False,
) -> dict[str, Any]:
    """Returns the numbers of every clipper in an optimizer state, for a logger.

    Clippers are found at any depth: in chain, masked, partition, MultiSteps,
    inject_hyperparams, apply_if_finite, and in a train state.

    Args:
      opt_state: the state of any optimizer that has a clipper in it, concrete or
        traced. Also a tree that holds it, such as flax's `TrainState`,
        `nnx.Optimizer`, and what `nnx.state` makes of that. The latter has no names,
        and tensors are numbered in it.
      only: names of numbers, such as "norm_before" or ("norm_before", "clipped"), to
        leave out the others. None for all.
      summary: whether a clipper with one norm for each tensor or group reports one row
        for all of them, instead of one for each.
      layers: whether each layer of a stacked leaf has a row of its own, such as
        `clip/norm_before/blocks/w/0`. `summary` is of all norms in any case.
      top: how many tensors or groups of a clipper are reported: those that are furthest
        above their limits. None for all. Only outside jit.
      quantiles: shares in [0, 1]. For each of them the quantile of the norms of a
        clipper is reported, such as `clip/norm_quantile/0.5` for the median.
      floats: whether to return Python floats, NaN and inf included. Only outside jit.
      json: the same with None in the place of NaN and inf, which JSON does not have.

    Returns:
      A flat dict of float32 scalars (float64 for norms of 64 bits), or of floats:

        clip/norm_before      the norm before clipping. It may be above the limit, which
                              does not mean that clipping failed
        clip/limit            what it was held against, inf where there is none
        clip/factor           what the updates were multiplied by: 1 where nothing was
                              done, never below 1.2e-38 unless they were made 0
        clip/norm_after       the norm after clipping: 0 where a broken step was made
                              zero, NaN where it was made NaN
        clip/clipped          1 if the last step was clipped, else 0. A step whose norm
                              is NaN or inf counts as 0
        clip/clipped_share    clipped steps over all steps, in [0, 1]
        clip/clipped_share_recent
                              the same of about the last 100 steps, a moving average
        clip/clipped_count    steps that were clipped
        clip/nonfinite_count  steps whose norm was NaN or inf

      Of units the one that is furthest above its limit is shown, and a step counts as
      clipped if one of them was. The share of them that the last step clipped is

        clip/units_clipped

      With `summary` the first five are those of the norm that is furthest over its
      limit (one that is NaN comes first), shares are means over all norms, counts the
      largest, and there are

        clip/norms_clipped    the share of the norms that were clipped in the last step
        clip/worst_ratio      norm over limit of the norm that is furthest over
        clip/worst_index      its number, in the order of `state.by_name()`
        clip/worst_name       with `floats` or `json`: its name, a string

      Of clippers of elements (`clip_by_value`, `clip`, `spam`), if they count:

        clip/elements_clipped         the share of elements clipped in the last step
        clip/elements_clipped_mean    its mean over all steps
        clip/elements_clipped_recent  its moving average, of about 100 steps

      Of optimizers that skip steps (`skip_spikes`):

        skip/norm, skip/limit               of the last gradient, whether skipped or not
        skip/loss, skip/loss_limit          of the last loss, NaN and inf without one
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

      Of `record_health`, of each tensor (with `summary` the largest of all, of the
      entropy the least):

        health/norm, health/weight_norm, health/ratio, health/cosine, health/zeros,
        health/subnormals, health/nonfinite, health/entropy, health/dead_rows

      A clipper with one norm for each tensor or group adds the path:
      `clip/norm_before/blocks/w`. Of stacked layers the one furthest over its limit is
      shown, and the share is the mean over all, or with `layers` all of them.

      The first clipper of a chain is `clip`, a second one `clip_2`. A name of your own
      comes from `optax.named_chain(("inner", clipper), ...)`: `clip/inner/norm_before`.
      So do the labels of `optax.partition`. A clipper that is named "clip" has no other
      name in its keys.

    Raises:
      ValueError: a state without a clipper in it, a name in `only` that is none, a
        `top` below 1, a quantile that is no share, the state of an ensemble
        (`jax.vmap(metrics)` reads that of each member), or, with `layers`, a leaf with
        the name of a layer of another.
      TypeError: an optimizer in the place of its state, or `floats`, `json` or `top`
        under jit.

    Example:
      >>> optimizer = optax.chain(optaxclip.clip_by_global_norm(1.0), optax.sgd(0.1))
      >>> grads = jnp.array([3.0, 4.0])
      >>> _, state = optimizer.update(grads, optimizer.init(grads))
      >>> print(optaxclip.metrics(state, only=("norm_before", "limit"), floats=True))
      {'clip/norm_before': 5.0, 'clip/limit': 1.0}
    """
    asked = {"floats": floats, "json": json, "top": top is not None}
    for option in [name for name, value in asked.items() if value]:
        # The error of JAX would not say what to do.
        _check_concrete(opt_state, option)
    if top is not None and top < 1:
        raise ValueError(f"metrics: top must be at least 1, got {top!r}.")
    for share in quantiles:
        if not 0 <= share <= 1:
            raise ValueError(
                f"metrics: quantiles must be in [0, 1], got {share!r}."
            )
    options = Options(
        _wanted_names(only),
        summary,
        layers,
        top,
        tuple(quantiles),
        floats or json,
    )
    report: dict[str, Any] = {}
    for prefix, title, state in reported_states(opt_state):
        for name, path, value in _rows(state, options):
            # "clip", "a", "limit", "blocks/w" -> "clip/a/limit/blocks/w".
            parts = prefix, title, name, path
            report["/".join(part for part in parts if part)] = value
    # Without `only` nothing may be right: a clipper of an empty tree has no norm.
    if only is not None and not report:
        every = options._replace(only=frozenset(NAMES))
        known = dict[str, None]()
        for _, _, state in reported_states(opt_state):
            known |= dict.fromkeys(row.name for row in _rows(state, every))
        raise ValueError(
            f"metrics: only={only!r} must name a number that this state has, which are "
            f"{', '.join(known) or 'none'}. Those of all norms together come with "
            "summary=True, and those of elements with count=True in the clipper."
        )
    return _as_floats(report, json) if floats or json else report


def _wanted_names(only: str | Collection[str] | None) -> frozenset[str]:
    if only is None:
        return frozenset(NAMES)
    # A string is a collection as well, of its letters.
    several = isinstance(only, Iterable) and not isinstance(only, str)
    listed: list[Any] = list(only) if several else [only]
    # `in` finds 3 and a list nowhere, where a set would not take a list.
    if not all(name in list(NAMES) for name in listed):
        raise ValueError(
            f"metrics: only must be among {', '.join(map(repr, NAMES))}, got {only!r}."
        )
    return frozenset(listed)


def _check_concrete(opt_state: Any, option: str) -> None:
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(opt_state)):
        instead = "None" if option == "top" else "False"
        raise TypeError(
            f"metrics: {option} must be {instead} under jit, where numbers are not "
            f"known yet: return the state, and call metrics(state, {option}=...) "
            "outside."
        )


def _as_floats(report: dict[str, Any], json: bool) -> dict[str, Any]:
    """The numbers as Python floats, and strings as they are."""
    found: dict[str, Any] = {}
    # As a list, because JAX sorts the keys of a dict. One call for all: it starts every
    # copy from the device before it waits for the first.
    for key, value in zip(report, jax.device_get(list(report.values()))):
        found[key] = value if isinstance(value, str) else float(value)
        if json and not isinstance(value, str) and not math.isfinite(value):
            found[key] = None
    return found


# ----------------------------------------------------------- the rows of one state


def _rows(state: Any, options: Options) -> Iterator[Row]:
    if isinstance(state, SkipState):
        numbers = _skip_numbers(
            # Without memories and moments one compiled call serves all optimizers.
            state._replace(memory=(), loss_memory=(), inner_state=())
        )
    elif isinstance(state, SpikeState):
        numbers = _spike_numbers(state._replace(memory=(), loss_memory=()))
    elif isinstance(state, ClipState):
        yield from _clip_rows(state, options)
        return
    elif isinstance(state, HealthState):
        asked = {"summary": options.summary, "layers": options.layers}
        for row in health_rows(state, **asked):
            if row[0] in options.only:
                yield Row(*row)
        return
    else:  # ClipByValueState and SpamState.
        numbers = dict(zip(ELEMENTS, state.elements))
    for name, value in numbers.items():
        if name in options.only:
            yield Row(name, "", value)


def _clip_rows(state: ClipState, options: Options) -> Iterator[Row]:
    parts = counts_of(state)
    if options.layers and not options.summary:
        parts = with_layers(state, "metrics")
    if not parts or not any(parts):
        return
    every = [name for part in parts for name in part]
    numbers_of = [count or 1 for part in parts for count in part.values()]
    # 0 for a state of one number.
    counts = tuple(numbers_of) if is_vector(state.names) else (0,)
    bare = state._replace(names=(), memory=())
    if options.quantiles:
        found = _quantiles(options.quantiles, state.norm)
        for share, value in zip(options.quantiles, found):
            yield Row("norm_quantile", f"{share:g}", value)
    if options.summary:
        numbers = _summary_numbers(counts, bare)
        for name in (*CLIP, *SUMMARY):
            if name in options.only and name in numbers:
                yield Row(name, "", numbers[name])
        if options.concrete and "worst_name" in options.only:
            # A name is a string, which a jitted function cannot return.
            yield Row("worst_name", "", every[int(numbers["worst_index"])])
        return
    has_units = bool(jax.tree.leaves(state.units_clipped))
    known = (*CLIP, *UNITS) if has_units else CLIP
    wanted = tuple(name for name in known if name in options.only)
    numbers, ratios = _numbers_of_norms(counts, wanted, bare)
    places = list(range(len(every)))
    if options.top is not None:
        # NaN is the largest to NumPy, and so the furthest above its limit.
        furthest = np.argsort(np.asarray(ratios))[::-1][: options.top]
        places = furthest.tolist()
    for place in places:
        for name, value in zip(wanted, numbers[place]):
            yield Row(name, every[place], value)


# Jitted, since without jit each operation would be a call. One call serves all norms of
# a clipper. Counts and names are static, because shapes depend on them.
@partial(jax.jit, static_argnums=(0, 1))
def _numbers_of_norms(
    counts: tuple[int, ...], wanted: tuple[str, ...], state: ClipState
) -> tuple[list[list[jax.Array]], jax.Array]:
    """The numbers of each name, and its norm over its limit."""
    found, ratios, start = [], [], 0
    ratio = _ratio(state.norm, state.limit)
    for count in counts:
        if count == 0:
            numbers = _numbers(state, state.step)
            ratios.append(ratio)
        else:
            rows = slice(start, start + count)
            own = _rows_of(state, rows)
            worst = jnp.argmax(ratio[rows]) if count > 1 else 0
            numbers = _of_several(own, state.step, worst)
            ratios.append(ratio[rows][worst])
            start += count
        found.append([numbers[name] for name in wanted])
    return found, jnp.stack(ratios)


def _rows_of(state: ClipState, rows: slice) -> ClipState:
    return jax.tree.map(lambda x: x[rows], state._replace(step=()))


@partial(jax.jit, static_argnums=0)
def _summary_numbers(
    counts: tuple[int, ...], state: ClipState
) -> dict[str, jax.Array]:
    """The numbers of all norms together."""
    own = jax.tree.map(jnp.atleast_1d, state._replace(step=()))
    ratio = _ratio(own.norm, own.limit)
    worst = jnp.argmax(ratio)
    numbers = _of_several(own, state.step, worst)
    norm, limit = own.norm[worst], own.limit[worst]
    # The number of the name of each entry: counts of 2 and 1 are [0, 0, 1].
    of_name = np.repeat(np.arange(len(counts)), [max(n, 1) for n in counts])
    clipped = _is_clipped(own.norm, own.factor).astype(jnp.float32)
    if jax.tree.leaves(own.units_clipped):
        clipped = own.units_clipped
    return numbers | {
        "norms_clipped": jnp.mean(clipped),
        # 0 over a limit of 0 is 0, and not NaN.
        "worst_ratio": jnp.where(norm == 0, 0.0, norm / limit),
        "worst_index": jnp.asarray(of_name)[worst].astype(jnp.float32),
    }


def _ratio(norm: jax.Array, limit: jax.Array) -> jax.Array:
    """How far each norm is above its limit. argmax takes NaN for the largest."""
    # A limit of 0 would hide all differences, so it counts as tiny.
    ratio = norm / jnp.maximum(limit, 2.0**-60)
    # Norms without a limit are compared where none has one.
    free = limit == jnp.inf
    return jnp.where(free, jnp.where(jnp.all(free), norm, 0 * norm), ratio)


def _of_several(
    state: ClipState, step: jax.Array, worst: Any
) -> dict[str, jax.Array]:
    """The numbers of the worst of some norms, counted over all of them."""
    one = jax.tree.map(lambda x: x[worst], state)
    clipped = state.clipped.astype(jnp.float32)
    numbers = _numbers(one, step)
    return numbers | {
        "clipped_share": jnp.mean(clipped / _steps(step)),
        "clipped_share_recent": jnp.mean(state.clipped_recently),
        "clipped_count": jnp.max(clipped),
        "nonfinite_count": jnp.max(state.nonfinite).astype(jnp.float32),
    }


def _numbers(state: ClipState, step: jax.Array) -> dict[str, jax.Array]:
    """The numbers of one norm."""
    norm, factor = state.norm, state.factor
    # At the ends of its range the factor is not the whole quotient. So far from its
    # limit, what a shrink leaves is the limit.
    info = jnp.finfo(factor.dtype)
    at_end = (factor == info.tiny) | (factor == info.max)
    product = jnp.where(factor == 0, 0.0, norm * factor)
    clipped = state.clipped.astype(jnp.float32)
    numbers = {
        "norm_before": norm,
        "limit": state.limit,
        "factor": factor,
        "norm_after": jnp.where(at_end, state.limit, product),
        "clipped": _is_clipped(norm, factor).astype(jnp.float32),
        "clipped_share": clipped / _steps(step),
        "clipped_share_recent": state.clipped_recently,
        "clipped_count": clipped,
        "nonfinite_count": state.nonfinite.astype(jnp.float32),
    }
    if jax.tree.leaves(state.units_clipped):
        numbers["units_clipped"] = state.units_clipped
    return numbers


def _is_clipped(norm: jax.Array, factor: jax.Array) -> jax.Array:
    # A broken step may have a factor of NaN or 0, and was not clipped.
    return (factor != 1) & jnp.isfinite(norm)


def _steps(step: jax.Array) -> jax.Array:
    return jnp.maximum(step, 1).astype(jnp.float32)


@partial(jax.jit, static_argnums=0)
def _quantiles(shares: tuple[float, ...], norm: jax.Array) -> list[jax.Array]:
    return [jnp.nanquantile(norm, share) for share in shares]


@jax.jit
def _skip_numbers(state: SkipState) -> dict[str, jax.Array]:
    numbers = (
        state.norm,
        state.limit,
        state.loss,
        state.loss_limit,
        # Steps skipped in a row until now, the last one included.
        state.consecutive > 0,
        state.skipped.astype(jnp.float32) / _steps(state.step),
        state.skipped_recently,
        state.skipped,
        state.consecutive,
        state.nonfinite,
    )
    return dict(zip(SKIP, map(_as_numbers, numbers)))


@jax.jit
def _spike_numbers(state: SpikeState) -> dict[str, jax.Array]:
    numbers = (
        state.norm,
        state.limit,
        state.loss,
        state.loss_limit,
        state.spiked,
        state.spikes,
        state.spikes.astype(jnp.float32) / _steps(state.step),
        state.spiked_recently,
    )
    return dict(zip(SPIKE, map(_as_numbers, numbers)))


def _as_numbers(x: jax.Array) -> jax.Array:
    """Norms in their dtype, and counts in float32."""
    return x if x.dtype == jnp.float64 else x.astype(jnp.float32)
