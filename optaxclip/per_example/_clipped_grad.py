"""A function transformation like `jax.grad`, whose gradient is a mean of gradients that
were clipped one by one. What it does with a batch, in this order:

    _problem            sorts the arguments by their roles, with the _limits
    _explicit           hands each device of an Explicit mesh its examples
    _traced             makes a program of the loss, and checks it
    _choose             chooses the method, and how many examples are clipped at once
    _passes, _ghost     make gradients, or what gives their norms and their sum
    _example_factors    norms, factors, and the sum of the clipped gradients
    _bounds             by how much one example changes this sum
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._arguments.checks import check_choice, check_flag, shown
from .._devices.mesh import MeshAxes
from .._trees import PyTree
from ..shrinks import Shrink, shrink_of
from ._bounds import Bounds, bounds_of
from ._choose import METHODS, checked_microbatch, choose
from ._explicit import DeviceResult, Static, on_each_device
from ._limits import limits_of
from ._passes import BatchRun
from ._problem import Argnums, Problem, Signature, check_function
from ._traced import traced

# Multiplied by this, a bound still holds after four float32 roundings.
ROUNDED_UP = 1 + 2.0**-22
# Why a result has no sensitivity, whatever the loss and the limits are.
DIVISOR_CHANGES = (
    "result must be a sum, got a mean, whose divisor changes with an example. Use "
    "mean=False, and divide by the expected number of examples."
)
LIMITS_MOVE = (
    "private=False lets one example move the limit of all others. Leave it out, and "
    "give max_norm as a number."
)
# One example less would be another program, in which the gradients of all others may
# have other bits.
NO_MASK = (
    "the batch had no mask=. Pad every batch to one size, and say by mask= which "
    "examples are real, since in a batch of another size the gradients of all others "
    "may have other bits (per_example.draw makes both)."
)


@jax.tree_util.register_static
class Obstacle(str):
    """A text that is part of the structure of a pytree, so that jit returns it."""


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
      sensitivity: by how much one example changes the sum at most, with all that
        rounding adds (`explain_clipped_grad` shows the parts). `add_noise` multiplies
        by it. It assumes that an example is added by unmasking a row. It is None

        * without `mask=`
        * for a mean
        * without a limit (None or inf), and for a limit between 0 and 1e-5. If jit
          traces the limit, it is inf
        * for sums that may leave the range of float32
        * with `private=False`
        * with some shrinks
        * for random numbers from keys other than threefry's, which `jax.vmap` draws
          from the key of the first example
        * where no finite bound is proved
      longest: how long the sum may be at most. None like `sensitivity`.
      obstacle: why `sensitivity` is None, as a sentence. None if it is not.
    """

    grads: PyTree
    norms: PyTree  # float32[batch]
    factors: PyTree  # float32[batch]
    nonfinite: jax.Array  # int32[]
    divisor: jax.Array | None  # int32[]
    values: jax.Array  # float[batch]
    aux: PyTree  # [batch, ...]
    sensitivity: Any  # float32[]
    longest: Any  # float32[]
    obstacle: Obstacle | None

    def added_to(self, total: ClippedGrad) -> ClippedGrad:
        """Returns the sum of this result and another one, for batches that come in
        several calls. No example may be in both.

        Its sensitivity is the larger one, and what rounding of this addition adds.
        `nonfinite` counts both. Norms, factors, values and aux are of this batch.

        Raises:
          ValueError: a mean. The sum of two means is not the mean of all examples.

        Example:
          >>> grad = optaxclip.clipped_grad(lambda w, x: w * x, 1.0, mean=False)
          >>> mask = jnp.array([True, True])
          >>> result = grad(0.0, jnp.array([3.0, 0.5]), mask=mask)
          >>> other = grad(0.0, jnp.array([0.5, 2.0]), mask=mask)
          >>> both = other.added_to(result)
          >>> print(f"{both.grads:.3f} {both.sensitivity:.6f}")
          3.000 1.000003
        """
        if self.divisor is not None or total.divisor is not None:
            raise ValueError(
                "added_to: both results must be sums, got a mean. Use mean=False, and "
                "divide the total by the number of examples."
            )
        sensitivity = None
        longest = None
        if self.sensitivity is not None and total.sensitivity is not None:
            longest = (self.longest + total.longest) * ROUNDED_UP
            larger = jnp.maximum(self.sensitivity, total.sensitivity)
            # The sum is rounded by 2^-24 of its length with an example, and without it.
            sensitivity = (larger + 2.0**-23 * longest) * ROUNDED_UP
        return self._replace(
            grads=jax.tree.map(jnp.add, self.grads, total.grads),
            nonfinite=self.nonfinite + total.nonfinite,
            sensitivity=sensitivity,
            longest=longest,
            obstacle=self.obstacle or total.obstacle,
        )


def clipped_grad(
    loss: Callable[..., Any],
    max_norm: PyTree,
    *,
    argnums: Argnums = 0,
    shared_argnums: Argnums = (),
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
        and with check_vma=False only those of the device it runs on. Such a limit needs
        all norms first, so the whole batch is differentiated at once.
      argnums: which arguments to differentiate, as in `jax.grad`.
      shared_argnums: which arguments are the same for all examples. All others are
        batches: pytrees of arrays whose first axis counts examples. Random keys are a
        batch too, `jax.random.split(key, B)`, so that each example has its own.
      has_aux: whether the loss returns something beside its value.
      shrink: what a norm over its limit becomes, of `optaxclip.shrinks`: None or
        `hard`, `normalize` (AUTO-V), `auto_s()`, `psac()`, `smooth()`, `drop`, or a
        function from norm and limit to new norm, of all examples of a microbatch at
        once. `sensitivity` is None with a function of yours, which may return more than
        the limit, and with a shrink that lengthens small gradients by more than 1e5
        limits: `normalize`, `auto_s` below 1e-5 and `psac` below 2.6e-11.
      microbatch: the most examples that are differentiated at once, at least 1. On a
        mesh with Explicit axes each device that shares the batch takes at least one. It
        need not divide the batch: with 9, a batch of 32 becomes four microbatches of 8.
        None: the whole batch with "one_pass", else what fits into memory.
      method: "ghost", "one_pass" or "auto". Both methods give the same numbers, but for
        rounding and for gradients whose terms cancel.

        "ghost": from one backward pass, without large gradients of examples. (With a
        limit of all norms, some convolutions take one pass: docs/per_example.md.) Where
        norms are by gram (`explain_clipped_grad`), terms of several positions are added
        up with those of other examples. If they cancel to less than 1/16 of their size
        (1/256 in a mean), the norm of the example counts as 1/16 (1/256) of that size,
        since their rounding stays.
        If squares leave the range of float32, the norm counts as the sum of the sizes
        of the terms, and with inputs of a layer above 2e31 as inf.

        "one_pass": the gradients of a microbatch at a time. Often the fastest for
        narrow networks and long sequences.

        "auto": the faster one, estimated from the shapes of the loss. One pass then
        takes a microbatch whose gradients fill at most two thirds of the memory that
        the backward pass keeps for the batch. On a CPU it takes at most 8 gradients, or
        as many as fit into a megabyte, unless convolutions are much of the work. For a
        loss that ghost clipping cannot take, gradients fill at most 8 MB on a CPU and
        256 MB elsewhere. A single gradient may always be larger.
        `explain_clipped_grad` shows the choice.
      mean: whether to divide by the number of examples that are not masked. False gives
        the sum, in float32 or wider: rounded to bfloat16, one example could change it
        by more than the limit.
      mesh_axes: inside shard_map and pmap, the mesh axes that split parameters. The
        norm of an example is then that of its whole gradient. One of "auto" (right in
        shard_map with check_vma=True, and where the loss joins no devices), names that
        split every parameter, None for parameters that are whole on each device, or a
        tree prefix of PartitionSpec. Axes that split the batch are not among them.
      private: False allows a `max_norm` that looks at the norms of the batch. One
        example then moves the limit of all others, and changes the sum by more than a
        limit: no account of privacy holds, and `add_noise` refuses the result. True is
        no promise of privacy, which needs noise.

    Returns:
      A function of the arguments of `loss`, by position, with batches for examples,
      and of `mask=`: bool[batch], False for padding. The function returns a
      `ClippedGrad`, with sums in float32 or wider. It should be jitted. Inside
      shard_map it gets the examples of its own device: take the sum (`mean=False`), and
      `lax.psum` it. `sensitivity` and `longest` are already those of the sum over all
      devices. On a mesh with Explicit axes it enters shard_map itself, and the gradient
      is split as the parameters are.

    Raises:
      ValueError: a limit that is negative, NaN or an array, an unknown method, or a
        microbatch below 1. A limit that is a function without `private=False`, or with
        a microbatch.
      TypeError: a limit that is not a number, a loss or a shrink that is not a
        function, or `has_aux`, `mean` or `private` that is not True or False.

    The function that it returns raises:
      ValueError, for its arguments: batches whose first axes are missing or differ, a
        mask of the wrong shape, or limits that do not fit the parameters.
      ValueError, for the loss: one that `jax.vmap` shows the whole batch
        (`jax.custom_batching`, callbacks and `ffi_call` with a `vmap_method` other than
        "sequential"), or one that joins devices with different examples, or the batches
        of an outer `jax.vmap` (`lax.psum`).
        In pmap and with check_vma=False, one that joins devices along mesh axes that
        `mesh_axes` does not name.
      ValueError, for mesh axes that contradict the types.
      ValueError, for "ghost": Explicit mesh axes that split parameters, but not the
        batch, symbolic sizes, and a loss that cannot be split, such as one with refs
        (`jax.new_ref`).
      ValueError, for a convolution of a batch that jit splits over devices, unless
        ghost clipping is possible and each kernel is used once. It is a JaxRuntimeError
        of the compiler if only `in_shardings` of jit splits the batch.
      NotImplementedError: a loss that closes over an array on a mesh with Explicit
        axes. Make it a shared argument.
      TypeError: parameters that are not floats or complex numbers, `argnums` or
        `shared_argnums` that are not ints, arguments by name, and a loss that is not
        one real number, or lacks the aux that `has_aux` says.

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
    check_flag(f"{call}: has_aux", has_aux)
    check_flag(f"{call}: mean", mean)
    check_flag(f"{call}: private", private)
    limits = limits_of(max_norm, call, shrink_of(shrink, call))
    check_choice(f"{call}: method", method, METHODS)
    microbatch = checked_microbatch(call, microbatch)
    if limits.needs_all_norms and (private or microbatch):
        raise ValueError(
            f"{call}: max_norm={shown(max_norm)}, a function of all norms, needs "
            f"private=False and microbatch=None, got {private=} and {microbatch=}. For "
            "a schedule give its number."
        )
    signature = Signature(
        call,
        loss,
        argnums=argnums,
        shared_argnums=shared_argnums,
        has_aux=has_aux,
        mesh_axes=mesh_axes,
        limits=limits,
        is_mean=mean,
    )

    def clip_on_device(problem_on_device: Problem) -> DeviceResult:
        # norms |g_i|, factors f_i = shrink(|g_i|, C) / |g_i|, by `factors_of_examples`
        # sums = sum_i f_i g_i / divisor, by `weighted_sum` or from cotangents
        problem = traced(problem_on_device, signature)
        choice = choose(problem, method, microbatch)
        run = BatchRun(problem, choice.width)
        if choice.ghost:
            sums, results = choice.ghost.clipped_sums(run)
        else:
            sums, results = run.in_one_pass()
        example_factors, values, aux = results
        # [batch, groups] -> a tree like max_norm of [batch]
        norms = limits.treedef.unflatten(example_factors.norms.T)
        factors = limits.treedef.unflatten(example_factors.reported.T)
        nonfinite = jnp.sum(
            problem.is_present & ~example_factors.is_counted, dtype=jnp.int32
        )
        examples = norms, factors, values, aux
        return DeviceResult(
            sums, nonfinite, examples, Static(bounds_of(problem, choice))
        )

    def grad_of_batch(*args: Any, mask: Any = None) -> ClippedGrad:
        problem = signature.problem_of(args, mask)
        sums, nonfinite, examples, static = on_each_device(clip_on_device, problem)
        norms, factors, values, aux = examples
        params, treedef = jax.tree.flatten(problem.params)
        if mean:
            sums = [x.astype(param.dtype) for x, param in zip(sums, params)]
        bounds: Bounds = static.value
        example_limit = None
        if mean:
            obstacle = DIVISOR_CHANGES
        elif not private:
            obstacle = LIMITS_MOVE
        elif mask is None:
            obstacle = NO_MASK
        elif bounds.obstacle:
            obstacle = bounds.obstacle
        else:
            example_limit, obstacle = limits.example_limit(bounds.norm_of_sum)
        sensitivity = None
        longest = None
        if example_limit is not None:
            sensitivity = example_limit * (1 + bounds.change) * ROUNDED_UP
            longest = example_limit * bounds.norm_of_sum * ROUNDED_UP
        return ClippedGrad(
            grads=treedef.unflatten(sums),
            norms=norms,
            factors=factors,
            nonfinite=nonfinite,
            divisor=problem.divisor,
            values=values,
            aux=aux,
            sensitivity=sensitivity,
            longest=longest,
            obstacle=None if obstacle is None else Obstacle(obstacle),
        )

    return grad_of_batch
