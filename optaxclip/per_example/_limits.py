"""Limits, and the factors of examples that follow from them:

    f_i = shrink(|g_i|, C) / |g_i|

Parameters that share a limit C are a group. Each example has a norm and a factor for
each group.

Limits exist three times. `LimitTree` is what the user gave, before any call. In
`Problem.limits` its numbers are arguments of a call, which shard_map hands to each
device. `Limits` joins these with the groups and the splits of the parameters.
"""

import math
from collections.abc import Callable, Sequence
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
from .._prefixes import Prefix, lookup
from .._reduce import norms_of
from .._specs import LeafSpec, NormPlan
from .._trees import PyTree
from ..rules._rule import is_rule
from ..shrinks import Shrink, hard, lengthening_of
from ._problem import Problem

Arrays = list[Array]
# How many times longer the terms of a gradient may be than their sum. Where they cancel
# more, rounding is too large a part of the sum, and the example counts as longer than
# it is.
MAX_CANCELLATION = 16
# Numbers below 1.2e-38 may be flushed to 0. The bounds leave them out, which is proved
# for limits from this on, and for factors up to the limit over this.
LEAST_LIMIT = 1e-5


class Weights(NamedTuple):
    """Norms and factors of the examples of a batch."""

    # float32[batch, groups]: 0 for an example that is masked
    norms: Array
    # float32[batch, groups]: the square roots of the factors. Without meaning for an
    # example that does not count.
    roots: Array
    # float32[batch, groups]: the factors, for reports. 0 for an example that does not
    # count.
    factors: Array
    counts: Array  # bool[batch]: is not masked, and has finite norms
    shares: Array  # float32[batch]: 1 / divisor, the same number for all examples

    def total(self, leaf: Array, group: int) -> Array:
        """The sum over the batch of the gradients that count, times the factors of a
        group and the shares, in float32 or wider.
        """
        root = along_batch(self.roots[:, group], leaf)
        counts = along_batch(self.counts, leaf)
        wide = np.promote_types(leaf.dtype, root.dtype)
        # Selected, since 0 times NaN is NaN.
        clipped = jnp.where(counts, times_square(leaf.astype(wide), root), 0)
        # A dot, which on a CPU is four times as fast as a sum over the first axis. At
        # the highest precision, because GPU and TPU would round to fewer bits.
        return jnp.tensordot(
            self.shares.astype(wide), clipped, axes=1, precision=lax.Precision.HIGHEST
        )


class Limits(NamedTuple):
    """The limits of the groups, and the group of each parameter, on a device."""

    call: str  # the function that the user called, for errors
    # For each group a number, a function of its norms, or None for no limit
    values: Sequence[Any]
    shrink: Shrink
    groups: Sequence[int]  # for each parameter, the number of its group
    splits: Sequence[AxisNames]  # for each parameter, the mesh axes that split it
    divisor: Any  # of the sum

    def weigh(
        self, leaves: Arrays, present: Array, term_bounds: Arrays | None = None
    ) -> Weights:
        """Norms and factors of gradients with a leading batch axis.

        `term_bounds` has a number [batch] for each leaf: at least as long as all terms
        of an example's gradient together, where these are only added up with those of
        other examples. It is 0 where the gradient itself is made. None: all gradients
        were made.
        """
        specs = []
        for group, mesh_axes in zip(self.groups, self.splits):
            specs.append(LeafSpec(norm_index=group, mesh_of_summed=mesh_axes))
        plan = NormPlan(tuple(specs), len(self.values), ord=None)

        def norms_of_one(leaves: Arrays) -> Array:
            return jnp.stack(norms_of(plan, leaves))

        norms_of_batch = jax.vmap(norms_of_one, axis_size=present.size)
        norms = norms_of_batch(leaves)
        if term_bounds:
            least = norms_of_batch(lax.stop_gradient(term_bounds)) / MAX_CANCELLATION
            norms = jnp.maximum(norms, least.astype(norms.dtype))
        return self._weights(norms, present)

    def _weights(self, norms: Array, present: Array) -> Weights:
        """Factors of gradients with these norms, [batch, groups]."""
        counts = present & jnp.all(jnp.isfinite(norms), axis=1)
        counted_norms = jnp.where(counts[:, None], norms, 0.0)
        limits = []
        for group, value in enumerate(self.values):
            limit = value
            if value is None:
                limit = jnp.inf
            elif is_function(value):
                limit = self._limit_from(value, norms[:, group], counts)
            limits.append(in_norm_dtype(norms.dtype, limit))
        # A traced limit may be negative, and then counts as 0.
        limits_of_groups = jnp.maximum(jnp.stack(limits), 0)
        limits_of_norms = jnp.broadcast_to(limits_of_groups, norms.shape)
        new_norms = shrunk_by(self.shrink, counted_norms, limits_of_norms, self.call)
        factor = factor_between(counted_norms, new_norms)
        ones = jnp.ones_like(counted_norms[:, 0])
        return Weights(
            norms=jnp.where(present[:, None], norms, 0.0),
            roots=factor.root,
            factors=jnp.where(counts[:, None], factor.reported, 0.0),
            counts=counts,
            shares=ones / in_norm_dtype(norms.dtype, self.divisor),
        )

    def _limit_from(
        self, function: Callable[[Array], Any], norms: Array, counts: Array
    ) -> Array:
        """The limit that a function computes from the norms of a group, of all devices
        in shard_map too.
        """
        all_norms = lax.stop_gradient(jnp.where(counts, norms, jnp.nan))
        for name in sorted(varying(all_norms)):
            all_norms = lax.all_gather(all_norms, name, tiled=True)
        limit = function(all_norms)
        check_scalar(f"{self.call}: what max_norm returns", limit)
        # Without an example there is no median.
        return jnp.where(jnp.any(counts), limit, 0)


class LimitTree(NamedTuple):
    """`max_norm`: a tree prefix of the parameters, with a limit for each group."""

    values: list[Any]  # as in `Limits`
    shrink: Shrink
    groups: Prefix  # the path of each limit, and the number of its group
    treedef: Any

    def on_device(self, problem: Problem) -> Limits:
        """The limits of a problem, whose numbers may be arrays of a device.

        Raises:
          ValueError: limits that do not fit the parameters.
        """
        argument = f"{problem.call}: max_norm"
        return Limits(
            problem.call,
            problem.limits,
            self.shrink,
            groups=lookup(self.groups, problem.params, argument),
            splits=problem.splits,
            divisor=problem.divisor,
        )

    def joint(self) -> Any:
        """The limit of all groups together, the root of the sum of their squares, or
        None where none is proved. For a traced limit that is not proved it is inf.
        """
        if not _is_proved(self.shrink):
            return None
        is_traced = False
        for limit in self.values:
            if limit is None or is_function(limit):
                return None
            if isinstance(limit, Tracer):
                is_traced = True
            # As a float: under jit JAX would trace a comparison of an array.
            elif math.isinf(limit) or 0 < float(limit) < LEAST_LIMIT:
                return None
        # By NumPy, so that `sensitivity` of dropin.jax_privacy is no tracer under jit.
        if not is_traced:
            return np.float64(math.hypot(*map(float, self.values)))
        dtype = jnp.result_type(float)
        limits = []
        for value in self.values:
            # A traced limit may be negative, and then counts as 0.
            limit = jnp.maximum(in_norm_dtype(dtype, value), 0)
            is_too_small = (limit > 0) & (limit < LEAST_LIMIT)
            limits.append(jnp.where(is_too_small, jnp.inf, limit))
        return reduce(jnp.hypot, limits) * (1 + len(limits) * 2.0**-22)


def limits_of(max_norm: PyTree, call: str, shrink: Shrink) -> LimitTree:
    """The limits of a number, a function, or of a tree of them.

    Raises:
      TypeError, ValueError: something that is not a limit, an array of several, or no
        limit at all.
    """
    argument = f"{call}: max_norm"

    def is_limit(node: object) -> bool:
        # JAX takes a rule for a tree, and a function of jax.tree_util.Partial too. A
        # rule is refused later: examples have no steps that it could learn from.
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
    return LimitTree(values, shrink, Prefix(tuple(groups)), treedef)


def over_limit(norm: Array, limit: Array) -> Array:
    """The shrink of `rescale_to_unit_norm` in dropin.jax_privacy: the clipped norm over
    the limit.
    """
    return hard(norm, limit) / limit


def _is_proved(shrink: Shrink) -> bool:
    """Whether a sum clipped by this shrink has a proved bound."""
    # `over_limit` multiplies by at most 1 over the limit, and its new limit is 1.
    return shrink is over_limit or lengthening_of(shrink) <= 1 / LEAST_LIMIT


def along_batch(per_example: Array, leaf: Array) -> Array:
    """One number for each example, in a shape that broadcasts against a leaf with a
    leading batch axis.
    """
    return per_example.reshape(-1, *(1,) * (leaf.ndim - 1))
