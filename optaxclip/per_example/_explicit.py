"""Meshes with Explicit axes, where the type of an array says how it is split.
`jax.vmap` and the cotangents of ghost clipping cannot follow such types. So each device
clips its own examples in `shard_map`:

    arguments        gathered along the mesh axes that split the batch, as FSDP does
    sums             added up over devices. Of a parameter that was split, each device
                     keeps its own part
    norms, factors   stay where their examples are

Mesh axes that split something else, such as tensor parallel layers, stay Explicit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array, lax
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .._devices.mesh import AxisNames, names_in
from .._trees import put_back
from ._problem import Problem


class DeviceResult(NamedTuple):
    """What a device computes of its examples."""

    sums: list[Array]  # of the clipped gradients, for each parameter
    nonfinite: Any  # how many examples are broken
    examples: Any  # results of each example: arrays with a batch axis
    static: Any  # a `Static`, known while JAX traces: the same on all devices


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class Static:
    """A value that is no array. It is part of the structure of a pytree, so that
    shard_map and `jax.eval_shape` return it.
    """

    value: Any


class MeshRoles(NamedTuple):
    """What the axes of an Explicit mesh split."""

    mesh: AbstractMesh
    batch_axes: AxisNames  # the batch
    other_axes: set[str]  # parameters, or an example

    @property
    def manual_axes(self) -> set[str]:
        """The axes along which each device sees its own part in shard_map."""
        return set(self.mesh.explicit_axes) - self.other_axes

    @property
    def batch_spec(self) -> P:
        return P(self.batch_axes or None)

    def placed(self, x: Array, spec: P) -> Array:
        """The array, with its first dimensions split as a spec says. Its later
        dimensions are gathered along manual axes, and stay split along other axes.
        """
        gathered_entries = []
        for entry in _spec_of(x):
            kept_names = _without(names_in(entry), self.manual_axes)
            gathered_entries.append(kept_names or None)
        placed_spec = P(*spec, *gathered_entries[len(spec) :])
        return jax.reshard(x, NamedSharding(self.mesh, placed_spec))

    def sum_spec(self, param_spec: P) -> P:
        """How shard_map returns the sum of gradients by a parameter: split as the
        parameter is, or complete on each device.
        """
        # JAX 0.10.2 has no psum_scatter of an array that other Explicit axes split.
        if self.other_axes & _names_of(param_spec):
            return P()
        return param_spec

    def added_up(self, device_sum: Array, sum_spec: P) -> Array:
        """The sum over devices, or the part of it that this device keeps."""
        total = device_sum
        for dim, entry in enumerate(sum_spec):
            names = names_in(entry)
            if names:
                total = lax.psum_scatter(
                    total, names, scatter_dimension=dim, tiled=True
                )
        return lax.psum(total, _without(self.batch_axes, _names_of(sum_spec)))


def on_each_device(
    run: Callable[[Problem], DeviceResult], problem: Problem
) -> DeviceResult:
    """Calls `run` on each device with its part of the problem, and adds up the sums and
    the counts of broken examples. Without Explicit axes it just calls `run`.
    """

    def array_or_none(x: Any) -> Any:
        # A shared argument may be a function, and a limit a Python number.
        return x if isinstance(x, (Array, np.ndarray)) else None

    # The problem with None for all that shard_map cannot pass on: what is not an array.
    arrays = jax.tree.map(array_or_none, problem)
    roles = _roles_of(arrays)
    # To shard_map an empty set means all axes.
    if not roles.manual_axes:
        return run(problem)
    # As leaves: a pytree class of the user's may refuse specs as children.
    leaves, treedef = jax.tree.flatten(arrays)
    leaf_specs = []
    for field, tree in vars(arrays).items():
        spec = roles.batch_spec if field in ("batch", "is_present") else P()
        leaf_specs += [spec] * len(jax.tree.leaves(tree))
    param_specs = [_spec_of(x) for x in jax.tree.leaves(problem.params)]
    sum_specs: list[Any] = [roles.sum_spec(spec) for spec in param_specs]
    axis_sizes = [roles.mesh.shape[name] for name in roles.batch_axes]
    devices = math.prod(axis_sizes)

    def on_device(leaves: list[Array]) -> DeviceResult:
        problem_on_device = put_back(treedef.unflatten(leaves), problem)
        result = run(replace(problem_on_device, explicit_devices=devices))
        return result._replace(
            sums=list(map(roles.added_up, result.sums, sum_specs)),
            nonfinite=lax.psum(result.nonfinite, roles.batch_axes),
        )

    run_on_all = jax.shard_map(
        on_device,
        mesh=roles.mesh,
        in_specs=(leaf_specs,),
        out_specs=DeviceResult(sum_specs, P(), roles.batch_spec, static=P()),
        axis_names=roles.manual_axes,
    )
    result = run_on_all(list(map(roles.placed, leaves, leaf_specs)))
    sums = []
    for total, spec in zip(result.sums, param_specs):
        sums.append(jax.reshard(total, NamedSharding(roles.mesh, spec)))
    return result._replace(sums=sums)


def _roles_of(arrays: Problem) -> MeshRoles:
    """The roles of the mesh axes in the arrays of a problem."""
    meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(arrays)]
    # The mesh of an array that is not on the Explicit mesh has no such axes.
    mesh = max(meshes, key=lambda mesh: len(mesh.explicit_axes))
    batch_axes: AxisNames = ()
    split_names = set()
    for x in jax.tree.leaves(arrays.params):
        split_names |= _names_of(_spec_of(x))
    for x in jax.tree.leaves(arrays.batch):
        batch_entry, *entries_of_example = _spec_of(x)
        # The first array of the batch that is split decides.
        batch_axes = batch_axes or names_in(batch_entry)
        split_names |= _names_of(entries_of_example)
    return MeshRoles(mesh, batch_axes, split_names - set(batch_axes))


def _spec_of(x: Any) -> P:
    return jax.typeof(x).sharding.spec


def _names_of(spec: Any) -> set[str]:
    """The mesh axes in a spec."""
    names: set[str] = set()
    for entry in spec:
        names.update(names_in(entry))
    return names


def _without(names: AxisNames, left_out: set[str]) -> AxisNames:
    return tuple(name for name in names if name not in left_out)
