"""How one step clips its groups of gradients: the layers, and all other weights.

one pass      a group is clipped to its limit in the budget
two passes    all groups are clipped by the norm of everything, which the first pass
              has measured
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from .._norms.norms import global_norm
from .._state.state import ClipState
from .budget import Budget, limit_of_group
from .stacks import Entries


class StepClip(NamedTuple):
    """How one step clips its groups."""

    clipper: Any  # of the norm of everything, whose state is a `ClipState`
    state: ClipState  # its state before this step
    inf_is_off: bool  # as in `Trainer`
    measured_norm: Array | None = None  # of everything. None: one pass

    def limit_ahead(self) -> Array:
        """The limit of everything, before the norm of this step is known. Rules are
        asked with the last norm, or with the last limit if that norm is broken.
        """
        norm = self.state.norm
        norm = jnp.where(jnp.isfinite(norm), norm, self.state.limit)
        # Before the first step any norm is possible, and a rule is asked with the
        # largest one. A rule that has seen no norm then returns no limit. inf would
        # count as broken.
        largest = jnp.finfo(norm.dtype).max
        is_usable = jnp.isfinite(norm) & (norm > 0)
        return self._next_state(jnp.where(is_usable, norm, largest)).limit

    def clip(self, grads: Entries, budget: Budget) -> tuple[Entries, Budget]:
        """Returns the clipped gradients of the next group, and the budget for the
        groups after it.
        """
        if self.measured_norm is None:
            norm = global_norm(grads).astype(budget.limit.dtype)
            limit, budget = limit_of_group(budget, norm)
            limit = self._without_inf_of_rule(limit)
        else:
            norm = self.measured_norm
            limit = None  # the limit of everything
        # With `grad_norm` and `limit`, update multiplies by limit / grad_norm, or by 1.
        # Without `limit` it asks the rule of the clipper. The new state, in which the
        # rule has learnt from this norm, is dropped.
        grads, _ = self.clipper.update(grads, self.state, grad_norm=norm, limit=limit)
        return grads, budget

    def state_after(self, budget: Budget) -> ClipState:
        """The state of the clipper after this step, of the norm of everything."""
        if self.measured_norm is not None:
            return self._next_state(self.measured_norm)
        # The update computes the factor as limit / norm. The groups together were
        # multiplied by norm_after / norm, so norm_after is passed as the limit, if
        # there is one.
        norm_after = global_norm(budget.norms_after)
        limit_for_inf = self._without_inf_of_rule(budget.limit)
        limit = jnp.where(budget.limit < jnp.inf, norm_after, limit_for_inf)
        state = self._next_state(global_norm(budget.norms), limit)
        return _with_limit(state, budget.limit)

    def _without_inf_of_rule(self, limit: Array) -> Array:
        """The largest number in place of a rule's inf. `update` lets NaN pass under a
        limit of inf. That is right if the user set it, but a rule says by inf that it
        has no limit yet.
        """
        if self.inf_is_off:
            return limit
        return jnp.minimum(limit, jnp.finfo(limit.dtype).max)

    def _next_state(self, norm: Array, limit: Array | None = None) -> ClipState:
        """The state of the clipper after a norm. Its rule learns from the norm, also
        where a limit is given.
        """
        _, state = self.clipper.update(
            jnp.zeros_like(norm), self.state, grad_norm=norm, limit=limit
        )
        return state


def _with_limit(state: ClipState, limit: Array) -> ClipState:
    """The state with another limit, whose factor stays."""
    row = state.names.number_row_names.index("limit")
    return state._replace(numbers=state.numbers.at[row].set(limit))
