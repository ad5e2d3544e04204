"""The states that `metrics` reports: which there are, and where they are found."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import DictKey

from ._checks import shown
from ._clippers._by_value import ClipByValueState
from ._clippers._recorders import SpikeState
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
    health_rows,
    skip_rows,
    spike_rows,
)
from ._state import ClipState, Names, RecordState, check_one_model
from ._trees import PyTree, unboxed
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
    HealthState: Kind("health", health_rows, HEALTH),
}
Scope = tuple[Any, ...]  # the names of mappings on the way to a state


class Found(NamedTuple):
    """A state in the state of an optimizer."""

    prefix: str  # "clip", or "clip_2" for the second one of this scope
    scope: str  # as a path: "outer/inner"
    state: Any


def reported_states(opt_state: PyTree) -> Iterator[Found]:
    """Every state that is reported.

    Raises:
      TypeError: an optimizer in the place of its state.
      ValueError: there is none, or one has an axis for the members of an ensemble.
    """
    tree = unboxed(opt_state)
    states = list(_states_in(tree))
    # A mapping without a state may be what `nnx.state` makes of one.
    if not states and isinstance(tree, Mapping):
        states = list(_states_of_nnx(tree))
    if not states:
        # An optimizer is a tuple of functions to JAX, in which there is no state.
        optimizers = (optax.GradientTransformation, optax.MultiSteps)
        error = TypeError if isinstance(opt_state, optimizers) else ValueError
        raise error(
            "metrics: opt_state must be the state of an optimizer with a clipper of "
            f"optaxclip in it, got {shown(opt_state)}: hand over what init and update "
            "return. The clippers of optax keep no state, those of optaxclip do."
        )
    counts = Counter[tuple[str, str]]()
    for scope, state in states:
        check_one_model("metrics: opt_state", "metrics", state)
        prefix = KINDS[type(state)].prefix
        path = "/".join(str(name) for name in scope if name != prefix)
        # "clip/a" and "clip/b" are counted separately: neither becomes "clip_2".
        counts[prefix, path] += 1
        number = counts[prefix, path]
        # The first keeps its name when a second one is added.
        yield Found(prefix if number == 1 else f"{prefix}_{number}", path, state)


def _states_in(tree: PyTree, scope: Scope = ()) -> Iterator[tuple[Scope, Any]]:
    """Every reported state of a tree, with its scope.

    `scope` is the one of the tree.
    """
    leaves = jax.tree.leaves_with_path(tree, is_leaf=lambda x: type(x) in KINDS)
    for path, leaf in leaves:
        if type(leaf) not in KINDS:
            continue
        # Places and fields have keys of other types: inner_states, "a", 0, clip -> "a".
        names = [key.key for key in path if isinstance(key, DictKey)]
        scope_of_state = (*scope, *names)
        yield scope_of_state, leaf
        # Of the reported states only this one holds others.
        if isinstance(leaf, SkipState):
            yield from _states_in(leaf.inner_state, scope_of_state)


# ------------------------------------------------------------ states in flax's mappings

# `nnx.state` makes a mapping of each state. Its keys are the fields that hold arrays,
# and the fields below always do. The first of them counts steps, in integers. So no
# weights that have the names of fields are taken for a state.
FIELDS = {
    ClipState: ("counts", "numbers"),
    ClipByValueState: ("step",),
    SpamState: ("step", "second_moment"),
    SkipState: ("skip_counts", "skip_numbers"),
    SpikeState: ("spike_counts", "spike_numbers"),
    HealthState: ("norms",),
}
# Names of fields in which flax NNX and optax keep a state within a state.
OUTER_FIELDS = {"opt_state", "inner_opt_state", "inner_state", "inner_states"}
OUTER_FIELDS |= {"clip_state"}


def _states_of_nnx(
    tree: Mapping[Any, Any], scope: Scope = ()
) -> Iterator[tuple[Scope, Any]]:
    """Every reported state of nested mappings, with its scope.

    `scope` is the one of the tree.
    """
    state = _state_of(tree)
    if state is not None:
        yield scope, state
    for key, value in tree.items():
        if not isinstance(value, Mapping):
            continue
        # A field of a state is no other state, but for those inside a `SkipState`.
        if state is not None and key != "inner_state":
            continue
        # The places of a chain are numbers.
        is_name = isinstance(key, str) and key not in OUTER_FIELDS
        scope_of_value = (*scope, key) if is_name else scope
        yield from _states_of_nnx(value, scope_of_value)


def _state_of(mapping: Mapping[Any, Any]) -> Any:
    """The state whose fields are the keys of a mapping, or None."""
    for state_type, fields in FIELDS.items():
        has_fields = set(fields) <= mapping.keys() <= set(state_type._fields)
        if has_fields and _counts_steps(mapping[fields[0]]):
            return _restored(state_type, mapping)
    return None


def _counts_steps(field: Any) -> bool:
    """Whether it is an array of integers, or the `ClipState` in a `HealthState`."""
    if isinstance(field, Mapping):
        return isinstance(_state_of(field), ClipState)
    return jnp.issubdtype(getattr(field, "dtype", float), jnp.integer)


def _restored(state_type: Any, mapping: Mapping[Any, Any]) -> Any:
    """The state of a mapping of its fields."""
    # Fields that are missing were empty.
    if state_type is HealthState:
        return HealthState(
            norms=_state_of(mapping["norms"]),
            signs=mapping.get("signs", {}),
            idle=mapping.get("idle", {}),
            dead=mapping.get("dead", {}),
        )
    fields: dict[str, Any] = dict.fromkeys(state_type._fields, ())
    fields.update(mapping)
    if state_type is ClipState:
        shape = jnp.shape(mapping["numbers"])
        # The names are lost, so norms are numbered.
        names = [""] if len(shape) == 1 else map(str, range(shape[-1]))
        fields["names"] = Names(dict.fromkeys(names))
    return state_type(**fields)
