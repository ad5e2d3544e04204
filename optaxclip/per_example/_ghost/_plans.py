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
from typing import NamedTuple

from jax import Array

from ..._mesh_types import varying
from ._capture import CapturedOfSites
from ._forms import FORMS, LOOKUPS, OuterProducts
from ._matrices import Matrix, Operand, matrices_at
from ._sites import Site


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
            for depth in origin.slicing_scans:
                operand_size *= site.scan_lengths[depth]
            for leaf in origin.params:
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
    matrices = matrices_at(operands)
    return _cheapest_plan(matrices, by_gradient) if matrices else by_gradient


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
