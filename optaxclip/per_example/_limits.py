"""Limits, and the factors of examples that follow from them:

    f_i = shrink(|g_i|, C) / |g_i|

A group of parameters has a limit, and in each example a norm and a factor.
"""

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer

from .. import _trees as trees
from .._checks import check_limit, check_scalar, in_norm_dtype, is_function, shown
from .._factors import factor_between, shrunk_by, times_square
from .._mesh import AxisNames
from .._mesh_types import varying
from .._prefixes import Prefix
from .._reduce import norms_of
from .._specs import LeafSpec, NormPlan
from ..rules._rule import is_rule
from ..shrinks import Shrink

Arrays = list[Array]
# How many times longer the terms of a gradient may be than their sum. Where they cancel
# more, rounding is too large a part of it, and the example counts as longer than it is.
CANCELS = 16


class Weights(NamedTuple):
    """Norms and factors of the examples of a batch."""

    # float32[batch, groups]: 0 for an example that is not present
    norms: Array
    # float32[batch, groups]: what each gradient is multiplied by twice. Without meaning
    # for an example that does not count.
    roots: Array
    # float32[batch, groups]: what each gradient is multiplied by altogether, for
    # reports. 0 for an example that does not count.
    factors: Array
    counts: Array  # bool[batch]: is present and has finite norms
    shares: Array  # float32[batch]: 1 over the divisor of the sum, for all the same

    def total(self, leaf: Array, group: int) -> Array:
        """The sum over the batch of the gradients that count, times the factors of a
        group, in float32 or wider.
        """
        root = along_batch(self.roots[:, group], leaf)
        counts = along_batch(self.counts, leaf)
        wide = np.promote_types(leaf.dtype, root.dtype)
        # Selected, since 0 times NaN is NaN.
        kept = jnp.where(counts, times_square(leaf.astype(wide), root), 0)
        # A dot, which on a CPU is four times as fast as a sum over the first axis. At
        # the highest precision, because GPU and TPU would round to fewer bits.
        highest = lax.Precision.HIGHEST
        shares = self.shares.astype(wide)
        return jnp.tensordot(shares, kept, axes=1, precision=highest)


class Limits(NamedTuple):
    """A tree prefix of limits. Each part of the gradient that has a limit is a group,
    with its own norm and factor.
    """

    call: str  # of the user
    # for each group a number, a function of its norms, or None for no limit
    values: list[Any]
    shrink: Shrink
    table: Prefix = Prefix(())  # path in the tree, number of the group
    treedef: Any = None
    groups: Sequence[int] = ()  # for each leaf, the number of its group
    # for each leaf, the mesh axes over which it is split. () if no leaf is
    splits: Sequence[AxisNames] = ()
    divisor: Any = 1  # of the sum

    def joint(self) -> Any:
        """The limit of all groups together: the root of the sum of their squares. None
        if a group is known to have none.
        """
        is_traced = False
        for limit in self.values:
            if limit is None or is_function(limit):
                return None
            if isinstance(limit, Tracer):
                is_traced = True
            elif math.isinf(limit):
                return None
        # Numbers that are not traced stay so, for `sensitivity` of dropin.jax_privacy.
        if not is_traced:
            return np.float64(math.hypot(*map(float, self.values)))
        dtype = jnp.result_type(float)
        # A traced limit may be negative, and then counts as 0.
        limits = [jnp.maximum(in_norm_dtype(dtype, limit), 0) for limit in self.values]
        return reduce(jnp.hypot, limits) * (1 + len(limits) * 2.0**-22)

    def weigh(
        self, leaves: Arrays, present: Array, term_bounds: Arrays | None = None
    ) -> Weights:
        """Norms and factors of gradients with a leading batch axis.

        `term_bounds` has for each leaf a bound of sum |term| over the terms of an
        example's gradient that are added up together with those of the others, 0 where
        the gradient is made before. None if all are made before.
        """
        splits = self.splits or [()] * len(leaves)
        specs = []
        for group, mesh_axes in zip(self.groups, splits):
            specs.append(LeafSpec(norm_index=group, summed_over=mesh_axes))
        plan = NormPlan(tuple(specs), len(self.values), ord=None)

        def norms_of_one(leaves: Arrays) -> Array:
            return jnp.stack(norms_of(plan, leaves))

        norms_of_batch = jax.vmap(norms_of_one, axis_size=present.size)
        norms = norms_of_batch(leaves)
        if term_bounds:
            least = norms_of_batch(lax.stop_gradient(term_bounds)) / CANCELS
            norms = jnp.maximum(norms, least.astype(norms.dtype))
        return self.weights(norms, present)

    def weights(self, norms: Array, present: Array) -> Weights:
        """Factors of gradients with these norms, [batch, groups]."""
        counts = present & jnp.all(jnp.isfinite(norms), axis=1)
        counted_norms = jnp.where(counts[:, None], norms, 0.0)
        norms_or_nan = jnp.where(counts[:, None], norms, jnp.nan)
        norms_or_nan = lax.stop_gradient(norms_or_nan)
        limits = []
        for group, limit in enumerate(self.values):
            if limit is None:
                limit = jnp.inf
            if is_function(limit):
                # Each device gets the norms of all, in shard_map too.
                all_norms = norms_or_nan[:, group]
                for name in sorted(varying(all_norms)):
                    all_norms = lax.all_gather(all_norms, name, tiled=True)
                limit = limit(all_norms)
                check_scalar(f"{self.call}: what max_norm returns", limit)
                # Without an example there is no median.
                limit = jnp.where(jnp.any(counts), limit, 0)
            limits.append(in_norm_dtype(norms.dtype, limit))
        # A traced limit may be negative, and then counts as 0.
        limits_of_groups = jnp.maximum(jnp.stack(limits), 0)
        limits_of_norms = jnp.broadcast_to(limits_of_groups, norms.shape)
        new_norms = shrunk_by(self.shrink, counted_norms, limits_of_norms, self.call)
        factor = factor_between(counted_norms, new_norms)
        return Weights(
            norms=jnp.where(present[:, None], norms, 0.0),
            roots=factor.root,
            factors=jnp.where(counts[:, None], factor.reported, 0.0),
            counts=counts,
            shares=jnp.ones_like(counted_norms[:, 0])
            / in_norm_dtype(norms.dtype, self.divisor),
        )


def limits_of(max_norm: Any, call: str, shrink: Shrink) -> Limits:
    """The limits of a number, a function, or of a tree of them.

    Raises:
      TypeError, ValueError: something that is not a limit, an array of several, or no
        limit at all.
    """
    argument = f"{call}: max_norm"

    def is_limit(node: Any) -> bool:
        # To JAX a rule is a tree, and so is a function of jax.tree_util.Partial. A rule
        # is refused later: examples have no steps that it could learn from.
        return node is None or is_rule(node) or is_function(node)

    limits, treedef = jax.tree.flatten_with_path(max_norm, is_leaf=is_limit)
    if not limits:
        raise ValueError(f"{argument} has no limit in it, got {shown(max_norm)}.")
    values = []
    groups = []
    for group, (path, limit) in enumerate(limits):
        if limit is not None and not is_function(limit):
            argument_of_path = f"{argument} for {trees.name(path)!r}"
            check_limit(argument_of_path if path else argument, limit, is_scalar=True)
        values.append(limit)
        groups.append((path, group))
    return Limits(call, values, shrink, Prefix(tuple(groups)), treedef)


def along_batch(per_example: Array, leaf: Array) -> Array:
    """One number for each example, in a shape that broadcasts against a leaf with a
    leading batch axis.
    """
    return per_example.reshape(-1, *(1,) * (leaf.ndim - 1))
