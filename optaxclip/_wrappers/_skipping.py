"""One step of an optimizer that skips: the judgement, and the state."""

import warnings
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._checks import (
    check_number,
    check_state,
    check_transformation,
    number_for_jit,
)
from .._exported import exported
from .._mesh import MeshAxes
from .._state import ClipState, moving_average
from ..rules._rule import Rule
from ._judged import first_fields, given, judge_loss, judge_norm, norm_of
from ._select_early import update_unless


@exported
class SkipState(NamedTuple):
    """What a skipping optimizer knows after a step. `metrics` reads it by name.

    Attributes:
      step: updates seen, skipped ones counted.
      norm: the global norm of the last gradient.
      limit: what the norm was held against.
      loss: the last loss, 0 without a rule for it.
      loss_limit: what the loss was held against.
      skipped: steps skipped.
      skipped_recently: their share of about the last 100 steps.
      nonfinite: steps whose norm or loss was NaN or inf.
      consecutive: steps skipped in a row, up to now.
      memory, loss_memory: what the rules of norm and loss remember.
      inner_state: the optimizer's state after the last step that was not skipped.
    """

    step: jax.Array  # int32[]
    norm: jax.Array  # float32[]
    limit: jax.Array  # float32[]
    loss: jax.Array  # float32[]
    loss_limit: jax.Array  # float32[]
    skipped: jax.Array  # int32[]
    skipped_recently: jax.Array  # float32[]
    nonfinite: jax.Array  # int32[]
    consecutive: jax.Array  # int32[]
    memory: Any
    loss_memory: Any
    inner_state: Any


class Skipper(NamedTuple):
    """What skips a step. `call` is the function that errors name."""

    call: str
    rule: Rule  # of the norm
    loss_rule: Rule | None
    needs_loss: bool
    max_consecutive: Any
    mesh_axes: MeshAxes


def skipping(
    inner: optax.GradientTransformation, skipper: Skipper
) -> optax.GradientTransformationExtraArgs:
    """An optimizer whose steps are judged."""
    call = skipper.call
    check_transformation(f"{call}: inner", inner)
    optimizer = optax.with_extra_args_support(inner)
    if skipper.max_consecutive is not None:
        check_number(f"{call}: max_consecutive", skipper.max_consecutive)

    def init(params: Any) -> SkipState:
        inner_state = optimizer.init(params)
        _warn_of_clippers(call, inner_state)
        return _first_state(skipper, params, inner_state)

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        value: Any = None,
        grad_norm: Any = None,
        **extra_args: Any,
    ) -> tuple[Any, SkipState]:
        check_state(call, state, SkipState)
        norm = norm_of(call, updates, grad_norm, skipper.mesh_axes)
        if skipper.needs_loss and value is None:
            raise ValueError(_no_loss(skipper))
        skip, new = _judge(skipper, state, norm, value)
        if value is not None:
            extra_args["value"] = value
        run = partial(optimizer.update, **extra_args)
        updates, inner = update_unless(
            skip, run, updates, state.inner_state, params
        )
        return updates, new._replace(inner_state=inner)

    return optax.GradientTransformationExtraArgs(init, update)


def _warn_of_clippers(call: str, inner_state: Any) -> None:
    """Warns where only clippers are skipped, and not the optimizer behind them."""

    def is_state(x: Any) -> bool:
        # That of optax.sgd is empty.
        return isinstance(x, (ClipState, optax.EmptyState))

    states = jax.tree.leaves(inner_state, is_leaf=is_state)
    if states and all(isinstance(state, ClipState) for state in states):
        warnings.warn(
            f"{call}: inner has only a ClipState, so it is a clipper and not an "
            "optimizer. In a skipped step the optimizer behind it still moves, by its "
            "momentum and weight decay. Put it around the whole: "
            f"{call}(optax.chain(clipper, optimizer)).",
            stacklevel=3,
        )


def _no_loss(skipper: Skipper) -> str:
    argument = "on_loss=True" if skipper.call == "skip_step" else "loss_rule"
    return (
        f"{skipper.call}: {argument} looks at the loss: call update(grads, state, "
        "params, value=loss), or leave that argument out."
    )


def _first_state(skipper: Skipper, params: Any, inner_state: Any) -> SkipState:
    # Each counter is its own array, so that the state can be donated.
    return SkipState(
        **first_fields(skipper.rule, skipper.loss_rule, params),
        skipped=jnp.zeros((), jnp.int32),
        skipped_recently=jnp.zeros((), jnp.float32),
        nonfinite=jnp.zeros((), jnp.int32),
        consecutive=jnp.zeros((), jnp.int32),
        inner_state=inner_state,
    )


def _judge(
    skipper: Skipper, state: SkipState, norm: Any, value: Any
) -> tuple[jax.Array, SkipState]:
    """Whether to skip the step, and the new state but for the optimizer's."""
    argument = f"{skipper.call}: rule"
    state, skip = judge_norm(argument, skipper.rule, state, norm)
    broken = ~jnp.isfinite(state.norm)
    if skipper.loss_rule is not None and value is not None:
        argument = f"{skipper.call}: loss_rule"
        loss = given(f"{skipper.call}: value", value)
        state, is_over = judge_loss(argument, skipper.loss_rule, state, loss)
        skip, broken = skip | is_over, broken | ~jnp.isfinite(state.loss)
    if skipper.max_consecutive is not None:
        most = number_for_jit(skipper.max_consecutive)
        skip = skip & (state.consecutive < most)
    return skip, state._replace(
        step=jnp.asarray(optax.safe_increment(state.step)),
        skipped=state.skipped + skip.astype(jnp.int32),
        skipped_recently=moving_average(
            state.skipped_recently, skip, state.step
        ),
        nonfinite=state.nonfinite + broken.astype(jnp.int32),
        consecutive=jnp.where(skip, state.consecutive + 1, 0),
    )
