"""Thresholds without memory: a number or schedule, and a share of the weights."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from .arguments import check_number
from .core import Threshold


def constant(limit: Any, *, argument: str = "constant: limit") -> Threshold:
    """The same limit in every step, or a schedule of limits.

    Args:
      limit: a number at least 0, an array, a schedule from step to number, or None for no limit. 0 turns updates into zeros, inf is no limit. An array must have a
        shape that broadcasts to the norm's. Its dtype does not matter.
      argument: how error messages name the limit.

    Raises:
      TypeError: a bool, a string, or another thing that is no real number.
      ValueError: a number that is negative or NaN.
    """
    if limit is None:
        limit = float("inf")
    if callable(limit):
        return Threshold(Partial(_remember_nothing), Partial(_scheduled, Partial(limit)))
    check_number(argument, limit)
    return Threshold(Partial(_remember_nothing), Partial(_constant, limit))


def share_of_params(share: Any, floor: Any = 0.0, *, argument: str = "share_of_params: share") -> Threshold:
    """limit = share * max(norm of the weights, floor): updates stay short against what they change.

    Args:
      share: a number at least 0, an array, or a schedule.
      floor: weights shorter than this count as this long, so that weights that start at 0 can leave it. At least 0.
      argument: how error messages name the share.

    Raises:
      TypeError, ValueError: as `constant`.
      ValueError: in `update`, when it is called without params.
    """
    check_number(f"{argument.partition(':')[0]}: eps", floor)
    if callable(share):
        return Threshold(Partial(_remember_nothing), Partial(_share, Partial(share), floor))
    check_number(argument, share)
    return Threshold(Partial(_remember_nothing), Partial(_share, share, floor))


def _remember_nothing(norm: jax.Array) -> tuple[()]:
    return ()


def _constant(limit, norm, memory, step, params_norm):
    return limit, memory


def _scheduled(schedule, norm, memory, step, params_norm):
    return schedule(step), memory


def _share(share, floor, norm, memory, step, params_norm):
    weights = params_norm().astype(norm.dtype)
    now = share(step) if callable(share) else share
    return jnp.asarray(now).astype(norm.dtype) * jnp.maximum(weights, jnp.asarray(floor).astype(norm.dtype)), memory
