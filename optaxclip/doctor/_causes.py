"""The table of causes: what each needs, how it is seen, and what helps."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .._checks import shown
from .._logs import Column, Log, distance_of_steps, listed, log_of, read_log
from . import _rules as rules
from ._rules import Hits
from ._signals import Signals, signals_of


class Finding(NamedTuple):
    """One cause, and the number that shows it.

    Attributes:
      cause: a name of the table in docs/doctor.md, such as "bad batch".
      step: the first one that shows it.
      worst: the step that shows it most.
      rows: how many rows of the log show it.
      value: the number in the worst step.
      limit: what it was held against.
      evidence: the number in words, with the columns or tensors.
      page: of the documentation, with the section.
      advice: what to do, in a line.
    """

    cause: str
    step: int
    worst: int
    rows: int
    value: float
    limit: float
    evidence: str
    page: str
    advice: str


class Cause(NamedTuple):
    """A row of the table."""

    name: str
    needs: str  # the columns, in words
    rule: Callable[[Signals], Hits | None]
    limit: float
    text: str  # with {value}, {subject} and {detail}
    page: str
    advice: str
    # Whether it says how a log or an optimizer is set up, and not what broke.
    is_of_setup: bool = False


NORM = "a gradient norm"
LOSS = "a loss above 0"
BOTH = f"{NORM} and {LOSS}"
UPDATES = "record_health() behind the optimizer, under a name with 'update' in it"
GRADIENTS = "record_health() in front of the optimizer"
CLIP = "metrics of a clipper of optaxclip"
CAUSES = (
    Cause(
        "not finite",
        "a loss or a gradient norm",
        rules.not_finite,
        0,
        "NaN or inf in {subject}; {detail}",
        "doctor.md#the-bracket-of-a-nan",
        "skip_nonfinite, and look at the batch and the backward pass of that step",
    ),
    Cause(
        "bad batch",
        NORM,
        rules.bad_batch,
        rules.SPIKE,
        "{subject} is {value:.3g} times the median of the rows before, and comes back",
        "run_health.md#rollback",
        "skip_step, and look at the batch",
    ),
    Cause(
        "divergence",
        LOSS,
        rules.divergence,
        1 + rules.LOST_GAIN,
        "{subject} ends {value:.3g} times as high as at its best; {detail}",
        "run_health.md#rollback",
        "go back to a checkpoint before, with a lower learning rate or skip_step",
    ),
    Cause(
        "change of data",
        BOTH,
        rules.data_change,
        1 + rules.LOST_GAIN,
        "{subject} leaps, ends {value:.3g} times as high as at its best, and no norm "
        "stands out",
        "doctor.md#what-changes-at-one-step",
        "look at labels and inputs from that step on: a file, an order, a mapping",
    ),
    Cause(
        "change of scale",
        f"{NORM}, and a loss that is above 0 if there is one",
        rules.scale_change,
        rules.SCALE,
        "{subject} is {detail} from there on",
        "doctor.md#what-changes-at-one-step",
        "look at the loss scale, at a sum in the place of a mean, and at how many "
        "devices and microbatches are averaged",
    ),
    Cause(
        "steady growth",
        NORM,
        rules.steady_growth,
        rules.GROWTH,
        "{subject} grows {value:.3g} times over the log",
        "run_health.md",
        "a lower learning rate, or weight decay",
    ),
    Cause(
        "vanishing",
        BOTH,
        rules.vanishing,
        -rules.VANISHED,
        "{subject} falls to nearly 0 while the loss does not",
        "doctor.md#no-gradient",
        "look for units that are dead, a loss scale that underflows, a stop_gradient",
    ),
    Cause(
        "norm after clip",
        NORM,
        rules.norm_after_clip,
        0.05,
        "{value:.0%} of the rows of {subject} are exactly {detail}",
        "choosing_a_limit.md#norms-after-a-clip",
        "log the norm before the clip: spikes cannot be seen in this one",
        is_of_setup=True,
    ),
    Cause(
        "clipped always",
        CLIP,
        rules.clipped_always,
        rules.SHORTENED,
        "{subject} is above its limit in nearly all steps, {value:.3g} times in the "
        "median",
        "choosing_a_limit.md",
        "a higher limit: this one is a second learning rate",
        is_of_setup=True,
    ),
    Cause(
        "skip behind clip",
        "metrics of a clipper and of a skip",
        rules.skip_behind_clip,
        1,
        "{subject} is at most the limit of a clipper, also of a gradient {value:.3g} "
        "times as long",
        "sharp_edges.md#a-skip-behind-a-clipper",
        "skip_step(optax.chain(clipper, optimizer)), and not the clipper in front",
        is_of_setup=True,
    ),
    Cause(
        "unnamed recorders",
        "two recorders",
        rules.unnamed_recorders,
        1,
        "{subject} do not say which of them sees updates",
        "doctor.md#record",
        "name them with optax.named_chain, one with 'update' in it",
        is_of_setup=True,
    ),
    Cause(
        "learning rate",
        UPDATES,
        rules.learning_rate,
        rules.RATE,
        "updates are {value:.2g} of the weights",
        "run_health.md",
        "a lower learning rate, or a longer warm-up",
    ),
    Cause(
        "growing weights",
        "record_health() with weights=True",
        rules.growing_weights,
        rules.GROWN,
        "weights grow {value:.3g} times in 100 steps",
        "doctor.md#record",
        "look at the sign of weight decay, and at the learning rate",
    ),
    Cause(
        "lost updates",
        UPDATES,
        rules.lost_updates,
        1,
        "updates of {subject} are {value:.3g} times too small for the dtype of the "
        "weights, which rounds most of them away",
        "sharp_edges.md#mixed-precision-and-loss-scaling",
        "float32 weights beside those of 16 bits, or a higher learning rate",
    ),
    Cause(
        "no gradient",
        GRADIENTS,
        rules.no_gradient,
        0.5,
        "{subject} has a gradient of 0 from there to the end",
        "doctor.md#no-gradient",
        "look for a stop_gradient, units that are dead, or a part that is not called",
    ),
    Cause(
        "underflow",
        f"{GRADIENTS}, with values=True",
        rules.underflow,
        rules.SUBNORMAL,
        "{value:.0%} of the elements that are not 0 are subnormal in {subject}",
        "sharp_edges.md#mixed-precision-and-loss-scaling",
        "a larger loss scale, or bfloat16",
    ),
    Cause(
        "dead embedding",
        f"{GRADIENTS}, with embeddings=",
        rules.dead_embedding,
        rules.DEAD,
        "{value:.0%} more rows than at first are without a gradient in {subject}",
        "doctor.md#dead-rows",
        "look at the tokens, and at weight decay of rows that are not read",
    ),
    Cause(
        "attention logits",
        "a column with attn or attention and logit in its name, or of qk_clip(None)",
        rules.attention_logits,
        rules.LOGIT,
        "{subject} {value:.4g}",
        "large_models.md#attention-logits-qk-clip",
        "qk_clip after the optimizer, or a norm of queries and keys",
    ),
)


class Report(NamedTuple):
    """What was found in a log, and what was not looked for.

    Attributes:
      findings: a `Finding` for each cause, the earliest first.
      looked_at: the columns and recorders that were read, and how many rows each has.
      not_judged: for each set of columns that the log lacks the names of the causes
        that need it.
      notes: what the reader left out or decided.
    """

    findings: list[Finding]
    looked_at: list[str]
    not_judged: dict[str, list[str]]
    notes: list[str]


def diagnose(
    log: str | Path | Iterable[Mapping[str, object]], *, pattern: str | None = None
) -> list[Finding]:
    """Names the causes that a log shows, the earliest first.

    Args:
      log: a file that `optaxclip.replay.read_history` can read, or its rows: a dict for
        each step, such as {"step": 3, "loss": 2.5, "grad_norm": 1.0}, also with all of
        `optaxclip.metrics(state, floats=True)`. Without a column of steps rows are
        counted from 0.
      pattern: a regular expression with a named group for each column, for a log that
        is text: "loss (?P<loss>\\S+)".

    Returns:
      A `Finding` for each cause. The first one is what to look at, since later ones may
      follow from it. An empty list does not say that a run is healthy: `examine` says
      what was looked at, and what could not be judged.

    Raises:
      ValueError: a log in which no cause can be judged, or a file in a format that is
        not known. The text says what was found.
      TypeError: a log that is neither a file nor rows.
      OSError: a file that cannot be opened.

    Example:
      >>> from optaxclip.doctor import diagnose
      >>> rows = [{"loss": 1.0, "grad_norm": 1.0 + step % 2} for step in range(40)]
      >>> rows[30]["grad_norm"] = 50.0
      >>> (finding,) = diagnose(rows)
      >>> print(finding.step, finding.cause, round(finding.value, 1))
      30 bad batch 33.3
    """
    return examine(log, pattern=pattern).findings


def examine(
    log: str | Path | Iterable[Mapping[str, object]], *, pattern: str | None = None
) -> Report:
    """Names the causes that a log shows, and those that it cannot show.

    Args:
      log: as of `diagnose`.
      pattern: as of `diagnose`.

    Returns:
      A `Report`: findings, columns that were read, causes that were not judged with the
      columns that they need, and notes of the reader.

    Raises:
      ValueError, TypeError, OSError: as of `diagnose`.

    Example:
      >>> from optaxclip.doctor import examine
      >>> report = examine([{"loss": 1.0}] * 40)
      >>> print(report.not_judged["a gradient norm"])
      ['bad batch', 'steady growth']
    """
    if isinstance(log, (str, Path)):
        return report_of(read_log(log, "diagnose", pattern))
    rows = list(log) if isinstance(log, Iterable) else [log]
    if not all(isinstance(row, Mapping) for row in rows):
        raise TypeError(
            "diagnose: log must be a file, or a list with a dict for each step, got "
            f"{shown(log)}."
        )
    try:
        return report_of(log_of(rows, []))
    except ValueError as error:
        raise ValueError(f"diagnose: {error}") from None


def report_of(log: Log) -> Report:
    """The report of a log that was read.

    Raises:
      ValueError: no cause can be judged.
    """
    signals = signals_of(log)
    findings: list[Finding] = []
    not_judged: dict[str, list[str]] = {}
    # A log may have NaN, which is above no limit.
    with np.errstate(all="ignore"):
        for cause in CAUSES:
            hits = cause.rule(signals)
            if hits is None and not cause.is_of_setup:
                not_judged.setdefault(cause.needs, []).append(cause.name)
            elif hits is not None and hits.steps.size:
                findings.append(_finding(cause, hits))
    columns = _columns_of(signals)
    if not columns:
        raise ValueError(
            "there is neither a loss nor a gradient norm in it, nor the numbers of "
            f"record_health. It has the columns {listed(list(log.columns))}. Log the "
            "loss as 'loss' and the norm as 'grad_norm' (optaxclip.record_norm(), "
            "optax.tree.norm), or metrics(state)."
        )
    notes = list(log.notes)
    looked_at = []
    distance = distance_of_steps(next(iter(columns.values())))
    if distance > 1:
        notes.append(
            f"The rows are {distance} steps apart. What happened between is not seen "
            "(transformers: logging_steps=1)."
        )
    for name, column in columns.items():
        looked_at.append(f"{name!r} ({len(column.steps)} rows)")
        notes += [f"{name!r}: {note}" for note in column.notes]
    is_of_setup = {cause.name: cause.is_of_setup for cause in CAUSES}
    # Hints on the set-up come last, whatever their step.
    findings.sort(key=lambda finding: (is_of_setup[finding.cause], finding.step))
    return Report(findings, looked_at, not_judged, notes)


def _columns_of(signals: Signals) -> dict[str, Column]:
    """The columns that rules look at, by what they are called. A recorder is one."""
    columns = {column.name: column for column in signals.norms}
    if signals.loss is not None:
        columns = {signals.loss.name: signals.loss} | columns
    for recorder in (*signals.gradients, *signals.updates):
        column = next(iter(recorder.tensors("norm").values()), None)
        if column is not None:
            columns[recorder.name] = column._replace(notes=())
    for name, column in signals.columns.items():
        if rules.LOGITS.fullmatch(name.lower()):
            columns[name] = column
    return columns


def _finding(cause: Cause, hits: Hits) -> Finding:
    values = np.where(np.isnan(hits.values), np.inf, hits.values)
    worst = int(np.argmax(values))
    text = cause.text.format(
        value=values[worst], subject=hits.subject, detail=hits.detail
    )
    return Finding(
        cause=cause.name,
        step=int(hits.steps[0]),
        worst=int(hits.steps[worst]),
        rows=len(hits.steps),
        value=float(values[worst]),
        limit=cause.limit,
        evidence=text.removesuffix("; "),
        page=cause.page,
        advice=cause.advice,
    )
