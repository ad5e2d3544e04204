"""Runs an optimizer's update and keeps the old state where the step is skipped.

    trace update(updates, state, params) to a list of equations
    for each equation:
        run it
        if it computes a leaf of the new state: select(skip, old leaf, new leaf)
    return select(skip, 0, new updates), the selected state

Each leaf of the new state is selected as soon as it is computed, and the equations that
follow read the selected one. Selected at the end, both old and new moments would be
alive at once, and XLA would copy them. Where the step is skipped, the updates are
computed from the old moments and thrown away.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import eval_jaxpr

from .._jaxpr import is_literal
from .._sums import per_platform


def update_unless(
    skip: jax.Array,
    update: Callable[..., Any],
    updates: Any,
    state: Any,
    params: Any,
) -> tuple[Any, Any]:
    """Returns the optimizer's updates and state, or zeros and the old state.

    Args:
      skip: bool[], whether the step is skipped.
      update: the optimizer's, a function of updates, state and params.
      updates, state, params: its arguments.
    """
    arguments, treedef = jax.tree.flatten((updates, state, params))

    def of_leaves(*leaves: Any) -> Any:
        return update(*treedef.unflatten(leaves))

    program, shapes = jax.make_jaxpr(of_leaves, return_shape=True)(*arguments)
    outputs, old_leaves = program.jaxpr.outvars, _old_leaves(state, shapes[1])
    # The program returns the updates, and then the leaves of the state.
    count = len(outputs) - len(old_leaves)
    old = [*(None,) * count, *old_leaves]
    choices = [
        _Choice(*each)
        for each in zip(_flags(skip, len(outputs)), old, strict=True)
    ]
    early = _computed_state(program.jaxpr, outputs[count:], choices[count:])
    values = _run(program, arguments, early)

    new = []
    for output, choice in zip(outputs, choices):
        value = _read(values, output)
        # Selected here: updates, and leaves of the state that are constants, arguments,
        # or a variable that the state holds several times.
        if is_literal(output) or early.get(output) is not choice:
            value = _select(choice, value)
        new.append(value)
    return jax.tree.unflatten(jax.tree.structure(shapes), new)


def _old_leaves(old: Any, new: Any) -> list[Any]:
    """The old leaf for each leaf of the new state."""
    leaves = jax.tree.leaves(old)
    entries = jax.tree_util.tree_flatten_with_path(new)[0]
    if len(leaves) == len(entries):
        return leaves
    # The first update of a clipper makes a state in the place of optax's EmptyState.
    # There was none before, so where that step is skipped the new one is zeros.
    known = dict(jax.tree_util.tree_flatten_with_path(old)[0])
    return [known.get(path) for path, _ in entries]


class _Choice(NamedTuple):
    """What an output is where the step is skipped."""

    skip: jax.Array  # bool[]
    old: Any  # None for zeros


def _flags(skip: jax.Array, count: int) -> list[jax.Array]:
    """`skip` for each output."""

    def entries(skip: jax.Array) -> list[jax.Array]:
        # XLA merges kernels of an optimizer that read the same vector.
        vector = lax.optimization_barrier(jnp.broadcast_to(skip, (count,)))
        return [vector[place] for place in range(count)]

    def same(skip: jax.Array) -> list[jax.Array]:
        return [skip] * count

    return per_platform(skip, cpu=same, gpu=entries, plain=same)


def _computed_state(
    jaxpr: Any, outputs: Sequence[Any], choices: Sequence[_Choice]
) -> dict[Any, _Choice]:
    """The choice for each variable of the new state that an equation computes.

    A variable that is at several places of the state gets the last of their leaves.
    """
    computed: set[Any] = set()
    for equation in jaxpr.eqns:
        computed.update(equation.outvars)
    found = {}
    for output, choice in zip(outputs, choices):
        if not is_literal(output) and output in computed:
            found[output] = choice
    return found


def _run(
    program: Any, arguments: Sequence[Any], early: dict[Any, _Choice]
) -> dict[Any, Any]:
    """The value of every variable, selected where there is a choice."""
    jaxpr = program.jaxpr
    values = dict(zip(jaxpr.constvars, program.consts))
    values.update(zip(jaxpr.invars, arguments))
    for equation in jaxpr.eqns:
        # As in eval_jaxpr, with a select behind each equation that computes a leaf.
        results = _run_equation(jaxpr, equation, values)
        values.update(zip(equation.outvars, results))
        for variable in equation.outvars:
            if variable in early:
                values[variable] = _select(early[variable], values[variable])
    return values


def _run_equation(
    jaxpr: Any, equation: Any, values: dict[Any, Any]
) -> Sequence[Any]:
    inputs = [atom for atom in equation.invars if not is_literal(atom)]
    # x * x reads x twice, and a program takes each argument once.
    inputs = list(dict.fromkeys(inputs))
    params = equation.params
    if "donated_invars" in params:
        # The old state is selected after it is read, so no update may have its place.
        kept = (False,) * len(params["donated_invars"])
        equation = equation.replace(params=params | {"donated_invars": kept})
    single = jaxpr.replace(
        constvars=[], invars=inputs, outvars=equation.outvars, eqns=[equation]
    )
    # eval_jaxpr knows how each primitive is bound, jit and scan among them.
    return eval_jaxpr(single, [], *(values[variable] for variable in inputs))


def _read(values: dict[Any, Any], atom: Any) -> jax.Array:
    # The value of a literal may be a Python number.
    if is_literal(atom):
        return jnp.asarray(atom.val, atom.aval.dtype)
    return values[atom]


def _select(choice: _Choice, new: Any) -> jax.Array:
    new = jnp.asarray(new)
    old = (
        jnp.zeros_like(new) if choice.old is None else jnp.asarray(choice.old)
    )
    # Typed PRNG keys refuse astype to their own dtype.
    if old.dtype != new.dtype:
        old = old.astype(new.dtype)
    # No lax.cond: collectives of the update must run on all devices.
    return jnp.where(choice.skip, old, new)
