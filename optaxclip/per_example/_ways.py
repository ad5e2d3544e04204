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
from ._uses import Origin, Use
from ._views import View


class Part(NamedTuple):
    """One use of one parameter."""

    use: int  # its number
    operand: int  # which of the operands of the use


class Fit(NamedTuple):
    """How one use of a parameter fits to the others."""

    form: Form
    swaps: bool  # whether its rows are the columns of others


class Way(NamedTuple):
    """How the norm of the gradient by one parameter is found."""

    name: str
    parts: list[Part]
    fits: list[Fit]  # for each part, where norms come from factors
    size: int = 0  # how many numbers are made of one example
    # about how many multiplications it takes that one pass does not
    cost: int = 0


def ways_of(uses: list[Use], shapes: list[tuple[int, ...]]) -> list[Way]:
    """The way of each parameter."""
    parts: list[list[Part]] = [[] for _ in shapes]
    for number, use in enumerate(uses):
        for operand, origin in enumerate(use.origins):
            for leaf in origin.by if _has_derivative(use) else ():
                parts[leaf].append(Part(number, operand))
    return [
        _way(uses, found, math.prod(shape))
        for found, shape in zip(parts, shapes)
    ]


def _has_derivative(use: Use) -> bool:
    # A comparison has none, and so no part in a gradient. Nor has what is empty, such
    # as the positions before the last of a sequence of one.
    sizes = [use.outs[k].size for k in use.tapped]
    return math.prod(use.loops) * sum(sizes) > 0


def _way(uses: list[Use], parts: list[Part], size: int) -> Way:
    if not parts or not size:
        return Way("unused", [], [])
    forms = [form_of(uses[part.use]) for part in parts]
    origins = [uses[part.use].origins[part.operand] for part in parts]
    fits = _fits(forms, origins)
    if not fits:
        costs = [
            _cost(uses[part.use], form) for part, form in zip(parts, forms)
        ]
        return Way("gradient", parts, [], size, sum(costs) + size)
    positions, lookups = _positions(uses, parts, fits)
    return _cheapest(Way("", parts, fits, size), positions, lookups)


def _cost(use: Use, form: Form | None) -> int:
    """About how many multiplications the gradient by an operand takes."""
    turns = math.prod(use.loops)
    if form and not form.is_lookup:
        return turns * math.prod(form.sizes)
    return turns * sum(x.size for x in (*use.data, *use.outs))


def _fits(forms: list[Form | None], origins: list[Origin]) -> list[Fit]:
    """How uses fit together. None where they do not, or one has no factors."""
    known, keys = [], []
    for form, origin in zip(forms, origins):
        if form is None or origin.view is None:
            return []
        known.append(form)
        keys.append(_axes_of(form, origin.view))
    if len(known) == 1:
        return [Fit(known[0], swaps=False)]
    lookups = [key for form, key in zip(known, keys) if form.is_lookup]
    first = [*lookups, *keys][0]
    # Rows of all lookups are rows of the table.
    if first is None or any(key != first for key in lookups):
        return []
    # A tied table: rows of the lookup are columns of the product with the transpose.
    shape, stack, rows, columns = first
    allowed = [first, (shape, stack, columns, rows)]
    if any(key not in allowed for key in keys):
        return []
    return [Fit(form, key != first) for form, key in zip(known, keys)]


def _axes_of(form: Form, view: View) -> Any:
    """Which axes of the parameter are the stack, rows and columns of a form. None where
    that is not known.
    """
    scanned = [axis for axis, _ in view.scanned]
    if not form.aligns or view.axes is None or -1 in scanned:
        return None
    axes = view.axes

    def named(chosen: tuple[int, ...]) -> tuple[int, ...]:
        found = [axes[k] for k in chosen]
        return tuple(sorted(axis for axis in found if axis is not None))

    stack = (*scanned, *named(form.stack))
    return view.shape, stack, named(form.rows), named(form.columns)


def _cheapest(way: Way, positions: int, lookups: int) -> Way:
    """The way that takes the fewest multiplications."""
    form, size = way.fits[0].form, way.size
    _, rows, columns = form.sizes
    stack = size // (rows * columns)
    pairs = stack * positions**2  # of positions t and s
    # JAX's own gradients of examples by a convolution take more than their factors.
    cost = 0 if form.is_convolution else positions * size
    patches = 2 * stack * positions * rows if form.is_convolution else 0
    made = way._replace(name="matrix", size=size + patches, cost=cost)
    if lookups:
        made = way._replace(name="gradient", cost=size + positions * columns)
    if positions == 1 and not lookups:
        return way._replace(
            name="product", size=1, cost=stack * (rows + columns)
        )
    if lookups == positions:
        cost, is_cheap = pairs * columns, positions**2 <= 4 * rows
        # A scatter into a table is slow: as slow as writing four times as much.
        return _gram(way, pairs, cost) if is_cheap else made
    # positions^2 (rows + columns) of gram, against positions rows columns of matrix.
    is_cheap = positions * (rows + columns) <= rows * columns
    gram = _gram(way, pairs, pairs * (rows + columns))
    return gram._replace(size=gram.size + patches) if is_cheap else made


def _gram(way: Way, pairs: int, cost: int) -> Way:
    return way._replace(name="gram", size=2 * pairs, cost=cost)


def _positions(
    uses: list[Use], parts: list[Part], fits: list[Fit]
) -> tuple[int, int]:
    """How many positions all parts have together, and how many of them are lookups."""
    positions, lookups = 0, 0
    for part, fit in zip(parts, fits):
        turns = math.prod(shared_loops(uses[part.use], part.operand))
        positions += fit.form.sizes[0] * turns
        lookups += fit.form.sizes[0] * turns if fit.form.is_lookup else 0
    return positions, lookups


def shared_loops(use: Use, operand: int) -> list[int]:
    """The lengths of the scans in each turn of which the same operand is used."""
    sliced = use.origins[operand].loops
    return [
        length for depth, length in enumerate(use.loops) if depth not in sliced
    ]
