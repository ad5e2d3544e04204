"""What becomes of the norms of a step, and what a state keeps of it.

Outcome          of each norm of a block
furthest_units   of a leaf: the outcome of the unit furthest above its limit
next_state       the state after a step
first_state      the state before the first step
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from . import _blocks as blocks
from . import _mesh as mesh
from . import _mesh_types as mesh_types
from . import _trees as trees
from ._blocks import Block
from ._checks import check_shape
from ._norms import Norms
from ._state import (
    COUNT_NAMES,
    ClipState,
    LayerNames,
    Names,
    StateRows,
    names_here,
    state_of_rows,
)
from ._sums import materialized_on_gpu
from ._trees import PyTree
from .rules._memory import count_up, in_place, moving_average
from .rules._rule import Rule, call_name

STEP = COUNT_NAMES.index("step")  # the index of a row


class Outcome(NamedTuple):
    """What becomes of norms, elementwise. `furthest_units` makes one entry for each
    leaf from those of its units.
    """

    norm: Array
    limit: Array
    factor: Array
    clipped: Array  # bool
    is_sound: Array  # bool: neither norm, limit nor shrink is broken
    # float: the share of the units that were clipped. 0 or 1 for a whole leaf
    unit_share: Array


class Decision(NamedTuple):
    """What the updates are multiplied by, and what the state keeps."""

    # The updates are multiplied by it twice, since its square, the factor, may be
    # subnormal. A hair less than the exact root, so that no product exceeds the limit.
    root_of_factor: Array
    outcome: Outcome


Decide = Callable[[Array, Array], Decision]  # of norms and limits
# Leaf name -> what a rule remembers of its units. None -> of all whole leaves.
Memories = dict[str | None, PyTree]


def are_sound(norms: Array, limits: Array) -> Array:
    """Whether neither is broken: the norm is finite, and the limit is not NaN."""
    # Only NaN differs from itself. `~isnan` is two operations on a TPU.
    return jnp.isfinite(norms) & (limits == limits)


def next_state(
    state: ClipState,
    outcomes: list[tuple[Block, Outcome]],
    memories: Memories,
    decide: Decide,
) -> ClipState:
    """The state after a step."""
    steps = count_up(state.counts[STEP])
    outcome = _in_state_order(state, outcomes, decide)
    units_clipped = outcome.unit_share
    is_present = np.zeros(state.norm.size, bool)
    for block, _ in outcomes:
        is_present[block.positions] = True
    if state.names.unit_leaves and not is_present.all():
        # A missing leaf keeps the share of its last step, while `clipped_recently`
        # counts this step as one that clipped nothing.
        is_present = is_present.reshape(state.norm.shape)
        units_clipped = jnp.where(is_present, units_clipped, state.units_clipped)
    rows = StateRows(
        step=steps,
        clipped=count_up(state.clipped, outcome.clipped),
        nonfinite=count_up(state.nonfinite, ~outcome.is_sound),
        norm=outcome.norm,
        limit=outcome.limit,
        factor=outcome.factor,
        clipped_recently=moving_average(
            state.clipped_recently, outcome.unit_share, steps
        ),
        units_clipped=units_clipped,
    )
    new_state = state_of_rows(
        names_here(state), rows, tuple(memories.values()), state.numbers.dtype
    )
    return state._replace(
        names=new_state.names,
        counts=in_place(new_state.counts, state.counts),
        numbers=in_place(new_state.numbers, state.numbers),
        windows=jax.tree.map(in_place, new_state.windows, state.windows),
    )


def _in_state_order(
    state: ClipState, outcomes: list[tuple[Block, Outcome]], decide: Decide
) -> Outcome:
    """One outcome with an entry for each norm of the state. A leaf that is missing
    keeps its norm, limit and factor, and was not clipped.
    """
    parts = []
    positions = []
    # Leaves whose units have one shape, for one reduction of all of them.
    leaves_of_shape: dict[Any, list[tuple[Block, Outcome]]] = {}
    for block, outcome in outcomes:
        if block.leaf_of_units is None:
            parts.append(outcome)
            positions.append(block.positions)
        else:
            key = jax.typeof(outcome.norm), block.mesh_of_units
            leaves_of_shape.setdefault(key, []).append((block, outcome))
    for (_, mesh_of_units), leaves in leaves_of_shape.items():
        norms = jnp.stack([outcome.norm for _, outcome in leaves])
        limits = jnp.stack([outcome.limit for _, outcome in leaves])
        parts.append(furthest_units(norms, limits, mesh_of_units, decide))
        positions += [block.positions for block, _ in leaves]
    zeros = jnp.zeros_like(state.norm)
    unchanged = Outcome(
        norm=state.norm,
        limit=state.limit,
        factor=state.factor,
        clipped=zeros != 0,
        is_sound=zeros == 0,
        unit_share=zeros,
    )
    if not parts:
        return unchanged
    if state.names.is_global:
        (outcome,) = parts
        # A tree of one array with units has one outcome for them, [1].
        return jax.tree.map(lambda row: row.reshape(zeros.shape), outcome)
    all_positions = np.concatenate(positions)

    def row(old: Array, *arrays: Array) -> Array:
        entries = blocks.concatenated(arrays).astype(old.dtype)
        return blocks.put(old, all_positions, entries)

    return jax.tree.map(row, unchanged, *parts)


# ------------------------------------------------------------------------------- units


class UnitNumbers(NamedTuple):
    """Numbers of units, [leaves, ...units], or of one unit of each leaf, [leaves]."""

    severity: Array  # how far the norm is above its limit, see `severity`
    norm: Array
    limit: Array
    factor: Array
    clipped_units: Array  # 1 or 0, or how many were clipped


def furthest_units(
    norms: Array, limits: Array, mesh_of_units: tuple[str, ...], decide: Decide
) -> Outcome:
    """Of the units of some leaves of equal shape: the outcome of the unit of each leaf
    that is furthest above its limit, and the share of units that were clipped.

    Norms and limits are [leaves, ...units]. `mesh_of_units` are the mesh axes that
    split the units.
    """
    norm, limit = materialized_on_gpu([norms, limits])
    # Decided again for all leaves at once. Stacking the decisions of each leaf would
    # write more arrays to memory.
    outcome = decide(norm, limit).outcome
    numbers = UnitNumbers(
        # Finite, and inf for a broken unit, so that it counts as the furthest.
        severity=jnp.where(outcome.is_sound, severity(norm, limit), jnp.inf),
        norm=norm,
        limit=limit,
        factor=outcome.factor,
        # A sum of ones in float32 would stop at 2^24. As a float, a count is rounded.
        clipped_units=outcome.clipped.astype(jnp.int32),
    )
    # JAX has no derivative of a reduction of several arrays.
    furthest = _furthest(lax.stop_gradient(numbers), range(1, norm.ndim))
    if mesh_of_units:
        # Each device knows its own units.
        columns = [column.astype(norm.dtype) for column in furthest]
        table = jnp.stack(columns)[..., None]
        tables = mesh.among_zeros(table, ((), (), mesh_of_units))
        tables = lax.psum(tables, mesh_of_units)
        furthest = _furthest(UnitNumbers(*tables), (1,))
    unit_count = norm.size // len(norm) * mesh.device_count(mesh_of_units)
    unit_share = furthest.clipped_units.astype(norm.dtype) / unit_count
    is_sound = furthest.severity < jnp.inf
    return Outcome(
        norm=furthest.norm,
        limit=furthest.limit,
        factor=furthest.factor,
        clipped=is_sound & (unit_share > 0),
        is_sound=is_sound,
        unit_share=unit_share,
    )


def severity(norm: Array, limit: Array) -> Array:
    """How far norms are above their limits, for a comparison: sqrt(norm / limit), and
    below 0 for finite norms without a limit. NaN where one of both is.
    """
    smallest = jnp.finfo(norm.dtype).tiny
    # A limit of 0 would hide all differences, so it counts as the smallest number. The
    # ratio of finite numbers may overflow. That of their roots does not.
    positive_limit = jnp.maximum(limit, smallest)
    root_of_ratio = jnp.sqrt(norm) / jnp.sqrt(positive_limit)
    # Finite norms without a limit come last. Among them -1 / norm rises with the norm.
    is_last = (limit == jnp.inf) & (norm < jnp.inf)
    positive_norm = jnp.maximum(norm, smallest)
    return jnp.where(is_last, -1 / positive_norm, root_of_ratio)


def _furthest(numbers: UnitNumbers, axes: Sequence[int]) -> UnitNumbers:
    """The numbers of the unit with the largest severity along some axes, and how many
    units were clipped.
    """
    # On a mesh one reduction of all numbers would take a collective for each.
    if not mesh_types.is_on_one_device(numbers.severity):
        return _furthest_on_a_mesh(numbers, axes)
    # One reduction. With a maximum for each number, as on a mesh, a step of a scanned
    # decoder with AGC has 858 kernels on an H100, with this 831. On a TPU v5e it moves
    # 0.8 % more bytes.
    starts = [column.dtype.type(0) for column in numbers]
    starts[0] = starts[0] - np.inf
    return UnitNumbers(
        *lax.reduce(tuple(numbers), tuple(starts), _furthest_of_two, axes)
    )


def _furthest_on_a_mesh(numbers: UnitNumbers, axes: Sequence[int]) -> UnitNumbers:
    """The same by a maximum for each number. If several units tie, norm, limit and
    factor are each the largest among them, so they may come from different units.
    """
    largest = jnp.max(numbers.severity, axes, keepdims=True)
    is_furthest = numbers.severity == largest
    rows = [largest.reshape(len(largest))]
    for column in (numbers.norm, numbers.limit, numbers.factor):
        rows.append(_largest_or_nan(column, is_furthest, axes))
    # As floats, which one collective joins with other sums. Integers need another.
    clipped_units = numbers.clipped_units.astype(numbers.norm.dtype)
    return UnitNumbers(*rows, clipped_units=jnp.sum(clipped_units, axes))


def _largest_or_nan(column: Array, is_candidate: Array, axes: Sequence[int]) -> Array:
    """The largest of some numbers that are not negative, and NaN if one is NaN."""
    # A maximum of floats drops NaN on a CPU, and over devices. As integers, these
    # numbers have the same order, with NaN last.
    integer = np.dtype(f"int{8 * column.dtype.itemsize}")
    bits = lax.bitcast_convert_type(jnp.abs(column), integer)
    largest = jnp.max(jnp.where(is_candidate, bits, 0), axes)
    return lax.bitcast_convert_type(largest, column.dtype)


def _furthest_of_two(
    left: Sequence[Array], right: Sequence[Array]
) -> tuple[Array, ...]:
    """Of two units the one that is further above its limit."""
    left = UnitNumbers(*left)
    right = UnitNumbers(*right)
    # Of equal units the longer norm counts, as it does on a mesh, and NaN before all.
    is_longer = (left.norm >= right.norm) | (left.norm != left.norm)
    is_equal = left.severity == right.severity
    is_left = (left.severity > right.severity) | is_equal & is_longer
    columns = []
    for left_column, right_column in zip(left[:-1], right[:-1]):
        columns.append(lax.select(is_left, left_column, right_column))
    return *columns, left.clipped_units + right.clipped_units


# --------------------------------------------------------------------- the first state


def first_state(norms: Norms, rules: list[Rule], argument: str) -> ClipState:
    """The state before the first step, from the types of norms and their rules.

    Raises:
      ValueError: an array in a rule that is not one number for each entry of a norm.
    """
    names = trees.unique_names(norms.paths)
    mesh_of_units = blocks.mesh_axes_of_units(norms, names)
    rule_of_name = dict(zip(names, rules))
    zeros_of_leaves = {}
    zeros_of_units = {}
    for name, norm in zip(names, norms.values):
        for shape in blocks.shapes_of_array_limits(rule_of_name[name]):
            check_shape(argument, shape, norm.shape)
        zeros = jnp.zeros(norm.shape, norm.dtype)
        zeros_by_name = zeros_of_units if name in mesh_of_units else zeros_of_leaves
        zeros_by_name[name] = mesh_types.typed_as(zeros, norm)
    # Leaves of units of one shape are looked at together, so they are neighbors.
    unit_leaves = sorted(zeros_of_units, key=lambda name: zeros_of_units[name].shape)
    layers = {name: _layer_names(x.shape) for name, x in zeros_of_leaves.items()}
    units = dict.fromkeys(unit_leaves)
    state_names = Names(layers | units, units)
    entries = list(zeros_of_leaves.values())
    memories: list[PyTree] = [()]
    if zeros_of_leaves:
        rule = rule_of_name[next(iter(zeros_of_leaves))]
        zeros = entries[0]
        if not state_names.is_global:
            zeros = blocks.concatenated(entries)
            # Limits of parts remember nothing, and their arrays fit no other leaf.
            if all(other is rule for other in rules):
                rule = blocks.rule_of_vector(rule, entries)
        memories = [_first_memory(rule, zeros)]
    for name in unit_leaves:
        zeros = zeros_of_units[name]
        memories.append(_first_memory(rule_of_name[name], zeros))
        # Each device has its own units, and the same outcome of them.
        other_axes = mesh_types.varying(zeros) - {*mesh_of_units[name]}
        zero = jnp.zeros((), zeros.dtype)
        entries.append(mesh_types.varying_over(zero, other_axes))
    if not entries:
        row = jnp.zeros((), jnp.float32)
    elif state_names.is_global:
        (row,) = entries
    else:
        row = blocks.concatenated(entries)
    return state_of_rows(state_names, _first_rows(row), tuple(memories), row.dtype)


def _first_rows(zeros: Array) -> StateRows:
    """The rows before the first step, from a row of zeros."""
    no_steps = jnp.zeros_like(zeros, jnp.int32)
    return StateRows(
        step=no_steps,
        clipped=no_steps,
        nonfinite=no_steps,
        norm=zeros,
        limit=jnp.full_like(zeros, np.inf),
        factor=jnp.ones_like(zeros),
        clipped_recently=zeros,
        units_clipped=zeros,
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
    # `jnp.zeros(norm.shape)` in a rule has lost the sharding of the norm.
    return mesh_types.typed_as(memory, jax.typeof(norm))


def _layer_names(shape: tuple[int, ...]) -> LayerNames:
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
