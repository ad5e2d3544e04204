"""Notes of a report: what may need a look, and what the log does not show."""

import numpy as np

from .._logs.columns import Log, distance_of_rows, notes_on_distance, quoted, rows_kept
from .._logs.norms import NOISE_SHARE, columns_named
from . import _rules as rules
from . import _signals as signals
from ._causes import BAD_BATCH, NOT_FINITE, PAGE_AT_ONE_STEP, Finding

# A loss gets a note if a row is this many times as high as the rows before it.
LOSS_SPIKE = 3.0
# Such a row must also rise by more than this part of the whole fall of the loss.
LOSS_SPIKE_OVER_FALL = 0.1
# A loss gets a note if its last level is above this part of the level in the second
# tenth of the log.
FLAT = 0.95
# A norm gets a note if the largest is this many times the median.
LARGE_NORM = 2.0
# A norm that is never above this gets a note: Adam's epsilon alone is 1e-8 in each
# element.
SMALL_NORM = 1e-6
# A norm that is never below this gets a note.
HUGE_NORM = 100.0


def notes_of(log: Log, run: signals.Run, findings: list[Finding]) -> list[str]:
    """All notes of a report."""
    return [
        *log.notes,
        *_notes_on_columns(run, log.unit),
        *_notes_on_norms(run),
        *_notes_on_loss(run, findings),
        *_notes_on_parts(log, findings),
    ]


def _notes_on_columns(run: signals.Run, unit: str) -> list[str]:
    """What the log does not show, and how columns were read."""
    notes: list[str] = []
    # The smallest distance, since some columns are logged more rarely than others. If
    # there are only two rows, one between them may have been damaged.
    columns = [column for column in run.looked_at if len(column.steps) > 2]
    if columns:
        notes += notes_on_distance(min(columns, key=distance_of_rows))
    names_by_note: dict[str, list[str]] = {}
    for column in run.looked_at:
        notes_of_column = [*column.notes]
        # With more empty cells than this a column is logged more rarely.
        if 0 < column.empty_cells < column.values.size / 2:
            notes_of_column.append(
                f"Rows without an entry: {column.empty_cells}. W&B and pandas leave a "
                "cell empty in rows of an evaluation, behind the end of a run, and for "
                "NaN."
            )
        for note in notes_of_column:
            names_by_note.setdefault(note, []).append(column.name)
    for note, names in names_by_note.items():
        notes.append(f"{quoted(names)}: {note}")
    if run.overflow_steps:
        notes.append(
            f"{unit.title()}s with norms that are not finite: "
            f"{len(run.overflow_steps)}, the first of them {unit} "
            f"{min(run.overflow_steps)}. They are taken for overflows of a dynamic "
            f"loss scale. If the run has no loss scale, look at that {unit}."
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
    """Norms that are too small to train with, and the largest ones: a spike below the
    limit of a bad batch may still want a clip.
    """
    notes: list[str] = []
    for norm in run.gradient_norms:
        if norm.steps.size and norm.values.max() < SMALL_NORM:
            notes.append(
                f"{norm.name!r} never exceeds {norm.values.max():.2g}. So short a "
                "gradient may be lost in the epsilon of Adam. See docs/doctor.md (No "
                "gradient)"
            )
        if norm.steps.size and norm.values.min() > HUGE_NORM:
            notes.append(
                f"{norm.name!r} is never below {norm.values.min():.3g}. Look at the "
                "loss scale, at sum or mean, and at the scale of the inputs."
            )
        is_usable = np.isfinite(norm.values) & (norm.values > 0)
        usable_norm = rows_kept(norm, is_usable)
        if not is_usable.any():
            continue
        row = np.argmax(usable_norm.values)
        ratio = usable_norm.values[row] / np.median(usable_norm.values)
        if ratio >= LARGE_NORM:
            advice = "See docs/choosing_a_limit.md"
            if row >= usable_norm.steps.size - rules.SHORT_WINDOW:
                advice = "If norms grow up to there, lower the learning rate."
            notes.append(
                f"The largest {norm.name!r} is {ratio:.3g} times its median, at "
                f"{norm.unit} {usable_norm.steps[row]}. {advice}"
            )
    return notes


def _notes_on_loss(run: signals.Run, findings: list[Finding]) -> list[str]:
    """A loss that ends above its lowest level, does not fall, or leaps: data or
    objective may have changed, which a log does not show.
    """
    # The levels of a loss say little if it becomes NaN.
    is_broken = any(finding.cause == NOT_FINITE for finding in findings)
    if run.leveled_loss is None or is_broken:
        return []
    loss, levels = run.leveled_loss
    # A finding says that the loss never falls.
    if levels.kept_height:
        return []
    notes: list[str] = []
    if levels.is_rise:
        notes.append(
            f"{loss.name!r} rises from {levels.lowest:.3g} near {loss.unit} "
            f"{loss.steps[levels.rise_row]} to {levels.last:.3g} in its last rows. "
            "That may be right if data or objective changed there. See "
            f"{PAGE_AT_ONE_STEP}"
        )
    elif levels.last > rules.NEVER_FALLS * loss.values[0]:
        notes.append(
            f"{loss.name!r} begins at {loss.values[0]:.3g} and ends higher, at "
            f"{levels.last:.3g}. If the first batch was not unusual, the rate is too "
            "high, or data or objective became harder."
        )
    elif levels.last > FLAT * levels.second_tenth:
        notes.append(
            f"{loss.name!r} does not fall much after the first fifth of the log: "
            f"{levels.second_tenth:.3g} there, {levels.last:.3g} at the end. RL, a "
            "GAN and a run that is done look so too. Else look at data, labels and "
            "learning rate."
        )
    if levels.is_rise:
        return notes
    usual_values = rules.usual_before(loss.values)
    is_large_rise = loss.values - usual_values > LOSS_SPIKE_OVER_FALL * levels.fall
    ratios = np.where(is_large_rise, loss.values / usual_values, 0)
    row = int(np.argmax(ratios))
    if ratios[row] > LOSS_SPIKE:
        notes.append(
            f"{loss.name!r} is {ratios[row]:.3g} times the median of up to 20 rows "
            f"before it at {loss.unit} {loss.steps[row]}. If no norm stands out "
            "there, look at the data, and at weights that were swapped or restored. "
            f"See {PAGE_AT_ONE_STEP}"
        )
    return notes


def _notes_on_parts(log: Log, findings: list[Finding]) -> list[str]:
    """Whether one part of the batch made a bad batch, if the log has noise_share."""
    notes = []
    for share in columns_named(NOISE_SHARE, log):
        for finding in findings:
            values = share.values[share.steps == finding.worst]
            if finding.cause == BAD_BATCH and values.size:
                notes.append(
                    f"{share.name!r} is {values[0]:.2g} at {log.unit} {finding.worst}, "
                    f"and its median {np.median(share.values):.2g}. Near 1 one part "
                    "of the batch made the norm. Near the median all parts grew: look "
                    "at the loss scale and the learning rate."
                )
    return notes
