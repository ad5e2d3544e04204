"""Ghost clipping with book-keeping: the clipped gradient of a batch from one backward
pass, without the gradients of its examples.

    1. Run the loss of all examples. Keep what comes into each use of a parameter, x.
    2. Run backward once, to the cotangents of what comes out of the uses, g.
    3. Norms of the gradients of examples, from x and g.
    4. The sum of the gradients with factors f, from x and f g: again no backward pass.

Where a backward rule of somebody's own (custom_vjp) leads to a parameter, the gradients
of examples by it are made in step 4 too: the rule may not be linear. So they are where
the way to it rounds to 16 bits, unless `_wide` knows how to go it in float32.

References: Li, Tramer, Liang, Hashimoto, Large language models can be strong
differentially private learners, 2022 (arXiv 2110.05679). Bu, Wang, Zha, Karypis,
Differentially private optimization on large model at small cost, 2023 (arXiv
2210.00038).
"""

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._factors import stretch
from .._jaxpr import has_convolution
from .._mesh import varying_as
from ._book import PRODUCTS, Book, Kept, factors_of, kept_inputs
from ._interpret import Feed, run
from ._lengths import Pair, by_gram, by_matrix, by_product, length_of_each
from ._microbatches import in_microbatches, replace_uncounted
from ._operands import Operands
from ._problem import typed_as_varying
from ._products import is_product_of_bfloat16, two_parts
from ._trace import Traced
from ._uses import Use
from ._ways import Way, ways_of
from ._weights import Weights, along_batch, sum_of_leaf
from ._wide import is_narrow, rounded, widened

# By the name of a way. The others, "gradient" and "unused", have no factors.
FROM_FACTORS: dict[str, Callable[[list[Pair]], jax.Array]] = {
    "product": by_product,
    "gram": by_gram,
    "matrix": by_matrix,
}

LITTLE = 2**20  # bytes that are not worth a loop


class Ghost(NamedTuple):
    """The loss of one example, ready to be run on batches."""

    traced: Traced
    params: list[jax.Array]
    uses: list[Use]
    ways: list[Way]

    def backward(self, batch: Any) -> tuple[jax.Array, Any, Book]:
        """The values of all examples, aux, and what was kept at each use."""
        leaves = jax.tree.leaves(batch)
        # list[use][operand]: made of parameters alone, so the same for all examples.
        given = Operands(self.traced, self.uses, self.params).all()

        def zeros(shape: tuple[int, ...], dtype: Any) -> jax.Array:
            zero = jnp.zeros((leaves[0].shape[0], *shape), dtype)
            # In shard_map the cotangent of another type would be summed over devices.
            for leaf in leaves:
                zero = varying_as(zero, jax.typeof(leaf))
            return zero

        # [batch, *turns of scans, ...]: stands for an output, to get its cotangent.
        def tap(use: Use) -> list[jax.Array]:
            outs = [use.outs[k] for k in use.tapped]
            return [zeros((*use.loops, *out.shape), out.dtype) for out in outs]

        def of_one(example: Any, taps: Any, zero: jax.Array) -> Any:
            feed = Feed(chain.from_iterable(given), iter(taps), zero, [])
            # The feed has all that is made of parameters.
            args = [None] * len(self.params) + example
            outs = run(self.traced.plan, self.traced.consts, args, feed)
            value, aux = jax.tree.unflatten(self.traced.out_tree, outs)
            return value, (aux, list(map(kept_inputs, self.uses, feed.inputs)))

        def of_all(taps: Any) -> Any:
            return jax.vmap(of_one)(leaves, taps, zeros((), jnp.float32))

        taps = [tap(use) for use in self.uses]
        values, pull, (aux, inputs) = jax.vjp(of_all, taps, has_aux=True)
        # Each tap belongs to one example, so that one pass gives all cotangents.
        (cotangents,) = pull(jnp.ones_like(values))
        kept = map(Kept, *rounded((inputs, cotangents)))
        return values, aux, dict(enumerate(kept))

    def lengths(self, book: Book, size: int) -> list[jax.Array]:
        """For each parameter, the norms of the examples' gradients by it."""
        return [
            self._length(leaf, book, size) for leaf in range(len(self.ways))
        ]

    def _length(self, leaf: int, book: Book, size: int) -> jax.Array:
        way = self.ways[leaf]
        if way.name == "unused":
            return jnp.zeros(size, jnp.float32)
        width = self._width(leaf, book, size)
        book = self._part_of(book, [leaf])
        if way.name == "gradient":
            measure = partial(self._from_gradients, leaf)
        else:
            measure = partial(self._from_factors, leaf)
        if width >= size:
            return measure(book)

        def step(
            total: None, _: jax.Array, book: Book
        ) -> tuple[None, jax.Array]:
            return None, measure(book)

        return in_microbatches(step, None, (book,), width)[1]

    def _width(self, leaf: int, book: Book, size: int) -> int:
        """How many examples are looked at at once: what is made to find norms may be
        larger than all that was kept.
        """
        whole = sum(x.nbytes for x in jax.tree.leaves(book))
        itemsize = jnp.dtype(jnp.float32).itemsize
        # With an eighth, a network of convolutions took 1.55 times the memory of a
        # plain gradient on a CPU, and no less time.
        room = max(whole // 16, LITTLE)
        return _divisor(
            size, max(room // (itemsize * self.ways[leaf].size), 1)
        )

    def _part_of(self, book: Book, leaves: list[int]) -> Book:
        """The book of the uses of some parameters."""
        parts = [part for leaf in leaves for part in self.ways[leaf].parts]
        return {part.use: book[part.use] for part in parts}

    def _from_factors(self, leaf: int, book: Book) -> jax.Array:
        """The norms from the factors of all uses of a parameter."""
        way = self.ways[leaf]
        pairs = []
        for part, fit in zip(way.parts, way.fits):
            use, kept = self.uses[part.use], book[part.use]
            pairs.append(factors_of(use, part.operand, fit, kept))
        return FROM_FACTORS[way.name](pairs)

    def _from_gradients(self, leaf: int, book: Book) -> jax.Array:
        """The norms from the gradients of the examples, which are made for it."""
        return length_of_each(self._gradients(leaf, book))

    def _gradients(self, leaf: int, book: Book) -> jax.Array:
        """The gradients of the examples by one parameter."""
        every = Operands(self.traced, self.uses, self.params)

        def of_one(book: Book) -> jax.Array:
            return every.gradients([leaf], book)[0]

        return rounded(jax.vmap(of_one)(book))

    def is_made(self, leaf: int) -> bool:
        """Whether the gradients of examples by a parameter must be made."""
        parts = self.ways[leaf].parts
        return any(self.uses[part.use].one_by_one for part in parts)

    def makes_kernels(self) -> bool:
        """Whether JAX makes gradients of examples by a kernel of a convolution."""
        parts = (way.parts for way in self.ways if way.name == "gradient")
        uses = (self.uses[part.use] for part in chain.from_iterable(parts))
        return any(use.eqn and has_convolution(use.eqn) for use in uses)

    def _sum_of_made(
        self, leaf: int, book: Book, root: jax.Array, counts: jax.Array
    ) -> jax.Array:
        """The weighted sum of gradients of examples that are made for it."""
        width = self._width(leaf, book, counts.size)
        book = self._part_of(book, [leaf])

        def step(
            total: Any, is_real: jax.Array, book: Book, *weights: jax.Array
        ) -> tuple[Any, None]:
            root, counts = weights
            grads = self._gradients(leaf, book)
            return total + sum_of_leaf(grads, root, counts & is_real), None

        param = self.params[leaf]
        zeros = jnp.zeros(
            param.shape, np.promote_types(param.dtype, root.dtype)
        )
        start = typed_as_varying((book, param, counts), zeros)
        return in_microbatches(step, start, (book, root, counts), width)[0]

    def weighted_sum(
        self, book: Book, weights: Weights, groups: list[int]
    ) -> list[jax.Array]:
        """The sum over examples of gradients times factors, in float32 or wider."""
        counts = weights.counts
        every = Operands(self.traced, self.uses, self.params)
        found = list(map(jnp.zeros_like, self.params))
        # A use that several groups share is weighed with the factors of each.
        for group in sorted(set(groups)):
            root, own = weights.roots[:, group], []
            for leaf, number in enumerate(groups):
                if number == group and self.is_made(leaf):
                    found[leaf] = self._sum_of_made(leaf, book, root, counts)
                elif number == group:
                    own.append(leaf)
            weigh = partial(_weighed, root, counts)
            kept = self._part_of(book, own)
            sums = every.gradients(own, kept, weigh)
            for leaf, total in zip(own, sums):
                # Where no example counts, broken ones remain: 0 times NaN is NaN.
                found[leaf] = jnp.where(jnp.any(counts), total, 0)
        return found


def _divisor(size: int, most: int) -> int:
    """The largest divisor that is at most some number, or that number if it is more
    than twice as large: microbatches that fill a batch need no copy of it.
    """
    fits = next(n for n in range(min(most, size), 0, -1) if size % n == 0)
    return fits if 2 * fits >= min(most, size) else most


def ghost_of(traced: Traced, params: list[jax.Array]) -> Ghost:
    uses = traced.plan.uses()
    return Ghost(
        traced, params, uses, ways_of(uses, [leaf.shape for leaf in params])
    )


def _weighed(
    root: jax.Array,
    counts: jax.Array,
    use: Use,
    kept: Kept,
    before: jax.Array | None,
) -> Kept:
    """What was kept of a use, times the factors of the examples, and nothing of
    examples that do not count.
    """
    # The gradient by an operand without numbers has none to wait for.
    if before is not None and before.size:
        counts = _after(before, counts)

    def shrunk(times: Callable[..., jax.Array], leaf: jax.Array) -> jax.Array:
        # Selected, since 0 times NaN is NaN.
        each = times(leaf, along_batch(root, leaf))
        return jnp.where(along_batch(counts, leaf), each, 0)

    if is_product_of_bfloat16(use):
        # A weighted cotangent in bfloat16 alone would differ from the measured one.
        (cotangent,) = widened(kept.cotangents)
        return Kept(
            replace_uncounted(kept.inputs, counts),
            two_parts(shrunk(stretch, cotangent)),
        )
    kept = widened(kept) if use.is_widened else kept
    if use.name in PRODUCTS and all(map(_is_wide, kept.inputs)):
        # Input and cotangent take a root of the factor each, since a factor such as
        # 1e-40 is below the normal numbers, and its root is not.
        return jax.tree.map(partial(shrunk, _times), kept)
    # The gradient is linear in the cotangent, and in general not in the input.
    inputs = replace_uncounted(kept.inputs, counts)
    return Kept(
        inputs, jax.tree.map(partial(shrunk, stretch), kept.cotangents)
    )


def _is_wide(x: jax.Array) -> bool:
    """Whether an array may take a root of a factor and is not rounded."""
    return jnp.issubdtype(x.dtype, jnp.inexact) and not is_narrow(x)


def _times(x: jax.Array, root: jax.Array) -> jax.Array:
    wide = np.promote_types(x.dtype, root.dtype)
    return (x.astype(wide) * root.astype(wide)).astype(x.dtype)


def _after(before: jax.Array, counts: jax.Array) -> jax.Array:
    """The same booleans, known only after another value is.

    XLA on a CPU computes as soon as it can. It would copy what was kept for all uses
    before it sums the first, which took a third more memory.
    """
    first = jnp.real(before.reshape(-1)[0])
    # True for every number, NaN included.
    return counts & ((first >= 0) | (first < 0) | jnp.isnan(first))
