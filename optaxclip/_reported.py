"""Finds the states that `metrics` reads, at any depth of an optimizer state."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import DictKey

from ._clippers._by_value import ClipByValueState
from ._clippers._record_spikes import SpikeState
from ._clippers._spam import SpamState
from ._health import HealthState
from ._state import ALL, ClipState, check_one_model
from ._trees import unboxed
from ._wrappers._skipping import SkipState

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


def _walk(
    tree: Any, path: tuple[Any, ...]
) -> Iterator[tuple[tuple[Any, ...], Any]]:
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
        keys = [
            key for key in keys if isinstance(key, str) and key not in FIELDS
        ]
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

    found = jax.tree.map(
        restored, tree, is_leaf=lambda x: _kind_of(x) is not None
    )
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
        empty = {
            name: values[name] or {} for name in ("signs", "idle", "dead")
        }
        values |= empty
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
