"""The gradient of one example by a weight matrix, in two factors:

    G = sum_t a_t c_t'

a_t is what comes into the matrix at position t, and c_t the cotangent of what comes
out. A matrix product has this form whatever its axes are. So has a convolution, whose
a_t are the patches of the image, and a lookup in a table, whose a_t is 1 in one row.
"""

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ._uses import Use

Axes = tuple[int, ...]
Order = Callable[[Sequence[int]], list[int]]  # sorts axes of an operand


class Factors(NamedTuple):
    """The factors of one use in one example, outside any scan."""

    # [stack, position, rows], or int32[stack, position] for rows with a single 1
    a: jax.Array
    c: jax.Array  # [stack, position, columns]


class Form(NamedTuple):
    """How the gradient by the operand of a use is made of factors."""

    stack: Axes  # the axes of the operand along which there is a matrix each
    rows: Axes  # the axes that are rows of the matrix
    columns: Axes
    sizes: tuple[int, int, int]  # of positions, rows and columns
    is_lookup: bool  # whether `a` has the numbers of rows
    aligns: bool  # whether each matrix of the stack is a slice of the operand
    split: Callable[[list[jax.Array], jax.Array, Order], Factors]
    is_convolution: bool = False


def form_of(use: Use) -> Form | None:
    """The form of a use, or None if its gradient is not known to have one."""
    rule = _RULES.get(use.name)
    if rule is None or len(use.places) != 1:
        return None
    # Complex products would need conjugates. Integers have no derivative.
    types = [use.outs[0], *use.data, use.eqn.invars[use.places[0]].aval]
    if use.name == "gather":
        types.remove(use.data[0])  # the numbers of the rows
    if not all(jnp.issubdtype(each.dtype, jnp.floating) for each in types):
        return None
    return rule(use)


def _dot_general(use: Use) -> Form:
    contracted, stacked = use.eqn.params["dimension_numbers"]
    own = use.places[0]
    other = 1 - own
    operand, data = use.eqn.invars[own].aval.shape, use.data[0].shape
    stack, rows = stacked[own], contracted[own]
    columns = [k for k in range(len(operand)) if k not in (*stack, *rows)]
    # Positions: axes of the data that are neither stacked nor summed over.
    free = [k for k in range(len(data)) if k not in stacked[other]]
    free = [k for k in free if k not in contracted[other]]
    sizes = _size(data, free), _size(operand, rows), _size(operand, columns)
    # The output has the stack first, then the free axes of the left, then the right.
    own_at = len(stack) + (len(free) if own else 0)
    data_at = len(stack) + (0 if own else len(columns))

    def split(
        inputs: list[jax.Array], cotangent: jax.Array, order: Order
    ) -> Factors:
        matrices = order(stack)
        # Axes of data and of cotangent: the stack, positions, then rows or columns.
        a = [stacked[other][stack.index(k)] for k in matrices] + free
        a += [contracted[other][rows.index(k)] for k in order(rows)]
        c = [stack.index(k) for k in matrices]
        c += [data_at + n for n in range(len(free))]
        c += [own_at + columns.index(k) for k in order(columns)]
        count = _size(operand, stack)
        return Factors(
            jnp.transpose(inputs[0], a).reshape(count, sizes[0], sizes[1]),
            jnp.transpose(cotangent, c).reshape(count, sizes[0], sizes[2]),
        )

    return Form(
        tuple(stack), tuple(rows), tuple(columns), sizes, False, True, split
    )


def _gather(use: Use) -> Form | None:
    """A lookup of whole rows. Everything else that gathers has no form here."""
    numbers = use.eqn.params["dimension_numbers"]
    shape = use.eqn.invars[0].aval.shape
    # table[index], where each slice is one row and all of its columns.
    found = numbers.collapsed_slice_dims, numbers.start_index_map
    whole = (1, *shape[1:])
    if (
        use.places != (0,)
        or found != ((0,), (0,))
        or numbers.operand_batching_dims
    ):
        return None
    if tuple(use.eqn.params["slice_sizes"]) != whole:
        return None
    out, offsets = use.outs[0], numbers.offset_dims
    positions = [k for k in range(out.ndim) if k not in offsets]
    columns = tuple(range(1, len(shape)))
    sizes = _size(out.shape, positions), shape[0], math.prod(shape[1:])
    # table[index] reads the nearest row for an index beyond the table. Its derivative,
    # a scatter, still drops what does not belong to a row. Only mode="clip" keeps it.
    drops = use.eqn.params["mode"] != lax.GatherScatterMode.CLIP

    def split(
        inputs: list[jax.Array], cotangent: jax.Array, order: Order
    ) -> Factors:
        index = inputs[0].reshape(1, sizes[0])
        if index.dtype.itemsize < 4:
            # A uint8 of 256, the number of rows, would be 0.
            index = index.astype(jnp.int32)
        axes = [*positions, *(offsets[k - 1] for k in order(columns))]
        c = jnp.transpose(cotangent, axes).reshape(1, sizes[0], sizes[2])
        within = (index >= 0) & (index < shape[0])
        if drops:
            c = jnp.where(within[:, :, None], c, 0)
        return Factors(jnp.clip(index, 0, shape[0] - 1).astype(jnp.int32), c)

    return Form((), (0,), columns, sizes, True, True, split)


def _convolution(use: Use) -> Form | None:
    params = use.eqn.params
    # Only the kernel: an image that is made of parameters is no such matrix.
    if use.places != (1,) or params["batch_group_count"] != 1:
        return None
    kernel = use.eqn.invars[1].aval.shape
    image, own, out = params["dimension_numbers"]
    groups = params["feature_group_count"]
    # Positions are the pixels of the output, rows the numbers of a patch, columns the
    # output channels of a group.
    taken = [use.outs[0].shape[k] for k in (out[0], *out[2:])]
    sizes = (
        math.prod(taken),
        _size(kernel, own[1:]),
        kernel[own[0]] // groups,
    )

    def split(
        inputs: list[jax.Array], cotangent: jax.Array, order: Order
    ) -> Factors:
        windows = [kernel[k] for k in own[2:]]
        pixels = jnp.transpose(inputs[0], (image[0], *image[2:], image[1]))
        found = _patches(pixels, windows, params, taken[1:])
        # [images, *places, *window, channels], its channels in groups.
        found = found.reshape(*found.shape[:-1], groups, -1)
        spatial = len(windows)
        place = {k: 1 + spatial + n for n, k in enumerate(own[2:])}
        place[own[1]] = found.ndim - 1
        axes = [found.ndim - 2, *range(1 + spatial)]
        axes += [place[k] for k in order(own[1:])]
        a = jnp.transpose(found, axes).reshape(groups, sizes[0], sizes[1])
        c = jnp.transpose(cotangent, (out[0], *out[2:], out[1]))
        c = c.reshape(sizes[0], groups, sizes[2]).swapaxes(0, 1)
        return Factors(a, c)

    return Form(
        (), tuple(own[1:]), (own[0],), sizes, False, groups == 1, split, True
    )


def _patches(
    image: jax.Array, window: Any, params: Any, places: Any
) -> jax.Array:
    """[images, *places, *window, channels] of images [images, ..., channels].

    Channels stay last, where convolutions mostly have them. In another order a GPU
    wrote a copy of all cotangents, and needed 1.9 times the memory of a plain gradient.
    """
    zero = jnp.zeros((), image.dtype)
    # lhs_dilation d puts d - 1 zeros between pixels.
    dilation = [step - 1 for step in params["lhs_dilation"]]
    edges = [
        (low, high, d) for (low, high), d in zip(params["padding"], dilation)
    ]
    image = lax.pad(image, zero, [(0, 0, 0), *edges, (0, 0, 0)])
    strides = params["window_strides"]
    found = []
    for offset in product(*map(range, window)):
        # The pixel at this offset of the window, in all places at once.
        start = [n * step for n, step in zip(offset, params["rhs_dilation"])]
        stop = [
            n + (count - 1) * step + 1
            for n, count, step in zip(start, places, strides)
        ]
        pixels = lax.slice(
            image,
            (0, *start, 0),
            (image.shape[0], *stop, image.shape[-1]),
            (1, *strides, 1),
        )
        found.append(pixels)
    stacked = jnp.stack(found, -2)
    return stacked.reshape(*stacked.shape[:-2], *window, image.shape[-1])


def _size(shape: Any, axes: Any) -> int:
    return math.prod(shape[k] for k in axes)


_RULES: dict[str, Callable[[Use], Form | None]] = {
    "dot_general": _dot_general,
    "gather": _gather,
    "conv_general_dilated": _convolution,
}
