"""How the norm of an example's gradient by each parameter is computed.

    product    |a| |c|: one position
    rows       |c|, after those of one row are added up: lookups
    gram       sqrt(sum_ts (a_t . a_s)(c_t . c_s)): few positions, a large matrix
    matrix     |sum_t a_t c_t'|: many positions. The gradient of an example is made
    gradient   the same by JAX's own derivative, where there are no outer products
    unused     0

Turns of a scan that share a matrix are positions too. The positions of several sites of
a parameter are those of one.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..._mesh_types import varying
from ._capture import Captured, CapturedOfSites, Origin, Site
from ._forms import FORMS, LOOKUPS, Form, OuterProducts, form_of


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
        operand = self.origin.make(values)
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
            if depth not in self.origin.scans:
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
        sliced_axes = sorted(1 + depth for depth in self.origin.scans)
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


class LeafPlan(NamedTuple):
    """How the norm of the gradient by one parameter is computed."""

    norm_by: str  # a word of the table above
    sites: list[Site]
    # How many numbers of one example are kept until the sum over examples
    kept_size: int
    temporaries: int = 0  # how many numbers are made of one example, and dropped
    # About how many multiplications it takes that a plain gradient does not.
    extra_work: int = 0
    matrices: tuple[Matrix, ...] = ()  # where there are outer products
    matrix_shape: tuple[int, ...] = ()  # stack, rows and columns
    positions: int = 1
    # Whether what one example adds is proved, as of a sum. That takes longer.
    is_bounded: bool = False

    def captured_of(self, captured: CapturedOfSites) -> CapturedOfSites:
        """What was captured at its sites."""
        return {site.number: captured[site.number] for site in self.sites}

    def outer_products(
        self, captured: CapturedOfSites, *, can_shift: bool = False
    ) -> list[OuterProducts]:
        """For each matrix the outer products of a batch."""
        products = []
        for matrix in self.matrices:
            data = captured[matrix.site.number]
            products.append(matrix.outer_products(data, can_shift=can_shift))
        return products


def plans_of(
    sites: list[Site], params: list[Array], *, is_bounded: bool
) -> list[LeafPlan]:
    """The plan of each parameter."""
    operands_of_leaves: list[list[Operand]] = [[] for _ in params]
    # How many numbers the gradient of an example has for each parameter
    gradient_sizes = [leaf.size for leaf in params]
    for site in sites:
        # An empty site, such as the positions before the last of a sequence of one, has
        # no part in a gradient.
        size = sum(site.out_types[index].size for index in site.tapped)
        if not math.prod(site.scan_lengths) * size:
            continue
        for place, origin in site.operands.items():
            operand_size = site.eqn.invars[place].aval.size if site.eqn else 0
            for depth in origin.scans:
                operand_size *= site.scan_lengths[depth]
            for leaf in origin.leaves:
                operands_of_leaves[leaf].append(Operand(site, origin))
                # The gradient by an operand, such as w + a @ b, gives that by each
                # parameter that it is made of.
                if site.name in FORMS:
                    gradient_sizes[leaf] = max(gradient_sizes[leaf], operand_size)
    plans = []
    for leaf, operands, size in zip(params, operands_of_leaves, gradient_sizes):
        plan = _plan_of(leaf, operands, size)
        plans.append(plan._replace(is_bounded=is_bounded))
    return plans


def _plan_of(leaf: Array, operands: list[Operand], gradient_size: int) -> LeafPlan:
    """The plan of one parameter, from all operands that are made of it."""
    # Several operands of one site are one entry.
    sites_by_number = {operand.site.number: operand.site for operand in operands}
    sites = list(sites_by_number.values())
    if not sites or not leaf.size:
        return LeafPlan("unused", sites, kept_size=0)
    by_gradient = LeafPlan("gradient", sites, gradient_size)
    # Where outputs differ along more mesh axes than the parameter, its gradient is a
    # sum over devices.
    axes_of_leaf = varying(leaf)
    for site in sites:
        for out_type in site.out_types:
            if not out_type.manual_axis_type.varying <= axes_of_leaf:
                return by_gradient
    matrices = _matrices_of(operands)
    return _cheapest_plan(matrices, by_gradient) if matrices else by_gradient


def _matrices_of(operands: list[Operand]) -> list[Matrix]:
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


def _cheapest_plan(matrices: list[Matrix], by_gradient: LeafPlan) -> LeafPlan:
    """The plan that takes the fewest multiplications."""
    positions = sum(matrix.positions() for matrix in matrices)
    first, *_ = matrices
    (place,) = first.site.operands
    rows, columns = first.form.matrix_shape(first.site.eqn.invars[place].aval.shape)
    stack = by_gradient.kept_size // (rows * columns)
    plan = by_gradient._replace(
        matrices=tuple(matrices),
        matrix_shape=(stack, rows, columns),
        positions=positions,
    )
    if all(matrix.site.name in LOOKUPS for matrix in matrices):
        return plan._replace(norm_by="rows", kept_size=stack * positions * columns)
    if positions == 1:
        work = stack * (rows + columns)
        return plan._replace(norm_by="product", kept_size=0, extra_work=work)
    is_convolution = first.site.name == "conv_general_dilated"
    patches = 2 * stack * positions if is_convolution else 0
    # positions^2 (rows + columns) against positions rows columns of matrix.
    if positions * (rows + columns) <= rows * columns:
        position_pairs = stack * positions**2
        return plan._replace(
            norm_by="gram",
            temporaries=2 * position_pairs + patches * rows,
            kept_size=0,
            extra_work=position_pairs * (rows + columns),
        )
    shifts = first.form.shifts
    numbers_of_patch = rows // shifts
    if shifts > 1:
        numbers_of_patch += shifts * columns
    return plan._replace(norm_by="matrix", temporaries=patches * numbers_of_patch)
