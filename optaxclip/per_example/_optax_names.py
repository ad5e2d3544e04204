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

from .. import _trees as trees
from .._checks import check_flag, check_limit
from ..shrinks import hard
from ._passes import Limits


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
    limit = _limit(f"{call}: l2_norm_clip", l2_norm_clip)
    total, clipped = _clip(call, grads, [limit])
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
      TypeError: a limit that is not a real number, or `uniform` that is not a bool.

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
    check_flag(f"{call}: uniform", uniform)
    limit = _limit(f"{call}: global_l2_norm_clip", global_l2_norm_clip)
    leaves, treedef = jax.tree.flatten(grads)
    # D_i, of one example: the first axis counts examples.
    sizes = [1 if uniform else math.prod(jnp.shape(leaf)[1:]) for leaf in leaves]
    # At least 1, since leaves may all be empty.
    total = max(sum(sizes), 1)
    # Their squares sum to C^2, so that all leaves together stay within C.
    limits = [limit * math.sqrt(size / total) for size in sizes]
    sums, clipped = _clip(call, grads, limits)
    return sums, treedef.unflatten(clipped)


def _limit(argument: str, limit: Any) -> Any:
    """The limit, in enough bits for its product with a share of it."""
    # Refuses None too, which elsewhere is no limit.
    check_limit(argument, limit, is_scalar=True)
    if not isinstance(limit, jax.Array):
        return float(limit)
    return limit.astype(jnp.result_type(float))


def _clip(call: str, grads: Any, limits: list[Any]) -> tuple[Any, Any]:
    """The weighted sum, and for each limit how many examples were shortened by it."""
    entries, treedef = jax.tree.flatten_with_path(grads)
    shapes = {trees.name(path) or "it": jnp.shape(x) for path, x in entries}
    # Without arrays the number of examples is not known.
    if not shapes:
        return grads, [jnp.zeros((), jnp.int32) for _ in limits]
    size, *others = {shape[:1] for shape in shapes.values()}
    if others or not size:
        raise ValueError(
            f"{call}: grads must be arrays whose first axis counts examples, of one "
            f"size, got the shapes {shapes}."
        )
    leaves = []
    for _, leaf in entries:
        leaf = jnp.asarray(leaf)
        # Integers as float32, as in optax. Norms leave out integers.
        is_float = jnp.issubdtype(leaf.dtype, jnp.inexact)
        leaves.append(leaf if is_float else leaf.astype(jnp.float32))
    # One for all, or one for each.
    groups = [number % len(limits) for number in range(len(leaves))]
    present = jnp.ones(size, bool)
    weights = Limits(call, limits, hard, groups=groups).weigh(leaves, present)
    # The factor of a broken example is 0, so that it counts as clipped.
    clipped = jnp.sum(weights.factors < 1, axis=0, dtype=jnp.int32)
    sums = list(map(weights.total, leaves, groups))
    return treedef.unflatten(sums), list(clipped)
