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

A mesh axis that contradicts the type of a leaf raises. Norms that keep dimensions of a
leaf (units, stacked layers) need a PartitionSpec where that leaf is split, because a
name alone does not tell which of its dimensions is.
"""

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.sharding import NamedSharding, PartitionSpec

from . import _trees as trees
from ._checks import shown
from ._trees import listed

# "auto", None, a name, a tuple of names, or a tree prefix of PartitionSpec
MeshAxes: TypeAlias = (
    "str | PartitionSpec | Mapping[Any, MeshAxes] | Sequence[MeshAxes] | None"
)
FORMS = "'auto', None, names of mesh axes, or a tree of PartitionSpecs"
Names = tuple[str, ...]


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


def varying(tree: Any) -> frozenset[str]:
    """The manual mesh axes over which some array of a tree may differ."""
    names: frozenset[str] = frozenset()
    for array in jax.tree.leaves(tree):
        names |= jax.typeof(array).manual_axis_type.varying
    return names


def varying_over(x: jax.Array, names: Iterable[str]) -> jax.Array:
    """The value, typed as one that differs along these mesh axes."""
    manual = manual_axes()
    # pcast refuses an axis along which the value varies already.
    missing = tuple(n for n in names if n in manual and n not in varying(x))
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
    names = sorted(varying(models)) if manual_axes() else ()
    if not names:
        return values
    return jax.tree.map(lambda x: varying_over(x, names), values)


def narrowed_as(values: Any, model: jax.Array) -> Any:
    """Arrays without NaN, typed as the same on all devices along the mesh axes along
    which `model` is. They are the same there. Their type lost it in a vector with
    numbers that differ.
    """

    def narrowed(value: jax.Array) -> jax.Array:
        too_many = tuple(sorted(varying(value) - varying(model)))
        return lax.pmax(value, too_many) if too_many else value

    return jax.tree.map(narrowed, values) if manual_axes() else values


def split_as(value: jax.Array, array_type: ShapedArray) -> jax.Array:
    """The value, split over the Explicit axes of the mesh as a type says. Dimensions
    beyond those of the type are not split.
    """
    return resharded(value, array_type.sharding.spec)


def typed_as(tree: Any, array_type: ShapedArray) -> Any:
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
    """The value, split over Explicit axes along its first dimensions as `spec` says,
    and whole along the others.
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


class Split(NamedTuple):
    """How one leaf is split over devices, seen from its norm."""

    summed: Names = ()  # mesh axes that split what is summed
    # For each dimension of the leaf, the mesh axes that split units or layers along it.
    kept: tuple[Names, ...] = ()

    def kept_names(self) -> Names:
        return tuple(chain.from_iterable(self.kept))


def static_axes(mesh_axes: Any, call: str) -> Any:
    """`mesh_axes` as a hashable value.

    Raises:
      TypeError: a list of names, which would be a tree with one name for each leaf, or
        an array.
    """
    if _is_spec(mesh_axes) or isinstance(mesh_axes, trees.Prefix):
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
    return trees.freeze(mesh_axes, _is_spec)


def specs_of(mesh_axes: Any, tree: Any, call: str) -> list[Any]:
    """The entry of `mesh_axes` for each leaf."""
    mesh_axes = static_axes(mesh_axes, call)
    if isinstance(mesh_axes, trees.Prefix):
        return trees.lookup(mesh_axes, tree, f"{call}: mesh_axes")
    # One name, one spec or "auto" is for every leaf.
    return [mesh_axes] * len(jax.tree.leaves(tree))


def whole_shapes(mesh_axes: Any, tree: Any, call: str) -> list[Any]:
    """For each leaf its shape over all devices, None where it is not known which
    dimension is split.
    """
    shapes: list[Any] = []
    for leaf, spec in zip(jax.tree.leaves(tree), specs_of(mesh_axes, tree, call)):
        # Only manual axes make a shape smaller. Else arrays are global.
        names_by_dim = _names_by_dim(leaf, spec, f"{call}: mesh_axes")
        if isinstance(spec, PartitionSpec):
            sizes = zip(jnp.shape(leaf), names_by_dim)
            shapes.append(tuple(size * axes_size(names) for size, names in sizes))
        # A type names the mesh axes of a leaf, but not the dimension that each splits.
        elif any(names_by_dim):
            shapes.append(None)
        else:
            shapes.append(jnp.shape(leaf))
    return shapes


def splits(mesh_axes: Any, tree: Any, dims: Sequence[Any], call: str) -> list[Split]:
    """For each leaf, how its norm over the dimensions `dims` (None: all) is split.

    Raises:
      ValueError: a mesh axis that is not bound, or that contradicts the type of a leaf;
        a name where a PartitionSpec is needed; a leaf with unreduced mesh axes.
    """
    # No mesh is set, as under plain jit: the common case, which looks at no leaf.
    if mesh_axes == "auto" and jax.sharding.get_abstract_mesh().empty:
        return [Split()] * len(dims)
    entries = jax.tree.leaves_with_path(tree)
    specs = specs_of(mesh_axes, tree, call)
    leaf_splits = []
    for (path, value), spec, summed_dims in zip(entries, specs, dims):
        split = _split(trees.name(path), value, spec, summed_dims, call)
        leaf_splits.append(split)
    return leaf_splits


def _split(
    name: str, value: jax.Array, spec: Any, summed_dims: Any, call: str
) -> Split:
    """How one leaf is split."""
    argument = f"{call}: mesh_axes"
    array_type = jax.typeof(value)
    manual = manual_axes()
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
    if spec is None:
        return Split()
    refused = f"{argument}={shown(spec)}"
    names_by_dim = _names_by_dim(value, spec, argument)
    names = tuple(chain.from_iterable(names_by_dim))
    if len(set(names)) < len(names):
        raise ValueError(f"{refused} names a mesh axis twice.")
    # pmap and check_vma=False have no types that could contradict.
    varying_names = varying(value) if has_types(manual) else set(names)
    # psum would count this leaf once for each device.
    replicated = set(names) & set(manual) - varying_names
    if replicated:
        raise ValueError(
            f"{refused}: the leaf {name!r} is the same on all devices "
            f"along {listed(replicated)}, so its sum must not be added up there: leave "
            "the axis out, or use mesh_axes='auto'."
        )
    # Each device would have another norm, and clip by another factor.
    forgotten = varying_names - set(names)
    if forgotten:
        raise ValueError(
            f"{refused}: the leaf {name!r} also differs along "
            f"{listed(forgotten)}: name that axis, or use mesh_axes='auto', or "
            "lax.pmean it first if it should be the same."
        )
    # Which dimension is split does not matter where all are summed.
    if summed_dims is None or len(summed_dims) == jnp.ndim(value):
        return Split(names)
    if names and not isinstance(spec, PartitionSpec):
        example = ", ".join(map(repr, names))
        raise ValueError(
            f"{refused} tells that the leaf {name!r} of shape "
            f"{jnp.shape(value)} is split over {listed(names)}, but not which of its "
            "dimensions is, and its norms are taken over some of them only: give a "
            "tree of PartitionSpecs, such as "
            f"mesh_axes=jax.sharding.PartitionSpec({example})."
        )
    # Units of [in, out] with P("x", "y") are summed over x. Each device along y has
    # the units of its own outputs.
    summed: list[str] = []
    kept: list[Names] = []
    for dim, names_of_dim in enumerate(names_by_dim):
        if dim in summed_dims:
            summed += names_of_dim
            kept.append(())
        else:
            kept.append(names_of_dim)
    return Split(tuple(summed), tuple(kept) if names else ())


def _names_by_dim(value: Any, spec: Any, argument: str) -> list[Names]:
    """The manual mesh axes of each dimension. One entry where that is not known."""
    manual = manual_axes()
    if isinstance(spec, PartitionSpec):
        # Outside shard_map specs change nothing, so they may name any axis.
        if not manual:
            return [()] * jnp.ndim(value)
        mesh_names = jax.sharding.get_abstract_mesh().axis_names
        unknown = set(chain.from_iterable(map(names_in, spec))) - set(mesh_names)
        if unknown:
            raise ValueError(
                f"{argument}={shown(spec)} names {listed(unknown)}, but there is no "
                f"such axis in the mesh, which has {listed(mesh_names)}."
            )
        if len(spec) > jnp.ndim(value):
            raise ValueError(
                f"{argument}={shown(spec)} has more entries than a leaf of shape "
                f"{jnp.shape(value)} has dimensions."
            )
        names_by_dim: list[Names] = [()] * jnp.ndim(value)
        for dim, entry in enumerate(spec):
            # Axes that jit looks after need nothing here.
            names_by_dim[dim] = tuple(n for n in names_in(entry) if n in manual)
        return names_by_dim
    if spec == "auto":
        # Without types each leaf counts as complete: nothing is known.
        return [tuple(sorted(varying(value)))] if has_types(manual) else [()]
    # Names alone, as "x": every leaf is split, along whichever dimension.
    names = names_in(spec)
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


def axes_size(names: Iterable[str]) -> int:
    """The number of devices along some mesh axes together."""
    # 1 for no names, as outside shard_map and pmap.
    return math.prod(int(lax.axis_size(name)) for name in names)


def joined(
    collective: Callable[..., Any], arrays: Sequence[jax.Array], axes: Sequence[Names]
) -> list[jax.Array]:
    """psum or pmax of each array over its own mesh axes, `axes`. All arrays that share
    their mesh axes travel as one vector, in one collective.
    """
    totals = list(arrays)
    # The indices of the arrays of each vector. A dict keeps its order, where the order
    # of a set may differ between processes, which would then wait for different
    # collectives.
    vectors: dict[Any, list[int]] = {}
    for index, (array, names) in enumerate(zip(arrays, axes)):
        if names:
            array = varying_over(array, names)
            totals[index] = array
            # A vector has one type. What an Explicit mesh splits cannot be reshaped, so
            # it is a vector of its own.
            is_split = any(jax.typeof(array).sharding.spec)
            key = names, varying(array), index if is_split else None
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


def at_own_place(numbers: jax.Array, split: Split) -> jax.Array:
    """The numbers that this device has for its layers, among zeros for the layers of
    other devices.

    The last dimensions of `numbers` are the dimensions of the leaf.
    """
    lead = numbers.ndim - len(split.kept)
    shape = list(numbers.shape)
    for dim, names in enumerate(split.kept):
        shape[lead + dim] *= axes_size(names)
    starts = [0] * lead + _starts(numbers.shape[lead:], split)
    zeros = typed_as(jnp.zeros(shape, numbers.dtype), jax.typeof(numbers))
    return lax.dynamic_update_slice(zeros, numbers, starts)


def own_part(layers: jax.Array, split: Split) -> jax.Array:
    """The layers of this device, out of an array for the layers of all devices."""
    sizes = list(layers.shape)
    for dim, names in enumerate(split.kept):
        sizes[dim] //= axes_size(names)
    return lax.dynamic_slice(layers, _starts(sizes, split), sizes)


def _starts(sizes: Sequence[int], split: Split) -> list[Any]:
    """Where the part of this device, of these sizes, begins along each dimension."""
    starts: list[Any] = []
    for size, names in zip(sizes, split.kept):
        # The index of this device along these axes. The first axis is the slowest.
        starts.append(lax.axis_index(names) * size if names else 0)
    return starts


def check_replicated(tree: Any, mesh_axes: str | tuple[str, ...]) -> jax.Array:
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
