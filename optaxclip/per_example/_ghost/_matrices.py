"""A parameter as a stack of matrices, at each site that takes it."""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ._capture import Captured
from ._forms import LOOKUPS, Form, OuterProducts, form_of
from ._sites import Origin, Site


class Operand(NamedTuple):
    """A value made of a parameter, where a site takes it."""

    site: Site
    origin: Origin


class Layout(NamedTuple):
    """How a parameter is read as matrices. The gradients of sites with one layout can
    be added up.
    """

    path: tuple[Any, ...]  # of its view
    groups: int
    # The axes of the parameter that are the stack, rows and columns
    stack: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    def transposed(self) -> "Layout":
        return self._replace(rows=self.columns, columns=self.rows)


class Matrix(NamedTuple):
    """A parameter as a stack of matrices, where one site takes it."""

    site: Site
    origin: Origin  # of the operand that is the parameter
    form: Form
    layout: Layout
    # Whether its rows are the columns of the first site, as those of a tied table.
    is_transposed: bool = False

    def value(self, values: dict[Any, Any]) -> Array:
        """The operand as [stack, rows, columns], from parameters by their numbers.
        Turns of scans that slice it belong to the stack.
        """
        operand = self.origin.value(values)
        form = self.form
        axes = np.array([*form.stack, *form.rows, *form.columns], int)
        turns = operand.ndim - len(axes)
        rows, columns = form.matrix_shape(operand.shape[turns:])
        x = jnp.transpose(operand, (*range(turns), *(turns + axes)))
        x = jnp.swapaxes(x.reshape(-1, rows, form.groups, columns), 1, 2)
        return x.reshape(-1, rows, columns)

    def positions(self) -> int:
        """The positions in all turns of scans that share the matrix."""
        positions = self.form.positions
        for depth, length in enumerate(self.site.scan_lengths):
            if depth not in self.origin.slicing_scans:
                positions *= length
        return positions

    def outer_products(
        self, captured: Captured, *, can_shift: bool = False
    ) -> OuterProducts:
        """The outer products for a batch. Turns of a scan that slices the operand
        belong to the stack, and turns that share it are positions. With `can_shift`
        cotangents may be shifted instead of pixels.
        """
        split = self.form.outer_products
        if can_shift and self.form.shifts > 1 and not self.is_transposed:
            split = partial(split, shifts=self.form.shifts)
        scans = len(self.site.scan_lengths)
        # Under vmap over example and turns, it is one site outside any scan.
        for _ in range(1 + scans):
            split = jax.vmap(split)
        # [example, *turns, stack, position, ...] -> [example, *sliced turns, stack,
        # *shared turns, position, ...]
        sliced_axes = sorted(1 + depth for depth in self.origin.slicing_scans)
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
        return OuterProducts(c, a) if self.is_transposed else OuterProducts(a, c)


def matrices_at(operands: list[Operand]) -> list[Matrix]:
    """The operands of a parameter as matrices. Empty where one of them is none, or
    their layouts do not fit together.
    """
    matrices = []
    for site, origin in operands:
        form = form_of(site)
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
        matrices.append(Matrix(site, origin, form, layout))
    # Lookups come first: their rows are the rows of the table.
    matrices.sort(key=lambda matrix: matrix.site.name not in LOOKUPS)
    straight = matrices[0].layout
    straight_matrices = []
    transposed_matrices = []
    for matrix in matrices:
        if matrix.layout == straight:
            straight_matrices.append(matrix)
        elif matrix.layout == straight.transposed() and matrix.site.name not in LOOKUPS:
            # A tied table: the columns of its product are the rows of its lookup.
            transposed_matrices.append(matrix._replace(is_transposed=True))
        else:
            return []
    return straight_matrices + transposed_matrices
