"""A rule over recorded norms."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from .._checks import check_shrunk
from .._factors import factor_between
from .._kernel import limit_of
from ..rules._constant import rule_without_params
from ..rules._rule import Rule
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


def run(rule: Any, norms: ArrayLike, *, shrink: Shrink | None = None) -> Replay:
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
      ValueError: a single number in the place of a history, no norm at all, a negative
        norm, a limit that is negative or NaN, or a rule that compares norms with
        weights.
      TypeError: a limit or a history that is not made of numbers.

    Example:
      >>> print(optaxclip.replay.run(2.0, [1.0, 4.0, 2.0]).factors)
      [1.  0.5 1. ]
    """
    norms = history_of("replay.run", norms)
    if norms.ndim == 0 or not norms.size:
        must = "norms must be a history, one norm for each step"
        got = f"got an array of shape {norms.shape}"
        raise ValueError(f"replay.run: {must}, {got}.")
    rule = rule_without_params(rule, "replay.run: rule")
    shrink = shrink_of(shrink, "replay.run")
    limits = limits_over(rule, norms, "replay.run: rule")
    return _replayed(shrink, norms, limits)


def history_of(call: str, norms: Any, *, signed: bool = False) -> jax.Array:
    """A history in float32, or in float64 where jax_enable_x64 is set.

    `signed`: losses, which may be negative.

    Raises:
      TypeError: something that has no numbers, such as the name of a file.
      ValueError: a negative norm.
    """
    if isinstance(norms, Tracer):
        return norms.astype(jnp.promote_types(norms.dtype, jnp.float32))
    found = np.asarray(norms)
    if not jnp.isdtype(found.dtype, ("real floating", "integral")):
        must = f"{call}: norms must be an array of numbers"
        hint = "A file is read by optaxclip.replay.read_history."
        raise TypeError(f"{must}, got {norms!r}. {hint}")
    if not signed and (found < 0).any():
        must = f"{call}: norms must be at least 0"
        raise ValueError(f"{must}, got {found[found < 0][0]}.")
    # NumPy makes float64 of int32. In JAX an int64 of 2^40 would be 0.
    dtype = np.promote_types(found.dtype, np.float32)
    # Numbers beyond the range of float32 become inf.
    with np.errstate(over="ignore"):
        return jnp.asarray(found.astype(dtype))


def limits_over(
    rule: Rule, values: jax.Array, argument: str, signed: bool = False
) -> jax.Array:
    """The limit that each value is held against, [steps, ...].

    `argument` is how errors call the rule. `signed`: the values are losses.
    """
    # Outside of jit, where the length of a window would be a traced number.
    memory = rule.init(jnp.zeros_like(values[0]))
    return _scan(rule, memory, values, argument=argument, signed=signed)


@partial(jax.jit, static_argnames=("argument", "signed"))
def _scan(rule: Rule, memory: Any, values: jax.Array, **options: Any) -> jax.Array:
    def one_step(memory: Any, numbered: Any) -> tuple[Any, jax.Array]:
        number, value = numbered
        return limit_of(rule, value, memory, number, **options)[::-1]

    numbers = jnp.arange(len(values), dtype=jnp.int32)
    return jax.lax.scan(one_step, memory, (numbers, values))[1]


@partial(jax.jit, static_argnums=0)
def _replayed(shrink: Shrink, norms: jax.Array, limits: jax.Array) -> Replay:
    # As in a clipper, which counts no step as clipped whose limit is NaN.
    known = jnp.isfinite(norms) & ~jnp.isnan(limits)
    off = jnp.isinf(limits)
    short = shrink(norms, jnp.where(off, 1.0, limits))
    check_shrunk("replay.run", short, norms)
    after = jnp.where(off, norms, short)
    factors = jnp.where(known, factor_between(norms, after).reported, jnp.nan)
    return Replay(norms, limits, factors, known & (after != norms))
