"""A function transformation like `jax.grad`, whose gradient is a mean of gradients that
were clipped one by one, and how it is computed.

Ghost clipping pays for each norm and for what it keeps of each layer, one pass for each
number of a gradient that it writes and reads again. All counts are known from shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import _trees as prefix
from .._checks import check_choice, check_flag, check_length, is_function, shown
from .._mesh import MeshAxes
from ..shrinks import Shrink, shrink_of
from ._choose import choose, costs_of, possible_ghost
from ._explicit import on_each_device
from ._ghost._norms import Way
from ._passes import CANCELS, Run, limits_of
from ._problem import Places, Problem, Question, check_function

METHODS = ("auto", "ghost", "one_pass")


class ClippedGrad(NamedTuple):
    """The gradient, and what was seen of each example.

    Attributes:
      grads: like the parameters: the mean of the clipped gradients in the dtypes of the
        parameters, or their sum in float32 or wider.
      norms: norms before clipping, a tree like `max_norm`, one array if that is one
        number. 0 where masked, NaN or inf where broken.
      factors: what each example's gradient was multiplied by, a tree like `norms`. 0
        where masked or broken.
      nonfinite: examples left out because a norm of theirs is NaN or inf.
      divisor: examples that are not masked, by which the sum was divided. None for the
        sum itself, with `mean=False`.
      values: the loss of each example.
      aux: what the loss returned beside its value. None without `has_aux`.
      limit: the longest that a gradient may be after clipping: `max_norm`, the root of
        the sum of squares for several. None without one (None or inf), and with
        `private=False`. `add_noise` refuses None.
    """

    grads: Any
    norms: Any  # float32[batch]
    factors: Any  # float32[batch]
    nonfinite: jax.Array  # int32[]
    divisor: jax.Array | None  # int32[]
    values: jax.Array  # float[batch]
    aux: Any  # [batch, ...]
    limit: jax.Array | None  # float32[]


def clipped_grad(
    loss: Callable[..., Any],
    max_norm: Any,
    *,
    argnums: Places = 0,
    shared_argnums: Places = (),
    has_aux: bool = False,
    shrink: Shrink | None = None,
    microbatch: int | None = None,
    method: str = "auto",
    mean: bool = True,
    mesh_axes: MeshAxes = "auto",
    private: bool = True,
) -> Callable[..., ClippedGrad]:
    """Makes a function that clips the gradient of each example and averages:
    (1 / B) sum_i f_i g_i with f_i = shrink(|g_i|, C) / |g_i|.

    It bounds what one example can do. It adds no noise and is not a privacy accountant.
    Differential privacy needs both: docs/private_training.md shows how to add them.

    Args:
      loss: the loss of ONE example, `loss(params, example, ...) -> scalar`, or
        `(scalar, aux)` with `has_aux`.
      max_norm: the limit C: a number at least 0, or None for no limit. Or a tree prefix
        of the parameters with a limit for each part, whose norm is then taken
        separately. With `private=False` a limit may be a function from all norms of the
        batch, float32[batch] with NaN for an example that is masked or broken, to a
        number, such as `jnp.nanmedian`. It gets the norms of all devices, but in pmap
        and with check_vma=False only those of its own. All norms are needed first, so
        the whole batch is differentiated at once.
      argnums: which arguments to differentiate, as in `jax.grad`.
      shared_argnums: which arguments are the same for all examples. All others are
        batches: pytrees of arrays whose first axis counts examples. Random keys are a
        batch too, `jax.random.split(key, B)`, so that each example has its own.
      has_aux: whether the loss returns something beside its value.
      shrink: what a norm over its limit becomes, of `optaxclip.shrinks`: None or
        `hard`, `normalize` (AUTO-V), `auto_s()`, `psac()`, `smooth()`, `drop`, or a
        function from norm and limit to new norm.
      microbatch: how many examples are differentiated at once, at least 1, or, on a
        mesh with Explicit axes, one for each device that shares the batch. It need not
        divide the batch: 32 examples, 9 at once, are 4 times 8. None for the whole
        batch, or for what "auto" chooses.
      method: how it is computed. All give the same numbers but for rounding, and but
        for what cancels in "ghost". "ghost": from one backward pass, without large
        gradients of examples. Where norms are by gram (`explain_clipped_grad`), an
        example whose terms cancel to less than 1/128 of their size counts as that long,
        since it is summed with their rounding. Where squares leave the range of float32
        it counts as that size, and with inputs of a layer above 2e31 as inf.
        "one_pass": the gradients of a microbatch at a time. Often the fastest for
        narrow networks and long sequences. "auto": "ghost" or "one_pass", by the shapes
        of the loss. One pass then takes no more memory for gradients of examples than
        two thirds of what is kept of the batch, or one gradient, on a CPU 8 or a
        megabyte. Convolutions it takes only all at once. `explain_clipped_grad` shows
        the choice.
      mean: whether to divide by the number of examples that are not masked. False gives
        the sum, in float32 or wider: rounded to bfloat16, one example could change it
        by more than the limit.
      mesh_axes: over which mesh axes parameters are split, inside shard_map and pmap,
        so that the norm of an example is that of its whole gradient: "auto" (right in
        shard_map with check_vma=True, and where the loss joins no devices), names that
        split every parameter, None for parameters that are whole on each device, or a
        tree prefix of PartitionSpec. Axes that split the batch are not among them.
      private: False allows a `max_norm` that looks at the norms of the batch. One
        example then moves the limit of all others, and changes the sum by more than a
        limit: no account of privacy holds, and `add_noise` refuses the result. True is
        no promise of privacy, which needs noise.

    Returns:
      A function of the arguments of `loss`, by position, with batches for examples,
      and of `mask=`: bool[batch], False for padding. It returns a `ClippedGrad`. Sums
      are in float32 or wider. The function should be jitted. Inside shard_map it gets
      the examples of its own device: take the sum (`mean=False`), and `lax.psum` it. On
      a mesh with Explicit axes it enters shard_map itself, and the gradient is split as
      the parameters are.

    Raises:
      ValueError: a limit that is negative, NaN or an array, an unknown method, a
        microbatch below 1. A limit that is a function without `private=False`, or with
        a microbatch. From the function: mesh axes that contradict the types, "auto" for
        a loss that joins devices (`lax.psum`) in pmap or with check_vma=False, a loss
        that joins devices with different examples, a loss that `jax.vmap` shows the
        whole batch (`jax.custom_batching`, callbacks and `ffi_call` with a
        `vmap_method` other than "sequential"), limits that do not fit the parameters,
        batches whose first axes are missing or differ, or a mask of the wrong shape.
        "ghost" raises where Explicit mesh axes split parameters, but not the batch, for
        symbolic sizes, and for a loss that cannot be split, such as one with refs
        (`jax.new_ref`). For a convolution of a batch that jit splits over devices all
        methods raise, but for "ghost" if each kernel is used once: JaxRuntimeError,
        when it is compiled, if only `in_shardings` of jit splits the batch.
      NotImplementedError: from the function: a loss that closes over an array on a mesh
        with Explicit axes. Make it a shared argument.
      TypeError: a limit that is not a number, a loss or a shrink that is not a
        function. From the function: parameters that are no floats or complex numbers,
        places that are no ints, arguments by name, and a loss that is not one real
        number, or lacks the aux that `has_aux` says.

    | an example that | contributes | divides the mean |
    |---|---|---|
    | has a norm within the limit | its gradient | yes |
    | has the gradient zero | 0, never 0 / 0 | yes |
    | has a NaN or inf in its gradient | 0, and is counted in `nonfinite` | yes |
    | is masked, whatever it holds | 0 | no. If all are masked: zeros |

    Example:
      >>> def loss(w, x):
      ...     return 0.5 * (w - x) ** 2
      >>> grad = optaxclip.per_example.clipped_grad(loss, 1.0)
      >>> result = grad(jnp.array(3.0), jnp.array([2.5, 1.0, 4.0, 3.0]))
      >>> print(f"{result.grads:.3f}", result.norms, result.factors)
      0.125 [0.5 2.  1.  0. ] [1.  0.5 1.  1. ]

    Reference: Abadi et al., Deep learning with differential privacy, 2016 (arXiv
    1607.00133). For ghost clipping Li, Tramer, Liang, Hashimoto, Large language models
    can be strong differentially private learners, 2022 (arXiv 2110.05679), and Bu,
    Wang, Zha, Karypis, Differentially private optimization on large model at small
    cost, 2023 (arXiv 2210.00038).
    """
    call = "clipped_grad"
    check_function(f"{call}: loss", loss)
    check_flag(f"{call}: mean", mean)
    limits = limits_of(max_norm, call, shrink_of(shrink, call))
    check_choice(f"{call}: method", method, METHODS)
    if microbatch is not None:
        check_length(f"{call}: microbatch", microbatch)
    needs_all_norms = any(map(is_function, limits.values))
    if needs_all_norms and (private or microbatch):
        raise ValueError(
            f"{call}: max_norm={shown(max_norm)}, a function of all norms, needs "
            f"private=False and microbatch=None, got {private=} and {microbatch=}. For "
            "a schedule give its number."
        )
    question = Question(call, loss, argnums, shared_argnums, has_aux, mesh_axes)

    def of_batch(*args: Any, mask: Any = None, **others: Any) -> ClippedGrad:
        for name in others:
            raise TypeError(
                f"{call}: there is no argument {name!r} beside mask. Hand over by "
                "position what the loss takes."
            )
        problem = question.about(args, mask)._replace(limits=limits.values)
        divisor = None
        if mean:
            # Broken examples too. A batch that is all masked gives 0 / 1.
            divisor = jnp.maximum(jnp.sum(problem.present, dtype=jnp.int32), 1)
            problem = problem._replace(divisor=divisor)
        sums, nonfinite, each = on_each_device(of_device, problem)
        leaves, treedef = jax.tree.flatten(problem.params)
        if mean:
            sums = [x.astype(y.dtype) for x, y in zip(sums, leaves)]
        norms, factors, values, aux = each
        return ClippedGrad(
            grads=treedef.unflatten(sums),
            norms=norms,
            factors=factors,
            nonfinite=nonfinite,
            divisor=divisor,
            values=values,
            aux=aux,
            limit=limits.joint() if private else None,
        )

    def of_device(problem: Problem) -> Any:
        problem = question.on_device(problem)
        _, width, ghost = choose(problem, method, microbatch)
        # The first factor is known after the last norm.
        width = None if needs_all_norms else width
        groups = prefix.lookup(limits.table, problem.params, f"{call}: max_norm")
        numbers = {"values": problem.limits, "splits": problem.splits}
        own = limits._replace(groups=groups, divisor=problem.divisor, **numbers)
        run = Run(problem, own, width)
        sums, found = ghost.in_steps(run) if ghost else run.in_one_pass()
        weights, losses, aux = found
        # [batch, groups] -> for each limit [batch].
        norms = limits.treedef.unflatten(weights.norms.T)
        factors = limits.treedef.unflatten(weights.factors.T)
        nonfinite = jnp.sum(problem.present & ~weights.counts, dtype=jnp.int32)
        return sums, nonfinite, (norms, factors, losses, aux)

    return of_batch


def _bounds(problem: Problem, width: int, ways: list[Way]) -> tuple[float, float]:
    """What is proved of excess and change, over the limit: see docs/numerics.md."""
    lost, missed = 0.0, 0.0
    size = problem.present.size * problem.devices
    for way, leaf in zip(ways, jax.tree.leaves(problem.params)):
        dtype = np.promote_types(leaf.dtype, np.float32)
        # A loss may compute in fewer bits than its parameters have.
        outs = [x.dtype for use in way.uses.values() for x in use.outs] or [dtype]
        own = reduce(np.promote_types, outs, np.dtype(np.float32))
        dtype = max(dtype, own, key=lambda x: float(jnp.finfo(x).eps))
        # Elsewhere what is measured is what is summed.
        is_gram = way.name == "gram"
        count = way.positions if is_gram else 1
        # The additions of a microbatch, of all microbatches, and the products.
        sums = _rounding(width * count + size + 4, dtype)
        for use in way.uses.values():
            if not way.held and any(x.dtype == jnp.bfloat16 for x in use.outs):
                # What two bfloat16 numbers tell of a cotangent times a factor.
                sums += 2.0**-17
        if is_gram:
            sums *= CANCELS + 1
            stack, rows, columns = way.matrices
            square = _rounding(rows + columns + stack * count**2 + 1, own)
            missed = max(missed, np.sqrt(1 + CANCELS**2 * square) - 1)
        lost = max(lost, sums)
    excess = missed + lost
    return excess, excess + 2 * (size - 1) * lost


def _rounding(count: int, dtype: Any) -> float:
    """What `count` roundings may take from a sum, over the sum of its terms' sizes."""
    share = count * float(jnp.finfo(dtype).eps) / 2
    return share / (1 - share) if share < 1 else np.inf


class ExplainedLeaf(NamedTuple):
    """How the norms of the gradients by one parameter are found."""

    name: str  # its path in the parameters
    shape: tuple[int, ...]
    way: str  # a word of the table in `explain_clipped_grad`
    # the operations that it goes into, such as "gather, dot_general"
    uses: str
    # bytes kept of the microbatch from forward and backward pass, for this parameter
    kept: int
    made: int  # bytes made of each example to find its norm


class Explanation(NamedTuple):
    """What `clipped_grad` does. Its text is a table with a line for each parameter.

    Attributes:
      method: the method that was given or chosen.
      microbatch: how many examples at once, None for the whole batch.
      leaves: one `ExplainedLeaf` for each parameter.
      excess: what one example adds to the sum, with the rounding of its terms, is at
        most C (1 + excess), for the limit C and whatever the example holds.
      change: with or without one example the sums differ by at most C (1 + change),
        even if all others were made to cancel. inf where nothing is proved. The bounds
        hold on a CPU: docs/numerics.md has the proof, and what was measured.
      costs: for each method, about how many times as long as the plain gradient it
        takes, counted from shapes: on a CPU ratios of two methods are mostly right
        within a factor of 2. "auto" takes the cheaper of "ghost" and "one_pass". There
        is no "ghost" where the loss cannot be split.
    """

    method: str
    microbatch: int | None
    leaves: list[ExplainedLeaf]
    excess: float
    change: float
    costs: dict[str, float]

    def __str__(self) -> str:
        width = self.microbatch or "the whole batch"
        costs = [f"{name} {cost:.2g}" for name, cost in self.costs.items()]
        slow = [name for name, cost in self.costs.items() if cost > 10]
        lines = [
            f"method {self.method}, microbatch: {width}",
            f"estimated time, in plain gradients: {', '.join(costs)}",
            *(f"more than ten plain gradients: {name}" for name in slow),
            f"an example adds at most 1 + {self.excess:.2g} limits and changes the sum "
            f"by 1 + {self.change:.2g}",
        ]
        head = ("parameter", "shape", "norm by", "uses", "kept", "made")
        rows = [head, *(tuple(map(str, leaf)) for leaf in self.leaves)]
        widths = [max(map(len, column)) for column in zip(*rows)]
        for row in rows:
            lines.append("  ".join(map(str.ljust, row, widths)).rstrip())
        return "\n".join(lines)


def explain_clipped_grad(
    loss: Callable[..., Any],
    *,
    argnums: Places = 0,
    shared_argnums: Places = (),
    has_aux: bool = False,
    microbatch: int | None = None,
    method: str = "auto",
) -> Callable[..., Explanation]:
    """Makes a function that says how `clipped_grad` computes its gradient: by which
    method, and from what the norms of each parameter's gradients are found.

    Nothing is computed. The loss is traced, and shapes are looked at.

    Args:
      loss: the loss of one example, as in `clipped_grad`.
      argnums: which arguments to differentiate.
      shared_argnums: which arguments are the same for all examples.
      has_aux: whether the loss returns something beside its value.
      microbatch: how many examples are differentiated at once, or None.
      method: "auto", "ghost" or "one_pass".

    Returns:
      A function of the arguments of `loss`, with batches for examples. It returns an
      `Explanation`, whose text is a table. Its `excess` and `change` are what is proved
      about the share of one example in the sum. `kept` is the bytes of the inputs and
      cotangents of a parameter's uses, for one microbatch. `made` is the bytes that one
      example adds while its norm is computed.

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
      TypeError: a loss that is not a function. From the function: one that is not one
        real number.

    Example:
      >>> def loss(params, x):
      ...     return jnp.sum((x @ params["w"] + params["b"]) ** 2)
      >>> params = {"w": jnp.ones((30, 20)), "b": jnp.ones(20)}
      >>> explain = optaxclip.per_example.explain_clipped_grad(loss)
      >>> print(explain(params, jnp.ones((4, 30))))
      method ghost, microbatch: the whole batch
      estimated time, in plain gradients: one_pass 3.9, ghost 1.4
      an example adds at most 1 + 7.2e-07 limits and changes the sum by 1 + 5e-06
      parameter  shape     norm by   uses         kept  made
      b          (20,)     gradient  add          320   80
      w          (30, 20)  product   dot_general  800   0
    """
    call = "explain_clipped_grad"
    check_function(f"{call}: loss", loss)
    check_choice(f"{call}: method", method, METHODS)
    if microbatch is not None:
        check_length(f"{call}: microbatch", microbatch)
    question = Question(call, loss, argnums, shared_argnums, has_aux)

    def of_batch(*args: Any) -> Explanation:
        problem, found = question.about(args), []
        jax.eval_shape(lambda: on_each_device(partial(explain, found), problem))
        return found[0]

    def explain(found: list[Explanation], problem: Problem) -> Any:
        problem = question.on_device(problem)
        chosen, width, ghost = choose(problem, method, microbatch)
        count = min(width or problem.present.size, problem.present.size)
        entries = jax.tree.leaves_with_path(problem.params)
        # One pass makes whole gradients, and keeps nothing of uses.
        ways = [Way("gradient", {}, held=leaf.size) for _, leaf in entries]
        rows, ways = [], ghost.ways if ghost else ways
        for (path, leaf), way in zip(entries, ways):
            of_leaf = way.uses.values()
            uses = [use.name + " in scan" * bool(use.loops) for use in of_leaf]
            # As if all that is kept and made had the dtype of the parameter.
            kept = leaf.dtype.itemsize * count * sum(use.kept for use in of_leaf)
            made = leaf.dtype.itemsize * (way.size + way.held)
            # DictKey("blocks"), SequenceKey(0) -> "blocks/0".
            name, shown = prefix.name(path), ", ".join(dict.fromkeys(uses))
            rows.append(ExplainedLeaf(name, leaf.shape, way.name, shown, kept, made))
        costs = costs_of(problem, ghost or possible_ghost(problem)[0], microbatch)
        bounds = _bounds(problem, count * problem.devices, ways)
        width = width and width * problem.devices
        found.append(Explanation(chosen, width, rows, *bounds, costs))
        return jax.tree.leaves(problem.params), 0, ()

    return of_batch
