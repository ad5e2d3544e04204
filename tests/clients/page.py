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
If you replace `optax.clip_by_global_norm` by `optaxclip.clip_by_global_norm` in a
program that uses optax, it runs on and gives the same losses. `python -m tests.clients`
shows this with the trainers of other packages. Each trainer runs a few steps three
times from one seed: with optax's clip, with optaxclip's, and without a clip. The
command downloads nothing, and takes the versions that are installed.
"""
COLUMNS = """
`losses` is the largest relative difference between the losses with both clips. `no
clip` is the same for no clip and optax's clip, and shows that the clip matters.
`clipped` counts the clipped steps, as `optaxclip.metrics` read them from the train
state of the package. `checkpoint` names the call that saved and restored that state,
and `same` says whether it came back bit for bit. The command fails if `losses` is above
1e-5, if `no clip` is at most 1e-3 or a hundred times `losses`, if nothing was clipped,
or if a restored state differs.
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
