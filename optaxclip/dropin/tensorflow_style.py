"""TensorFlow's clipping functions for trees: `tf.clip_by_value`, `tf.clip_by_norm`,
`tf.clip_by_global_norm` and their relatives.

    clip_by_value          max(min(t, clip_value_max), clip_value_min)
    clip_by_norm           t * min(1, clip_norm / |t|)                 each tensor, or
                           along axes of it
    clip_by_average_norm   t * min(1, clip_norm / (|t| / size of t))   each tensor
    clip_by_global_norm    t * min(1, clip_norm / |all of t_list|)     all tensors
                           together

What TensorFlow says of a tensor holds here for each leaf of a tree; None leaves are
ignored and kept.

    case                            TensorFlow 2.21                           here
    norm above the limit            clip_norm / norm                          the same,
                                    to 8 float32 eps
    norm within the limit           rounded by the multiplication             the same
                                    bits as the input
    axes                            negative ones, lists, all of them         the same
    use_norm                        used, and returned as the global norm     the same
    None in t_list                  kept, not measured                        the same
    global norm not finite          all NaN                                   the same
    clip_by_norm, norm not finite   NaN and zeros                             all NaN
                                    that was measured together
    clip_norm inf                   NaN                                       untouched,
                                    since there is no limit
    clip_norm 0, zero tensor        NaN                                       zeros
    clip_norm < 0                   counts as 0, or as no limit
                                    ValueError; 0 if only a traced program knows it
    clip_norm NaN                   NaN                                       ValueError
    clip_value_min above the max    the lower one wins                        ValueError
                                    if both are known
    float16, float32 near overflow  norm inf: NaN or zeros                    the true
                                    norm, clipped
    norm                            in the dtype of the tensors               float32,
                                    or float64 if a leaf has 64 bits
    mixed dtypes in t_list          refused                                   each keeps
                                    its own
    a bare tensor as t_list         TypeError                                 a tree of
                                    one leaf
    complex tensors                 refused                                   by
                                    modulus; refused by clip_by_value, whose two bounds
                                    need an order
    integers by norm                refused                                   neither
                                    measured nor clipped
    integers by value               with integer bounds only                  other
                                    bounds are rounded inwards
    clip_by_average_norm            refuses float16 and float64               all float
                                    dtypes
    IndexedSlices                   supported                                 JAX has
                                    none

`tf.contrib.training.clip_gradient_norms`, each gradient by itself, is `clip_by_norm` of
the tree.

Reference: tensorflow/python/ops/clip_ops.py, TensorFlow 2.21;
tensorflow/contrib/estimator/python/estimator/extenders.py, TensorFlow 1.
"""

import math
from typing import Any

import jax
import optax

from .. import by_value, norms
from .._arguments import check_number, check_order
from ..fixed import clip_together
from .._core._once import clip_once


def clip_by_value(t: Any, clip_value_min: Any, clip_value_max: Any) -> Any:
    """Limits every element to [clip_value_min, clip_value_max]. NaN stays NaN; inf
    becomes the bound.

    Args:
      t: an array, or a pytree of arrays.
      clip_value_min: the lower bound: a number, or an array that broadcasts to each
        leaf. It may be traced.
      clip_value_max: the upper bound, likewise.

    Returns:
      `t` in its dtypes.

    Raises:
      TypeError, ValueError: a bound that is no real number or NaN, bounds with no room
        between them, or a bound that does not fit a leaf.

    Example:
      >>> import jax.numpy as jnp
      >>> print(clip_by_value(jnp.array([[-5.0, 2.0], [0.5, 9.0]]), -1.0, 3.0))
      [[-1.   2. ]
       [ 0.5  3. ]]
    """
    check_number("clip_by_value: clip_value_min", clip_value_min, lowest=-math.inf)
    check_number("clip_by_value: clip_value_max", clip_value_max, lowest=-math.inf)
    check_order(
        "clip_by_value",
        ("clip_value_min", clip_value_min),
        ("clip_value_max", clip_value_max),
    )
    clipper = by_value.clip_by_value(clip_value_max, clip_value_min)
    return clipper.update(t, clipper.init(t))[0]


def clip_by_norm(t: Any, clip_norm: Any, axes: Any = None) -> Any:
    """Shortens each tensor to a norm of at most `clip_norm`, whole or along axes.

    Args:
      t: an array, or a pytree of arrays.
      clip_norm: at least 0: a number, or an array that broadcasts to the norms, whose
        summed axes have size 1. It may be traced.
      axes: an int, or a list or tuple of ints: the axes that are summed over; None for
        all. Negative ones count from the end.

    Returns:
      `t` in its dtypes.

    Raises:
      TypeError, ValueError: a limit that cannot be, or axes that a leaf does not have.

    Example:
      >>> import jax.numpy as jnp
      >>> t = jnp.array([[-3.0, 0.0, 0.0], [4.0, 0.0, 0.0]])
      >>> print(*(f"{x:.4f}" for x in clip_by_norm(t, 4.0)[:, 0]))
      -2.4000 3.2000
      >>> print(*(f"{x:.4f}" for x in clip_by_norm(t, 2.0, axes=[1])[:, 0]))
      -2.0000 2.0000
    """
    check_number("clip_by_norm: clip_norm", clip_norm)
    if axes is None:
        return clip_once(
            t,
            clip_norm,
            norms.tensor_norm,
            argument="clip_by_norm: clip_norm",
            axes="auto",
        )[0]
    axis = tuple(axes) if isinstance(axes, (list, tuple)) else axes
    return clip_once(
        t,
        clip_norm,
        norms.unit_norm,
        argument="clip_by_norm: clip_norm",
        axis=axis,
        axes="auto",
    )[0]


def clip_by_average_norm(t: Any, clip_norm: Any) -> Any:
    """Shortens each tensor to an average norm, |t| / size, of at most `clip_norm`. This
    is no root mean square: it divides by the size, not by its root.

    Args:
      t: an array, or a pytree of arrays.
      clip_norm: a scalar at least 0. It may be traced.

    Returns:
      `t` in its dtypes.

    Raises:
      TypeError, ValueError: a limit that cannot be.

    Example:
      >>> import jax.numpy as jnp
      >>> clipped = clip_by_average_norm(jnp.array([-3.0, 0.0, 0.0, 4.0]), 0.75)
      >>> print(*(f"{x:.4f}" for x in clipped))
      -1.8000 0.0000 0.0000 2.4000
    """
    check_number("clip_by_average_norm: clip_norm", clip_norm)
    return clip_once(
        t,
        clip_norm,
        norms.tensor_norm,
        argument="clip_by_average_norm: clip_norm",
        ord="average",
        axes="auto",
    )[0]


def clip_by_global_norm(
    t_list: Any, clip_norm: Any, use_norm: Any = None
) -> tuple[Any, jax.Array]:
    """Shortens all tensors together to a norm of at most `clip_norm`.

    Args:
      t_list: a list, or any pytree, of arrays.
      clip_norm: a scalar at least 0; inf only measures. It may be traced.
      use_norm: the norm, if it is known already; None to measure it.

    Returns:
      (list_clipped, global_norm): `t_list` in its structure and dtypes, and the norm
      from before, a scalar, float32 (float64 if a leaf has 64 bits).

    Raises:
      TypeError, ValueError: a limit that cannot be, or a norm that is no scalar.

    Example:
      >>> import jax.numpy as jnp
      >>> grads = [jnp.array([3.0, 4.0]), None, jnp.array([12.0])]
      >>> (first, missing, last), norm = clip_by_global_norm(grads, 6.5)
      >>> print(norm, *(f"{x:.4f}" for x in first), missing, f"{last[0]:.4f}")
      13.0 1.5000 2.0000 None 6.0000
    """
    check_number("clip_by_global_norm: clip_norm", clip_norm)
    return clip_once(
        t_list,
        clip_norm,
        norms.global_norm,
        argument="clip_by_global_norm: clip_norm",
        grad_norm=use_norm,
        axes="auto",
    )


def global_norm(t_list: Any) -> jax.Array:
    """The norm of all tensors together: sqrt(sum |t|^2). None is ignored, and an empty
    list has norm 0.

    Args:
      t_list: a list, or any pytree, of arrays.

    Returns:
      A scalar, float32 (float64 if a leaf has 64 bits).

    Example:
      >>> import jax.numpy as jnp
      >>> print(global_norm([jnp.array([3.0, 4.0]), None, jnp.array([12.0])]))
      13.0
    """
    return norms.global_norm(t_list)


def clip_gradients_by_norm(
    optimizer: optax.GradientTransformation, clip_norm: Any
) -> optax.GradientTransformationExtraArgs:
    """The optimizer, with its gradients shortened first:
    `tf.contrib.estimator.clip_gradients_by_norm`, which takes the global norm for all
    its name says.

    Args:
      optimizer: an optax optimizer.
      clip_norm: a number at least 0, a schedule, or None to only measure.

    Returns:
      A transformation; `optaxclip.metrics` reads the norm from its state.

    Raises:
      TypeError, ValueError: a limit that cannot be.

    Example:
      >>> import jax.numpy as jnp
      >>> optimizer = clip_gradients_by_norm(optax.sgd(1.0), 1.0)
      >>> params = jnp.zeros(2)
      >>> grads = jnp.array([3.0, 4.0])
      >>> updates, state = optimizer.update(grads, optimizer.init(params), params)
      >>> print(*(f"{x:.4f}" for x in updates))
      -0.6000 -0.8000
    """
    return optax.chain(
        clip_together("clip_gradients_by_norm: clip_norm", clip_norm), optimizer
    )
