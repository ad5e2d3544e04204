"""The norms and factors of each example's gradient, and the weighted sum."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import _trees as prefix
from .._checks import check_limit, held_in
from .._factors import factor_between, stretch
from .._kernel import shrunk_by
from .._mesh import split_as
from .._norms import Leaf, Plan, norms_of
from .._trees import clipped_leaves
from ..rules._rule import is_rule
from ..shrinks import Shrink


class Limits(NamedTuple):
    """A tree prefix of limits. Each part of the gradient that has one is a group: it is
    measured and clipped separately.
    """

    values: list[Any]  # a number for each group, None for no limit
    numbers: prefix.Prefix  # from part of the gradient to number of the group
    treedef: Any

    def group_of_each(self, tree: Any, call: str) -> list[int]:
        """For each leaf, the number of its group."""
        return prefix.lookup(self.numbers, tree, f"{call}: max_norm")


class Weights(NamedTuple):
    """What was found out about the examples of a batch."""

    # float32[batch, groups]: 0 for an example that is not present
    norms: jax.Array
    # float32[batch, groups]: what each gradient is multiplied by twice. Without meaning
    # for an example that does not count.
    roots: jax.Array
    # float32[batch, groups]: what it is multiplied by altogether, for reports. 0 for an
    # example that does not count.
    factors: jax.Array
    counts: jax.Array  # bool[batch]: is present and has finite norms


def limits_of(max_norm: Any, argument: str) -> Limits:
    """The limits of a number or of a tree of them.

    Raises:
      TypeError, ValueError: something that is not a limit, an array of several, or no
        limit at all.
    """
    found = jax.tree_util.tree_flatten_with_path(max_norm, is_leaf=_is_whole)
    entries, treedef = found
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
    paths = [path for path, _ in entries]
    values = [value for _, value in entries]
    return Limits(values, numbered(paths), treedef)


def _is_whole(limit: Any) -> bool:
    # A rule is a tree to JAX. Examples have no steps that it could learn from.
    return limit is None or is_rule(limit)


def numbered(paths: list[Any]) -> prefix.Prefix:
    """The prefix that gives each of these paths its number."""
    return prefix.Prefix(
        tuple((path, number) for number, path in enumerate(paths))
    )


def weigh(
    grads: Any,
    present: jax.Array,
    *,
    limits: Limits,
    shrink: Shrink,
    call: str,
) -> Weights:
    """Norms and factors of gradients with a leading batch axis."""

    def of_one(grad: Any) -> jax.Array:
        return _norms(grad, limits, call)

    norms = jax.vmap(of_one, axis_size=present.size)(grads)
    counts = present & jnp.all(jnp.isfinite(norms), axis=1)
    known = jnp.where(counts[:, None], norms, 0.0)
    new = _shrunk(known, limits, shrink, call)
    factor = factor_between(known, new)
    return Weights(
        norms=jnp.where(present[:, None], norms, 0.0),
        roots=factor.root,
        factors=jnp.where(counts[:, None], factor.reported, 0.0),
        counts=counts,
    )


def weighted_sum(grads: Any, weights: Weights, groups: list[int]) -> Any:
    """The sum over the batch axis, in float32 or wider, of each leaf stretched by the
    factors of its group.
    """
    leaves, treedef = jax.tree.flatten(grads)
    sums = []
    for leaf, group in zip(leaves, groups):
        root = weights.roots[:, group]
        sums.append(sum_of_leaf(leaf, root, weights.counts))
    return treedef.unflatten(sums)


def batch_size(tree: Any, argument: str) -> int:
    """The size that the first axes of all leaves share.

    Raises:
      ValueError: there are no leaves, they have no first axis, or their sizes differ.
    """
    entries = jax.tree_util.tree_flatten_with_path(tree)[0]
    shapes = {
        prefix.name(path) or "it": jnp.shape(leaf) for path, leaf in entries
    }
    sizes = {shape[:1] for shape in shapes.values()}
    if not all(shapes.values()) or len(sizes) != 1:
        raise ValueError(
            f"{argument} must be arrays whose first axis counts examples, of one size, "
            f"got the shapes {shapes}."
        )
    return next(iter(shapes.values()))[0]


def along_batch(per_example: jax.Array, leaf: jax.Array) -> jax.Array:
    """One number for each example, in a shape that broadcasts against a leaf with a
    leading batch axis.
    """
    return per_example.reshape(-1, *(1,) * (leaf.ndim - 1))


def _norms(grad: Any, limits: Limits, call: str) -> jax.Array:
    """The norms of one example's gradient, float32[groups]."""
    # Summed on each device alone: devices that share a batch hold different examples.
    pairs = []
    for number, leaf in zip(
        limits.group_of_each(grad, call), clipped_leaves(jax.tree.leaves(grad))
    ):
        if leaf is not None:
            pairs.append((Leaf(number), leaf))
    plan = Plan(tuple(leaf for leaf, _ in pairs), len(limits.values))
    return jnp.stack(norms_of(plan, [x for _, x in pairs]))


def _shrunk(
    norms: jax.Array, limits: Limits, shrink: Shrink, call: str
) -> jax.Array:
    """The norms that gradients of these norms get."""
    known = [jnp.inf if limit is None else limit for limit in limits.values]
    limit = jnp.stack([held_in(norms.dtype, each) for each in known])
    # A traced limit may be negative, and then counts as 0.
    limit = jnp.broadcast_to(jnp.maximum(limit, 0), norms.shape)
    limit = split_as(limit, jax.typeof(norms))
    short = shrunk_by(shrink, norms, norms, limit, call)
    # Without a limit the shrink is not used: normalize would make the norm inf.
    return jnp.where(limit == jnp.inf, norms, short)


def sum_of_leaf(
    leaf: jax.Array, root: jax.Array, counts: jax.Array
) -> jax.Array:
    """The sum over the batch axis of what counts, stretched, in float32 or wider."""
    wide = np.promote_types(leaf.dtype, root.dtype)
    stretched = stretch(leaf.astype(wide), along_batch(root, leaf))
    # Selected, since 0 times NaN is NaN.
    kept = jnp.where(along_batch(counts, leaf), stretched, 0)
    # A dot, which on a CPU is four times as fast as a sum over the first axis. At the
    # highest precision, because GPU and TPU would round to fewer bits.
    ones = jnp.ones(counts.shape, wide)
    return jnp.tensordot(ones, kept, axes=1, precision=lax.Precision.HIGHEST)
