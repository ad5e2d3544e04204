"""Ghost clipping with book-keeping: the clipped gradient of a batch from one backward
pass, without the large gradients of its examples.

    1. Run the loss of all examples. Capture what comes into each use of a parameter, x.
    2. Run backward once, to the cotangents of what comes out of the uses, g.
    3. Norms of the gradients of examples, from x and g. Gradients that are smaller than
       these are made of them, and held.
    4. The sum of the gradients with factors f, from x and f g: again no backward pass.

Where a use of a parameter has no such factors, JAX makes the gradients of examples by
that parameter.

References: Li, Tramer, Liang, Hashimoto, Large language models can be strong
differentially private learners, 2022 (arXiv 2110.05679). Bu, Wang, Zha, Karypis,
Differentially private optimization on large model at small cost, 2023 (arXiv
2210.00038).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ..._factors import stretch
from ..._jaxpr import has_backward_rule, has_convolution
from ..._mesh import typed_as_varying, varying
from .. import _passes as passes
from .._passes import Arrays, Run, Weights, along_batch
from .._problem import Problem
from ._capture import Captured, Program, Use, bind, capture, split_loss
from ._norms import Pair, Part, Way, by_gram, factors_of, found_by, joined, ways_of

Book = list[Captured]  # of each use


class Ghost(NamedTuple):
    """The loss of one example, ready to be run on batches."""

    program: Program
    params: Arrays
    ways: list[Way]
    out_tree: Any  # of the value and aux
    made: list[int]  # the parameters by which gradients of examples are made
    uses: dict[int, Use]  # their uses
    # the parameters whose gradients have factors, the last first
    factored: list[int]
    kept: int  # how many numbers are captured in one example
    held: int  # how many of its gradient are held until its factor is known
    is_convolved: bool

    def in_steps(self, run: Run) -> tuple[Arrays, Any]:
        """The weighted sums of the gradients, and what was found out."""

        def step(present: Array, example: Any) -> tuple[Arrays, Any]:
            outs, book = capture(self.program, self.params, jax.tree.leaves(example))
            # Gradients by some parameters, norms of gradients by others: their norm is
            # that of the gradient.
            found = [jnp.zeros(present.size, jnp.float32) for _ in self.ways]
            terms = list(found)
            for leaf, grads in zip(self.made, self._gradients(book)):
                found[leaf] = grads
            for leaf in self.factored:
                found[leaf], terms[leaf] = _looked_at(self.ways[leaf], book, present)
            weights = run.limits.weigh(found, present, terms)
            sums = self._sums(book, found, weights, run.limits.groups)
            values, aux = jax.tree.unflatten(self.out_tree, outs)
            return sums, (weights, values, aux)

        return run.in_steps(step)

    def _gradients(self, book: Book) -> Arrays:
        """The gradients of the examples by parameters that have no factors."""

        def of_one(book: Book) -> Arrays:
            inputs, cotangents = zip(*book)

            def outputs(made: dict[Any, Any]) -> list[Arrays]:
                pairs = zip(self.uses.values(), inputs)
                return [_outputs(made, *pair) for pair in pairs]

            outs, pull = self._vjp(outputs, self.made)
            typed = jax.tree.map(lambda x, y: x.astype(y.dtype), [*cotangents], outs)
            return pull(typed)[0]

        own = [book[number] for number in self.uses]
        return passes.written(jax.vmap(of_one)(own)) if own else []

    def _vjp(self, outputs: Callable[[Any], Any], leaves: list[int]) -> Any:
        """The derivative by some parameters, in float32 or wider."""

        def run(own: Arrays) -> Any:
            made: dict[Any, Any] = dict(enumerate(self.params))
            return outputs(made | dict(zip(leaves, own)))

        return jax.vjp(run, passes.widened([self.params[leaf] for leaf in leaves]))

    def _sums(
        self, book: Book, found: Arrays, weights: Weights, groups: Sequence[int]
    ) -> Arrays:
        """The sum over examples of gradients times factors, in float32 or wider."""
        sums = list(map(jnp.zeros_like, self.params))
        # The last come first, whose arrays are freed before those of others are copied.
        for leaf in [*self.made, *self.factored]:
            if leaf in self.made or self.ways[leaf].name == "matrix":
                sums[leaf] = weights.total(found[leaf], groups[leaf])
            else:
                sums[leaf] = self._sum(leaf, book, found[leaf], weights, groups[leaf])
            counts = _after(sums[leaf], weights.counts)
            weights = weights._replace(counts=counts)

        # From matrices to parameters it is linear, so it is done once for all examples.
        parts = [self.ways[leaf].parts[0] for leaf in self.factored]
        outs, pull = self._vjp(
            lambda made: [part.matrices(made) for part in parts], self.factored
        )
        pairs = zip(self.factored, outs)
        (pulled,) = pull([sums[leaf].astype(x.dtype) for leaf, x in pairs])
        for leaf, total in zip(self.factored, pulled):
            sums[leaf] = total
        return sums

    def _sum(
        self, leaf: int, book: Book, found: Array, weights: Weights, group: int
    ) -> Array:
        """The weighted sum of the gradients by a parameter that has factors, as
        matrices [stack, rows, columns].
        """
        way, param = self.ways[leaf], self.params[leaf]
        counts, root, share = weights.counts, weights.roots[:, group], weights.shares
        dtype = np.promote_types(param.dtype, root.dtype)
        own, start = way.own(book), jnp.zeros(way.matrices, dtype)
        start = typed_as_varying((own, param, counts), start)

        def step(
            counts: Array, own: Book, found: Array, root: Array, share: Array
        ) -> Any:
            total, pairs = start, list(map(factors_of, way.parts, own))
            if way.name == "rows":
                pairs = [(jnp.sort(joined(pairs)[0]), found)]
            for part, pair in zip(way.parts, pairs):
                total = _plus_weighted(total, part, pair, root, share, counts)
            return total, None

        # The patches of all images may be more than all that was captured.
        is_large = way.parts[0].use.name == "conv_general_dilated"
        width = _width(way, book, counts.size) if is_large else None
        each = own, found, root, share
        return passes.in_microbatches(step, start, counts, each, width)[0]


def _outputs(made: dict[Any, Any], use: Use, inputs: list[Any]) -> list[Any]:
    """The outputs of a use in one example that a backward pass comes by."""
    given = [origin.make(made) for origin in use.origins]
    if use.eqn is None:
        return given
    has_rule = has_backward_rule(use.eqn)

    def run(given: list[Any], inputs: list[Any], zero: Array) -> Any:
        if has_rule:
            # A rule of somebody's own sees the cotangent of each turn of a scan.
            given = [x + zero.astype(x.dtype) for x in given]
        ins, rest = dict(zip(use.places, given)), iter(inputs)
        every = range(len(use.eqn.invars))
        ins = [ins[k] if k in ins else next(rest) for k in every]
        outs = bind(use.eqn, ins, is_wide=True)
        return [outs[k] for k in use.tapped]

    # The innermost scan first, so that the axis of the outermost is in front.
    for depth, length in reversed(list(enumerate(use.loops))):
        axes = [0 if depth in x.loops else None for x in use.origins]
        run = jax.vmap(run, (axes, 0, 0), axis_size=length)
    return run(given, inputs, jnp.zeros(use.loops))


def _looked_at(way: Way, book: Book, counts: Array) -> tuple[Array, Array]:
    """Of a parameter that has factors, the norms of the examples' gradients, or the
    gradients, and bounds of their terms that are still to be added up.
    """

    def step(_: Array, own: Book) -> tuple[None, tuple[Array, Array]]:
        split = partial(factors_of, shifts=way.name == "matrix")
        pairs = list(map(split, way.parts, own))
        if way.name == "gram":
            return None, by_gram(pairs)
        found = found_by(way, pairs)
        # What is measured is what is added up.
        return None, (found, jnp.zeros(len(found), jnp.float32))

    width = _width(way, book, counts.size)
    found = passes.in_microbatches(step, None, counts, (way.own(book),), width)[1]
    return found if way.name == "product" else passes.written(found)


def _width(way: Way, book: Book, size: int) -> int:
    """How many examples are looked at at once: what is made to find norms may be larger
    than all that was captured.
    """
    kept = sum(x.nbytes for x in jax.tree.leaves(book)) // np.float32().nbytes
    # With an eighth, a network of convolutions took 1.42 times the memory of a plain
    # gradient on a CPU instead of 1.30, and no less time.
    most = max(kept // 16, 2 * passes.little()) // max(way.size, 1)
    # A power of two mostly fills the batch.
    return size if most >= size else 1 << (max(most, 1).bit_length() - 1)


def _plus_weighted(
    total: Array, part: Part, pair: Pair, root: Array, share: Array, counts: Array
) -> Array:
    """The total, plus the products of factors of the examples that count, each times
    the square of its root and its share.
    """
    # Selected, since 0 times NaN is NaN.
    a, c = (jnp.where(along_batch(counts, x), x, 0) for x in pair)
    wide, is_bfloat16 = total.dtype, a.dtype == c.dtype == jnp.bfloat16
    c = stretch(c.astype(wide), along_batch(root, c))
    c = c * along_batch(share, c).astype(wide)
    if a.ndim == 3:
        return total.at[jnp.arange(len(total))[:, None], a].add(c)
    a, parts = a.astype(wide), [c]
    if is_bfloat16:
        # As fast on a GPU and a TPU as one that gives bfloat16. The factors of the
        # examples are in the cotangents, which are two arrays then: one of bfloat16
        # would round the factors. Of a cast to bfloat16 and back XLA would make
        # nothing, and the second part zero.
        info = jnp.finfo(jnp.bfloat16)
        first = lax.reduce_precision(c, info.nexp, info.nmant)
        a, *parts = (x.astype(jnp.bfloat16) for x in (a, first, c - first))
    # Over examples and positions, for each matrix of the stack.
    over = ((0, 2), (0, 2)), ((1,), (1,))
    # An algorithm would say in what to add up, too.
    asked = part.use.eqn.params.get("precision")
    asked = asked if isinstance(asked, (tuple, lax.Precision)) else None
    if a.shape[1:3] == (1, 1):
        # Of one position. A CPU takes up to 6 % less for a gradient of small batches.
        # More positions, joined to the batch, would be gathered if devices split them.
        a, *parts = (x[:, 0, 0] for x in (a, *parts))
        over = ((0,), (0,)), ((), ())
    for c in parts:
        product = lax.dot_general(a, c, over, asked, wide)
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
    found = program.uses()
    ways = ways_of(found, params)
    made = [k for k, way in enumerate(ways) if way.name == "gradient"]
    uses: dict[int, Use] = {}
    for leaf in made:
        uses |= ways[leaf].uses
    factored = [k for k, way in enumerate(ways) if way.parts][::-1]
    out_tree = jax.tree.structure(problem.returned)
    kept, held = sum(use.kept for use in found), sum(way.held for way in ways)
    known = kept, held, any(map(has_convolution, loss.jaxpr.eqns))
    return Ghost(program, params, ways, out_tree, made, uses, factored, *known)
