"""Reads the program of a loss: which of its scans go through layers.

traced    the loss becomes a program (a jaxpr)
opened    equations take the place of calls, so that scans in calls are seen
stacks    scans whose xs are leaves of params that nothing else reads
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.interpreters.partial_eval import dce_jaxpr

from .._jaxpr import (
    body_of,
    counts_of_scan,
    every_equation,
    is_literal,
    is_stop,
    jaxpr_of,
    type_of,
)
from .._trees import PyTree, listed
from .stacks import LayerSlice, LayoutStep, Stack

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

JITS = frozenset({"jit", "pjit"})
CALLS = JITS | {"closed_call", "core_call", "checkpoint", "remat2"}
# What may stand between a leaf and the scan that reads it: the same numbers in another
# order, shape or dtype.
LAYOUT = {
    "transpose",
    "squeeze",
    "broadcast_in_dim",
    "reshape",
    "convert_element_type",
    "copy",
    "copy_p",
    "sharding_constraint",
}
# The outputs of an equation from its inputs, or None to run it as it is.
ReplaceEquation = Callable[["JaxprEqn", list[Array]], list[Array] | None]


class Program(NamedTuple):
    """The program of a loss, in which calls are opened."""

    jaxpr: ClosedJaxpr  # from params and batch to the loss, and then aux
    structure: PyTree  # of what the loss returns
    stacks: dict[int, Stack]  # by `id` of their equations
    slice_of_leaf: dict[str, LayerSlice]  # where layers are in the leaves of all stacks

    @property
    def layer_count(self) -> int:
        return sum(stack.length for stack in self.stacks.values())


def read_program(
    loss: Callable[..., Any],
    params: PyTree,
    batch: Sequence[PyTree],
    name_of_leaf: dict[str, str],
    trained: Container[str],
) -> Program:
    """Traces the loss and finds its stacks. One in a checkpoint is found only if there
    is none outside of checkpoints.

    Args:
      name_of_leaf: what errors call each leaf of params, by its path.
      trained: the paths of the leaves that are trained.

    Raises:
      TypeError: a loss that is not a real scalar.
      ValueError: a leaf that the loss does not depend on, or a loss without a stack.
    """
    traced, shapes = jax.make_jaxpr(loss, return_shape=True)(params, *batch)
    _check_scalar(shapes)
    _check_dependence(traced.jaxpr, name_of_leaf, trained)
    inputs = jax.tree.leaves((params, batch))
    # Calls other than jits are opened only if need be: a checkpoint of the head should
    # stay one.
    for calls in (JITS, CALLS):
        opened = _opened(traced, calls, inputs)
        weights = _trained_inputs(opened.jaxpr, name_of_leaf, trained)
        stacks = _stacks_of(opened.jaxpr, weights)
        if stacks:
            return Program(
                jaxpr=opened,
                structure=jax.tree.structure(shapes),
                stacks=stacks,
                slice_of_leaf=_slice_of_leaf(stacks.values()),
            )
    raise ValueError(
        "release: no scan of loss goes through layers. It has "
        f"{', '.join(_scans_of(traced)) or 'no scan at all'}. Scan the layers "
        "(jax.lax.scan, nn.scan, nnx.scan) outside of loops and branches. Among its xs "
        "must be leaves of params that nothing else reads: no second scan, no penalty "
        "of all weights, no index into them in a layer."
    )


def _slice_of_leaf(stacks: Iterable[Stack]) -> dict[str, LayerSlice]:
    """Where layers are in the leaves of stacks, by the path of the leaf."""
    slice_of_leaf = {}
    for stack in stacks:
        for layer_slice in stack.slice_of_input.values():
            slice_of_leaf[layer_slice.leaf_path] = layer_slice
    return slice_of_leaf


def _trained_inputs(
    jaxpr: Jaxpr, leaf_paths: Iterable[str], trained: Container[str]
) -> dict[Var, str]:
    """The inputs of a program that are trained leaves, with their paths. Its first
    inputs are the leaves of params, in the order of `leaf_paths`.
    """
    weights = {}
    for path, var in zip(leaf_paths, jaxpr.invars):
        if path in trained:
            weights[var] = path
    return weights


def _scans_of(traced: ClosedJaxpr) -> list[str]:
    """The lengths and lines of all scans, for an error."""
    from jax.extend.source_info_util import summarize

    # A dict, since a scan may be called twice.
    scans: dict[str, None] = {}
    for equation in traced.eqns:
        for inner in every_equation(equation):
            if inner.primitive.name == "scan":
                line = summarize(inner.source_info)
                scans[f"one of length {inner.params['length']} at {line}"] = None
    return list(scans)


# ---------------------------------------------------------------------------- checks


def _check_scalar(shapes: PyTree) -> None:
    """Raises TypeError for a loss that is neither a real scalar nor (scalar, aux)."""
    loss = shapes
    if type(shapes) is tuple and len(shapes) == 2:
        loss, _ = shapes
    is_scalar = getattr(loss, "shape", None) == ()
    if not is_scalar or not jnp.issubdtype(loss.dtype, jnp.floating):
        types = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", shapes)
        raise TypeError(
            "release: loss must return a real scalar, or a pair of that and any other "
            f"outputs, got {types}."
        )


def _check_dependence(
    jaxpr: Jaxpr, name_of_leaf: dict[str, str], trained: Container[str]
) -> None:
    """Raises ValueError for a trained leaf that the loss does not read. It would still
    get moments and weight decay. A leaf behind `stop_gradient` counts as read.
    """
    weights = _trained_inputs(jaxpr, name_of_leaf, trained)
    readers = _readers(_needed(jaxpr, [0]))
    unread = [name_of_leaf[path] for var, path in weights.items() if not readers[var]]
    if unread:
        raise ValueError(
            "release: the loss must depend on every trained leaf of params, but does "
            f"not on {listed(unread)}. Leave out what is not trained, such as "
            "statistics of BatchNorm, by trainable=, and hand new values over as "
            "aux."
        )


# ------------------------------------------------------------------------ running it


def run_equations(
    traced: Any, inputs: Iterable[Array], replace: ReplaceEquation
) -> list[Array]:
    """Runs a program equation by equation, and returns its outputs."""
    jaxpr = jaxpr_of(traced)
    values = dict(zip(jaxpr.invars, inputs))
    values.update(zip(jaxpr.constvars, getattr(traced, "consts", ())))

    def read(atom: Any) -> Array:
        if is_literal(atom):
            return jnp.asarray(atom.val, atom.aval.dtype)
        return values[atom]

    for equation in jaxpr.eqns:
        arrays = [read(atom) for atom in equation.invars]
        outputs = replace(equation, arrays)
        if outputs is None:
            outputs = _run_equation(equation, values)
        values.update(zip(equation.outvars, outputs))
    return [read(atom) for atom in jaxpr.outvars]


def _run_equation(equation: JaxprEqn, values: dict[Var, Array]) -> list[Array]:
    """The outputs of an equation, from the values of variables."""
    from jax.extend.core import ClosedJaxpr, DebugInfo, Jaxpr, jaxpr_as_fun

    # A dict, since an equation may read a variable twice.
    variables = dict.fromkeys(_variables(equation.invars))
    # JAX warns of a program without it.
    debug_info = DebugInfo("release", "loss", None, None)
    # A program of one equation, since `primitive.bind` would lose its named scopes.
    jaxpr = Jaxpr(
        constvars=(),
        invars=[*variables],
        outvars=equation.outvars,
        eqns=[equation],
        debug_info=debug_info,
    )
    arrays = [values[var] for var in variables]
    return jaxpr_as_fun(ClosedJaxpr(jaxpr, ()))(*arrays)


def _opened(
    traced: ClosedJaxpr, calls: frozenset[str], inputs: list[Array]
) -> ClosedJaxpr:
    """The program with equations in the place of calls."""
    from jax.extend.core import ClosedJaxpr

    def open_call(equation: JaxprEqn, inputs: list[Array]) -> list[Array] | None:
        if equation.primitive.name in calls:
            return run_equations(body_of(equation), inputs, open_call)
        return None

    def run_opened(*inputs: Array) -> list[Array]:
        return run_equations(traced, inputs, open_call)

    opened = jax.make_jaxpr(run_opened)(*inputs)
    # nnx.scan returns its weights as ys, which nobody reads.
    jaxpr = _needed(opened.jaxpr, range(len(opened.out_avals)))
    return ClosedJaxpr(jaxpr, opened.consts)


def _needed(jaxpr: Jaxpr, outputs: Sequence[int]) -> Jaxpr:
    """A program cut down to what the outputs with these indices need. A scan in it may
    have fewer inputs and outputs.
    """
    is_needed = [index in outputs for index in range(len(jaxpr.outvars))]
    needed, _ = dce_jaxpr(jaxpr, is_needed, instantiate=True)
    return needed


def _variables(atoms: Iterable[Any]) -> list[Var]:
    """The variables among some inputs, which may be numbers too."""
    return [atom for atom in atoms if not is_literal(atom)]


def _readers(jaxpr: Jaxpr) -> Counter[Var]:
    """How often each variable is read. An output is a reader too."""
    readers = Counter(_variables(jaxpr.outvars))
    for equation in jaxpr.eqns:
        readers.update(_variables(equation.invars))
    return readers


def _makers(jaxpr: Jaxpr) -> dict[Var, JaxprEqn]:
    """The equation that makes each variable."""
    makers = {}
    for equation in jaxpr.eqns:
        makers |= dict.fromkeys(equation.outvars, equation)
    return makers


# ---------------------------------------------------------------------------- stacks


def _stacks_of(jaxpr: Jaxpr, weights: dict[Var, str]) -> dict[int, Stack]:
    """The scans that read weights slice by slice, by `id` of their equations."""
    # A leaf that is read for aux alone is not read twice: readers are counted in the
    # program of the loss. The stacks are equations of the program that runs, with aux.
    program_of_loss = _needed(jaxpr, [0])
    readers = _readers(program_of_loss)
    makers = _makers(jaxpr)
    makers_for_loss = _makers(program_of_loss)
    dependent = _dependent_on(weights, jaxpr)

    def slice_of(var: Any, axis: int, length: int) -> LayerSlice | None:
        """Where the layers are in the leaf behind a variable, which has them along an
        axis. None: there is no leaf behind it, or the loss reads the leaf twice.
        """
        if is_literal(var) or readers[var] != 1:
            return None
        if var in weights:
            return LayerSlice(weights[var], axis, length, layout_steps=[])
        maker = makers.get(var)
        if maker is None or maker.primitive.name not in LAYOUT:
            return None
        axis_before = _axis_before(maker, axis, length)
        if axis_before is None:
            return None
        before = slice_of(maker.invars[0], axis_before, length)
        if before is None:
            return None
        step = LayoutStep(maker, axis)
        return before._replace(layout_steps=[*before.layout_steps, step])

    stacks = {}
    layer_count = 0
    for equation in jaxpr.eqns:
        length = equation.params.get("length", 0)
        if equation.primitive.name != "scan" or length == 0:
            continue
        slice_of_input = {}
        read_for_loss = _inputs_for_loss(equation, makers_for_loss)
        consts, carries = counts_of_scan(equation)
        first_x = consts + carries
        for place, var in enumerate(equation.invars[first_x:], first_x):
            if not is_literal(var) and var in read_for_loss:
                layer_slice = slice_of(var, axis=0, length=length)
                if layer_slice is not None:
                    slice_of_input[place] = layer_slice
        if slice_of_input:
            stacks[id(equation)] = Stack(
                equation=equation,
                slice_of_input=slice_of_input,
                dependent_inputs=_dependent_inputs(equation, dependent),
                layers_before=layer_count,
            )
            layer_count += length
    return stacks


def _dependent_on(weights: Iterable[Var], jaxpr: Jaxpr) -> set[Var]:
    """The variables that may have a gradient by weights."""
    dependent = set(weights)
    for equation in jaxpr.eqns:
        reads_dependent = not dependent.isdisjoint(_variables(equation.invars))
        if reads_dependent and not is_stop(equation):
            dependent.update(equation.outvars)
    return dependent


def _dependent_inputs(equation: JaxprEqn, dependent: set[Var]) -> set[int]:
    """The places of the inputs of a scan that depend on weights, in any layer."""
    places = set()
    for place, var in enumerate(equation.invars):
        if not is_literal(var) and var in dependent:
            places.add(place)
    body = jaxpr_of(body_of(equation))
    consts, carries = counts_of_scan(equation)
    read_by_carry = []
    for carry in range(carries):
        is_output = [index == carry for index in range(len(body.outvars))]
        _, is_read = dce_jaxpr(body, is_output)
        read_by_carry.append({place for place, flag in enumerate(is_read) if flag})
    # A weight may come into one carry, and by the next layer into another.
    for _ in range(carries):
        for carry, places_read in enumerate(read_by_carry):
            if places & places_read:
                places.add(consts + carry)
    return places


def _inputs_for_loss(
    equation: JaxprEqn, makers_for_loss: dict[Var, JaxprEqn]
) -> set[Var]:
    """The inputs of a scan that the loss needs. Removing what the loss does not need
    may have taken inputs from this scan. These are left.
    """
    inputs: set[Var] = set()
    for output in equation.outvars:
        if output in makers_for_loss:
            inputs.update(_variables(makers_for_loss[output].invars))
    return inputs


def _axis_before(equation: JaxprEqn, axis: int, length: int) -> int | None:
    """The axis of the layers before an equation that changes the layout. None: the
    layers are no longer along one axis.
    """
    before = type_of(equation.invars[0]).shape
    after = type_of(equation.outvars[0]).shape
    if equation.primitive.name == "transpose":
        return equation.params["permutation"][axis]
    if math.prod(before) != math.prod(after) or _also_transposes(equation):
        return None
    # A reshape keeps the numbers in front of the axis. [12, 5] -> [3, 4, 5] makes
    # blocks: each of 3 layers reads 4 rows.
    numbers_in_front = math.prod(after[:axis])
    for axis_before, size in enumerate(before):
        is_same_place = math.prod(before[:axis_before]) == numbers_in_front
        if is_same_place and size % length == 0:
            return axis_before
    return None


def _also_transposes(equation: JaxprEqn) -> bool:
    """Whether a reshape or a broadcast changes the order of numbers as well."""
    if equation.primitive.name == "reshape":
        return equation.params["dimensions"] is not None
    if equation.primitive.name == "broadcast_in_dim":
        axes = equation.params["broadcast_dimensions"]
        return list(axes) != sorted(axes)
    return False
