"""Draws the scores of all methods: a panel for each fault, a line for each method."""

import json
from pathlib import Path
from typing import Any

from examples._shared import Look, draw_both

from .scores import mean_and_error, over_tasks


def draw(results: Path, picture: Path) -> None:
    """Reads the JSON, and draws once for light and once for dark pages."""
    content = json.loads(results.read_text())
    faults = content["faults"]
    scores = over_tasks(content)
    names = sorted(scores, key=lambda name: scores[name].mean())

    def draw_panels(panels: Any, look: Look) -> None:
        for fault, panel in enumerate(panels):
            unclipped = scores["none"][fault]
            panel.axvline(unclipped.mean(), color=look.orange, linewidth=2)
            for place, name in enumerate(names):
                mean, error = mean_and_error(scores[name][fault])
                gain, doubt = mean_and_error(scores[name][fault] - unclipped)
                colour = look.grey
                if abs(gain) > 2 * doubt:
                    colour = look.green if gain > 0 else look.orange
                panel.hlines(place, unclipped.mean(), mean, color=colour)
                panel.errorbar(mean, place, xerr=error, fmt="o", color=colour)
            panel.set_title(faults[fault], weight="bold")
            panel.set(xlim=(-0.02, 1.12), xlabel="learnt")
            panel.set_yticks(range(len(names)), names)
            panel.grid(axis="y", alpha=0.2)

    draw_both(picture, len(faults), draw_panels, height=9)
