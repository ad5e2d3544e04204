"""The command: see `tests/clients/__init__.py`."""

import sys

from ..packages import options_of, record
from .compare import row_of
from .page import page, table
from .trained import CLIENTS


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 1 if something is wrong between two runs."""
    options = options_of(
        arguments,
        "tests.clients",
        "Trains with programs of other packages, with our clip in theirs.",
        CLIENTS,
    )
    rows = options.run(row_of)
    print(table(rows))
    problems = [problem for row in rows for problem in row.problems]
    return options.finish(page, record(rows, ("jax", "optax", "flax")), problems)


if __name__ == "__main__":
    sys.exit(main())
