"""SPAM: a coordinate whose square is thousands of times its usual square is a spike,
and is cut down.

    g_i <- sign(g_i) sqrt(threshold * v_i)      where g_i^2 > threshold * v_i
    v_i <- decay * v_i + (1 - decay) * g_i^2    with the clipped g_i

The paper pairs it with a reset of Adam's moments every `every` steps, after which the
learning rate rises again along a cosine:

    optax.chain(
        spam(),
        reset_momentum(optax.scale_by_adam(), every=500, warmup=150),
        optax.scale_by_learning_rate(1e-3),
    )

Reference: Huang et al., SPAM: spike-aware Adam with momentum reset for stable LLM
training, 2025 (arXiv 2501.06842).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from .._checks import (
    check_flag,
    check_length,
    check_number,
    check_state,
    number_for_jit,
)
from .._exported import exported
from .._factors import cast_like
from .._mesh import typed_as, types_of
from .._state import ClippedElements, count_clipped, no_elements_clipped
from .._sums import modulus_dtype, norm_dtype, wide_dtype, with_modulus
from .._trees import check_kept, clipped_leaves, is_none, put_back, values_of
from .._wrappers._reset_momentum import steps_since_reset
from ..rules._memory import root
from ..rules._rule import Number, at_step, check_field, number


@exported
class SpamState(NamedTuple):
    """The state of `spam`."""

    step: jax.Array  # int32[]: updates seen
    # float32[...] for each clipped leaf (float64 if it has 64 bits): the average of
    # squares, not corrected for its start
    second_moment: Any
    # Which share of them was clipped, where that is counted, else ().
    elements: ClippedElements | tuple[()]


def spam(
    threshold: Number = 5000.0,
    *,
    decay: Number = 0.999,
    warmup: ArrayLike = 20,
    every: int | None = 500,
    count: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Cuts coordinates down to sqrt(threshold * v), v the average of their squares.

        g_i <- sign(g_i) sqrt(threshold * v_i)      where g_i^2 > threshold * v_i
        v_i <- decay * v_i + (1 - decay) * g_i^2    with the clipped g_i

    In the paper v is Adam's. Here it is a buffer of its own, as large as the
    parameters, unless `update(..., second_moment=v)` passes one in. A coordinate that
    is NaN stays NaN, and an infinite one becomes the limit. Neither enters the average.
    Complex coordinates are limited by modulus.

    Args:
      threshold: how many times its usual square a square may be. At least 0. A number
        or a schedule.
      decay: of the average, in [0, 1]. A number or a schedule.
      warmup: how many updates from each reset on are not clipped, since v has seen too
        little by then. At the start it is one fewer. Where v is 0, nothing is clipped
        either. At least 0.
      every: the average starts anew before each update whose number is a multiple of
        this, as in `reset_momentum`. None for never. A whole number, at least 1.
      count: whether to count which share of the elements is clipped, for `metrics`.

    Returns:
      A transformation with a `SpamState`. `update(..., second_moment=v)` uses another
      average, a tree like the updates, and leaves its own unchanged.

    Raises:
      ValueError: a number out of its range, an `every` that is not whole, or a
        `second_moment` without a leaf of the updates, or of another shape.
      TypeError: something else that is not a number.

    Example:
      >>> clipper = optaxclip.spam(16.0, decay=0.75, warmup=0)
      >>> state = clipper.init(jnp.zeros(2))
      >>> _, state = clipper.update(jnp.array([1.0, 1.0]), state)
      >>> updates, state = clipper.update(jnp.array([9.0, 1.0]), state)
      >>> print(updates)
      [2. 1.]

    Reference: Huang et al., SPAM: spike-aware Adam with momentum reset for stable LLM
    training, 2025 (arXiv 2501.06842). The public code makes a coordinate 0 whose v is
    0. It does not reset the count that corrects Adam's moments. Here the whole state
    starts anew.
    """
    call = "spam"
    # The checks of a rule's numbers. This is no rule: its limits are of elements, and
    # rules get norms.
    threshold = check_field(call, "threshold", number(), threshold)
    decay = check_field(call, "decay", number(highest=1.0), decay)
    check_number(f"{call}: warmup", warmup)
    warmup = number_for_jit(warmup)
    if every is not None:
        check_length(f"{call}: every", every)
    check_flag(f"{call}: count", count)

    def init(params: Any) -> SpamState:
        # Only shapes and dtypes are read, so `init` takes jax.ShapeDtypeStruct.
        moment = jax.tree.map(_no_squares, types_of(clipped_leaves, params))
        step = jnp.zeros((), jnp.int32)
        elements = no_elements_clipped() if count else ()
        return SpamState(step, moment, elements)

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        second_moment: Any = None,
        **_: Any,
    ) -> tuple[Any, SpamState]:
        check_state(call, state, SpamState)
        step, tree = state.step, clipped_leaves(updates)
        check_kept(call, tree, state.second_moment)
        since = steps_since_reset(step, every)

        # The step is traced, so a reset is a selection in every step.
        def started_anew(v: jax.Array) -> jax.Array:
            return jnp.where(since == 0, jnp.zeros_like(v), v)

        def cut(x: Any, v: jax.Array) -> Any:
            if x is None:
                return None
            # One from elsewhere, such as Adam's, may have 16 bits.
            v = _widened(v)
            # A schedule is read in the dtype of v, float32 or wider.
            (limit,) = at_step(step, v, threshold)
            return _cut_spikes(x, v, limit, since >= warmup)

        def learn(x: Any, clipped: Any, v: jax.Array) -> jax.Array:
            if x is None:
                # A leaf that is missing in this step keeps its average.
                return v
            (keep,) = at_step(step, v, decay)
            return _blend(x, clipped, v, keep)

        own = jax.tree.map(started_anew, state.second_moment)
        usual = own
        if second_moment is not None:
            usual = values_of(call, "second_moment", tree, second_moment)
        clipped = jax.tree.map(cut, tree, usual, is_leaf=is_none)
        # With a second moment from elsewhere the own one is neither updated nor reset.
        moment = state.second_moment
        if second_moment is None:
            moment = jax.tree.map(learn, tree, clipped, own, is_leaf=is_none)
        elements = state.elements
        if count:
            pairs = list(zip(jax.tree.leaves(tree), jax.tree.leaves(clipped)))
            elements = count_clipped(elements, step, pairs)
        step = jnp.asarray(optax.safe_increment(step))
        return put_back(clipped, updates), SpamState(step, moment, elements)

    return optax.GradientTransformationExtraArgs(init, update)


def _no_squares(kind: Any) -> jax.Array:
    """The average of a leaf of this type before the first step."""
    return typed_as(jnp.zeros(kind.shape, norm_dtype([kind])), kind)


def _cut_spikes(
    x: Any, v: jax.Array, threshold: jax.Array, warm: jax.Array
) -> jax.Array:
    """A leaf with its spikes cut down."""
    # Roots first: threshold * v overflows for gradients of 1e18, v being their square.
    limit, wide = root(threshold) * root(v), _widened(x)
    # Where v is 0 nothing is usual yet. The public code makes such a coordinate 0.
    spike = (_size(x, v) > limit) & (v > 0) & warm
    # An infinite limit cuts nothing, and times the sign of 0 it would be NaN.
    most = float(jnp.finfo(jnp.result_type(x)).max)
    held = jnp.where(spike, jnp.minimum(limit, most), 1.0)
    short = with_modulus(held.astype(modulus_dtype(wide)), wide)
    return jnp.where(spike, cast_like(short, x), x)


def _blend(x: Any, clipped: Any, v: jax.Array, decay: jax.Array) -> jax.Array:
    """The average of squares after a step."""
    # From 1.8e19 on the square of a float32 number is inf, and 0 * inf is NaN.
    square = jnp.where(decay == 1, 0.0, _size(clipped, v) ** 2)
    new = decay * v + (1 - decay) * square
    # The average would stay inf.
    new = jnp.minimum(new, jnp.finfo(v.dtype).max)
    # An infinite coordinate is clipped to the limit, which is not learned from.
    return jnp.where(jnp.isfinite(_widened(x)), new, v)


def _widened(x: Any) -> jax.Array:
    """In at least 32 bits. NumPy promotes floats of 8 bits too, which JAX refuses."""
    x = jnp.asarray(x)
    return x.astype(wide_dtype(x))


def _size(x: Any, like: jax.Array) -> jax.Array:
    return jnp.abs(_widened(x)).astype(like.dtype)
