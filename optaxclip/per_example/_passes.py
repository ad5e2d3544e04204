"""A batch, a few examples at a time: the gradients of a microbatch, their norms, and
their weighted sum.

It needs no memory that grows with the batch beyond a few numbers for each example,
apart from the activations of a microbatch.
"""

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer

from .. import _trees as prefix
from .._checks import check_limit, check_scalar, held_in, is_function, shown
from .._factors import factor_between, shrunk_by, stretch
from .._mesh import Names, Split, typed_as_varying, varying
from .._plan import Leaf, Plan, norms_of
from ..rules._rule import is_rule
from ..shrinks import Shrink
from ._problem import Problem

Arrays = list[Array]
# (counts, *examples) -> (terms of a sum, what was found for each example)
Step = Callable[..., tuple[Any, Any]]
# How many times longer the terms of a gradient may be than their sum. Where they cancel
# more, rounding is too large a part of it, and the example counts as longer than it is.
CANCELS = 128


class Limits(NamedTuple):
    """A tree prefix of limits. Each part of the gradient that has one is a group: it is
    measured and clipped separately.
    """

    call: str  # of the user
    # for each group a number, a function of its norms, or None for no limit
    values: list[Any]
    shrink: Shrink
    table: prefix.Prefix = prefix.Prefix(())  # path in the tree, number of the group
    treedef: Any = None
    groups: Sequence[int] = ()  # for each leaf, the number of its group
    # for each leaf, the mesh axes over which it is split. () if none is
    splits: Sequence[Names] = ()
    divisor: Any = 1  # of the sum

    def joint(self) -> Array | None:
        """The limit of all groups together: the root of the sum of their squares. None
        if a group is known to have none.
        """
        for limit in self.values:
            if limit is None or is_function(limit):
                return None
            if not isinstance(limit, Tracer) and math.isinf(limit):
                return None
        dtype = jnp.result_type(float)
        # A traced limit may be negative, and then counts as 0.
        limits = [jnp.maximum(held_in(dtype, limit), 0) for limit in self.values]
        return reduce(jnp.hypot, limits)

    def weigh(
        self, leaves: Arrays, present: Array, terms: Arrays | None = None
    ) -> "Weights":
        """Norms and factors of gradients with a leading batch axis.

        `terms` has for each leaf a bound of sum |term| over the terms of an example's
        gradient that are added up together with those of the others, 0 where it is made
        before. None if all are made before.
        """
        splits = self.splits or [()] * len(leaves)
        own = [Leaf(x, None, Split(y)) for x, y in zip(self.groups, splits)]
        plan = Plan(tuple(own), len(self.values))

        def of_one(leaves: Arrays) -> Array:
            return jnp.stack(norms_of(plan, leaves))

        measure = jax.vmap(of_one, axis_size=present.size)
        norms = measure(leaves)
        if terms:
            least = measure(lax.stop_gradient(terms)) / CANCELS
            norms = jnp.maximum(norms, least.astype(norms.dtype))
        return self.weights(norms, present)

    def weights(self, norms: Array, present: Array) -> "Weights":
        """Factors of gradients with these norms, [batch, groups]."""
        counts = present & jnp.all(jnp.isfinite(norms), axis=1)
        known = jnp.where(counts[:, None], norms, 0.0)
        limits, seen = [], lax.stop_gradient(jnp.where(counts[:, None], norms, jnp.nan))
        for group, limit in enumerate(self.values):
            if is_function(limit):
                # Each device gets the norms of all, in shard_map too.
                every = seen[:, group]
                for name in sorted(varying(every)):
                    every = lax.all_gather(every, name, tiled=True)
                limit = limit(every)
                check_scalar(f"{self.call}: what max_norm returns", limit)
                # Without an example there is no median.
                limit = jnp.where(jnp.any(counts), limit, 0)
            limits.append(held_in(norms.dtype, jnp.inf if limit is None else limit))
        # A traced limit may be negative, and then counts as 0.
        limit = jnp.stack(limits)
        limit = jnp.broadcast_to(jnp.maximum(limit, 0), norms.shape)
        new = shrunk_by(self.shrink, known, limit, self.call)
        factor = factor_between(known, new)
        return Weights(
            norms=jnp.where(present[:, None], norms, 0.0),
            roots=factor.root,
            factors=jnp.where(counts[:, None], factor.reported, 0.0),
            counts=counts,
            shares=jnp.ones_like(known[:, 0]) / held_in(norms.dtype, self.divisor),
        )


class Weights(NamedTuple):
    """What was found out about the examples of a batch."""

    # float32[batch, groups]: 0 for an example that is not present
    norms: Array
    # float32[batch, groups]: what each gradient is multiplied by twice. Without meaning
    # for an example that does not count.
    roots: Array
    # float32[batch, groups]: what it is multiplied by altogether, for reports. 0 for an
    # example that does not count.
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
        kept = jnp.where(counts, stretch(leaf.astype(wide), root), 0)
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
    found, treedef = jax.tree.flatten_with_path(
        max_norm, is_leaf=lambda limit: limit is None or is_rule(limit)
    )
    if not found:
        raise ValueError(f"{argument} has no limit in it, got {shown(max_norm)}.")
    for path, value in found:
        where = f"{argument} for {prefix.name(path)!r}" if path else argument
        if value is not None and not is_function(value):
            check_limit(where, value, is_scalar=True)
    values = [value for _, value in found]
    entries = tuple((path, number) for number, (path, _) in enumerate(found))
    return Limits(call, values, shrink, prefix.Prefix(entries), treedef)


def little() -> int:
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
    """The arrays of a tree, with float32 in the place of 16 bits."""

    def wide(x: Any) -> Any:
        return x.astype(np.float32) if is_narrow(x) else x

    return jax.tree.map(wide, tree)


def written(tree: Any) -> Any:
    """The arrays of a tree, written to memory, where all readers get the same numbers.

    XLA computes what has several readers several times, each time rounded differently,
    and leaves out a rounding to 16 bits before what computes in float32. It would
    measure other numbers than it adds up.
    """
    return jax.tree.map(lax.optimization_barrier, tree)


class Run(NamedTuple):
    """One call of the function that `clipped_grad` made.

    Each method returns the weighted sums of the gradients, and what was found out about
    the examples: their weights, values and aux.
    """

    problem: Problem
    limits: Limits
    microbatch: int | None

    def in_one_pass(self) -> tuple[Arrays, Any]:
        def step(present: Array, example: Any) -> tuple[Arrays, Any]:
            grads, found = self._look(present, example)
            return list(map(found[0].total, grads, self.limits.groups)), found

        return self.in_steps(step)

    def in_steps(self, step: Any) -> tuple[Arrays, Any]:
        inputs = self.problem.present, (self.problem.batch,)
        return in_microbatches(step, self._zeros(), *inputs, self.microbatch)

    def _zeros(self) -> Arrays:
        """Where gradients are summed: float32 or wider, so that many small 16-bit
        gradients are not lost beside their sum.
        """

        def zero(leaf: Array) -> Array:
            x = jnp.zeros(leaf.shape, np.promote_types(leaf.dtype, np.float32))
            # As lax.scan asks for: of the type of the sums that follow.
            return typed_as_varying((self.problem.batch, leaf), x)

        return list(map(zero, jax.tree.leaves(self.problem.params)))

    def _look(self, present: Array, example: Any) -> tuple[Arrays, Any]:
        """The gradients of a microbatch, and what was found out."""
        gradient = jax.value_and_grad(self.problem.of_one, has_aux=True)

        def of_one(params: Any, example: Any) -> tuple[Any, Arrays]:
            found, grads = gradient(params, example)
            # A node of the user's may refuse gradients of several examples.
            return found, jax.tree.leaves(grads)

        run = jax.vmap(of_one, (None, 0))
        (values, aux), grads = run(self.problem.params, example)
        # XLA on a CPU would else write the float64 squares of gradients that only a
        # norm reads.
        leaves = written(grads)
        return leaves, (self.limits.weigh(leaves, present), values, aux)


def in_microbatches(
    step: Step, total: Any, counts: Array, batch: Any, most: int | None
) -> tuple[Any, Any]:
    """Runs `step(counts, *examples) -> (terms, found)` on each microbatch, of at most
    `most` examples.

    `counts` is False for examples that only fill up the last microbatch.

    Returns:
      The total plus all terms, and what was found for each example.
    """
    size = counts.size
    width = evened(size, int(most or size))
    count = -(-size // width)
    if count == 1:
        terms, found = step(counts, *batch)
        return jax.tree.map(_plus, total, terms), found

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

        terms, found = step(*jax.tree.map(take, (counts & is_real, *batch)))
        return jax.tree.map(_plus, total, terms), found

    total, found = lax.scan(body, total, jnp.arange(count))
    return total, jax.tree.map(joined, found)


def _plus(total: Array, term: Array) -> Array:
    return total + term.astype(total.dtype)


def evened(size: int, most: int) -> int:
    """How many examples are in each of the fewest microbatches of at most some.

    32 examples, 9 at once, would be 4 microbatches with 4 examples to spare. 8 at once
    they are 4 microbatches as well, with none.
    """
    count = -(-size // min(most, size))
    return -(-size // count)
