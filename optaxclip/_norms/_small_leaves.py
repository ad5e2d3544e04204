"""Small leaves read together: what small networks on a GPU spend their time on.

    leaves of one norm       concatenated, and summed as one leaf
    leaves with own norms    those of one size stacked, and summed by row

A GPU takes about 2 us to start a kernel, which is longer than it takes to read a small
leaf. Putting leaves together moves data between devices where jit splits them over a
mesh. So it is done on one device, and inside shard_map and pmap, where arrays are
local.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ._bins import SMALL, Bins, bins_of_leaf, sum_on_gpu
from ._collectives import Split
from ._types import is_on_one_device, varying


def join_small(
    leaves: list[jax.Array], splits: Sequence[Split]
) -> tuple[list[jax.Array], list[Split]]:
    """The leaves of one norm, with small ones of one kind concatenated."""
    found, of_leaves = [], []
    kinds = [(_kind(place, x), splits[place]) for place, x in enumerate(leaves)]
    for kind in dict.fromkeys(kinds):
        alike = [leaf for leaf, own in zip(leaves, kinds) if own == kind]
        flat = [leaf.reshape(-1) for leaf in alike] if len(alike) > 1 else alike
        found.append(jnp.concatenate(flat) if len(alike) > 1 else alike[0])
        of_leaves.append(kind[1])
    return found, of_leaves


def bins_of_leaves(leaves: list[jax.Array]) -> list[Bins]:
    """The sums in bins of each leaf, with small ones of one size as rows."""
    found: list[Any] = [None] * len(leaves)
    kinds = [(_kind(place, leaf), leaf.size) for place, leaf in enumerate(leaves)]
    for kind in dict.fromkeys(kinds):
        places = [place for place, own in enumerate(kinds) if own == kind]
        if len(places) == 1:
            found[places[0]] = bins_of_leaf(sum_on_gpu, None, leaves[places[0]])
            continue
        rows = jnp.stack([leaves[place].reshape(-1) for place in places])
        sums = bins_of_leaf(sum_on_gpu, (1,), rows)
        for row, place in enumerate(places):
            found[place] = Bins(*(x[row, 0] for x in sums))
    return found


def _kind(place: int, leaf: jax.Array) -> Any:
    """What leaves that are put together have in common. A large leaf is alone."""
    known = all(isinstance(size, int) for size in leaf.shape)
    if known and leaf.size <= SMALL and is_on_one_device(leaf):
        return leaf.dtype, varying(leaf)
    return place
