"""Which method clips examples, and how many at once.

Ghost clipping pays for each norm and for what it keeps of each layer, one pass for each
number of a gradient that it writes and reads again. All counts are known from shapes.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.core import Tracer

from .. import _trees as prefix
from .._jaxpr import has_convolution, has_groups, work_of
from .._mesh import is_on_one_device, manual_axes
from ._ghost import Ghost, ghost_of
from ._ghost._capture import CannotSplit
from ._passes import evened, little
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


def choose(
    problem: Problem, method: str, microbatch: int | None
) -> tuple[str, int | None, Ghost | None]:
    """The method that was asked for, or the one that takes the least time, how many
    examples at once, and, if that is the method, ghost clipping.
    """
    if microbatch:
        microbatch = max(microbatch // problem.devices, 1)
    hindrance, ghost = "", None
    if method != "one_pass":
        ghost, hindrance = possible_ghost(problem)
    if hindrance and method == "ghost":
        raise ValueError(
            f'clipped_grad: method must be "one_pass" or "auto" for {hindrance}, got '
            '"ghost".'
        )
    is_split, has_several = _is_split(problem.batch), _runs(problem, has_groups)
    if has_several or (is_split is not False and _runs(problem, has_convolution)):
        # XLA makes gradients of examples by a kernel wrong where the batch is split, as
        # it does those of jax.vmap(jax.grad(loss)). With several groups NaN of one
        # example reaches the others, on a CPU.
        uses = ghost.uses.values() if ghost else ()
        if ghost and not any(has_convolution(use.eqn) for use in uses if use.eqn):
            method = "ghost"
        elif is_split:
            raise ValueError(SPLIT_KERNELS.format(method))
        else:
            _refuse_a_split(problem.batch, SPLIT_KERNELS.format(method))
            microbatch = 1 if has_several else microbatch
    if not ghost:
        return "one_pass" if method == "auto" else method, microbatch, None
    most, size = _most_at_once(problem, ghost), problem.present.size
    if method == "auto":
        costs = costs_of(problem, ghost, microbatch)
        method = min(most, key=lambda name: costs[name])
    width = evened(size, max(most[method], 1)) if most[method] < size else None
    return method, microbatch or width, ghost if method == "ghost" else None


def _most_at_once(problem: Problem, ghost: Ghost) -> dict[str, int]:
    """For both methods of "auto", for how many examples at once there is memory."""
    kept, size = ghost.kept, problem.present.size
    pairs = zip(ghost.params, ghost.ways)
    every = sum(max(leaf.size, way.held) for leaf, way in pairs)
    most = {"ghost": ghost.held, "one_pass": every}
    for name, numbers in most.items():
        # Gradients of examples take a third of the memory of what is kept of the
        # activations of the whole batch, or two of a part of it, of which less is kept.
        room = max(size * kept // 3, little() // 4) // max(numbers, 1)
        most[name] = size if room >= size else min(2 * room, size // 2)
    if ghost.held <= kept:
        most["ghost"] = size
    if jax.default_backend() == "cpu" and not ghost.is_convolved:
        # A CPU is the faster the more of them stay in its cache: a transformer of
        # 432,000 parameters took half as long with 8 at once as with 16. Of a megabyte
        # all do: LoRA took 0.6 with 16 or 32, and 0.7 to 0.8 with 8.
        most["one_pass"] = min(most["one_pass"], max(8, little() // max(every, 1)))
    return most


def costs_of(
    problem: Problem, ghost: Ghost | None, microbatch: int | None
) -> dict[str, float]:
    """For each method, about how many times as long as the plain gradient it takes."""
    size = problem.present.size
    numbers = sum(leaf.size for leaf in jax.tree.leaves(problem.params))
    made = MULTIPLICATIONS_PER_NUMBER * numbers
    # Forward, and backward to the inputs and to the parameters of all examples.
    plain = 3 * work_of(problem.program) + made / size
    costs = {"one_pass": 1 + made / plain}
    if ghost:
        if ghost.is_convolved:
            # XLA on a CPU takes about half as long again for the gradients of examples
            # by a convolution, and in a loop eight times as long.
            most = microbatch or _most_at_once(problem, ghost)["one_pass"]
            costs["one_pass"] *= 8 if most < size else 1.5
        # What is kept of uses is written and read, too.
        made = ghost.kept + ghost.held
        added = MULTIPLICATIONS_PER_NUMBER * made + sum(way.cost for way in ghost.ways)
        costs["ghost"] = 1 + added / plain
    return costs


def _runs(problem: Problem, kind: Callable[[Any], bool]) -> bool:
    """Whether the loss has an equation of a kind."""
    return any(map(kind, problem.program.jaxpr.eqns))


def _is_split(batch: Any) -> bool | None:
    """Whether jit may split the batch over devices. None if only the compiler knows."""
    traced = [isinstance(leaf, Tracer) for leaf in jax.tree.leaves(batch)]
    for leaf, is_traced in zip(jax.tree.leaves(batch), traced):
        # The type of a traced array has the mesh, but not how it is split.
        is_whole = is_traced or leaf.sharding.is_fully_replicated
        if not (is_on_one_device(leaf) and is_whole):
            return True
    is_hidden = any(traced) and jax.device_count() > 1 and not manual_axes()
    return None if is_hidden else False


def _refuse_a_split(batch: Any, text: str) -> None:
    """Makes the compiler raise an error if it splits the batch."""

    def look(sharding: jax.sharding.Sharding) -> None:
        if not sharding.is_fully_replicated:
            raise ValueError(text)

    for leaf in jax.tree.leaves(batch):
        jax.debug.inspect_array_sharding(leaf, callback=look)


def possible_ghost(problem: Problem) -> tuple[Ghost | None, str]:
    """Ghost clipping, or None and what it cannot do."""
    roles = {"parameters": problem.params, "the batch": problem.batch}
    for path, leaf in jax.tree.leaves_with_path(roles):
        kind = jax.typeof(leaf)
        # The cotangents that it asks for would need their shardings as types.
        if any(kind.sharding.spec):
            what = f"{prefix.name(path)!r} of {kind}"
            return None, f"{what}, which Explicit mesh axes split beside the batch's"
        # It is chosen by sizes, and those of jax.export may be symbols.
        if not all(isinstance(size, int) for size in leaf.shape):
            return None, f"sizes that are not known, here {leaf.shape}"
    try:
        return ghost_of(problem), ""
    except CannotSplit:
        return None, (
            "a loss with refs (jax.new_ref), random numbers beside parameters that are "
            "not of threefry keys, symbolic_zeros in a rule for them, 100 operations "
            "on them in a row, or a convolution whose kernel depends on the example"
        )
