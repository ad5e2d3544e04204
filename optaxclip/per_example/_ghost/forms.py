"""The gradient by a matrix, as a sum of outer products over positions t:

    G = sum_t a_t c_t'

a_t is the input of the matrix at position t, and c_t the cotangent of its output. A
matrix product has this form whatever its axes are. So has a convolution, whose a_t are
the patches of the image, and a lookup in a table, whose a_t is 1 in one row. Several
matrices are a stack.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ..._jaxpr import type_of
from .sites import Site

LOOKUPS = ("gather", "dynamic_slice")  # table[row] of one row is a slice


class OuterProducts(NamedTuple):
    """A gradient as a sum of outer products. In a batch an axis for examples is in
    front.
    """

    # [stack, position, rows]: inputs, or cotangents if the matrix is transposed. The
    # groups of a convolution are a stack too. For lookups int32[stack, position]: the
    # number of the row in which the input is 1. It is 0 in the others.
    a: Array
    # [stack, position, columns]: cotangents, or inputs if the matrix is transposed
    c: Array

    @property
    def is_lookup(self) -> bool:
        """Whether the inputs are the numbers of rows."""
        return jnp.issubdtype(self.a.dtype, jnp.integer)


class Form(NamedTuple):
    """How the gradient by the operand of a site is a sum of outer products."""

    # The axes of the operand along which matrices are stacked, and the axes that are
    # rows and columns of a matrix
    stack: Sequence[int]
    rows: Sequence[int]
    columns: Sequence[int]
    # In one iteration of a scan. At least 1, since `plans_of` leaves out empty sites
    positions: int
    # From inputs and cotangent of one example, in one iteration of a scan
    outer_products: Callable[..., OuterProducts]
    # Of a convolution: its columns are split among so many groups, each of which is a
    # matrix of its own in the stack.
    feature_groups: int = 1


def form_of(site: Site) -> Form | None:
    """The form of a site, or None if its gradient is not known to have one."""
    if site.name not in FORMS:
        return None
    # The data of a lookup are the numbers of its rows.
    data_types = [] if site.name in LOOKUPS else site.data_types
    # Complex products would need conjugates. Integers have no derivative.
    for array_type in (*data_types, *site.out_types):
        if not jnp.issubdtype(array_type.dtype, jnp.floating):
            return None
    return FORMS[site.name](site)


def _dot_general(site: Site) -> Form:
    contracted_axes, stacked_axes = site.eqn.params["dimension_numbers"]
    (side,) = site.operands  # 0: the parameter is on the left
    data_side = 1 - side
    operand_shape = _in_shape(site, side)
    data_shape = site.data_types[0].shape
    stack = stacked_axes[side]
    rows = contracted_axes[side]
    columns = _other_axes(operand_shape, (*stack, *rows))
    data_stack = stacked_axes[data_side]
    data_contracted = contracted_axes[data_side]
    # Axes of the data that are neither stacked nor summed over are positions.
    data_positions = _other_axes(data_shape, (*data_stack, *data_contracted))
    stack_size = size_along(operand_shape, stack)
    positions = size_along(data_shape, data_positions)

    def outer_products(inputs: list[Array], cotangent: Array) -> OuterProducts:
        (data,) = inputs
        order = (*data_stack, *data_positions, *data_contracted)
        a = jnp.transpose(data, order)
        a = a.reshape(stack_size, positions, -1)
        # The output has the stack first, then the other axes of the left, then the
        # other axes of the right.
        if side == 0:
            c = cotangent.reshape(stack_size, -1, positions).mT
        else:
            c = cotangent.reshape(stack_size, positions, -1)
        return OuterProducts(a, c)

    return Form(stack, rows, columns, positions, outer_products)


def _gather(site: Site) -> Form | None:
    """A lookup of single rows, as in table[index]. No other gather has a form here."""
    params = site.eqn.params
    dims = params["dimension_numbers"]
    table_shape = _in_shape(site, 0)
    is_table = tuple(site.operands) == (0,)
    is_by_row = dims.collapsed_slice_dims == (0,) and dims.start_index_map == (0,)
    is_one_row = tuple(params["slice_sizes"]) == (1, *table_shape[1:])
    is_lookup = is_by_row and is_one_row and not dims.operand_batching_dims
    if not (is_table and is_lookup):
        return None
    out_shape = site.out_types[0].shape
    position_axes = _other_axes(out_shape, dims.offset_dims)
    positions = size_along(out_shape, position_axes)
    # With an index beyond the table, table[index] reads the nearest row. Its
    # derivative, a scatter, drops the cotangent. Only with mode="clip" does the
    # cotangent go to the nearest row.
    drops_beyond = params["mode"] != lax.GatherScatterMode.CLIP

    def outer_products(inputs: list[Array], cotangent: Array) -> OuterProducts:
        index = inputs[0].reshape(1, positions)
        row = _nearest_row(index, table_shape[0] - 1)
        order = (*position_axes, *dims.offset_dims)
        c = jnp.transpose(cotangent, order)
        c = c.reshape(1, positions, -1)
        if drops_beyond:
            is_in_table = row == index
            c = jnp.where(is_in_table[:, :, None], c, 0)
        return OuterProducts(row.astype(jnp.int32), c)

    return _lookup(table_shape, positions, outer_products)


def _slice_of_rows(site: Site) -> Form | None:
    """A lookup of neighbouring rows, mostly of one."""
    table_shape = _in_shape(site, 0)
    count, *row_shape = site.eqn.params["slice_sizes"]
    is_table = tuple(site.operands) == (0,)
    if not is_table or tuple(row_shape) != table_shape[1:]:
        return None

    def outer_products(inputs: list[Array], cotangent: Array) -> OuterProducts:
        # A slice that would end beyond the table is moved, and so is its derivative.
        start = _nearest_row(inputs[0], table_shape[0] - count)
        rows = start.astype(jnp.int32) + jnp.arange(count, dtype=jnp.int32)
        c = cotangent.reshape(1, count, -1)
        return OuterProducts(rows[None], c)

    return _lookup(table_shape, count, outer_products)


def _lookup(
    table_shape: Sequence[int],
    positions: int,
    outer_products: Callable[..., OuterProducts],
) -> Form:
    """The form of a lookup of rows of a table."""
    return Form(
        stack=(),
        rows=(0,),
        columns=range(1, len(table_shape)),
        positions=positions,
        outer_products=outer_products,
    )


def _nearest_row(index: Array, last: int) -> Array:
    """The index, at least 0 and at most `last`, in its own dtype."""
    # The dtype may be too narrow for the number of rows.
    largest = jnp.iinfo(index.dtype).max
    return jnp.clip(index, 0, min(last, largest))


def _convolution(site: Site) -> Form | None:
    params = site.eqn.params
    # Only the kernel: an image that is made of parameters has no form here.
    is_kernel = tuple(site.operands) == (1,)
    if not is_kernel or params["batch_group_count"] != 1:
        return None
    kernel_shape = _in_shape(site, 1)
    feature_groups = params["feature_group_count"]
    image_axes, kernel_axes, out_axes = params["dimension_numbers"]
    out_channel_axis, in_channel_axis, *window_axes = kernel_axes
    out_channels = kernel_shape[out_channel_axis]
    # Positions are the pixels of the output, rows the numbers of a patch, columns the
    # output channels of a group.
    rows = (*window_axes, in_channel_axis)
    window = [kernel_shape[axis] for axis in window_axes]

    def outer_products(inputs: list[Array], cotangent: Array) -> OuterProducts:
        # Channels stay last, where convolutions mostly have them. In another order a
        # GPU wrote a copy of all cotangents, and needed 1.9 times the memory of a plain
        # gradient.
        pixels = jnp.transpose(inputs[0], _channels_last(image_axes))
        c = jnp.transpose(cotangent, _channels_last(out_axes))[..., None, :]

        def by_group(x: Array) -> Array:
            """[..., offsets, channels] as [groups, positions, rows or columns]."""
            offsets, channels = x.shape[-2:]
            x = x.reshape(-1, offsets, feature_groups, channels // feature_groups)
            x = jnp.moveaxis(x, 2, 0)
            return lax.collapse(x, 2)

        patches = _patches(pixels, window, params)
        return OuterProducts(by_group(patches), by_group(c))

    return Form(
        stack=(),
        rows=rows,
        columns=(out_channel_axis,),
        positions=site.out_types[0].size // out_channels,
        outer_products=outer_products,
        feature_groups=feature_groups,
    )


def _channels_last(axes: Sequence[int]) -> tuple[int, ...]:
    """Reorders the axes of a spec of `dimension_numbers`, which has channels second."""
    image_axis, channel_axis, *place_axes = axes
    return (image_axis, *place_axes, channel_axis)


def _patches(image: Array, window: list[int], params: dict[str, Any]) -> Array:
    """The pixels under the window in all its places.

    Args:
      image: [images, *sizes, channels].
      window: its sizes.
      params: of the convolution.

    Returns:
      [images, *places, offsets in the window, channels].
    """
    unpadded = (0, 0, 0)
    edges = [unpadded]
    for (low, high), step in zip(params["padding"], params["lhs_dilation"]):
        # lhs_dilation d puts d - 1 zeros between pixels.
        edges.append((low, high, step - 1))
    edges.append(unpadded)
    zero = jnp.zeros((), image.dtype)
    image = lax.pad(image, zero, edges)
    images, *sizes, channels = image.shape
    strides = (1, *params["window_strides"], 1)
    dilation = np.array(params["rhs_dilation"])
    # How far the last pixel of a window is from the first
    extents = (np.array(window) - 1) * dilation
    # In how many places the window fits, with a stride of 1
    places = np.array(sizes) - extents
    pixels_by_offset = []
    for offset in np.ndindex(*window):
        # The pixel at this offset of the window, in all places at once.
        start = np.array(offset) * dilation
        stop = start + places
        pixels = lax.slice(
            image,
            start_indices=(0, *start, 0),
            limit_indices=(images, *stop, channels),
            strides=strides,
        )
        pixels_by_offset.append(pixels)
    return jnp.stack(pixels_by_offset, -2)


def _in_shape(site: Site, input_index: int) -> tuple[int, ...]:
    return type_of(site.eqn.invars[input_index]).shape


def size_along(shape: Sequence[int], axes: Sequence[int]) -> int:
    """How many numbers are along some axes."""
    return math.prod(shape[axis] for axis in axes)


def _other_axes(shape: Sequence[int], axes: Sequence[int]) -> list[int]:
    return [axis for axis in range(len(shape)) if axis not in axes]


FORMS: dict[str, Callable[[Site], Form | None]] = {
    "dot_general": _dot_general,
    "gather": _gather,
    "dynamic_slice": _slice_of_rows,
    "conv_general_dilated": _convolution,
}
