"""The table of causes: what each needs, how it is seen, and what helps."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .._checks import shown
from .._logs import Column, Log, distance_of_steps, in_common, listed, log_of, read_log
from . import _rules as rules
from . import _signals as signals


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
      page: where the documentation says more, such as "docs/run_health.md (Rollback)",
        a file of the repository and the title of a section.
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
    needs: str
    rule: Callable[..., np.ndarray | float]  # from the numbers that it needs
    limit: float
    text: str  # with {value} and {subject}
    page: str
    advice: str
    # Whether it says how a log or an optimizer is set up, and not what broke.
    is_of_setup: bool = False
    sees_broken: bool = False  # whether the rule sees rows with NaN and inf too
    least_rows: int = 1  # of a log that the rule can judge


AT_ONE_STEP = "docs/doctor.md (What changes at one step)"
SCALE_ADVICE = (
    "look at the loss scale, at a sum in the place of a mean, and at how many devices "
    "and microbatches are averaged"
)
# Of two that begin in the same step the upper one is named first.
CAUSES = (
    Cause(
        "not finite",
        signals.LOSS_OR_NORM,
        rules.not_finite,
        0,
        "NaN or inf begins in {subject}",
        "docs/doctor.md (Where a NaN begins)",
        "skip_nonfinite, and look at the batch and the backward pass of that step",
        sees_broken=True,
    ),
    Cause(
        "bad batch",
        signals.NORM,
        rules.bad_batch,
        rules.SPIKE,
        "{subject} is {value:.3g} times the median of the rows before, for at most 20 "
        "rows of the log",
        "docs/run_health.md (Rollback)",
        "skip_step around the optimizer, and look at the batch",
    ),
    Cause(
        "change of scale",
        signals.NORM_AND_ANY_LOSS,
        rules.growth_of_scale,
        rules.SCALE,
        "{subject} is {value:.4g} times as long from there on",
        AT_ONE_STEP,
        SCALE_ADVICE,
        least_rows=20,
    ),
    Cause(
        "change of scale",
        signals.NORM_AND_ANY_LOSS,
        rules.fall_of_scale,
        rules.SCALE,
        "{subject} is {value:.4g} times as short from there on",
        AT_ONE_STEP,
        SCALE_ADVICE,
        least_rows=20,
    ),
    Cause(
        "divergence",
        signals.LOSS,
        rules.divergence,
        rules.RISE,
        "{subject} is {value:.3g} times as high as at its best, and stays high",
        AT_ONE_STEP,
        "go back to a checkpoint before, with a lower learning rate or skip_step. If "
        "it leaps and no norm does, look at the data",
        least_rows=20,
    ),
    Cause(
        "steady growth",
        signals.NORM,
        rules.growth,
        10,
        "{subject} grows {value:.3g} times since its second fifth",
        "docs/run_health.md",
        "a lower learning rate, or weight decay",
        least_rows=40,
    ),
    Cause(
        "vanishing",
        signals.NORM_AND_LOSS,
        rules.vanishing,
        rules.VANISHED,
        "{subject} falls to nearly 0, and the loss does not",
        "docs/doctor.md (No gradient)",
        "look for units that are dead, a loss scale that underflows, a stop_gradient",
        least_rows=20,
    ),
    Cause(
        "learning rate",
        signals.UPDATES,
        rules.learning_rate,
        rules.RATE,
        "updates are {value:.2g} of the weights",
        "docs/run_health.md",
        "a lower learning rate, or a longer warm-up",
        sees_broken=True,
    ),
    Cause(
        "growing weights",
        signals.WEIGHTS,
        rules.growth,
        2,  # The rule asks for 1.3**3 = 2.2 in all. This limit sets the first row.
        "weights grow {value:.3g} times since the second fifth of the log",
        "docs/doctor.md (Record)",
        "look at the sign of weight decay, and at the learning rate",
        least_rows=40,
    ),
    Cause(
        "lost updates",
        signals.ROUNDING,
        rules.lost_updates,
        1,
        "updates of {subject} are {value:.3g} times too small for the dtype of the "
        "weights, which rounds most of them away",
        "docs/sharp_edges.md (Mixed precision and loss scaling)",
        "float32 weights beside those of 16 bits, or a higher learning rate",
    ),
    Cause(
        "no gradient",
        signals.GRADIENTS,
        rules.no_gradient,
        0,
        "{subject} has a gradient of 0 from there to the end",
        "docs/doctor.md (No gradient)",
        "look for a stop_gradient, units that are dead, or a part that is not called",
    ),
    Cause(
        "underflow",
        signals.SUBNORMALS,
        rules.underflow,
        0.25,
        "{value:.0%} of the elements that are not 0 are subnormal in {subject}",
        "docs/sharp_edges.md (Mixed precision and loss scaling)",
        "a larger loss scale, or bfloat16",
    ),
    Cause(
        "dead embedding",
        signals.DEAD_ROWS,
        rules.dead_rows,
        0.2,
        "{value:.0%} more rows than at first are without a gradient in {subject}",
        "docs/doctor.md (Dead rows)",
        "look at the tokens, and at weight decay of rows that are not read",
    ),
    Cause(
        "attention logits",
        signals.LOGITS,
        rules.value,
        100,  # of Kimi K2
        "{subject} is {value:.4g}",
        "docs/large_models.md (Attention logits: QK-Clip)",
        "qk_clip after the optimizer, or a norm of queries and keys",
    ),
    Cause(
        "norm after clip",
        signals.EVERY_NORM,
        rules.norm_after_clip,
        0,
        "{value:.0%} of the rows of {subject} are exactly the largest of them",
        "docs/choosing_a_limit.md (Norms after a clip)",
        "log the norm before the clip: spikes cannot be seen in this one",
        is_of_setup=True,
    ),
    Cause(
        "clipped always",
        signals.CLIP,
        rules.clipped_always,
        10,
        "{subject} is {value:.3g} times its limit in the median of all rows",
        "docs/choosing_a_limit.md",
        "a higher limit: this one is a second learning rate",
        is_of_setup=True,
        least_rows=20,
    ),
    Cause(
        "skip behind clip",
        signals.SKIP_AND_CLIP,
        rules.skip_behind_clip,
        1,
        "{subject} never exceeds the clip limit, even when the gradient is {value:.3g} "
        "times that",
        "docs/sharp_edges.md (A skip behind a clipper)",
        "skip_step(optax.chain(clipper, optimizer)), and not the clipper in front",
        is_of_setup=True,
    ),
    Cause(
        "unnamed recorders",
        signals.UNNAMED,
        rules.is_first_row,
        0,
        "{subject} do not say which of them sees updates",
        "docs/doctor.md (Record)",
        "name them with optax.named_chain, one with 'update' in it",
        is_of_setup=True,
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
    log: str | Path | Iterable[Mapping[str, object]],
    *,
    pattern: str | None = None,
    loss: str | None = None,
) -> list[Finding]:
    """Names the causes that a log shows, the earliest first.

    Args:
      log: a file that `optaxclip.replay.read_history` can read, or its rows: a dict for
        each step, such as {"step": 3, "loss": 2.5, "grad_norm": 1.0}, also with all of
        `optaxclip.metrics(state, floats=True)`. Without a column of steps rows are
        counted from 0.
      pattern: a regular expression with a named group for each column, for a log that
        is text: "loss (?P<loss>\\S+)".
      loss: the column of the loss, where its name does not say so.

    Returns:
      A `Finding` for each cause. The first one is what to look at, since later ones may
      follow from it. An empty list does not say that a run is healthy: `examine` says
      what was looked at, and what could not be judged.

    Raises:
      ValueError: a log in which no cause can be judged, a file in a format that is not
        known, or a column that is not there. The text says what was found.
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
    return _examined("diagnose", log, pattern, loss).findings


def examine(
    log: str | Path | Iterable[Mapping[str, object]],
    *,
    pattern: str | None = None,
    loss: str | None = None,
) -> Report:
    """Names the causes that a log shows, and those that it cannot show.

    Args:
      log: a file that `optaxclip.replay.read_history` can read, or its rows: a dict for
        each step, such as {"step": 3, "loss": 2.5, "grad_norm": 1.0}, also with all of
        `optaxclip.metrics(state, floats=True)`. Without a column of steps rows are
        counted from 0.
      pattern: a regular expression with a named group for each column, for a log that
        is text: "loss (?P<loss>\\S+)".
      loss: the column of the loss, where its name does not say so.

    Returns:
      A `Report`: findings, columns that were read, causes that were not judged with the
      columns that they need, and notes of the reader.

    Raises:
      ValueError: a log in which no cause can be judged, a file in a format that is not
        known, or a column that is not there. The text says what was found.
      TypeError: a log that is neither a file nor rows.
      OSError: a file that cannot be opened.

    Example:
      >>> from optaxclip.doctor import examine
      >>> report = examine([{"loss": 1.0}] * 40)
      >>> print(report.not_judged["a gradient norm"])
      ['bad batch', 'steady growth']
    """
    return _examined("examine", log, pattern, loss)


def _examined(
    call: str,
    log: str | Path | Iterable[Mapping[str, object]],
    pattern: str | None,
    loss: str | None,
) -> Report:
    """The report of a file or of rows. Errors begin with the call."""
    try:
        if isinstance(log, (str, Path)):
            return report_of(read_log(log, call, pattern), loss)
        rows = list(log) if isinstance(log, Iterable) else [log]
        if not all(isinstance(row, Mapping) for row in rows):
            raise TypeError(
                f"{call}: log must be a file, or a list with a dict for each step, got "
                f"{shown(log)}."
            )
        return report_of(log_of(rows, []), loss)
    except ValueError as error:
        # Errors of the file itself begin with the call already.
        text = str(error).removeprefix(f"{call}: ")
        raise ValueError(f"{call}: {text}") from None


def report_of(log: Log, loss_name: str | None = None) -> Report:
    """The report of a log that was read.

    Raises:
      ValueError: no cause can be judged, or there is no column `loss_name`.
    """
    # A defaultdict: a need that the log does not meet has no columns.
    columns, looked_at = signals.signals_of(log, loss_name)
    if not looked_at:
        raise ValueError(
            "there is neither a loss nor a gradient norm in it, nor the numbers of "
            f"record_health. It has the columns {listed(list(log.columns))}. Log the "
            "loss as 'loss' and the norm as 'grad_norm' (optaxclip.record_norm(), "
            "optax.tree.norm), or metrics(state)."
        )
    findings: list[Finding] = []
    hints: list[Finding] = []
    not_judged: dict[str, list[str]] = {}
    for cause in CAUSES:
        finding = _finding(cause, columns[cause.needs])
        if finding is not None and cause.is_of_setup:
            hints.append(finding)
        elif finding is not None:
            findings.append(finding)
        elif not columns[cause.needs] and not cause.is_of_setup:
            names = not_judged.setdefault(cause.needs, [])
            # A change of scale is two rows of the table.
            if cause.name not in names:
                names.append(cause.name)
    findings.sort(key=lambda finding: finding.step)
    notes = list(log.notes)
    distance = distance_of_steps(looked_at[0])
    if distance > 1:
        notes.append(
            f"The rows are {distance} steps apart. What happened between is not seen "
            "(transformers: logging_steps=1)."
        )
    for column in looked_at:
        notes += [f"{column.name!r}: {note}" for note in column.notes]
    texts = [f"{column.name!r} ({len(column.steps)} rows)" for column in looked_at]
    return Report(findings + hints, texts, not_judged, notes)


def _finding(cause: Cause, columns_of_rule: signals.ColumnGroups) -> Finding | None:
    """Where a cause shows, and how much. None if it does not."""
    hits = [_hits(cause, columns) for columns in columns_of_rule]
    if not any(hit.steps.size for hit in hits):
        return None
    steps = np.concatenate([hit.steps for hit in hits])
    values = np.concatenate([hit.values for hit in hits])
    value = float(values.max())
    worst = int(steps[values == value].min())
    names = []
    for hit in hits:
        if value in hit.values[hit.steps == worst]:
            names.append(hit.name)
    return Finding(
        cause=cause.name,
        step=int(steps.min()),
        worst=worst,
        rows=len(np.unique(steps)),
        value=value,
        limit=cause.limit,
        evidence=cause.text.format(value=value, subject=listed(names)),
        page=cause.page,
        advice=cause.advice,
    )


def _hits(cause: Cause, columns: tuple[Column, ...]) -> Column:
    """The rows that show a cause, under the name of the first column."""
    steps, numbers = in_common(columns)
    if not cause.sees_broken:
        is_finite = np.isfinite(numbers).all(axis=0)
        steps = steps[is_finite]
        numbers = numbers[:, is_finite]
    values = np.zeros(len(steps))
    if len(steps) >= cause.least_rows:
        # Norms may be 0, and a rule may see NaN and inf.
        with np.errstate(all="ignore"):
            values[:] = cause.rule(*numbers)
    is_hit = values > cause.limit
    return Column(columns[0].name, steps[is_hit], values[is_hit])
