"""Plans: how the norm of an example's gradient G by each parameter is computed, and the
weighted sum over examples. At position t, a_t is the input of the parameter's equation
and c_t the cotangent of its output: G = sum_t a_t c_t'. f is the factor of the example.
`norm_by` of a plan is one of:

    product    |a| |c|: one position
    rows       |c|, after the cotangents of each row are added up: lookups
    gram       sqrt(sum_ts (a_t . a_s)(c_t . c_s)): few positions, a large matrix
    matrix     |sum_t a_t c_t'|: many positions. The gradient of an example is made
    gradient   the same by JAX's own derivative, where there are no outer products
    unused     0

Each has a class with what it costs, the source of its norms, and its weighted sum. Of
`gradient` and `unused`, `GhostClipping` makes the sources. `plans_of`, at the end,
chooses the plan of each parameter. A plan that keeps gradients adds them up
(`LeafPlan.weighted_sum`). The others add up outer products, a_t (f c_t)', of many
examples at once (`SummedPlan.weighted_sum`).
"""

import math
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..._devices.mesh_types import varying, varying_as_any_of
from .. import _passes as passes
from .._example_factors import GroupFactors, NormSource
from .capture import CapturedOfSites, at_sites
from .forms import FORMS, OuterProducts
from .matrices import Matrix, MatrixShape, Operand, matrices_at
from .norms import (
    HIGHEST,
    gradients_of,
    joined,
    norms_by_gram,
    norms_of_products,
    sums_of_rows,
)
from .sites import Site
from .weighted_sums import terms_of_sum


@dataclass(frozen=True)
class LeafPlan:
    """How the norm of the gradient by one parameter is computed."""

    norm_by: ClassVar[str]

    sites: list[Site]

    @property
    def kept_size(self) -> int:
        """How many numbers of one example are kept until the sum over examples."""
        return 0

    @property
    def extra_work(self) -> int:
        """About how many multiplications it takes that a plain gradient does not."""
        return 0

    def weighted_sum(
        self, captured: CapturedOfSites, stand_ins: Array, factors: GroupFactors
    ) -> Array:
        """The sum of f G over examples, in float32 or wider.

        Args:
          captured: the arrays of all sites.
          stand_ins: of the source of the norms. Here they are the gradients.
          factors: f, and which examples count.
        """
        return factors.weighted_sum(stand_ins)


@dataclass(frozen=True)
class UnusedPlan(LeafPlan):
    """G = 0."""

    norm_by = "unused"


@dataclass(frozen=True)
class GradientPlan(LeafPlan):
    """|G|, where JAX's own derivative makes the gradients."""

    norm_by = "gradient"

    gradient_size: int

    @property
    def kept_size(self) -> int:
        return self.gradient_size


@dataclass(frozen=True)
class OuterProductPlan(LeafPlan, ABC):
    """A norm of G = sum_t a_t c_t', from the outer products of all sites."""

    param: Array
    matrices: list[Matrix]
    # Whether norms are upper bounds, and sums have the precision that the proof of
    # `../_bounds` counts on. That takes longer. False for a mean.
    is_bounded: bool

    @abstractmethod
    def _norm_source_from(self, products: list[OuterProducts]) -> NormSource:
        """The arrays whose norms are |G|, from the outer products of each matrix."""

    @property
    def matrix_shape(self) -> MatrixShape:
        return self.matrices[0].shape

    @property
    def positions(self) -> int:
        return sum(matrix.positions for matrix in self.matrices)

    @property
    def temporaries(self) -> int:
        """How many numbers are made of one example, and dropped. Here those of all
        patches of a convolution, each of which is written twice.
        """
        if not self.matrices[0].is_convolution:
            return 0
        stack, rows, _ = self.matrix_shape
        return 2 * stack * self.positions * rows

    def norm_source(self, captured: CapturedOfSites, is_present: Array) -> NormSource:
        """The arrays whose norms are |G|, made for a few examples at a time."""

        def step(_: Array, captured: CapturedOfSites) -> tuple[None, NormSource]:
            return None, self._norm_source_from(self._outer_products(captured))

        _, source = passes.in_microbatches(
            step,
            None,
            is_present,
            batch=(at_sites(captured, self.sites),),
            max_width=self._examples_at_once(captured, is_present.size),
        )
        return source

    def _outer_products(self, captured: CapturedOfSites) -> list[OuterProducts]:
        """The outer products of each matrix."""
        products = []
        for matrix in self.matrices:
            arrays = captured[matrix.site.site_index]
            products.append(matrix.outer_products(arrays))
        return products

    def _examples_at_once(self, captured: CapturedOfSites, batch_size: int) -> int:
        """How many examples are computed at once, so that temporaries take little
        memory beside the captured arrays of all sites.
        """
        captured_bytes = sum(x.nbytes for x in jax.tree.leaves(captured))
        captured_size = captured_bytes // np.float32().nbytes
        # With an eighth in place of this sixteenth, a network of convolutions took 1.42
        # times the memory of a plain gradient on a CPU instead of 1.30, and no less
        # time.
        room = max(captured_size // 16, 2 * passes.numbers_without_loop())
        fitting = max(room // max(self.temporaries, 1), 1)
        if fitting >= batch_size:
            return batch_size
        # A power of two mostly fills the batch.
        return 1 << (fitting.bit_length() - 1)


@dataclass(frozen=True)
class SummedPlan(OuterProductPlan):
    """Computes the norm without the gradient, and sums outer products over examples."""

    @property
    def terms_at_once(self) -> int:
        """How many terms of the sum are added up at once. Each position of an example
        is a term.
        """
        return sys.maxsize

    def weighted_sum(
        self, captured: CapturedOfSites, stand_ins: Array, factors: GroupFactors
    ) -> Array:
        """The sum of f G over examples, as [stack, rows, columns]."""
        captured_of_param = at_sites(captured, self.sites)
        is_counted = factors.is_counted
        dtype = np.promote_types(self.param.dtype, factors.roots.dtype)
        zeros = jnp.zeros(self.matrix_shape, dtype)
        zeros = varying_as_any_of(zeros, (captured_of_param, self.param, is_counted))
        examples_at_once = max(self.terms_at_once // self.positions, 1)
        # The patches of all images may take more memory than all captured arrays.
        if self.matrices[0].is_convolution:
            fitting = self._examples_at_once(captured, is_counted.size)
            examples_at_once = min(examples_at_once, fitting)

        kahan_sum, _ = passes.in_microbatches(
            partial(self._sum_of_microbatch, zeros),
            passes.KahanSum(zeros, zeros),
            is_counted,
            batch=(captured_of_param, stand_ins, factors),
            max_width=examples_at_once,
            add=passes.KahanSum.plus,
        )
        return kahan_sum.total

    def _sum_of_microbatch(
        self,
        zeros: Array,
        is_counted: Array,
        captured: CapturedOfSites,
        stand_ins: Array,
        factors: GroupFactors,
    ) -> tuple[Array, None]:
        """The weighted sum of some examples, like `zeros`, and no results of each."""
        # Examples that only fill up a microbatch do not count.
        factors = factors._replace(is_counted=is_counted)
        terms = []
        for matrix, outer in self._products_to_sum(captured, stand_ins):
            # A proof counts roundings of float32. The loss may leave the precision to
            # XLA, and a GPU would then round to TF32, and a TPU to bfloat16.
            precision = HIGHEST if self.is_bounded else matrix.precision
            terms += terms_of_sum(
                outer,
                factors,
                zeros=zeros,
                positions_at_once=self.terms_at_once,
                precision=precision,
            )
        return passes.KahanSum.of(terms), None

    def _products_to_sum(
        self, captured: CapturedOfSites, stand_ins: Array
    ) -> list[tuple[Matrix, OuterProducts]]:
        """Matrices, and the outer products whose weighted sum is the result."""
        return list(zip(self.matrices, self._outer_products(captured)))


@dataclass(frozen=True)
class ProductPlan(SummedPlan):
    """|G| = |a| |c|, of one position."""

    norm_by = "product"

    @property
    def extra_work(self) -> int:
        stack, rows, columns = self.matrix_shape
        return stack * (rows + columns)

    def _norm_source_from(self, products: list[OuterProducts]) -> NormSource:
        (outer,) = products
        return NormSource(norms_of_products(outer))


@dataclass(frozen=True)
class RowsPlan(SummedPlan):
    """|G|, from the rows of G that are looked up. The others are 0."""

    norm_by = "rows"

    @property
    def kept_size(self) -> int:
        return self.matrix_shape.stack * self.positions * self.matrix_shape.columns

    def _norm_source_from(self, products: list[OuterProducts]) -> NormSource:
        # Written, since the weighted sum reads them as well.
        sums = passes.written_to_memory(sums_of_rows(products))
        return NormSource(sums)

    def _products_to_sum(
        self, captured: CapturedOfSites, stand_ins: Array
    ) -> list[tuple[Matrix, OuterProducts]]:
        """The rows, and the sums of their cotangents."""
        # `sums_of_rows` puts each sum at the first position of its row, after sorting.
        rows = joined(self._outer_products(captured)).a
        return [(self.matrices[0], OuterProducts(jnp.sort(rows), stand_ins))]


@dataclass(frozen=True)
class GramPlan(SummedPlan):
    """|G| = sqrt(sum_ts (a_t . a_s)(c_t . c_s))."""

    norm_by = "gram"

    @property
    def position_pairs(self) -> int:
        return self.matrix_shape.stack * self.positions**2

    @property
    def temporaries(self) -> int:
        return 2 * self.position_pairs + super().temporaries

    @property
    def extra_work(self) -> int:
        _, rows, columns = self.matrix_shape
        return self.position_pairs * (rows + columns)

    @property
    def roundings(self) -> int:
        """How many roundings a square has at most: of both inner products, of the sum
        over pairs of positions, and one.
        """
        _, rows, columns = self.matrix_shape
        return rows + columns + self.position_pairs + 1

    @property
    def terms_at_once(self) -> int:
        return passes.block_size() if self.is_bounded else sys.maxsize

    def _norm_source_from(self, products: list[OuterProducts]) -> NormSource:
        # Written, since norms and bounds have several readers.
        source = norms_by_gram(
            products, roundings=self.roundings, is_bounded=self.is_bounded
        )
        return passes.written_to_memory(source)


@dataclass(frozen=True)
class MatrixPlan(OuterProductPlan):
    """|G|, where the gradients G = sum_t a_t c_t' are made."""

    norm_by = "matrix"

    @property
    def kept_size(self) -> int:
        return math.prod(self.matrix_shape)

    def _norm_source_from(self, products: list[OuterProducts]) -> NormSource:
        # Written, since the weighted sum reads them as well.
        gradients = passes.written_to_memory(gradients_of(products, self.matrix_shape))
        return NormSource(gradients)


def plans_of(
    sites: list[Site], params: list[Array], *, is_bounded: bool
) -> list[LeafPlan]:
    """The plan of each parameter."""
    operands_of_params: list[list[Operand]] = [[] for _ in params]
    for site in sites:
        # An empty site, such as the positions before the last of a sequence of one, has
        # no part in a gradient.
        tapped_size = sum(out_type.size for out_type in site.tapped_types)
        if not math.prod(site.scan_lengths) * tapped_size:
            continue
        for input_index, origin in site.operands.items():
            for param_index in origin.param_indices:
                operands_of_params[param_index].append(Operand(site, input_index))
    return [
        _plan_of(param, operands, is_bounded)
        for param, operands in zip(params, operands_of_params)
    ]


def _plan_of(param: Array, operands: list[Operand], is_bounded: bool) -> LeafPlan:
    """The plan of one parameter, from all operands that are made of it: the one whose
    norm takes the fewest multiplications.
    """
    # A site that takes several of the operands is listed once.
    sites_by_index = {operand.site.site_index: operand.site for operand in operands}
    sites = list(sites_by_index.values())
    if not sites or not param.size:
        return UnusedPlan(sites)
    matrices = []
    if not _is_sum_over_devices(param, sites):
        matrices = matrices_at(operands)
    if not matrices:
        return GradientPlan(sites, _gradient_size(param, operands))
    arguments = sites, param, matrices, is_bounded
    if all(matrix.is_lookup for matrix in matrices):
        return RowsPlan(*arguments)
    by_gram = GramPlan(*arguments)
    if by_gram.positions == 1:
        return ProductPlan(*arguments)
    # Multiplications of the norm by matrix. `extra_work` counts those by gram.
    work_of_matrix = by_gram.positions * math.prod(by_gram.matrix_shape)
    if by_gram.extra_work <= work_of_matrix:
        return by_gram
    return MatrixPlan(*arguments)


def _gradient_size(param: Array, operands: list[Operand]) -> int:
    """How many numbers the gradient of an example by a parameter takes."""
    sizes = [param.size]
    for operand in operands:
        # The gradient by an operand, such as w + a @ b, gives the gradient by each
        # parameter that it is made of.
        if operand.site.name in FORMS:
            sizes.append(operand.size)
    return max(sizes)


def _is_sum_over_devices(param: Array, sites: list[Site]) -> bool:
    """Whether the gradient is a sum over devices: outputs differ along more mesh axes
    than the parameter.
    """
    mesh_axes: frozenset[str] = frozenset()
    for site in sites:
        for out_type in site.out_types:
            mesh_axes |= out_type.manual_axis_type.varying
    return not mesh_axes <= varying(param)
