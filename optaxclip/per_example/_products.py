"""Gradients by matrices that meet bfloat16 inputs, in float32.

The product of input and cotangent, which are bfloat16, is added up in float32: as fast
on a GPU and a TPU as one that gives bfloat16. The factors of the examples are in the
cotangents, which are two arrays then: one of bfloat16 would round the factors.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._book import Kept, factors_of, order_of
from ._factors import form_of
from ._uses import Use
from ._ways import Fit


def is_product_of_bfloat16(use: Use) -> bool:
    """Whether a matrix product with an operand has bfloat16 arrays only."""
    if use.name != "dot_general" or len(use.places) != 1:
        return False
    types = [*use.outs, *(x.aval for x in use.eqn.invars)]
    return all(x.dtype == jnp.bfloat16 for x in types)


def two_parts(x: jax.Array) -> list[jax.Array]:
    """Two bfloat16 arrays whose sum is a float32 array but for 2^-17 of it."""
    # Of a cast to bfloat16 and back XLA would make nothing, and the second part zero.
    info = jnp.finfo(jnp.bfloat16)
    first = lax.reduce_precision(x, info.nexp, info.nmant)
    return [part.astype(jnp.bfloat16) for part in (first, x - first)]


def by_product(use: Use, kept: Kept, batched: bool) -> jax.Array:
    """The gradient by the operand of a matrix product, added up in float32."""
    if not batched:
        kept = jax.tree.map(lambda x: x[None], kept)
    form = form_of(use)
    assert form

    def product(cotangent: jax.Array) -> jax.Array:
        part = kept._replace(cotangents=[cotangent])
        a, c = factors_of(use, 0, Fit(form, swaps=False), part)
        # Over examples and positions, for each matrix of the stack.
        over = ((0, 2), (0, 2)), ((1,), (1,))
        wide = np.dtype(np.float32)
        if not batched:
            # Under vmap XLA on a CPU has no such product of some shapes.
            a, c = a.astype(wide), c.astype(wide)
        return lax.dot_general(a, c, over, preferred_element_type=wide)

    total = functools.reduce(jnp.add, map(product, kept.cotangents))
    # The stack begins with the turns of scans that slice the operand.
    turns = [use.loops[depth] for depth in sorted(use.origins[0].loops)]
    order, operand = order_of(use, 0), use.eqn.invars[use.places[0]].aval
    axes = [*order(form.stack), *order(form.rows), *order(form.columns)]
    total = total.reshape(*turns, *(operand.shape[axis] for axis in axes))
    back = len(turns) + np.argsort(axes)
    return jnp.transpose(total, (*range(len(turns)), *back))
