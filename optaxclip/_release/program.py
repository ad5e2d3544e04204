"""Reads the program of a loss: which of its scans go through layers.

program    the loss is traced (a jaxpr)
inlined    equations take the place of calls, so that scans in calls are seen
stacks     scans whose xs are leaves of params that nothing else reads
"""

import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.interpreters.partial_eval import dce_jaxpr

from .._jaxpr import (
    CALLS,
    body_of,
    counts_of_scan,
    every_equation,
    is_literal,
    run_equations,
    source_line,
    type_of,
)
from .._trees import PyTree, listed
from .stacks import LayerSlice, LayoutChange, Stack

JITS = ("jit", "pjit")
# What may stand between a leaf and the scan that reads it: the same numbers in another
# order, shape or dtype.
LAYOUT_PRIMITIVES = {
    "transpose",
    "squeeze",
    "reshape",
    "convert_element_type",
    "copy",
    "sharding_constraint",
}


class Program(NamedTuple):
    """The program of a loss, in which calls are inlined."""

    jaxpr: ClosedJaxpr  # from params and batch to the loss, and then aux
    structure: PyTree  # of what the loss returns
    stacks: dict[int, Stack]  # by `id` of their equations

    @property
    def slice_of_leaf(self) -> dict[str, LayerSlice]:
        """Where layers are in the leaves of all stacks, by the path of the leaf."""
        slice_of_leaf = {}
        for stack in self.stacks.values():
            slice_of_leaf |= stack.slice_of_leaf
        return slice_of_leaf


def read_program(
    loss: Callable[..., Any],
    params: PyTree,
    batch: Sequence[PyTree],
    name_of_leaf: dict[str, str],
    trained_paths: Container[str],
) -> Program:
    """Traces the loss and finds its stacks. A stack inside a checkpoint is found only
    if there is none outside of checkpoints.

    Args:
      name_of_leaf: what errors call each leaf of params, by its path.
      trained_paths: the paths of the trained leaves.

    Raises:
      TypeError: a loss that is not a real scalar.
      ValueError: a leaf that the loss does not depend on, or a loss without a stack.
    """
    # `jax.disable_jit` would unroll the scans.
    with jax.disable_jit(False):
        program, output_types = jax.make_jaxpr(loss, return_shape=True)(params, *batch)
    _check_scalar(output_types)
    _check_dependence(program.jaxpr, name_of_leaf, trained_paths)
    inputs = jax.tree.leaves((params, batch))
    # Calls other than jits are inlined only if need be: a checkpoint of the head should
    # stay one.
    for calls in (JITS, CALLS):
        inlined = _inlined(program, calls, inputs)
        weights = {}
        # The first inputs of the program are the leaves of params.
        for path, var in zip(name_of_leaf, inlined.jaxpr.invars):
            if path in trained_paths:
                weights[var] = path
        stacks = _stacks_of(inlined.jaxpr, weights)
        if stacks:
            return Program(inlined, jax.tree.structure(output_types), stacks)
    raise ValueError(
        "release: no scan of loss goes through layers. It has "
        f"{', '.join(_scans_of(program)) or 'no scan at all'}. Scan the layers "
        "(jax.lax.scan, nn.scan, nnx.scan) outside of loops, branches and shard_map. "
        "Among its xs must be trained leaves of params, and not slices or sums of "
        "them. Nothing else may read these leaves: no second scan, no penalty of all "
        "weights, no index into them in a layer."
    )


def _scans_of(program: ClosedJaxpr) -> list[str]:
    """The lengths and lines of all scans of a program, for an error."""
    # A dict, since a scan may be called twice.
    scans: dict[str, None] = {}
    for equation in program.eqns:
        for inner in every_equation(equation):
            if inner.primitive.name == "scan":
                length = inner.params["length"]
                scans[f"one of length {length}{source_line(inner)}"] = None
    return list(scans)


# ---------------------------------------------------------------------------- checks


def _check_scalar(output_types: PyTree) -> None:
    """Raises TypeError for a loss that is neither a real scalar nor (scalar, aux)."""
    loss = output_types
    if type(output_types) is tuple and len(output_types) == 2:
        loss, _ = output_types
    is_scalar = getattr(loss, "shape", None) == ()
    if not is_scalar or not jnp.issubdtype(loss.dtype, jnp.floating):
        types = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", output_types)
        raise TypeError(
            "release: loss must return a real scalar, or a pair of that and any other "
            f"outputs, got {types}."
        )


def _check_dependence(
    jaxpr: Jaxpr, name_of_leaf: dict[str, str], trained_paths: Container[str]
) -> None:
    """Raises ValueError for a trained leaf that the loss does not read. It would still
    get moments and weight decay. A leaf behind `stop_gradient` counts as read.
    """
    is_loss = [index == 0 for index in range(len(jaxpr.outvars))]
    _, is_read = dce_jaxpr(jaxpr, is_loss)
    unread = []
    for path, leaf_is_read in zip(name_of_leaf, is_read):
        if path in trained_paths and not leaf_is_read:
            unread.append(name_of_leaf[path])
    if unread:
        raise ValueError(
            "release: the loss must depend on every trained leaf of params, but does "
            f"not on {listed(unread)}. Leave out what is not trained, such as "
            "statistics of BatchNorm, by trainable=, and hand new values over as "
            "aux."
        )


# -------------------------------------------------------------------------- inlining


def _inlined(
    program: ClosedJaxpr, calls: Container[str], inputs: list[Array]
) -> ClosedJaxpr:
    """The program with equations in the place of calls."""

    def inline_call(equation: JaxprEqn, call_inputs: list[Array]) -> list[Array] | None:
        if equation.primitive.name in calls:
            return run_equations(body_of(equation), call_inputs, inline_call)
        return None

    run = partial(run_equations, program, replace=inline_call)
    inlined = jax.make_jaxpr(run)(inputs)
    # nnx.scan returns its weights as ys, which nothing reads.
    are_needed = [True] * len(inlined.out_avals)
    jaxpr, _ = dce_jaxpr(inlined.jaxpr, are_needed, instantiate=True)
    return ClosedJaxpr(jaxpr, inlined.consts)


def variables(atoms: Iterable[Any]) -> list[Var]:
    """The variables among some inputs, which may be numbers too."""
    return [atom for atom in atoms if not is_literal(atom)]


# ---------------------------------------------------------------------------- stacks


class _Reads(NamedTuple):
    """Which equations compute the variables of a loss, and how often each is read."""

    weights: dict[Var, str]  # the variables of trained leaves, with their paths
    equations: list[JaxprEqn]  # that the loss needs, the last one first
    equation_of: dict[Var, JaxprEqn]  # that computes the variable
    # How often the loss reads each variable. Aux may read the weights of layers too.
    read_count: Counter[Var]


def _reads_of_loss(jaxpr: Jaxpr, weights: dict[Var, str]) -> _Reads:
    """What the first output of a program needs and reads."""
    reads = _Reads(weights, [], {}, Counter(variables(jaxpr.outvars[:1])))
    for equation in reversed(jaxpr.eqns):
        if any(output in reads.read_count for output in equation.outvars):
            reads.equations.append(equation)
            reads.read_count.update(variables(equation.invars))
            reads.equation_of.update(dict.fromkeys(equation.outvars, equation))
    return reads


def _stacks_of(jaxpr: Jaxpr, weights: dict[Var, str]) -> dict[int, Stack]:
    """The scans that read weights layer by layer, by `id` of their equations.

    Args:
      weights: the variables of trained leaves, with their paths.
    """
    reads = _reads_of_loss(jaxpr, weights)
    stacks = {}
    for equation in reads.equations:
        length = equation.params.get("length", 0)
        if equation.primitive.name != "scan" or length == 0:
            continue
        first_x = sum(counts_of_scan(equation))
        slice_of_input = {}
        for index, var in enumerate(equation.invars[first_x:], first_x):
            layer_slice = _layer_slice(var, length, reads)
            if layer_slice is not None:
                slice_of_input[index] = layer_slice
        if slice_of_input:
            stacks[id(equation)] = Stack(equation, slice_of_input)
    return stacks


def _layer_slice(var: Any, length: int, reads: _Reads) -> LayerSlice | None:
    """Where the layers are in the leaf from which a variable of the scan's xs comes.
    None: it comes from no leaf, or the loss reads the leaf elsewhere too.
    """
    axis = 0
    changes: list[LayoutChange] = []
    while not is_literal(var) and reads.read_count[var] == 1:
        if var in reads.weights:
            rows = type_of(var).shape[axis] // length
            return LayerSlice(reads.weights[var], axis, rows, changes[::-1])
        equation = reads.equation_of.get(var)
        if equation is None or equation.primitive.name not in LAYOUT_PRIMITIVES:
            return None
        axis_and_change = _layout_change(equation, axis, length)
        if axis_and_change is None:
            return None
        axis, change = axis_and_change
        changes.append(change)
        var = equation.invars[0]
    return None


def _layout_change(
    equation: JaxprEqn, axis: int, length: int
) -> tuple[int, LayoutChange] | None:
    """The axis of the layers in the input of an equation that changes the layout, and
    the same change for one layer. None: in the input, layers are not along one axis.

    Args:
      axis: of the layers in the output.
      length: how many layers there are.
    """
    params = equation.params
    if equation.primitive.name == "transpose":
        permutation = params["permutation"]
        return permutation[axis], lambda layer: jnp.transpose(layer, permutation)
    if equation.primitive.name == "reshape" and params["dimensions"] is not None:
        # `lax.reshape` can transpose as well.
        return None
    # All others keep the order of the numbers, as a reshape and a cast do. A sharding
    # constraint is left out: it is one of the whole leaf, not of a layer.
    shape = type_of(equation.invars[0]).shape
    new_type = type_of(equation.outvars[0])
    # The layer axis keeps the same number of elements in front of it. [12, 5] ->
    # [3, 4, 5] makes blocks: each of 3 layers reads 4 rows.
    elements_in_front = math.prod(new_type.shape[:axis])
    layer_shape = list(new_type.shape)
    layer_shape[axis] //= length
    for axis_before, size in enumerate(shape):
        is_layer_axis = math.prod(shape[:axis_before]) == elements_in_front
        if is_layer_axis and size % length == 0:
            return (
                axis_before,
                lambda layer: layer.reshape(layer_shape).astype(new_type.dtype),
            )
    return None
