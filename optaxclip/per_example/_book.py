"""What ghost clipping keeps of a batch."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ._factors import Factors, Order
from ._lengths import Pair
from ._uses import Use
from ._ways import Fit

# Uses that are sums: what comes in beside the parameter has no part in the gradient.
SUMS = ("add", "sub", "add_any", "concatenate")


# Uses whose gradient by the parameter is a product of input and cotangent.
PRODUCTS = ("dot_general", "conv_general_dilated", "mul")


class Kept(NamedTuple):
    """What is kept of one use. Arrays are [example, *turns of scans, ...]."""

    inputs: list[jax.Array]  # the data that came in, where the gradient has it
    cotangents: list[jax.Array]  # of the outputs that have a derivative

    def all_inputs(self, use: Use, batched: bool) -> list[jax.Array]:
        """The inputs, with zeros for those that were not kept."""
        if len(self.inputs) == len(use.data):
            return self.inputs
        # [*example, *turns], which inputs and cotangents have in common.
        around = self.cotangents[0].shape[: batched + len(use.loops)]
        return [jnp.zeros((*around, *x.shape), x.dtype) for x in use.data]


Book = dict[int, Kept]  # by the number of a use


def kept_inputs(use: Use, inputs: list[jax.Array]) -> list[jax.Array]:
    """The inputs of a use in one example that its gradient has."""
    return [] if use.name in SUMS else inputs


def kept_numbers(use: Use) -> int:
    """How many numbers are kept of a use in one example."""
    inputs = [] if use.name in SUMS else use.data
    outs = [use.outs[k] for k in use.tapped]
    return math.prod(use.loops) * sum(x.size for x in (*inputs, *outs))


def factors_of(use: Use, operand: int, fit: Fit, kept: Kept) -> Pair:
    """The factors of one use for a batch. Turns of a scan that slices the operand
    belong to the stack, and turns that share it are positions.
    """
    order = order_of(use, operand)

    def split(inputs: list[jax.Array], cotangents: list[jax.Array]) -> Factors:
        return fit.form.split(inputs, cotangents[0], order)

    # Under vmap over example and turns, what is split is one use outside any scan.
    for _ in range(1 + len(use.loops)):
        split = jax.vmap(split)
    a, c = split(kept.inputs, kept.cotangents)
    a, c = _merged(a, use, operand), _merged(c, use, operand)
    return Pair(c, a) if fit.swaps else Pair(a, c)


def _merged(x: jax.Array, use: Use, operand: int) -> jax.Array:
    """[example, *turns, stack, position, ...] with turns as stack or positions."""
    depths = range(len(use.loops))
    sliced = use.origins[operand].loops
    separate = [1 + depth for depth in depths if depth in sliced]
    shared = [1 + depth for depth in depths if depth not in sliced]
    stack = 1 + len(use.loops)
    rest = range(stack + 2, x.ndim)
    x = jnp.transpose(x, (0, *separate, stack, *shared, stack + 1, *rest))
    middle = 2 + len(separate)
    last = middle + len(shared) + 1
    shape = x.shape
    sizes = math.prod(shape[1:middle]), math.prod(shape[middle:last])
    return x.reshape(shape[0], *sizes, *shape[last:])


def order_of(use: Use, operand: int) -> Order:
    """Sorts axes of an operand by the axes of the parameter that they are, so that all
    uses of it agree.
    """
    view = use.origins[operand].view
    if view is None or view.axes is None:
        return list
    # Axes that the parameter does not have are of size 1, and may be anywhere.
    places = [-1 if axis is None else axis for axis in view.axes]

    def order(chosen: Any) -> list[int]:
        return sorted(chosen, key=places.__getitem__)

    return order
