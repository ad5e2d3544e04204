"""Draws a picture twice, for light and for dark pages."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

try:
    from matplotlib import rc_context, style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
except ModuleNotFoundError as error:
    error.add_note('Install what this program needs: pip install -e ".[examples]"')
    raise


class Look(NamedTuple):
    """Colours that people with any kind of colour vision can tell apart."""

    suffix: str  # of the file's name
    style: str  # of matplotlib
    background: str
    grey: str
    orange: str
    blue: str
    green: str


# Okabe and Ito's colours. On dark pages they are lighter.
LIGHT = Look("", "default", "#ffffff", "#8f8f8f", "#d55e00", "#0072b2", "#007a5a")
DARK = Look(
    "_dark", "dark_background", "#1e2129", "#9a9a9a", "#ff8c42", "#56b4e9", "#2fc79a"
)


def draw_both(
    path: str | Path, size: tuple[float, float], draw: Callable[[Any, Look], None]
) -> None:
    """Saves what `draw(figure, look)` draws to `path`, and with "_dark" in its name."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    for look in (LIGHT, DARK):
        with style.context(look.style), rc_context({"font.size": 14}):
            figure = Figure(size, layout="constrained", facecolor=look.background)
            FigureCanvasAgg(figure)
            draw(figure, look)
            figure.savefig(path.with_stem(path.stem + look.suffix), dpi=100)


def prepare(axis: Any, look: Look, **settings: Any) -> None:
    """A panel without a box around it."""
    axis.set(facecolor=look.background, **settings)
    axis.spines[["top", "right"]].set_visible(False)


def note(axis: Any, text: str, place: tuple[float, float], colour: str) -> None:
    """Writes into a panel, right-aligned, beside what the text is about."""
    corner = {"transform": axis.transAxes, "ha": "right", "va": "top"}
    axis.text(*place, text, color=colour, **corner)
