"""The norms of the gradients of examples, from what was captured.

The gradient by a matrix has factors:

    G = sum_t a_t c_t'

a_t is what comes into the matrix at position t, and c_t the cotangent of what comes
out. A matrix product has this form whatever its axes are. So has a convolution, whose
a_t are the patches of the image, and a lookup in a table, whose a_t is 1 in one row.
Turns of a scan that share a matrix are positions too. Several matrices are a stack.

    product    |a| |c|: one position
    rows       |c|, after those of one row are added up: lookups
    gram       sqrt(sum_ts (a_t . a_s)(c_t . c_s)): few positions, a large matrix
    matrix     |sum_t a_t c_t'|: many positions. The gradient of an example is made
    gradient   the same by JAX's own derivative, where there are no factors
    unused     0

The positions of several uses of a parameter are those of one.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import attrgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ..._mesh import varying
from ..._plan import own_norm
from ._capture import Captured, Origin, Use

# Above it a product with the cotangent times the factor, which may be flushed to 0,
# would be large.
LARGEST = 2.0**104
HIGHEST = lax.Precision.HIGHEST
LOOKUPS = ("gather", "dynamic_slice")  # table[row] of one row is a slice

# The factors of one use: `a` [stack, position, rows], or the numbers of rows that are
# looked up, int32[stack, position], and `c` [stack, position, columns]. In a batch an
# axis for examples is in front.
Pair = tuple[Array, Array]


class Form(NamedTuple):
    """How the gradient by the operand of a use is made of factors."""

    # The axes of the operand along which there is a matrix each, and those that are
    # rows and columns of the matrix
    stack: Sequence[int]
    rows: Sequence[int]
    columns: Sequence[int]
    sizes: tuple[int, int, int]  # of positions, rows and columns
    # From inputs and cotangent of one example, outside any scan.
    split: Callable[..., Pair]
    groups: int = 1  # of a convolution, which are columns of the operand too
    # By how many offsets of its window `split` can shift the cotangents, in place of
    # the pixels: the matrix is [rows / shifts, shifts * columns] then.
    shifts: int = 1


class Part(NamedTuple):
    """One use of one parameter, whose gradient has factors."""

    number: int  # of the use
    use: Use
    origin: Origin  # of the operand that is the parameter
    form: Form
    swaps: bool = False  # whether its rows are the columns of others

    def matrices(self, made: dict[Any, Any]) -> Array:
        """The operand as [stack, rows, columns]. Turns of scans that slice it belong to
        the stack.
        """
        operand, form = self.origin.make(made), self.form
        axes = np.array([*form.stack, *form.rows, *form.columns], int)
        turns = operand.ndim - len(axes)
        x = jnp.transpose(operand, (*range(turns), *(turns + axes)))
        _, rows, columns = form.sizes
        x = jnp.swapaxes(x.reshape(-1, rows, form.groups, columns), 1, 2)
        return x.reshape(-1, rows, columns)


class Way(NamedTuple):
    """How the norm of the gradient by one parameter is found."""

    name: str
    uses: dict[int, Use]  # by their numbers
    size: int = 0  # how many numbers are made of one example, and dropped
    held: int = 0  # how many are held until the sum over examples
    # about how many multiplications it takes that a plain gradient does not
    cost: int = 0
    parts: tuple[Part, ...] = ()  # where there are factors
    matrices: tuple[int, ...] = ()  # stack, rows and columns
    positions: int = 1

    def own(self, book: list[Captured]) -> list[Captured]:
        """What was captured at its uses."""
        return [book[part.number] for part in self.parts]


def ways_of(uses: list[Use], params: list[Array]) -> list[Way]:
    """The way of each parameter."""
    places: list[list[Place]] = [[] for _ in params]
    held = [leaf.size for leaf in params]
    for number, use in enumerate(uses):
        # What is empty, such as the positions before the last of a sequence of one, has
        # no part in a gradient.
        size = sum(use.outs[k].size for k in use.tapped)
        for k, origin in zip(use.places, use.origins):
            for leaf in origin.by if math.prod(use.loops) * size else ():
                places[leaf].append((number, use, origin))
                # From the gradient by an operand, such as w + a @ b, that by what it is
                # made of follows.
                if use.name in FORMS:
                    turns = [n for d, n in enumerate(use.loops) if d in origin.loops]
                    operand = math.prod(turns) * use.eqn.invars[k].aval.size
                    held[leaf] = max(held[leaf], operand)
    ways, axes = [], list(map(varying, params))
    for own, leaf, over, most in zip(places, params, axes, held):
        uses_of_leaf = {number: use for number, use, _ in own}
        name = "gradient" if own and leaf.size else "unused"
        made = Way(name, uses_of_leaf, held=most)
        # Where what comes out differs along more mesh axes than the parameter, its
        # gradient is a sum over devices.
        kinds = [x.manual_axis_type.varying for _, use, _ in own for x in use.outs]
        is_own = over >= frozenset().union(*kinds)
        parts = _fitted(own) if own and leaf.size and is_own else []
        ways.append(_cheapest(parts, made) if parts else made)
    return ways


# Where a parameter is used: the number of the use, the use, and the operand.
Place = tuple[int, Use, Origin]


def _fitted(places: list[Place]) -> list[Part]:
    """The uses of a parameter, with their forms. None where these do not fit together,
    or one has no factors.
    """
    found, keys, lookups = [], [], []
    for number, use, origin in places:
        form, view = form_of(use), origin.view
        if form is None or view is None:
            return []
        # The axes of the parameter that are the stack, rows and columns.
        named = [tuple(view.axes[k] for k in axes) for axes in form[:3]]
        keys.append((view.path, form.groups, *named))
        lookups += keys[-1:] if use.name in LOOKUPS else []
        found.append(Part(number, use, origin, form))
    # Rows of all lookups are rows of the table.
    first = [*lookups, *keys][0]
    # A tied table: rows of the lookup are columns of the product with the transpose.
    *begin, rows, columns = first
    turned = (*begin, columns, rows)
    if {*lookups} - {first} or {*keys} - {first, turned}:
        return []
    pairs = zip(found, keys)
    found = [part._replace(swaps=key != first) for part, key in pairs]
    # The first has the rows and columns of all.
    return sorted(found, key=attrgetter("swaps"))


def _cheapest(parts: list[Part], made: Way) -> Way:
    """The way that takes the fewest multiplications."""
    positions = 0
    for part in parts:
        turns = enumerate(part.use.loops)
        shared = [count for depth, count in turns if depth not in part.origin.loops]
        positions += part.form.sizes[0] * math.prod(shared)
    _, rows, columns = parts[0].form.sizes
    stack = made.held // (rows * columns)
    way = made._replace(parts=tuple(parts), positions=positions)
    way = way._replace(matrices=(stack, rows, columns))
    if {part.use.name for part in parts} <= {*LOOKUPS}:
        return way._replace(name="rows", held=stack * positions * columns)
    if positions == 1:
        return way._replace(name="product", held=0, cost=stack * (rows + columns))
    pairs = stack * positions**2  # of positions t and s
    is_convolution = parts[0].use.name == "conv_general_dilated"
    patches, shifts = 2 * stack * positions * is_convolution, parts[0].form.shifts
    # positions^2 (rows + columns) against positions rows columns of matrix.
    if positions * (rows + columns) <= rows * columns:
        size, cost = 2 * pairs + patches * rows, pairs * (rows + columns)
        return way._replace(name="gram", size=size, held=0, cost=cost)
    width = rows // shifts + (shifts > 1) * shifts * columns
    return way._replace(name="matrix", size=patches * width)


def form_of(use: Use) -> Form | None:
    """The form of a use, or None if its gradient is not known to have one."""
    # Complex products would need conjugates. Integers have no derivative. Of a lookup
    # the data are the numbers of the rows.
    data = [] if use.name in LOOKUPS else use.data
    dtypes = [x.dtype for x in (*data, *use.outs)]
    is_real = all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes)
    rule = FORMS.get(use.name)
    return rule(use) if rule and is_real else None


def _dot_general(use: Use) -> Form:
    contracted, stacked = use.eqn.params["dimension_numbers"]
    own = use.places[0]
    operand, data = use.eqn.invars[own].aval.shape, use.data[0].shape
    stack, rows = stacked[own], contracted[own]
    columns = [k for k in range(len(operand)) if k not in (*stack, *rows)]
    # Positions: axes of the data that are neither stacked nor summed over.
    begin, end = stacked[1 - own], contracted[1 - own]
    free = [k for k in range(len(data)) if k not in (*begin, *end)]
    sizes = _size(data, free), _size(operand, rows), _size(operand, columns)
    count = _size(operand, stack)

    def split(inputs: list[Array], cotangent: Array) -> Pair:
        a = jnp.transpose(inputs[0], (*begin, *free, *end))
        # The output has the stack first, then the rest of the left, then of the right.
        if own == 0:
            c = cotangent.reshape(count, sizes[2], sizes[0]).mT
        else:
            c = cotangent.reshape(count, sizes[0], sizes[2])
        return a.reshape(count, *sizes[:2]), c

    return Form(stack, rows, columns, sizes, split)


def _gather(use: Use) -> Form | None:
    """A lookup of whole rows. Everything else that gathers has no form here."""
    numbers = use.eqn.params["dimension_numbers"]
    shape = use.eqn.invars[0].aval.shape
    # table[index], where each slice is one row and all of its columns.
    found = use.places, numbers.collapsed_slice_dims, numbers.start_index_map
    is_row = tuple(use.eqn.params["slice_sizes"]) == (1, *shape[1:])
    is_batched = bool(numbers.operand_batching_dims)
    if {*found} != {(0,)} or is_batched or not is_row:
        return None
    out, offsets = use.outs[0], numbers.offset_dims
    free = [k for k in range(out.ndim) if k not in offsets]
    sizes = _size(out.shape, free), shape[0], math.prod(shape[1:])
    # table[index] reads the nearest row for an index beyond the table. Its derivative,
    # a scatter, still drops what does not belong to a row. Only mode="clip" keeps it.
    drops = use.eqn.params["mode"] != lax.GatherScatterMode.CLIP

    def split(inputs: list[Array], cotangent: Array) -> Pair:
        index = inputs[0].reshape(1, sizes[0])
        row = _row(index, shape[0] - 1)
        c = jnp.transpose(cotangent, (*free, *offsets))
        c = c.reshape(1, sizes[0], sizes[2])
        if drops:
            c = jnp.where((row == index)[:, :, None], c, 0)
        return row.astype(jnp.int32), c

    return Form((), (0,), range(1, len(shape)), sizes, split)


def _row(index: Array, last: int) -> Array:
    """The nearest row. In the dtype of the index, which may be too narrow for the
    number of rows, or wider than int32.
    """
    return jnp.clip(index, 0, min(last, jnp.iinfo(index.dtype).max))


def _slice_of_rows(use: Use) -> Form | None:
    """A lookup of neighbouring rows, mostly of one."""
    shape, slices = use.eqn.invars[0].aval.shape, use.eqn.params["slice_sizes"]
    if use.places != (0,) or slices[1:] != shape[1:]:
        return None
    sizes = slices[0], shape[0], math.prod(shape[1:])

    def split(inputs: list[Array], cotangent: Array) -> Pair:
        # A slice that would end beyond the table is moved, and so is its derivative.
        start = _row(inputs[0], shape[0] - slices[0]).astype(jnp.int32)
        index = start + jnp.arange(slices[0], dtype=jnp.int32)
        return index[None], cotangent.reshape(1, sizes[0], sizes[2])

    return Form((), (0,), range(1, len(shape)), sizes, split)


def _convolution(use: Use) -> Form | None:
    params = use.eqn.params
    # Only the kernel: an image that is made of parameters is no such matrix.
    if use.places != (1,) or params["batch_group_count"] != 1:
        return None
    kernel = use.eqn.invars[1].aval.shape
    groups = params["feature_group_count"]
    image, own, out = params["dimension_numbers"]
    # Positions are the pixels of the output, rows the numbers of a patch, columns the
    # output channels of a group.
    count = use.outs[0].size // kernel[own[0]]
    rows = (*own[2:], own[1])
    sizes = count, _size(kernel, rows), kernel[own[0]] // groups
    # Shifted along the first axis of its window, where that makes fewer numbers: a
    # kernel of 3 x 3 makes 3 of each pixel and 3 of each cotangent, in place of 9.
    shifts = kernel[own[2]] if params["window_strides"][:1] == (1,) else 1
    shifts = shifts if sizes[1] > shifts * sizes[2] else 1

    def split(inputs: list[Array], cotangent: Array, shifts: int = 1) -> Pair:
        # Channels stay last, where convolutions mostly have them. In another order a
        # GPU wrote a copy of all cotangents, and needed 1.9 times the memory of a plain
        # gradient.
        pixels = jnp.transpose(inputs[0], (image[0], *image[2:], image[1]))
        c = jnp.transpose(cotangent, (out[0], *out[2:], out[1]))[..., None, :]
        window = [kernel[k] for k in own[2:]]
        if shifts > 1:
            window[0], step = 1, params["rhs_dilation"][0]
            most, rest = (shifts - 1) * step, [(0, 0)] * (c.ndim - 2)
            # Padded once: XLA on a CPU takes four times as long to join padded arrays.
            padded = jnp.pad(c, [(0, 0), (most, most), *rest])
            size, starts = c.shape[1] + most, range(most, -1, -step)
            c = jnp.concatenate([padded[:, k : k + size] for k in starts], -2)

        def by_group(x: Array) -> Array:
            """[..., offsets, channels] as [groups, positions, numbers]."""
            offsets, channels = x.shape[-2:]
            x = x.reshape(-1, offsets, groups, channels // groups)
            return jnp.moveaxis(x, 2, 0).reshape(groups, len(x), -1)

        return by_group(_patches(pixels, window, params)), by_group(c)

    return Form((), rows, own[:1], sizes, split, groups, shifts)


def _patches(image: Array, window: list[int], params: Any) -> Array:
    """[images, *places, offsets in the window, channels] of [images, ..., channels]."""
    pairs = zip(params["padding"], params["lhs_dilation"])
    # lhs_dilation d puts d - 1 zeros between pixels.
    edges = [(low, high, step - 1) for (low, high), step in pairs]
    zero, unpadded = jnp.zeros((), image.dtype), (0, 0, 0)
    image = lax.pad(image, zero, [unpadded, *edges, unpadded])
    strides, found = (1, *params["window_strides"], 1), []
    dilation, size = np.array(params["rhs_dilation"]), image.shape[1:-1]
    last = np.array(size) - (np.array(window) - 1) * dilation
    for offset in np.ndindex(*window):
        # The pixel at this offset of the window, in all places at once.
        start = np.array(offset) * dilation
        stop = len(image), *(start + last), image.shape[-1]
        found.append(lax.slice(image, (0, *start, 0), stop, strides))
    return jnp.stack(found, -2)


def _size(shape: Sequence[int], axes: Sequence[int]) -> int:
    return math.prod(shape[k] for k in axes)


FORMS: dict[str, Callable[[Use], Form | None]] = {
    "dot_general": _dot_general,
    "gather": _gather,
    "dynamic_slice": _slice_of_rows,
    "conv_general_dilated": _convolution,
}


def factors_of(part: Part, captured: Captured, *, shifts: bool = False) -> Pair:
    """The factors of one use for a batch. Turns of a scan that slices the operand
    belong to the stack, and turns that share it are positions. `shifts`: whether it may
    shift cotangents.
    """
    split = part.form.split
    if shifts and part.form.shifts > 1 and not part.swaps:
        split = partial(split, shifts=part.form.shifts)
    # Under vmap over example and turns, what is split is one use outside any scan.
    for _ in range(1 + len(part.use.loops)):
        split = jax.vmap(split)
    last = 1 + len(part.use.loops)
    sliced = sorted(1 + depth for depth in part.origin.loops)
    shared = [k for k in range(1, last) if k not in sliced]
    order = 0, *sliced, last, *shared, last + 1
    middle = 2 + len(sliced)  # where positions begin

    def merged(x: Array) -> Array:
        x = jnp.transpose(x, (*order, *range(last + 2, x.ndim)))
        stack = math.prod(x.shape[1:middle])
        positions = math.prod(x.shape[middle : last + 2])
        return x.reshape(len(x), stack, positions, *x.shape[last + 2 :])

    inputs, (cotangent,) = captured
    a, c = map(merged, split(inputs, cotangent))
    return (c, a) if part.swaps else (a, c)


def found_by(way: Way, pairs: list[Pair]) -> Array:
    """The norm of the gradient of each example, from the factors of all uses, or the
    gradients, [example, stack, rows, columns]. Of lookups instead the sum of those
    cotangents that belong to one row, at the first place of it in the order of rows.
    """
    if way.name == "rows":
        a, c = joined(pairs)
        rows = jnp.sort(a)
        first = jax.vmap(jax.vmap(jnp.searchsorted))(rows, a)
        return _scattered(first, c, c.shape[1:])
    if way.name == "product":
        norm_of_each = jax.vmap(own_norm)
        # For a stack of products |G|^2 = sum_s |a_s|^2 |c_s|^2.
        a, c = (norm_of_each(x.reshape(-1, x.shape[-1])) for x in pairs[0])
        norms = (a * c).reshape(pairs[0][0].shape[:2])
        return norm_of_each(norms) if norms.shape[1] > 1 else norms[:, 0]
    total: Any = 0.0
    for a, c in pairs:
        if a.ndim == 3:
            total += _scattered(a, c, way.matrices)
        else:
            x = _dot("bstr,bstk->bsrk", a, c)
            x = x.reshape(*x.shape[:3], -1, way.matrices[2])  # shifts before columns
            total += jnp.swapaxes(x, 2, 3).reshape(len(x), *way.matrices)
    return total


def joined(pairs: list[Pair]) -> Pair:
    """The factors of several uses as those of one."""
    a, c = (jnp.concatenate(x, 2) for x in zip(*pairs))
    return a, c


def _scattered(a: Array, c: Array, shape: tuple[int, ...]) -> Array:
    stack = jnp.arange(shape[0])[:, None]
    zeros = jnp.zeros((len(a), *shape), np.promote_types(c.dtype, np.float32))
    return jax.vmap(lambda x, a, c: x.at[stack, a].add(c))(zeros, a, c)


def by_gram(pairs: list[Pair]) -> tuple[Array, Array]:
    """The norm in Gram form, and sum_t |a_t| |c_t|, which bounds the terms.
    In whatever order they are added, each addition loses at most eps / 2 of it.

    Where squares would leave the range of the dtype, the bound is the norm.
    """
    norm_of_each = jax.vmap(own_norm)
    norm_of_rows = jnp.vectorize(own_norm, signature="(n)->()")
    floats = [x.dtype for pair in pairs for x in pair if x.ndim == 4]
    wide = reduce(np.promote_types, floats, np.dtype(np.float32))
    cast = jax.tree.map(lambda x: x.astype(wide) if x.ndim == 4 else x, pairs)
    # All lookups are joined, and all others: of 32 uses there were 32 x 32 products.
    kinds = [[pair for pair in cast if pair[0].ndim == rank] for rank in (3, 4)]
    rows, columns = zip(*[joined(own) for own in kinds if own])
    c = jnp.concatenate(columns, 2)
    if c.shape[1] == 1:
        # A stack of one: with its axis XLA on a CPU would make the factors twice.
        rows, c = jax.tree.map(lambda x: x[:, 0], (rows, c))
    of_columns = norm_of_rows(c)
    # A lookup is 1 in one row.
    sizes = [jnp.ones_like(a, wide) if _is_lookup(a) else norm_of_rows(a) for a in rows]
    of_rows = jnp.concatenate(sizes, -1)
    each = jnp.where(of_rows < LARGEST, of_rows, jnp.inf) * of_columns
    # That of a stack is of all its matrices.
    terms = norm_of_each(jnp.sum(each, -1))

    products = partial(_products, dtype=wide)
    inner = jnp.block([list(map(partial(products, a), rows)) for a in rows])
    is_used = (of_rows != 0) & (of_columns != 0)
    both = is_used[..., :, None] & is_used[..., None, :]
    # Selected, since beside a cotangent of 0 the product of inputs may be inf.
    total = _sums(jnp.where(both, inner * products(c, c), 0))
    # Numbers that are flushed to 0 are less than eps / 2 of the square of the bound,
    # for up to 2^24 rows and columns, and 2^13 positions of all layers.
    info = jnp.finfo(wide)
    least = 2.0**13 * float(2 * info.tiny / info.eps) ** 0.5
    size = _sums(jnp.where(is_used, of_rows + of_columns, 0))
    is_enough = terms > least * (size + 2.0**-13 * is_used[0].size)
    fits = is_enough & (jnp.maximum(terms, size) < float(info.max) ** 0.5)
    # The derivative of sqrt(0) would be NaN.
    is_long, is_zero = fits & (total > 0), fits & (total <= 0)
    norm = jnp.sqrt(jnp.where(is_long, total, 1))
    return jnp.where(is_long, norm, jnp.where(is_zero, 0, terms)), terms


def _sums(x: Array) -> Array:
    """Of each example, over all other axes."""
    return jnp.sum(x, range(1, x.ndim))


def _is_lookup(a: Array) -> bool:
    return jnp.issubdtype(a.dtype, jnp.integer)


def _products(a: Array, b: Array, dtype: Any) -> Array:
    """The products a_t . b_s of rows, some of which may be those of lookups."""
    if _is_lookup(a) and _is_lookup(b):
        # 1 where both look up the same row, and else 0.
        same = a[..., :, None] == b[..., None, :]
        return same.astype(dtype)
    if _is_lookup(a):
        return jnp.swapaxes(_products(b, a, dtype), -1, -2)
    if _is_lookup(b):
        # For a lookup of row r the product with a_t is the entry a_t[r].
        index = jnp.broadcast_to(b[..., None, :], (*a.shape[:-1], b.shape[-1]))
        return jnp.take_along_axis(a, index, axis=-1)
    return _dot("...tn,...un->...tu", a, b)


def _dot(axes: str, x: Array, y: Array) -> Array:
    """A product in float32. GPU and TPU would else round its factors to fewer bits."""
    wide = np.promote_types(x.dtype, np.float32)
    return jnp.einsum(axes, x.astype(wide), y.astype(wide), precision=HIGHEST)
