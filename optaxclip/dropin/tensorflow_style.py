"""TensorFlow's clipping functions for trees: `tf.clip_by_value`, `tf.clip_by_norm`,
`tf.clip_by_global_norm` and their relatives.

    clip_by_value          max(min(t, clip_value_max), clip_value_min)
    clip_by_norm           t * min(1, clip_norm / |t|)    each tensor, or along its axes
    clip_by_average_norm   t * min(1, clip_norm / (|t| / size of t))    each tensor
    clip_by_global_norm    t * min(1, clip_norm / |all of t_list|)      all together

What TensorFlow says of a tensor holds here for each leaf of a tree. None leaves are
ignored and kept.

    case                         TensorFlow 2.21          here
    norm above the limit         clip_norm / norm         the same, to 8 float32 eps
    norm within the limit        rounded by the           the same bits as the input
                                 multiplication
    axes                         negative ones, lists,    the same
                                 all of them
    use_norm                     used, and returned as    the same
                                 the global norm
    None in t_list               kept, not measured       the same
    global norm not finite       all NaN                  the same
    clip_by_norm, norm not       NaN and zeros            all NaN that was measured
    finite                                                together
    clip_norm inf                NaN                      untouched, no limit
    clip_norm 0, zero tensor     NaN                      zeros
    clip_norm < 0                counts as 0, or as no    ValueError, but 0 if known
                                 limit                    only when a program runs
    clip_norm NaN                NaN                      ValueError
    clip_value_min above the     the lower one wins       ValueError if both are known
    max
    float16, float32 near        norm inf: NaN or zeros   the true norm, clipped
    overflow
    norm                         in the dtype of the      float32, or float64 if a leaf
                                 tensors                  has 64 bits
    mixed dtypes in t_list       refused                  each keeps its own
    a bare tensor as t_list      TypeError                a tree of one leaf
    a list of numbers            one tensor, but several  a tree of scalars
                                 in t_list
    name=                        names the operation      TypeError
    complex tensors              refused                  by modulus. clip_by_value
                                                          refuses them, since its two
                                                          bounds need an order
    integers by norm             refused                  neither measured nor clipped
    integers by value            with integer bounds      other bounds are rounded
                                 only                     inwards
    clip_by_average_norm         refuses float16 and      all float dtypes
                                 float64
    IndexedSlices                supported                JAX has none

`tf.contrib.training.clip_gradient_norms`, each gradient separately, is `clip_by_norm`
of the tree.

Reference: tensorflow/python/ops/clip_ops.py, TensorFlow 2.21.
tensorflow/contrib/estimator/python/estimator/extenders.py, TensorFlow 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike

from .. import _trees as trees
from .._arguments.checks import check_given_norm, check_number, with_extra_args
from .._arguments.helpful_errors import with_helpful_errors
from .._clippers.by_value import value_clipper
from .._norm_clipper import clip_once, make_clipper
from .._norms import norms
from .._norms.axes import axes_within
from .._norms.options import checked_options
from .._trees import PyTree, Tree, leaves_to_clip
from ..rules._limits import Limit

__all__ = [
    "clip_by_average_norm",
    "clip_by_global_norm",
    "clip_by_norm",
    "clip_by_value",
    "clip_gradients_by_norm",
    "global_norm",
]


def clip_by_value(
    t: Tree, clip_value_min: ArrayLike, clip_value_max: ArrayLike
) -> Tree:
    """Clips every element to [clip_value_min, clip_value_max].

    NaN stays NaN, and inf becomes the bound.

    Args:
      t: an array, or a pytree of arrays.
      clip_value_min: the lower bound: a number, or an array that broadcasts to each
        leaf. It may be traced.
      clip_value_max: the upper bound: a number, or an array that broadcasts to each
        leaf. It may be traced.

    Returns:
      `t` in its dtypes.

    Raises:
      ValueError: a bound that is NaN or does not fit a leaf, or a lower bound above the
        upper one.
      TypeError: a bound that is not a real number, or a complex leaf.

    Example:
      >>> t = jnp.array([[-5.0, 2.0], [0.5, 9.0]])
      >>> print(optaxclip.dropin.tensorflow_style.clip_by_value(t, -1.0, 3.0))
      [[-1.   2. ]
       [ 0.5  3. ]]
    """
    call = "clip_by_value"
    low, high = clip_value_min, clip_value_max
    # Bounds may be negative, unlike limits of norms. Trees and schedules are refused.
    check_number(f"{call}: clip_value_max", high, lowest=-math.inf)
    check_number(f"{call}: clip_value_min", low, lowest=-math.inf)
    # Where traced bounds cross, the lower one wins as in TensorFlow.
    if isinstance(low, Tracer) or isinstance(high, Tracer):
        high = jnp.maximum(high, low)
    clipper: Any = value_clipper(
        call,
        high,
        low,
        upper_argument="clip_value_max",
        lower_argument="clip_value_min",
    )
    return clipper.update(t, clipper.init(t))[0]


def clip_by_norm(
    t: Tree, clip_norm: ArrayLike, axes: int | Sequence[int] | np.ndarray | None = None
) -> Tree:
    """Clips the norm of each tensor, whole or along axes: t * min(1, clip_norm / |t|).

    Args:
      t: an array, or a pytree of arrays.
      clip_norm: the limit, at least 0: a number, or with `axes` an array that
        broadcasts to the norms, whose summed axes have size 1. It may be traced.
      axes: the axes that are summed over: an int, or a list, tuple, range or NumPy
        array of ints. Negative ones count from the end. None for all. Inside shard_map
        take `clip_by_unitwise_norm`, which has `mesh_axes`.

    Returns:
      `t` in its dtypes.

    Raises:
      ValueError: a limit that is negative or NaN, or axes that are not ints, or not
        different axes of each leaf.
      TypeError: a limit that is not a real number.

    Example:
      >>> t = jnp.array([[-3.0, 0.0, 0.0], [4.0, 0.0, 0.0]])
      >>> from optaxclip.dropin.tensorflow_style import clip_by_norm
      >>> print(*(f"{x:.4f}" for x in clip_by_norm(t, 4.0)[:, 0]))
      -2.4000 3.2000
      >>> print(*(f"{x:.4f}" for x in clip_by_norm(t, 2.0, axes=[1])[:, 0]))
      -2.0000 2.0000
    """
    call = "clip_by_norm"
    # TensorFlow takes negative limits. Here known ones raise, and traced ones are 0.
    check_number(f"{call}: clip_norm", clip_norm)
    measure: Any = norms.TensorNorm(call)
    if axes is not None:
        # A static argument of the jitted update, so arrays and lists become tuples.
        axis = tuple(np.atleast_1d(axes).tolist())
        entries = jax.tree.leaves_with_path(leaves_to_clip(t, call))
        for path, leaf in entries:
            axes_within(axis, f"{call}: axes", trees.path_name(path), jnp.ndim(leaf))
        # axes are summed over, like `axis` of clip_by_unitwise_norm.
        measure = norms.UnitwiseNorm(**checked_options(call, None, axis=axis))
    return clip_once(t, clip_norm, measure, call=call, limit_argument="clip_norm")[0]


def clip_by_average_norm(t: Tree, clip_norm: ArrayLike) -> Tree:
    """Clips the average norm of each tensor: t * min(1, clip_norm / (|t| / size)).

    This is not a root mean square. It divides by the size, not by its root.

    Args:
      t: an array, or a pytree of arrays.
      clip_norm: the limit, a scalar at least 0. It may be traced.

    Returns:
      `t` in its dtypes.

    Raises:
      ValueError: a limit that is negative or NaN.
      TypeError: a limit that is not a real number.

    Example:
      >>> t = jnp.array([-3.0, 0.0, 0.0, 4.0])
      >>> clipped = optaxclip.dropin.tensorflow_style.clip_by_average_norm(t, 0.75)
      >>> print(*(f"{x:.4f}" for x in clipped))
      -1.8000 0.0000 0.0000 2.4000
    """
    call = "clip_by_average_norm"
    check_number(f"{call}: clip_norm", clip_norm)
    # "average" is |t| / size, and "rms" would be |t| / sqrt(size).
    measure = norms.TensorNorm(call, "average")
    return clip_once(t, clip_norm, measure, call=call, limit_argument="clip_norm")[0]


def clip_by_global_norm(
    t_list: Tree, clip_norm: ArrayLike, use_norm: ArrayLike | None = None
) -> tuple[Tree, Array]:
    """Clips the norm of all tensors together: t * min(1, clip_norm / |t_list|).

    Args:
      t_list: a list, or any pytree, of arrays.
      clip_norm: the limit, a scalar at least 0. inf only measures. It may be traced.
      use_norm: the norm, a scalar, if it is known already. None to measure it.

    Returns:
      (list_clipped, global_norm): `t_list` in its structure and dtypes, and the norm
      before clipping, a scalar, float32 (float64 if a leaf has 64 bits).

    Raises:
      ValueError: a limit that is negative or NaN, or a norm that is negative or not a
        scalar. The sign of a `jax.Array` is not checked: that would wait for the
        device.
      TypeError: a limit or norm that is not a real number.

    Example:
      >>> from optaxclip.dropin.tensorflow_style import clip_by_global_norm
      >>> grads = [jnp.array([3.0, 4.0]), None, jnp.array([12.0])]
      >>> (first, missing, last), norm = clip_by_global_norm(grads, 6.5)
      >>> print(norm, *(f"{x:.4f}" for x in first), missing, f"{last[0]:.4f}")
      13.0 1.5000 2.0000 None 6.0000
    """
    call = "clip_by_global_norm"
    check_number(f"{call}: clip_norm", clip_norm)
    if use_norm is not None:
        check_given_norm(f"{call}: use_norm", use_norm, is_scalar=True)
    # `use_norm` replaces the measured norm, also in what is returned.
    return clip_once(
        t_list,
        clip_norm,
        norms.GlobalNorm(call),
        call=call,
        limit_argument="clip_norm",
        grad_norm=use_norm,
    )


def global_norm(t_list: PyTree) -> Array:
    """Returns the norm of all tensors together: sqrt(sum |t|^2).

    None is ignored, and the norm of an empty list is 0.

    Args:
      t_list: a list, or any pytree, of arrays.

    Returns:
      A scalar, float32 (float64 if a leaf has 64 bits).

    Example:
      >>> grads = [jnp.array([3.0, 4.0]), None, jnp.array([12.0])]
      >>> print(optaxclip.dropin.tensorflow_style.global_norm(grads))
      13.0
    """
    return norms.global_norm(t_list)


def clip_gradients_by_norm(
    optimizer: optax.GradientTransformation, clip_norm: Limit
) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer with its gradients clipped first, by their global norm.

    It is `tf.contrib.estimator.clip_gradients_by_norm`, which in spite of its name does
    not clip each gradient separately.

    Args:
      optimizer: an optax optimizer.
      clip_norm: the limit, a number at least 0, a schedule, or None to only measure.

    Returns:
      A transformation. `optaxclip.metrics` reads the norm from its state.

    Raises:
      ValueError: a limit that is negative or NaN.
      TypeError: a limit that is not a real number, or something else than an optimizer.

    Example:
      >>> import optax
      >>> from optaxclip.dropin.tensorflow_style import clip_gradients_by_norm
      >>> optimizer = clip_gradients_by_norm(optax.sgd(1.0), 1.0)
      >>> params, grads = jnp.zeros(2), jnp.array([3.0, 4.0])
      >>> updates, state = optimizer.update(grads, optimizer.init(params), params)
      >>> print(*(f"{x:.4f}" for x in updates))
      -0.6000 -0.8000
    """
    call = "clip_gradients_by_norm"
    optimizer = with_extra_args(f"{call}: optimizer", optimizer)
    measure = norms.GlobalNorm(call)
    clipper = make_clipper(measure, clip_norm, call=call, limit_argument="clip_norm")
    return optax.chain(clipper, optimizer)


with_helpful_errors(__name__)
