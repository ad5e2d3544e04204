"""Measuring: from a tree of updates to its norms.

A measure is a static description of what is measured together. Called on a tree of
clipped leaves it returns `Norms`, in which norms of one shape are one array.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._arguments import check_known
from . import _prefix as prefix
from ._collectives import Split
from ._groups import Group
from ._in_blocks import Norms, Place, norms_of_tree
from ._leaves import (
    by_label,
    static_labels,
    static_numbers,
    unit_axes,
)
from ._mesh_axes import freeze, splits, without_names
from ._modulus import as_float
from ._powers import norms_of
from ._stacked import other_axes, stacked_axes
from ._three_sums import Dims
from ._unstack import stacked_again

Ord = float | str | None
ORDERS = "a number above 0, math.inf, 'rms' or 'average'"


class Measure(Protocol):
    """What is measured together. Hashable, so that equal clippers share a program."""

    def __call__(self, tree: Any) -> Norms: ...


class GlobalNorm(NamedTuple):
    """One norm for all leaves together."""

    call: str = "global_norm"
    ord: Ord = None
    mesh_axes: Any = "auto"

    def __call__(self, tree: Any) -> Norms:
        leaves = jax.tree.leaves(tree)
        dims: list[Dims] = [None] * len(leaves)
        found = splits(self.mesh_axes, tree, dims, self.call)
        # One group is one block, which is a scalar.
        blocks, places = norms_of([Group(leaves, None, found)], self.ord)
        of_leaf: list[int | None] = [0] * len(leaves)
        # The empty path: its name is "".
        return Norms(blocks, places, [()], of_leaf, jax.tree.structure(0))


class TensorNorm(NamedTuple):
    """One norm for each leaf, or for each layer of a stacked leaf."""

    call: str = "tensor_norm"
    ord: Ord = None
    stacked: Any = None
    mesh_axes: Any = "auto"

    def __call__(self, tree: Any) -> Norms:
        layers = stacked_axes(self.stacked, tree, self.call, self.mesh_axes)
        # Layers keep their axes, and all others are summed: one norm for each layer.
        dims = []
        for axes, leaf in zip(layers, jax.tree.leaves(tree)):
            dims.append(other_axes(axes, jnp.ndim(leaf)) if axes else None)
        return _norm_of_each_leaf(tree, dims, self)


class UnitwiseNorm(NamedTuple):
    """One norm for each unit: the weights that feed one output."""

    call: str = "unitwise_norm"
    ord: Ord = None
    axis: Any = None
    stacked: Any = None
    mesh_axes: Any = "auto"

    def __call__(self, tree: Any) -> Norms:
        dims = unit_axes(
            self.axis, self.stacked, self.mesh_axes, tree, self.call
        )
        return _norm_of_each_leaf(tree, dims, self)


class GroupNorm(NamedTuple):
    """One norm for all leaves that carry a label."""

    labels: Any  # a frozen tree prefix of labels, or a function that makes one
    call: str = "group_norm"
    ord: Ord = None
    mesh_axes: Any = "auto"

    def __call__(self, tree: Any) -> Norms:
        leaves, labels = (
            jax.tree.leaves(tree),
            by_label(tree, self.labels, self.call),
        )
        found = splits(self.mesh_axes, tree, [None] * len(leaves), self.call)
        # A label whose leaves are None or integers has a norm as well, which is 0.
        known = set(labels)
        if isinstance(self.labels, prefix.Prefix):
            known |= {label for _, label in self.labels.entries}
        # The order in which JAX flattens a dict: 2 before 10.
        order = sorted(known)
        groups = [Group([], None, []) for _ in order]
        of_leaf: list[int | None] = [order.index(label) for label in labels]
        for leaf, label, split in zip(leaves, labels, found):
            groups[order.index(label)].leaves.append(leaf)
            groups[order.index(label)].splits.append(split)
        # The name of a norm is its label.
        paths = [(jax.tree_util.DictKey(label),) for label in order]
        treedef = jax.tree.structure(dict.fromkeys(order, 0))
        blocks, places = _in_rows(*norms_of(groups, self.ord))
        return Norms(blocks, places, paths, of_leaf, treedef, noun="label")


class OwnNorm(NamedTuple):
    """A norm function of the user's: from a tree to a tree prefix of norms."""

    norm: Callable[[Any], Any]
    call: str = "clip_by"

    def __call__(self, tree: Any) -> Norms:
        with stacked_again(True):
            norms = self.norm(tree)
        # Such as a Python number, or an integer, whose dtype holds no limit of 1.5.
        norms = jax.tree.map(as_float, norms)
        return norms_of_tree(norms, tree, f"{self.call}: what norm returns")


# Jitted, so that the first update finds what `init` has traced. Inlined, since a call
# in its place is another program to XLA, with a fifth more kernels of AGC on a v5e.
@partial(jax.jit, static_argnums=0, inline=True)
def measured(measure: Measure, tree: Any) -> Norms:
    """The norms of a tree."""
    return measure(tree)


def without_devices(measure: Any) -> Any:
    """The same measure outside shard_map, where no mesh axis has a name."""
    # Norms of the user's, and the spectral norm, take no mesh axes.
    mesh_axes = getattr(measure, "mesh_axes", "auto")
    if mesh_axes == "auto":
        return measure
    return measure._replace(mesh_axes=without_names(mesh_axes))


def _in_rows(
    blocks: list[jax.Array], places: list[Place]
) -> tuple[list[jax.Array], list[Place]]:
    """The norm of a single group is no norm of everything, so it has a row."""
    if len(places) == 1 and not blocks[0].ndim:
        return [blocks[0][None]], [Place(0, 0)]
    return blocks, places


def norm_of_norms(norms: Norms) -> jax.Array:
    """The norm of all norms together, without a derivative."""
    # Each device has the norms of its own units, whose squares are then summed over
    # devices. Norms of whole leaves are the same everywhere and count once.
    kept = norms.kept or ((),) * len(norms.blocks)
    splits = [Split(names) for names in kept]
    (total,), _ = norms_of([Group(norms.blocks, None, splits)])
    return lax.stop_gradient(total)


def _norm_of_each_leaf(tree: Any, dims: list[Any], measure: Any) -> Norms:
    entries, treedef = jax.tree_util.tree_flatten_with_path(tree)
    found = splits(measure.mesh_axes, tree, dims, measure.call)
    groups = []
    for (_, leaf), over, split in zip(entries, dims, found):
        groups.append(Group([leaf], over, [split]))
    blocks, places = norms_of(groups, measure.ord)
    # Updates that are one array have one norm, and no row.
    if treedef != jax.tree.structure(0):
        blocks, places = _in_rows(blocks, places)
    paths = [path for path, _ in entries]
    of_leaf: list[int | None] = list(range(len(entries)))
    # Leaves of one block are split alike.
    of_block = {place.block: split for place, split in zip(places, found)}
    kept = tuple(of_block[block].kept for block in range(len(blocks)))
    return Norms(blocks, places, paths, of_leaf, treedef, kept)


def check_measure(call: str, ord: Any, **numbers: Any) -> dict[str, Any]:
    """The options of a measure, checked and hashable.

    `numbers` are `mesh_axes`, and `axis`, `stacked` or `labels` where it has them.
    """
    check_ord(call, ord)
    # Static arguments must be hashable.
    known = float(ord) if isinstance(ord, (np.number, jax.Array)) else ord
    options: dict[str, Any] = {"call": call, "ord": known}
    for name, value in numbers.items():
        # Lists and dicts become tables of key paths, which have a hash.
        if name == "mesh_axes":
            value = freeze(value, call)
        elif name == "labels":
            value = static_labels(value)
        else:
            value = static_numbers(name, value, call)
        options[name] = value
    return options


def check_ord(call: str, ord: Any) -> None:
    """Refuses what is no order of a norm."""
    if ord in (None, "rms", "average"):
        return
    # The order decides which program is compiled, so a traced one comes too late.
    check_known(f"{call}: ord", ord)
    is_number = isinstance(ord, (int, float, np.number, jax.Array))
    try:
        # True is an int in Python. As an order it is a slip.
        known = float(ord) if is_number and ord is not True else math.nan
    except (TypeError, OverflowError):  # an array, or 10**400
        known = math.nan
    if math.isnan(known) or known <= 0:
        raise ValueError(f"{call}: ord must be {ORDERS}, got {ord!r}.")
