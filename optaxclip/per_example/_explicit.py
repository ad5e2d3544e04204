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
from itertools import chain
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .._mesh import Names, names_in
from .._trees import put_back
from ._problem import Problem

# Sums like the leaves of the parameters, a count, and arrays with a batch axis.
Found = tuple[list[jax.Array], Any, Any]


def on_each_device(run: Callable[[Problem], Found], problem: Problem) -> Found:
    """Calls `run` with what each device has of the problem. Adds up sums and counts."""
    # What is shared may be a function, and a limit a Python number.
    arrays = jax.tree.map(
        lambda x: x if isinstance(x, (jax.Array, np.ndarray)) else None, problem
    )
    meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(arrays)]
    mesh = max(meshes, key=lambda mesh: len(mesh.explicit_axes))
    params = [_spec_of(x) for x in jax.tree.leaves(problem.params)]
    batch = [_spec_of(x) for x in jax.tree.leaves(problem.batch)]
    over = next(filter(None, [names_in(spec[0]) for spec in batch]), ())
    theirs = _names(*params, *[spec[1:] for spec in batch]).difference(over)
    manual = set(mesh.explicit_axes) - theirs
    # To shard_map an empty set means all axes.
    if not manual:
        return run(problem)
    split = P(over or None)
    # In a list, since a node of the user's may refuse specs.
    leaves, treedef = jax.tree.flatten(arrays)
    specs = []
    for name, field in arrays._asdict().items():
        spec = split if name in ("batch", "present") else P()
        specs += [spec] * len(jax.tree.leaves(field))

    def placed(x: jax.Array, spec: P) -> jax.Array:
        """The array, split along manual axes as a spec says."""
        kept = [_without(manual, names_in(entry)) or None for entry in _spec_of(x)]
        return jax.reshard(x, NamedSharding(mesh, P(*spec, *kept[len(spec) :])))

    # JAX 0.10.2 has no psum_scatter of what further Explicit axes split.
    parts = [P() if theirs & _names(spec) else spec for spec in params]
    devices = math.prod(mesh.shape[name] for name in over)

    def on_device(leaves: list[jax.Array]) -> Found:
        of_device = put_back(treedef.unflatten(leaves), problem)
        sums, count, each = run(of_device._replace(devices=devices))
        own = [_added(total, over, part) for total, part in zip(sums, parts)]
        return own, lax.psum(count, over), each

    run_on_all = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(specs,),
        out_specs=(parts, P(), split),
        axis_names=manual,
    )
    sums, count, each = run_on_all(list(map(placed, leaves, specs)))
    kinds = [NamedSharding(mesh, spec) for spec in params]
    return list(map(jax.reshard, sums, kinds)), count, each


def _spec_of(x: Any) -> P:
    return jax.typeof(x).sharding.spec


def _names(*specs: Any) -> set[str]:
    """The mesh axes in some specs."""
    return set(chain(*map(names_in, chain(*specs))))


def _without(others: set[str], names: Names) -> Names:
    return tuple(name for name in names if name not in others)


def _added(total: jax.Array, over: Names, parts: P) -> jax.Array:
    """The sum over devices, or the part of it that a device keeps."""
    for dim, names in enumerate(map(names_in, parts)):
        if names:
            total = lax.psum_scatter(total, names, scatter_dimension=dim, tiled=True)
    return lax.psum(total, _without(_names(parts), over))
