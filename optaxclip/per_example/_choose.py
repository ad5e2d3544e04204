"""Which method takes the least time for a loss and a batch.

Ghost clipping pays for each norm, one pass for each number of a gradient that it writes
and reads again. Both counts are known from shapes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer

from .._jaxpr import has_bits_that_vmap_changes, has_convolution
from .._mesh import is_on_one_device
from ._book import kept_numbers
from ._ghost import Ghost, ghost_of
from ._microbatches import evened
from ._problem import Problem
from ._trace import trace

METHODS = ("auto", "ghost", "one_pass", "two_pass")

# To write and read one number of a gradient takes as long as about this many
# multiplications in a matrix product: on two CPU cores a perceptron took 17 times as
# long in one pass as without clipping, and transformers were as fast either way where
# sequences had about this length.
MULTIPLICATIONS_PER_NUMBER = 32
# What keeps `trace` from splitting a loss.
UNTRACED = (
    "a loss with refs (jax.new_ref), with random numbers beside parameters that are "
    "not of threefry keys, or with a rule for parameters that asks which inputs have "
    "a derivative (symbolic_zeros)"
)
# XLA makes them wrong, as it does those of jax.vmap(jax.grad(loss)).
KERNELS_OF_A_SPLIT_BATCH = (
    "for convolutions of a batch that jit splits over devices, where XLA computes "
    "wrong gradients of single examples by a kernel. Put clipped_grad into "
    "jax.shard_map, with mean=False, and add up its gradients with lax.psum"
)


class Choice(NamedTuple):
    """How a clipped gradient is computed."""

    method: str
    microbatch: int | None
    ghost: Ghost | None  # where the loss was traced


def choose(problem: Problem, method: str, microbatch: int | None) -> Choice:
    """The method that was asked for, or the one that takes the least time."""
    leaves = jax.tree.leaves(problem.params)
    # The second pass puts a good example in the place of a masked or broken one. Where
    # that is the first, vmap draws other bits than in the first pass for all.
    if method == "two_pass" and _has(problem, has_bits_that_vmap_changes):
        raise ValueError(
            'clipped_grad: method must be "one_pass", "ghost" or "auto" for random '
            'numbers of keys that are not of threefry, got "two_pass".'
        )
    hindrance, traced = _hindrance(problem), None
    if method in ("ghost", "auto") and not hindrance:
        traced = trace(problem)
        hindrance = "" if traced else UNTRACED
    if method == "ghost" and hindrance:
        raise ValueError(
            'clipped_grad: method must be "one_pass", "two_pass" or "auto" for '
            f'{hindrance}, got "ghost".'
        )
    ghost = ghost_of(traced, leaves) if traced else None
    # Whether no gradient of an example by a kernel may be made.
    is_split = _is_split(problem.batch)
    no_kernels = is_split and _has(problem, has_convolution)
    is_right = bool(ghost) and not (no_kernels and ghost.makes_kernels())
    if no_kernels and not (is_right and method in ("ghost", "auto")):
        raise ValueError(
            'clipped_grad: method must be "ghost", and each kernel used once, '
            f'{KERNELS_OF_A_SPLIT_BATCH}. Got method="{method}".'
        )
    if not ghost:
        return Choice(
            "one_pass" if method == "auto" else method, microbatch, None
        )
    if method == "ghost" or no_kernels or _pays(ghost):
        return Choice("ghost", microbatch, ghost)
    return Choice("one_pass", microbatch or _width(ghost, problem.size), ghost)


def _is_split(batch: Any) -> bool:
    """Whether jit may split the batch over devices."""
    for leaf in jax.tree.leaves(batch):
        # The type of a traced array has the mesh, but not how it is split.
        if not is_on_one_device(leaf):
            return True
        is_known = not isinstance(leaf, Tracer)
        if is_known and not leaf.sharding.is_fully_replicated:
            return True
    return False


def _has(problem: Problem, kind: Callable[[Any], bool]) -> bool:
    """Whether the loss has an equation of a kind."""
    return any(map(kind, problem.program()[0].jaxpr.eqns))


def _pays(ghost: Ghost) -> bool:
    """Whether ghost clipping takes less time than one pass."""
    # Gradients of examples that are made anyway cost both the same.
    spared = sum(
        leaf.size
        for number, leaf in enumerate(ghost.params)
        if not ghost.is_made(number)
    )
    cost = sum(way.cost for way in ghost.ways)
    return cost <= MULTIPLICATIONS_PER_NUMBER * spared


def _width(ghost: Ghost, size: int) -> int:
    """How many gradients of examples take a quarter of the memory of what is kept of
    the activations of the whole batch, and at least one.

    A CPU is the faster the more of them stay in its cache: a transformer of 432,000
    parameters took half as long with 8 at once as with 16.
    """
    kept = size * sum(map(kept_numbers, ghost.uses)) // 4
    numbers = sum(leaf.size for leaf in ghost.params)
    return evened(size, max(kept // max(numbers, 1), 1))


def _hindrance(problem: Problem) -> str:
    """What ghost clipping cannot do with these arrays. "" for nothing."""
    leaves = jax.tree.leaves((problem.params, problem.batch))
    meshes = [jax.typeof(leaf).sharding.mesh for leaf in leaves]
    # The cotangents that it asks for would need their shardings as types.
    axes = sorted({name for mesh in meshes for name in mesh.explicit_axes})
    if axes:
        return f"arrays on a mesh with Explicit axes, here {axes}"
    for leaf in leaves:
        # It is chosen by sizes, and those of jax.export may be symbols.
        if not all(isinstance(size, int) for size in jnp.shape(leaf)):
            return f"sizes that are not known, here {jnp.shape(leaf)}"
    return ""
