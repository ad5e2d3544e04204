"""What a run writes, and what it must not lose."""

import json

import pytest

from benchmarks import report


def written(path, rows):
    report.write(path, {"quick": True}, {"compiled": report.Table("", (), rows)})
    return json.loads(path.read_text())["tables"]["compiled"]["rows"]


def test_new_rows_replace_those_of_the_file(tmp_path):
    assert written(tmp_path / "new.json", [{"kernels": 1}]) == [{"kernels": 1}]
    assert written(tmp_path / "new.json", [{"kernels": 2}]) == [{"kernels": 2}]


def test_a_table_without_rows_does_not_replace_one_with_rows(tmp_path):
    path = tmp_path / "kept.json"
    assert written(path, []) == []
    written(path, [{"kernels": 1}])
    before = path.read_text()
    with pytest.raises(SystemExit, match="keeps its rows of compiled"):
        written(path, [])
    assert path.read_text() == before
