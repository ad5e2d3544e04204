"""AutoClip: the limit is a percentile of the norms seen so far.

    limit_t = quantile_q(norm_1 ... norm_t) * factor

No norm has to be known beforehand, and the loss may be scaled at will: multiply it by a
constant and limits and norms follow together. A low percentile (the paper's 10) makes
nearly every step as long as a short one; norms that grow stay clipped to old values for
long.

The history is a ring of `window` norms. The paper keeps all of them: with a window as
long as the run this is the paper's rule. The quantile is interpolated linearly, as in
`numpy.percentile`. PyPI's `autoclip` is `clip_by_tensor_norm(windowed_quantile(0.9,
1000))`: the current norm is not in the statistic there.

Reference: Seetharaman, Wichern, Pardo, Le Roux, AutoClip: adaptive gradient clipping
for source separation networks, 2020 (arXiv 2007.14469).
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.tree_util import Partial

from ..arguments import check_number
from ..sharding import Axes
from ..thresholds import Threshold
from .memory import (
    Window,
    at,
    check_length,
    is_clipped,
    oldest,
    parameter,
    places,
    push,
    window,
)
from .scope import Scope, clip_at


class QuantileMemory(NamedTuple):
    """The last norms, and the same ones by size."""

    recent: Window
    ordered: jax.Array  # float32[norm, length]: inf where there is none yet


def autoclip(
    percentile: Any = 10.0,
    window: Any = 10_000,
    *,
    scope: Scope = "global",
    nonfinite: str = "propagate",
    axes: Axes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Clips to a percentile of the norms so far, the current one included.

    Args:
      percentile: in [0, 100]: 0 clips to the shortest gradient, 100 never clips. A
        number or a schedule.
      window: how many norms are kept. The paper keeps all: give the number of steps of
        the run to have that. The length is part of the state: a restored state goes on
        with its own.
      scope: "global", "tensor", or labels as for `clip_by_group_norm`.
      nonfinite, axes: as in `clip_by_global_norm`.

    Returns:
      A transformation with a `ClipState`; for each norm it remembers `window` numbers
      twice, by age and by size.

    Example:
      >>> import optaxclip
      >>> clipper = optaxclip.autoclip(50)
      >>> state = clipper.init(jnp.zeros(2))
      >>> for norm in (1.0, 3.0, 9.0):
      ...     updates, state = clipper.update(jnp.array([norm, 0.0]), state)
      ...     print(f"{state.limit:.4f} {updates[0]:.4f}")
      1.0000 1.0000
      2.0000 2.0000
      3.0000 3.0000

    Reference: Seetharaman et al., 2020 (arXiv 2007.14469).
    """
    percentile = parameter("autoclip: percentile", percentile, highest=100.0)
    share = Partial(_share, percentile) if callable(percentile) else percentile / 100
    return clip_at(
        scope,
        windowed_quantile(share, window, current=True),
        "autoclip",
        nonfinite,
        axes,
    )


def windowed_quantile(
    quantile: Any = 0.5,
    window: Any = 100,
    *,
    factor: Any = 1.0,
    current: Any = False,
    remember: str = "raw",
    warmup: Any = 1,
) -> Threshold:
    """limit = factor * quantile of the last norms.

    Args:
      quantile: in [0, 1]; 0.5 is the median. A number or a schedule.
      window: how many norms are remembered, a whole number at least 1.
        The length is part of the state: a restored state goes on with its own.
      factor: at least 0. A number or a schedule.
      current, remember, warmup: see `optaxclip.adaptive`.
    """
    call = "windowed_quantile"
    quantile, factor = (
        parameter(f"{call}: quantile", quantile, highest=1.0),
        parameter(f"{call}: factor", factor),
    )
    check_length(f"{call}: window", window)
    check_number(f"{call}: warmup", warmup)
    return Threshold(
        Partial(_empty, window),
        Partial(_update, quantile, factor, current, is_clipped(call, remember), warmup),
    )


def _share(percentile, step):
    return percentile(step) / 100


def _empty(length, norm):
    recent = window("windowed_quantile: window", length, norm)
    return QuantileMemory(recent, jnp.full_like(recent.past, jnp.inf))


def _update(
    quantile, factor, current, clipped, warmup, norm, memory, step, params_norm
):
    quantile, factor = at(step, norm, quantile, factor)
    return _judge(quantile, factor, current, clipped, warmup, norm, memory)


@jax.jit
def _judge(quantile, factor, current, clipped, warmup, norm, memory):
    held = jax.tree.map(partial(jnp.where, current), _push(memory, norm), memory)
    limit = jnp.where(
        held.recent.seen >= jnp.maximum(warmup, 1),
        factor * _quantile(quantile, held),
        jnp.inf,
    )
    return limit, _push(memory, jnp.where(clipped, jnp.minimum(norm, limit), norm))


def _push(memory: QuantileMemory, norm: jax.Array) -> QuantileMemory:
    """One norm more: the oldest goes out of its place in the order, the new one into
    its own. That is a pass over the window, where sorting it would be many.
    """
    recent, ordered = memory
    place, length = places(recent), recent.past.shape[-1]
    new, old = (
        norm[..., None],
        jnp.where(recent.seen >= length, oldest(recent), jnp.inf)[..., None],
    )
    gap, own = _ranks(ordered, old, new)
    own = own - (old < new).astype(jnp.int32)
    # Where each place takes its norm from: those after the gap move down by one, those
    # after the new norm up by one.
    source = place - (place > own).astype(jnp.int32)
    source = source + (source >= gap).astype(jnp.int32)
    moved = jnp.take_along_axis(ordered, jnp.minimum(source, length - 1), axis=-1)
    moved = jnp.where(source < length, moved, jnp.inf)
    return QuantileMemory(push(recent, norm), jnp.where(place == own, new, moved))


def _ranks(ordered: jax.Array, *norms: jax.Array) -> list[jax.Array]:
    """How many are smaller than each of some norms, counted in one pass."""
    smaller = [(ordered < norm).astype(jnp.int32) for norm in norms]
    counts = lax.reduce(
        smaller,
        [np.int32(0)] * len(norms),
        lambda one, other: [a + b for a, b in zip(one, other)],
        (ordered.ndim - 1,),
    )
    return [count[..., None] for count in counts]


def _quantile(quantile: jax.Array, memory: QuantileMemory) -> jax.Array:
    """Interpolated between the two nearest norms."""
    place = quantile * (
        jnp.clip(memory.recent.seen, 1, memory.ordered.shape[-1]) - 1
    ).astype(quantile.dtype)
    low, high = (
        jnp.take_along_axis(
            memory.ordered, f(place).astype(jnp.int32)[..., None], axis=-1
        )[..., 0]
        for f in (jnp.floor, jnp.ceil)
    )
    return low + (place - jnp.floor(place)) * (high - low)
