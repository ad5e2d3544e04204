"""Norms and factors of the examples of a batch, and the sums of their gradients:

    f_i = shrink(|g_i|, C) / |g_i|
    sum_i f_i g_i / divisor

Parameters that share a limit C are a group. Each example has a norm and a factor for
each group.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .._factors import factor_between, shrunk_by, times_square
from .._norms.reduce import norms_of
from .._norms.specs import LeafSpec, NormPlan
from .._numbers import in_norm_dtype
from ._traced import TracedProblem

Arrays = list[Array]
# If the terms of a gradient cancel to less than 1/16 of sum |term|, rounding is too
# large a part of their sum. Then sum |term| / 16 counts as the norm.
MAX_CANCELLATION = 16


class NormSource(NamedTuple):
    """Where the norms of the examples' gradients by one parameter come from."""

    # [example, ...]: the gradients, or other arrays with the same norms: smaller ones,
    # or the norms themselves
    stand_ins: Array
    # float[example]: a bound of sum |term|, where gradients are never made (norms by
    # gram). The norm counts as at least 1 / MAX_CANCELLATION of it. None where the
    # weighted sum adds whole gradients.
    term_bounds: Array | None = None


def factors_of_examples(
    problem: TracedProblem, sources: list[NormSource], is_present: Array
) -> ExampleFactors:
    """Norms and factors of the examples of a batch.

    Args:
      problem: has the limits.
      sources: of the norms, for each parameter.
      is_present: bool[batch], not masked.
    """
    limits = problem.limits
    norms = _norms_of_examples(problem, sources, batch_size=is_present.size)
    is_counted = is_present & jnp.all(jnp.isfinite(norms), axis=1)
    counted_norms = jnp.where(is_counted[:, None], norms, 0.0)
    limits_of_groups = limits.numbers_for(norms, is_counted)
    limits_of_norms = jnp.broadcast_to(limits_of_groups, norms.shape)
    new_norms = shrunk_by(limits.shrink, counted_norms, limits_of_norms, problem.call)
    factor = factor_between(counted_norms, new_norms)
    divisor = 1 if problem.is_sum else problem.divisor
    ones = jnp.ones_like(counted_norms[:, 0])
    return ExampleFactors(
        norms=jnp.where(is_present[:, None], norms, 0.0),
        roots=factor.root,
        reported=jnp.where(is_counted[:, None], factor.reported, 0.0),
        is_counted=is_counted,
        inverse_divisor=ones / in_norm_dtype(norms.dtype, divisor),
    )


def _norms_of_examples(
    problem: TracedProblem, sources: list[NormSource], batch_size: int
) -> Array:
    """The norms [batch, groups] of the gradients, by all parameters of a group."""
    specs = []
    for group_index, split_axes in zip(problem.groups, problem.axes_of_params):
        specs.append(LeafSpec(norm_index=group_index, mesh_axes_of_summed=split_axes))
    plan = NormPlan(tuple(specs), len(problem.limits.values), ord=None)

    def norms_of_one(arrays: Arrays) -> Array:
        return jnp.stack(norms_of(plan, arrays))

    # Without parameters only `axis_size` says how many examples there are.
    norms_of_batch = jax.vmap(norms_of_one, axis_size=batch_size)
    norms = norms_of_batch([source.stand_ins for source in sources])
    bounds = [source.term_bounds for source in sources]
    if any(x is not None for x in bounds):
        no_terms = jnp.zeros(batch_size, jnp.float32)
        bounds = [no_terms if x is None else x for x in bounds]
        least_norms = norms_of_batch(lax.stop_gradient(bounds)) / MAX_CANCELLATION
        norms = jnp.maximum(norms, least_norms.astype(norms.dtype))
    return norms


class ExampleFactors(NamedTuple):
    """Norms and factors of the examples of a batch."""

    # Floats are float32, or float64 for 64-bit leaves.
    norms: Array  # float[batch, groups]: 0 for an example that is masked
    # float[batch, groups]: the square roots of the factors. Gradients are multiplied by
    # them twice. Without meaning for an example that does not count.
    roots: Array
    # float[batch, groups]: the factors, for reports. 0 for an example that does not
    # count.
    reported: Array
    is_counted: Array  # bool[batch]: is not masked, and has finite norms
    # float[batch]: the same number for all examples, for the dot of `weighted_sum`
    inverse_divisor: Array

    def of_group(self, group_index: int) -> GroupFactors:
        """The factors for the parameters of a group."""
        roots = self.roots[:, group_index]
        return GroupFactors(self.is_counted, roots, self.inverse_divisor)


class GroupFactors(NamedTuple):
    """What gradients by the parameters of a group are multiplied by:
    root * root * inverse_divisor. A root stays in the range of its dtype where its
    square would leave it.
    """

    is_counted: Array  # bool[batch]
    roots: Array  # float[batch]
    inverse_divisor: Array  # float[batch]

    def weighted_sum(self, leaf: Array) -> Array:
        """The sum over the batch of the gradients by a parameter that count, times
        their factors, over the divisor, in float32 or wider.
        """
        root = along_batch(self.roots, leaf)
        is_counted = along_batch(self.is_counted, leaf)
        wide = np.promote_types(leaf.dtype, root.dtype)
        # Selected, since 0 times NaN is NaN.
        clipped = jnp.where(is_counted, times_square(leaf.astype(wide), root), 0)
        # A dot, which on a CPU is four times as fast as a sum over the first axis. At
        # the highest precision, because GPU and TPU would round to fewer bits.
        return jnp.tensordot(
            self.inverse_divisor.astype(wide),
            clipped,
            axes=1,
            precision=lax.Precision.HIGHEST,
        )


def along_batch(per_example: Array, leaf: Array) -> Array:
    """One number for each example, in a shape that broadcasts against a leaf with a
    leading batch axis.
    """
    return per_example.reshape(-1, *(1,) * (leaf.ndim - 1))
