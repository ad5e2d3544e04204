"""A norm and a loss that are held against rules: what skipping optimizers and
`record_spikes` have in common.

Their states have the fields of `first_fields`, by these names.
"""

from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from .._checks import check_scalar, number_for_jit
from .._limits import limit_of
from .._mesh import MeshAxes
from .._norms import GlobalNorm, global_norm
from .._trees import clipped_leaves
from ..rules._rule import Rule

State = TypeVar("State", bound=Any)


def first_fields(
    rule: Rule, loss_rule: Rule | None, params: Any
) -> dict[str, Any]:
    """Step, norm, loss, their limits and memories before the first step."""
    # Only its dtype is needed: float64 if a leaf has 64 bits.
    measure = partial(global_norm, mesh_axes=None)
    norm = jnp.zeros((), jax.eval_shape(measure, params).dtype)
    loss = jnp.zeros(())
    # Each number is its own array, so that the state can be donated. A rule may return
    # the very array that it is given, so it gets another one.
    loss_memory = () if loss_rule is None else loss_rule.init(jnp.zeros(()))
    return {
        "step": jnp.zeros((), jnp.int32),
        "norm": norm,
        "limit": jnp.full_like(norm, jnp.inf),
        "loss": loss,
        "loss_limit": jnp.full_like(loss, jnp.inf),
        "memory": rule.init(jnp.zeros_like(norm)),
        "loss_memory": loss_memory,
    }


def norm_of(
    call: str, updates: Any, grad_norm: Any, mesh_axes: MeshAxes
) -> Any:
    """The norm that was measured elsewhere, or else that of the updates."""
    if grad_norm is not None:
        return given(f"{call}: grad_norm", grad_norm)
    measure = GlobalNorm(call, mesh_axes=mesh_axes)
    return measure(clipped_leaves(updates, call)).each[0]


def given(argument: str, number: Any) -> Any:
    """A norm or a loss that an update is given, as JAX can carry it."""
    # A loss for each example or device would make arrays of limit and decision.
    check_scalar(argument, number)
    return number_for_jit(number)


def judge_norm(
    argument: str, rule: Rule, state: State, norm: Any
) -> tuple[State, jax.Array]:
    """Returns the state with the norm and its limit, and whether the norm is over it.

    NaN and inf are over every limit.
    """
    # A norm that was measured elsewhere may have another dtype than the state.
    norm = jnp.asarray(norm).astype(state.norm.dtype)
    asked = rule, norm, state.memory, state.step
    limit, memory = limit_of(*asked, argument=argument)
    state = state._replace(norm=norm, limit=limit, memory=memory)
    # Not `norm > limit`, which is False for NaN. inf would pass a limit of inf.
    return state, ~(norm <= limit) | ~jnp.isfinite(norm)


def judge_loss(
    argument: str, rule: Rule, state: State, loss: Any
) -> tuple[State, jax.Array]:
    """Does the same for a loss, which may be negative."""
    loss = jnp.asarray(loss).astype(state.loss.dtype)
    asked = rule, loss, state.loss_memory, state.step
    limit, memory = limit_of(*asked, argument=argument, signed=True)
    state = state._replace(loss=loss, loss_limit=limit, loss_memory=memory)
    return state, ~(loss <= limit) | ~jnp.isfinite(loss)
