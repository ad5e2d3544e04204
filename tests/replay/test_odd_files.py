"""Log files that are written in an unusual way, or wrong."""

import csv

import numpy as np
import pytest

from optaxclip import replay


def read(tmp_path, text, name="run.csv", **options):
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return replay.read_history(path, **options)


@pytest.mark.parametrize(
    "text",
    [
        "step,grad_norm\r\n0,1.5\r\n1,2.5\r\n",
        "step,grad_norm\r0,1.5\r1,2.5\r",
        "\ufeffstep,grad_norm\n0,1.5\n1,2.5\n",
        "step, grad_norm\n0, 1.5\n1, 2.5\n",
        "step,grad_norm \n0,1.5 \n\n1,2.5\n",
        "step,grad_norm\n0,1.5\n1, \n2,\n3\n4,2.5,9\n",
        "step,step,grad_norm\n0,0,1.5\n1,1,2.5\n",
        "\nstep,grad_norm\n0,1.5\n1,2.5\n",
        ",grad_norm\n0,1.5\n1,2.5\n",
    ],
)
def test_a_csv_may_be_written_in_many_ways(tmp_path, text):
    np.testing.assert_array_equal(read(tmp_path, text), [1.5, 2.5])


def test_a_csv_may_have_long_notes(tmp_path):
    text = f"note,grad_norm\n{'x' * 200_000},1.5\n,2.5\n"
    np.testing.assert_array_equal(read(tmp_path, text), [1.5, 2.5])
    assert csv.field_size_limit() == 131_072


def test_nan_and_inf_may_be_text(tmp_path):
    text = "step,grad_norm\n0,nan\n1,NaN\n2,inf\n3,Infinity\n4,1e3\n"
    wanted = [np.nan, np.nan, np.inf, np.inf, 1000.0]
    np.testing.assert_array_equal(read(tmp_path, text), wanted)


@pytest.mark.parametrize("name", ["run.txt", "run.log", "run.JSON", "run.csv"])
@pytest.mark.parametrize(
    "text",
    [
        '{"grad_norm": 1.5}\n{"grad_norm": 2.5}\n',
        '\n[{"grad_norm": 1.5},\n {"grad_norm": 2.5}]',
    ],
)
def test_json_is_known_by_its_text(tmp_path, name, text):
    np.testing.assert_array_equal(read(tmp_path, text, name), [1.5, 2.5])


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "must hold a row for each step, got 0"),
        ("step,grad_norm\n", "must hold a row for each step, got 0"),
        ("step,loss\n0,1\n", "no column of .* has the name of a gradient norm"),
        ("step,grad_norm\n0,N/A\n", "must hold numbers: .*'N/A'"),
        ("step,grad_norm\n0,\n1, \n", "must hold numbers, got empty entries only"),
        ("step;grad_norm\n0;1,5\n", "must have commas between its columns"),
        ("step\tgrad_norm\n0\t1.5\n", "must have commas between its columns"),
        ("1.5\n2.5\n", "must begin with the names of its columns"),
        (b"\xff\xfes\0", "must be a text file in UTF-8"),
        (f'{{"grad_norm": {"9" * 400}}}', "must hold numbers: int too large"),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong(tmp_path, text, error):
    with pytest.raises(ValueError, match=rf"^read_history: .*{error}"):
        read(tmp_path, text)


def test_two_columns_of_one_name_are_asked_for(tmp_path):
    text = "step,grad_norm,grad_norm\n0,1.5,3.5\n"
    with pytest.raises(
        ValueError, match=r"It has 'step', 'grad_norm.1', 'grad_norm.2'"
    ):
        read(tmp_path, text)
    assert read(tmp_path, text, column="grad_norm.2") == [3.5]


def test_a_directory_or_no_file_is_named(tmp_path):
    for path in (tmp_path, tmp_path / "none.csv"):
        with pytest.raises(OSError, match=path.name):
            replay.read_history(path)


def test_columns_of_one_name_take_no_name_of_another(tmp_path):
    text = "norm.1,norm,norm\n9,1,3\n"
    for name, norm in {"norm.1": 9, "norm.2": 1, "norm.3": 3}.items():
        np.testing.assert_array_equal(read(tmp_path, text, column=name), [norm])
