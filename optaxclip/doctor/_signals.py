"""The numbers of a log that the rules of the doctor read."""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from .._logs import (
    TENSOR_PATTERN,
    Column,
    Log,
    columns_named,
    in_common,
    listed,
    losses_of,
    norms_of,
    rows_kept,
)

# What a rule needs. A report prints these sentences, and `run_of` returns the
# columns that meet them, by sentence.
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

# The signs of `record_health`: the last word of its columns, before the tensor.
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
HEALTH_SEGMENT = re.compile(r"(.*[. ])?health(_\d+)?")
# "train/clip/outer/norm_before" of a clipper, and "train/skip_2/norm" of a skip.
NORM_OF_CLIP = re.compile(r"((.*[/. ])?clip(_\d+)?/(.*/)?)norm_before")
NORM_OF_SKIP = re.compile(r"((.*[/. ])?(skip|spike)(_\d+)?/(.*/)?)norm")
# Of attention by their names, or of qk_clip under a name with "logit" or "qk".
NAMES_OF_LOGITS = re.compile(
    r"(?!.*(limit|factor|count|num|share|mean|std|entropy))"
    r"(.*(attn|attention|(^|[/._])qk).*logit.*|.*logit.*(attn|attention).*"
    r"|(.*[/. ])?(clip|record)(_\d+)?/[^/]*(logit|qk)[^/]*/norm(_before)?(/.*)?)"
)
NAME_OF_SCALE = re.compile("loss.?scale|scaler")
OVERFLOWS = 0.1  # the share of rows with inf, under a dynamic loss scale


# A tuple for each time that a rule runs, such as once for each tensor, with the columns
# that it reads together.
RuleInputs = list[tuple[Column, ...]]


class Recorder(NamedTuple):
    """The columns of one `record_health`."""

    name: str  # such as health/updates
    # By sign and tensor. The name of a summary of all tensors is "".
    columns: defaultdict[str, dict[str, Column]]

    @property
    def is_of_updates(self) -> bool:
        """By the name, without what a logger puts in front."""
        place = self.name.find("health")
        return "update" in self.name[place:].lower()

    def of_tensors(self, *signs: str) -> RuleInputs:
        """The columns of these signs: of each tensor, or of the summary of all."""
        tables = [self.columns[sign] for sign in signs]
        tensors = set(tables[0]).intersection(*tables)
        # Beside tensors a summary says nothing new.
        if len(tensors) > 1:
            tensors.discard("")
        return [tuple(table[tensor] for table in tables) for tensor in sorted(tensors)]

    def subnormals(self) -> RuleInputs:
        """For each tensor the share of subnormal elements, and the share of zeros."""
        # A summary has the largest of both, which may be of two tensors.
        if set(self.columns["subnormals"]) == {""}:
            return self.of_tensors("subnormals")
        return self.of_tensors("subnormals", "zeros")

    def norm_of_all(self, sign: str) -> list[Column]:
        """One column: the norm of all tensors together, or in a summary the largest
        norm of a tensor. No column if the sign was not recorded.
        """
        table = self.columns[sign]
        if "" in table:
            return [table[""]]
        return [total_of(self.name, list(table.values()))] if table else []


def total_of(name: str, norms: Sequence[Column]) -> Column:
    """The norm of several tensors together, in the steps that have all."""
    steps, numbers = in_common(norms)
    root_of_squares = np.sqrt(np.sum(numbers**2, axis=0))
    # Tensors are logged together, so notes on one of them hold for all.
    return Column(name, steps, root_of_squares, norms[0].notes)


# ------------------------------------------------------------------------------- a log


class Run(NamedTuple):
    """What a log says about a run."""

    # For each need, such as NORM, the columns that meet it: none if the log lacks them.
    # The first column of a tuple names the finding.
    columns: defaultdict[str, RuleInputs]
    looked_at: list[Column]  # with the norm of each recorder
    gradient_norms: list[Column]  # of all tensors, from each optimizer
    recorders: list[Recorder]
    overflow_steps: set[int]  # steps without their norm, see `_without_overflows`


def run_of(log: Log, loss_name: str | None) -> Run:
    """Finds the columns that say something about a run.

    Raises:
      ValueError: there is no column `loss_name`.
    """
    losses = _losses_of(log, loss_name)
    logits = columns_named(NAMES_OF_LOGITS, log)
    log_without_logits = _without_logits(log, logits)
    whole_norms = norms_of(log_without_logits)
    logged_tensors = columns_named(TENSOR_PATTERN, log_without_logits)
    norm_of_tensors: list[Column] = []
    if logged_tensors:
        norm_of_tensors = [total_of("all tensors", logged_tensors)]
    logged_norms = whole_norms or norm_of_tensors
    recorders = _recorders_of(log)
    update_norms: list[Column] = []
    recorded_norms: list[Column] = []  # of gradients, and so are the next two
    recorded_tensors: list[Column] = []
    recorded_groups: list[Column] = []
    columns: defaultdict[str, RuleInputs] = defaultdict(list)
    for recorder in recorders:
        norms = recorder.norm_of_all("norm")
        weight_norms = recorder.norm_of_all("weight_norm")
        columns[WEIGHTS] += _one_by_one(weight_norms)
        if recorder.is_of_updates:
            update_norms += norms
            columns[UPDATES] += zip(norms, weight_norms)
            columns[ROUNDING] += recorder.of_tensors("ratio", "rounding")
        else:
            tensors = [column for (column,) in recorder.of_tensors("norm")]
            recorded_norms += norms
            recorded_tensors += tensors
            recorded_groups += _norms_of_groups(tensors)
            columns[SUBNORMALS] += recorder.subnormals()
            columns[DEAD_ROWS] += recorder.of_tensors("dead_rows")
    # A recorder repeats what a clipper or the loop logs.
    gradient_norms = logged_norms or recorded_norms
    groups = _norms_of_groups(logged_tensors) or recorded_groups
    columns[NORM] = _one_by_one([*gradient_norms, *groups])
    columns[EVERY_NORM] = _one_by_one([*logged_norms, *recorded_norms])
    columns[GRADIENTS] = _one_by_one(recorded_tensors)
    columns[LOGITS] = _one_by_one(logits)
    has_scale = any(NAME_OF_SCALE.search(name.lower()) for name in log.columns)
    columns[LOSS_OR_NORM] = _one_by_one(losses)
    overflow_steps: set[int] = set()
    for norm in [*whole_norms, *logged_tensors, *recorded_tensors, *update_norms]:
        finite_norm = _without_overflows(norm, has_scale)
        columns[LOSS_OR_NORM].append((finite_norm,))
        overflow_steps |= {*norm.steps} - {*finite_norm.steps}
    # Ratios of losses that change their sign say nothing. From the norm alone REINFORCE
    # with rewards of another scale (benchmarks/doctor) would be a change of scale.
    if all(np.nanmin(loss.values, initial=np.inf) >= 0 for loss in losses):
        # transformers rounds a small loss to 0, which has no ratio.
        above_0 = [rows_kept(loss, loss.values != 0) for loss in losses]
        columns[LOSS] = _one_by_one(above_0)
        columns[NORM_AND_ANY_LOSS] = [(norm, *above_0) for norm in gradient_norms]
        columns[NORM_AND_LOSS] = list(product(gradient_norms, above_0))
    columns[CLIP] = _with_limits(log, NORM_OF_CLIP)
    skips = _with_limits(log, NORM_OF_SKIP)
    columns[SKIP_AND_CLIP] = [
        skip + clip for skip, clip in product(skips, columns[CLIP])
    ]
    looked_at = [
        *losses,
        *whole_norms,
        *norm_of_tensors,
        *logits,
        *recorded_norms,
        *update_norms,
    ]
    return Run(columns, looked_at, gradient_norms, recorders, overflow_steps)


def _losses_of(log: Log, name: str | None) -> list[Column]:
    """The column of the loss, and nothing where the log has none."""
    if name is None:
        return losses_of(log)
    if name not in log.columns:
        names = listed(list(log.columns))
        raise ValueError(f"there is no loss {name!r} in it, only {names}.")
    return [log.columns[name]]


def _without_logits(log: Log, logits: Sequence[Column]) -> Log:
    """qk_clip writes its logits under names of norms."""
    columns = dict(log.columns)
    for column in logits:
        del columns[column.name]
    return log._replace(columns=columns)


def _norms_of_groups(tensors: Sequence[Column]) -> list[Column]:
    """The norm of each group of tensors: actor/w and actor/b are the group actor. The
    first part of a name that is not the same in all names tells the group.
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
    norms = [total_of(name, columns) for name, columns in groups.items()]
    # An expert has no tokens in some steps, and in others far more than usual.
    return [norm for norm in norms if np.all(norm.values != 0)]


def _one_by_one(columns: Sequence[Column]) -> RuleInputs:
    return [(column,) for column in columns]


def _without_overflows(norm: Column, has_scale: bool) -> Column:
    """A norm without the rows with inf, if a dynamic loss scale may have skipped them:
    at most a tenth of all rows, and not the last one. Without NaN too, if the log has
    the scale.
    """
    is_finite = np.isfinite(norm.values)
    is_rare = np.sum(~is_finite) <= OVERFLOWS * len(is_finite)
    has_unexplained_nan = np.isnan(norm.values).any() and not has_scale
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


class Reading(NamedTuple):
    """What the name of a column says: train/health_2/updates/norm/blocks/w."""

    recorder: str  # train/health_2/updates
    sign: str  # norm
    tensor: str  # blocks/w


def _recorders_of(log: Log) -> list[Recorder]:
    """A recorder may be called like a sign, and so may a tensor: health/ratio/norm/w is
    the norm of w in a recorder "ratio", or the ratio of a tensor norm/w. Of several
    readings we take the one whose recorder has most signs.
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
            tensor = column._replace(name=reading.tensor or reading.recorder)
            recorder.columns[reading.sign][reading.tensor] = tensor
    return list(recorders.values())


def _readings(name: str) -> Iterator[Reading]:
    parts = name.split("/")
    is_behind_health = False
    for place, part in enumerate(parts):
        if is_behind_health and part in SIGNS:
            tensor = "/".join(parts[place + 1 :])
            yield Reading("/".join(parts[:place]), part, tensor)
        if HEALTH_SEGMENT.fullmatch(part):
            is_behind_health = True
