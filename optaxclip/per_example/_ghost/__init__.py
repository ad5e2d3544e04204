"""Ghost clipping with book-keeping: the clipped gradient of a batch from one backward
pass, without the large gradients of its examples. In the order in which to read:

    _sites           where parameters meet data in the program of the loss
    _flow            where a backward pass goes through this program
    _capture         one run forward and backward. It captures the input a of each site,
                     and the cotangent c of its output
    _forms           the gradient of an example by the operand of a site: sum_t a_t c_t'
    _matrices        the same by a parameter, as matrices with rows and columns
    _norms           the norm of such a sum, without the sum:
                     |G|^2 = sum_ts (a_t . a_s)(c_t . c_s)
    _weighted_sums   the sum over examples b with factors f: sum_bt a_bt (f_b c_bt)'
    _plans           which of these norms is the cheapest for each parameter
    here             all of it for a batch

Beside this folder `_passes` runs microbatches (`Run.in_steps`), `_limits` makes factors
of norms (`weights_of`), and `_bounds` proves how much an example adds to a sum.

Where the gradient by a parameter is not such a sum, JAX makes the gradients of examples
by that parameter.

References: Li, Tramer, Liang, Hashimoto, Large language models can be strong
differentially private learners, 2022 (arXiv 2110.05679). Bu, Wang, Zha, Karypis,
Differentially private optimization on large model at small cost, 2023 (arXiv
2210.00038).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..._jaxpr import has_backward_rule
from ..._mesh_types import varying
from .._limits import Arrays, Weights, weights_of
from .._passes import ExampleResults, Run, widened, written
from .._problem import Problem
from .._work import has_window, work_of
from ._capture import CapturedOfSites, capture
from ._norms import NormSource
from ._plans import GradientPlan, LeafPlan, OuterProductPlan, plans_of
from ._sites import Program, Site, Values, bind, split_loss


@dataclass(frozen=True, eq=False)
class Ghost:
    """The loss of one example, ready to be run on batches."""

    program: Program
    params: Arrays
    plans: list[LeafPlan]  # of each parameter
    out_tree: Any  # of the value and aux
    # In a loop, XLA on a CPU runs convolutions 16 times slower. Whether they would then
    # take most of the time.
    is_convolved: bool

    @property
    def captured_size(self) -> int:
        """How many numbers are captured in one example."""
        return sum(site.captured_size for site in self.program.sites)

    @property
    def kept_size(self) -> int:
        """How many numbers of the gradient of an example are kept until its factor is
        known.
        """
        return sum(plan.kept_size for plan in self.plans)

    @cached_property
    def gradient_plans(self) -> dict[int, GradientPlan]:
        """By the numbers of parameters."""
        plans = {}
        for number, plan in enumerate(self.plans):
            if isinstance(plan, GradientPlan):
                plans[number] = plan
        return plans

    @cached_property
    def gradient_sites(self) -> list[Site]:
        """The sites of all gradient plans."""
        sites = {}
        for plan in self.gradient_plans.values():
            sites |= {site.number: site for site in plan.sites}
        return list(sites.values())

    @cached_property
    def outer_product_plans(self) -> dict[int, OuterProductPlan]:
        """By the numbers of parameters. The last is first, so that its captured arrays
        are freed before the arrays of others are copied.
        """
        plans = {}
        for number, plan in reversed(list(enumerate(self.plans))):
            if isinstance(plan, OuterProductPlan):
                plans[number] = plan
        return plans

    def clipped_sums(self, run: Run) -> tuple[Arrays, ExampleResults]:
        """The weighted sums of the gradients, and the results of the examples."""

        def step(present: Array, example: Any) -> tuple[Arrays, ExampleResults]:
            batch = jax.tree.leaves(example)
            outputs, captured = capture(self.program, self.params, batch)
            # The norm of a gradient is the norm of the array in its source, or
            # term_bounds / 16 if that is larger.
            sources = self._norm_sources(captured, present)
            arrays = [source.array for source in sources]
            term_bounds = [source.term_bounds for source in sources]
            weights = weights_of(run.problem, arrays, present, term_bounds)
            groups = run.problem.groups
            sums = self._weighted_sums(captured, arrays, weights, groups)
            values, aux = jax.tree.unflatten(self.out_tree, outputs)
            return sums, ExampleResults(weights, values, aux)

        return run.in_steps(step)

    def _norm_sources(
        self, captured: CapturedOfSites, present: Array
    ) -> list[NormSource]:
        """For each parameter the source of the norms of the examples."""
        # The gradient by a parameter that is not used is 0.
        zeros = NormSource.of_added_up(jnp.zeros(present.size, jnp.float32))
        sources = [zeros for _ in self.plans]
        for number, gradients in self._gradients(captured).items():
            sources[number] = NormSource.of_added_up(gradients)
        for number, plan in self.outer_product_plans.items():
            sources[number] = plan.norm_source(captured, present)
        return sources

    def _gradients(self, captured: CapturedOfSites) -> dict[int, Array]:
        """The gradients of the examples by the parameters with a gradient plan."""
        sites = self.gradient_sites
        if not sites:
            return {}

        def gradients_of_one(captured: CapturedOfSites) -> dict[int, Array]:
            def outputs_of_sites(values: Values) -> dict[int, Arrays]:
                outputs = {}
                for site in sites:
                    inputs = captured[site.number].inputs
                    outputs[site.number] = _tapped_outputs(values, site, inputs)
                return outputs

            outputs, backward = self._vjp(outputs_of_sites, list(self.gradient_plans))
            cotangents = {n: arrays.cotangents for n, arrays in captured.items()}
            cotangents = jax.tree.map(_cast_as, cotangents, outputs)
            (gradients,) = backward(cotangents)
            return gradients

        captured_of_sites = {site.number: captured[site.number] for site in sites}
        return written(jax.vmap(gradients_of_one)(captured_of_sites))

    def _vjp(self, function: Callable[[Values], Any], numbers: list[int]) -> Any:
        """The derivative of a function of all parameters by some of them, in float32 or
        wider.
        """
        constants = dict(enumerate(self.params))

        def function_of_some(params: dict[int, Array]) -> Any:
            return function(Values(constants | params))

        params = {number: self.params[number] for number in numbers}
        return jax.vjp(function_of_some, widened(params))

    def _weighted_sums(
        self,
        captured: CapturedOfSites,
        norm_arrays: Arrays,
        weights: Weights,
        limit_groups: Sequence[int],
    ) -> Arrays:
        """The sum over examples of gradients times factors, in float32 or wider."""
        sums = []
        for param in self.params:
            dtype = np.promote_types(param.dtype, np.float32)
            sums.append(jnp.zeros_like(param, dtype))
        for number, plan in (self.gradient_plans | self.outer_product_plans).items():
            sums[number] = plan.weighted_sum(
                captured, norm_arrays[number], weights, limit_groups[number]
            )
            is_counted = _after(sums[number], weights.is_counted)
            weights = weights._replace(is_counted=is_counted)
        matrix_sums = {number: sums[number] for number in self.outer_product_plans}
        for number, total in self._sums_by_parameters(matrix_sums).items():
            sums[number] = total
        return sums

    def _sums_by_parameters(self, matrix_sums: dict[int, Array]) -> dict[int, Array]:
        """The sums of gradients by parameters, from the sums by their matrices.

        The function from a parameter to its matrices is linear. So its derivative is
        applied once, to the sum over examples.
        """

        def matrices_of_params(values: Values) -> dict[int, Array]:
            matrices = {}
            for number, plan in self.outer_product_plans.items():
                matrices[number] = plan.matrices[0].value(values)
            return matrices

        matrices, backward = self._vjp(matrices_of_params, list(matrix_sums))
        (sums,) = backward(jax.tree.map(_cast_as, matrix_sums, matrices))
        return sums


def _cast_as(x: Array, model: Array) -> Array:
    return x.astype(model.dtype)


def _tapped_outputs(values: Values, site: Site, inputs: list[Any]) -> list[Any]:
    """The tapped outputs of a site, computed again for one example from its
    operands.
    """
    operands = [values.value(origin) for origin in site.operands.values()]

    def outputs_of_turn(
        operands: list[Any], inputs: list[Any], turn_zero: Array
    ) -> Any:
        if site.eqn is None:
            return operands
        if has_backward_rule(site.eqn):
            # With a zero for each turn, a rule of the user's sees the cotangent of each
            # turn of a scan.
            operands = [x + turn_zero.astype(x.dtype) for x in operands]
        arguments = list(inputs)
        # Places are in ascending order, so each operand is inserted at its place.
        for place, operand in zip(site.operands, operands):
            arguments.insert(place, operand)
        outputs = bind(site.eqn, arguments, is_wide=True)
        return [outputs[index] for index in site.tapped]

    run = outputs_of_turn
    # The innermost scan first, so that the axis of the outermost is in front.
    for scan_depth, length in reversed(list(enumerate(site.scan_lengths))):
        operand_axes = []
        for origin in site.operands.values():
            operand_axes.append(0 if scan_depth in origin.slicing_scans else None)
        run = jax.vmap(run, (operand_axes, 0, 0), axis_size=length)
    return run(operands, inputs, jnp.zeros(site.scan_lengths))


def _after(first: Array, counts: Array) -> Array:
    """The same `counts`, which the compiler cannot compute before the array `first`.

    XLA on a CPU computes as soon as it can. It would copy the captured arrays of all
    sites before it sums the first: a perceptron took a quarter more memory.
    """
    if not varying(first) <= varying(counts):
        # `counts` would become varying over the axes of `first`, and so would all later
        # sums.
        return counts
    entry = jnp.real(first.reshape(-1)[0])
    # True for every number, NaN included.
    return counts & ((entry >= 0) | (entry < 0) | jnp.isnan(entry))


def ghost_of(problem: Problem) -> Ghost:
    """The loss of a problem. Raises CannotSplit where it cannot be split."""
    params = jax.tree.leaves(problem.params)
    program = split_loss(problem.program, params)
    all_work = work_of(problem.program)
    convolved_work = work_of(problem.program, has_window)
    return Ghost(
        program,
        params,
        plans=plans_of(program.sites, params, is_bounded=problem.is_sum),
        out_tree=jax.tree.structure(problem.result_types),
        is_convolved=16 * convolved_work > all_work,
    )
