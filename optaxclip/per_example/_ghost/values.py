"""Where the values of a split program come from, and those that are made of parameters
alone (`WideValues`): each `Origin` is a parameter, a constant, an output of a
`Computation` of such values, or data.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import JaxprEqn

from ..._jaxpr import CASTS_OVER_DEVICES
from ..._trees import PyTree

# The gradient by one term of a sum does not depend on the other terms.
SUMS = ("add", "sub", "add_any", "concatenate")
# The output has all numbers of the input, in the same layout or in another one.
KEEPS_LAYOUT = (
    "convert_element_type",
    "copy",
    "sharding_constraint",
    *CASTS_OVER_DEVICES,
)
CHANGES_LAYOUT = ("broadcast_in_dim", "expand_dims", "reshape", "rev", "squeeze")
# Equations that may run in float32 instead of 16 bits.
WIDENED = {
    *KEEPS_LAYOUT,
    *CHANGES_LAYOUT,
    *SUMS,
    "mul",
    "div",
    "neg",
    "transpose",
    "dynamic_slice",
    "gather",
    "select_n",
    "reduce_sum",
    "slice",
    "split",
    "conv_general_dilated",
    "dot_general",
}


class View(NamedTuple):
    """How a value is made by rearranging a parameter, or the slice of it that a scan
    takes in one iteration.
    """

    # The reshapes and slices from the parameter to the value, each with its options and
    # the `axes` before it. Two views of a parameter with the same ones have the same
    # numbers, and differ by a transpose at most.
    reshapes: tuple[Any, ...]
    # Transposes are kept apart: axis i of the value is axis axes[i] of the array that
    # the reshapes alone give.
    axes: tuple[int, ...]


class Origin(NamedTuple):
    """Where a value of the program comes from: a computation without data, a parameter,
    a constant, or data.
    """

    computation: Computation | None = None
    out_index: int = 0  # among the outputs of the computation
    param_index: int | None = None  # of the parameter that it is
    constant: Any = None
    is_data: bool = False  # whether it depends on the example
    # The indices of the parameters that it may be differentiated by
    param_indices: frozenset[int] = frozenset()
    # The depths of the scans that slice it
    slicing_scans: frozenset[int] = frozenset()
    view: View | None = None  # if it is a rearranged parameter


DATA = Origin(is_data=True)


@dataclass(frozen=True, eq=False)
class Computation:
    """An equation without data, in all iterations of the scans that slice its
    inputs.
    """

    eqn: JaxprEqn
    in_origins: list[Origin]

    @property
    def slicing_scans(self) -> frozenset[int]:
        """The depths of the scans that slice any of its inputs."""
        depths: frozenset[int] = frozenset()
        for origin in self.in_origins:
            depths |= origin.slicing_scans
        return depths

    def outputs(self, inputs: list[Any]) -> list[Any]:
        """Its outputs, for the values of its inputs."""

        def outputs_of_iteration(inputs: list[Any], _: Any) -> list[Any]:
            return bind(self.eqn, inputs, is_wide=True)

        outputs_of_all = over_iterations(
            outputs_of_iteration, self.in_origins, self.slicing_scans
        )
        no_data = ()
        return outputs_of_all(inputs, no_data)


def over_iterations(
    function: Callable[..., Any], origins: Collection[Origin], depths: Collection[int]
) -> Callable[..., Any]:
    """The function for all iterations of scans, from a function for one iteration.

    Args:
      function: takes a list of values without data, and any data. Data have an axis
        for the iterations of each scan in front, and so have results.
      origins: of the values. A value has an axis for the iterations of the scans that
        slice it. It is the same in all iterations of another scan.
      depths: of the scans.
    """
    # The innermost scan first, so that the axis of the outermost is in front.
    for depth in sorted(depths, reverse=True):
        axes = [0 if depth in origin.slicing_scans else None for origin in origins]
        function = jax.vmap(function, (axes, 0))
    return function


class WideValues:
    """Parameters, and the values that are computed from them, in float32 instead of 16
    bits where that is possible. Each computation runs once.
    """

    def __init__(self, params: dict[int, Any]) -> None:
        self.params = params  # by their indices
        self._outputs: dict[Computation, list[Any]] = {}

    def value(self, origin: Origin) -> Any:
        """The value with this origin, which is not data."""
        # A stack in place of recursion, since Python limits how deep calls go: a loss
        # may have a thousand operations on parameters in a row.
        stack = self._missing_for([origin])
        while stack:
            computation = stack[-1]
            missing = self._missing_for(computation.in_origins)
            if missing:
                stack += missing
                continue
            stack.pop()
            # It may have been on the stack twice.
            if computation not in self._outputs:
                inputs = list(map(self._computed, computation.in_origins))
                self._outputs[computation] = computation.outputs(inputs)
        return self._computed(origin)

    def _missing_for(self, origins: list[Origin]) -> list[Computation]:
        """The computations that values with these origins wait for."""
        computations = [origin.computation for origin in origins]
        return [x for x in computations if x and x not in self._outputs]

    def _computed(self, origin: Origin) -> Any:
        """The value, after its computation has run."""
        if origin.computation:
            return self._outputs[origin.computation][origin.out_index]
        if origin.param_index is not None:
            return self.params[origin.param_index]
        return origin.constant


def bind(eqn: JaxprEqn, inputs: list[Any], is_wide: bool = False) -> list[Any]:
    """The outputs of an equation. With `is_wide`, in float32 instead of 16 bits where
    that is possible.
    """
    params = eqn.params
    if is_wide and eqn.primitive.name in WIDENED:
        inputs = widened(inputs)
        for key in ("new_dtype", "preferred_element_type"):
            dtype = params.get(key)
            if dtype is not None and is_narrow(dtype):
                params = params | {key: np.dtype(np.float32)}
    elif is_wide:
        inputs = list(map(_as_in_program, inputs, eqn.invars))
    # A custom_jvp keeps its functions as programs. They are made functions again.
    params = eqn.primitive.get_bind_params(params)
    with eqn.ctx.manager:  # such as the device that compute_on asks for
        outputs = eqn.primitive.bind(*inputs, **params)
    return list(outputs) if eqn.primitive.multiple_results else [outputs]


def _as_in_program(x: Any, var: Any) -> Any:
    """The value, cast to the type of a variable that has 16 bits."""
    return x.astype(var.aval.dtype) if is_narrow(var.aval) else x


def is_narrow(x: Any) -> bool:
    """Whether an array, a type, or a dtype has floats of 16 bits or fewer."""
    dtype = getattr(x, "dtype", x)
    is_float = jnp.issubdtype(dtype, jnp.inexact)
    return is_float and jnp.finfo(dtype).bits < 32


def widened(tree: PyTree) -> PyTree:
    """The arrays of a tree, with float32 instead of 16 bits."""

    def wide(x: Array) -> Array:
        return x.astype(np.float32) if is_narrow(x) else x

    return jax.tree.map(wide, tree)
