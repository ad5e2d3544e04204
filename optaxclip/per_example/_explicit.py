"""Meshes with Explicit axes. The type of an array says there how it is split, which
`jax.vmap` and the cotangents of ghost clipping cannot follow. So each device clips its
own examples in `shard_map`:

    arguments        gathered along the mesh axes that split the batch, as FSDP does
    sums             added up over devices. Of a parameter that was split, each device
                     keeps its own part
    norms, factors   stay where their examples are

Mesh axes that split something else, as those of tensor parallel layers, stay Explicit.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .._mesh import Names, listed, names_in
from ._problem import Problem

# Sums like the leaves of the parameters, a count, and arrays with a batch axis.
Found = tuple[list[jax.Array], jax.Array, Any]


def on_each_device(
    run: Callable[[Problem, Any, int], Found], problem: Problem, numbers: Any, call: str
) -> Found:
    """Calls `run(problem, numbers, devices)` with what each device has of the problem,
    and the number of devices that share the batch. Adds up sums and counts.

    Raises:
      ValueError: a loss that closes over an array on the mesh.
    """
    rest = problem._replace(batch=(), present=None), numbers
    leaves, treedef = jax.tree.flatten(rest)
    # The others are functions and Python numbers.
    places = [k for k, x in enumerate(leaves) if isinstance(x, (jax.Array, np.ndarray))]
    arrays = [leaves[place] for place in places]
    batch = problem.batch, problem.present
    meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves((batch, arrays))]
    mesh = next((mesh for mesh in meshes if mesh.explicit_axes), None)
    if mesh is None:
        return run(problem, numbers, 1)
    first = [names_in(spec_of(x)[0]) for x in jax.tree.leaves(batch)]
    over: Names = next(filter(None, first), ())

    def placed(x: jax.Array, *start: Names) -> jax.Array:
        """The array, along the axes of the batch split at its start or whole."""
        kept = [_without(entry, over) for entry in spec_of(x)]
        kept[: len(start)] = start
        spec = P(*[names or None for names in kept])
        return jax.reshard(x, NamedSharding(mesh, spec))

    def rebuilt(arrays: list[jax.Array], batch: Any) -> tuple[Problem, Any]:
        filled = list(leaves)
        for place, x in zip(places, arrays):
            filled[place] = x
        problem, numbers = treedef.unflatten(filled)
        return problem._replace(batch=batch[0], present=batch[1]), numbers

    arrays = list(map(placed, arrays))
    batch = jax.tree.map(lambda x: placed(x, over), batch)
    manual = set(mesh.explicit_axes)
    for x in jax.tree.leaves((batch, arrays)):
        for entry in spec_of(x):
            manual.difference_update(_without(entry, over))
    # An empty set would mean all axes to shard_map.
    if not manual:
        return run(problem, numbers, 1)
    given = set(map(id, arrays))
    for x in rebuilt(arrays, batch)[0].program()[0].consts:
        if id(x) not in given and jax.typeof(x).sharding.mesh.explicit_axes:
            raise ValueError(
                f"{call}: loss closes over an array of shape {x.shape} on a mesh with "
                f"Explicit axes, here {listed(mesh.explicit_axes)}. Give it as an "
                "argument, and name that in shared_argnums."
            )
    kinds = [jax.typeof(x).sharding for x in jax.tree.leaves(problem.params)]
    parts = [_parts_along(over, kind.spec) for kind in kinds]
    devices = math.prod(mesh.shape[name] for name in over)

    def on_device(arrays: list[jax.Array], batch: Any) -> Found:
        sums, count, each = run(*rebuilt(arrays, batch), devices)
        own = [_added(total, over, part) for total, part in zip(sums, parts)]
        return own, lax.psum(count, over), each

    by_example = P(over or None)
    run_on_all = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(P(), by_example),
        out_specs=(parts, P(), by_example),
        axis_names=manual,
    )
    sums, count, each = run_on_all(arrays, batch)
    wanted = [NamedSharding(mesh, kind.spec) for kind in kinds]
    return list(map(jax.reshard, sums, wanted)), count, each


def spec_of(x: Any) -> P:
    """How an array is split over Explicit axes of a mesh, by its type."""
    return jax.typeof(x).sharding.spec


def _without(entry: Any, over: Names) -> Names:
    """The mesh axes of an entry of a spec that are not some others."""
    return tuple(name for name in names_in(entry) if name not in over)


def _parts_along(over: Names, spec: P) -> P:
    """The spec, or nothing where further mesh axes split an array too. JAX 0.10.2 does
    not lower a `psum_scatter` of that.
    """
    is_theirs = any(_without(entry, over) for entry in spec)
    return P() if is_theirs else spec


def _added(total: jax.Array, over: Names, parts: P) -> jax.Array:
    """The sum over devices, or the part of it that a device keeps."""
    left = over
    for dim, entry in enumerate(parts):
        if entry:
            names = names_in(entry)
            total = lax.psum_scatter(total, names, scatter_dimension=dim, tiled=True)
            left = _without(left, names)
    return lax.psum(total, left)
