"""Files in the forms that people write by hand, and what is wrong with the others."""

import gzip
import io
import json
import zipfile

import numpy as np
import pytest

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
    "step,grad_norm\n0,1.5\n1, \n2,\n3\n4,2.5,9\n",
    "step,step,grad_norm\n0,0,1.5\n1,1,2.5\n",
    "\nstep,grad_norm\n0,1.5\n1,2.5\n",
    '{"grad_norm": 1.5}\n{"grad_norm": 2.5}\n',
    '\ufeff{"grad_norm": 1.5}\n\n{"loss": 1}\n{"grad_norm": null}\n{"grad_norm": 2.5}',
    '\n[{"grad_norm": 1.5},\n {"grad_norm": 2.5}]',
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


def zipped():
    file = io.BytesIO()
    np.savez(file, norm=np.ones(3))
    return file.getvalue()


TEXT = "must be a text file in UTF-8, .npy or .npz, also in gzip"


WRONG = [
    ("", "must hold numbers, got 0 rows without"),
    ("step,grad_norm\n", "must hold numbers, got 0 rows without"),
    ("[]", "must hold numbers, got 0 rows without"),
    ("a,grad_norm\n,\n,\n", "must hold numbers, got 2 rows without"),
    ("step,grad_norm\n0,N/A\n", "There are 'step'. Choose one with column='NAME'"),
    ("step,grad_norm\n0,\n1, \n", "no column of numbers has .* There are 'step'"),
    ("norm\n1.0\nhigh\n", "the column 'norm' must hold numbers: .*: 'high'"),
    ("step;norm\n0;1\n1;1,5\n", "the column 'norm' must hold numbers: .*'1,5'"),
    ("1.5\n2.5\n", "must begin with names of columns, .* the numbers '1.5'"),
    (b"\xff\xfes\0", TEXT),
    ("norm\n1\n".encode("utf-16"), TEXT),
    (b"\x89PNG\r\n\x1a\n\x00\xff", TEXT),
    (excel(), TEXT),
    # Without the time, which would be in the name of the case, and in each of
    # several processes another.
    (gzip.compress(b"norm\n1\n2\n", mtime=0)[:-9], "Compressed file ended before"),
    (zipped()[:-30], "File is not a zip file"),
    (array([1], [1, 2], dtype=object), "Object arrays cannot be loaded"),
    (array([1.0, 2.0], dtype=float), "must hold numbers, got 1 rows without"),
    (f'{{"norm": 1}}\n{{"norm": {"9" * 400}}}', "hold numbers: int too large"),
    ('{"norm": 1}\n{"norm": [1.5]}\n', "the column 'norm' must hold numbers"),
    ('{"norm": 1.0}\nnorm 2\n', "Expecting value: line 2 column 1"),
    ('{"norm": 1.5}\n[2.5]\n', r"JSON lines, or one array .* got '\[2\.5\]'"),
    ("[{", "Expecting property name"),
    ("[1, 2]", "must hold JSON lines, or one array of objects, got '1'"),
    ('[{"norm": 1}, 2]', "must hold JSON lines, or one array of objects, got '2'"),
]


def test_a_wrong_file_is_named_with_what_is_wrong(tmp_path):
    path = tmp_path / "run.csv"
    for text, error in WRONG:
        with pytest.raises(ValueError, match=rf"^read_history: {path}: .*{error}"):
            read(tmp_path, text)


def test_a_last_line_that_is_cut_off_is_left_out(tmp_path):
    with pytest.warns(UserWarning, match="last line is cut off, .*'{\"norm\": 3'"):
        found = read(tmp_path, '{"norm": 1}\n{"norm": 2}\n{"norm": 3')
    assert found.tolist() == [1, 2]


def test_the_norm_of_the_worst_tensor_is_not_that_of_all(tmp_path):
    """Of `metrics(state, summary=True)`. The name of one norm is empty."""
    row = {"clip/norm_before": 1.0, "clip/worst_name": "w"}
    row |= {"clip_2/norm_before": 1.5, "clip_2/worst_name": ""}
    found = read(tmp_path, json.dumps([row, row]))
    np.testing.assert_array_equal(found, [1.5, 1.5])
    row = {"record/norm": 1.0, "record/worst_name": "w"}
    row |= {"record_2/norm": 1.5, "record_2/worst_name": ""}
    found = read(tmp_path, json.dumps([row, row]))
    np.testing.assert_array_equal(found, [1.5, 1.5])


def test_null_of_metrics_is_nan(tmp_path):
    row = {"clip/norm_before": None, "clip/nonfinite_count": 1}
    rows = json.dumps([row, row | {"clip/norm_before": 1.5}])
    for text in (rows, "clip/norm_before,clip/nonfinite_count\n,1\n1.5,1"):
        for begin in ("clip/norm_before", "clip/"), ("record/norm", "record/"):
            named = text.replace("clip/norm_before", begin[0])
            named = named.replace("clip/", begin[1])
            np.testing.assert_array_equal(read(tmp_path, named), [np.nan, 1.5])


def test_a_header_that_comes_again_is_left_out(tmp_path):
    assert read(tmp_path, "step,norm\n0,1\nstep,norm\n0,2\n").tolist() == [1, 2]


def test_a_column_of_numbers_may_begin_with_something_else(tmp_path):
    with pytest.raises(ValueError, match=r"'grad_norm' must hold numbers: .*'N/A'"):
        read(tmp_path, "step,grad_norm\n0,N/A\n1,2.0\n")


def test_a_loss_may_be_negative_and_a_norm_may_not(tmp_path):
    for name in ("loss", "Loss/train", "eval_LOSS"):
        assert read(tmp_path, f"step,{name}\n0,-1.5\n", name) == [-1.5]
    error = "the column 'norm' must hold norms, which are at least 0, got -1.5"
    with pytest.raises(ValueError, match=error):
        read(tmp_path, "step,norm\n0,-1.5\n")


def test_a_directory_or_no_file_is_named(tmp_path):
    for path in (tmp_path, tmp_path / "none.csv"):
        with pytest.raises(OSError, match=path.name):
            read_history(path)


SUREST = [
    ("loss,gnorm", "gnorm"),
    ("norm,gnorm", "norm"),
    ("norm,grad_norm,clip/norm_before", "clip/norm_before"),
    ("normal,norm/w", "norm/w"),
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
    ("record/a/norm,skip/a/norm", "record/a/norm"),
]


def test_the_surest_name_is_taken(tmp_path):
    for names, found in SUREST:
        numbers = ",".join(map(str, range(len(names.split(",")))))
        wanted = [names.split(",").index(found)]
        assert read(tmp_path, f"{names}\n{numbers}\n") == wanted, names


def test_one_of_several_norms_must_be_named(tmp_path):
    for first in ("clip/norm_before/w", "clip_0/norm_before", "record/norm/w"):
        second = first.replace("/w", "/v").replace("_0", "_1")
        text = f"{first},{second}\n1,2\n"
        error = f"several columns have .* There are '{first}', '{second}'. Choose"
        with pytest.raises(ValueError, match=error):
            read(tmp_path, text)
        assert read(tmp_path, text, second) == [2.0]


def test_a_step_that_is_no_number_is_none(tmp_path):
    """Of a table with a line for each metric: 0 stands for it."""
    lines = ["key,value,step", "norm,1.5,nan", "norm,2.5,3"]
    np.testing.assert_array_equal(read(tmp_path, "\n".join(lines)), [1.5, 2.5])


def test_the_norm_of_everything_is_proposed(tmp_path):
    text = "clip/norm_before/v,clip/norm_before/w,clip_2/norm_before\n1,2,3\n"
    with pytest.raises(ValueError, match="one with column='clip_2/norm_before'"):
        read(tmp_path, text)


def test_a_column_that_is_not_there_is_named(tmp_path):
    text = "column='norms' is not in this file, which has 'step', 'norm'"
    with pytest.raises(ValueError, match=text):
        read(tmp_path, "step,norm,note\n0,1.5,a\n", "norms")


def test_a_hundred_columns_are_not_all_listed(tmp_path):
    names = ",".join(f"clip/norm_before/{i}" for i in range(100))
    with pytest.raises(ValueError, match="'clip/norm_before/11' and 88 more"):
        read(tmp_path, f"{names}\n{'1,' * 99}1\n")


def test_nested_objects_are_columns(tmp_path):
    rows = [{"train": {"clip": {"norm_before": x}, "loss": 9.0}} for x in (1.5, 0.5)]
    text = "\n".join(map(json.dumps, rows))
    np.testing.assert_array_equal(read(tmp_path, text), [1.5, 0.5])
    np.testing.assert_array_equal(read(tmp_path, text, "train/loss"), [9.0, 9.0])


def test_an_object_of_one_step_may_have_metrics_in_it(tmp_path):
    """In MLflow's answer they are a list."""
    text = json.dumps({"step": 3, "metrics": {"grad_norm": 1.5, "loss": 9.0}})
    np.testing.assert_array_equal(read(tmp_path, text), [1.5])
