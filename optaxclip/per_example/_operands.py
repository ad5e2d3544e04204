"""The operands of uses, and gradients by them and by the parameters behind them."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax

from ._book import Book, Kept
from ._interpret import apply, operands
from ._products import by_product, is_product_of_bfloat16
from ._trace import Traced
from ._uses import Use
from ._wide import widened

# (use, what was kept of it, a value to wait for) -> what is summed
Weigh = Callable[[Use, Kept, jax.Array | None], Kept]


class Operands(NamedTuple):
    """The values made of parameters alone that come into uses."""

    traced: Traced
    uses: list[Use]
    params: list[jax.Array]

    def all(self) -> list[list[jax.Array]]:
        """The operands of each use."""
        return self._with(self.params)

    def _with(
        self, params: list[jax.Array], is_wide: bool = False
    ) -> list[list[jax.Array]]:
        plan, consts = self.traced.plan, self.traced.consts
        # After the parameters comes the example, which has no part in operands.
        missing = len(plan.jaxpr.invars) - len(params)
        args = [*params, *[None] * missing]
        rest = iter(operands(plan, consts, args, is_wide)[1])
        return [[next(rest) for _ in use.places] for use in self.uses]

    def gradients(
        self, leaves: list[int], book: Book, weigh: Weigh | None = None
    ) -> list[jax.Array]:
        """The gradients by some parameters, in one example or summed over a batch, in
        float32 or wider.

        From uses to their operands, and from these to the parameters. The second is
        linear, so it is done once for a whole batch.

        Args:
          leaves: the numbers of the parameters.
          book: what was kept of the uses that the parameters are in.
          weigh: makes of what was kept of a batch what is summed. The third argument
            is a value that is to be computed before. None where the book is that of one
            example.
        """

        def chosen(given: list[list[Any]]) -> list[list[Any]]:
            return [
                _of_leaves(self.uses[n], given[n], leaves)
                for n in sorted(book)
            ]

        def by_params(own: list[jax.Array]) -> list[list[jax.Array]]:
            given = dict(zip(leaves, own))
            params = [given.get(n, x) for n, x in enumerate(self.params)]
            return chosen(self._with(params, is_wide=True))

        # Operands may be made of several parameters. The others are constants here.
        wide = widened([self.params[leaf] for leaf in leaves])
        given, pull = jax.vjp(by_params, wide)
        every = self.all()
        cotangents, done = [], None
        # The last first, whose arrays are then freed before those of others are copied.
        for n in sorted(book, reverse=True):
            use = self.uses[n]
            kept = weigh(use, book[n], done) if weigh else book[n]
            found = by_operands(use, every[n], kept, batched=weigh is not None)
            cotangents.insert(0, _of_leaves(use, found, leaves))
            done = cotangents[0][0]
        typed = jax.tree.map(lambda x, y: x.astype(y.dtype), cotangents, given)
        return pull(typed)[0]


def _of_leaves(use: Use, each: list[Any], leaves: list[int]) -> list[Any]:
    """Of a list for the operands of a use, those with a derivative by parameters."""
    wanted = set(leaves)
    pairs = zip(use.origins, each)
    return [x for origin, x in pairs if origin.by & wanted]


def by_operands(
    use: Use, given: list[jax.Array], kept: Kept, batched: bool
) -> list[jax.Array | None]:
    """The gradients by the operands of a use, in float32 or wider if it can be. None
    for an operand without a derivative.
    """
    if is_product_of_bfloat16(use):
        return [by_product(use, kept, batched)]
    inputs, cotangents = kept.all_inputs(use, batched), kept.cotangents
    if use.is_widened:
        use = use.widened()
        given, inputs, cotangents = widened((given, inputs, cotangents))
    run = partial(apply, use)
    # The innermost scan first, so that the axis of the outermost is in front.
    for depth in reversed(range(len(use.loops))):
        axes = [0 if depth in origin.loops else None for origin in use.origins]
        run = jax.vmap(run, (axes, 0), axis_size=use.loops[depth])
    if batched:
        # Operands are not mapped, so that their gradients are summed over the batch.
        run = jax.vmap(run, (None, 0), axis_size=cotangents[0].shape[0])
    # Others, such as integers, may be where no gradient can be taken.
    own = {k: given[k] for k, origin in enumerate(use.origins) if origin.by}
    every = dict(enumerate(given))
    _, pull = jax.vjp(lambda own: run([*(every | own).values()], inputs), own)
    found = pull(cotangents)[0]
    return [found.get(k) for k in every]
