"""Files as the programs write them, each also in gzip: the norms are 2.5 and 0.5."""

import gzip
import io
import json

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
LOGS = [
    {"epoch": 0.5, "grad_norm": 2.5, "learning_rate": 1e-3, "loss": 1.4, "step": 1},
    {"epoch": 1.0, "grad_norm": 0.5, "learning_rate": 5e-4, "loss": 1.2, "step": 2},
    {"epoch": 1.0, "eval_loss": 1.3, "eval_runtime": 0.1, "step": 2},
    {"epoch": 1.0, "step": 2, "total_flos": 1e9, "train_loss": 1.3},
]
TRAINER_STATE = {
    "best_metric": None,
    "epoch": 1.0,
    "global_step": 2,
    "is_world_process_zero": True,
    "log_history": LOGS,
    "max_steps": 2,
    "stateful_callbacks": {"TrainerControl": {"args": {}}},
    "trial_params": None,
}
LIGHTNING = """\
epoch,grad_2.0_norm/layer.weight,grad_2.0_norm_total,step,train_loss,val_loss
0,1.5,2.5,0,1.4,
0,0.3,0.5,1,1.2,
0,,,1,,1.3
"""
WANDB_PANEL = """\
"Step","sun-7 - train/grad_norm","sun-7 - train/grad_norm__MIN","sun-7 - _step"
"1","2.5","2.0","1"
"2","0.5","0.5","2"
"""
WANDB_TABLE = """\
,_step,_runtime,train/loss,train/grad_norm,gradients/w
0,0,1.5,1.4,2.5,"{'_type': 'histogram', 'bins': [0, 1], 'values': [3]}"
1,1,2.5,1.2,0.5,"{'_type': 'histogram', 'bins': [0, 1], 'values': [3]}"
2,1,2.6,,,
"""
HISTOGRAM = {"_type": "histogram", "values": [3, 1], "bins": [0.0, 0.5, 1.0]}
WANDB_HISTORY = [
    {"_step": 0, "_runtime": 1.5, "train/grad_norm": 2.5, "grad_norm/w": HISTOGRAM},
    {"_step": 1, "_runtime": 2.5, "train/grad_norm": 0.5, "grad_norm/w": HISTOGRAM},
]
TENSORBOARD = """\
Wall time,Step,Value
1700000000.1,1,2.5
1700000001.2,2,0.5
"""
MLFLOW_CHART = """\
"Run","Run ID","metric","step","timestamp","value"
"shrew-1","a1b2","grad_norm","1","1700000000000","2.5"
"shrew-1","a1b2","grad_norm","2","1700000001000","0.5"
"shrew-1","a1b2","loss","1","1700000000000","-1.4"
"""
MLFLOW_PAGE = """\
run_id,key,value,step,timestamp
a1b2,grad_norm,2.5,1,1700000000000
a1b2,grad_norm,0.5,2,1700000001000
"""
MLFLOW_REST = [
    {"key": "grad_norm", "value": 2.5, "timestamp": 1700000000000, "step": 1},
    {"key": "grad_norm", "value": 0.5, "timestamp": 1700000001000, "step": 2},
]
AIM = """\
,idx,step,value,epoch,time
0,0,1,2.5,1,2026-01-01 00:00:00.123456
1,1,2,0.5,1,2026-01-01 00:00:01.123456
"""
AIM_NAMES = """\
,idx,step,value,epoch,time,run.hash,metric.name,metric.context.subset
0,0,1,2.5,1,2026-01-01 00:00:00.123456,a1b2,grad_norm,train
1,0,1,1.4,1,2026-01-01 00:00:00.123456,a1b2,loss,train
2,1,2,0.5,1,2026-01-01 00:00:01.123456,a1b2,grad_norm,train
"""
AIM_RECORDS = [
    {"idx": 0, "step": 1, "value": 2.5, "metric.name": "grad_norm", "time": 1700000},
    {"idx": 1, "step": 2, "value": 0.5, "metric.name": "grad_norm", "time": 1700001},
]
FILES = {
    "transformers, trainer_state.json": json.dumps(TRAINER_STATE, indent=2),
    "Lightning, metrics.csv": LIGHTNING,
    "W&B, panel.csv": WANDB_PANEL,
    "W&B, run.history().csv": WANDB_TABLE,
    "W&B, wandb-history.jsonl": lines(*WANDB_HISTORY),
    "TensorBoard, scalar.csv": TENSORBOARD,
    "TensorBoard, scalar.json": "[[1.7e9, 1, 2.5], [1.7e9, 2, 0.5]]",
    "MLflow, chart.csv": MLFLOW_CHART,
    "MLflow, page.csv": MLFLOW_PAGE,
    "MLflow, get-history.json": json.dumps({"metrics": MLFLOW_REST}, indent=2),
    "Aim, one metric.csv": AIM,
    "Aim, metrics.csv": AIM_NAMES,
    "Aim, metrics.json": json.dumps(AIM_RECORDS),
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


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize("program", FILES)
def test_what_programs_write_is_read_without_a_column(tmp_path, program, packed):
    path = written(tmp_path, FILES[program])
    if packed:
        path = written(tmp_path, gzip.compress(path.read_bytes()), "log.gz")
    np.testing.assert_array_equal(read_history(path), NORMS)


@pytest.mark.parametrize(
    ("program", "column", "wanted"),
    [
        ("transformers, trainer_state.json", "loss", [1.4, 1.2]),
        ("Lightning, metrics.csv", "grad_2.0_norm/layer.weight", [1.5, 0.3]),
        ("MLflow, chart.csv", "loss", [-1.4]),
        ("Aim, metrics.csv", "loss", [1.4]),
        ("numpy.savez, log.npz", "loss", [-2.5, -0.5]),
        ("numpy.savez, log.npz", "seed", [3]),
    ],
)
def test_other_columns_are_read_by_their_names(tmp_path, program, column, wanted):
    path = written(tmp_path, FILES[program])
    assert read_history(path, column).tolist() == wanted


@pytest.mark.parametrize(
    "name",
    [
        "train/grad_norm",
        "a/b/grad_norm",
        "optim/gnorm",
        "x/gradient_norm",
        "grad-norm",
        "learning/raw_grad_norm",
        "l2_norm/grad/global",
        "grad/norm/total",
        "train/grad_2.0_norm_total",
        "grad_inf_norm_total",
    ],
)
def test_the_names_of_other_libraries_are_known(tmp_path, name):
    path = written(tmp_path, f"train/loss,{name},lr\n1.0,2.5,0.1\n")
    np.testing.assert_array_equal(read_history(path), [2.5])


@pytest.mark.parametrize(
    "name",
    ["train/grad_norm_ratio", "layer/norm", "grad_normal", "clip/all/norm_before_ms"],
)
def test_other_names_are_not_taken_for_norms(tmp_path, name):
    found = error(written(tmp_path, f"step,{name},loss\n0,2.5,1.0\n"))
    assert "no column of numbers has the name of a gradient norm, such as" in found
    # What is called like a norm is proposed before what is not.
    assert f"There are 'step', '{name}', 'loss'. Choose one with" in found
    assert found.endswith(f"column='{name}', on the command line --column '{name}'.")


@pytest.mark.parametrize(
    "write", [lines, lambda row: json.dumps({"log_history": [row]})]
)
def test_proposals_exist_and_hold_numbers(tmp_path, write):
    row = {**LOGS[2], "run": "sun-7", "norm": HISTOGRAM, "best": None, "tags": [1]}
    found = error(written(tmp_path, write(row)))
    names = "'epoch', 'eval_loss', 'eval_runtime', 'step'"
    assert f"There are {names}. Choose one with column='step', on" in found


def test_runs_of_one_file_must_be_told_apart(tmp_path):
    panel = "Step,sun-7 - grad_norm,moon-8 - grad_norm\n1,2.5,9.0\n2,0.5,9.0\n"
    page = MLFLOW_PAGE + "c3,grad_norm,9.0,1,1700000000000\n"
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


@pytest.mark.parametrize(
    ("name", "content", "value"),
    [
        ("norm", "step,norm\n0,1.5\n1,-2.5\n2,-3.0\n", "-2.5"),
        ("norm", binary(np.save, [1.5, -0.5, np.nan]), "-0.5"),
        ("train/grad_norm", lines({"train/grad_norm": -np.inf}), "-inf"),
        ("Value", TENSORBOARD.replace(",0.5", ",-0.5"), "-0.5"),
    ],
)
def test_negative_norms_are_refused(tmp_path, command, name, content, value):
    path = written(tmp_path, content)
    text = f"read_history: {path}: the column '{name}' must hold norms, which are at "
    text = f"{text}least 0, got {value}."
    assert error(path) == error(path, name) == text
    with pytest.raises(SystemExit) as raised:
        command(path)
    assert str(raised.value) == text
