"""How the norm of each parameter's gradient is found.

    product    |a| |c|: one position, one matrix
    gram       sqrt(sum_ts (a_t . a_s)(c_t . c_s)): few positions, a large matrix
    matrix     |sum_t a_t c_t'|: many positions. The gradient of an example is made
    gradient   the same by JAX's own derivative, for uses that have no such factors
    unused     0

A parameter with several uses is right in each way: factors of several uses are added
as positions of one, and gradients are added before the norm is taken.
"""

import math
from typing import Any, NamedTuple

from ._factors import Form, form_of
from ._trace import Origin, Use


class Part(NamedTuple):
    """One use of one parameter."""

    use: int  # its number
    operand: int  # which of the operands of the use
    swaps: bool = False  # whether its rows are the columns of the first part


class Way(NamedTuple):
    """How the norm of the gradient by one parameter is found."""

    name: str
    parts: list[Part]
    size: int = 0  # how many numbers are made of one example
    # about how many multiplications it takes that one pass does not
    cost: int = 0


def ways_of(uses: list[Use], shapes: list[tuple[int, ...]]) -> list[Way]:
    """The way of each parameter."""
    parts: list[list[Part]] = [[] for _ in shapes]
    for number, use in enumerate(uses):
        for operand, origin in enumerate(use.origins):
            for leaf in origin.leaves if use.tapped else ():
                parts[leaf].append(Part(number, operand))
    return [_way(uses, found, math.prod(shape)) for found, shape in zip(parts, shapes)]


def _way(uses: list[Use], parts: list[Part], size: int) -> Way:
    if not parts or not size:
        return Way("unused", [])
    forms = [form_of(uses[part.use]) for part in parts]
    origins = [uses[part.use].origins[part.operand] for part in parts]
    swaps = _swaps(forms, origins)
    if swaps is None:
        costs = [_cost(uses[part.use], form) for part, form in zip(parts, forms)]
        return Way("gradient", parts, size, sum(costs) + size)
    parts = [part._replace(swaps=swap) for part, swap in zip(parts, swaps)]
    positions, lookups = _positions(uses, parts, forms)
    return _cheapest(parts, size, positions, lookups, forms[0])


def _cost(use: Use, form: Form | None) -> int:
    """About how many multiplications the gradient by an operand takes."""
    turns = math.prod(use.loops)
    if form and not form.is_lookup:
        return turns * math.prod(form.sizes)
    return turns * sum(x.size for x in (*use.data, *use.outs))


def _swaps(forms: list[Form | None], origins: list[Origin]) -> list[bool] | None:
    """For each part, whether its factors change places to fit those of the first. None
    where they do not fit, or a part has none.
    """
    keys = []
    for form, origin in zip(forms, origins):
        if form is None or origin.view is None:
            return None
        keys.append(_axes_of(form, origin))
    if len(forms) == 1:
        return [False]
    if None in keys:
        return None
    shape, stack, rows, columns = keys[0]
    allowed = [(shape, stack, rows, columns), (shape, stack, columns, rows)]
    if not all(key in allowed for key in keys):
        return None
    return [key != keys[0] for key in keys]


def _axes_of(form: Form, origin: Origin) -> Any:
    """Which axes of the parameter are the stack, rows and columns of a form. None where
    that is not known.
    """
    view = origin.view
    scanned = [axis for axis, _ in view.scanned]
    if not form.aligns or view.axes is None or -1 in scanned:
        return None

    def named(axes: tuple[int, ...]) -> tuple[int, ...]:
        found = [view.axes[k] for k in axes]
        return tuple(sorted(axis for axis in found if axis is not None))

    stack = (*scanned, *named(form.stack))
    return view.shape, stack, named(form.rows), named(form.columns)


def _cheapest(
    parts: list[Part], size: int, positions: int, lookups: int, form: Form
) -> Way:
    """The way that takes the fewest multiplications."""
    _, rows, columns = form.sizes
    stack = size // (rows * columns)
    pairs = stack * positions**2
    # JAX's own gradients of examples by a convolution take more than their factors.
    saved = form.is_convolution
    made = Way("matrix", parts, size, 0 if saved else positions * size)
    if lookups:
        made = Way("gradient", parts, size, size + positions * columns)
    if positions == 1 and not lookups:
        return Way("product", parts, 1, stack * (rows + columns))
    if lookups == positions:
        gram = Way("gram", parts, 2 * pairs, pairs * columns)
        # A scatter into a table is slow: as slow as writing four times as much.
        return gram if positions**2 <= 4 * rows else made
    gram = Way("gram", parts, 2 * pairs, pairs * (rows + columns))
    return gram if positions * (rows + columns) <= rows * columns else made


def _positions(
    uses: list[Use], parts: list[Part], forms: list[Form]
) -> tuple[int, int]:
    """How many positions all parts have together, and how many of them are lookups."""
    positions, lookups = 0, 0
    for part, form in zip(parts, forms):
        count = form.sizes[0] * math.prod(shared_loops(uses[part.use], part.operand))
        positions += count
        lookups += count if form.is_lookup else 0
    return positions, lookups


def shared_loops(use: Use, operand: int) -> list[int]:
    """The lengths of the scans in each turn of which the same operand is used."""
    sliced = use.origins[operand].loops
    return [length for depth, length in enumerate(use.loops) if depth not in sliced]
