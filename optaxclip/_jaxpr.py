"""Reading traced programs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jax.core import ShapedArray

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

CALLS = ("jit", "pjit", "closed_call", "checkpoint", "remat2")
# Functions whose derivative is 0, or is made so.
STOPS = ("ceil", "floor", "round", "sign", "stop_gradient")


def is_literal(atom: Any) -> bool:
    """Whether an operand of an equation is a number that stands in the program."""
    return hasattr(atom, "val")


def type_of(atom: Any) -> ShapedArray:
    """The type of a variable or a literal."""
    return atom.aval


def jaxpr_of(program: Any) -> Jaxpr:
    """A program without its constants, which it may have or not."""
    return getattr(program, "jaxpr", program)


def every_equation(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    """An equation, and all equations that it runs."""
    # Imported here, since it imports Pallas, which would slow down `import optaxclip`.
    from jax.extend.core import jaxprs_in_params

    yield eqn
    for jaxpr in jaxprs_in_params(eqn.params):
        for inner in jaxpr.eqns:
            yield from every_equation(inner)


def runs_primitive_like(primitive: str, eqn: JaxprEqn) -> bool:
    """Whether an equation, or one that it runs, is of a primitive whose name begins
    so.
    """
    return any(x.primitive.name.startswith(primitive) for x in every_equation(eqn))


# A convolution, and a backward pass of the user's (custom_vjp).
has_convolution = partial(runs_primitive_like, "conv_general_dilated")
has_backward_rule = partial(runs_primitive_like, "custom_vjp_call")


def has_groups(eqn: JaxprEqn) -> bool:
    """Whether an equation has a convolution of several groups, with more than one
    channel in each: not one that is depthwise.
    """
    for inner in every_equation(eqn):
        groups = inner.params.get("feature_group_count", 1)
        if groups > 1:
            outputs, inputs, *_ = inner.params["dimension_numbers"].rhs_spec
            kernel_shape = type_of(inner.invars[1]).shape
            if kernel_shape[inputs] > 1 or kernel_shape[outputs] > groups:
                return True
    return False


def uses_symbolic_zeros(eqn: JaxprEqn) -> bool:
    """Whether a rule in an equation looks at which of its inputs have a derivative."""
    return any(x.params.get("symbolic_zeros") is True for x in every_equation(eqn))


def has_refs(eqn: JaxprEqn) -> bool:
    """Whether an equation, or one that it runs, has an array that can be written to."""
    # A ref has a type that is not that of an array.
    return not all(isinstance(x, ShapedArray) for x in _types(eqn))


def has_bits_that_vmap_changes(eqn: JaxprEqn) -> bool:
    """Whether an equation makes random bits that vmap makes differ from those of a
    loop. With keys of threefry they are the same.
    """
    dtypes = {str(getattr(x, "dtype", None)) for x in _types(eqn)}
    key_dtypes = {dtype for dtype in dtypes if dtype.startswith("key<")}
    return runs_primitive_like("rng_bit_generator", eqn) or not key_dtypes <= {
        "key<fry>"
    }


def _types(eqn: JaxprEqn) -> Iterator[Any]:
    """The types of all values in an equation and in those that it runs."""
    for inner in every_equation(eqn):
        for atom in (*inner.invars, *inner.outvars):
            yield atom.aval


def has_window(eqn: JaxprEqn) -> bool:
    """Whether an equation is a convolution whose window is more than one pixel."""
    return any(size > 1 for size in _window_of(eqn))


def windows_overlap(eqn: JaxprEqn) -> bool:
    """Whether an equation is a convolution whose windows share pixels. One of patches
    side by side is a matrix product.
    """
    strides = eqn.params.get("window_strides", ())
    return any(size > stride for size, stride in zip(_window_of(eqn), strides))


def _window_of(eqn: JaxprEqn) -> list[int]:
    """The sizes of the window of a convolution, none for other equations."""
    if eqn.primitive.name != "conv_general_dilated":
        return []
    kernel_shape = type_of(eqn.invars[1]).shape
    window_axes = eqn.params["dimension_numbers"].rhs_spec[2:]
    return [kernel_shape[axis] for axis in window_axes]


def work_of(
    program: ClosedJaxpr | Jaxpr, counts: Callable[[JaxprEqn], bool] | None = None
) -> int:
    """For about how many multiplications a program runs. `counts` says which equations
    count, if not all do.
    """
    from jax.extend.core import jaxprs_in_params

    total = 0
    for eqn in jaxpr_of(program).eqns:
        bodies = jaxprs_in_params(eqn.params)
        work_of_bodies = [work_of(body, counts) for body in bodies]
        if work_of_bodies:
            total += eqn.params.get("length", 1) * sum(work_of_bodies)
            continue
        if counts and not counts(eqn):
            continue
        # Other functions take as long as a few, but are mostly fused.
        work_per_output = 8
        if eqn.primitive.name == "dot_general":
            (axes, _), _ = eqn.params["dimension_numbers"]
            left_shape = type_of(eqn.invars[0]).shape
            work_per_output = math.prod(left_shape[axis] for axis in axes)
        if eqn.primitive.name == "conv_general_dilated":
            kernel = type_of(eqn.invars[1])
            out_channels = eqn.params["dimension_numbers"].rhs_spec[0]
            work_per_output = kernel.size // kernel.shape[out_channels]
            # There a CPU multiplies about half as fast as in a matrix product: so the
            # estimates for nine networks of 8 to 128 channels were nearest.
            if windows_overlap(eqn):
                work_per_output *= 2
        total += work_per_output * sum(type_of(x).size for x in eqn.outvars)
    return total


def is_stop(eqn: JaxprEqn) -> bool:
    """Whether an equation has no derivative, as integers have none."""
    dtypes = [type_of(x).dtype for x in eqn.outvars]
    is_float = any(jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes)
    return eqn.primitive.name in STOPS or not is_float


def body_of(eqn: JaxprEqn) -> Any:
    """The program of a call, or of one turn of a scan."""
    return eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))


def counts_of_scan(eqn: JaxprEqn) -> tuple[int, int]:
    """How many inputs of a scan are constants, and how many are carried."""
    if "num_carry" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    # So in JAX 0.12.
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(consts), len(carry)


Flags = list[bool]


class Flow(NamedTuple):
    """How a backward pass goes through an equation."""

    from_outputs: Flags  # from these outputs, and carries of earlier turns
    to_inputs: Flags


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
        # A carry that one turn needs comes out of the turn before.
        to_carries = to_inputs[consts : consts + carries]
        carry_flags = [a or b for a, b in zip(has_cotangent, to_carries)]
        if carry_flags == has_cotangent[:carries]:
            return Flow(has_cotangent, to_inputs)
        has_cotangent = [*carry_flags, *has_cotangent[carries:]]
