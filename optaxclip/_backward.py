"""Clipping in the backward pass: the identity forward, and a cotangent that is clipped
or multiplied on its way back.

    clip_cotangent    y = x,   dL/dx = clip(dL/dy)
    scale_cotangent   y = x,   dL/dx = scale * dL/dy

A clipper in the optimizer sees gradients once they are complete. In a recurrent network
they are sums of cotangents that have come back through many steps, each multiplied by
the same matrix. If that stretches, the earliest steps outweigh all others, and clipping
the sum does not bring them back. `clip_cotangent` inside the cell limits what goes back
in every step, so that a sum over T steps grows at most as T.

Under vmap each example is clipped separately. An x that all examples share is clipped
once, after their cotangents are added. All transformations of reverse mode work: jit,
vmap, scan, checkpoint, grad of grad, and `jax.hessian`.

Reference: Graves, Generating sequences with recurrent neural networks, 2013 (arXiv
1308.0850), clips the cotangents of an LSTM's inputs to [-1, 1] or [-10, 10].
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from ._arguments.checks import check_limit, check_order, shown
from ._clippers.by_value import value_clipper
from ._devices.mesh import MeshAxes
from ._devices.mesh_types import varying
from ._norm_clipper import clip_once
from ._norms.axes import axes_within
from ._norms.norms import Measure, TensorNorm, UnitwiseNorm
from ._norms.options import Ord, checked_options
from ._trees import PyTree, Tree, leaves_to_clip, path_name, put_back

CALL = "clip_cotangent"


def clip_cotangent(
    x: Tree,
    *,
    max_value: ArrayLike | None = None,
    min_value: ArrayLike | None = None,
    max_norm: ArrayLike | None = None,
    axis: int | tuple[int, ...] | None = None,
    ord: Ord = None,
    mesh_axes: MeshAxes = "auto",
) -> Tree:
    """Returns `x`, and clips the cotangent of each of its arrays.

        y = x,   dL/dx = clip(dL/dy)

    | cotangent             | becomes                                           |
    |-----------------------|---------------------------------------------------|
    | at or below the limit | itself, bit for bit                               |
    | finite, limit 0       | zeros                                             |
    | any, limit inf        | itself, NaN too                                   |
    | with NaN              | NaN there (max_value), all NaN (max_norm)         |
    | with inf              | the limit there, or NaN if complex (max_value),   |
    |                       | all NaN (max_norm)                                |

    Args:
      x: an array or a pytree of arrays, of any shapes. Leaves that are neither float
        nor complex pass through.
      max_value: the limit of the modulus of each element: a scalar at least 0. It may
        be traced, and the gradient by it is 0.
      min_value: for `max_value`: a lower bound of its own. Each element is then held
        between both, which may have any sign. None means -max_value. Real arrays only.
      max_norm: the limit of the norm of each array, or of its norms along `axis`: a
        scalar at least 0. It may be traced, and the gradient by it is 0. Give one of
        max_value and max_norm.
      axis: for `max_norm`: the axes that a norm sums over, -1 for the rows of a batch
        (batch, features). An int or a tuple of ints. None: each array as a whole.
      ord: for `max_norm`: the order of the norm: a number above 0, `math.inf`, "rms" or
        "average". None means 2.
      mesh_axes: for `max_norm`: over which mesh axes arrays are split, inside shard_map
        and pmap: names that split every leaf, a tree prefix of PartitionSpec, or None:
        each device clips what it holds, which is right where devices have different
        examples. "auto" is for arrays that are the same on all devices.

    Returns:
      `x`: values, dtypes and structure are kept, and so are the cotangent's.

    Raises:
      TypeError: a limit that is not a real number, or, in the backward pass, two bounds
        for a complex array. Also, from JAX, in forward mode (`jax.jvp`, `jax.jacfwd`),
        because no tangent belongs to a clipped cotangent.
      ValueError: none or both of the limits, a limit that is negative, NaN or not a
        scalar, a lower bound above the upper, an unknown order, or an axis that an
        array does not have. In shard_map: "auto" for arrays that differ between
        devices, which may be parts of one array, or belong to different examples.

    Example:
      >>> def last(h):  # twenty steps of h <- 1.2 h
      ...     def step(h, _):
      ...         return 1.2 * optaxclip.clip_cotangent(h, max_norm=1.0), None
      ...
      ...     return jax.lax.scan(step, h, length=20)[0]
      >>> print(f"{jax.grad(last)(1.0):.4f} instead of {1.2**20:.4f}")
      1.0000 instead of 38.3376
      >>> weights = jnp.array([[30.0, 40.0], [0.3, 0.4]])
      >>> def loss(x):
      ...     x = optaxclip.clip_cotangent(x, max_norm=1.0, axis=-1)
      ...     return jnp.sum(weights * x)
      >>> rows = jax.grad(loss)(jnp.zeros((2, 2)))
      >>> print(*(f"{x:.4f}" for x in (*rows[0], *rows[1])))
      0.6000 0.8000 0.3000 0.4000

    Reference: Graves, Generating sequences with recurrent neural networks, 2013 (arXiv
    1308.0850).
    """
    if (max_value is None) == (max_norm is None):
        raise ValueError(
            f"{CALL}: give one of max_value and max_norm, got "
            f"max_value={shown(max_value)} and max_norm={shown(max_norm)}."
        )
    if max_norm is None:
        needed = "max_norm"
        unused = {"axis": axis, "ord": ord}
    else:
        needed = "max_value"
        unused = {"min_value": min_value}
    for argument, value in unused.items():
        if value is not None:
            raise ValueError(f"{CALL}: {argument}={shown(value)} belongs to {needed}.")
    # Integers stay outside, since JAX gives them cotangents of dtype float0.
    arrays = jax.tree.map(jnp.asarray, leaves_to_clip(x, CALL))
    measure = None
    limit: Array | _Bounds
    if max_value is not None:
        limit = _bounds(max_value, min_value)
    else:
        limit = _scalar(f"{CALL}: max_norm", max_norm)
        measure = _measure(arrays, axis, ord, mesh_axes)
    # A list of leaves, since JAX would put placeholders into nodes of the user's.
    leaves, treedef = jax.tree.flatten(arrays)
    new_leaves = _with_clipped_cotangent(measure, treedef, leaves, limit)
    return put_back(treedef.unflatten(new_leaves), x)


def scale_cotangent(x: Tree, scale: ArrayLike) -> Tree:
    """Returns `x`, and multiplies its derivative.

        y = x,   dL/dx = scale * dL/dy

    This is x * scale + stop_gradient(x * (1 - scale)) without the rounding of that sum.
    MuZero takes 0.5 for the hidden state of a model that is unrolled, GLM-130B 0.1 for
    an embedding whose gradients spike. -1 reverses a gradient, 0 stops it.

    Args:
      x: an array or a pytree of arrays, of any shapes. Leaves that are neither float
        nor complex pass through.
      scale: a scalar, of any sign. It may be traced, and its own gradient is 0.

    Returns:
      `x`: values, dtypes and structure are kept, and so are the derivative's. NaN stays
      NaN. Forward and reverse mode both work.

    Raises:
      TypeError: a scale that is not a real number.
      ValueError: a scale that is NaN or not a scalar.

    Example:
      >>> def loss(x):
      ...     return optaxclip.scale_cotangent(x, 0.1) ** 2
      >>> print(jax.grad(loss)(3.0))
      0.6

    Reference: Schrittwieser et al., Mastering Atari, Go, chess and shogi by planning
    with a learned model, 2019 (arXiv 1911.08265). Zeng et al., GLM-130B, 2022 (arXiv
    2210.02414).
    """
    scale = _scalar("scale_cotangent: scale", scale, lowest=-math.inf)
    arrays = jax.tree.map(jnp.asarray, leaves_to_clip(x, "scale_cotangent"))
    return put_back(_with_scaled_derivative(arrays, scale), x)


class _Bounds(NamedTuple):
    """The bounds of each element."""

    high: Array
    low: Array | None  # None: -high


def _bounds(max_value: ArrayLike, min_value: ArrayLike | None) -> _Bounds:
    """The bounds as float scalars."""
    # Two bounds may both be negative. A single one limits the modulus.
    lowest = 0.0 if min_value is None else -math.inf
    high = _scalar(f"{CALL}: max_value", max_value, lowest)
    if min_value is None:
        return _Bounds(high, None)
    low = _scalar(f"{CALL}: min_value", min_value, lowest)
    check_order(CALL, ("min_value", min_value), ("max_value", max_value))
    return _Bounds(high, low)


def _measure(
    arrays: PyTree, axis: int | tuple[int, ...] | None, ord: Ord, mesh_axes: MeshAxes
) -> Measure:
    """How the norms of cotangents of these arrays are measured."""
    if mesh_axes == "auto" and varying(arrays):
        # The devices may hold parts of one array, or different examples of a vmap.
        raise ValueError(
            f"{CALL}: mesh_axes must be None, where devices have different examples, "
            "or say what splits one array: x differs over "
            f"{sorted(varying(arrays))}, got 'auto'."
        )
    if axis is None:
        return TensorNorm(**checked_options(CALL, ord, mesh_axes=mesh_axes))
    options = checked_options(CALL, ord, axis=axis, mesh_axes=mesh_axes)
    # Checked in the forward pass already: a cotangent has the shape of x.
    for path, leaf in jax.tree.leaves_with_path(arrays):
        axes_within(axis, f"{CALL}: axis", path_name(path), leaf.ndim)
    return UnitwiseNorm(**options)


# The measure is hashable and part of the program. The limit is an operand, so
# that it may be traced, and differ between the examples of a vmap.
@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _with_clipped_cotangent(
    measure: Measure | None,
    treedef: PyTree,
    leaves: list[Array],
    limit: Array | _Bounds,
) -> list[Array]:
    """The identity. Its cotangent is clipped by norm, or by value without a measure."""
    return leaves


def _clip_forward(
    measure: Measure | None,
    treedef: PyTree,
    leaves: list[Array],
    limit: Array | _Bounds,
) -> tuple[Any, Any]:
    # Only the limit is kept for the backward pass, and no activations.
    return leaves, limit


def _clip_backward(
    measure: Measure | None, treedef: PyTree, limit: Any, cotangents: list[Array]
) -> tuple[list[Array], Any]:
    """The clipped cotangents of the leaves, and the cotangent of the limit, which is 0.

    A backward pass has nowhere to keep the clipper's state, so it is dropped.
    """
    cotangent = treedef.unflatten(cotangents)
    if measure is None:
        clipper = value_clipper(CALL, limit.high, limit.low)
        clipped, _ = clipper.update(cotangent, clipper.init(cotangent))
    else:
        clipped, _ = clip_once(
            cotangent, limit, measure, call=CALL, limit_argument="max_norm"
        )
    return jax.tree.leaves(clipped), jax.tree.map(jnp.zeros_like, limit)


_with_clipped_cotangent.defvjp(_clip_forward, _clip_backward)


# JAX transposes a JVP that is linear in the tangent for reverse mode. A clip is not
# linear, so `clip_cotangent` has a custom VJP and no forward mode.
@jax.custom_jvp
def _with_scaled_derivative(x: PyTree, scale: Array) -> PyTree:
    """The identity. Its derivative is multiplied."""
    return x


@_with_scaled_derivative.defjvp
def _jvp_of_scaled(
    primals: tuple[Array, ...], tangents: tuple[Array, ...]
) -> tuple[Any, Any]:
    x, scale = primals
    # Without the tangent of the scale, whose gradient therefore is 0.
    x_tangent, _ = tangents

    def multiplied(tangent: Array) -> Array:
        # Rounded once: a scale of 0.1 would be 0.1001 in bfloat16.
        # By NumPy, since JAX does not promote floats of 8 bits.
        wide = np.promote_types(tangent.dtype, scale.dtype)
        return (tangent.astype(wide) * scale.astype(wide)).astype(tangent.dtype)

    return x, jax.tree.map(multiplied, x_tangent)


def _scalar(argument: str, value: Any, lowest: float = 0.0) -> Array:
    """A number as a float scalar, which can have a cotangent.

    A traced number below the lowest counts as the lowest.
    """
    check_limit(argument, value, lowest=lowest, is_scalar=True)
    # An int would have a cotangent of float0, which zeros_like does not make.
    return jnp.maximum(jnp.asarray(value, float), lowest)
