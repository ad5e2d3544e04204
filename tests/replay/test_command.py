"""The command says what it read, recommends one row and replaces no file unasked."""

import numpy as np
import optax
import pytest

import optaxclip
from optaxclip.replay import __main__ as command
from optaxclip.replay import suggest
from optaxclip.replay.__main__ import main

pytestmark = pytest.mark.slow

NORMS = np.exp(np.random.default_rng(0).normal(size=400))


@pytest.fixture
def log(tmp_path):
    lines = [f"{step},1.0,{norm}" for step, norm in enumerate(NORMS)]
    path = tmp_path / "run.csv"
    path.write_text("\n".join(["Step,train/loss,train/grad_norm", *lines]))
    return path


def printed(capsys, *arguments):
    main([str(each) for each in arguments])
    return capsys.readouterr().out


def test_it_says_which_column_it_guessed_and_how_to_choose(log, capsys):
    guess, others, *_ = printed(capsys, log).splitlines()
    assert guess == "Norms: column 'train/grad_norm' of run.csv, taken by its name."
    assert others == "--column NAME takes another one: 'Step', 'train/loss'."


def test_a_column_that_was_chosen_is_no_guess(log, capsys):
    text = printed(capsys, log, "--column", "Step").splitlines()[0]
    assert text == "Norms: column 'Step' of run.csv."


def test_one_row_is_recommended_that_clips_one_percent(log, capsys):
    (best,) = [row for row in suggest(NORMS) if row.recommended]
    assert best.limit == pytest.approx(np.quantile(NORMS, 0.99), rel=0.01)
    text = printed(capsys, log)
    (row,) = [line for line in text.splitlines() if line.startswith("->  ")]
    assert row.endswith(best.rule)
    assert f"-> Start with {best.rule}: it clips 1.0% of these steps." in text


def test_a_limit_among_the_norms_of_broken_steps_is_not_recommended():
    # 1 % of the steps are above 2000, and 4 % are broken.
    norms = [*np.linspace(0.5, 1.5, 96), 1000.0, 2000.0, 3000.0, 4000.0]
    (best,) = [row for row in suggest(norms) if row.recommended]
    assert best.limit == pytest.approx(5 * np.median(norms), 1e-3)
    assert best.clip_rate == pytest.approx(0.04)


def test_norms_that_never_change_have_a_recommendation_too():
    (best,) = [row for row in suggest(np.ones(50)) if row.recommended]
    assert best.limit == 1.0


def test_the_rows_of_the_table_are_python(log, capsys):
    lines = printed(capsys, log).splitlines()
    rows = [line[2:].split(None, 3)[3] for line in lines if "%  " in line]
    assert len(rows) == 10
    names = {"optaxclip": optaxclip, "optimizer": optax.sgd(0.1)}
    for row in rows:
        transformation = eval(row, names)
        _, state = transformation.update(
            {"w": np.ones(2)}, transformation.init({"w": np.ones(2)})
        )
        assert optaxclip.metrics(state)


def test_a_picture_is_replaced_only_with_force(log, capsys):
    picture = log.with_suffix(".png")
    picture.write_text("mine")
    assert f"No picture: {picture} exists. --force replaces" in printed(capsys, log)
    assert picture.read_text() == "mine"
    assert f"Picture: {picture}" in printed(capsys, log, "--force")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_picture_elsewhere_is_not_replaced_either(log, tmp_path, capsys):
    picture = tmp_path / "mine.png"
    picture.write_text("mine")
    assert "No picture" in printed(capsys, log, "--picture", picture)
    assert picture.read_text() == "mine"


def test_nothing_but_the_picture_is_written(log, capsys):
    before = set(log.parent.iterdir())
    printed(capsys, log)
    assert set(log.parent.iterdir()) - before == {log.with_suffix(".png")}


def test_the_recommended_limit_is_drawn(log, monkeypatch):
    drawn = []
    plot = command.plot_history
    monkeypatch.setattr(
        command,
        "plot_history",
        lambda history, axis: drawn.append(history) or plot(history, axis=axis),
    )
    main([str(log)])
    (best,) = [row for row in suggest(NORMS) if row.recommended]
    np.testing.assert_array_equal(drawn[0].limits, np.float32(best.limit))


@pytest.mark.parametrize("name", ["missing/run.png", "run.xyz"])
def test_a_picture_that_cannot_be_drawn_ends_in_one_line(log, capsys, name):
    with pytest.raises(SystemExit, match="No picture: "):
        printed(capsys, log, "--picture", log.parent / name)
    assert "-> Start with" in capsys.readouterr().out


def test_norms_beyond_float32_count_as_infinite(tmp_path, capsys):
    path = tmp_path / "run.csv"
    path.write_text("grad_norm\n1e38\n2e38\n3e40\n")
    text = printed(capsys, path)
    assert "3 steps, 1 of them NaN or inf. Norms from 1e+38 to 2e+38" in text
