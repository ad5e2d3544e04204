"""The norms of the gradients of examples, from what was captured.

The gradient by a matrix is a sum of outer products:

    G = sum_t a_t c_t'

a_t is what comes into the matrix at position t, and c_t the cotangent of what comes
out. A matrix product has this form whatever its axes are. So has a convolution, whose
a_t are the patches of the image, and a lookup in a table, whose a_t is 1 in one row.
Turns of a scan that share a matrix are positions too. Several matrices are a stack.

    product    |a| |c|: one position
    rows       |c|, after those of one row are added up: lookups
    gram       sqrt(sum_ts (a_t . a_s)(c_t . c_s)): few positions, a large matrix
    matrix     |sum_t a_t c_t'|: many positions. The gradient of an example is made
    gradient   the same by JAX's own derivative, where there are no outer products
    unused     0

The positions of several uses of a parameter are those of one.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ..._mesh_types import varying
from ..._reduce import LeafSpec, norms_of
from ..._sums import per_platform
from ._capture import Captured, Origin, Use

# A cotangent times its factor may be flushed to 0. Times inputs of a larger norm than
# this the product that is lost would be large.
LARGEST_INPUT = 2.0**104
HIGHEST = lax.Precision.HIGHEST
LOOKUPS = ("gather", "dynamic_slice")  # table[row] of one row is a slice


class OuterProducts(NamedTuple):
    """A gradient as a sum of outer products. In a batch an axis for examples is in
    front.
    """

    # [stack, position, rows], or the numbers of rows that are looked up,
    # int32[stack, position]
    a: Array
    c: Array  # [stack, position, columns]


class Sizes(NamedTuple):
    """The sizes of the outer products of one use, outside any scan."""

    positions: int
    rows: int
    columns: int


class Form(NamedTuple):
    """How the gradient by the operand of a use is a sum of outer products."""

    # The axes of the operand along which there is a matrix each, and those that are
    # rows and columns of the matrix
    stack: Sequence[int]
    rows: Sequence[int]
    columns: Sequence[int]
    sizes: Sizes
    # From inputs and cotangent of one example, outside any scan.
    outer_products: Callable[..., OuterProducts]
    groups: int = 1  # of a convolution, which are columns of the operand too
    # By how many offsets of its window `outer_products` can shift the cotangents,
    # instead of the pixels: the matrix is then [rows / shifts, shifts * columns].
    shifts: int = 1


class Operand(NamedTuple):
    """A value made of a parameter, where a use takes it."""

    use_number: int  # its index among all uses
    use: Use
    origin: Origin


class MatrixUse(NamedTuple):
    """One use of one parameter, whose gradient is a sum of outer products."""

    use_number: int  # its index among all uses
    use: Use
    origin: Origin  # of the operand that is the parameter
    form: Form
    # Whether its rows are the columns of the first use, as those of a tied table.
    is_transposed: bool = False

    def matrices(self, values: dict[Any, Any]) -> Array:
        """The operand as [stack, rows, columns], from parameters by their numbers.
        Turns of scans that slice it belong to the stack.
        """
        operand = self.origin.make(values)
        form = self.form
        axes = np.array([*form.stack, *form.rows, *form.columns], int)
        turns = operand.ndim - len(axes)
        x = jnp.transpose(operand, (*range(turns), *(turns + axes)))
        _, rows, columns = form.sizes
        x = jnp.swapaxes(x.reshape(-1, rows, form.groups, columns), 1, 2)
        return x.reshape(-1, rows, columns)


class LeafPlan(NamedTuple):
    """How the norm of the gradient by one parameter is computed."""

    norm_by: str  # a word of the table above
    uses: dict[int, Use]  # by their index among all uses
    temporaries: int = 0  # how many numbers are made of one example, and dropped
    held: int = 0  # how many are held until the sum over examples
    # About how many multiplications it takes that a plain gradient does not.
    extra_work: int = 0
    matrix_uses: tuple[MatrixUse, ...] = ()  # where there are outer products
    matrix_shape: tuple[int, ...] = ()  # stack, rows and columns
    positions: int = 1
    # Whether what one example adds is proved, as of a sum. That takes longer.
    is_bounded: bool = False

    def captured_of(self, captured: list[Captured]) -> list[Captured]:
        """What was captured at its uses, of what was captured at all."""
        return [captured[use.use_number] for use in self.matrix_uses]


def plans_of(uses: list[Use], params: list[Array]) -> list[LeafPlan]:
    """The plan of each parameter."""
    operands_of_leaves: list[list[Operand]] = [[] for _ in params]
    # How many numbers the gradient of an example has for each parameter
    held = [leaf.size for leaf in params]
    for use_number, use in enumerate(uses):
        # An empty use, such as the positions before the last of a sequence of one, has
        # no part in a gradient.
        size = sum(use.out_types[index].size for index in use.tapped)
        if not math.prod(use.scan_lengths) * size:
            continue
        for place, origin in use.operands.items():
            operand_size = use.eqn.invars[place].aval.size if use.eqn else 0
            for depth in origin.scans:
                operand_size *= use.scan_lengths[depth]
            for leaf in origin.leaves:
                operands_of_leaves[leaf].append(Operand(use_number, use, origin))
                # The gradient by an operand, such as w + a @ b, gives that by each
                # parameter that it is made of.
                if use.name in FORMS:
                    held[leaf] = max(held[leaf], operand_size)
    plans = []
    for leaf, operands, held_of_leaf in zip(params, operands_of_leaves, held):
        plans.append(_plan_of(leaf, operands, held_of_leaf))
    return plans


def _plan_of(leaf: Array, operands: list[Operand], held: int) -> LeafPlan:
    """The plan of one parameter, from all operands that are made of it."""
    uses = {operand.use_number: operand.use for operand in operands}
    if not uses or not leaf.size:
        return LeafPlan("unused", uses, held=held)
    by_gradient = LeafPlan("gradient", uses, held=held)
    # Where outputs differ along more mesh axes than the parameter, its gradient is a
    # sum over devices.
    axes_of_leaf = varying(leaf)
    for use in uses.values():
        for out_type in use.out_types:
            if not out_type.manual_axis_type.varying <= axes_of_leaf:
                return by_gradient
    matrix_uses = _matrix_uses_of(operands)
    return _cheapest_plan(matrix_uses, by_gradient) if matrix_uses else by_gradient


class Layout(NamedTuple):
    """How a parameter is read as matrices. Uses of equal layout have the same matrices,
    and their gradients can be added up.
    """

    path: tuple[Any, ...]  # of its view
    groups: int
    # The axes of the parameter that are the stack, rows and columns
    stack: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]


def _matrix_uses_of(operands: list[Operand]) -> list[MatrixUse]:
    """The uses of a parameter, with their forms. Empty where the forms do not fit
    together, or a use has none.
    """
    matrix_uses = []
    layouts = []
    layouts_of_lookups = []
    for use_number, use, origin in operands:
        form = form_of(use)
        view = origin.view
        if form is None or view is None:
            return []
        layout = Layout(
            view.path,
            form.groups,
            stack=tuple(view.axes[axis] for axis in form.stack),
            rows=tuple(view.axes[axis] for axis in form.rows),
            columns=tuple(view.axes[axis] for axis in form.columns),
        )
        layouts.append(layout)
        if use.name in LOOKUPS:
            layouts_of_lookups.append(layout)
        matrix_uses.append(MatrixUse(use_number, use, origin, form))
    # Rows of all lookups are rows of the table.
    straight = [*layouts_of_lookups, *layouts][0]
    # A tied table: rows of the lookup are columns of the product with the transpose.
    transposed = straight._replace(rows=straight.columns, columns=straight.rows)
    if set(layouts_of_lookups) - {straight} or set(layouts) - {straight, transposed}:
        return []
    # Straight ones come first: the first use has the rows and columns of all.
    straight_uses = []
    transposed_uses = []
    for matrix_use, layout in zip(matrix_uses, layouts):
        if layout == straight:
            straight_uses.append(matrix_use)
        else:
            transposed_uses.append(matrix_use._replace(is_transposed=True))
    return straight_uses + transposed_uses


def _cheapest_plan(matrix_uses: list[MatrixUse], by_gradient: LeafPlan) -> LeafPlan:
    """The plan that takes the fewest multiplications."""
    positions = 0
    for matrix_use in matrix_uses:
        positions_of_use = matrix_use.form.sizes.positions
        for depth, length in enumerate(matrix_use.use.scan_lengths):
            if depth not in matrix_use.origin.scans:
                positions_of_use *= length
        positions += positions_of_use
    first = matrix_uses[0]
    _, rows, columns = first.form.sizes
    stack = by_gradient.held // (rows * columns)
    plan = by_gradient._replace(
        matrix_uses=tuple(matrix_uses),
        matrix_shape=(stack, rows, columns),
        positions=positions,
    )
    if all(matrix_use.use.name in LOOKUPS for matrix_use in matrix_uses):
        return plan._replace(norm_by="rows", held=stack * positions * columns)
    if positions == 1:
        work = stack * (rows + columns)
        return plan._replace(norm_by="product", held=0, extra_work=work)
    is_convolution = first.use.name == "conv_general_dilated"
    patches = 2 * stack * positions if is_convolution else 0
    # positions^2 (rows + columns) against positions rows columns of matrix.
    if positions * (rows + columns) <= rows * columns:
        position_pairs = stack * positions**2
        return plan._replace(
            norm_by="gram",
            temporaries=2 * position_pairs + patches * rows,
            held=0,
            extra_work=position_pairs * (rows + columns),
        )
    shifts = first.form.shifts
    numbers_of_patch = rows // shifts
    if shifts > 1:
        numbers_of_patch += shifts * columns
    return plan._replace(norm_by="matrix", temporaries=patches * numbers_of_patch)


def form_of(use: Use) -> Form | None:
    """The form of a use, or None if its gradient is not known to have one."""
    form_of_primitive = FORMS.get(use.name)
    # The data of a lookup are the numbers of its rows.
    data_types = [] if use.name in LOOKUPS else use.data_types
    # Complex products would need conjugates. Integers have no derivative.
    for array_type in (*data_types, *use.out_types):
        if not jnp.issubdtype(array_type.dtype, jnp.floating):
            return None
    return form_of_primitive(use) if form_of_primitive else None


def _dot_general(use: Use) -> Form:
    contracted_axes, stacked_axes = use.eqn.params["dimension_numbers"]
    (side,) = use.operands  # 0: the parameter is on the left
    operand_shape = use.eqn.invars[side].aval.shape
    data_shape = use.data_types[0].shape
    stack = stacked_axes[side]
    rows = contracted_axes[side]
    columns = _other_axes(operand_shape, (*stack, *rows))
    data_stack = stacked_axes[1 - side]
    data_rows = contracted_axes[1 - side]
    # Axes of the data that are neither stacked nor summed over are positions.
    data_positions = _other_axes(data_shape, (*data_stack, *data_rows))
    stack_size = _size(operand_shape, stack)
    sizes = Sizes(
        positions=_size(data_shape, data_positions),
        rows=_size(operand_shape, rows),
        columns=_size(operand_shape, columns),
    )

    def outer_products(inputs: list[Array], cotangent: Array) -> OuterProducts:
        a = jnp.transpose(inputs[0], (*data_stack, *data_positions, *data_rows))
        # The output has the stack first, then the other axes of the left, then those of
        # the right.
        if side == 0:
            c = cotangent.reshape(stack_size, sizes.columns, sizes.positions).mT
        else:
            c = cotangent.reshape(stack_size, sizes.positions, sizes.columns)
        return OuterProducts(a.reshape(stack_size, sizes.positions, sizes.rows), c)

    return Form(stack, rows, columns, sizes, outer_products)


def _gather(use: Use) -> Form | None:
    """A lookup of whole rows. No other gather has a form here."""
    dims = use.eqn.params["dimension_numbers"]
    table_shape = use.eqn.invars[0].aval.shape
    # table[index], where each slice is one row and all of its columns.
    is_by_row = dims.collapsed_slice_dims == dims.start_index_map == (0,)
    is_one_row = tuple(use.eqn.params["slice_sizes"]) == (1, *table_shape[1:])
    if not (tuple(use.operands) == (0,) and is_by_row and is_one_row):
        return None
    if dims.operand_batching_dims:
        return None
    out_type = use.out_types[0]
    column_axes = dims.offset_dims
    position_axes = _other_axes(out_type.shape, column_axes)
    positions = _size(out_type.shape, position_axes)
    sizes = Sizes(positions, table_shape[0], math.prod(table_shape[1:]))
    # table[index] reads the nearest row for an index beyond the table. Its derivative,
    # a scatter, still drops what does not belong to a row. Only mode="clip" keeps it.
    drops = use.eqn.params["mode"] != lax.GatherScatterMode.CLIP

    def outer_products(inputs: list[Array], cotangent: Array) -> OuterProducts:
        index = inputs[0].reshape(1, positions)
        row = _row(index, table_shape[0] - 1)
        c = jnp.transpose(cotangent, (*position_axes, *column_axes))
        c = c.reshape(1, positions, sizes.columns)
        if drops:
            c = jnp.where((row == index)[:, :, None], c, 0)
        return OuterProducts(row.astype(jnp.int32), c)

    return Form((), (0,), range(1, len(table_shape)), sizes, outer_products)


def _row(index: Array, last: int) -> Array:
    """The nearest row. In the dtype of the index, which may be too narrow for the
    number of rows, or wider than int32.
    """
    return jnp.clip(index, 0, min(last, jnp.iinfo(index.dtype).max))


def _slice_of_rows(use: Use) -> Form | None:
    """A lookup of neighbouring rows, mostly of one."""
    table_shape = use.eqn.invars[0].aval.shape
    slice_sizes = use.eqn.params["slice_sizes"]
    if tuple(use.operands) != (0,) or slice_sizes[1:] != table_shape[1:]:
        return None
    count = slice_sizes[0]
    sizes = Sizes(count, table_shape[0], math.prod(table_shape[1:]))

    def outer_products(inputs: list[Array], cotangent: Array) -> OuterProducts:
        # A slice that would end beyond the table is moved, and so is its derivative.
        start = _row(inputs[0], table_shape[0] - count).astype(jnp.int32)
        index = start + jnp.arange(count, dtype=jnp.int32)
        c = cotangent.reshape(1, count, sizes.columns)
        return OuterProducts(index[None], c)

    return Form((), (0,), range(1, len(table_shape)), sizes, outer_products)


def _convolution(use: Use) -> Form | None:
    params = use.eqn.params
    # Only the kernel: an image that is made of parameters is no such matrix.
    if tuple(use.operands) != (1,) or params["batch_group_count"] != 1:
        return None
    kernel_shape = use.eqn.invars[1].aval.shape
    groups = params["feature_group_count"]
    image_axes, kernel_axes, out_axes = params["dimension_numbers"]
    out_channels = kernel_shape[kernel_axes[0]]
    window_axes = kernel_axes[2:]
    # Positions are the pixels of the output, rows the numbers of a patch, columns the
    # output channels of a group.
    rows = (*window_axes, kernel_axes[1])
    sizes = Sizes(
        positions=use.out_types[0].size // out_channels,
        rows=_size(kernel_shape, rows),
        columns=out_channels // groups,
    )
    # Shifted along the first axis of its window, where that makes fewer numbers: a
    # kernel of 3 x 3 makes 3 of each pixel and 3 of each cotangent, instead of 9.
    possible_shifts = 1
    if params["window_strides"][:1] == (1,):
        possible_shifts = kernel_shape[window_axes[0]]
    if sizes.rows <= possible_shifts * sizes.columns:
        possible_shifts = 1

    def outer_products(
        inputs: list[Array], cotangent: Array, shifts: int = 1
    ) -> OuterProducts:
        # Channels stay last, where convolutions mostly have them. In another order a
        # GPU wrote a copy of all cotangents, and needed 1.9 times the memory of a plain
        # gradient.
        pixels = jnp.transpose(inputs[0], _channels_last(image_axes))
        c = jnp.transpose(cotangent, _channels_last(out_axes))[..., None, :]
        window = [kernel_shape[axis] for axis in window_axes]
        if shifts > 1:
            window[0] = 1
            c = _shifted(c, shifts, params["rhs_dilation"][0])

        def by_group(x: Array) -> Array:
            """[..., offsets, channels] as [groups, positions, numbers]."""
            offsets, channels = x.shape[-2:]
            x = x.reshape(-1, offsets, groups, channels // groups)
            return jnp.moveaxis(x, 2, 0).reshape(groups, len(x), -1)

        patches = _patches(pixels, window, params)
        return OuterProducts(by_group(patches), by_group(c))

    return Form(
        (),
        rows,
        kernel_axes[:1],
        sizes,
        outer_products,
        groups=groups,
        shifts=possible_shifts,
    )


def _channels_last(axes: Sequence[int]) -> tuple[int, ...]:
    """The axes of a spec of `dimension_numbers`, which has channels second."""
    images, channels, *places = axes
    return (images, *places, channels)


def _shifted(c: Array, shifts: int, step: int) -> Array:
    """[images, height + margin, ..., shifts, channels] of [images, height, ..., 1,
    channels]: cotangents, shifted along the first axis of the window by 0, `step`, ...
    """
    margin = (shifts - 1) * step
    unpadded = [(0, 0)] * (c.ndim - 2)
    # Padded once: XLA on a CPU takes four times as long to join padded arrays.
    padded = jnp.pad(c, [(0, 0), (margin, margin), *unpadded])
    size = c.shape[1] + margin
    starts = range(margin, -1, -step)
    return jnp.concatenate([padded[:, start : start + size] for start in starts], -2)


def _patches(image: Array, window: list[int], params: Any) -> Array:
    """[images, *places, offsets in the window, channels] of [images, ..., channels]."""
    unpadded = (0, 0, 0)
    edges = [unpadded]
    for (low, high), step in zip(params["padding"], params["lhs_dilation"]):
        # lhs_dilation d puts d - 1 zeros between pixels.
        edges.append((low, high, step - 1))
    zero = jnp.zeros((), image.dtype)
    image = lax.pad(image, zero, [*edges, unpadded])
    strides = (1, *params["window_strides"], 1)
    dilation = np.array(params["rhs_dilation"])
    last = np.array(image.shape[1:-1]) - (np.array(window) - 1) * dilation
    pixels_by_offset = []
    for offset in np.ndindex(*window):
        # The pixel at this offset of the window, in all places at once.
        start = np.array(offset) * dilation
        stop = len(image), *(start + last), image.shape[-1]
        pixels_by_offset.append(lax.slice(image, (0, *start, 0), stop, strides))
    return jnp.stack(pixels_by_offset, -2)


def _size(shape: Sequence[int], axes: Sequence[int]) -> int:
    return math.prod(shape[axis] for axis in axes)


def _other_axes(shape: Sequence[int], axes: Sequence[int]) -> list[int]:
    return [axis for axis in range(len(shape)) if axis not in axes]


FORMS: dict[str, Callable[[Use], Form | None]] = {
    "dot_general": _dot_general,
    "gather": _gather,
    "dynamic_slice": _slice_of_rows,
    "conv_general_dilated": _convolution,
}


def outer_products_of(
    matrix_use: MatrixUse, captured: Captured, *, can_shift: bool = False
) -> OuterProducts:
    """The outer products of one use for a batch. Turns of a scan that slices the
    operand belong to the stack, and turns that share it are positions. With `can_shift`
    cotangents may be shifted instead of pixels.
    """
    form = matrix_use.form
    split = form.outer_products
    if can_shift and form.shifts > 1 and not matrix_use.is_transposed:
        split = partial(split, shifts=form.shifts)
    scans = len(matrix_use.use.scan_lengths)
    # Under vmap over example and turns, it is one use outside any scan.
    for _ in range(1 + scans):
        split = jax.vmap(split)
    # [example, *turns, stack, position, ...] -> [example, *sliced turns, stack,
    # *shared turns, position, ...]
    sliced_axes = sorted(1 + depth for depth in matrix_use.origin.scans)
    shared_axes = [axis for axis in range(1, 1 + scans) if axis not in sliced_axes]
    order = 0, *sliced_axes, 1 + scans, *shared_axes, 2 + scans
    first_position_axis = 2 + len(sliced_axes)

    def merged(x: Array) -> Array:
        x = jnp.transpose(x, (*order, *range(len(order), x.ndim)))
        stack = math.prod(x.shape[1:first_position_axis])
        positions = math.prod(x.shape[first_position_axis : len(order)])
        return x.reshape(len(x), stack, positions, *x.shape[len(order) :])

    (cotangent,) = captured.cotangents
    products = split(captured.inputs, cotangent)
    a = merged(products.a)
    c = merged(products.c)
    return OuterProducts(c, a) if matrix_use.is_transposed else OuterProducts(a, c)


def grads_or_norms_of(plan: LeafPlan, products: list[OuterProducts]) -> Array:
    """The norm of the gradient of each example, from the outer products of all uses, or
    the gradients, [example, stack, rows, columns]. Of lookups instead the sum of the
    cotangents that belong to one row, at the first place of it in the order of rows.
    """
    if plan.norm_by == "rows":
        a, c = joined(products)
        rows = jnp.sort(a)
        first = jax.vmap(jax.vmap(jnp.searchsorted))(rows, a)
        return _scattered(first, c, c.shape[1:])
    if plan.norm_by == "product":
        (product,) = products
        norms_along_first_axis = jax.vmap(_norm)
        a_norms = norms_along_first_axis(product.a.reshape(-1, product.a.shape[-1]))
        c_norms = norms_along_first_axis(product.c.reshape(-1, product.c.shape[-1]))
        # For a stack of products |G|^2 = sum_s |a_s|^2 |c_s|^2.
        norms = (a_norms * c_norms).reshape(product.a.shape[:2])
        return norms_along_first_axis(norms) if norms.shape[1] > 1 else norms[:, 0]
    total: Any = 0.0
    for a, c in products:
        if a.ndim == 3:
            total += _scattered(a, c, plan.matrix_shape)
        else:
            x = _dot("bstr,bstk->bsrk", a, c)
            # Shifts stand before columns.
            x = x.reshape(*x.shape[:3], -1, plan.matrix_shape[2])
            total += jnp.swapaxes(x, 2, 3).reshape(len(x), *plan.matrix_shape)
    return total


def _norm(array: Array) -> Array:
    """The norm of an array on this device."""
    (norm,) = norms_of((LeafSpec(norm_index=0),), 1, None, [array])
    return norm


def joined(products: list[OuterProducts]) -> OuterProducts:
    """The outer products of several uses as those of one."""
    a = jnp.concatenate([product.a for product in products], 2)
    c = jnp.concatenate([product.c for product in products], 2)
    return OuterProducts(a, c)


def _scattered(rows: Array, c: Array, shape: tuple[int, ...]) -> Array:
    stack = jnp.arange(shape[0])[:, None]
    zeros = jnp.zeros((len(rows), *shape), np.promote_types(c.dtype, np.float32))
    return jax.vmap(lambda x, rows, c: x.at[stack, rows].add(c))(zeros, rows, c)


def norms_by_gram(
    products: list[OuterProducts], *, is_bounded: bool
) -> tuple[Array, Array]:
    """The norm in Gram form, and sum_t |a_t| |c_t|, which bounds the terms.

    With `is_bounded` a gradient is never longer than its norm. A CPU then adds up in
    float64. Elsewhere the norm is rounded up by the most that its additions may lose,
    in whatever order they are made. Where squares would leave the range of the dtype,
    the bound is the norm.
    """
    norms_along_first_axis = jax.vmap(_norm)
    norms_of_rows = jnp.vectorize(_norm, signature="(n)->()")
    wide = np.dtype(np.float32)
    for x in jax.tree.leaves(products):
        if not _is_lookup(x):
            wide = np.promote_types(wide, x.dtype)
    products = jax.tree.map(partial(_cast, dtype=wide), products)
    lookups = [product for product in products if _is_lookup(product.a)]
    matrix_products = [product for product in products if not _is_lookup(product.a)]
    # All lookups are joined, and all products: 32 uses had 32 x 32 blocks below.
    a_arrays = []
    c_arrays = []
    for products_to_join in (lookups, matrix_products):
        if products_to_join:
            a, c = joined(products_to_join)
            a_arrays.append(a)
            c_arrays.append(c)
    c = jnp.concatenate(c_arrays, 2)
    stack = c.shape[1]
    if stack == 1:
        # A stack of one: with its axis XLA on a CPU would make the factors twice.
        a_arrays = [a[:, 0] for a in a_arrays]
        c = c[:, 0]
    c_norms = norms_of_rows(c)
    norms = []
    for a in a_arrays:
        # A lookup is 1 in one row.
        norms.append(jnp.ones_like(a, wide) if _is_lookup(a) else norms_of_rows(a))
    a_norms = jnp.concatenate(norms, -1)
    term_norms = jnp.where(a_norms < LARGEST_INPUT, a_norms, jnp.inf) * c_norms
    # That of a stack is of all its matrices.
    bounds = norms_along_first_axis(jnp.sum(term_norms, -1))
    is_used = (a_norms != 0) & (c_norms != 0)
    # Numbers that are flushed to 0 are less than eps / 2 of the square of the bound,
    # for up to 2^24 rows and columns, and 2^13 positions of all layers.
    info = jnp.finfo(wide)
    least = 2.0**13 * float(2 * info.tiny / info.eps) ** 0.5
    size = _sums(jnp.where(is_used, a_norms + c_norms, 0))
    is_enough = bounds > least * (size + 2.0**-13 * is_used[0].size)
    fits = is_enough & (jnp.maximum(bounds, size) < float(info.max) ** 0.5)

    def rounded_up(a_arrays: list[Array], c: Array, is_used: Array) -> Array:
        squares = _squares_by_gram(a_arrays, c, is_used, wide)
        rows = 1 if _is_lookup(a_arrays[-1]) else a_arrays[-1].shape[-1]
        terms = rows + c.shape[-1] + stack * c.shape[-2] ** 2 + 1
        # At most the square of the bound: nothing is longer.
        lost = min(rounding(terms, wide), 1.0)
        return jnp.maximum(squares, 0) + jnp.where(fits, lost * bounds**2, 0)

    if is_bounded:
        squares = per_platform(
            a_arrays,
            c,
            is_used,
            cpu=partial(_squares_in_float64, dtype=wide),
            gpu=rounded_up,
            plain=rounded_up,
        )
    else:
        squares = _squares_by_gram(a_arrays, c, is_used, wide)
    is_long = fits & (squares > 0)
    is_zero = fits & (squares <= 0)
    # The derivative of sqrt(0) would be NaN.
    norm = jnp.sqrt(jnp.where(is_long, squares, 1))
    return jnp.where(is_long, norm, jnp.where(is_zero, 0, bounds)), bounds


def rounding(count: int, dtype: Any) -> float:
    """The most that `count` roundings take from a sum, over the sizes of its terms."""
    share = count * float(jnp.finfo(dtype).eps) / 2
    return share / (1 - share) if share < 1 else np.inf


def _squares_in_float64(
    a_arrays: list[Array], c: Array, is_used: Array, *, dtype: Any
) -> Array:
    with jax.enable_x64(True):
        squares = _squares_by_gram(a_arrays, c, is_used, np.float64)
        return lax.convert_element_type(squares, dtype)


def _squares_by_gram(
    a_arrays: list[Array], c: Array, is_used: Array, dtype: Any
) -> Array:
    """The squares of the norms: sum_ts (a_t . a_s)(c_t . c_s)."""
    *a_arrays, c = [_cast(x, dtype) for x in (*a_arrays, c)]
    blocks = []
    for a in a_arrays:
        blocks.append([_inner_products(a, b, dtype) for b in a_arrays])
    a_products = jnp.block(blocks)
    both_used = is_used[..., :, None] & is_used[..., None, :]
    # Selected, since beside a cotangent of 0 the product of inputs may be inf.
    c_products = _inner_products(c, c, dtype)
    return _sums(jnp.where(both_used, a_products * c_products, 0))


def _cast(x: Array, dtype: Any) -> Array:
    """The array in a dtype, or the numbers of rows as they are."""
    return x if _is_lookup(x) else lax.convert_element_type(x, dtype)


def _sums(x: Array) -> Array:
    """Of each example, over all other axes."""
    return jnp.sum(x, range(1, x.ndim))


def _is_lookup(a: Array) -> bool:
    return jnp.issubdtype(a.dtype, jnp.integer)


def _inner_products(a: Array, b: Array, dtype: Any) -> Array:
    """The products a_t . b_s of rows. Each of both may be the rows of lookups."""
    if _is_lookup(a) and _is_lookup(b):
        # 1 where both look up the same row, and else 0.
        same = a[..., :, None] == b[..., None, :]
        return same.astype(dtype)
    if _is_lookup(a):
        return jnp.swapaxes(_inner_products(b, a, dtype), -1, -2)
    if _is_lookup(b):
        # For a lookup of row r the product with a_t is the entry a_t[r].
        index = jnp.broadcast_to(b[..., None, :], (*a.shape[:-1], b.shape[-1]))
        return jnp.take_along_axis(a, index, axis=-1)
    stacked = tuple(range(a.ndim - 2))
    last = a.ndim - 1
    # `jnp.einsum` asks for its dtype by name, which vmap and derivatives do again,
    # where there may be no float64.
    return lax.dot_general(
        a, b, (((last,), (last,)), (stacked, stacked)), precision=HIGHEST
    )


def _dot(axes: str, x: Array, y: Array) -> Array:
    """A product in float32. GPU and TPU would else round its factors to fewer bits."""
    wide = np.promote_types(x.dtype, np.float32)
    return jnp.einsum(axes, x.astype(wide), y.astype(wide), precision=HIGHEST)
