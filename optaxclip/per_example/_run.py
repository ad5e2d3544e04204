"""The ways to the clipped gradient of a batch.

    ghost         one backward pass to the places where parameters are used (_ghost)
    one pass      for each microbatch: all its per-example gradients, their norms, their
                  weighted sum
    two passes    norms first, microbatch by microbatch. Then the gradient of
                  sum_i f_i loss_i with the factors f_i held fixed, which is the same
                  sum

None needs memory that grows with the batch beyond a few numbers for each example, apart
from the activations of a microbatch.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._factors import stretch
from .._sums import wide_dtype
from .._weighted_loss import is_weighted
from ._ghost import Ghost
from ._microbatches import in_microbatches, replace_uncounted
from ._problem import Loss, typed_as_varying
from ._weights import Weights, weighted_sum
from ._wide import rounded


class Seen(NamedTuple):
    """What was found out about the examples."""

    weights: Weights
    values: jax.Array  # float[batch]
    aux: Any  # [batch, ...]


class Run(NamedTuple):
    """One call of the function that `clipped_grad` made."""

    of_one: Loss
    weights_of: Callable[[Any, jax.Array], Weights]
    params: Any
    batch: Any
    present: jax.Array  # bool[batch]
    microbatch: int | None

    def look(self, example: Any, present: jax.Array) -> tuple[Any, Seen]:
        """The per-example gradients of a microbatch, and what was found out."""
        grad = jax.vmap(
            jax.value_and_grad(self.of_one, has_aux=True), (None, 0)
        )
        (values, aux), grads = grad(self.params, example)
        grads = rounded(grads)
        return grads, Seen(self.weights_of(grads, present), values, aux)

    def in_one_pass(self, groups: list[int]) -> tuple[Any, Seen]:
        """The weighted sum of the gradients, and what was found out."""

        def step(
            total: Any, is_real: jax.Array, example: Any, present: jax.Array
        ) -> tuple[Any, Seen]:
            grads, seen = self.look(example, present & is_real)
            return _plus(
                total, weighted_sum(grads, seen.weights, groups)
            ), seen

        inputs = self.batch, self.present
        return in_microbatches(step, self.zeros(), inputs, self.microbatch)

    def in_two_passes(self) -> tuple[Any, Seen]:
        """The same. The gradients are summed by a second backward pass."""

        def measure(
            nothing: Any, is_real: jax.Array, example: Any, present: jax.Array
        ) -> tuple[Any, Seen]:
            # Gradients end here: no more than those of a microbatch are in memory.
            return nothing, self.look(example, present & is_real)[1]

        def add(
            total: Any, is_real: jax.Array, example: Any, weights: Weights
        ) -> tuple[Any, None]:
            return _plus(total, self.pulled(example, weights, is_real)), None

        inputs = self.batch, self.present
        _, seen = in_microbatches(measure, None, inputs, self.microbatch)
        inputs = self.batch, seen.weights
        total, _ = in_microbatches(add, self.zeros(), inputs, self.microbatch)
        return total, seen

    def pulled(
        self, example: Any, weights: Weights, is_real: jax.Array
    ) -> Any:
        """The weighted sum of the gradients of a microbatch, by one backward pass."""
        counts = weights.counts & is_real
        example = replace_uncounted(example, counts)

        def values_of(params: Any) -> jax.Array:
            return jax.vmap(self.of_one, (None, 0))(params, example)[0]

        # sum_i f_i g_i is the derivative of sum_i f_i loss_i.
        with is_weighted(True):
            values, pull = jax.vjp(values_of, self.params)
        # There is one group: two passes refuse several limits.
        root = weights.roots[:, 0]
        # Here a factor must be one number, so it ends at the range of its dtype.
        factor = stretch(jnp.ones_like(root), root)
        factor = jnp.minimum(factor, jnp.finfo(factor.dtype).max)
        with is_weighted(True):
            (grads,) = pull(jnp.where(counts, factor, 0).astype(values.dtype))
        # Where no example counts, broken ones remain: 0 times NaN is NaN.
        return jax.tree.map(lambda x: jnp.where(jnp.any(counts), x, 0), grads)

    def in_ghost(self, ghost: Ghost, groups: list[int]) -> tuple[Any, Seen]:
        """The same from one backward pass, without gradients of examples."""
        treedef = jax.tree.structure(self.params)

        def step(
            total: Any, is_real: jax.Array, example: Any, present: jax.Array
        ) -> tuple[Any, Seen]:
            values, aux, book = ghost.backward(example)
            # The norm of the norms of all leaves is that of the gradient.
            lengths = treedef.unflatten(ghost.lengths(book, present.size))
            weights = self.weights_of(lengths, present & is_real)
            grads = treedef.unflatten(
                ghost.weighted_sum(book, weights, groups)
            )
            return _plus(total, grads), Seen(weights, values, aux)

        inputs = self.batch, self.present
        return in_microbatches(step, self.zeros(), inputs, self.microbatch)

    def zeros(self) -> Any:
        """Where gradients are summed: float32 or wider, so that many small 16-bit
        gradients are not lost beside their sum.
        """

        def zero(leaf: jax.Array) -> jax.Array:
            total = jnp.zeros(leaf.shape, wide_dtype(leaf))
            # As lax.scan asks for: of the type of the sums that follow.
            return typed_as_varying((self.batch, leaf), total)

        return jax.tree.map(zero, self.params)


def _plus(total: Any, term: Any) -> Any:
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, term)
