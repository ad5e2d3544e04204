"""Clippers with a fixed limit: by value, and by the norm of everything, a tensor, a unit or a group.

All that measure share these: a limit that is a number, an array, a schedule from step to number, None for no limit, or a rule that learns (`optaxclip.adaptive`); `ord` (the order
of the norm: a number above 0, `math.inf`, "rms", "average"; None means 2); `shrink` (what becomes of what is too long: None or `hard`, `smooth()`, `drop`, `normalize`); `eps` (added to the
norm before dividing; 1e-6 gives torch's numbers); `nonfinite` ("propagate", "zero" or "raise", see `clip_by`).

    limit 0          zeros, for zero updates as well
    limit None, inf  only measures: bit for bit the input, even where it is NaN
    norm <= limit    bit for bit the input
    norm NaN or inf  all that was measured together becomes NaN (nonfinite="propagate")
    nothing to clip  the norm of an empty tree is 0; None, integer, bool and empty leaves pass through
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from . import prefix, sharding
from .arguments import broadcasts_to, check_number, check_ord, check_state
from .core import Measure, Threshold, clip_by
from .norms import Axes, Axis, Ord, Stacked, axes_by_label, by_label, global_norm, norm_of_each, tensor_norm, unit_norm
from .shrinks import Shrink
from .thresholds import constant, rule_of, share_of_params


class ClipByValueState(NamedTuple):
    """The state of `clip_by_value`."""

    step: jax.Array  # int32[]: updates seen, for bounds that follow a schedule


def clip_by_global_norm(
    max_norm: Any, *, ord: Ord = None, shrink: Shrink | None = None, eps: Any = 0.0, nonfinite: str = "propagate", axes: Axes = "auto"
) -> optax.GradientTransformationExtraArgs:
    """Shortens the updates, all together, to at most `max_norm`: g * min(1, max_norm / |g|).

    Args:
      max_norm: a number at least 0, an array, a schedule, None to only measure, or a `Threshold` that learns.
      ord, shrink, eps, nonfinite: see the module.

    Returns:
      A transformation whose state is a `ClipState`, read by `metrics`. `update(..., grad_norm=norm)` takes a norm measured elsewhere.

    Raises:
      TypeError, ValueError: a limit, order or policy that can not be; FloatingPointError: see `clip_by`.

    Example:
      >>> import optaxclip
      >>> grads = [jnp.array([3.0, 4.0]), jnp.array([1.0, 2.0])]
      >>> clipper = optaxclip.clip_by_global_norm(5.0)
      >>> updates, state = clipper.update(grads, clipper.init(grads))
      >>> print(*(f"{float(x):.4f}" for x in (state.norm, *updates[0], *updates[1])))
      5.4772 2.7386 3.6515 0.9129 1.8257

    Reference: Pascanu, Mikolov, Bengio, On the difficulty of training recurrent neural networks, 2013 (arXiv 1211.5063).
    """
    call = "clip_by_global_norm"
    return clip_by(_measure(call, global_norm, ord, axes), rule_of(max_norm, f"{call}: max_norm"), shrink, eps=eps, nonfinite=nonfinite, call=call)


def clip_by_tensor_norm(
    max_norm: Any, *, ord: Ord = None, stacked: Stacked = None, shrink: Shrink | None = None, eps: Any = 0.0, nonfinite: str = "propagate", axes: Axes = "auto"
) -> optax.GradientTransformationExtraArgs:
    """Shortens each leaf by itself to at most `max_norm` (TensorFlow's `clip_by_norm`, Keras' `clipnorm`).

    Args:
      max_norm: a number at least 0, an array, a schedule, None, a `Threshold`, or a tree prefix of these: limits for parts of the tree.
      stacked: how many leading axes of a leaf count layers (see `tensor_norm`); each layer is clipped by itself.
      ord, shrink, eps, nonfinite: see the module.
    """
    return _tensor_clip("clip_by_tensor_norm", "max_norm", max_norm, ord, stacked, shrink, eps, nonfinite, axes)


def clip_by_tensor_rms(
    max_rms: Any, *, stacked: Stacked = None, shrink: Shrink | None = None, eps: Any = 0.0, nonfinite: str = "propagate", axes: Axes = "auto"
) -> optax.GradientTransformationExtraArgs:
    """Shortens each leaf to a root mean square of at most `max_rms`: the update clipping of Adafactor, which puts it after the preconditioner with 1.0.

    Args:
      max_rms: as `max_norm` in `clip_by_tensor_norm`.
      stacked, shrink, eps, nonfinite: as in `clip_by_tensor_norm`.

    Reference: Shazeer, Stern, Adafactor, 2018 (arXiv 1804.04235).
    """
    return _tensor_clip("clip_by_tensor_rms", "max_rms", max_rms, "rms", stacked, shrink, eps, nonfinite, axes)


def clip_by_average_norm(
    max_norm: Any, *, stacked: Stacked = None, shrink: Shrink | None = None, eps: Any = 0.0, nonfinite: str = "propagate", axes: Axes = "auto"
) -> optax.GradientTransformationExtraArgs:
    """Shortens each leaf to an average norm, |g| / size, of at most `max_norm`. This is TensorFlow's definition; it is not the root mean square.

    Args:
      max_norm, stacked, shrink, eps, nonfinite: as in `clip_by_tensor_norm`.
    """
    return _tensor_clip("clip_by_average_norm", "max_norm", max_norm, "average", stacked, shrink, eps, nonfinite, axes)


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
      max_norm: as in `clip_by_tensor_norm`. An array may hold one limit for each unit, with the summed axes at size 1.
      axis: the axes that are summed over (see `unit_norm`); None chooses by rank.
      ord, stacked, shrink, eps, nonfinite: as in `clip_by_tensor_norm`.
    """
    call = "clip_by_unit_norm"
    limits = _limits(max_norm, f"{call}: max_norm")
    return clip_by(_measure(call, unit_norm, ord, axes, axis=_axes(axis), stacked=_counts(stacked)), limits, shrink, eps=eps, nonfinite=nonfinite, call=call)


def clip_by_group_norm(
    max_norm: Any, labels: Any, *, ord: Ord = None, shrink: Shrink | None = None, eps: Any = 0.0, nonfinite: str = "propagate", axes: Axes = "auto"
) -> optax.GradientTransformationExtraArgs:
    """Shortens each group of leaves to at most its limit: one norm and one limit for each label.

    Args:
      max_norm: one limit for every group, or a dict from label to limit. A limit is a number at least 0, an array, a schedule, None or a `Threshold`.
      labels: a tree prefix of labels, or a function that makes one from the tree, as in `optax.partition`.
      ord, shrink, eps, nonfinite: see the module.

    Raises:
      ValueError: a leaf without a label, or a label without a limit.
    """
    call = "clip_by_group_norm"
    limits = _limits(max_norm, f"{call}: max_norm")

    def clipper(tree: Any) -> optax.GradientTransformationExtraArgs:
        norms = _measure(call, norm_of_each, ord, axes_by_label(axes, tree, labels, call))
        return clip_by(norms, limits, shrink, eps=eps, nonfinite=nonfinite, call=call)

    def init(params: Any) -> Any:
        return clipper(params).init(by_label(params, labels, call)[0])

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        groups, restore = by_label(updates, labels, call)
        params = None if params is None else by_label(params, labels, call)[0]
        clipped, state = clipper(updates).update(groups, state, params, **extra_args)
        return restore(clipped), state

    return optax.GradientTransformationExtraArgs(init, update)


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
    """Keeps each unit's gradient short against its weights: |G_i| <= clipping * max(|W_i|, eps).

    Its `update` needs params. The paper leaves out the final linear layer: wrap the clipper in `optax.masked`.

    Args:
      clipping: a number at least 0, an array or a schedule. 0.01 is the paper's for batches of 1024 to 4096; smaller batches take larger ones.
      eps: weights shorter than this count as this long. At least 0.
      axis: the axes that are summed over (see `unit_norm`); None chooses by rank.
      per_tensor: compare whole leaves in place of units, as DreamerV3 does with clipping=0.3.
      ord, stacked, shrink, nonfinite: as in `clip_by_tensor_norm`.

    Raises:
      ValueError: `update` without params.

    Reference: Brock et al., High-performance large-scale image recognition without normalization, 2021 (arXiv 2102.06171); Hafner et al., Mastering diverse domains through world
    models, 2023 (arXiv 2301.04104).
    """
    call = "adaptive_grad_clip"
    if per_tensor and axis is not None:
        raise ValueError(f"{call}: axis={axis!r} says how units are summed; with per_tensor=True there are none.")
    stacked = _counts(stacked)
    measure = _measure(call, tensor_norm, ord, axes, stacked=stacked) if per_tensor else _measure(call, unit_norm, ord, axes, axis=_axes(axis), stacked=stacked)
    return clip_by(measure, share_of_params(clipping, eps, argument=f"{call}: clipping"), shrink, nonfinite=nonfinite, call=call)


def measure(norm: Callable[[Any], Any] = global_norm) -> optax.GradientTransformationExtraArgs:
    """Clips nothing: keeps the norms for `metrics`. Beside a clipper in the same jitted step it costs nothing, since XLA computes equal sums once.

    Args:
      norm: from a tree to its norms: `global_norm`, `tensor_norm`, or a function of your own.
    """
    return clip_by(norm, constant(None), call="measure")


def clip_by_value(max_value: Any, min_value: Any = None) -> optax.GradientTransformation:
    """Limits every element to [min_value, max_value], or to [-max_value, max_value] when one bound is given.

    Complex elements are limited by modulus and take one bound. NaN stays NaN, an infinite element becomes the bound. Integer leaves keep their dtype: the bounds are rounded
    inwards. The direction of the gradient changes; no device needs to hear of another.

    Args:
      max_value: the upper bound: a number, a schedule, an array that broadcasts to each leaf, or a tree prefix of these. At least 0 when it stands alone.
      min_value: the lower bound, likewise; None for -max_value.

    Raises:
      ValueError: NaN, bounds that are known to leave no room between them, or a bound that does not fit a leaf.
      TypeError: a bound that is no real number, or two bounds for a complex leaf.

    Reference: Mikolov, Statistical language models based on neural networks, 2012.
    """
    call = "clip_by_value"
    upper = _bounds(max_value, f"{call}: max_value", 0.0 if min_value is None else -math.inf)
    lower = None if min_value is None else _bounds(min_value, f"{call}: min_value", -math.inf)
    _check_order(call, max_value, min_value)

    def init(params: Any) -> ClipByValueState:
        return ClipByValueState(jnp.zeros((), jnp.int32))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        check_state(call, state, ClipByValueState)
        uppers = prefix.lookup(upper, updates, f"{call}: max_value")
        lowers = [None] * len(uppers) if lower is None else prefix.lookup(lower, updates, f"{call}: min_value")
        paths, treedef = jax.tree_util.tree_flatten_with_path(updates)
        clipped = [_limit(prefix.name(path), leaf, _now(high, state.step), _now(low, state.step)) for (path, leaf), high, low in zip(paths, uppers, lowers)]
        return jax.tree.unflatten(treedef, clipped), ClipByValueState(jnp.asarray(optax.safe_increment(state.step)))

    return optax.GradientTransformation(init, update)


def clip(max_delta: Any) -> optax.GradientTransformation:
    """`optax.clip`: see `clip_by_value`."""
    return clip_by_value(max_delta)


def clip_by_block_rms(threshold: Any) -> optax.GradientTransformationExtraArgs:
    """`optax.clip_by_block_rms`: see `clip_by_tensor_rms`."""
    return _tensor_clip("clip_by_block_rms", "threshold", threshold, "rms", None, None, 0.0, "propagate", "auto")


def _tensor_clip(call, argument, limit, ord, stacked, shrink, eps, nonfinite, axes):
    measure = _measure(call, tensor_norm, ord, axes, stacked=_counts(stacked))
    return clip_by(measure, _limits(limit, f"{call}: {argument}"), shrink, eps=eps, nonfinite=nonfinite, call=call)


def _measure(call: str, norm: Callable[..., Any], ord: Ord, axes: Axes, **options: Any) -> Measure:
    check_ord(call, ord)
    return Measure(norm, (("ord", ord), ("axes", sharding.freeze(axes)), *options.items()))


def _limits(limit: Any, argument: str) -> Any:
    """The limit, or each limit of a tree, as a threshold."""
    return jax.tree.map(lambda x: rule_of(x, argument), limit, is_leaf=_is_rule_like)


def _counts(stacked: Stacked) -> Any:
    return stacked if callable(stacked) else prefix.freeze(stacked, lambda x: False)


def _axes(axis: Axis) -> Any:
    return axis if callable(axis) else prefix.freeze(axis, lambda x: isinstance(x, tuple) and all(isinstance(i, int) for i in x))


def _is_rule_like(x: Any) -> bool:
    return x is None or callable(x) or isinstance(x, Threshold)


def _bounds(bound: Any, argument: str, lowest: float) -> prefix.Prefix:
    table = prefix.freeze(bound, callable)
    for _, value in table.entries:
        if not callable(value):
            check_number(argument, value, lowest=lowest)
    return table


def _check_order(call: str, max_value: Any, min_value: Any) -> None:
    known = isinstance(max_value, (int, float)) and isinstance(min_value, (int, float))
    if known and min_value > max_value:
        raise ValueError(f"{call}: min_value must be at most max_value, got min_value={min_value!r} and max_value={max_value!r}.")


def _now(bound: Any, step: jax.Array) -> Any:
    return bound(step) if callable(bound) else bound


def _limit(path: str, leaf: Any, high: Any, low: Any) -> Any:
    """One leaf between its bounds. Selected, not computed, so that what lies inside stays bit for bit."""
    if getattr(leaf, "dtype", None) in (jax.dtypes.float0, bool):
        return leaf
    x = jnp.asarray(leaf)
    for bound in (high, low):
        if bound is not None and not broadcasts_to(jnp.shape(bound), x.shape):
            raise ValueError(f"clip_by_value: a bound of shape {jnp.shape(bound)} does not fit the leaf {path!r} of shape {x.shape}.")
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        if low is not None:
            raise TypeError(f"clip_by_value: the leaf {path!r} is complex and has no order: give one bound, for its modulus.")
        size = jnp.abs(x)
        scale = jnp.asarray(high).astype(size.dtype) / jnp.where(size > high, size, 1.0)
        return jnp.where(size > high, x * scale, x)
    low = -jnp.asarray(high) if low is None else low
    if jnp.issubdtype(x.dtype, jnp.integer):
        info = jnp.iinfo(x.dtype)
        low, high = (jnp.clip(edge, info.min, info.max) for edge in (jnp.ceil(low), jnp.floor(high)))
    high, low = (jax.lax.full_like(x, edge) if jnp.ndim(edge) == 0 else jnp.broadcast_to(edge, x.shape).astype(x.dtype) for edge in (high, low))
    return jnp.where(x > high, high, jnp.where(x < low, low, x))
