"""Finds the states that `metrics` reads, at any depth of an optimizer state."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import DictKey

from .._clippers._by_value import ClipByValueState
from .._clippers._record_spikes import SpikeState
from .._clippers._spam import SpamState
from .._core._shares import ClippedElements
from .._core._state import ClipState, check_one_model
from .._norms._leaves import unboxed
from .._wrappers._skipping import SkipState

PREFIXES = {
    ClipState: "clip",
    ClipByValueState: "clip",
    SpamState: "clip",
    SkipState: "skip",
    SpikeState: "spike",
}
# What holds no arrays, or is not read. A mapping may lack it.
OPTIONAL = {"names", "memory", "loss_memory", "second_moment", "inner_state"}
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
    entries, _ = flatten(tree, is_leaf=_is_reported)
    for own, state in entries:
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
    was one. `nnx.state(optimizer)` makes a mapping of each tuple.
    """
    kinds = []

    def is_state(x: Any) -> bool:
        return _kind_of(x) is not None

    def restored(x: Any) -> Any:
        kind = _kind_of(x)
        if kind is None:
            return x
        kinds.append(kind)
        return _from_mapping(kind, x)

    return jax.tree.map(restored, tree, is_leaf=is_state), bool(kinds)


def _kind_of(x: Any) -> type | None:
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
    values = {name: _as_tuple(fields.get(name, ())) for name in kind._fields}
    if kind is ClipState:
        values["names"] = _numbered(values["norm"])
        values["memory"] = _of_blocks(values["norm"], fields.get("memory", ()))
    if kind is SkipState:
        # What it wraps has clippers of its own.
        values["inner_state"] = _as_states(fields.get("inner_state", ()))[0]
    if "elements" in values:
        values["elements"] = ClippedElements(**fields["elements"])
    return kind(**values)


def _of_blocks(norms: Any, memories: Any) -> Any:
    """The memories of all blocks. A mapping lacks blocks that have none."""
    if not isinstance(norms, tuple) or not isinstance(memories, Mapping):
        return memories
    known = {int(place): memory for place, memory in memories.items()}
    return tuple(known.get(place, ()) for place in range(len(norms)))


def _numbered(norms: Any) -> tuple[tuple[str, ...], ...]:
    """Numbers for the names of the norms in each block."""
    blocks = norms if isinstance(norms, tuple) else (norms,)
    if len(blocks) == 1 and jnp.ndim(blocks[0]) == 0:
        return (("",),)  # the norm of everything
    # Blocks of [3], [2, 1, 5] and [1, 5] have 3, 2 and 1 names: 0 to 5. Those of a
    # single stack of layers are taken for rows.
    counts = [len(block) for block in blocks]
    numbers = map(str, itertools.count())
    return tuple(tuple(itertools.islice(numbers, count)) for count in counts)


def _as_tuple(x: Any) -> Any:
    """Blocks in their order, from a mapping of their numbers."""
    if not isinstance(x, Mapping) or not all(
        str(key).isdecimal() for key in x
    ):
        return x
    # As numbers: "10" comes after "9".
    return tuple(x[key] for key in sorted(x, key=int))


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
    states = _names_of_states(opt_state)
    if states:
        shown = ", ".join(states)
        return f"{shown}: the clippers of optax keep no state, those of optaxclip do"
    count = len(jax.tree.leaves(opt_state))
    if not count:
        return repr(opt_state)
    return f"a tree of {count} leaves that holds no state, as gradients are"


def _names_of_states(opt_state: Any) -> list[str]:
    """The classes of the states in a tree, each once."""
    found: dict[str, None] = {}

    def is_state(x: Any) -> bool:
        # JAX asks about each node on its way down. False lets it go on into the node.
        named = hasattr(x, "_fields")
        if named:
            found[type(x).__name__] = None
        return False

    jax.tree.flatten(opt_state, is_leaf=is_state)
    return list(found)
