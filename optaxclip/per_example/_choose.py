"""Chooses the method that clips examples, and how many it takes at once.

The time of each method is estimated from shapes. On top of the plain gradient, ghost
clipping computes norms, and writes and reads the arrays that it captures. One pass
writes and reads the gradient of each example.

`microbatch` is the user's option. The devices of an Explicit mesh share it. The width
is how many examples one device takes at once.
"""

from typing import Any, NamedTuple

import jax
from jax.core import Tracer
from jax.extend.core import JaxprEqn

from .. import _trees as trees
from .._arguments.checks import check_whole_number
from .._devices.mesh_types import is_on_one_device, manual_axes
from .._jaxpr import source_line
from .._trees import PyTree
from ._ghost import GhostClipping, ghost_of
from ._ghost.plans import GradientPlan, LeafPlan
from ._ghost.sites import CannotSplit
from ._passes import even_width, numbers_without_loop
from ._traced import TracedProblem
from ._work import (
    CONVOLUTION_SLOWDOWN,
    CONVOLUTION_SLOWDOWN_IN_LOOP,
    convolutions_of,
    has_convolution,
    kind_of,
    lets_nan_through,
    work_of,
)

METHODS = ("auto", "ghost", "one_pass")
# Writing and reading one number takes about as long as this many multiplications in a
# matrix product. With 48 the estimates for twelve models on two CPU cores were near the
# measured times (`each_kind` in benchmarks/per_example/losses.py).
MULTIPLICATIONS_PER_NUMBER = 48


class Choice(NamedTuple):
    """How the gradients of a problem are clipped."""

    width: int  # how many examples a device takes at once
    ghost: GhostClipping | None = None  # None: in one pass

    @property
    def method(self) -> str:
        return "ghost" if self.ghost else "one_pass"

    def plans(self, problem: TracedProblem) -> list[LeafPlan]:
        """How the norms of the gradients by each parameter are computed."""
        if self.ghost:
            return self.ghost.plans
        # One pass makes all gradients of examples, and captures nothing.
        leaves = jax.tree.leaves(problem.params)
        return [GradientPlan([], leaf.size) for leaf in leaves]


def checked_microbatch(call: str, microbatch: Any) -> int | None:
    """The microbatch as an int, or None. Raises for a wrong one."""
    if microbatch is None:
        return None
    check_whole_number(f"{call}: microbatch", microbatch)
    return int(microbatch)


def choose(problem: TracedProblem, method: str, microbatch: int | None) -> Choice:
    """How the gradients of a problem are clipped.

    | method | takes | at once, without a microbatch |
    |---|---|---|
    | "ghost" | ghost clipping | what fits into memory |
    | "one_pass" | one pass | the whole batch |
    | "auto" | the one with the lower estimate | what fits into memory |

    Convolutions may change both (`_method_for_convolutions`).

    Raises:
      ValueError: "ghost" for a loss that it cannot take, and the convolutions that
        `_method_for_convolutions` refuses.
    """
    ghost = None
    if method != "one_pass":
        ghost, obstacle = ghost_or_obstacle(problem)
        if method == "ghost" and not ghost:
            raise ValueError(
                f'{problem.call}: method must be "one_pass" or "auto" for {obstacle}, '
                'got "ghost".'
            )
    method, microbatch = _method_for_convolutions(problem, ghost, method, microbatch)
    if method == "one_pass" and not microbatch:
        return Choice(problem.size)
    is_ghost = method == "ghost"
    if ghost and method == "auto":
        costs = costs_of(problem, ghost, microbatch)
        is_ghost = costs["ghost"] <= costs["one_pass"]
    if ghost and is_ghost:
        return Choice(_width_of_ghost(problem, ghost, microbatch), ghost)
    return Choice(_width_of_one_pass(problem, ghost, microbatch))


def ghost_or_obstacle(problem: TracedProblem) -> tuple[GhostClipping | None, str]:
    """Ghost clipping, or None and the obstacle, as errors name it."""
    arguments = {"parameters": problem.params, "the batch": problem.batch}
    for path, leaf in jax.tree.leaves_with_path(arguments):
        array_type = jax.typeof(leaf)
        # Cotangents of a split array would need the same sharding in their types.
        if any(array_type.sharding.spec):
            return None, (
                f"{trees.path_name(path)!r} of {array_type}, which is split over "
                "Explicit mesh axes that do not split the batch"
            )
    # Plans depend on sizes.
    if problem.has_symbolic_sizes:
        return None, "symbolic sizes of jax.export"
    try:
        return ghost_of(problem), ""
    except CannotSplit as error:
        return None, str(error)


# ------------------------------------------------------------ how many examples at once


def _width_of_microbatch(problem: TracedProblem, microbatch: int) -> int:
    """The width of a microbatch that the devices of an Explicit mesh share."""
    return even_width(problem.size, max(microbatch // problem.explicit_devices, 1))


def _width_of_ghost(
    problem: TracedProblem, ghost: GhostClipping, microbatch: int | None
) -> int:
    """The width of ghost clipping."""
    if microbatch:
        return _width_of_microbatch(problem, microbatch)
    # If no more numbers are kept than captured, the whole batch takes at most twice the
    # memory of the captured arrays.
    if ghost.kept_size <= ghost.captured_size:
        return problem.size
    fitting_width = _fitting_width(problem.size, ghost.kept_size, ghost.captured_size)
    return even_width(problem.size, fitting_width)


def _width_of_one_pass(
    problem: TracedProblem, ghost: GhostClipping | None, microbatch: int | None
) -> int:
    """The width of one pass by the microbatch that was asked for, or by memory. How
    much the backward pass captures is known only where ghost clipping is possible.
    """
    if microbatch:
        return _width_of_microbatch(problem, microbatch)
    size = problem.size
    if problem.has_symbolic_sizes:
        return size
    # 8 * 2^18 float32 numbers on a CPU, 8 MB. 8 * 2^23 elsewhere, 256 MB
    numbers_at_once = 8 * numbers_without_loop()
    if not ghost:
        fitting_width = numbers_at_once // max(problem.gradient_size, 1)
        return even_width(size, max(fitting_width, 1))
    kept_size = 0
    for leaf, plan in zip(jax.tree.leaves(problem.params), ghost.plans):
        kept_size += max(leaf.size, plan.kept_size)
    fitting_width = _fitting_width(size, kept_size, ghost.captured_size)
    is_small = size * (kept_size + ghost.captured_size) <= numbers_at_once
    total_work = work_of(problem.loss_program)
    convolved_work = work_of(problem.loss_program, has_convolution)
    # Convolutions would take most of the time in a loop.
    are_loops_slow = CONVOLUTION_SLOWDOWN_IN_LOOP * convolved_work > total_work
    if jax.default_backend() == "cpu" and not are_loops_slow and not is_small:
        # A CPU is faster with as many gradients as fit its cache, a megabyte, and at
        # least 8. A transformer of 432,000 parameters took half as long with 8 examples
        # at once as with 16.
        width_of_cache = max(8, numbers_without_loop() // max(kept_size, 1))
        fitting_width = min(fitting_width, width_of_cache)
    return even_width(size, fitting_width)


def _fitting_width(size: int, kept_size: int, captured_size: int) -> int:
    """How many of `size` examples fit into memory at once, if `kept_size` numbers of
    each are kept beside `captured_size` numbers.

    The whole batch, which captures C numbers, may keep C / 3: 4/3 C together. A
    microbatch is at most half the batch and captures at most C / 2, so it may keep
    2/3 C: 7/6 C together. Some room for kept numbers is always there.
    """
    most_kept_numbers = max(size * captured_size // 3, numbers_without_loop() // 4)
    fitting_width = most_kept_numbers // max(kept_size, 1)
    if fitting_width >= size:
        return size
    # Twice, since a microbatch may keep twice as much as the whole batch.
    return max(min(2 * fitting_width, size // 2), 1)


# -------------------------------------------------------------------- estimated times


def costs_of(
    problem: TracedProblem, ghost: GhostClipping | None, microbatch: int | None
) -> dict[str, float]:
    """The estimated time of each method. That of the plain gradient is 1."""
    gradient_work = MULTIPLICATIONS_PER_NUMBER * problem.gradient_size
    # All work is for one example. The loss runs forward, backward to its inputs, and
    # backward to its parameters. The plain gradient is written once for the batch.
    plain_work = 3 * work_of(problem.loss_program) + gradient_work / problem.size
    # A loss without parameters may have no work.
    plain_work = max(plain_work, 1.0)
    one_pass_work = plain_work + gradient_work
    if not ghost:
        return {"one_pass": one_pass_work / plain_work}
    slowdown = CONVOLUTION_SLOWDOWN
    if _width_of_one_pass(problem, ghost, microbatch) < problem.size:
        slowdown = CONVOLUTION_SLOWDOWN_IN_LOOP
    one_pass_work += (slowdown - 1) * 3 * work_of(problem.loss_program, has_convolution)
    # Captured arrays are written and read, and so are gradients that are kept.
    written_size = ghost.kept_size
    for site in ghost.split_program.sites:
        # XLA fuses nothing into a convolution, so the plain gradient writes and reads
        # the same arrays. By ghost clipping, networks with kernels of one pixel took
        # 0.4 to 0.8 times as long as it.
        if not has_convolution(site.eqn):
            written_size += site.captured_size
    ghost_work = plain_work + MULTIPLICATIONS_PER_NUMBER * written_size
    ghost_work += sum(plan.extra_work for plan in ghost.plans)
    return {"one_pass": one_pass_work / plain_work, "ghost": ghost_work / plain_work}


# ------------------------------------------------------------- kernels of convolutions


def _method_for_convolutions(
    problem: TracedProblem,
    ghost: GhostClipping | None,
    method: str,
    microbatch: int | None,
) -> tuple[str, int | None]:
    """The method and the microbatch, changed where XLA would compute wrong gradients of
    examples by a convolution's kernel. Ghost clipping is right if it does not need
    these gradients. If it does, a batch that jit splits over devices is refused.
    Grouped and float64 convolutions take one example at a time, since on a CPU the NaN
    of one example would reach the others, and grouped ones are slow.

    Raises:
      ValueError: a batch that is split (`_refuse_a_split`).
    """
    only_in_rules = _convolutions_only_in_rules(problem)
    convolutions = convolutions_of(problem.loss_program) + only_in_rules
    may_be_split = len(convolutions) > 0 and _may_be_split(problem.batch)
    # On all platforms: where a traced program runs is not known yet, and JAX with a GPU
    # has a CPU too. No GPU was tried.
    any_lets_nan_through = any(map(lets_nan_through, convolutions))
    if not may_be_split and not any_lets_nan_through:
        return method, microbatch
    if ghost and not only_in_rules:
        sites = ghost.gradient_sites
        if not any(has_convolution(site.eqn) for site in sites):
            return "ghost", microbatch
    if may_be_split:
        _refuse_a_split(
            problem.batch,
            f'{problem.call}: method="ghost", with each kernel used once, is needed '
            f"for convolutions{source_line(convolutions[0])} of a batch that jit "
            "splits over devices, where XLA computes wrong gradients of examples. Or "
            "put clipped_grad into jax.shard_map, with mean=False, and lax.psum its "
            f'gradients. Got method="{method}".',
        )
    if not any_lets_nan_through:
        return method, microbatch
    if problem.limits.needs_all_norms:
        # Ghost clipping, also if it was asked for, would make the gradients of all
        # examples at once.
        method = "one_pass"
    return method, 1


def _convolutions_only_in_rules(problem: TracedProblem) -> list[JaxprEqn]:
    """Convolutions of a kind that only the gradient has. A rule of the user's
    (custom_vjp, custom_jvp) makes them.
    """
    kinds = set(map(kind_of, convolutions_of(problem.loss_program)))
    convolutions = convolutions_of(problem.gradient_program)
    return [eqn for eqn in convolutions if kind_of(eqn) not in kinds]


def _may_be_split(batch: PyTree) -> bool:
    """Whether jit may split the batch over devices."""
    # Of a traced batch only the compiler knows how `in_shardings` of jit splits it.
    is_unknown = jax.device_count() > 1 and not manual_axes()
    for leaf in jax.tree.leaves(batch):
        if not is_on_one_device(leaf) or (is_unknown and isinstance(leaf, Tracer)):
            return True
    return False


def _refuse_a_split(batch: PyTree, error_text: str) -> None:
    """Raises ValueError for a batch that is split over devices. The compiler raises it
    if only the compiler knows the split.
    """

    def check(sharding: jax.sharding.Sharding) -> None:
        if not sharding.is_fully_replicated:
            raise ValueError(error_text)

    for leaf in jax.tree.leaves(batch):
        if not is_on_one_device(leaf):
            raise ValueError(error_text)
        jax.debug.inspect_array_sharding(leaf, callback=check)
