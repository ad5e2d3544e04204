"""What the doctor says of a log: columns, reports, its command and its page."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip._logs.columns import log_from_rows
from optaxclip.doctor import diagnose, examine
from optaxclip.doctor.__main__ import main
from optaxclip.doctor._causes import CAUSES, LEAP_OF_RATE
from optaxclip.doctor._signals import NEEDS_OF_RECORDER
from optaxclip.replay._history import columns_of

DOCS = Path(__file__).parents[2] / "docs"


def calm(size=60):
    """Norms that no rule stumbles over."""
    return 1.0 + 0.1 * np.random.default_rng(0).uniform(size=size)


def changed(column, values):
    """A column with other values in some rows."""
    column = np.array(column)
    for row, value in values.items():
        column[row] = value
    return column


def rows_of(**columns):
    """Rows of columns whose names have two underscores for a slash."""
    named = {name.replace("__", "/"): x for name, x in columns.items()}
    return [dict(zip(named, line)) for line in zip(*named.values())]


def causes_of(rows):
    return [(finding.cause, finding.step) for finding in diagnose(rows)]


# ---------------------------------------------------------------------------- columns


@pytest.mark.parametrize("name", ["val_loss", "eval/loss", "Loss/val", "dev-ce_loss"])
def test_a_loss_of_a_validation_is_judged_if_there_is_no_other(name):
    rows = [{name: loss} for loss in changed(calm(), {30: np.nan})]
    assert causes_of(rows) == [("not finite", 30)]
    rows = [row | {"loss": 1.0} for row in rows]
    assert causes_of(rows) == []


def test_a_loss_of_a_validation_that_rises_may_be_learnt_by_heart():
    losses = [*np.geomspace(4.0, 1.0, 100), *np.geomspace(1.0, 3.0, 100)]
    (finding,) = diagnose([{"val_loss": loss} for loss in losses])
    assert finding.cause == "divergence"
    assert "learns its examples by heart" in finding.advice


def test_a_log_of_loss_and_norm_is_enough(tmp_path):
    norms = calm()
    norms[40] = 50.0
    rows = rows_of(step=range(0, 600, 10), loss=calm(), grad_norm=norms)
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps({"log_history": rows}))
    report = examine(path)
    assert [(x.cause, x.step) for x in report.findings] == [("bad batch", 400)]
    assert report.looked_at == ["'loss' (60 rows)", "'grad_norm' (60 rows)"]
    assert report.notes[0].startswith("The rows are 10 steps apart.")


def test_what_needs_a_recorder_is_said_in_one_line():
    report = examine(rows_of(loss=calm(), grad_norm=calm()))
    needs = "record_health() in the optimizer, see docs/doctor.md (Record)"
    causes = [cause.name for cause in CAUSES if cause.needs in NEEDS_OF_RECORDER]
    assert len(causes) == 7 and report.not_judged[needs] == causes
    assert [*report.not_judged.values()] == [causes, ["attention logits"]]
    # Beside a recorder, its options or its place are said.
    rows = rows_of(grad_norm=calm(), health__gradients__norm__w=calm())
    not_judged = examine(rows).not_judged
    assert needs not in not_judged
    needs = "record_health() in front of the optimizer, with values=True"
    assert not_judged[needs] == ["underflow"]


def test_a_text_is_read_with_a_pattern(tmp_path):
    path = tmp_path / "run.log"
    lines = [f"iter {step}: loss 1.5, norm 1.5" for step in range(40)]
    path.write_text("\n".join([*lines, "iter 40: loss nan, norm nan"]))
    pattern = r"iter (?P<step>\d+)|loss (?P<loss>\S+)|norm (?P<norm>\S+)"
    found = diagnose(path, pattern=pattern)
    assert ("not finite", 40) in [(x.cause, x.step) for x in found]


def test_what_is_judged_is_named_where_nothing_is_found():
    report = examine(rows_of(loss=calm()))
    assert report.findings == [] and report.looked_at == ["'loss' (60 rows)"]
    causes = ["gradients add up", "learning rate", "bad batch", "change of scale"]
    causes += ["steady growth", "vanishing"]
    assert report.not_judged["a gradient norm"] == causes
    report = examine(rows_of(grad_norm=calm()))
    assert "a loss or a gradient norm" not in report.not_judged


@pytest.mark.parametrize(
    "name", ["grads", "ratio", "nonfinite", "zeros", "norm", "rounding"]
)
def test_a_recorder_may_be_called_like_a_quantity(name):
    optimizer = optax.named_chain(
        (name, optaxclip.record_health()), ("sgd", optax.sgd(0.01))
    )
    params = {"norm/w": jnp.ones(4), "zeros": jnp.ones(3)}
    state = optimizer.init(params)
    rows = []
    for step in range(40):
        grads = {"norm/w": jnp.ones(4), "zeros": jnp.ones(3)}
        if step == 30:
            grads["zeros"] = jnp.full(3, jnp.nan)
        _, state = optimizer.update(grads, state, params)
        rows.append({"step": step, **optaxclip.metrics(state, floats=True)})
    found = [x for x in diagnose(rows) if x.cause == "not finite"]
    assert [x.step for x in found] == [30]
    assert found[0].evidence == f"NaN or inf begins in 'health/{name}/zeros'"


def test_a_loss_without_a_number_is_said():
    """No finding would otherwise look like a loss without one."""
    rows = rows_of(loss=60 * ["2.5 (3.0)"], grad_norm=calm(), mode=60 * ["train"])
    (note,) = examine(rows).notes
    assert note.startswith("The column 'loss' has no number. Text is left out. ")


def test_groups_in_front_of_a_name_are_read():
    rows = rows_of(health__norm__w=[*calm(30), 90.0, 1.0], loss=calm(32))
    run = "health-updates-7 - "
    for front in ("train/", "a/b/", "train.", "ppo_update/", run, f"{run}train/"):
        renamed = [{front + name: x for name, x in row.items()} for row in rows]
        assert causes_of(renamed) == [("bad batch", 30)], front
    assert causes_of([{"train": row} for row in rows]) == [("bad batch", 30)]
    # A mapping that is no dict, such as a FrozenDict of flax.
    frozen = [{"train": MappingProxyType(row)} for row in rows]
    assert causes_of(frozen) == [("bad batch", 30)]


def test_a_norm_that_json_cannot_hold_is_not_finite(tmp_path):
    # W&B adds the extremes of each number.
    names = "health/norm/a", "health/norm/b", "health/norm/b__MIN", "health/norm/b__MAX"
    path = tmp_path / "run.jsonl"
    for broken in (float("nan"), None):
        rows = [dict.fromkeys(names, 1.0 + step % 3) for step in range(40)]
        rows[37]["health/norm/b"] = broken
        path.write_text("\n".join(map(json.dumps, rows)))
        (found,) = diagnose(path)
        assert (found.step, found.cause) == (37, "not finite")
        assert found.evidence == "NaN or inf begins in 'health/b'"


def test_tensors_that_are_logged_now_and_then_hide_no_leap():
    rows = []
    for step, norm in enumerate(calm()):
        rows.append({"health/norm": norm, "health/nonfinite": 0.0})
        if step % 7 == 0:
            rows[-1] |= {"health/norm/a": norm, "health/nonfinite/a": 0.0}
    assert diagnose(rows) == []
    rows[42]["health/norm"] = 50.0
    assert causes_of(rows) == [("bad batch", 42)]


def test_a_summary_beside_tensors_is_not_named_too():
    rows = rows_of(health__norm=calm(40), health__norm__a=calm(40))
    rows[30] |= {"health/norm": float("nan"), "health/norm/a": float("nan")}
    (finding,) = diagnose(rows)
    assert finding.evidence == "NaN or inf begins in 'health/a'"
    # Without tensors the recorder is.
    for row in rows:
        del row["health/norm/a"]
    (finding,) = diagnose(rows)
    assert finding.evidence == "NaN or inf begins in 'health'"
    rows[30]["health/norm"] = 50.0
    (finding,) = diagnose(rows)
    assert finding.evidence.startswith("'health' is ")


def test_names_stand_once_where_all_begin_in_one_step(capsys, tmp_path):
    broken = changed(calm(), dict.fromkeys(range(40, 60), float("nan")))
    loss = changed(calm(), dict.fromkeys(range(41, 60), float("nan")))
    path = tmp_path / "run.jsonl"
    rows = rows_of(loss=loss, health__norm__a=broken, health__norm__b=broken)
    path.write_text("\n".join(map(json.dumps, rows)))
    main([str(path)])
    text = capsys.readouterr().out
    assert "begins in 'health/a', 'health/b'\n" in text
    assert "\n             'loss' from 41\n" in text


def test_norms_of_all_tensors_are_judged_together():
    """A change of scale is one of the whole gradient."""
    names = [f"clip__norm_before__{number}" for number in range(3)]
    norms = np.where(np.arange(200) < 100, 1.0, 8.0)
    rows = rows_of(loss=np.ones(200), **dict.fromkeys(names, norms))
    (finding,) = diagnose(rows)
    total = "clip/norm_before/*"
    assert finding.evidence == f"{total!r} is 8 times as long from there on"
    assert finding.first_steps == {total: 100}


def test_norms_of_two_recorders_are_not_joined():
    """A run of W&B may stand in front, and a tensor may be called a norm."""
    columns = {
        "Run - 1 - record__norm__Norm__w": calm(),
        "Run - 1 - record__norm__record__norm__w": calm(),
        "clip__norm_before__Norm__w": 3 * calm(),
    }
    first, second = examine(rows_of(**columns)).looked_at
    assert first == "'Run - 1 - record/norm/*' (60 rows)"
    assert second == "'clip/norm_before/*' (60 rows)"


def test_two_rows_of_a_step_are_one_run():
    """As of loggers that write a row for each recorder."""
    rows = []
    for step, norm in enumerate([*calm(12), 50.0, *calm(9)]):
        rows.append({"step": step, "health/norm/w": norm})
        rows.append({"step": step, "loss": 1.0})
    assert causes_of(rows) == [("bad batch", 12)]


def test_of_a_resumed_run_the_later_part_counts():
    steps = [*range(40), *range(30, 60)]
    rows = [{"step": step, "norm": x} for step, x in zip(steps, calm(70))]
    rows[35]["norm"] = 90.0
    report = examine(rows)
    assert report.findings == [] and "Steps 30 to 39 come twice" in report.notes[0]
    rows[45]["norm"] = 90.0
    assert causes_of(rows) == [("bad batch", 35)]


def test_steps_may_begin_again_in_each_epoch():
    rows = [{"step": row % 30, "norm": x} for row, x in enumerate(calm(90))]
    rows[45]["norm"] = 90.0
    report = examine(rows)
    assert [(found.cause, found.step) for found in report.findings] == [
        ("bad batch", 45)
    ]
    assert "'step' begins again, as in each epoch" in report.notes[0]


def test_minus_1_of_deepspeed_is_not_finite():
    rows = [{"total_norm": x} for x in calm(60)]
    rows[45]["total_norm"] = -1
    assert causes_of(rows) == [("not finite", 45)]


def test_a_recorder_of_a_resumed_run_is_said_to_be_resumed():
    steps = [*range(40), *range(30, 60)]
    rows = [{"step": step, "health/norm/w": x} for step, x in zip(steps, calm(70))]
    (note,) = examine(rows).notes
    assert note.startswith("'health': Steps 30 to 39 come twice")
    # Once for all columns.
    (note,) = examine([row | {"loss": 99.0 - row["step"]} for row in rows]).notes
    assert note.startswith("'loss', 'health': Steps 30 to 39 come twice")


def test_tensors_of_two_recorders_are_told_apart():
    names = "health/norm/w", "health_2/norm/w"
    rows = [dict.fromkeys(names, norm) for norm in calm(40)]
    for row in rows[20:]:
        row["health_2/norm/w"] = 0.0
    (finding,) = diagnose(rows)
    assert finding.first_steps == {"health_2/w": 20}


def test_a_column_of_one_row_says_nothing_of_the_others():
    rows = rows_of(step=range(0, 600, 10), grad_norm=calm())
    rows[30]["attention_logit"] = 3.0
    (note,) = examine(rows).notes
    assert note.startswith("The rows are 10 steps apart.")


def test_steps_that_are_far_apart_count_something_else():
    rows = rows_of(global_step=range(0, 60 * 2048, 2048), grad_norm=calm())
    (note,) = examine(rows).notes
    assert note.startswith("The rows are 2048 steps apart, as where steps count env")


@pytest.mark.parametrize(("first_lost", "is_said"), [(30, True), (40, False)])
def test_many_lost_rows_are_said(first_lost, is_said):
    rows = rows_of(step=range(60), loss=calm())
    del rows[first_lost:45]
    notes = [note for note in examine(rows).notes if "has no row" in note]
    assert notes == ["'loss' has no row between steps 29 and 45."] * is_said


def test_a_damaged_row_between_two_is_no_interval(tmp_path):
    path = tmp_path / "run.jsonl"
    lines = [json.dumps(row) for row in rows_of(step=range(3), loss=calm(3))]
    lines[1] = lines[1][:12]
    path.write_text("\n".join(lines))
    (note,) = examine(path).notes
    assert "text outside of complete {...} are left out: 1." in note


def test_a_loss_that_is_logged_rarely_hides_no_rows():
    rows = rows_of(step=range(60), grad_norm=calm())
    for row in rows[::10]:
        row["loss"] = 1.0
    assert examine(rows).notes == []


def test_a_step_that_few_rows_have_counts_no_rows():
    """As of evaluations, or of a summary at the end."""
    rows = rows_of(loss=calm(200), grad_norm=changed(calm(200), {120: 60.0}))
    for extra in ([{"global_step": 2000}], [{"step": 50}, {"step": 100}]):
        assert causes_of([*rows, *extra]) == [("bad batch", 120)]


@pytest.mark.parametrize(
    "name", ["avg_loss", "train-loss", "train_loss_epoch", "loss/total", "loss_train"]
)
def test_a_loss_is_known_by_more_names(name):
    assert examine(rows_of(**{name: calm(40)})).looked_at == [f"{name!r} (40 rows)"]


@pytest.mark.parametrize("name", ["current_steps", "iterations", "train/step"])
def test_steps_are_known_by_more_names(name):
    rows = rows_of(**{name: range(0, 400, 10), "loss": calm(40)})
    assert examine(rows).notes[0].startswith("The rows are 10 steps apart.")


def test_rows_that_are_too_few_are_said():
    rows = rows_of(loss=calm(12), grad_norm=calm(12))
    not_judged = examine(rows).not_judged
    assert not_judged["40 rows with a gradient norm"] == ["steady growth"]
    (needs,) = [x for x, names in not_judged.items() if "divergence" in names]
    assert needs.startswith("20 rows with a loss")
    columns = dict.fromkeys(("health__norm__w", "health__subnormals__w"), calm(4))
    not_judged = examine(rows_of(**columns, health__zeros__w=calm(4))).not_judged
    (needs,) = [x for x, names in not_judged.items() if "underflow" in names]
    assert needs.startswith("5 rows with record_health()")
    not_judged = examine(rows_of(grad_norm=calm(2))).not_judged
    assert not_judged["3 rows with a gradient norm"] == ["bad batch"]


def test_a_recorder_is_no_norm_of_all_gradients():
    """A summary has the norm of one tensor."""
    rows = rows_of(health__gradients__norm=calm(), health__gradients__zeros=calm() - 1)
    assert examine(rows).looked_at == ["'health/gradients' (60 rows)"]
    with pytest.raises(ValueError, match="this file has no gradient norm"):
        columns_of(log_from_rows(rows, []), None, "replay")
    # A logger may have a group of this name.
    (column,) = columns_of(
        log_from_rows([{"health/grad_norm": 1.0}], []), None, "replay"
    )
    assert column.name == "health/grad_norm"


def test_a_log_of_nothing_that_is_known_is_refused(tmp_path):
    path = tmp_path / "run.csv"
    path.write_text("step,accuracy\n1,2.0\n")
    for call in (diagnose, examine):
        text = rf"^{call.__name__}: .*run.csv: there is neither a loss .*'accuracy'"
        with pytest.raises(ValueError, match=text):
            call(path)
    with pytest.raises(
        SystemExit, match=r"^doctor: .*run.csv: there is neither a loss"
    ):
        main([str(path)])
    with pytest.raises(SystemExit, match=r"^doctor: .*none\.csv: No such file"):
        main([str(tmp_path / "none.csv")])
    # A loss of another name can be named.
    with pytest.raises(ValueError, match=r"--loss NAME \(in Python: loss=NAME\)"):
        diagnose([{"ce": 1.0}])
    for rows in ([], [{}], [{"loss": "high"}]):
        with pytest.raises(ValueError, match=r"^diagnose: there is no number in it"):
            diagnose(rows)


def test_a_log_that_is_no_rows_and_a_pattern_for_rows_are_refused():
    for log in (5, None, [1.0]):
        with pytest.raises(TypeError, match=r"^diagnose: log must be a file, or a li"):
            diagnose(log)
    with pytest.raises(ValueError, match=r"^examine: pattern is for a file"):
        examine([{"loss": 1.0}], pattern="loss (.*)")


# ------------------------------------------------------------------------- the command


@pytest.fixture
def log(tmp_path):
    norms = calm()
    norms[[30, 40]] = 40.0, 50.0
    lines = [f"{10 * n},{norm},{1 / (n + 1)}" for n, norm in enumerate(norms)]
    path = tmp_path / "run.csv"
    path.write_text("\n".join(["Step,grad_norm,train/loss", *lines]))
    return path


def test_the_command_prints_a_table(log, capsys):
    main([str(log)])
    text = capsys.readouterr().out
    norms = calm()
    ratio = 50 / np.median([*norms[20:30], 40.0, *norms[31:40]])
    line = f"step    300  bad batch         'grad_norm' is {ratio:.3g} times the median"
    assert text.startswith(line) and "(at step 400, limit 15)\n" in text
    assert "\n             2 rows show it: 300, 400\n" in text
    assert "the rate is too high\n             see docs/run_health.md (My loss " in text
    assert "Looked at 'train/loss' (60 rows), 'grad_norm' (60 rows)." in text
    assert "Note: The rows are 10 steps apart." in text
    assert "no gradient, underflow, dead embedding: needs record_health() in" in text


def test_the_command_counts_rows_where_there_are_no_steps(log, capsys):
    text = log.read_text().replace("Step,", "time,")
    log.write_text(text)
    main([str(log)])
    text = capsys.readouterr().out
    assert text.startswith("row      30  bad batch  ")
    assert "(at row 40, limit 15)\n             2 rows show it: 30, 40\n" in text
    assert "\nNote: There is no column of steps, so rows are counted, from 0.\n" in text
    assert "times its median, at row 40. See" in text


def test_empty_cells_are_said_unless_most_are_empty(tmp_path):
    """pandas writes NaN as nothing, but also the rows of an evaluation."""
    path = tmp_path / "run.csv"
    norms = calm()
    for count, is_said in ((5, True), (40, False)):
        cells = [f"{norm}" for norm in norms]
        cells[-count:] = [""] * count
        lines = [f"{step},{cell},1" for step, cell in enumerate(cells)]
        path.write_text("\n".join(["step,grad_norm,loss", *lines]))
        notes = examine(path).notes
        said = f"'grad_norm': Rows without an entry: {count}. W&B and pandas leave"
        assert any(note.startswith(said) for note in notes) == is_said


def test_nothing_found_names_what_was_looked_at(tmp_path, capsys):
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join(map(json.dumps, rows_of(loss=calm(), grad_norm=calm()))))
    main([str(path)])
    text = capsys.readouterr().out
    assert text.startswith("Nothing found. That does not say that the run is healthy")
    assert "Looked at 'loss' (60 rows), 'grad_norm' (60 rows)." in text


def test_the_largest_of_each_norm_is_noted():
    """Below the limit of a bad batch, a norm of 8 medians may still want a clip."""
    other_norms = np.array([*calm(), np.inf])
    norms = 10 * other_norms
    norms[40] = 8 * np.median(norms[:-1])
    rows = rows_of(step=range(0, 610, 10), a__grad_norm=other_norms, b__grad_norm=norms)
    # One norm that is inf, and is followed by others, is no cause.
    rows.insert(50, rows.pop() | {"step": 495})
    ratio = norms[40] / np.median(norms[np.isfinite(norms)])
    report = examine(rows)
    assert report.findings == []
    # The largest of the other norm is not far from its median.
    _, note_on_inf, last_note = report.notes
    assert "not finite: 1, the first of them step 495" in note_on_inf
    assert last_note == (
        f"The largest 'b/grad_norm' is {ratio:.3g} times its median, at step 400. See "
        "docs/choosing_a_limit.md"
    )
    rows[-3]["a/grad_norm"] = 7.0
    *_, note_on_end, _ = examine(rows).notes
    assert note_on_end.endswith(
        "at step 570. If norms grow up to there, lower the learning rate."
    )


def test_of_many_rows_the_first_six_are_listed(log, capsys):
    norms = calm()
    norms[10:60:5] = 50.0
    lines = [f"{10 * n},{norm},{1 / (n + 1)}" for n, norm in enumerate(norms)]
    log.write_text("\n".join(["Step,grad_norm,train/loss", *lines]))
    main([str(log)])
    text = capsys.readouterr().out
    assert "\n             10 rows show it: 100, 150, 200, 250, 300, 350, ...\n" in text


def test_tensors_that_are_not_listed_are_counted(tmp_path, capsys):
    starts = {f"health/norm/w{number}": 20 + number for number in range(15)}
    rows = []
    for step in range(60):
        norms = {name: float(step < start) for name, start in starts.items()}
        rows.append({"loss": 1.0, **norms})
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    main([str(path)])
    assert "'health/w12' from 32 and 2 more\n" in capsys.readouterr().out


def test_norms_that_are_always_huge_have_a_note():
    (note,) = examine(rows_of(grad_norm=845 * calm())).notes
    assert note.startswith("'grad_norm' is never below 84")
    assert "loss scale, at sum or mean, and at the scale of the inputs" in note
    assert examine(rows_of(grad_norm=changed(845 * calm(), {3: 99.0}))).notes == []


def test_a_log_without_norms_has_no_largest_one():
    rows = rows_of(loss=np.geomspace(2.0, 1.0))
    assert examine(rows).notes == []
    for norm, text in ((0.0, "0"), (1e-9, "1e-09")):
        (note,) = examine([row | {"grad_norm": norm} for row in rows]).notes
        assert note.startswith(f"'grad_norm' never exceeds {text}. So short a gradient")
    assert examine([row | {"grad_norm": 1e-5} for row in rows]).notes == []


@pytest.mark.parametrize("spike", [{100: 30.0, 101: 9.0}, {197: 30, 198: 50, 199: 90}])
def test_a_loss_that_leaps_has_a_note(spike):
    loss = changed(np.linspace(2.0, 1.0, 200), spike)
    notes = examine(rows_of(loss=loss, grad_norm=calm(200))).notes
    (note,) = [note for note in notes if "times the median of up to 20 rows" in note]
    step = max(spike, key=spike.get)
    assert f"before it at row {step}. If no norm stands out there, look at" in note
    assert "at the data, and at weights that were swapped or restored. See" in note


def test_a_bad_batch_is_said_to_be_of_one_part_or_of_all():
    norms = changed(calm(), {40: 60.0})
    for value in (0.98, 0.1):
        shares = changed(np.full(60, 0.1), {40: value})
        *_, note = examine(rows_of(grad_norm=norms, train__noise_share=shares)).notes
        text = f"'train/noise_share' is {value} at row 40, and its median 0.1."
        assert note.startswith(f"{text} Near 1 one part of the batch made the norm.")


def test_the_column_of_the_loss_is_given_by_name(tmp_path, capsys):
    losses = [*np.geomspace(4.0, 1.0, 60), *np.full(40, 9.0)]
    rows = rows_of(step=range(100), objective=losses)
    with pytest.raises(ValueError, match="neither a loss nor a gradient norm"):
        diagnose(rows)
    (finding,) = diagnose(rows, loss="objective")
    assert (finding.cause, finding.step) == ("divergence", 60)
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert diagnose(path, loss="objective") == [finding]
    main([str(path), "--loss", "objective"])
    text = capsys.readouterr().out
    assert "divergence" in text and "Looked at 'objective' (100 rows)." in text
    # The end of a name is enough, if no other name ends so.
    renamed = [{"train/objective": row["objective"], "loss": 1.0} for row in rows]
    (finding,) = diagnose(renamed, loss="objective")
    assert (finding.cause, finding.step) == ("divergence", 60)
    renamed[0]["eval/objective"] = 4.0
    with pytest.raises(ValueError, match="no loss 'objective' in it, only 'train/ob"):
        diagnose(renamed, loss="objective")
    error = "no loss 'loss' in it, only 'objective'"
    with pytest.raises(ValueError, match=rf"^diagnose: there is {error}"):
        diagnose(rows, loss="loss")
    with pytest.raises(SystemExit, match=rf"^doctor: .*run.jsonl: there is {error}"):
        main([str(path), "--loss", "loss"])


@pytest.mark.slow
def test_python_runs_it_as_a_module(log):
    command = [sys.executable, "-W", "error", "-m", "optaxclip.doctor", str(log)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "bad batch" in run.stdout and not run.stderr


@pytest.mark.parametrize("tool", ["doctor", "replay"])
def test_a_pipe_that_closes_early_is_no_error(log, tool):
    """As `| head -1` does it."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", f"optaxclip.{tool}", str(log)]
    run = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=True)
    os.close(writer)
    assert not run.stderr


# ---------------------------------------------------------------------------- the page


@pytest.mark.parametrize("cause", [*CAUSES, LEAP_OF_RATE], ids=lambda cause: cause.name)
def test_the_page_of_a_cause_exists_and_has_its_row(cause):
    page, _, title = cause.page.removesuffix(")").partition(" (")
    titles = re.findall("^#+ (.*)$", (DOCS.parent / page).read_text(), re.MULTILINE)
    assert not title or title in titles
    assert f"| {cause.name} |" in (DOCS / "doctor.md").read_text()


def test_a_note_says_where_a_loss_began_to_rise():
    loss = np.concatenate([np.linspace(8.0, 3.0, 150), np.full(50, 3.0)])
    loss = np.append(loss, np.full(100, 4.0))
    (note,) = examine(rows_of(loss=loss)).notes
    assert note.startswith(
        "'loss' rises from 3 near row 199 to 4 in its last rows. That may"
    )
    # Windows of many rows tell a rise from noise of the same size.
    noise = np.random.default_rng(0).normal(scale=0.5, size=1200)
    (note,) = examine(rows_of(loss=np.repeat(loss, 4) + noise)).notes
    row = int(note.split("near row ")[1].split()[0])
    assert "'loss' rises from " in note and 700 <= row <= 830
    # Within its noise it has not risen.
    noise = np.resize([-0.4, 0.4], loss.size)
    # Nor has one that stays near 0.
    solved = np.geomspace(8.0, 1e-5, 300)
    solved[-100:] = 1e-3
    for other_loss in (loss + 2 * noise, np.minimum(loss, 3.2), loss[:200], solved):
        notes = examine(rows_of(loss=other_loss)).notes
        assert not any("' rises from" in note for note in notes)
    report = examine(rows_of(loss=np.append(loss, np.full(100, 8.0))))
    assert [finding.cause for finding in report.findings] == ["divergence"]
    (note,) = report.notes
    assert note.startswith("'loss' rises from 3 near row 199 to 8 in its last rows")


def test_a_loss_that_stays_from_early_on_has_a_note():
    falling = np.geomspace(4.0, 1.0, 400)
    for loss in (np.maximum(falling, 3.5), np.full(400, 2.0)):
        (note,) = examine(rows_of(loss=loss)).notes
        assert note.startswith(
            "'loss' does not fall much after the first fifth of the log: "
        )
    for loss in (falling, np.maximum(falling, 3.0)):
        assert examine(rows_of(loss=loss)).notes == []


def test_a_bad_batch_behind_a_rise_of_the_loss_is_not_named():
    loss = np.append(np.geomspace(4.0, 2.0, 200), np.geomspace(2.0, 2.6, 200))
    rows = rows_of(loss=loss, grad_norm=changed(calm(400), {350: 50.0}))
    assert [cause for cause, _ in causes_of(rows)] == ["divergence"]
    rows = rows_of(loss=loss, grad_norm=changed(calm(400), {150: 50.0}))
    assert [cause for cause, _ in causes_of(rows)] == ["bad batch", "divergence"]


def test_a_loss_that_becomes_nan_has_no_note_on_its_levels():
    rising = np.append(np.geomspace(4.0, 1.0, 200), np.geomspace(1.0, 3.0, 100))
    for loss in (rising, np.full(300, 2.0)):
        assert examine(rows_of(loss=loss)).notes
        assert examine(rows_of(loss=[*loss, *np.full(40, np.nan)])).notes == []


def test_many_bad_batches_are_no_accident():
    leaps = {row: 30.0 + row / 10 for row in range(100, 400, 12)}
    (finding,) = diagnose(rows_of(grad_norm=changed(calm(400), leaps)))
    assert finding.cause == "bad batch"
    assert finding.advice.startswith("25 rows are no accident: look at the data")


@pytest.mark.parametrize("name", ["train/batch_size", "bs", "loss_scale"])
def test_a_change_of_scale_names_the_size_that_changes_with_it(name):
    is_behind = np.arange(100) >= 60
    columns = {"grad_norm": calm(100) / np.where(is_behind, 2, 1), "batch": range(100)}
    (finding,) = diagnose(rows_of(**columns, **{name: np.where(is_behind, 1024, 256)}))
    assert (finding.cause, finding.step) == ("change of scale", 60)
    assert finding.advice == f"{name!r} changes there from 256 to 1024"
    (finding,) = diagnose(rows_of(**columns, **{name: np.full(100, 256)}))
    assert finding.advice.startswith("look at the loss scale")


def test_a_loss_of_0_beside_a_norm_of_nan_is_nan():
    """transformers writes NaN so."""
    losses = np.append(calm(40), np.zeros(20))
    norms = np.append(calm(45), np.full(15, np.nan))
    report = examine(rows_of(loss=losses, grad_norm=norms))
    (finding,) = report.findings
    assert finding.first_steps == {"loss": 45, "grad_norm": 45}
    assert any("0 beside a norm of NaN is read as NaN" in note for note in report.notes)
