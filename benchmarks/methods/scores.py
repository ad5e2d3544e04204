"""From where runs ended to tables.

A score is how far a run came from the untrained weights, over how far no clip came
without a fault at its best rate. With DP-SGD the first method stands for no clip. A run
that ended worse than it began has 0.
"""

from typing import Any, NamedTuple

import numpy as np

from ..report import grid

CLOSE = 0.98  # of the best score, in which another rate is as good
NOISY = "pole"  # the task whose seeds differ more than its methods


class Best(NamedTuple):
    """A method in one task, at its best rates."""

    scores: np.ndarray  # float[faults, seeds], at the best rate for each fault
    place: int  # of the best rate without a fault
    width: float  # the largest rate over the smallest that are close to it
    beside: float  # the mean score at the rates next to it


def scores_of(row: dict[str, Any]) -> dict[str, np.ndarray]:
    """Of one task and each method float[faults, rates, seeds]."""
    start = np.mean(row["untrained"])
    costs = {name: np.asarray(ends, float) for name, ends in row["costs"].items()}
    reference = next(iter(costs.values()))[0].mean(-1)
    distance = start - np.nanmin(reference)
    return {
        name: np.nan_to_num(np.maximum((start - ends) / distance, 0.0))
        for name, ends in costs.items()
    }


def best(scores: np.ndarray, rates: list[float]) -> Best:
    """The rates with the highest mean over all seeds."""
    means = scores.mean(-1)
    places = means.argmax(-1)
    at_best = scores[np.arange(len(places)), places]
    is_close = means[0] >= CLOSE * means[0].max()
    low = high = int(places[0])
    while low > 0 and is_close[low - 1]:
        low -= 1
    while high + 1 < len(rates) and is_close[high + 1]:
        high += 1
    place = int(places[0])
    beside = [*means[0, max(place - 1, 0) : place], *means[0, place + 1 : place + 2]]
    return Best(at_best, place, rates[high] / rates[low], float(np.mean(beside)))


def all_best(content: dict[str, Any]) -> dict[str, dict[str, Best]]:
    """Of each task and each method."""
    return {
        task: {
            name: best(scores, row["rates"]) for name, scores in scores_of(row).items()
        }
        for task, row in content["tasks"].items()
    }


def mean_and_error(scores: np.ndarray) -> tuple[float, float]:
    """The mean over seeds, and its standard error."""
    return float(scores.mean()), float(scores.std(ddof=1) / len(scores) ** 0.5)


def quiet_tasks(content: dict[str, Any]) -> list[dict[str, Best]]:
    """All tasks but the noisy one."""
    return [bests for task, bests in all_best(content).items() if task != NOISY]


def over_tasks(content: dict[str, Any]) -> dict[str, np.ndarray]:
    """Of each method float[faults, seeds], the mean over the quiet tasks."""
    tasks = quiet_tasks(content)
    return {
        name: np.mean([bests[name].scores for bests in tasks], axis=0)
        for name in tasks[0]
    }


def shown(scores: np.ndarray) -> str:
    mean, error = mean_and_error(scores)
    return f"{mean:.2f} ± {error:.2f}"


def faults_table(content: dict[str, Any]) -> str:
    """The means over tasks, and how much the rate matters without a fault."""
    tasks = quiet_tasks(content)
    lines = []
    for name, scores in over_tasks(content).items():
        widths = [bests[name].width for bests in tasks]
        width = np.exp(np.mean(np.log(widths)))
        beside = np.mean([bests[name].beside for bests in tasks])
        cells = [*map(shown, scores), f"{width:.1f}", f"{beside:.2f}"]
        lines.append([f"`{name}`", *cells])
    columns = ["rates within 2 %", "rate 4 times off"]
    return grid(["method", *content["faults"], *columns], lines)


def tasks_table(content: dict[str, Any], fault: int) -> str:
    """All tasks under one fault."""
    bests = all_best(content)
    lines = []
    for name in next(iter(bests.values())):
        cells = [shown(bests[task][name].scores[fault]) for task in bests]
        lines.append([f"`{name}`", *cells])
    return grid(["method", *bests], lines)


def worse_table(content: dict[str, Any]) -> str:
    """Where a method scores lower than no clip by more than two standard errors."""
    bests = all_best(content)
    faults = content["faults"]
    lines = []
    for name in over_tasks(content):
        cells = []
        for fault in range(len(faults)):
            losses = []
            for task, best_of in bests.items():
                gain = best_of[name].scores[fault] - best_of["none"].scores[fault]
                mean, error = mean_and_error(gain)
                if mean < -2 * error:
                    losses.append(f"{task} {mean:.2f}")
            cells.append(", ".join(losses))
        if any(cells):
            lines.append([f"`{name}`", *cells])
    return grid(["method", *faults], lines)


def rows(content: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each method, from which pages take single numbers: a column for each
    fault, each task without a fault, and the rates beside the best one.
    """
    bests = all_best(content)
    tasks = quiet_tasks(content)
    table = []
    for name, scores in over_tasks(content).items():
        row: dict[str, Any] = {"method": name}
        row |= zip(content["faults"], scores.mean(-1).tolist())
        row |= {task: bests[task][name].scores[0].mean() for task in bests}
        row["beside"] = np.mean([best_of[name].beside for best_of in tasks])
        table.append(row)
    return table
