"""The table of what ran, and the page `docs/clients.md`."""

from typing import Any

import numpy as np

from ..packages import wrapped
from .compare import Row
from .trained import CLIENTS

HEAD = (
    "| package | version | trains | losses | no clip | clipped | checkpoint | same |",
    "|---|---|---|---|---|---|---|---|",
)
INTRO = """
Replace `optax.clip_by_global_norm` by `optaxclip.clip_by_global_norm` in a program that
uses optax, and it runs. `python -m tests.clients` shows this with the trainers of other
packages. Each trainer runs a few steps three times from one seed, in a process of its
own: with optax's clip, with optaxclip's in its place, and without a clip. Nothing is
downloaded. The installed versions are used.
"""
COLUMNS = """
`losses` is the largest relative difference between the losses with optaxclip's clip and
with optax's. `no clip` compares no clip with optax's in this way, and shows that the
clip matters. `clipped` counts the clipped steps, which `optaxclip.metrics` read from
the train state of the package. `checkpoint` names the call that saved and restored that
state, and `same` says whether it came back bit for bit. The command fails if `losses`
is above 1e-5, if `no clip` is at most a hundred times as large as `losses` or as 1e-5,
if nothing was clipped, or if a restored state differs.
"""
STATE = """
These runs do not show how a run that was saved with optax's clip goes on with
optaxclip's. [Sharp edges](sharp_edges.md#a-checkpoint-from-optax) does.
"""


def table(rows: list[Row]) -> str:
    return "\n".join([*HEAD, *map(line, rows)])


def line(row: Row) -> str:
    client = CLIENTS[row.client]
    numbers = ["not run", "", "", client.checkpoint, ""]
    if not np.isnan(row.difference):
        same = "yes" if row.restored else "no"
        differences = [shown(row.difference), shown(row.without)]
        numbers = [*differences, str(row.clipped), client.checkpoint, same]
    cells = [client.install, row.version, client.trainer, *numbers]
    return f"| {' | '.join(cells)} |"


def shown(difference: float) -> str:
    return f"{difference:.0e}" if difference else "equal"


def page(recorded: dict[str, Any]) -> str:
    """All of `docs/clients.md`."""
    rows = [Row(**row) for row in recorded["rows"]]
    parts = [
        "# Programs of other packages",
        wrapped(INTRO),
        wrapped(f"{recorded['where']}."),
        table(rows),
        wrapped(COLUMNS),
        wrapped(STATE),
    ]
    return "\n\n".join(parts) + "\n"
