"""What the clippers did, as numbers for a logger.

Every clipper keeps its last norm, limit and factor in its state, so reading them costs
no second pass over the gradients, inside jit or outside.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.tree_util import DictKey

from ._checks import shown
from ._clippers._by_value import ClipByValueState
from ._clippers._clip_by import SpikeState
from ._clippers._spam import SpamState
from ._health import HEALTH, HealthState, health_rows
from ._state import ALL, ClipState, check_one_model, counts_of, with_layers
from ._trees import unboxed
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
NAMES = dict.fromkeys((*CLIP, *UNITS, *SUMMARY, *ELEMENTS, *SKIP, *SPIKE, *HEALTH))


PREFIXES = {
    ClipState: "clip",
    ClipByValueState: "clip",
    SpamState: "clip",
    SkipState: "skip",
    SpikeState: "spike",
    HealthState: "health",
}
# What holds no arrays, or is not read. `nnx.state` makes a mapping of each state, which
# may lack these.
OPTIONAL = {
    "names",
    "memory",
    "loss_memory",
    "second_moment",
    "inner_state",
    "units_clipped",
    "elements",
    "signs",
    "idle",
    "dead",
}
# Names of fields in which flax NNX and optax keep a state within a state.
FIELDS = {
    "opt_state",
    "inner_state",
    "inner_states",
    "inner_opt_state",
    "clip_state",
}


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

      Of `record_health`, of each tensor (with `summary` the largest of all):

        health/norm, health/weight_norm, health/ratio, health/cosine, health/zeros,
        health/subnormals, health/nonfinite, health/dead_rows

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
        raise ValueError(f"metrics: top must be at least 1, got {shown(top)}.")
    for share in quantiles:
        if not 0 <= share <= 1:
            raise ValueError(
                f"metrics: quantiles must be in [0, 1], got {shown(share)}."
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
            f"metrics: only={shown(only)} must name a number that this state has, "
            f"which are {', '.join(known) or 'none'}. Those of all norms together come "
            "with summary=True, and those of elements with count=True in the clipper."
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
            f"metrics: only must be among {', '.join(map(repr, NAMES))}, got "
            f"{shown(only)}."
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
    if isinstance(state, ClipState):
        yield from _clip_rows(state, options)
        return
    if isinstance(state, HealthState):
        asked = {"summary": options.summary, "layers": options.layers}
        for row in health_rows(state, **asked):
            if row[0] in options.only:
                yield Row(*row)
        return
    # Without memories and moments one compiled call serves all optimizers.
    if isinstance(state, SkipState):
        bare = state._replace(memory=(), loss_memory=(), inner_state=())
        numbers = zip(SKIP, _skip_numbers(bare))
    elif isinstance(state, SpikeState):
        bare = state._replace(memory=(), loss_memory=())
        numbers = zip(SPIKE, _spike_numbers(bare))
    else:  # ClipByValueState and SpamState.
        numbers = zip(ELEMENTS, state.elements)
    for name, value in numbers:
        if name in options.only:
            yield Row(name, "", value)


def _clip_rows(state: ClipState, options: Options) -> Iterator[Row]:
    parts = counts_of(state)
    if options.layers and not options.summary:
        parts = with_layers(state, "metrics")
    named: list[tuple[str, int | None]] = []
    for part in parts:
        named += part.items()
    if not named:
        return
    every = [name for name, _ in named]
    counts = tuple(count or 1 for _, count in named)
    if options.quantiles:
        found = jnp.nanquantile(state.norm, np.array(options.quantiles))
        for share, value in zip(options.quantiles, found):
            yield Row("norm_quantile", f"{share:g}", value)
    bare = state._replace(names=(), memory=())
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
    numbers, ratios = _numbers_of_names(counts, wanted, bare)
    places = list(range(len(every)))
    if options.top is not None:
        # NaN is the largest to NumPy, and so the furthest above its limit.
        places = np.argsort(np.asarray(ratios))[::-1][: options.top].tolist()
    for place in places:
        for name, value in zip(wanted, numbers[place]):
            yield Row(name, every[place], value)


# Jitted, since without jit each operation would be a call. One call serves all norms of
# a clipper. Counts and names are static, because shapes depend on them.
@partial(jax.jit, static_argnums=(0, 1))
def _numbers_of_names(
    counts: tuple[int, ...], wanted: tuple[str, ...], state: ClipState
) -> tuple[list[list[jax.Array]], jax.Array]:
    """The numbers of each name, and its norm over its limit."""
    found, ratios, start = [], [], 0
    several = jax.tree.map(jnp.atleast_1d, state._replace(step=()))
    ratio = _ratio(several.norm, several.limit)
    for count in counts:
        rows = slice(start, start + count)
        own = jax.tree.map(itemgetter(rows), several)
        worst = jnp.argmax(ratio[rows])
        numbers = _numbers(own, state.step, worst)
        found.append([numbers[name] for name in wanted])
        ratios.append(ratio[rows][worst])
        start += count
    return found, jnp.stack(ratios)


@partial(jax.jit, static_argnums=0)
def _summary_numbers(counts: tuple[int, ...], state: ClipState) -> dict[str, jax.Array]:
    """The numbers of all norms together."""
    several = jax.tree.map(jnp.atleast_1d, state._replace(step=()))
    worst = jnp.argmax(_ratio(several.norm, several.limit))
    norm, limit = several.norm[worst], several.limit[worst]
    # The number of the name of each entry: counts of 2 and 1 are [0, 0, 1].
    of_name = np.repeat(np.arange(len(counts)), counts)
    clipped = _is_clipped(several.norm, several.factor).astype(jnp.float32)
    if jax.tree.leaves(several.units_clipped):
        clipped = several.units_clipped
    return _numbers(several, state.step, worst) | {
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


def _numbers(
    state: ClipState, step: jax.Array, worst: jax.Array
) -> dict[str, jax.Array]:
    """The numbers of the worst of some norms, counted over all of them."""
    norm, limit = state.norm[worst], state.limit[worst]
    factor = state.factor[worst]
    # At the ends of its range the factor is not the whole quotient. So far from its
    # limit, what a shrink leaves is the limit.
    info = jnp.finfo(factor.dtype)
    at_end = (factor == info.tiny) | (factor == info.max)
    product = jnp.where(factor == 0, 0.0, norm * factor)
    clipped = state.clipped.astype(jnp.float32)
    numbers = {
        "norm_before": norm,
        "limit": limit,
        "factor": factor,
        "norm_after": jnp.where(at_end, limit, product),
        "clipped": _is_clipped(norm, factor).astype(jnp.float32),
        "clipped_share": jnp.mean(clipped / _steps(step)),
        "clipped_share_recent": jnp.mean(state.clipped_recently),
        "clipped_count": jnp.max(clipped),
        "nonfinite_count": jnp.max(state.nonfinite).astype(jnp.float32),
    }
    if jax.tree.leaves(state.units_clipped):
        numbers["units_clipped"] = state.units_clipped[worst]
    return numbers


def _is_clipped(norm: jax.Array, factor: jax.Array) -> jax.Array:
    # A broken step may have a factor of NaN or 0, and was not clipped.
    return (factor != 1) & jnp.isfinite(norm)


def _steps(step: jax.Array) -> jax.Array:
    return jnp.maximum(step, 1).astype(jnp.float32)


@jax.jit
def _skip_numbers(state: SkipState) -> list[jax.Array]:
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
    return list(map(_as_number, numbers))


@jax.jit
def _spike_numbers(state: SpikeState) -> list[jax.Array]:
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
    return list(map(_as_number, numbers))


def _as_number(x: jax.Array) -> jax.Array:
    """Norms in their dtype, and counts in float32."""
    return x if x.dtype == jnp.float64 else x.astype(jnp.float32)


# ------------------------------------------------------- the states of an optimizer


class Found(NamedTuple):
    """A state that is reported."""

    prefix: str  # with which its keys begin: clip, clip_2, skip, spike
    title: str  # the names on the way to it: "outer/inner"
    state: Any


def reported_states(opt_state: Any) -> list[Found]:
    """Every clipper and skipping optimizer in a state.

    Raises:
      TypeError: an optimizer in the place of its state.
      ValueError: there is none, or one has an axis for the members of an ensemble.
    """
    tree, pure = _as_states(unboxed(opt_state))
    seen: dict[tuple[str, str], int] = {}
    reported = []
    for path, state in _walk(tree, ()):
        check_one_model("metrics: opt_state", "metrics", state)
        prefix = PREFIXES[type(state)]
        title = _title(path, prefix, pure)
        # "clip/a" and "clip/b" are counted separately: neither becomes "clip_2".
        number = seen[prefix, title] = seen.get((prefix, title), 0) + 1
        # The first keeps its name when a second one is added.
        numbered = prefix if number == 1 else f"{prefix}_{number}"
        reported.append(Found(numbered, title, state))
    if not reported:
        _raise_none_found(opt_state)
    return reported


def _walk(tree: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    flatten = jax.tree_util.tree_flatten_with_path
    for own, state in flatten(tree, is_leaf=_is_reported)[0]:
        whole = (*path, *own)
        if _is_reported(state):
            yield whole, state
        # The walk ends at a reported state, and only this one holds others.
        if isinstance(state, SkipState):
            yield from _walk(state.inner_state, whole)


def _is_reported(x: Any) -> bool:
    return type(x) in PREFIXES


def _title(path: tuple[Any, ...], prefix: str, pure: bool) -> str:
    """The names on the way to a state: of `named_chain`, `partition`, a dict."""
    # Places and fields have keys of other types: inner_states, "a", 0, clip -> "a".
    keys = [key.key for key in path if isinstance(key, DictKey)]
    # nnx.state makes those DictKeys too, with numbers for places.
    if pure:
        keys = [key for key in keys if isinstance(key, str) and key not in FIELDS]
    return "/".join(str(key) for key in keys if key != prefix)


def _as_states(tree: Any) -> tuple[Any, bool]:
    """The tree with states in the place of mappings of their fields, and whether there
    was one.
    """
    kinds = []

    def restored(x: Any) -> Any:
        kind = _kind_of(x)
        if kind is None:
            return x
        kinds.append(kind)
        return _from_mapping(kind, x)

    found = jax.tree.map(restored, tree, is_leaf=lambda x: _kind_of(x) is not None)
    return found, bool(kinds)


def _kind_of(x: Any) -> Any:
    """The state whose fields these are the names of."""
    if not isinstance(x, Mapping):
        return None
    names = set(x)
    for kind in PREFIXES:
        fields = set(kind._fields)
        if fields - OPTIONAL <= names <= fields:
            return kind
    return None


def _from_mapping(kind: Any, fields: Mapping[str, Any]) -> Any:
    # A field without arrays is missing in a mapping. It was ().
    values = {name: fields.get(name, ()) for name in kind._fields}
    if kind is ClipState:
        norm = values["norm"]
        numbered = dict.fromkeys(map(str, range(jnp.size(norm))))
        values["names"] = (numbered,) if jnp.ndim(norm) else ALL
    if kind is SkipState:
        # What it wraps has clippers of its own.
        values["inner_state"] = _as_states(values["inner_state"])[0]
    if kind is HealthState:
        values["norms"] = _from_mapping(ClipState, values["norms"])
        for name in ("signs", "idle", "dead"):
            values[name] = values[name] or {}
    if isinstance(values.get("elements"), Mapping):
        values["elements"] = tuple(values["elements"].values())
    return kind(**values)


def _raise_none_found(opt_state: Any) -> None:
    must = (
        "metrics: opt_state must be the state of an optimizer with a clipper of "
        "optaxclip in it, got"
    )
    # An optimizer is a tuple of functions to JAX, in which there is no state.
    if isinstance(opt_state, (optax.GradientTransformation, optax.MultiSteps)):
        raise TypeError(
            f"{must} the optimizer: hand over what its init and update return."
        )
    raise ValueError(f"{must} {_described(opt_state)}.")


def _described(opt_state: Any) -> str:
    """What was handed over instead of a state with a clipper."""
    states: dict[str, None] = {}

    def is_state(x: Any) -> bool:
        # JAX asks about each node on its way down. False lets it go on into the node.
        if hasattr(x, "_fields"):
            states[type(x).__name__] = None
        return False

    count = len(jax.tree.leaves(opt_state, is_leaf=is_state))
    if states:
        shown = ", ".join(states)
        return f"{shown}: the clippers of optax keep no state, those of optaxclip do"
    if not count:
        return repr(opt_state)
    return f"a tree of {count} leaves that holds no state, as gradients are"
