"""Small leaves read together: what small networks on a GPU spend their time on.

    leaves of one size and dtype, below 2^16 elements: stacked, and summed by row

A GPU takes about 2 us to start a kernel, which is longer than it takes to read a small
leaf. Stacking moves data between devices where leaves are split under jit, which a
program cannot know when it is traced. So it is done with one device in the process, and
inside shard_map and pmap, where arrays are local.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ._bins import Bins, bins_of_leaf, sum_on_gpu
from ._types import in_manual_mesh, varying

SMALL = 2**16  # elements


def bins_of_leaves(leaves: list[jax.Array]) -> list[Bins]:
    """The sums in bins of each leaf."""
    found: list[Any] = [None] * len(leaves)
    for places in _alike(leaves).values():
        if len(places) == 1:
            found[places[0]] = bins_of_leaf(sum_on_gpu, None, leaves[places[0]])
            continue
        rows = jnp.stack([leaves[place].reshape(-1) for place in places])
        sums = bins_of_leaf(sum_on_gpu, (1,), rows)
        for row, place in enumerate(places):
            found[place] = Bins(*(x[row, 0] for x in sums))
    return found


def _alike(leaves: list[jax.Array]) -> dict[Any, list[int]]:
    """The places of leaves that can be read together."""
    groups: dict[Any, list[int]] = {}
    for place, leaf in enumerate(leaves):
        key = (leaf.size, leaf.dtype, varying(leaf)) if _is_movable(leaf) else place
        groups.setdefault(key, []).append(place)
    return groups


def _is_movable(leaf: jax.Array) -> bool:
    known = all(isinstance(size, int) for size in leaf.shape)
    local = in_manual_mesh() or jax.device_count() == 1
    return known and local and leaf.size < SMALL
