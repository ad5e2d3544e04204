"""Reading traced programs."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax.core import ShapedArray

CALLS = ("jit", "pjit", "closed_call", "checkpoint", "remat2")
# Functions whose derivative is 0, or is made so.
STOPS = ("ceil", "floor", "round", "sign", "stop_gradient")


def is_literal(atom: Any) -> bool:
    """Whether an operand of an equation is a number that stands in the program."""
    return hasattr(atom, "val")


def every_equation(eqn: Any) -> Iterator[Any]:
    """An equation, and all equations that it runs."""
    # Imported here, since it imports Pallas, which would slow down `import optaxclip`.
    from jax.extend.core import jaxprs_in_params

    yield eqn
    for jaxpr in jaxprs_in_params(eqn.params):
        for inner in jaxpr.eqns:
            yield from every_equation(inner)


def runs(primitive: str, eqn: Any) -> bool:
    """Whether an equation, or one that it runs, is of a primitive whose name begins
    so.
    """
    return any(x.primitive.name.startswith(primitive) for x in every_equation(eqn))


# A convolution, and a backward pass of somebody's own (custom_vjp).
has_convolution = partial(runs, "conv_general_dilated")
has_backward_rule = partial(runs, "custom_vjp_call")


def has_groups(eqn: Any) -> bool:
    """Whether an equation has a convolution of several groups, with more than one
    channel in each: not one that is depthwise.
    """
    for each in every_equation(eqn):
        groups = each.params.get("feature_group_count", 1)
        if groups > 1:
            outputs, inputs, *_ = each.params["dimension_numbers"].rhs_spec
            kernel = each.invars[1].aval.shape
            if kernel[inputs] > 1 or kernel[outputs] > groups:
                return True
    return False


def asks_what_moves(eqn: Any) -> bool:
    """Whether a rule in an equation looks at which of its inputs have a derivative."""
    return any(x.params.get("symbolic_zeros") is True for x in every_equation(eqn))


def has_refs(eqn: Any) -> bool:
    """Whether an equation, or one that it runs, has an array that can be written to."""
    # The type of a ref is no type of an array.
    return not all(isinstance(x, ShapedArray) for x in _types(eqn))


def has_bits_that_vmap_changes(eqn: Any) -> bool:
    """Whether an equation makes random bits that vmap makes differ from those of a
    loop. With keys of threefry they are the same.
    """
    keys = {str(getattr(x, "dtype", None)) for x in _types(eqn)}
    keys = {key for key in keys if key.startswith("key<")}
    return runs("rng_bit_generator", eqn) or not keys <= {"key<fry>"}


def _types(eqn: Any) -> Iterator[Any]:
    """The types of all values in an equation and in those that it runs."""
    for each in every_equation(eqn):
        for atom in (*each.invars, *each.outvars):
            yield atom.aval


def work_of(body: Any) -> int:
    """For about how many multiplications a program runs."""
    from jax.extend.core import jaxprs_in_params

    total = 0
    for eqn in getattr(body, "jaxpr", body).eqns:
        inner = list(map(work_of, jaxprs_in_params(eqn.params)))
        if inner:
            total += eqn.params.get("length", 1) * sum(inner)
            continue
        # Other functions take as long as a few, but are mostly fused.
        each = 8
        if eqn.primitive.name == "dot_general":
            (axes, _), _ = eqn.params["dimension_numbers"]
            each = math.prod(eqn.invars[0].aval.shape[k] for k in axes)
        if eqn.primitive.name == "conv_general_dilated":
            kernel, numbers = eqn.invars[1].aval, eqn.params["dimension_numbers"]
            each = kernel.size // kernel.shape[numbers.rhs_spec[0]]
        total += each * sum(x.aval.size for x in eqn.outvars)
    return total


def is_stop(eqn: Any) -> bool:
    """Whether an equation has no derivative, as integers have none."""
    is_float = any(jnp.issubdtype(x.aval.dtype, jnp.inexact) for x in eqn.outvars)
    return eqn.primitive.name in STOPS or not is_float


def body_of(eqn: Any) -> Any:
    """The program of a call, or of one turn of a scan."""
    return eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))


def counts_of_scan(eqn: Any) -> tuple[int, int]:
    """How many inputs of a scan are constants, and how many are carried."""
    if "num_carry" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    # So in JAX 0.12.
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(consts), len(carry)


Flags = list[bool]
# How a backward pass goes through an equation: from which outputs, and carries of
# earlier turns, and to which operands.
Flow = tuple[Flags, Flags]


def backward_through(body: Any, wanted: Flags) -> tuple[list[Flow], Flags]:
    """How a backward pass from the wanted outputs of a program goes through each of its
    equations, and to which inputs of the program.
    """
    jaxpr = getattr(body, "jaxpr", body)
    # By identity, since literals cannot be hashed.
    reached = {id(x) for x, is_wanted in zip(jaxpr.outvars, wanted) if is_wanted}
    flows = []
    for eqn in reversed(jaxpr.eqns):
        flow = _backward(eqn, [id(x) in reached for x in eqn.outvars])
        reached |= {id(x) for x, comes in zip(eqn.invars, flow[1]) if comes}
        flows.append(flow)
    return flows[::-1], [id(x) in reached for x in jaxpr.invars]


def _backward(eqn: Any, wanted: Flags) -> Flow:
    name, count = eqn.primitive.name, len(eqn.invars)
    if is_stop(eqn) or not any(wanted):
        return wanted, [False] * count
    if name == "cond":
        each = [backward_through(x, wanted)[1] for x in eqn.params["branches"]]
        # Before the operands of its branches, a cond has their number.
        return wanted, [False, *map(any, zip(*each))]
    if name in CALLS:
        return wanted, backward_through(body_of(eqn), wanted)[1]
    if name != "scan":
        return wanted, [True] * count
    first, carried = counts_of_scan(eqn)
    while True:
        ins = backward_through(body_of(eqn), wanted)[1]
        # What one turn needs, the one before carries to it.
        needed = [a or b for a, b in zip(wanted, ins[first : first + carried])]
        if needed == wanted[:carried]:
            return wanted, ins
        wanted = [*needed, *wanted[carried:]]
