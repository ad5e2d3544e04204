"""Ghost clipping with book-keeping: the clipped gradient of a batch from one backward
pass, without the large gradients of its examples. The gradient of example b by a matrix
is a sum over positions t of its inputs a and the cotangents c of its outputs:

    G_b = sum_t a_bt c_bt'

While JAX traces, before any number is computed (`ghost_of`):

    1. sites            splits the loss where parameters meet data. values computes
                        what is made of parameters alone
    2. plans            chooses the cheapest norm for each parameter. forms says how an
                        equation makes a and c, matrices which of a parameter's axes
                        are rows and columns

For each microbatch (`GhostClipping.clipped_sums`):

    3. capture          runs the loss forward and backward, and captures a and c
    4. norms            |G|^2 = sum_ts (a_t . a_s)(c_t . c_s), without G
    5. ../_example_factors    f = shrink(|G|, C) / |G|
    6. weighted_sums    sum_b f_b G_b = sum_bt a_bt (f_b c_bt)'

Where the gradient by a parameter has no such a and c, as by a bias, JAX makes it for
each example (`GhostClipping._gradients`). `../_passes` runs microbatches
(`BatchRun.run_steps`), and `../_bounds` proves how much an example adds to a sum.

References: Li, Tramer, Liang, Hashimoto, Large language models can be strong
differentially private learners, 2022 (arXiv 2110.05679). Bu, Wang, Zha, Karypis,
Differentially private optimization on large model at small cost, 2023 (arXiv
2210.00038).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ..._devices.mesh_types import varying
from ..._jaxpr import has_backward_rule
from .._example_factors import Arrays, ExampleFactors, NormSource, factors_of_examples
from .._passes import BatchRun, ExampleResults, written_to_memory
from .._traced import TracedProblem
from .capture import CapturedOfSites, at_sites, capture
from .plans import GradientPlan, LeafPlan, OuterProductPlan, UnusedPlan, plans_of
from .sites import Site, SplitProgram, split_loss
from .values import WideValues, bind, over_iterations, widened


@dataclass(frozen=True, eq=False)
class GhostClipping:
    """Ghost clipping of a problem: the split loss, and a plan for each parameter."""

    split_program: SplitProgram
    params: Arrays
    plans: list[LeafPlan]  # of each parameter

    @property
    def captured_size(self) -> int:
        """How many numbers are captured in one example."""
        return sum(site.captured_size for site in self.split_program.sites)

    @property
    def kept_size(self) -> int:
        """How many numbers of the gradient of an example are kept until its factor is
        known.
        """
        return sum(plan.kept_size for plan in self.plans)

    @property
    def gradient_sites(self) -> list[Site]:
        """The sites of all gradient plans."""
        sites = {}
        for plan in self.plans:
            if isinstance(plan, GradientPlan):
                sites |= {site.site_index: site for site in plan.sites}
        return list(sites.values())

    def clipped_sums(self, run: BatchRun) -> tuple[Arrays, ExampleResults]:
        """The weighted sums of the gradients, and the results of the examples."""

        def step(is_present: Array, examples: Any) -> tuple[Arrays, ExampleResults]:
            batch = jax.tree.leaves(examples)
            outputs, captured = capture(self.split_program, self.params, batch)
            sources = self._norm_sources(captured, is_present)
            factors = factors_of_examples(run.problem, sources, is_present)
            sums = self._weighted_sums(run, captured, sources, factors)
            values, aux = jax.tree.unflatten(run.problem.out_tree, outputs)
            return sums, ExampleResults(factors, values, aux)

        return run.run_steps(step)

    def _norm_sources(
        self, captured: CapturedOfSites, is_present: Array
    ) -> list[NormSource]:
        """For each parameter the source of the norms of the examples."""
        gradients = self._gradients(captured)
        # The gradient by a parameter that is not used is 0.
        no_gradient = jnp.zeros(is_present.size, jnp.float32)
        sources = []
        for param_index, plan in enumerate(self.plans):
            if isinstance(plan, OuterProductPlan):
                source = plan.norm_source(captured, is_present)
            else:
                source = NormSource(gradients.get(param_index, no_gradient))
            sources.append(source)
        return sources

    def _gradients(self, captured: CapturedOfSites) -> dict[int, Array]:
        """The gradients of the examples by the parameters with a gradient plan: for one
        example JAX's own derivative of its sites, applied to their cotangents.
        """
        sites = self.gradient_sites
        if not sites:
            return {}
        param_indices = [
            param_index
            for param_index, plan in enumerate(self.plans)
            if isinstance(plan, GradientPlan)
        ]

        def gradients_of_one(captured_of_one: CapturedOfSites) -> dict[int, Array]:
            def outputs_of_sites(values: WideValues) -> dict[int, Arrays]:
                outputs = {}
                for site in sites:
                    inputs = captured_of_one[site.site_index].inputs
                    outputs[site.site_index] = _tapped_outputs(values, site, inputs)
                return outputs

            outputs, backward = self._vjp(outputs_of_sites, param_indices)
            cotangents = {
                site_index: arrays.cotangents
                for site_index, arrays in captured_of_one.items()
            }
            # The sites run in float32 here, and ran in 16 bits when they were captured.
            cotangents = jax.tree.map(
                lambda cotangent, output: cotangent.astype(output.dtype),
                cotangents,
                outputs,
            )
            (gradients,) = backward(cotangents)
            return gradients

        return written_to_memory(jax.vmap(gradients_of_one)(at_sites(captured, sites)))

    def _vjp(
        self, function: Callable[[WideValues], Any], param_indices: list[int]
    ) -> tuple[Any, Callable[[Any], tuple[dict[int, Array]]]]:
        """What a function of all parameters returns, and its derivative by some of
        them: from cotangents to the gradients by these, in float32 or wider.
        """
        constants = dict(enumerate(self.params))

        def function_of_some(params: dict[int, Array]) -> Any:
            return function(WideValues(constants | params))

        params = {index: self.params[index] for index in param_indices}
        return jax.vjp(function_of_some, widened(params))

    def _weighted_sums(
        self,
        run: BatchRun,
        captured: CapturedOfSites,
        sources: list[NormSource],
        factors: ExampleFactors,
    ) -> Arrays:
        """The sum over examples of gradients times factors, in float32 or wider."""
        sums = run.zeros()

        def by_freed_memory(param_index: int) -> tuple[bool, int]:
            """A sort key. Gradients that were made are first, and free their memory.
            Then the last parameter is first, so that its captured arrays are freed
            before the arrays of others are copied.
            """
            return isinstance(self.plans[param_index], OuterProductPlan), -param_index

        for param_index in sorted(range(len(self.plans)), key=by_freed_memory):
            plan = self.plans[param_index]
            if isinstance(plan, UnusedPlan):
                continue
            total = plan.weighted_sum(
                captured,
                sources[param_index].stand_ins,
                factors.of_group(run.problem.groups[param_index]),
            )
            is_counted = _after(total, factors.is_counted)
            factors = factors._replace(is_counted=is_counted)
            if isinstance(plan, OuterProductPlan):
                total = self._sum_by_parameter(param_index, plan, total)
            sums[param_index] = total
        return sums

    def _sum_by_parameter(
        self, param_index: int, plan: OuterProductPlan, sum_by_matrix: Array
    ) -> Array:
        """The sum of gradients by a parameter, from the sum by its matrix.

        The function from a parameter to its matrix is linear. So its derivative is
        applied once, to the sum over examples.
        """
        matrix, backward = self._vjp(plan.matrices[0].value, [param_index])
        (sum_by_param,) = backward(sum_by_matrix.astype(matrix.dtype))
        return sum_by_param[param_index]


def _tapped_outputs(values: WideValues, site: Site, inputs: list[Any]) -> list[Any]:
    """The tapped outputs of a site, computed again for one example from its
    operands.
    """
    operands = [values.value(origin) for origin in site.operands.values()]

    def outputs_of_iteration(
        operands: list[Any], data: tuple[list[Any], Array]
    ) -> list[Any]:
        inputs, iteration_zero = data
        if has_backward_rule(site.eqn):
            # With a zero for each iteration of a scan, a rule of the user's sees the
            # cotangent of each one.
            operands = [x + iteration_zero.astype(x.dtype) for x in operands]
        arguments = list(inputs)
        # In ascending order, so that each operand comes to its index.
        for input_index, operand in zip(site.operands, operands):
            arguments.insert(input_index, operand)
        outputs = bind(site.eqn, arguments, is_wide=True)
        return [outputs[index] for index in site.tapped]

    scan_depths = range(len(site.scan_lengths))
    run = over_iterations(outputs_of_iteration, site.operands.values(), scan_depths)
    iteration_zeros = jnp.zeros(site.scan_lengths)
    return run(operands, (inputs, iteration_zeros))


def _after(first: Array, is_counted: Array) -> Array:
    """The same `is_counted`, which the compiler cannot compute before `first`.

    XLA on a CPU computes as soon as it can. It would copy the captured arrays of all
    sites before it sums the first: a perceptron took a quarter more memory.
    """
    if not varying(first) <= varying(is_counted):
        # `is_counted` would become varying over the axes of `first`, and so would all
        # later sums.
        return is_counted
    entry = jnp.real(first.reshape(-1)[0])
    is_number = (entry >= 0) | (entry < 0)
    # Always true. XLA does not see it.
    return is_counted & (is_number | jnp.isnan(entry))


def ghost_of(problem: TracedProblem) -> GhostClipping:
    """Ghost clipping of a problem. Raises CannotSplit if its loss cannot be split."""
    params = jax.tree.leaves(problem.params)
    program = split_loss(problem.loss_program, params)
    return GhostClipping(
        program,
        params,
        plans=plans_of(program.sites, params, is_bounded=problem.is_sum),
    )
