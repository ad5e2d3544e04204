"""Names and order of the numbers that `metrics` reports, all float32."""

from typing import Any, NamedTuple

import jax

# The fields are the names in the keys of a report, in its order.


class ClipNumbers(NamedTuple):
    """Of one norm."""

    norm_before: jax.Array
    limit: jax.Array  # inf where there is none
    factor: jax.Array  # 1 where nothing was done
    norm_after: jax.Array
    clipped: jax.Array  # 1 or 0
    clipped_share: jax.Array
    clipped_share_recent: jax.Array
    clipped_count: jax.Array
    nonfinite_count: jax.Array


class SummaryNumbers(NamedTuple):
    """Of all norms of a clipper, besides the numbers of the worst."""

    norms_clipped: jax.Array
    worst_ratio: jax.Array
    worst_index: jax.Array  # its place in `state.by_name()`


class ElementNumbers(NamedTuple):
    """Of a clipper of elements."""

    elements_clipped: jax.Array
    elements_clipped_mean: jax.Array
    elements_clipped_recent: jax.Array


class SkipNumbers(NamedTuple):
    """Of an optimizer that skips steps."""

    norm: jax.Array
    limit: jax.Array
    loss: jax.Array
    loss_limit: jax.Array
    skipped: jax.Array
    skipped_share: jax.Array
    skipped_share_recent: jax.Array
    skipped_count: jax.Array
    consecutive_count: jax.Array
    nonfinite_count: jax.Array


class SpikeNumbers(NamedTuple):
    """Of `record_spikes`."""

    norm: jax.Array
    limit: jax.Array
    loss: jax.Array
    loss_limit: jax.Array
    spiked: jax.Array
    spiked_count: jax.Array
    score: jax.Array
    score_recent: jax.Array


# (name of the number, path of the tensor, number)
Row = tuple[str, str, Any]
# It is a string and no number, so it has no field, and comes outside jit only.
WORST_NAME = "worst_name"
