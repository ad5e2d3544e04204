"""The loss of one example as a program (a jaxpr), and checks that in it no example sees
others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun

from .._arguments.checks import function_name
from .._devices import mesh as _mesh
from .._devices import mesh_types
from .._devices.mesh import AxisNames, MeshAxes, listed
from .._devices.mesh_types import varying
from .._jaxpr import CASTS_OVER_DEVICES, source_line
from .._trees import PyTree
from ._problem import Problem, Signature
from ._work import equations_of

# (params, example) -> (value, aux), or the gradient and aux
FunctionOfOne = Callable[[PyTree, PyTree], tuple[Any, PyTree]]
# With these values of `vmap_method` a callback sees one example at a time. With None
# JAX itself refuses arguments of the callback that depend on the example. An equation
# that is not a callback has None as well.
ONE_BY_ONE = (None, "sequential", "sequential_unrolled")
HINT_FOR_SPLIT_TABLES = (
    "an Explicit mesh axis splits a parameter, but not the batch. If that parameter is "
    "a table, look up its rows by table.at[rows].get(out_sharding=jax.sharding."
    "PartitionSpec()), or make the axis Auto."
)


@dataclass(frozen=True)
class TracedProblem(Problem):
    """A problem on one device, with the program of its loss."""

    loss_program: ClosedJaxpr  # of the loss of one example
    # Backward rules of the user's are only in here
    gradient_program: ClosedJaxpr
    # Runs `loss_program`, so that each compilation calls the user's function once
    traced_loss: FunctionOfOne
    out_tree: Any  # of the value and aux
    # For each parameter, the mesh axes over which its gradient is split
    axes_of_params: list[AxisNames]
    # Inside shard_map and pmap: the mesh axes along which examples differ
    batch_axes: AxisNames


def traced(problem: Problem, signature: Signature) -> TracedProblem:
    """The problem on one device with its program, which is checked.

    Raises:
      TypeError: a loss that is not one real number.
      ValueError: mesh axes that contradict types, or a loss in which one example sees
        others.
    """
    axes_of_params = _axes_of_params(problem, signature.mesh_axes)
    batch_axes = _batch_axes(problem.batch, axes_of_params)
    params = mesh_types.varying_as_any_of(problem.params, problem.batch)
    problem = replace(problem, params=params)

    def loss_of_one(params: PyTree, example: PyTree) -> tuple[jax.Array, PyTree]:
        return problem.loss(params, example, problem.shared)

    loss_program, result_types = _program_of(loss_of_one, problem, signature)
    _check_program(problem.call, loss_program, batch_axes)
    out_tree = jax.tree.structure(result_types)

    def traced_loss(params: PyTree, example: PyTree) -> tuple[jax.Array, PyTree]:
        outputs = jaxpr_as_fun(loss_program)(*jax.tree.leaves((params, example)))
        return jax.tree.unflatten(out_tree, outputs)

    # A rule of jax.custom_jvp or jax.custom_vjp is a program in the gradient only.
    # JAX refuses a loss that is not one real number.
    gradient_of_one = jax.grad(traced_loss, has_aux=True)
    gradient_program, _ = _program_of(gradient_of_one, problem, signature)
    _check_program(problem.call, gradient_program, batch_axes)
    return TracedProblem(
        **vars(problem),
        loss_program=loss_program,
        gradient_program=gradient_program,
        traced_loss=traced_loss,
        out_tree=out_tree,
        axes_of_params=axes_of_params,
        batch_axes=batch_axes,
    )


def _program_of(
    function: FunctionOfOne, problem: Problem, signature: Signature
) -> tuple[ClosedJaxpr, PyTree]:
    """The program of a function of the parameters and one example, and the types of its
    results. Adds a hint to the errors of the loss.
    """
    programs = []

    def record_program(params: PyTree, example: PyTree) -> jax.Array:
        make_program = jax.make_jaxpr(function, return_shape=True)
        programs.append(make_program(params, example))
        return jnp.zeros(())

    # Inside vmap the batch looks like one example. JAX takes its axis away from the
    # types of keys, shardings and mesh axes too.
    record_of_batch = jax.vmap(record_program, (None, 0))
    try:
        jax.make_jaxpr(record_of_batch)(problem.params, problem.batch)
    except Exception as error:
        # A loss that was written for a batch may index an axis that is missing.
        shapes = [list(leaf.shape[1:]) for leaf in jax.tree.leaves(problem.batch)]
        hint = (
            f"{function_name(signature.loss)} gets one example, without the batch "
            f"axis: arrays of shape {', '.join(map(str, shapes))}. It must return one "
            "real number, or (value, aux) with has_aux=True."
        )
        # JAX has no public name for its error.
        if "out_sharding" in str(error):
            hint = HINT_FOR_SPLIT_TABLES
        error.add_note(f"{problem.call}: {hint}")
        raise
    return programs[0]


# -------------------------------------------------------------------------- mesh axes


def _axes_of_params(problem: Problem, mesh_axes: MeshAxes) -> list[AxisNames]:
    """For each parameter, the mesh axes over which its gradient is split."""
    axes_of_params = []
    for split in _mesh.splits(mesh_axes, problem.params, problem.call):
        # Along mesh axes of the batch devices hold gradients of different examples, and
        # not parts of one.
        names = set(split.names) - varying(problem.batch)
        axes_of_params.append(tuple(sorted(names)))
    return axes_of_params


def _batch_axes(batch: PyTree, axes_of_params: Sequence[AxisNames]) -> AxisNames:
    """The mesh axes along which devices have different examples. Without types of
    shard_map these are assumed to be all axes that split no parameter.
    """
    manual = mesh_types.manual_axes()
    if mesh_types.has_types(manual):
        return tuple(sorted(varying(batch)))
    return tuple(sorted(set(manual).difference(*axes_of_params)))


# ----------------------------------------------------------------------------- checks


def _check_program(call: str, program: ClosedJaxpr, batch_axes: AxisNames) -> None:
    """Raises ValueError for a loss in which one example sees others: those of its own
    batch, of other devices, or of an outer `jax.vmap`.
    """
    equations = equations_of(program)
    # Devices may share the work on one example along mesh axes that do not split the
    # batch, also along those of a shard_map in the loss. Any other name belongs to an
    # outer jax.vmap.
    safe_axes = set(mesh_types.manual_axes())
    for eqn in equations:
        if eqn.primitive.name == "shard_map":
            safe_axes.update(eqn.params["mesh"].axis_names)
    safe_axes -= set(batch_axes)
    for eqn in equations:
        _check_examples(call, eqn)
        _check_devices(call, eqn, safe_axes)


def _check_examples(call: str, eqn: JaxprEqn) -> None:
    """Raises ValueError for an equation that jax.vmap runs on the whole batch."""
    name = eqn.primitive.name
    method = eqn.params.get("vmap_method")
    if name == "custom_vmap_call":
        cure = "Call the function without jax.custom_batching."
    elif method not in ONE_BY_ONE:
        name = f"{name} with vmap_method={method!r}"
        cure = "Take vmap_method='sequential'."
    else:
        return
    raise ValueError(
        f"{call}: the loss of one example has a {name}{source_line(eqn)}, which sees "
        "the whole batch: one example could change the gradients of all others, and no "
        f"limit would bound what it does. {cure}"
    )


def _check_devices(call: str, eqn: JaxprEqn, safe_axes: set[str]) -> None:
    """Raises ValueError for an equation that joins values along an axis that is not
    safe.
    """
    joined = _joined_axes(eqn) - safe_axes
    if joined:
        raise ValueError(
            f"{call}: the loss of one example has a {eqn.primitive} over "
            f"{listed(joined)}{source_line(eqn)}. Over axes that split the batch "
            "gather parameters before the call, and add up gradients after it. In pmap "
            "and with check_vma=False every mesh axis that mesh_axes does not name "
            "counts as one that splits the batch: name those that split parameters."
        )


def _joined_axes(eqn: JaxprEqn) -> set[str]:
    """The named axes along which an equation joins values."""
    if eqn.primitive.name in ("axis_index", *CASTS_OVER_DEVICES):
        return set()
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    # The axes of a sum on one device are numbers.
    return {name for name in _mesh.names_in(axes) if isinstance(name, str)}
