"""Ghost clipping with book-keeping: the clipped gradient of a batch from one backward
pass, without the large gradients of its examples.

    1. Run the loss of all examples. Capture what comes into each use of a parameter, x.
    2. Run backward once, to the cotangents of what comes out of the uses, g.
    3. Norms of the gradients of examples, from x and g. Gradients that are smaller than
       these are made of them, and held.
    4. The sum of the gradients with factors f, from x and f g: again no backward pass.

Where the gradient by a use of a parameter is not such a product of x and g, JAX makes
the gradients of examples by that parameter.

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
from ..._jaxpr import has_backward_rule, has_convolution
from ..._mesh_types import varying, varying_as_any_of
from .. import _passes as passes
from .._passes import Arrays, ExampleResults, Run, Weights, along_batch
from .._problem import Problem
from ._capture import Captured, Program, Use, bind, capture, split_loss
from ._norms import (
    LeafPlan,
    MatrixUse,
    OuterProducts,
    grads_or_norms_of,
    joined,
    norms_by_gram,
    outer_products_of,
    plans_of,
)


class Ghost(NamedTuple):
    """The loss of one example, ready to be run on batches."""

    program: Program
    params: Arrays
    plans: list[LeafPlan]  # of each parameter
    out_tree: Any  # of the value and aux
    # The parameters by which gradients of examples are made, and their uses
    gradient_leaves: list[int]
    gradient_uses: dict[int, Use]
    # The parameters whose gradients are sums of outer products, the last first
    matrix_leaves: list[int]
    captured_size: int  # how many numbers are captured in one example
    held: int  # how many of its gradient are held until its factor is known
    is_convolved: bool

    def in_steps(self, run: Run) -> tuple[Arrays, ExampleResults]:
        """The weighted sums of the gradients, and the results of the examples."""

        def step(present: Array, example: Any) -> tuple[Arrays, ExampleResults]:
            examples = jax.tree.leaves(example)
            outputs, captured = capture(self.program, self.params, examples)
            # Gradients by some parameters, norms of gradients by others: their norm is
            # that of the gradient.
            zeros = [jnp.zeros(present.size, jnp.float32) for _ in self.plans]
            grads_or_norms = list(zeros)
            term_bounds = list(zeros)
            gradients = self._gradients(captured)
            for leaf, gradient in zip(self.gradient_leaves, gradients):
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

    def _gradients(self, captured: list[Captured]) -> Arrays:
        """The gradients of the examples by parameters without outer products."""
        if not self.gradient_uses:
            return []

        def of_one(captured: list[Captured]) -> Arrays:
            def outputs_of_uses(values: dict[Any, Any]) -> list[Arrays]:
                outputs = []
                for use, data in zip(self.gradient_uses.values(), captured):
                    outputs.append(_tapped_outputs(values, use, data.inputs))
                return outputs

            outputs, pull = self._vjp(outputs_of_uses, self.gradient_leaves)
            cotangents = [data.cotangents for data in captured]
            typed = jax.tree.map(lambda x, y: x.astype(y.dtype), cotangents, outputs)
            return pull(typed)[0]

        captured = [captured[number] for number in self.gradient_uses]
        return passes.written(jax.vmap(of_one)(captured))

    def _vjp(
        self, outputs_of: Callable[[dict[Any, Any]], Any], leaves: list[int]
    ) -> Any:
        """The derivative by some parameters, in float32 or wider, of a function of the
        values of parameters by their numbers.
        """

        def run(params: Arrays) -> Any:
            values: dict[Any, Any] = dict(enumerate(self.params))
            values.update(zip(leaves, params))
            return outputs_of(values)

        return jax.vjp(run, passes.widened([self.params[leaf] for leaf in leaves]))

    def _sums(
        self,
        captured: list[Captured],
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

        # From matrices to parameters it is linear, so it is done once for all examples.
        first_uses = [self.plans[leaf].matrix_uses[0] for leaf in self.matrix_leaves]

        def matrices_of(values: dict[Any, Any]) -> Arrays:
            return [use.matrices(values) for use in first_uses]

        matrices, pull = self._vjp(matrices_of, self.matrix_leaves)
        matrix_sums = []
        for leaf, matrix in zip(self.matrix_leaves, matrices):
            matrix_sums.append(sums[leaf].astype(matrix.dtype))
        (sums_of_leaves,) = pull(matrix_sums)
        for leaf, sum_of_leaf in zip(self.matrix_leaves, sums_of_leaves):
            sums[leaf] = sum_of_leaf
        return sums


def _tapped_outputs(values: dict[Any, Any], use: Use, inputs: list[Any]) -> list[Any]:
    """The outputs of a use in one example that a backward pass comes by."""
    operands = [origin.make(values) for origin in use.operands.values()]
    if use.eqn is None:
        return operands
    has_rule = has_backward_rule(use.eqn)

    def run(operands: list[Any], inputs: list[Any], zero: Array) -> Any:
        if has_rule:
            # A rule of the user's sees the cotangent of each turn of a scan.
            operands = [x + zero.astype(x.dtype) for x in operands]
        arguments = list(inputs)
        # In the order of their places, each is inserted at its own.
        for place, operand in zip(use.operands, operands):
            arguments.insert(place, operand)
        outputs = bind(use.eqn, arguments, is_wide=True)
        return [outputs[index] for index in use.tapped]

    # The innermost scan first, so that the axis of the outermost is in front.
    for depth, length in reversed(list(enumerate(use.scan_lengths))):
        axes = [0 if depth in x.scans else None for x in use.operands.values()]
        run = jax.vmap(run, (axes, 0, 0), axis_size=length)
    return run(operands, inputs, jnp.zeros(use.scan_lengths))


def _grads_or_norms_and_bounds(
    plan: LeafPlan, captured: list[Captured], counts: Array
) -> tuple[Array, Array]:
    """Of a parameter with outer products, the norms of the examples' gradients, or the
    gradients, and bounds of their terms that are still to be added up.
    """

    def step(_: Array, captured: list[Captured]) -> tuple[None, tuple[Array, Array]]:
        products = []
        for matrix_use, data in zip(plan.matrix_uses, captured):
            can_shift = plan.norm_by == "matrix"
            products.append(outer_products_of(matrix_use, data, can_shift=can_shift))
        if plan.norm_by == "gram":
            return None, norms_by_gram(products, is_bounded=plan.is_bounded)
        grads_or_norms = grads_or_norms_of(plan, products)
        # The norms are those of what is added up.
        return None, (grads_or_norms, jnp.zeros(len(grads_or_norms), jnp.float32))

    width = _width(plan, captured, counts.size)
    batch = (plan.captured_of(captured),)
    _, results = passes.in_microbatches(step, None, counts, batch, width)
    return results if plan.norm_by == "product" else passes.written(results)


def _weighted_sum(
    plan: LeafPlan,
    param: Array,
    captured: list[Captured],
    grads_or_norms: Array,
    weights: Weights,
    group: int,
) -> Array:
    """The weighted sum of the gradients by a parameter with outer products, as matrices
    [stack, rows, columns].
    """
    roots = weights.roots[:, group]
    dtype = np.promote_types(param.dtype, roots.dtype)
    captured_of_leaf = plan.captured_of(captured)
    zeros = jnp.zeros(plan.matrix_shape, dtype)
    zeros = varying_as_any_of(zeros, (captured_of_leaf, param, weights.counts))

    def step(
        counts: Array,
        captured: list[Captured],
        grads_or_norms: Array,
        root: Array,
        share: Array,
    ) -> tuple[Array, None]:
        total = zeros
        products = list(map(outer_products_of, plan.matrix_uses, captured))
        if plan.norm_by == "rows":
            # The cotangents of each row have been added up.
            rows = jnp.sort(joined(products).a)
            products = [OuterProducts(rows, grads_or_norms)]
        for matrix_use, product in zip(plan.matrix_uses, products):
            total = _plus_weighted(total, matrix_use, product, root, share, counts)
        return total, None

    width = weights.counts.size
    # The patches of all images may be more than all that was captured.
    if plan.matrix_uses[0].use.name == "conv_general_dilated":
        width = _width(plan, captured, width)
    if plan.norm_by == "gram" and plan.is_bounded:
        width = min(width, passes.block_width(plan.positions))
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


def _width(plan: LeafPlan, captured: list[Captured], size: int) -> int:
    """How many examples are looked at at once: the temporaries of norms may be larger
    than all that was captured.
    """
    captured_bytes = sum(x.nbytes for x in jax.tree.leaves(captured))
    captured_size = captured_bytes // np.float32().nbytes
    # With an eighth, a network of convolutions took 1.42 times the memory of a plain
    # gradient on a CPU instead of 1.30, and no less time.
    room = max(captured_size // 16, 2 * passes.small_memory())
    width = room // max(plan.temporaries, 1)
    if width >= size:
        return size
    # A power of two mostly fills the batch.
    return 1 << (max(width, 1).bit_length() - 1)


def _plus_weighted(
    total: Array,
    matrix_use: MatrixUse,
    products: OuterProducts,
    root: Array,
    share: Array,
    counts: Array,
) -> Array:
    """The total, plus the outer products of the examples that count, each times the
    square of its root and its share.
    """
    # Selected, since 0 times NaN is NaN.
    a = jnp.where(along_batch(counts, products.a), products.a, 0)
    c = jnp.where(along_batch(counts, products.c), products.c, 0)
    wide = total.dtype
    is_bfloat16 = a.dtype == c.dtype == jnp.bfloat16
    c = times_square(c.astype(wide), along_batch(root, c))
    c = c * along_batch(share, c).astype(wide)
    if a.ndim == 3:
        return total.at[jnp.arange(len(total))[:, None], a].add(c)
    a = a.astype(wide)
    c_terms = [c]
    if is_bfloat16:
        # As fast on a GPU and a TPU as one that gives bfloat16. The cotangents, which
        # have the factors of the examples in them, are then two arrays: one of bfloat16
        # would round the factors. The first is cut and not rounded, so that without the
        # second, which may be flushed to 0, the gradient is shorter.
        bits = lax.bitcast_convert_type(c, np.uint32) & np.uint32(0xFFFF0000)
        leading = lax.bitcast_convert_type(bits, np.float32)
        remainder = c - leading
        a = a.astype(jnp.bfloat16)
        c_terms = [leading.astype(jnp.bfloat16), remainder.astype(jnp.bfloat16)]
    # Over examples and positions, for each matrix of the stack.
    dimension_numbers = ((0, 2), (0, 2)), ((1,), (1,))
    # An algorithm would also say in which dtype to add up.
    precision = matrix_use.use.eqn.params.get("precision")
    if not isinstance(precision, (tuple, lax.Precision)):
        precision = None
    if a.shape[1:3] == (1, 1):
        # One position. A CPU takes up to 6 % less for a gradient of small batches.
        # More positions, joined to the batch, would be gathered if devices split them.
        a = a[:, 0, 0]
        c_terms = [x[:, 0, 0] for x in c_terms]
        dimension_numbers = ((0,), (0,)), ((), ())
    for c in c_terms:
        product = lax.dot_general(a, c, dimension_numbers, precision, wide)
        total = total + product.reshape(total.shape)
    return total


def _after(before: Array, counts: Array) -> Array:
    """The same booleans, known only after another value is.

    XLA on a CPU computes as soon as it can. It would copy what was captured at all uses
    before it sums the first: a perceptron took a quarter more memory.
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
    loss = problem.program
    program = split_loss(loss, params)
    uses = program.uses()
    plans = []
    for plan in plans_of(uses, params):
        plans.append(plan._replace(is_bounded=problem.is_sum))
    gradient_leaves = []
    gradient_uses: dict[int, Use] = {}
    matrix_leaves = []
    for leaf, plan in enumerate(plans):
        if plan.norm_by == "gradient":
            gradient_leaves.append(leaf)
            gradient_uses |= plan.uses
        elif plan.matrix_uses:
            matrix_leaves.insert(0, leaf)
    return Ghost(
        program,
        params,
        plans,
        out_tree=jax.tree.structure(problem.returned),
        gradient_leaves=gradient_leaves,
        gradient_uses=gradient_uses,
        matrix_leaves=matrix_leaves,
        captured_size=sum(use.captured_size for use in uses),
        held=sum(plan.held for plan in plans),
        is_convolved=any(map(has_convolution, loss.jaxpr.eqns)),
    )
