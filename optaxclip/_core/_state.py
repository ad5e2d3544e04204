"""What a clipper keeps. Its fields are in blocks, as `_blocks` arranges them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._norms import _prefix as prefix
from ._factors import reported
from ._shares import moving_average


class Entry(NamedTuple):
    """One block of a state: of its fields from `norm` on, one array each."""

    norm: jax.Array
    limit: jax.Array
    factor: jax.Array
    clipped: jax.Array
    clipped_recently: jax.Array
    nonfinite: jax.Array
    memory: Any


class ClipState(NamedTuple):
    """What a clipper knows after a step.

    The fields from `norm` on have one entry for each norm: an array for all scalar
    norms, shape [] for the norm of everything and [N] for those of N tensors or groups.
    Norms of units and of stacked layers are arrays of their own, in a tuple.
    `optaxclip.metrics` reads all of it by name.
    """

    # No arrays: the names of the norms, as one key, one on each line. An empty line
    # separates blocks.
    names: dict[str, None]
    step: jax.Array  # int32[]: updates seen
    norm: Any  # float32[N]: before clipping, in the last step
    limit: Any  # float32[N]: what the norm was held against
    # float32[N]: what the updates were multiplied by. 1 where nothing was done, 0 only
    # where they were made 0. Held within the normal numbers of its dtype.
    factor: Any
    clipped: Any  # int32[N]: finite steps that changed the updates
    clipped_recently: Any  # float32[N]: their share of about the last 100 steps
    nonfinite: Any  # int32[N]: steps whose norm was NaN or inf
    memory: Any  # what the rule remembers, its arrays [N, ...]

    def by_name(self) -> dict[str, Entry]:
        """Returns what the state knows of each norm: its own `norm`, `limit`, `factor`,
        `clipped`, `clipped_recently`, `nonfinite` and `memory`.

        The name of a tensor is its path ("blocks/0/w"), that of a group its label, and
        that of the norm of everything is "".
        """
        found = {}
        for block, entry in zip(*unpack(self)):
            # A vector has a row for each name, other blocks are one norm.
            shape = () if block == [""] else (len(block),)
            has_rows = jnp.shape(entry.norm) == shape != ()
            for row, name in enumerate(block):
                found[name] = _row(entry, row) if has_rows else entry
        return found


class AnyNames(str):
    """Equal to the names of any norms.

    `optax.tree_map_params` calls `init` with a placeholder for the parameters, and
    compares the structure of what it gets with that of the state.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash("")


def is_placeholder(params: Any) -> bool:
    """Whether these are no parameters but a stand-in for them: a node that is empty and
    not one of Python's containers.
    """
    return (
        not isinstance(params, (dict, list, tuple))
        and params is not None
        and (not jax.tree.leaves(params))
    )


def state_of_placeholder(memory: Any) -> ClipState:
    """A state with one leaf for each field, for `optax.tree_map_params`."""
    zero = jnp.zeros(())
    names: dict[str, None] = {AnyNames(): None}
    return ClipState(names, zero, zero, zero, zero, zero, zero, zero, memory)


def next_entry(
    step: jax.Array,
    old: Entry,
    norm: jax.Array,
    limit: jax.Array,
    new_norm: tuple[jax.Array, jax.Array],
    memory: Any,
) -> Entry:
    """A block after a step. `new_norm` is (norm, new norm), whose quotient counts."""
    before, after = new_norm
    broken = ~jnp.isfinite(norm) | jnp.isnan(limit)
    changed = ~broken & (after != before)
    return Entry(
        norm=norm.astype(old.norm.dtype),
        limit=limit.astype(old.limit.dtype),
        factor=reported(before, after).astype(old.factor.dtype),
        clipped=old.clipped + changed.astype(jnp.int32),
        clipped_recently=moving_average(old.clipped_recently, changed, step),
        nonfinite=old.nonfinite + broken.astype(jnp.int32),
        memory=memory,
    )


def _row(entry: Entry, row: int) -> Entry:
    return jax.tree.map(lambda x: x[row], entry)


def pack(names: list[list[str]], step: jax.Array, entries: list[Entry]) -> ClipState:
    """The state of some blocks."""
    blocks = ["\n".join(block) for block in names]
    fields = list(zip(*entries)) or [()] * len(Entry._fields)
    packed = [x[0] if len(entries) == 1 else tuple(x) for x in fields]
    if not jax.tree.leaves(packed[-1]):
        packed[-1] = ()
    names_of_blocks = {"\n\n".join(blocks): None} if blocks else {}
    return ClipState(names_of_blocks, step, *packed)


def unpack(state: ClipState) -> tuple[list[list[str]], list[Entry]]:
    """The names of the norms in each block, and the blocks."""
    if not state.names:
        return [], []
    (key,) = state.names
    if isinstance(key, AnyNames):
        return _numbered(state)
    names = [block.split("\n") for block in key.split("\n\n")]
    return names, _entries(state, len(names))


def _entries(state: ClipState, count: int) -> list[Entry]:
    memory = state.memory if jax.tree.leaves(state.memory) else ((),) * count
    if count == 1:
        memory = (state.memory,)
    fields = [x if count > 1 else (x,) for x in state[2:-1]]
    return [Entry(*each) for each in zip(*fields, memory)]


def limits_of(state: ClipState, tree: Any) -> Any:
    """The limit of each leaf of a tree, from the state of a clipper of tensors."""
    entries, treedef = jax.tree_util.tree_flatten_with_path(tree)
    known = state.by_name()
    names = prefix.names([path for path, _ in entries])
    return treedef.unflatten([known[name].limit for name in names])


def _numbered(state: ClipState) -> tuple[list[list[str]], list[Entry]]:
    """The blocks of a state whose names `optax.tree_map_params` has dropped."""
    count = len(state.norm) if isinstance(state.norm, tuple) else 1
    entries = _entries(state, count)
    if count == 1 and jnp.ndim(entries[0].norm) == 0:
        return [[""]], entries  # the norm of everything
    names = []
    for block, entry in enumerate(entries):
        rows = range(len(entry.norm)) if jnp.ndim(entry.norm) == 1 else [0]
        names.append([f"{block}/{row}" if count > 1 else f"{row}" for row in rows])
    return names, entries
