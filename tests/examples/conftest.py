"""No example writes into the source tree unless it is told to."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT, ROOT / "docs", ROOT / "examples")


def files():
    """Every file that a program might leave in the tree, with its time."""
    times = {}
    for folder in FOLDERS:
        for path in folder.iterdir():
            if path.is_file():
                times[path] = path.stat().st_mtime_ns
    return times


@pytest.fixture(scope="module", autouse=True)
def the_tree_stays_as_it_is():
    before = files()
    yield
    after = files()
    changed = {path for path, time in after.items() if before.get(path) != time}
    assert not changed, f"written unasked: {sorted(map(str, changed))}"
