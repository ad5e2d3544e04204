"""The judgement of a step: is its norm, or its loss, out of the ordinary?

    a number is rejected    unless it is finite and at most its limit
    a step is rejected      if its norm or its loss is

So a limit of NaN rejects everything.

`skip_step` and its relatives skip a rejected step. `record_spikes` counts it. The state
of each keeps what was judged (`rows.py`).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike

from .._arguments import checks
from .._arguments.other_names import OTHER_NAMES_IN_UPDATE
from .._devices.mesh import MeshAxes
from .._devices.mesh_types import varying, varying_as_any_of
from .._norms.norms import GlobalNorm
from .._numbers import number_for_jit
from .._trees import PyTree, leaves_to_clip
from ..rules._rule import Rule, limit_and_memory_of, limit_and_memory_of_jitted


class ComparedNumber(NamedTuple):
    """A norm or a loss, and the limit that it was held against."""

    value: Array
    limit: Array
    memory: PyTree  # what the rule of the limit remembers from now on
    is_nonfinite: ArrayLike = False  # bool[]: NaN or inf
    is_rejected: ArrayLike = False  # bool[]: not finite, or not at most its limit


class Judgement(NamedTuple):
    """Whether a step is rejected, and why."""

    norm: ComparedNumber
    # The last loss that was given. Only in the step that gave it can it be rejected.
    loss: ComparedNumber
    is_rejected: Array  # bool[]
    is_nonfinite: Array  # bool[]: whether norm or loss is NaN or inf


class Judge(NamedTuple):
    """Judges steps by the rules of norm and loss."""

    call: str  # the function that errors name
    rule: Rule  # of the norm
    loss_rule: Rule | None  # None: losses are ignored
    mesh_axes: MeshAxes
    # The argument by which the user demands a loss in each step. The error of a step
    # without one names it. "" where a loss may be missing.
    loss_argument: str = ""

    def before_first_step(
        self, params: PyTree
    ) -> tuple[ComparedNumber, ComparedNumber]:
        """Norm and loss before the first step."""
        tree = leaves_to_clip(params, self.call)
        # Only the dtype of the norm is needed: float64 if a leaf has 64 bits. `init`
        # may run outside the mesh, hence mesh_axes=None.
        norm_type = jax.eval_shape(self._replace(mesh_axes=None)._norm_of, tree)
        zero = jnp.zeros((), norm_type.dtype)
        no_limit = jnp.full_like(zero, jnp.inf)
        memory = self.rule.init(zero)
        loss_memory = () if self.loss_rule is None else self.loss_rule.init(zero)
        # Rules may return Python numbers, or one array for norm and loss. A donated
        # state must not have an array twice, so all are copied.
        memory, loss_memory = jax.tree.map(jnp.array, (memory, loss_memory))
        # -inf stands for no loss. NaN would raise under `jax_debug_nans`.
        no_loss = jnp.full_like(zero, -jnp.inf)
        norm = ComparedNumber(zero, no_limit, memory)
        return norm, ComparedNumber(no_loss, no_limit, loss_memory)

    def judgement_of(
        self, state: PyTree, updates: PyTree, extra_args: Mapping[str, Any]
    ) -> Judgement:
        """Holds norm and loss of a step against the limits of their rules.

        `state` is a `SkipState` or a `SpikeState`. `extra_args` are the extra arguments
        of `update`.

        Raises:
          ValueError: a number that is not a scalar, that differs between devices, or a
            loss that is missing.
          TypeError: something that is not a number, or a loss under another name.
        """
        memory, loss_memory = state.memories
        norm_value = self._checked_argument(extra_args, "grad_norm")
        if norm_value is None:
            norm_value = self._norm_of(updates)
        norm = self._compared_number(
            self.rule, norm_value, memory, state, like=state.norm
        )
        loss = ComparedNumber(state.loss, state.loss_limit, loss_memory)
        if self.loss_rule is not None:
            loss_value = self._checked_argument(extra_args, "value")
            if loss_value is None:
                self._check_loss_may_be_missing(extra_args)
            else:
                loss = self._compared_number(
                    self.loss_rule,
                    loss_value,
                    loss_memory,
                    state,
                    like=(state.norm, norm.value),
                    is_loss=True,
                )
        return Judgement(
            norm,
            loss,
            is_rejected=jnp.logical_or(norm.is_rejected, loss.is_rejected),
            is_nonfinite=jnp.logical_or(norm.is_nonfinite, loss.is_nonfinite),
        )

    def varying_if_trained_alone(self, values: PyTree, like: PyTree) -> PyTree:
        """The values, typed for devices that each train alone (mesh_axes=None): as
        differing over the mesh axes over which `like` does.
        """
        if self.mesh_axes is None:
            return varying_as_any_of(values, like)
        return values

    def _norm_of(self, updates: PyTree) -> Array:
        """The global norm of the updates."""
        measure = GlobalNorm(self.call, mesh_axes=self.mesh_axes)
        return measure(leaves_to_clip(updates, self.call)).values[0]

    def _compared_number(
        self,
        rule: Rule,
        number: ArrayLike,
        memory: PyTree,
        state: PyTree,
        *,
        like: PyTree,
        is_loss: bool = False,
    ) -> ComparedNumber:
        """Holds a norm or a loss against the limit of its rule. Where devices train
        alone, the number may differ over the mesh axes over which `like` does.
        """
        # A user's number may have another dtype than the state.
        value = jnp.array(number, state.norm.dtype)
        value = self.varying_if_trained_alone(value, like)
        argument = "loss_rule" if is_loss else "rule"
        # Tracers show that the user's jit is running. There a jit of ours would keep a
        # schedule, and what it refers to, alive in its cache.
        is_traced = isinstance(value, Tracer) or isinstance(state.step, Tracer)
        compute_limit = limit_and_memory_of if is_traced else limit_and_memory_of_jitted
        limit, new_memory = compute_limit(
            rule,
            value,
            memory,
            state.step,
            argument=f"{self.call}: {argument}",
            is_loss=is_loss,
        )
        is_nonfinite = ~jnp.isfinite(value)
        # Not `value > limit`, which is False for a limit of NaN.
        is_rejected = is_nonfinite | ~(value <= limit)
        return ComparedNumber(value, limit, new_memory, is_nonfinite, is_rejected)

    def _checked_argument(self, extra_args: Mapping[str, Any], argument: str) -> Any:
        """The norm or the loss among the arguments of `update`, in the form in which
        JAX carries it into a compiled call, or None.

        Raises:
          TypeError: something that is not a number.
          ValueError: a number that is not a scalar, or differs between devices, or a
            norm below 0.
        """
        number = extra_args.get(argument)
        if number is None:
            return None
        # From a loss for each example, limit and decision would be arrays too.
        if argument == "grad_norm":
            checks.check_given_norm(f"{self.call}: {argument}", number, is_scalar=True)
        else:
            checks.check_scalar(f"{self.call}: {argument}", number)
        number = number_for_jit(number)
        mesh_axes = tuple(sorted(varying(number)))
        # With None each device trains alone, so it may decide alone.
        if mesh_axes and self.mesh_axes is not None:
            raise ValueError(
                f"{self.call}: {argument} differs along the mesh axes {mesh_axes}, so "
                "each device would decide for itself: hand over the norm of the whole "
                f"gradient and the mean of losses, lax.pmean(value, {mesh_axes}), or "
                "say with mesh_axes=None that each device trains alone."
            )
        return number

    def _check_loss_may_be_missing(self, extra_args: Mapping[str, Any]) -> None:
        """Raises where `update` has a loss under another name, or needs one."""
        wrong_names = sorted(OTHER_NAMES_IN_UPDATE["value"] & extra_args.keys())
        if wrong_names:
            raise TypeError(
                f"{self.call}: update has no argument {wrong_names[0]!r}: the loss is "
                "value, as in optax. Call update(grads, state, params, value=loss)."
            )
        if self.loss_argument:
            raise ValueError(
                f"{self.call}: {self.loss_argument} looks at the loss: call "
                "update(grads, state, params, value=loss), or leave that argument out."
            )
