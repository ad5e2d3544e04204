"""What the clippers did, as numbers for a logger.

Every clipper keeps its last norm, limit and factor in its state, so reading them costs
no second pass over the gradients, inside jit or outside.
"""

import math
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import jax
from jax.core import Tracer

from .._clippers._record_spikes import SpikeState
from .._core._state import ClipState
from .._other_names import with_our_names
from .._wrappers._skipping import SkipState
from ._found import reported_states
from ._numbers import (
    WORST_NAME,
    ClipNumbers,
    ElementNumbers,
    Row,
    SkipNumbers,
    SpikeNumbers,
    SummaryNumbers,
)
from ._rows import (
    clip_rows,
    elements_rows,
    skip_rows,
    spike_rows,
    summary_rows,
)

_KINDS = ClipNumbers, SummaryNumbers, ElementNumbers, SkipNumbers, SpikeNumbers
# A dict keeps their order for the error of `only`. Some kinds share names: norm, limit.
NAMES = dict.fromkeys(name for kind in _KINDS for name in kind._fields)
NAMES |= {WORST_NAME: None}


@with_our_names
def metrics(
    opt_state: Any,
    *,
    only: str | Collection[str] | None = None,
    summary: bool = False,
    layers: bool = False,
    floats: bool = False,
) -> dict[str, Any]:
    """Returns the numbers of every clipper in an optimizer state, for a logger.

    Clippers are found at any depth: in chain, masked, partition, MultiSteps,
    inject_hyperparams, apply_if_finite, and in a train state.

    Args:
      opt_state: the state of any optimizer that has a clipper in it, concrete or
        traced. Also a tree that holds it, such as flax's `TrainState`,
        `nnx.Optimizer`, and what `nnx.state` makes of that. The latter has no names,
        and tensors are numbered in it.
      only: names of numbers, such as "norm_before" or ("norm_before", "clipped"), to
        leave out the others. None for all.
      summary: whether a clipper with one norm for each tensor or group reports one row
        for all of them, instead of one for each.
      layers: whether each layer of a stacked leaf, and each unit, has rows of its own,
        such as `clip/norm_before/blocks/w/0`. `summary` is of all norms in any case.
      floats: whether to return finite Python floats, for JSON. Numbers that are NaN or
        inf are left out. Only outside jit.

    Returns:
      A flat dict of float32 scalars, or of floats:

        clip/norm_before      the norm before clipping. It may be above the limit, which
                              does not mean that clipping failed
        clip/limit            what it was held against, inf where there is none
        clip/factor           what the updates were multiplied by: 1 where nothing was
                              done, never below 1.2e-38 unless they were made 0
        clip/norm_after       the norm after clipping: 0 where a broken step was made
                              zero, NaN where it was made NaN
        clip/clipped          1 if the last step was clipped, else 0. A step whose norm
                              is NaN or inf counts as 0
        clip/clipped_share    clipped steps over all steps, in [0, 1]
        clip/clipped_share_recent
                              the same of about the last 100 steps, a moving average
        clip/clipped_count    steps that were clipped
        clip/nonfinite_count  steps whose norm was NaN or inf

      With `summary` the first five are those of the norm that is furthest over its
      limit (one that is NaN comes first), shares are means over all norms, counts the
      largest, and there are

        clip/norms_clipped    the share of the norms that were clipped in the last step
        clip/worst_ratio      norm over limit of the norm that is furthest over
        clip/worst_index      its number, in the order of `state.by_name()`
        clip/worst_name       with `floats`: its name, a string

      Of clippers of elements (`clip_by_value`, `clip`, `spam`):

        clip/elements_clipped         the share of elements clipped in the last step
        clip/elements_clipped_mean    its mean over all steps
        clip/elements_clipped_recent  its moving average, of about 100 steps

      Of optimizers that skip steps (`skip_spikes`):

        skip/norm, skip/limit               of the last gradient, whether skipped or not
        skip/loss, skip/loss_limit          of the last loss, 0 and inf without a rule
                                            for it
        skip/skipped                        1 if the last step was skipped, else 0
        skip/skipped_share, skip/skipped_share_recent, skip/skipped_count,
        skip/consecutive_count, skip/nonfinite_count

      Of `record_spikes`:

        spike/norm, spike/limit, spike/loss, spike/loss_limit
                                      as of optimizers that skip steps
        spike/spiked                  1 if the last step was a spike, else 0
        spike/spiked_count            steps that were
        spike/score                   their share of all steps, in [0, 1]
        spike/score_recent            the same of about the last 10,000 steps

      A clipper with one norm for each tensor or group adds the path:
      `clip/norm_before/blocks/w`. Of units and stacked layers the one furthest over its
      limit is shown, and the share is the mean over all, or with `layers` all of them.

      The first clipper of a chain is `clip`, a second one `clip_2`. A name of your own
      comes from `optax.named_chain(("inner", clipper), ...)`: `clip/inner/norm_before`.
      So do the labels of `optax.partition`. A clipper that is named "clip" has no other
      name in its keys.

    Raises:
      ValueError: a state without a clipper in it, a name in `only` that is none, the
        state of an ensemble (`jax.vmap(metrics)` reads that of each member), or, with
        `layers`, a leaf with the name of a layer of another.
      TypeError: an optimizer in the place of its state, or `floats` under jit.

    Example:
      >>> optimizer = optax.chain(optaxclip.clip_by_global_norm(1.0), optax.sgd(0.1))
      >>> grads = jnp.array([3.0, 4.0])
      >>> _, state = optimizer.update(grads, optimizer.init(grads))
      >>> print(optaxclip.metrics(state, only=("norm_before", "limit"), floats=True))
      {'clip/norm_before': 5.0, 'clip/limit': 1.0}
    """
    wanted = _wanted_names(only)
    if floats:
        # The error of JAX would not say what to do.
        _check_concrete(opt_state)
    report: dict[str, Any] = {}
    for prefix, title, state in reported_states(opt_state):
        for name, path, value in _rows(state, wanted, summary, layers, floats):
            # `clip_rows` makes only what is wanted, and the others make all.
            if name in wanted:
                # "clip", "a", "limit", "blocks/w" -> "clip/a/limit/blocks/w".
                parts = prefix, title, name, path
                report["/".join(part for part in parts if part)] = value
    # Without `only` nothing may be right: a clipper of an empty tree has no norm.
    if only is not None and not report:
        every, known = frozenset(NAMES), dict[str, None]()
        for _, _, state in reported_states(opt_state):
            rows = _rows(state, every, summary, layers, floats)
            known |= dict.fromkeys(name for name, _, _ in rows)
        raise ValueError(
            f"metrics: only={only!r} must name a number that this state has, which are "
            f"{', '.join(known) or 'none'}. Those of all norms together come with "
            "summary=True."
        )
    return _as_floats(report) if floats else report


def _rows(
    state: Any,
    wanted: frozenset[str],
    summary: bool,
    layers: bool,
    floats: bool,
) -> Iterator[Row]:
    """(name, path, value) for each number of one state."""
    if isinstance(state, SkipState):
        return skip_rows(state)
    if isinstance(state, SpikeState):
        return spike_rows(state)
    # ClipByValueState and SpamState.
    if not isinstance(state, ClipState):
        return elements_rows(state)
    if summary:
        # A name is a string, which a jitted function cannot return.
        return summary_rows(state, with_name=floats)
    return clip_rows(state, wanted, layers=layers)


def _wanted_names(only: str | Collection[str] | None) -> frozenset[str]:
    if only is None:
        return frozenset(NAMES)
    # A string is a collection as well, of its letters.
    several = isinstance(only, Iterable) and not isinstance(only, str)
    listed: list[Any] = list(only) if several else [only]
    # `in` finds 3 and a list nowhere, where a set would not take a list.
    if not all(name in list(NAMES) for name in listed):
        raise ValueError(
            f"metrics: only must be among {', '.join(map(repr, NAMES))}, got {only!r}."
        )
    return frozenset(listed)


def _check_concrete(opt_state: Any) -> None:
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(opt_state)):
        raise TypeError(
            "metrics: floats must be False under jit, where numbers are not known yet: "
            "return the state, and call metrics(state, floats=True) outside."
        )


def _as_floats(report: dict[str, Any]) -> dict[str, Any]:
    """The finite numbers as Python floats, and strings as they are."""
    found: dict[str, Any] = {}
    # As a list, because JAX sorts the keys of a dict. One call for all: it starts every
    # copy from the device before it waits for the first.
    for key, value in zip(report, jax.device_get(list(report.values()))):
        if isinstance(value, str):
            found[key] = value
        # JSON has no NaN and no inf.
        elif math.isfinite(value):
            found[key] = float(value)
    return found
