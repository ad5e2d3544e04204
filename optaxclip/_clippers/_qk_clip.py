"""QK-Clip: shortens the weights of queries and keys whose attention logits are too
large.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.typing import ArrayLike

from .._checks import check_number, check_params, check_state, shown
from .._factors import cast_like
from .._kernel import make_clipper
from .._mesh import typed_as, types_of, varying_as
from .._norms import OwnNorm
from .._state import PLACEHOLDER, ClipState
from .._trees import clipped_leaves, put_back, values_of
from ..rules._constant import Limit
from ..rules._rule import is_rule
from ..rules._without_params import rule_without_params
from ._heads import Attention, Where, find_attentions, logits_of, scale_of

CALL = "qk_clip"


def qk_clip(
    max_logit: Limit = 100.0,
    *,
    queries: Where,
    keys: Where,
    rotary: Where | None = None,
    alpha: ArrayLike = 0.5,
) -> optax.GradientTransformationExtraArgs:
    """Shrinks the query and key weights of each head whose attention logits exceed
    `max_logit`.

        factor = min(1, max_logit / S)        S: the largest logit of a head
        query weights W <- factor^alpha (W + u)
        key weights   W <- factor^(1 - alpha) (W + u)

    It comes last, after the optimizer, and returns the update that leads to these
    weights: u' = sqrt(factor) (W + u) - W. So logits after the step are those that the
    step alone would have led to, times the factor. All else is left alone, and so is a
    head within its limit, bit for bit.

        muon = optax.contrib.muon(0.02)
        optimizer = optax.chain(muon, optaxclip.qk_clip(100.0, queries=..., keys=...))
        updates, state = optimizer.update(grads, state, params, max_logits=max_logits)

    `max_logits` is what the attention of this step reports: for each attention the
    largest logit of each head before the softmax, scaled as the softmax gets it, over
    all of the batch. It is one array of shape [heads], or [layers, heads], or a tree of
    such arrays whose paths begin with those of the attentions. On several devices take
    the maximum over those that share the batch (`lax.pmax`).

        multi-head          each head has its own factor
        grouped queries     the heads that share a key share the smallest of their
                            factors
        MLA                 `rotary` names the rotary queries, which take the whole
                            factor, since the rotary key is shared and stays as it is
        a head with NaN     its weights become NaN. As a rule the gradient is NaN then,
        or inf              and `skip_nonfinite` around the optimizer leaves the step
                            out. It looks at the gradient, and not at logits
        biases              belong to queries and keys like kernels
        QK-norm             makes logits independent of these weights: do not clip it

    Args:
      max_logit: the limit: a number at least 0, a schedule, a rule of
        `optaxclip.rules`, or None to only measure. Kimi K2 has 100.
      queries: where the query weights are: a dict from patterns of paths to their axis
        of heads, such as {"*/query/*": -2} for flax's (features, heads, entries), or to
        a `Heads` where a leaf has more in it than one axis says. Or a function of path
        and leaf that returns either, and None for other leaves.
      keys: where the key weights are, likewise.
      rotary: where rotary queries are whose keys all heads share, likewise.
      alpha: how much of the factor the queries take, in [0, 1]. The keys take the rest.

    Returns:
      A transformation with a `ClipState`, read by `metrics`. The norm is the largest
      logit of each head of the keys, 0 if it is negative. Its name is the path that
      query and key have in common.

    Raises:
      ValueError: a pattern that finds no leaf, a query without a key beside it, heads
        that do not fit, an alpha outside [0, 1], a negative limit, a rule that compares
        norms with weights, or `update` without params or with `max_logits` that do not
        fit the attentions.
      TypeError: a limit or alpha that is not a number.

    Example:
      >>> clipper = optaxclip.qk_clip(20.0, queries={"q": 1}, keys={"k": 1})
      >>> params = {"q": jnp.ones((1, 2)), "k": jnp.ones((1, 2))}
      >>> updates = {"q": jnp.ones((1, 2)), "k": jnp.ones((1, 2))}
      >>> max_logits = jnp.array([80.0, 15.0])
      >>> state = clipper.init(params)
      >>> updates, state = clipper.update(
      ...     updates, state, params, max_logits=max_logits
      ... )
      >>> print(optax.apply_updates(params, updates)["q"], state.clipped)
      [[1. 2.]] [1 0]

    Reference: Kimi Team, Kimi K2: open agentic intelligence, 2025 (arXiv 2507.20534).
    The rule for grouped queries is that of Megatron-LM.
    """
    check_number(f"{CALL}: alpha", alpha)
    # The keys take factor^(1 - alpha): with alpha above 1 they would grow.
    if not isinstance(alpha, Tracer) and np.any(np.asarray(alpha) > 1):
        raise ValueError(
            f"{CALL}: alpha must be at most 1, got {shown(alpha)}."
        )
    # Its norms are logits, which have no weights to be compared with.
    if is_rule(max_logit):
        rule_without_params(max_logit, f"{CALL}: max_logit")
    roles = {"query": queries, "key": keys, "rotary": rotary}
    # The attention has measured its logits already.
    own = OwnNorm(_as_measured)
    kernel = make_clipper(own, max_logit, call=CALL, name="max_logit")

    def init(params: Any) -> Any:
        # `optax.tree_map_params` has no weights in which heads could be found.
        if isinstance(params, PLACEHOLDER):
            return kernel.init(params)
        tree = types_of(clipped_leaves, params)
        types, zeros = jax.tree.leaves(tree), {}
        for name, _, shape, dtype, uses in find_attentions(roles, tree):
            # Typed as the logits will be, which come of the weights.
            zeros[name] = varying_as(
                jnp.zeros(shape, dtype), types[uses[0].leaf]
            )
        return kernel.init(zeros)

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        max_logits: Any = None,
        **_: Any,
    ) -> tuple[Any, Any]:
        check_state(CALL, state, ClipState)
        check_params(CALL, params, "updates")
        if max_logits is None:
            raise ValueError(
                f"{CALL}: max_logits is missing: call update(updates, state, params, "
                "max_logits=...) with the largest attention logit of each head."
            )
        tree = clipped_leaves(updates, CALL)
        attentions = find_attentions(roles, tree)
        logits: Any = logits_of(attentions, max_logits)
        # Its updates would be clipped logits. Its state is that of these.
        new: Any = kernel.update(logits, state)[1]
        # Inside shard_map a state keeps its types from step to step, which `lax.scan`
        # compares.
        new = jax.tree.map(lambda x, y: typed_as(x, jax.typeof(y)), new, state)
        # Bit for bit, also where a logit is NaN.
        if max_logit is None:
            return updates, new
        weights = jax.tree.leaves(values_of(CALL, "params", tree, params))
        clipped = _clip(tuple(attentions), alpha, tree, weights, new)
        return put_back(clipped, updates), new

    return optax.GradientTransformationExtraArgs(init, update)


def _as_measured(logits: Any) -> Any:
    """The norms of logits that are measured already."""
    return logits


# Jitted at module level, so that clippers with equal settings share a program.
@partial(jax.jit, static_argnums=0)
def _clip(
    attentions: tuple[Attention, ...],
    alpha: Any,
    tree: Any,
    weights: list[Any],
    state: ClipState,
) -> Any:
    """The updates that lead to the weights times their scales."""
    leaves, treedef = jax.tree.flatten(tree)
    known, scales = state.by_name(), {}
    for attention in attentions:
        # Of [heads] or [layers, heads], also where there is one head.
        factor = known[attention.name].factor.reshape(attention.shape)
        power = jnp.asarray(alpha).astype(factor.dtype)
        query = factor**power
        # The quotient, so that the product is the factor to one rounding.
        key = factor / jnp.where(query == 0, 1, query)
        # With alpha = 1 the keys stay, also where the factor is 0.
        key = jnp.where((power == 1) & (factor == 0), 1, key)
        # All heads share the rotary key, which stays as it is, so the rotary queries
        # take the whole factor.
        powers = {"query": query, "key": key, "rotary": factor}
        for use in attention.uses:
            scale = scale_of(use, leaves[use.leaf].ndim, powers[use.role])
            # Queries and keys may share a leaf. Each scale is 1 outside its own heads.
            scales[use.leaf] = scale * scales.get(use.leaf, 1)
    for number, scale in scales.items():
        leaves[number] = _scaled(leaves[number], weights[number], scale)
    return treedef.unflatten(leaves)


def _scaled(update: jax.Array, weight: Any, scale: jax.Array) -> jax.Array:
    """scale (weight + update) - weight, without its cancellation."""
    wide = np.promote_types(update.dtype, scale.dtype)
    scale = scale.astype(wide)
    # Exact where the scale is 1. The update itself is read once: an operand of two
    # operations XLA on a CPU writes to memory instead of computing it in the same loop.
    weight = jnp.asarray(weight).astype(wide)
    taken = jnp.where(scale == 1, 0, (1 - scale) * weight)
    return cast_like(scale * jnp.asarray(update).astype(wide) - taken, update)
