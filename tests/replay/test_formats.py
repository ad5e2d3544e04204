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
        # A file of one scalar has no name in it.
        if program.startswith("TensorBoard"):
            continue
        path = written(tmp_path, content)
        np.testing.assert_array_equal(read_history(path), NORMS, program)
        path = written(tmp_path, gzip.compress(path.read_bytes()), "log.gz")
        np.testing.assert_array_equal(read_history(path), NORMS, program)


OTHER_COLUMNS = [
    ("transformers, trainer_state.json", "loss", [1.4, 1.2]),
    ("Lightning, metrics.csv", "grad_2.0_norm/layer.weight", [1.5, 0.3]),
    ("numpy.savez, log.npz", "loss", [-2.5, -0.5]),
    ("TensorBoard, scalar.csv", "Value", [2.5, 0.5]),
]


def test_other_columns_are_read_by_their_names(tmp_path):
    for program, column, wanted in OTHER_COLUMNS:
        path = written(tmp_path, FILES[program])
        assert read_history(path, column).tolist() == wanted, (program, column)


KNOWN = (
    "train/grad_norm a/b/grad_norm optim/gnorm x/gradient_norm grad-norm "
    "learning/raw_grad_norm l2_norm/grad/global grad/norm/total "
    "train/grad_2.0_norm_total grad_inf_norm_total grad_norm_before_clipping "
    "grad_norm(l2) total_norm train/grad_norm_step grad_norm_preclip "
    "grad_norm_pre_clip_step l2_grads"
)


def test_the_steps_of_other_libraries_are_known(tmp_path):
    """Of Lightning in W&B, and of fairseq."""
    for name in ("trainer/global_step", "num_updates"):
        path = written(tmp_path, f"{name},gnorm\n0,9\n50,2.5\n50,1.5\n100,0.5\n")
        with pytest.warns(UserWarning, match="Steps 50 to 50 come twice"):
            assert read_history(path).tolist() == [9, 1.5, 0.5]


# Norms of something else, settings, and what has nothing to do with norms.
OTHERS = (
    "train/grad_norm_ratio layer/norm grad_normal clip/all/norm_before_ms loss_norm "
    "learning/raw_grad_norm_ema skip/normal skip/norm_ema norms/w Values val_acc usd "
    "clip/norm_before_ema train/grad_norm_total_ms l2_norm/grad/global/x eval_wer "
    "max_grad_norm args/clip_grad_norm train_cfg.algorithm.max_grad_norm param_norm "
    "weight_norm clipped_grad_norm grad_norm_after_clip cfg/grad_norm update_norm "
    "config.grad_norm grad_norm_threshold proxy/tgt_norm_mean residual_norm "
    "grad_norm/clipped grad_norm/after_clip"
)


def test_the_names_of_other_libraries_are_known(tmp_path):
    for name in KNOWN.split():
        path = written(tmp_path, f"train/loss,{name},lr\n1.0,2.5,0.1\n")
        np.testing.assert_array_equal(read_history(path), [2.5], name)


def test_nothing_else_is_taken_for_a_norm_or_proposed(tmp_path):
    for name in OTHERS.split():
        path = written(tmp_path, f"step,{name},loss\n0,2.5,1.0\n")
        found = error(path)
        assert "this file has no gradient norm. Log one in each step" in found, name
        assert f"the columns '{name}', 'loss'. If one of them is a norm" in found
        assert read_history(path, name).tolist() == [2.5]


def test_numbers_beside_lists_are_read(tmp_path):
    row = {"grad_norm": 2.5, "loss": 1.5, "weights": [1.0, 2.0], "name": "a"}
    path = written(tmp_path, json.dumps(row))
    assert read_history(path).tolist() == [2.5]
    assert read_history(path, "loss").tolist() == [1.5]
    assert read_history(path, "weights").tolist() == [1.0, 2.0]


def test_runs_of_one_file_must_be_told_apart(tmp_path):
    panel = "Step,sun-7 - grad_norm,moon-8 - grad_norm\n1,2.5,9.0\n2,0.5,9.0\n"
    first, second = "sun-7 - grad_norm", "moon-8 - grad_norm"
    path = written(tmp_path, panel)
    assert f"'{first}', '{second}'. Choose one with" in error(path)
    np.testing.assert_array_equal(read_history(path, first), NORMS)
    assert read_history(path, second).tolist() == [9.0, 9.0]
    path = written(tmp_path, panel.replace("moon-8", "sun-7"))
    with pytest.warns(UserWarning, match="with the same name the last one counts"):
        assert read_history(path).tolist() == [9.0, 9.0]


def test_nan_and_inf_may_be_text(tmp_path):
    rows = [{"norm": x} for x in (2.5, "NaN", "Infinity", float("nan"), float("inf"))]
    csv = "norm\n2.5\nnan\nInfinity\nNaN\ninf\n"
    for content in (lines(*rows), json.dumps(rows, indent=1), csv):
        found = read_history(written(tmp_path, content))
        np.testing.assert_array_equal(found, [2.5, np.nan, np.inf, np.nan, np.inf])


NEGATIVE = [
    ("norm", "step,norm\n0,1.5\n1,-2.5\n2,-3.0\n", "-2.5"),
    ("norm", binary(np.save, [1.5, -0.5, np.nan]), "-0.5"),
    ("train/grad_norm", lines({"train/grad_norm": -np.inf}), "-inf"),
]


def test_negative_norms_are_refused(tmp_path, command):
    for name, content, value in NEGATIVE:
        path = written(tmp_path, content)
        text = (
            f"the column '{name}' must hold norms, which are at least 0, got {value}."
        )
        assert error(path) == error(path, name) == f"read_history: {path}: {text}"
        with pytest.raises(SystemExit) as raised:
            command(path)
        assert str(raised.value) == f"replay: {path}: {text}"


def test_events_of_tensorboard_are_read(tmp_path):
    writer = pytest.importorskip("tensorboardX").SummaryWriter(str(tmp_path))
    for step, norm in enumerate((1.5, 2.5)):
        writer.add_scalar("train/grad_norm", norm, step)
        writer.add_scalar("train/loss", -norm, step)
    writer.close()
    (path,) = tmp_path.glob("*tfevents*")
    assert read_history(path).tolist() == [1.5, 2.5]
    assert read_history(path, "train/loss").tolist() == [-1.5, -2.5]
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.warns(UserWarning, match="The event file is cut off"):
        assert read_history(path).tolist() == [1.5, 2.5]


def test_scalars_of_tensorflow_2_are_read(tmp_path):
    """They are tensors, in one of two fields."""
    pb = "tensorboardX.proto.{}_pb2"
    event_pb2 = pytest.importorskip(pb.format("event"))
    fields = (
        {"tensor_content": np.float32(2.5).tobytes()},
        {"float_val": [0.5]},
        # A vector is not a scalar.
        {"float_val": [1.0, 2.0]},
    )
    events = [event_pb2.Event(file_version="brain.Event:2")]
    for step, tensor in enumerate(fields):
        value = {"tag": "grad_norm", "tensor": {"dtype": 1, **tensor}}
        events.append(event_pb2.Event(step=step, summary={"value": [value]}))
    data = b""
    for event in events:
        content = event.SerializeToString()
        length = len(content).to_bytes(8, "little")
        data += length + b"sums" + content + b"sums"
    np.testing.assert_array_equal(read_history(written(tmp_path, data)), NORMS)
