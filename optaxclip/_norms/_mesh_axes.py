"""The option `mesh_axes`: over which mesh axes is a leaf split?

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

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from .._other_names import with_our_names
from . import _prefix as prefix
from ._collectives import Split, axes_size
from ._mesh_checks import (
    FORMS,
    SplitLeaf,
    check_bound,
    check_once,
    check_reduced,
    check_spec,
    check_types,
    names_in,
    shown,
)
from ._types import has_types, varying, varying_over

# "auto", None, a name, a tuple of names, or a tree prefix of PartitionSpec
MeshAxes: TypeAlias = (
    "str | PartitionSpec | Mapping[Any, MeshAxes] | Sequence[MeshAxes] | None"
)


def freeze(mesh_axes: MeshAxes, call: str) -> Any:
    """`mesh_axes` as a hashable value.

    Raises:
      TypeError: a list of names, which would be a tree with one name for each leaf, or
        an array.
    """
    plain = mesh_axes is None or isinstance(mesh_axes, (str, prefix.Prefix))
    if plain or _are_names(mesh_axes):
        return mesh_axes
    for value in jax.tree.leaves(mesh_axes, is_leaf=_is_spec):
        # Static arguments must be hashable, which arrays are not.
        if isinstance(value, (np.ndarray, jax.Array)):
            raise TypeError(
                f"{call}: mesh_axes must be {FORMS}, got {value!r}."
            )
    if isinstance(mesh_axes, list) and all(
        isinstance(x, str) for x in mesh_axes
    ):
        raise TypeError(
            f"{call}: mesh_axes must be a name or a tuple of names, got {mesh_axes!r}: "
            f"write mesh_axes={tuple(mesh_axes)!r}."
        )
    return prefix.freeze(mesh_axes, _is_spec)


def without_names(mesh_axes: Any) -> Any:
    """`mesh_axes` outside shard_map, where no mesh axis has a name.

    PartitionSpecs stay, as they say which leaves are split alike.
    """
    if isinstance(mesh_axes, prefix.Prefix):
        entries = [(path, without_names(x)) for path, x in mesh_axes.entries]
        return prefix.Prefix(tuple(entries))
    stays = mesh_axes == "auto" or isinstance(mesh_axes, PartitionSpec)
    return mesh_axes if stays else None


def splits(
    mesh_axes: Any,
    tree: Any,
    dims: list[tuple[int, ...] | None],
    call: str,
) -> list[Split]:
    """For each leaf, how its norm over the dimensions `dims` (None: all) is split.

    Raises:
      ValueError: a mesh axis that is not bound, or that contradicts the type of a leaf;
        a name where a PartitionSpec is needed; a leaf with unreduced mesh axes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    # No mesh is set, as under plain jit: the common case, which looks at no leaf.
    if mesh.empty and (mesh_axes is None or mesh_axes == "auto"):
        return [Split()] * len(dims)
    argument = f"{call}: mesh_axes"
    entries = jax.tree_util.tree_flatten_with_path(tree)[0]
    mesh_axes = freeze(mesh_axes, call)
    # One name or "auto" is for every leaf, a tree for each its own.
    specs = [mesh_axes] * len(entries)
    if isinstance(mesh_axes, prefix.Prefix):
        specs = prefix.lookup(mesh_axes, tree, argument)
    found = []
    for (path, value), spec, over in zip(entries, specs, dims):
        leaf = SplitLeaf(value, argument, prefix.name(path), spec)
        check_reduced(leaf)
        found.append(Split() if spec is None else _split(leaf, over))
    return found


def whole_shapes(
    mesh_axes: Any, tree: Any, call: str
) -> list[tuple[int, ...] | None]:
    """For each leaf its shape over all devices, None where it is not known which
    dimension is split.
    """
    mesh_axes, leaves = freeze(mesh_axes, call), jax.tree.leaves(tree)
    specs = [mesh_axes] * len(leaves)
    if isinstance(mesh_axes, prefix.Prefix):
        specs = prefix.lookup(mesh_axes, tree, f"{call}: mesh_axes")
    return [_whole_shape(leaf, spec) for leaf, spec in zip(leaves, specs)]


def _whole_shape(leaf: Any, spec: Any) -> tuple[int, ...] | None:
    manual = jax.sharding.get_abstract_mesh().manual_axes
    shape = jnp.shape(leaf)
    if isinstance(spec, PartitionSpec):
        # Only manual axes make a shape smaller. Over the others arrays are global.
        split = [set(names_in(entry)) & set(manual) for entry in spec]
        # P("x") of a leaf of rank 2 says nothing of the second dimension.
        split += [set()] * (len(shape) - len(spec))
        return tuple(
            size * axes_size(names) for size, names in zip(shape, split)
        )
    # A type names the mesh axes of a leaf, but not the dimension that each splits.
    if spec is None or (
        spec == "auto" and not (has_types(manual) and varying(leaf))
    ):
        return shape
    return None


def _split(leaf: SplitLeaf, over: tuple[int, ...] | None) -> Split:
    by_dim = _names_by_dim(leaf)
    check_types(leaf, {name for names in by_dim for name in names})
    every = tuple(name for names in by_dim for name in names)
    # Which dimension is split does not matter where all are summed.
    if over is None or len(over) == jnp.ndim(leaf.value):
        return Split(every)
    if not isinstance(leaf.spec, PartitionSpec):
        if not every:
            return Split()
        example = ", ".join(map(repr, every))
        raise leaf.refused(
            f" tells that the leaf {leaf.path!r} of shape {jnp.shape(leaf.value)} is "
            f"split over {shown(every)}, but not which of its dimensions is, and its "
            "norms are taken over some of them only: give a tree of PartitionSpecs, "
            f"such as mesh_axes=jax.sharding.PartitionSpec({example})."
        )
    # Units of [in, out] with P("x", "y") are summed over x. Each device along y keeps
    # those of its own outputs.
    summed, kept = [], []
    for dim, names in enumerate(by_dim):
        (summed if dim in over else kept).extend(names)
    return Split(tuple(summed), tuple(kept), leaf.spec)


def _only(manual: tuple[str, ...], names: Iterable[str]) -> tuple[str, ...]:
    """The mesh axes that are manual."""
    return tuple(name for name in names if name in manual)


def _names_by_dim(leaf: SplitLeaf) -> list[tuple[str, ...]]:
    """The manual mesh axes of each dimension. One entry where that is not known."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if isinstance(leaf.spec, str) and leaf.spec == "auto":
        # Without types each leaf counts as complete: nothing is known.
        typed = has_types(manual)
        return [tuple(sorted(varying(leaf.value)))] if typed else [()]
    if isinstance(leaf.spec, PartitionSpec):
        check_spec(leaf, manual)
        # Axes that jit looks after (all of them outside shard_map) need nothing here.
        found = [_only(manual, names_in(entry)) for entry in leaf.spec]
        return found + [()] * (jnp.ndim(leaf.value) - len(found))
    # Names alone, as "x": every leaf is split, along whichever dimension.
    names = names_in(leaf.spec)
    check_bound(names, leaf.argument)
    check_once(leaf, names)
    return [names]


@with_our_names
def check_replicated(tree: Any, mesh_axes: str | tuple[str, ...]) -> jax.Array:
    """Returns whether all devices along some mesh axes hold the same values.

    For debugging inside pmap and shard_map, where JAX cannot tell.

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
    different = jnp.zeros((), jnp.int32)
    for leaf in jax.tree.leaves(tree):
        # Bits are compared, so NaN equals itself and 0 differs from -0.
        bits = varying_over(_bits(jnp.asarray(leaf)), names)
        # ~max(~bits) is the minimum of unsigned integers. Devices agree where it is the
        # maximum.
        unequal = lax.pmax(bits, names) != ~lax.pmax(~bits, names)
        different = different | jnp.any(unequal).astype(jnp.int32)
    return different == 0


def _bits(leaf: jax.Array) -> jax.Array:
    # bitcast_convert_type takes neither bool nor complex numbers.
    if leaf.dtype == bool:
        return leaf.astype(jnp.uint8)
    if jnp.iscomplexobj(leaf):
        leaf = jnp.stack([leaf.real, leaf.imag])
    return lax.bitcast_convert_type(
        leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")
    )


def _are_names(axes: Any) -> bool:
    # A NamedTuple of strings is a tree of names, so the type is tuple itself.
    names = type(axes) is tuple and bool(axes)
    return names and all(isinstance(name, str) for name in axes)


def _is_spec(x: Any) -> bool:
    return x is None or isinstance(x, (PartitionSpec, str)) or _are_names(x)
