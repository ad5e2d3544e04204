"""The table of causes: what each needs, how it is seen, and what helps."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .._checks import shown
from .._logs.columns import (
    Column,
    Log,
    distance_of_rows,
    in_common,
    log_from_rows,
    notes_on_distance,
    quoted,
    rows_kept,
)
from .._logs.files import read_log
from .._logs.norms import NOISE_SHARE, columns_named
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
      page: where the documentation says more, such as "docs/doctor.md (Record)", a file
        of the repository and the title of a section.
      advice: what to do, in a line.
      first_steps: for each column or tensor that shows the cause, the first step that
        does, such as {"clip/norm_before/actor": 300} if groups have their own norms.
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
    first_steps: dict[str, int]


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
        overflows of a loss scale, how large the largest norm is beside the median, and
        whether recorders need names.
    """

    findings: list[Finding]
    looked_at: list[str]
    not_judged: dict[str, list[str]]
    notes: list[str]


class Cause(NamedTuple):
    """A row of the table."""

    name: str
    needs: str  # the columns that the rule reads, a sentence of `_signals`
    rule: Callable[..., np.ndarray | float]  # from the numbers of these columns
    limit: float  # a row whose number is above it shows the cause
    evidence: str  # in words, with {value} and {subject}, the names of columns
    page: str
    advice: str
    # Whether it is about how a log or an optimizer is set up, and not about what broke.
    is_of_setup: bool = False
    sees_nonfinite: bool = False  # whether the rule also gets rows with NaN and inf
    least_rows: int = 1  # with fewer rows the cause is not judged


PAGE_AT_ONE_STEP = "docs/doctor.md (What changes at one step)"
LEAST_ROWS_OF_LOSS = 20
# A loss gets a note if it rises by more than these parts: of its lowest level, and of
# its whole fall, since a loss near 0 may rise many times.
LEAST_RISE = 0.1
LEAST_RISE_OVER_FALL = 0.01
# A loss gets a note if a row is this many times as high as the rows before it, and
# higher by this part of its whole fall.
LOSS_SPIKE = 3.0
LOSS_SPIKE_OVER_FALL = 0.1
# A norm gets a note if the largest is this many times the median.
LARGE_NORM = 2.0
BAD_BATCH = 15  # times the median of the rows before
# A norm that is never above this gets a note: Adam's epsilon alone is 1e-8 in each
# element.
SHORT_NORM = 1e-6
SCALE_ADVICE = "look at the loss scale, at sum or mean, and at the number of devices"
# If two causes begin in the same step, a report names the upper one first. Limits were
# set on one half of the trainings in benchmarks/doctor.
CAUSES = (
    Cause(
        name="not finite",
        needs=signals.LOSS_OR_NORM,
        rule=rules.not_finite,
        limit=0,
        evidence="NaN or inf begins in {subject}",
        page="docs/doctor.md (Where a NaN begins)",
        advice="skip_nonfinite, and look at batch, backward pass and optimizer there",
        sees_nonfinite=True,
    ),
    Cause(
        name="bad batch",
        needs=signals.NORM,
        rule=rules.bad_batch,
        limit=BAD_BATCH,
        evidence="{subject} is {value:.3g} times the median of the rows before",
        page="docs/run_health.md (My loss spikes, or gradients explode)",
        advice="look at that batch: a clip shortens its step, skip_step leaves it out",
        least_rows=3,
    ),
    Cause(
        name="change of scale",
        needs=signals.NORM_AND_ANY_LOSS,
        rule=rules.growth_of_scale,
        limit=1.7,
        evidence="{subject} is {value:.4g} times as long from there on",
        page=PAGE_AT_ONE_STEP,
        advice=SCALE_ADVICE,
        least_rows=20,
    ),
    Cause(
        name="change of scale",
        needs=signals.NORM_AND_ANY_LOSS,
        rule=rules.fall_of_scale,
        limit=1.7,
        evidence="{subject} is {value:.4g} times as short from there on",
        page=PAGE_AT_ONE_STEP,
        advice=SCALE_ADVICE,
        least_rows=20,
    ),
    Cause(
        name="divergence",
        needs=signals.LOSS,
        rule=rules.divergence,
        limit=1.4,
        evidence="{subject} is {value:.3g} times its lowest level, and stays high",
        page=PAGE_AT_ONE_STEP,
        advice=(
            "go back to a checkpoint, with a clip or a lower rate. If no norm leaps "
            "there, look at the data"
        ),
        least_rows=LEAST_ROWS_OF_LOSS,
    ),
    Cause(
        name="steady growth",
        needs=signals.NORM,
        rule=rules.growth,
        limit=10,
        evidence="{subject} grows {value:.3g} times since its second fifth",
        page="docs/run_health.md",
        advice="a lower learning rate, or weight decay",
        least_rows=40,
    ),
    Cause(
        name="steady growth",
        needs=signals.NORM,
        rule=rules.late_growth,
        limit=20,
        evidence="{subject} grows to {value:.3g} times its median",
        page="docs/run_health.md",
        advice="a lower learning rate, or weight decay",
        least_rows=40,
    ),
    Cause(
        name="vanishing",
        needs=signals.NORM_AND_LOSS,
        rule=rules.vanishing,
        limit=rules.VANISHED,
        evidence="{subject} falls to nearly 0, and the loss does not",
        page="docs/doctor.md (No gradient)",
        advice="look for dead units, a loss scale that underflows, a stop_gradient",
        least_rows=20,
    ),
    Cause(
        name="learning rate",
        needs=signals.UPDATES,
        rule=rules.learning_rate,
        limit=rules.HIGH_RATIO,
        evidence="updates are {value:.2g} of the weights",
        page="docs/run_health.md",
        advice="a lower learning rate, or a longer warm-up",
        sees_nonfinite=True,
        least_rows=5,
    ),
    Cause(
        name="growing weights",
        needs=signals.WEIGHTS,
        rule=rules.growth,
        # Weights that the rule finds to grow end above 1.3**3 = 2.2. The limit only
        # decides which step is the first.
        limit=2,
        evidence="weights grow {value:.3g} times since the second fifth of the log",
        page="docs/doctor.md (Record)",
        advice="look at the sign of weight decay, and at the learning rate",
        least_rows=40,
    ),
    Cause(
        name="lost updates",
        needs=signals.ROUNDING,
        rule=rules.lost_updates,
        limit=1,
        evidence=(
            "updates of {subject} are {value:.3g} times too small for the dtype of the "
            "weights"
        ),
        page="docs/sharp_edges.md (Mixed precision and loss scaling)",
        advice="float32 weights beside those of 16 bits, or a higher learning rate",
        least_rows=10,
    ),
    Cause(
        name="no gradient",
        needs=signals.GRADIENTS,
        rule=rules.no_gradient,
        limit=0,
        evidence="{subject} has a gradient of 0 from there to the end",
        page="docs/doctor.md (No gradient)",
        advice="look for a stop_gradient, dead units, or a part that is not called",
        least_rows=20,
    ),
    Cause(
        name="underflow",
        needs=signals.SUBNORMALS,
        rule=rules.underflow,
        limit=0.25,
        evidence="{value:.0%} of the nonzero elements of {subject} are subnormal",
        page="docs/sharp_edges.md (Mixed precision and loss scaling)",
        advice="a larger loss scale, or bfloat16",
        least_rows=5,
    ),
    Cause(
        name="dead embedding",
        needs=signals.DEAD_ROWS,
        rule=rules.dead_rows,
        limit=0.2,
        evidence="{value:.0%} of the rows of {subject} have no gradient any more",
        page="docs/doctor.md (Dead rows)",
        advice="look at the tokens, and at weight decay of rows that are not read",
    ),
    Cause(
        name="attention logits",
        needs=signals.LOGITS,
        rule=np.asarray,  # the column itself
        limit=100,  # of Kimi K2
        evidence="{subject} is {value:.4g}",
        page="docs/large_models.md (Attention logits: QK-Clip)",
        advice="qk_clip after the optimizer, or a norm of queries and keys",
    ),
    Cause(
        name="norm after clip",
        needs=signals.EVERY_NORM,
        rule=rules.norm_after_clip,
        limit=0,
        evidence="{value:.0%} of the rows of {subject} are within 0.1 % of the largest",
        page="docs/choosing_a_limit.md (Norms after a clip)",
        advice="log the norm before the clip: spikes cannot be seen in this one",
        is_of_setup=True,
    ),
    Cause(
        name="clipped always",
        needs=signals.CLIP,
        rule=rules.clipped_always,
        limit=10,
        evidence="{subject} is {value:.3g} times its limit in the median of all rows",
        page="docs/choosing_a_limit.md",
        advice="with plain SGD a higher limit. With Adam this one may stay",
        is_of_setup=True,
        least_rows=20,
    ),
    Cause(
        name="skip behind clip",
        needs=signals.SKIP_AND_CLIP,
        rule=rules.skip_behind_clip,
        limit=1,
        evidence=(
            "{subject} never exceeds the clip limit, even when the gradient is "
            "{value:.3g} times that"
        ),
        page="docs/sharp_edges.md (A skip behind a clipper)",
        advice="skip_step(optax.chain(clipper, optimizer)), no clipper in front",
        is_of_setup=True,
    ),
)


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
        a loss and a norm.
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
        a loss and a norm.
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
      >>> print(report.not_judged["a gradient norm"])
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
            return _judge(read_log(log, call, pattern), loss)
        rows = list(log) if isinstance(log, Iterable) else [log]
        if not all(isinstance(row, Mapping) for row in rows):
            raise TypeError(
                f"{call}: log must be a file, or a list with a dict for each step, as "
                f"DataFrame.to_dict('records') of pandas, got {shown(log)}."
            )
        return _judge(log_from_rows(rows, []), loss)
    except ValueError as error:
        # Errors of `read_log` begin with the prefix already.
        text = str(error).removeprefix(prefix)
        raise ValueError(f"{prefix}{text}") from None


# Rules divide by norms, which may be 0, NaN or inf.
@np.errstate(all="ignore")
def _judge(log: Log, loss_name: str | None) -> Report:
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
    findings_of_setup: list[Finding] = []
    other_findings: list[Finding] = []
    not_judged: dict[str, list[str]] = {}
    for cause in CAUSES:
        is_judged = False
        hits: list[Hit] = []
        for columns in run.inputs_of_need[cause.needs]:
            hits_of_columns = _hits(cause, columns)
            if hits_of_columns is not None:
                is_judged = True
                hits += hits_of_columns
        if hits:
            findings = findings_of_setup if cause.is_of_setup else other_findings
            findings.append(_finding(cause, hits))
        if not is_judged and not cause.is_of_setup:
            names = not_judged.setdefault(_lacking(cause, run), [])
            # "change of scale" stands in the table twice, for growth and fall.
            if cause.name not in names:
                names.append(cause.name)
    findings = [
        *sorted(other_findings, key=lambda finding: finding.step),
        *sorted(findings_of_setup, key=lambda finding: finding.step),
    ]
    return Report(
        findings=findings,
        looked_at=[
            f"{column.name!r} ({len(column.steps)} rows)" for column in run.looked_at
        ],
        not_judged=not_judged,
        notes=[
            *log.notes,
            *_notes(run),
            *_notes_on_norms(run),
            *_notes_on_losses(run, findings),
            *_notes_on_parts(log, findings),
        ],
    )


def _lacking(cause: Cause, run: signals.Run) -> str:
    """What a log must have so that a cause can be judged, but does not have."""
    needs = cause.needs
    if run.inputs_of_need[needs]:
        return f"{cause.least_rows} rows with {needs}"
    if needs in signals.NEEDS_OF_RECORDER and not run.recorders:
        return signals.ANY_RECORDER
    # What needs both is said beside what needs the one that is not there.
    if needs in (signals.NORM_AND_ANY_LOSS, signals.NORM_AND_LOSS):
        needs = signals.LOSS if run.gradient_norms else signals.NORM
    if needs == signals.LOSS and run.loss_candidates:
        return f"{needs}, such as {quoted(run.loss_candidates)}"
    return needs


def _notes(run: signals.Run) -> list[str]:
    """What the log does not show, and how columns were read."""
    notes: list[str] = []
    # The smallest distance, since some columns are logged more rarely than others. If
    # there are only two rows, one between them may have been damaged.
    columns = [column for column in run.looked_at if len(column.steps) > 2]
    notes += notes_on_distance(min(map(distance_of_rows, columns), default=1))
    names_of_notes: dict[str, list[str]] = {}
    for column in run.looked_at:
        for note in column.notes:
            names_of_notes.setdefault(note, []).append(column.name)
    for note, names in names_of_notes.items():
        notes.append(f"{quoted(names)}: {note}")
    for column in run.looked_at:
        # A column with more empty cells than this is one that is logged more rarely.
        if 0 < column.empty_cells < column.values.size / 2:
            notes.append(
                f"Rows without an entry of {column.name!r}: {column.empty_cells}. They "
                "may be NaN, because pandas writes NaN so."
            )
    if run.overflow_steps:
        notes.append(
            f"Steps with norms that are not finite: {len(run.overflow_steps)}, the "
            f"first of them step {min(run.overflow_steps)}. They are taken for "
            "overflows of a dynamic loss scale. If the run has none, look at that step."
        )
    recorders = run.recorders
    if len(recorders) > 1 and not any(recorder.is_of_updates for recorder in recorders):
        names = [recorder.name for recorder in recorders]
        notes.append(
            f"{quoted(names)} do not say which of them sees updates: name them with "
            "optax.named_chain, one with 'update' in it. See docs/doctor.md (Record)"
        )
    return notes


def _notes_on_norms(run: signals.Run) -> list[str]:
    """Norms that are too short to train with, and the largest ones: a spike below the
    limit of a bad batch may still want a clip.
    """
    notes: list[str] = []
    for norm in run.gradient_norms:
        if norm.steps.size and norm.values.max() < SHORT_NORM:
            notes.append(
                f"{norm.name!r} never exceeds {norm.values.max():.2g}. So short a "
                "gradient may be lost in the epsilon of Adam. See docs/doctor.md (No "
                "gradient)"
            )
        finite_norm = rows_kept(norm, np.isfinite(norm.values))
        norm = rows_kept(finite_norm, finite_norm.values > 0)
        if norm.steps.size:
            row = np.argmax(norm.values)
            step = norm.steps[row]
            ratio = norm.values[row] / np.median(norm.values)
            advice = "See docs/choosing_a_limit.md"
            if row >= norm.steps.size - rules.SHORT:
                advice = "If norms grow up to there, lower the learning rate."
            if ratio >= LARGE_NORM:
                near_miss = _near_bad_batch(finite_norm, step, ratio)
                notes.append(
                    f"The largest {norm.name!r} is {ratio:.3g} times its median"
                    f"{near_miss}, at step {step}. {advice}"
                )
    return notes


def _near_bad_batch(norm: Column, step: int, ratio: float) -> str:
    """The number of the rule of a bad batch at the step of the largest norm, in words,
    if it is not above the limit and a reader might think so. Else "".

    `ratio`: the largest norm over the median of the whole log.
    """
    (ratio_before,) = rules.bad_batch(norm.values)[norm.steps == step]
    # 0 if the norm does not come back. Then a spike is no bad batch, however high.
    is_below_limit = 0 < ratio_before <= BAD_BATCH
    if is_below_limit and max(ratio, ratio_before) > BAD_BATCH / 2:
        return (
            f", and {ratio_before:.3g} times the median of the rows before it (bad "
            f"batch: above {BAD_BATCH})"
        )
    return ""


def _notes_on_losses(run: signals.Run, findings: list[Finding]) -> list[str]:
    """Losses that leap, or end above their lowest level, where no divergence is found:
    data or objective may have changed, which a log does not show.
    """
    if any(finding.cause == "divergence" for finding in findings):
        return []
    notes = []
    for (loss,) in run.inputs_of_need[signals.LOSS]:
        loss = rows_kept(loss, np.isfinite(loss.values))
        if loss.steps.size < LEAST_ROWS_OF_LOSS:
            continue
        levels = rules.loss_levels(loss.values)
        fall = levels.first - levels.lowest
        least_rise = max(LEAST_RISE * levels.lowest, LEAST_RISE_OVER_FALL * fall)
        if levels.is_rise and levels.rise > least_rise:
            notes.append(
                f"{loss.name!r} is lowest near step {loss.steps[levels.lowest_row]}, "
                f"at {levels.lowest:.3g}, and ends at {levels.last:.3g}. If neither "
                f"data nor objective changed, it diverges. See {PAGE_AT_ONE_STEP}"
            )
        usual_values = rules.usual_before(loss.values)
        is_leap = loss.values - usual_values > LOSS_SPIKE_OVER_FALL * fall
        ratios = np.where(is_leap, loss.values / usual_values, 0)
        row = int(np.argmax(ratios))
        if ratios[row] > LOSS_SPIKE:
            notes.append(
                f"{loss.name!r} is {ratios[row]:.3g} times the median of up to 20 rows "
                f"before it at step {loss.steps[row]}. If no norm stands out there, "
                f"look at the data. See {PAGE_AT_ONE_STEP}"
            )
    return notes


def _notes_on_parts(log: Log, findings: list[Finding]) -> list[str]:
    """Whether one part of the batch made a bad batch, if the log has noise_share."""
    notes = []
    for share in columns_named(NOISE_SHARE, log):
        for finding in findings:
            values = share.values[share.steps == finding.worst]
            if finding.cause == "bad batch" and values.size:
                notes.append(
                    f"{share.name!r} is {values[0]:.2g} at step {finding.worst}, and "
                    f"its median {np.median(share.values):.2g}. Near 1 one part of the "
                    "batch made the norm. Near the median all parts grew: look at "
                    "scale and rate."
                )
    return notes


def _hits(cause: Cause, columns: tuple[Column, ...]) -> list[Hit] | None:
    """The rows that show a cause. None if the columns have too few rows in common."""
    steps, numbers = in_common(columns)
    if not cause.sees_nonfinite:
        is_finite = np.isfinite(numbers).all(axis=0)
        steps = steps[is_finite]
        numbers = numbers[:, is_finite]
    if len(steps) < cause.least_rows:
        return None
    # Some rules have one number for all rows.
    values = np.broadcast_to(cause.rule(*numbers), steps.shape)
    rows = np.flatnonzero(values > cause.limit)
    return [Hit(columns[0].name, int(steps[row]), float(values[row])) for row in rows]


def _finding(cause: Cause, hits: list[Hit]) -> Finding:
    """One finding from all rows that show a cause."""
    worst_hit = max(hits, key=lambda hit: (hit.value, -hit.step))
    # A NaN may begin in several tensors.
    worst_names = [hit.name for hit in hits if hit[1:] == worst_hit[1:]]
    first_steps: dict[str, int] = {}
    for hit in sorted(hits, key=lambda hit: hit.step):
        first_steps.setdefault(hit.name, hit.step)
    steps = {hit.step for hit in hits}
    return Finding(
        cause=cause.name,
        step=min(steps),
        worst=worst_hit.step,
        rows=len(steps),
        value=worst_hit.value,
        limit=cause.limit,
        evidence=cause.evidence.format(
            value=worst_hit.value, subject=quoted(worst_names)
        ),
        page=cause.page,
        advice=cause.advice,
        first_steps=first_steps,
    )
