"""The switch between platforms, and what each of them needs.

JAX lowers a program for one platform. `per_platform` has a function for each, and JAX
takes the one of the platform that it lowers for.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import lax

from .._trees import PyTree

# Up to so many norms have a root each. More of them are a vector, with one root for all
# (_norms/squares.py), and on a TPU with one operation for all factors (_factors.py).
# With 128 tensors on a v5e:4x4 a clip by the RMS then takes 137 scalar operations,
# instead of 3,465. With 52 on one v5e vectors moved 1.3 % more bytes.
FEW_NORMS_ON_A_GPU = 12
FEW_NORMS_ON_A_TPU = 64

# Jitted, so that JAX traces a function once for all arrays of one type. `inline=True`
# is for TPUs: AGC of 128 tensors on a v5e:4x4 runs 572 kernels, and 739 without it. A
# GPU gets the same program either way, so a function for it alone is plainly jitted,
# which is traced faster.
traced_once = partial(jax.jit, inline=True)


def per_platform(
    *operands: Any,
    cpu: Callable[..., Any],
    gpu: Callable[..., Any],
    plain: Callable[..., Any],
) -> Any:
    """Calls the function of the platform that the program is compiled for. `plain` is
    for a TPU and any other.
    """
    # OPTAXCLIP_PLATFORM=plain takes the form of plain `jnp` everywhere. It is read
    # while a program is traced, so set it before the first step.
    forced = os.environ.get("OPTAXCLIP_PLATFORM")
    if forced:
        function_of_name = {"cpu": cpu, "gpu": gpu, "plain": plain}
        if forced not in function_of_name:
            raise ValueError(
                f"OPTAXCLIP_PLATFORM must be one of {list(function_of_name)}, got "
                f"{forced!r}."
            )
        return function_of_name[forced](*operands)
    # JAX traces each function, so the plain one is given once, as the default.
    other_functions = {}
    if cpu is not plain:
        other_functions["cpu"] = cpu
    if gpu is not plain:
        other_functions["cuda"] = gpu
        other_functions["rocm"] = gpu
    return lax.platform_dependent(*operands, **other_functions, default=plain)


def materialized_on_gpu(arrays: PyTree) -> Any:
    """The arrays unchanged. On a GPU they are written to memory, so that no kernel that
    reads them computes them again: a step of AGC moves 12.27 GB on an H100, not 12.58.
    """

    def unchanged(arrays: PyTree) -> PyTree:
        return arrays

    return per_platform(
        arrays, cpu=unchanged, gpu=lax.optimization_barrier, plain=unchanged
    )
