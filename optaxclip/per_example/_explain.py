"""How `clipped_grad` computes a sum, as a table with a line for each parameter."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from .. import _trees as trees
from .._arguments.checks import check_choice, check_flag
from .._devices.mesh import MeshAxes
from .._trees import PyTree
from ..shrinks import hard
from ._bounds import bounds_of
from ._choose import (
    METHODS,
    Choice,
    checked_microbatch,
    choose,
    costs_of,
    ghost_or_obstacle,
)
from ._explicit import DeviceResult, Static, on_each_device
from ._limits import limits_of
from ._problem import Argnums, Problem, Signature, check_function
from ._traced import TracedProblem, traced


class ExplainedLeaf(NamedTuple):
    """How the norms of the gradients by one parameter are computed."""

    name: str  # its path in the parameters
    shape: tuple[int, ...]
    norm_by: str  # a word of the table in `explain_clipped_grad`
    # the operations that it goes into, such as "gather, dot_general"
    uses: str


class Explanation(NamedTuple):
    """What `clipped_grad` does. Its text is a table with a line for each parameter.

    Attributes:
      method: the method that was given or chosen.
      microbatch: how many examples at once, None for the whole batch. Of 32 examples
        with `microbatch=9` it is 8.
      leaves: one `ExplainedLeaf` for each parameter.
      excess: what one example adds to the sum, with the rounding of its terms, is at
        most C (1 + excess), for the limit C and whatever the example holds.
      change: with an example, or with `mask=` False in its place, the sums differ by at
        most C (1 + change), even if all others were made to cancel. inf where nothing
        is proved. Both hold for limits from 1e-5 on, and shrinks with which
        `clipped_grad` has a sensitivity. Without `mask=`, or for batches of different
        sizes, nothing is proved. docs/numerics.md has the proof, what it needs on a GPU
        or TPU, and what was measured.
      obstacle: why nothing is proved even with `mask=`, as a sentence, or None.
      costs: for each method, about how many times as long as the plain gradient it
        takes with the microbatch that was given, or that "auto" takes. They are counted
        from shapes: on a CPU ratios of two methods are mostly right within a factor of
        2. "auto" takes the cheaper method. There is no "ghost" where the loss cannot be
        split.
    """

    method: str
    microbatch: int | None
    leaves: list[ExplainedLeaf]
    excess: float
    change: float
    obstacle: str | None
    costs: dict[str, float]

    def __str__(self) -> str:
        width = self.microbatch or "the whole batch"
        costs = [f"{name} {cost:.2g}" for name, cost in self.costs.items()]
        lines = [
            f"method {self.method}, microbatch: {width}",
            f"estimated time, in plain gradients: {', '.join(costs)}",
        ]
        if self.change < np.inf:
            rounding_of_others = self.change - self.excess
            lines += [
                f"one example changes the sum by at most 1 + {self.change:.2g} limits",
                f"  1 by its limit, {self.excess:.2g} by its rounding, "
                f"{rounding_of_others:.2g} by that of the others",
                "  proved for one batch size, with mask= for absent examples",
                "  no bound without mask=, nor for batches that differ in size",
            ]
        else:
            lines += [
                "no bound is proved of how much one example changes the sum:",
                f"  {self.obstacle}",
            ]
        head = ("parameter", "shape", "norm by", "uses")
        rows: list[tuple[str, ...]] = [head]
        for leaf in self.leaves:
            rows.append(tuple(map(str, leaf)))
        widths = [max(map(len, column)) for column in zip(*rows)]
        for row in rows:
            lines.append("  ".join(map(str.ljust, row, widths)).rstrip())
        return "\n".join(lines)


def explain_clipped_grad(
    loss: Callable[..., Any],
    *,
    argnums: Argnums = 0,
    shared_argnums: Argnums = (),
    has_aux: bool = False,
    microbatch: int | None = None,
    method: str = "auto",
    mesh_axes: MeshAxes = "auto",
) -> Callable[..., Explanation]:
    """Makes a function that says how `clipped_grad` computes a sum (`mean=False`): by
    which method, and how the norms of the gradients by each parameter are computed.

    It traces the loss and looks at shapes. It computes nothing.

    Args:
      loss: the loss of one example, as in `clipped_grad`.
      argnums: which arguments to differentiate.
      shared_argnums: which arguments are the same for all examples.
      has_aux: whether the loss returns something beside its value.
      microbatch: how many examples are differentiated at once, or None.
      method: "auto", "ghost" or "one_pass".
      mesh_axes: over which mesh axes parameters are split, as in `clipped_grad`.

    Returns:
      A function of the arguments of `loss`, with batches for examples. Their shapes,
      `jax.ShapeDtypeStruct`, are enough. It returns an `Explanation`, whose text is a
      table. Its `excess` and `change` are proved bounds of what one example adds to the
      sum, and how much it changes the sum, whatever `max_norm` is.

    | norm by | is | for |
    |---|---|---|
    | product | abs(a) abs(c), of input a and cotangent c | one position |
    | rows | abs(c), of cotangents that are added up for each row | lookups in a table |
    | gram | sqrt(sum_ts (a_t . a_s)(c_t . c_s)) | few positions, large matrices |
    | matrix | abs(sum_t a_t c_t') | many positions, convolutions |
    | gradient | abs(g), g by JAX's own derivative | biases, scales, all else |
    | unused | 0 | parameters that the loss does not depend on |

    In one pass it is "gradient" for all.

    Raises:
      ValueError: an unknown method, a microbatch below 1. From the function: batches
        whose first axes are missing or differ, a loss that is shown the whole batch.
      TypeError: a loss that is not a function, or `has_aux` that is not True or False.
        From the function: a loss that is not one real number.

    Example:
      >>> def loss(params, x):
      ...     return jnp.sum((x @ params["w"] + params["b"]) ** 2)
      >>> params = {"w": jnp.ones((30, 20)), "b": jnp.ones(20)}
      >>> explain = optaxclip.per_example.explain_clipped_grad(loss)
      >>> print(explain(params, jnp.ones((4, 30))))
      method ghost, microbatch: the whole batch
      estimated time, in plain gradients: one_pass 3.9, ghost 1.4
      one example changes the sum by at most 1 + 4.2e-06 limits
        1 by its limit, 9.5e-07 by its rounding, 3.2e-06 by that of the others
        proved for one batch size, with mask= for absent examples
        no bound without mask=, nor for batches that differ in size
      parameter  shape     norm by   uses
      b          (20,)     gradient  add
      w          (30, 20)  product   dot_general
    """
    call = "explain_clipped_grad"
    check_function(f"{call}: loss", loss)
    check_flag(f"{call}: has_aux", has_aux)
    check_choice(f"{call}: method", method, METHODS)
    microbatch = checked_microbatch(call, microbatch)
    signature = Signature(
        call,
        loss,
        argnums=argnums,
        shared_argnums=shared_argnums,
        has_aux=has_aux,
        mesh_axes=mesh_axes,
        limits=limits_of(None, call, hard),
        is_mean=False,
    )

    def of_batch(*args: Any) -> Explanation:
        def shape_or_none(x: Any) -> Any:
            return x if isinstance(x, jax.ShapeDtypeStruct) else None

        def explain(arrays: PyTree) -> Static:
            problem = signature.problem_of(trees.put_back(arrays, args))
            return on_each_device(explain_on_device, problem).static

        # As arguments shapes become traced arrays.
        explanation = jax.eval_shape(explain, jax.tree.map(shape_or_none, args))
        return explanation.value

    def explain_on_device(problem_on_device: Problem) -> DeviceResult:
        problem = traced(problem_on_device, signature)
        choice = choose(problem, method, microbatch)
        bounds = bounds_of(problem, choice)
        ghost = choice.ghost or ghost_or_obstacle(problem)[0]
        width_of_all = None
        if choice.width != problem.size:
            width_of_all = choice.width * problem.explicit_devices
        explanation = Explanation(
            method=choice.method,
            microbatch=width_of_all,
            leaves=_explained_leaves(problem, choice),
            excess=bounds.excess,
            change=bounds.change,
            obstacle=bounds.obstacle,
            costs=costs_of(problem, ghost, microbatch),
        )
        # The gradients have the shapes of the parameters.
        sums = jax.tree.leaves(problem.params)
        return DeviceResult(sums, 0, (), Static(explanation))

    return of_batch


def _explained_leaves(problem: TracedProblem, choice: Choice) -> list[ExplainedLeaf]:
    """How the norms are computed, for each parameter."""
    leaves = []
    entries = jax.tree.leaves_with_path(problem.params)
    for (path, leaf), plan in zip(entries, choice.plans(problem)):
        use_names = []
        for site in plan.sites:
            in_scan = " in scan" if site.scan_lengths else ""
            use_names.append(site.name + in_scan)
        explained = ExplainedLeaf(
            name=trees.path_name(path),  # DictKey("a"), SequenceKey(0) -> "a/0"
            shape=leaf.shape,
            norm_by=plan.norm_by,
            uses=", ".join(dict.fromkeys(use_names)),
        )
        leaves.append(explained)
    return leaves
