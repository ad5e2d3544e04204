"""Sums and maxima over devices: one collective for all norms of a clipper.

    names of a block = the mesh axes that split what it sums
    all blocks with names take the union of them, unless a norm stays split over one
    blocks with the same names travel as one vector, in one psum or pmax

Outside shard_map and pmap arrays are global, no block has names, and XLA adds the
collectives itself.
"""

import math
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from ._types import varying, varying_over


class Split(NamedTuple):
    """How one leaf is split over devices, seen from its norm."""

    summed: tuple[str, ...] = ()  # mesh axes that split what is summed
    # Mesh axes that split the units or layers: each device keeps the norms of its own.
    kept: tuple[str, ...] = ()
    # The PartitionSpec of a leaf that has units or layers. It says which leaves are
    # split alike also outside shard_map, where a state is made.
    spec: PartitionSpec | None = None


def names_of_blocks(blocks: list[list[Split]]) -> list[tuple[str, ...]]:
    """For each block, from the splits of its leaves, the mesh axes to join it over."""
    needs = []
    for splits in blocks:
        needs.append(
            _sorted(chain.from_iterable(split.summed for split in splits))
        )
    every = chain.from_iterable(blocks)
    kept = set(chain.from_iterable(split.kept for split in every))
    union = _sorted(chain.from_iterable(needs))
    # One collective for all blocks, unless that would add up what devices keep apart.
    if kept & set(union):
        return needs
    # Over mesh axes that do not split a block its sum is divided by the copies first.
    return [union if names else () for names in needs]


def counted_once(
    part: jax.Array, split: Split, names: tuple[str, ...]
) -> jax.Array:
    """A leaf's part of a sum over devices.

    psum adds a replicated value once for each device. Dividing it by the number of
    copies first makes it count once.
    """
    copies = axes_size(set(names) - set(split.summed))
    return varying_over(part / copies if copies > 1 else part, names)


def join_devices(
    collective: Callable[..., Any],
    blocks: list[jax.Array],
    names: list[tuple[str, ...]],
) -> list[jax.Array]:
    """Applies psum or pmax to each block, over its mesh axes."""
    joined = list(blocks)
    # Not a set: its order may differ between processes, which would then wait for
    # different collectives.
    for over in dict.fromkeys(names):
        places = [place for place, own in enumerate(names) if own == over]
        if over:
            parts = [varying_over(blocks[place], over) for place in places]
            for place, total in zip(
                places, _as_one_vector(collective, parts, over)
            ):
                joined[place] = total
    return joined


def _as_one_vector(
    collective: Callable[..., Any],
    parts: list[jax.Array],
    names: tuple[str, ...],
) -> list[jax.Array]:
    """One collective over several arrays.

    Arrays that differ along other mesh axes too go separately, because a vector has one
    type. So do arrays that an Explicit mesh splits, which cannot be reshaped.
    """
    totals = list(parts)
    kinds = [_kind(place, part) for place, part in enumerate(parts)]
    # [2, 3] and [4] travel as one vector of 10 numbers.
    for kind in dict.fromkeys(kinds):
        places = [place for place, own in enumerate(kinds) if own == kind]
        if len(places) == 1:
            totals[places[0]] = collective(parts[places[0]], names)
            continue
        flat = [parts[place].reshape(-1) for place in places]
        vector = collective(jnp.concatenate(flat), names)
        start = 0
        for place in places:
            shape, end = parts[place].shape, start + parts[place].size
            totals[place] = lax.slice(vector, (start,), (end,)).reshape(shape)
            start = end
    return totals


def _kind(place: int, part: jax.Array) -> Any:
    is_split = any(jax.typeof(part).sharding.spec)
    # A place is that of one part only, so a part that is split travels alone.
    return varying(part), place if is_split else None


def axes_size(names: Iterable[str]) -> int:
    """The number of devices along some mesh axes together."""
    # 1 for no names, as outside shard_map and pmap.
    return math.prod(int(lax.axis_size(name)) for name in names)


def _sorted(names: Iterable[str]) -> tuple[str, ...]:
    # ("x", "y") and ("y", "x") are one collective.
    return tuple(sorted(set(names)))
