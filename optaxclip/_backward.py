"""Clipping in the backward pass: the identity forward, and a cotangent that is clipped,
or scaled, on its way back.

    clip_cotangent    y = x,   dL/dx = clip(dL/dy)
    scale_cotangent   y = x,   dL/dx = scale * dL/dy

A clipper in the optimizer sees gradients once they are complete. In a recurrent network
they are sums of cotangents that have come back through many steps, each multiplied by
the same matrix: where it stretches, the earliest steps drown all others, and shortening
the sum does not bring them back. `clip_cotangent` inside the cell bounds what goes back
in every step, so that a sum over T steps grows at most as T.

Under vmap each example is clipped by itself. All transformations of reverse mode work:
jit, vmap, scan, checkpoint, grad of grad, and `jax.hessian`.

Reference: Graves, Generating sequences with recurrent neural networks, 2013 (arXiv
1308.0850), clips the cotangents of an LSTM's inputs to [-1, 1] or [-10, 10].
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from . import prefix
from ._arguments import check_limit, check_number, check_ord
from ._clippers._by_value import clip_by_value
from ._norms._leaves import clipped_leaves, put_back
from ._norms._norms import Measure, Ord, tensor_norm, unit_norm
from ._core._once import clip_once
from ._norms._types import MeshAxes, freeze


def clip_cotangent(
    x: Any,
    *,
    max_value: Any = None,
    max_norm: Any = None,
    axis: int | tuple[int, ...] | None = None,
    ord: Ord = None,
    mesh_axes: MeshAxes = "auto",
) -> Any:
    """Returns `x`, and clips the cotangent of each array of it: by value, by its norm,
    or by its norms along an axis.

    | cotangent             | becomes                                           |
    |-----------------------|---------------------------------------------------|
    | at or below the limit | itself, bit for bit                               |
    | finite, limit 0       | zeros                                             |
    | any, limit inf        | itself, NaN too                                   |
    | with NaN              | NaN there (max_value), all NaN (max_norm)         |
    | with inf              | the bound there (max_value), all NaN (max_norm)   |

    Args:
      x: an array or a pytree of arrays, of any shapes. Leaves that are neither float
        nor complex pass through.
      max_value: the greatest modulus of an element: a scalar at least 0. It may be
        traced, and its own gradient is 0.
      max_norm: the greatest norm, likewise. Give one of the two.
      axis: for `max_norm`: the axes that a norm sums over, -1 for the rows of a batch
        (batch, features). None: each array as a whole.
      ord: the order of the norm: a number above 0, `math.inf`, "rms" or "average"; None
        means 2.
      axes: over which mesh axes arrays are split, inside shard_map and pmap (see
        `optaxclip.sharding`). None clips what each device holds by itself, as is right
        for the rows of a batch that is split over devices.

    Returns:
      `x`: values, dtypes and structure are kept, and so are the cotangent's.

    Raises:
      TypeError: a limit that is no real number. Also, from JAX, in forward mode
        (`jax.jvp`, `jax.jacfwd`): a clipped cotangent belongs to no tangent.
      ValueError: none or both of the limits, one that is negative, NaN or no scalar, an
        order that is none, or an axis that an array does not have.

    Example:
      >>> def last(h):  # twenty steps of h <- 1.2 h
      ...     def step(h, _):
      ...         return 1.2 * clip_cotangent(h, max_norm=1.0), None
      ...
      ...     return jax.lax.scan(step, h, length=20)[0]
      >>> print(f"{jax.grad(last)(1.0):.4f} in place of {1.2**20:.4f}")
      1.0000 in place of 38.3376
      >>> weights = jnp.array([[30.0, 40.0], [0.3, 0.4]])
      >>> def loss(x):
      ...     return jnp.sum(weights * clip_cotangent(x, max_norm=1.0, axis=-1))
      >>> rows = jax.grad(loss)(jnp.zeros((2, 2)))
      >>> print(*(f"{x:.4f}" for x in (*rows[0], *rows[1])))
      0.6000 0.8000 0.3000 0.4000

    Reference: Graves, 2013 (arXiv 1308.0850).
    """
    call = "clip_cotangent"
    if (max_value is None) == (max_norm is None):
        raise ValueError(
            f"{call}: give one of max_value and max_norm, got max_value={max_value!r} "
            f"and max_norm={max_norm!r}."
        )
    if max_norm is None and (axis is not None or ord is not None):
        raise ValueError(
            f"{call}: axis={axis!r} and ord={ord!r} belong to max_norm; max_value "
            "limits each element by itself."
        )
    check_ord(call, ord)
    _check_axis(call, axis, x)
    if max_norm is None:
        measure, limit = None, _scalar(f"{call}: max_value", max_value)
    else:
        options = (("ord", ord), ("axes", freeze(axes)))
        measure = (
            Measure(tensor_norm, options)
            if axis is None
            else Measure(unit_norm, (*options, ("axis", axis)))
        )
        check_limit(f"{call}: max_norm", max_norm)
        limit = _scalar(f"{call}: max_norm", max_norm)
    return put_back(_clipped(measure, _arrays(x), limit), x)


def scale_cotangent(x: Any, scale: Any) -> Any:
    """Returns `x`, and multiplies its derivative: x * scale + stop_gradient(x * (1 -
    scale)), without the rounding of that sum.

    0.5 on the hidden state of a model that is unrolled (MuZero), 0.1 on an embedding
    whose gradients spike (GLM-130B), -1 to turn a gradient round, 0 to stop it.

    Args:
      x: an array or a pytree of arrays, of any shapes. Leaves that are neither float
        nor complex pass through.
      scale: a scalar, of any sign. It may be traced, and its own gradient is 0.

    Returns:
      `x`: values, dtypes and structure are kept, and so are the derivative's. NaN stays
      NaN. Forward and reverse mode both work.

    Raises:
      TypeError: a scale that is no real number.
      ValueError: one that is NaN or no scalar.

    Example:
      >>> print(jax.grad(lambda x: scale_cotangent(x, 0.1) ** 2)(3.0))
      0.6

    Reference: Schrittwieser et al., Mastering Atari, Go, chess and shogi by planning
    with a learned model, 2019 (arXiv 1911.08265); Zeng et al., GLM-130B, 2022 (arXiv
    2210.02414).
    """
    scale = _scalar("scale_cotangent: scale", scale, lowest=-math.inf)
    return put_back(_scaled(_arrays(x), scale), x)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _clipped(measure: Measure | None, x: Any, limit: jax.Array) -> Any:
    """The identity, whose cotangent is clipped by what is measured, or by value where
    nothing is.
    """
    return x


def _forward(
    measure: Measure | None, x: Any, limit: jax.Array
) -> tuple[Any, jax.Array]:
    return x, limit


def _backward(
    measure: Measure | None, limit: jax.Array, cotangent: Any
) -> tuple[Any, jax.Array]:
    if measure is None:
        clipper = clip_by_value(limit)
        clipped, _ = clipper.update(cotangent, clipper.init(cotangent))
    else:
        clipped, _ = clip_once(
            cotangent,
            limit,
            measure.norm,
            argument="clip_cotangent: max_norm",
            **dict(measure.options),
        )
    return clipped, jnp.zeros_like(limit)


_clipped.defvjp(_forward, _backward)


@jax.custom_jvp
def _scaled(x: Any, scale: jax.Array) -> Any:
    return x


@_scaled.defjvp
def _scaled_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    (x, scale), (dx, _) = primals, tangents

    def part(dx: jax.Array) -> jax.Array:
        wide = jnp.promote_types(dx.dtype, scale.dtype)
        return (dx.astype(wide) * scale.astype(wide)).astype(dx.dtype)

    return x, jax.tree.map(part, dx)


def _arrays(x: Any) -> Any:
    """The leaves that have a derivative, as JAX arrays."""
    return jax.tree.map(jnp.asarray, clipped_leaves(x))


def _scalar(argument: str, value: Any, lowest: float = 0.0) -> jax.Array:
    """A number as a float scalar, which a cotangent can belong to. A negative one that
    only a traced program knows counts as the lowest.
    """
    check_number(argument, value, lowest=lowest)
    if jnp.ndim(value):
        raise ValueError(
            f"{argument} must be a scalar, got an array of shape {jnp.shape(value)}."
        )
    return jnp.maximum(jnp.asarray(value, float), lowest)


def _check_axis(call: str, axis: Any, x: Any) -> None:
    wanted = () if axis is None else axis if isinstance(axis, tuple) else (axis,)
    for path, leaf in jax.tree_util.tree_flatten_with_path(clipped_leaves(x))[0]:
        rank = jnp.ndim(leaf)
        if not all(isinstance(i, int) and -rank <= i < rank for i in wanted):
            raise ValueError(
                f"{call}: axis={axis!r} does not fit the leaf {prefix.name(path)!r} of "
                f"shape {jnp.shape(leaf)}."
            )
