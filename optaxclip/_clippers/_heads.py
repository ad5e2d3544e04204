"""Which weights make the queries and keys of which attention head.

attention    the leaves below the longest common path of a query leaf and a key leaf
powers       what each weight of a head is multiplied by, from the head's factor
"""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import _trees as prefix

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


class Use(NamedTuple):
    """What a leaf is in an attention."""

    leaf: int
    role: str  # "query", "key" or "rotary"
    axes: tuple[int, ...]  # of layers and heads, at least 0
    heads: Heads

    @property
    def has_entries_behind(self) -> bool:
        """Whether the entries of a head lie along an axis of their own."""
        return self.heads.width == 1 and self.heads.entries != (None, None)


class Attention(NamedTuple):
    """The leaves of one attention."""

    name: str
    path: tuple[str, ...]
    shape: tuple[int, ...]  # of its norms: layers, and heads of keys
    uses: tuple[Use, ...]


class _Found(NamedTuple):
    """A leaf that a pattern found."""

    path: tuple[str, ...]
    shape: tuple[int, ...]  # layers, heads
    use: Use


def find_attentions(
    roles: dict[str, Where | None], tree: Any
) -> list[Attention]:
    """The attentions of a tree, whose `roles` are "query", "key" and "rotary".

    Raises:
      ValueError: a pattern that finds no leaf, a query without a key or a key without a
        query, or leaves of an attention whose numbers of heads do not fit.
    """
    entries = jax.tree_util.tree_flatten_with_path(tree)[0]
    found = {
        role: _matches(role, where, entries) for role, where in roles.items()
    }
    paths = _attention_paths(found)
    attentions = []
    for path in paths:
        own = {role: [] for role in found}
        for role, matches in found.items():
            own[role] = [
                each for each in matches if each.path[: len(path)] == path
            ]
        attentions.append(_attention(path, own))
    _check_all_used(found, paths)
    return attentions


def _matches(
    role: str, where: Where | None, entries: list[tuple[Any, Any]]
) -> list[_Found]:
    """The leaves that `queries`, `keys` or `rotary` names."""
    if where is None:
        return []
    if not isinstance(where, Mapping) and not callable(where):
        raise TypeError(
            f"qk_clip: {ARGUMENTS[role]} must be a dict from patterns of paths to axes "
            f"of heads, or a function of path and leaf, got {where!r}."
        )
    found = []
    for number, (path, leaf) in enumerate(entries):
        heads = _heads_at(where, prefix.name(path), leaf)
        if heads is None:
            continue
        heads = heads if isinstance(heads, Heads) else Heads(heads)
        # The axis of heads is the last: -2 and (0, -2) both end with it.
        axes = heads.axis if isinstance(heads.axis, tuple) else (heads.axis,)
        if not axes or not all(map(_is_whole, (*axes, heads.width))):
            raise TypeError(
                f"qk_clip: {ARGUMENTS[role]}: axis and width must be whole numbers, or "
                f"axis a tuple of them, got {heads}."
            )
        shape, rank = jnp.shape(leaf), max(jnp.ndim(leaf), 1)
        use = Use(number, role, tuple(axis % rank for axis in axes), heads)
        _check_use(use, axes, prefix.name(path), shape)
        found.append(_Found(names_in(path), _shape(use, shape), use))
    # A typo in a pattern would otherwise leave weights unclipped without a word.
    if not found:
        raise ValueError(
            f"qk_clip: {ARGUMENTS[role]}={where!r} finds no leaf: the updates have "
            f"{prefix.shown(path for path, _ in entries)}."
        )
    return found


def _heads_at(where: Where, name: str, leaf: Any) -> Any:
    if callable(where):
        return where(name, leaf)
    hits = [
        heads for pattern, heads in where.items() if fnmatchcase(name, pattern)
    ]
    return hits[0] if hits else None


def _check_use(
    use: Use, axes: tuple[int, ...], name: str, shape: tuple[int, ...]
) -> None:
    """Raises for axes, widths and heads that the leaf does not have."""
    rank, axis, width = len(shape), use.axes[-1], use.heads.width
    if not all(-rank <= each < rank for each in axes):
        wrong = "axis must be a dimension of it"
    elif len(set(use.axes)) < len(axes):
        wrong = "axis must name each dimension once"
    elif width < 1 or shape[axis] % width:
        wrong = f"width must divide its axis {axis}"
    elif not _selects(use.heads.heads, shape[axis] // width):
        wrong = f"heads must be among its {shape[axis] // width}"
    elif use.has_entries_behind and axis + 1 in (rank, *use.axes):
        wrong = "entries need a width, or an axis behind that of heads"
    elif not _selects(use.heads.entries, _entries_of_head(use, shape)):
        wrong = f"entries must be among the {_entries_of_head(use, shape)} of a head"
    else:
        return
    raise ValueError(
        f"qk_clip: {ARGUMENTS[use.role]}: {use.heads} does not fit the leaf {name!r} "
        f"of shape {shape}: {wrong}."
    )


def _is_whole(number: Any) -> bool:
    return isinstance(number, (int, np.integer))


def _selects(ends: Range, count: int) -> bool:
    """Whether a range selects something, and only what is there: a slice would leave
    out the rest without a word.
    """
    is_there = all(abs(end or 0) <= count for end in ends)
    return is_there and len(range(*slice(*ends).indices(count))) > 0


def _entries_of_head(use: Use, shape: tuple[int, ...]) -> int:
    if use.has_entries_behind:
        return shape[use.axes[-1] + 1]
    return use.heads.width


def _shape(use: Use, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of layers and heads of a leaf."""
    *layers, axis = use.axes
    count = shape[axis] // use.heads.width
    # heads=(2, 4) of 6 heads are 2, and (None, None) all of them.
    own = range(*slice(*use.heads.heads).indices(count))
    return (*(shape[layer] for layer in layers), len(own))


def names_in(path: Any) -> tuple[str, ...]:
    return tuple(prefix.name((key,)) for key in path)


def _attention_paths(found: dict[str, list[_Found]]) -> list[tuple[str, ...]]:
    """What each query has in common with the key next to it."""
    # layer_0/attention/query/kernel and layer_0/attention/key/kernel share
    # layer_0/attention.
    keys = [key.path for key in found["key"]]
    paths = {}
    for query in found["query"]:
        shared = [common(query.path, key) for key in keys]
        paths[max(shared, key=len)] = query.path
    for one, query in paths.items():
        # A query without a key shares only the way to the key of another attention.
        if any(one == other[: len(one)] for other in paths if other != one):
            raise ValueError(
                f"qk_clip: keys finds no leaf beside the queries {'/'.join(query)!r}."
            )
    return list(paths)


def common(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, ...]:
    alike = [a == b for a, b in zip(one, other)] + [False]
    return one[: alike.index(False)]


def _check_all_used(found: dict[str, list[_Found]], paths: list[Any]) -> None:
    """Raises for a key, or a rotary query, that belongs to no attention."""
    for role, matches in found.items():
        for each in matches:
            if not any(each.path[: len(path)] == path for path in paths):
                raise ValueError(
                    f"qk_clip: {ARGUMENTS[role]} finds {'/'.join(each.path)!r}, and "
                    "queries finds no leaf beside it."
                )


def _attention(
    path: tuple[str, ...], own: dict[str, list[_Found]]
) -> Attention:
    name, shape = "/".join(path), own["key"][0].shape
    for each in (*own["query"], *own["key"], *own["rotary"]):
        # Grouped queries: 8 heads of queries may share 2 heads of keys.
        *layers, heads = each.shape
        fits = tuple(layers) == shape[:-1] and heads % shape[-1] == 0
        if not fits or (each.use.role == "key" and each.shape != shape):
            raise ValueError(
                f"qk_clip: in the attention {name!r} the heads of "
                f"{'/'.join(each.path)!r} have the shape {each.shape}, which does not "
                f"fit those of the keys, {shape}: queries have a multiple of their "
                "heads."
            )
    uses = [each.use for found in own.values() for each in found]
    return Attention(name, path, shape, tuple(uses))


def scale_of(use: Use, shape: tuple[int, ...], factor: jax.Array) -> jax.Array:
    """What a leaf of this shape is multiplied by: 1 where it is no query or key.

    Args:
      use: of the leaf.
      shape: of the leaf.
      factor: for each layer and head of the keys.

    Returns:
      An array that broadcasts to the leaf, with as many dimensions.
    """
    heads, (*layers, axis) = use.heads, use.axes
    count = shape[axis] // heads.width
    behind = _entries_of_head(use, shape)
    own = slice(*heads.heads)
    repeats = len(range(*own.indices(count))) // factor.shape[-1]
    factor = jnp.repeat(factor, repeats, axis=-1)[..., None]
    ones = jnp.ones((*factor.shape[:-2], count, behind), factor.dtype)
    scale = ones.at[..., own, slice(*heads.entries)].multiply(factor)
    axes = [*layers, axis]
    if use.has_entries_behind:
        axes.append(axis + 1)
    else:
        scale = scale.reshape((*scale.shape[:-2], -1))
    scale = scale.transpose([axes.index(each) for each in sorted(axes)])
    return jnp.expand_dims(scale, sorted(set(range(len(shape))) - set(axes)))
