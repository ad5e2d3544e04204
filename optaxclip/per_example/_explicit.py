"""Meshes with Explicit axes. The type of an array says there how it is split, which
`jax.vmap` and the cotangents of ghost clipping cannot follow. So each device clips its
own examples in `shard_map`:

    arguments        gathered along the mesh axes that split the batch, as FSDP does
    sums             added up over devices. Of a parameter that was split, each device
                     keeps its own part
    norms, factors   stay where their examples are

Mesh axes that split something else, such as tensor parallel layers, stay Explicit.
"""

import math
from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .._mesh import AxisNames, names_in
from .._trees import put_back
from ._problem import Problem


class DeviceResult(NamedTuple):
    """What a device computes of its examples."""

    sums: list[jax.Array]  # like the leaves of the parameters
    nonfinite: Any  # how many examples are broken
    examples: Any  # arrays with a batch axis


def on_each_device(
    run: Callable[[Problem], DeviceResult], problem: Problem
) -> DeviceResult:
    """Calls `run` with the part of the problem that each device has. Adds up sums, and
    how many examples are broken.
    """
    # A shared argument may be a function, and a limit a Python number.
    arrays = jax.tree.map(
        lambda x: x if isinstance(x, (jax.Array, np.ndarray)) else None, problem
    )
    meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(arrays)]
    mesh = max(meshes, key=lambda mesh: len(mesh.explicit_axes))
    param_specs = [_spec_of(x) for x in jax.tree.leaves(problem.params)]
    batch_specs = [_spec_of(x) for x in jax.tree.leaves(problem.batch)]
    # Of the first array of the batch that is split
    batch_axes: AxisNames = ()
    for spec in batch_specs:
        batch_axes = batch_axes or names_in(spec[0])
    other_dims = [spec[1:] for spec in batch_specs]
    # Mesh axes that split something else than the batch.
    other_axes = _names(*param_specs, *other_dims).difference(batch_axes)
    manual = set(mesh.explicit_axes) - other_axes
    # To shard_map an empty set means all axes.
    if not manual:
        return run(problem)
    split_by_example = P(batch_axes or None)
    # In a list, since a node of the user's may refuse specs.
    leaves, treedef = jax.tree.flatten(arrays)
    specs = []
    for name, field in arrays._asdict().items():
        spec = split_by_example if name in ("batch", "present") else P()
        specs += [spec] * len(jax.tree.leaves(field))

    def placed(x: jax.Array, spec: P) -> jax.Array:
        """The array, split along manual axes as a spec says."""
        kept = [_without(manual, names_in(entry)) or None for entry in _spec_of(x)]
        return jax.reshard(x, NamedSharding(mesh, P(*spec, *kept[len(spec) :])))

    sum_specs = []
    for spec in param_specs:
        # JAX 0.10.2 has no psum_scatter of an array that other Explicit axes split.
        sum_specs.append(P() if other_axes & _names(spec) else spec)
    devices = math.prod(mesh.shape[name] for name in batch_axes)

    def on_device(leaves: list[jax.Array]) -> DeviceResult:
        problem_on_device = put_back(treedef.unflatten(leaves), problem)
        result = run(problem_on_device._replace(devices=devices))
        sums = []
        for device_sum, spec in zip(result.sums, sum_specs):
            sums.append(_added(device_sum, batch_axes, spec))
        return DeviceResult(
            sums, lax.psum(result.nonfinite, batch_axes), result.examples
        )

    run_on_all = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(specs,),
        out_specs=DeviceResult(sum_specs, P(), split_by_example),
        axis_names=manual,
    )
    result = run_on_all(list(map(placed, leaves, specs)))
    sums = []
    for total, spec in zip(result.sums, param_specs):
        sums.append(jax.reshard(total, NamedSharding(mesh, spec)))
    return result._replace(sums=sums)


def _spec_of(x: Any) -> P:
    return jax.typeof(x).sharding.spec


def _names(*specs: Any) -> set[str]:
    """The mesh axes in some specs."""
    names: set[str] = set()
    for entry in chain(*specs):
        names.update(names_in(entry))
    return names


def _without(left_out: set[str], names: AxisNames) -> AxisNames:
    return tuple(name for name in names if name not in left_out)


def _added(device_sum: jax.Array, batch_axes: AxisNames, spec: P) -> jax.Array:
    """The sum over devices, or the part of it that a device keeps."""
    total = device_sum
    for dim, names in enumerate(map(names_in, spec)):
        if names:
            total = lax.psum_scatter(total, names, scatter_dimension=dim, tiled=True)
    return lax.psum(total, _without(_names(spec), batch_axes))
