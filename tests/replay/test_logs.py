"""Logs are read whatever they are, or the error says why not."""

import json

import numpy as np
import pytest

import optaxclip
from optaxclip.replay.__main__ import main
from tests.replay.logs import NORMS, write_csv


def write_lines(path):
    rows = [
        {"step": 0, "loss": 2.0},
        *({"step": step, "grad_norm": float(norm)} for step, norm in enumerate(NORMS)),
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    return path


def test_logs_are_read_whatever_they_are(tmp_path):
    for path in (
        write_csv(tmp_path / "a.csv"),
        write_csv(tmp_path / "b.csv", "clip_0/norm_before"),
        write_lines(tmp_path / "c.jsonl"),
    ):
        column = "clip_0/norm_before" if path.stem == "b" else None
        np.testing.assert_allclose(
            optaxclip.replay.read_history(path, column), NORMS, rtol=1e-6
        )


def test_a_log_that_cannot_be_read_says_why(tmp_path):
    with pytest.raises(
        ValueError,
        match=(
            r"read_history: column='norms' is not in .*a\.csv, which has 'step', "
            r"'clip/norm_before', 'loss'"
        ),
    ):
        optaxclip.replay.read_history(write_csv(tmp_path / "a.csv"), "norms")
    with pytest.raises(
        ValueError,
        match=r"no column of .* has the name of a gradient norm, such as 'grad_norm'",
    ):
        optaxclip.replay.read_history(write_csv(tmp_path / "b.csv", "unknown"))
    (tmp_path / "c.jsonl").write_text('{"norm": 1.0}\nnorm 2\n')
    with pytest.raises(ValueError, match=r"line 2 of .*c\.jsonl must be a JSON object"):
        optaxclip.replay.read_history(tmp_path / "c.jsonl")
    (tmp_path / "d.csv").write_text("norm\n1.0\nhigh\n")
    with pytest.raises(
        ValueError,
        match=(
            r"the column 'norm' of .*d\.csv must hold numbers: could not convert "
            r"string to float: 'high'"
        ),
    ):
        optaxclip.replay.read_history(tmp_path / "d.csv")
    with pytest.raises(
        ValueError,
        match="suggest: norms must hold at least two finite norms above 0, got 1",
    ):
        optaxclip.replay.suggest([1.0, np.nan])
    for norms, shape in ((1.0, r"\(\)"), ([], r"\(0,\)")):
        with pytest.raises(
            ValueError,
            match=(
                "replay.run: norms must be a history, one norm for each step, got an "
                f"array of shape {shape}"
            ),
        ):
            optaxclip.replay.run(1.0, norms)


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_a_log_may_begin_with_a_byte_order_mark(tmp_path, suffix):
    text = {"csv": "grad_norm\n1.5\n2.5\n", "jsonl": '{"grad_norm": 1.5}\n' * 2}
    path = tmp_path / f"run.{suffix}"
    path.write_text(text[suffix], encoding="utf-8-sig")
    assert optaxclip.replay.read_history(path)[0] == 1.5


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
@pytest.mark.parametrize(
    "content", [b"\x89PNG\r\n\x1a\n\x00\xff", "norm\n1\n".encode("utf-16")]
)
def test_a_log_that_is_no_text_is_named(tmp_path, content, suffix):
    path = tmp_path / f"run.{suffix}"
    path.write_bytes(content)
    with pytest.raises(
        ValueError, match=rf"^read_history: {path} must be a text file in UTF-8: "
    ):
        optaxclip.replay.read_history(path)
    with pytest.raises(SystemExit, match="must be a text file in UTF-8"):
        main([str(path)])


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ("gnorm", "gnorm"),
        ("norm,gnorm", "norm"),
        ("norm,grad_norm,clip/norm_before", "clip/norm_before"),
        ("normal,norm/w", "norm/w"),
        ("loss,clip/all/norm_before", "clip/all/norm_before"),
        ("clip_1/norm_before,clip_0/limit", "clip_1/norm_before"),
        ("clip/norm_before/w,clip/limit/w,skip/norm", "skip/norm"),
        ("clip/limit,skip/outer/norm,norm_after", "skip/outer/norm"),
    ],
)
def test_the_column_of_the_norm_is_found_by_what_loggers_write(tmp_path, names, found):
    path = tmp_path / "log.csv"
    path.write_text(
        f"{names}\n{','.join(str(place) for place, _ in enumerate(names.split(',')))}\n"
    )
    assert optaxclip.replay.read_history(path) == [names.split(",").index(found)]


@pytest.mark.parametrize(
    "names",
    [
        ("clip/norm_before/w", "clip/norm_before/v"),
        ("clip_0/norm_before", "clip_1/norm_before"),
    ],
    ids=["tensors", "clippers"],
)
def test_one_of_several_norms_must_be_named(tmp_path, names):
    path = tmp_path / "log.csv"
    path.write_text(f"{','.join(names)}\n1,2\n")
    with pytest.raises(
        ValueError,
        match=(
            rf"^read_history: column must be given: .*log.csv has several norms, "
            rf"'{names[0]}', '{names[1]}'\."
        ),
    ):
        optaxclip.replay.read_history(path)
    assert optaxclip.replay.read_history(path, names[1]) == [2.0]


def test_lines_without_a_norm_are_left_out_and_signs_are_kept(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("step,norm\n0,1.5\n1,\n2,-2.5\n3\n4,3.5,surplus\n")
    np.testing.assert_array_equal(optaxclip.replay.read_history(path), [1.5, -2.5, 3.5])
    with pytest.raises(ValueError, match=r"which has 'step', 'norm'. Name"):
        optaxclip.replay.read_history(path, "loss")
    path.write_text("step,clip/all/norm_before_ms\n0,1.5\n")
    with pytest.raises(
        ValueError,
        match=(
            r"no column of .*log.csv has the name of a gradient norm.*It has 'step', "
            r"'clip/all/norm_before_ms'. Choose one"
        ),
    ):
        optaxclip.replay.read_history(path)


@pytest.mark.parametrize("suffix", ["jsonl", "json", "ndjson"])
def test_lines_of_json_are_read_under_each_of_their_names(tmp_path, suffix):
    path = tmp_path / f"log.{suffix}"
    path.write_text('{"norm": 1.5}\n\n{"loss": 1.0}\n{"norm": null}\n{"norm": 2.5}\n')
    np.testing.assert_array_equal(optaxclip.replay.read_history(path), [1.5, 2.5])
    path.write_text('{"norm": 1.5}\n[2.5]\n')
    with pytest.raises(
        ValueError,
        match=r"read_history: line 2 of .* must be a JSON object, got '\[2\.5\]'",
    ):
        optaxclip.replay.read_history(path)
    path.write_text('{"norm": [1.5]}\n')
    with pytest.raises(ValueError, match=r"the column 'norm' of .* must hold numbers"):
        optaxclip.replay.read_history(path)


def test_nested_objects_are_columns(tmp_path):
    path = tmp_path / "log.jsonl"
    rows = [{"train": {"clip": {"norm_before": x}, "loss": 9.0}} for x in (1.5, 0.5)]
    path.write_text("\n".join(map(json.dumps, rows)))
    np.testing.assert_array_equal(optaxclip.replay.read_history(path), [1.5, 0.5])
    found = optaxclip.replay.read_history(path, "train/loss")
    np.testing.assert_array_equal(found, [9.0, 9.0])
