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
from ._ghost._capture import CannotSplit
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


def choose(problem: Problem, method: str, microbatch: int | None) -> Choice:
    """The method that was asked for, or the one that takes the least time."""
    microbatch = on_one_device(problem, microbatch)
    hindrance = ""
    ghost = None
    if method != "one_pass":
        ghost, hindrance = possible_ghost(problem)
    if hindrance and method == "ghost":
        raise ValueError(
            f'clipped_grad: method must be "one_pass" or "auto" for {hindrance}, got '
            '"ghost".'
        )
    equations = problem.program.jaxpr.eqns
    has_several_groups = any(map(has_groups, equations))
    is_split = _is_split(problem.batch)
    may_be_split = is_split is None or is_split
    if has_several_groups or (may_be_split and any(map(has_convolution, equations))):
        # XLA makes gradients of examples by a kernel wrong where the batch is split, as
        # it does those of jax.vmap(jax.grad(loss)). With several groups NaN of one
        # example reaches the others, on a CPU.
        if ghost and not _makes_kernel_gradients(ghost):
            method = "ghost"
        elif is_split:
            raise ValueError(SPLIT_KERNELS.format(method))
        else:
            _refuse_a_split(problem.batch, SPLIT_KERNELS.format(method))
            if has_several_groups:
                if any(map(is_function, problem.limits)):
                    raise ValueError(KERNELS_OF_GROUPS)
                microbatch = 1
    if not ghost:
        return Choice("one_pass", microbatch)
    size = problem.present.size
    most_at_once = _most_at_once(problem, ghost)
    if method == "auto":
        costs = costs_of(problem, ghost, microbatch)
        method = min(most_at_once, key=lambda name: costs[name])
    if not microbatch and most_at_once[method] < size:
        microbatch = even_width(size, max(most_at_once[method], 1))
    return Choice(method, microbatch, ghost if method == "ghost" else None)


def on_one_device(problem: Problem, microbatch: int | None) -> int | None:
    """How many examples of a microbatch each of the devices takes that share it."""
    return max(microbatch // problem.devices, 1) if microbatch else None


def _makes_kernel_gradients(ghost: Ghost) -> bool:
    """Whether ghost clipping makes gradients of examples by a convolution's kernel."""
    equations = [site.eqn for site in ghost.gradient_sites if site.eqn]
    return any(map(has_convolution, equations))


def _most_at_once(problem: Problem, ghost: Ghost) -> dict[str, int]:
    """For both methods of "auto", for how many examples at once there is memory."""
    size = problem.present.size
    captured = ghost.captured_size
    whole_gradient = 0
    for leaf, plan in zip(ghost.params, ghost.plans):
        whole_gradient += max(leaf.size, plan.kept_size)
    numbers_of_example = {"ghost": ghost.kept_size, "one_pass": whole_gradient}
    most = {}
    for name, numbers in numbers_of_example.items():
        # Gradients of examples take a third of the memory of the activations that are
        # kept of the whole batch, or two of a part of it, of which less is kept.
        room = max(size * captured // 3, small_memory() // 4) // max(numbers, 1)
        most[name] = size if room >= size else min(2 * room, size // 2)
    if ghost.kept_size <= captured:
        most["ghost"] = size
    if jax.default_backend() == "cpu" and not ghost.is_convolved:
        # A CPU is faster the more gradients stay in its cache: a transformer of 432,000
        # parameters took half as long with 8 at once as with 16. All gradients of a
        # megabyte do: LoRA took 0.6 with 16 or 32, and 0.7 to 0.8 with 8.
        in_cache = max(8, small_memory() // max(whole_gradient, 1))
        most["one_pass"] = min(most["one_pass"], in_cache)
    return most


def costs_of(
    problem: Problem, ghost: Ghost | None, microbatch: int | None
) -> dict[str, float]:
    """For each method, about how many times as long as the plain gradient it takes."""
    size = problem.present.size
    numbers = sum(leaf.size for leaf in jax.tree.leaves(problem.params))
    gradient_work = MULTIPLICATIONS_PER_NUMBER * numbers
    # Forward, and backward to the inputs and to the parameters of all examples.
    plain_work = 3 * work_of(problem.program) + gradient_work / size
    costs = {"one_pass": 1 + gradient_work / plain_work}
    if ghost:
        # For the gradients of examples by a convolution XLA on a CPU takes about twice
        # as long, and in a loop 11 to 70 times as long, also for patches of an image.
        width = microbatch or _most_at_once(problem, ghost)["one_pass"]
        slowdown = 16 if width < size else 2
        convolved_work = 3 * work_of(problem.program, has_window)
        costs["one_pass"] += (slowdown - 1) * convolved_work / plain_work
        # The data that are captured are written and read, too.
        work = MULTIPLICATIONS_PER_NUMBER * (ghost.captured_size + ghost.kept_size)
        work += sum(plan.extra_work for plan in ghost.plans)
        costs["ghost"] = 1 + work / plain_work
    return costs


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
    except CannotSplit:
        return None, (
            "a loss with refs (jax.new_ref), random numbers beside parameters that are "
            "not of threefry keys, symbolic_zeros in a rule for them, a learned value "
            "of lax.pad, 100 operations on parameters in a row, or a convolution whose "
            "kernel depends on the example"
        )
