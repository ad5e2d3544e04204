"""Files as the programs write them, each also in gzip: the norms are 2.5 and 0.5."""

import gzip
import io
import json
from pathlib import Path

import numpy as np
import pytest

from optaxclip.replay import read_history


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def binary(save, *arrays, **named):
    file = io.BytesIO()
    save(file, *arrays, **named)
    return file.getvalue()


NORMS = np.array([2.5, 0.5])
SECTIONS = Path(__file__).with_name("formats.txt").read_text().split("==== ")[1:]
FILES = {
    **dict(section.split("\n", 1) for section in SECTIONS),
    "numpy.save, norms.npy": binary(np.save, NORMS),
    "numpy.savez, log.npz": binary(np.savez, loss=-NORMS, grad_norm=NORMS, seed=3),
    "metrics, of numpy.savez.npz": binary(np.savez, **{"clip/norm_before": NORMS}),
}


def written(tmp_path, content, name="log"):
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def error(path, column=None):
    with pytest.raises(ValueError) as raised:
        read_history(path, column)
    return str(raised.value)


def test_what_programs_write_is_read_without_a_column(tmp_path):
    for program, content in FILES.items():
        path = written(tmp_path, content)
        np.testing.assert_array_equal(read_history(path), NORMS, program)
        path = written(tmp_path, gzip.compress(path.read_bytes()), "log.gz")
        np.testing.assert_array_equal(read_history(path), NORMS, program)


OTHER_COLUMNS = [
    ("transformers, trainer_state.json", "loss", [1.4, 1.2]),
    ("Lightning, metrics.csv", "grad_2.0_norm/layer.weight", [1.5, 0.3]),
    ("MLflow, chart.csv", "loss", [-1.4]),
    ("Aim, metrics.csv", "loss", [1.4]),
    ("numpy.savez, log.npz", "loss", [-2.5, -0.5]),
    ("numpy.savez, log.npz", "seed", [3]),
]


def test_other_columns_are_read_by_their_names(tmp_path):
    for program, column, wanted in OTHER_COLUMNS:
        path = written(tmp_path, FILES[program])
        assert read_history(path, column).tolist() == wanted, (program, column)


KNOWN = (
    "train/grad_norm a/b/grad_norm optim/gnorm x/gradient_norm grad-norm "
    "learning/raw_grad_norm l2_norm/grad/global grad/norm/total "
    "train/grad_2.0_norm_total grad_inf_norm_total"
)


# Names that hold one that is known.
OTHERS = (
    "train/grad_norm_ratio layer/norm grad_normal clip/all/norm_before_ms "
    "learning/raw_grad_norm_ema my_raw_grad_norm loss_norm skip/normal skip/norm_ema "
    "clip/norm_before_ema norms/w train/grad_norm_total_ms "
    "l2_norm/grad/global/x Values"
)


def test_the_names_of_other_libraries_are_known(tmp_path):
    for name in KNOWN.split():
        path = written(tmp_path, f"train/loss,{name},lr\n1.0,2.5,0.1\n")
        np.testing.assert_array_equal(read_history(path), [2.5], name)


def test_other_names_are_not_taken_for_norms(tmp_path):
    for name in OTHERS.split():
        found = error(written(tmp_path, f"step,{name},loss\n0,2.5,1.0\n"))
        assert "no column of numbers has the name of a gradient norm, such as" in found
        assert f"There are 'step', '{name}', 'loss'. Choose one with" in found
        # What is called like a norm is proposed before what is not.
        likely = name if "norm" in name else "loss"
        assert found.endswith(
            f"column='{likely}', on the command line --column '{likely}'."
        )


def test_proposals_exist_and_hold_numbers(tmp_path):
    row = {"epoch": 1.0, "eval_loss": 1.3, "step": 2, "run": "sun-7", "best": None}
    row |= {"norm": {"_type": "histogram", "values": [3, 1]}, "tags": [1]}
    names = "'epoch', 'eval_loss', 'step'"
    for text in (lines(row), json.dumps({"log_history": [row]})):
        found = error(written(tmp_path, text))
        # A step is no norm.
        assert f"There are {names}. Choose one with column='eval_loss', on" in found


def test_runs_of_one_file_must_be_told_apart(tmp_path):
    panel = "Step,sun-7 - grad_norm,moon-8 - grad_norm\n1,2.5,9.0\n2,0.5,9.0\n"
    page = FILES["MLflow, page.csv"] + "c3,grad_norm,9.0,1,1700000000000\n"
    for content, first, second in (
        (panel, "sun-7 - grad_norm", "moon-8 - grad_norm"),
        (page, "a1b2 - grad_norm", "c3 - grad_norm"),
        # W&B runs of one name.
        (panel.replace("moon-8", "sun-7"), *("sun-7 - grad_norm." + x for x in "12")),
    ):
        path = written(tmp_path, content)
        found = error(path)
        assert f"'{first}', '{second}'. Choose one with" in found
        np.testing.assert_array_equal(read_history(path, first), NORMS)
        assert set(read_history(path, second)) == {9.0}


def test_nan_and_inf_may_be_text(tmp_path):
    rows = [{"norm": x} for x in (2.5, "NaN", "Infinity", float("nan"), float("inf"))]
    csv = "norm\n2.5\nnan\nInfinity\nNaN\ninf\n"
    board = json.dumps([[1.7e9, step, row["norm"]] for step, row in enumerate(rows)])
    for content in (lines(*rows), json.dumps(rows, indent=1), csv, board):
        found = read_history(written(tmp_path, content))
        np.testing.assert_array_equal(found, [2.5, np.nan, np.inf, np.nan, np.inf])


NEGATIVE = [
    ("norm", "step,norm\n0,1.5\n1,-2.5\n2,-3.0\n", "-2.5"),
    ("norm", binary(np.save, [1.5, -0.5, np.nan]), "-0.5"),
    ("train/grad_norm", lines({"train/grad_norm": -np.inf}), "-inf"),
    ("Value", FILES["TensorBoard, scalar.csv"].replace(",0.5", ",-0.5"), "-0.5"),
]


def test_negative_norms_are_refused(tmp_path, command):
    for name, content, value in NEGATIVE:
        path = written(tmp_path, content)
        text = f"read_history: {path}: the column '{name}' must hold norms, which are "
        text = f"{text}at least 0, got {value}."
        assert error(path) == error(path, name) == text
        with pytest.raises(SystemExit) as raised:
            command(path)
        assert str(raised.value) == text


def test_a_table_of_runs_that_went_on_has_every_value(tmp_path):
    """A run that is resumed logs steps again, the last one too. Two metrics of one
    step stay beside each other.
    """
    steps = [1, 2, 3, 3, 2, 3, 4]
    lines = ["run_id,key,value,step,timestamp"]
    for number, step in enumerate(steps):
        lines.append(f"a,grad_norm,{number},{step},0")
        lines.append(f"a,loss,{-number},{step},0")
    path = written(tmp_path, "\n".join(lines))
    # In the order in which they were logged, since no part goes back.
    assert read_history(path).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert read_history(path, "loss").tolist() == [0, -1, -2, -3, -4, -5, -6]
