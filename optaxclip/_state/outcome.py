"""The outcome of a step for each norm, and the new state.

Outcome          the norms of a block, their limits, factors and flags
next_state       the state after a step
furthest_units   for each leaf with units: the outcome of the unit furthest above its
                 limit
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .._devices import mesh, mesh_types
from .._devices.platforms import materialized_on_gpu
from .._trees import PyTree
from ..rules._memory import count_up, in_buffer_of, moving_average
from . import blocks
from .blocks import Block
from .state import (
    COUNT_ROW_NAMES,
    ClipState,
    StateRows,
    names_on_this_device,
    state_of_rows,
)

STEP = COUNT_ROW_NAMES.index("step")  # the index of a row


class Outcome(NamedTuple):
    """What becomes of each norm of a block. For units, `furthest_units` makes one entry
    for each leaf.
    """

    norm: Array
    limit: Array
    factor: Array
    clipped: Array  # bool
    is_sound: Array  # bool: neither norm, limit nor shrink is broken
    # float: the share of the units that were clipped. 0 or 1 for a single norm
    units_clipped: Array


class Decision(NamedTuple):
    """What the updates are multiplied by, and what the state keeps."""

    # The updates are multiplied by it twice, since its square, the factor, may be
    # subnormal. A hair less than the exact root, so that no product exceeds the limit.
    root_of_factor: Array
    outcome: Outcome


# From norms and limits to decisions, elementwise. `_norm_clipper.py` calls it for each
# block, and `furthest_units` again for all units of some leaves at once.
Decide = Callable[[Array, Array], Decision]
# What rules remember. The key is the name of a leaf with units, or None for all other
# leaves together.
Memories = dict[str | None, PyTree]


def are_sound(norms: Array, limits: Array) -> Array:
    """For each norm whether it is finite and its limit is not NaN."""
    # Only NaN differs from itself. `~isnan` is two operations on a TPU.
    return jnp.isfinite(norms) & (limits == limits)


def next_state(
    state: ClipState,
    outcomes: list[tuple[Block, Outcome]],
    memories: Memories,
    decide: Decide,
) -> ClipState:
    """The state after a step, from what became of each block and the new memories."""
    # The whole row, of which `state.step` is one number.
    step = count_up(state.counts[STEP])
    outcome = _outcome_of_state(state, outcomes, decide)
    rows = StateRows(
        step=step,
        clipped=count_up(state.clipped, outcome.clipped),
        nonfinite=count_up(state.nonfinite, ~outcome.is_sound),
        norm=outcome.norm,
        limit=outcome.limit,
        factor=outcome.factor,
        clipped_recently=moving_average(
            state.clipped_recently, outcome.units_clipped, step
        ),
        units_clipped=_units_clipped_row(state, outcomes, outcome.units_clipped),
    )
    new_state = state_of_rows(
        names_on_this_device(state), rows, tuple(memories.values()), state.numbers.dtype
    )
    return state._replace(
        names=new_state.names,
        counts=in_buffer_of(new_state.counts, state.counts),
        numbers=in_buffer_of(new_state.numbers, state.numbers),
        windows=jax.tree.map(in_buffer_of, new_state.windows, state.windows),
    )


def _units_clipped_row(
    state: ClipState, outcomes: list[tuple[Block, Outcome]], units_clipped: Array
) -> Array:
    """The share of clipped units of each leaf. A leaf that is missing in this step
    keeps its last share, while `clipped_recently` counts the step as one that clipped
    nothing.
    """
    # Without units the state has no such row.
    if not state.names.unit_leaves:
        return units_clipped
    is_present = np.zeros(state.norm.size, bool)
    for block, _ in outcomes:
        is_present[block.positions] = True
    if is_present.all():
        return units_clipped
    is_present = is_present.reshape(state.norm.shape)
    return jnp.where(is_present, units_clipped, state.units_clipped)


def _outcome_of_state(
    state: ClipState, outcomes: list[tuple[Block, Outcome]], decide: Decide
) -> Outcome:
    """One outcome with an entry for each norm of the state. A leaf that is missing in
    the step keeps its norm, limit and factor, and was not clipped.
    """
    new_outcomes = []
    # The positions of all their entries in a row of the state. One outcome may be of
    # several leaves, each of which adds its positions.
    positions = []
    # Leaves whose units have one shape and are split over the same mesh axes are
    # reduced together.
    outcomes_of_type: dict[Any, list[tuple[Block, Outcome]]] = {}
    for block, outcome in outcomes:
        if block.leaf_of_units is None:
            new_outcomes.append(outcome)
            positions.append(block.positions)
        else:
            units_type = jax.typeof(outcome.norm), block.mesh_axes_of_units
            outcomes_of_type.setdefault(units_type, []).append((block, outcome))
    for (_, mesh_axes_of_units), unit_outcomes in outcomes_of_type.items():
        norms = jnp.stack([outcome.norm for _, outcome in unit_outcomes])
        limits = jnp.stack([outcome.limit for _, outcome in unit_outcomes])
        new_outcomes.append(furthest_units(norms, limits, mesh_axes_of_units, decide))
        positions += [block.positions for block, _ in unit_outcomes]
    zeros = jnp.zeros_like(state.norm)
    unchanged = Outcome(
        norm=state.norm,
        limit=state.limit,
        factor=state.factor,
        clipped=jnp.zeros_like(zeros, bool),
        is_sound=jnp.ones_like(zeros, bool),
        units_clipped=zeros,
    )
    if not new_outcomes:
        return unchanged
    if state.names.is_global:
        (outcome,) = new_outcomes
        # A tree of one array with units has one outcome for them, [1].
        return jax.tree.map(lambda row: row.reshape(state.norm.shape), outcome)
    all_positions = np.concatenate(positions)

    def merged_row(old: Array, *arrays: Array) -> Array:
        entries = blocks.concatenated(arrays).astype(old.dtype)
        return blocks.put(old, all_positions, entries)

    return jax.tree.map(merged_row, unchanged, *new_outcomes)


# ------------------------------------------------------------------------------- units


class UnitNumbers(NamedTuple):
    """Numbers of units, [leaves, ...units]. After a reduction: the numbers of the
    furthest unit of each leaf, [leaves], and the count of all its units that were
    clipped.
    """

    severity: Array  # see `severity`, and inf for a broken norm
    norm: Array
    limit: Array
    factor: Array
    clipped_count: Array  # of a single unit 0 or 1


def furthest_units(
    norms: Array, limits: Array, mesh_axes_of_units: tuple[str, ...], decide: Decide
) -> Outcome:
    """For each leaf, the outcome of its unit furthest above its limit, with the share
    of its units that were clipped. All units have one shape.

    Norms and limits are [leaves, ...units]. `mesh_axes_of_units` are the mesh axes that
    split the units.
    """
    norms, limits = materialized_on_gpu([norms, limits])
    # Decided again for all leaves at once. Stacking the decisions of each leaf would
    # write more arrays to memory.
    outcome = decide(norms, limits).outcome
    numbers = UnitNumbers(
        # inf for a broken unit, so that it counts as the furthest. Of sound units it is
        # finite.
        severity=jnp.where(outcome.is_sound, severity(norms, limits), jnp.inf),
        norm=norms,
        limit=limits,
        factor=outcome.factor,
        # An integer, since a float32 that is raised by 1 for each unit stops at 2^24.
        # The finished count may become a float.
        clipped_count=outcome.clipped.astype(jnp.int32),
    )
    # JAX has no derivative of a reduction of several arrays.
    furthest = _furthest(lax.stop_gradient(numbers), range(1, norms.ndim))
    if mesh_axes_of_units:
        # Each device has found the furthest of its own units, and counted them. It puts
        # its numbers at its place among zeros, so the sum has those of all devices:
        # [numbers, leaves, devices].
        columns = [column.astype(norms.dtype) for column in furthest]
        numbers_here = jnp.stack(columns)[..., None]
        placed_numbers = mesh.placed_among_zeros(
            numbers_here, ((), (), mesh_axes_of_units)
        )
        all_numbers = lax.psum(placed_numbers, mesh_axes_of_units)
        furthest = _furthest(UnitNumbers(*all_numbers), (1,))
    unit_count = norms.size // len(norms) * mesh.device_count(mesh_axes_of_units)
    units_clipped = furthest.clipped_count.astype(norms.dtype) / unit_count
    is_sound = furthest.severity < jnp.inf
    return Outcome(
        norm=furthest.norm,
        limit=furthest.limit,
        factor=furthest.factor,
        clipped=is_sound & (units_clipped > 0),
        is_sound=is_sound,
        units_clipped=units_clipped,
    )


def severity(norm: Array, limit: Array) -> Array:
    """How far norms are above their limits, for a comparison: sqrt(norm / limit), and
    below 0 for a finite norm without a limit. NaN where norm or limit is NaN, or where
    both are inf.
    """
    smallest = jnp.finfo(norm.dtype).tiny
    # A limit of 0 would hide all differences, so it counts as the smallest number. The
    # ratio of finite numbers may overflow. The ratio of their roots does not.
    positive_limit = jnp.maximum(limit, smallest)
    root_of_ratio = jnp.sqrt(norm) / jnp.sqrt(positive_limit)
    # Finite norms without a limit come last. Among them -1 / norm rises with the norm.
    has_no_limit = (limit == jnp.inf) & (norm < jnp.inf)
    positive_norm = jnp.maximum(norm, smallest)
    return jnp.where(has_no_limit, -1 / positive_norm, root_of_ratio)


def _furthest(numbers: UnitNumbers, axes: Sequence[int]) -> UnitNumbers:
    """The numbers of the unit with the largest severity along some axes, and how many
    units were clipped. If several units tie, the longest norm counts, and NaN is longer
    than any number.

    On one device a reduction of all numbers together finds them. It saves 27 of 858
    kernels of a step of a scanned decoder with AGC on an H100, and costs 0.8 % more
    bytes on a TPU v5e. XLA cannot split it over a mesh without a collective for each
    number. So there each number has a maximum of its own.
    """
    if mesh_types.is_on_one_device(numbers.severity):
        return _furthest_by_one_reduction(numbers, axes)
    return _furthest_by_maxima(numbers, axes)


def _furthest_by_one_reduction(
    numbers: UnitNumbers, axes: Sequence[int]
) -> UnitNumbers:
    """`_furthest` on one device, by comparing two units at a time."""
    # Every unit is further above its limit than this one.
    start = UnitNumbers(*[column.dtype.type(0) for column in numbers])
    start = start._replace(severity=numbers.severity.dtype.type(-np.inf))
    return lax.reduce(numbers, start, _furthest_of_two, axes)


def _furthest_of_two(left: UnitNumbers, right: UnitNumbers) -> UnitNumbers:
    """The numbers of the one of two units that is further above its limit, and the sum
    of their counts.
    """
    # Only NaN differs from itself.
    is_left_longer = (left.norm >= right.norm) | (left.norm != left.norm)
    is_equal = left.severity == right.severity
    is_left = (left.severity > right.severity) | (is_equal & is_left_longer)
    further = jax.tree.map(partial(lax.select, is_left), left, right)
    return further._replace(clipped_count=left.clipped_count + right.clipped_count)


def _furthest_by_maxima(numbers: UnitNumbers, axes: Sequence[int]) -> UnitNumbers:
    """`_furthest` on a mesh, by a maximum for each number. If several units tie, limit
    and factor are the largest among them too, and may come from other units.
    """
    largest = jnp.max(numbers.severity, axes, keepdims=True)
    is_furthest = numbers.severity == largest
    columns = [largest.reshape(len(largest))]
    for column in (numbers.norm, numbers.limit, numbers.factor):
        columns.append(_largest_or_nan(column, is_furthest, axes))
    # Counts are floats here, so that one collective joins them with other sums of
    # floats. XLA sums a single array in a tree, so float32 does not stop at 2^24 (seen
    # on a CPU).
    clipped_count = numbers.clipped_count.astype(numbers.norm.dtype)
    return UnitNumbers(*columns, clipped_count=jnp.sum(clipped_count, axes))


def _largest_or_nan(column: Array, is_candidate: Array, axes: Sequence[int]) -> Array:
    """The largest candidate of a column along some axes, NaN if one is NaN. All numbers
    must be at least 0.
    """
    # On a CPU XLA drops NaN from a maximum of many floats (20,000), and from one over
    # devices. As integers, these numbers have the same order, with NaN last.
    integer = np.dtype(f"int{8 * column.dtype.itemsize}")
    bits = lax.bitcast_convert_type(jnp.abs(column), integer)
    largest = jnp.max(jnp.where(is_candidate, bits, 0), axes)
    return lax.bitcast_convert_type(largest, column.dtype)
