"""A function transformation like `jax.grad`, whose gradient is a mean of gradients that
were clipped one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import check_choice, check_flag
from ..shrinks import Shrink, shrink_of
from ._choose import METHODS, choose
from ._problem import Question, check_microbatch, check_unnamed
from ._roles import Places
from ._run import Run
from ._weights import limits_of, weigh


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
    """

    grads: Any
    norms: Any  # float32[batch]
    factors: Any  # float32[batch]
    nonfinite: jax.Array  # int32[]
    divisor: jax.Array | None  # int32[]
    values: jax.Array  # float[batch]
    aux: Any  # [batch, ...]


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
) -> Callable[..., ClippedGrad]:
    """Makes a function that clips the gradient of each example and averages:
    (1 / B) sum_i f_i g_i with f_i = shrink(|g_i|, C) / |g_i|.

    It bounds what one example can do. It adds no noise and is not a privacy accountant.
    Differential privacy needs both: docs/per_example.md shows how to add them, and
    jax_privacy (https://github.com/google-deepmind/jax_privacy) has them too.

    Args:
      loss: the loss of ONE example, `loss(params, example, ...) -> scalar`, or
        `(scalar, aux)` with `has_aux`.
      max_norm: the limit C: a number at least 0, or None for no limit. Or a tree prefix
        of the parameters with a limit for each part, whose norm is then taken
        separately.
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
      method: how it is computed. All give the same numbers but for rounding. "ghost":
        from one backward pass, without gradients of examples. "one_pass": the gradients
        of a microbatch at a time. Often the fastest for narrow networks and long
        sequences. "two_pass": norms first, and then the gradient of the weighted loss.
        Its factors are rounded to the dtype of the loss, which should be float32, and
        below 1.2e-38 count as 0. It adds up a microbatch in the dtype that parameters
        are cast to. The backward pass of the loss must be linear, so that it has no
        `clip_cotangent`. "auto": "ghost" or "one_pass", by the shapes of the loss. One
        pass then takes no more memory for gradients of examples than a quarter of the
        activations of the batch, or one gradient. `explain_clipped_grad` shows the
        choice.
      mean: whether to divide by the number of examples that are not masked. False gives
        the sum, in float32 or wider: rounded to bfloat16, one example could change it
        by more than the limit.

    Returns:
      A function of the arguments of `loss`, by position, with batches for examples,
      and of `mask=`: bool[batch], False for padding. It returns a `ClippedGrad`. Sums
      are in float32 or wider, but for those of "two_pass". The function should be
      jitted. Inside shard_map it gets the examples of its own device: take the sum
      (`mean=False`), and `lax.psum` it.

    Raises:
      ValueError: a limit that is negative, NaN or an array, several limits or
        `clip_cotangent` with two passes, an unknown method, a microbatch below 1. From
        the function: limits that do not fit the parameters, batches whose first axes
        are missing or differ, a mask of the wrong shape, "ghost" on a mesh with
        Explicit axes, for symbolic sizes, or a loss that cannot be split, such as one
        with refs (`jax.new_ref`). "two_pass" with random keys other than threefry's.
        Convolutions of a batch that jit splits over devices, but for "ghost" where
        every kernel is used by itself. A split is not seen if only `in_shardings` of
        jit tells it.
      TypeError: a limit that is not a number, or a shrink that is not a function. From
        the function: parameters that are no floats or complex numbers, places that are
        no ints, arguments by name, and a loss that is not one real number, or lacks the
        aux that `has_aux` says.

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
    cost, 2023 (arXiv 2210.00038). For two passes Lee, Kifer, Scaling up differentially
    private deep learning with fast per-example gradient clipping, 2021 (arXiv
    2009.03106).
    """
    call = "clipped_grad"
    check_flag(f"{call}: mean", mean)
    limits = limits_of(max_norm, f"{call}: max_norm")
    _check_options(call, microbatch, method, len(limits.values))
    shrink = shrink_of(shrink, call)
    weights_of = partial(weigh, limits=limits, shrink=shrink, call=call)

    question = Question(call, loss, argnums, shared_argnums, has_aux)

    def of_batch(*args: Any, mask: Any = None, **named: Any) -> ClippedGrad:
        check_unnamed(call, named)
        of_one, params, batch, size = problem = question.about(args)
        present = _present(mask, size, call)
        groups = limits.group_of_each(params, call)
        kind, width, ghost = choose(problem, method, microbatch)
        run = Run(of_one, weights_of, params, batch, present, width)
        if kind == "ghost" and ghost:
            total, seen = run.in_ghost(ghost, groups)
        elif kind == "two_pass":
            total, seen = run.in_two_passes()
        else:
            total, seen = run.in_one_pass(groups)
        divisor = None
        if mean:
            # Broken examples too. A batch that is all masked gives 0 / 1.
            divisor = jnp.maximum(jnp.sum(present, dtype=jnp.int32), 1)
            total = jax.tree.map(partial(_divided_as, divisor), params, total)
        weights = seen.weights
        return ClippedGrad(
            grads=total,
            # [batch, groups] -> for each limit [batch].
            norms=limits.treedef.unflatten(weights.norms.T),
            factors=limits.treedef.unflatten(weights.factors.T),
            nonfinite=jnp.sum(present & ~weights.counts, dtype=jnp.int32),
            divisor=divisor,
            values=seen.values,
            aux=seen.aux,
        )

    return of_batch


def _divided_as(
    divisor: jax.Array, leaf: jax.Array, total: jax.Array
) -> jax.Array:
    """The total by the divisor, in the dtype of a leaf."""
    if jnp.iscomplexobj(total):
        parts = jnp.real(total), jnp.imag(total)
        real, imag = (
            _divided_as(divisor, jnp.real(leaf), part) for part in parts
        )
        return lax.complex(real, imag)
    wide = np.promote_types(total.dtype, np.float32)
    # Strict dtype promotion does not divide a float by an integer.
    mean = total.astype(wide) / divisor.astype(wide)
    return mean.astype(leaf.dtype)


def _present(mask: Any, size: int, call: str) -> jax.Array:
    if mask is None:
        return jnp.ones(size, bool)
    mask = jnp.asarray(mask)
    if mask.dtype != bool or mask.shape != (size,):
        raise ValueError(
            f"{call}: mask must be bool[{size}], one for each example, got "
            f"{mask.dtype}{list(mask.shape)}."
        )
    return mask


def _check_options(
    call: str, microbatch: Any, method: str, limits: int
) -> None:
    check_microbatch(call, microbatch)
    check_choice(f"{call}: method", method, METHODS)
    if method == "two_pass" and limits > 1:
        raise ValueError(
            f"{call}: method='two_pass' weighs the loss of an example, which has one "
            f"factor, but max_norm has {limits} limits: use another method, or one "
            "limit."
        )
