"""The numbers of a log that the rules of the doctor read."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain, product
from typing import NamedTuple

import numpy as np

from .._logs.columns import Column, Log, column_called, in_common, quoted, rows_kept
from .._logs.norms import (
    TENSOR_PATTERN,
    VALIDATION_PATTERN,
    columns_named,
    loss_of,
    norms_of,
)
from ._rules import LEAST_ROWS_OF_LOSS, LossLevels, loss_levels

# What a rule needs. A report prints these sentences, and they are the keys of
# `Run.inputs_of_need`.
LOSS_OR_NORM = "a loss or a gradient norm"
LOSS = "a loss above 0 in all rows (--loss NAME)"
NORM = "a gradient norm"
NORM_AND_ANY_LOSS = "a gradient norm, and no loss below 0 beside it"
NORM_AND_LOSS = "a gradient norm, and a loss above 0 in all rows (--loss NAME)"
EVERY_NORM = "a gradient norm, also one of record_health()"
RATE = "a column of the learning rate"
LOGITS = "a column with attention and logit in its name, or qk_clip(None)"
CLIP = "metrics of a clipper of optaxclip"
SKIP_AND_CLIP = "metrics of a skip and of a clipper"
UPDATES = "record_health() behind the optimizer, under a name with 'update' in it"
ROUNDING = "record_health() behind the optimizer, with weights=True"
WEIGHTS = "record_health() with weights=True"
GRADIENTS = "record_health() in front of the optimizer"
SUBNORMALS = "record_health() in front of the optimizer, with values=True"
DEAD_ROWS = "record_health() in front of the optimizer, with embeddings="
# A report prints one sentence for all of these, if the log has no recorder.
NEEDS_OF_RECORDER = {UPDATES, ROUNDING, WEIGHTS, GRADIENTS, SUBNORMALS, DEAD_ROWS}
ANY_RECORDER = "record_health() in the optimizer, see docs/doctor.md (Record)"

# "train/clip/outer/norm_before" of a clipper, and "train/skip_2/norm" of a skip.
NORM_OF_CLIP = re.compile(r"((.*[/. ])?clip(_\d+)?/(.*/)?)norm_before")
NORM_OF_SKIP = re.compile(r"((.*[/. ])?(skip|spike)(_\d+)?/(.*/)?)norm")
# The slash between the name of a norm and that of a tensor.
SLASH_AFTER_NORM = re.compile(r"(?<=norm)/|(?<=norm_before)/", re.IGNORECASE)
# Names that say attention and logit, or a qk_clip named with "logit" or "qk".
NAMES_OF_LOGITS = re.compile(
    r"(?!.*(limit|factor|count|num|share|mean|std|entropy))"
    r"(.*(attn|attention|(^|[/._])qk).*logit.*|.*logit.*(attn|attention).*"
    r"|(.*[/. ])?(clip|record)(_\d+)?/[^/]*(logit|qk)[^/]*/norm(_before)?(/.*)?)"
)
# lr, train/learning_rate, lr-Adam, learning_rate/group0, and not lr_scale
NAME_OF_RATE = re.compile(r"(.*[/. ])?(lr|learning[ _-]?rate)([/-].*|_?\d+)?")
# batch_size, bs, loss_scale, num_devices, accumulation_steps, seq_len, stage
NAME_OF_SIZE = re.compile(
    r"(.*[/._ -])?bs|.*(batch|scale|devices|accum|seq|size|stage|phase|curriculum).*"
)
NAME_OF_STAGE = re.compile(".*(stage|phase|curriculum).*")
# reward, rollout/ep_rew_mean, charts/episodic_return, but no loss of a reward model
NAME_OF_REWARD = re.compile(
    r"(?!.*loss)(.*[/._ -])?(rew|rewards?|returns?)([/._ -].*)?"
)
NAME_OF_LOSS_SCALE = re.compile(".*(loss.?scale|scaler).*")
MOST_OVERFLOWS = 0.1  # the share of rows with inf that a dynamic loss scale explains


# The arguments of a rule for each of its calls, such as one call for each tensor.
RuleInputs = list[tuple[Column, ...]]


class Run(NamedTuple):
    """What a log says about a run."""

    # For each need, such as NORM, the columns that rules read. Empty if the log lacks
    # them. A finding is named after the first column of a tuple.
    inputs_of_need: dict[str, RuleInputs]
    looked_at: list[Column]  # as a report lists them
    gradient_norms: list[Column]  # of all tensors together, one for each optimizer
    # The finite rows of the loss, if it has enough of them, and its levels.
    leveled_loss: tuple[Column, LossLevels] | None
    recorders: list[Recorder]
    overflow_steps: set[int]  # norms of these steps are left out of LOSS_OR_NORM


def run_of(log: Log, loss_name: str | None) -> Run:
    """Finds the columns that say something about a run.

    Raises:
      ValueError: there is no column `loss_name`.
    """
    logits = columns_named(NAMES_OF_LOGITS, log)
    # qk_clip names logits like norms.
    norms = _logged_norms(_without(logits, log))
    recorders = _recorders_of(log)
    recorded = _columns_of_recorders(recorders)
    # Recorders repeat the norms of a clipper or the loop, so theirs come second.
    gradient_norms = norms.global_norms_or_totals or recorded.gradient_norms
    loss = _chosen_loss(log, loss_name, norms.global_norms)
    columns_of_loss = [] if loss is None else [loss]
    tensor_norms = chain(norms.tensor_norms, *recorded.inputs_of_need[GRADIENTS])
    norms_without_overflows, overflow_steps = _all_without_overflows(
        [*norms.global_norms, *tensor_norms, *recorded.update_norms],
        has_loss_scale=bool(columns_named(NAME_OF_LOSS_SCALE, log)),
    )
    clips = _with_limits(log, NORM_OF_CLIP)
    skips = _with_limits(log, NORM_OF_SKIP)
    inputs_of_need: dict[str, RuleInputs] = {
        LOSS_OR_NORM: _one_by_one([*columns_of_loss, *norms_without_overflows]),
        **_inputs_of_loss(loss, gradient_norms),
        NORM: _one_by_one(gradient_norms),
        EVERY_NORM: _one_by_one(
            [*norms.global_norms_or_totals, *recorded.gradient_norms]
        ),
        LOGITS: _one_by_one(logits),
        RATE: _one_by_one(columns_named(NAME_OF_RATE, log)),
        CLIP: clips,
        SKIP_AND_CLIP: [(*skip, *clip) for skip, clip in product(skips, clips)],
        **recorded.inputs_of_need,
    }
    looked_at = [
        *columns_of_loss,
        *norms.global_norms,
        *norms.totals,
        *logits,
        *recorded.gradient_norms,
        *recorded.update_norms,
    ]
    return Run(
        inputs_of_need=inputs_of_need,
        looked_at=looked_at,
        gradient_norms=gradient_norms,
        leveled_loss=_with_levels(_above_0(loss)),
        recorders=recorders,
        overflow_steps=overflow_steps,
    )


def _inputs_of_loss(
    loss: Column | None, gradient_norms: Sequence[Column]
) -> dict[str, RuleInputs]:
    """The arguments of the rules that read a loss, alone or beside norms."""
    loss_above_0 = _above_0(loss)
    if loss is None:
        losses: RuleInputs = []
        norms_and_loss: RuleInputs = []
        norms_and_any_loss = _one_by_one(gradient_norms)
    elif loss_above_0 is None:
        # A norm beside a loss below 0 is not judged as if it were alone: in REINFORCE
        # (benchmarks/doctor) rewards of another scale would look like a change of
        # scale.
        losses = norms_and_loss = norms_and_any_loss = []
    else:
        losses = [(loss_above_0,)]
        norms_and_loss = [(norm, loss_above_0) for norm in gradient_norms]
        norms_and_any_loss = norms_and_loss
    return {
        LOSS: losses,
        NORM_AND_LOSS: norms_and_loss,
        NORM_AND_ANY_LOSS: norms_and_any_loss,
    }


def _chosen_loss(log: Log, name: str | None, norms: Sequence[Column]) -> Column | None:
    """The column of the loss. Without a name it is the training loss. A log without
    this and without norms may have the loss of a validation. None if there is no loss.
    """
    loss = loss_of(log) if name is None else column_called(name, log)
    if loss is not None:
        return _zeros_as_nan(loss, norms)
    if name is None and norms:
        return None
    if name is None:
        return loss_of(log, VALIDATION_PATTERN)
    names = quoted(list(log.columns))
    raise ValueError(f"there is no loss {name!r} in it, only {names}.")


def _zeros_as_nan(loss: Column, norms: Sequence[Column]) -> Column:
    """A loss with NaN for the 0 that transformers writes beside a norm of NaN."""
    is_nan = np.zeros(loss.steps.shape, bool)
    for norm in norms:
        nan_steps = norm.steps[np.isnan(norm.values)]
        is_nan |= (loss.values == 0) & np.isin(loss.steps, nan_steps)
    notes = [*loss.notes]
    if is_nan.any():
        notes.append(
            "0 beside a norm of NaN is read as NaN, as transformers writes it."
        )
    return loss._replace(values=np.where(is_nan, np.nan, loss.values), notes=notes)


def _above_0(loss: Column | None) -> Column | None:
    """The loss where it is not 0. None if there is no loss, or if it falls below 0: the
    ratio of two such losses says nothing.
    """
    if loss is None or np.nanmin(loss.values, initial=np.inf) < 0:
        return None
    # transformers rounds a small loss to 0, which has no ratio.
    return rows_kept(loss, loss.values != 0)


def _with_levels(loss: Column | None) -> tuple[Column, LossLevels] | None:
    """The finite rows of a loss, and its levels. None if there are too few rows."""
    if loss is None:
        return None
    finite_loss = rows_kept(loss, np.isfinite(loss.values))
    if finite_loss.steps.size < LEAST_ROWS_OF_LOSS:
        return None
    return finite_loss, loss_levels(finite_loss.values)


class LoggedNorms(NamedTuple):
    """The norms of gradients that a log has, without those of recorders."""

    global_norms: list[Column]  # of all tensors together
    tensor_norms: list[Column]
    totals: list[Column]  # of all tensors together, from the norms of tensors

    @property
    def global_norms_or_totals(self) -> list[Column]:
        """The totals only stand in where there are no global norms."""
        return self.global_norms or self.totals


def _logged_norms(log: Log) -> LoggedNorms:
    tensor_norms = columns_named(TENSOR_PATTERN, log)
    # A log may have clip/norm_before/w and record/norm/w.
    tensors_of_norm: dict[str, list[Column]] = defaultdict(list)
    for column in tensor_norms:
        norm, *_ = re.split(SLASH_AFTER_NORM, column.name, maxsplit=1)
        tensors_of_norm[norm].append(column)
    totals = [
        total_of(f"{norm}/*", tensors) for norm, tensors in tensors_of_norm.items()
    ]
    return LoggedNorms(norms_of(log), tensor_norms, totals)


def _without(columns: Sequence[Column], log: Log) -> Log:
    """A log without some columns."""
    names = {column.name for column in columns}
    kept = {name: column for name, column in log.columns.items() if name not in names}
    return log._replace(columns=kept)


def total_of(name: str, norms: Sequence[Column]) -> Column:
    """The norm of several tensors together, in the steps that have all."""
    steps, numbers = in_common(norms)
    root_of_squares = np.sqrt(np.sum(numbers**2, axis=0))
    # Tensors are logged together, so notes on one of them hold for all.
    return Column(name, steps, root_of_squares, norms[0].notes, unit=norms[0].unit)


def _one_by_one(columns: Sequence[Column]) -> RuleInputs:
    """The arguments of a rule that is called with one column at a time."""
    return [(column,) for column in columns]


def _all_without_overflows(
    norms: Sequence[Column], has_loss_scale: bool
) -> tuple[list[Column], set[int]]:
    """The norms without overflows of a dynamic loss scale, and the steps of these."""
    kept_norms: list[Column] = []
    overflow_steps: set[int] = set()
    for norm in norms:
        kept_norm = _without_overflows(norm, has_loss_scale)
        kept_norms.append(kept_norm)
        overflow_steps |= {*norm.steps} - {*kept_norm.steps}
    return kept_norms, overflow_steps


def _without_overflows(norm: Column, has_loss_scale: bool) -> Column:
    """A norm without the rows with inf or NaN in which a dynamic loss scale may have
    skipped the step. Nothing is left out if

    - more than a tenth of all rows, or of the last fifth (at least 50 rows), are not
      finite, not counting those before the first finite one, in which a loss scale that
      begins too high is lowered,
    - the last row is one of them, or
    - the norm has NaN, and the log has no loss scale.
    """
    is_finite = np.isfinite(norm.values)
    has_begun = np.logical_or.accumulate(is_finite)
    overflows = has_begun & ~is_finite
    recent_overflows = overflows[-max(50, len(overflows) // 5) :]
    if max(overflows.mean(), recent_overflows.mean()) > MOST_OVERFLOWS:
        return norm
    if not is_finite[-1:].all():
        return norm
    if np.isnan(norm.values).any() and not has_loss_scale:
        return norm
    return rows_kept(norm, is_finite)


def _with_limits(log: Log, pattern: re.Pattern[str]) -> RuleInputs:
    """The norms whose names fit a pattern, each with its limit."""
    pairs: RuleInputs = []
    for name, norm in log.columns.items():
        match = pattern.fullmatch(name)
        if match and f"{match[1]}limit" in log.columns:
            pairs.append((norm, log.columns[f"{match[1]}limit"]))
    return pairs


# --------------------------------------------------------------------------- recorders


# What `record_health` calls its numbers: "ratio" in health/updates/ratio/blocks/w.
QUANTITIES = {
    "norm",
    "weight_norm",
    "ratio",
    "rounding",
    "zeros",
    "subnormals",
    "nonfinite",
    "dead_rows",
}
# The part "health_2" of such a name. W&B may write a run in front: "sun-7 - health".
HEALTH_PART = re.compile(r"(.*[. ])?health(_\d+)?")


class Recorder(NamedTuple):
    """The columns of one `record_health`."""

    name: str  # such as health/updates
    # For each quantity its columns by tensor. Under "" is the largest of all tensors.
    columns_of_quantity: defaultdict[str, dict[str, Column]]

    @property
    def is_of_updates(self) -> bool:
        """Whether its name says so. The name of a run in front of it does not count."""
        _, _, name = self.name.rpartition(" - ")[-1].partition("health")
        return "update" in name.lower()

    def of_tensors(self, *quantities: str) -> RuleInputs:
        """The columns of these quantities: of each tensor, or of the summary of all."""
        tables = [self.columns_of_quantity[quantity] for quantity in quantities]
        tensors = set(tables[0]).intersection(*tables)
        # The summary repeats what the tensors show.
        if len(tensors) > 1:
            tensors.discard("")
        return [tuple(table[tensor] for table in tables) for tensor in sorted(tensors)]

    def subnormals(self) -> RuleInputs:
        """For each tensor the share of subnormal elements, and the share of zeros."""
        # In a summary the largest share of each may come from two different tensors.
        if set(self.columns_of_quantity["subnormals"]) == {""}:
            return self.of_tensors("subnormals")
        return self.of_tensors("subnormals", "zeros")

    def total_or_largest(self, quantity: str) -> list[Column]:
        """A list of one column: the norm of all tensors together, or if there is a
        summary the largest norm of a tensor. Empty if the quantity was not recorded.
        """
        # A log with both may have the tensors in few rows.
        table = self.columns_of_quantity[quantity]
        if "" in table:
            return [table[""]]
        return [total_of(self.name, list(table.values()))] if table else []


class RecorderColumns(NamedTuple):
    """The columns of all recorders."""

    gradient_norms: list[Column]  # of all tensors together
    update_norms: list[Column]  # likewise
    inputs_of_need: dict[str, RuleInputs]  # of needs that only recorders meet


def _columns_of_recorders(recorders: Sequence[Recorder]) -> RecorderColumns:
    """The columns of all recorders, by what they are and by what rules need."""
    recorded = RecorderColumns([], [], {need: [] for need in NEEDS_OF_RECORDER})
    inputs = recorded.inputs_of_need
    for recorder in recorders:
        norms = recorder.total_or_largest("norm")
        weight_norms = recorder.total_or_largest("weight_norm")
        inputs[WEIGHTS] += _one_by_one(weight_norms)
        if recorder.is_of_updates:
            recorded.update_norms.extend(norms)
            inputs[UPDATES] += zip(norms, weight_norms)
            inputs[ROUNDING] += recorder.of_tensors("ratio", "rounding")
        else:
            recorded.gradient_norms.extend(norms)
            inputs[GRADIENTS] += recorder.of_tensors("norm")
            inputs[SUBNORMALS] += recorder.subnormals()
            inputs[DEAD_ROWS] += recorder.of_tensors("dead_rows")
    return recorded


class Reading(NamedTuple):
    """What the name of a column says: train/health_2/updates/norm/blocks/w."""

    recorder: str  # train/health_2/updates
    quantity: str  # norm
    tensor: str  # blocks/w


def _recorders_of(log: Log) -> list[Recorder]:
    """The recorders whose columns a log has. A recorder and a tensor may both be named
    like a quantity: health/ratio/norm/w is the norm of w in a recorder "ratio", or the
    ratio of a tensor norm/w. We take the reading whose recorder has most quantities.
    """
    quantities: dict[str, set[str]] = defaultdict(set)
    for name in log.columns:
        for reading in _readings(name):
            quantities[reading.recorder].add(reading.quantity)
    recorders: dict[str, Recorder] = {}
    for name, column in log.columns.items():
        readings = list(_readings(name))
        if readings:
            reading = max(
                readings, key=lambda reading: len(quantities[reading.recorder])
            )
            empty = Recorder(reading.recorder, defaultdict(dict))
            recorder = recorders.setdefault(reading.recorder, empty)
            # Tensors of two recorders may have the same names.
            tensor_name = f"{reading.recorder}/{reading.tensor}".removesuffix("/")
            renamed = column._replace(name=tensor_name)
            recorder.columns_of_quantity[reading.quantity][reading.tensor] = renamed
    return list(recorders.values())


def _readings(name: str) -> Iterator[Reading]:
    """A reading for each quantity that comes after "health" in a name."""
    parts = name.split("/")
    is_behind_health = False
    for index, part in enumerate(parts):
        if is_behind_health and part in QUANTITIES:
            recorder = "/".join(parts[:index])
            tensor = "/".join(parts[index + 1 :])
            yield Reading(recorder, part, tensor)
        if HEALTH_PART.fullmatch(part):
            is_behind_health = True
