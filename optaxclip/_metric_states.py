"""The states that `metrics` reports: which there are, and where they are found."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import DictKey, KeyPath

from ._checks import shown
from ._clippers._by_value import ClipByValueState
from ._clippers._clip_by import SpikeState
from ._clippers._spam import SpamState
from ._health import HEALTH, HealthState
from ._metric_rows import (
    ClipNumbers,
    ElementNumbers,
    Options,
    RecordNumbers,
    Row,
    SkipNumbers,
    SpikeNumbers,
    clip_rows,
    element_rows,
    rows_of_health,
    skip_rows,
    spike_rows,
)
from ._state import ClipState, Names, RecordState, check_one_model
from ._trees import unboxed
from ._wrappers._skipping import SkipState


class Kind(NamedTuple):
    """How a kind of state is reported."""

    prefix: str  # of its keys
    rows: Callable[[Any, Options], Iterator[Row]]
    metrics: tuple[str, ...]  # all that its rows may have


OF_CLIPPERS = ("norm_quantile", *ClipNumbers._fields, "worst_name")
OF_RECORDERS = ("norm_quantile", *RecordNumbers._fields, "worst_name")
KINDS = {
    ClipState: Kind("clip", clip_rows, OF_CLIPPERS),
    RecordState: Kind("record", clip_rows, OF_RECORDERS),
    ClipByValueState: Kind("clip", element_rows, ElementNumbers._fields),
    SpamState: Kind("clip", element_rows, ElementNumbers._fields),
    SkipState: Kind("skip", skip_rows, SkipNumbers._fields),
    SpikeState: Kind("spike", spike_rows, SpikeNumbers._fields),
    HealthState: Kind("health", rows_of_health, HEALTH),
}
# Fields that `nnx.state`, which makes a mapping of each state, leaves out where they
# hold no arrays, or that are not read.
_OPTIONAL = """
    names windows loss_windows second_moment inner_state elements signs idle dead
"""
# Names of fields in which flax NNX and optax keep a state within a state.
_FIELDS = ("opt_state", "inner_state", "inner_states", "inner_opt_state", "clip_state")


class Found(NamedTuple):
    """A state in the state of an optimizer."""

    prefix: str  # "clip", or "clip_2" for the second one of this scope
    scope: str  # the names on the way to it: "outer/inner"
    state: Any


def reported_states(opt_state: Any) -> Iterator[Found]:
    """Every state that is reported.

    Raises:
      TypeError: an optimizer in the place of its state.
      ValueError: there is none, or one has an axis for the members of an ensemble.
    """
    arrays = unboxed(opt_state)
    # nnx.state makes a mapping of all, and DictKeys of fields and places. In any other
    # state a mapping is of the user's, such as weights called "step".
    tree = _as_states(arrays) if isinstance(arrays, Mapping) else arrays
    is_of_nnx = jax.tree.structure(tree) != jax.tree.structure(arrays)
    counts = Counter[tuple[str, str]]()
    for path, state in _states_in(tree, ()):
        check_one_model("metrics: opt_state", "metrics", state)
        prefix = KINDS[type(state)].prefix
        # Places and fields have keys of other types: inner_states, "a", 0, clip -> "a".
        keys = [key.key for key in path if isinstance(key, DictKey)]
        if is_of_nnx:
            keys = [key for key in keys if isinstance(key, str) and key not in _FIELDS]
        scope = "/".join(str(key) for key in keys if key != prefix)
        # "clip/a" and "clip/b" are counted separately: neither becomes "clip_2".
        counts[prefix, scope] += 1
        number = counts[prefix, scope]
        # The first keeps its name when a second one is added.
        yield Found(prefix if number == 1 else f"{prefix}_{number}", scope, state)
    if not counts:
        # An optimizer is a tuple of functions to JAX, in which there is no state.
        optimizers = (optax.GradientTransformation, optax.MultiSteps)
        error = TypeError if isinstance(opt_state, optimizers) else ValueError
        raise error(
            "metrics: opt_state must be the state of an optimizer with a clipper of "
            f"optaxclip in it, got {shown(opt_state)}: hand over what init and update "
            "return. The clippers of optax keep no state, those of optaxclip do."
        )


def _states_in(tree: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """Every reported state of a tree at this path, with its own path."""
    leaves = jax.tree.leaves_with_path(tree, is_leaf=lambda x: type(x) in KINDS)
    for path_in_tree, leaf in leaves:
        if type(leaf) not in KINDS:
            continue
        path_of_state = (*path, *path_in_tree)
        yield path_of_state, leaf
        # Of the reported states only this one holds others.
        if isinstance(leaf, SkipState):
            yield from _states_in(leaf.inner_state, path_of_state)


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
    for kind in KINDS:
        fields = set(kind._fields)
        if fields.difference(_OPTIONAL.split()) <= x.keys() <= fields:
            return kind
    return None
