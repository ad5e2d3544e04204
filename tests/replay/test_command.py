"""The command says what it read, recommends one row and replaces no file unasked."""

import subprocess
import sys

import numpy as np
import optax
import pytest

import optaxclip
from optaxclip import replay
from optaxclip.replay import suggest
from tests.helpers import apply

# As many finite norms in each log, so that each rule is compiled once.
SIZE = 200
NORMS = np.exp(np.random.default_rng(0).normal(size=SIZE))


@pytest.fixture
def log(tmp_path):
    lines = [f"{step},1.0,{norm},a" for step, norm in enumerate(NORMS)]
    path = tmp_path / "run.csv"
    path.write_text("\n".join(["Step,train/loss,train/grad_norm,note", *lines]))
    return path


def test_it_says_which_column_it_guessed_and_how_to_choose(log, command):
    guess, others, *_ = command(log).splitlines()
    assert guess == "Norms: column 'train/grad_norm' of run.csv, taken by its name."
    assert others == "--column NAME takes another one: 'Step', 'train/loss'."
    text = command(log, "--column", "Step").splitlines()[0]
    assert text == "Norms: column 'Step' of run.csv."


def test_one_row_is_recommended_that_clips_one_percent(log, command):
    (best,) = [row for row in suggest(NORMS) if row.recommended]
    assert best.limit == pytest.approx(np.quantile(NORMS, 0.99), rel=0.01)
    text = command(log)
    (row,) = [line for line in text.splitlines() if line.startswith("->  ")]
    assert row.endswith(best.rule)
    assert f"-> Start with {best.rule}: it clips 1.0% of these steps." in text


def test_the_rows_of_the_table_are_python(log, command):
    lines = command(log).splitlines()
    rows = [line[2:].split(None, 3)[3] for line in lines if "%  " in line]
    assert len(rows) == 10
    names = {"optaxclip": optaxclip, "optimizer": optax.sgd(0.1)}
    for row in rows:
        _, state = apply(eval(row, names), {"w": np.ones(2)})
        assert optaxclip.metrics(state)


def test_a_picture_is_replaced_only_with_force(log, command):
    for options, picture in (
        ((), log.with_suffix(".png")),
        (("--picture", log.parent / "mine.png"), log.parent / "mine.png"),
    ):
        picture.write_text("mine")
        text = command(log, *options)
        assert f"No picture: {picture} exists. --force replaces" in text
        assert picture.read_text() == "mine"
        assert f"Picture: {picture}" in command(log, "--force", *options)
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_recommended_limit_is_drawn(log, command, monkeypatch):
    drawn = []
    plot = replay.plot_history

    def recorded(history):
        drawn.append(history)
        return plot(history)

    monkeypatch.setattr(replay, "plot_history", recorded)
    command(log)
    (best,) = [row for row in suggest(NORMS) if row.recommended]
    np.testing.assert_array_equal(drawn[0].limits, np.float32(best.limit))


def test_a_picture_that_cannot_be_drawn_ends_in_one_line(log, command, capsys):
    for name in ("missing/run.png", "run.xyz"):
        with pytest.raises(SystemExit, match="No picture: "):
            command(log, "--picture", log.parent / name)
        assert "-> Start with" in capsys.readouterr().out


def test_it_does_without_matplotlib(log, command, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "No picture: matplotlib is not installed" in command(log)
    assert not log.with_suffix(".png").exists()


def test_broken_norms_are_counted_and_left_out(tmp_path, command):
    path = tmp_path / "run.csv"
    # The last one is beyond the range of float32.
    norms = [*np.linspace(1, 9, SIZE - 1), 1000.0, np.nan, np.inf, 3e40]
    path.write_text("length of the gradient\n" + "\n".join(map(str, norms)))
    text = command("--column", "length of the gradient", path)
    assert "203 steps, 3 of them NaN or inf. Norms from 1 to 1000, median 5.02" in text
    (row,) = [line for line in text.splitlines() if "norm(5.02)" in line]
    assert row.split()[:2] == ["5.02", "50.0%"]


def test_a_log_of_no_use_ends_in_one_line(tmp_path, command):
    path = tmp_path / "run.csv"
    with pytest.raises(SystemExit, match=r"run\.csv"):
        command(path)
    path.write_text("loss\n1\n2\n")
    with pytest.raises(SystemExit, match="no column of numbers has"):
        command(path)
    path.write_text("norm\n1\n")
    with pytest.raises(SystemExit, match="suggest: norms must hold at least two"):
        command(path)


@pytest.mark.slow
def test_it_runs_without_a_warning(log):
    python = [sys.executable, "-W", "error", "-m", "optaxclip.replay", log]
    done = subprocess.run(python, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
