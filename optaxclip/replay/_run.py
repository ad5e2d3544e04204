"""Rules over recorded norms.

`run` says what a rule would have done to the norms, and `suggest` which rules to try.
`plot_history` draws a run, and `spike_score` counts the steps that stand out.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from .._arguments.checks import check_whole_number, shown
from .._factors import factor_between, shrunk_by
from .._logs.after_clip import clipped_share
from .._trees import PyTree
from ..rules import windowed_quantile, z_score
from ..rules._limits import Limit, rule_of_norm_alone
from ..rules._rule import Number, Rule, limit_and_memory_of
from ..rules._windows import skip_step_rule, spike_rule
from ..shrinks import Shrink, drop, shrink_of

# matplotlib is the extra `plot`, so only type checkers import it here.
if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Replay(NamedTuple):
    """What a rule made of recorded norms: one entry for each step.

    Attributes:
      norms: float32[steps, ...]: as recorded.
      limits: float32[steps, ...]: what each norm was held against.
      factors: float32[steps, ...]: what the updates would have been multiplied by. NaN
        where the norm was not finite, or the limit NaN.
      clipped: bool[steps, ...]: the steps that would have been changed, without those
        whose factor is NaN.
    """

    norms: jax.Array  # float32[steps, ...]
    limits: jax.Array  # float32[steps, ...]
    factors: jax.Array  # float32[steps, ...]
    clipped: jax.Array  # bool[steps, ...]


def run(rule: Limit, norms: ArrayLike, *, shrink: Shrink | None = None) -> Replay:
    """Runs a rule over a history of norms, as one `lax.scan`.

    Many rules run at once under `jax.vmap`:
    `jax.vmap(lambda q: run(rules.windowed_quantile(q), norms))(quantiles)`.

    Args:
      rule: a rule of `optaxclip.rules`, a number at least 0, a schedule, or None for no
        limit.
      norms: the history, [steps], or [steps, ...] for many norms at once, each with a
        memory of its own.
      shrink: what a norm over its limit becomes, of `optaxclip.shrinks`. None is
        `hard`.

    Returns:
      A `Replay`: the norms, their limits, the factors that the updates would have been
      multiplied by, and which steps would have been clipped.

    Raises:
      ValueError: a single number in the place of a history, no norm at all, a negative
        norm, a limit that is negative or NaN, or a rule that compares norms with
        weights.
      TypeError: a limit or a history that is not made of numbers.

    Example:
      >>> print(optaxclip.replay.run(2.0, [1.0, 4.0, 2.0]).factors)
      [1.  0.5 1. ]
    """
    norms = history_of("replay.run", norms)
    if norms.ndim == 0 or not norms.size:
        raise ValueError(
            "replay.run: norms must be a history, one norm for each step, got an array "
            f"of shape {norms.shape}."
        )
    rule = rule_of_norm_alone(rule, "replay.run: rule")
    shrink = shrink_of(shrink, "replay.run")
    limits = limits_over(rule, norms, argument="replay.run: rule")
    return _replayed(shrink, norms, limits)


def history_of(call: str, norms: object, *, is_loss: bool = False) -> jax.Array:
    """A history in float32. Where jax_enable_x64 is set, numbers of 64 bits keep them.

    `is_loss`: the numbers are losses, which may be negative.

    Raises:
      TypeError: something that has no numbers, such as the name of a file.
      ValueError: a negative norm.
    """
    if isinstance(norms, Tracer):
        return norms.astype(jnp.promote_types(norms.dtype, jnp.float32))
    array = np.asarray(norms)
    if not jnp.isdtype(array.dtype, ("real floating", "integral")):
        raise TypeError(
            f"{call}: norms must be an array of numbers, got {shown(norms)}. A file is "
            "read by optaxclip.replay.read_history."
        )
    if not is_loss and (array < 0).any():
        negative = array[array < 0][0]
        raise ValueError(f"{call}: norms must be at least 0, got {negative}.")
    # Promoted in NumPy, where int32 and int64 become float64. JAX would first truncate
    # an int64 of 2^40 to 0.
    dtype = np.promote_types(array.dtype, np.float32)
    # Numbers beyond the range of float32 become inf.
    with np.errstate(over="ignore"):
        return jnp.asarray(array.astype(dtype))


def limits_over(
    rule: Rule, values: jax.Array, *, argument: str, is_loss: bool = False
) -> jax.Array:
    """The limit that each value is held against, [steps, ...].

    `argument` is the name of the rule in errors.
    """
    # Outside jit, since init needs the window length as an int. A rule is a pytree, so
    # under jit the length is traced.
    memory = rule.init(jnp.zeros_like(values[0]))
    return _scanned_limits(rule, memory, values, argument=argument, is_loss=is_loss)


@partial(jax.jit, static_argnames=("argument", "is_loss"))
def _scanned_limits(
    rule: Rule, memory: PyTree, values: jax.Array, *, argument: str, is_loss: bool
) -> jax.Array:
    def one_step(carry: PyTree, value: jax.Array) -> tuple[PyTree, jax.Array]:
        step, memory = carry
        limit, memory = limit_and_memory_of(
            rule, value, memory, step, argument=argument, is_loss=is_loss
        )
        return (step + 1, memory), limit

    _, limits = jax.lax.scan(one_step, (jnp.int32(0), memory), values)
    return limits


@partial(jax.jit, static_argnums=0)
def _replayed(shrink: Shrink, norms: jax.Array, limits: jax.Array) -> Replay:
    new_norms = shrunk_by(shrink, norms, limits, "replay.run")
    factors = factor_between(norms, new_norms).reported
    # As in a clipper, a step whose limit is NaN does not count as clipped.
    has_factor = jnp.isfinite(norms) & ~jnp.isnan(limits)
    return Replay(
        norms=norms,
        limits=limits,
        factors=jnp.where(has_factor, factors, jnp.nan),
        clipped=has_factor & (new_norms != norms),
    )


# -------------------------------------------------------------------------- suggestions


class Suggestion(NamedTuple):
    """One candidate rule.

    Attributes:
      rule: Python that makes it after `import optaxclip`. `skip_step` wraps the
        variable `optimizer`.
      limit: at the last step, in units of the norm.
      clip_rate: the share of steps clipped, in [0, 1].
      mean_factor: what the clipped steps would have been multiplied by, on average. 0
        for a rule that skips them, and 1 if no step was clipped.
      is_guard: whether it is the fixed limit that clips about 1 %. At most one is. The
        command `python -m optaxclip.replay` may recommend 1.0 instead, or `zclip`.
    """

    rule: str
    limit: float
    clip_rate: float
    mean_factor: float
    is_guard: bool = False


# The share of steps that a guard clips, so that it clips spikes only.
GUARD_RATE = 0.01
# The highest guard, in medians of the norms. If more than 1 % of the steps are broken,
# a limit that clips 1 % lies among the norms of broken steps, and lets them through.
MAX_GUARD_IN_MEDIANS = 20
# A limit that clips more than this share of the steps is no guard.
MAX_GUARD_RATE = 0.2
# Among fewer norms a single one is more than 1 %.
MIN_NORMS = 100


def suggestion_of(
    text: str, rule: Limit, norms: np.ndarray, *, shrink: Shrink | None = None
) -> Suggestion:
    """What a rule does to norms. `text` is Python that makes a clipper with it."""
    replay = run(rule, norms, shrink=shrink)
    factors_of_clipped = np.asarray(replay.factors)[replay.clipped]
    mean_factor = 1.0
    if factors_of_clipped.size:
        mean_factor = float(factors_of_clipped.mean())
    return Suggestion(
        rule=text,
        limit=float(replay.limits[-1]),
        clip_rate=float(np.asarray(replay.clipped).mean()),
        mean_factor=mean_factor,
    )


def _suggested_limits(norms: np.ndarray) -> list[Suggestion]:
    """Fixed limits at quantiles of the norms, and at five times the median, in
    ascending order.
    """
    quantiles = np.quantile(norms, (0.5, 0.9, 0.95, 0.99))
    five_medians = 5 * quantiles[0]
    limits = {float(f"{limit:.3g}") for limit in (*quantiles, five_medians)}
    return [
        suggestion_of(f"optaxclip.clip_by_global_norm({limit:g})", limit, norms)
        for limit in sorted(limits)
    ]


def _rows_of_window(steps: int, every: int) -> int:
    """How many rows of a log a window of steps has. Ten or more, since the deviation of
    fewer is so inexact that most rows would count as spikes.
    """
    return max(10, round(steps / every))


def z_score_of_zclip(every: int) -> Rule:
    """The rule of `zclip()` for a log in which `every` steps lie between two norms."""
    # 0.97^3 remembers about ten rows.
    return z_score(decay=0.97 ** min(every, 3), warmup=_rows_of_window(25, every))


def _suggested_rules(norms: np.ndarray, every: int) -> list[Suggestion]:
    """Rules that learn: twice the median, zclip and skip_step.

    The numbers are the defaults of these clippers, as a test checks.
    """
    two_medians = windowed_quantile(0.5, _rows_of_window(100, every), factor=2.0)
    skip_step = skip_step_rule("skip_step", window=_rows_of_window(128, every))
    text_of_two_medians = (
        "optaxclip.clip_by_global_norm("
        "optaxclip.rules.windowed_quantile(0.5, 100, factor=2.0))"
    )
    text_of_skip = "optaxclip.skip_step(optimizer, on_loss=False)"
    return [
        suggestion_of(text_of_two_medians, two_medians, norms),
        suggestion_of("optaxclip.zclip()", z_score_of_zclip(every), norms),
        suggestion_of(text_of_skip, skip_step, norms, shrink=drop),
    ]


def suggest(norms: ArrayLike, *, every: int = 1) -> list[Suggestion]:
    """Candidate rules for a history of norms, each with the share of steps that it
    would have clipped.

    The shares are of the norms as they were recorded. Clipping changes a run, so this
    is a place to start, not a forecast.

    Args:
      norms: the history, [steps]. Norms that are NaN, 0, or beyond the range of float32
        are left out, also of the shares.
      every: how many steps lie between two norms. Of a window of 100 steps, a rule that
        learns then sees 100 / every norms, or ten if these are fewer. At least 1.

    Returns:
      Fixed limits first, from quantiles of the norms (Pascanu et al. take half to ten
      times the usual norm), then rules that learn. Each is a `Suggestion`: the rule as
      it is written in a program, its limit at the last step, the share of steps that it
      clips, their mean factor, and whether it is the guard.

      The guard is the fixed limit, up to twenty times the median, that clips nearest to
      1 % of the steps, and at most 20 % of them. It clips none only if all others clip
      more. Fewer than 100 norms cannot show 1 %, and have no guard. Norms that look
      clipped have none either. They do if 5 % or more are within 0.1 % of the largest,
      and no other value is even a third as common.

    Raises:
      ValueError: a history that is not [steps], a negative norm, fewer than two finite
        norms above 0, or an `every` that is not whole or below 1.
      TypeError: a history that is not made of numbers.

    Example:
      >>> for row in optaxclip.replay.suggest([1.0, 2.0, 3.0, 4.0])[:2]:
      ...     print(row.rule, row.clip_rate, round(row.mean_factor, 4))
      optaxclip.clip_by_global_norm(2.5) 0.5 0.7292
      optaxclip.clip_by_global_norm(3.7) 0.25 0.925
    """
    check_whole_number("suggest: every", every)
    history = np.asarray(history_of("suggest", norms), np.float64)
    norms = history[np.isfinite(history) & (history > 0)]
    if history.ndim != 1 or norms.size < 2:
        raise ValueError(
            "suggest: norms must hold at least two finite norms above 0, as [steps], "
            f"got {norms.size} in an array of shape {history.shape}."
        )
    limits = _suggested_limits(norms)
    if norms.size >= MIN_NORMS and not clipped_share(norms):
        max_guard = MAX_GUARD_IN_MEDIANS * float(np.median(norms))
        limits = _with_a_guard(limits, max_guard)
    return limits + _suggested_rules(norms, every)


def _with_a_guard(limits: list[Suggestion], max_guard: float) -> list[Suggestion]:
    """Marks the limit that clips nearest to 1 % of the steps, up to `max_guard`. Marks
    no limit if all of them clip many steps.
    """
    possible_guards = [row for row in limits if row.limit <= max_guard]
    # If norms have few digits, the quantile of 99 % may be the largest norm.
    guards_that_clip = [
        row for row in possible_guards if 0 < row.clip_rate <= MAX_GUARD_RATE
    ]
    guard = min(
        guards_that_clip or possible_guards,
        key=lambda row: abs(row.clip_rate - GUARD_RATE),
    )
    if guard.clip_rate > MAX_GUARD_RATE:
        return limits
    return [row._replace(is_guard=row is guard) for row in limits]


# -------------------------------------------------------------- picture and spike score


def plot_history(
    history: Replay, *, steps: ArrayLike | None = None, axis: Axes | None = None
) -> Axes:
    """Draws norms and limits over the steps, on a logarithmic scale, with the clipped
    steps marked. Needs matplotlib.

    Args:
      history: of `run`.
      steps: [steps], the number of each step. None counts from 0.
      axis: the `Axes` of matplotlib to draw into. None makes a figure, which
        `axis.figure` gives.

    Returns:
      The `Axes`. Norms and limits that are NaN or inf are gaps in their lines.

    Raises:
      ImportError: matplotlib is not installed.

    Example:
      >>> history = optaxclip.replay.run(2.0, [1.0, 4.0, 3.0, 2.0])
      >>> axis = optaxclip.replay.plot_history(history)
      >>> print(axis.lines[2].get_label(), axis.lines[2].get_xdata())
      clipped (2 of 4) [1 2]
    """
    if axis is None:
        # Unlike pyplot, Figure opens no window and keeps no list of figures.
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError as error:
            raise ImportError(
                "the picture needs matplotlib: run pip install matplotlib."
            ) from error

        axis = Figure(figsize=(9, 4), layout="constrained").add_subplot()
    norms = np.asarray(history.norms)
    clipped = np.asarray(history.clipped)
    if steps is None:
        steps = np.arange(len(norms))
    steps = np.asarray(steps)
    # Lines have gaps where they are not finite. "0.55" is a gray of matplotlib.
    axis.semilogy(steps, norms, color="0.55", lw=0.8, label="norm before clipping")
    axis.semilogy(steps, history.limits, color="tab:blue", label="limit")
    label = f"clipped ({clipped.sum()} of {clipped.size})"
    rows = np.nonzero(clipped)[0]
    axis.plot(steps[rows], norms[clipped], "r.", markersize=4, label=label)
    # The legend gets a band above all norms, so that it hides none of them.
    low, high = axis.get_ylim()
    axis.set_ylim(low, high * (high / low) ** 0.15)
    axis.set(xlabel="step", ylabel="gradient norm")
    axis.legend(loc="upper right", ncols=3)
    return axis


def spike_score(
    *histories: ArrayLike, sigmas: Number = 6.0, window: int = 128
) -> jax.Array:
    """The share of steps at which a recorded number stands out.

        spike    if x > mean + sigmas * deviation, both of the `window` values before x
        score    spikes / steps

    Args:
      histories: norms before any clip, losses or both, [steps] each. A step counts as a
        spike if any of them is one. NaN and inf are spikes, and are not remembered.
      sigmas: how many standard deviations above the mean are not a spike. At least 0.
      window: how many values before x are looked at. A whole number, at least 1.
        Nothing is a spike before there are as many.

    Returns:
      float32[]: the score, in [0, 1].

    Raises:
      ValueError: no history, histories that are not [steps] of one length, or a number
        out of its range. TypeError: something that is not a number.

    Example:
      >>> norms = [1.0, 2.0, 1.0, 2.0, 9.0, 2.0, 1.0, 2.0]
      >>> print(optaxclip.replay.spike_score(norms, sigmas=2.0, window=4))
      0.125

    Reference: OLMo-core, `train/callbacks/stability_monitor.py`, counts with 6
    deviations of 128 values. OLMo 2, 2025 (arXiv 2501.00656) and AdaGC, 2025 (arXiv
    2502.11034) count with 7 of 1000.
    """
    call = "spike_score"
    arrays = [history_of(call, history, is_loss=True) for history in histories]
    shapes = sorted({array.shape for array in arrays})
    if len(shapes) != 1 or len(shapes[0]) != 1 or 0 in shapes[0]:
        raise ValueError(
            f"{call}: histories must be [steps] of one length, got shapes {shapes}."
        )
    values = jnp.stack(arrays, axis=1)
    rule = spike_rule(call, sigmas, window)
    # `is_loss`: a loss of 0 or below is remembered, too.
    limits = limits_over(rule, values, argument=call, is_loss=True)
    spiked = (values > limits) | ~jnp.isfinite(values)
    # A step at which norm and loss both stand out counts once.
    return jnp.mean(spiked.any(axis=1))
