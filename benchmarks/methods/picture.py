"""Draws the scores of all methods: a panel for each fault, a row for each method, and a
dot for each optimizer. Methods that no fault harms share one row.
"""

import json
import re
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from examples._shared import Look, draw_both

from .scores import CLOSE, GLOBAL, OPTIMIZERS, Summary, ranked

# Faults whose names in tables are too short to be understood alone.
TITLES = {
    "elements x 1000": "single elements\ntimes 1000",
    "a layer x 1000": "one layer\ntimes 1000",
}
TITLE = (
    "With SGD and momentum a fault can ruin a run, and {good} of {all} clips save it.\n"
    "Which of them hardly matters. With Adam even no clip does well."
)
# Headings of methods.
GOOD = "stop every fault"
PARTIAL = "let faults through"
WORSE = "harm healthy runs"
LABEL_WIDTH = 34  # letters of a line
OFFSETS = 0.15, -0.15  # of the dots of each optimizer, so that none hides another


class Row(NamedTuple):
    """Methods that are drawn at one height. A heading has none."""

    label: str
    methods: list[Summary]


def draw(results: Path, picture: Path) -> None:
    """Reads the JSON, and draws once for light and once for dark pages."""
    content = json.loads(results.read_text())
    no_clip, *clips = ranked(content)
    groups = grouped(clips)
    rows = rows_of(no_clip, groups)
    heights = np.array([1 + 0.95 * row.label.count("\n") for row in rows])
    places = heights / 2 - heights.cumsum()
    title = TITLE.format(good=len(groups[GOOD]), all=len(clips))

    def draw_panels(panels: Any, look: Look) -> None:
        colours = look.orange, look.blue
        for fault, panel in enumerate(panels):
            panel.axvline(1, color=look.grey, linewidth=1, linestyle="--")
            for place, row in zip(places, rows):
                if row.methods:
                    panel.axhline(place, color=look.grey, linewidth=1, alpha=0.2)
                for optimizer, colour, offset in zip(OPTIMIZERS, colours, OFFSETS):
                    means = [mean_of(x, optimizer, fault) for x in row.methods]
                    dot_places = np.full(len(means), place + offset)
                    panel.plot(means, dot_places, "o", color=colour)
            name = content["faults"][fault]
            panel.set_title(TITLES.get(name, name), weight="bold")
            panel.set(xlim=(-0.08, 1.15), xlabel="score")
            panel.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
            panel.set_yticks(places, [row.label for row in rows])
            panel.tick_params(axis="y", length=0)
        first, *_ = panels
        for label, row in zip(first.get_yticklabels(), rows):
            if not row.methods:
                label.set_weight("bold")
        for (optimizer, tasks), colour in zip(OPTIMIZERS.items(), colours):
            label = f"{optimizer}, {len(tasks)} tasks"
            first.plot([], [], "o", color=colour, label=label)
        label = "1: healthy run without a clip (0: untrained)"
        first.plot([], [], "--", color=look.grey, label=label)
        figure = first.figure
        figure.suptitle(title)
        figure.legend(loc="outside lower center", ncols=3, frameon=False)

    draw_both(picture, len(content["faults"]), draw_panels, height=8.5)


def grouped(clips: list[Summary]) -> dict[str, list[Summary]]:
    """The methods under each heading."""
    groups: dict[str, list[Summary]] = {GOOD: [], PARTIAL: [], WORSE: []}
    for clip in clips:
        healthy, *faulty = clip.scores.mean(-1)
        if healthy < CLOSE:
            groups[WORSE].append(clip)
        elif min(faulty) < CLOSE:
            groups[PARTIAL].append(clip)
        else:
            groups[GOOD].append(clip)
    return groups


def rows_of(no_clip: Summary, groups: dict[str, list[Summary]]) -> list[Row]:
    """No clip on top, then the good methods in one row, then a row for each other."""
    rows = [Row("no clip", [no_clip])]
    for heading, clips in groups.items():
        rows.append(Row(f"\n{len(clips)} clips {heading}:", []))
        if heading == GOOD:
            # The usual clip is named first.
            names = ["+".join(re.findall(r"(\w+)\(", x.method)) for x in clips]
            usual = GLOBAL.partition("(")[0]
            names.sort(key=lambda name: name != usual)
            texts = [
                name if count == 1 else f"{name} ({count}\N{NO-BREAK SPACE}settings)"
                for name, count in Counter(names).items()
            ]
            rows.append(Row(textwrap.fill(", ".join(texts), LABEL_WIDTH), clips))
        else:
            rows += [Row(clip.method, [clip]) for clip in clips]
    return rows


def mean_of(summary: Summary, optimizer: str, fault: int) -> float:
    """The mean score over the tasks with this optimizer."""
    scores = [summary.tasks[name].scores[fault] for name in OPTIMIZERS[optimizer]]
    return float(np.mean(scores))
