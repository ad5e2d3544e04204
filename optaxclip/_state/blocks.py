"""How the norms of a step fit into the state of a clipper.

A block is a set of norms whose limits and factors are computed as one array: the norm
of everything, the norms of all whole leaves as a vector (inside shard_map one vector
for each set of varying mesh axes), or the units of one leaf. Norms are found in the
state by name. A leaf that is None in a step is in no block.
"""

from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import fields
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .. import _trees as trees
from .._arguments.checks import BEGIN_ANEW
from .._arguments.prefixes import lookup_paths, prefix_table
from .._devices import mesh_types
from .._norms.norms import Norms
from .._trees import PyTree
from ..rules._limits import Joined
from ..rules._rule import Rule, is_rule
from .state import ClipState, Span, spans_of_names


class Block(NamedTuple):
    """Norms whose limits and factors are computed as one array."""

    norm: Array  # [n] of whole leaves, [] of everything, or [1, units] of one leaf
    # The same numbers by name: the norm of each whole leaf, or the units of one leaf.
    norm_of_name: Mapping[str, Array]
    # Indices in a row of the state: n, or 1 for everything or a leaf with units.
    positions: np.ndarray
    is_vector: bool  # whether `norm` joins the norms of whole leaves
    leaf_of_units: str | None = None  # the leaf whose units they are
    mesh_axes_of_units: tuple[str, ...] = ()  # the mesh axes that split the units

    def as_array(self, value_of_name: Mapping[str, Array]) -> Array:
        """One array in the layout of `norm`, from values by name."""
        values = [value_of_name[name] for name in self.norm_of_name]
        return concatenated(values) if self.is_vector else values[0]

    def by_name(self, array: Array) -> dict[str, Array]:
        """The value of each norm, from the array of the block."""
        if self.is_vector:
            norm_types = [jax.typeof(norm) for norm in self.norm_of_name.values()]
            values = mesh_types.entries_of(array, norm_types)
        else:
            values = [array]
        return dict(zip(self.norm_of_name, values))

    def memory_of_block(self, memory: PyTree) -> PyTree:
        """What a rule remembers of these norms, from a memory of all norms."""
        if not self.is_vector:
            return memory
        return jax.tree.map(lambda row: take(row, self.positions), memory)

    def memory_with_block(self, memory: PyTree, memory_of_block: PyTree) -> PyTree:
        """A memory of all norms, with what a rule now remembers of these."""
        if not self.is_vector:
            return memory_of_block
        return jax.tree.map(
            lambda row, values: put(row, self.positions, values),
            memory,
            memory_of_block,
        )


def blocks_of(
    norms: Norms, names: list[str], state: ClipState, call: str
) -> list[Block]:
    """The norms of a step, with their names, as blocks. Those of units come last.

    Raises:
      ValueError: a norm that the state does not have, or with other layers or units.
    """
    norm_of_name = dict(zip(names, norms.values))
    mesh_axes_of_leaf = _mesh_axes_of_unit_leaves(norms, names)
    span_of_name = spans_of_names(state, call=call)
    _check_norms(state, span_of_name, norm_of_name, mesh_axes_of_leaf, call)
    blocks_of_units = []
    # Inside shard_map some norms differ between devices, and others are the same on
    # all. A vector has one type, so they are separate blocks.
    names_by_mesh_axes: dict[Any, list[str]] = {}
    for name, span in span_of_name.items():
        if name in mesh_axes_of_leaf:
            block = Block(
                norm=norm_of_name[name],
                norm_of_name={name: norm_of_name[name]},
                positions=np.arange(*span),
                is_vector=False,
                leaf_of_units=name,
                mesh_axes_of_units=mesh_axes_of_leaf[name],
            )
            blocks_of_units.append(block)
        elif name in norm_of_name:
            mesh_axes = mesh_types.varying(norm_of_name[name])
            names_by_mesh_axes.setdefault(mesh_axes, []).append(name)
    is_vector = not state.names.is_global
    blocks = []
    for names_of_block in names_by_mesh_axes.values():
        norms_of_block = [norm_of_name[name] for name in names_of_block]
        positions = [np.arange(*span_of_name[name]) for name in names_of_block]
        block = Block(
            norm=concatenated(norms_of_block) if is_vector else norms_of_block[0],
            norm_of_name=dict(zip(names_of_block, norms_of_block)),
            positions=np.concatenate(positions),
            is_vector=is_vector,
        )
        blocks.append(block)
    return blocks + blocks_of_units


def _mesh_axes_of_unit_leaves(
    norms: Norms, names: list[str]
) -> dict[str, tuple[str, ...]]:
    """The mesh axes that split the units of each leaf that has units. `names` are those
    of the norms.
    """
    mesh_axes_of_leaf = {}
    for spec in norms.specs:
        if spec.has_units:
            mesh_axes_of_leaf[names[spec.norm_index]] = spec.mesh_axes_of_units
    return mesh_axes_of_leaf


def _check_norms(
    state: ClipState,
    span_of_name: Mapping[str, Span],
    norm_of_name: Mapping[str, Array],
    unit_leaves: Collection[str],
    call: str,
) -> None:
    """Raises ValueError for a norm that the state does not have, for units where the
    state has none or the reverse, and for another number of layers. A step may lack
    leaves of the state.
    """
    names = state.names
    unit_leaves_of_state = set(names.unit_leaves).intersection(norm_of_name)
    has_all_names = set(norm_of_name) <= set(span_of_name)
    if not has_all_names or unit_leaves_of_state != set(unit_leaves):
        raise ValueError(
            f"{call}: state was made for norms of "
            f"{_listed_norms(span_of_name, names.unit_leaves)}, but the updates have "
            f"norms of {_listed_norms(norm_of_name, unit_leaves)}. {BEGIN_ANEW}"
        )
    for name, norm in norm_of_name.items():
        size = span_of_name[name].size
        # The state has one entry for all units of a leaf.
        if name not in unit_leaves and norm.size != size:
            raise ValueError(
                f"{call}: state was made for {size} norms in {name!r}, but the updates "
                f"have {norm.size}. {BEGIN_ANEW}"
            )


def _listed_norms(names: Collection[str], unit_leaves: Collection[str]) -> str:
    """The names of norms for an error. The only norm of everything has the name ""."""
    if set(names) == {""}:
        return "everything"
    listed_names = trees.listed(names) or "nothing"
    if not unit_leaves:
        return listed_names
    return f"{listed_names} (with units in {trees.listed(unit_leaves)})"


def take(row: Array, positions: np.ndarray) -> Array:
    """The numbers of an array of all norms at some positions."""
    return row if _covers(positions, row) else row[positions]


def put(row: Array, positions: np.ndarray, values: Array) -> Array:
    """An array of all norms with other values at some positions."""
    if _covers(positions, row):
        return values
    row, values = typed_alike([row, values])
    return row.at[positions].set(values)


def _covers(positions: np.ndarray, row: Array) -> bool:
    """Whether these are all positions of a row, in order."""
    return np.array_equal(positions, np.arange(len(row)))


def concatenated(arrays: Sequence[Array]) -> Array:
    """All numbers of some arrays as one vector, whole on each device of an Explicit
    mesh.
    """
    arrays = typed_alike(arrays)
    dtypes = {array.dtype for array in arrays}
    if all(array.ndim == 0 for array in arrays) and len(dtypes) == 1:
        return lax.stack(arrays)
    flat = [array.reshape(-1) for array in arrays]
    return flat[0] if len(flat) == 1 else jnp.concatenate(flat)


def typed_alike(arrays: Sequence[Array]) -> list[Array]:
    """The arrays with one type of a mesh, as a stack or a vector needs it."""
    arrays = [mesh_types.resharded(array) for array in arrays]
    return mesh_types.varying_as_any_of(arrays, arrays)


# ----------------------------------------------------------------- rules of the norms


def rules_of_norms(rules: PyTree, norms: Norms, argument: str) -> list[Rule]:
    """The rule of each norm, from one rule or a tree prefix of rules.

    Raises:
      ValueError: a norm without a rule, or a rule without a norm.
    """
    if isinstance(rules, Rule):
        return [rules] * len(norms.values)
    return lookup_paths(
        prefix_table(rules, is_rule),
        norms.paths,
        set(norms.holes),
        argument=argument,
        part=norms.part_in_errors,
        allow_missing=norms.allow_missing,
    )


def rule_of_vector(rule: Rule, norms: Sequence[Array]) -> Rule:
    """The rule for a vector of norms. An array in a rule has one number for each layer.
    In the new rule it is repeated for each leaf.
    """
    # Not `dataclasses.replace`, which would check all fields again.
    new_rule = copy(rule)
    values = vars(new_rule)
    for field, array in _array_limits(rule).items():
        arrays = [jnp.broadcast_to(array, norm.shape) for norm in norms]
        values[field] = concatenated(arrays)
    if isinstance(rule, Joined):
        values["rules"] = tuple(rule_of_vector(part, norms) for part in rule.rules)
    return new_rule


def shapes_of_array_limits(rule: Rule) -> list[tuple[int, ...]]:
    """The shapes of the arrays of a rule. A number fits every norm."""
    shapes = [array.shape for array in _array_limits(rule).values()]
    if isinstance(rule, Joined):
        for part in rule.rules:
            shapes += shapes_of_array_limits(part)
    return shapes


def _array_limits(rule: Rule) -> dict[str, Array]:
    """The fields of a rule that are arrays, with a number for each layer."""
    arrays = {}
    for field in fields(rule):
        value = getattr(rule, field.name)
        # A plain field, of a rule of the user's, may be an array of any shape.
        if getattr(value, "shape", ()) and "check" in field.metadata:
            arrays[field.name] = value
    return arrays
