"""The one module that knows about devices: over which mesh axes a leaf is split, and
one collective for all norms.

Under jit (Auto or Explicit meshes, any sharding) arrays are global, sums are right as
they stand, and XLA adds the collectives. Inside `shard_map` and `pmap` a program sees
only its device's part, so sums of squares must be added over just the mesh axes that a
leaf is split over, and leaves that every device holds must be counted once. The option
`axes` says which:

    "auto"               nothing outside shard_map and pmap. Inside a typed shard_map
                         (check_vma=True), what the type of each leaf says. Where there
                         are no types (pmap, check_vma=False) each leaf counts as
                         complete, which is right for gradients after `lax.pmean`
    "x", ("x", "y")      every leaf is split over these axes, as ZeRO's shards in pmap
                         are
    tree of PartitionSpec  for each leaf or part of the tree, as the in_specs of
                           shard_map; P() where every device holds the whole leaf
    None                 each device by itself, without any collective

What the types contradict raises. Norms that keep axes of a leaf (units, stacked layers)
need a PartitionSpec where that leaf is split, since the names alone do not tell which
of its dimensions is split.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from . import prefix

Axes = Any  # "auto" | None | str | tuple of str | tree prefix of PartitionSpec


class Split(NamedTuple):
    """How one leaf is spread over devices, seen from its norm."""

    summed: tuple[
        str, ...
    ] = ()  # mesh axes that split what is summed: the collective goes over these
    kept: tuple[
        str, ...
        # mesh axes that split the units or layers: each device keeps the norms of its
        # own
    ] = ()


def freeze(axes: Axes) -> Axes:
    """`axes` as a hashable value."""
    if axes is None or isinstance(axes, (str, prefix.Prefix)) or _are_names(axes):
        return axes
    return prefix.freeze(axes, _is_spec)


def splits(
    axes: Axes, tree: Any, dims: list[tuple[int, ...] | None], call: str
) -> list[Split]:
    """For each leaf how its norm over the dimensions `dims` (None: all) is spread.

    Raises:
      ValueError: an axis that is not bound, that the type of a leaf contradicts, or
        that leaves open which dimension is split; values that wait for a reduction.
    """
    axes = freeze(axes)
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    specs = (
        prefix.lookup(axes, tree, f"{call}: axes")
        if isinstance(axes, prefix.Prefix)
        else [axes] * len(leaves)
    )
    manual = jax.sharding.get_abstract_mesh().manual_axes
    typed = _has_types(manual)
    return [
        _split(leaf, spec, over, manual, typed, f"{call}: axes", prefix.name(path))
        for (path, leaf), spec, over in zip(leaves, specs, dims)
    ]


def whole_shapes(axes: Axes, tree: Any, call: str) -> list[tuple[int, ...] | None]:
    """For each leaf its shape over all devices, None where it is not known which
    dimension is split.
    """
    axes = freeze(axes)
    leaves = jax.tree.leaves(tree)
    specs = (
        prefix.lookup(axes, tree, f"{call}: axes")
        if isinstance(axes, prefix.Prefix)
        else [axes] * len(leaves)
    )
    manual = jax.sharding.get_abstract_mesh().manual_axes
    typed = _has_types(manual)
    return [
        _whole_shape(leaf, spec, manual, typed) for leaf, spec in zip(leaves, specs)
    ]


def _whole_shape(
    leaf: Any, spec: Any, manual: tuple[str, ...], typed: bool
) -> tuple[int, ...] | None:
    shape = jnp.shape(leaf)
    if isinstance(spec, PartitionSpec):
        split = [set(_names(entry)) & set(manual) for entry in spec]
        split += [set()] * (len(shape) - len(spec))
        return tuple(size * axes_size(names) for size, names in zip(shape, split))
    if spec is None or (spec == "auto" and not (typed and _varying(leaf))):
        return shape
    return None


def _split(
    leaf: Any,
    spec: Any,
    over: tuple[int, ...] | None,
    manual: tuple[str, ...],
    typed: bool,
    argument: str,
    path: str,
) -> Split:
    _check_reduced(leaf, argument, path)
    if spec is None:
        return Split()
    varying = _varying(leaf) if typed else frozenset()
    if isinstance(spec, str) and spec == "auto":
        names: list[tuple[str, ...]] = [tuple(sorted(varying))]
    elif isinstance(spec, PartitionSpec):
        if len(spec) > jnp.ndim(leaf):
            raise ValueError(
                f"{argument}={spec!r} has more entries than the leaf {path!r} of shape "
                f"{jnp.shape(leaf)} has dimensions."
            )
        _check_spec(spec, manual, argument)
        # Axes that jit looks after (all of them outside shard_map) need nothing from
        # us.
        names = [
            tuple(name for name in _names(entry) if name in manual) for entry in spec
        ] + [()] * (jnp.ndim(leaf) - len(spec))
    else:
        names = [_names(spec)]
        _check_bound(names[0], argument)
        _check_once(names[0], argument, spec)
    _check_types(names, spec, varying, manual, typed, argument, path)
    every = tuple(name for group in names for name in group)
    if over is None or len(over) == jnp.ndim(leaf) or not every:
        return Split(every)
    if not isinstance(spec, PartitionSpec):
        example = ", ".join(map(repr, every))
        raise ValueError(
            f"{argument}={spec!r} tells that the leaf {path!r} of shape "
            f"{jnp.shape(leaf)} is split over {_shown(every)}, but not which of its "
            "dimensions is, and its norms are taken over some of them only: give a "
            "tree of PartitionSpecs, such as "
            f"axes=jax.sharding.PartitionSpec({example})."
        )
    return Split(
        tuple(name for dim, group in enumerate(names) if dim in over for name in group),
        tuple(
            name for dim, group in enumerate(names) if dim not in over for name in group
        ),
    )


def all_sum(
    partials: list[list[jax.Array]], spread: list[list[Split]]
) -> list[jax.Array]:
    """The sum of each list, over its members and over devices, in one psum for all
    lists. Every list needs a member.
    """

    def together(
        names: tuple[str, ...], group: list[jax.Array], how: list[Split]
    ) -> jax.Array:
        # A psum counts what all devices hold once for each device, so its share is
        # divided by their number.
        shares = [
            _varying_over(
                part / copies
                if (copies := axes_size(set(names) - set(split.summed))) > 1
                else part,
                names,
            )
            for part, split in zip(group, how)
        ]
        return chain(shares)

    return _reduced(partials, spread, together, lax.psum, chain)


def all_max(
    partials: list[list[jax.Array]], spread: list[list[Split]]
) -> list[jax.Array]:
    """The maximum of each list, over its members and over devices, in one pmax for all
    lists. A maximum over devices may drop NaN.
    """

    def largest(group: list[jax.Array]) -> jax.Array:
        whole = group[0]
        for part in group[1:]:
            whole = jnp.maximum(whole, part)
        return whole

    def together(
        names: tuple[str, ...], group: list[jax.Array], how: list[Split]
    ) -> jax.Array:
        return largest([_varying_over(part, names) for part in group])

    return _reduced(partials, spread, together, lax.pmax, largest)


def _reduced(
    partials: Any, spread: Any, together: Any, collective: Any, alone: Any
) -> list[jax.Array]:
    """Joins each list, and all that must hear of other devices in one collective; where
    norms stay split, in one for each set of axes.
    """
    needs = [
        tuple(sorted({name for split in how for name in split.summed}))
        for how in spread
    ]
    kept = {name for how in spread for split in how for name in split.kept}
    union = tuple(sorted({name for names in needs for name in names}))
    if not kept & set(union):
        needs = [union if names else () for names in needs]
    totals: list[Any] = [None] * len(partials)
    for names in dict.fromkeys(needs):
        places = [place for place, wanted in enumerate(needs) if wanted == names]
        if not names:
            for place in places:
                totals[place] = alone(partials[place])
            continue
        parts = [together(names, partials[place], spread[place]) for place in places]
        for place, total in zip(places, _joined(parts, collective, names)):
            totals[place] = total
    return totals


def _joined(
    parts: list[jax.Array], collective: Any, names: tuple[str, ...]
) -> list[jax.Array]:
    """The collective over several small arrays as one vector; what differs along other
    axes as well goes by itself, for a vector has one type, and so does what an Explicit
    mesh splits, for that cannot be reshaped to a vector.
    """
    alike: dict[Any, list[int]] = {}
    for place, part in enumerate(parts):
        is_split = any(jax.typeof(part).sharding.spec)
        alike.setdefault((_varying(part), is_split and place), []).append(place)
    totals: list[Any] = [None] * len(parts)
    for places in alike.values():
        if len(places) == 1:
            totals[places[0]] = collective(parts[places[0]], names)
            continue
        vector = collective(
            jnp.concatenate([parts[place].reshape(-1) for place in places]), names
        )
        start = 0
        for place in places:
            size = parts[place].size
            totals[place] = lax.slice(vector, (start,), (start + size,)).reshape(
                parts[place].shape
            )
            start += size
    return totals


def axes_size(names: Any) -> int:
    """The number of devices along these mesh axes together."""
    return math.prod(int(lax.axis_size(name)) for name in names)


def chain(terms: list[jax.Array]) -> jax.Array:
    """The sum as a chain of adds: XLA merges the all-reduces of such a chain, not those
    of a stack.
    """
    return sum(terms[1:], start=terms[0])


def inside() -> bool:
    """Are we inside shard_map or pmap?"""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def types_of(function: Callable[..., Any], *args: Any) -> Any:
    """The types of what a function returns. `jax.eval_shape` drops the shardings of a
    mesh that has both Explicit and Auto axes, as seen in JAX 0.10.2.
    """
    program, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    return jax.tree.unflatten(jax.tree.structure(shapes), program.out_avals)


def typed_as(value: jax.Array, kind: Any) -> jax.Array:
    """The value with a type that `jax.typeof` or `types_of` gave: it differs between
    devices where that does, and an Explicit mesh splits it in the same way. `lax.scan`
    and shard_map compare these types of a state.
    """
    return varying_as(split_as(value, kind), kind)


def varying_as(value: jax.Array, kind: Any) -> jax.Array:
    """The value, typed as differing between devices where a type says so."""
    return _varying_over(value, tuple(sorted(kind.manual_axis_type.varying)))


def split_as(value: jax.Array, kind: Any) -> jax.Array:
    """The value, split over the Explicit axes of the mesh as a type says. Axes beyond
    those of the type are not split.
    """
    if not jax.sharding.get_abstract_mesh().explicit_axes:
        return value
    return _resharded(value, kind.sharding.spec)


def gathered(value: jax.Array, kept: int) -> jax.Array:
    """The value, split over the Explicit axes of the mesh along its first `kept` axes
    only.
    """
    if not jax.sharding.get_abstract_mesh().explicit_axes:
        return value
    return _resharded(value, jax.typeof(value).sharding.spec[:kept])


def _resharded(value: jax.Array, spec: Any) -> jax.Array:
    return jax.reshard(value, PartitionSpec(*spec, *[None] * (value.ndim - len(spec))))


def check_replicated(tree: Any, axes: str | tuple[str, ...]) -> jax.Array:
    """Do all devices along these mesh axes hold the same values? For debugging inside
    pmap and shard_map, where JAX can not tell.

    Args:
      tree: a pytree of arrays.
      axes: the name of a mesh axis, or several.

    Returns:
      A bool scalar, the same on all devices. NaN equals NaN; an empty tree is
      replicated.

    Raises:
      ValueError: an axis that is not bound here.
    """
    names = _names(axes)
    _check_bound(names, "check_replicated: axes")
    different = jnp.zeros((), jnp.int32)
    for leaf in jax.tree.leaves(tree):
        leaf = jnp.asarray(leaf)
        # Bits are compared, so NaN counts as equal to itself and 0 as different from
        # -0.
        bits = (
            jax.lax.bitcast_convert_type(
                jnp.stack([leaf.real, leaf.imag]) if jnp.iscomplexobj(leaf) else leaf,
                _unsigned(leaf),
            )
            if leaf.dtype != bool
            else leaf.astype(jnp.uint8)
        )
        bits = _varying_over(bits, names)
        unequal = lax.pmax(bits, names) != ~lax.pmax(~bits, names)
        different = different | jnp.any(unequal).astype(jnp.int32)
    return different == 0


def _unsigned(leaf: jax.Array) -> Any:
    width = leaf.dtype.itemsize // (2 if jnp.iscomplexobj(leaf) else 1)
    return jnp.dtype(f"uint{8 * width}")


def _names(axes: Any) -> tuple[str, ...]:
    return () if axes is None else axes if isinstance(axes, tuple) else (axes,)


def _are_names(axes: Any) -> bool:
    return (
        type(axes) is tuple
        and bool(axes)
        and all(isinstance(name, str) for name in axes)
    )


def _is_spec(x: Any) -> bool:
    return x is None or isinstance(x, (PartitionSpec, str)) or _are_names(x)


def _has_types(manual: tuple[str, ...]) -> bool:
    """Do types tell here what differs between devices? With check_vma=False and under
    pmap even the index of the device is typed as the same everywhere.
    """
    return bool(manual) and all(
        name in _varying(lax.axis_index(name)) for name in manual
    )


def _varying(x: Any) -> frozenset[str]:
    """The manual mesh axes over which a value may differ."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def _varying_over(x: jax.Array, names: tuple[str, ...]) -> jax.Array:
    missing = tuple(name for name in names if name not in _varying(x))
    manual = tuple(
        name for name in missing if name in jax.sharding.get_abstract_mesh().manual_axes
    )
    return lax.pcast(x, manual, to="varying") if manual and _has_types(manual) else x


def _check_reduced(leaf: Any, argument: str, path: str) -> None:
    kind = jax.typeof(leaf)
    waiting = set(kind.manual_axis_type.unreduced) | set(
        getattr(kind.sharding.spec, "unreduced", ())
    )
    if waiting:
        raise ValueError(
            f"{argument}: the leaf {path!r} is not yet summed over {_shown(waiting)}: "
            "reshard it, or use lax.psum, before clipping."
        )


def _check_bound(names: tuple[str, ...], argument: str) -> None:
    for name in names:
        if not isinstance(name, str):
            raise ValueError(
                f"{argument} must be 'auto', None, names of mesh axes, or a tree of "
                f"PartitionSpecs, got {name!r}."
            )
        try:
            lax.axis_size(name)
        except NameError:
            raise ValueError(
                f"{argument}={name!r}: there is no such axis here. Outside shard_map "
                "and pmap no axes are needed, axes='auto' is right; inside, it must "
                "be one of theirs."
            ) from None


def _check_spec(spec: PartitionSpec, manual: tuple[str, ...], argument: str) -> None:
    named = tuple(name for entry in spec for name in _names(entry))
    _check_once(named, argument, spec)
    unknown = set(named) - set(jax.sharding.get_abstract_mesh().axis_names)
    if manual and unknown:
        raise ValueError(
            f"{argument}={spec!r} names {_shown(unknown)}, but there is no such axis "
            "in the mesh, which has "
            f"{_shown(jax.sharding.get_abstract_mesh().axis_names)}."
        )


def _check_once(names: tuple[str, ...], argument: str, spec: Any) -> None:
    if len(set(names)) < len(names):
        raise ValueError(f"{argument}={spec!r} names a mesh axis twice.")


def _check_types(
    names: list[tuple[str, ...]],
    spec: Any,
    varying: frozenset[str],
    manual: tuple[str, ...],
    typed: bool,
    argument: str,
    path: str,
) -> None:
    if not typed:
        return
    told = {name for group in names for name in group if name in manual}
    if told - varying:
        raise ValueError(
            f"{argument}={spec!r}: the leaf {path!r} is the same on all devices along "
            f"{_shown(told - varying)}, so its sum must not be added up there: leave "
            "the axis out, or use axes='auto'."
        )
    if varying - told:
        raise ValueError(
            f"{argument}={spec!r}: the leaf {path!r} also differs along "
            f"{_shown(varying - told)}: name that axis, or use axes='auto', or "
            "lax.pmean it first if it should be the same."
        )


def _shown(names: Any) -> str:
    return ", ".join(repr(name) for name in sorted(names))
