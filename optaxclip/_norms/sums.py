"""Sums over one leaf.

A sum of squares is three numbers:

    up          sum (x * s)^2    taken if it is finite           s = 2^83 in float32
    unscaled    sum x^2          else taken if it is finite
    down        sum (x / s)^2    else taken

The norm is the root of the first that is finite. No normal number is too small for
`up`. If `up` overflows, the sum of squares is at least 2^-38, and each square that
`unscaled` loses is below 2^-126: 2^37 of them add less than 2^-50 of the sum. If
`unscaled` overflows, the sum is at least 2^128, and each square that `down` loses is
below 2^40. There is no branch, so neither vmap nor devices with different shards are a
special case.

    CPU    one float64 sum. Three sums for leaves that are float64 themselves
    GPU    three float32 sums in one reduction
    TPU    three float32 sums in one read. Any other platform takes this too, since it
           is plain `jnp`

Reference: Blue, A portable Fortran program to find the Euclidean norm of a vector,
1978. Anderson, Algorithm 978: safe scaling in the level 1 BLAS, 2017. Both sort numbers
by size into three sums. Without sorting, there is less to compute for each.
"""

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from .._devices.mesh_types import is_on_one_device
from .._devices.platforms import per_platform, traced_once

# Room for 2^37 of the largest numbers: (2^128 / s)^2 = 2^90. The smallest normal number
# stays normal: (2^-126 * s)^2 = 2^-86.
SCALES = {np.dtype(np.float32): 2.0**83, np.dtype(np.float64): 2.0**600}
# Sums of fewer numbers than this are not split: XLA fuses them into their reader.
LEAST_SUMMED_TO_SPLIT = 32

# The array axes that are summed, and stay with size 1. None: all, to a scalar.
Axes = tuple[int, ...] | None


# ---------------------------------------------------------------------- sums of squares


def sum_over(x: Array, axes: Axes) -> Array:
    """The sum over some axes, which stay with size 1, or over all, to a scalar."""
    if axes is None:
        return lax.reduce_sum(x, range(x.ndim))
    return lax.expand_dims(lax.reduce_sum(x, axes), axes)


class Sums(NamedTuple):
    """Sums of the squares of the numbers scaled up, as they are, and scaled down."""

    up: Array
    unscaled: Array
    down: Array


# What a leaf adds to its norm: one sum, or three.
Term = TypeVar("Term", Array, Sums)


def _sums_both_parts(sums_of: Callable[..., Term]) -> Callable[..., Term]:
    """Lets a function that sums squares of real numbers take complex ones too.

    |a + bi|^2 = a^2 + b^2, so both parts are summed like two real arrays.
    """

    @wraps(sums_of)
    def sums_of_both_parts(array: Array, *args: Any) -> Term:
        if not jnp.iscomplexobj(array):
            return sums_of(array, *args)
        real = sums_of(jnp.real(array), *args)
        imag = sums_of(jnp.imag(array), *args)
        return jax.tree.map(operator.add, real, imag)

    return sums_of_both_parts


@_sums_both_parts
def one_sum(array: Array, axes: Axes, dtype: np.dtype) -> Array:
    """The sum of squares in one read. In float64 no square of a float32 number leaves
    the range. Call it, and what reads its sum, inside `jax.enable_x64(True)`.
    """
    x = lax.convert_element_type(array, dtype)
    return sum_over(lax.square(x), axes)


@partial(traced_once, static_argnums=(1, 2))
@_sums_both_parts
def three_sums_in_jnp(array: Array, axes: Axes, dtype: np.dtype) -> Sums:
    """The three sums in plain `jnp`, which a TPU computes in one read."""
    x = array.astype(dtype)
    scale = SCALES[dtype]
    return Sums(
        up=sum_over(_scaled_square(x, scale), axes),
        unscaled=sum_over(_scaled_square(x, 1.0), axes),
        down=sum_over(_scaled_square(x, 1 / scale), axes),
    )


def _scaled_square(x: Array, scale: ArrayLike) -> Array:
    """(x * scale)^2."""
    # Without the bounds XLA makes x^2 * scale^2 of it, and scale^2 is 0 or inf. The
    # square of a bound is inf.
    bound = x.dtype.type(jnp.finfo(x.dtype).max / 2)
    product = x * jnp.asarray(scale, x.dtype)
    clamped = lax.clamp(-bound, product, bound)
    return lax.square(clamped)


@traced_once
def root_of_mean(count: ArrayLike, sums: Sums) -> Array:
    """sqrt(sum / count), of the first of the three sums that is finite."""
    up, unscaled, down = sums
    dtype = unscaled.dtype
    scale = dtype.type(SCALES[dtype])
    # NaN is in all sums, and NaN < inf is False.
    up_is_finite = up < jnp.inf
    unscaled_is_finite = unscaled < jnp.inf
    fallback = jnp.where(unscaled_is_finite, unscaled, down)
    scale_of_fallback = jnp.where(unscaled_is_finite, dtype.type(1), 1 / scale)
    # Divided before the root: a mean is finite even where the norm is not.
    root = jnp.sqrt(jnp.where(up_is_finite, up, fallback) / count)
    # The division comes last: each kernel on a CPU that reads the norm computes anew
    # what follows the last division or root.
    return root / jnp.where(up_is_finite, scale, scale_of_fallback)


# ---------------------------------------------------------------- three sums on a GPU


@partial(jax.jit, static_argnums=(1, 2))
@_sums_both_parts
def three_sums_on_a_gpu(array: Array, axes: Axes, dtype: np.dtype) -> Sums:
    """The three sums, in the form that a GPU computes in one kernel."""
    # The forms below were measured in float32 only.
    if dtype == np.float64:
        return three_sums_in_jnp(array, axes, dtype)
    summed_axes = tuple(range(array.ndim)) if axes is None else axes
    # The sums of an array that jit splits are one array, so that one collective joins
    # the devices.
    if not is_on_one_device(array):
        sums = _sums_stacked(array, summed_axes, keepdims=axes is not None, dtype=dtype)
        return _split_last_axis(sums)
    if array.ndim and array.ndim - 1 not in summed_axes:
        return _sums_of_columns(array, summed_axes, dtype)
    sums = _sums_by_pairs(array, summed_axes, dtype)
    if axes is not None:
        sums = jax.tree.map(lambda x: jnp.expand_dims(x, axes), sums)
    return sums


def _sums_by_pairs(array: Array, axes: tuple[int, ...], dtype: np.dtype) -> Sums:
    """The three sums by one reduction of pairs, a complex number and a real one:

        (x * s)^2 + i (x / s)^2, x^2

    XLA on a GPU writes several computed arrays, such as the step of Adam, to memory
    before it sums them. So two of the squares are one complex array. The third is a
    real operand of the same reduction: jit may split an array whose type shows no mesh
    (`out_shardings`), and XLA then needs a collective. On a GPU it has one for such a
    pair, and none for complex operands alone.
    """
    x = array.astype(dtype)
    scale = SCALES[dtype]
    # XLA must not know the scales, or it squares them: scale^2 is 0 or inf.
    scales = lax.optimization_barrier(np.array([scale, 1 / scale], dtype))
    up = lax.square(x * scales[0])
    down = lax.square(x * scales[1])
    operands = lax.complex(up, down), x * x
    starts = np.complex64(0), dtype.type(0)
    up_and_down, unscaled = lax.reduce(operands, starts, _added_pairs, axes)
    return Sums(jnp.real(up_and_down), unscaled, jnp.imag(up_and_down))


def _added_pairs(left: tuple[Any, Any], right: tuple[Any, Any]) -> tuple[Any, Any]:
    """The sums of two pairs of numbers."""
    first = left[0] + right[0]
    second = left[1] + right[1]
    return first, second


def _sums_of_columns(array: Array, axes: tuple[int, ...], dtype: np.dtype) -> Sums:
    """Sums over other axes than the last. XLA on a GPU computes them in few threads, or
    writes the squares to memory first. So parts of the longest axis are summed first.
    """
    sizes = [array.shape[axis] for axis in axes]
    # A size of jax.export may be a symbol, which does not compare with others.
    has_symbol = not all(isinstance(size, int) for size in sizes)
    if has_symbol or math.prod(sizes) < LEAST_SUMMED_TO_SPLIT:
        return three_sums_in_jnp(array, axes, dtype)
    length = max(sizes)
    longest_axis = axes[sizes.index(length)]
    # Compiled for an H100, AGC of GPT-2 small ran 195 kernels with 8 parts, and 293
    # with 32. Long axes have more, of about 1,000 to 2,000 numbers each.
    most_parts = max(8, 2 ** (length // 2048).bit_length())
    # Parts have one length: 1002 numbers are 2 parts. An odd length is one part.
    part_count = math.gcd(length, most_parts)
    shape = list(array.shape)
    shape[longest_axis : longest_axis + 1] = part_count, length // part_count
    # The longest axis is two axes now. The first of them stays for the second sum.
    inner_axes = [axis + 1 if axis >= longest_axis else axis for axis in axes]
    sums_of_parts = _sums_stacked(
        array.reshape(shape), inner_axes, keepdims=True, dtype=dtype
    )
    # Without the barrier XLA makes one sum of both.
    sums_of_parts = lax.optimization_barrier(sums_of_parts)
    return _split_last_axis(jnp.sum(sums_of_parts, longest_axis))


def _sums_stacked(
    array: Array, axes: Sequence[int], *, keepdims: bool, dtype: np.dtype
) -> Array:
    """The three sums along a new last axis, [..., 3]: one kernel on a GPU, and one
    collective on a mesh.
    """
    scale = SCALES[dtype]
    shape = (*array.shape, 3)
    x = lax.broadcast_in_dim(array.astype(dtype), shape, range(array.ndim))
    scales = np.array([scale, 1, 1 / scale], dtype)
    squares = _scaled_square(x, jnp.broadcast_to(scales, shape))
    return jnp.sum(squares, tuple(axes), keepdims=keepdims)


def _split_last_axis(sums: Array) -> Sums:
    """The three sums out of one array, [..., 3]."""
    return Sums(up=sums[..., 0], unscaled=sums[..., 1], down=sums[..., 2])


# ---------------------------------------------------------------- terms of other orders


@partial(traced_once, static_argnums=1)
def sum_in_float64_on_cpu(x: Array, axes: Axes) -> Array:
    """The sum of numbers that cannot overflow, in float64 on a CPU."""
    sum_on_other_platforms = partial(sum_over, axes=axes)

    def sum_on_a_cpu(x: Array) -> Array:
        with jax.enable_x64(True):
            wide = lax.convert_element_type(x, np.float64)
            return lax.convert_element_type(sum_over(wide, axes), x.dtype)

    return per_platform(
        x, cpu=sum_on_a_cpu, gpu=sum_on_other_platforms, plain=sum_on_other_platforms
    )


@partial(traced_once, static_argnums=(1, 2))
def bits_of_largest(array: Array, axes: Axes, dtype: np.dtype) -> Array:
    """max |x|, as the bits of the number: integers in the same order, with NaN last. A
    maximum of many floats drops NaN on a CPU, and so does one over devices.
    """
    moduli = jnp.abs(array).astype(dtype)
    largest = jnp.max(moduli, axes, keepdims=axes is not None)
    # This maximum may have dropped NaN. A sum finds it: 1 / (1 + inf) is 0, and
    # 1 / (1 + NaN) is NaN. A comparison would find it too, but XLA on a CPU writes the
    # operand of a reduction to memory if it contains one.
    sum_with_nan = sum_over(1 / (1 + moduli * moduli), axes)
    largest = jnp.where(jnp.isnan(sum_with_nan), jnp.nan, largest)
    integer = np.int64 if dtype == np.float64 else np.int32
    # Without the sign, which NaN may have too.
    bits = lax.bitcast_convert_type(largest, integer)
    return bits & integer(np.iinfo(integer).max)
