"""What the measured costs must show, what is raced against each other, and what a run
writes and must not lose.
"""

import json

import jax.numpy as jnp
import pytest

from benchmarks import pages, report, timing
from benchmarks.per_example import methods, rows


def gradient(size):
    return lambda: {"w": size * jnp.arange(1.0, 4.0)}


def test_a_race_of_different_gradients_is_refused():
    runs = {methods.OPTAX: gradient(1.0), "another": gradient(1.001)}
    with pytest.raises(ValueError, match=r"another: 0\.001 from optax's gradient"):
        rows._differences(runs)


def test_what_clips_nothing_may_differ():
    runs = {methods.OPTAX: gradient(1.0), methods.PLAIN: gradient(2.0)}
    assert rows._differences(runs) == {methods.OPTAX: 0.0}


@pytest.mark.parametrize(("seconds", "calls"), [(0.05, 5), (0.01, 1), (0.001, 1)])
def test_a_run_is_repeated_until_it_fills_the_time(monkeypatch, seconds, calls):
    monkeypatch.setattr(timing, "_seconds", lambda contestant: 0.01)
    runs = []
    contestant = timing.repeated([lambda: runs.append(None)], seconds)
    assert contestant.calls == calls
    before = len(runs)
    contestant.run()
    assert len(runs) - before == calls


def test_runs_take_turns_from_round_to_round(monkeypatch):
    monkeypatch.setattr(timing, "_seconds", lambda contestant: 0.01)
    runs = []
    functions = [lambda: runs.append("first"), lambda: runs.append("second")]
    contestant = timing.repeated(functions, 0.02)
    runs.clear()
    for _ in range(3):
        contestant.run()
    assert runs == ["first", "first", "second", "second", "first", "first"]


ROWS = pages.rows_of("per_example", "per_example")


def test_all_ways_compute_the_same_gradient():
    clipped = [row for row in ROWS if "not clipped" not in row["gradient"]]
    assert clipped and all(row["difference"] <= rows.SAME for row in clipped)


def test_ghost_clipping_takes_at_most_half_more_memory():
    ghost = [row for row in ROWS if row["gradient"] == "optaxclip, ghost"]
    assert ghost and all(row["temporary memory"] <= 1.5 for row in ghost)


def by_case():
    """The rows of each small model and batch."""
    cases = {}
    for row in pages.rows_of("per_example", "per_example_auto"):
        cases.setdefault((row["model"], row["batch"]), []).append(row)
    return cases.items()


def test_auto_is_near_the_best_method_of_as_little_memory():
    assert len(by_case()) == 24
    for case, rows_of_case in by_case():
        clipped = [row for row in rows_of_case if row["gradient"] != "not clipped"]
        auto = next(row for row in clipped if "auto" in row["gradient"])
        assert auto["memory"] <= 1.5, case
        best = min(row["time"] for row in clipped if row["memory"] <= 1.5)
        assert auto["time"] <= 1.3 * best, case


def test_auto_is_near_the_best_method_for_unseen_models():
    rows = pages.rows_of("per_example", "per_example_unseen")
    models = {row["model"] for row in rows}
    assert len(models) == 12
    for model in models:
        _, auto, *others = [row for row in rows if row["model"] == model]
        assert "auto" in auto["gradient"]
        assert auto["time"] <= 1.15 * min(row["time"] for row in others), model


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
