"""Devices: over which mesh axes a leaf is split, and the collective of a clipper.

Under jit (Auto or Explicit meshes, any sharding) arrays are global, sums are right as
they stand, and XLA adds the collectives. Inside `shard_map` and `pmap` a program sees
only its device's part. Sums must then be added over just the mesh axes that a leaf is
split over, and leaves that every device holds must count once. `mesh_axes` says which:

    "auto"               nothing outside shard_map and pmap. Inside a typed shard_map
                         (check_vma=True), what the type of each leaf says. Where there
                         are no types (pmap, check_vma=False) each leaf counts as
                         complete, which is right for gradients after `lax.pmean`
    "x", ("x", "y")      every leaf is split over these axes, as ZeRO's shards in pmap
    tree of              for each leaf or part of the tree, as the in_specs of
    PartitionSpec        shard_map. P() where every device holds the whole leaf
    None                 each device separately, without any collective. In a tree
                         None is P()

Where there are types, it is an error to name a mesh axis along which a leaf is the
same, or to leave out one along which it varies. Norms that keep axes of a leaf (units,
stacked layers) need a PartitionSpec where that leaf is split, because a name alone does
not say which of its axes is split.

In this module `axes` are axes of an array, `mesh_axes` is the option, `names` and
`mesh_axes_of_...` are names of mesh axes, and `leaf_name` is the path of a leaf. In
errors `argument` is "clip_by_global_norm: mesh_axes", and `argument_and_value` ends
with "mesh_axes='x'".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec

from .. import _trees as trees
from .._arguments.checks import shown
from .._arguments.prefixes import Prefix, lookup, prefix_table
from .._trees import PyTree, Shape, listed
from .mesh_types import (
    AxisNames,
    entries_of,
    has_types,
    manual_axes,
    typed_as,
    varying,
    varying_over,
)

# "auto", None, a name, a tuple of names, or a tree prefix of PartitionSpec
MeshAxes: TypeAlias = (
    "str | PartitionSpec | Mapping[Any, MeshAxes] | Sequence[MeshAxes] | None"
)


class Split(NamedTuple):
    """Which manual mesh axes split a leaf."""

    names: AxisNames = ()
    # For each axis of the leaf the names of those that split it. None where only the
    # names are known: neither a type nor a name says which axis is split.
    names_by_axis: Sequence[AxisNames] | None = None
    # "clip_by_tensor_norm: mesh_axes='x' says that the leaf 'w'"
    error_start: str = ""

    def of_norm(self, shape: Shape, summed_axes: tuple[int, ...] | None) -> SplitOfNorm:
        """Which of the mesh axes split the axes that a norm sums (None: all of them),
        and which split the others. `shape` is that of the leaf's part on this device.

        Raises:
          ValueError: the norm keeps axes, and only the names of mesh axes are known.
        """
        # Which axis is split does not matter where all are summed.
        if summed_axes is None or len(summed_axes) == len(shape):
            return SplitOfNorm(mesh_axes_of_summed=self.names)
        if not self.names:
            return SplitOfNorm()
        if self.names_by_axis is None:
            example = ", ".join(map(repr, self.names))
            raise ValueError(
                f"{self.error_start} of shape {shape} is split over "
                f"{listed(self.names)}, but not which of its dimensions is split. Its "
                "norms are taken over some of them only: give a tree of "
                "PartitionSpecs, such as "
                f"mesh_axes=jax.sharding.PartitionSpec({example})."
            )
        # Units of [in, out] with P("x", "y") are summed over x. Each device along y has
        # the units of its own outputs.
        mesh_axes_of_summed: AxisNames = ()
        mesh_axes_of_kept: list[AxisNames] = [()] * len(shape)
        for axis, names in enumerate(self.names_by_axis):
            if axis in summed_axes:
                mesh_axes_of_summed += names
            else:
                mesh_axes_of_kept[axis] = names
        if not any(mesh_axes_of_kept):
            mesh_axes_of_kept = []
        return SplitOfNorm(mesh_axes_of_summed, tuple(mesh_axes_of_kept))


class SplitOfNorm(NamedTuple):
    """Which mesh axes split the axes of a leaf that a norm sums, and those that it
    keeps.
    """

    mesh_axes_of_summed: AxisNames = ()
    # For each axis of the leaf its mesh axes, () for a summed axis. () if no kept axis
    # is split.
    mesh_axes_of_kept: tuple[AxisNames, ...] = ()


# ----------------------------------------------------------------- the option mesh_axes


def _is_entry(x: object) -> bool:
    """Whether `x` is one entry of `mesh_axes`: None, "auto", a name, a tuple of names
    or a PartitionSpec.
    """
    # A NamedTuple of strings is a tree of names, so the type is tuple itself.
    if type(x) is tuple and x:
        return all(isinstance(name, str) for name in x)
    return x is None or isinstance(x, (PartitionSpec, str))


def static_mesh_axes(mesh_axes: MeshAxes | Prefix, call: str) -> MeshAxes | Prefix:
    """`mesh_axes` as a hashable value. A None in a tree means P(): not split.

    Raises:
      TypeError: a list of names, which would be a tree with one name for each leaf, or
        something that is not a mesh axis.
    """
    if _is_entry(mesh_axes) or isinstance(mesh_axes, Prefix):
        return mesh_axes
    for entry in jax.tree.leaves(mesh_axes, is_leaf=_is_entry):
        if not _is_entry(entry):
            raise TypeError(
                f"{call}: mesh_axes must be 'auto', None, names of mesh axes, or a "
                f"tree of PartitionSpecs, got {shown(entry)}."
            )
    # An empty list may be an empty tree.
    if isinstance(mesh_axes, list) and {type(entry) for entry in mesh_axes} == {str}:
        raise TypeError(
            f"{call}: mesh_axes must be a name or a tuple of names, got "
            f"{shown(mesh_axes)}: write mesh_axes={tuple(mesh_axes)!r}."
        )
    entries = []
    for path, entry in prefix_table(mesh_axes, _is_entry).entries:
        entries.append((path, PartitionSpec() if entry is None else entry))
    return Prefix(tuple(entries))


def global_shapes(splits_of_leaves: Sequence[Split], tree: PyTree) -> list[Any]:
    """The shape of each leaf over all devices. None where it is not known which axis is
    split.
    """
    shapes: list[Any] = []
    for split, array in zip(splits_of_leaves, jax.tree.leaves(tree)):
        if not split.names:
            shapes.append(jnp.shape(array))
        elif split.names_by_axis is None:
            shapes.append(None)
        else:
            shapes.append(global_shape(jnp.shape(array), split.names_by_axis))
    return shapes


def global_shape(
    shape: Sequence[Any], names_by_axis: Sequence[AxisNames]
) -> tuple[Any, ...]:
    """The shape over all devices of an array whose part here has this shape. For each
    axis the manual mesh axes that split it, or () if none is split.
    """
    # Only manual mesh axes make the shapes of a program smaller.
    sizes = list(shape)
    for axis, names in enumerate(names_by_axis):
        sizes[axis] *= device_count(names)
    return tuple(sizes)


def splits(mesh_axes: MeshAxes | Prefix, tree: PyTree, call: str) -> list[Split]:
    """How each leaf is split.

    Raises:
      ValueError: a mesh axis that is not bound, or that contradicts the type of a leaf,
        or a leaf with unreduced mesh axes.
    """
    # No mesh is set, as under plain jit: the common case, which looks at no leaf.
    if mesh_axes == "auto" and jax.sharding.get_abstract_mesh().empty:
        return [Split()] * len(jax.tree.leaves(tree))
    leaves = jax.tree.leaves_with_path(tree)
    argument = f"{call}: mesh_axes"
    mesh_axes = static_mesh_axes(mesh_axes, call)
    if isinstance(mesh_axes, Prefix):
        entries = lookup(mesh_axes, tree, argument)
    else:
        # One name, one spec or "auto" is for every leaf.
        entries = [mesh_axes] * len(leaves)
    splits_of_leaves = []
    for (path, array), entry in zip(leaves, entries):
        split = _split(trees.path_name(path), array, entry, argument)
        splits_of_leaves.append(split)
    return splits_of_leaves


def _split(leaf_name: str, array: Array, entry: Any, argument: str) -> Split:
    """How one leaf is split, by its entry of `mesh_axes`."""
    array_type = jax.typeof(array)
    # The mesh axes over which a sum is still to be taken, by the types of shard_map and
    # by the specs of Explicit meshes.
    unreduced = {
        *array_type.manual_axis_type.unreduced,
        *array_type.sharding.spec.unreduced,
    }
    if unreduced:
        raise ValueError(
            f"{argument}: the leaf {leaf_name!r} is not yet summed over "
            f"{listed(unreduced)}: reshard it, or use lax.psum, before clipping."
        )
    if entry is None:
        return Split()
    argument_and_value = f"{argument}={shown(entry)}"
    names, names_by_axis = _names_of_split(array, entry, argument)
    _check_names(argument_and_value, leaf_name, array, names)
    error_start = f"{argument_and_value} says that the leaf {leaf_name!r}"
    return Split(names, names_by_axis, error_start)


def _check_names(
    argument_and_value: str, leaf_name: str, array: Array, names: AxisNames
) -> None:
    """Raises ValueError if mesh axes are named twice, or if the leaf's type says that
    other ones split it.
    """
    manual = manual_axes()
    if len(set(names)) < len(names):
        raise ValueError(f"{argument_and_value} names a mesh axis twice.")
    # In pmap and with check_vma=False there are no types to contradict.
    if not has_types(manual):
        return
    # psum would count this leaf once for each device.
    replicated = set(names) & (set(manual) - varying(array))
    if replicated:
        raise ValueError(
            f"{argument_and_value}: the leaf {leaf_name!r} is the same on all devices "
            f"along {listed(replicated)}, so its sum must not be added up there: leave "
            "the axis out, or use mesh_axes='auto'."
        )
    # Each device would have another norm, and clip by another factor.
    forgotten = varying(array) - set(names)
    if forgotten:
        raise ValueError(
            f"{argument_and_value}: the leaf {leaf_name!r} also differs along "
            f"{listed(forgotten)}: name that axis, or use mesh_axes='auto', or "
            "lax.pmean it first if it should be the same."
        )


def _names_of_split(
    array: Array, entry: Any, argument: str
) -> tuple[AxisNames, list[AxisNames] | None]:
    """The manual mesh axes that split a leaf, by its entry of `mesh_axes`. Also a list
    with the mesh axes of each array axis, or None where only the names are known.
    """
    if isinstance(entry, PartitionSpec):
        names_by_axis = _names_of_spec(array, entry, argument)
        return tuple(chain.from_iterable(names_by_axis)), names_by_axis
    if entry == "auto":
        # Without types each leaf counts as complete: nothing is known.
        names = tuple(sorted(varying(array))) if has_types(manual_axes()) else ()
    else:
        # Names alone, as "x": every leaf is split, along whichever axis.
        names = names_in(entry)
        check_bound(names, argument)
    return names, None


def _names_of_spec(array: Array, spec: PartitionSpec, argument: str) -> list[AxisNames]:
    """For each axis of an array the manual mesh axes that split it."""
    spec_names = set(chain.from_iterable(map(names_in, spec)))
    bound = {name for name in spec_names if _is_bound(name)}
    names_by_axis: list[AxisNames] = [()] * jnp.ndim(array)
    # Outside shard_map specs change nothing, so they may name any axis.
    if not bound and not manual_axes():
        return names_by_axis
    mesh_names = jax.sharding.get_abstract_mesh().axis_names
    unknown = spec_names - bound - set(mesh_names)
    if unknown:
        raise ValueError(
            f"{argument}={shown(spec)} names {listed(unknown)}, but there is no "
            f"such axis in the mesh, which has {listed(mesh_names)}."
        )
    if len(spec) > jnp.ndim(array):
        raise ValueError(
            f"{argument}={shown(spec)} has more entries than a leaf of shape "
            f"{jnp.shape(array)} has dimensions."
        )
    for axis, names in enumerate(map(names_in, spec)):
        # Other mesh axes belong to jit, which adds the collectives.
        names_by_axis[axis] = tuple(name for name in names if name in bound)
    return names_by_axis


def names_in(entry: str | tuple[str, ...] | None) -> AxisNames:
    """The names in an entry of a PartitionSpec: None, "x" or ("x", "y")."""
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def _is_bound(name: str) -> bool:
    """Whether a name is a manual mesh axis, or the axis name of a vmap."""
    # The mesh does not list axis names of vmap, which lax.axis_size finds.
    try:
        lax.axis_size(name)
    except NameError:
        return False
    return True


def check_bound(names: AxisNames, argument: str) -> None:
    """Raises ValueError for a name that is not a mesh axis here."""
    for name in names:
        if not _is_bound(name):
            if manual_axes():
                hint = f"There is {listed(manual_axes())}."
            else:
                hint = "Outside shard_map and pmap there is none, and none is needed."
            raise ValueError(
                f"{argument}={shown(name)}: there is no such axis here. {hint}"
            )


# ---------------------------------------------------------------------- collectives


def device_count(names: Iterable[str]) -> int:
    """The number of devices along some mesh axes together."""
    # 1 for no names, as outside shard_map and pmap.
    return math.prod(int(lax.axis_size(name)) for name in names)


def joined_over_devices(
    collective: Callable[..., Any],
    arrays: Sequence[Array],
    names_of_arrays: Sequence[AxisNames],
) -> list[Array]:
    """psum or pmax of each array over its own mesh axes. All arrays have one dtype.
    Those that share their mesh axes travel as one vector, in one collective.
    """
    joined = list(arrays)
    # The indices of the arrays that form a vector. A dict keeps its order. The order of
    # a set may differ between processes, which would then wait for different
    # collectives.
    indices_of_vector: dict[Any, list[int]] = {}
    for index, (array, names) in enumerate(zip(arrays, names_of_arrays)):
        if names:
            array = varying_over(array, names)
            joined[index] = array
            # A vector has one type. An array that an Explicit mesh splits cannot be
            # reshaped, so it is a vector of its own.
            is_sharded = any(jax.typeof(array).sharding.spec)
            key = names, varying(array), index if is_sharded else None
            indices_of_vector.setdefault(key, []).append(index)
    for (names, _, _), indices in indices_of_vector.items():
        if len(indices) == 1:
            joined[indices[0]] = collective(joined[indices[0]], names)
            continue
        flat = [joined[index].reshape(-1) for index in indices]
        vector = collective(jnp.concatenate(flat), names)
        array_types = [jax.typeof(arrays[index]) for index in indices]
        for index, array in zip(indices, entries_of(vector, array_types)):
            joined[index] = array
    return joined


def placed_among_zeros(numbers: Array, mesh_axes_of_kept: Sequence[AxisNames]) -> Array:
    """An array of the global shape: this device's numbers at their place, 0 elsewhere.
    Its psum is the numbers of all devices.

    The last axes of `numbers` are the axes of the leaf, each split over its entry of
    `mesh_axes_of_kept`.
    """
    leading_count = numbers.ndim - len(mesh_axes_of_kept)
    shape = global_shape(numbers.shape, [()] * leading_count + [*mesh_axes_of_kept])
    starts = [np.int32(0)] * leading_count
    starts += _starts(numbers.shape[leading_count:], mesh_axes_of_kept)
    zeros = typed_as(jnp.zeros(shape, numbers.dtype), jax.typeof(numbers))
    return lax.dynamic_update_slice(zeros, numbers, starts)


def local_layers(layers: Array, mesh_axes_of_kept: Sequence[AxisNames]) -> Array:
    """The layers of this device, out of an array for the layers of all devices."""
    sizes = list(layers.shape)
    for axis, names in enumerate(mesh_axes_of_kept):
        sizes[axis] //= device_count(names)
    return lax.dynamic_slice(layers, _starts(sizes, mesh_axes_of_kept), sizes)


def _starts(sizes: Sequence[int], mesh_axes_of_kept: Sequence[AxisNames]) -> list[Any]:
    """Where this device's part of an array begins along each axis. The part has these
    sizes.
    """
    starts: list[Any] = []
    for size, names in zip(sizes, mesh_axes_of_kept):
        # The index of this device along these mesh axes. The first axis is the slowest.
        # It is an int32 with x64 too, and all starts must have one dtype.
        starts.append(lax.axis_index(names) * size if names else np.int32(0))
    return starts


# ------------------------------------------------------------------------ for debugging


def check_replicated(tree: PyTree, mesh_axes: str | tuple[str, ...]) -> Array:
    """Whether all devices along some mesh axes hold the same values. Raises nothing if
    they do not.

    For debugging inside pmap and shard_map, where JAX cannot tell. A gradient that is
    the same on all devices is whole, so leave the axis out of a clipper's `mesh_axes`.

    Args:
      tree: a pytree of arrays.
      mesh_axes: the name of a mesh axis, or several.

    Returns:
      A bool scalar, the same on all devices. NaN equals NaN, and 0 differs from -0.
      An empty tree is replicated.

    Raises:
      ValueError: a mesh axis that is not bound here.
      TypeError: something that is neither a name nor a tuple of names.

    Example:
      >>> def is_same(x):
      ...     return optaxclip.check_replicated(x, "devices")
      >>> x = jnp.ones((jax.local_device_count(), 2))
      >>> print(jax.pmap(is_same, axis_name="devices")(x)[0])
      True
    """
    names = (mesh_axes,) if isinstance(mesh_axes, str) else mesh_axes
    if type(names) is not tuple or not all(isinstance(name, str) for name in names):
        raise TypeError(
            "check_replicated: mesh_axes must be the name of a mesh axis or a tuple of "
            f"names, got {shown(mesh_axes)}."
        )
    check_bound(names, "check_replicated: mesh_axes")
    different = jnp.zeros((), bool)
    for leaf in map(jnp.asarray, jax.tree.leaves(tree)):
        # A gradient of an integer has no bits.
        if leaf.dtype == jax.dtypes.float0:
            continue
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        # Numbers of 4 bits have no bytes of their own.
        if leaf.dtype.itemsize == 1:
            leaf = leaf.astype(np.float32)
        # Bytes are compared, so 0 differs from -0. NaN has several forms.
        if jnp.issubdtype(leaf.dtype, np.inexact):
            leaf = jnp.where(jnp.isnan(leaf), jnp.nan, leaf)
        numbers = varying_over(jnp.atleast_1d(leaf).view(np.uint8), names)
        different |= jnp.any(lax.pmax(numbers, names) != lax.pmin(numbers, names))
    return ~different
