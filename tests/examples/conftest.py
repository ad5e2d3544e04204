"""No example writes into the source tree unless it is told to."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLACES = (ROOT, ROOT / "docs", ROOT / "examples")


def files():
    """Every file that a program might leave in the tree, with its time."""
    found = (path for place in PLACES for path in place.iterdir())
    return {path: path.stat().st_mtime_ns for path in found if path.is_file()}


@pytest.fixture(scope="module", autouse=True)
def the_tree_stays_as_it_is():
    before = files()
    yield
    after = files()
    changed = {path for path, time in after.items() if before.get(path) != time}
    assert not changed, f"written unasked: {sorted(map(str, changed))}"
