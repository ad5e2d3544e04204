"""Which weights make the queries and keys of which attention head, and which logits
are theirs.

An attention is the leaves below the longest common path of a query leaf and a key leaf:
layer_0/attention/query/kernel and layer_0/attention/key/kernel share layer_0/attention.
"""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import _trees as prefix
from .._checks import shown
from .._mesh import gathered
from .._sums import norm_dtype

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
      entries: which entries of a head: (start, stop) within `width`, or along the axis
        behind the heads if that is 1.

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


ARGUMENTS = {"query": "queries", "key": "keys", "rotary": "rotary"}
Where = Mapping[str, Any] | Callable[[str, Any], Any]
Path = tuple[str, ...]
Shape = tuple[int, ...]


class Use(NamedTuple):
    """What a leaf is in an attention."""

    leaf: int
    path: Path
    role: str  # "query", "key" or "rotary"
    heads: Heads
    # Of layers, heads, and the entries of a head where they have an axis of their own.
    axes: tuple[int, ...]
    shape: Shape  # layers, and the heads that are used
    heads_of_leaf: int  # all of them
    entries: int  # those of one head, of which `Heads.entries` takes some


class Attention(NamedTuple):
    """The leaves of one attention."""

    name: str
    path: Path
    shape: Shape  # of its norms: layers, and heads of keys
    dtype: Any  # of its norms
    uses: tuple[Use, ...]


def find_attentions(roles: dict[str, Any], tree: Any) -> list[Attention]:
    """The attentions of a tree, whose `roles` are "query", "key" and "rotary".

    Raises:
      ValueError: a pattern that finds no leaf, a query without a key or a key without a
        query, or leaves of an attention whose numbers of heads do not fit.
    """
    entries = jax.tree_util.tree_flatten_with_path(tree)[0]
    uses = []
    for role, where in roles.items():
        if where is not None:
            uses += _uses(role, where, entries)
    by_path: dict[Path, list[Use]] = {}
    for use in uses:
        # What each query has in common with the key next to it, and the reverse.
        beside = "query" if use.role == "key" else "key"
        others = [other.path for other in uses if other.role == beside]
        path = max((_common(use.path, other) for other in others), key=len)
        by_path.setdefault(path, []).append(use)
    attentions = []
    for path, own in by_path.items():
        # A leaf without the other shares only the way to another attention.
        below = [other for other in by_path if other[: len(path)] == path]
        if len(below) > 1 or not {"query", "key"} <= {use.role for use in own}:
            missing = "query" if own[0].role == "key" else "key"
            raise ValueError(
                f"qk_clip: {ARGUMENTS[missing]} finds no leaf beside the "
                f"{ARGUMENTS[own[0].role]} {'/'.join(own[0].path)!r}."
            )
        name, shape = "/".join(path), _shape(path, own)
        dtype = norm_dtype(entries[own[0].leaf][1])
        attentions.append(Attention(name, path, shape, dtype, tuple(own)))
    return attentions


def _uses(role: str, where: Where, entries: list[Any]) -> list[Use]:
    """The leaves that `queries`, `keys` or `rotary` names."""
    if not isinstance(where, Mapping) and not callable(where):
        raise TypeError(
            f"qk_clip: {ARGUMENTS[role]} must be a dict from patterns of paths to axes "
            f"of heads, or a function of path and leaf, got {shown(where)}."
        )
    found = []
    for number, (path, leaf) in enumerate(entries):
        heads = _heads_at(where, prefix.name(path), leaf)
        if heads is not None:
            found.append(_use(number, path, role, heads, jnp.shape(leaf)))
    # A typo in a pattern would otherwise leave weights unclipped without a word.
    if not found:
        raise ValueError(
            f"qk_clip: {ARGUMENTS[role]}={shown(where)} finds no leaf: the updates "
            f"have {prefix.listed_paths(path for path, _ in entries)}."
        )
    return found


def _heads_at(where: Where, name: str, leaf: Any) -> Any:
    if callable(where):
        return where(name, leaf)
    for pattern, heads in where.items():
        if fnmatchcase(name, pattern):
            return heads
    return None


def _use(leaf: int, path: Any, role: str, heads: Any, shape: Shape) -> Use:
    """Where a leaf has its heads. Raises for those that it does not have."""
    heads = heads if isinstance(heads, Heads) else Heads(heads)
    axes = heads.axis if isinstance(heads.axis, tuple) else (heads.axis,)
    whole = int, np.integer
    if not axes or not all(isinstance(n, whole) for n in (*axes, heads.width)):
        raise TypeError(
            f"qk_clip: {ARGUMENTS[role]}: axis and width must be whole numbers, or "
            f"axis a tuple of them, got {heads}."
        )

    def check(fits: bool, must: str) -> None:
        if not fits:
            raise ValueError(
                f"qk_clip: {ARGUMENTS[role]}: {heads} does not fit the leaf "
                f"{prefix.name(path)!r} of shape {shape}: {must}."
            )

    rank, width = len(shape), heads.width
    inside = all(-rank <= axis < rank for axis in axes)
    check(inside, "axis must be a dimension of it")
    axes = tuple(axis % rank for axis in axes)
    check(len(set(axes)) == len(axes), "axis must name each dimension once")
    # The axis of heads is the last: -2 and (0, -2) both end with it.
    *layers, axis = axes
    divides = width > 0 and shape[axis] % width == 0
    check(divides, f"width must divide its axis {axis}")
    count = shape[axis] // width
    used = _selected(heads.heads, count)
    check(used > 0, f"heads must be among its {count}")
    if width == 1 and heads.entries != (None, None):
        behind = axis + 1
        is_free = behind < rank and behind not in axes
        check(is_free, "entries need a width, or an axis behind that of heads")
        axes, width = (*axes, behind), shape[behind]
    has_some = _selected(heads.entries, width) > 0
    check(has_some, f"entries must be among the {width} of a head")
    sizes = *(shape[layer] for layer in layers), used
    return Use(leaf, _names(path), role, heads, axes, sizes, count, width)


def _selected(ends: Range, count: int) -> int:
    """How many of so many a range selects. 0 where an end is not among them, where a
    slice would leave out the rest without a word.
    """
    is_there = all(abs(end or 0) <= count for end in ends)
    return len(range(count)[slice(*ends)]) if is_there else 0


def _names(path: Any) -> Path:
    return tuple(prefix.name((key,)) for key in path)


def _common(one: Path, other: Path) -> Path:
    """The names with which both paths begin."""
    alike = [a == b for a, b in zip(one, other)] + [False]
    return one[: alike.index(False)]


def _shape(path: Path, uses: list[Use]) -> Shape:
    """The layers and heads of the keys of an attention, which all leaves must fit."""
    shape = next(use.shape for use in uses if use.role == "key")
    for use in uses:
        # Grouped queries: 8 heads of queries may share 2 heads of keys.
        fits = use.shape[:-1] == shape[:-1] and use.shape[-1] % shape[-1] == 0
        if not fits or (use.role == "key" and use.shape != shape):
            raise ValueError(
                f"qk_clip: in the attention {'/'.join(path)!r} the heads of "
                f"{'/'.join(use.path)!r} have the shape {use.shape}, which does not "
                f"fit those of the keys, {shape}: queries have a multiple of their "
                "heads."
            )
    return shape


def scale_of(use: Use, rank: int, factor: jax.Array) -> jax.Array:
    """What a leaf of this rank is multiplied by: 1 where it is no query or key.

    `factor` is that of each layer and head of the keys. Broadcasts to the leaf.
    """
    repeats = use.shape[-1] // factor.shape[-1]
    factor = jnp.repeat(factor, repeats, axis=-1)[..., None]
    ones = jnp.ones(
        (*use.shape[:-1], use.heads_of_leaf, use.entries), factor.dtype
    )
    own = slice(*use.heads.heads), slice(*use.heads.entries)
    scale = ones.at[..., *own].multiply(factor)
    if scale.ndim > len(use.axes):
        scale = scale.reshape((*scale.shape[:-2], -1))
    scale = scale.transpose(np.argsort(use.axes))
    others = [axis for axis in range(rank) if axis not in use.axes]
    return jnp.expand_dims(scale, others)


def logits_of(
    attentions: list[Attention], max_logits: Any
) -> dict[str, jax.Array]:
    """The largest logit of each attention's heads of keys, at least 0: of the one array
    whose path begins like its own, or the other way round.

    Raises:
      ValueError: an attention without logits, with several, or with those of another
        shape.
    """
    flat = jax.tree_util.tree_flatten_with_path(max_logits)[0]
    entries = [(_names(path), value) for path, value in flat]
    found = {}
    for name, path, shape, dtype, _ in attentions:
        # flax's `sow` adds a name after the path, and users may leave out its end.
        own = [
            x for names, x in entries if _common(names, path) in (names, path)
        ]
        if len(own) != 1 or len(entries) != len(attentions):
            shown = ", ".join(repr("/".join(names)) for names, _ in entries)
            raise ValueError(
                f"qk_clip: max_logits must have one array for each of "
                f"{[each.name for each in attentions]}, got {shown or 'none'}."
            )
        logits = jnp.atleast_1d(own[0])
        given = logits.shape
        if given[:-1] != shape[:-1] or given[-1] % shape[-1]:
            raise ValueError(
                f"qk_clip: max_logits of the attention {name!r} must have the shape "
                f"{shape}, or a multiple of its last number where several queries "
                f"share a key, got {given}: take the maximum over batch and positions. "
                "Where an axis of the weights counts layers, name it too: "
                "Heads((layer axis, head axis))."
            )
        # [..., heads of queries] -> [..., heads of keys, queries that share it]
        logits = gathered(logits, 0).astype(dtype).reshape((*shape, -1))
        # A negative logit is within every limit. Norms are at least 0. NaN stays NaN.
        found[name] = jnp.maximum(jnp.max(logits, axis=-1), 0)
    return found
