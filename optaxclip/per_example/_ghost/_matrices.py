"""A parameter as a stack of matrices, at each site that takes it.

Turns of a scan that slices the parameter belong to the stack. Turns that share it are
positions, and so are several sites of one parameter.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ..._jaxpr import type_of
from ._capture import Captured
from ._forms import LOOKUPS, Form, OuterProducts, form_of, size_along
from ._sites import Origin, Site, Values

# Of the outer products of one example
STACK_AXIS = 0
POSITION_AXIS = 1


class Operand(NamedTuple):
    """A value made of a parameter, where a site takes it."""

    site: Site
    origin: Origin


class Layout(NamedTuple):
    """How a parameter is read as matrices. The gradients of sites with one layout can
    be added up.
    """

    path: tuple[Any, ...]  # of its view
    feature_groups: int
    # The axes of the parameter that are the stack, rows and columns
    stack: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    def transposed(self) -> "Layout":
        return self._replace(rows=self.columns, columns=self.rows)


class MatrixShape(NamedTuple):
    """The shape of a stack of matrices."""

    stack: int
    rows: int
    columns: int


class Matrix(NamedTuple):
    """A parameter as a stack of matrices, where one site takes it."""

    site: Site
    origin: Origin  # of the operand that is the parameter
    form: Form
    layout: Layout
    # Whether its rows are the columns of the first site, as in a tied table.
    is_transposed: bool = False

    @property
    def is_lookup(self) -> bool:
        return self.site.name in LOOKUPS

    @property
    def is_convolution(self) -> bool:
        return self.site.name == "conv_general_dilated"

    @property
    def rows_and_columns(self) -> tuple[int, int]:
        (place,) = self.site.operands
        shape = self.site.eqn.invars[place].aval.shape
        columns = size_along(shape, self.form.columns) // self.form.feature_groups
        return size_along(shape, self.form.rows), columns

    @property
    def positions(self) -> int:
        """The positions in all turns of scans that share the matrix."""
        positions = self.form.positions
        for scan_depth, length in enumerate(self.site.scan_lengths):
            if scan_depth not in self.origin.slicing_scans:
                positions *= length
        return positions

    @property
    def precision(self) -> Any:
        """The precision that the loss asks for, for `lax.dot_general`."""
        precision = self.site.eqn.params.get("precision")
        # Not an algorithm, which would also say in which dtype to add up.
        if isinstance(precision, (tuple, lax.Precision)):
            return precision
        return None

    @property
    def dtypes(self) -> list[np.dtype]:
        """The dtypes of the operand and of the values between it and the parameter."""
        dtypes = []
        computation = self.origin.computation
        # A view is made of one value, and that of another.
        while computation:
            dtypes.append(type_of(computation.eqn.outvars[0]).dtype)
            computation = computation.in_origins[0].computation
        return dtypes

    def value(self, values: Values) -> Array:
        """The operand as [stack, rows, columns]."""
        form = self.form
        rows, columns = self.rows_and_columns

        def matrices_of(operand: Array) -> Array:
            order = (*form.stack, *form.rows, *form.columns)
            x = jnp.transpose(operand, order)
            x = x.reshape(-1, rows, form.feature_groups, columns)
            return jnp.swapaxes(x, 1, 2).reshape(-1, rows, columns)

        for _ in self.origin.slicing_scans:
            matrices_of = _in_turns(matrices_of, STACK_AXIS)
        return matrices_of(values.value(self.origin))

    def outer_products(self, captured: Captured, *, can_shift: bool) -> OuterProducts:
        """The outer products for a batch. With `can_shift` cotangents may be shifted
        instead of pixels.
        """
        make = self.form.outer_products
        if can_shift and self.form.shifts > 1 and not self.is_transposed:
            make = partial(make, shifts=self.form.shifts)
        # The innermost scan first, so that turns of the outermost are in front.
        for scan_depth in reversed(range(len(self.site.scan_lengths))):
            is_sliced = scan_depth in self.origin.slicing_scans
            make = _in_turns(make, STACK_AXIS if is_sliced else POSITION_AXIS)
        (cotangent,) = captured.cotangents
        a, c = jax.vmap(make)(captured.inputs, cotangent)
        if self.is_transposed:
            return OuterProducts(c, a)
        return OuterProducts(a, c)


def _in_turns(function: Callable[..., Any], axis: int) -> Callable[..., Any]:
    """A function of arrays from all turns of a scan. The turns belong to an axis of its
    results, where they come before the entries of one turn.
    """
    of_all_turns = jax.vmap(function, out_axes=axis)

    def joined(x: Array) -> Array:
        return lax.collapse(x, axis, axis + 2)

    return lambda *arrays: jax.tree.map(joined, of_all_turns(*arrays))


def matrices_at(operands: list[Operand]) -> list[Matrix]:
    """The operands of a parameter as matrices, lookups first. Empty where an operand is
    no matrix, or where the layouts do not fit together.
    """
    matrices = []
    for site, origin in operands:
        form = form_of(site)
        view = origin.view
        if form is None or view is None:
            return []
        layout = Layout(
            view.path,
            form.feature_groups,
            stack=tuple(view.axes[axis] for axis in form.stack),
            rows=tuple(view.axes[axis] for axis in form.rows),
            columns=tuple(view.axes[axis] for axis in form.columns),
        )
        matrices.append(Matrix(site, origin, form, layout))
    # Lookups decide which axes are rows: their rows are the rows of the table.
    matrices.sort(key=lambda matrix: not matrix.is_lookup)
    first_layout = matrices[0].layout
    same_layout = []
    transposed_layout = []
    for matrix in matrices:
        if matrix.layout == first_layout:
            same_layout.append(matrix)
        elif matrix.layout == first_layout.transposed() and not matrix.is_lookup:
            # A tied table: the columns of its product are the rows of its lookup.
            transposed_layout.append(matrix._replace(is_transposed=True))
        else:
            return []
    return same_layout + transposed_layout
