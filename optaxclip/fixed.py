"""Clippers by norm: of everything, of each tensor, of each unit, or of groups.

They share these: a limit that is a number, an array, a schedule from step to number,
None for no limit, or a rule that learns (`optaxclip.adaptive`); AGC takes a share of
the weights in its place; `ord` (the order of the norm: a number above 0, `math.inf`,
"rms", "average"; None means 2); `shrink` (what becomes of what is too long: None or
`hard`, `smooth()`, `drop`, `normalize`); `eps` (added to the norm before dividing; 1e-6
gives torch's numbers); `nonfinite` ("propagate", "zero" or "raise", see `clip_by`).

    limit 0          zeros, for zero updates as well
    limit None, inf  only measures: bit for bit the input, even where it is NaN
    norm <= limit    bit for bit the input
    norm NaN or inf  all that was measured together becomes NaN (nonfinite="propagate")
    nothing to clip  the norm of an empty tree is 0; None, integer, bool and empty
                     leaves pass through
"""

from collections.abc import Callable
from typing import Any

import optax

from .arguments import call_of, check_state
from .core import ClipState, clip_by
from .leaves import (
    Axis,
    Stacked,
    axes_by_label,
    by_label,
    check_labels,
    measured_as,
    unboxed,
)
from .norms import Ord, global_norm, measure_of, norm_of_each, tensor_norm, unit_norm
from .sharding import Axes
from .shrinks import Shrink
from .thresholds import rule_of, share_of_params


def clip_by_global_norm(
    max_norm: Any,
    *,
    ord: Ord = None,
    shrink: Shrink | None = None,
    eps: Any = 0.0,
    nonfinite: str = "propagate",
    axes: Axes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Shortens the updates, all together, to at most `max_norm`: g * min(1, max_norm /
    |g|).

    Args:
      max_norm: a number at least 0, an array, a schedule, None to only measure, or a
        `Threshold` that learns.
      ord, shrink, eps, nonfinite: see the module.

    Returns:
      A transformation whose state is a `ClipState`, read by `metrics`. `update(...,
      grad_norm=norm)` takes a norm measured elsewhere.

    Raises:
      TypeError, ValueError: a limit, order or policy that can not be;
        FloatingPointError: see `clip_by`.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> grads = [jnp.array([3.0, 4.0]), jnp.array([1.0, 2.0])]
      >>> clipper = optaxclip.clip_by_global_norm(5.0)
      >>> updates, state = clipper.update(grads, clipper.init(grads))
      >>> print(*(f"{float(x):.4f}" for x in (state.norm, *updates[0], *updates[1])))
      5.4772 2.7386 3.6515 0.9129 1.8257

    Reference: Pascanu, Mikolov, Bengio, On the difficulty of training recurrent neural
    networks, 2013 (arXiv 1211.5063).
    """
    return clip_together(
        "clip_by_global_norm: max_norm",
        max_norm,
        ord=ord,
        shrink=shrink,
        eps=eps,
        nonfinite=nonfinite,
        axes=axes,
    )


def clip_by_tensor_norm(
    max_norm: Any,
    *,
    ord: Ord = None,
    stacked: Stacked = None,
    shrink: Shrink | None = None,
    eps: Any = 0.0,
    nonfinite: str = "propagate",
    axes: Axes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Shortens each leaf by itself to at most `max_norm` (TensorFlow's `clip_by_norm`,
    Keras' `clipnorm`).

    Args:
      max_norm: a number at least 0, an array, a schedule, None, a `Threshold`, or a
        tree prefix of these: limits for parts of the tree.
      stacked: how many leading axes of a leaf count layers (see `tensor_norm`); each
        layer is clipped by itself.
      ord, shrink, eps, nonfinite: see the module.
    """
    return clip_tensors(
        "clip_by_tensor_norm: max_norm",
        max_norm,
        ord=ord,
        stacked=stacked,
        shrink=shrink,
        eps=eps,
        nonfinite=nonfinite,
        axes=axes,
    )


def clip_by_tensor_rms(
    max_rms: Any,
    *,
    stacked: Stacked = None,
    shrink: Shrink | None = None,
    eps: Any = 0.0,
    nonfinite: str = "propagate",
    axes: Axes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Shortens each leaf to a root mean square of at most `max_rms`: the update
    clipping of Adafactor, which puts it after the preconditioner with 1.0.

    Args:
      max_rms: as `max_norm` in `clip_by_tensor_norm`.
      stacked, shrink, eps, nonfinite: as in `clip_by_tensor_norm`.

    Reference: Shazeer, Stern, Adafactor, 2018 (arXiv 1804.04235).
    """
    return clip_tensors(
        "clip_by_tensor_rms: max_rms",
        max_rms,
        ord="rms",
        stacked=stacked,
        shrink=shrink,
        eps=eps,
        nonfinite=nonfinite,
        axes=axes,
    )


def clip_by_average_norm(
    max_norm: Any,
    *,
    stacked: Stacked = None,
    shrink: Shrink | None = None,
    eps: Any = 0.0,
    nonfinite: str = "propagate",
    axes: Axes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Shortens each leaf to an average norm, |g| / size, of at most `max_norm`. This is
    TensorFlow's definition; it is not the root mean square.

    Args:
      max_norm, stacked, shrink, eps, nonfinite: as in `clip_by_tensor_norm`.
    """
    return clip_tensors(
        "clip_by_average_norm: max_norm",
        max_norm,
        ord="average",
        stacked=stacked,
        shrink=shrink,
        eps=eps,
        nonfinite=nonfinite,
        axes=axes,
    )


def clip_by_unit_norm(
    max_norm: Any,
    *,
    axis: Axis = None,
    ord: Ord = None,
    stacked: Stacked = None,
    shrink: Shrink | None = None,
    eps: Any = 0.0,
    nonfinite: str = "propagate",
    axes: Axes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Shortens each unit, the weights that feed one output, to at most `max_norm`.

    Args:
      max_norm: as in `clip_by_tensor_norm`. An array may hold one limit for each unit,
        with the summed axes at size 1.
      axis: the axes that are summed over (see `unit_norm`). None chooses by shape: all
        axes where at most one is longer than 1, otherwise those before the last, the
        output of a JAX kernel (axis 0 alone at rank 3). For weights of shape (out, in):
        `axis=lambda path, x: tuple(range(1, x.ndim)) or None`.
      ord, stacked, shrink, eps, nonfinite: as in `clip_by_tensor_norm`.
    """
    call = "clip_by_unit_norm"
    units = measure_of(call, unit_norm, ord, axes, axis=axis, stacked=stacked)
    return clip_by(
        units,
        max_norm,
        shrink,
        eps=eps,
        nonfinite=nonfinite,
        argument=f"{call}: max_norm",
    )


def clip_by_group_norm(
    max_norm: Any,
    labels: Any,
    *,
    ord: Ord = None,
    shrink: Shrink | None = None,
    eps: Any = 0.0,
    nonfinite: str = "propagate",
    axes: Axes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Shortens each group of leaves to at most its limit: one norm and one limit for
    each label.

    Args:
      max_norm: one limit for every group, or a dict from label to limit. A limit is a
        number at least 0, an array, a schedule, None or a `Threshold`.
      labels: a tree prefix of labels, or a function that makes one from the tree, as in
        `optax.partition`.
      ord, shrink, eps, nonfinite: see the module.

    Raises:
      ValueError: a leaf without a label, or a label without a limit.
      TypeError: labels of mixed kinds, such as 1 and "1".
    """
    return clip_groups(
        "clip_by_group_norm: max_norm",
        max_norm,
        labels,
        ord=ord,
        shrink=shrink,
        eps=eps,
        nonfinite=nonfinite,
        axes=axes,
    )


def adaptive_grad_clip(
    clipping: Any = 0.01,
    eps: Any = 1e-3,
    axis: Axis = None,
    *,
    per_tensor: bool = False,
    ord: Ord = None,
    stacked: Stacked = None,
    shrink: Shrink | None = None,
    nonfinite: str = "propagate",
    axes: Axes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Keeps each unit's gradient short against its weights: |G_i| <= clipping *
    max(|W_i|, eps).

    Its `update` needs params. The paper leaves out the final linear layer: wrap the
    clipper in `optax.masked`.

    Args:
      clipping: a number at least 0, an array or a schedule. 0.01 is the paper's for
        batches of 1024 to 4096; smaller batches take larger ones.
      eps: weights shorter than this count as this long. At least 0.
      axis: the axes that are summed over (see `unit_norm`). None chooses by shape, as
        the paper's code and optax do: all axes where at most one is longer than 1, so
        that a bias or a kernel of shape (n, 1) or (1, n) is one unit; otherwise those
        before the last, the output of a JAX kernel (axis 0 alone at rank 3).
        Weights of shape (out, in), as equinox and torch have them, need to be told, or
        a unit is what one input feeds:
        `axis=lambda path, x: tuple(range(1, x.ndim)) or None`.
      per_tensor: compare whole leaves in place of units, as DreamerV3 does with
        clipping=0.3.
      ord, stacked, shrink, nonfinite: as in `clip_by_tensor_norm`.

    Raises:
      ValueError: `update` without params.

    Reference: Brock et al., High-performance large-scale image recognition without
    normalization, 2021 (arXiv 2102.06171); Hafner et al., Mastering diverse domains
    through world models, 2023 (arXiv 2301.04104).
    """
    call = "adaptive_grad_clip"
    if per_tensor and axis is not None:
        raise ValueError(
            f"{call}: axis={axis!r} says how units are summed; with per_tensor=True "
            "there are none."
        )
    parts = (
        measure_of(call, tensor_norm, ord, axes, stacked=stacked)
        if per_tensor
        else measure_of(call, unit_norm, ord, axes, axis=axis, stacked=stacked)
    )
    limits = share_of_params(
        clipping, eps, argument=f"{call}: clipping", floor_argument=f"{call}: eps"
    )
    return clip_by(
        parts, limits, shrink, nonfinite=nonfinite, argument=f"{call}: clipping"
    )


def measure(
    norm: Callable[[Any], Any] = global_norm,
) -> optax.GradientTransformationExtraArgs:
    """Clips nothing: keeps the norms for `metrics`. Beside a clipper in the same jitted
    step it costs nothing, since XLA computes equal sums once.

    Args:
      norm: from a tree to its norms: `global_norm`, `tensor_norm`, or a function of
        your own.
    """
    return clip_by(norm, None, argument="measure: norm")


def clip_by_block_rms(threshold: Any) -> optax.GradientTransformationExtraArgs:
    """`optax.clip_by_block_rms`: see `clip_by_tensor_rms`."""
    return clip_tensors("clip_by_block_rms: threshold", threshold, ord="rms")


# The three below are also what the clippers with papers of their own are made of, which
# tell errors under their own names.


def clip_together(
    argument: str, limit: Any, *, ord: Ord = None, axes: Axes = "auto", **options: Any
) -> optax.GradientTransformationExtraArgs:
    """One norm for everything; `argument` is how error messages name the call and its
    limit, `options` are those of `clip_by`.
    """
    return clip_by(
        measure_of(call_of(argument), global_norm, ord, axes),
        rule_of(limit, argument),
        argument=argument,
        **options,
    )


def clip_tensors(
    argument: str,
    limit: Any,
    *,
    ord: Ord = None,
    stacked: Stacked = None,
    axes: Axes = "auto",
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """One norm for each leaf, or for each of its layers."""
    return clip_by(
        measure_of(call_of(argument), tensor_norm, ord, axes, stacked=stacked),
        limit,
        argument=argument,
        **options,
    )


def clip_groups(
    argument: str,
    limit: Any,
    labels: Any,
    *,
    ord: Ord = None,
    axes: Axes = "auto",
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """One norm for each label."""
    call = call_of(argument)
    if isinstance(limit, dict):
        check_labels(f"{argument} must have labels", limit)

    def clipper(tree: Any) -> optax.GradientTransformationExtraArgs:
        norms = measure_of(
            call, norm_of_each, ord, axes_by_label(axes, tree, labels, call)
        )
        return clip_by(norms, limit, argument=argument, **options)

    def init(params: Any) -> Any:
        return clipper(params).init(by_label(params, labels, call)[0])

    def update(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        check_state(call, state, ClipState)
        groups, restore = by_label(updates, labels, call)
        # All of a group may be missing in a step. What is no dict was made by another
        # clipper, as the kernel will say.
        absent = (
            {label: {} for label in state.norm if label not in groups}
            if isinstance(state.norm, dict)
            else {}
        )
        weights = (
            None
            if params is None
            else by_label(measured_as(unboxed(updates), params), labels, call)[0]
            | absent
        )
        clipped, state = clipper(updates).update(
            groups | absent, state, weights, **extra_args
        )
        return restore(clipped), state

    clip_by(
        measure_of(call, global_norm, ord), limit, argument=argument, **options
    )  # an argument that can not be is refused here, not in the first step
    return optax.GradientTransformationExtraArgs(init, update)
