"""Clippers whose limit follows the norms of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import optax
from jax import Array
from jax.tree_util import Partial
from jax.typing import ArrayLike

from .._arguments.checks import Nonfinite, shown, warn_user
from .._devices.mesh import MeshAxes
from .._norm_clipper import make_clipper
from .._norms.axes import Stacked
from .._norms.norms import GlobalNorm, GroupNorm, Measure, TensorNorm
from .._norms.options import checked_options
from .._state.interop import exported
from ..rules._averages import EmaBand, MomentsRatio, ZScore
from ..rules._limits import Limit, minimum, rule_of
from ..rules._memory import count_up, exponential_average, has_reached
from ..rules._rule import (
    LimitAndMemory,
    Number,
    Rule,
    Schedule,
    checked_number,
    number_field,
    numbers_at_step,
    rule_for_clipper,
    warn_if_limits_fall,
)
from ..rules._windows import WindowedQuantile
from ..shrinks import Shrink, normalize

# "global", "tensor", or labels as `clip_by_group_norm` takes them.
Scope = str | Mapping[Any, Any] | Sequence[Any] | Callable[..., Any]


def autoclip(
    percentile: Number = 10.0,
    window: ArrayLike = 10_000,
    *,
    cap: Limit = None,
    scope: Scope = "global",
    stacked: Stacked = None,
    nonfinite: Nonfinite = "propagate",
    mesh_axes: MeshAxes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Clips to a percentile of the norms so far, the current one included.

        limit_t = quantile(norm_1 ... norm_t)

    No norm has to be known beforehand, and the loss may be scaled at will: multiply it
    by a constant, and limits and norms follow together. A low percentile (the paper's
    10) makes nearly every step as long as a short one. If norms grow during the run,
    limits lag behind, because old norms stay in the window.

    Args:
      percentile: in [0, 100]: 0 clips to the shortest gradient, 100 never clips. A
        number or a schedule.
      window: how many norms are kept, at least 1. The paper keeps all: give the number
        of steps of the run to have that. The length is part of the state: a restored
        state goes on with its own.
      cap: a fixed limit besides. Without one the first gradient passes, whatever its
        norm. A later spike passes too if the percentile is as large as it. At least 0,
        None for none. A number or a schedule. The percentile does not depend on it.
      scope: "global", "tensor", or labels: a tree prefix of them, a function that makes
        one from the tree, or a function of path and leaf.
      stacked: with scope="tensor", which axes of a leaf index its layers, each with a
        norm of its own: 1 for the leading axis, or another form that
        `clip_by_tensor_norm` takes.
      nonfinite: what becomes of updates whose norm is NaN or inf: "propagate" makes
        them NaN, "zero" makes them 0, "raise" raises FloatingPointError (under jit it
        is a `checkify.check`).
      mesh_axes: over which mesh axes leaves are split: "auto", names, None or a tree
        prefix of PartitionSpec, as in `clip_by_global_norm`. Stacked leaves that are
        split need PartitionSpecs.

    Returns:
      A transformation with a `ClipState`. For each norm it remembers `window` numbers
      twice, by age and by size. Its `update` also takes `grad_norm=` and `limit=`.

    Raises:
      ValueError: a percentile or window out of its range, an unknown scope, or
        `stacked` at another scope than "tensor".
      TypeError: something that is not a number.

    Example:
      >>> clipper = optaxclip.autoclip(50)
      >>> state = clipper.init(jnp.zeros(2))
      >>> for norm in (1.0, 3.0, 9.0):
      ...     updates, state = clipper.update(jnp.array([norm, 0.0]), state)
      ...     print(f"{state.limit:.4f} {updates[0]:.4f}")
      1.0000 1.0000
      2.0000 2.0000
      3.0000 3.0000

    Reference: Seetharaman, Wichern, Pardo, Le Roux, AutoClip: adaptive gradient
    clipping for source separation networks, 2020 (arXiv 2007.14469).
    """
    call = "autoclip"
    # The percentile is checked before it becomes a share, so that errors show it.
    percentile = checked_number(f"{call}: percentile", percentile, highest=100.0)
    # `windowed_quantile` takes shares, so 0.1 for ten percent is an easy slip. The
    # percentile 0 is none: it clips to the shortest gradient.
    if isinstance(percentile, (int, float)) and 0 < percentile < 1:
        warn_user(
            f"{call}: percentile={percentile} is less than one percent. Percentiles "
            f"go from 0 to 100: for the share {percentile} of the norms write "
            f"percentile={100 * percentile:g}."
        )
    # A lambda would compile anew for each clipper that is built alike.
    share = Partial(_share_at, percentile) if callable(percentile) else percentile / 100
    rule = rule_for_clipper(
        call,
        WindowedQuantile,
        quantile=share,
        window=window,
        # AutoClip's percentile is of the norms up to and including the current one.
        current=True,
    )
    rule = _capped(rule, cap, call)
    return _clipper_at(
        scope, rule, call, stacked=stacked, nonfinite=nonfinite, mesh_axes=mesh_axes
    )


def _share_at(percentile: Schedule, step: ArrayLike) -> Any:
    """The share of a percentile that follows a schedule."""
    return percentile(step) / 100


def zclip(
    z: Number = 2.5,
    decay: Number = 0.97,
    *,
    cap: Limit = None,
    target: Literal["adaptive", "mean", "max"] = "adaptive",
    warmup: ArrayLike = 25,
    eps: Number = 1e-6,
    scope: Scope = "global",
    stacked: Stacked = None,
    nonfinite: Nonfinite = "propagate",
    mesh_axes: MeshAxes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Clips norms with a z-score above `z`, the further off the more.

        score = (norm - mean) / (deviation + eps)
        limit = mean + (z^2 / score) * deviation    where score > z

    Mean and deviation are moving averages over the clipped norms.

    Args:
      z: a norm with a score above it is clipped. At least 0. A number or a schedule.
      decay: the decay of the averages for mean and variance, in [0, 1]. A number or a
        schedule.
      cap: a fixed limit besides, as the public code has with 1.0, so that the warm-up
        has a limit too. None for the paper's rule. At least 0. A number or a schedule.
        The averages do not depend on it.
      target: what a clipped norm is brought to: "adaptive" is the equation above,
        "mean" the mean, "max" z deviations above it.
      warmup: how many norms are seen before the first is clipped. At least 1.
      eps: added to the deviation when the score is computed, in units of the norm. At
        least 0. A number or a schedule.
      scope: "global", "tensor", or labels: a tree prefix of them, a function that makes
        one from the tree, or a function of path and leaf.
      stacked: with scope="tensor", which axes of a leaf index its layers, each with a
        norm of its own: 1 for the leading axis, or another form that
        `clip_by_tensor_norm` takes.
      nonfinite: what becomes of updates whose norm is NaN or inf: "propagate" makes
        them NaN, "zero" makes them 0, "raise" raises FloatingPointError (under jit it
        is a `checkify.check`).
      mesh_axes: over which mesh axes leaves are split: "auto", names, None or a tree
        prefix of PartitionSpec, as in `clip_by_global_norm`. Stacked leaves that are
        split need PartitionSpecs.

    Returns:
      A transformation with a `ClipState`. For each norm it remembers three numbers. Its
      `update` also takes `grad_norm=` and `limit=`.

    Raises:
      ValueError: a number out of its range, an unknown target or scope, or `stacked` at
        another scope than "tensor".
      TypeError: something that is not a number.

    Example:
      >>> clipper = optaxclip.zclip(2.0, 0.5, warmup=3)
      >>> state = clipper.init(jnp.zeros(1))
      >>> for norm in (1.0, 3.0, 2.0, 9.0):
      ...     updates, state = clipper.update(jnp.array([norm]), state)
      >>> print(f"{state.limit:.3f} {updates[0]:.3f}")
      2.381 2.381

    Reference: Kumar, Owen, Chowdhury, Gura, ZClip: adaptive spike mitigation for LLM
    pre-training, 2025 (arXiv 2504.02507).
    """
    call = "zclip"
    # Errors of the rule name zclip, which the user called, instead of z_score.
    rule = rule_for_clipper(
        call, ZScore, z=z, decay=decay, eps=eps, target=target, warmup=warmup
    )
    rule = _capped(rule, cap, call)
    return _clipper_at(
        scope, rule, call, stacked=stacked, nonfinite=nonfinite, mesh_axes=mesh_axes
    )


def adagc(
    ratio: Number = 1.05,
    decay: Number = 0.98,
    *,
    max_norm: Number = 1.0,
    warmup: ArrayLike = 100,
    scope: Scope = "tensor",
    stacked: Stacked = None,
    nonfinite: Nonfinite = "propagate",
    mesh_axes: MeshAxes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Clips each tensor to `ratio` times the running average of its norm.

        warm-up     h = min(1, max_norm / |all|)       average <- min(average, h |g|)
        afterwards  h = min(1, ratio * average / |g|)  average <- decay * average +
                                                         (1 - decay) * h |g|

    After the warm-up one tensor that spikes is clipped alone. All others pass bit for
    bit, where a global clip would shorten them too. What is let through grows by at
    most the factor 1 + (1 - decay) * (ratio - 1) a step.

    In the warm-up one factor shortens all tensors, and the averages become the
    shortened norms. So a spike of 10,000 times the limit there holds every tensor back
    for thousands of steps. Put `skip_step` around the optimizer, or choose `max_norm`
    so that the warm-up clips little.

    Args:
      ratio: above 1. From 0 to 1 it is allowed with a warning: what is let through can
        then only fall, since the average is taken over clipped norms. The paper's code
        has 1.05 with a decay of 0.98, later runs 1.04 with 0.99. A number or a
        schedule.
      decay: the decay of the average, in [0, 1]. A number or a schedule.
      max_norm: the global limit of the warm-up, at least 0. A number or a schedule.
      warmup: how many norms are seen under the global limit. At least 1.
      scope: "tensor", "global", or labels: a tree prefix of them, a function that makes
        one from the tree, or a function of path and leaf.
      stacked: with scope="tensor", which axes of a leaf index its layers, each with a
        norm of its own: 1 for the leading axis, or another form that
        `clip_by_tensor_norm` takes.
      nonfinite: what becomes of updates whose norm is NaN or inf: "propagate" makes
        them NaN, "zero" makes them 0, "raise" raises FloatingPointError (under jit it
        is a `checkify.check`). In the warm-up one broken tensor breaks all.
      mesh_axes: over which mesh axes leaves are split: "auto", names, None or a tree
        prefix of PartitionSpec, as in `clip_by_global_norm`. Stacked leaves that are
        split need PartitionSpecs.

    Returns:
      A transformation with a `ClipState`. For each norm it remembers two numbers. Its
      `update` also takes `grad_norm=` and `limit=`.

    Raises:
      ValueError: a number out of its range, an unknown scope, or `stacked` at another
        scope than "tensor".
      TypeError: something that is not a number.

    Warns:
      UserWarning: a ratio of at most 1, which may be meant for a limit.

    Example:
      >>> clipper = optaxclip.adagc(1.5, 0.5, warmup=1)
      >>> state = clipper.init({"w": jnp.zeros(1), "b": jnp.zeros(1)})
      >>> for spike in (0.4, 8.0):
      ...     grads = {"w": jnp.array([spike]), "b": jnp.array([0.3])}
      ...     updates, state = clipper.update(grads, state)
      >>> print(updates["w"], updates["b"])
      [0.6] [0.3]

    Reference: Wang et al., AdaGC: improving training stability for large language model
    pretraining, 2025 (arXiv 2502.11034). The authors' code for Megatron adds 1e-6 to
    norms. Paddle's code seeds the averages with norms before the global clip and warms
    up one step longer. In both codes a norm that is 0, or is shortened to 0, holds its
    tensor at 0 for good. Here it is not remembered.
    """
    call = "adagc"
    rule = Adagc(ratio=ratio, decay=decay, max_norm=max_norm, warmup=warmup)
    warn_if_limits_fall(f"{call}: ratio", ratio)
    return _clipper_at(
        scope, rule, call, stacked=stacked, nonfinite=nonfinite, mesh_axes=mesh_axes
    )


@exported
class AdaGCMemory(NamedTuple):
    """What `adagc` remembers of each norm."""

    seen: Array  # int32[norm]: norms remembered
    average: Array  # float32[norm]: of clipped norms, inf before the first


# Only `adagc` uses this rule, so it is not in `optaxclip.rules`. Errors derive the name
# of the call from the name of the class, and `AdaGC` would become ada_g_c.
class Adagc(Rule):
    """The rule of AdaGC. The docstring of `adagc` has its equations."""

    ratio: Number = number_field()
    decay: Number = number_field(highest=1.0)
    max_norm: Number = number_field()
    warmup: ArrayLike = number_field(lowest=1, may_be_schedule=False)

    # `update` gets the norm of all tensors together, which the warm-up clips.
    needs_total = True

    def init(self, norm: Array) -> AdaGCMemory:
        # The first average is the minimum of a norm and inf, which is the norm.
        average = jnp.full_like(norm, jnp.inf)
        return AdaGCMemory(jnp.zeros(norm.shape, jnp.int32), average)

    def update(
        self, norm: Array, memory: AdaGCMemory, step: Array, total: Array
    ) -> LimitAndMemory:
        ratio, decay, max_norm = numbers_at_step(
            step, norm.dtype, self.ratio, self.decay, self.max_norm
        )
        seen, average = memory
        is_past_warmup = has_reached(seen, self.warmup)
        is_over = total > max_norm
        # h = min(1, max_norm / total). The inner where keeps 0 out of the division.
        factor = jnp.where(is_over, max_norm / jnp.where(is_over, total, 1.0), 1.0)
        # A tensor whose limit is h |g| is multiplied by h.
        early_limit = jnp.where(is_over, norm * factor, jnp.inf)
        # In the warm-up all tensors are clipped together, so a broken one breaks all.
        # A limit of NaN counts as a broken norm.
        early_limit = jnp.where(jnp.isfinite(total), early_limit, jnp.nan)
        # The average is inf before the first norm. `jnp.where` would drop ratio * inf,
        # but its derivative would be 0 * inf, which is NaN.
        finite_average = jnp.where(is_past_warmup, average, 0.0)
        limit = jnp.where(is_past_warmup, ratio * finite_average, early_limit)
        # h |g|: the spike itself never enters the average.
        clipped_norm = jnp.minimum(norm, limit)
        later_average = exponential_average(finite_average, clipped_norm, decay)
        # During the warm-up the average is the smallest h |g| so far.
        early_average = jnp.minimum(average, clipped_norm)
        new_average = jnp.where(is_past_warmup, later_average, early_average)
        # An average of 0 would clip its tensor to 0 for good. Subnormal norms are not
        # remembered either: a CPU flushes them to 0, and a GPU does not.
        is_remembered = clipped_norm >= jnp.finfo(clipped_norm.dtype).tiny
        new_memory = AdaGCMemory(
            seen=count_up(seen, is_remembered),
            average=jnp.where(is_remembered, new_average, average),
        )
        return limit, new_memory


def aggc(
    low: Number = 0.95,
    high: Number = 0.6,
    *,
    scope: Scope,
    decay: Number = 0.95,
    floor: Number = 0.01,
    up: Number = 1.1,
    down: Number = 0.9,
    raise_small: ArrayLike = False,
    stacked: Stacked = None,
    nonfinite: Nonfinite = "propagate",
    mesh_axes: MeshAxes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Pulls the norm of each group down towards a multiple of its running average, and
    on request up towards another.

        target = high * average             where the norm is above it
                 max(floor, low * average)  for a norm below it, with raise_small=True
                 norm                       for all others
        new norm = target, within [down * norm, up * norm]
        average <- decay * average + (1 - decay) * new norm

    A group that explodes does not shorten the others, and one that dies away can be
    lifted. A norm above `high * average` is brought down to it, even where `low` is
    higher, as by default. With the defaults a steady norm is shortened by 10 % in every
    step but the first: the upper edge comes down to 0.54 of the norm, but `down` allows
    no less than 0.9.

    Args:
      low, high: the edges, as multiples of the average. At least 0. Numbers or
        schedules. `low` has an effect with raise_small=True only.
      scope: labels, such as the kind of the layer: a tree prefix of them, a function
        that makes one from the tree, or a function of path and leaf. Or "tensor" or
        "global".
      decay: the decay of the average, in [0, 1]. A number or a schedule.
      floor: the lower edge is at least this, in units of the norm. It has an effect
        with raise_small=True only. At least 0. A number or a schedule.
      up: how far one step is lengthened at most, at least 1. A number or a schedule.
      down: how far one step is shortened at most, in [0, 1]. A number or a schedule.
      raise_small: whether norms below the band are lifted. Otherwise they pass.
      stacked: with scope="tensor", which axes of a leaf index its layers, each with a
        norm of its own: 1 for the leading axis, or another form that
        `clip_by_tensor_norm` takes.
      nonfinite: what becomes of updates whose norm is NaN or inf: "propagate" makes
        them NaN, "zero" makes them 0, "raise" raises FloatingPointError (under jit it
        is a `checkify.check`).
      mesh_axes: over which mesh axes leaves are split: "auto", names, None or a tree
        prefix of PartitionSpec, as in `clip_by_global_norm`. Stacked leaves that are
        split need PartitionSpecs.

    Returns:
      A transformation with a `ClipState`, whose `limit` is the norm that was aimed at.
      For each norm it remembers two numbers. Its `update` also takes `grad_norm=` and
      `limit=`.

    Raises:
      ValueError: a number out of its range, an unknown scope, or `stacked` at another
        scope than "tensor".
      TypeError: something that is not a number.

    Example:
      >>> clipper = optaxclip.aggc(0.5, 1.0, scope="tensor", decay=0.5, down=0.5)
      >>> state = clipper.init(jnp.zeros(1))
      >>> for norm in (2.0, 3.0, 9.0):
      ...     updates, state = clipper.update(jnp.array([norm]), state)
      ...     print(f"{updates[0]:.4f}")
      2.0000
      2.0000
      4.5000

    Reference: Li, Wu, Chang, AGGC: adaptive group gradient clipping for stabilizing
    large language model training, 2026 (arXiv 2601.11864). The defaults are those with
    which the public scripts for LoRA begin. The public code starts the average at 0.
    Here it starts at the first norm, which passes.
    """
    call = "aggc"
    # The published low, 0.95, is above the published high, 0.6: the upper edge wins.
    rule = rule_for_clipper(
        call,
        EmaBand,
        low=low,
        high=high,
        decay=decay,
        floor=floor,
        up=up,
        down=down,
        raise_small=raise_small,
    )
    return _clipper_at(
        scope,
        rule,
        call,
        # The limit is the norm aimed at, and `hard` would lift no norm to it.
        shrink=normalize,
        stacked=stacked,
        nonfinite=nonfinite,
        mesh_axes=mesh_axes,
    )


def adagn(
    decay1: Number = 0.7,
    decay2: Number = 0.9,
    *,
    eps: Number = 1e-8,
    scope: Scope = "tensor",
    stacked: Stacked = None,
    nonfinite: Nonfinite = "propagate",
    mesh_axes: MeshAxes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Makes each tensor as long as the quotient of its norm's moments, about 1.

        mean   <- decay1 * mean + (1 - decay1) * |g|       both corrected for their
        square <- decay2 * square + (1 - decay2) * |g|^2   start, as in Adam
        new norm = mean / (sqrt(square) + eps)

    A steady norm becomes 1, whatever the scale of the loss, and one that falls becomes
    less. A norm that rises may become more: after a long steady run up to the root of
    decay1^2 / decay2 + (1 - decay1)^2 / (1 - decay2). By default this is 1.20. With 0.6
    and 0.999 it is 12.7. Stable-SPAM puts `adaclip` first, then this, then Adam with
    `reset_momentum`. GradientStabilizer is this alone, before any optimizer, with
    `adagn(0.6, 0.999, eps=1e-12)`.

    Args:
      decay1, decay2: the decays of the two moments, in [0, 1]. Numbers or schedules. A
        moment whose decay is always 1 is the mean of all steps.
      eps: at least 0, in units of the norm. A number or a schedule.
      scope: "tensor", "global", or labels: a tree prefix of them, a function that makes
        one from the tree, or a function of path and leaf.
      stacked: with scope="tensor", which axes of a leaf index its layers, each with a
        norm of its own: 1 for the leading axis, or another form that
        `clip_by_tensor_norm` takes.
      nonfinite: what becomes of updates whose norm is NaN or inf: "propagate" makes
        them NaN, "zero" makes them 0, "raise" raises FloatingPointError (under jit it
        is a `checkify.check`).
      mesh_axes: over which mesh axes leaves are split: "auto", names, None or a tree
        prefix of PartitionSpec, as in `clip_by_global_norm`. Stacked leaves that are
        split need PartitionSpecs.

    Returns:
      A transformation with a `ClipState`, whose `limit` is the norm that was aimed at.
      For each norm it remembers four numbers. Its `update` also takes `grad_norm=` and
      `limit=`. In a chain after `adaclip` do not pass `grad_norm`: it would be the norm
      before `adaclip`.

    Raises:
      ValueError: a number out of its range, an unknown scope, or `stacked` at another
        scope than "tensor".
      TypeError: something that is not a number.

    Example:
      >>> clipper = optaxclip.adagn(0.5, 0.5)
      >>> state = clipper.init(jnp.zeros(1))
      >>> for norm in (1.0, 1.0, 3.0):
      ...     updates, state = clipper.update(jnp.array([norm]), state)
      >>> print(f"{updates[0]:.3f}")
      0.908

    Reference: Huang et al., Stable-SPAM: how to train in 4-bit more stably than 16-bit
    Adam, 2025 (arXiv 2502.17055). The public code corrects the two moments for their
    start with Adam's step count, which it resets, but does not reset the moments. Here
    they keep their own count. From its third version on (ICML 2026) the paper presents
    GradientStabilizer.
    """
    call = "adagn"
    rule = rule_for_clipper(call, MomentsRatio, decay1=decay1, decay2=decay2, eps=eps)
    return _clipper_at(
        scope,
        rule,
        call,
        # `normalize` makes every norm its limit, whether it was longer or shorter.
        shrink=normalize,
        stacked=stacked,
        nonfinite=nonfinite,
        mesh_axes=mesh_axes,
    )


def _capped(rule: Rule, cap: Limit, call: str) -> Rule:
    """The smaller of the rule's limit and a cap. The cap is a rule of its own, so what
    the first rule learns does not depend on it.
    """
    return rule if cap is None else minimum(rule, rule_of(cap, f"{call}: cap"))


def _clipper_at(
    scope: Scope,
    rule: Rule,
    call: str,
    *,
    shrink: Shrink | None = None,
    stacked: Stacked,
    nonfinite: Nonfinite,
    mesh_axes: MeshAxes,
) -> optax.GradientTransformationExtraArgs:
    """The clipper by a rule of the norms at a scope. Errors name the `call`.

    Raises:
      ValueError: an unknown scope, or `stacked` at another scope than "tensor".
    """
    # As labels, None or another string would make one group of all leaves.
    if scope is None or (isinstance(scope, str) and scope not in ("global", "tensor")):
        raise ValueError(
            f"{call}: scope must be 'global', 'tensor', or labels as in "
            f"clip_by_group_norm, got {shown(scope)}."
        )
    # A norm of several tensors has no layers.
    if stacked is not None and scope != "tensor":
        raise ValueError(
            f"{call}: stacked={shown(stacked)} makes each layer a tensor of its own: "
            f"take scope='tensor', not scope={shown(scope)}."
        )
    # All papers of these rules have norms of order 2.
    check_options = partial(checked_options, call, ord=None, mesh_axes=mesh_axes)
    measure: Measure
    if scope == "global":
        measure = GlobalNorm(**check_options())
    elif scope == "tensor":
        measure = TensorNorm(**check_options(stacked=stacked))
    else:
        measure = GroupNorm(**check_options(labels=scope), argument="scope")
    return make_clipper(
        measure,
        rule,
        call=call,
        limit_argument="limit",
        shrink=shrink,
        nonfinite=nonfinite,
    )
