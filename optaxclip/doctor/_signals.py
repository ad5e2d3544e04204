"""The numbers of a log that the rules of the doctor read."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from .._logs.columns import Column, Log, in_common, listed, rows_kept
from .._logs.norms import TENSOR_PATTERN, columns_named, losses_of, norms_of

# What a rule needs. A report prints these sentences, and they are the keys of
# `Run.columns`.
LOSS_OR_NORM = "a loss or a gradient norm"
LOSS = "a loss above 0 (--loss NAME, if the log has one)"
NORM = "a gradient norm"
NORM_AND_ANY_LOSS = "a gradient norm, and no loss below 0 beside it"
NORM_AND_LOSS = "a gradient norm, and a loss above 0 (--loss NAME)"
EVERY_NORM = "a gradient norm, also one of record_health()"
LOGITS = "a column with attn or attention and logit in its name, or of qk_clip(None)"
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
# Names that say attention and logit, or a qk_clip named with "logit" or "qk".
NAMES_OF_LOGITS = re.compile(
    r"(?!.*(limit|factor|count|num|share|mean|std|entropy))"
    r"(.*(attn|attention|(^|[/._])qk).*logit.*|.*logit.*(attn|attention).*"
    r"|(.*[/. ])?(clip|record)(_\d+)?/[^/]*(logit|qk)[^/]*/norm(_before)?(/.*)?)"
)
NAME_OF_LOSS_SCALE = re.compile("loss.?scale|scaler")
MOST_OVERFLOWS = 0.1  # the share of rows with inf that a dynamic loss scale explains


# The arguments of a rule for each of its calls, such as one call for each tensor.
RuleInputs = list[tuple[Column, ...]]


class Run(NamedTuple):
    """What a log says about a run."""

    # For each need, such as NORM, the columns that rules read. Empty if the log lacks
    # them. A finding is named after the first column of a tuple.
    columns: defaultdict[str, RuleInputs]
    looked_at: list[Column]  # with the norm of each recorder
    gradient_norms: list[Column]  # of all tensors together, one for each optimizer
    recorders: list[Recorder]
    overflow_steps: set[int]  # norms of these steps are left out of LOSS_OR_NORM


def run_of(log: Log, loss_name: str | None) -> Run:
    """Finds the columns that say something about a run.

    Raises:
      ValueError: there is no column `loss_name`.
    """
    losses = _losses_of(log, loss_name)
    logits = columns_named(NAMES_OF_LOGITS, log)
    log_without_logits = _without_logits(log, logits)
    global_norms = norms_of(log_without_logits)
    tensors = columns_named(TENSOR_PATTERN, log_without_logits)
    norm_of_tensors = [total_of("all tensors", tensors)] if tensors else []
    logged_norms = global_norms or norm_of_tensors
    recorders = _recorders_of(log)
    recorded = _recorded(recorders)
    # A recorder repeats what a clipper or the loop logs.
    gradient_norms = logged_norms or recorded.gradient_norms
    groups = _norms_of_groups(tensors) or recorded.groups
    columns = recorded.columns
    columns[NORM] = _one_by_one([*gradient_norms, *groups])
    columns[EVERY_NORM] = _one_by_one([*logged_norms, *recorded.gradient_norms])
    columns[GRADIENTS] = _one_by_one(recorded.tensors)
    columns[LOGITS] = _one_by_one(logits)
    columns[CLIP] = _with_limits(log, NORM_OF_CLIP)
    skips = _with_limits(log, NORM_OF_SKIP)
    for skip_columns, clip_columns in product(skips, columns[CLIP]):
        columns[SKIP_AND_CLIP].append((*skip_columns, *clip_columns))
    # The ratio of two losses says nothing if the loss changes its sign. Without a loss
    # REINFORCE with rewards of another scale (benchmarks/doctor) would be found to have
    # a change of scale, so its norm is not judged alone.
    if all(np.nanmin(loss.values, initial=np.inf) >= 0 for loss in losses):
        # transformers rounds a small loss to 0, which has no ratio.
        above_0 = [rows_kept(loss, loss.values != 0) for loss in losses]
        columns[LOSS] = _one_by_one(above_0)
        columns[NORM_AND_ANY_LOSS] = [(norm, *above_0) for norm in gradient_norms]
        columns[NORM_AND_LOSS] = list(product(gradient_norms, above_0))
    columns[LOSS_OR_NORM] = _one_by_one(losses)
    overflow_steps: set[int] = set()
    has_loss_scale = any(
        NAME_OF_LOSS_SCALE.search(name.lower()) for name in log.columns
    )
    for norm in [*global_norms, *tensors, *recorded.tensors, *recorded.update_norms]:
        finite_norm = _without_overflows(norm, has_loss_scale)
        columns[LOSS_OR_NORM].append((finite_norm,))
        overflow_steps |= {*norm.steps} - {*finite_norm.steps}
    looked_at = [
        *losses,
        *global_norms,
        *norm_of_tensors,
        *logits,
        *recorded.gradient_norms,
        *recorded.update_norms,
    ]
    return Run(columns, looked_at, gradient_norms, recorders, overflow_steps)


def _losses_of(log: Log, name: str | None) -> list[Column]:
    """The column of the loss. Empty if no name is given and the log has none."""
    if name is None:
        return losses_of(log)
    if name not in log.columns:
        names = listed(list(log.columns))
        raise ValueError(f"there is no loss {name!r} in it, only {names}.")
    return [log.columns[name]]


def _without_logits(log: Log, logits: Sequence[Column]) -> Log:
    """A log in which no logit is taken for a norm: qk_clip names both alike."""
    columns = dict(log.columns)
    for column in logits:
        del columns[column.name]
    return log._replace(columns=columns)


def total_of(name: str, norms: Sequence[Column]) -> Column:
    """The norm of several tensors together, in the steps that have all."""
    steps, numbers = in_common(norms)
    root_of_squares = np.sqrt(np.sum(numbers**2, axis=0))
    # Tensors are logged together, so notes on one of them hold for all.
    return Column(name, steps, root_of_squares, norms[0].notes)


def _norms_of_groups(tensors: Sequence[Column]) -> list[Column]:
    """The norm of each group of tensors: actor/w and actor/b are the group actor. A
    group is named up to the first part that differs between tensors.
    """
    paths = [column.name.split("/") for column in tensors]
    depth = 1
    for parts in zip(*paths):
        if len(set(parts)) > 1:
            break
        depth += 1
    groups: dict[str, list[Column]] = defaultdict(list)
    for column, path in zip(tensors, paths):
        groups["/".join(path[:depth])].append(column)
    # The norm of a single group is the norm of all tensors.
    if len(groups) == 1:
        return []
    norms: list[Column] = []
    for name, columns in groups.items():
        norm = total_of(name, columns)
        # Before a head or a factor of LoRA that begins at 0, the first gradient is 0.
        has_begun = np.logical_or.accumulate(norm.values != 0)
        norm = rows_kept(norm, has_begun)
        # A later norm of 0 marks an expert without tokens. In other steps it gets far
        # more than usual, which is no bad batch.
        if norm.values.all():
            norms.append(norm)
    return norms


def _one_by_one(columns: Sequence[Column]) -> RuleInputs:
    return [(column,) for column in columns]


def _without_overflows(norm: Column, has_loss_scale: bool) -> Column:
    """A norm without the rows with inf or NaN in which a dynamic loss scale may have
    skipped the step. The norm as it is if these are more than a tenth of all rows or
    among them the last one, or if it has NaN and the log has no loss scale.
    """
    is_finite = np.isfinite(norm.values)
    is_rare = np.sum(~is_finite) <= MOST_OVERFLOWS * len(is_finite)
    has_unexplained_nan = np.isnan(norm.values).any() and not has_loss_scale
    if not is_rare or not is_finite[-1:].all() or has_unexplained_nan:
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
SIGNS = {
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
HEALTH_SEGMENT = re.compile(r"(.*[. ])?health(_\d+)?")


class Recorder(NamedTuple):
    """The columns of one `record_health`."""

    name: str  # such as health/updates
    # By sign and tensor. The summary of all tensors is the tensor "".
    columns: defaultdict[str, dict[str, Column]]

    @property
    def is_of_updates(self) -> bool:
        """Whether its name says so, without what a logger puts in front."""
        _, _, name = self.name.partition("health")
        return "update" in name.lower()

    def of_tensors(self, *signs: str) -> RuleInputs:
        """The columns of these signs: of each tensor, or of the summary of all."""
        tables = [self.columns[sign] for sign in signs]
        tensors = set(tables[0]).intersection(*tables)
        # The summary repeats what the tensors show.
        if len(tensors) > 1:
            tensors.discard("")
        return [tuple(table[tensor] for table in tables) for tensor in sorted(tensors)]

    def subnormals(self) -> RuleInputs:
        """For each tensor the share of subnormal elements, and the share of zeros."""
        # In a summary the largest share of each may come from two different tensors.
        if set(self.columns["subnormals"]) == {""}:
            return self.of_tensors("subnormals")
        return self.of_tensors("subnormals", "zeros")

    def norm_of_all(self, sign: str) -> list[Column]:
        """A list of one column: the norm of all tensors together, or if there is a
        summary the largest norm of a tensor. Empty if the sign was not recorded.
        """
        table = self.columns[sign]
        if "" in table:
            return [table[""]]
        return [total_of(self.name, list(table.values()))] if table else []


class Recorded(NamedTuple):
    """The columns of all recorders."""

    columns: defaultdict[str, RuleInputs]  # of needs that only recorders meet
    update_norms: list[Column]  # of all tensors together
    gradient_norms: list[Column]  # likewise
    tensors: list[Column]  # the norm of the gradient of each
    groups: list[Column]


def _recorded(recorders: Sequence[Recorder]) -> Recorded:
    recorded = Recorded(defaultdict(list), [], [], [], [])
    columns = recorded.columns
    for recorder in recorders:
        norms = recorder.norm_of_all("norm")
        weight_norms = recorder.norm_of_all("weight_norm")
        columns[WEIGHTS] += _one_by_one(weight_norms)
        if recorder.is_of_updates:
            recorded.update_norms.extend(norms)
            columns[UPDATES] += zip(norms, weight_norms)
            columns[ROUNDING] += recorder.of_tensors("ratio", "rounding")
        else:
            tensors = [column for (column,) in recorder.of_tensors("norm")]
            recorded.gradient_norms.extend(norms)
            recorded.tensors.extend(tensors)
            recorded.groups.extend(_norms_of_groups(tensors))
            columns[SUBNORMALS] += recorder.subnormals()
            columns[DEAD_ROWS] += recorder.of_tensors("dead_rows")
    return recorded


class Reading(NamedTuple):
    """What the name of a column says: train/health_2/updates/norm/blocks/w."""

    recorder: str  # train/health_2/updates
    sign: str  # norm
    tensor: str  # blocks/w


def _recorders_of(log: Log) -> list[Recorder]:
    """The recorders whose columns a log has. A recorder and a tensor may both be named
    like a sign: health/ratio/norm/w is the norm of w in a recorder "ratio", or the
    ratio of a tensor norm/w. We take the reading whose recorder has most signs.
    """
    signs: dict[str, set[str]] = defaultdict(set)
    for name in log.columns:
        for reading in _readings(name):
            signs[reading.recorder].add(reading.sign)
    recorders: dict[str, Recorder] = {}
    for name, column in log.columns.items():
        readings = list(_readings(name))
        if readings:
            reading = max(readings, key=lambda reading: len(signs[reading.recorder]))
            empty = Recorder(reading.recorder, defaultdict(dict))
            recorder = recorders.setdefault(reading.recorder, empty)
            recorder.columns[reading.sign][reading.tensor] = column
    # Tensors of two optimizers may have the same names.
    numbers = Counter(recorder.is_of_updates for recorder in recorders.values())
    for recorder in recorders.values():
        is_alone = numbers[recorder.is_of_updates] == 1
        _rename_columns(recorder, is_alone)
    return list(recorders.values())


def _rename_columns(recorder: Recorder, is_alone: bool) -> None:
    """Names columns after their tensors, and the summary after the recorder. If there
    are several recorders of updates, or of gradients, their names stand in front.
    """
    prefix = "" if is_alone else f"{recorder.name}/"
    for table in recorder.columns.values():
        for tensor, column in table.items():
            name = f"{prefix}{tensor}" if tensor else recorder.name
            table[tensor] = column._replace(name=name)


def _readings(name: str) -> Iterator[Reading]:
    """One for each sign in a name, if it stands behind "health"."""
    parts = name.split("/")
    is_behind_health = False
    for index, part in enumerate(parts):
        if is_behind_health and part in SIGNS:
            recorder = "/".join(parts[:index])
            tensor = "/".join(parts[index + 1 :])
            yield Reading(recorder, part, tensor)
        if HEALTH_SEGMENT.fullmatch(part):
            is_behind_health = True
