"""One pass: the gradients of examples by `jax.vmap`, their norms, and their weighted
sum, a microbatch at a time (`BatchRun.in_one_pass`). Ghost clipping uses the same loop
over microbatches (`in_microbatches`), and the helpers below.

Memory is that of one microbatch, plus a few numbers for each example.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .._devices.mesh_types import varying_as_any_of
from .._trees import PyTree
from ._example_factors import Arrays, ExampleFactors, NormSource, factors_of_examples
from ._traced import TracedProblem

# (is_present, *examples) -> (terms of a sum, results of each example)
MicrobatchFunction = Callable[..., tuple[PyTree, PyTree]]


class ExampleResults(NamedTuple):
    """The results of the examples of a batch."""

    factors: ExampleFactors
    values: Array  # float[batch]: of the loss
    aux: PyTree  # [batch, ...]


class BatchRun(NamedTuple):
    """The clipping of one batch on a device. `in_one_pass` and `run_steps` return the
    weighted sums of the gradients, one for each parameter, and the results of the
    examples.
    """

    problem: TracedProblem
    width: int  # how many examples at once

    @property
    def needs_all_norms(self) -> bool:
        """Whether the whole batch is one microbatch, because a limit is a function of
        all norms.
        """
        return self.problem.limits.needs_all_norms

    def in_one_pass(self) -> tuple[Arrays, ExampleResults]:
        """Makes the gradients of the examples of each microbatch."""
        value_and_grad = jax.value_and_grad(self.problem.traced_loss, has_aux=True)

        def gradient_of_one(params: PyTree, example: PyTree) -> tuple[PyTree, Arrays]:
            value_and_aux, grads = value_and_grad(params, example)
            # As leaves: a class of the user's may refuse arrays with a batch axis.
            return value_and_aux, jax.tree.leaves(grads)

        def gradients_of(examples: PyTree) -> tuple[PyTree, Arrays]:
            gradient = partial(gradient_of_one, self.problem.params)
            if self.needs_all_norms and self.width == 1:
                # One at a time in the one microbatch
                return lax.map(gradient, examples)
            return jax.vmap(gradient)(examples)

        def step(is_present: Array, examples: PyTree) -> tuple[Arrays, ExampleResults]:
            (values, aux), grads = gradients_of(examples)
            # Without this barrier XLA on a CPU would also write to memory the float64
            # squares of the gradients, which only the norms need.
            grads = written_to_memory(grads)
            sources = [NormSource(leaf) for leaf in grads]
            factors = factors_of_examples(self.problem, sources, is_present)
            sums = []
            for leaf, group_index in zip(grads, self.problem.groups):
                sums.append(factors.of_group(group_index).weighted_sum(leaf))
            return sums, ExampleResults(factors, values, aux)

        return self.run_steps(step)

    def run_steps(self, step: MicrobatchFunction) -> tuple[Arrays, ExampleResults]:
        """Runs `step(is_present, examples)` on each microbatch."""
        width = None if self.needs_all_norms else self.width
        # One argument of `step` is the whole batch, a tuple.
        batch = (self.problem.batch,)
        return in_microbatches(
            step, self.zeros(), self.problem.is_present, batch, width
        )

    def zeros(self) -> Arrays:
        """Sums of no gradients, in float32 or wider: in 16 bits small gradients would
        be lost beside their sum.
        """
        zeros = []
        for leaf in jax.tree.leaves(self.problem.params):
            dtype = np.promote_types(leaf.dtype, np.float32)
            # `zeros_like` keeps how an Explicit mesh splits the parameter.
            zero = jnp.zeros_like(leaf, dtype)
            # lax.scan needs zeros of the type that its sums will have, also of the mesh
            # axes that they vary over.
            zeros.append(varying_as_any_of(zero, (self.problem.batch, leaf)))
        return zeros


def in_microbatches(
    step: MicrobatchFunction,
    total: PyTree,
    is_present: Array,
    batch: PyTree,
    max_width: int | None,
    add: Callable[[PyTree, PyTree], PyTree] | None = None,
) -> tuple[PyTree, PyTree]:
    """Runs `step(is_present, *examples) -> (terms, results)` on each microbatch, of at
    most `max_width` examples, or on the whole batch for None.

    `is_present` is bool[batch]. A step gets False also for examples that only fill up
    its microbatch. `add` adds terms to the total. If it is None they are added leaf by
    leaf.

    Returns:
      The total plus all terms, and the results of each example.
    """
    add = add or partial(jax.tree.map, _plus)
    size = is_present.size
    width = even_width(size, max_width or size)
    microbatch_count = -(-size // width)
    if microbatch_count == 1:
        terms, results = step(is_present, *batch)
        return add(total, terms), results

    def split(x: Array) -> Array:
        """[batch, ...] as [width, microbatch_count, ...].

        Of m microbatches number n has the examples n, n + m, n + 2 m, and so on,
        instead of neighbours. Devices that share a batch then have a part of every
        microbatch, and need not send any.
        """
        missing = width * microbatch_count - size
        if missing:
            # The first examples fill up. Fewer than `width` are missing, so the batch
            # has enough of them.
            x = jnp.concatenate([x, x[:missing]])
        return x.reshape(width, microbatch_count, *x.shape[1:])

    def joined(x: Array) -> Array:
        """[microbatch_count, width, ...] as [batch, ...], without the examples that
        fill up.
        """
        return jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:])[:size]

    # The examples that fill up must not count again.
    is_first_time = np.arange(width * microbatch_count) < size
    is_present = split(is_present) & is_first_time.reshape(width, microbatch_count)
    batch = jax.tree.map(split, batch)

    def take_turn(total: PyTree, turn: Array) -> tuple[PyTree, PyTree]:
        # lax.scan itself slices first axes, for which the batch would be transposed.
        def take(x: Array) -> Array:
            return lax.dynamic_index_in_dim(x, turn, 1, keepdims=False)

        terms, results = step(*jax.tree.map(take, (is_present, *batch)))
        return add(total, terms), results

    total, results = lax.scan(take_turn, total, jnp.arange(microbatch_count))
    return total, jax.tree.map(joined, results)


def _plus(total: Array, term: Array) -> Array:
    return total + term.astype(total.dtype)


def even_width(size: int, max_width: int) -> int:
    """The smallest width with which microbatches are as few as with `max_width`.

    32 examples with at most 9 are four microbatches of 8, not of 9, 9, 9 and 5.
    """
    microbatch_count = -(-size // min(max_width, size))
    return -(-size // microbatch_count)


class KahanSum(NamedTuple):
    """A running sum, and how much its last addition rounded up.

    Reference: Kahan, Further remarks on reducing truncation errors, 1965.
    """

    total: Array
    excess: Array

    def plus(self, term: Array) -> "KahanSum":
        """Adds a term, less the excess of the addition before."""
        term = term - self.excess
        total = self.total + term
        return KahanSum(total, (total - self.total) - term)

    @staticmethod
    def of(terms: Arrays) -> Array:
        """The sum of some arrays."""
        first, *later_terms = terms
        sum_so_far = KahanSum(first, jnp.zeros_like(first))
        for term in later_terms:
            sum_so_far = sum_so_far.plus(term)
        return sum_so_far.total


def block_size() -> int:
    """How many terms are added up at once where terms may cancel. On a CPU `KahanSum`
    adds up the sums of such blocks. Elsewhere all terms are one block.
    """
    return 256 if jax.default_backend() == "cpu" else sys.maxsize


def numbers_without_loop() -> int:
    """Up to this many float32 numbers one array is faster than a loop over parts."""
    # A megabyte on a CPU, which fits its cache. Elsewhere 32 megabytes, since each turn
    # of a loop starts kernels again.
    return 2**18 if jax.default_backend() == "cpu" else 2**23


def written_to_memory(tree: PyTree) -> PyTree:
    """The arrays of a tree, written to memory, so that norms and sums read the same
    numbers.

    Without it XLA may compute an array again for each reader, rounded differently each
    time. It also leaves out a rounding to 16 bits before a computation in float32.
    """
    return jax.tree.map(lax.optimization_barrier, tree)
