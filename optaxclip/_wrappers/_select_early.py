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
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr


def update_unless(
    skip: jax.Array, update: Callable[..., Any], updates: Any, state: Any, params: Any
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
    outputs, old_leaves = program.jaxpr.outvars, jax.tree.leaves(state)
    count = len(outputs) - len(old_leaves)
    early = _computed_state(program.jaxpr, outputs[count:], old_leaves)
    values = _run(program, arguments, skip, early)

    new = [_read(values, output) for output in outputs]
    old = [*map(jnp.zeros_like, new[:count]), *old_leaves]
    for place, output in enumerate(outputs):
        is_selected = not _is_literal(output) and early.get(output) is old[place]
        if not is_selected:
            new[place] = _select(skip, old[place], new[place])
    return jax.tree.unflatten(jax.tree.structure(shapes), new)


def _computed_state(
    jaxpr: Any, outputs: Sequence[Any], old_leaves: Sequence[Any]
) -> dict[Any, Any]:
    """The old leaf for each variable of the new state that an equation computes.

    A variable that is at several places of the state gets the last of their leaves.
    """
    computed: set[Any] = set()
    for equation in jaxpr.eqns:
        computed.update(equation.outvars)
    found = {}
    for output, old in zip(outputs, old_leaves):
        if not _is_literal(output) and output in computed:
            found[output] = old
    return found


def _run(
    program: Any, arguments: Sequence[Any], skip: jax.Array, early: dict[Any, Any]
) -> dict[Any, Any]:
    """The value of every variable, selected where `early` has an old one."""
    jaxpr = program.jaxpr
    values = dict(zip(jaxpr.constvars, program.consts))
    values.update(zip(jaxpr.invars, arguments))
    for equation in jaxpr.eqns:
        results = _run_equation(jaxpr, equation, values)
        values.update(zip(equation.outvars, results))
        for variable in equation.outvars:
            if variable in early:
                values[variable] = _select(skip, early[variable], values[variable])
    return values


def _run_equation(jaxpr: Any, equation: Any, values: dict[Any, Any]) -> Sequence[Any]:
    inputs = [atom for atom in equation.invars if not _is_literal(atom)]
    inputs = list(dict.fromkeys(inputs))
    single = jaxpr.replace(
        constvars=[], invars=inputs, outvars=equation.outvars, eqns=[equation]
    )
    return eval_jaxpr(single, [], *(values[variable] for variable in inputs))


def _read(values: dict[Any, Any], atom: Any) -> jax.Array:
    if _is_literal(atom):  # Its value may be a Python number.
        return jnp.asarray(atom.val, atom.aval.dtype)
    return values[atom]


def _select(skip: jax.Array, old: Any, new: Any) -> jax.Array:
    old, new = jnp.asarray(old), jnp.asarray(new)
    if old.dtype != new.dtype:  # Typed PRNG keys refuse astype to their own dtype.
        old = old.astype(new.dtype)
    return jnp.where(skip, old, new)


def _is_literal(atom: Any) -> bool:
    # Imported here, since it imports Pallas, which would slow down `import optaxclip`.
    from jax.extend.core import Literal

    return isinstance(atom, Literal)
