"""Ghost clipping with book-keeping: the clipped gradient of a batch from one backward
pass, without the large gradients of its examples.

    1. _capture  Run the loss of all examples. Capture what comes into each site where
                 a parameter meets data, x. Run backward once, to the cotangents of what
                 comes out of the sites, g.
    2. _norms    Norms of the gradients of examples, from x and g. Gradients that are
                 smaller than these are made of them, and kept. _plans has the cheapest
                 of these for each parameter, _forms the products of x and g.
    3. here      The sum of the gradients with factors f, from x and f g: again no
                 backward pass.

Where the gradient by a parameter is not such a product of x and g, JAX makes the
gradients of examples by that parameter.

References: Li, Tramer, Liang, Hashimoto, Large language models can be strong
differentially private learners, 2022 (arXiv 2110.05679). Bu, Wang, Zha, Karypis,
Differentially private optimization on large model at small cost, 2023 (arXiv
2210.00038).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ..._factors import times_square
from ..._jaxpr import has_backward_rule, has_window, work_of
from ..._mesh_types import varying, varying_as_any_of
from .. import _passes as passes
from .._limits import Arrays, Weights, along_batch
from .._passes import ExampleResults, Run
from .._problem import Problem
from ._capture import CapturedOfSites, capture
from ._forms import OuterProducts
from ._norms import joined, matrices_of, norms_by_gram, norms_of_products, sums_of_rows
from ._plans import LeafPlan, plans_of
from ._sites import Program, Site, bind, split_loss


class Ghost(NamedTuple):
    """The loss of one example, ready to be run on batches."""

    program: Program
    params: Arrays
    plans: list[LeafPlan]  # of each parameter
    out_tree: Any  # of the value and aux
    # The parameters by which gradients of examples are made by JAX, and their sites
    gradient_leaves: list[int]
    gradient_sites: list[Site]
    # The parameters whose gradients are sums of outer products, the last first
    matrix_leaves: list[int]
    captured_size: int  # how many numbers are captured in one example
    kept_size: int  # how many of its gradient are kept until its factor is known
    is_convolved: bool  # In a loop convolutions would take longer than all else.

    def in_steps(self, run: Run) -> tuple[Arrays, ExampleResults]:
        """The weighted sums of the gradients, and the results of the examples."""

        def step(present: Array, example: Any) -> tuple[Arrays, ExampleResults]:
            examples = jax.tree.leaves(example)
            outputs, captured = capture(self.program, self.params, examples)
            # Of each parameter the gradients, or their norms: the norm of a norm is
            # itself.
            zeros = [jnp.zeros(present.size, jnp.float32) for _ in self.plans]
            grads_or_norms = list(zeros)
            term_bounds = list(zeros)
            for leaf, gradient in self._gradients(captured).items():
                grads_or_norms[leaf] = gradient
            for leaf in self.matrix_leaves:
                grads_or_norms[leaf], term_bounds[leaf] = _grads_or_norms_and_bounds(
                    self.plans[leaf], captured, present
                )
            weights = run.limits.weigh(grads_or_norms, present, term_bounds)
            sums = self._sums(captured, grads_or_norms, weights, run.limits.groups)
            values, aux = jax.tree.unflatten(self.out_tree, outputs)
            return sums, ExampleResults(weights, values, aux)

        return run.in_steps(step)

    def _gradients(self, captured: CapturedOfSites) -> dict[int, Array]:
        """The gradients of the examples by parameters without outer products."""
        if not self.gradient_sites:
            return {}

        def of_one(captured: CapturedOfSites) -> dict[int, Array]:
            def outputs_of_sites(values: dict[int, Any]) -> dict[int, Arrays]:
                outputs = {}
                for site in self.gradient_sites:
                    inputs = captured[site.number].inputs
                    outputs[site.number] = _tapped_outputs(values, site, inputs)
                return outputs

            outputs, pull = self._vjp(outputs_of_sites, self.gradient_leaves)
            cotangents = {number: captured[number].cotangents for number in outputs}
            typed = jax.tree.map(lambda x, y: x.astype(y.dtype), cotangents, outputs)
            return pull(typed)[0]

        numbers = [site.number for site in self.gradient_sites]
        captured = {number: captured[number] for number in numbers}
        return passes.written(jax.vmap(of_one)(captured))

    def _vjp(
        self, outputs_of: Callable[[dict[int, Any]], Any], leaves: list[int]
    ) -> Any:
        """The derivative by some parameters, in float32 or wider, of a function of the
        values of parameters by their numbers.
        """
        constants: dict[int, Any] = dict(enumerate(self.params))

        def run(params: dict[int, Array]) -> Any:
            # A dict of its own, in which origins put what they have made.
            return outputs_of(constants | params)

        params = {leaf: self.params[leaf] for leaf in leaves}
        return jax.vjp(run, passes.widened(params))

    def _sums(
        self,
        captured: CapturedOfSites,
        grads_or_norms: Arrays,
        weights: Weights,
        groups: Sequence[int],
    ) -> Arrays:
        """The sum over examples of gradients times factors, in float32 or wider."""
        sums = [jnp.zeros_like(leaf) for leaf in self.params]
        # The last come first, whose arrays are freed before those of others are copied.
        for leaf in [*self.gradient_leaves, *self.matrix_leaves]:
            plan = self.plans[leaf]
            if plan.norm_by in ("gradient", "matrix"):
                sums[leaf] = weights.total(grads_or_norms[leaf], groups[leaf])
            else:
                sums[leaf] = _weighted_sum(
                    plan,
                    self.params[leaf],
                    captured,
                    grads_or_norms[leaf],
                    weights,
                    groups[leaf],
                )
            counts = _after(sums[leaf], weights.counts)
            weights = weights._replace(counts=counts)

        # From parameters to matrices it is linear, so it is done once for all examples.
        def first_matrices(values: dict[int, Any]) -> dict[int, Array]:
            matrices = {}
            for leaf in self.matrix_leaves:
                first, *_ = self.plans[leaf].matrices
                matrices[leaf] = first.value(values)
            return matrices

        matrices, pull = self._vjp(first_matrices, self.matrix_leaves)
        matrix_sums = {}
        for leaf, matrix in matrices.items():
            matrix_sums[leaf] = sums[leaf].astype(matrix.dtype)
        (sums_of_leaves,) = pull(matrix_sums)
        for leaf, sum_of_leaf in sums_of_leaves.items():
            sums[leaf] = sum_of_leaf
        return sums


def _tapped_outputs(values: dict[int, Any], site: Site, inputs: list[Any]) -> list[Any]:
    """The outputs of a site in one example that a backward pass comes by."""
    operands = [origin.value(values) for origin in site.operands.values()]

    def run(operands: list[Any], inputs: list[Any], zero: Array) -> Any:
        if site.eqn is None:
            return operands
        if has_backward_rule(site.eqn):
            # A rule of the user's sees the cotangent of each turn of a scan.
            operands = [x + zero.astype(x.dtype) for x in operands]
        arguments = list(inputs)
        # In the order of their places, each is inserted at its own.
        for place, operand in zip(site.operands, operands):
            arguments.insert(place, operand)
        outputs = bind(site.eqn, arguments, is_wide=True)
        return [outputs[index] for index in site.tapped]

    # The innermost scan first, so that the axis of the outermost is in front.
    for depth, length in reversed(list(enumerate(site.scan_lengths))):
        axes = [0 if depth in x.slicing_scans else None for x in site.operands.values()]
        run = jax.vmap(run, (axes, 0, 0), axis_size=length)
    return run(operands, inputs, jnp.zeros(site.scan_lengths))


def _grads_or_norms_and_bounds(
    plan: LeafPlan, captured: CapturedOfSites, counts: Array
) -> tuple[Array, Array]:
    """For a parameter with outer products, the norms of the examples' gradients, or the
    gradients, and bounds of their terms that are still to be added up.
    """

    def step(_: Array, captured: CapturedOfSites) -> tuple[None, tuple[Array, Array]]:
        products = plan.outer_products(captured, can_shift=plan.norm_by == "matrix")
        if plan.norm_by == "gram":
            return None, norms_by_gram(products, is_bounded=plan.is_bounded)
        if plan.norm_by == "product":
            grads_or_norms = norms_of_products(*products)
        elif plan.norm_by == "rows":
            grads_or_norms = sums_of_rows(products)
        else:
            grads_or_norms = matrices_of(products, plan.matrix_shape)
        # The norms are those of what is added up.
        return None, (grads_or_norms, jnp.zeros(len(grads_or_norms), jnp.float32))

    width = _width(plan, captured, counts.size)
    batch = (plan.captured_of(captured),)
    _, results = passes.in_microbatches(step, None, counts, batch, width)
    return results if plan.norm_by == "product" else passes.written(results)


def _weighted_sum(
    plan: LeafPlan,
    param: Array,
    captured: CapturedOfSites,
    grads_or_norms: Array,
    weights: Weights,
    group: int,
) -> Array:
    """The weighted sum of the gradients by a parameter with outer products, over
    examples b and positions t, as matrices [stack, rows, columns]:

        sum_b f_b sum_t a_bt c_bt'
    """
    roots = weights.roots[:, group]
    dtype = np.promote_types(param.dtype, roots.dtype)
    captured_of_leaf = plan.captured_of(captured)
    zeros = jnp.zeros(plan.matrix_shape, dtype)
    zeros = varying_as_any_of(zeros, (captured_of_leaf, param, weights.counts))
    width = weights.counts.size
    block = plan.positions
    # The patches of all images may be more than all that was captured.
    if plan.sites[0].name == "conv_general_dilated":
        width = _width(plan, captured, width)
    if plan.norm_by == "gram" and plan.is_bounded:
        block = min(block, passes.block_size())
        width = min(width, max(passes.block_size() // plan.positions, 1))

    def step(
        counts: Array,
        captured: CapturedOfSites,
        grads_or_norms: Array,
        root: Array,
        share: Array,
    ) -> tuple[Array, None]:
        products = plan.outer_products(captured)
        if plan.norm_by == "rows":
            # The cotangents of each row have been added up.
            rows = jnp.sort(joined(products).a)
            products = [OuterProducts(rows, grads_or_norms)]
        terms = []
        for matrix, product in zip(plan.matrices, products):
            for a, c in _weighted(product, counts, root, share, dtype):
                for start in range(0, a.shape[2], block):
                    positions = slice(start, start + block)
                    part = OuterProducts(a[:, :, positions], c[:, :, positions])
                    terms.append(_sum_of_products(part, matrix.site, zeros))
        return passes.KahanSum.of(terms), None

    batch = captured_of_leaf, grads_or_norms, roots, weights.shares
    sums, _ = passes.in_microbatches(
        step,
        passes.KahanSum(zeros, zeros),
        weights.counts,
        batch,
        width,
        plus=passes.KahanSum.plus,
    )
    return sums.total


def _weighted(
    product: OuterProducts, counts: Array, roots: Array, shares: Array, dtype: np.dtype
) -> list[OuterProducts]:
    """Outer products a_t (f c_t)', 0 in examples that do not count. Of bfloat16 they
    are two, whose sum that is.
    """
    a, c = product
    # Selected, since 0 times NaN is NaN.
    a = jnp.where(along_batch(counts, a), a, 0)
    c = jnp.where(along_batch(counts, c), c, 0)
    weighted = times_square(c.astype(dtype), along_batch(roots, c))
    weighted *= along_batch(shares, c).astype(dtype)
    if a.dtype == c.dtype == jnp.bfloat16 and weighted.dtype == np.float32:
        # As fast on a GPU and a TPU as one product that gives bfloat16.
        leading, trailing = _in_bfloat16(weighted)
        return [OuterProducts(a, leading), OuterProducts(a, trailing)]
    # Numbers of rows have an axis less.
    return [OuterProducts(a.astype(dtype) if a.ndim == 4 else a, weighted)]


def _width(plan: LeafPlan, captured: CapturedOfSites, size: int) -> int:
    """For how many examples at once norms are made, whose temporaries may be larger
    than all that was captured.
    """
    captured_bytes = sum(x.nbytes for x in jax.tree.leaves(captured))
    captured_size = captured_bytes // np.float32().nbytes
    # With an eighth in place of this sixteenth, a network of convolutions took 1.42
    # times the memory of a plain gradient on a CPU instead of 1.30, and no less time.
    room = max(captured_size // 16, 2 * passes.small_memory())
    width = room // max(plan.temporaries, 1)
    if width >= size:
        return size
    # A power of two mostly fills the batch.
    return 1 << (max(width, 1).bit_length() - 1)


def _in_bfloat16(weighted: Array) -> Arrays:
    """Float32 as a sum of two arrays of bfloat16: one would round the factors.

    The first is cut and not rounded, so that without the second, which may be flushed
    to 0, the gradient is shorter.
    """
    bits = lax.bitcast_convert_type(weighted, np.uint32) & np.uint32(0xFFFF0000)
    leading = lax.bitcast_convert_type(bits, np.float32)
    return [leading.astype(jnp.bfloat16), (weighted - leading).astype(jnp.bfloat16)]


def _sum_of_products(products: OuterProducts, site: Site, zeros: Array) -> Array:
    """The sum of outer products over examples and positions, like `zeros`, which is
    [stack, rows, columns].
    """
    a, c = products
    if a.ndim == 3:
        return zeros.at[jnp.arange(len(zeros))[:, None], a].add(c)
    # Not an algorithm, which would also say in which dtype to add up.
    precision = site.eqn.params.get("precision")
    if not isinstance(precision, (tuple, lax.Precision)):
        precision = None
    if a.shape[1:3] == (1, 1):
        # One position. A CPU takes up to 6 % less for a gradient of small batches.
        # More positions, joined to the batch, would be gathered if devices split them.
        axes = ((0,), (0,)), ((), ())
        total = lax.dot_general(a[:, 0, 0], c[:, 0, 0], axes, precision, zeros.dtype)
        return total[None]
    axes = ((0, 2), (0, 2)), ((1,), (1,))
    return lax.dot_general(a, c, axes, precision, zeros.dtype)


def _after(before: Array, counts: Array) -> Array:
    """The same booleans, which the compiler cannot compute before another value.

    XLA on a CPU computes as soon as it can. It would copy what was captured at all
    sites before it sums the first: a perceptron took a quarter more memory.
    """
    if not varying(before) <= varying(counts):
        # It would give the type of a split parameter to all sums that follow.
        return counts
    first = jnp.real(before.reshape(-1)[0])
    # True for every number, NaN included.
    return counts & ((first >= 0) | (first < 0) | jnp.isnan(first))


def ghost_of(problem: Problem) -> Ghost:
    """The loss of a problem. Raises CannotSplit where it cannot be split."""
    params = jax.tree.leaves(problem.params)
    program = split_loss(problem.program, params)
    plans = plans_of(program.sites, params, is_bounded=problem.is_sum)
    gradient_leaves = []
    gradient_sites: dict[int, Site] = {}
    matrix_leaves = []
    for leaf, plan in enumerate(plans):
        if plan.norm_by == "gradient":
            gradient_leaves.append(leaf)
            gradient_sites |= {site.number: site for site in plan.sites}
        elif plan.matrices:
            matrix_leaves.insert(0, leaf)
    convolved_work = work_of(problem.program, has_window)
    return Ghost(
        program,
        params,
        plans,
        out_tree=jax.tree.structure(problem.returned),
        gradient_leaves=gradient_leaves,
        gradient_sites=list(gradient_sites.values()),
        matrix_leaves=matrix_leaves,
        captured_size=sum(site.captured_size for site in program.sites),
        kept_size=sum(plan.kept_size for plan in plans),
        is_convolved=16 * convolved_work > work_of(problem.program),
    )
