"""The norm is found in what loggers export, and where it is not, the text says why."""

import json

import numpy as np
import pytest

from optaxclip.replay import read_history

# W&B, a panel of one run and of two, and the whole history from its Python client.
PANEL = "Step,sun-7 - train/grad_norm,sun-7 - train/grad_norm__MIN,"
PANEL += "sun-7 - train/grad_norm__MAX\n1,2.5,2.0,3.0\n2,0.5,0.5,0.5\n"
TWO_RUNS = "Step,sun-7 - grad_norm,moon-8 - grad_norm\n1,2.5,9.0\n2,0.5,9.0\n"
HISTORY = ",_step,train/loss,train/grad_norm\n0,0,1.0,2.5\n1,1,1.0,0.5\n"
TENSORBOARD = "Wall time,Step,Value\n1700000000.1,1,2.5\n1700000001.2,2,0.5\n"


def log(tmp_path, text, name="log.csv"):
    path = tmp_path / name
    path.write_text(text)
    return path


def error(path, column=None):
    with pytest.raises(ValueError) as raised:
        read_history(path, column)
    return str(raised.value)


@pytest.mark.parametrize("text", [PANEL, HISTORY, TENSORBOARD])
def test_exported_csv_is_read_without_a_column(tmp_path, text):
    np.testing.assert_array_equal(read_history(log(tmp_path, text)), [2.5, 0.5])


@pytest.mark.parametrize(
    "name",
    ["train/grad_norm", "a/b/grad_norm", "optim/gnorm", "x/gradient_norm"],
)
def test_a_group_before_the_name_is_no_hindrance(tmp_path, name):
    path = log(tmp_path, f"train/loss,{name},lr\n1.0,2.5,0.1\n")
    np.testing.assert_array_equal(read_history(path), [2.5])


@pytest.mark.parametrize("name", ["train/grad_norm_ratio", "layer/norm", "grad_normal"])
def test_other_names_are_not_taken_for_norms(tmp_path, name):
    path = log(tmp_path, f"step,{name}\n0,2.5\n")
    assert "no column of" in error(path)


def test_two_runs_of_one_panel_must_be_told_apart(tmp_path):
    path = log(tmp_path, TWO_RUNS)
    assert "several norms, 'sun-7 - grad_norm', 'moon-8 - grad_norm'" in error(path)
    assert "--column 'sun-7 - grad_norm'" in error(path)
    assert read_history(path, "moon-8 - grad_norm").tolist() == [9.0, 9.0]


def test_the_array_of_tensorboard_is_read(tmp_path):
    rows = [[1.7e9, 1, 2.5], [1.7e9, 2, "NaN"], [1.7e9, 3, 0.5]]
    path = log(tmp_path, json.dumps(rows), "log.json")
    np.testing.assert_array_equal(read_history(path), [2.5, np.nan, 0.5])


def test_an_array_of_objects_is_read(tmp_path):
    rows = [{"train/grad_norm": 2.5}, {"loss": 1.0}, {"train/grad_norm": "Infinity"}]
    path = log(tmp_path, json.dumps(rows, indent=1), "log.json")
    np.testing.assert_array_equal(read_history(path), [2.5, np.inf])


@pytest.mark.parametrize("text", ["[1, 2]", "[[1, 2]]", '[{"norm": 1}, 2]', "[{"])
def test_another_array_is_named(tmp_path, text):
    path = log(tmp_path, text, "log.json")
    assert "must hold JSON lines, or one array of objects" in error(path)


def test_a_missing_header_is_named(tmp_path):
    found = error(log(tmp_path, "0,0.75\n1,0.5\n"))
    assert "must begin with the names of its columns" in found
    assert "got the numbers '0', '0.75'" in found


@pytest.mark.parametrize(
    ("name", "text"), [("a.csv", ""), ("a.csv", "step,norm\n"), ("a.json", "[]")]
)
def test_a_log_without_rows_is_named(tmp_path, name, text):
    assert "must hold a row for each step, got 0" in error(log(tmp_path, text, name))


def test_an_unknown_norm_says_what_there_is_and_how_to_choose(tmp_path):
    found = error(log(tmp_path, "Step,loss\n0,1.0\n"))
    assert "has the name of a gradient norm, such as 'grad_norm'" in found
    assert "It has 'Step', 'loss'" in found
    assert "column='loss', on the command line --column 'loss'" in found


def test_a_hundred_columns_are_not_all_listed(tmp_path):
    names = ",".join(f"clip/norm_before/{i}" for i in range(100))
    found = error(log(tmp_path, f"{names}\n{',1' * 100}\n"[:-1]))
    assert "'clip/norm_before/11' and 88 more" in found
