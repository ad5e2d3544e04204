"""The second step of an update: from norms and memories to limits."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from ._checks import (
    check_returned,
    check_shape,
    check_shrunk,
    held_in,
)
from ._mesh import typed_as
from .rules._memory import keep_where
from .rules._rule import Rule, call_name
from .shrinks import Shrink, is_ours

BEGIN_ANEW = (
    "Begin with a new one: state = optimizer.init(params). To keep the rest of the old "
    "state, such as moments of Adam, replace only this part of it."
)


@partial(jax.jit, static_argnames=("argument", "signed"))
def limit_of(
    rule: Rule,
    norm: jax.Array,
    memory: Any,
    step: jax.Array,
    *further: Any,
    argument: str,
    signed: bool = False,
) -> tuple[jax.Array, Any]:
    """Asks a rule: (limit, memory).

    `further` is what `further_norms` gives. The limit has the norm's dtype and shape,
    and is at least 0. NaN, inf and 0 leave the memory unchanged. `signed`: the value is
    a loss rather than a norm, so it and its limit may be 0 or negative.

    Raises:
      ValueError: the memory of another rule, or a limit that does not fit the norm.
    """
    asked = checked_memory(rule, norm, memory, argument)
    # stop_gradient: limits have no derivative by the updates.
    answer = rule.update(lax.stop_gradient(norm), asked, step, *further)
    limit, new = _checked_answer(rule, answer, asked)
    check_returned(argument, limit)
    check_shape(jnp.shape(limit), norm.shape, argument)
    # A limit beyond the norm's dtype is its largest number: inf would not clip.
    limit = held_in(norm.dtype, limit)
    # A schedule may fall below 0, which counts as 0.
    if not signed:
        limit = jnp.maximum(limit, 0)
    limit = typed_as(jnp.broadcast_to(limit, norm.shape), jax.typeof(norm))
    if not jax.tree.leaves(memory):
        return limit, memory
    learns = can_clip(norm, limit)
    return limit, keep_where(
        learns if signed else learns & (norm > 0), new, memory
    )


def can_clip(norm: jax.Array, limit: jax.Array) -> jax.Array:
    """Whether the norm is finite, and its limit a number."""
    # Only NaN differs from itself. `~isnan` is two operations on a TPU.
    return jnp.isfinite(norm) & (limit == limit)


def checked_memory(
    rule: Rule, norm: jax.Array, memory: Any, argument: str
) -> Any:
    """The memory in the form of the rule's own.

    Raises for the memory of another rule. The length of a window is not compared: under
    jit it is a traced number.
    """
    # A rule without an `init` of its own, such as a constant limit, remembers nothing.
    if type(rule).init is Rule.init and not jax.tree.leaves(memory):
        return ()
    known = jax.tree.map(
        lambda x: 1 if isinstance(x, Tracer) and not x.ndim else x, rule
    )
    wanted = jax.eval_shape(known.init, norm)
    # A state keeps () in place of any memory without arrays.
    if not jax.tree.leaves((wanted, memory)):
        return wanted
    if jax.tree.structure(wanted) != jax.tree.structure(memory):
        wanted, found = (_form(tree) for tree in (wanted, memory))
        raise ValueError(
            f"{argument.partition(':')[0]}: state was made with another rule. "
            f"{call_name(type(rule))} remembers {wanted}, and the state has {found}. "
            f"{BEGIN_ANEW}"
        )
    return memory


def check_first_memory(
    rule: Rule, memory: Any, shape: tuple[int, ...]
) -> None:
    """Raises for a first memory that does not have a place for each norm."""
    for leaf in jax.tree.leaves(memory):
        if leaf.shape[: len(shape)] != shape:
            raise ValueError(
                f"{call_name(type(rule))}: init must return arrays whose first axes "
                f"are those of the norm, {shape}, got the shape {leaf.shape}."
            )


def _checked_answer(rule: Rule, answer: Any, memory: Any) -> tuple[Any, Any]:
    """(limit, memory), as a rule of the user's may not return them."""
    if not isinstance(answer, (tuple, list)) or len(answer) != 2:
        call = f"{call_name(type(rule))}: update"
        raise TypeError(f"{call} must return (limit, memory), got {answer!r}.")
    # What a rule without arrays returns as its memory is not kept.
    if not jax.tree.leaves(memory):
        return answer[0], memory
    wanted, found = (jax.tree.structure(x) for x in (memory, answer[1]))
    if wanted != found:
        call = f"{call_name(type(rule))}: update"
        raise ValueError(
            f"{call} must return a memory in the structure of the one it got, "
            f"{wanted}, got {found}."
        )
    return answer[0], answer[1]


def _form(tree: Any) -> Any:
    if not jax.tree.leaves(tree):
        return "nothing"
    return jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", tree)


def shrunk_by(
    shrink: Shrink,
    norm: jax.Array,
    long: jax.Array,
    limit: jax.Array,
    call: str,
) -> jax.Array:
    """What norms become under their limits, where those are finite.

    `long` is the norm with the eps of a clipper.

    Raises:
      TypeError: a shrink that returns no number for each norm.
    """
    # A limit of inf clips nothing, and the derivative of a shrink there may be NaN.
    finite = jnp.where(limit == jnp.inf, 1.0, limit)
    new = shrink(long, finite)
    if is_ours(shrink):
        return new
    # One of the user's.
    check_shrunk(call, new, norm)
    # At 0, and where all becomes 0, its derivative may be NaN, and is not asked for.
    fixed = (norm == 0) | ((limit == 0) & (new == 0))
    moved = shrink(*(jnp.where(fixed, 1.0, x) for x in (long, finite)))
    # At 0 it may be NaN or inf itself, such as norm * (limit / norm).
    value = lax.stop_gradient(jnp.where(jnp.isfinite(new), new, long))
    return jnp.where(fixed, value, moved)
