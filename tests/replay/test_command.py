"""The command says what it read, recommends one row and replaces no file unasked."""

import subprocess
import sys

import numpy as np
import optax
import pytest

import optaxclip
from optaxclip import replay
from optaxclip.replay import suggest
from tests.helpers import apply

# As many finite norms in each log, so that each rule is compiled once.
SIZE = 200
NORMS = np.exp(np.random.default_rng(0).normal(size=SIZE))


@pytest.fixture
def log(tmp_path):
    lines = [f"{step},1.0,{norm},a" for step, norm in enumerate(NORMS)]
    path = tmp_path / "run.csv"
    path.write_text("\n".join(["Step,train/loss,train/grad_norm,note", *lines]))
    return path


def test_it_says_which_column_it_guessed_and_how_to_choose(log, command):
    source = "Column 'train/grad_norm' of run.csv, taken "
    by_name = f"{source}by its name (--column NAME takes another one):\n"
    assert command(log).startswith(by_name)
    text = command(log, "--column", "train/grad_norm")
    assert text.startswith(source) and "by its name" not in text


def test_the_answer_comes_before_the_table(log, command):
    answer, _, rest = command(log).partition("\n\n")
    assert answer.splitlines()[1].startswith("Take ")
    assert "clipper, as Python" in rest and "Take " not in rest


@pytest.mark.parametrize(
    ("long_steps", "place"),
    [
        ([7], "Steps above {}: 1, from step 7 to 7."),
        ([2, 5, 90, 15], "Steps above {}: 4, from step 2 to 90."),
    ],
)
def test_where_the_clipped_steps_lie_is_said(log, command, long_steps, place):
    norms = np.linspace(0.5, 0.6, SIZE)
    norms[long_steps] = 9.0
    # 1.0 clips the long steps alone.
    log.write_text(log_of(norms))
    assert place.format(1) in command(log)
    # 1.0 clips none.
    log.write_text(log_of(norms / 10))
    (guard,) = [row.limit for row in suggest(norms / 10) if row.is_guard]
    assert place.format(f"{guard:g}") in command(log) and guard < 1.0
    # 1.0 clips many more than the guard, which clips the long steps alone.
    norms[100:140] = 1.1
    norms[long_steps] = 9.0
    log.write_text(log_of(norms))
    (guard,) = [row.limit for row in suggest(norms) if row.is_guard]
    assert place.format(f"{guard:g}") in command(log) and guard > 1.1


def test_norms_of_few_values_may_have_no_step_above_the_guard(log, command):
    log.write_text(log_of(np.tile([0.25, 0.5], SIZE // 2)))
    assert "\nNo step is above" in command(log)


def test_norms_with_few_digits_have_a_guard_that_clips_some(log, command):
    """As a log with two digits, of which 4 % are the largest."""
    norms = np.tile(np.repeat([0.5, 0.8, 0.9, 1.0], [14, 5, 5, 1]), SIZE // 25)
    log.write_text(log_of(norms / 10))
    text = command(log)
    assert "a guard that clips 4.0% of the steps" in text
    assert "No step is above" not in text


def test_rows_that_are_counted_are_said(log, command):
    said = "There is no column of steps, so rows are counted, from 0."
    text = command(log)
    assert said not in text and "Steps above" in text
    log.write_text("\n".join(["grad_norm", *map(str, NORMS)]))
    text = command(log)
    assert said in text and "Rows above" in text
    log.write_text("\n".join(["a/grad_norm,b/grad_norm", *(f"{x},{x}" for x in NORMS)]))
    assert command(log).count(said) == 1


def test_a_column_of_another_name_is_said_to_be_taken_for_a_norm(log, command):
    said = "of run.csv, taken for a gradient norm, as --column says:"
    assert said in command(log, "--column", "train/loss")
    assert said not in command(log)


def test_rows_that_are_missing_are_said_and_drawn_in_steps(log, command, monkeypatch):
    lines = [f"{10 * step},{norm}" for step, norm in enumerate(NORMS)]
    log.write_text("\n".join(["step,grad_norm", *lines]))
    axes = []
    plot = replay.plot_history

    def recorded(*arguments, **options):
        axes.append(plot(*arguments, **options))
        return axes[-1]

    monkeypatch.setattr(replay, "plot_history", recorded)
    text = command(log, "--picture", log.parent / "run.png")
    assert "The rows are 10 steps apart. What happened between is not seen" in text
    assert axes[0].lines[0].get_xdata()[-1] == 10 * (SIZE - 1)
    for row in suggest(NORMS, every=10):
        assert f"{row.limit:16.4g}  {row.clip_rate:13.1%}" in text


def test_rows_that_are_far_apart_count_as_one_step_each(log, command):
    """CleanRL counts environment steps."""
    for distance, every in ((500, 500), (512, 1), (2048, 1)):
        lines = [f"{distance * step},{norm}" for step, norm in enumerate(NORMS)]
        log.write_text("\n".join(["global_step,grad_norm", *lines]))
        text = command(log)
        note = f"The rows are {distance} steps apart, as where steps count environment"
        assert (note in text) == (every == 1)
        for row in suggest(NORMS, every=every):
            assert f"{row.limit:16.4g}  {row.clip_rate:13.1%}" in text


def test_no_limit_is_recommended_from_a_run_that_broke(log, command):
    nan_at_end = [*NORMS[:-5], *[np.nan] * 5]
    # Norms grow by exp(1) in 20 steps.
    growth = np.exp(np.maximum(np.arange(SIZE) - 100, 0) / 20)
    leap = np.where(np.arange(SIZE) < 60, 1.0, 1e3)
    reasons = {
        "from step 195 to the end norms are NaN or inf": nan_at_end,
        "from step 179 to the end most norms are more than 20 times": NORMS * growth,
        "from step 60 to the end most norms are more than 20 times": NORMS * leap,
        "from step 150 to the end norms are 0": np.append(NORMS[:150], [0.0] * 50),
    }
    for reason, norms in reasons.items():
        log.write_text(log_of(norms))
        text = command(log)
        assert text.splitlines()[1].startswith(f"The run broke: {reason}")
        assert "run python -m optaxclip.doctor" in text.splitlines()[1]
        assert "->" not in text and "Take " not in text
    with pytest.raises(SystemExit, match="a limit that is recommended for it"):
        command(log, "--picture", log.parent / "run.png")


def log_with_loss(norms, losses):
    """A log of these norms and losses, as CSV."""
    steps = range(len(norms))
    lines = [f"{i},{norm},{loss}" for i, norm, loss in zip(steps, norms, losses)]
    return "\n".join(["step,grad_norm,loss", *lines])


def test_a_run_that_the_doctor_calls_broken_gets_no_limit(log, command):
    steps = np.arange(SIZE)
    falls = 2 + 6 * np.exp(-steps / 20)
    rises = np.where(steps < 120, falls, 5.0)
    healthy = NORMS**0.1
    dead = np.where(steps < 120, healthy, 1e-9 * healthy)
    norms_and_losses = {
        "from step 120 on 'loss' rises to 2.48 times its lowest": (healthy, rises),
        "on 'grad_norm' falls to nearly 0, and the loss does": (dead, falls),
        "on 'grad_norm' grows ": (healthy * np.exp(steps / 40), falls),
    }
    for reason, (norms, losses) in norms_and_losses.items():
        log.write_text(log_with_loss(norms, losses))
        advice = command(log).splitlines()[1]
        assert advice.startswith("The run broke: from step ") and reason in advice
        assert advice.endswith("run python -m optaxclip.doctor.")
    log.write_text(log_with_loss(healthy, falls))
    assert "broke" not in command(log)


def test_a_limit_is_recommended_where_a_bad_batch_broke_the_loss(log, command):
    """A clip is what helps there."""
    norms = NORMS**0.1
    norms[100] = 1000.0
    losses = np.where(np.arange(SIZE) < 100, 2.0 + NORMS / 100, 5.0)
    log.write_text(log_with_loss(norms, losses))
    text = command(log)
    assert "broke" not in text and "->" in text


def test_earlier_bad_batches_do_not_hide_a_divergence(log, command):
    norms = NORMS**0.1
    norms[[30, 60]] = 1000.0
    losses = np.where(np.arange(SIZE) < 120, 2.0 + NORMS / 100, 5.0)
    log.write_text(log_with_loss(norms, losses))
    advice = command(log).splitlines()[1]
    assert advice.startswith("The run broke: from step 120 on 'loss' rises to 2.")


def test_accidents_are_no_broken_run(log, command):
    four_nan = np.append(NORMS[:-4], [np.nan] * 4)
    four_long = np.append(NORMS[:-4], 1e4 * NORMS[:4])
    spread = NORMS.copy()
    spread[::20] = np.nan
    spread[7::20] *= 1e4
    # At the start, as in a warm-up.
    long_at_start = np.append(1e4 * NORMS[:20], NORMS[20:])
    # A guard clips them: they are 1 % of the log.
    one_percent = np.append(np.repeat(NORMS, 4), 1e4 * NORMS[:8])
    for norms in (four_nan, four_long, spread, long_at_start, one_percent):
        log.write_text(log_of(norms))
        text = command(log)
        assert "broke" not in text and "->" in text


def test_windows_of_rules_are_counted_in_steps():
    """A window of 100 steps has 10 norms where every tenth is logged."""
    norms = np.float32([1.0] * 100 + [4.0] * 60)
    name = "optaxclip.clip_by_global_norm(optaxclip.rules.windowed_quantile({}))"
    name = name.format("0.5, 100, factor=2.0")
    limits = {
        every: {row.rule: row.limit for row in suggest(norms, every=every)}[name]
        for every in (1, 10)
    }
    assert limits == {1: 8.0, 10: 8.0}
    shares = {
        every: {row.rule: row.clip_rate for row in suggest(norms, every=every)}[name]
        for every in (1, 10)
    }
    # Until half of the window are large, the limit is below them.
    assert shares == {1: pytest.approx(50 / 160), 10: pytest.approx(5 / 160)}


def test_no_limit_is_recommended_from_norms_after_a_clip(log, command):
    norms = np.minimum(NORMS, np.quantile(NORMS, 0.54))
    lines = [f"{step},{norm}" for step, norm in enumerate(norms)]
    log.write_text("\n".join(["step,grad_norm", *lines]))
    text = command(log)
    assert (
        "46% of the rows are within 0.1 % of 1." in text
        and "no limit can be chosen" in text
    )
    assert "clipper, as Python" not in text
    with pytest.raises(SystemExit, match="a limit that is recommended for it"):
        command(log, "--picture", log.parent / "run.png")
    assert not any(row.is_guard for row in suggest(norms))


def test_norms_with_few_digits_are_not_taken_for_clipped_ones():
    few = np.round(0.1 + 0.2 * np.random.default_rng(0).uniform(size=SIZE), 1)
    for norms in (np.round(NORMS, 1), few):
        assert any(row.is_guard for row in suggest(norms))


def test_no_limit_is_recommended_that_clips_many_steps(log, command):
    norms = NORMS.copy()
    norms[::3] *= 1e4
    log.write_text(log_of(norms))
    text = command(log)
    assert "\nMore than 20% of the norms are above five times the median, so no" in text
    assert "->" not in text and "Take " not in text


def test_several_optimizers_have_a_row_each(log, command):
    lines = [f"{step},{norm},{2 * norm}" for step, norm in enumerate(NORMS)]
    log.write_text("\n".join(["step,actor/grad_norm,critic/grad_norm", *lines]))
    text = command(log).splitlines()
    assert text[-2].endswith("clip_by_group_norm takes all limits.")
    assert text[-1] == "--column NAME shows the table of one."
    with pytest.raises(SystemExit, match="--to and --picture need one column"):
        command(log, "--batch", 1, "--to", 2)
    for name, factor in (("actor/grad_norm", 1), ("critic/grad_norm", 2)):
        (start,) = [row for row, line in enumerate(text) if f"Column '{name}'" in line]
        (best,) = [row for row in suggest(factor * NORMS) if row.is_guard]
        low, middle, high = factor * np.quantile(NORMS, (0.0, 0.5, 1.0))
        assert text[start + 1] == (
            f"Take {best.rule}, a guard that clips {best.clip_rate:.1%} of the steps."
        )
        share = np.mean(factor * NORMS > 1)
        assert text[start + 2].startswith(f"The usual 1.0 clips {share:.1%}, ")
        assert text[start + 4] == (
            f"{SIZE} finite norms from {low:.4g} to {high:.4g}, median {middle:.4g}."
        )


def test_a_change_of_scale_is_said_before_the_limit(log, command):
    norms = np.where(np.arange(SIZE) < SIZE // 2, 1, 1 / 64) * NORMS
    log.write_text(log_of(norms))
    line = f"Look at step {SIZE // 2} first: the doctor names 'change of scale'"
    text = command(log)
    assert text.index(line) < text.index("Take ")


def test_if_all_optimizers_broke_no_limit_is_taken(log, command):
    broken = [f"{step},{norm},{norm}" for step, norm in enumerate([*NORMS, *[0] * 9])]
    log.write_text("\n".join(["step,actor/grad_norm,critic/grad_norm", *broken]))
    text = command(log)
    assert text.count("The run broke") == 2 and "takes all limits" not in text


def test_what_the_reader_decided_is_said_of_several_columns_too(log, command):
    steps = [*range(0, 300, 10), *range(200, 400, 10)]
    lines = [f"{step},{norm},{norm}" for step, norm in zip(steps, NORMS)]
    log.write_text("\n".join(["step,actor/grad_norm,critic/grad_norm", *lines]))
    text = command(log)
    assert text.count("Steps 200 to 290 come twice") == 2
    assert text.count("The rows are 10 steps apart") == 2


def test_an_optimizer_without_norms_has_a_row_too(log, command):
    norms = np.minimum(NORMS, np.quantile(NORMS, 0.54))
    lines = [f"{norm},0,nan" for norm in norms]
    log.write_text("\n".join(["a/grad_norm,b/grad_norm,c/grad_norm", *lines]))
    text = command(log)
    clipped, zeros, broken, *_ = text.split("\n\n")
    assert "'a/grad_norm'" in clipped and "46% of the rows are within" in clipped
    assert "'b/grad_norm'" in zeros and "from row 0 to the end norms are 0." in zeros
    assert "200 finite norms from 0 to 0" in zeros
    assert "'c/grad_norm'" in broken and "\nThe run broke: from row 0 to" in broken
    assert "NaN or inf: 200 (100.0%). No clip" in broken


def test_nan_and_few_norms_are_said(log, command):
    norms = [*[np.nan] * 30, *NORMS[:10]]
    lines = [f"{step},{norm}" for step, norm in enumerate(norms)]
    log.write_text("\n".join(["step,grad_norm", *lines]))
    text = command(log)
    assert "NaN or inf: 30 (75.0%). No clip cures them" in text
    assert "Norms above 0 are too few to choose a limit from: 10." in text


def test_a_log_without_a_norm_above_0_is_said(log, command):
    for lines, count in (("step,grad_norm\n1,2.5", 1), ("grad_norm\n" + 4 * "0\n", 0)):
        log.write_text(lines)
        text = command(log)
        assert text.startswith("Column 'grad_norm' of run.csv, taken by its name")
        assert f"Norms above 0 are too few to choose a limit from: {count}." in text
        assert "clipper, as Python" not in text


def log_of(norms):
    """A log of these norms, as CSV."""
    lines = [f"{step},{norm}" for step, norm in enumerate(norms)]
    return "\n".join(["step,grad_norm", *lines])


def falling(log_of_fall, scale=1.0):
    """Norms that fall by exp(-log_of_fall). The one at step 60 is odd, and the longest
    healthy one is at step 90.
    """
    norms = scale * NORMS**0.1 * np.exp(-log_of_fall * np.arange(SIZE) / SIZE)
    norms[60] = 1000.0 * scale
    norms[90] = 3.0 * scale
    return norms


def test_where_norms_fall_far_it_names_one_rule_that_follows_them(log, command):
    norms = falling(4.6, scale=50.0)
    log.write_text(log_of(norms))
    text = command(log)
    early, late = np.median(norms[:40]), np.median(norms[-40:])
    # Ten times the largest of the first hundred norms, without the odd one.
    cap = 10 * np.max(np.delete(norms[:100], 60))
    rule = f"optaxclip.zclip(cap={float(f'{cap:.2g}'):g})"
    _, advice, reason, *_ = text.splitlines()
    assert reason == (
        f"Norms fall from a median of {early:.3g} in the first fifth of the log to "
        f"{late:.3g} in the last, so no fixed limit fits the whole run."
    )
    assert advice.startswith(f"Take {rule}, whose limit follows the norms. It clips ")
    assert text.count("Take ") == 1
    assert "guard" not in text and "Adam" not in text and "The usual" not in text
    (row,) = [line for line in text.splitlines() if line.startswith("->")]
    share = row.split()[2]
    assert row.endswith(f"  {rule}") and advice.endswith(f" {share} of the steps.")


def test_the_rule_that_follows_is_the_clipper_that_it_names(log, command):
    norms = falling(4.6, scale=50.0)
    log.write_text(log_of(norms))
    (row,) = [line for line in command(log).splitlines() if line.startswith("->")]
    _, limit, share, _, rule = row.split()
    clipper = eval(rule, {"optaxclip": optaxclip})
    state = clipper.init(np.ones(1, np.float32))
    for norm in norms:
        _, state = clipper.update(np.float32([norm]), state)
    numbers = optaxclip.metrics(state, floats=True)
    assert float(limit) == pytest.approx(numbers["clip/limit"], rel=1e-3)
    assert share == f"{numbers['clip/clipped_share']:.1%}"


def test_norms_that_fall_by_orders_have_a_rule_without_a_guard(log, command):
    """As where a network learns its examples by heart."""
    norms = NORMS**0.1 * np.exp(-9 * np.arange(SIZE) / SIZE)
    assert not any(row.is_guard for row in suggest(norms))
    log.write_text(log_of(norms))
    text = command(log)
    assert "Take optaxclip.zclip(cap=" in text and "no fixed limit fits" in text


def test_a_fixed_limit_that_still_guards_the_last_norms_is_kept(log, command):
    # 1.0 is 26 of the last medians, then 15 and 3 of them.
    for fall, scale, falls_far in ((3.6, 1, True), (3.0, 1, False), (1.2, 1, False)):
        norms = scale * NORMS**0.1 * np.exp(-fall * np.arange(SIZE) / SIZE)
        late = np.median(norms[-40:])
        early = np.median(norms[:40])
        share = np.mean(norms > 1)
        assert 0 < share < 0.5 and (early >= 5 * late) == (fall > 2)
        assert (early >= 5 * late and 20 * late < 1.0) == falls_far
        log.write_text(log_of(norms))
        assert ("no fixed limit fits the whole run" in command(log)) == falls_far


def test_the_usual_limit_far_above_norms_that_do_not_fall_is_kept(log, command):
    norms = 0.03 * NORMS**0.1
    norms[7] = 9.0
    assert 20 * np.median(norms[-40:]) < 1.0
    log.write_text(log_of(norms))
    assert "Take 1.0, as most trainers do: it clips 0.5% of the" in command(log)


def test_several_columns_that_fall_are_said_too(log, command):
    lines = [f"{norm},{norm}" for norm in falling(4.6, scale=50.0)]
    log.write_text("\n".join(["actor/grad_norm,critic/grad_norm", *lines]))
    text = command(log)
    assert text.count("Take optaxclip.zclip(cap=") == text.count("Take ") == 2
    assert text.count("no fixed limit fits") == 2


def test_a_text_is_read_with_a_pattern(log, command):
    log.write_text("\n".join(f"norm:{norm}" for norm in NORMS))
    text = command(log, "--pattern", "norm:(?P<grad_norm>\\S+)")
    assert text.startswith("Column 'grad_norm' of run.csv, taken by its name")


def test_the_arrow_is_on_a_guard_that_is_taken(log, command):
    (best,) = [row for row in suggest(NORMS) if row.is_guard]
    assert best.limit == pytest.approx(np.quantile(NORMS, 0.99), rel=0.01)
    text = command(log)
    (row,) = [line for line in text.splitlines() if line.startswith("->")]
    assert row.endswith(f"  {best.rule}")
    advice = f"Take {best.rule}, a guard that clips 1.0% of the steps."
    assert text.splitlines()[1] == advice


def test_the_arrow_is_on_the_usual_limit_where_it_is_taken(log, command):
    norms = NORMS / 2
    log.write_text(log_of(norms))
    (best,) = [row for row in suggest(norms) if row.is_guard]
    lines = command(log).splitlines()
    (usual,) = [line for line in lines if line.startswith("->")]
    factors = 1 / norms[norms > 1]
    assert usual.split() == [
        "->",
        "1",
        f"{len(factors) / SIZE:.1%}",
        f"{factors.mean():.3f}",
        "optaxclip.clip_by_global_norm(1.0)",
    ]
    (guard,) = [line for line in lines if line.endswith(f"  {best.rule}")]
    assert guard.startswith("   ")
    advice = f"To clip only accidents, take {best.rule}, a guard that clips "
    assert f"{advice}{best.clip_rate:.1%}." in lines


def test_the_answer_and_the_table_round_a_share_alike(log, command):
    # 36.25 % is just above that in float32.
    norms = np.append(np.linspace(0.5, 0.9, 765), np.linspace(1.1, 1.9, 435))
    log.write_text(log_of(norms))
    answer, _, table = command(log).partition("\n\n")
    (usual,) = [line for line in table.splitlines() if line.startswith("->")]
    assert f"it clips {usual.split()[2]} of the steps" in answer


def test_no_guard_is_offered_that_is_tighter_than_the_usual_limit(log, command):
    # 1.0 clips 1 % of the norms, and the guard would be a little below it.
    norms = np.append(np.linspace(0.5, 0.95, 990), np.linspace(1.5, 2.5, 10))
    log.write_text(log_of(norms))
    (best,) = [row for row in suggest(norms) if row.is_guard]
    assert best.limit < 1.0
    text = command(log)
    assert "Take 1.0, as most trainers do: it clips 1.0% of the steps" in text
    assert "guard" not in text


def test_a_guard_that_is_the_usual_limit_has_one_row(log, command):
    # 1.0 is the norm that 1 % of the steps exceed.
    norms = np.append(np.linspace(0.2, 0.4, SIZE - 3), [1.0, 1.01, 1.01])
    log.write_text(log_of(norms))
    (best,) = [row for row in suggest(norms) if row.is_guard]
    assert best.limit == 1.0 and best.clip_rate == pytest.approx(0.01)
    text = command(log)
    (row,) = [
        line for line in text.splitlines() if "norm(1)" in line or "norm(1.0)" in line
    ]
    assert row.startswith("->") and "guard" not in text
    assert "Take 1.0, as most trainers do: it clips 1.0% of the steps" in text
    assert "accidents" not in text


def test_rows_are_in_the_order_of_their_shares(log, command):
    rows = [line for line in command(log).splitlines() if "%  " in line]
    shares = [float(row[2:].split()[1].rstrip("%")) for row in rows]
    assert shares == sorted(shares, reverse=True) and len(shares) >= 8


def test_norms_that_grow_far_are_said(log, command):
    log.write_text(log_of(np.geomspace(0.5, 8.0, 200)))
    assert "Norms grow from a median of 0.656 in the first fifth" in command(log)
    log.write_text(log_of(np.geomspace(0.5, 2.0, 200)))
    assert "Norms grow" not in command(log)


def test_one_step_of_a_long_log_is_not_0_percent(log, command):
    log.write_text(log_of(np.append(np.linspace(0.5, 0.7, 2999), [40.0])))
    assert " 0.033%  " in command(log)


def test_rows_of_equal_share_are_in_the_order_of_their_limits(log, command):
    # With one accident among 200 norms many rows clip that step alone.
    log.write_text(log_of(np.append(np.linspace(0.5, 0.501, 199), [40.0])))
    rows = [line[2:].split() for line in command(log).splitlines() if "%  " in line]
    limits = [float(row[0]) for row in rows if row[1] == "0.5%"]
    assert limits == sorted(limits) and len(limits) >= 3


def test_a_guard_instead_of_the_usual_limit_has_one_reason(log, command):
    norms = NORMS / np.quantile(NORMS, 1 - 0.585)
    log.write_text(log_of(norms))
    (guard,) = [row for row in suggest(norms) if row.is_guard]
    _, verdict, reason, place, norms_found = command(log).split("\n\n")[0].splitlines()
    assert verdict == f"Take {guard.rule}, a guard that clips 1.0% of the steps."
    assert reason == (
        "The usual 1.0 clips 58.5%, more than half: you may keep it with Adam, which "
        "cancels a constant factor."
    )
    assert place.startswith("Steps above") and "finite norms" in norms_found


def test_a_row_that_clips_nothing_has_a_mean_factor_of_1(log, command):
    norms = np.linspace(0.5, 1.5, SIZE)
    log.write_text(log_of(norms))
    assert "    0.0%        1.000  optaxclip.clip_by_global_norm(5)" in command(log)
    rows = {row.rule: row for row in suggest(norms)}
    assert rows["optaxclip.clip_by_global_norm(5)"].mean_factor == 1.0


@pytest.mark.parametrize(
    ("length", "choice"),
    [
        (0.5, "Take 1.0, as most trainers do: it clips {share:.1f}% of the steps"),
        (1e-3, "Take {guard}, a guard that clips 1.0% of the steps.\nThe usual"),
        (1e3, "\nThe usual 1.0 clips 100.0%, more than half: you may keep it with"),
    ],
)
def test_it_chooses_between_the_usual_limit_and_a_guard(log, command, length, choice):
    norms = length * NORMS
    lines = [f"{step},{norm}" for step, norm in enumerate(norms)]
    log.write_text("\n".join(["step,grad_norm", *lines]))
    (best,) = [row for row in suggest(norms) if row.is_guard]
    assert choice.format(share=100 * np.mean(norms > 1), guard=best.rule) in command(
        log
    )


def test_one_spike_of_a_long_run_is_not_none_of_the_steps(log, command):
    norms = [*(NORMS.repeat(20) / NORMS.max() / 2), 9.0]
    lines = [f"{step},{norm}" for step, norm in enumerate(norms)]
    log.write_text("\n".join(["step,grad_norm", *lines]))
    assert "Take 1.0, as most trainers do: it clips 0.025% of the" in command(log)


def test_few_norms_cannot_show_one_percent(log, command):
    norms = np.random.default_rng(0).uniform(size=30)
    lines = [f"{step},{norm}" for step, norm in enumerate(norms)]
    log.write_text("\n".join(["step,grad_norm", *lines]))
    text = command(log)
    few = "Norms above 0 are too few to choose a limit from: 30. Log 100 steps or more."
    usual = "Until then take 1.0, the limit that most trainers use."
    assert f":\n{few}\n{usual}\n" in text
    assert "clipper, as Python" not in text and "guard" not in text
    with pytest.raises(SystemExit, match="a limit that is recommended for it"):
        command(log, "--picture", log.parent / "run.png")


def test_the_rows_of_the_table_are_python(log, command):
    lines = command(log).splitlines()
    rows = [line[2:].split(None, 3)[3] for line in lines if "%  " in line]
    assert len(rows) >= 8
    names = {"optaxclip": optaxclip, "optimizer": optax.sgd(0.1)}
    for row in rows:
        _, state = apply(eval(row, names), {"w": np.ones(2)})
        assert optaxclip.metrics(state)


@pytest.mark.parametrize(
    ("norms", "limit"),
    [
        (NORMS, np.float32(f"{np.quantile(NORMS, 0.99):.3g}")),
        (NORMS / 2, np.float32(1.0)),
        (falling(4.6, scale=50.0), None),
    ],
)
def test_the_limit_to_take_is_drawn_where_it_is_asked_for(
    log, command, monkeypatch, norms, limit
):
    log.write_text(log_of(norms))
    drawn = []
    plot = replay.plot_history

    def recorded(history, **options):
        drawn.append((history, plot(history, **options)))
        return drawn[-1][1]

    monkeypatch.setattr(replay, "plot_history", recorded)
    command(log)
    assert not drawn and list(log.parent.iterdir()) == [log]
    picture = log.parent / "mine.png"
    text = command(log, "--picture", picture)
    assert text.endswith(f"\nThe picture is in {picture}.\n")
    assert picture.read_bytes().startswith(b"\x89PNG")
    (row,) = [line for line in text.splitlines() if line.startswith("->")]
    ((history, axis),) = drawn
    assert axis.get_title() == f"norms as recorded, and {row.split()[-1]}"
    if limit is None:
        assert len(set(history.limits.tolist())) > 100
    else:
        np.testing.assert_array_equal(history.limits, limit)


def test_a_picture_that_cannot_be_drawn_ends_in_one_line(log, command, capsys):
    missing = r"^replay: .*missing/run\.png: No such file or directory$"
    for name, error in (("missing/run.png", missing), ("run.xyz", "xyz")):
        with pytest.raises(SystemExit, match=error):
            command(log, "--picture", log.parent / name)
        assert capsys.readouterr().out == ""


def test_no_picture_is_drawn_if_the_other_batch_has_no_answer(log, command, capsys):
    picture = log.parent / "run.png"
    with pytest.raises(SystemExit, match="--to needs the column noise_share"):
        command(log, "--picture", picture, "--batch", 1, "--to", 2)
    assert capsys.readouterr().out == "" and not picture.exists()


def test_a_picture_without_matplotlib_ends_in_one_line(log, command, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit, match="run pip install matplotlib"):
        command(log, "--picture", log.parent / "run.png")
    assert "a guard that clips" in command(log)


def test_broken_norms_are_counted_and_left_out(tmp_path, command):
    path = tmp_path / "run.csv"
    # The last one is beyond the range of float32, so no rule sees it.
    norms = [*np.linspace(1, 9, SIZE - 1), 1000.0, np.nan, np.inf, 3e40]
    path.write_text("length of the gradient,\n" + "\n".join(f"{x}," for x in norms))
    text = command("--column", "length of the gradient", path)
    assert "201 finite norms from 1 to 3e+40, median 5.04" in text
    assert "NaN or inf: 2 (1.0%)" in text
    (row,) = [line for line in text.splitlines() if "norm(5.02)" in line]
    assert row.split()[:2] == ["5.02", "50.0%"]


def test_a_log_of_no_use_ends_in_one_line(tmp_path, command):
    path = tmp_path / "run.csv"
    missing = r"^replay: .*run\.csv: No such file or directory$"
    with pytest.raises(SystemExit, match=missing):
        command(path)
    path.write_text("")
    with pytest.raises(SystemExit, match="the file is empty"):
        command(path)
    path.write_text("loss\n1\n2\n")
    with pytest.raises(SystemExit, match="this file has no gradient norm"):
        command(path)


@pytest.mark.slow
def test_it_runs_without_a_warning(log):
    python = [sys.executable, "-W", "error", "-m", "optaxclip.replay", log]
    done = subprocess.run(python, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
