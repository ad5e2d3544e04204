"""Which way of arithmetic a compiled program takes: a CPU's, a GPU's or a TPU's."""

import os
from collections.abc import Callable
from typing import Any

from jax import lax

# For tests: the ways of accelerators are right on a CPU too, only slower there.
FORCED = os.environ.get("OPTAXCLIP_PLATFORM")


def per_platform(
    *operands: Any,
    cpu: Callable[..., Any],
    gpu: Callable[..., Any],
    tpu: Callable[..., Any],
) -> Any:
    """Calls the function of the platform that the program is compiled for.

    Platforms without a name here take the TPU's way, which needs no float64 and no
    reduction with several operands.
    """
    if FORCED:
        return {"cpu": cpu, "gpu": gpu, "tpu": tpu}[FORCED](*operands)
    # JAX knows GPUs as cuda and rocm. An export for several platforms holds all ways.
    return lax.platform_dependent(
        *operands, cpu=cpu, cuda=gpu, rocm=gpu, default=tpu
    )
