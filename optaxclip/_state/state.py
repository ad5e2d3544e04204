"""What a clipper knows after a step: two arrays, what its rule remembers, and names.

    counts    step, clipped, nonfinite
    numbers   norm, limit, factor, clipped_recently and, in clippers of units,
              units_clipped

Each of these is a row with one entry for each norm. Behind them are the rows of what
the rule remembers (`packed.py`). The names of the norms are not arrays: they belong to
the structure of the state.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from .. import _trees as trees
from .._arguments.checks import check_one_model
from .._arguments.reprs import call_repr, has_numbers
from .._trees import PyTree
from .packed import InWindows, Packed, is_mark, packed, row_at, rows_from, unpacked


class StateRows(NamedTuple):
    """All rows that every clipper has. The first three are ints, in `counts`."""

    step: Array
    clipped: Array
    nonfinite: Array
    norm: Array
    limit: Array
    factor: Array
    clipped_recently: Array
    units_clipped: Array  # only in clippers of units


COUNT_ROW_NAMES = StateRows._fields[:3]
NUMBER_ROW_NAMES = StateRows._fields[3:]


# ----------------------------------------------------------------------- names of norms


# The names of the layers of a stacked leaf. None for a single norm.
LayerNames = Mapping[str, None] | None


class Names(NamedTuple):
    """The names of the norms of a state, in the order of its entries.

    Dicts of None have no leaves. `optax.tree` looks into every field of a state, and
    would take strings for leaves.
    """

    # {"blocks/w": {"0": None, "1": None}, "b": None}: the names of norms, each with the
    # names of its layers. The norm of everything has the name "".
    layer_names_of_norm: Mapping[str, LayerNames]
    # The names of leaves with units. In `layer_names_of_norm` they stand last.
    unit_leaves: Mapping[str, None] = {}
    # The structure of `windows`, with `InWindows` for each of its arrays. None if
    # unknown: `jax.export` does not store it.
    windows_structure: PyTree = ()

    @property
    def is_global(self) -> bool:
        """Whether there is one norm of everything, or none, as for an empty tree. Then
        rows are scalars.
        """
        return self.layer_names_of_norm in ({"": None}, {})

    @property
    def number_row_names(self) -> tuple[str, ...]:
        """The names of the first rows of `numbers`. Rows of a memory have none."""
        return NUMBER_ROW_NAMES if self.unit_leaves else NUMBER_ROW_NAMES[:-1]

    # JAX compares names where it compares the structures of two states. This is not
    # transitive: 2 layers equal 6, and 6 equal 3, but 2 do not equal 3.
    # `windows_structure` is left out: an exported state has None there.
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Names):
            return NotImplemented
        layer_names_of_norm = self.layer_names_of_norm
        other_layer_names_of_norm = other.layer_names_of_norm
        # All states of a run share the object.
        if layer_names_of_norm is other_layer_names_of_norm:
            return True
        # As lists, since dicts are equal in any order.
        if [*layer_names_of_norm] != [*other_layer_names_of_norm]:
            return False
        if [*self.unit_leaves] != [*other.unit_leaves]:
            return False
        # One state may hold a part of the other's layers. Then it holds a part of every
        # leaf.
        layer_names = layer_names_of_norm.values()
        other_layer_names = other_layer_names_of_norm.values()
        return all(map(_may_be_part, layer_names, other_layer_names)) or all(
            map(_may_be_part, other_layer_names, layer_names)
        )

    # A tuple has a != of its own.
    def __ne__(self, other: object) -> bool:
        return not self == other

    # So that equal names have equal hashes, the hash is constant.
    def __hash__(self) -> int:
        return 0


def _may_be_part(layer_names: LayerNames, all_layer_names: LayerNames) -> bool:
    """Whether the layers of a leaf may be those that one device holds of all layers:
    the same ones, or inside shard_map a share. So 3 layers may be a share of 6, and 4
    may not (test_states_in_optax.py).
    """
    if not layer_names or not all_layer_names:
        return layer_names == all_layer_names
    if len(layer_names) == len(all_layer_names):
        return layer_names == all_layer_names
    return len(all_layer_names) % len(layer_names) == 0


# ---------------------------------------------------------------------------- the state


class NormEntry(NamedTuple):
    """What a state knows of one norm, or of the layers of a stacked leaf."""

    norm: Array
    limit: Array
    factor: Array
    clipped: Array
    clipped_recently: Array
    nonfinite: Array
    units_clipped: Any
    memory: PyTree


class _ClipStateFields(NamedTuple):
    names: Any
    counts: Any
    numbers: Any
    windows: Any = ()


def _row_property(name: str) -> property:
    """The property that shows a row of a state."""

    def row(state: "ClipState") -> Any:
        if name in COUNT_ROW_NAMES:
            array = state.counts
            index = COUNT_ROW_NAMES.index(name)
        else:
            array = state.numbers
            index = NUMBER_ROW_NAMES.index(name)
        return row_at(array, index, state.names.is_global)

    return property(row)


class ClipState(_ClipStateFields):
    """What a clipper knows after a step.

    Its numbers are the rows of two arrays, which properties show by name. A row has an
    entry for each norm: shape [N], or [] for one norm of everything. Each layer of a
    stacked leaf is a norm. For the units of a leaf the state keeps a summary: norm,
    limit and factor of the unit that is furthest above its limit. Entries of a leaf
    that is missing in a step stay as they are. `metrics(state)` and `state.by_name()`
    give the entries by name.

    Attributes:
      step: int32[]: updates seen.
      norm: float[N]: before clipping, in the last step.
      limit: float[N]: what the norm was held against.
      factor: float[N]: what the updates were multiplied by. 1 where nothing was done, 0
        only where they were made 0. Within the normal numbers of its dtype.
      clipped: int32[N]: finite steps that changed the updates. For a leaf with units:
        steps that changed at least one unit.
      clipped_recently: float[N]: the share of clipped steps among about the last 100.
        For a leaf with units: the mean of `units_clipped` over them.
      nonfinite: int32[N]: steps whose norm was NaN or inf, or whose limit was NaN.
      units_clipped: float[N]: the share of the units of each leaf that the last step
        changed. () in clippers without units.
      memory: a tuple: what the rule remembers of the norms of whole leaves, in arrays
        [N, ...], and then of the units of each leaf.
      names: the names of the norms. To JAX they are not leaves.
      counts: int32[rows, N], or int32[rows]: `step`, `clipped`, `nonfinite`, and then
        the integers of `memory` that have one number for each norm.
      numbers: float32[rows, N], or float32[rows] (float64 where a leaf has 64 bits):
        `norm`, `limit`, `factor`, `clipped_recently`, in a clipper of units
        `units_clipped`, and then the floats of `memory` that have one number for each
        norm.
      windows: the other arrays of `memory`, such as the last 100 norms.
    """

    __slots__ = ()

    def __new__(cls, names: Any, counts: Any, numbers: Any, windows: Any = ()) -> Self:
        if isinstance(names, PlaceholderNames) and names.names_of_state is not None:
            names = names.names_of_state
            windows = _one_for_each_window(windows, names)
        return super().__new__(cls, names, counts, numbers, windows)

    norm = _row_property("norm")
    limit = _row_property("limit")
    factor = _row_property("factor")
    clipped = _row_property("clipped")
    clipped_recently = _row_property("clipped_recently")
    nonfinite = _row_property("nonfinite")

    _steps = _row_property("step")
    _units_clipped = _row_property("units_clipped")

    @property
    def step(self) -> Any:
        # All norms have seen the same number of steps.
        return self._steps if self.names.is_global else self._steps[..., 0]

    @property
    def units_clipped(self) -> Any:
        return self._units_clipped if self.names.unit_leaves else ()

    @property
    def memory(self) -> tuple[PyTree, ...]:
        is_global = self.names.is_global
        number_row_count = len(self.names.number_row_names)
        return unpacked(
            self.windows,
            counts=rows_from(self.counts, len(COUNT_ROW_NAMES), is_global),
            numbers=rows_from(self.numbers, number_row_count, is_global),
        )

    def __repr__(self) -> str:
        has_known_names = isinstance(self.names, Names)
        names = [*self.names.layer_names_of_norm] if has_known_names else self.names
        # `jax.tree.map` may leave scalars in the place of the arrays.
        arrays = self.counts, self.numbers
        has_rows = all(has_numbers(array) and array.ndim for array in arrays)
        if has_known_names and has_rows:
            shown = (*COUNT_ROW_NAMES, *self.names.number_row_names, "memory")
        else:
            shown = ("counts", "numbers", "windows")
        fields = {name: getattr(self, name) for name in shown}
        return call_repr(type(self).__name__, {**fields, "names": names})

    def by_name(self, *, layers: bool = False) -> dict[str, NormEntry]:
        """Returns what the state knows of each norm: its own `norm`, `limit`, `factor`,
        `clipped`, `clipped_recently`, `nonfinite`, `units_clipped` and `memory`.

        The name of a tensor is its path ("blocks/0/w"), that of a group its label, and
        that of the norm of everything is "".

        Args:
          layers: whether each layer of a stacked leaf has an entry of its own, named by
            its number: "blocks/w/0", or "blocks/w/0/3" for layer 0 and expert 3.
            Otherwise the layers of a leaf share an entry, whose fields are vectors.
            Inside shard_map the layers of each device are named "blocks/w/0",
            "blocks/w/1" and so on, from 0 on each device.

        Raises:
          ValueError: a state of several models, as under `jax.vmap`, a leaf with the
            name of a layer of another, or rows that `jax.shard_map` joined from several
            devices.
        """
        call_for_many_models = "jax.vmap(optaxclip.ClipState.by_name)(opt_state)"
        check_one_model("by_name: the state", self, call_for_many_models)
        memory_of_leaves, *memories_of_units = self.memory
        memory_of_units = dict(zip(self.names.unit_leaves, memories_of_units))
        rows = {name: getattr(self, name) for name in NormEntry._fields[:-1]}
        entries = {}
        spans = spans_of_names(self, by_layer=layers, call="by_name")
        for name, span in spans.items():
            # A number for one norm, and a vector for the layers of a leaf.
            position: Any = span.start
            if self.names.is_global:
                position = ...
            elif not layers and self.names.layer_names_of_norm[name] is not None:
                position = slice(*span)
            if name in memory_of_units:
                memory = memory_of_units[name]
            else:
                memory = entries_at(memory_of_leaves, position)
            entries[name] = NormEntry(**entries_at(rows, position), memory=memory)
        return entries


class RecordState(ClipState):
    """What `record_norm` knows after a step: a `ClipState` whose limits are inf. Its
    type tells `metrics` that no clipper made it.
    """

    __slots__ = ()


def state_of_rows(
    names: Names, rows: StateRows, memory: tuple[PyTree, ...], dtype: DTypeLike
) -> ClipState:
    """The state with these rows, its numbers cast to a dtype. `memory` is a tuple: the
    memory of all whole leaves, and then the memory of the units of each leaf.
    """
    counts = [getattr(rows, name) for name in COUNT_ROW_NAMES]
    numbers = [getattr(rows, name) for name in names.number_row_names]
    if names.unit_leaves:
        # A row has one number for each leaf, and a memory of units one for each unit.
        # So no part of this memory becomes a row.
        memory_rows = Packed(memory, counts=[], numbers=[])
    else:
        row_type = jax.ShapeDtypeStruct(rows.norm.shape, dtype)
        memory_rows = packed(memory, row_type)
    structure = jax.tree.map(lambda _: InWindows(), memory_rows.windows)
    numbers = [number.astype(dtype) for number in numbers + memory_rows.numbers]
    return ClipState(
        names._replace(windows_structure=structure),
        counts=jnp.stack(counts + memory_rows.counts),
        numbers=jnp.stack(numbers),
        windows=memory_rows.windows,
    )


def clip_states(tree: PyTree) -> list[ClipState]:
    """All states of clippers and recorders in the state of an optimizer."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, ClipState))
    return [leaf for leaf in leaves if isinstance(leaf, ClipState)]


# ------------------------------------------------------------------ its entries by name


class Span(NamedTuple):
    """Where the entries of a name are in a row of a state."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """How many entries these are."""
        return self.stop - self.start


def spans_of_names(
    state: ClipState, *, by_layer: bool = False, call: str = "update"
) -> dict[str, Span]:
    """The entries of each name, in the order of a row. With `by_layer` each layer has a
    name of its own, such as "w/0/3" for layer 0 and expert 3 of "w".

    Raises:
      ValueError: a leaf is called "w/0", and a stack "w" has a layer 0. Or the rows of
        several devices were joined, so that they repeat each norm for each device.
    """
    layer_names_of_norm = state.names.layer_names_of_norm
    if state.names.is_global:
        return dict.fromkeys(layer_names_of_norm, Span(0, 1))
    layer_counts = [len(names) for names in layer_names_of_norm.values() if names]
    layer_count = sum(layer_counts)
    single_count = len(layer_names_of_norm) - len(layer_counts)
    row_length = state.numbers.shape[-1]
    # If the state has one stack and nothing else, rows joined from devices are still in
    # the order of layers. Only the names of the layers are missing.
    is_one_stack = len(layer_counts) == 1 and single_count == 0
    if by_layer or not is_one_stack:
        _check_not_joined(row_length, layer_count + single_count, call)
    # Inside shard_map a device may have a share of all layers, such as of the heads of
    # `qk_clip`.
    layer_count_here = row_length - single_count
    spans: dict[str, Span] = {}
    start = 0
    for name, layer_names in layer_names_of_norm.items():
        stop = start + 1
        if layer_names is not None:
            # All stacks are split alike: a device has the same share of each.
            stop = start + len(layer_names) * layer_count_here // layer_count
        new_spans = {name: Span(start, stop)}
        if by_layer and layer_names is not None:
            new_spans = {}
            for index, layer_name in zip(range(start, stop), layer_names):
                new_spans[f"{name}/{layer_name}"] = Span(index, index + 1)
        if spans.keys() & new_spans:
            leaves = trees.listed(layer_names_of_norm)
            raise ValueError(
                f"{call}: layers=True: a leaf of {leaves} has the name of a layer of "
                "another leaf. Rename it, or use layers=False."
            )
        spans |= new_spans
        start = stop
    return spans


def _check_not_joined(row_length: int, norm_count: int, call: str) -> None:
    """Refuses a row with more entries than norms."""
    if row_length > norm_count:
        raise ValueError(
            f"{call}: the state must have one entry for each norm, but joins the rows "
            f"of several devices: {row_length} entries for {norm_count} norms. Read it "
            "inside shard_map, or give the clipper mesh_axes=, the PartitionSpecs of "
            "the leaves, and the state the spec P()."
        )


def names_on_this_device(state: ClipState) -> Names:
    """The names of a state, with those of the layers that this device has. A state of
    one leaf keeps the names of all its layers.
    """
    names = state.names
    # Rows of one leaf that shard_map joins from devices are in the order of its layers.
    # Rows of several leaves are not: `spans_of_names` refuses them, since they are more
    # than the names.
    if len(names.layer_names_of_norm) == 1:
        return names
    names_here = dict(names.layer_names_of_norm)
    for name, span in spans_of_names(state).items():
        layer_names = names.layer_names_of_norm[name]
        if layer_names is not None:
            names_here[name] = dict.fromkeys([*layer_names][: span.size])
    # The same object, which `Names.__eq__` compares first.
    if names_here == names.layer_names_of_norm:
        return names
    return names._replace(layer_names_of_norm=names_here)


def entries_at(rows: PyTree, position: Any) -> Any:
    """The tree of rows, with the entries at a position in the place of each row."""
    return jax.tree.map(lambda row: row[position], rows)


# ----------------------------------------------------------------------- a state in JAX


def state_of_placeholder() -> ClipState:
    """The state for `optax.tree_map_params`, which calls `init` without parameters: one
    leaf for each field, and placeholder names.
    """
    return ClipState(PlaceholderNames(), jnp.zeros(()), jnp.zeros(()), jnp.zeros(()))


class PlaceholderNames:
    """The names of a state that `optax.tree_map_params` makes.

    It compares the structure of `init(placeholder)` with that of a real state, maps
    over both, and rebuilds the first. Which names there are depends on the parameters,
    which a placeholder does not have. So:

        init(placeholder)   a state of one leaf for each field, with this object
        map with a state    JAX compares the names, and this object keeps the state's
        rebuild             `ClipState` takes the names that were kept

    tests/core/test_states_in_optax.py fails without it.
    """

    def __init__(self) -> None:
        self.names_of_state: Names | None = None

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Names):
            self.names_of_state = other
        return isinstance(other, (Names, PlaceholderNames))

    def __hash__(self) -> int:
        return 0


def _one_for_each_window(windows: PyTree, names: Names) -> PyTree:
    """The windows of a state that `optax.tree_map_params` made. It maps all windows as
    one leaf, such as to one sharding, which is repeated here for each window.
    """
    # The windows of a real state are a tuple, as `memory` is. optax puts one value in
    # their place.
    if type(windows) is tuple or names.windows_structure is None:
        return windows
    return jax.tree.map(
        lambda mark: windows if isinstance(mark, InWindows) else mark,
        names.windows_structure,
        is_leaf=is_mark,
    )


def _names_to_json(static_fields: tuple[Names]) -> bytes:
    (names,) = static_fields
    return json.dumps([names.layer_names_of_norm, names.unit_leaves]).encode()


def _names_from_json(text: bytes) -> tuple[Names]:
    layer_names_of_norm, unit_leaves = json.loads(text)
    # A structure of NamedTuples is not JSON. The next step makes it anew.
    return (Names(layer_names_of_norm, unit_leaves, windows_structure=None),)


# JAX compares two dataclass nodes by their fields and `names`, and not by their types.
# So clippers and recorders list their fields in different orders: their structures
# differ, and JAX does not take the state of a recorder for that of a clipper.
DATA_FIELDS = {
    ClipState: ["counts", "numbers", "windows"],
    RecordState: ["windows", "counts", "numbers"],
}

for state_type, fields in DATA_FIELDS.items():
    # As a NamedTuple alone it would be a node in which JAX takes each name for a leaf.
    jax.tree_util.register_dataclass(
        state_type, data_fields=fields, meta_fields=["names"]
    )
    jax.export.register_pytree_node_serialization(
        state_type,
        serialized_name=f"optaxclip.{state_type.__name__}",
        serialize_auxdata=_names_to_json,
        deserialize_auxdata=_names_from_json,
    )
