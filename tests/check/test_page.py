"""The page on wrong norms: each of its programs has the kind that stands beside it."""

import re
from pathlib import Path

from optaxclip._check_step.bugs import MEANINGS

from . import wrong_steps
from .test_check_step import WRONG
from .test_planted import FURTHER, PLANTED

PAGE = (Path(__file__).parents[2] / "docs/wrong_norms.md").read_text()


def rows(columns):
    """The cells of table rows that begin with a link or a word, and end in code."""
    lines = [line for line in PAGE.splitlines() if line.startswith("| ")]
    cells = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in lines]
    return [row for row in cells if len(row) == columns]


def test_the_program_of_a_thread_is_tested_with_its_kind():
    tested = {(name, setting, kind) for name, setting, kind, _ in WRONG}
    threads = [row for row in rows(5) if row[0] != "thread"]
    assert len(threads) == 15
    for _, _, kind, program, setting in threads:
        assert (program, setting, kind) in tested


def test_every_kind_has_a_row_and_a_tested_program():
    tested = {(name, kind) for name, _, kind, _ in WRONG}
    for name, norm, update in PLANTED:
        tested |= {(name, norm), (name, update)}
    kinds = {row[0]: row[2] for row in rows(3) if row[0] in MEANINGS}
    assert list(kinds) == list(MEANINGS)
    del kinds["unknown"]
    assert {(program, kind) for kind, program in kinds.items()} <= tested


def test_every_program_is_tested_and_says_what_is_wrong():
    pattern = r"^def (\w+)\(setting\):"
    source = Path(wrong_steps.__file__).read_text()
    names = set(re.findall(pattern, source, re.MULTILINE))
    helpers = {"nan_to_0"}  # what is not found
    assert names - helpers == {name for name, *_ in [*WRONG, *PLANTED, *FURTHER]}
    assert all(getattr(wrong_steps, name).__doc__ for name in names)
