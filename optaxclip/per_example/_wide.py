"""Floats of 16 bits or fewer, and operations with float32 in their place.

A sum over a batch in bfloat16 stops growing, and one example changes it by more than
its own gradient. So a loss that computes in 16 bits is gone back through in float32:

    casts of parameters to 16 bits   have the derivative 1, and round nothing
    operations that `can_widen`      get float32 in the place of 16 bits
    matrix products of bfloat16      give float32 (_products)
    all else                         for each example by itself
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._jaxpr import inside

# What they compute is right with any floats in the place of others.
WIDENED = (
    *("add", "add_any", "sub", "mul", "div", "neg"),
    *("broadcast_in_dim", "concatenate", "copy", "expand_dims", "transpose"),
    *("dynamic_slice", "gather", "pad", "pvary", "reshape", "rev", "select_n"),
    *("reduce_sum", "sharding_constraint", "slice", "split", "squeeze"),
    *("conv_general_dilated", "convert_element_type", "dot_general"),
)


def is_narrow(x: Any) -> bool:
    """Whether an array, or a type, has floats of 16 bits or fewer."""
    is_float = jnp.issubdtype(x.dtype, jnp.inexact)
    return is_float and jnp.finfo(x.dtype).bits < 32


def rounds(eqn: Any) -> bool:
    """Whether a way back through an equation may have 16 bits or fewer."""
    if eqn.primitive.name == "reduce_precision":
        return True
    types = [x.aval for x in (*eqn.invars, *eqn.outvars)]
    return any(map(is_narrow, types)) or rounds_inside(eqn)


def rounds_inside(eqn: Any) -> bool:
    """The same of the equations that it runs."""
    return any(map(rounds, inside(eqn)))


def can_widen(eqn: Any) -> bool:
    """Whether an equation may get float32 in the place of 16 bits."""
    return eqn.primitive.name in WIDENED


def widened(tree: Any) -> Any:
    """The arrays of a tree, with float32 in the place of 16 bits."""
    return jax.tree.map(
        lambda x: x.astype(np.float32) if is_narrow(x) else x, tree
    )


def rounded(tree: Any) -> Any:
    """The arrays of a tree, where all readers of 16 bits get the same numbers.

    XLA leaves out a rounding to 16 bits before what computes in float32. It would
    measure other numbers than it adds up.
    """
    return jax.tree.map(
        lambda x: lax.optimization_barrier(x) if is_narrow(x) else x, tree
    )


def wide_equation(eqn: Any) -> Any:
    """The same equation, which does not ask for a result of 16 bits."""
    asked = {"new_dtype", "preferred_element_type"} & set(eqn.params)
    types = {
        key: eqn.params[key] for key in asked if eqn.params[key] is not None
    }
    wide = {
        key: np.dtype(np.float32)
        for key, dtype in types.items()
        if is_narrow(jax.ShapeDtypeStruct((), dtype))
    }
    return eqn.replace(params=eqn.params | wide)
