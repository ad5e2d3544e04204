"""Types of arrays: along which mesh axes they vary, and how a mesh splits them.

Two parts of a type tell of devices. Inside a typed shard_map (check_vma=True) it names
the manual mesh axes along which a value may differ between devices. On an Explicit mesh
it has the sharding. Numbers that the library makes get the types of the arrays that
they belong to:

    varying_over         differs between devices along these mesh axes
    varying_as           differs where a type says so
    varying_as_any_of    differs where some array of another tree does
    narrowed_as          is the same on all devices where another array is
    resharded            is split over an Explicit mesh as a spec says
    resharded_as         is split as a type says
    typed_as             differs and is split as a type says

`names` are names of mesh axes.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax import Array, lax
from jax.core import ShapedArray
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from .._trees import PyTree

AxisNames = tuple[str, ...]


def manual_axes() -> AxisNames:
    """The mesh axes along which this program sees its own part only."""
    return jax.sharding.get_abstract_mesh().manual_axes


def has_types(manual: AxisNames) -> bool:
    """Whether JAX tracks here which values differ between devices.

    It does not in pmap and with check_vma=False. There even axis_index has the type of
    a value that is the same everywhere.
    """
    return bool(manual) and varying(lax.axis_index(manual)) >= set(manual)


def varying(tree: PyTree) -> frozenset[str]:
    """The manual mesh axes over which some array of a tree may differ."""
    names: frozenset[str] = frozenset()
    for array in jax.tree.leaves(tree):
        axis_type = jax.typeof(array).manual_axis_type
        names |= axis_type.varying
    return names


def varying_over(x: Array, names: Iterable[str]) -> Array:
    """The value, typed as one that differs along these mesh axes."""
    # pcast refuses an axis along which the value varies already.
    same_axes = set(manual_axes()) - varying(x)
    missing = tuple(name for name in names if name in same_axes)
    if missing and has_types(missing):
        return lax.pcast(x, missing, to="varying")
    return x


def varying_as(value: Array, array_type: ShapedArray) -> Array:
    """The value, typed as differing between devices where a type says so."""
    axis_type = array_type.manual_axis_type
    return varying_over(value, sorted(axis_type.varying))


def varying_as_any_of(values: PyTree, like: PyTree) -> Any:
    """The arrays of a tree, typed as differing between devices along all mesh axes over
    which some array of another tree, `like`, does.

    In shard_map the gradient by a parameter that differs stays separate on each device.
    JAX sums the gradient by any other parameter over devices (see `per_example`).
    """
    # Outside shard_map the leaves of `like` need not be arrays.
    if not manual_axes():
        return values
    names = sorted(varying(like))
    return jax.tree.map(lambda x: varying_over(x, names), values)


def narrowed_as(values: PyTree, like: Array) -> PyTree:
    """The arrays of a tree, typed as the same on all devices along the mesh axes along
    which `like` is.

    The caller guarantees equal values without NaN. They vary only by type: they were
    taken out of a vector whose other numbers vary.
    """
    # Outside shard_map the leaves need not be arrays.
    if not manual_axes():
        return values

    def narrowed(value: Array) -> Array:
        wider_axes = varying(value) - varying(like)
        if not wider_axes:
            return value
        return lax.pmax(value, tuple(sorted(wider_axes)))

    return jax.tree.map(narrowed, values)


def resharded_as(value: Array, array_type: ShapedArray) -> Array:
    """The value, split over the Explicit axes of the mesh as a type says. Array axes
    beyond those of the type are not split.
    """
    sharding = array_type.sharding
    return resharded(value, sharding.spec, sharding.mesh)


def types_of(function: Callable[..., Any], *args: object) -> PyTree:
    """The types of the arrays that a function returns.

    `jax.eval_shape` drops the shardings of a mesh that has both Explicit and Auto axes,
    as seen in JAX 0.10.2.
    """
    program, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    treedef = jax.tree.structure(shapes)
    return treedef.unflatten(program.out_avals)


def typed_as(tree: PyTree, array_type: ShapedArray) -> Any:
    """The arrays of a tree with a type that `jax.typeof` or `types_of` gave.

    `lax.scan` and shard_map compare the types of a state before and after a step.
    """
    # Outside jax.set_mesh, JAX cannot place an array that depends on no other.
    if jax.sharding.get_abstract_mesh().empty:
        return tree

    def typed(value: Array) -> Array:
        value = resharded_as(value, array_type)
        return varying_as(value, array_type)

    return jax.tree.map(typed, tree)


def resharded(
    value: Array, spec: Sequence[Any] = (), mesh: AbstractMesh | None = None
) -> Array:
    """The value, split over Explicit mesh axes along its first axes as `spec` says, and
    whole along the others. `mesh` is for a value whose type has none.
    """
    # Outside jax.set_mesh only types know the mesh.
    value_mesh = jax.typeof(value).sharding.mesh
    for candidate in (value_mesh, mesh, jax.sharding.get_abstract_mesh()):
        if candidate is not None and candidate.explicit_axes:
            sharding = NamedSharding(candidate, PartitionSpec(*spec))
            return jax.reshard(value, sharding)
    # In Auto meshes the sharding is not part of a type, and XLA chooses it.
    return value


def entries_of(
    vector: Array,
    array_types: Sequence[ShapedArray],
    numbers: Sequence[Array] | None = None,
) -> list[Array]:
    """Arrays of these types, one after the other out of a vector. `numbers` are its
    numbers as scalars, if the caller has them.
    """
    if numbers is None and not any(array_type.shape for array_type in array_types):
        # One operation, where an index for each scalar takes long to trace.
        numbers = lax.unstack(vector)
    arrays = []
    start = 0
    for array_type in array_types:
        stop = start + math.prod(array_type.shape)
        if array_type.shape or numbers is None:
            array = vector[start:stop].reshape(array_type.shape)
            arrays.append(resharded_as(array, array_type))
        else:
            arrays.append(numbers[start])
        start = stop
    return arrays


def is_on_one_device(x: object) -> bool:
    """Whether no part of the value can be on another device.

    Under jit the type of a value names the mesh that it lives on, though not how an
    Auto mesh splits it.
    """
    # Manual axes do not count: inside shard_map each device has an array of its own.
    mesh = jax.typeof(x).sharding.mesh
    split_by_jit = set(mesh.axis_names) - set(mesh.manual_axes)
    return all(mesh.shape[name] == 1 for name in split_by_jit)
