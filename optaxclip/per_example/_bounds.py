"""Proved bounds of a sum of clipped gradients, in units of the limit.

    gamma(n) = n u / (1 - n u)               the most that n roundings take from a sum
    excess = e + k gamma(N)                  one example adds at most 1 + excess
    change = excess + 2 (B - 1) k gamma(N)   one of B examples changes it by 1 + change

u     the unit of rounding, 2^-24 for float32: products have the highest precision
N     how many roundings a term of the sum goes through
k     sum of |terms| <= k |gradient|. 1 where gradients are added up. 17 where norms are
      by gram, MAX_CANCELLATION + 1: the terms of positions may cancel to 1/16
e     the error of a norm: of its sum of squares, and of norms by gram
B     examples

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
# factor, and the product with it have seven of them.
ROUNDINGS_OF_FACTOR = 32
# XLA promises no order of a sum. That a GPU or TPU adds up a long one in at least this
# many parts, in threads or in the lanes of its vectors, is assumed.
PARTS_OF_A_SUM = 1024


class Bounds(NamedTuple):
    """Bounds of the sum over all devices, in units of the limit."""

    excess: float  # what one example adds at most, less 1
    change: float  # how much one example changes the sum at most, less 1
    longest: float  # how long the sum may be


def bounds_of(problem: Problem, choice: Choice) -> Bounds:
    """The bounds of a problem whose gradients are clipped by a choice."""
    # In shard_map and pmap the caller adds up the sums of devices, by lax.psum.
    devices = device_count(problem.mesh_axes)
    size = problem.present.size * devices
    leaves = jax.tree.leaves(problem.params)
    sizes = [size, *(leaf.size for leaf in leaves)]
    # Sizes of jax.export may be symbols.
    is_known = all(isinstance(size, int) for size in sizes)
    # jax.vmap draws the bits of all examples from the key of the first one.
    equations = problem.program.jaxpr.eqns
    if not is_known or any(map(has_bits_that_vmap_changes, equations)):
        return Bounds(excess=np.inf, change=np.inf, longest=np.inf)
    # All devices add up the examples of a turn, and then there is a sum over turns.
    width = min((choice.microbatch or size) * devices, size)
    turns = -(-size // width)
    squares = ROUNDINGS_OF_FACTOR
    norm_errors = [0.0]
    sum_errors = [0.0]
    for plan, leaf, mesh_axes in zip(choice.plans(problem), leaves, problem.splits):
        # A norm by product has a square for each row and column, and one for itself:
        # at most two more than the parameter has numbers.
        squares += 2
        if isinstance(plan, GramPlan):
            terms_over_gradient = MAX_CANCELLATION + 1
            # The terms of a block, and two roundings of Kahan's sum twice: for the
            # blocks of an example, and for those of all examples
            block = min(width * plan.positions, block_size())
            roundings = block + 2 + 2 + devices
            norm_errors.append(_error_of_gram(plan))
        else:
            terms_over_gradient = 1
            roundings = width
            # A norm by gram is one number instead.
            squares += leaf.size * device_count(mesh_axes)
        # A gradient times its factor and the divisor is rounded four times.
        error = gamma(roundings + turns + 4, _dtype_of_sum(plan, leaf))
        error += _error_of_factors(plan)
        sum_errors.append(terms_over_gradient * error)
    error_of_sum = max(sum_errors)
    excess = _error_of_squares(squares) + max(norm_errors) + error_of_sum
    return Bounds(
        excess,
        change=excess + 2 * (size - 1) * error_of_sum,
        longest=size * (1 + excess),
    )


def _error_of_squares(count: int) -> float:
    """What the sum of all squares may miss of a norm: sqrt(1 + gamma(n)) - 1, for n
    squares, which only a CPU adds up in float64.
    """
    if has_accelerator():
        one_after_another = min(count, count // PARTS_OF_A_SUM + PARTS_OF_A_SUM)
        error_of_square = gamma(one_after_another, np.float32)
    else:
        error_of_square = gamma(count, np.float64)
    return float(np.sqrt(1 + error_of_square) - 1)


def has_accelerator() -> bool:
    """Whether a program may run elsewhere than on a CPU."""
    return set(backends()) != {"cpu"}


def _dtype_of_sum(plan: LeafPlan, leaf: Array) -> np.dtype:
    """The dtype of the fewest bits to which terms or their sum are rounded, float32 or
    wider. A loss may compute in fewer bits than the parameter has.
    """
    dtypes = [leaf.dtype]
    for site in plan.sites:
        dtypes += [site.out_types[index].dtype for index in site.tapped]
    if isinstance(plan, OuterProductPlan):
        dtypes += plan.matrices[0].dtypes
    wide_dtypes = [np.promote_types(dtype, np.float32) for dtype in dtypes]
    return max(wide_dtypes, key=lambda dtype: float(jnp.finfo(dtype).eps))


def _error_of_factors(plan: LeafPlan) -> float:
    """What a cotangent times a factor loses where it is written as two bfloat16
    numbers, at all sites. Not where the gradient is kept instead.
    """
    if plan.kept_size:
        return 0.0
    error = 0.0
    for site in plan.sites:
        if any(out_type.dtype == jnp.bfloat16 for out_type in site.out_types):
            error += 2.0**-16
    return error


def _error_of_gram(plan: GramPlan) -> float:
    """e = sqrt(1 + 16^2 gamma(R + K + L T^2 + 1)) - 1 for sums in float64, with R rows,
    K columns, a stack of L matrices, and T positions.
    """
    error_of_square = gamma(plan.roundings, np.float64)
    return float(np.sqrt(1 + MAX_CANCELLATION**2 * error_of_square) - 1)
