"""The per-example clippers of optax, from gradients that carry a leading batch axis:
`jax.vmap(jax.grad(loss), in_axes=(None, 0))(params, batch)`.

They give what optax gives, except that norms are float32 for every dtype, any tree
will do, and an example with a NaN or an inf contributes nothing and is counted as
clipped (in optax the whole sum becomes NaN and nothing is counted). All gradients are
in memory at once. `clipped_grad` needs no more than a microbatch of them.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from .._checks import check_limit
from ..shrinks import hard
from ._weights import (
    Limits,
    batch_size,
    limits_of,
    numbered,
    weigh,
    weighted_sum,
)


def per_example_global_norm_clip(
    grads: Any, l2_norm_clip: Any
) -> tuple[Any, jax.Array]:
    """Clips the gradient of each example and sums: sum_i g_i min(1, C / |g_i|).

    Args:
      grads: a pytree of arrays whose first axis counts examples.
      l2_norm_clip: the limit C, a number at least 0.

    Returns:
      (sum, number clipped): the sum has no batch axis and is float32, or wider where a
      leaf is. The number is int32[].

    Raises:
      ValueError: a leaf without a batch axis, batch axes of different sizes, or a limit
        that is negative or NaN.
      TypeError: a limit that is not a real number.

    | an example whose gradient | contributes | is counted |
    |---|---|---|
    | is zero | 0 | no, at limit 0 neither |
    | has a norm within the limit | its gradient | no |
    | has a NaN or an inf, or a norm above 3.4e38 | 0, also at limit inf | yes |

    Example:
      >>> nan = jnp.nan
      >>> examples = [[0.0, 0.0, 0.0], [0.0, 3.0, 4.0], [4.0, 0.0, 3.0]]
      >>> examples.append([3.0, 4.0, nan])
      >>> clip = optaxclip.per_example.per_example_global_norm_clip
      >>> total, clipped = clip([jnp.array(examples)], 2.5)
      >>> print(total[0], clipped)
      [2.  1.5 3.5] 3

    Reference: Abadi et al., Deep learning with differential privacy, 2016 (arXiv
    1607.00133).
    """
    call = "per_example_global_norm_clip"
    argument = f"{call}: l2_norm_clip"
    limit = _number(argument, l2_norm_clip)
    total, clipped = _clip(grads, limits_of(limit, argument), call)
    return total, clipped[0]


def per_example_layer_norm_clip(
    grads: Any, global_l2_norm_clip: Any, uniform: bool = True
) -> tuple[Any, Any]:
    """Clips each leaf of each example's gradient by its own norm, and sums.

    The limits of the leaves are such that all leaves together stay within C.

    Args:
      grads: a pytree of arrays whose first axis counts examples.
      global_l2_norm_clip: the limit C for all leaves together, a number at least 0.
      uniform: True gives each of the K leaves C / sqrt(K), False gives it C sqrt(D_i /
        D), by its share of the D parameters.

    Returns:
      (sums, numbers clipped): two trees of the structure of `grads`. The sums have no
      batch axis and are float32, or wider where a leaf is. The numbers are int32[]. An
      example with a NaN or an inf anywhere contributes to no leaf and is counted in
      all.

    Raises:
      ValueError: a leaf without a batch axis, batch axes of different sizes, or a limit
        that is negative or NaN.
      TypeError: a limit that is not a real number.

    Example:
      >>> weights = jnp.array([[0.0, 3.0, 4.0], [4.0, 0.0, 3.0]])
      >>> grads = {"w": weights, "b": jnp.array([1.0, 2.0])}
      >>> clip = optaxclip.per_example.per_example_layer_norm_clip
      >>> total, clipped = clip(grads, 2.5 * 2**0.5)
      >>> print(total["w"], total["b"], clipped["w"], clipped["b"])
      [2.  1.5 3.5] 3.0 2 0

    Reference: McMahan, Ramage, Talwar, Zhang, Learning differentially private recurrent
    language models, 2018 (arXiv 1710.06963).
    """
    call = "per_example_layer_norm_clip"
    limit = _number(f"{call}: global_l2_norm_clip", global_l2_norm_clip)
    entries, treedef = jax.tree_util.tree_flatten_with_path(grads)
    # D_i, of one example: the first axis counts examples.
    sizes = [math.prod(jnp.shape(leaf)[1:]) for _, leaf in entries]
    if uniform:
        sizes = [1] * len(sizes)
    # At least 1, since leaves may all be empty.
    total = max(sum(sizes), 1)
    # Their squares sum to C^2, so that all leaves together stay within C.
    values = [limit * math.sqrt(size / total) for size in sizes]
    limits = Limits(values, numbered([path for path, _ in entries]), treedef)
    sums, clipped = _clip(grads, limits, call)
    return sums, treedef.unflatten(clipped)


def _number(argument: str, limit: Any) -> Any:
    """The limit, in enough bits for its product with a share of it."""
    # Refuses None too, which limits_of would take for no limit.
    check_limit(argument, limit)
    limits_of(limit, argument)
    if not isinstance(limit, jax.Array):
        return float(limit)
    return limit.astype(jnp.result_type(float))


def _clip(
    grads: Any, limits: Limits, call: str
) -> tuple[Any, list[jax.Array]]:
    """The weighted sum, and for each limit how many examples were shortened by it."""
    grads = jax.tree.map(_floating, grads)
    # Without arrays the number of examples is not known.
    if not jax.tree.leaves(grads):
        return grads, [jnp.zeros((), jnp.int32) for _ in limits.values]
    present = jnp.ones(batch_size(grads, f"{call}: grads"), bool)
    weights = weigh(grads, present, limits=limits, shrink=hard, call=call)
    # The factor of a broken example is 0, so that it counts as clipped.
    clipped = jnp.sum(weights.factors < 1, axis=0, dtype=jnp.int32)
    total = weighted_sum(grads, weights, limits.group_of_each(grads, call))
    return total, list(clipped)


def _floating(leaf: Any) -> jax.Array:
    """Integers as float32, as in optax. Norms leave out integer leaves, which elsewhere
    are not gradients.
    """
    leaf = jnp.asarray(leaf)
    if jnp.issubdtype(leaf.dtype, jnp.inexact):
        return leaf
    return leaf.astype(jnp.float32)
