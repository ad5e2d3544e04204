"""The clip of one group of gradients: a layer, or the weights outside of the layers.

one pass      a group is clipped to its limit in the budget
two passes    all groups are clipped by the norm of everything, which the first pass
              has measured
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from .._norms import global_norm
from .._state import ClipState
from .budget import Budget, limit_of_group
from .stacks import Entries


class GroupClip(NamedTuple):
    """How the groups of one step are clipped."""

    clipper: Any  # of the norm of everything, whose state is a `ClipState`
    state: ClipState  # its state before this step
    norm: Array | None = None  # of everything in this step, once it is measured

    def limit_ahead(self) -> Array:
        """The limit of everything, before the norm of this step is known. Rules are
        asked with the norm of the step before.
        """
        norm = self.state.norm
        # Before the first norm, and after one that is broken, any norm is possible.
        # finfo.max: a rule without memory then returns no limit.
        is_norm = jnp.isfinite(norm) & (norm > 0)
        largest = jnp.finfo(norm.dtype).max
        return self._next_state(jnp.where(is_norm, norm, largest)).limit

    def clip(
        self, group: Array | int, grads: Entries, budget: Budget
    ) -> tuple[Entries, Budget]:
        """Returns the clipped gradients of a group, and the budget for the groups after
        it.
        """
        if self.norm is None:
            norm = global_norm(grads)
            limit, budget = limit_of_group(budget, group, norm)
        else:
            norm = self.norm
            limit = None  # the limit of everything
        grads, _ = self.clipper.update(grads, self.state, grad_norm=norm, limit=limit)
        return grads, budget

    def state_after(self, budget: Budget) -> ClipState:
        """The state of the clipper after this step, of the norm of everything."""
        if self.norm is not None:
            return self._next_state(self.norm)
        # A group may be clipped where everything is within the limit. With the norm
        # after the clip in the place of the limit, the factor is norm_after / norm.
        norm_after = global_norm(budget.norms_after)
        # A limit of inf stays: with it the factor is 1 for a norm of NaN too.
        is_limited = budget.limit < jnp.inf
        limit = jnp.where(is_limited, norm_after, budget.limit)
        state = self._next_state(global_norm(budget.norms), limit)
        row = state.number_names.index("limit")
        numbers = state.numbers.at[row].set(budget.limit)
        return state._replace(numbers=numbers)

    def _next_state(self, norm: Array, limit: Array | None = None) -> ClipState:
        """The state of the clipper after a norm."""
        _, state = self.clipper.update(
            jnp.zeros_like(norm), self.state, grad_norm=norm, limit=limit
        )
        return state
