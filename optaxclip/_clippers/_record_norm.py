"""Norms for the log, without clipping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optax

from .._checks import check_norm, with_hash
from .._kernel import make_clipper
from .._norms import OwnNorm, global_norm


def record_norm(
    norm: Callable[[Any], Any] = global_norm,
) -> optax.GradientTransformationExtraArgs:
    """Clips nothing, and keeps the norms for `metrics`.

    A `limit=` that a chain is given for one step is not for it. In the same jitted step
    as a clipper with the same sums it reads nothing more on a CPU, since XLA computes
    equal sums once.

    Args:
      norm: from a tree to its norms: `global_norm`, `tensor_norm`, or a function of
        your own.

    Returns:
      A transformation whose state is a `ClipState`.

    Raises:
      TypeError: a norm that is not a function.

    Example:
      >>> recorder = optaxclip.record_norm()
      >>> grads = jnp.array([3.0, 4.0])
      >>> _, state = recorder.update(grads, recorder.init(grads))
      >>> print(state.norm)
      5.0
    """
    call = "record_norm"
    check_norm(call, norm)
    # With None nothing is multiplied, not even by 1. To XLA that would be another
    # array, which the next clipper of the chain would read again.
    measure = OwnNorm(with_hash(norm), call)
    recorder = make_clipper(measure, None, call=call, name="norm")

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        limit: Any = None,  # of the clippers in its chain
        **extra_args: Any,
    ) -> tuple[Any, Any]:
        return recorder.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(recorder.init, update)
