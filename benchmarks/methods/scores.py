"""From where runs ended to tables.

A score is how far a run came from the untrained weights, over how far no clip came
without a fault at its best rate. With DP-SGD the first method stands for no clip. A run
that ended worse than it began has 0.
"""

from typing import Any, NamedTuple

import numpy as np

from ..report import grid

CLOSE = 0.98  # of the best score, in which another rate is as good
LEARNT = 0.5  # a score below which no rate is good
SMALLEST = 0.005  # how much lower a score is that a table names
NOISY = "pole"  # the task whose seeds differ more than its methods
GLOBAL = "clip_by_global_norm(1.0)"
# The tasks with each optimizer, without the noisy one.
OPTIMIZERS = {
    "SGD with momentum": ("digits", "recurrent", "regression"),
    "Adam": ("transformer", "4 bits"),
}


class Best(NamedTuple):
    """A method in one task, at its best rates."""

    scores: np.ndarray  # float[faults, seeds], at the best rate for each fault
    place: int  # of the best rate without a fault
    width: float  # the largest rate over the smallest that are close to it
    at_neighbours: float  # the mean score at the rates next to it


class Summary(NamedTuple):
    """A method in all tasks. Means are over all tasks but the noisy one."""

    method: str
    tasks: dict[str, Best]
    scores: np.ndarray  # float[faults, seeds], the mean
    width: float  # the geometric mean
    at_neighbours: float  # the mean


def scores_of(row: dict[str, Any]) -> dict[str, np.ndarray]:
    """Of one task and each method float[faults, rates, seeds]."""
    start = np.mean(row["untrained"])
    costs = {name: np.asarray(ends, float) for name, ends in row["costs"].items()}
    reference = next(iter(costs.values()))[0].mean(-1)
    distance = start - np.nanmin(reference)
    scores = {}
    for name, ends in costs.items():
        learnt = (start - ends) / distance
        scores[name] = np.nan_to_num(np.maximum(learnt, 0.0))
    return scores


def best(scores: np.ndarray, rates: list[float]) -> Best:
    """The rates with the highest mean over all seeds."""
    means = scores.mean(-1)
    places = means.argmax(-1)
    place = int(places[0])
    width = 1.0
    if means[0, place] >= LEARNT:
        close_rates = np.compress(means[0] >= CLOSE * means[0, place], rates)
        width = close_rates[-1] / close_rates[0]
    neighbours = [means[0, x] for x in (place - 1, place + 1) if 0 <= x < len(rates)]
    return Best(
        scores=scores[np.arange(len(places)), places],
        place=place,
        width=width,
        at_neighbours=float(np.mean(neighbours)),
    )


def summaries(content: dict[str, Any]) -> list[Summary]:
    """All methods, in the order of the JSON."""
    tasks_of_method: dict[str, dict[str, Best]] = {}
    for task, row in content["tasks"].items():
        for method, scores in scores_of(row).items():
            tasks = tasks_of_method.setdefault(method, {})
            tasks[task] = best(scores, row["rates"])
    rows = []
    for method, tasks in tasks_of_method.items():
        quiet = [task for name, task in tasks.items() if name != NOISY]
        summary = Summary(
            method=method,
            tasks=tasks,
            scores=np.mean([task.scores for task in quiet], axis=0),
            width=float(np.exp(np.mean([np.log(task.width) for task in quiet]))),
            at_neighbours=float(np.mean([task.at_neighbours for task in quiet])),
        )
        rows.append(summary)
    return rows


def mean_and_error(scores: np.ndarray) -> tuple[float, float]:
    """The mean over seeds, and its standard error."""
    return float(scores.mean()), float(scores.std(ddof=1) / len(scores) ** 0.5)


def shown(scores: np.ndarray) -> str:
    mean, error = mean_and_error(scores)
    return f"{mean:.2f} ± {error:.2f}"


def ranked(content: dict[str, Any]) -> list[Summary]:
    """No clip, and then all methods, those with the highest mean score first."""
    unclipped, *clipped = summaries(content)
    clipped.sort(key=lambda row: row.scores.mean(), reverse=True)
    return [unclipped, *clipped]


def titled(method: str) -> str:
    """How a table calls a method."""
    return "no clip" if method == "none" else f"`{method}`"


def optimizers_table(content: dict[str, Any]) -> str:
    """No clip and the usual clip, for the tasks with each optimizer."""
    compared = [row for row in summaries(content) if row.method in ("none", GLOBAL)]
    lines = []
    for optimizer, names in OPTIMIZERS.items():
        for row in compared:
            tasks = [row.tasks[name] for name in names]
            means = np.mean([task.scores.mean(-1) for task in tasks], axis=0)
            at_neighbours = np.mean([task.at_neighbours for task in tasks])
            cells = [f"{mean:.2f}" for mean in (*means, at_neighbours)]
            lines.append([optimizer, titled(row.method), *cells])
    faults = content["faults"]
    return grid(["optimizer", "method", *faults, "rate 4 times off"], lines)


def faults_table(content: dict[str, Any]) -> str:
    """The means over tasks, and how much the rate matters without a fault."""
    lines = []
    for row in ranked(content):
        cells = [shown(scores) for scores in row.scores]
        rate = [f"{row.width:.1f}", f"{row.at_neighbours:.2f}"]
        lines.append([titled(row.method), *cells, *rate])
    columns = ["rates within 2 %", "rate 4 times off"]
    return grid(["method", *content["faults"], *columns], lines)


def tasks_table(content: dict[str, Any], fault: int) -> str:
    """All tasks under one fault."""
    lines = []
    for row in ranked(content):
        cells = [shown(task.scores[fault]) for task in row.tasks.values()]
        lines.append([titled(row.method), *cells])
    return grid(["method", *content["tasks"]], lines)


def worse_table(content: dict[str, Any]) -> str:
    """Where a method scores lower than no clip by 0.005 or more, and by more than two
    standard errors.
    """
    unclipped, *clipped = ranked(content)
    faults = content["faults"]
    lines = []
    for row in clipped:
        cells = []
        for fault in range(len(faults)):
            losses = []
            for name, task in row.tasks.items():
                gain = task.scores[fault] - unclipped.tasks[name].scores[fault]
                mean, error = mean_and_error(gain)
                if mean < -2 * error and mean <= -SMALLEST:
                    losses.append(f"{name} {mean:.2f}")
            cells.append(", ".join(losses))
        if any(cells):
            lines.append([f"`{row.method}`", *cells])
    return grid(["method", *faults], lines)


def rows(content: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each method, from which pages take single numbers: a column for each
    fault, each task without a fault, and the rates beside the best one.
    """
    table = []
    for summary in summaries(content):
        row: dict[str, Any] = {
            "method": summary.method,
            "beside": summary.at_neighbours,
        }
        row |= zip(content["faults"], summary.scores.mean(-1).tolist())
        for name, task in summary.tasks.items():
            row[name] = task.scores[0].mean()
        table.append(row)
    return table
