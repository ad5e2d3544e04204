"""The types of values: their size, and along which mesh axes they differ or are split.

`lax.scan` and shard_map compare these types of a state, so a state gets those of its
norms when it is made.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec


def is_on_one_device(x: Any) -> bool:
    """Whether no part of the value can be on another device.

    Under jit the type of a value names the mesh that it lives on, though not how an
    Auto mesh splits it.
    """
    # Manual axes do not count: inside shard_map each device has an array of its own.
    mesh = jax.typeof(x).sharding.mesh
    others = set(mesh.axis_names) - set(mesh.manual_axes)
    return all(mesh.shape[name] == 1 for name in others)


def is_known(x: jax.Array) -> bool:
    """Whether its size is known. A symbolic one, of jax.export, is not compared."""
    return all(isinstance(size, int) for size in x.shape)


def has_types(manual: tuple[str, ...]) -> bool:
    """Whether JAX tracks here which values differ between devices.

    It does not in pmap and with check_vma=False. There even axis_index has the type of
    a value that is the same everywhere.
    """
    # axis_index differs between devices, so its type tells whether types are tracked.
    indices = {name: lax.axis_index(name) for name in manual}
    return bool(manual) and all(
        name in varying(i) for name, i in indices.items()
    )


def varying(x: Any) -> frozenset[str]:
    """The manual mesh axes over which a value may differ."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def varying_over(x: jax.Array, names: Iterable[str]) -> jax.Array:
    """The value, typed as one that differs along these mesh axes."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    # pcast refuses an axis along which the value varies already.
    missing = tuple(n for n in names if n in manual and n not in varying(x))
    return (
        lax.pcast(x, missing, to="varying")
        if missing and has_types(missing)
        else x
    )


def types_of(function: Callable[..., Any], *args: Any) -> Any:
    """The types of what a function returns.

    `jax.eval_shape` drops the shardings of a mesh that has both Explicit and Auto axes,
    as seen in JAX 0.10.2.
    """
    program, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    return jax.tree.unflatten(jax.tree.structure(shapes), program.out_avals)


def typed_as(tree: Any, kind: Any, skip: int = 0) -> Any:
    """The arrays of a tree with a type that `jax.typeof` or `types_of` gave."""
    # Without a mesh, as under plain jit, no type says anything of devices.
    if jax.sharding.get_abstract_mesh().empty:
        return tree
    return jax.tree.map(
        lambda x: varying_as(split_as(x, kind, skip), kind), tree
    )


def varying_as(value: jax.Array, kind: Any) -> jax.Array:
    """The value, typed as differing between devices where a type says so."""
    return varying_over(value, sorted(kind.manual_axis_type.varying))


def split_as(value: jax.Array, kind: Any, skip: int = 0) -> jax.Array:
    """The value, split over the Explicit axes of the mesh as a type says.

    Dimensions beyond those of the type are not split. The first `skip` of the type are
    none of the value's.
    """
    # In Auto meshes the sharding is no part of a type, and XLA chooses it.
    if not jax.sharding.get_abstract_mesh().explicit_axes:
        return value
    return _resharded(value, kind.sharding.spec[skip:])


def gathered(value: jax.Array, kept: int) -> jax.Array:
    """The value, split over Explicit axes along its first `kept` dimensions only."""
    if not jax.sharding.get_abstract_mesh().explicit_axes:
        return value
    return _resharded(value, jax.typeof(value).sharding.spec[:kept])


def _resharded(value: jax.Array, spec: Any) -> jax.Array:
    # P("x") of [4, 6] is P("x", None): what is not named is not split.
    rest = [None] * (value.ndim - len(spec))
    return jax.reshard(value, PartitionSpec(*spec, *rest))
