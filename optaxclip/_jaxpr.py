"""Reads the equations of traced programs (jaxprs)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import ShapedArray, eval_jaxpr

from . import _trees

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr, JaxprEqn

# Lines in these folders, of JAX and of this library, tell a user nothing.
LIBRARY_FOLDERS = tuple(
    f"{Path(str(x.__file__)).parent}{os.sep}" for x in (jax, _trees)
)
# Primitives that run a program once, as if its equations stood in their place.
CALLS = ("jit", "pjit", "closed_call", "checkpoint", "remat2")
# Primitives that change along which mesh axes a value varies, and no number.
CASTS_OVER_DEVICES = ("pvary", "pcast")
# Primitives whose derivative is 0.
STOPS = ("ceil", "floor", "round", "sign", "stop_gradient")
# The outputs of an equation from its inputs, or None to run it as it is.
ReplaceEquation = Callable[["JaxprEqn", list[Array]], list[Array] | None]


def is_literal(atom: Any) -> bool:
    """Whether an operand of an equation is a number that stands in the program."""
    return hasattr(atom, "val")


def type_of(atom: Any) -> ShapedArray:
    """The type of a variable or a literal."""
    return atom.aval


def jaxpr_of(program: Any) -> Jaxpr:
    """The open jaxpr of a program that is closed or open."""
    return getattr(program, "jaxpr", program)


def run_equations(
    program: Any, inputs: Iterable[Array], replace: ReplaceEquation
) -> list[Array]:
    """The outputs of a program whose equations are replaced or run one by one."""
    jaxpr = jaxpr_of(program)
    values = dict(zip(jaxpr.invars, inputs))
    values.update(zip(jaxpr.constvars, getattr(program, "consts", ())))

    def read(atom: Any) -> Array:
        if is_literal(atom):
            return jnp.asarray(atom.val, type_of(atom).dtype)
        return values[atom]

    for eqn in jaxpr.eqns:
        arrays = [read(atom) for atom in eqn.invars]
        outputs = replace(eqn, arrays)
        if outputs is None:
            # By `values` instead of `arrays`, in which literals have become arrays.
            outputs = run_equation(jaxpr, eqn, values)
        values.update(zip(eqn.outvars, outputs))
    return [read(atom) for atom in jaxpr.outvars]


def run_equation(jaxpr: Jaxpr, eqn: JaxprEqn, values: Mapping[Any, Any]) -> list[Any]:
    """The outputs of an equation of a program, from the values of its variables."""
    inputs = [atom for atom in eqn.invars if not is_literal(atom)]
    program = jaxpr.replace(
        constvars=[], invars=inputs, outvars=eqn.outvars, eqns=[eqn]
    )
    # eval_jaxpr knows how each primitive is bound, jit and scan among them, and keeps
    # its named scopes.
    return eval_jaxpr(program, [], *[values[atom] for atom in inputs])


def every_equation(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    """An equation, and all equations that it runs."""
    # Imported here, since it imports Pallas, which would slow down `import optaxclip`.
    from jax.extend.core import jaxprs_in_params

    yield eqn
    for jaxpr in jaxprs_in_params(eqn.params):
        for inner in jaxpr.eqns:
            yield from every_equation(inner)


def runs_primitive_like(names: str | tuple[str, ...], eqn: JaxprEqn) -> bool:
    """Whether an equation runs a primitive whose name begins with a name."""
    primitives = [inner.primitive.name for inner in every_equation(eqn)]
    return any(name.startswith(names) for name in primitives)


# A backward pass of the user's (custom_vjp).
has_backward_rule = partial(runs_primitive_like, "custom_vjp_call")


def uses_symbolic_zeros(eqn: JaxprEqn) -> bool:
    """Whether a rule in an equation looks at which of its inputs have a derivative."""
    equations = every_equation(eqn)
    return any(inner.params.get("symbolic_zeros") is True for inner in equations)


def has_refs(eqn: JaxprEqn) -> bool:
    """Whether an equation reads or writes an array that can be written to."""
    # A ref has another type than an array.
    return any(not isinstance(value_type, ShapedArray) for value_type in _types(eqn))


def has_bits_that_vmap_changes(eqn: JaxprEqn) -> bool:
    """Whether an equation draws random bits, and others under vmap than in a loop.
    With keys of threefry they are the same.
    """
    for value_type in _types(eqn):
        dtype = str(getattr(value_type, "dtype", None))
        if dtype.startswith("key<") and dtype != "key<fry>":
            return True
    return runs_primitive_like("rng_bit_generator", eqn)


def _types(eqn: JaxprEqn) -> Iterator[Any]:
    """The types of all values that an equation, or one that it runs, reads or makes."""
    for inner in every_equation(eqn):
        for atom in (*inner.invars, *inner.outvars):
            yield type_of(atom)


def is_stop(eqn: JaxprEqn) -> bool:
    """Whether no derivative passes an equation, as none passes integers."""
    for output in eqn.outvars:
        if jnp.issubdtype(type_of(output).dtype, jnp.inexact):
            return eqn.primitive.name in STOPS
    return True


def body_of(eqn: JaxprEqn) -> Any:
    """The program of a call, or of one turn of a scan."""
    if "jaxpr" in eqn.params:
        return eqn.params["jaxpr"]
    return eqn.params["call_jaxpr"]


def counts_of_scan(eqn: JaxprEqn) -> tuple[int, int]:
    """How many inputs of a scan are constants, and how many are carried."""
    if "num_carry" in eqn.params:
        consts = eqn.params["num_consts"]
        carries = eqn.params["num_carry"]
        return consts, carries
    # So in JAX 0.12.
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(consts), len(carry)


def source_line(eqn: JaxprEqn) -> str:
    """The line of the user's code that an equation comes from, where JAX knows it."""
    traceback = eqn.source_info.traceback
    frames = traceback.frames if traceback else ()
    for frame in frames:
        if not frame.file_name.startswith(LIBRARY_FOLDERS):
            return f" ({frame.file_name}:{frame.line_num})"
    return ""
