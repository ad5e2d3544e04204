"""The limit of the norm of everything as a budget, in one backward pass.

A backward pass sees groups of gradients one after the other: the last layer first, and
what is outside of the layers at the end. With s_j the usual share of group j in the
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
from ..rules._memory import moving_average

# Over about how many steps the shares are averaged.
REACH = 10
# A group that never had a gradient must not make 0 / 0, nor 0 * inf.
LEAST_SHARE = 1e-12


class Budget(NamedTuple):
    """What the groups of one backward pass may spend, and have spent so far."""

    limit: Array  # float[]
    portions: Array  # float[groups]: the portion of what is left that a group may spend
    left: Array  # float[]: of the square of the limit, as a portion of it
    norms: Array  # float[groups], before the clip
    norms_after: Array  # float[groups]


def first_shares(groups: int) -> Array:
    """The shares before the first step: all groups are alike."""
    return jnp.full(groups, 1 / groups, jnp.float32)


def new_budget(limit: Array, shares: Array) -> Budget:
    """The budget of a backward pass whose groups come in the order of their shares."""
    shares = jnp.maximum(shares, LEAST_SHARE)
    shares_from_here = jnp.cumsum(shares[::-1])[::-1]
    # That of the last group is s / s, which is exactly 1.
    portions = (shares / shares_from_here).astype(limit.dtype)
    zeros = jnp.zeros_like(portions)
    return Budget(
        limit=limit,
        portions=portions,
        left=jnp.ones_like(limit),
        norms=zeros,
        norms_after=zeros,
    )


def limit_of_group(
    budget: Budget, group: Array | int, norm: Array
) -> tuple[Array, Budget]:
    """Returns the limit of a group, and the budget for the groups after it."""
    portion = budget.left * budget.portions[group]
    limit = budget.limit * jnp.sqrt(portion)
    is_over = norm >= limit
    # Relative to the limit, since the square of a norm may overflow.
    spent = jnp.where(is_over, portion, (norm / budget.limit) ** 2)
    # A group whose norm is NaN or inf becomes zeros or NaN, and spends nothing.
    spent = jnp.where(jnp.isfinite(norm), spent, 0.0)
    norm_after = jnp.where(is_over, limit, norm)
    budget = budget._replace(
        left=jnp.maximum(budget.left - spent, 0.0),
        norms=budget.norms.at[group].set(norm),
        norms_after=budget.norms_after.at[group].set(norm_after),
    )
    return limit, budget


def next_shares(shares: Array, norms: Array, step: Array) -> Array:
    """The shares after a step, the first of which is step 1.

    A step whose norm is 0, NaN or inf changes nothing.
    """
    norm = global_norm(norms)
    shares_of_step = (norms / norm) ** 2
    averages = moving_average(shares, shares_of_step, step, REACH)
    is_norm = jnp.isfinite(norm) & (norm > 0)
    return jnp.where(is_norm, averages, shares)
