"""How much a program computes, and its convolutions, from its equations."""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxprs_in_params

from .._jaxpr import every_equation, jaxpr_of, runs_primitive_like, type_of

# In a loop XLA on a CPU takes 11 to 70 times as long for the gradients of examples by
# the kernel of a convolution, also for patches side by side. For single pixels it took
# 0.6 to 11 times as long, and 11 times in a transformer whose layers are convolutions.
CONVOLUTION_SLOWDOWN_IN_LOOP = 16
# Outside of loops they take about twice as long as the one gradient of the batch. Other
# platforms are assumed to be alike.
CONVOLUTION_SLOWDOWN = 2
CONVOLUTION = "conv_general_dilated"
# Whether an equation is a convolution, or runs one.
has_convolution = partial(runs_primitive_like, CONVOLUTION)


def equations_of(program: ClosedJaxpr) -> list[JaxprEqn]:
    """All equations of a program, with those inside them."""
    equations: list[JaxprEqn] = []
    for eqn in program.jaxpr.eqns:
        equations += every_equation(eqn)
    return equations


def convolutions_of(program: ClosedJaxpr) -> list[JaxprEqn]:
    """The convolutions that a program runs."""
    equations = equations_of(program)
    return [eqn for eqn in equations if eqn.primitive.name == CONVOLUTION]


def lets_nan_through(convolution: JaxprEqn) -> bool:
    """Whether XLA on a CPU, if the program runs on one, lets the NaN of one example
    through to the gradients of others that are computed at once.

    It joins groups to one kernel whose other entries are 0, and 0 times NaN is NaN. The
    examples of a batch become groups too, and are joined in float64. For groups of one
    channel it does not, but they are slow: with 32 images of 8 x 8 x 32 they took 72
    times the memory of the plain gradient, and 18 times as long. One at a time took a
    third of its memory, and 4 times as long.
    """
    return any(kind_of(convolution))


def kind_of(convolution: JaxprEqn) -> tuple[bool, bool]:
    """Whether a convolution has several groups, of channels or of images, and whether
    it is of float64. Its derivatives are of the same kind.
    """
    params = convolution.params
    has_groups = params["feature_group_count"] > 1 or params["batch_group_count"] > 1
    dtypes = [type_of(x).dtype for x in (*convolution.invars, *convolution.outvars)]
    return has_groups, np.float64 in dtypes or np.complex128 in dtypes


def work_of(
    program: ClosedJaxpr | Jaxpr, is_included: Callable[[JaxprEqn], bool] | None = None
) -> int:
    """The time of a program, as a number of multiplications in a matrix product that
    take about as long. `is_included` says which equations count, if not all do.
    """
    total = 0
    for eqn in jaxpr_of(program).eqns:
        bodies = jaxprs_in_params(eqn.params)
        work_of_bodies = [work_of(body, is_included) for body in bodies]
        if work_of_bodies:
            # A scan has a length. Each turn runs its body.
            total += eqn.params.get("length", 1) * sum(work_of_bodies)
            continue
        if is_included and not is_included(eqn):
            continue
        # Other functions take as long as a few multiplications, but mostly are fused.
        work_per_output = 8
        if eqn.primitive.name == "dot_general":
            (contracted_axes, _), _ = eqn.params["dimension_numbers"]
            left_shape = type_of(eqn.invars[0]).shape
            work_per_output = math.prod(left_shape[axis] for axis in contracted_axes)
        if eqn.primitive.name == CONVOLUTION:
            work_per_output = _work_per_pixel(eqn)
        total += work_per_output * sum(type_of(var).size for var in eqn.outvars)
    return total


def _work_per_pixel(convolution: JaxprEqn) -> int:
    """The work for one number of the output of a convolution."""
    kernel = type_of(convolution.invars[1])
    out_channels, _, *window_axes = convolution.params["dimension_numbers"].rhs_spec
    work = kernel.size // kernel.shape[out_channels]
    # XLA on a CPU computes the gradient by a kernel of groups as if they were one. Of a
    # depthwise kernel of 3 x 3 x 48 it took as long as of a whole one of
    # 3 x 3 x 48 x 48.
    work *= convolution.params["feature_group_count"]
    # A CPU multiplies overlapping windows about half as fast as matrices. With 2 the
    # estimates for nine networks of 8 to 128 channels were nearest. Patches side by
    # side are a matrix product.
    strides = convolution.params["window_strides"]
    if any(kernel.shape[axis] > stride for axis, stride in zip(window_axes, strides)):
        work *= 2
    return work
