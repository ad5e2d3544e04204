"""Proved bounds of a sum of clipped gradients, in units of the limit.

A clipped gradient is as long as the limit at most, but for rounding:

    e     the relative error of a clipped norm: of the sum of all squares, plus the
          largest of a gram matrix, plus the largest from a norm to its factor
    r     how far rounding moves the terms of one example in the sum of B examples, at
          the parameter where it is largest

    excess = e + r                    one example adds at most 1 + excess
    change = excess + 2 (B - 1) r     one example changes the sum by at most 1 + change.
                                      The terms of all others may be rounded up with it
                                      and down without it
    norm_of_sum = B (1 + excess)      the norm of the sum is at most this

How r is computed:

    r = k (gamma(N) + t)
    gamma(n) = n u / (1 - n u)        the relative error of n roundings

    u     the unit of rounding, 2^-24 for float32. Matrix products of the sum have JAX's
          highest precision, so this holds on a GPU and TPU too
    N     how many roundings a term goes through: width + turns + 4. By gram
          min(width * positions, block) + 4 + devices + turns + 4. The width is how many
          examples all devices take at once, in B / width turns, and a block is how many
          terms are added up before Kahan's sum
    t     2^-16 for each product whose factors are split into two bfloat16 numbers
    k     the sum of |terms| of a clipped gradient is at most k limits. Where gradients
          are added up k is 1 + e. Where norms are by gram it is 17, MAX_CANCELLATION +
          1: the terms of positions may cancel to 1/16

docs/numerics.md has the proof.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.backend import backends

from .._devices.mesh import device_count
from .._jaxpr import has_bits_that_vmap_changes, source_line
from ._choose import Choice
from ._example_factors import MAX_CANCELLATION
from ._ghost.norms import gamma
from ._ghost.plans import GramPlan, LeafPlan, OuterProductPlan
from ._passes import block_size
from ._traced import TracedProblem

# Roots and quotients on the way to a factor: three roots in a norm by product, a
# quotient in a shrink, and two roots and a quotient in the root of the factor, which is
# multiplied by twice.
ROOTS_AND_QUOTIENTS = 3 + 1 + 2 * 3
# One of the limit to its dtype, a product in the norm, one in the shrink, and one in
# the root, which counts twice.
OTHER_ROUNDINGS = 1 + 1 + 1 + 2 * 1
# `factor_between` shortens by 4 eps, and eps is two roundings.
SHORTENED_BY = 8
# XLA promises no order of a sum. It is assumed that a GPU or TPU adds up a long one in
# at least this many parts, in threads or in the lanes of its vectors.
PARTS_OF_A_SUM = 1024


class Bounds(NamedTuple):
    """Bounds of the sum over all devices, in units of the limit. All are inf where
    nothing is proved.
    """

    excess: float = np.inf  # one example adds at most 1 + excess
    change: float = np.inf  # one example changes the sum by at most 1 + change
    norm_of_sum: float = np.inf  # the norm of the sum is at most this
    obstacle: str | None = None  # why nothing is proved, as a sentence


class LeafErrors(NamedTuple):
    """What rounding adds by one parameter."""

    is_by_gram: bool
    roundings_of_squares: int  # in the sum of squares of an example
    error_of_gram: float  # relative, of the norm. 0 if it is not by gram
    error_of_factor: float  # relative, from the sum of squares to the factor
    error_of_terms: float  # gamma(N) + t: of the terms of the sum, relative to each


def bounds_of(problem: TracedProblem, choice: Choice) -> Bounds:
    """The bounds of the sum that a choice computes. Only for sums (`problem.is_sum`).
    Nothing is proved of a mean.
    """
    for eqn in problem.gradient_program.jaxpr.eqns:
        if has_bits_that_vmap_changes(eqn):
            return Bounds(
                obstacle="the loss draws random numbers from keys other than threefry's"
                f"{source_line(eqn)}, and jax.vmap draws those of all examples from "
                'the key of the first. Take jax.random.key(seed, impl="threefry2x32").'
            )
    if problem.has_symbolic_sizes:
        return Bounds(obstacle="a size is a symbol of jax.export. Give it as a number.")
    errors = _errors_of_leaves(problem, choice)
    error_of_norm = _error_of_norm(errors)
    error_of_sum = 0.0
    for leaf in errors:
        # k: the terms of a clipped gradient together, in limits
        size_of_terms = 1 + error_of_norm
        if leaf.is_by_gram:
            size_of_terms = MAX_CANCELLATION + 1
        error_of_sum = max(error_of_sum, size_of_terms * leaf.error_of_terms)
    excess = error_of_norm + error_of_sum
    if excess == np.inf:
        return Bounds(
            obstacle="the rounding of so many terms may change all of the sum. Take a "
            'larger microbatch, a smaller batch or method="one_pass".'
        )
    total_size = problem.size * device_count(problem.batch_axes)
    return Bounds(
        excess=excess,
        change=excess + 2 * (total_size - 1) * error_of_sum,
        norm_of_sum=total_size * (1 + excess),
    )


def _errors_of_leaves(problem: TracedProblem, choice: Choice) -> list[LeafErrors]:
    """What rounding adds by each parameter."""
    # In shard_map and pmap the caller adds up the sums of devices, by lax.psum. The
    # proof adds up one microbatch of each device, and then the turns. So the width is
    # that of all devices together.
    devices = device_count(problem.batch_axes)
    width_of_all = choice.width * devices
    turns = -(-problem.size // choice.width)
    leaves = jax.tree.leaves(problem.params)
    plans = choice.plans(problem)
    errors = []
    for plan, leaf, split_axes in zip(plans, leaves, problem.axes_of_params):
        # A norm by product squares a row and a column (together at most one number more
        # than the matrix), and then the product of their norms.
        roundings_of_squares = 2
        error_of_gram = 0.0
        is_by_gram = isinstance(plan, GramPlan)
        if is_by_gram:
            # The terms of a block are added up. Kahan's sum has two roundings for the
            # blocks of an example, and two for those of all examples.
            block = min(width_of_all * plan.positions, block_size())
            roundings_of_term = block + 2 + 2 + devices
            error_of_gram = _error_of_gram(plan)
        else:
            roundings_of_term = width_of_all
            # Norms by gram square no gradients. A complex number has two squares.
            squares = 2 * leaf.size if jnp.iscomplexobj(leaf) else leaf.size
            roundings_of_squares += squares * device_count(split_axes)
        # A gradient times its factor and the divisor is rounded four times.
        roundings_of_term += turns + 4
        dtype = _dtype_of_sum(plan, leaf)
        error_of_terms = gamma(roundings_of_term, dtype) + _error_of_split_factors(plan)
        leaf_errors = LeafErrors(
            is_by_gram,
            roundings_of_squares,
            error_of_gram,
            error_of_factor=gamma(_roundings_of_factor(), dtype),
            error_of_terms=error_of_terms,
        )
        errors.append(leaf_errors)
    return errors


def _error_of_norm(errors: list[LeafErrors]) -> float:
    """The relative error of the norm of a clipped gradient, e above. 0 for a loss
    without parameters.
    """
    roundings_of_squares = sum(leaf.roundings_of_squares for leaf in errors)
    error_of_gram = max((leaf.error_of_gram for leaf in errors), default=0.0)
    error_of_factor = max((leaf.error_of_factor for leaf in errors), default=0.0)
    return _error_of_squares(roundings_of_squares) + error_of_gram + error_of_factor


def _is_only_on_cpus() -> bool:
    """Whether JAX has no other platform, on any of which a program may run."""
    return set(backends()) == {"cpu"}


def _error_of_squares(roundings: int) -> float:
    """The relative error of a norm from rounding its sum of squares:
    sqrt(1 + gamma(n)) - 1 for n roundings. Only a CPU adds up squares in float64.
    """
    if _is_only_on_cpus():
        error_of_square = gamma(roundings, np.float64)
    else:
        # n / 1024 roundings in each part, and 1024 to add up the parts
        longest_chain = roundings // PARTS_OF_A_SUM + PARTS_OF_A_SUM
        error_of_square = gamma(min(roundings, longest_chain), np.float32)
    return float(np.sqrt(1 + error_of_square) - 1)


def _roundings_of_factor() -> int:
    """How many roundings from sums of squares to a factor may lengthen an example."""
    roundings = ROOTS_AND_QUOTIENTS
    if not _is_only_on_cpus():
        # GPU and TPU round a root or a quotient up to four times as much as a CPU.
        roundings *= 4
    return roundings + OTHER_ROUNDINGS - SHORTENED_BY


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


def _error_of_split_factors(plan: LeafPlan) -> float:
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
    """The part of e from a gram matrix, sqrt(1 + 16^2 gamma(R + K + L T^2 + 1)) - 1,
    with R rows, K columns, a stack of L matrices, and T positions. Its sums are in
    float64.
    """
    error_of_square = gamma(plan.roundings, np.float64)
    return float(np.sqrt(1 + MAX_CANCELLATION**2 * error_of_square) - 1)
