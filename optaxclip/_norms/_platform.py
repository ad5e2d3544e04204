"""Which way of arithmetic a compiled program takes: a CPU's, a GPU's or a TPU's."""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.core import Tracer

# For tests: the ways of accelerators are right on a CPU too, only slower there.
FORCED = os.environ.get("OPTAXCLIP_PLATFORM")


class Ways(NamedTuple):
    """Functions of the same arrays, with results of the same types."""

    cpu: Callable[..., Any]
    gpu: Callable[..., Any]
    # Also that of platforms without a name here. It needs no float64 and no reduction
    # with several operands.
    tpu: Callable[..., Any]

    def switch(self, *operands: Any) -> Any:
        """All ways, of which XLA keeps that of its platform."""
        # JAX knows GPUs as cuda and rocm.
        return lax.platform_dependent(
            *operands,
            cpu=self.cpu,
            cuda=self.gpu,
            rocm=self.gpu,
            default=self.tpu,
        )


def per_platform(
    *operands: Any,
    cpu: Callable[..., Any],
    gpu: Callable[..., Any],
    tpu: Callable[..., Any],
) -> Any:
    """Calls the function of the platform that the program is compiled for.

    To trace all three takes most of the time in which a clipper is traced. So only the
    CPU's, which is the shortest, is traced with the program, for the types of results.
    The platform's own is called later, so that none may hold a traced value.
    """
    ways = Ways(cpu, gpu, tpu)
    if FORCED:
        return getattr(ways, FORCED)(*operands)
    leaves, treedef = jax.tree.flatten(operands)
    if not any(isinstance(leaf, Tracer) for leaf in leaves):
        return ways.switch(*operands)
    traced, types = jax.make_jaxpr(cpu, return_shape=True)(*operands)
    # A collective knows its mesh axis only while the program is traced.
    if traced.effects:
        return ways.switch(*operands)
    # Imported here, since it takes 60 ms.
    from ._when_lowered import chosen_when_lowered

    found = chosen_when_lowered(ways, traced, treedef, leaves)
    return jax.tree.structure(types).unflatten(found)
