"""The command prints a table, and the pictures show what a rule would do."""

import subprocess
import sys

import numpy as np
import pytest
from matplotlib.figure import Figure

import optaxclip
from optaxclip.replay import plot_history
from optaxclip.replay.__main__ import main
from tests.replay.logs import NORMS, write_csv


@pytest.mark.slow
def test_the_command_prints_a_table_and_draws_a_picture(tmp_path, capsys):
    main([str(write_csv(tmp_path / "run.csv"))])
    printed = capsys.readouterr().out
    assert f"150 steps, {np.sum(~np.isfinite(NORMS))} of them NaN or inf" in printed
    assert (
        "steps clipped" in printed and "zclip()" in printed and "estimates" in printed
    )
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit, match=r"nowhere\.csv"):
        main([str(tmp_path / "nowhere.csv")])


@pytest.mark.slow
def test_the_command_runs_without_a_warning(tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "error",
            "-m",
            "optaxclip.replay",
            write_csv(tmp_path / "run.csv"),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_the_picture_has_norms_limits_and_clipped_steps():
    result = optaxclip.replay.run(optaxclip.rules.z_score(1.0), NORMS)
    axis = plot_history(result)
    labels = [line.get_label() for line in axis.lines]
    assert labels[:2] == ["norm before clipping", "limit"] and labels[3] == "NaN or inf"
    assert len(axis.lines[2].get_xdata()) == int(result.clipped.sum())
    own = Figure().add_subplot()
    assert plot_history(NORMS, axis=own) is own
    with pytest.raises(ValueError, match=r"must be \[steps\] of one length"):
        plot_history(NORMS, NORMS[:3])


def log_of(path, norms, column="norm"):
    path.write_text(
        "\n".join(
            [f"step,{column}", *(f"{step},{norm}" for step, norm in enumerate(norms))]
        )
        + "\n"
    )
    return path


@pytest.mark.slow
def test_the_command_takes_a_column_and_a_picture(tmp_path, capsys):
    norms = [*np.linspace(1, 9, 9), 1000.0, np.nan, np.inf]
    log, picture = (
        log_of(tmp_path / "run.csv", norms, "length of the gradient"),
        tmp_path / "drawn.png",
    )
    main(["--column", "length of the gradient", "--picture", str(picture), str(log)])
    printed = capsys.readouterr().out
    assert "12 steps, 2 of them NaN or inf. Norms from 1 to 1000, median 5.5" in printed
    row = next(
        line
        for line in printed.splitlines()
        if line.endswith("optaxclip.clip_by_global_norm(5.5)")
    )
    assert row.split()[:2] == ["5.5", "50.0%"]
    assert (
        picture.exists()
        and not (tmp_path / "run.png").exists()
        and f"Picture: {picture}" in printed
    )


def test_the_command_ends_with_one_line_where_a_log_is_of_no_use(tmp_path):
    with pytest.raises(SystemExit, match=r"read_history: no column of"):
        main([str(log_of(tmp_path / "run.csv", [1.0, 2.0], "loss"))])
    with pytest.raises(SystemExit, match=r"suggest: norms must hold at least two"):
        main([str(log_of(tmp_path / "run.csv", [1.0]))])


@pytest.mark.slow
def test_the_command_does_without_matplotlib(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    main([str(log_of(tmp_path / "run.csv", [*range(1, 11), np.nan, np.inf]))])
    assert "No picture: matplotlib is not installed" in capsys.readouterr().out
    assert not (tmp_path / "run.png").exists()


def lines_of(axis):
    return {
        str(line.get_label()): (
            np.asarray(line.get_xdata(), float),
            np.asarray(line.get_ydata(), float),
        )
        for line in axis.lines
    }


def test_a_picture_of_bare_norms_marks_those_above_their_limits():
    norms = [1.0, 5.0, np.nan, 2.0]
    drawn = lines_of(plot_history(norms, [2.0, 2.0, 2.0, np.inf], word="skipped"))
    np.testing.assert_array_equal(drawn["norm before clipping"][1], [1, 5, np.nan, 2])
    np.testing.assert_array_equal(drawn["limit"][1], [2, 2, 2, np.nan])
    np.testing.assert_array_equal(drawn["skipped (25.0%)"], [[1], [5]])
    np.testing.assert_array_equal(drawn["NaN or inf"], [[2], [1]])
    assert np.isnan(lines_of(plot_history([1.0, np.inf]))["norm before clipping"][1][1])
    assert lines_of(plot_history([1.0, 2.0]))["clipped (0.0%)"][0].size == 0
    assert "clipped (0.0%)" in lines_of(plot_history([]))


def test_a_replay_picture_takes_other_limits_and_marks():
    axis = plot_history(
        optaxclip.replay.run(2.0, [1.0, 3.0]), [4.0, 5.0], [True, False]
    )
    drawn = lines_of(axis)
    np.testing.assert_array_equal(drawn["limit"][1], [4, 5])
    np.testing.assert_array_equal(drawn["clipped (50.0%)"], [[0], [1]])
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("step", "gradient norm")


@pytest.mark.parametrize(
    "wrong",
    [(np.ones((2, 2)),), (np.ones(2), np.ones(3)), (np.ones(2), np.ones(2), [True])],
    ids=["norms", "limits", "marks"],
)
def test_a_picture_wants_norms_limits_and_marks_of_one_length(wrong):
    with pytest.raises(
        ValueError,
        match=(
            r"plot_history: norms, limits and clipped must be \[steps\] of one length"
        ),
    ):
        plot_history(*wrong)
