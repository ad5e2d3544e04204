"""Leaves summed at once: fewer kernels, and a program that is compiled sooner.

    GPU, leaves of one norm       small ones concatenated, and summed as one leaf
    GPU, leaves with own norms    those of one size stacked, and summed by row. Of a
                                  large leaf this row has the sums of its own rows.
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
import numpy as np

from ._collectives import Split
from ._in_blocks import Number, Row, alike, evenly
from ._pairs import (
    Pairs,
    sum_of_pairs,
    sum_on_gpu,
    sums_of_rows,
    three_sums_of,
)
from ._three_sums import (
    SMALL,
    Sums,
    has_columns,
    is_long,
    sum_at_once,
    sum_on_tpu,
    sums_of_leaf,
    terms_on_tpu,
)
from ._types import is_known, is_on_one_device, varying

# Leaves that one reduction sums on a GPU. With 24 the compiler of an H100 spills
# registers.
AT_ONCE = 16
# And on a TPU. For a v5e a clipped Adam step of 148 tensors is compiled in 7.9 s with
# 8, and in 8.2 s with 16, which spares it 4 of 296 kernels.
AT_ONCE_ON_TPU = 8
# Elements of such a leaf on a TPU. Larger ones would leave the on-chip memory before
# the optimizer reads them again.
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
    for places in alike(kinds).values():
        some = [leaves[place] for place in places]
        if len(some) > 1:
            some = [jnp.concatenate([leaf.reshape(-1) for leaf in some])]
        found += some
        of_leaves.append(splits[places[0]])
    return found, of_leaves


def sums_on_gpu(leaves: list[jax.Array]) -> list[tuple[Number, ...]]:
    """The three sums of each leaf, of those of one size as rows of one array."""
    found: list[Any] = [None] * len(leaves)
    kinds = [
        (_kind(place, leaf, leaf.size), leaf.size)
        for place, leaf in enumerate(leaves)
    ]
    # Of each type that sums have: places, and vectors with a number for each.
    vectors: dict[Any, list[tuple[list[int], Sums]]] = {}
    for (kind, _), same in alike(kinds).items():
        first = leaves[same[0]]
        if kind == same[0]:
            found[same[0]] = sums_of_leaf(sum_on_gpu, None, first)
            continue
        # Of small leaves XLA stacks any number in the kernel that sums them.
        for places in evenly(same, AT_ONCE if is_long(first) else len(same)):
            sums = _sums_by_row([leaves[place] for place in places])
            vectors.setdefault(varying(first), []).append((places, sums))
    for parts in vectors.values():
        order = [place for places, _ in parts for place in places]
        # In the order of the leaves, so that they need not be stacked again.
        back = np.argsort(order)
        joined = zip(*(sums for _, sums in parts))
        every = [jnp.concatenate(x)[back] for x in joined]
        for row, place in enumerate(sorted(order)):
            found[place] = tuple(Row(vector, row) for vector in every)
    return found


def _sums_by_row(leaves: list[jax.Array]) -> Sums:
    """The sums of leaves of one size, as vectors."""
    if is_long(leaves[0]):
        each = [sums_of_rows(leaf) for leaf in leaves]
        stack = Pairs(*(jnp.stack(x) for x in zip(*each)))
        return three_sums_of(sum_of_pairs(stack, (1,)))
    rows = jnp.stack([leaf.reshape(-1) for leaf in leaves])
    sums = sums_of_leaf(sum_on_gpu, (1,), rows)
    return Sums(*(jnp.squeeze(x, 1) for x in sums))


def sums_on_tpu(leaves: list[jax.Array]) -> list[Sums]:
    """The three sums of each leaf, of small ones of one shape by one reduction."""
    found: list[Any] = [None] * len(leaves)
    kinds: list[Any] = []
    for place, leaf in enumerate(leaves):
        # The sums of columns are small vectors.
        most = leaf.size if has_columns(leaf, None) else SMALL_ON_TPU
        kinds.append((_kind(place, leaf, most), leaf.shape))
    for same in alike(kinds).values():
        for places in evenly(same, AT_ONCE_ON_TPU):
            sums = _sums_of_alike([leaves[place] for place in places])
            for place, own in zip(places, sums):
                found[place] = own
    return found


@jax.jit
def _sums_of_alike(leaves: list[jax.Array]) -> list[Sums]:
    """The sums of leaves of one shape and dtype."""
    first = leaves[0]
    alone = len(leaves) == 1 and not has_columns(first, None)
    if alone or jnp.iscomplexobj(first):
        return [sums_of_leaf(sum_on_tpu, None, leaf) for leaf in leaves]
    # Three operands for each leaf, at most 24 in one reduction.
    terms = [x for leaf in leaves for x in terms_on_tpu(leaf, None)]
    sums = sum_at_once(terms, range(terms[0].ndim))
    return [Sums(*sums[i : i + 3]) for i in range(0, len(sums), 3)]


def _kind(place: int, leaf: jax.Array, most: int = SMALL) -> Any:
    """What leaves that are put together have in common. Others are a kind of their own,
    which is their place.
    """
    if is_known(leaf) and leaf.size <= most and is_on_one_device(leaf):
        return leaf.dtype, varying(leaf)
    return place
