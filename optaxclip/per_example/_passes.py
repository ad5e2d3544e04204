"""A batch, a few examples at a time: the gradients of a microbatch, their norms, and
their weighted sum.

It needs no memory that grows with the batch beyond a few numbers for each example,
apart from the activations of a microbatch.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .._mesh_types import varying_as_any_of
from ._limits import Arrays, Limits, Weights
from ._problem import Problem

# (counts, *examples) -> (terms of a sum, results of each example)
Step = Callable[..., tuple[Any, Any]]


def small_memory() -> int:
    """How many numbers of float32 are not worth a loop."""
    # A megabyte on a CPU, which is the faster the more stays in its cache. Elsewhere a
    # loop starts its kernels in each turn.
    return 2**18 if jax.default_backend() == "cpu" else 2**23


def is_narrow(x: Any) -> bool:
    """Whether an array, a type, or a dtype has floats of 16 bits or fewer."""
    dtype = getattr(x, "dtype", x)
    is_float = jnp.issubdtype(dtype, jnp.inexact)
    return is_float and jnp.finfo(dtype).bits < 32


def widened(tree: Any) -> Any:
    """The arrays of a tree, with float32 instead of 16 bits."""

    def wide(x: Any) -> Any:
        return x.astype(np.float32) if is_narrow(x) else x

    return jax.tree.map(wide, tree)


def written(tree: Any) -> Any:
    """The arrays of a tree, written to memory, where all readers get the same numbers.

    XLA computes a value with several readers several times, each time rounded
    differently, and leaves out a rounding to 16 bits before a computation in float32.
    The norms would be those of other numbers than are added up.
    """
    return jax.tree.map(lax.optimization_barrier, tree)


class ExampleResults(NamedTuple):
    """The results of the examples of a batch."""

    weights: Weights
    values: Array  # float[batch]: of the loss
    aux: Any  # [batch, ...]


class Run(NamedTuple):
    """One call of the function that `clipped_grad` made.

    Each method returns the weighted sums of the gradients, and the results of the
    examples.
    """

    problem: Problem
    limits: Limits
    microbatch: int | None

    def in_one_pass(self) -> tuple[Arrays, ExampleResults]:
        value_and_grad = jax.value_and_grad(self.problem.of_one, has_aux=True)

        def of_one(params: Any, example: Any) -> tuple[Any, Arrays]:
            value_and_aux, grads = value_and_grad(params, example)
            # A node of the user's may refuse gradients of several examples.
            return value_and_aux, jax.tree.leaves(grads)

        of_all = jax.vmap(of_one, (None, 0))

        def step(present: Array, example: Any) -> tuple[Arrays, ExampleResults]:
            (values, aux), grads = of_all(self.problem.params, example)
            # XLA on a CPU would else write the float64 squares of gradients that only a
            # norm reads.
            grads = written(grads)
            weights = self.limits.weigh(grads, present)
            sums = list(map(weights.total, grads, self.limits.groups))
            return sums, ExampleResults(weights, values, aux)

        return self.in_steps(step)

    def in_steps(self, step: Step) -> tuple[Arrays, ExampleResults]:
        return in_microbatches(
            step,
            self._zeros(),
            self.problem.present,
            (self.problem.batch,),
            self.microbatch,
        )

    def _zeros(self) -> Arrays:
        """Where gradients are summed: float32 or wider, so that many small 16-bit
        gradients are not lost beside their sum.
        """

        zeros = []
        for leaf in jax.tree.leaves(self.problem.params):
            zero = jnp.zeros(leaf.shape, np.promote_types(leaf.dtype, np.float32))
            # As lax.scan asks for: of the type of the sums that follow.
            zeros.append(varying_as_any_of(zero, (self.problem.batch, leaf)))
        return zeros


def in_microbatches(
    step: Step,
    total: Any,
    counts: Array,
    batch: Any,
    most: int | None,
    plus: Callable[[Any, Any], Any] | None = None,
) -> tuple[Any, Any]:
    """Runs `step(counts, *examples) -> (terms, results)` on each microbatch, of at most
    `most` examples.

    `counts` is False for examples that only fill up a microbatch. `plus` adds
    terms to the total, leaf by leaf if it is None.

    Returns:
      The total plus all terms, and the results of each example.
    """
    plus = plus or partial(jax.tree.map, _plus)
    size = counts.size
    width = even_width(size, int(most or size))
    count = -(-size // width)
    if count == 1:
        terms, results = step(counts, *batch)
        return plus(total, terms), results

    def split(x: Array) -> Array:
        """[batch, ...] as [width, count, ...].

        Each microbatch gets every count-th example instead of neighbours. Devices that
        share a batch then have a part of every microbatch, and need not send any.
        """
        missing = width * count - size
        if missing:
            # Fewer than width, so the batch has as many to fill up with.
            x = jnp.concatenate([x, x[:missing]])
        return x.reshape(width, count, *x.shape[1:])

    def joined(x: Array) -> Array:
        """[count, width, ...] in the order of the batch."""
        return jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:])[:size]

    # Entry k of turn n is example k * count + n of the batch.
    is_real = np.arange(width * count).reshape(width, count) < size
    counts, batch = jax.tree.map(split, (counts, batch))

    def body(total: Any, turn: Array) -> tuple[Any, Any]:
        # lax.scan slices first axes, and would need a transposed copy of the batch.
        def take(x: Array) -> Array:
            return lax.dynamic_index_in_dim(x, turn, 1, keepdims=False)

        terms, results = step(*jax.tree.map(take, (counts & is_real, *batch)))
        return plus(total, terms), results

    total, results = lax.scan(body, total, jnp.arange(count))
    return total, jax.tree.map(joined, results)


def _plus(total: Array, term: Array) -> Array:
    return total + term.astype(total.dtype)


def block_size() -> int:
    """How many terms are added up at once where terms may cancel: few on a CPU, where
    what is lost between blocks is kept.
    """
    return 256 if jax.default_backend() == "cpu" else sys.maxsize


class KahanSum(NamedTuple):
    """A sum, and what its last addition added too much.

    Reference: Kahan, Further remarks on reducing truncation errors, 1965.
    """

    total: Array
    excess: Array

    def plus(self, term: Array) -> "KahanSum":
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


def even_width(size: int, most: int) -> int:
    """How many examples are in each of the fewest microbatches of at most `most`.

    32 examples, 9 at once, would be 4 microbatches with 4 examples to spare. 8 at once
    they are 4 microbatches as well, with none.
    """
    count = -(-size // min(most, size))
    return -(-size // count)
