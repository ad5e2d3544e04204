"""Proved bounds of a sum of clipped gradients, in units of the limit.

    gamma(n) = n u / (1 - n u)               bounds the relative error of n roundings
    excess = e + k gamma(N)                  one example adds at most 1 + excess
    change = excess + 2 (B - 1) k gamma(N)   one of B examples changes it by 1 + change

u     the unit of rounding, 2^-24 for float32: products have the highest precision
N     how many roundings a term of the sum goes through
k     the sum of |terms| is at most k |gradient|. k is 1 where gradients are added up.
      Where norms are by gram it is 17, MAX_CANCELLATION + 1: the terms of positions may
      cancel to 1/16
e     the relative error of a norm: rounding in its sum of squares, plus rounding in the
      gram matrix
B     how many examples there are

e and k gamma(N) are the largest of all parameters. docs/numerics.md has the proof.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.backend import backends

from .._jaxpr import has_bits_that_vmap_changes
from .._mesh import device_count
from ._choose import Choice
from ._ghost._norms import gamma
from ._ghost._plans import GramPlan, LeafPlan, OuterProductPlan
from ._limits import MAX_CANCELLATION
from ._passes import block_size
from ._problem import Problem

# GPU and TPU round a quotient or a root up to four times as much as a CPU. A norm, its
# factor, and the product with it have seven roundings: 28, and some to spare.
ROUNDINGS_OF_FACTOR = 32
# XLA promises no order of a sum. It is assumed that a GPU or TPU adds up a long one in
# at least this many parts, in threads or in the lanes of its vectors.
PARTS_OF_A_SUM = 1024


class Bounds(NamedTuple):
    """Bounds of the sum over all devices, in units of the limit."""

    excess: float  # one example adds at most 1 + excess
    change: float  # one example changes the sum by at most 1 + change
    longest: float  # the norm of the sum is at most this


def bounds_of(problem: Problem, choice: Choice) -> Bounds:
    """The bounds of the sum that a choice computes. All are inf where nothing is
    proved.
    """
    # jax.vmap draws the bits of all examples from the key of the first one.
    equations = problem.program.jaxpr.eqns
    is_one_draw = any(map(has_bits_that_vmap_changes, equations))
    if is_one_draw or problem.has_symbolic_sizes:
        return Bounds(excess=np.inf, change=np.inf, longest=np.inf)
    # In shard_map and pmap the caller adds up the sums of devices, by lax.psum. It is
    # counted as if the microbatches of all devices were added first, and then turns.
    devices = device_count(problem.mesh_axes)
    size = problem.size * devices
    width = choice.width * devices
    turns = -(-size // width)
    roundings_of_squares = ROUNDINGS_OF_FACTOR
    gram_errors = [0.0]
    sum_errors = [0.0]
    leaves = jax.tree.leaves(problem.params)
    for plan, leaf, mesh_axes in zip(choice.plans(problem), leaves, problem.splits):
        if isinstance(plan, GramPlan):
            terms_over_gradient = MAX_CANCELLATION + 1
            # The terms of a block are added up. Kahan's sum has two roundings for the
            # blocks of an example, and two for those of all examples.
            block = min(width * plan.positions, block_size())
            roundings_of_term = block + 2 + 2 + devices
            gram_errors.append(_error_of_gram(plan))
        else:
            terms_over_gradient = 1
            roundings_of_term = width
            # Norms by gram square no gradients.
            roundings_of_squares += leaf.size * device_count(mesh_axes)
        # One more number than the parameter, which a row and a column may have for a
        # norm by product, and one more squaring.
        roundings_of_squares += 2
        # A gradient times its factor and the divisor is rounded four times.
        roundings_of_term += turns + 4
        error = gamma(roundings_of_term, _dtype_of_sum(plan, leaf))
        error += _error_of_factors(plan)
        sum_errors.append(terms_over_gradient * error)
    error_of_sum = max(sum_errors)
    error_of_norm = _error_of_squares(roundings_of_squares) + max(gram_errors)
    excess = error_of_norm + error_of_sum
    return Bounds(
        excess,
        change=excess + 2 * (size - 1) * error_of_sum,
        longest=size * (1 + excess),
    )


def _error_of_squares(roundings: int) -> float:
    """How much too short a norm may be, since its sum of squares is rounded:
    sqrt(1 + gamma(n)) - 1 for n roundings. Only a CPU adds up squares in float64.
    """
    # A program may run on any of the platforms that JAX has.
    if set(backends()) == {"cpu"}:
        error_of_square = gamma(roundings, np.float64)
    else:
        in_parts = roundings // PARTS_OF_A_SUM + PARTS_OF_A_SUM
        error_of_square = gamma(min(roundings, in_parts), np.float32)
    return float(np.sqrt(1 + error_of_square) - 1)


def _dtype_of_sum(plan: LeafPlan, leaf: Array) -> np.dtype:
    """The dtype in which the sum over examples is rounded: float64 if the parameter and
    all arrays that the loss makes of it have 64 bits, otherwise float32.
    """
    dtypes = [leaf.dtype]
    for site in plan.sites:
        dtypes += [out_type.dtype for out_type in site.tapped_types]
    if isinstance(plan, OuterProductPlan):
        dtypes += plan.matrices[0].dtypes
    wide_dtypes = [np.promote_types(dtype, np.float32) for dtype in dtypes]
    return max(wide_dtypes, key=lambda dtype: float(jnp.finfo(dtype).eps))


def _error_of_factors(plan: LeafPlan) -> float:
    """The error of products of a cotangent and a factor that are split into two
    bfloat16 numbers, of all sites together. Plans that keep the gradient split none.
    """
    if plan.kept_size:
        return 0.0
    error = 0.0
    for site in plan.sites:
        if any(out_type.dtype == jnp.bfloat16 for out_type in site.out_types):
            error += 2.0**-16
    return error


def _error_of_gram(plan: GramPlan) -> float:
    """e = sqrt(1 + 16^2 gamma(R + K + L T^2 + 1)) - 1, with R rows, K columns, a stack
    of L matrices, and T positions. Its sums are in float64.
    """
    error_of_square = gamma(plan.roundings, np.float64)
    return float(np.sqrt(1 + MAX_CANCELLATION**2 * error_of_square) - 1)
