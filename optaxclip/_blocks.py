"""How the norms of a step fit into the state of a clipper.

A block is what is decided as one array: the norms of all whole leaves as a vector, or
the units of one leaf. Norms are found in the state by name. A leaf that is None in one
step has no norm there, and the state keeps what it knew.
"""

from collections.abc import Iterable, Sequence
from dataclasses import fields
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from . import _mesh as mesh
from . import _trees as trees
from ._checks import BEGIN_ANEW, check_shape
from ._norms import Norms
from ._packed import InWindows, Packed, PyTree, packed
from ._state import ROWS_OF_COUNTS, ClipState, Names, entry_counts
from .rules._limits import Joined
from .rules._rule import Rule, call_name, is_rule


class Block(NamedTuple):
    """Norms that are decided as one array."""

    norms: list[Array]  # in this step
    indices: list[int]  # of them, among all norms of the step
    entries: np.ndarray  # int[N]: of them, in the state
    unit_leaf: str | None  # the name of the leaf whose units they are
    # Whether the norms are joined to a vector. Otherwise there is one array in `norms`:
    # the norm of everything, or the units of a leaf.
    is_vector: bool

    def joined(self, values: Sequence[Array]) -> Array:
        """Numbers of all norms of the step, those of this block as its array."""
        return self.together([values[index] for index in self.indices])

    def together(self, numbers: Sequence[Array]) -> Array:
        """Numbers of each norm of this block as its array."""
        return concatenated(numbers) if self.is_vector else numbers[0]

    def taken_apart(self, array: Array) -> list[Array]:
        """The numbers of each norm, of an array of this block."""
        if not self.is_vector:
            return [array]
        return mesh.entries_of(array, [jax.typeof(norm) for norm in self.norms])


class BlockLimits(NamedTuple):
    """A block with its limits, and what its rule remembers after this step."""

    block: Block
    norm: Array  # the array of the block
    limit: Array  # of each of its norms, in the same array
    limit_of_norms: list[Array]  # the same limits, one array for each norm
    memory: PyTree


def blocks_of(norms: Norms, state: ClipState, call: str) -> list[Block]:
    """The norms of a step as blocks, those of units last.

    Raises:
      ValueError: a norm that the state does not have, or with other layers or units.
    """
    names = state.names
    names_of_norms = trees.names(norms.paths, names.layers)
    index_of_name = {name: index for index, name in enumerate(names_of_norms)}
    _check_names(names, index_of_name, norms, call)
    # Inside shard_map, norms that each device has for itself are a block apart from
    # those that are the same on all devices: a vector has one type.
    whole: dict[Any, list[tuple[int, range]]] = {}
    units = []
    start = 0
    for name, count in entry_counts(state).items():
        entries = range(start, start + (count or 1))
        start = entries.stop
        if name not in index_of_name:
            continue
        index = index_of_name[name]
        norm = norms.values[index]
        if index in norms.units:
            units.append(_block(norms, [(index, entries)], name, is_vector=False))
            continue
        if norm.size != len(entries):
            raise ValueError(
                f"{call}: state was made for {len(entries)} norms in {name!r}, but the "
                f"updates have {norm.size}. {BEGIN_ANEW}"
            )
        whole.setdefault(mesh.varying(norm), []).append((index, entries))
    blocks = []
    for places in whole.values():
        blocks.append(_block(norms, places, None, is_vector=not names.is_global))
    return blocks + units


def _block(
    norms: Norms,
    places: list[tuple[int, range]],
    unit_leaf: str | None,
    *,
    is_vector: bool,
) -> Block:
    """A block of norms with these indices and entries."""
    indices = [index for index, _ in places]
    return Block(
        norms=[norms.values[index] for index in indices],
        indices=indices,
        entries=np.concatenate([np.array(entries) for _, entries in places]),
        unit_leaf=unit_leaf,
        is_vector=is_vector,
    )


def _check_names(
    names: Names, index_of_name: dict[str, int], norms: Norms, call: str
) -> None:
    """Refuses norms that the state does not have. It may have more: some leaves may be
    missing in a step.
    """
    unit_leaves = set()
    for name, index in index_of_name.items():
        if index in norms.units:
            unit_leaves.add(name)
    new_units = sorted(unit_leaves - names.units.keys())
    lost_units = sorted(names.units.keys() & index_of_name.keys() - unit_leaves)
    if not index_of_name.keys() <= names.layers.keys():
        norms_of_state = _shown(names.layers)
        norms_of_step = _shown(index_of_name)
    elif new_units:
        norms_of_state = _shown(names.layers)
        norms_of_step = f"units in {_shown(new_units)}"
    elif lost_units:
        norms_of_state = f"units in {_shown(lost_units)}"
        norms_of_step = _shown(lost_units)
    else:
        return
    raise ValueError(
        f"{call}: state was made for norms of {norms_of_state}, but the updates have "
        f"norms of {norms_of_step}. {BEGIN_ANEW}"
    )


def memory_of_block(memory: PyTree, block: Block) -> PyTree:
    """What a rule remembers of the norms of a block, in a memory of all norms."""
    if not block.is_vector:
        return memory
    return jax.tree.map(lambda x: take_entries(x, block.entries), memory)


def take_entries(array: Array, entries: np.ndarray) -> Array:
    """Some entries of an array of all norms."""
    return array if _are_all(entries, array) else array[entries]


def put_entries(array: Array, entries: np.ndarray, values: Array) -> Array:
    """An array of all norms with other values in some entries."""
    return values if _are_all(entries, array) else array.at[entries].set(values)


def _are_all(entries: np.ndarray, array: Array) -> bool:
    return np.array_equal(entries, np.arange(len(array)))


def concatenated(arrays: Sequence[Array]) -> Array:
    """All numbers of some arrays as one vector, whole on each device of an Explicit
    mesh.
    """
    flat = [x.reshape(-1) for x in typed_alike(arrays)]
    return flat[0] if len(flat) == 1 else jnp.concatenate(flat)


def typed_alike(arrays: Sequence[Array]) -> list[Array]:
    """The arrays with one type of a mesh, as a stack or a vector needs it."""
    if jax.sharding.get_abstract_mesh().empty:
        return list(arrays)
    arrays = [mesh.resharded(array) for array in arrays]
    return mesh.typed_as_varying(arrays, arrays)


def units_over(norms: Norms, block: Block) -> tuple[str, ...]:
    """The mesh axes that split the units of a leaf."""
    (index,) = block.indices
    return next(spec.units_over for spec in norms.specs if spec.norm == index)


# ----------------------------------------------------------------- rules of the norms


def rules_of_norms(
    rules: Any, norms: Norms, argument: str, names: Iterable[str] = ()
) -> list[Rule]:
    """The rule of each norm, from one rule or a tree prefix of rules.

    `names` are those of the state, some of which may have no norm in this step.

    Raises:
      ValueError: a norm without a rule, or a rule without a norm.
    """
    if isinstance(rules, Rule):
        return [rules] * len(norms.values)
    table = trees.freeze(rules, is_rule)
    # A missing leaf is a hole in the tree of norms. A missing label leaves none.
    if norms.noun == "label" and names:
        missing = set(names) - set(trees.names(norms.paths))
        kept = [x for x in table.entries if trees.name(x[0]) not in missing]
        table = trees.Prefix(tuple(kept))
    return trees.lookup_paths(
        table,
        norms.paths,
        set(norms.holes),
        argument=argument,
        part=norms.noun,
        allow_missing=norms.allow_missing,
    )


def rule_of_block(rule: Rule, block: Block) -> Rule:
    """The rule with its arrays, which are one number for each layer of each leaf, as
    vectors of the block.
    """
    if not block.is_vector or not shapes_of(rule):
        return rule

    def spread(number: Any) -> Any:
        # A schedule and a scalar are for all norms.
        if callable(number) or not jnp.ndim(number):
            return number
        return concatenated([jnp.broadcast_to(number, x.shape) for x in block.norms])

    return jax.tree.map(spread, rule, is_leaf=callable)


def shapes_of(rule: Rule) -> list[tuple[int, ...]]:
    """The shapes of the arrays of a rule. A number fits every norm."""
    if isinstance(rule, Joined):
        return list(chain.from_iterable(shapes_of(part) for part in rule.rules))
    # A plain field, of a rule of the user's, may be an array of any shape.
    checked = [field for field in fields(rule) if "check" in field.metadata]
    values = [getattr(rule, field.name) for field in checked]
    return [value.shape for value in values if getattr(value, "shape", ())]


# --------------------------------------------------------------------- the first state


def first_state(norms: Norms, rules: list[Rule], argument: str) -> ClipState:
    """The state before the first step, from the types of norms and their rules.

    Raises:
      ValueError: an array in a rule that is not one number for each entry of a norm.
    """
    names = trees.names(norms.paths)
    zeros = []
    for norm, rule in zip(norms.values, rules):
        for shape in shapes_of(rule):
            check_shape(shape, norm.shape, argument)
        zeros.append(mesh.typed_as(jnp.zeros(norm.shape, norm.dtype), norm))
    whole = [index for index in range(len(zeros)) if index not in norms.units]
    layers = {names[index]: _layer_names(zeros[index].shape) for index in whole}
    # Leaves of units of one shape are looked at together, so they are neighbors.
    units_in_order = sorted(norms.units, key=lambda index: zeros[index].shape)
    units = {names[index]: None for index in units_in_order}
    state_names = Names(layers | units, units)
    memories: list[PyTree] = [()]
    entries = [zeros[index] for index in whole]
    if whole:
        vector = entries[0] if state_names.is_global else concatenated(entries)
        rule = rules[whole[0]]
        memories = [_first_memory(rule, vector)]
    for index in units_in_order:
        memories.append(_first_memory(rules[index], zeros[index]))
        # Each device has its own units, and the same summary of them.
        spec = next(spec for spec in norms.specs if spec.norm == index)
        other_axes = mesh.varying(zeros[index]) - {*spec.units_over}
        zero = jnp.zeros((), zeros[index].dtype)
        entries.append(mesh.varying_over(zero, other_axes))
    if not entries:
        entry = jnp.zeros((), jnp.float32)
    elif state_names.is_global:
        (entry,) = entries
    else:
        entry = concatenated(entries)
    if units:
        # Units have arrays of their own in a memory, of which none is a row.
        memory = Packed(tuple(memories), counts=[], numbers=[])
    else:
        memory = packed(tuple(memories), entry)
    numbers = [jnp.full_like(entry, number) for number in (0, np.inf, 1, 0)]
    if units:
        numbers.append(jnp.zeros_like(entry))
    counts = [jnp.zeros_like(entry, jnp.int32) for _ in ROWS_OF_COUNTS]
    structure = jax.tree.map(lambda _: InWindows(), memory.windows)
    return ClipState(
        state_names._replace(structure=structure),
        jnp.stack(counts + memory.counts),
        jnp.stack(numbers + memory.numbers),
        memory.windows,
    )


def _first_memory(rule: Rule, norm: Array) -> PyTree:
    """What a rule remembers before the first norm."""
    # A rule may return the very array that it is given, and a donated state must not
    # have one array twice.
    memory = jax.tree.map(jnp.array, rule.init(norm))
    for leaf in jax.tree.leaves(memory):
        if leaf.shape[: norm.ndim] != norm.shape:
            raise ValueError(
                f"{call_name(type(rule))}: init must return arrays whose first axes "
                f"are those of the norm, {norm.shape}, got the shape {leaf.shape}."
            )
    # Zeros that a rule made of a shape have no type of a mesh.
    return mesh.typed_as(memory, jax.typeof(norm))


def _layer_names(shape: tuple[int, ...]) -> dict[str, None] | None:
    """The names of the layers of a norm, such as "0/3" for layer 0 and expert 3. None
    for a norm without layers.
    """
    if not shape:
        return None
    names = []
    for index in np.ndindex(shape):
        # Axes of size 1 are those that a norm sums, and have no number.
        numbers = [str(number) for number, size in zip(index, shape) if size > 1]
        names.append("/".join(numbers) or "0")
    return dict.fromkeys(names)


def _shown(names: Iterable[str]) -> str:
    if set(names) == {""}:
        return "everything"
    return trees.listed(names) or "nothing"
