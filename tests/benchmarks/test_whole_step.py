"""Whole steps are run in turns, written as JSON, and shown as a digest."""

import json

import pytest

import benchmarks
from benchmarks import pages, steps


@pytest.mark.slow
@pytest.mark.usefixtures("as_programs_run")
def test_the_command_prints_tables_progress_and_json(tmp_path, capsys):
    path = tmp_path / "results.json"
    benchmarks.main(["--quick", "--only", "whole_step", "--json", str(path)])
    printed = capsys.readouterr()
    assert "| actor and critic | optax, global norm | " in printed.out
    assert "whole_step (1 of 1) ..." in printed.err
    assert "global norm: compiled" in printed.err and "round 2 of 2" in printed.err
    (table,) = json.loads(path.read_text())["tables"].values()
    assert table["quick"] and [row["clipped by"] for row in table["rows"]] == [
        "none",
        "global norm",
        steps.GLOBAL,
    ]
    for row in table["rows"]:
        first, last = row["losses"]
        assert last < first  # they really train


def test_every_clip_of_ours_has_a_counterpart():
    ours = [name for name in steps.STEPS if "optax" not in name and name != "none"]
    assert all(steps.counterpart(name) in steps.STEPS for name in ours)
    assert steps.counterpart("none") is steps.counterpart(steps.GLOBAL) is None


def test_the_digest_has_times_and_what_a_clip_adds(monkeypatch, tmp_path):
    names = list(pages.DIGEST)
    timed = [
        {"network": "net", "clipped by": name, "time": 1 + place / 100}
        for place, name in enumerate(names)
    ]
    compiled = [
        {"device": "v5e", "model": "8 layers, scanned", "clipped by": name, "GB": gb}
        for name, gb in zip(names, (50.0, 50.1))
    ]
    tables = {"whole_step": timed, "whole_step_compiled": compiled}
    content = {"tables": {name: {"rows": rows} for name, rows in tables.items()}}
    for name in ("costs", "gpu"):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    lines = pages.digest().splitlines()
    assert lines[2] == "| nothing, Adam alone | 1.00 | 1.00 | 50.00 |"
    assert lines[3] == "| `clip_by_global_norm` | 1.01 | 1.01 | +0.2 % |"
    assert lines[4] == "| `optax.clip_by_global_norm` | 1.02 | 1.02 | - |"
