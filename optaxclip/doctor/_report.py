"""The report of a log: which causes it shows, and which could not be judged."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .._arguments.checks import shown
from .._logs.columns import Column, Log, in_common, log_from_rows, quoted
from .._logs.files import read_log
from .._logs.norms import VALIDATION_PATTERN, columns_named
from . import _rules as rules
from . import _signals as signals
from ._causes import (
    BAD_BATCH,
    CAUSES,
    CHANGE_OF_SCALE,
    DIVERGENCE,
    LEAP_OF_RATE,
    LEARNING_RATE,
    ROLLBACK,
    SHRINKING_WEIGHTS,
    Cause,
    Finding,
)
from ._notes import notes_of

# More bad batches than this come from the data or the rate.
MOST_ACCIDENTS = 20
# In a learnt task a gradient of new examples may exceed the first norms, but not by
# more than this factor.
MUCH_LONGER = 2.0


class Hit(NamedTuple):
    """A row that shows a cause."""

    name: str  # of the column or tensor
    step: int
    value: float


class Report(NamedTuple):
    """What was found in a log, and what was not looked for.

    Attributes:
      findings: a `Finding` for each cause: what broke, the earliest first, and then how
        the log or the optimizer is set up.
      looked_at: the columns and recorders that were read, and how many rows each has.
      not_judged: what the log lacks, columns or rows, and the names of the causes that
        need it.
      notes: sentences. What the reader left out or decided, how many steps look like
        overflows of a loss scale, how large the largest norm is beside the median,
        whether recorders need names, and a rise of the loss that the log explains.
      unit: what steps count: "step", or "row" if the log has no column of steps.
    """

    findings: list[Finding]
    looked_at: list[str]
    not_judged: dict[str, list[str]]
    notes: list[str]
    unit: str = "step"


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
        is text: "loss (?P<loss>\\S+)". None takes the most frequent labels of a step,
        a learning rate, a loss and a norm.
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
    return read_and_judge("diagnose", log, pattern=pattern, loss=loss).findings


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
        is text: "loss (?P<loss>\\S+)". None takes the most frequent labels of a step,
        a learning rate, a loss and a norm.
      loss: the column of the loss, where its name does not say so.

    Returns:
      A `Report`: findings, columns that were read, causes that were not judged with the
      columns or rows that they need, and notes.

    Raises:
      ValueError: a log in which no cause can be judged, a file in a format that is not
        known, or a column that is not there. The text says what was found.
      TypeError: a log that is neither a file nor rows.
      OSError: a file that cannot be opened.

    Example:
      >>> from optaxclip.doctor import examine
      >>> report = examine([{"loss": 1.0}] * 40)
      >>> print(report.not_judged["a gradient norm"][2:])
      ['bad batch', 'change of scale', 'steady growth', 'vanishing']
    """
    return read_and_judge("examine", log, pattern=pattern, loss=loss)


def read_and_judge(
    call: str,
    log: str | Path | Iterable[Mapping[str, object]],
    *,
    pattern: str | None,
    loss: str | None,
) -> Report:
    """The report of a file or of rows. Errors begin with the call and the file name."""
    prefix = f"{call}: "
    try:
        if isinstance(log, (str, Path)):
            prefix = f"{call}: {log}: "
            return report_of(read_log(log, call, pattern), loss)
        rows = list(log) if isinstance(log, Iterable) else [log]
        if not all(isinstance(row, Mapping) for row in rows):
            raise TypeError(
                f"{call}: log must be a file, or a list with a dict for each step, as "
                f"DataFrame.to_dict('records') of pandas, got {shown(log)}."
            )
        if pattern is not None:
            raise ValueError("pattern is for a file of text, but log has rows.")
        return report_of(log_from_rows(rows, []), loss)
    except ValueError as error:
        # Errors of `read_log` begin with the prefix already.
        text = str(error).removeprefix(prefix)
        raise ValueError(f"{prefix}{text}") from None


# Rules divide by norms, which may be 0, NaN or inf.
@np.errstate(all="ignore")
def report_of(log: Log, loss_name: str | None) -> Report:
    """The report of a log. The loss is found by its name if none is given."""
    run = signals.run_of(log, loss_name)
    if not run.looked_at:
        raise ValueError(
            "there is neither a loss nor a gradient norm in it, nor the numbers of "
            f"record_health. It has the columns {quoted(list(log.columns))}. If one of "
            "them is a loss, name it with --loss NAME (in Python: loss=NAME). Else log "
            "the loss as 'loss' and the norm as 'grad_norm' (optaxclip.record_norm(), "
            "optax.tree.norm), or metrics(state)."
        )
    judgement = _judgement_of(run, log)
    first_findings = _without_consequences(judgement.findings, run)
    leaps = _leaps_of_rate(run, first_findings)
    findings = [
        *_first_of_each_cause([*leaps, *first_findings]),
        *_first_of_each_cause(judgement.findings_of_setup),
    ]
    findings = [_with_advice(finding, run, log) for finding in findings]
    notes = judgement.notes
    # These notes say that what they name may be right. What follows from a rate that is
    # too high is not.
    if any(finding.cause == LEARNING_RATE for finding in findings):
        notes = []
    rates = chain(*run.inputs_of_need[signals.RATE])
    return Report(
        findings=findings,
        looked_at=[
            f"{column.name!r} ({len(column.steps)} rows)"
            for column in [*run.looked_at, *rates]
        ],
        not_judged=judgement.not_judged,
        notes=[*notes, *notes_of(log, run, findings)],
        unit=log.unit,
    )


def _first_of_each_cause(findings: list[Finding]) -> list[Finding]:
    """The earliest finding of each name. The table has several rows for some causes.

    A growth and a fall of scale are both kept: each has a step of its own, at which
    something else may have changed.
    """
    names: set[str] = set()
    first_findings: list[Finding] = []
    for finding in sorted(findings, key=lambda finding: finding.step):
        if finding.cause not in names or finding.cause == CHANGE_OF_SCALE:
            first_findings.append(finding)
        names.add(finding.cause)
    return first_findings


class Judgement(NamedTuple):
    """What the table of causes says about a run."""

    findings: list[Finding]  # of what broke
    findings_of_setup: list[Finding]
    not_judged: dict[str, list[str]]  # as in `Report`
    notes: list[str]  # on what would be findings, if the log did not say why


def _judgement_of(run: signals.Run, log: Log) -> Judgement:
    """Goes through the table of causes."""
    judgement = Judgement([], [], {}, [])
    for cause in CAUSES:
        is_judged = False
        hits: list[Hit] = []
        for columns in run.inputs_of_need[cause.needs]:
            hits_of_columns = _hits(cause, columns)
            if hits_of_columns is not None:
                is_judged = True
                hits += hits_of_columns
        if hits and cause.is_of_setup:
            judgement.findings_of_setup.append(_finding(cause, hits))
        elif hits:
            finding = _finding(cause, hits)
            reason = _innocent_reason(finding, run, log) if cause.may_be_right else None
            if reason is None:
                judgement.findings.append(finding)
            else:
                judgement.notes.append(
                    f"{finding.evidence}, from {log.unit} {finding.step} on. That may "
                    f"be right: {reason}."
                )
        if not is_judged and not cause.is_of_setup:
            names = judgement.not_judged.setdefault(_lacking(cause, run), [])
            # The table has two rows for some causes, such as growth and fall of scale.
            if cause.name not in names:
                names.append(cause.name)
    return judgement


def _without_consequences(findings: list[Finding], run: signals.Run) -> list[Finding]:
    """The findings that do not follow from something else that broke before."""
    # A NaN that stays makes other faults, such as gradients of 0 behind a ReLU.
    broken_step = min(_steps_at_broken_end(run.looked_at), default=np.inf)
    # Long gradients follow from a loss that rose for good, unless they come near the
    # first row of the rise: then they may have made it.
    risen_steps: set[int] = set()
    if run.leveled_loss is not None:
        loss, levels = run.leveled_loss
        row = rules.row_of_rise(loss.values, levels)
        risen_steps = {*loss.steps[row + rules.LONG_WINDOW // 2 :]}
    # Spikes for which the rate is named are not named again as bad batches.
    first_steps_of_rate = [
        finding.first_steps for finding in findings if finding.cause == LEARNING_RATE
    ]
    # Any update is long beside weights that shrank to nothing.
    shrunk_step = min(
        (finding.step for finding in findings if finding.cause == SHRINKING_WEIGHTS),
        default=np.inf,
    )
    kept: list[Finding] = []
    for finding in findings:
        if finding.cause == LEARNING_RATE and finding.step > shrunk_step:
            continue
        is_consequence = finding.cause == BAD_BATCH and (
            finding.step in risen_steps or finding.first_steps in first_steps_of_rate
        )
        if finding.step <= broken_step and not is_consequence:
            kept.append(finding)
    return kept


def _lacking(cause: Cause, run: signals.Run) -> str:
    """What a log must have so that a cause can be judged, but does not have."""
    needs = cause.needs
    if run.inputs_of_need[needs]:
        return f"{cause.least_rows} rows with {needs}"
    if needs in signals.NEEDS_OF_RECORDER and not run.recorders:
        return signals.ANY_RECORDER
    # A cause that needs both is listed under the one that is missing.
    if needs in (signals.NORM_AND_ANY_LOSS, signals.NORM_AND_LOSS):
        return signals.LOSS if run.gradient_norms else signals.NORM
    return needs


def _hits(cause: Cause, columns: tuple[Column, ...]) -> list[Hit] | None:
    """The rows that show a cause. None if the columns have too few rows in common."""
    steps, numbers = in_common(columns)
    if not cause.takes_nonfinite:
        is_finite = np.isfinite(numbers).all(axis=0)
        steps = steps[is_finite]
        numbers = numbers[:, is_finite]
    if len(steps) < cause.least_rows:
        return None
    # Some rules have one number for all rows.
    values = np.broadcast_to(cause.rule(*numbers), steps.shape)
    rows = np.flatnonzero(values > cause.limit)
    return [Hit(columns[0].name, int(steps[row]), float(values[row])) for row in rows]


def _steps_at_broken_end(columns: Sequence[Column]) -> list[int]:
    """The steps after the last finite row of each column."""
    steps: list[int] = []
    for column in columns:
        finite_rows = np.flatnonzero(np.isfinite(column.values))
        if finite_rows.size:
            steps += column.steps[finite_rows[-1] + 1 :].tolist()
    return steps


def _leaps_of_rate(run: signals.Run, findings: list[Finding]) -> list[Finding]:
    """The leaps of a logged learning rate that broke something: a finding begins, or is
    worst, from ten rows before to 20 rows after. Empty if there is none.
    """
    broken_steps = np.array([(finding.step, finding.worst) for finding in findings])
    hits: list[Hit] = []
    for columns in run.inputs_of_need[signals.RATE]:
        steps = columns[0].steps
        for hit in _hits(LEAP_OF_RATE, columns) or []:
            row = int(np.searchsorted(steps, hit.step))
            # A noisy loss may seem to rise a few rows before.
            first_row = max(0, row - rules.LONG_WINDOW // 2)
            near_steps = steps[first_row : row + rules.LONG_WINDOW + 1]
            is_near = (near_steps[0] <= broken_steps) & (broken_steps <= near_steps[-1])
            if is_near.any():
                hits.append(hit)
    return [_finding(LEAP_OF_RATE, hits)] if hits else []


def _with_advice(finding: Finding, run: signals.Run, log: Log) -> Finding:
    """A finding with the advice that other columns give."""
    if finding.cause == BAD_BATCH and finding.rows > MOST_ACCIDENTS:
        advice = (
            f"{finding.rows} rows are no accident: look at the data, its scale and the "
            f"learning rate from {log.unit} {finding.step} on"
        )
        return finding._replace(advice=advice)
    if finding.cause == DIVERGENCE:
        return finding._replace(advice=_advice_on_divergence(finding, run, log))
    if finding.cause == CHANGE_OF_SCALE:
        for size in columns_named(signals.NAME_OF_SIZE, log):
            change = _change_near(finding.step, size)
            if change is not None:
                return finding._replace(advice=change)
    return finding


def _advice_on_divergence(finding: Finding, run: signals.Run, log: Log) -> str:
    """What to do where a loss rises: it may be of a validation, or leap in one row."""
    losses_of_validation = columns_named(VALIDATION_PATTERN, log)
    if any(loss.name in finding.first_steps for loss in losses_of_validation):
        return (
            "if the training loss falls there, the model learns its examples by heart: "
            f"stop earlier. Else {ROLLBACK}"
        )
    if run.leveled_loss is not None:
        loss, levels = run.leveled_loss
        row = rules.row_of_rise(loss.values, levels)
        if rules.leaps_at(row, loss.values, levels):
            return (
                "the loss leaps there: look first at data and labels of that step, and "
                f"at weights that were restored. Else {ROLLBACK}"
            )
    return ROLLBACK


def _innocent_reason(finding: Finding, run: signals.Run, log: Log) -> str | None:
    """What explains a finding so that nothing is wrong. None if nothing does."""
    if finding.cause == BAD_BATCH:
        return _reason_of_spikes(finding, run)
    return _reason_of_rise(finding, log)


def _reason_of_spikes(finding: Finding, run: signals.Run) -> str | None:
    """Says that the network knows most examples, so that others stand out. None unless
    the loss ends far below its first level, and neither the loss nor a norm with spikes
    is much higher than in the first 20 rows.
    """
    if run.leveled_loss is None:
        return None
    loss, levels = run.leveled_loss
    if levels.last > rules.SOLVED * levels.first or _is_above_start(loss, 1):
        return None
    # In the first rows no example is known.
    if finding.step in loss.steps[: rules.LONG_WINDOW]:
        return None
    for norm in run.gradient_norms:
        if norm.name in finding.first_steps and _is_above_start(norm, MUCH_LONGER):
            return None
    return (
        f"{loss.name!r} ends at {levels.last / levels.first:.2g} of its first rows, "
        "and no norm is much longer than there. If a network knows most examples, "
        "batches of others stand out"
    )


def _is_above_start(column: Column, factor: float) -> bool:
    """Whether a row exceeds a factor times the highest of the first 20 rows. Rows with
    NaN or inf, as where a loss scale begins too high, are no start.
    """
    first_values, later_values = np.split(column.values, [rules.LONG_WINDOW])
    start = np.max(first_values, where=np.isfinite(first_values), initial=0.0)
    return bool(np.any(later_values > factor * start))


def _reason_of_rise(finding: Finding, log: Log) -> str | None:
    """What in the log explains a loss that rises: a stage that changes there, or a
    reward that is highest in the last quarter. None if nothing does.
    """
    for stage in columns_named(signals.NAME_OF_STAGE, log):
        change = _change_near(finding.step, stage)
        if change is not None:
            return change
    for reward in columns_named(signals.NAME_OF_REWARD, log):
        # Steps in which no game ended may have NaN.
        rewards = reward.values[np.isfinite(reward.values)]
        if len(rewards) < rules.LONG_WINDOW:
            continue
        levels = [np.median(quarter) for quarter in np.array_split(rewards, 4)]
        if levels[0] < levels[-1] == max(levels):
            return f"{reward.name!r} rises from {levels[0]:.3g} to {levels[-1]:.3g}"
    return None


def _change_near(step: int, column: Column) -> str | None:
    """How a column changes near a step. None if it does not, or if it changes in other
    rows too, as a counter.
    """
    row = int(np.searchsorted(column.steps, step))
    past = column.values[: max(0, row - rules.SHORT_WINDOW)][-rules.LONG_WINDOW :]
    future = column.values[row + rules.SHORT_WINDOW :][:1]
    if len({*past}) != 1 or (future == past[0]).all():
        return None
    return f"{column.name!r} changes there from {past[0]:g} to {future[0]:g}"


def _finding(cause: Cause, hits: list[Hit]) -> Finding:
    """One finding from all rows that show a cause."""
    worst_hit = max(hits, key=lambda hit: (hit.value, -hit.step))
    # A NaN may begin in several tensors.
    worst_names = [
        hit.name
        for hit in hits
        if hit.step == worst_hit.step and hit.value == worst_hit.value
    ]
    first_steps: dict[str, int] = {}
    for hit in sorted(hits, key=lambda hit: hit.step):
        first_steps.setdefault(hit.name, hit.step)
    steps = {hit.step for hit in hits}
    return Finding(
        cause=cause.name,
        step=min(steps),
        worst=worst_hit.step,
        rows=len(steps),
        early_steps=sorted(steps)[:6],
        value=worst_hit.value,
        limit=cause.limit,
        evidence=cause.evidence.format(
            value=worst_hit.value, subject=quoted(worst_names)
        ),
        page=cause.page,
        advice=cause.advice,
        first_steps=first_steps,
    )
