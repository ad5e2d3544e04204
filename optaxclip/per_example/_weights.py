"""What each example's gradient weighs: its norms, its factors, and the weighted sum."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .. import prefix
from .._arguments import check_limit, held_in
from .._core._factors import factor_of, scale_of, stretch
from .._norms._norms import norm_of_each
from ..shrinks import Shrink


class Limits(NamedTuple):
    """A tree prefix of limits: each part of the gradient that has one is measured and
    clipped by itself.
    """

    values: list[Any]  # a number for each limit, None for none
    places: prefix.Prefix  # which of them holds for which part of the gradient
    treedef: Any

    def for_leaves(self, tree: Any, call: str) -> list[int]:
        """For each leaf, the place of its limit."""
        return prefix.lookup(self.places, tree, f"{call}: max_norm")


class Weights(NamedTuple):
    """What was found out about the examples of a batch."""

    norms: list[jax.Array]  # float32[batch], one for each limit
    # float32[batch], one for each limit: those of `factor_of`; of an example that does
    # not count it means nothing
    factors: list[jax.Array]
    # float32[batch], one for each limit: what each gradient is multiplied by; 0 for an
    # example that does not count
    scales: list[jax.Array]
    counts: jax.Array  # bool[batch]: is present and has finite norms


def limits_of(max_norm: Any, argument: str) -> Limits:
    """The limits of a number or of a tree of them.

    Raises:
      TypeError, ValueError: something that is no limit, more than one number in the
        place of one, or no limit at all.
    """
    entries, treedef = jax.tree_util.tree_flatten_with_path(
        max_norm, is_leaf=lambda x: x is None
    )
    if not entries:
        raise ValueError(f"{argument} has no limit in it, got {max_norm!r}.")
    for path, value in entries:
        where = f"{argument} for {prefix.name(path)!r}" if path else argument
        if value is None:
            continue
        check_limit(where, value)
        if jnp.ndim(value):
            raise ValueError(
                f"{where} must be one number, got an array of shape {jnp.shape(value)}."
            )
    return Limits(
        [value for _, value in entries],
        prefix.Prefix(tuple((path, place) for place, (path, _) in enumerate(entries))),
        treedef,
    )


def weigh(
    grads: Any, limits: Limits, shrink: Shrink, present: jax.Array, call: str
) -> Weights:
    """Norms and factors of gradients with a leading batch axis."""
    norms = jax.vmap(lambda one: _norms(one, limits, call), axis_size=present.size)(
        grads
    )
    finite = jnp.all(jnp.stack([jnp.isfinite(norm) for norm in norms]), axis=0)
    counts = present & finite
    known = [jnp.where(counts, norm, 0.0) for norm in norms]
    new = [
        _shrunk(norm, limit, shrink)
        for norm, limit in zip(known, limits.values, strict=True)
    ]
    return Weights(
        [jnp.where(present, norm, 0.0) for norm in norms],
        [factor_of(*each) for each in zip(known, new)],
        [jnp.where(counts, scale_of(*each), 0.0) for each in zip(known, new)],
        counts,
    )


def weighted_sum(
    grads: Any, factors: list[jax.Array], counts: jax.Array, places: list[int]
) -> Any:
    """The sum over the batch axis, of each leaf stretched by the factors at its place,
    in float32 or wider.
    """
    leaves, treedef = jax.tree.flatten(grads)
    return treedef.unflatten(
        [
            _weighted_sum(leaf, factors[place], counts)
            for leaf, place in zip(leaves, places)
        ]
    )


def batch_size(tree: Any, argument: str) -> int:
    """The size that the first axes of all leaves share.

    Raises:
      ValueError: there are no leaves, they have no first axis, or their sizes differ.
    """
    shapes = {
        prefix.name(path) or "it": jnp.shape(leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }
    if not all(shapes.values()) or len({shape[:1] for shape in shapes.values()}) != 1:
        raise ValueError(
            f"{argument} must be arrays whose first axis counts examples, of one size, "
            f"got the shapes {shapes}."
        )
    return next(iter(shapes.values()))[0]


def beside(per_example: jax.Array, leaf: jax.Array) -> jax.Array:
    """One number for each example, in a shape that broadcasts against a leaf with a
    leading batch axis.
    """
    return per_example.reshape(-1, *(1,) * (leaf.ndim - 1))


def _norms(one: Any, limits: Limits, call: str) -> list[jax.Array]:
    """The norms of one example's gradient, one for each limit."""
    groups: dict[int, list[Any]] = {place: [] for place in range(len(limits.values))}
    for place, leaf in zip(limits.for_leaves(one, call), jax.tree.leaves(one)):
        groups[place].append(leaf)
    # Never over devices: along a mesh axis that splits the batch they hold different
    # examples.
    return list(norm_of_each(groups, mesh_axes=None).values())


def _shrunk(norm: jax.Array, limit: Any, shrink: Shrink) -> jax.Array:
    """The norms that gradients of these norms get."""
    limit = held_in(norm.dtype, jnp.inf if limit is None else limit)
    limit = jnp.broadcast_to(jnp.maximum(limit, 0), norm.shape)
    return jnp.where(limit == jnp.inf, norm, shrink(norm, limit))


def _weighted_sum(leaf: jax.Array, factor: jax.Array, counts: jax.Array) -> jax.Array:
    wide = jnp.promote_types(leaf.dtype, factor.dtype)
    stretched = stretch(leaf.astype(wide), beside(factor, leaf))
    # Selected, since 0 times NaN is NaN.
    kept = jnp.where(beside(counts, leaf), stretched, 0)
    # A dot, which on a CPU is four times as fast as a sum over the first axis; at the
    # highest precision, for GPU and TPU would round to fewer bits.
    return jnp.tensordot(
        jnp.ones(counts.shape, wide), kept, axes=1, precision=lax.Precision.HIGHEST
    )
