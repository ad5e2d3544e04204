"""Reading traced programs."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray

CALLS = ("jit", "pjit", "closed_call", "checkpoint", "remat2")
# Functions whose derivative is 0, or is made so.
STOPS = ("ceil", "floor", "round", "sign", "stop_gradient")


def is_literal(atom: Any) -> bool:
    """Whether an operand of an equation is a number that stands in the program."""
    # Imported here, since it imports Pallas, which would slow down `import optaxclip`.
    from jax.extend.core import Literal

    return isinstance(atom, Literal)


def has_backward_rule(eqn: Any) -> bool:
    """Whether a backward pass of somebody's own is in an equation (custom_vjp)."""
    if eqn.primitive.name.startswith("custom_vjp_call"):
        return True
    return any(map(has_backward_rule, inside(eqn)))


def has_refs(eqn: Any) -> bool:
    """Whether an equation, or one that it runs, has an array that can be written to."""
    variables = (x for x in (*eqn.invars, *eqn.outvars) if not is_literal(x))
    # The type of a ref is no type of an array.
    if not all(isinstance(x.aval, ShapedArray) for x in variables):
        return True
    return any(map(has_refs, inside(eqn)))


def has_convolution(eqn: Any) -> bool:
    """Whether an equation, or one that it runs, is a convolution."""
    own = eqn.primitive.name == "conv_general_dilated"
    return own or any(map(has_convolution, inside(eqn)))


def asks_what_moves(eqn: Any) -> bool:
    """Whether a rule in an equation looks at which of its inputs have a derivative."""
    return eqn.params.get("symbolic_zeros") is True or any(
        map(asks_what_moves, inside(eqn))
    )


def has_bits_that_vmap_changes(eqn: Any) -> bool:
    """Whether an equation makes random bits that vmap makes differ from those of a
    loop. With keys of "threefry" they are the same.
    """
    variables = (x for x in (*eqn.invars, *eqn.outvars) if not is_literal(x))
    types = [getattr(x.aval, "dtype", None) for x in variables]
    keys = [x for x in types if x is not None and _is_key(x)]
    if eqn.primitive.name == "rng_bit_generator" or any(
        str(key) != "key<fry>" for key in keys
    ):
        return True
    return any(map(has_bits_that_vmap_changes, inside(eqn)))


def _is_key(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def reached_backward(jaxpr: Any, wanted: list[bool]) -> set[Any]:
    """The variables that a backward pass from the wanted outputs of a program comes
    by.
    """
    pairs = zip(jaxpr.outvars, wanted)
    reached = {x for x, is_wanted in pairs if is_wanted and not is_literal(x)}
    for eqn in reversed(jaxpr.eqns):
        own = reached_operands(eqn, [x in reached for x in eqn.outvars])
        reached.update(
            x
            for x, comes in zip(eqn.invars, own)
            if comes and not is_literal(x)
        )
    return reached


def reached_operands(eqn: Any, wanted: list[bool]) -> list[bool]:
    """Which operands of an equation a backward pass from its wanted outputs comes
    by.
    """
    if is_stop(eqn) or not any(wanted):
        return [False] * len(eqn.invars)
    if eqn.primitive.name == "cond":
        each = [_reached_inputs(x, wanted) for x in eqn.params["branches"]]
        return [False, *map(any, zip(*each))]
    if eqn.primitive.name == "scan":
        return _reached_inputs(
            eqn.params["jaxpr"], wanted_in_scan(eqn, wanted)
        )
    if eqn.primitive.name in CALLS:
        return _reached_inputs(body_of(eqn), wanted)
    return [True] * len(eqn.invars)


def wanted_in_scan(eqn: Any, wanted: list[bool]) -> list[bool]:
    """The outputs of the body of a scan that a backward pass comes by: those of the
    scan that are wanted, and what is carried to a later turn that needs it.
    """
    first, count = counts_of_scan(eqn)
    while True:
        ins = _reached_inputs(eqn.params["jaxpr"], wanted)
        carried = ins[first : first + count]
        carried = [a or b for a, b in zip(wanted[:count], carried)]
        if carried == wanted[:count]:
            return wanted
        wanted = [*carried, *wanted[count:]]


def _reached_inputs(body: Any, wanted: list[bool]) -> list[bool]:
    jaxpr = getattr(body, "jaxpr", body)
    reached = reached_backward(jaxpr, wanted)
    return [x in reached for x in jaxpr.invars]


def moved_outputs(eqn: Any, moved: list[bool]) -> list[bool]:
    """Which outputs of an equation change with the inputs that move."""
    if is_stop(eqn) or not any(moved):
        return [False] * len(eqn.outvars)
    if eqn.primitive.name == "sort":
        return moved
    if eqn.primitive.name == "cond":
        each = [_moved_outputs(x, moved[1:]) for x in eqn.params["branches"]]
        return list(map(any, zip(*each)))
    if eqn.primitive.name == "scan":
        return _moved_by_scan(eqn, moved)
    if eqn.primitive.name in CALLS:
        return _moved_outputs(body_of(eqn), moved)
    return [True] * len(eqn.outvars)


def _moved_by_scan(eqn: Any, moved: list[bool]) -> list[bool]:
    first, count = counts_of_scan(eqn)
    last = first + count
    while True:
        outs = _moved_outputs(eqn.params["jaxpr"], moved)
        carried = [a or b for a, b in zip(moved[first:last], outs)]
        if carried == moved[first:last]:
            # Without a turn what is carried comes out as it went in.
            return [*carried, *outs[count:]]
        moved = [*moved[:first], *carried, *moved[last:]]


def _moved_outputs(body: Any, moved: list[bool]) -> list[bool]:
    jaxpr = getattr(body, "jaxpr", body)
    found = {x for x, moves in zip(jaxpr.invars, moved) if moves}
    for eqn in jaxpr.eqns:
        ins = [not is_literal(x) and x in found for x in eqn.invars]
        own = zip(eqn.outvars, moved_outputs(eqn, ins))
        found.update(x for x, moves in own if moves)
    return [not is_literal(x) and x in found for x in jaxpr.outvars]


def is_stop(eqn: Any) -> bool:
    """Whether an equation has no derivative, as integers have none."""
    types = [x.aval.dtype for x in eqn.outvars]
    is_float = any(jnp.issubdtype(dtype, jnp.inexact) for dtype in types)
    return eqn.primitive.name in STOPS or not is_float


def body_of(eqn: Any) -> Any:
    """The program of a call."""
    return eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))


def counts_of_scan(eqn: Any) -> tuple[int, int]:
    """How many inputs of a scan are constants, and how many are carried."""
    if "num_carry" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    # So in JAX 0.12.
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(consts), len(carry)


def inside(eqn: Any) -> Iterator[Any]:
    """The equations of the programs that an equation runs, not those inside these."""
    return _equations(eqn.params.values())


def _equations(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _equations(value)  # such as the branches of a cond
        # A closed program has its equations one step further in.
        yield from getattr(getattr(value, "jaxpr", value), "eqns", ())
