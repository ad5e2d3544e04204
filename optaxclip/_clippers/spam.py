"""SPAM and Stable-SPAM: spikes of single coordinates are cut down, and the optimizer's
state starts anew from time to time.

    spam            compares the square of a coordinate with its running average
    adaclip         compares it with the usual largest one of its tensor
    reset_momentum  resets the moments, after which the updates rise again

The papers pair them:

    optax.chain(
        spam(),
        reset_momentum(optax.scale_by_adam(), every=500, warmup=150),
        optax.scale_by_learning_rate(1e-3),
    )
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike

from .. import _trees as trees
from .._arguments import checks
from .._arguments.checks import Nonfinite, check_state
from .._arguments.updates import check_fits_stored
from .._devices.mesh import MeshAxes
from .._norm_clipper import make_clipper
from .._norms.axes import Stacked
from .._norms.moduli import modulus_dtype, wide_dtype, widened, with_modulus
from .._norms.norms import Norms, TensorNorm
from .._norms.options import checked_options
from .._state.interop import exported
from .._trees import PyTree, arrays_of, leaves_to_clip, put_back
from ..rules._averages import Ema
from ..rules._memory import count_up, has_reached, new_where, root
from ..rules._rule import Number, checked_number, numbers_at_step, rule_for_clipper
from .elements import Shares, no_elements_clipped, shares_after


@exported
class SpamState(NamedTuple):
    """The state of `spam`."""

    step: Array  # int32[]: updates seen
    # float32[...] for each clipped leaf (float64 if it has 64 bits): the average of
    # squares, not corrected for its start
    second_moment: Any
    # The share of the elements that was clipped, where it is counted, else ().
    elements: Shares


def spam(
    threshold: Number = 5000.0,
    *,
    decay: Number = 0.999,
    warmup: ArrayLike = 20,
    every: ArrayLike | None = 500,
    count: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Cuts coordinates down to sqrt(threshold * v), v the average of their squares.

        g_i <- sign(g_i) sqrt(threshold * v_i)      where g_i^2 > threshold * v_i
        v_i <- decay * v_i + (1 - decay) * g_i^2    with the clipped g_i

    In the paper v is Adam's. Here it is a buffer of its own, as large as the
    parameters. A coordinate that is NaN stays NaN. An infinite coordinate becomes the
    limit, or stays infinite where there is no limit: in the warm-up, and where v is 0.
    Neither NaN nor inf enters the average. Complex coordinates are limited by modulus,
    and become NaN if infinite and above a limit.

    Args:
      threshold: the largest g_i^2 / v_i that is allowed. At least 0. A number or a
        schedule.
      decay: of the average, in [0, 1]. A number or a schedule.
      warmup: how many updates pass unclipped after a reset. The one that resets is the
        first of them. At the start of training it is one fewer. Where v is 0, nothing
        is clipped either. At least 0.
      every: the average starts anew before each update whose number, from 1, is a
        multiple of this, as in `reset_momentum`. None for never. A whole number above
        `warmup`.
      count: whether to count which share of the elements is clipped, for `metrics`.

    Returns:
      A transformation with a `SpamState`.

    Raises:
      ValueError: a number out of its range, an array in place of a number, or an
        `every` that is not whole or not above `warmup`.
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
    # An array, even of shape (1,), would broadcast against the leaves.
    checked_scalar = partial(checked_number, is_scalar=True)
    threshold = checked_scalar(f"{call}: threshold", threshold)
    decay = checked_scalar(f"{call}: decay", decay, highest=1.0)
    warmup = checked_scalar(f"{call}: warmup", warmup, may_be_schedule=False)
    if every is not None:
        checks.check_whole_number(f"{call}: every", every)
        # Otherwise a warm-up would last until the next reset, and nothing be clipped.
        checks.check_order(call, ("warmup + 1", warmup + 1), ("every", every))
    checks.check_flag(f"{call}: count", count)

    def zero_moment(leaf: ArrayLike) -> Array:
        return jnp.zeros_like(leaf, jnp.finfo(wide_dtype(leaf)).dtype)

    def init(params: PyTree) -> SpamState:
        # The moment is split over devices as the weights are, which may be
        # jax.ShapeDtypeStruct.
        moment = jax.tree.map(zero_moment, leaves_to_clip(params, call))
        step = jnp.zeros((), jnp.int32)
        elements = no_elements_clipped() if count else ()
        return SpamState(step, moment, elements)

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: object
    ) -> Any:
        check_state(call, state, SpamState)
        if "second_moment" in extra_args:
            raise TypeError(
                f"{call}: update takes no second_moment. It keeps its own average."
            )
        tree = leaves_to_clip(updates, call)
        check_fits_stored(call, tree, state.second_moment)
        step = state.step
        since_reset = _steps_since_reset(step, every)
        # The step is traced, so a reset is a selection in every step.
        zeros = jax.tree.map(jnp.zeros_like, state.second_moment)
        moment = new_where(since_reset == 0, zeros, state.second_moment)
        # Where a leaf is missing in this step, the tree has None.
        map_leaves = partial(jax.tree.map, is_leaf=trees.is_none)
        cut_down = partial(
            _cut_down,
            step=step,
            threshold=threshold,
            is_past_warmup=has_reached(since_reset, warmup),
        )
        clipped = map_leaves(cut_down, tree, moment)
        next_moment = partial(_next_moment, step=step, decay=decay)
        new_moment = map_leaves(next_moment, tree, clipped, moment)
        new_step = count_up(step)
        elements = state.elements
        if count:
            leaves = jax.tree.leaves(tree)
            before_and_after = list(zip(leaves, jax.tree.leaves(clipped)))
            elements = shares_after(call, elements, new_step, before_and_after)
        return put_back(clipped, updates), SpamState(new_step, new_moment, elements)

    return optax.GradientTransformationExtraArgs(init, update)


def _steps_since_reset(step: Array, every: ArrayLike | None) -> Array:
    """Steps since the last reset. Resets are before the updates number `every`,
    2 `every` and so on. Without resets, the number of the update.
    """
    # After the largest int32 the number stays, as the step does.
    update_number = count_up(step)
    if every is None:
        return update_number
    # every=3: the steps 0, 1, 2, 3, 4, 5 give 1, 2, 0, 1, 2, 0.
    return update_number % jnp.asarray(every, jnp.int32)


def _cut_down(
    x: ArrayLike | None,
    moment: Array,
    *,
    step: Array,
    threshold: Number,
    is_past_warmup: Array,
) -> Array | None:
    """A leaf with its spikes cut down, where `is_past_warmup` and v > 0:

        sign(x) * min(|x|, sqrt(threshold * v))

    None is a leaf that is missing in this step.
    """
    if x is None:
        return None
    wide = widened(x)
    (threshold,) = numbers_at_step(step, moment.dtype, threshold)
    # Where v is 0 nothing is usual yet. The public code makes such a coordinate 0.
    has_moment = moment > 0
    # Where v is 0 the 1 keeps a threshold of inf from making NaN. `is_spike` is False.
    root_of_moment = jnp.where(has_moment, root(moment), 1.0)
    # The roots are multiplied, since threshold * v overflows for gradients of 1e18.
    limit = root(threshold) * root_of_moment
    modulus = jnp.abs(wide).astype(moment.dtype)
    is_spike = (modulus > limit) & has_moment & is_past_warmup
    dtype = jnp.result_type(x)
    largest = float(jnp.finfo(dtype).max)
    # The limit of an infinite coordinate may be beyond the dtype of the leaf. Where
    # nothing is cut the limit may be inf, and inf * 0 is NaN, so 1 takes its place.
    new_modulus = jnp.where(is_spike, jnp.minimum(limit, largest), 1.0)
    new_modulus = new_modulus.astype(modulus_dtype(wide))
    shortened = with_modulus(new_modulus, wide)
    return jnp.where(is_spike, shortened.astype(dtype), x)


def _next_moment(
    x: ArrayLike | None, clipped: Array, moment: Array, *, step: Array, decay: Number
) -> Array:
    """The average of squares after a step. A missing leaf, of which `x` is None, keeps
    its average.
    """
    if x is None:
        return moment
    (decay,) = numbers_at_step(step, moment.dtype, decay)
    # An infinite coordinate leaves the average as it is, though it was clipped.
    is_finite = jnp.isfinite(widened(x))
    modulus = jnp.abs(widened(clipped)).astype(moment.dtype)
    modulus = jnp.where(is_finite, modulus, 0.0)
    # A square may be inf: in float32 from 1.8e19 on. A decay of 1 would multiply it by
    # 0, and 0 * inf is NaN.
    square = jnp.where(decay == 1, 0.0, modulus**2)
    new_moment = decay * moment + (1 - decay) * square
    # An average of inf would stay inf.
    largest = jnp.finfo(moment.dtype).max
    new_moment = jnp.minimum(new_moment, largest)
    return jnp.where(is_finite, new_moment, moment)


def adaclip(
    decay: Number = 0.999,
    *,
    stacked: Stacked = None,
    nonfinite: Nonfinite = "propagate",
    mesh_axes: MeshAxes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Shortens coordinates above the running average of their tensor's largest one.

        T <- decay * T + (1 - decay) * max|g|      corrected for its start
        g_i <- g_i * T / max|g|                    where |g_i| > T

    Args:
      decay: the decay of the average T, in [0, 1]. With 1 T is the mean of all steps. A
        number or a schedule.
      stacked: which axes of a leaf index its layers: 1 for the leading axis, or another
        form that `clip_by_tensor_norm` takes.
      nonfinite: what becomes of a tensor whose norm is NaN or inf: "propagate" makes it
        NaN, "zero" makes it 0, "raise" raises FloatingPointError (under jit it is a
        `checkify.check`).
      mesh_axes: over which mesh axes leaves are split: "auto", names, None or a tree
        prefix of PartitionSpec, as in `clip_by_global_norm`. Stacked leaves that are
        split need PartitionSpecs.

    Returns:
      A transformation with a `ClipState`: `norm` is the largest coordinate, `factor`
      what those over the limit were multiplied by. For each tensor it remembers two
      numbers. Its `update` also takes `limit=`. It does not look at a `grad_norm=` that
      a chain is given.

    Raises:
      ValueError: a decay out of its range, an unknown `nonfinite`, or an axis in
        `stacked` that a leaf does not have. TypeError: a decay that is not a number.

    Example:
      >>> clipper = optaxclip.adaclip(0.5)
      >>> state = clipper.init(jnp.zeros(2))
      >>> for largest in (2.0, 4.0):
      ...     updates, state = clipper.update(jnp.array([largest, 1.0]), state)
      >>> print(updates)
      [3.3333 1.    ]

    Reference: Huang et al., Stable-SPAM: how to train in 4-bit more stably than 16-bit
    Adam, 2025 (arXiv 2502.17055). The public code resets Adam's step count but not the
    average's. Here the average keeps its own count.
    """
    call = "adaclip"
    options = checked_options(call, ord=math.inf, stacked=stacked, mesh_axes=mesh_axes)
    # Order inf: the norm of a tensor is its largest coordinate, max|g|.
    measure = TensorNorm(**options)
    rule = rule_for_clipper(call, Ema, decay=decay)
    norm_clipper: Any = make_clipper(
        measure, rule, call=call, limit_argument="limit", nonfinite=nonfinite
    )

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: object
    ) -> Any:
        tree = leaves_to_clip(updates, call)
        norms = measure(tree)
        # `norm_clipper` takes these norms and measures nothing. A `grad_norm` that a
        # chain was given is not the largest coordinate.
        extra_args["grad_norm"] = norms
        # `norm_clipper` multiplies whole tensors by T / max|g|. `_scaled_over_limit`
        # then gives coordinates up to T their own bits back.
        scaled, new_state = norm_clipper.update(tree, state, params, **extra_args)
        # Lists, since a user's class may check the shapes of what it is built from, and
        # norms have other shapes than its arrays.
        leaves, treedef = jax.tree.flatten(tree)
        clipped_leaves = jax.tree.map(
            _scaled_over_limit,
            leaves,
            jax.tree.leaves(scaled),
            norms.local_values(),
            _local_limits(norms, new_state),
        )
        return put_back(treedef.unflatten(clipped_leaves), updates), new_state

    return optax.GradientTransformationExtraArgs(norm_clipper.init, update)


def _local_limits(norms: Norms, state: PyTree) -> list[Array]:
    """The limit of each tensor, with the layers that this device holds."""
    entry_by_name = state.by_name()
    names = trees.unique_names(norms.paths)
    limits = []
    for name, norm in zip(names, norms.values):
        limit = entry_by_name[name].limit
        limits.append(limit.reshape(norm.shape))
    return norms._replace(values=limits).local_values()


def _scaled_over_limit(x: Array, scaled: Array, norm: ArrayLike, limit: Array) -> Array:
    """The tensor with `scaled` in place of its coordinates above the limit. If its norm
    is NaN or inf, all are `scaled`, which is NaN or 0 then.
    """
    # The norm reads `jnp.abs(x)`. If this line read it too, XLA on a CPU would write it
    # to memory, instead of computing it twice.
    modulus = jnp.abs(x) if jnp.iscomplexobj(x) else jnp.maximum(x, -x)
    # The modulus takes the dtype of the limit, as bfloat16 would round the limit.
    is_within = modulus.astype(limit.dtype) <= limit
    return jnp.where(is_within & jnp.isfinite(norm), x, scaled)


@exported
class ResetState(NamedTuple):
    """The state of `reset_momentum`."""

    step: Array  # int32[]: updates seen
    inner_state: Any  # the inner transformation's


def reset_momentum(
    inner: optax.GradientTransformation, every: ArrayLike = 500, warmup: ArrayLike = 150
) -> optax.GradientTransformationExtraArgs:
    """Gives an optimizer a fresh state every `every` steps.

    After a reset its updates rise again from a hundredth to their full size:

        1 - 0.99 (1 + cos(pi k / warmup)) / 2    k steps after a reset

    All of the inner state starts anew, step counts and schedules too. So wrap
    `optax.scale_by_adam()`, not the whole optimizer. Leaves that are not floats or
    complex numbers come out as the inner transformation returns them.

    Args:
      inner: the transformation whose state is reset.
      every: the state starts anew before each update whose number, from 1, is a
        multiple of this. A whole number, at least 1.
      warmup: over how many steps after a reset the updates rise to their full size.
        With a warmup of `every` or more they never reach it. At the start of training
        they do not rise. At least 0.

    Returns:
      A transformation with a `ResetState`. `update` needs `params` if `init` of the
      inner transformation copies weights: it would copy gradients otherwise.

    Raises:
      ValueError: an `every` that is not whole or below 1, or a warmup that is negative
        or an array.
      TypeError: something else that is not a number.

    Example:
      >>> optimizer = optaxclip.reset_momentum(optax.trace(0.9), every=3, warmup=0)
      >>> state = optimizer.init(jnp.zeros(()))
      >>> for _ in range(4):
      ...     update, state = optimizer.update(jnp.ones(()), state)
      ...     print(update)
      1.0
      1.9
      1.0
      1.9

    Reference: Huang et al., SPAM: spike-aware Adam with momentum reset for stable LLM
    training, 2025 (arXiv 2501.06842). The public code has k / (warmup + 1) in the
    cosine. It resets the moments but not Adam's step count, so they are not corrected
    for their new start. Here the count starts anew as well.
    """
    call = "reset_momentum"
    checks.check_whole_number(f"{call}: every", every)
    warmup = checked_number(
        f"{call}: warmup", warmup, may_be_schedule=False, is_scalar=True
    )
    optimizer = checks.with_extra_args(f"{call}: inner", inner)

    def init(params: PyTree) -> ResetState:
        return ResetState(jnp.zeros((), jnp.int32), optimizer.init(params))

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: object
    ) -> Any:
        check_state(call, state, ResetState)
        since_reset = _steps_since_reset(state.step, every)
        # `init` runs in every step, since a reset is a selection. It gets the weights,
        # of which the state of some optimizers holds a copy.
        weights = updates if params is None else arrays_of(params)
        first_state = optimizer.init(weights)
        inner_state = new_where(since_reset == 0, first_state, state.inner_state)
        inner_updates, new_inner_state = optimizer.update(
            updates, inner_state, params, **extra_args
        )
        new_step = count_up(state.step)
        # At the start of training there was no reset, so nothing rises.
        had_reset = has_reached(new_step, every)
        is_rising = had_reset & ~has_reached(since_reset, warmup)
        # A warmup of 0 has no rise, and is not divided by.
        rising_steps = jnp.maximum(jnp.asarray(warmup, float), 1)
        progress = since_reset.astype(float) / rising_steps
        # 0.01 right after a reset, 0.505 half way.
        rise = 1 - 0.99 * (1 + jnp.cos(jnp.pi * progress)) / 2
        factor = jnp.where(is_rising, rise, 1.0)

        def times_factor(x: ArrayLike) -> Array:
            wide = widened(x)
            product = wide * factor.astype(wide.dtype)
            return product.astype(jnp.result_type(x))

        tree = jax.tree.map(times_factor, leaves_to_clip(inner_updates, call))
        return put_back(tree, inner_updates), ResetState(new_step, new_inner_state)

    return optax.GradientTransformationExtraArgs(init, update)
