"""Draws the scores of all methods: a panel for each fault, a row for each method,
and an upright line for no clip.
"""

import json
from pathlib import Path
from typing import Any

from examples._shared import Look, draw_both

from .scores import mean_and_error, ranked

# Faults whose names in tables are too short to be understood alone.
TITLES = {
    "elements x 1000": "single elements\ntimes 1000",
    "a layer x 1000": "one layer\ntimes 1000",
}
TITLE = (
    "Mean score of five tasks with each clip, at its best learning rate for each "
    "fault, and the\nstandard error of five seeds. 0: untrained, 1: as good as a "
    "healthy run without a clip.\nRows are sorted by the mean of the four panels."
)


def draw(results: Path, picture: Path) -> None:
    """Reads the JSON, and draws once for light and once for dark pages."""
    content = json.loads(results.read_text())
    no_clip, *rows = ranked(content)
    rows.reverse()  # the lowest row of a panel has place 0
    names = [row.method for row in rows]

    def draw_panels(panels: Any, look: Look) -> None:
        for fault, panel in enumerate(panels):
            unclipped = no_clip.scores[fault]
            line = unclipped.mean()
            panel.axvline(line, color=look.grey, linewidth=2)
            for place, row in enumerate(rows):
                mean, error = mean_and_error(row.scores[fault])
                gain, doubt = mean_and_error(row.scores[fault] - unclipped)
                colour = look.grey
                if gain > 2 * doubt:
                    colour = look.green
                elif gain < -2 * doubt:
                    colour = look.orange
                panel.hlines(place, line, mean, color=colour, linewidth=1)
                panel.errorbar(
                    mean, place, xerr=error, fmt="o", color=colour, capsize=4
                )
            panel.text(
                line - 0.03,
                len(rows) - 0.5,
                "no clip",
                color=look.grey,
                ha="right",
                fontsize=11,
            )
            name = content["faults"][fault]
            panel.set_title(TITLES.get(name, name), weight="bold")
            panel.set(xlim=(-0.02, 1.12), xlabel="0: untrained, 1: healthy")
            panel.set_yticks(range(len(names)), names)
            panel.grid(axis="y", alpha=0.2)
        panels[0].figure.suptitle(TITLE)
        panels[0].set_ylabel("mean of 3 tasks with SGD and momentum and 2 with Adam")
        # The upper left corner of the first panel is empty.
        meanings = {look.green: "better", look.orange: "worse", look.grey: "as no clip"}
        for line, (colour, meaning) in enumerate(meanings.items()):
            panels[0].text(0, len(rows) - 2 - line, f"● {meaning}", color=colour)

    draw_both(picture, len(content["faults"]), draw_panels, height=9)
