"""Small leaves read together: what small networks on a GPU spend their time on.

    GPU, leaves of one norm       concatenated, and summed as one leaf
    GPU, leaves with own norms    those of one size stacked, and summed by row
    TPU                           those of one shape summed by one reduction

A GPU takes about 2 us to start a kernel, which is longer than it takes to read a small
leaf. Putting leaves together moves data between devices where jit splits them over a
mesh. So it is done on one device, and inside shard_map and pmap, where arrays are
local.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ._bins import (
    SMALL,
    Bins,
    bins_of_leaf,
    has_columns,
    is_known,
    sum_at_once,
    sum_on_gpu,
    sum_on_tpu,
    terms_on_tpu,
)
from ._collectives import Split
from ._types import is_on_one_device, varying

AT_ONCE = 16  # leaves that one reduction on a TPU sums
# Elements of such a leaf. Larger ones would leave the on-chip memory before the
# optimizer reads them again.
SMALL_ON_TPU = 16_384


def join_small(
    leaves: list[jax.Array], splits: Sequence[Split]
) -> tuple[list[jax.Array], list[Split]]:
    """The leaves of one norm, with small ones of one kind concatenated."""
    found, of_leaves = [], []
    # Leaves that different mesh axes split must stay apart for their collective.
    kinds = [
        (_kind(place, x), splits[place]) for place, x in enumerate(leaves)
    ]
    for kind in dict.fromkeys(kinds):
        alike = [leaf for leaf, own in zip(leaves, kinds) if own == kind]
        if len(alike) > 1:
            alike = [jnp.concatenate([leaf.reshape(-1) for leaf in alike])]
        found += alike
        of_leaves.append(kind[1])
    return found, of_leaves


def bins_of_leaves(leaves: list[jax.Array]) -> list[Bins]:
    """The sums in bins of each leaf, with small ones of one size as rows."""
    found: list[Any] = [None] * len(leaves)
    kinds = [
        (_kind(place, leaf), leaf.size) for place, leaf in enumerate(leaves)
    ]
    for kind in dict.fromkeys(kinds):
        places = [place for place, own in enumerate(kinds) if own == kind]
        if len(places) == 1:
            found[places[0]] = bins_of_leaf(
                sum_on_gpu, None, leaves[places[0]]
            )
            continue
        # [rows, size]: leaves of one size, whatever their shapes.
        rows = jnp.stack([leaves[place].reshape(-1) for place in places])
        sums = bins_of_leaf(sum_on_gpu, (1,), rows)
        for row, place in enumerate(places):
            # Dimension 1 is the one that was summed, and has size 1.
            found[place] = Bins(*(x[row, 0] for x in sums))
    return found


def bins_at_once(leaves: list[jax.Array]) -> list[Bins]:
    """The sums in bins of each leaf, of small ones of one shape by one reduction."""
    found: list[Any] = [None] * len(leaves)
    kinds: list[Any] = []
    for place, leaf in enumerate(leaves):
        # The sums of columns are small vectors.
        most = leaf.size if has_columns(leaf, None) else SMALL_ON_TPU
        kinds.append((_kind(place, leaf, most), leaf.shape))
    for kind in dict.fromkeys(kinds):
        places = [place for place, own in enumerate(kinds) if own == kind]
        for begin in range(0, len(places), AT_ONCE):
            some = places[begin : begin + AT_ONCE]
            sums = _sums_of_alike([leaves[place] for place in some])
            for place, bins in zip(some, sums):
                found[place] = bins
    return found


@jax.jit
def _sums_of_alike(leaves: list[jax.Array]) -> list[Bins]:
    """The sums of leaves of one shape and dtype."""
    first = leaves[0]
    alone = len(leaves) == 1 and not has_columns(first, None)
    if alone or jnp.issubdtype(first.dtype, jnp.complexfloating):
        return [bins_of_leaf(sum_on_tpu, None, leaf) for leaf in leaves]
    # Three operands for each leaf, at most 48 in one reduction.
    terms = [x for leaf in leaves for x in terms_on_tpu(leaf, None)]
    sums = sum_at_once(terms, range(terms[0].ndim))
    return [Bins(*sums[i : i + 3]) for i in range(0, len(sums), 3)]


def _kind(place: int, leaf: jax.Array, most: int = SMALL) -> Any:
    """What leaves that are put together have in common. A large leaf is alone."""
    if is_known(leaf) and leaf.size <= most and is_on_one_device(leaf):
        return leaf.dtype, varying(leaf)
    return place
