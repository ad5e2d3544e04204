"""Which inputs and outputs a backward pass goes through, equation by equation."""

from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from ..._jaxpr import CALLS, body_of, counts_of_scan, is_stop, jaxpr_of

Flags = list[bool]


class Flow(NamedTuple):
    """How a backward pass goes through an equation."""

    # For each output, whether it has a cotangent. A carry has one also if the next
    # iteration needs it.
    from_outputs: Flags
    to_inputs: Flags  # for each input, whether it gets one


def backward_through(
    program: ClosedJaxpr | Jaxpr, has_cotangent: Flags
) -> tuple[list[Flow], Flags]:
    """How a backward pass goes through each equation of a program, and to which inputs
    of the program. It begins at the outputs that have a cotangent.
    """
    jaxpr = jaxpr_of(program)
    # By identity, since literals cannot be hashed.
    reached: set[int] = set()

    def reach(atoms: Any, flags: Flags) -> None:
        reached.update(id(atom) for atom, flag in zip(atoms, flags) if flag)

    reach(jaxpr.outvars, has_cotangent)
    flows = []
    for eqn in reversed(jaxpr.eqns):
        flow = _backward(eqn, [id(var) in reached for var in eqn.outvars])
        reach(eqn.invars, flow.to_inputs)
        flows.append(flow)
    return flows[::-1], [id(var) in reached for var in jaxpr.invars]


def _backward(eqn: JaxprEqn, has_cotangent: Flags) -> Flow:
    name = eqn.primitive.name
    if is_stop(eqn) or not any(has_cotangent):
        return Flow(has_cotangent, [False] * len(eqn.invars))
    if name == "cond":
        flags_of_branches = []
        for branch in eqn.params["branches"]:
            _, to_inputs = backward_through(branch, has_cotangent)
            flags_of_branches.append(to_inputs)
        # A cond has the number of its branch before the operands of its branches.
        return Flow(has_cotangent, [False, *map(any, zip(*flags_of_branches))])
    if name in CALLS:
        _, to_inputs = backward_through(body_of(eqn), has_cotangent)
        return Flow(has_cotangent, to_inputs)
    if name == "scan":
        return _backward_through_scan(eqn, has_cotangent)
    return Flow(has_cotangent, [True] * len(eqn.invars))


def _backward_through_scan(eqn: JaxprEqn, has_cotangent: Flags) -> Flow:
    consts, carries = counts_of_scan(eqn)
    while True:
        _, to_inputs = backward_through(body_of(eqn), has_cotangent)
        # A carry that one iteration needs comes out of the iteration before.
        to_carries = to_inputs[consts : consts + carries]
        from_carries = has_cotangent[:carries]
        carry_flags = [a or b for a, b in zip(from_carries, to_carries)]
        if carry_flags == from_carries:
            return Flow(has_cotangent, to_inputs)
        has_cotangent = [*carry_flags, *has_cotangent[carries:]]
