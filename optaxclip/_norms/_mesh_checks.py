"""Checks of the option `mesh_axes`: what each leaf says against what the mesh says.

Every error names the entry, the leaf by its path, and what would be right.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ._types import has_types, varying

FORMS = "'auto', None, names of mesh axes, or a tree of PartitionSpecs"


class SplitLeaf(NamedTuple):
    """A leaf and what errors say about it."""

    value: Any
    argument: str  # "global_norm: mesh_axes"
    path: str
    spec: Any  # its entry of `mesh_axes`

    def refused(self, text: str) -> ValueError:
        return ValueError(f"{self.argument}={self.spec!r}{text}")


def names_in(axes: Any) -> tuple[str, ...]:
    # An entry of a PartitionSpec: None, "x" or ("x", "y").
    if axes is None:
        return ()
    return axes if isinstance(axes, tuple) else (axes,)


def check_reduced(leaf: SplitLeaf) -> None:
    kind = jax.typeof(leaf.value)
    # Terms of a sum that is still to be taken. Types of shard_map say so, and specs of
    # Explicit meshes.
    waiting = set(kind.manual_axis_type.unreduced)
    waiting |= set(getattr(kind.sharding.spec, "unreduced", ()))
    if waiting:
        raise ValueError(
            f"{leaf.argument}: the leaf {leaf.path!r} is not yet summed over "
            f"{shown(waiting)}: reshard it, or use lax.psum, before clipping."
        )


def check_bound(names: tuple[str, ...], argument: str) -> None:
    for name in names:
        if not isinstance(name, str):
            raise ValueError(f"{argument} must be {FORMS}, got {name!r}.")
        # The mesh does not list axis names of vmap, which lax.axis_size finds.
        try:
            lax.axis_size(name)
        except NameError:
            raise ValueError(f"{argument}={name!r}: {_bound_axes()}") from None


def _bound_axes() -> str:
    """Which mesh axes have a name here, for errors."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.manual_axes:
        return (
            f"there is no such axis here. There is {shown(mesh.manual_axes)}."
        )
    return (
        "there is no such axis here. Outside shard_map and pmap no mesh axes are "
        "needed: mesh_axes='auto' is right."
    )


def check_spec(leaf: SplitLeaf, manual: tuple[str, ...]) -> None:
    if len(leaf.spec) > jnp.ndim(leaf.value):
        raise leaf.refused(
            f" has more entries than the leaf {leaf.path!r} of shape "
            f"{jnp.shape(leaf.value)} has dimensions."
        )
    named = tuple(name for entry in leaf.spec for name in names_in(entry))
    check_once(leaf, named)
    # Outside shard_map specs change nothing, so they may name any axis.
    known = jax.sharding.get_abstract_mesh().axis_names
    unknown = set(named) - set(known)
    if manual and unknown:
        raise leaf.refused(
            f" names {shown(unknown)}, but there is no such axis in the mesh, which "
            f"has {shown(known)}."
        )


def check_once(leaf: SplitLeaf, names: tuple[str, ...]) -> None:
    if len(set(names)) < len(names):
        raise leaf.refused(" names a mesh axis twice.")


def check_types(leaf: SplitLeaf, names: set[str]) -> None:
    """Raises where the type of a leaf contradicts its entry of `mesh_axes`."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    # pmap and check_vma=False have no types that could contradict.
    if not has_types(manual):
        return
    # psum would count this leaf once for each device.
    same = names & set(manual) - varying(leaf.value)
    if same:
        raise leaf.refused(
            f": the leaf {leaf.path!r} is the same on all devices along "
            f"{shown(same)}, so its sum must not be added up there: leave the axis "
            "out, or use mesh_axes='auto'."
        )
    # Each device would have another norm, and clip by another factor.
    forgotten = varying(leaf.value) - names
    if forgotten:
        raise leaf.refused(
            f": the leaf {leaf.path!r} also differs along {shown(forgotten)}: name "
            "that axis, or use mesh_axes='auto', or lax.pmean it first if it should be "
            "the same."
        )


def shown(names: Any) -> str:
    return ", ".join(repr(name) for name in sorted(names))
