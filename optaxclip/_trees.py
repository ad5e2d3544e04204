"""Trees of updates: which leaves count, what they are called, and options that are
given for parts of a tree.

Limits, axes, stacked layers, labels and bounds may be given once for everything, or for
each part of the tree, as deep as is wanted (a tree prefix). A prefix is matched by key
path, so a dict matches any mapping with the same keys, and `None` or `MaskedNode` in
the updates needs no value.
"""

import operator
import sys
import warnings
from collections import Counter
from collections.abc import (
    Callable,
    Container,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
)
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from ._checks import BEGIN_ANEW, NUMBERS, is_function, shown

ByPath = Callable[[str, Any], Any]  # of a leaf's path ("blocks/w") and it
# A whole number or a tuple of them, a tree prefix of these, or a function likewise.
Axis: TypeAlias = "int | Mapping[Any, Axis] | Sequence[Axis] | ByPath | None"
Stacked: TypeAlias = "int | Mapping[Any, Stacked] | Sequence[Stacked] | ByPath | None"


# From a sparse array x, one that holds no index twice. With nse JAX can jit it.
UNIQUE = {
    "BCOO": "x.sum_duplicates(nse=x.nse)",
    "BCSR": "x.to_bcoo().sum_duplicates(nse=x.nse)",
}


# ---------------------------------------------------------------- leaves that count


def clipped_leaves(tree: Any, call: str = "") -> Any:
    """The tree of the leaves that count, with None in the place of all others.

    A leaf counts if it has a float or complex dtype and at least one element.

    Raises:
      TypeError: a leaf that is not an array.
      ValueError: a sparse array that may hold an index twice.
    """
    check_sparse(tree, f"{call}: " if call else "")
    try:
        return jax.tree.map(_clipped, tree, is_leaf=_is_box)
    except TypeError:
        # Paths take time, so they are made only for the error.
        check_leaves(tree, f"{call}: " if call else "")
        raise


def _clipped(leaf: Any) -> Any:
    """The leaf, or None for one that does not count."""
    if _is_box(leaf):
        leaf = leaf.__jax_array__()
        # A variable of NNX may hold a MaskedNode, which is no leaf.
        if is_hole(leaf):
            return leaf
    # A Python number has no dtype. Those of random keys and float0 are not inexact.
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    if _is_foreign(dtype):
        raise TypeError(f"an array of {dtype}")
    counts = jnp.issubdtype(dtype, jnp.inexact) and 0 not in jnp.shape(leaf)
    return leaf if counts else None


def _is_foreign(dtype: Any) -> bool:
    """Whether it is a dtype of NumPy that JAX does not have: objects, strings, times.
    JAX would refuse such an array in jit. Outside it would pass unclipped.
    """
    # Those of random keys have no kind.
    return getattr(dtype, "kind", None) in ("O", "S", "U", "M", "m")


def check_leaves(tree: Any, begin: str) -> None:
    """Raises for a leaf that is not an array, such as a function in a model."""
    for path, leaf in jax.tree.leaves_with_path(tree):
        dtype = getattr(leaf, "dtype", None)
        if _is_foreign(dtype):
            raise TypeError(
                f"{begin}the leaf {name(path)!r} must be an array of numbers, got one "
                f"of {dtype}: make it float32, or hand over None for it."
            )
        try:
            _clipped(leaf)
        except TypeError:
            raise TypeError(
                f"{begin}the leaf {name(path)!r} must be an array or a number, got "
                f"{shown(leaf)}: hand over arrays only, with None for everything else. "
                "In equinox that is eqx.filter(model, eqx.is_inexact_array)."
            ) from None


def check_sparse(tree: Any, begin: str) -> None:
    """Raises ValueError for a sparse array that may hold an index twice: the norm of
    its data is not the norm of the array.
    """
    # Not imported, since that takes time. Where nobody did, there are no such arrays.
    sparse = sys.modules.get("jax.experimental.sparse")
    if sparse is None:
        return

    def is_sparse(x: Any) -> bool:
        return isinstance(x, sparse.JAXSparse)

    for path, leaf in jax.tree.leaves_with_path(tree, is_leaf=is_sparse):
        if is_sparse(leaf) and not getattr(leaf, "unique_indices", False):
            kind = type(leaf).__name__
            where = f"the leaf {name(path)!r}" if path else "it"
            unique = UNIQUE.get(kind, "x.todense()")
            raise ValueError(
                f"{begin}{where} is a {kind} that may hold an index twice, so that the "
                "norm of its data is not its norm. Hand over one with unique_indices="
                f"True, or {unique}."
            )


def put_back(changed: Any, tree: Any) -> Any:
    """Puts clipped leaves back into the tree that they came from."""
    old, treedef = jax.tree.flatten(tree, is_leaf=is_none)
    new = jax.tree.leaves(changed, is_leaf=is_none)
    return treedef.unflatten([a if b is None else b for a, b in zip(old, new)])


def _is_box(x: Any) -> bool:
    # The protocol by which JAX itself makes an array of an object.
    return callable(getattr(x, "__jax_array__", None))


def _unboxed(x: Any) -> Any:
    return x.__jax_array__() if _is_box(x) else x


def unboxed(tree: Any) -> Any:
    """The tree with arrays for objects that hold one, such as variables of flax NNX."""
    return jax.tree.map(_unboxed, tree, is_leaf=_is_box)


def arrays_of(model: Any) -> Any:
    """The model, with None in the place of what is no array, such as a function."""
    return jax.tree.map(
        lambda x: x if hasattr(x, "dtype") or isinstance(x, NUMBERS) else None, model
    )


# Is it None? For `jax.tree.map`, which otherwise passes None over.
is_none = partial(operator.is_, None)


def is_hole(x: Any) -> bool:
    """Is there nothing here: None, or a node such as `optax.MaskedNode`?"""
    return not jax.tree.leaves(x)


# ------------------------------------------------------------------ updates, weights


def gradients_of(call: str, updates: Any, params: Any) -> Any:
    """The clipped leaves of what must be gradients alone.

    Raises:
      TypeError: a leaf that is not an array, or a tuple of gradients and something
        else, as `jax.value_and_grad`, `has_aux` and `clipped_grad` return them.
    """
    # Norms and losses beside gradients would be taken for more of them.
    if {"grads", "factors"} <= set(getattr(updates, "_fields", ())):
        raise TypeError(
            f"{call}: updates must be the gradients alone, got a "
            f"{type(updates).__name__}: hand over its grads."
        )
    tree = clipped_leaves(updates, call)
    # A NamedTuple is a tree. A plain pair may be (value, grads).
    if type(updates) is not tuple or len(updates) != 2 or params is None:
        return tree
    wanted = jax.tree.structure(params)
    for place, each in enumerate(updates):
        # The gradients are the one of the two that looks like params, unless these are
        # a pair as well, of two arrays for example.
        is_alike = jax.tree.structure(each) == wanted
        if is_alike and jax.tree.structure(updates) != wanted:
            raise TypeError(
                f"{call}: updates must be the gradients alone, got a tuple of two in "
                f"which updates[{place}] has the structure of params. "
                "jax.value_and_grad returns (value, grads), and has_aux (grads, aux)."
            )
    return tree


def warn_of_integers(call: str, updates: Any) -> None:
    """Warns where nothing is clipped because all numbers are integers."""
    # Updates without any leaf, as of a model without weights, are no mistake.
    for path, leaf in jax.tree.leaves_with_path(updates):
        # An int of Python has no dtype. A bool is one too, but no number to clip.
        dtype = type(leaf) if type(leaf) is int else getattr(leaf, "dtype", bool)
        if jnp.issubdtype(dtype, jnp.integer) and jnp.size(leaf):
            warnings.warn(
                f"{call}: nothing is clipped, since no leaf of the updates has a float "
                f"or complex dtype. The leaf {name(path)!r} is "
                f"{getattr(dtype, '__name__', dtype)}: make it float32.",
                # The line that called update.
                stacklevel=4,
            )
            return


def check_kept(call: str, tree: Any, kept: Any) -> None:
    """Raises ValueError for a clipped leaf of which the state keeps nothing, or an
    array of another shape.
    """
    updates, form = jax.tree.flatten_with_path(tree, is_leaf=is_none)
    try:
        # None may stand for a part of the tree, all of which is missing then.
        known = form.flatten_up_to(kept)
    except (TypeError, ValueError):
        old, new = (dict(jax.tree.leaves_with_path(x)) for x in (kept, tree))
        raise ValueError(
            f"{call}: state was made for leaves {listed_paths(old)} in "
            f"{type(kept).__name__}, but the updates have {listed_paths(new)} in "
            f"{type(tree).__name__}. {BEGIN_ANEW}"
        ) from None
    for (path, leaf), own in zip(updates, known):
        if leaf is None:
            continue
        if own is None:
            raise ValueError(
                f"{call}: the update of the leaf {name(path)!r} is "
                f"{jnp.result_type(leaf)}, but what init was given for it has no float "
                "or complex dtype. Make that float32, or give None for the update."
            )
        if jnp.shape(leaf) != jnp.shape(own):
            raise ValueError(
                f"{call}: state was made for the leaf {name(path)!r} of shape "
                f"{jnp.shape(own)}, but its update has {jnp.shape(leaf)}. {BEGIN_ANEW}"
            )


def weights_of(call: str, tree: Any, params: Any, updates: str = "gradients") -> Any:
    """The weights of the clipped leaves.

    Raises:
      ValueError: there are none, or they do not fit the updates.
      TypeError: weights that are integers.
    """
    # `clippy` and `qk_clip` come after the optimizer, and compare its updates.
    if params is None:
        given = "grads" if updates == "gradients" else updates
        raise ValueError(
            f"{call} compares {updates} with weights: call "
            f"update({given}, state, params)."
        )
    check_sparse(params, f"{call}: params: ")
    return values_of(call, "params", tree, params)


def values_of(call: str, argument: str, tree: Any, values: Any) -> Any:
    """The values of the clipped leaves, such as weights, found by their paths.

    So they may be in another kind of mapping than the updates, and have more entries.

    Raises:
      ValueError: a leaf without a value, or with one of another shape.
      TypeError: values that are integers.
    """
    # A FrozenDict of params and a dict of updates have the same paths.
    table = dict(jax.tree.leaves_with_path(unboxed(values)))
    found = []
    for path, leaf in jax.tree.leaves_with_path(tree):
        # Entries without updates, such as frozen weights, are not used.
        if path not in table:
            raise ValueError(
                f"{call}: {argument} has no value for the leaf {name(path)!r} "
                f"of the updates: it has {listed_paths(table)}."
            )
        value = table[path]
        if jnp.shape(value) != jnp.shape(leaf):
            raise ValueError(
                f"{call}: {argument} has the shape {jnp.shape(value)} for the leaf "
                f"{name(path)!r}, and the updates have {jnp.shape(leaf)}."
            )
        kind = getattr(value, "dtype", type(value))
        # Weights that are integers would have no norm, while their updates have one.
        if not jnp.issubdtype(kind, jnp.inexact):
            raise TypeError(
                f"{call}: {argument} must have a float or complex dtype for the leaf "
                f"{name(path)!r}, whose update is {jnp.result_type(leaf)}, got "
                f"{jnp.result_type(value)}. Make it float32, or give None for that "
                "update."
            )
        found.append(value)
    return jax.tree.structure(tree).unflatten(found)


# ---------------------------------------------------------------------------- names


# A key path as a user reads it: `blocks/0/w`.
name = partial(jax.tree_util.keystr, simple=True, separator="/")


def names(paths: Sequence[Any], known: Container[str] = ()) -> list[str]:
    """The names of all key paths of a tree, no two alike: where `a/b` could be two
    places, they are written as in Python. No name has line breaks. `known` are names of
    which some may be missing here.
    """
    # {"a/b": x} and {"a": {"b": x}} both read a/b.
    found = [name(path).replace("\n", "\\n") for path in paths]
    counts = Counter(found)
    for place, own in enumerate(found):
        long = jax.tree_util.keystr(paths[place])
        if counts[own] > 1 or (own not in known and long in known):
            found[place] = long
    return found


def listed_paths(paths: Iterable[Any]) -> str:
    """Key paths as errors list them."""
    return listed(map(name, paths)) or "none at all"


def listed(names: Iterable[Any]) -> str:
    """Names in order, and of many the first eight: "'b', 'w'"."""
    known = sorted(map(str, names))
    text = ", ".join(map(repr, known[:8]))
    return text if len(known) <= 8 else f"{text} and {len(known) - 8} more"


# --------------------------------------------------------------------- tree prefixes


class Prefix(NamedTuple):
    """A tree prefix as a flat table. It is hashable when its values are, so it can be a
    static argument of a jitted function.
    """

    entries: tuple[tuple[Any, Any], ...]  # (key path, value)


def freeze(prefix: Any, is_leaf: Callable[[Any], bool]) -> Prefix:
    """The table of a prefix. `is_leaf` says what counts as one value (None always
    does).
    """
    if isinstance(prefix, Prefix):
        return prefix
    # None is a value: no limit, or the default of an option.
    entries = jax.tree.leaves_with_path(
        prefix, is_leaf=lambda x: is_none(x) or _is_box(x) or is_leaf(x)
    )
    return Prefix(tuple((path, _unboxed(x)) for path, x in entries))


def heads(path: Any) -> Iterator[Any]:
    """A key path and all that it begins with: (), (a,), (a, b)."""
    return (path[:depth] for depth in range(len(path) + 1))


def lookup(
    prefix: Prefix,
    tree: Any,
    argument: str,
    part: str = "leaf",
    *,
    allow_missing: bool = False,
) -> list[Any]:
    """The value for each leaf of `tree`, in order. `part` is what errors call a leaf.

    Raises:
      ValueError: a leaf has no value, or a value stands where the tree has no such
        part, unless `allow_missing`. The text names the argument and the path.
    """
    return lookup_paths(
        prefix,
        [path for path, _ in jax.tree.leaves_with_path(tree)],
        set(holes_of(tree)),
        argument=argument,
        part=part,
        allow_missing=allow_missing,
    )


def holes_of(tree: Any) -> tuple[Any, ...]:
    """The key paths of all holes in a tree."""
    entries = jax.tree.leaves_with_path(tree, is_leaf=is_hole)
    return tuple(path for path, leaf in entries if is_hole(leaf))


def lookup_paths(
    prefix: Prefix,
    paths: Sequence[Any],
    holes: Set[Any],
    *,
    argument: str,
    part: str,
    allow_missing: bool,
) -> list[Any]:
    """`lookup`, by the key paths of leaves and holes."""
    table = dict(prefix.entries)
    # A value at a hole, or above it, need not reach a leaf.
    used = set(chain.from_iterable(map(heads, holes)))
    values = []
    for path in paths:
        # At most one entry of a tree prefix begins a path. () is a value for all.
        found = next((head for head in heads(path) if head in table), None)
        if found is None:
            raise ValueError(
                f"{argument} has no value for the {part} {name(path)!r}: it has "
                f"{listed_paths(table)}. Give one for each {part}, or one for all."
            )
        values.append(table[found])
        used.add(found)
    for key in () if allow_missing else table:
        # Nor need a value below a hole, as in a full tree of limits.
        if key not in used and holes.isdisjoint(heads(key)):
            kind = "label, see allow_missing" if part == "label" else "part"
            raise ValueError(
                f"{argument} has a value for {name(key)!r}, but the updates have no "
                f"such {kind}: they have {listed_paths(paths)}."
            )
    return values


def for_each_leaf(
    value: Any, tree: Any, argument: str, is_value: Callable[[Any], bool] = is_none
) -> list[Any]:
    """One value for each leaf, from a function of path and leaf or a tree prefix."""
    if is_function(value):
        entries = jax.tree.leaves_with_path(tree)
        return [value(name(path), leaf) for path, leaf in entries]
    return lookup(freeze(value, is_value), tree, argument)


# --------------------------------------------------------------- axes of units, layers


def is_axes(x: Any) -> TypeGuard[tuple[int, ...]]:
    """Whether it is a tuple of axes, and not a part of a tree."""
    # A NamedTuple of ints is a part of a tree, so the type is tuple itself.
    return type(x) is tuple and all(isinstance(i, (int, np.integer)) for i in x)


def axes_within(value: Any, argument: str, leaf: str, rank: int) -> tuple[int, ...]:
    """The axes of a leaf, counted from the front.

    Raises:
      ValueError: an axis that it does not have, or has named twice.
    """
    wanted = value if isinstance(value, tuple) else (value,)
    # (-1, 0) of rank 3 is (0, 2). An axis twice, as in (0, -3), makes the set smaller.
    whole = [axis for axis in wanted if isinstance(axis, (int, np.integer))]
    axes = {int(axis) % rank for axis in whole if -rank <= axis < rank}
    if len(axes) < len(wanted):
        raise ValueError(
            f"{argument}={shown(value)} does not fit the leaf {leaf!r}, a tensor of "
            f"rank {rank}: give axes for each leaf, none of them twice."
        )
    return tuple(sorted(axes))


def other_axes(axes: Iterable[int], rank: int) -> tuple[int, ...]:
    """The axes of a leaf that are not among these."""
    return tuple(axis for axis in range(rank) if axis not in axes)


def stacked_axes(
    stacked: Any, tree: Any, call: str, shapes: list[Any]
) -> list[tuple[int, ...]]:
    """For each leaf, the axes that count layers, in ascending order.

        1                        the leading axis, as `jax.vmap` and `lax.scan` stack
        2                        the two leading axes, such as layers and experts
        (1,)                     axis 1, as MaxText and T5X stack
        a tree prefix of these   another answer for each part of the model
        function(path, leaf)     the answer for each leaf: one of these, or None for 0

    `shapes` are those of whole leaves, None where a device knows its part only. Leaves
    that share one answer are layers of one stack.

    Raises:
      ValueError: an axis that a leaf does not have, or leaves that share one answer but
        not the number of layers.
    """
    entries = jax.tree.leaves_with_path(tree)
    if is_function(stacked):
        # A function has no places, so leaves with equal answers are one stack.
        answers = for_each_leaf(stacked, tree, "")
        sourced = [(repr(answer), answer) for answer in answers]
    else:
        # Each value with its place in the table, which tells equal values apart.
        table = freeze(stacked, is_axes).entries
        placed = Prefix(tuple((key, (key, value)) for key, value in table))
        sourced = lookup(placed, tree, f"{call}: stacked")
    found = []
    first: dict[Any, tuple[str, str]] = {}
    for (path, leaf), (source, answer), shape in zip(entries, sourced, shapes):
        axes = _layer_axes(answer, name(path), jnp.shape(leaf), call)
        found.append(axes)
        if not axes or shape is None:
            continue
        sizes = " x ".join(str(shape[axis]) for axis in axes)
        other, known = first.setdefault(source, (name(path), sizes))
        if sizes != known:
            raise ValueError(
                f"{call}: stacked={shown(answer)} would count {known} in {other!r} and "
                f"{sizes} in {name(path)!r}, but leaves of one stack have the same "
                "number of layers. Axes other than the leading ones are a tuple, such "
                "as (1,) for axis 1. A leaf that is not stacked takes None. Several "
                "stacks take a value each, as in {'encoder': 1, 'decoder': 1}."
            )
    return found


def _layer_axes(
    answer: Any, leaf: str, shape: tuple[int, ...], call: str
) -> tuple[int, ...]:
    rank = len(shape)
    if answer is None:
        return ()
    if isinstance(answer, (int, np.integer)) and 0 <= answer <= rank:
        return tuple(range(int(answer)))
    if is_axes(answer):
        return axes_within(answer, f"{call}: stacked", leaf, rank)
    raise ValueError(
        f"{call}: stacked must be a number of leading axes, from 0 to {rank} for the "
        f"leaf {leaf!r} of shape {shape}, or a tuple of its axes, got {shown(answer)}."
    )


def unit_axes(
    axis: Any, layers: list[tuple[int, ...]], tree: Any, call: str, shapes: list[Any]
) -> list[tuple[int, ...] | None]:
    """For each leaf, the dimensions that a unit norm sums. None for all of them without
    keeping any.
    """
    entries = jax.tree.leaves_with_path(tree)
    given = for_each_leaf(axis, tree, f"{call}: axis", is_axes)
    found: list[tuple[int, ...] | None] = []
    for (path, leaf), value, own, shape in zip(entries, given, layers, shapes):
        # Axes count within one layer: of [layers, in, out], axis 0 is dimension 1.
        inside = other_axes(own, jnp.ndim(leaf))
        rank = len(inside)
        if value is not None:
            summed = axes_within(value, f"{call}: axis", name(path), rank)
        elif rank <= 1 and not own:
            # A vector is one unit. Its norm is a number, as that of a tensor.
            found.append(None)
            continue
        else:
            layer = shape and tuple(shape[i] for i in inside)
            summed = _axes_by_shape(layer, f"{call}: axis", name(path), rank)
        found.append(tuple(inside[i] for i in summed))
    return found


def _axes_by_shape(
    shape: tuple[Any, ...] | None, argument: str, leaf: str, rank: int
) -> tuple[int, ...]:
    """All dimensions of what squeezes to a vector, else those that feed one output."""
    # Axes of size 1 do not count: [1, 1, n] is a vector, as in optax. A size that only
    # a run of an exported program knows counts as one of many.
    if shape is not None:
        ones = [size for size in shape if isinstance(size, int) and size <= 1]
        if rank - len(ones) <= 1:
            return tuple(range(rank))
    if rank > 5:
        raise ValueError(
            f"{argument} must be given for the leaf {leaf!r} of rank {rank}: there is "
            "no rule above rank 5."
        )
    # Kernels as [in, out], [in, heads, size], [height, width, in, out], and with depth.
    # Those of rank 3 are taken for attention, as in optax.
    return tuple(range({2: 1, 3: 1, 4: 3, 5: 4}.get(rank, rank)))
