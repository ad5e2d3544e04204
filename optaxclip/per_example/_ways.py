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
    # What one example's gradient by it takes in memory beside activations, in numbers.
    size: int = 0


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
        return Way("gradient", parts, size)
    parts = [part._replace(swaps=swap) for part, swap in zip(parts, swaps)]
    name, positions = _cheapest(uses, parts, forms)
    taken = {"product": 1, "gram": 2 * positions**2}.get(name, size)
    return Way(name, parts, taken)


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


def _cheapest(uses: list[Use], parts: list[Part], forms: list[Form]) -> tuple[str, int]:
    """The way that takes the fewest multiplications, and the number of positions."""
    positions, lookups = 0, 0
    for part, form in zip(parts, forms):
        count = form.sizes[0] * math.prod(shared_loops(uses[part.use], part.operand))
        positions += count
        lookups += count if form.is_lookup else 0
    _, rows, columns = forms[0].sizes
    if lookups == positions:
        # Here a scatter into the table is the alternative.
        return ("gram" if positions**2 <= 4 * rows else "gradient"), positions
    if positions == 1:
        return "product", 1
    if positions * (rows + columns) <= rows * columns:
        return "gram", positions
    return ("gradient" if lookups else "matrix"), positions


def shared_loops(use: Use, operand: int) -> list[int]:
    """The lengths of the scans in each turn of which the same operand is used."""
    sliced = use.origins[operand].loops
    return [length for depth, length in enumerate(use.loops) if depth not in sliced]
