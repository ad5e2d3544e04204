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

from .._norms.norms import global_norm

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
    left: Array  # float[]: from 1 to 0
    shares: Array  # float[groups]: of the groups to come, the next one first, then 0
    norms: Array  # float[groups]: before the clip, the norm of the newest group last
    norms_after: Array  # float[groups]: after the clip, in the same order


def first_shares(groups: int) -> Array:
    """The shares before the first step: all groups are alike."""
    return jnp.full(groups, 1 / groups, jnp.float32)


def new_budget(limit: Array, shares: Array) -> Budget:
    """The budget of a backward pass whose groups come in the order of their shares."""
    shares = jnp.maximum(shares.astype(limit.dtype), LEAST_SHARE)
    return Budget(
        limit=limit,
        left=jnp.ones_like(limit),
        shares=shares,
        norms=jnp.zeros_like(shares),
        norms_after=jnp.zeros_like(shares),
    )


def limit_of_group(budget: Budget, norm: Array) -> tuple[Array, Budget]:
    """Returns the limit of the next group, and the budget for the groups after it."""
    share = budget.shares[0]
    later_shares = budget.shares[1:].sum()
    # The portion of the last group is s / s, which is exactly 1.
    shares_from_here = share + later_shares
    square_of_limit = budget.left * (share / shares_from_here)
    limit = budget.limit * jnp.sqrt(square_of_limit)
    is_over = norm >= limit
    square = (norm / budget.limit) ** 2
    spent = jnp.where(is_over, square_of_limit, square)
    # A group whose norm is NaN or inf becomes zeros or NaN, and spends nothing.
    spent = jnp.where(jnp.isfinite(norm), spent, 0.0)
    # `left - spent` as a sum: the part of the later groups, and what this group leaves.
    # The difference would round a small part to 0. After a group with all but 1e-8 of
    # the square, later groups would never move.
    unspent = jnp.maximum(square_of_limit - spent, 0.0)
    left = budget.left * (later_shares / shares_from_here) + unspent
    norm_after = jnp.where(is_over, limit, norm)
    budget = with_norm(budget, norm)
    return limit, budget._replace(
        left=left,
        shares=_moved_up(budget.shares, jnp.zeros_like(norm)),
        norms_after=_moved_up(budget.norms_after, norm_after),
    )


def with_norm(budget: Budget, norm: Array) -> Budget:
    """The budget with the norm of the next group, which spends nothing."""
    return budget._replace(norms=_moved_up(budget.norms, norm))


def _moved_up(row: Array, last: Array) -> Array:
    """The row without its first number, and with a new last one."""
    return jnp.append(row[1:], last.astype(row.dtype))


def next_shares(shares: Array, norms: Array, finite_steps: Array) -> Array:
    """The shares after a step: the moving average of (norm_j / norm)^2.

    A step whose norm is 0, NaN or inf changes nothing. `finite_steps` counts the steps
    whose norm is a number, with this one.
    """
    norm = global_norm(norms)
    new_shares = ((norms / norm) ** 2).astype(shares.dtype)
    # The mean of all steps, while there are few.
    steps = jnp.clip(finite_steps, 1, STEPS_OF_AVERAGE).astype(shares.dtype)
    # No difference of shares, which would round small ones to 0.
    averages = shares * ((steps - 1) / steps) + new_shares / steps
    is_usable = jnp.isfinite(norm) & (norm > 0)
    return jnp.where(is_usable, averages, shares)
