"""What is proved of a sum of clipped gradients, in units of the limit.

    gamma(n) = n u / (1 - n u)               what n roundings take from a sum at most
    excess = e + k gamma(N)                  one example adds 1 + excess
    change = excess + 2 (B - 1) k gamma(N)   one of B examples changes it by 1 + change

e is the error of a norm, and N counts the roundings of a sum. The gradients of examples
are terms of it, and k is 1. Norms by gram have an error, and terms that may be 16 times
as long as their gradient: k is 17. The largest of all parameters count.

docs/numerics.md has the proof.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .._mesh import device_count
from ._choose import Choice
from ._ghost._norms import rounding
from ._ghost._plans import GramPlan, LeafPlan
from ._limits import CANCELS
from ._passes import block_size
from ._problem import Problem


class Bounds(NamedTuple):
    """Bounds of the sum over all devices."""

    excess: float  # what one example adds, less 1
    change: float  # how much the sum changes by one example, less 1
    longest: float  # how long the sum is


def bounds_of(problem: Problem, choice: Choice) -> Bounds:
    """The bounds of a problem, however its program is chosen."""
    # In shard_map and pmap the caller adds up the sums of devices, by lax.psum.
    devices = device_count(problem.mesh_axes)
    size = problem.present.size * devices
    # How many examples are summed at once, and how often
    width = min((choice.microbatch or size) * devices, size)
    turns = -(-size // width)
    norm_errors = [0.0]
    sum_errors = [0.0]
    for plan, leaf in zip(choice.plans(problem), jax.tree.leaves(problem.params)):
        dtype = _dtype_of_sum(plan, leaf)
        # Those of the products are 4.
        roundings = turns + 4
        if not isinstance(plan, GramPlan):
            error = rounding(width + roundings, dtype)
            sum_errors.append(error + _error_of_factors(plan))
            continue
        # Two of Kahan's for the blocks of an example, and two for those of all
        block = min(width * plan.positions, block_size())
        error = rounding(block + 2 + 2 + devices + roundings, dtype)
        sum_errors.append((CANCELS + 1) * (error + _error_of_factors(plan)))
        norm_errors.append(_error_of_gram(plan))
    error_of_sum = max(sum_errors)
    excess = max(norm_errors) + error_of_sum
    return Bounds(
        excess,
        change=excess + 2 * (size - 1) * error_of_sum,
        longest=size * (1 + excess),
    )


def _dtype_of_sum(plan: LeafPlan, leaf: Array) -> np.dtype:
    """The dtype to which terms are rounded. A loss may compute in fewer bits than its
    parameters have.
    """
    dtype = np.promote_types(leaf.dtype, np.float32)
    out_types = [out_type for site in plan.sites for out_type in site.out_types]
    if not out_types:
        return dtype
    computed = np.dtype(np.float32)
    for out_type in out_types:
        computed = np.promote_types(computed, out_type.dtype)
    return max(dtype, computed, key=lambda x: float(jnp.finfo(x).eps))


def _error_of_factors(plan: LeafPlan) -> float:
    """What two bfloat16 numbers lose of a cotangent times a factor, at all sites."""
    if plan.kept_size:
        return 0.0
    error = 0.0
    for site in plan.sites:
        if any(out_type.dtype == jnp.bfloat16 for out_type in site.out_types):
            error += 2.0**-16
    return error


def _error_of_gram(plan: GramPlan) -> float:
    """e = sqrt(1 + 16^2 gamma(R + K + L T^2 + 1)) - 1, of sums in float64."""
    stack, rows, columns = plan.matrix_shape
    terms = rows + columns + stack * plan.positions**2 + 1
    error_of_square = rounding(terms, np.float64)
    return float(np.sqrt(1 + CANCELS**2 * error_of_square) - 1)
