"""The option `stacked`: which axes of a leaf count layers and belong to no tensor.

    1                        the leading axis, as `jax.vmap` and `lax.scan` stack layers
    2                        the two leading axes, such as layers and experts
    (1,)                     axis 1, as MaxText and T5X stack (`param_scan_axis: 1`)
    (0, 2), (-2,)            these axes, by position
    a tree prefix of these   another answer for each part of the model
    function(path, leaf)     the answer for each leaf: one of these, or None for 0

Leaves that share one answer are layers of one stack, so they must agree on the number
of layers. An axis that counts something else is found by that: inputs and outputs of
different kernels differ.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from .._arguments import is_function
from . import _prefix as prefix
from ._mesh_axes import MeshAxes, whole_shapes
from ._prefix import ByPath

Axes = tuple[int, ...]
# A number of leading axes, a tuple of axes, a tree prefix of these, or a function of
# the leaf's path and the leaf.
Stacked: TypeAlias = (
    "int | Mapping[Any, Stacked] | Sequence[Stacked] | ByPath | None"
)


class _Leaf(NamedTuple):
    """A leaf and the answer of `stacked` for it."""

    path: str
    shape: tuple[int, ...]
    answer: Any
    source: Any  # leaves with one source share one answer


def stacked_axes(
    stacked: Stacked, tree: Any, call: str, mesh_axes: MeshAxes = "auto"
) -> list[Axes]:
    """For each leaf, the axes that count layers, in ascending order.

    Raises:
      ValueError: an axis that a leaf does not have, or leaves that share one answer but
        not the number of layers.
    """
    # Nothing is stacked: the common case, which looks at no leaf.
    if stacked is None:
        return [()] * len(jax.tree.leaves(tree))
    leaves = _leaves(stacked, tree, call)
    found = [_axes_of(leaf, call) for leaf in leaves]
    # Inside shard_map a program sees the shapes of its device's parts.
    shapes = whole_shapes(mesh_axes, tree, call)
    first: dict[Any, tuple[str, Axes]] = {}
    for leaf, axes, shape in zip(leaves, found, shapes):
        if shape is not None and axes:
            own = leaf.path, tuple(shape[axis] for axis in axes)
            known = first.setdefault(leaf.source, own)
            if own[1] != known[1]:
                raise ValueError(_disagreement(call, leaf.answer, known, own))
    return found


def other_axes(axes: Axes, rank: int) -> Axes:
    """The axes of one layer."""
    return tuple(axis for axis in range(rank) if axis not in axes)


def is_axes(x: Any) -> TypeGuard[Axes]:
    """Whether it is a tuple of axes, and not a part of a tree."""
    # A NamedTuple of ints is a part of a tree, so the type is tuple itself.
    whole = int, np.integer
    return type(x) is tuple and all(isinstance(i, whole) for i in x)


def _leaves(stacked: Stacked, tree: Any, call: str) -> list[_Leaf]:
    entries = jax.tree_util.tree_flatten_with_path(tree)[0]
    if is_function(stacked):
        answers = [stacked(prefix.name(path), leaf) for path, leaf in entries]
        # A function has no places, so leaves with equal answers are one stack.
        pairs = [(repr(answer), answer) for answer in answers]
    else:
        is_table = isinstance(stacked, prefix.Prefix)
        table = stacked if is_table else prefix.freeze(stacked, is_axes)
        # Each value with its place in the table, which tells equal values apart.
        numbered = [(key, (key, value)) for key, value in table.entries]
        pairs = prefix.lookup(
            prefix.Prefix(tuple(numbered)), tree, f"{call}: stacked"
        )
    found = []
    for (path, leaf), (source, answer) in zip(entries, pairs):
        found.append(_Leaf(prefix.name(path), jnp.shape(leaf), answer, source))
    return found


def _axes_of(leaf: _Leaf, call: str) -> Axes:
    answer, rank = leaf.answer, len(leaf.shape)
    if answer is None:
        return ()
    if isinstance(answer, (int, np.integer)) and 0 <= answer <= rank:
        return tuple(range(int(answer)))
    if is_axes(answer):
        # Of rank 3, (-2,) is (1,). An axis twice, as in (0, -3), makes the set smaller.
        axes = {axis % rank for axis in answer if -rank <= axis < rank}
        if len(axes) == len(answer):
            return tuple(sorted(axes))
    raise ValueError(
        f"{call}: stacked must be a number of leading axes, from 0 to {rank} for the "
        f"leaf {leaf.path!r} of shape {leaf.shape}, or a tuple of its axes, got "
        f"{answer!r}."
    )


def _disagreement(
    call: str, answer: Any, one: tuple[str, Axes], other: tuple[str, Axes]
) -> str:
    """What is wrong with leaves of one stack that count different layers."""
    counts = []
    for path, sizes in (one, other):
        counts.append(f"{' x '.join(map(str, sizes))} in {path!r}")
    return (
        f"{call}: stacked={answer!r} would count {' and '.join(counts)}, but leaves of "
        "one stack have the same number of layers. Axes other than the leading ones "
        "are a tuple, such as (1,) for axis 1. A leaf that is not stacked takes None. "
        "Several stacks take a value each, as in {'encoder': 1, 'decoder': 1}."
    )
