"""What the clippers did, as numbers for a logger.

Every clipper keeps its last norm, limit and factor in its state, so reading them costs
no second pass over the gradients, inside jit or outside.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.tree_util import DictKey

from ._checks import check_flag, check_length, check_number, shown
from ._clippers._by_value import ClipByValueState
from ._clippers._clip_by import SpikeState
from ._clippers._spam import SpamState
from ._health import HEALTH, HealthState, health_rows
from ._state import ClipState, Names, RecordState, check_one_model, sizes_of
from ._trees import unboxed
from ._wrappers._skipping import SkipState

ELEMENTS = ("elements_clipped", "elements_clipped_mean", "elements_clipped_recent")
_NUMBERS = """
    norm_before norm limit loss loss_limit factor norm_after
    clipped clipped_share clipped_share_recent clipped_count
    skipped skipped_share skipped_share_recent skipped_count consecutive_count
    spiked spiked_count score score_recent
    nonfinite_count units_clipped norms_clipped worst_ratio worst_index worst_name
"""
# The names of the numbers, in the order of a report. Several kinds of state share some.
NAMES = tuple(dict.fromkeys((*_NUMBERS.split(), *ELEMENTS, *HEALTH)))
# The kinds of state that are reported, and with what their keys begin.
PREFIXES = {
    ClipState: "clip",
    RecordState: "record",
    ClipByValueState: "clip",
    SpamState: "clip",
    SkipState: "skip",
    SpikeState: "spike",
    HealthState: "health",
}
# Fields that `nnx.state`, which makes a mapping of each state, leaves out where they
# hold no arrays, or that are not read.
_OPTIONAL = """
    names windows loss_windows second_moment inner_state elements signs idle dead
"""
# Names of fields in which flax NNX and optax keep a state within a state.
_FIELDS = ("opt_state", "inner_state", "inner_states", "inner_opt_state", "clip_state")
Numbers = dict[str, jax.Array]  # by name


def metrics(
    opt_state: Any,
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
        traced. Also a tree that holds it, such as flax's `TrainState`,
        `nnx.Optimizer`, and what `nnx.state` makes of that. The latter has no names:
        tensors are numbered in it, and `record_norm` looks like a clipper.
      only: names of numbers, such as "norm_before" or ("norm_before", "clipped"), to
        leave out the others. None for all.
      summary: whether a clipper with one norm for each tensor or group reports one row
        for all of them, instead of one for each.
      layers: whether each layer of a stacked leaf has a row of its own, such as
        `clip/norm_before/blocks/w/0`. `summary` is of all norms in any case.
      top: how many tensors or groups of a clipper are reported: those that are furthest
        above their limits. None for all. Only outside jit.
      quantiles: one share in [0, 1], or several. For each of them the quantile of the
        norms of a clipper is reported: `clip/norm_quantile/0.5` is the median.
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

      Of clippers of elements (`clip_by_value`, `spam`), with `count=True`:

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

        health/norm, health/weight_norm, health/ratio, health/cosine, health/rounding,
        health/zeros, health/subnormals, health/nonfinite, health/dead_rows

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
    is_traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(opt_state))
    if is_traced and (floats or json or top is not None):
        # The error of JAX would not say what to do.
        raise TypeError(
            "metrics: floats, json and top must be left out under jit, where numbers "
            "are not known yet: return the state, and call metrics outside."
        )
    flags = {"summary": summary, "layers": layers, "floats": floats, "json": json}
    for name, value in flags.items():
        check_flag(f"metrics: {name}", value)
    if top is not None:
        check_length("metrics: top", top)
    shares = np.atleast_1d(quantiles).tolist()
    for share in shares:
        check_number("metrics: quantiles", share, highest=1.0)
    # A string is a collection as well, of its letters.
    is_one = isinstance(only, str) or not isinstance(only, Collection | None)
    wanted: Any = [only] if is_one else only
    if wanted is not None and not all(name in NAMES for name in wanted):
        raise ValueError(
            f"metrics: only must be among {', '.join(map(repr, NAMES))}, got "
            f"{shown(only)}."
        )
    report: dict[str, Any] = {}
    known: dict[str, None] = {}
    for prefix, title, state in _reported_states(opt_state):
        if isinstance(state, ClipState):
            sizes = sizes_of(state, layers and not summary)
            rows = _clip_rows(state, sizes, summary, top, shares, floats or json)
        elif isinstance(state, HealthState):
            rows = health_rows(state, summary=summary, layers=layers)
        else:
            rows = _rows_of_one(state)
        for name, path, value in rows:
            known[name] = None
            if wanted is None or name in (*wanted, "norm_quantile"):
                # "clip", "a", "limit", "blocks/w" -> "clip/a/limit/blocks/w".
                key = prefix, title, name, path
                report["/".join(part for part in key if part)] = value
    # Without `only` nothing may be right: a clipper of an empty tree has no norm.
    if only is not None and not report:
        raise ValueError(
            f"metrics: only={shown(only)} must name a number that this state has, "
            f"which are {', '.join(known) or 'none'}. Those of all norms together come "
            "with summary=True, and those of elements with count=True in the clipper."
        )
    if not (floats or json):
        return report
    # As a list, because JAX sorts the keys of a dict. One call for all: it starts every
    # copy from the device before it waits for the first.
    for key, value in zip(report, jax.device_get(list(report.values()))):
        # A name stays as it is.
        if not isinstance(value, str):
            report[key] = float(value) if math.isfinite(value) or not json else None
    return report


# ----------------------------------------------------------- the rows of one state


def _rows_of_one(state: Any) -> Iterator[tuple[str, str, Any]]:
    """Name, path and value of each number of a state that has each once."""
    if isinstance(state, (ClipByValueState, SpamState)):
        for name, share in zip(ELEMENTS, state.elements):
            yield name, "", share
        return
    steps = jnp.maximum(state.step, 1).astype(jnp.float32)
    shared = ("norm", "limit", "loss", "loss_limit")
    numbers = {name: getattr(state, name) for name in shared}
    if isinstance(state, SkipState):
        numbers |= {
            # Steps skipped in a row until now, the last one included.
            "skipped": state.consecutive > 0,
            "skipped_share": state.skipped.astype(jnp.float32) / steps,
            "skipped_share_recent": state.skipped_recently,
            "skipped_count": state.skipped,
            "consecutive_count": state.consecutive,
            "nonfinite_count": state.nonfinite,
        }
    else:
        numbers |= {
            "spiked": state.spiked,
            "spiked_count": state.spikes,
            "score": state.spikes.astype(jnp.float32) / steps,
            "score_recent": state.spiked_recently,
        }
    for name, value in numbers.items():
        # Norms and losses in their dtype, and counts and shares in float32.
        yield name, "", value if name in shared else value.astype(jnp.float32)


def _clip_rows(
    state: ClipState,
    sizes: dict[str, int],
    summary: bool,
    top: int | None,
    quantiles: Sequence[float],
    concrete: bool,
) -> Iterator[tuple[str, str, Any]]:
    """Name, path and value of each number. `sizes` are the names of the norms, and how
    many entries each has.
    """
    names, counts = list(sizes), tuple(sizes.values())
    if not names:
        return
    if quantiles:
        # Between two norms is an average, in which 0 * inf would be NaN.
        norms = jnp.minimum(state.norm, jnp.finfo(state.norm.dtype).max)
        found = jnp.nanquantile(norms, np.array(quantiles))
        for share, value in zip(quantiles, found):
            yield "norm_quantile", f"{share:g}", value
    rows = _numbers_of_names(counts, summary, state)
    places = range(len(rows))
    if top is not None and not summary:
        starts = np.cumsum([0, *counts])[:-1]
        ratios = np.ravel(_ratio(state.norm, state.limit))
        # NaN is the largest to NumPy, and so the furthest above its limit.
        order = np.argsort(np.maximum.reduceat(ratios, starts))
        places = order[::-1][: int(top)]
    for place in places:
        numbers = rows[place]
        for name in (name for name in NAMES if name in numbers):
            yield name, "" if summary else names[place], numbers[name]
    if summary and concrete:
        # A name is a string, which a jitted function cannot return.
        yield "worst_name", "", names[int(rows[0]["worst_index"])]


# Jitted, since without jit each operation would be a call. One call serves all norms of
# a clipper. Counts are static, because shapes depend on them.
@partial(jax.jit, static_argnums=(0, 1))
def _numbers_of_names(
    counts: tuple[int, ...], summary: bool, state: ClipState
) -> list[Numbers]:
    """The numbers of each name, or those of all norms together."""
    several = Columns.of(state)
    ratio = _ratio(several.norm, several.limit)
    if not summary:
        found = []
        for end, count in zip(np.cumsum(counts), counts):
            rows = slice(end - count, end)
            columns = jax.tree.map(lambda x, rows=rows: x[rows], several)
            worst = jnp.argmax(ratio[rows])
            found.append(_numbers(columns, state, worst))
        return found
    worst = jnp.argmax(ratio)
    norm, limit = several.norm[worst], several.limit[worst]
    # The number of the name of each entry: counts of 2 and 1 are [0, 0, 1].
    of_name = np.repeat(np.arange(len(counts)), counts)
    clipped = _is_clipped(several.norm, several.factor).astype(jnp.float32)
    if jax.tree.leaves(several.units_clipped):
        clipped = several.units_clipped.astype(jnp.float32)
    numbers = _numbers(several, state, worst)
    if not isinstance(state, RecordState):
        numbers["norms_clipped"] = jnp.mean(clipped)
        # 0 over a limit of 0 is 0, and not NaN.
        numbers["worst_ratio"] = jnp.where(norm == 0, 0.0, norm / limit)
    numbers["worst_index"] = jnp.asarray(of_name)[worst].astype(jnp.float32)
    return [numbers]


def _ratio(norm: jax.Array, limit: jax.Array) -> jax.Array:
    """How far each norm is above its limit. argmax takes NaN for the largest."""
    # A limit of 0 would hide all differences, so it counts as tiny.
    ratio = norm / jnp.maximum(limit, 2.0**-60)
    # Norms without a limit are the last. Where none has one, all are compared.
    free = limit == jnp.inf
    return jnp.where(free, jnp.where(jnp.all(free), norm, 0 * norm), ratio)


class Columns(NamedTuple):
    """The rows of a state, as vectors of all norms."""

    norm: jax.Array
    limit: jax.Array
    factor: jax.Array
    clipped: jax.Array
    clipped_recently: jax.Array
    nonfinite: jax.Array
    units_clipped: Any

    @classmethod
    def of(cls, state: ClipState) -> "Columns":
        """The rows of a state."""
        rows = [getattr(state, name) for name in cls._fields]
        return cls(*jax.tree.map(jnp.atleast_1d, rows))


def _numbers(columns: Columns, state: ClipState, worst: jax.Array) -> Numbers:
    """The numbers of the worst of some norms, counted over all of them."""
    norm = columns.norm[worst]
    limit = columns.limit[worst]
    nonfinite = jnp.max(columns.nonfinite).astype(jnp.float32)
    # A recorder has nothing to say of clipping.
    if isinstance(state, RecordState):
        return {"norm": norm, "nonfinite_count": nonfinite}
    factor = columns.factor[worst]
    # At an end of its dtype the factor is not new norm / norm, and a norm so far from
    # its limit becomes the limit.
    info = jnp.finfo(factor.dtype)
    at_end = (factor == info.tiny) | (factor == info.max)
    product = jnp.where(factor == 0, 0.0, norm * factor)
    clipped = columns.clipped.astype(jnp.float32)
    steps = jnp.maximum(state.step, 1).astype(jnp.float32)
    numbers = {
        "norm_before": norm,
        "limit": limit,
        "factor": factor,
        "norm_after": jnp.where(at_end, limit, product),
        "clipped": _is_clipped(norm, factor).astype(jnp.float32),
        "clipped_share": jnp.mean(clipped / steps),
        "clipped_share_recent": jnp.mean(columns.clipped_recently.astype(jnp.float32)),
        "clipped_count": jnp.max(clipped),
        "nonfinite_count": nonfinite,
    }
    if jax.tree.leaves(columns.units_clipped):
        numbers["units_clipped"] = columns.units_clipped[worst].astype(jnp.float32)
    return numbers


def _is_clipped(norm: jax.Array, factor: jax.Array) -> jax.Array:
    # A broken step may have a factor of NaN or 0, and was not clipped.
    return (factor != 1) & jnp.isfinite(norm)


# ------------------------------------------------------- the states of an optimizer


def _reported_states(opt_state: Any) -> Iterator[tuple[str, str, Any]]:
    """Every state that is reported, with what its keys begin with (clip, clip_2, skip,
    spike) and the names on the way to it ("outer/inner").

    Raises:
      TypeError: an optimizer in the place of its state.
      ValueError: there is none, or one has an axis for the members of an ensemble.
    """
    given = unboxed(opt_state)
    # nnx.state makes a mapping of all, and DictKeys of fields and places. In any other
    # state a mapping is of the user's, such as weights called "step".
    is_mapping = isinstance(given, Mapping)
    tree = _as_states(given) if is_mapping else given
    pure = jax.tree.structure(tree) != jax.tree.structure(given)
    seen = Counter[tuple[str, str]]()
    for path, state in _walk(tree, ()):
        check_one_model("metrics: opt_state", "metrics", state)
        prefix = PREFIXES[type(state)]
        # Places and fields have keys of other types: inner_states, "a", 0, clip -> "a".
        keys = [key.key for key in path if isinstance(key, DictKey)]
        if pure:
            keys = [key for key in keys if isinstance(key, str) and key not in _FIELDS]
        title = "/".join(str(key) for key in keys if key != prefix)
        # "clip/a" and "clip/b" are counted separately: neither becomes "clip_2".
        seen[prefix, title] += 1
        number = seen[prefix, title]
        # The first keeps its name when a second one is added.
        yield prefix if number == 1 else f"{prefix}_{number}", title, state
    if not seen:
        # An optimizer is a tuple of functions to JAX, in which there is no state.
        optimizers = (optax.GradientTransformation, optax.MultiSteps)
        error = TypeError if isinstance(opt_state, optimizers) else ValueError
        raise error(
            "metrics: opt_state must be the state of an optimizer with a clipper of "
            f"optaxclip in it, got {shown(opt_state)}: hand over what init and update "
            "return. The clippers of optax keep no state, those of optaxclip do."
        )


def _walk(tree: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    flatten = jax.tree.leaves_with_path
    for own, state in flatten(tree, is_leaf=lambda x: type(x) in PREFIXES):
        whole = (*path, *own)
        if type(state) in PREFIXES:
            yield whole, state
        # The walk ends at a reported state, and only this one holds others.
        if isinstance(state, SkipState):
            yield from _walk(state.inner_state, whole)


def _as_states(tree: Any) -> Any:
    """The tree with states in the place of mappings of their fields."""

    def restored(x: Any) -> Any:
        kind = _kind_of(x)
        if kind is None:
            return x
        # A field without arrays is missing in a mapping. It was empty.
        empty = {} if kind is HealthState else ()
        values = {name: _as_states(x.get(name, empty)) for name in kind._fields}
        if kind is ClipState:
            shape = jnp.shape(values["numbers"])
            # Their names are lost, so norms are numbered.
            names = [""] if len(shape) == 1 else map(str, range(shape[1]))
            values["names"] = Names(dict.fromkeys(names))
        return kind(**values)

    return jax.tree.map(restored, tree, is_leaf=lambda x: _kind_of(x) is not None)


def _kind_of(x: Any) -> Any:
    """The type of state whose fields are the keys of a mapping, or None."""
    if not isinstance(x, Mapping):
        return None
    for kind in PREFIXES:
        fields = set(kind._fields)
        if fields.difference(_OPTIONAL.split()) <= x.keys() <= fields:
            return kind
    return None
