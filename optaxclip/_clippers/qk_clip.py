"""QK-Clip: shortens the weights of queries and keys whose attention logits are too
large.

An attention is the leaves below the longest common path of a query leaf and a key leaf:
layer_0/attention/query/kernel and layer_0/attention/key/kernel share layer_0/attention.
A leaf may hold queries and keys, such as GPT-2's h_0/attn/c_attn/kernel. Its attention
is the leaf alone. If a fused bias stands beside it, the attention is h_0/attn/c_attn.
A query alone in layer_0 and a key alone in layer_1 are an attention too, "".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.tree_util import KeyPath
from jax.typing import ArrayLike

from .. import _trees as trees
from .._arguments.checks import check_number, check_state, shown
from .._arguments.updates import weights_of
from .._devices.mesh_types import resharded, typed_as, types_of, varying_as
from .._norm_clipper import make_clipper
from .._norms.axes import axes_within, check_no_bool, other_axes
from .._norms.moduli import wide_dtype
from .._norms.norms import UserNorm
from .._numbers import norm_dtype
from .._state.interop import is_placeholder
from .._state.state import ClipState
from .._trees import PyTree, Shape, leaves_to_clip, put_back
from ..rules._limits import Limit, rule_of_norm_alone

CALL = "qk_clip"
Range = tuple[int | None, int | None]


class Heads(NamedTuple):
    """Says where a leaf has its heads, for `qk_clip`.

    Args:
      axis: the axis of the leaf that counts heads. Where logits have layers too, one
        axis for each of their dimensions, such as (0, -2).
      width: entries of that axis in one head: 1 for an axis of heads, the size of a
        head where heads and their entries share the axis, as in (768, 768).
      heads: which heads of the leaf: (start, stop) as in a slice, without stop.
        (None, None) is all.
      entries: which entries of a head: (start, stop) within `width`. If `width` is 1,
        along the axis after the axis of heads.

    Example:
      >>> clipper = optaxclip.qk_clip(
      ...     100.0,
      ...     queries={"*/c_attn": optaxclip.Heads(-1, width=64, heads=(0, 12))},
      ...     keys={"*/c_attn": optaxclip.Heads(-1, width=64, heads=(12, 24))},
      ... )
      >>> params = {"layer": {"c_attn": jnp.zeros((768, 3 * 768))}}
      >>> print(clipper.init(params).norm.shape)
      (12,)
    """

    axis: int | tuple[int, ...]
    width: int = 1
    heads: Range = (None, None)
    entries: Range = (None, None)


# Which leaves have heads, and where: {pattern of paths: axis or Heads}, or a function
# of path and leaf.
HeadsByPath = Mapping[str, Any] | Callable[[str, Any], Any]
Path = tuple[str, ...]


def qk_clip(
    max_logit: Limit = 100.0,
    *,
    queries: HeadsByPath,
    keys: HeadsByPath,
    rotary: HeadsByPath | None = None,
    alpha: ArrayLike = 0.5,
) -> optax.GradientTransformationExtraArgs:
    """Shrinks the query and key weights of each head whose attention logits exceed
    `max_logit`.

        factor = min(1, max_logit / S)        S: the largest logit of a head
        query weights W <- factor^alpha (W + u)
        key weights   W <- factor^(1 - alpha) (W + u)

    It comes last, after the optimizer, and returns the update that leads to these
    weights: u' = scale (W + u) - W. The scale is the power of the factor above, and the
    factor itself for rotary queries. So logits after the step are the logits that the
    optimizer alone would have led to, times the factor. Other weights keep their
    updates, and so do heads within the limit, bit for bit.

        muon = optax.contrib.muon(0.02)
        optimizer = optax.chain(muon, optaxclip.qk_clip(100.0, queries=..., keys=...))
        updates, state = optimizer.update(grads, state, params, max_logits=max_logits)

    `max_logits` is what the attention of this step reports: for each attention the
    largest logit of each head before the softmax, scaled as the softmax gets it, over
    all of the batch. It is one array of shape [heads], or [layers, heads], or a tree
    with one array for each attention: under its path, under a longer path (as flax's
    `sow` has it), or under the beginning of its path. On several devices take the
    maximum over the devices that each hold a part of the batch (`lax.pmax`).

        multi-head          each head has its own factor
        grouped queries     the heads that share a key share the smallest of their
                            factors
        MLA                 `rotary` names the rotary queries, which take the whole
                            factor, since the rotary key is shared and stays as it is
        NaN or inf logits   the weights of the head become NaN. `skip_nonfinite` does
                            not see that, since it looks at gradients. The
                            gradients are usually NaN too, and the step is left out
        biases              belong to queries and keys like kernels, also where one leaf
                            holds queries and keys
        QK-norm             makes logits independent of these weights: do not clip it

    Args:
      max_logit: the limit: a number at least 0, a schedule, a rule of
        `optaxclip.rules`, or None to only measure. Kimi K2 has 100.
      queries: where the query weights are: a dict from patterns of paths to their axis
        of heads, such as {"*/query/*": -2} for flax's (features, heads, entries), or to
        a `Heads` where a leaf has more in it than one axis says. The first pattern
        that matches a leaf counts, and `*` also matches "/". Or a function of path and
        leaf that returns either, and None for other leaves.
      keys: where the key weights are, likewise.
      rotary: where rotary queries are whose keys all heads share, likewise.
      alpha: how much of the factor the queries take, in [0, 1]. The keys take the rest.

    Returns:
      A transformation with a `ClipState`, read by `metrics`. It has a norm for each
      head of the keys: the largest logit of the query heads that use it, at least 0.
      The name of an attention is the path that its query and key have in common.

    Raises:
      ValueError: a pattern that finds no leaf, a query without a key in its attention,
        an axis or heads that the leaf does not have, entries of a leaf with two roles,
        an alpha outside [0, 1], a negative limit, a rule that compares norms with
        weights, or `update` without params or with `max_logits` that do not fit the
        attentions.
      TypeError: a limit or an alpha that is not a number, a bool as an axis, or
        `queries`, `keys` or `rotary` that is neither a dict nor a function.

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
    # With alpha above 1 the keys, which take factor^(1 - alpha), would grow.
    check_number(f"{CALL}: alpha", alpha, highest=1, is_scalar=True)
    # Logits have no norm of weights to be compared with.
    rule_of_norm_alone(max_logit, f"{CALL}: max_logit")
    roles = {"queries": queries, "keys": keys}
    if rotary is not None:
        roles["rotary"] = rotary
    # Nothing is measured: the norms are the logits that the attentions report, in a
    # dict from the name of an attention to its heads.
    norm_clipper = make_clipper(
        UserNorm(dict), max_logit, call=CALL, limit_argument="max_logit"
    )

    def init(params: PyTree) -> Any:
        # `optax.tree_map_params` has no weights in which heads could be found.
        if is_placeholder(params):
            return norm_clipper.init(params)
        tree = types_of(partial(leaves_to_clip, call=CALL), params)
        types = jax.tree.leaves(tree)
        zeros_of_name = {}
        for attention in _attentions_of(roles, tree):
            # Logits are computed from the weights, so they vary over the same devices.
            weights_type = types[attention.leaves[0].leaf_index]
            logits = jnp.zeros(attention.norm_shape, attention.norm_dtype)
            zeros_of_name[attention.name] = varying_as(logits, weights_type)
        return norm_clipper.init(zeros_of_name)

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: object
    ) -> Any:
        check_state(CALL, state, ClipState)
        tree = leaves_to_clip(updates, CALL)
        weights = jax.tree.leaves(weights_of(CALL, tree, params))
        attentions = _attentions_of(roles, tree)
        logits: Any = _logits_of(attentions, extra_args.get("max_logits"))
        # This clips the logits themselves. Only the state is used.
        new_state: Any = norm_clipper.update(logits, state)[1]
        # Inside shard_map a state keeps its types from step to step, which `lax.scan`
        # compares.
        new_state = jax.tree.map(
            lambda new, old: typed_as(new, jax.typeof(old)), new_state, state
        )
        clipped = _clipped_updates(
            tuple(attentions), alpha, tree, weights, state=new_state
        )
        return put_back(clipped, updates), new_state

    return optax.GradientTransformationExtraArgs(init, update)


class AttentionLeaf(NamedTuple):
    """A leaf of queries or keys in an attention. Where it holds both, each has its own
    record.
    """

    leaf_index: int  # in the tree
    path: Path
    rank: int
    role: str  # "queries", "keys" or "rotary"
    layout: Heads
    layer_axes: tuple[int, ...]
    head_axes: tuple[int, ...]  # of heads, and of their entries if these have their own
    selected_shape: Shape  # layers, and the heads that `layout.heads` selects
    all_head_count: int  # heads of the leaf
    all_entry_count: int  # entries of a head, of which `layout.entries` selects some


class Attention(NamedTuple):
    """The leaves of one attention."""

    name: str
    path: Path
    norm_shape: Shape  # layers, and heads of keys
    norm_dtype: Any
    leaves: tuple[AttentionLeaf, ...]


# Jitted at module level, so that clippers with equal settings share a program.
@partial(jax.jit, static_argnums=0)
def _clipped_updates(
    attentions: tuple[Attention, ...],
    alpha: ArrayLike,
    tree: PyTree,
    weights: list[Array],
    state: PyTree,
) -> Any:
    """The updates that lead to scale (weight + update). `weights` has the weight of
    each leaf of `tree`, which has the updates.
    """
    updates, treedef = jax.tree.flatten(tree)
    entry_by_name = state.by_name()
    scale_of_index: dict[int, Array] = {}
    for attention in attentions:
        # The state has a vector for all layers and heads of the attention. Here it is
        # [heads] or [layers, heads].
        entry = entry_by_name[attention.name]
        factors = entry.factor.reshape(attention.norm_shape)
        power = jnp.asarray(alpha).astype(factors.dtype)
        # All heads share the rotary key, which stays as it is, so the rotary queries
        # take the whole factor.
        powers = {"queries": power, "keys": 1 - power, "rotary": 1}
        for leaf in attention.leaves:
            factors_of_role = factors ** powers[leaf.role]
            # NaN ** 0 is 1, but a broken head must break its queries and its keys.
            factors_of_role = jnp.where(jnp.isnan(factors), factors, factors_of_role)
            scale = _scale_of(leaf, factors_of_role)
            # Queries and keys may share a leaf. Each scale is 1 outside its heads.
            other_scale = scale_of_index.get(leaf.leaf_index, 1)
            scale_of_index[leaf.leaf_index] = scale * other_scale
    for index, scale in scale_of_index.items():
        updates[index] = _update_of_scaled_weight(updates[index], weights[index], scale)
    return treedef.unflatten(updates)


def _scale_of(leaf: AttentionLeaf, factors: Array) -> Array:
    """The numbers that a leaf is multiplied by, 1 where it has no query and no key.
    They broadcast to the leaf.

    `factors` are [*layers, heads of the keys].
    """
    *layer_sizes, selected_count = leaf.selected_shape
    # One key may have several heads of queries, side by side.
    factors = jnp.repeat(factors, selected_count // factors.shape[-1], axis=-1)
    shape = (*layer_sizes, leaf.all_head_count, leaf.all_entry_count)
    heads = slice(*leaf.layout.heads)
    entries = slice(*leaf.layout.entries)
    ones = jnp.ones(shape, factors.dtype)
    scale = ones.at[..., heads, entries].multiply(factors[..., None])
    # In the leaf heads and their entries may share an axis.
    if len(leaf.head_axes) == 1:
        scale = scale.reshape((*scale.shape[:-2], -1))
    # The axes in the order of the leaf, with size 1 on all of its other axes.
    axes = leaf.layer_axes + leaf.head_axes
    scale = scale.transpose(np.argsort(axes))
    return jnp.expand_dims(scale, other_axes(axes, leaf.rank))


def _update_of_scaled_weight(update: Array, weight: ArrayLike, scale: Array) -> Array:
    """scale (weight + update) - weight, without its cancellation."""
    wide = wide_dtype(update)
    scale = scale.astype(wide)
    # Where the scale is 1 the result is the update, bit for bit. `update` is read once:
    # XLA on a CPU writes an operand of two operations to memory, instead of computing
    # it in the same loop.
    weight = jnp.asarray(weight).astype(wide)
    decrease = jnp.where(scale == 1, 0, (1 - scale) * weight)
    return (scale * update.astype(wide) - decrease).astype(update.dtype)


# ------------------------------------------------------------- the logits of attentions


def _logits_of(attentions: list[Attention], max_logits: PyTree) -> dict[str, Array]:
    """For each attention, by name, the largest logit of each head of its keys, at
    least 0.

    Raises:
      ValueError: an attention without logits, with several, or with logits of another
        shape.
    """
    logits_by_name = {}
    array_by_path = _array_by_path(attentions, max_logits)
    for attention in attentions:
        shape = attention.norm_shape
        logits = jnp.atleast_1d(array_by_path[attention.path])
        if not _is_grouped(logits.shape, shape) or logits.shape[-1] == 0:
            raise ValueError(
                f"{CALL}: max_logits of the attention {attention.name!r} must have "
                f"the shape {shape}, or a multiple of its last number where several "
                f"queries share a key, got {logits.shape}: take the maximum over batch "
                "and positions, and name an axis of layers too: Heads((layer axis, "
                "head axis))."
            )
        # [..., heads of queries] -> [..., heads of keys, queries that share it]
        logits = resharded(logits).astype(attention.norm_dtype).reshape((*shape, -1))
        largest = jnp.max(logits, axis=-1)
        # XLA on a CPU drops NaN from a maximum of many floats: seen for 61 layers with
        # 128 keys of 8 queries each.
        has_nan = jnp.any(jnp.isnan(logits), axis=-1)
        largest = jnp.where(has_nan, jnp.nan, largest)
        # Norms are at least 0, and a negative logit is within every limit.
        logits_by_name[attention.name] = jnp.maximum(largest, 0)
    return logits_by_name


def _array_by_path(
    attentions: list[Attention], max_logits: PyTree
) -> dict[Path, Array]:
    """The array of each attention, by the path of the attention.

    Raises:
      ValueError: an attention that has no array of its own, or an array too many.
    """
    attention_paths = [attention.path for attention in attentions]
    paths = []
    array_by_path = {}
    for key_path, array in jax.tree.leaves_with_path(max_logits):
        path = _path_names(key_path)
        paths.append(path)
        attention_path = _attention_of_array(path, attention_paths)
        if attention_path is not None:
            array_by_path[attention_path] = array
    # No attention has two arrays, and each has one.
    if not len(array_by_path) == len(paths) == len(attentions):
        path_names = ", ".join(repr("/".join(path)) for path in paths)
        raise ValueError(
            f"{CALL}: max_logits must have one array for each of "
            f"{[attention.name for attention in attentions]}, got "
            f"{path_names or 'none'}."
        )
    return array_by_path


def _attention_of_array(path: Path, attention_paths: list[Path]) -> Path | None:
    """The path of the attention that an array at this path belongs to, or None."""
    # flax's `sow` adds a name after the path of an attention. If one attention is
    # within another, the array belongs to the inner one.
    beginnings = [start for start in attention_paths if path[: len(start)] == start]
    if beginnings:
        return max(beginnings, key=len)
    # Users may leave out the end of a path that only one attention continues.
    continuations = [
        longer for longer in attention_paths if longer[: len(path)] == path
    ]
    return continuations[0] if len(continuations) == 1 else None


# ------------------------------------------------------ which leaves have which heads


def _attentions_of(roles: dict[str, HeadsByPath], tree: PyTree) -> list[Attention]:
    """The attentions of a tree. `roles` has the arguments `queries`, `keys` and
    `rotary` of `qk_clip`, by name, without a `rotary` that is None.

    Raises:
      ValueError: a pattern that finds no leaf, a query without a key or a key without a
        query, entries with two roles, or leaves of an attention whose numbers of heads
        do not fit.
    """
    leaves_with_path = jax.tree.leaves_with_path(tree)
    leaves: list[AttentionLeaf] = []
    for role, where in roles.items():
        leaves += _leaves_of_role(role, where, leaves_with_path)
    _check_disjoint(leaves)
    leaves_by_path: dict[Path, list[AttentionLeaf]] = {}
    for leaf in leaves:
        leaves_by_path.setdefault(_attention_path(leaf, leaves), []).append(leaf)
    attentions = []
    for path, leaves_of_path in leaves_by_path.items():
        first = leaves_of_path[0]
        if not {"queries", "keys"} <= {leaf.role for leaf in leaves_of_path}:
            missing = "queries" if first.role == "keys" else "keys"
            raise ValueError(
                f"{CALL}: {missing} finds no leaf beside the {first.role} "
                f"{'/'.join(first.path)!r}."
            )
        attention = Attention(
            name="/".join(path),
            path=path,
            norm_shape=_norm_shape(path, leaves_of_path),
            norm_dtype=norm_dtype([leaves_with_path[first.leaf_index][1]]),
            leaves=tuple(leaves_of_path),
        )
        attentions.append(attention)
    return attentions


def _check_disjoint(leaves: list[AttentionLeaf]) -> None:
    """Raises ValueError if two roles have the same entries of a leaf, which would be
    multiplied twice. `Heads` without `heads` selects all heads, also of the values.
    """
    mask_of_index: dict[int, np.ndarray] = {}
    for leaf in leaves:
        mask = _selected_entries(leaf)
        mask_of_others = mask_of_index.get(leaf.leaf_index, np.False_)
        if np.any(mask & mask_of_others):
            raise ValueError(
                f"{CALL}: {leaf.role} names entries of the leaf "
                f"{'/'.join(leaf.path)!r} that another role has too: {leaf.layout}. "
                "Name the heads of each by Heads(..., heads=(start, stop))."
            )
        mask_of_index[leaf.leaf_index] = mask | mask_of_others


def _selected_entries(leaf: AttentionLeaf) -> np.ndarray:
    """Whether the layout of a leaf selects each of its entries: a mask that broadcasts
    to the leaf.
    """
    mask = np.zeros((leaf.all_head_count, leaf.all_entry_count), bool)
    mask[slice(*leaf.layout.heads), slice(*leaf.layout.entries)] = True
    # Heads and their entries may share one axis.
    if len(leaf.head_axes) == 1:
        mask = mask.ravel()
    return np.expand_dims(mask, other_axes(leaf.head_axes, leaf.rank))


def _attention_path(leaf: AttentionLeaf, leaves: list[AttentionLeaf]) -> Path:
    """The path of the attention of a leaf: the longest path that a query or a rotary
    query has in common with a key, or a key with a query.
    """
    partner_role = "queries" if leaf.role == "keys" else "keys"
    partners = [partner for partner in leaves if partner.role == partner_role]
    common_paths = [_common_start(leaf.path, partner.path) for partner in partners]
    path = max(common_paths, key=len)
    if path != leaf.path:
        return path
    # This leaf holds queries and keys, so it has its whole path in common with itself.
    # A leaf of another rank beside it is the bias of its kernel, or the reverse: both
    # are one attention. Fused kernels of several attentions have the same rank.
    module = path[:-1]
    for neighbor in leaves:
        if neighbor.path[:-1] == module and neighbor.rank != leaf.rank:
            return module
    return path


def _leaves_of_role(
    role: str, where: HeadsByPath, leaves_with_path: list[Any]
) -> list[AttentionLeaf]:
    """The leaves that `queries`, `keys` or `rotary` names."""
    if not isinstance(where, Mapping) and not callable(where):
        raise TypeError(
            f"{CALL}: {role} must be a dict from patterns of paths to axes "
            f"of heads, or a function of path and leaf, got {shown(where)}."
        )
    leaves = []
    matched_patterns: set[str] = set()
    for index, (path, array) in enumerate(leaves_with_path):
        name = trees.path_name(path)
        if callable(where):
            axis_or_heads = where(name, array)
        else:
            matching = [pattern for pattern in where if fnmatchcase(name, pattern)]
            axis_or_heads = where[matching[0]] if matching else None
            matched_patterns.update(matching)
        if axis_or_heads is not None:
            leaf = _attention_leaf(index, path, role, axis_or_heads, jnp.shape(array))
            leaves.append(leaf)
    unmatched_patterns = []
    if not callable(where):
        unmatched_patterns = [name for name in where if name not in matched_patterns]
    # Otherwise a typo in a pattern would silently leave weights unclipped.
    if unmatched_patterns or not leaves:
        argument = repr(unmatched_patterns[0]) if leaves else shown(where)
        raise ValueError(
            f"{CALL}: {role}={argument} finds no leaf: the updates have "
            f"{trees.listed_paths(path for path, _ in leaves_with_path)}."
        )
    return leaves


def _attention_leaf(
    index: int, path: KeyPath, role: str, axis_or_heads: Any, shape: Shape
) -> AttentionLeaf:
    """A leaf that has the heads of a role. `axis_or_heads` is a `Heads`, or the axis of
    one.

    Raises:
      ValueError: heads or entries that the leaf does not have.
    """
    if not isinstance(axis_or_heads, Heads):
        axis_or_heads = Heads(axis_or_heads)
    layout = Heads(*[_without_list(field) for field in axis_or_heads])
    check_no_bool(f"{CALL}: {role}", layout.axis)
    axes = layout.axis if isinstance(layout.axis, tuple) else (layout.axis,)
    rank = len(shape)
    # For its errors only: it sorts, and here the order of the axes counts.
    axes_within(layout.axis, f"{CALL}: {role}", trees.path_name(path), rank)
    # The axis of heads is the last: -2 and (0, -2) both end with it.
    *layer_axes, head_axis = (axis % rank for axis in axes)
    head_axes = (head_axis,)
    all_head_count = shape[head_axis] // max(layout.width, 1)
    all_entry_count = layout.width
    if layout.width == 1 and layout.entries != (None, None):
        # The entries have an axis of their own, after the axis of heads. Without such
        # an axis there are none.
        entry_axis = head_axis + 1
        head_axes = head_axis, entry_axis
        has_entries = entry_axis < rank and entry_axis not in layer_axes
        all_entry_count = shape[entry_axis] if has_entries else 0
    selected_count = _selected_count(layout.heads, all_head_count)
    if (
        all_head_count * layout.width != shape[head_axis]
        or selected_count == 0
        or _selected_count(layout.entries, all_entry_count) == 0
    ):
        raise ValueError(
            f"{CALL}: {role}: {layout} does not fit the leaf "
            f"{trees.path_name(path)!r} of shape {shape}: width must divide "
            f"its axis {head_axis}, heads must be among those of the leaf, and entries "
            "among those of a head."
        )
    return AttentionLeaf(
        leaf_index=index,
        path=_path_names(path),
        rank=rank,
        role=role,
        layout=layout,
        layer_axes=tuple(layer_axes),
        head_axes=head_axes,
        selected_shape=(*(shape[axis] for axis in layer_axes), selected_count),
        all_head_count=all_head_count,
        all_entry_count=all_entry_count,
    )


def _without_list(field: Any) -> Any:
    """The field, with a tuple in place of a list: YAML and JSON have no tuples."""
    return tuple(field) if isinstance(field, list) else field


def _selected_count(ends: Range, count: int) -> int:
    """How many of `count` heads or entries a range selects. 0 if it is not a range, or
    if it ends beyond `count`, where a slice would silently select fewer.
    """
    if not isinstance(ends, tuple) or len(ends) != 2:
        return 0
    is_within = all(abs(end or 0) <= count for end in ends)
    return len(range(count)[slice(*ends)]) if is_within else 0


def _norm_shape(path: Path, leaves: list[AttentionLeaf]) -> Shape:
    """The layers and heads of the keys of an attention.

    Raises:
      ValueError: a leaf whose layers or heads do not fit these.
    """
    shape = next(leaf.selected_shape for leaf in leaves if leaf.role == "keys")
    for leaf in leaves:
        fits = _is_grouped(leaf.selected_shape, shape)
        if not fits or (leaf.role == "keys" and leaf.selected_shape != shape):
            raise ValueError(
                f"{CALL}: in the attention {'/'.join(path)!r} the heads of "
                f"{'/'.join(leaf.path)!r} have the shape {leaf.selected_shape}, and "
                f"those of the keys {shape}: queries must have a multiple of their "
                "heads."
            )
    return shape


# --------------------------------------------------------------------- paths and shapes


def _path_names(path: KeyPath) -> Path:
    """The names along a path. One key may hold several: Haiku joins the names of
    modules by "/", and torch by ".".
    """
    names: list[str] = []
    for key in path:
        names += re.split("[/.]", trees.path_name((key,)))
    return tuple(names)


def _common_start(left: Path, right: Path) -> Path:
    """The names with which both paths begin."""
    names = []
    for left_name, right_name in zip(left, right):
        if left_name != right_name:
            break
        names.append(left_name)
    return tuple(names)


def _is_grouped(shape: Shape, shape_of_keys: Shape) -> bool:
    """Whether layers are those of the keys, and heads a multiple of theirs: 8 heads of
    queries may share 2 heads of keys.
    """
    has_same_layers = shape[:-1] == shape_of_keys[:-1]
    return has_same_layers and shape[-1] % shape_of_keys[-1] == 0
