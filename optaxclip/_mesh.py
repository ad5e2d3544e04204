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
    None                 each device separately, without any collective

A mesh axis that contradicts the type of a leaf raises. Norms that keep axes of a leaf
(units, stacked layers) need a PartitionSpec where that leaf is split, because a name
alone does not tell which of its axes is.

In this module `axes` are the axes of an array, and `mesh_axes` are names of mesh axes.
"""

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.sharding import NamedSharding, PartitionSpec

from . import _trees as trees
from ._checks import shown
from ._prefixes import Prefix, lookup, prefix_table
from ._trees import PyTree, listed

# "auto", None, a name, a tuple of names, or a tree prefix of PartitionSpec
MeshAxes: TypeAlias = (
    "str | PartitionSpec | Mapping[Any, MeshAxes] | Sequence[MeshAxes] | None"
)
FORMS = "'auto', None, names of mesh axes, or a tree of PartitionSpecs"
Names = tuple[str, ...]
# How a leaf is split: the mesh axes that split its summed axes, and for each of its
# axes the mesh axes that split it if it is kept. () if no kept axis is split.
Split = tuple[Names, tuple[Names, ...]]
NOT_SPLIT: Split = ((), ())


# ---------------------------------------------------------------------------- types


def manual_axes() -> Names:
    """The mesh axes along which this program sees its own part only."""
    return jax.sharding.get_abstract_mesh().manual_axes


def has_types(manual: Names) -> bool:
    """Whether JAX tracks here which values differ between devices.

    It does not in pmap and with check_vma=False. There even axis_index has the type of
    a value that is the same everywhere.
    """
    return bool(manual) and varying(lax.axis_index(manual)) >= set(manual)


def varying(tree: PyTree) -> frozenset[str]:
    """The manual mesh axes over which some array of a tree may differ."""
    mesh_axes: frozenset[str] = frozenset()
    for array in jax.tree.leaves(tree):
        mesh_axes |= jax.typeof(array).manual_axis_type.varying
    return mesh_axes


def varying_over(x: jax.Array, mesh_axes: Iterable[str]) -> jax.Array:
    """The value, typed as one that differs along these mesh axes."""
    manual = manual_axes()
    # pcast refuses an axis along which the value varies already.
    missing = tuple(n for n in mesh_axes if n in manual and n not in varying(x))
    if missing and has_types(missing):
        return lax.pcast(x, missing, to="varying")
    return x


def varying_as(value: jax.Array, array_type: ShapedArray) -> jax.Array:
    """The value, typed as differing between devices where a type says so."""
    return varying_over(value, sorted(array_type.manual_axis_type.varying))


def typed_as_varying(models: Any, values: Any) -> Any:
    """The arrays of a tree, typed as differing between devices along all mesh axes over
    which some array of another tree, `models`, does.

    In shard_map the gradient by parameters of any other type comes summed over devices,
    and the examples in it cannot be told apart.
    """
    # Outside shard_map the leaves of `models` may be no arrays.
    mesh_axes = sorted(varying(models)) if manual_axes() else ()
    if not mesh_axes:
        return values
    return jax.tree.map(lambda x: varying_over(x, mesh_axes), values)


def narrowed_as(values: Any, model: jax.Array) -> Any:
    """The arrays of a tree, typed as the same on all devices along the mesh axes along
    which `model` is. They are the same there, and hold no NaN. Only their type lost it,
    in a vector with numbers that differ.
    """

    def narrowed(value: jax.Array) -> jax.Array:
        too_many = tuple(sorted(varying(value) - varying(model)))
        return lax.pmax(value, too_many) if too_many else value

    return jax.tree.map(narrowed, values) if manual_axes() else values


def split_as(value: jax.Array, array_type: ShapedArray) -> jax.Array:
    """The value, split over the Explicit axes of the mesh as a type says. Array axes
    beyond those of the type are not split.
    """
    return resharded(value, array_type.sharding.spec)


def types_of(function: Callable[..., Any], *args: Any) -> Any:
    """The types of the arrays that a function returns.

    `jax.eval_shape` drops the shardings of a mesh that has both Explicit and Auto axes,
    as seen in JAX 0.10.2.
    """
    program, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    return jax.tree.unflatten(jax.tree.structure(shapes), program.out_avals)


def typed_as(tree: PyTree, array_type: ShapedArray) -> Any:
    """The arrays of a tree with a type that `jax.typeof` or `types_of` gave.

    `lax.scan` and shard_map compare the types of a state before and after a step.
    """
    # Without a mesh, as under plain jit, no type says anything of devices.
    if jax.sharding.get_abstract_mesh().empty:
        return tree

    def typed(value: jax.Array) -> jax.Array:
        return varying_as(split_as(value, array_type), array_type)

    return jax.tree.map(typed, tree)


def resharded(value: jax.Array, spec: Sequence[Any] = ()) -> jax.Array:
    """The value, split over Explicit mesh axes along its first axes as `spec` says, and
    whole along the others.
    """
    mesh = jax.typeof(value).sharding.mesh
    # Outside jax.set_mesh only the type knows the mesh.
    mesh = mesh if mesh.explicit_axes else jax.sharding.get_abstract_mesh()
    # In Auto meshes the sharding is no part of a type, and XLA chooses it.
    if not mesh.explicit_axes:
        return value
    return jax.reshard(value, NamedSharding(mesh, PartitionSpec(*spec)))


def entries_of(
    vector: jax.Array,
    array_types: Sequence[ShapedArray],
    entry: Callable[[jax.Array, int], jax.Array] = operator.getitem,
) -> list[jax.Array]:
    """Arrays of these types, one after the other out of a vector. `entry` takes out a
    single number.
    """
    arrays = []
    start = 0
    for array_type in array_types:
        stop = start + math.prod(array_type.shape)
        if array_type.shape:
            array = vector[start:stop].reshape(array_type.shape)
            arrays.append(split_as(array, array_type))
        else:
            arrays.append(entry(vector, start))
        start = stop
    return arrays


def is_on_one_device(x: Any) -> bool:
    """Whether no part of the value can be on another device.

    Under jit the type of a value names the mesh that it lives on, though not how an
    Auto mesh splits it.
    """
    # Manual axes do not count: inside shard_map each device has an array of its own.
    mesh = jax.typeof(x).sharding.mesh
    split_by_jit = set(mesh.axis_names) - set(mesh.manual_axes)
    return all(mesh.shape[name] == 1 for name in split_by_jit)


# ----------------------------------------------------------------- the option mesh_axes


def static_mesh_axes(mesh_axes: Any, call: str) -> Any:
    """`mesh_axes` as a hashable value.

    Raises:
      TypeError: a list of names, which would be a tree with one name for each leaf, or
        an array.
    """
    if _is_spec(mesh_axes) or isinstance(mesh_axes, Prefix):
        return mesh_axes
    for value in jax.tree.leaves(mesh_axes, is_leaf=_is_spec):
        # Static arguments must be hashable, which arrays are not.
        if isinstance(value, (np.ndarray, jax.Array)):
            raise TypeError(f"{call}: mesh_axes must be {FORMS}, got {shown(value)}.")
    if isinstance(mesh_axes, list) and all(isinstance(x, str) for x in mesh_axes):
        raise TypeError(
            f"{call}: mesh_axes must be a name or a tuple of names, got "
            f"{shown(mesh_axes)}: write mesh_axes={tuple(mesh_axes)!r}."
        )
    return prefix_table(mesh_axes, _is_spec)


def mesh_axes_of_leaves(mesh_axes: Any, tree: PyTree, call: str) -> list[Any]:
    """The entry of `mesh_axes` for each leaf."""
    mesh_axes = static_mesh_axes(mesh_axes, call)
    if isinstance(mesh_axes, Prefix):
        return lookup(mesh_axes, tree, f"{call}: mesh_axes")
    # One name, one spec or "auto" is for every leaf.
    return [mesh_axes] * len(jax.tree.leaves(tree))


def global_shapes(mesh_axes: Any, tree: PyTree, call: str) -> list[Any]:
    """The shape of each leaf over all devices. None where it is not known which axis is
    split.
    """
    arrays = jax.tree.leaves(tree)
    shapes: list[Any] = []
    for array, entry in zip(arrays, mesh_axes_of_leaves(mesh_axes, tree, call)):
        # Only manual axes make a shape smaller. Else arrays are global.
        mesh_axes_by_axis = _mesh_axes_by_axis(array, entry, f"{call}: mesh_axes")
        if isinstance(entry, PartitionSpec):
            shape = []
            for size, names in zip(jnp.shape(array), mesh_axes_by_axis):
                shape.append(size * device_count(names))
            shapes.append(tuple(shape))
        # A type names the mesh axes of a leaf, but not the array axis that each splits.
        elif any(mesh_axes_by_axis):
            shapes.append(None)
        else:
            shapes.append(jnp.shape(array))
    return shapes


def splits(mesh_axes: Any, tree: PyTree, axes: Sequence[Any], call: str) -> list[Split]:
    """For each leaf, how it is split if its norm is taken over its axes `axes` (None:
    all).

    Raises:
      ValueError: a mesh axis that is not bound, or that contradicts the type of a leaf;
        a name where a PartitionSpec is needed; a leaf with unreduced mesh axes.
    """
    # No mesh is set, as under plain jit: the common case, which looks at no leaf.
    if mesh_axes == "auto" and jax.sharding.get_abstract_mesh().empty:
        return [NOT_SPLIT] * len(axes)
    paths_and_arrays = jax.tree.leaves_with_path(tree)
    entries = mesh_axes_of_leaves(mesh_axes, tree, call)
    splits_of_leaves = []
    for (path, array), entry, summed_axes in zip(paths_and_arrays, entries, axes):
        split = _split(trees.name(path), array, entry, summed_axes, call)
        splits_of_leaves.append(split)
    return splits_of_leaves


def _split(
    name: str, array: jax.Array, entry: Any, summed_axes: Any, call: str
) -> Split:
    """How one leaf is split, by its entry of `mesh_axes`."""
    argument = f"{call}: mesh_axes"
    array_type = jax.typeof(array)
    # Terms of a sum that is still to be taken. Types of shard_map say so, and specs of
    # Explicit meshes.
    unreduced = {
        *array_type.manual_axis_type.unreduced,
        *array_type.sharding.spec.unreduced,
    }
    if unreduced:
        raise ValueError(
            f"{argument}: the leaf {name!r} is not yet summed over "
            f"{listed(unreduced)}: reshard it, or use lax.psum, before clipping."
        )
    if entry is None:
        return NOT_SPLIT
    argument = f"{argument}={shown(entry)}"
    mesh_axes_by_axis = _mesh_axes_by_axis(array, entry, f"{call}: mesh_axes")
    mesh_axes = tuple(chain.from_iterable(mesh_axes_by_axis))
    _check_against_type(argument, name, array, mesh_axes)
    # Which axis is split does not matter where all are summed.
    if summed_axes is None or len(summed_axes) == jnp.ndim(array):
        return mesh_axes, ()
    if not mesh_axes:
        return NOT_SPLIT
    if not isinstance(entry, PartitionSpec):
        example = ", ".join(map(repr, mesh_axes))
        raise ValueError(
            f"{argument} tells that the leaf {name!r} of shape "
            f"{jnp.shape(array)} is split over {listed(mesh_axes)}, but not which of "
            "its dimensions is, and its norms are taken over some of them only: give a "
            "tree of PartitionSpecs, such as "
            f"mesh_axes=jax.sharding.PartitionSpec({example})."
        )
    # Units of [in, out] with P("x", "y") are summed over x. Each device along y has
    # the units of its own outputs.
    summed_over: Names = ()
    kept_over: list[Names] = [()] * jnp.ndim(array)
    for axis, names in enumerate(mesh_axes_by_axis):
        if axis in summed_axes:
            summed_over += names
        else:
            kept_over[axis] = names
    return summed_over, tuple(kept_over) if any(kept_over) else ()


def _check_against_type(
    argument: str, name: str, array: jax.Array, mesh_axes: Names
) -> None:
    """Raises ValueError for mesh axes over which a leaf cannot be split."""
    manual = manual_axes()
    if len(set(mesh_axes)) < len(mesh_axes):
        raise ValueError(f"{argument} names a mesh axis twice.")
    # In pmap and with check_vma=False there are no types to contradict.
    if not has_types(manual):
        return
    # psum would count this leaf once for each device.
    replicated = set(mesh_axes) & (set(manual) - varying(array))
    if replicated:
        raise ValueError(
            f"{argument}: the leaf {name!r} is the same on all devices "
            f"along {listed(replicated)}, so its sum must not be added up there: leave "
            "the axis out, or use mesh_axes='auto'."
        )
    # Each device would have another norm, and clip by another factor.
    forgotten = varying(array) - set(mesh_axes)
    if forgotten:
        raise ValueError(
            f"{argument}: the leaf {name!r} also differs along "
            f"{listed(forgotten)}: name that axis, or use mesh_axes='auto', or "
            "lax.pmean it first if it should be the same."
        )


def _mesh_axes_by_axis(array: Any, entry: Any, argument: str) -> list[Names]:
    """For each axis of an array the manual mesh axes that split it, by an entry of
    `mesh_axes`. A list of one where it is not known which axis is split.
    """
    manual = manual_axes()
    if isinstance(entry, PartitionSpec):
        # Outside shard_map specs change nothing, so they may name any axis.
        if not manual:
            return [()] * jnp.ndim(array)
        mesh_names = jax.sharding.get_abstract_mesh().axis_names
        unknown = set(chain.from_iterable(map(names_in, entry))) - set(mesh_names)
        if unknown:
            raise ValueError(
                f"{argument}={shown(entry)} names {listed(unknown)}, but there is no "
                f"such axis in the mesh, which has {listed(mesh_names)}."
            )
        if len(entry) > jnp.ndim(array):
            raise ValueError(
                f"{argument}={shown(entry)} has more entries than a leaf of shape "
                f"{jnp.shape(array)} has dimensions."
            )
        mesh_axes_by_axis: list[Names] = [()] * jnp.ndim(array)
        for axis, names in enumerate(map(names_in, entry)):
            # Axes that jit looks after need nothing here.
            mesh_axes_by_axis[axis] = tuple(name for name in names if name in manual)
        return mesh_axes_by_axis
    if entry == "auto":
        # Without types each leaf counts as complete: nothing is known.
        return [tuple(sorted(varying(array)))] if has_types(manual) else [()]
    # Names alone, as "x": every leaf is split, along whichever axis.
    names = names_in(entry)
    check_bound(names, argument)
    return [names]


def names_in(entry: Any) -> Names:
    """The names in an entry of a PartitionSpec: None, "x" or ("x", "y")."""
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def check_bound(names: Names, argument: str) -> None:
    """Raises ValueError for what is not the name of a mesh axis here."""
    for name in names:
        if not isinstance(name, str):
            raise ValueError(f"{argument} must be {FORMS}, got {shown(name)}.")
        # The mesh does not list axis names of vmap, which lax.axis_size finds.
        try:
            lax.axis_size(name)
        except NameError:
            if manual_axes():
                hint = f"There is {listed(manual_axes())}."
            else:
                hint = (
                    "Outside shard_map and pmap no mesh axes are needed: "
                    "mesh_axes='auto' is right."
                )
            raise ValueError(
                f"{argument}={shown(name)}: there is no such axis here. {hint}"
            ) from None


def _is_spec(x: Any) -> bool:
    # A NamedTuple of strings is a tree of names, so the type is tuple itself.
    if type(x) is tuple and x:
        return all(isinstance(name, str) for name in x)
    return x is None or isinstance(x, (PartitionSpec, str))


# ---------------------------------------------------------------------- collectives


def device_count(mesh_axes: Iterable[str]) -> int:
    """The number of devices along some mesh axes together."""
    # 1 for no names, as outside shard_map and pmap.
    return math.prod(int(lax.axis_size(name)) for name in mesh_axes)


def joined(
    collective: Callable[..., Any],
    arrays: Sequence[jax.Array],
    mesh_axes: Sequence[Names],
) -> list[jax.Array]:
    """psum or pmax of each array over its own mesh axes. All arrays that share their
    mesh axes travel as one vector, in one collective.
    """
    totals = list(arrays)
    # The indices of the arrays of each vector. A dict keeps its order, where the order
    # of a set may differ between processes, which would then wait for different
    # collectives.
    vectors: dict[Any, list[int]] = {}
    for index, (array, names) in enumerate(zip(arrays, mesh_axes)):
        if names:
            array = varying_over(array, names)
            totals[index] = array
            # A vector has one type. An array that an Explicit mesh splits cannot be
            # reshaped, so it is a vector of its own.
            is_sharded = any(jax.typeof(array).sharding.spec)
            key = names, varying(array), index if is_sharded else None
            vectors.setdefault(key, []).append(index)
    for (names, _, _), indices in vectors.items():
        if len(indices) == 1:
            totals[indices[0]] = collective(totals[indices[0]], names)
            continue
        flat = [totals[index].reshape(-1) for index in indices]
        vector = collective(jnp.concatenate(flat), names)
        array_types = [jax.typeof(arrays[index]) for index in indices]
        for index, total in zip(indices, entries_of(vector, array_types)):
            totals[index] = total
    return totals


def among_zeros(numbers: jax.Array, kept_over: Sequence[Names]) -> jax.Array:
    """The numbers that this device has for its layers, among zeros for the layers of
    other devices.

    The last axes of `numbers` are the axes of the leaf, each split over its entry of
    `kept_over`.
    """
    first = numbers.ndim - len(kept_over)
    shape = list(numbers.shape)
    for axis, names in enumerate(kept_over, first):
        shape[axis] *= device_count(names)
    starts = [0] * first + _starts(numbers.shape[first:], kept_over)
    zeros = typed_as(jnp.zeros(shape, numbers.dtype), jax.typeof(numbers))
    return lax.dynamic_update_slice(zeros, numbers, starts)


def local_layers(layers: jax.Array, kept_over: Sequence[Names]) -> jax.Array:
    """The layers of this device, out of an array for the layers of all devices."""
    sizes = list(layers.shape)
    for axis, names in enumerate(kept_over):
        sizes[axis] //= device_count(names)
    return lax.dynamic_slice(layers, _starts(sizes, kept_over), sizes)


def _starts(sizes: Sequence[int], kept_over: Sequence[Names]) -> list[Any]:
    """Where the part of this device, of these sizes, begins along each axis."""
    starts: list[Any] = []
    for size, names in zip(sizes, kept_over):
        # The index of this device along these mesh axes. The first axis is the slowest.
        starts.append(lax.axis_index(names) * size if names else 0)
    return starts


def check_replicated(tree: PyTree, mesh_axes: str | tuple[str, ...]) -> jax.Array:
    """Returns whether all devices along some mesh axes hold the same values.

    For debugging inside pmap and shard_map, where JAX cannot tell. A gradient that is
    the same on all devices is whole, and no mesh axis is named for it in `mesh_axes`.

    Args:
      tree: a pytree of arrays.
      mesh_axes: the name of a mesh axis, or several.

    Returns:
      A bool scalar, the same on all devices. NaN equals NaN. An empty tree is
      replicated.

    Raises:
      ValueError: a mesh axis that is not bound here.

    Example:
      >>> def differs(x):
      ...     return optaxclip.check_replicated(x, "devices")
      >>> x = jnp.ones((jax.local_device_count(), 2))
      >>> print(jax.pmap(differs, axis_name="devices")(x)[0])
      True
    """
    names = names_in(mesh_axes)
    check_bound(names, "check_replicated: mesh_axes")
    different = jnp.zeros((), bool)
    for leaf in map(jnp.asarray, jax.tree.leaves(tree)):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        # Bits are compared, so NaN equals itself and 0 differs from -0. Of complex
        # numbers each byte, since without x64 there is no uint64.
        size = 1 if jnp.iscomplexobj(leaf) else leaf.dtype.itemsize
        bits = varying_over(jnp.atleast_1d(leaf).view(f"uint{8 * size}"), names)
        different |= jnp.any(lax.pmax(bits, names) != lax.pmin(bits, names))
    return ~different
