"""Files in the forms that people write by hand, and what is wrong with the others."""

import gzip
import io
import json
import re
import zipfile

import numpy as np
import pytest

from optaxclip._logs.files import read_log
from optaxclip._logs.norms import TENSOR_PATTERN, columns_named, loss_of
from optaxclip.replay import read_history


def read(tmp_path, text, column=None, name="run.csv"):
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_history(path, column)


FORMS = [
    "step,grad_norm\r\n0,1.5\r\n1,2.5\r\n",
    "step,grad_norm\r0,1.5\r1,2.5\r",
    "\ufeffstep,grad_norm\n0,1.5\n1,2.5\n",
    "step, grad_norm\n0, 1.5\n1, 2.5\n",
    "step;grad_norm\n0;1.5\n1;2.5\n",
    "step\tgrad_norm\n0\t1.5\n1\t2.5\n",
    "step,grad_norm \n0,1.5 \n\n1,2.5\n",
    "step,grad_norm\n0,1.5\n1, \n2,\n4,2.5\n",
    "\nstep,grad_norm\n0,1.5\n1,2.5\n",
    '{"grad_norm": 1.5}\n{"grad_norm": 2.5}\n',
    '\ufeff{"grad_norm": 1.5}\n\n{"loss": 1}\n{"grad_norm": 2.5}',
    '\n[{"grad_norm": 1.5},\n {"grad_norm": 2.5}]',
    '{"grad_norm": [1.5, 2.5], "loss": [2, 1]}',
    '{"run": "a", "log_history": [{"grad_norm": 1.5}, {"grad_norm": 2.5}]}',
    "{'loss': 2.0, 'grad_norm': 1.5}\n{'loss': 1.0, 'grad_norm': np.float64(2.5)}\n",
    "{'grad_norm': Array(1.5, dtype=float32)}\n{'grad_norm': 2.5, 'a': None}",
    '#{"t_start": 1.5}\nloss,grad_norm\n2,1.5\n1,2.5\n',
    "step  grad_norm\n   0        1.5\n   1        2.5\n",
    "step;grad norm\n0;1,5\n1;2,5\n",
    # np.savetxt with a header.
    "# step,grad_norm\n0.0e+00,1.5e+00\n1.0e+00,2.5e+00\n",
    "# step grad_norm\n0.0e+00 1.5e+00\n1.0e+00 2.5e+00\n",
    # to_json of pandas.
    '{"loss": {"0": 2, "1": 1}, "grad_norm": {"0": 1.5, "1": 2.5}}',
    # As pandas writes an index.
    "\tstep\tgrad_norm\n0\t0\t1.5\n1\t1\t2.5\n",
    "grad_norm\tval\n1.5\t2\n2.5\t\n",
    "grad norm\n1.5\n2.5\n",
    # The header begins as a zip file does.
    "PK,norm\n7,1.5\n8,2.5\n",
    "step,grad_norm\n0/10,1.5\n1/10,2.5\n",
    "{'params': {'norm': 3.0}, 'norm': 1.5}\n{'params': {'norm': 3.0}, 'norm': 2.5}\n",
    b'{"grad_norm": 1.5}\n{"grad_norm": 2.5}\n\0\0\0',
    # A run that went on after a crash of the machine.
    b"step,grad_norm\n0,1.5\n" + 512 * b"\0" + b"1,2.5\n",
    gzip.compress(b"norm\n1.5\n", mtime=0) + gzip.compress(b"2.5\n", mtime=0),
    # A crash leaves zeros behind a gzip file too.
    gzip.compress(b"norm\n1.5\n2.5\n", mtime=0) + 512 * b"\0",
]


def test_files_may_be_written_in_many_ways(tmp_path):
    for text in FORMS:
        for name in ("run.csv", "run.log", "run.JSON"):
            found = read(tmp_path, text, name=name)
            np.testing.assert_array_equal(found, [1.5, 2.5], text)


def excel():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("xl/workbook.xml", b"\xff")
    return file.getvalue()


def array(*entries, dtype):
    file = io.BytesIO()
    np.save(file, np.array(entries, dtype=dtype))
    return file.getvalue()


def zipped(**arrays):
    file = io.BytesIO()
    np.savez(file, norm=np.ones(3), **arrays)
    return file.getvalue()


READS = "The reader takes JSON lines, JSON, CSV"
EMPTY = f"the file is empty. {READS}"
BINARY = f"the file is binary. {READS}"
TEXT = f"there is no table of numbers in it. {READS}"
BROKEN = '.*log that survives a kill has a line for each step, such as {"step": 1, "gr'
NO_NORM = "this file has no gradient norm. Log one in each step"


WRONG = [
    ("", EMPTY),
    ("\n \n", EMPTY),
    ("step,grad_norm\n", TEXT),
    ("# a comment", TEXT),
    ("[]", TEXT),
    ("a,grad_norm\n,\n,\n", TEXT),
    (
        "step,grad_norm\n0,N/A\n",
        "there is no number in it. A log has a row for each step, with a number under",
    ),
    ("1.5\n2.5\n", TEXT),
    ('the log\n"' + 200_000 * "x", TEXT),
    ("step,grad_norm\n0,1.5\n".encode("utf-16"), f"{BINARY}.* text as UTF-8"),
    (b"\x89PNG\r\n\x1a\n\x00\xff", BINARY),
    (bytes(range(256)) * 4, BINARY),
    (excel(), "it is a zip file without arrays, such as a spreadsheet .* as CSV"),
    # Without the time, which would be in the name of the case, and in each of
    # several processes another.
    (b"\x1f\x8b" + 30 * b"no gzip", "compression method"),
    (gzip.compress(b"norm\n1\n", mtime=0)[:-12] + 12 * b"x", f"decompress{BROKEN}"),
    (zipped()[:-30], f"File is not a zip file{BROKEN}"),
    (array([1], [1, 2], dtype=object), f"Object arrays cannot be loaded{BROKEN}"),
    (array(1.0, 2.0, dtype=float)[:-3], f"EOF: reading array data{BROKEN}"),
    (
        array([1.0, 2.0], dtype=float),
        r"there is no number in it.* 'norm' has the shape \(1, 2\), which is not one",
    ),
    (2 * '{"grad_norm": [1.0, 2.0, 3.0]}\n', TEXT),
    (f'{{"norm": {"9" * 400}}}', TEXT),
    ("[{", TEXT),
    (20_000 * "[", TEXT),
    (20_000 * '{"a":', TEXT),
    ("[1, 2]", TEXT),
    ("{}", TEXT),
    ('{"loss": []}', TEXT),
    (
        '{"usd": 1}\n',
        f"{NO_NORM}.* the columns 'usd'. If one of them is a norm, name it with --col",
    ),
    (
        "step,health/norm/w\n0,1.5\n",
        r"no gradient norm. record_health .* put optaxclip.record_norm\(\) before it",
    ),
    (
        "step,Metric,value\n0,loss,1.5\n0,grad_norm,2.5\n",
        r"a row for each metric.* df.pivot\(index='step', columns='Metric', val",
    ),
]


def test_a_wrong_file_is_named_with_what_is_wrong(tmp_path):
    path = tmp_path / "run.csv"
    for text, error in WRONG:
        with pytest.raises(ValueError, match=rf"^read_history: {path}: .*({error})"):
            read(tmp_path, text)


CUT_OFF = [
    ('{"norm": 1}\n{"norm": 2}\n{"norm": 3', "The last one is '{\"norm\": 3'"),
    ('[{"norm": 1},\n{"norm": 2},\n{"no', "The last one is '{\"no'"),
    ('[{"norm": 1}, {"norm": 2}, {', "left out: 1. The last one is ', {'"),
    (
        '{"log_history": [\n{"norm": 1},\n{"norm": 2},\n{"a": 1, "no',
        "last one is '{\"a",
    ),
    ('{"log_history": [\n{"norm": 1},\n{"norm": 2},\n{"no', "The JSON is cut off"),
    # A dict of lists, in a group, and where a name is cut in two.
    ('{"loss": [3, 2, 1], "norm": [1, 2, 2.', "The JSON is cut off"),
    ('{\n "train": {\n  "norm": [\n   1,\n   2,\n   2', "The JSON is cut off"),
    ('{"lr": {"max": 1}, "norm": [1, 2], "lo', "The JSON is cut off"),
    ('{"train": {"norm": [1, 2], "lo', "The JSON is cut off"),
    ("step,norm\n0,1\n1,2\n2", "Lines that do not have 2 entries are left out: 1"),
    (
        gzip.compress(b"norm\n1\n2\n" + 99 * b" ", mtime=0)[:-9],
        "The gzip file is cut off",
    ),
    # A line without an end is read too.
    (gzip.compress(b'{"norm": [1, 2]}', mtime=0)[:-4], "The gzip file is cut off"),
]


def test_a_file_that_is_cut_off_is_read_up_to_there(tmp_path):
    for text, warning in CUT_OFF:
        with pytest.warns(UserWarning) as caught:
            assert read(tmp_path, text).tolist() == [1, 2], text
        assert len(caught) == 1 and re.search(warning, str(caught[0].message))


def test_an_array_that_is_no_column_is_said(tmp_path):
    weights = r"'w' has the shape \(3, 2\), which is not one number for each step"
    with pytest.warns(UserWarning, match=weights):
        found = read(tmp_path, zipped(w=np.ones((3, 2)), seed=np.array(7)))
    assert found.tolist() == [1, 1, 1]


def test_the_norm_of_the_worst_tensor_is_not_that_of_all(tmp_path):
    """In `metrics(state, summary=True)`, with the index of that tensor."""
    for name in ("clip/norm_before", "record/norm"):
        owner, norm = name.split("/")
        rows = [
            {name: 1.0, f"{owner}/worst_index": index}
            | {f"{owner}_2/{norm}": 1.5, f"{owner}_2/worst_index": 0}
            for index in (0, 1)
        ]
        np.testing.assert_array_equal(read(tmp_path, json.dumps(rows)), [1.5, 1.5])


def test_null_is_nan_unless_the_column_is_logged_more_rarely(tmp_path):
    for nulls in ([50], range(70, 100), range(40, 100)):
        assert np.isnan(with_nulls(tmp_path, nulls, len(nulls))).sum() == len(nulls)
    for count in (34, 50):
        rows = np.linspace(0, 98, count, dtype=int).tolist()
        assert np.isfinite(with_nulls(tmp_path, rows, 0)).all()


def with_nulls(tmp_path, places, count):
    """The norms of 100 rows, with null in these, if `count` of them are said."""
    rows = [{"grad_norm": 1.0 + step % 7} for step in range(100)]
    for step in places:
        rows[step]["grad_norm"] = None
    text = "\n".join(map(json.dumps, rows))
    if not count:
        return read(tmp_path, text)
    with pytest.warns(UserWarning, match=f"Null is read as NaN. .* there: {count}"):
        return read(tmp_path, text)


def test_null_in_another_row_of_a_step_is_no_norm(tmp_path):
    """pandas writes it in the rows of an evaluation."""
    rows = [{"step": step, "norm": 1.0 + step} for step in range(9)]
    rows.insert(5, {"step": 4, "norm": None})
    assert read(tmp_path, json.dumps(rows)).tolist() == [*range(1, 10)]


def test_null_before_the_number_of_a_step_is_no_norm(tmp_path):
    """Without a warning, which would be an error here."""
    rows = [{"step": step, "norm": 1.0 + step} for step in range(9)]
    rows.insert(4, {"step": 4, "norm": None})
    assert read(tmp_path, json.dumps(rows)).tolist() == [*range(1, 10)]


def test_steps_that_begin_again_give_way_to_a_global_step(tmp_path):
    rows = [
        {"step": batch, "global_step": 3 * epoch + batch, "norm": 3.0 * epoch + batch}
        for epoch in range(3)
        for batch in range(3)
    ]
    assert read(tmp_path, json.dumps(rows)).tolist() == [*range(9)]
    # Of a run that is resumed the later steps count.
    steps = [*range(9), *range(5, 9)]
    rows = [{"step": x, "_step": row, "norm": row} for row, x in enumerate(steps)]
    with pytest.warns(UserWarning, match="Steps 5 to 8 come twice"):
        found = read(tmp_path, json.dumps(rows))
    assert found.tolist() == [*range(5), *range(9, 13)]


def test_steps_that_begin_again_are_counted_on(tmp_path):
    """In the log of a loop over epochs, with a row in ten steps, and by itself or in a
    row of its own the number of each."""
    steps = [0, 10, 20, 0, 10, 20, 0, 10, 20]
    rows = [{"step": x, "norm": row, "epoch": row // 3} for row, x in enumerate(steps)]
    pairs = [({"step": x, "loss": x}, {"step": x, "norm": x}) for x in steps]
    for entries in (rows, [row for pair in pairs for row in pair]):
        path = tmp_path / "run.json"
        path.write_text(json.dumps(entries))
        log = read_log(path, "test")
        wanted = [0, 10, 20, 21, 31, 41, 42, 52, 62]
        assert log.columns["norm"].steps.tolist() == wanted
        assert log.notes == [
            "The column 'step' begins again, as in each epoch, and is counted on. If "
            "the run was started anew, delete the rows of earlier ones."
        ]


def test_steps_that_begin_again_at_1_are_counted_on(tmp_path):
    path = tmp_path / "run.csv"
    path.write_text("step,norm\n" + 3 * "1,2.5\n2,2.5\n3,2.5\n")
    steps = read_log(path, "test").columns["norm"].steps
    assert steps.tolist() == [*range(1, 10)]


def test_of_a_step_that_comes_twice_the_later_run_counts(tmp_path):
    steps = [*range(40), *range(30, 50)]
    lines = [f"{step},{row}" for row, step in enumerate(steps)]
    with pytest.warns(UserWarning, match=r"Steps 30 to 39 come twice \(entries: 10\)"):
        found = read(tmp_path, "\n".join(["step,norm", *lines]))
    assert found.tolist() == [*range(30), *range(40, 60)]


def test_a_row_that_comes_late_is_put_in_its_place(tmp_path):
    """As jax.debug.callback without ordered=True may write it. Without a warning."""
    for steps in ([0, 1, 3, 4, 2, 5], [1, 0, 2, 3, 4, 5]):
        rows = [{"step": step, "norm": 1.0 + step} for step in steps]
        assert read(tmp_path, json.dumps(rows)).tolist() == [1, 2, 3, 4, 5, 6]


def test_a_row_comes_late_also_in_a_run_that_is_resumed(tmp_path):
    steps = [0, 2, 1, 3, 5, 4, 6, 3, 5, 4, 7, 6]
    rows = [{"step": step, "norm": row} for row, step in enumerate(steps)]
    with pytest.warns(UserWarning, match=r"Steps 3 to 6 come twice \(entries: 4\)"):
        found = read(tmp_path, json.dumps(rows))
    assert found.tolist() == [0, 2, 1, 7, 9, 8, 11, 10]


def test_minus_1_is_a_norm_that_is_not_finite(tmp_path):
    """DeepSpeed logs it for NaN and inf."""
    for column in (None, "total_norm"):
        with pytest.warns(UserWarning, match="Norms of -1 are read as NaN, .* so: 2"):
            found = read(tmp_path, "step,total_norm\n0,1.5\n1,-1\n2,-1\n", column)
        np.testing.assert_array_equal(found, [1.5, np.nan, np.nan])
    assert read(tmp_path, "step,loss\n0,-1\n", "loss").tolist() == [-1]


def test_the_steps_of_multisteps_are_the_surest(tmp_path):
    path = tmp_path / "run.csv"
    path.write_text("step,gradient_step,norm\n2,1,1.5\n5,2,2.5\n")
    log = read_log(path, "test")
    assert log.columns["norm"].steps.tolist() == [1, 2]


def test_the_index_of_pandas_is_the_step_of_a_row(tmp_path):
    path = tmp_path / "run.json"
    path.write_text('{"grad_norm": {"100": 1.5, "110": 2.5}}')
    log = read_log(path, "test")
    assert log.columns["grad_norm"].steps.tolist() == [100, 110]
    # A column of steps is surer.
    path.write_text('{"_step": {"0": 7, "1": 8}, "norm": {"0": 1.5, "1": 2.5}}')
    log = read_log(path, "test")
    assert log.columns["norm"].steps.tolist() == [7, 8]


def test_nulls_that_a_resumed_run_replaces_are_no_norms(tmp_path):
    norms = {**dict.fromkeys(range(95), 1.0), **dict.fromkeys(range(95, 101))}
    rows = [{"step": step, "norm": norm} for step, norm in norms.items()]
    rows += [{"step": step, "norm": 2.0} for step in range(60, 91)]
    with pytest.warns(UserWarning, match="Steps 60 to 100 come twice"):
        assert read(tmp_path, json.dumps(rows)).tolist() == 60 * [1.0] + 31 * [2.0]


def test_text_among_numbers_is_counted_and_left_out(tmp_path):
    with pytest.warns(UserWarning, match="Text is left out. Entries: 1, 'N/A'"):
        assert read(tmp_path, "step,grad_norm\n0,N/A\n1,2.0\n").tolist() == [2.0]


def test_a_norm_that_is_always_null_is_said(tmp_path):
    """As NaN from the first step on in strict JSON."""
    rows = '{"loss": 2.0, "grad_norm": null}\n{"loss": 1.0, "grad_norm": null}'
    error = "no gradient norm.* The column 'grad_norm' has no number. Ent.* null: 2"
    with pytest.raises(ValueError, match=error):
        read(tmp_path, rows)


def test_a_header_that_comes_again_is_left_out(tmp_path):
    with pytest.warns(UserWarning, match="Text is left out. Entries: 1, 'norm'"):
        found = read(tmp_path, "step,norm\n0,1\nstep,norm\n1,2\n")
    assert found.tolist() == [1, 2]


def test_a_loss_may_be_negative_and_a_norm_may_not(tmp_path):
    for name in ("loss", "Loss/train", "eval_LOSS"):
        assert read(tmp_path, f"step,{name}\n0,-1.5\n", name) == [-1.5]
    error = "the column 'norm' must hold norms, which are at least 0, got -1.5"
    with pytest.raises(ValueError, match=error):
        read(tmp_path, "step,norm\n0,-1.5\n")


def test_a_directory_or_no_file_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for name, error, what in (
        ("runs", IsADirectoryError, "Is a directory"),
        ("none.csv", FileNotFoundError, "No such file or directory"),
    ):
        with pytest.raises(error, match=f"{what}: '{name}'"):
            read_history(name)


SUREST = [
    ("loss,gnorm", "gnorm"),
    ("norm,gnorm", "gnorm"),
    ("norm,grad_norm,clip/norm_before", "clip/norm_before"),
    ("loss,clip/all/norm_before", "clip/all/norm_before"),
    ("clip_1/norm_before,clip_0/limit", "clip_1/norm_before"),
    ("clip/norm_before/w,clip/limit/w,skip/norm", "skip/norm"),
    ("clip/limit,skip/outer/norm,norm_after", "skip/outer/norm"),
    ("learning/grad_norm,learning/raw_grad_norm", "learning/raw_grad_norm"),
    # Of record_norm, in front of a clipper or behind it.
    ("loss,record/norm", "record/norm"),
    ("record/norm,clip/norm_before", "clip/norm_before"),
    ("grad_norm,record/norm,skip/norm", "record/norm"),
    ("record/norm/w,record/norm", "record/norm"),
    ("loss,record/all/norm,clip/limit", "record/all/norm"),
    ("run - record_2/norm,loss", "run - record_2/norm"),
    # A run of W&B may be called like a setting.
    ("clip max 0.5 - grad_norm,loss", "clip max 0.5 - grad_norm"),
    ("record/a/norm,skip/a/norm", "record/a/norm"),
    # A group of TensorBoard.
    ("Loss/train,Loss/grad_norm", "Loss/grad_norm"),
]


def test_the_training_loss_is_told_from_other_losses(tmp_path):
    for name in ("train/loss", "latest/loss", "interval/loss", "total_loss"):
        assert loss_name(tmp_path, name) == name
    # Of a spreadsheet, of the writers of torch, of Megatron, and of Lightning.
    for name in ("train loss", "Loss/train", "lm loss", "train_loss_step"):
        assert loss_name(tmp_path, name) == name
    for name in ("val/loss", "my_val/loss", "test/loss", "aux/loss", "Loss/val"):
        assert loss_name(tmp_path, name) is None


def test_extremes_and_summaries_are_no_tensors(tmp_path):
    """W&B writes the extremes of each number beside it."""
    path = tmp_path / "run.csv"
    names = ["a", "b", "b__MIN", "b__MAX", "max", "mean", "clipped"]
    path.write_text(
        ",".join(f"grad_norm/{name}" for name in names)
        + ",health/updates/norm/b,health/updates/norm/b__MAX\n"
        + "1,1,1,1,1,1,1,1,1\n" * 3
    )
    log = read_log(path, "test")
    tensors = [column.name for column in columns_named(TENSOR_PATTERN, log)]
    assert tensors == ["grad_norm/a", "grad_norm/b"]
    assert not any("__M" in name for name in log.columns)


def loss_name(tmp_path, name):
    path = tmp_path / "run.csv"
    path.write_text(f"{name},lr\n2,1\n1,1\n")
    loss = loss_of(read_log(path, "test"))
    return loss.name if loss else None


def test_the_surest_name_is_taken(tmp_path):
    for names, found in SUREST:
        numbers = ",".join(map(str, range(len(names.split(",")))))
        wanted = [names.split(",").index(found)]
        assert read(tmp_path, f"{names}\n{numbers}\n") == wanted, names


def test_one_of_several_norms_must_be_named(tmp_path):
    for first in ("clip/norm_before/w", "clip_0/norm_before", "record/norm/w"):
        second = first.replace("/w", "/v").replace("_0", "_1")
        text = f"{first},{second}\n1,2\n"
        error = f"several columns are called .*: '{first}', '{second}'. Choose"
        with pytest.raises(ValueError, match=error):
            read(tmp_path, text)
        assert read(tmp_path, text, second) == [2.0]


def test_a_step_that_is_no_number_is_that_of_the_row_before(tmp_path):
    rows = [{"step": 2, "norm": 1.5}, {"step": "NaN", "norm": 9.0}, {"norm": 8.0}]
    rows.append({"step": 3, "norm": 2.5})
    with pytest.warns(UserWarning, match="Steps 2 to 2 come twice"):
        assert read(tmp_path, json.dumps(rows)).tolist() == [8.0, 2.5]


def test_the_norm_of_everything_comes_before_those_of_tensors(tmp_path):
    text = "clip/norm_before/v,clip/norm_before/w,clip_2/norm_before\n1,2,3\n"
    assert read(tmp_path, text) == [3.0]


def test_the_end_of_a_name_is_enough_for_a_column(tmp_path):
    text = "a/norm,b/size,c/size,size_of/length\n1,2,3,4\n"
    assert read(tmp_path, text, "length") == [4.0]
    with pytest.raises(ValueError, match="this file has no column 'size'"):
        read(tmp_path, text, "size")


def test_a_column_that_is_not_there_is_named(tmp_path):
    text = (
        "this file has no column 'norms'. Name one with --column NAME (in Python: "
        "column=NAME): it has 'loss', 'norm'."
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        read(tmp_path, "loss,norm,note\n0,1.5,a\n", "norms")


def test_a_hundred_columns_are_not_all_listed(tmp_path):
    names = ",".join(f"clip/norm_before/{i}" for i in range(100))
    with pytest.raises(ValueError, match="'clip/norm_before/11' and 88 more"):
        read(tmp_path, f"{names}\n{'1,' * 99}1\n")


def test_a_quote_that_never_closes_hides_no_dicts(tmp_path):
    """The reader of CSV refuses a cell of more than 131,072 characters."""
    text = 'run "a\n' + 10_000 * "{'norm': 1.5}\n"
    with pytest.warns(UserWarning, match="outside of complete {...} are left out: 1"):
        assert read(tmp_path, text).tolist() == 10_000 * [1.5]


def test_a_name_of_the_run_beside_the_norm_is_no_metric(tmp_path):
    text = "step,name,value,grad_norm\n0,ppo-clip-loss,3,1.5\n1,ppo-clip-loss,3,2.5\n"
    assert read(tmp_path, text).tolist() == [1.5, 2.5]


def test_a_series_of_pandas_has_the_name_0(tmp_path):
    assert read(tmp_path, ",0\n0,1.5\n1,0.5\n", "0").tolist() == [1.5, 0.5]


def test_nested_objects_are_columns(tmp_path):
    rows = [{"train": {"clip": {"norm_before": x}, "loss": 9.0}} for x in (1.5, 0.5)]
    text = "\n".join(map(json.dumps, rows))
    np.testing.assert_array_equal(read(tmp_path, text), [1.5, 0.5])
    np.testing.assert_array_equal(read(tmp_path, text, "train/loss"), [9.0, 9.0])


def test_an_object_of_one_step_may_have_metrics_in_it(tmp_path):
    """In MLflow's answer they are a list."""
    text = json.dumps({"step": 3, "metrics": {"grad_norm": 1.5, "loss": 9.0}})
    np.testing.assert_array_equal(read(tmp_path, text), [1.5])
