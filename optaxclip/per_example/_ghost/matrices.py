"""A parameter as a stack of matrices, at each site that takes it.

Iterations of a scan that slices the parameter belong to the stack. Iterations that
share it are positions, and so are several sites of one parameter.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ..._jaxpr import type_of
from .capture import Captured
from .forms import LOOKUPS, Form, OuterProducts, form_of, size_along
from .sites import Site
from .values import Origin, WideValues

# Axes of the outer products of one example
STACK_AXIS = 0
POSITION_AXIS = 1


class Operand(NamedTuple):
    """A value made of a parameter, where a site takes it."""

    site: Site
    input_index: int  # among the inputs of the site

    @property
    def origin(self) -> Origin:
        return self.site.operands[self.input_index]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape in one iteration of the scans around the site."""
        return type_of(self.site.eqn.invars[self.input_index]).shape

    @property
    def size(self) -> int:
        """How many numbers it has in all iterations of the scans that slice it."""
        size = math.prod(self.shape)
        for scan_depth in self.origin.slicing_scans:
            size *= self.site.scan_lengths[scan_depth]
        return size


class Layout(NamedTuple):
    """How a parameter is read as matrices. The gradients of sites with one layout can
    be added up.
    """

    reshapes: tuple[Any, ...]  # from the parameter to the operand, as in `View`
    feature_groups: int  # of a convolution
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

    operand: Operand
    form: Form
    layout: Layout
    # Whether its rows are the columns of the first site, as in a tied table.
    is_transposed: bool = False

    @property
    def site(self) -> Site:
        return self.operand.site

    @property
    def is_lookup(self) -> bool:
        return self.site.name in LOOKUPS

    @property
    def is_convolution(self) -> bool:
        return self.site.name == "conv_general_dilated"

    @property
    def shape(self) -> MatrixShape:
        """Its shape as `form` reads it, also if `is_transposed`."""
        form = self.form
        rows = size_along(self.operand.shape, form.rows)
        columns = size_along(self.operand.shape, form.columns) // form.feature_groups
        return MatrixShape(self.operand.size // (rows * columns), rows, columns)

    @property
    def positions(self) -> int:
        """The positions in all iterations of scans that share the matrix."""
        positions = self.form.positions
        for scan_depth, length in enumerate(self.site.scan_lengths):
            if scan_depth not in self.operand.origin.slicing_scans:
                positions *= length
        return positions

    @property
    def precision(self) -> Any:
        """The precision that the loss asks for, for `lax.dot_general`."""
        precision = self.site.eqn.params.get("precision")
        # A DotAlgorithm is ignored: it would also say in which dtype to add up.
        if isinstance(precision, (tuple, lax.Precision)):
            return precision
        return None

    @property
    def dtypes(self) -> list[np.dtype]:
        """The dtypes of the operand and of the values between it and the parameter."""
        dtypes = []
        computation = self.operand.origin.computation
        # Each computation of a view has one input.
        while computation:
            dtypes.append(type_of(computation.eqn.outvars[0]).dtype)
            computation = computation.in_origins[0].computation
        return dtypes

    def value(self, values: WideValues) -> Array:
        """The operand as [stack, rows, columns]."""
        form = self.form
        _, rows, columns = self.shape

        def matrices_of(operand: Array) -> Array:
            order = (*form.stack, *form.rows, *form.columns)
            x = jnp.transpose(operand, order)
            x = x.reshape(-1, rows, form.feature_groups, columns)
            # Each feature group is a matrix of the stack.
            x = jnp.swapaxes(x, 1, 2)
            return x.reshape(-1, rows, columns)

        origin = self.operand.origin
        for _ in origin.slicing_scans:
            matrices_of = _with_iterations_along(STACK_AXIS, matrices_of)
        return matrices_of(values.value(origin))

    def outer_products(self, captured: Captured) -> OuterProducts:
        """The outer products for a batch."""
        of_example = self.form.outer_products
        # The innermost scan first, so that iterations of the outermost are in front.
        for scan_depth in reversed(range(len(self.site.scan_lengths))):
            axis = POSITION_AXIS
            if scan_depth in self.operand.origin.slicing_scans:
                axis = STACK_AXIS
            of_example = _with_iterations_along(axis, of_example)
        (cotangent,) = captured.cotangents
        a, c = jax.vmap(of_example)(captured.inputs, cotangent)
        if self.is_transposed:
            return OuterProducts(c, a)
        return OuterProducts(a, c)


def _with_iterations_along(
    axis: int, function: Callable[..., Any]
) -> Callable[..., Any]:
    """The function for all iterations of a scan, from a function for one iteration. An
    axis of the results gets longer: it has the entries of all iterations, one iteration
    after the other.
    """
    of_all_iterations = jax.vmap(function, out_axes=axis)

    def joined(x: Array) -> Array:
        return lax.collapse(x, axis, axis + 2)

    return lambda *arrays: jax.tree.map(joined, of_all_iterations(*arrays))


def _matrix_at(operand: Operand) -> Matrix | None:
    """The operand as a matrix, if it is one."""
    form = form_of(operand.site)
    view = operand.origin.view
    if form is None or view is None:
        return None
    layout = Layout(
        view.reshapes,
        form.feature_groups,
        stack=tuple(view.axes[axis] for axis in form.stack),
        rows=tuple(view.axes[axis] for axis in form.rows),
        columns=tuple(view.axes[axis] for axis in form.columns),
    )
    return Matrix(operand, form, layout)


def matrices_at(operands: list[Operand]) -> list[Matrix]:
    """The operands of a parameter as matrices, lookups first. Empty where an operand is
    not a matrix, or where the layouts do not fit together.
    """
    matrices = []
    for operand in operands:
        matrix = _matrix_at(operand)
        if matrix is None:
            return []
        matrices.append(matrix)
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
