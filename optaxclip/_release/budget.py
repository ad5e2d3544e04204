"""The limit of the norm of everything as a budget, in one backward pass.

A backward pass sees groups of gradients one after the other: the last layer first, and
at the end the weights outside of the layers. With s_j the usual share of group j in the
square of the norm and c the limit, group j is clipped to a_j:

    left = c^2
    for each group j:
        a_j^2 = left * s_j / (s_j + shares of all later groups)
        clip the group to a_j
        left -= min(norm_j, a_j)^2

So all groups together never spend more than c^2, whatever their shares are. Where the
shares are as expected, every a_j^2 is s_j * c^2, which is the clip of the global norm.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from .._norms import global_norm

# Over about how many steps the shares are averaged. Shares change while a model trains:
# with 30 and 100, more steps below the limit are shortened (docs/release.md).
STEPS_OF_AVERAGE = 10
# A group that never had a gradient must not make 0 / 0, nor 0 * inf.
LEAST_SHARE = 1e-12


class Budget(NamedTuple):
    """What the groups of one backward pass may still spend, and their norms so far.

    Squares are relative to c^2, since the square of a norm may overflow.
    """

    limit: Array  # float[]: c
    portions: Array  # float[groups]: s_j / (s_j + shares of all later groups)
    later_portions: Array  # float[groups]: 1 - portions, without its cancellation
    left: Array  # float[]: from 1 to 0
    norms: Array  # float[groups]: before the clip
    norms_after: Array  # float[groups]


def first_shares(groups: int) -> Array:
    """The shares before the first step: all groups are alike."""
    return jnp.full(groups, 1 / groups, jnp.float32)


def new_budget(limit: Array, shares: Array) -> Budget:
    """The budget of a backward pass whose groups come in the order of their shares."""
    # In the dtype of the limit, so that the portions of a group and of all later groups
    # add up to 1 in it.
    shares = jnp.maximum(shares.astype(limit.dtype), LEAST_SHARE)
    shares_from_here = jnp.cumsum(shares[::-1])[::-1]
    # The last portion is s / s, which is exactly 1.
    portions = shares / shares_from_here
    shares_of_later = jnp.append(shares_from_here[1:], 0.0)
    later_portions = shares_of_later / shares_from_here
    return Budget(
        limit=limit,
        portions=portions,
        later_portions=later_portions,
        left=jnp.ones_like(limit),
        norms=jnp.zeros_like(portions),
        norms_after=jnp.zeros_like(portions),
    )


def limit_of_group(
    budget: Budget, group: Array | int, norm: Array
) -> tuple[Array, Budget]:
    """Returns the limit of a group, and the budget for the groups after it."""
    square_of_limit = budget.left * budget.portions[group]
    limit = budget.limit * jnp.sqrt(square_of_limit)
    is_over = norm >= limit
    square = (norm / budget.limit) ** 2
    spent = jnp.where(is_over, square_of_limit, square)
    # A group whose norm is NaN or inf becomes zeros or NaN, and spends nothing.
    spent = jnp.where(jnp.isfinite(norm), spent, 0.0)
    norm_after = jnp.where(is_over, limit, norm)
    budget = with_norm(budget, group, norm)
    # `left - spent` as a sum: the part of the later groups, and what this group leaves.
    # The difference would round a small part to 0. After a group with all but 1e-8 of
    # the square, later groups would never move.
    unspent = jnp.maximum(square_of_limit - spent, 0.0)
    left = budget.left * budget.later_portions[group] + unspent
    budget = budget._replace(
        left=left, norms_after=budget.norms_after.at[group].set(norm_after)
    )
    return limit, budget


def with_norm(budget: Budget, group: Array | int, norm: Array) -> Budget:
    """The budget with the norm of a group, which spends nothing."""
    return budget._replace(norms=budget.norms.at[group].set(norm))


def next_shares(shares: Array, norms: Array, finite_steps: Array) -> Array:
    """The shares after a step: the moving average of (norm_j / norm)^2.

    A step whose norm is 0, NaN or inf changes nothing. `finite_steps` counts the steps
    whose norm is a number, with this one.
    """
    norm = global_norm(norms)
    new_shares = (norms / norm) ** 2
    new_shares = new_shares.astype(shares.dtype)
    # The mean of all steps, while there are few.
    steps = jnp.clip(finite_steps, 1, STEPS_OF_AVERAGE)
    steps = steps.astype(shares.dtype)
    # No difference of shares, which would round small ones to 0.
    averages = shares * ((steps - 1) / steps) + new_shares / steps
    is_usable = jnp.isfinite(norm) & (norm > 0)
    return jnp.where(is_usable, averages, shares)
