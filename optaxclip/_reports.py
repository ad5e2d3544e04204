"""What a state keeps of a step.

norms of whole leaves   what was decided of each
units of a leaf         a summary: the unit that is furthest above its limit
-> Report               an entry for each norm of the state
-> next_state           its rows, and those of what the rule remembers
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from . import _blocks as blocks
from . import _mesh as mesh
from ._blocks import BlockLimits
from ._norms import Norms
from ._packed import Packed, PyTree, packed
from ._state import ClipState
from ._sums import written_by_a_gpu
from .rules._memory import count_up, in_place, moving_average


class Decision(NamedTuple):
    """What becomes of norms, elementwise."""

    # The root of the factor. Updates are multiplied by it twice, since the factor may
    # be below the normal numbers.
    root: Array
    factor: Array
    clipped: Array  # bool
    is_sound: Array  # bool: neither norm nor limit is broken


Decide = Callable[[Array, Array], Decision]  # of norms and limits


class Report(NamedTuple):
    """What a state keeps of the norms of a step. Each field has an entry for each norm
    of whole leaves, or for the units of each leaf.
    """

    norm: Array
    limit: Array
    factor: Array
    clipped: Array  # bool
    is_sound: Array  # bool: neither norm nor limit is broken
    share: Array  # float: which share of its units was clipped, 0 or 1 of a whole leaf


def next_state(
    state: ClipState,
    norms: Norms,
    limits: list[BlockLimits],
    decisions: list[Decision],
    decide: Decide,
) -> ClipState:
    """The state after a step."""
    steps = count_up(state.counts[0])
    if not limits:
        # A tree without leaves, or one in which all of them are missing.
        return state._replace(counts=jnp.asarray(state.counts).at[0].set(steps))
    report, is_present = _report(state, norms, limits, decisions, decide)
    memory = _memory_after(state, limits)
    if state.names.units:
        # Units have arrays of their own in a memory, of which none is a row.
        memory_rows = Packed(memory, counts=[], numbers=[])
    else:
        memory_rows = packed(memory, state.norm)
    counts = [
        steps,
        count_up(state.clipped, report.clipped),
        count_up(state.nonfinite, ~report.is_sound),
    ]
    recently = moving_average(state.clipped_recently, report.share, steps)
    numbers = [report.norm, report.limit, report.factor, recently]
    if state.names.units:
        numbers.append(report.share)
    dtype = state.numbers.dtype
    new_counts = jnp.stack(counts + memory_rows.counts)
    new_numbers = jnp.stack(
        [row.astype(dtype) for row in numbers + memory_rows.numbers]
    )
    if not is_present.all():
        # Norms that are missing in this step keep what was known of them.
        new_counts = jnp.where(is_present, new_counts, state.counts).at[0].set(steps)
        new_numbers = jnp.where(is_present, new_numbers, state.numbers)
    return state._replace(
        counts=in_place(new_counts, state.counts),
        numbers=in_place(new_numbers, state.numbers),
        windows=jax.tree.map(in_place, memory_rows.windows, state.windows),
    )


def _report(
    state: ClipState,
    norms: Norms,
    limits: list[BlockLimits],
    decisions: list[Decision],
    decide: Decide,
) -> tuple[Report, np.ndarray]:
    """The report of a step, with an entry for each norm of the state, and which of
    these are present in this step.
    """
    reports: list[Report] = []
    entries: list[np.ndarray] = []  # of the reports, in the state
    limits_of_units: list[BlockLimits] = []
    for of_block, decision in zip(limits, decisions):
        if of_block.block.unit_leaf is not None:
            limits_of_units.append(of_block)
            continue
        report = Report(
            norm=of_block.norm,
            limit=of_block.limit,
            factor=decision.factor,
            clipped=decision.clipped,
            is_sound=decision.is_sound,
            share=decision.clipped.astype(of_block.norm.dtype),
        )
        reports.append(report)
        entries.append(of_block.block.entries)
    for alike in _of_equal_shapes(norms, limits_of_units):
        reports.append(_summary(norms, alike, decide))
        entries += [of_block.block.entries for of_block in alike]
    shape = state.norm.shape
    places = np.concatenate(entries)
    is_present = np.zeros(shape, bool)
    is_present.reshape(-1)[places] = True
    rows = []
    for column in zip(*reports):
        row = blocks.concatenated(column)
        if state.names.is_global:
            rows.append(row.reshape(shape))
        else:
            zeros = mesh.typed_as(jnp.zeros(shape, row.dtype), jax.typeof(row))
            rows.append(blocks.put_entries(zeros, places, row))
    return Report(*rows), is_present


def _memory_after(state: ClipState, limits: list[BlockLimits]) -> tuple[PyTree, ...]:
    """What the rule remembers after a step, in the form of `ClipState.memory`."""
    memory_of_leaves, *memories_of_units = state.memory
    memory_of_unit_leaf = dict(zip(state.names.units, memories_of_units))
    memories = []
    entries = []
    for of_block in limits:
        if of_block.block.unit_leaf is None:
            memories.append(of_block.memory)
            entries.append(of_block.block.entries)
        else:
            memory_of_unit_leaf[of_block.block.unit_leaf] = of_block.memory

    def with_parts(old: Array, *parts: Array) -> Array:
        """The memory of all norms, with that of the norms of this step."""
        if state.names.is_global:
            return parts[0]
        together = jnp.concatenate(blocks.typed_alike(parts))
        old = mesh.typed_as(old, jax.typeof(together))
        return blocks.put_entries(old, np.concatenate(entries), together)

    # Constant limits and trees of limits have no memory.
    if jax.tree.leaves(memory_of_leaves) and memories:
        memory_of_leaves = jax.tree.map(with_parts, memory_of_leaves, *memories)
    return memory_of_leaves, *memory_of_unit_leaf.values()


# ----------------------------------------------------------------- summaries of units


def _of_equal_shapes(
    norms: Norms, limits_of_units: list[BlockLimits]
) -> list[list[BlockLimits]]:
    """Leaves whose units have one shape, for one reduction of all of them."""
    alike: dict[Any, list[BlockLimits]] = {}
    for of_block in limits_of_units:
        key = jax.typeof(of_block.norm), blocks.units_over(norms, of_block.block)
        alike.setdefault(key, []).append(of_block)
    return list(alike.values())


class Columns(NamedTuple):
    """Numbers of units, [leaves, ...units], or of one unit of each leaf, [leaves]."""

    ratio: Array  # how far the norm is above its limit
    norm: Array
    limit: Array
    factor: Array
    clipped: Array  # 1 or 0, or how many were clipped


def _summary(norms: Norms, alike: list[BlockLimits], decide: Decide) -> Report:
    """What a state keeps of the units of some leaves of equal shape: of each leaf norm
    and limit of the unit that is furthest above its limit, what becomes of it, and the
    share of units that were clipped.
    """
    stacks = [
        jnp.stack([of_block.norm for of_block in alike]),
        jnp.stack([of_block.limit for of_block in alike]),
    ]
    norm, limit = written_by_a_gpu(stacks)
    # Decided again for all leaves at once. To stack the decisions of each leaf would be
    # more to write.
    decision = decide(norm, limit)
    largest = jnp.finfo(norm.dtype).max
    # A limit of 0 would hide all differences, so it counts as tiny.
    ratio = jnp.minimum(norm / jnp.maximum(limit, 2.0**-60), largest)
    # Units without a limit are below all others, and among them -1 / norm rises with
    # the norm.
    ratio = jnp.where(limit == jnp.inf, jnp.maximum(-1 / norm, -largest), ratio)
    # A broken unit is the furthest.
    ratio = jnp.where(decision.is_sound, ratio, jnp.inf)
    columns = Columns(
        ratio=ratio,
        norm=norm,
        limit=limit,
        factor=decision.factor,
        clipped=decision.clipped.astype(norm.dtype),
    )
    # JAX has no derivative of a reduction of several arrays.
    furthest = _furthest(lax.stop_gradient(columns), range(1, norm.ndim))
    mesh_axes = blocks.units_over(norms, alike[0].block)
    if mesh_axes:
        # Each device knows its own units.
        table = jnp.stack(furthest)[..., None]
        tables = lax.psum(mesh.among_zeros(table, ((), (), mesh_axes)), mesh_axes)
        furthest = _furthest(Columns(*tables), (1,))
    unit_count = norm.size // len(alike) * mesh.device_count(mesh_axes)
    share = furthest.clipped / unit_count
    is_sound = furthest.ratio < jnp.inf
    return Report(
        norm=furthest.norm,
        limit=furthest.limit,
        factor=furthest.factor,
        clipped=is_sound & (share > 0),
        is_sound=is_sound,
        share=share,
    )


def _furthest(columns: Columns, axes: Sequence[int]) -> Columns:
    """The numbers of the unit with the largest ratio along some axes, and how many
    units were clipped.
    """
    # On a mesh one reduction of all columns would take a collective for each.
    if not mesh.is_on_one_device(columns.ratio):
        most = jnp.max(columns.ratio, axes, keepdims=True)
        is_furthest = columns.ratio == most
        rows = []
        for column in columns[:-1]:
            rows.append(jnp.max(jnp.where(is_furthest, column, -jnp.inf), axes))
        return Columns(*rows, clipped=jnp.sum(columns.clipped, axes))
    starts = [column.dtype.type(0) for column in columns]
    starts[0] = starts[0] - np.inf
    return Columns(*lax.reduce(tuple(columns), tuple(starts), _further, axes))


def _further(left: Any, right: Any) -> Any:
    """Of two units the one that is further above its limit."""
    left = Columns(*left)
    right = Columns(*right)
    # Of equal ratios the longer norm counts, as it does on a mesh.
    is_level = left.ratio == right.ratio
    is_left = (left.ratio > right.ratio) | is_level & (left.norm >= right.norm)
    row = [lax.select(is_left, x, y) for x, y in zip(left[:-1], right[:-1])]
    return *row, left.clipped + right.clipped
