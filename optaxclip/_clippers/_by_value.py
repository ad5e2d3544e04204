"""Clipping by value: every element by itself, between bounds."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from . import prefix
from .arguments import broadcasts_to, check_number, check_order, check_state
from .sums import direction


class ClipByValueState(NamedTuple):
    """The state of `clip_by_value`."""

    step: jax.Array  # int32[]: updates seen, for bounds that follow a schedule


def clip_by_value(
    max_value: Any, min_value: Any = None
) -> optax.GradientTransformation:
    """Limits every element to [min_value, max_value], or to [-max_value, max_value]
    when one bound is given.

    Complex elements are limited by modulus and take one bound. NaN stays NaN, an
    infinite element becomes the bound (a complex one in the direction of its infinite
    part). Integer leaves keep their dtype: the bounds are rounded inwards. The
    direction of the gradient changes; no device needs to hear of another.

    Args:
      max_value: the upper bound: a number, a schedule, an array that broadcasts to each
        leaf, or a tree prefix of these. At least 0 when it stands alone.
      min_value: the lower bound, likewise; None for -max_value.

    Raises:
      ValueError: NaN, bounds that are known to leave no room between them, or a bound
        that does not fit a leaf.
      TypeError: a bound that is no real number, or two bounds for a complex leaf.

    Reference: Mikolov, Statistical language models based on neural networks, 2012.
    """
    call = "clip_by_value"
    upper = _bounds(
        max_value, f"{call}: max_value", 0.0 if min_value is None else -math.inf
    )
    lower = (
        None
        if min_value is None
        else _bounds(min_value, f"{call}: min_value", -math.inf)
    )
    for low, high in prefix.overlaps(lower, upper) if lower else ():
        check_order(call, ("min_value", low), ("max_value", high))

    def init(params: Any) -> ClipByValueState:
        return ClipByValueState(jnp.zeros((), jnp.int32))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        check_state(call, state, ClipByValueState)
        uppers = prefix.lookup(upper, updates, f"{call}: max_value")
        lowers = (
            [None] * len(uppers)
            if lower is None
            else prefix.lookup(lower, updates, f"{call}: min_value")
        )
        paths, treedef = jax.tree_util.tree_flatten_with_path(updates)
        clipped = [
            _limit(path, leaf, _now(high, state.step), _now(low, state.step))
            for (path, leaf), high, low in zip(paths, uppers, lowers)
        ]
        return jax.tree.unflatten(treedef, clipped), ClipByValueState(
            jnp.asarray(optax.safe_increment(state.step))
        )

    return optax.GradientTransformation(init, update)


def clip(max_delta: Any) -> optax.GradientTransformation:
    """`optax.clip`: see `clip_by_value`."""
    return clip_by_value(max_delta)


def _bounds(bound: Any, argument: str, lowest: float) -> prefix.Prefix:
    table = prefix.freeze(bound, callable)
    for _, value in table.entries:
        if not callable(value):
            check_number(argument, value, lowest=lowest)
    return table


def _now(bound: Any, step: jax.Array) -> Any:
    return bound(step) if callable(bound) else bound


def _limit(path: Any, leaf: Any, high: Any, low: Any) -> Any:
    """One leaf between its bounds."""
    if getattr(leaf, "dtype", None) in (jax.dtypes.float0, bool):
        return leaf
    x = jnp.asarray(leaf)
    for bound in (high, low):
        if bound is not None and not broadcasts_to(jnp.shape(bound), x.shape):
            raise ValueError(
                f"clip_by_value: a bound of shape {jnp.shape(bound)} does not fit the "
                f"leaf {prefix.name(path)!r} of shape {x.shape}."
            )
    if low is not None and jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise TypeError(
            f"clip_by_value: the leaf {prefix.name(path)!r} is complex and has no "
            "order: give one bound, for its modulus."
        )
    # An int stays one, since float32 has not all of them, but Python's may be beyond
    # those of the device.
    largest = jnp.iinfo(jnp.result_type(int)).max
    return _between(
        x,
        *(
            float(bound) if isinstance(bound, int) and abs(bound) > largest else bound
            for bound in (high, low)
        ),
    )


@jax.jit
def _between(x: jax.Array, high: jax.Array, low: jax.Array | None) -> jax.Array:
    """Selected, not computed, so that what lies inside stays bit for bit. Jitted, so
    that without jit it is one pass.
    """
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        size = jnp.abs(x)
        return jnp.where(size > high, high.astype(size.dtype) * direction(x), x)
    low = -high if low is None else low
    if jnp.issubdtype(x.dtype, jnp.integer):
        info = jnp.iinfo(x.dtype)
        low, high = (
            jnp.clip(edge, info.min, info.max)
            for edge in (jnp.ceil(low), jnp.floor(high))
        )
    high, low = (
        jax.lax.full_like(x, edge)
        if jnp.ndim(edge) == 0
        else jnp.broadcast_to(edge, x.shape).astype(x.dtype)
        for edge in (high, low)
    )
    return jnp.where(x > high, high, jnp.where(x < low, low, x))
