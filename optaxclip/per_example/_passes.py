"""A batch, a few examples at a time: the gradients of a microbatch, their norms, and
their weighted sum.

It needs no memory that grows with the batch beyond a few numbers for each example,
apart from the activations of a microbatch.
"""

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer

from .. import _trees as trees
from .._checks import check_limit, check_scalar, in_norm_dtype, is_function, shown
from .._factors import factor_between, shrunk_by, times_square
from .._mesh import AxisNames
from .._mesh_types import varying, varying_as_any_of
from .._prefixes import Prefix
from .._reduce import LeafSpec, norms_of
from ..rules._rule import is_rule
from ..shrinks import Shrink
from ._problem import Problem

Arrays = list[Array]
# (counts, *examples) -> (terms of a sum, results of each example)
Step = Callable[..., tuple[Any, Any]]
# How many times longer the terms of a gradient may be than their sum. Where they cancel
# more, rounding is too large a part of it, and the example counts as longer than it is.
CANCELS = 16


class Limits(NamedTuple):
    """A tree prefix of limits. Each part of the gradient that has a limit is a group,
    with its own norm and factor.
    """

    call: str  # of the user
    # for each group a number, a function of its norms, or None for no limit
    values: list[Any]
    shrink: Shrink
    table: Prefix = Prefix(())  # path in the tree, number of the group
    treedef: Any = None
    groups: Sequence[int] = ()  # for each leaf, the number of its group
    # for each leaf, the mesh axes over which it is split. () if no leaf is
    splits: Sequence[AxisNames] = ()
    divisor: Any = 1  # of the sum

    def joint(self) -> Any:
        """The limit of all groups together: the root of the sum of their squares. None
        if a group is known to have none.
        """
        is_traced = False
        for limit in self.values:
            if limit is None or is_function(limit):
                return None
            if isinstance(limit, Tracer):
                is_traced = True
            elif math.isinf(limit):
                return None
        # Numbers that are not traced stay so, for `sensitivity` of dropin.jax_privacy.
        if not is_traced:
            return np.float64(math.hypot(*map(float, self.values)))
        dtype = jnp.result_type(float)
        # A traced limit may be negative, and then counts as 0.
        limits = [jnp.maximum(in_norm_dtype(dtype, limit), 0) for limit in self.values]
        return reduce(jnp.hypot, limits) * (1 + len(limits) * 2.0**-22)

    def weigh(
        self, leaves: Arrays, present: Array, term_bounds: Arrays | None = None
    ) -> "Weights":
        """Norms and factors of gradients with a leading batch axis.

        `term_bounds` has for each leaf a bound of sum |term| over the terms of an
        example's gradient that are added up together with those of the others, 0 where
        the gradient is made before. None if all are made before.
        """
        splits = self.splits or [()] * len(leaves)
        specs = []
        for group, mesh_axes in zip(self.groups, splits):
            specs.append(LeafSpec(norm_index=group, summed_over=mesh_axes))

        def norms_of_one(leaves: Arrays) -> Array:
            return jnp.stack(norms_of(tuple(specs), len(self.values), None, leaves))

        norms_of_batch = jax.vmap(norms_of_one, axis_size=present.size)
        norms = norms_of_batch(leaves)
        if term_bounds:
            least = norms_of_batch(lax.stop_gradient(term_bounds)) / CANCELS
            norms = jnp.maximum(norms, least.astype(norms.dtype))
        return self.weights(norms, present)

    def weights(self, norms: Array, present: Array) -> "Weights":
        """Factors of gradients with these norms, [batch, groups]."""
        counts = present & jnp.all(jnp.isfinite(norms), axis=1)
        counted_norms = jnp.where(counts[:, None], norms, 0.0)
        norms_or_nan = jnp.where(counts[:, None], norms, jnp.nan)
        norms_or_nan = lax.stop_gradient(norms_or_nan)
        limits = []
        for group, limit in enumerate(self.values):
            if limit is None:
                limit = jnp.inf
            if is_function(limit):
                # Each device gets the norms of all, in shard_map too.
                all_norms = norms_or_nan[:, group]
                for name in sorted(varying(all_norms)):
                    all_norms = lax.all_gather(all_norms, name, tiled=True)
                limit = limit(all_norms)
                check_scalar(f"{self.call}: what max_norm returns", limit)
                # Without an example there is no median.
                limit = jnp.where(jnp.any(counts), limit, 0)
            limits.append(in_norm_dtype(norms.dtype, limit))
        # A traced limit may be negative, and then counts as 0.
        limits_of_groups = jnp.maximum(jnp.stack(limits), 0)
        limits_of_norms = jnp.broadcast_to(limits_of_groups, norms.shape)
        new_norms = shrunk_by(self.shrink, counted_norms, limits_of_norms, self.call)
        factor = factor_between(counted_norms, new_norms)
        return Weights(
            norms=jnp.where(present[:, None], norms, 0.0),
            roots=factor.root,
            factors=jnp.where(counts[:, None], factor.reported, 0.0),
            counts=counts,
            shares=jnp.ones_like(counted_norms[:, 0])
            / in_norm_dtype(norms.dtype, self.divisor),
        )


class Weights(NamedTuple):
    """Norms and factors of the examples of a batch."""

    # float32[batch, groups]: 0 for an example that is not present
    norms: Array
    # float32[batch, groups]: what each gradient is multiplied by twice. Without meaning
    # for an example that does not count.
    roots: Array
    # float32[batch, groups]: what each gradient is multiplied by altogether, for
    # reports. 0 for an example that does not count.
    factors: Array
    counts: Array  # bool[batch]: is present and has finite norms
    shares: Array  # float32[batch]: 1 over the divisor of the sum, for all the same

    def total(self, leaf: Array, group: int) -> Array:
        """The sum over the batch of the gradients that count, times the factors of a
        group, in float32 or wider.
        """
        root = along_batch(self.roots[:, group], leaf)
        counts = along_batch(self.counts, leaf)
        wide = np.promote_types(leaf.dtype, root.dtype)
        # Selected, since 0 times NaN is NaN.
        kept = jnp.where(counts, times_square(leaf.astype(wide), root), 0)
        # A dot, which on a CPU is four times as fast as a sum over the first axis. At
        # the highest precision, because GPU and TPU would round to fewer bits.
        highest = lax.Precision.HIGHEST
        shares = self.shares.astype(wide)
        return jnp.tensordot(shares, kept, axes=1, precision=highest)


def limits_of(max_norm: Any, call: str, shrink: Shrink) -> Limits:
    """The limits of a number, a function, or of a tree of them.

    Raises:
      TypeError, ValueError: something that is not a limit, an array of several, or no
        limit at all.
    """
    argument = f"{call}: max_norm"
    # A rule is a tree to JAX. Examples have no steps that it could learn from.
    limits, treedef = jax.tree.flatten_with_path(
        max_norm, is_leaf=lambda limit: limit is None or is_rule(limit)
    )
    if not limits:
        raise ValueError(f"{argument} has no limit in it, got {shown(max_norm)}.")
    values = []
    groups = []
    for group, (path, limit) in enumerate(limits):
        if limit is not None and not is_function(limit):
            argument_of_path = f"{argument} for {trees.name(path)!r}"
            check_limit(argument_of_path if path else argument, limit, is_scalar=True)
        values.append(limit)
        groups.append((path, group))
    return Limits(call, values, shrink, Prefix(tuple(groups)), treedef)


def small_memory() -> int:
    """How many numbers of float32 are not worth a loop."""
    # A megabyte on a CPU, which is the faster the more stays in its cache. Elsewhere a
    # loop starts its kernels in each turn.
    return 2**18 if jax.default_backend() == "cpu" else 2**23


def along_batch(per_example: Array, leaf: Array) -> Array:
    """One number for each example, in a shape that broadcasts against a leaf with a
    leading batch axis.
    """
    return per_example.reshape(-1, *(1,) * (leaf.ndim - 1))


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

    `counts` is False for examples that only fill up the last microbatch. `plus` adds
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
