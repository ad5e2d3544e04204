"""Which method clips examples, and how many at once.

Ghost clipping pays for each norm and for what it keeps of each layer, one pass for each
number of a gradient that it writes and reads again. All counts are known from shapes.
"""

from typing import Any, NamedTuple

import jax
from jax.core import Tracer

from .. import _trees as trees
from .._checks import is_function
from .._jaxpr import has_convolution, has_groups, has_window, work_of
from .._mesh_types import is_on_one_device, manual_axes
from ._ghost import Ghost, ghost_of
from ._ghost._plans import GradientPlan, LeafPlan
from ._ghost._sites import CannotSplit
from ._passes import even_width, small_memory
from ._problem import Problem

# To write and read one number takes as long as about this many multiplications in a
# matrix product: so the estimates for twelve models on two CPU cores were near what was
# measured (`each_kind` in benchmarks/per_example/losses.py).
MULTIPLICATIONS_PER_NUMBER = 48
SPLIT_KERNELS = (
    'clipped_grad: method must be "ghost", and each kernel used once, for convolutions '
    "of a batch that jit splits over devices, where XLA computes wrong gradients of "
    "examples. Or put clipped_grad into jax.shard_map, with mean=False, and lax.psum "
    'its gradients. Got method="{}".'
)
KERNELS_OF_GROUPS = (
    "clipped_grad: max_norm must be a number for a convolution with "
    "feature_group_count, got a function. Its gradients are made one example at a "
    "time, and a function needs the norms of all examples first. Or use each kernel "
    'once and as it is, with method="ghost".'
)


class Choice(NamedTuple):
    """How the gradients of a problem are clipped."""

    method: str  # "ghost" or "one_pass"
    microbatch: int | None  # how many examples at once. None: all
    ghost: Ghost | None = None  # set if that is the method

    def plans(self, problem: Problem) -> list[LeafPlan]:
        """How the norms of the gradients by each parameter are computed."""
        if self.ghost:
            return self.ghost.plans
        # One pass makes all gradients of examples, and captures nothing.
        leaves = jax.tree.leaves(problem.params)
        return [GradientPlan([], leaf.size) for leaf in leaves]


def choose(problem: Problem, method: str, microbatch: int | None) -> Choice:
    """The method that was asked for, or the one that takes the least time."""
    microbatch = on_one_device(problem, microbatch)
    ghost = None
    if method != "one_pass":
        ghost, obstacle = possible_ghost(problem)
        if method == "ghost" and not ghost:
            raise ValueError(
                f'clipped_grad: method must be "one_pass" or "auto" for {obstacle}, '
                'got "ghost".'
            )
    if _has_risky_kernels(problem):
        if ghost and not _makes_kernel_gradients(ghost):
            method = "ghost"
        else:
            microbatch = _safe_microbatch(problem, method, microbatch)
    if not ghost:
        return Choice("one_pass", microbatch)
    if method == "auto":
        costs = costs_of(problem, ghost, microbatch)
        method = min(("ghost", "one_pass"), key=lambda name: costs[name])
    size = problem.present.size
    most_at_once = _most_at_once(problem, ghost)[method]
    if not microbatch and most_at_once < size:
        microbatch = even_width(size, max(most_at_once, 1))
    return Choice(method, microbatch, ghost if method == "ghost" else None)


def on_one_device(problem: Problem, microbatch: int | None) -> int | None:
    """How many examples of a microbatch each of the devices takes that share it."""
    return max(microbatch // problem.devices, 1) if microbatch else None


def _has_risky_kernels(problem: Problem) -> bool:
    """Whether XLA may make the gradients of examples by the kernel of a convolution
    wrong, as it does those of jax.vmap(jax.grad(loss)): where jit splits the batch, and
    of several groups, where on a CPU the NaN of one example reaches all.
    """
    equations = problem.program.jaxpr.eqns
    may_be_split = _is_split(problem.batch) is not False
    is_split_kernel = may_be_split and any(map(has_convolution, equations))
    return is_split_kernel or any(map(has_groups, equations))


def _makes_kernel_gradients(ghost: Ghost) -> bool:
    """Whether ghost clipping makes gradients of examples by a convolution's kernel."""
    equations = [site.eqn for site in ghost.gradient_sites if site.eqn]
    return any(map(has_convolution, equations))


def _safe_microbatch(
    problem: Problem, method: str, microbatch: int | None
) -> int | None:
    """The microbatch with which XLA makes gradients by risky kernels right: 1 for
    several groups. Raises ValueError, or lets the compiler, for a batch that is split.
    """
    error_text = SPLIT_KERNELS.format(method)
    is_split = _is_split(problem.batch)
    if is_split:
        raise ValueError(error_text)
    if is_split is None:
        _refuse_a_split(problem.batch, error_text)
    if not any(map(has_groups, problem.program.jaxpr.eqns)):
        return microbatch
    if any(map(is_function, problem.limits)):
        raise ValueError(KERNELS_OF_GROUPS)
    return 1


def _most_at_once(problem: Problem, ghost: Ghost) -> dict[str, int]:
    """For both methods of "auto", how many examples to take at once."""
    size = problem.present.size
    gradient_size = 0
    for leaf, plan in zip(ghost.params, ghost.plans):
        gradient_size += max(leaf.size, plan.kept_size)
    most = {
        "ghost": _most_with_memory(size, ghost, ghost.kept_size),
        "one_pass": _most_with_memory(size, ghost, gradient_size),
    }
    if ghost.kept_size <= ghost.captured_size:
        most["ghost"] = size
    is_small = size * (gradient_size + ghost.captured_size) <= 8 * small_memory()
    if jax.default_backend() == "cpu" and not ghost.is_convolved and not is_small:
        # A CPU is faster the more gradients stay in its cache: a transformer of 432,000
        # parameters took half as long with 8 at once as with 16. All gradients of a
        # megabyte do: LoRA took 0.6 with 16 or 32, and 0.7 to 0.8 with 8. Where all
        # that the batch keeps does, turns only cost: a neural ODE took 0.8 with 32 at
        # once of its time with 8.
        in_cache = max(8, small_memory() // max(gradient_size, 1))
        most["one_pass"] = min(most["one_pass"], in_cache)
    return most


def _most_with_memory(size: int, ghost: Ghost, kept_size: int) -> int:
    """For how many of the examples there is memory, if as many numbers are kept of
    each: all, if these take a third of the memory of what is captured of the batch.
    Else they may take two thirds, since of a part of the batch less is captured.
    """
    room = max(size * ghost.captured_size // 3, small_memory() // 4)
    fitting = room // max(kept_size, 1)
    return size if fitting >= size else min(2 * fitting, size // 2)


def costs_of(
    problem: Problem, ghost: Ghost | None, microbatch: int | None
) -> dict[str, float]:
    """For each method, about how many times as long as the plain gradient it takes."""
    size = problem.present.size
    gradient_size = sum(leaf.size for leaf in jax.tree.leaves(problem.params))
    gradient_work = MULTIPLICATIONS_PER_NUMBER * gradient_size
    # Forward, and backward to the inputs and to the parameters of all examples. The
    # plain gradient is written once for the batch.
    plain_work = 3 * work_of(problem.program) + gradient_work / size
    one_pass_work = plain_work + gradient_work
    if not ghost:
        return {"one_pass": one_pass_work / plain_work}
    # For the gradients of examples by a convolution XLA on a CPU takes about twice as
    # long, and in a loop 11 to 70 times as long, also for patches of an image.
    width = microbatch or _most_at_once(problem, ghost)["one_pass"]
    slowdown = 16 if width < size else 2
    one_pass_work += (slowdown - 1) * 3 * work_of(problem.program, has_window)
    # The data that are captured are written and read, too.
    written_size = ghost.captured_size + ghost.kept_size
    ghost_work = plain_work + MULTIPLICATIONS_PER_NUMBER * written_size
    ghost_work += sum(plan.extra_work for plan in ghost.plans)
    return {"one_pass": one_pass_work / plain_work, "ghost": ghost_work / plain_work}


def _is_split(batch: Any) -> bool | None:
    """Whether jit may split the batch over devices. None if only the compiler knows."""
    is_traced = False
    for leaf in jax.tree.leaves(batch):
        if not is_on_one_device(leaf):
            return True
        # The type of a traced array has the mesh, but not how it is split.
        if isinstance(leaf, Tracer):
            is_traced = True
        elif not leaf.sharding.is_fully_replicated:
            return True
    if is_traced and jax.device_count() > 1 and not manual_axes():
        return None
    return False


def _refuse_a_split(batch: Any, text: str) -> None:
    """Makes the compiler raise an error if it splits the batch."""

    def check(sharding: jax.sharding.Sharding) -> None:
        if not sharding.is_fully_replicated:
            raise ValueError(text)

    for leaf in jax.tree.leaves(batch):
        jax.debug.inspect_array_sharding(leaf, callback=check)


def possible_ghost(problem: Problem) -> tuple[Ghost | None, str]:
    """Ghost clipping, or None and what it cannot do."""
    roles = {"parameters": problem.params, "the batch": problem.batch}
    for path, leaf in jax.tree.leaves_with_path(roles):
        array_type = jax.typeof(leaf)
        # Its cotangents would need their shardings as types.
        if any(array_type.sharding.spec):
            name = f"{trees.name(path)!r} of {array_type}"
            return None, f"{name}, which Explicit mesh axes split beside the batch's"
        # It is chosen by sizes, and sizes of jax.export may be symbols.
        if not all(isinstance(size, int) for size in leaf.shape):
            return None, f"sizes that are not known, here {leaf.shape}"
    try:
        return ghost_of(problem), ""
    except CannotSplit as error:
        return None, str(error)
