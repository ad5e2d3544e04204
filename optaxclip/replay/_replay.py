"""A rule over recorded norms."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .._arguments import check_shrunk
from .._factors import factor_between
from .._limits import can_clip, limit_of
from .._mesh import varying_as
from ..rules._rule import Rule
from ..rules._without_params import rule_without_params
from ..shrinks import Shrink, shrink_of


class Replay(NamedTuple):
    """What a rule made of recorded norms: one entry for each step.

    Attributes:
      norms: float32[steps, ...]: as recorded.
      limits: float32[steps, ...]: what each was held against.
      factors: float32[steps, ...]: what the updates would have been multiplied by. NaN
        where the norm was not finite, or the limit NaN.
      clipped: bool[steps, ...]: the steps that would have been changed, without those
        whose factor is NaN.
    """

    norms: jax.Array  # float32[steps, ...]
    limits: jax.Array  # float32[steps, ...]
    factors: jax.Array  # float32[steps, ...]
    clipped: jax.Array  # bool[steps, ...]


def run(
    rule: Any, norms: ArrayLike, *, shrink: Shrink | None = None
) -> Replay:
    """Runs a rule over a history of norms, as one `lax.scan`.

    Many rules run at once under `jax.vmap`:
    `jax.vmap(lambda q: run(rules.windowed_quantile(q), norms))(quantiles)`.

    Args:
      rule: a rule of `optaxclip.rules`, a number at least 0, a schedule, or None for no
        limit.
      norms: the history, [steps], or [steps, ...] for many norms at once, each with a
        memory of its own.
      shrink: what a norm over its limit becomes, of `optaxclip.shrinks`. None is
        `hard`.

    Returns:
      A `Replay`: the norms, their limits, the factors that the updates would have been
      multiplied by, and which steps would have been clipped.

    Raises:
      ValueError: a single number in the place of a history, no norm at all, a limit
        that is negative or NaN, or a rule that compares norms with weights.
      TypeError: a limit or a history that is not made of numbers.

    Example:
      >>> print(optaxclip.replay.run(2.0, [1.0, 4.0, 2.0]).factors)
      [1.  0.5 1. ]
    """
    if not isinstance(norms, jax.Array):
        norms = array_of_norms("replay.run", norms)
        # Without jax_enable_x64 an int64 of 2^40 would become the int32 0.
        is_whole = np.issubdtype(norms.dtype, np.integer)
        norms = norms.astype(np.float64) if is_whole else norms
    norms = jnp.asarray(norms)
    norms = norms.astype(jnp.promote_types(norms.dtype, jnp.float32))
    if norms.ndim == 0 or not norms.size:
        raise ValueError(
            "replay.run: norms must be a history, one norm for each step, got an array "
            f"of shape {norms.shape}."
        )
    rule = rule_without_params(rule, "replay.run: rule")
    shrink = shrink_of(shrink, "replay.run")
    return replayed(shrink, rule, first_memory(rule, norms), norms)


def array_of_norms(call: str, norms: Any) -> np.ndarray:
    """A history as an array of NumPy, inf where JAX would make inf of a number: beyond
    the range of float32, or of float64 where jax_enable_x64 is set.

    Raises:
      TypeError: something that has no numbers, such as the name of a file.
    """
    try:
        found = np.asarray(norms)
    except ValueError:  # lists of different lengths
        found = np.asarray(None)
    # NumPy's issubdtype does not know bfloat16 as a float.
    kinds = jnp.floating, jnp.integer
    if not any(jnp.issubdtype(found.dtype, kind) for kind in kinds):
        raise TypeError(
            f"{call}: norms must be an array of numbers, got {norms!r}. A file is read "
            "by optaxclip.replay.read_history."
        )
    if found.dtype == np.float64:
        most = float(jnp.finfo(jnp.result_type(float)).max)
        found = np.where(
            np.abs(found) > most, np.copysign(np.inf, found), found
        )
    return found


def first_memory(rule: Rule, norms: jax.Array) -> Any:
    """What the rule remembers before the first norm."""
    start = jnp.zeros(norms.shape[1:], norms.dtype)
    return rule.init(varying_as(start, jax.typeof(norms)))


@partial(jax.jit, static_argnums=0)
def replayed(
    shrink: Shrink, rule: Rule, memory: Any, norms: jax.Array
) -> Replay:
    """What a rule that remembers this makes of the norms."""
    limits = _limits(rule, memory, norms)
    # As in a clipper, which counts no step as clipped whose limit is NaN.
    known, off = can_clip(norms, limits), jnp.isinf(limits)
    short = shrink(norms, jnp.where(off, 1.0, limits))
    check_shrunk("replay.run", short, norms)
    after = jnp.where(off, norms, short)
    factors = jnp.where(known, factor_between(norms, after).reported, jnp.nan)
    return Replay(norms, limits, factors, known & (after != norms))


def _limits(rule: Rule, memory: Any, norms: jax.Array) -> jax.Array:
    def step(carry: Any, norm: jax.Array) -> tuple[Any, jax.Array]:
        count, memory = carry
        asked = rule, norm, memory, count
        limit, memory = limit_of(*asked, argument="replay.run: rule")
        return (count + 1, memory), limit

    first = jnp.zeros((), jnp.int32), memory
    return jax.lax.scan(step, first, norms)[1]
