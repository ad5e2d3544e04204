"""A function transformation like `jax.grad`, whose gradient is a mean of gradients that
were clipped one by one.

    one pass      per microbatch: all its per-example gradients, their norms, their
                  weighted sum
    two passes    norms first, microbatch by microbatch; then the gradient of sum_i f_i
                  loss_i with the factors f_i held fixed, which is the same sum

Neither needs memory that grows with the batch beyond a few numbers for each example.
The second way keeps no per-example gradient until the norm of the whole is known, at
the cost of another forward and backward pass. Dense layers, whose per-example gradient
is an outer product, gain most: XLA on CPU never stores it, and two passes take half the
time and a tenth of the memory of one, or less. A convolution and a recurrent network
took two thirds to three quarters of the memory and 0.8 to 2.6 times the time.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import sharding
from .._core._factors import stretch
from ..shrinks import Shrink, hard
from .microbatches import in_microbatches, stand_in
from .weights import Weights, batch_size, limits_of, weigh, weighted_sum

Places = int | Sequence[int]
Loss = Callable[[Any, Any], tuple[jax.Array, Any]]  # (params, example) -> (value, aux)


class ClippedGrad(NamedTuple):
    """The gradient, and what was seen of each example. `norms` and `factors` are trees
    like `max_norm`: one array, where that is one number.
    """

    # like the parameters, in their dtypes: the mean, or the sum, of the clipped
    # gradients
    grads: Any
    # float32[batch]: norms before clipping; 0 where masked, NaN or inf where broken
    norms: Any
    # float32[batch]: what each example's gradient was multiplied by; 0 where masked or
    # broken
    factors: Any
    nonfinite: (
        jax.Array
    )  # int32[]: examples that were left out because a norm of theirs is NaN or inf
    values: jax.Array  # float[batch]: the loss of each example
    # [batch, ...]: what the loss returned beside its value; None without has_aux
    aux: Any


class _Seen(NamedTuple):
    """What was found out about the examples."""

    weights: Weights
    values: jax.Array
    aux: Any


def clipped_grad(
    loss: Callable[..., Any],
    max_norm: Any,
    *,
    argnums: Places = 0,
    batch_argnums: Places = 1,
    has_aux: bool = False,
    shrink: Shrink | None = None,
    microbatch: int | None = None,
    two_pass: bool = False,
    mean: bool = True,
) -> Callable[..., ClippedGrad]:
    """Makes a function that clips the gradient of each example and averages: (1 / B)
    sum_i f_i g_i with f_i = shrink(|g_i|, C) / |g_i|.

    It bounds what one example can do; it is no privacy accountant and adds no noise.
    For differential privacy see jax_privacy
    (https://github.com/google-deepmind/jax_privacy).

    Args:
      loss: the loss of ONE example, `loss(params, example) -> scalar`, or `(scalar,
        aux)` with `has_aux`.
      max_norm: the limit C, a number at least 0, or None for none; or a tree prefix of
        the parameters with a limit for each part, whose norm is then taken by itself.
      argnums: which arguments to differentiate, as in `jax.grad`.
      batch_argnums: which arguments are batches: pytrees of arrays whose first axis
        counts examples. The others are the same for all examples.
      has_aux: the loss returns something beside its value.
      shrink: from norm and limit to the norm that is let through: None or `hard`,
        `normalize` (AUTO-V), `auto_s()`, `psac()`, `smooth()`, `drop`, or your own.
      microbatch: how many examples are differentiated at once; None for the whole
        batch. It need not divide the batch.
      two_pass: less memory, and for other than dense layers more time, see the module.
        The factors are rounded to the dtype of the loss, so let that be float32.
        Factors below 1.2e-38 count as 0 there.
      mean: divide by the number of examples that are not masked; False gives the sum.

    Returns:
      A function of the arguments of `loss`, with batches for examples, and of `mask=`:
      bool[batch], False for padding. It returns a `ClippedGrad`. Sums are in float32.
      Jit it. Inside shard_map it sees the examples of its own device: take the sum, and
      `lax.psum` it.

    Raises:
      TypeError, ValueError: a limit that cannot be, several limits with `two_pass`, a
        microbatch below 1; and from the function: limits that do not fit the
        parameters, a batch or mask of the wrong shape.

    | an example that | contributes | divides the mean | |---|---|---| | has a norm
    within the limit | its gradient | yes | | has the gradient zero | 0, never 0 / 0 |
    yes | | has a NaN or inf in its gradient | 0, never 0 * NaN, and is counted in
    `nonfinite` | yes | | is masked, whatever it holds | 0 | no; all masked: zeros |

    Example:
      >>> import optaxclip
      >>> def loss(w, x):
      ...     return 0.5 * (w - x) ** 2
      >>> grad = optaxclip.per_example.clipped_grad(loss, 1.0)
      >>> result = grad(jnp.array(3.0), jnp.array([2.5, 1.0, 4.0, 3.0]))
      >>> print(result.grads, result.norms, result.factors)
      0.125 [0.5 2.  1.  0. ] [1.  0.5 1.  1. ]

    Reference: Abadi et al., Deep learning with differential privacy, 2016 (arXiv
    1607.00133); for the two passes Lee, Kifer, Scaling up differentially private deep
    learning with fast per-example gradient clipping, 2021 (arXiv 2009.03106).
    """
    call = "clipped_grad"
    limits = limits_of(max_norm, f"{call}: max_norm")
    _check(call, microbatch, two_pass, len(limits.values))

    def of_batch(*args: Any, mask: Any = None) -> ClippedGrad:
        _check_apart(call, argnums, batch_argnums, len(args))
        batch = jax.tree.map(jnp.asarray, _taken(args, batch_argnums))
        present = _present(mask, batch_size(batch, f"{call}: the batch"), call)
        params = jax.tree.map(
            lambda leaf: _varying_as(batch, jnp.asarray(leaf)), _taken(args, argnums)
        )

        def one(params: Any, example: Any) -> tuple[jax.Array, Any]:
            found = loss(*_put(_put(args, argnums, params), batch_argnums, example))
            return found if has_aux else (found, None)

        look = partial(
            _look,
            one,
            params,
            partial(weigh, limits=limits, shrink=shrink or hard, call=call),
        )
        if two_pass:
            total, seen = _two_passes(one, look, params, batch, present, microbatch)
        else:
            total, seen = _one_pass(
                look,
                limits.for_leaves(params, call),
                params,
                batch,
                present,
                microbatch,
            )
        divisor = jnp.maximum(jnp.sum(present), 1) if mean else 1
        return ClippedGrad(
            grads=jax.tree.map(
                lambda total, leaf: (total / divisor).astype(leaf.dtype), total, params
            ),
            norms=limits.treedef.unflatten(seen.weights.norms),
            factors=limits.treedef.unflatten(seen.weights.scales),
            nonfinite=jnp.sum(present & ~seen.weights.counts, dtype=jnp.int32),
            values=seen.values,
            aux=seen.aux,
        )

    return of_batch


def _look(
    one: Loss,
    params: Any,
    weights_of: Callable[..., Weights],
    example: Any,
    present: jax.Array,
) -> tuple[Any, _Seen]:
    """The per-example gradients of a microbatch, and what there is to know about
    them.
    """
    (values, aux), grads = jax.vmap(jax.value_and_grad(one, has_aux=True), (None, 0))(
        params, example
    )
    return grads, _Seen(weights_of(grads, present=present), values, aux)


def _one_pass(
    look: Callable[..., Any],
    places: list[int],
    params: Any,
    batch: Any,
    present: jax.Array,
    microbatch: int | None,
) -> tuple[Any, _Seen]:
    def step(
        total: Any, here: jax.Array, example: Any, present: jax.Array
    ) -> tuple[Any, _Seen]:
        grads, seen = look(example, present & here)
        return _plus(
            total,
            weighted_sum(grads, seen.weights.factors, seen.weights.counts, places),
        ), seen

    return in_microbatches(step, _zeros(params, batch), (batch, present), microbatch)


def _two_passes(
    one: Loss,
    look: Callable[..., Any],
    params: Any,
    batch: Any,
    present: jax.Array,
    microbatch: int | None,
) -> tuple[Any, _Seen]:
    def first(
        nothing: Any, here: jax.Array, example: Any, present: jax.Array
    ) -> tuple[Any, _Seen]:
        return nothing, look(example, present & here)[1]

    def second(
        total: Any, here: jax.Array, example: Any, factor: jax.Array, counts: jax.Array
    ) -> tuple[Any, None]:
        counts = counts & here
        example = stand_in(example, counts)
        values, pull = jax.vjp(
            lambda params: jax.vmap(one, (None, 0))(params, example)[0], params
        )
        # Here the factor must be one number, so the range of its dtype is the end.
        scale = stretch(jnp.ones_like(factor), factor)
        scale = jnp.minimum(scale, jnp.finfo(scale.dtype).max)
        (grads,) = pull(jnp.where(counts, scale, 0).astype(values.dtype))
        return _plus(
            total, jax.tree.map(lambda leaf: jnp.where(jnp.any(counts), leaf, 0), grads)
        ), None

    _, seen = in_microbatches(first, None, (batch, present), microbatch)
    total, _ = in_microbatches(
        second,
        _zeros(params, batch),
        (batch, seen.weights.factors[0], seen.weights.counts),
        microbatch,
    )
    return total, seen


def _zeros(params: Any, batch: Any) -> Any:
    """Where gradients are summed: float32 or wider, so that many small 16-bit gradients
    are not lost beside their sum.
    """
    return jax.tree.map(
        lambda leaf: _varying_as(
            (batch, leaf),
            jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32)),
        ),
        params,
    )


def _plus(total: Any, term: Any) -> Any:
    return jax.tree.map(
        lambda total, term: total + term.astype(total.dtype), total, term
    )


def _varying_as(tree: Any, value: jax.Array) -> jax.Array:
    """The value, typed as differing between devices wherever the tree does. In
    shard_map the gradient by parameters of any other type comes summed over devices,
    and the examples in it cannot be told apart.
    """
    for leaf in jax.tree.leaves(tree):
        value = varying_as(value, jax.typeof(leaf))
    return value


def _present(mask: Any, size: int, call: str) -> jax.Array:
    if size == 0:
        raise ValueError(
            f"{call}: the batch is empty: give at least one example, masked if need be."
        )
    if mask is None:
        return jnp.ones(size, bool)
    mask = jnp.asarray(mask)
    if mask.dtype != bool or mask.shape != (size,):
        raise ValueError(
            f"{call}: mask must be bool[{size}], one for each example, got "
            f"{mask.dtype}{list(mask.shape)}."
        )
    return mask


def _taken(args: tuple[Any, ...], places: Places) -> Any:
    return (
        args[places]
        if isinstance(places, int)
        else tuple(args[place] for place in places)
    )


def _put(args: tuple[Any, ...], places: Places, values: Any) -> tuple[Any, ...]:
    """The arguments with values in these places."""
    new = list(args)
    for place, value in (
        [(places, values)] if isinstance(places, int) else zip(places, values)
    ):
        new[place] = value
    return tuple(new)


def _check(call: str, microbatch: Any, two_pass: bool, limits: int) -> None:
    if microbatch is not None and (
        isinstance(microbatch, bool)
        or not isinstance(microbatch, int)
        or microbatch < 1
    ):
        raise ValueError(
            f"{call}: microbatch must be a number of examples, at least 1, or None, "
            f"got {microbatch!r}."
        )
    if two_pass and limits > 1:
        raise ValueError(
            f"{call}: two_pass=True weighs the loss of an example, which has one "
            f"factor, but max_norm has {limits} limits: use two_pass=False, or one "
            "limit."
        )


def _check_apart(call: str, argnums: Places, batch_argnums: Places, count: int) -> None:
    """Refuses places that the call does not have, and an argument in two roles."""
    roles = {"argnums": argnums, "batch_argnums": batch_argnums}
    taken: list[int] = []
    for name, places in roles.items():
        for place in [places] if isinstance(places, int) else places:
            if not -count <= place < count:
                raise ValueError(
                    f"{call}: {name}={places!r}, but the function was called with "
                    f"{count} positional arguments."
                )
            if place % count in taken:
                raise ValueError(
                    f"{call}: argnums={argnums!r} and batch_argnums={batch_argnums!r} "
                    "must be different arguments."
                )
            taken.append(place % count)
