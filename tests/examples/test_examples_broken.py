"""The program behind the README's picture runs, draws for both backgrounds, and writes
its table.
"""

import json

import pytest

from examples import adaptive, broken_batches

pytestmark = pytest.mark.usefixtures("as_programs_run")


@pytest.mark.slow
def test_it_draws_twice_and_writes_its_table(tmp_path, monkeypatch):
    monkeypatch.setattr(adaptive.char_rnn, "HIDDEN", 16)
    table = tmp_path / "table.json"
    rows = broken_batches.main(steps=8, save=tmp_path / "picture.png", table=table)
    for name in ("picture.png", "picture_dark.png"):
        assert (tmp_path / name).stat().st_size > 10_000
    written = json.loads(table.read_text())
    assert [row["protection"] for row in written] == [
        adaptive.CLEAN,
        *broken_batches.TITLES,
    ]
    assert [row["final_loss"] for row in written] == [row.final_loss for row in rows]
