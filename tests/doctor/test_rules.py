"""Each cause in a log made by hand, and the log beside it that shows none."""

import tracemalloc
import warnings

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip.doctor import diagnose, examine
from tests.doctor.test_doctor import calm, causes_of, changed, rows_of

NAN, INF = float("nan"), float("inf")


def found(rows, cause):
    """The finding of a cause, None without one."""
    return next((x for x in diagnose(rows) if x.cause == cause), None)


def noisy(size=200, spread=0.1, seed=0):
    return np.exp(spread * np.random.default_rng(seed).normal(size=size))


# ------------------------------------------------------------------------- not finite


def test_a_loss_that_is_nan_is_named_with_what_came_first():
    norms = changed(calm(), {35: NAN})
    losses = [*calm(38), *[NAN] * 22]
    finding = found(rows_of(grad_norm=norms, loss=losses), "not finite")
    assert (finding.step, finding.value) == (35, INF)
    assert finding.evidence == "NaN or inf begins in 'grad_norm'"
    finding = found(rows_of(loss=losses), "not finite")
    assert (finding.step, finding.rows) == (38, 22)


def test_infinite_norms_now_and_then_are_those_of_a_loss_scale():
    norms = changed(calm(200), {3: INF, 90: INF, 150: INF})
    assert diagnose(rows_of(grad_norm=norms, loss=calm(200))) == []
    # A scale that begins too high is lowered in the first rows.
    first_norms = changed(calm(40), dict.fromkeys(range(8), INF))
    assert diagnose(rows_of(grad_norm=first_norms, loss=calm(40))) == []
    # NaN is not, unless the log has a loss scale.
    norms[90] = NAN
    rows = rows_of(grad_norm=norms, loss=calm(200))
    assert causes_of(rows) == [("not finite", 3)]
    for name in ("loss_scale", "train/LossScale"):
        assert diagnose([row | {name: 2.0} for row in rows]) == []
    # A loss that is NaN is never.
    losses = changed(calm(200), {90: NAN})
    rows = rows_of(grad_norm=norms, loss=losses, loss_scale=calm(200))
    assert causes_of(rows) == [("not finite", 90)]
    # In the last rows, or in more than a tenth of them, it is none.
    norms = changed(calm(200), dict.fromkeys(range(198, 200), INF))
    assert causes_of(rows_of(grad_norm=norms)) == [("not finite", 198)]
    norms = changed(calm(200), dict.fromkeys(range(0, 190, 7), INF))
    assert causes_of(rows_of(grad_norm=norms)) == [("not finite", 0)]


def test_many_infinite_norms_have_the_cure_of_a_loss_scale():
    norms = changed(calm(200), dict.fromkeys(range(0, 190, 7), INF))
    (finding,) = diagnose(rows_of(grad_norm=norms, loss=calm(200)))
    assert "has a loss scale, lower it, or make it dynamic" in finding.advice


def test_infinite_norms_in_every_fifth_step_of_late_are_no_overflows():
    """Of 400 rows less than a tenth are infinite."""
    late = dict.fromkeys(range(205, 400, 5), INF)
    norms = changed(calm(400), late)
    assert causes_of(rows_of(grad_norm=norms)) == [("not finite", 205)]
    few = dict.fromkeys(range(205, 400, 15), INF)
    assert diagnose(rows_of(grad_norm=changed(calm(400), few))) == []


def test_no_cause_is_named_after_a_nan_that_stays():
    gradient = np.append(calm(30), np.zeros(30))
    columns = {"health__norm__a": gradient, "health__norm__b": calm()}
    late_nan = dict.fromkeys(range(29, 60), NAN)
    rows = rows_of(loss=changed(calm(), late_nan), **columns)
    assert causes_of(rows) == [("not finite", 29)]
    # After a NaN that goes the run is judged.
    rows = rows_of(loss=changed(calm(), {29: NAN}), **columns)
    assert causes_of(rows) == [("not finite", 29), ("no gradient", 30)]


def test_an_overflow_does_not_stand_for_a_nan_of_another_norm():
    norms = changed(calm(200), {3: INF})
    broken_norms = changed(calm(200), dict.fromkeys(range(150, 200), NAN))
    rows = rows_of(a__grad_norm=norms, b__grad_norm=broken_norms)
    assert causes_of(rows) == [("not finite", 150)]


def test_rows_that_are_taken_for_overflows_are_counted_in_a_note():
    norms = changed(calm(200), {3: INF, 90: INF})
    others = changed(calm(200), {90: INF, 120: INF})
    report = examine(rows_of(a__grad_norm=norms, b__grad_norm=others))
    assert report.findings == []
    sentence = "Rows with norms that are not finite: 3, the first of them row 3"
    assert [sentence in note for note in report.notes].count(True) == 1
    # Rows that a finding names have no note.
    norms[199] = INF
    report = examine(rows_of(grad_norm=norms))
    assert causes_of(rows_of(grad_norm=norms)) == [("not finite", 3)]
    assert not any("not finite:" in note for note in report.notes)


def test_norms_of_a_loss_scale_are_judged_too():
    norms = changed(calm(200), {3: INF, 90: INF})
    report = examine(rows_of(grad_norm=norms))
    assert report.findings == []
    judged = [cause for causes in report.not_judged.values() for cause in causes]
    assert "not finite" not in judged


def test_a_nan_is_named_with_the_tensors_in_which_it_begins():
    rows = []
    for step in range(20):
        row = {"step": 10 * step}
        for number in range(6):
            # It spreads to the last layer a row later.
            is_broken = 2 <= number <= 4 if step == 15 else step > 15 and number >= 2
            row[f"health/norm/blocks/{number}/w"] = NAN if is_broken else 1.0 + step % 3
        rows.append(row)
    finding = found(rows, "not finite")
    assert (finding.step, finding.rows) == (150, 5)
    names = "'health/blocks/2/w', 'health/blocks/3/w', 'health/blocks/4/w'"
    assert finding.evidence == f"NaN or inf begins in {names}"


# ------------------------------------------------------------------- losses of 0


def broken_runs():
    """Columns of runs with these causes, whose loss is never 0."""
    high = changed(noisy(100), dict.fromkeys(range(60, 100), 8.0))
    grown = np.where(np.arange(100) < 50, 1.0, 8.0) * noisy(100)
    lost = np.where(np.arange(100) < 50, 1.0, 1e-6) * noisy(100)
    return {
        "divergence": (high, noisy(100)),
        "change of scale": (noisy(100), grown),
        "vanishing": (noisy(100), lost),
    }


@pytest.mark.parametrize("cause", ["divergence", "change of scale", "vanishing"])
def test_a_loss_that_was_rounded_to_0_is_left_out(cause):
    """As transformers rounds it, to four digits."""
    loss, norm = broken_runs()[cause]
    expected = found(rows_of(loss=loss, norm=norm), cause)
    loss = changed(loss, {7: 0.0})
    assert found(rows_of(loss=loss, norm=norm), cause) == expected is not None
    # A loss below 0 has no ratio.
    loss = changed(loss, {7: -0.1})
    assert found(rows_of(loss=loss, norm=norm), cause) is None


def test_losses_of_0_alone_have_no_ratio():
    report = examine(rows_of(loss=np.zeros(60), grad_norm=calm()))
    assert report.findings == []
    assert report.not_judged["20 rows with a loss above 0 in all rows (--loss NAME)"]


# -------------------------------------------------------------------------- bad batch


def test_a_spike_is_held_against_the_median_of_20_rows():
    norms = changed(calm(), {10: 40.0, 40: 50.0, 45: 30.0})
    (finding,) = diagnose(rows_of(grad_norm=norms))
    assert (finding.cause, finding.step, finding.worst) == ("bad batch", 10, 40)
    assert (finding.rows, finding.limit) == (3, 15)
    assert finding.value == pytest.approx(50 / np.median(norms[20:40]))
    # None hides behind another one. The first two rows are not judged.
    spikes = {4: 26.0, 7: 29.0, 22: 72.0, 58: 4.8}
    rows = rows_of(norm=[spikes.get(step, 0.5) for step in range(80)])
    finding = found(rows, "bad batch")
    assert (finding.step, finding.worst, finding.rows) == (4, 22, 3)
    assert diagnose(rows_of(norm=changed(calm(), {1: 90.0, 30: 14.0}))) == []


def test_a_spike_in_the_last_row_is_named():
    norms = changed(calm(), {59: 50.0})
    (finding,) = diagnose(rows_of(grad_norm=norms))
    assert (finding.cause, finding.step) == ("bad batch", 59)
    # Whether it comes back is not in the log.
    assert finding.evidence.endswith("times the median of the rows before")


def learnt_by_heart():
    """Norm and loss of a network that knows most examples, but not those of some steps:
    nothing is above the first rows.
    """
    norms = np.concatenate([np.full(20, 5.0), np.geomspace(5.0, 0.01, 80)])
    norms = np.append(norms, np.full(100, 0.01)) * noisy(200)
    losses = changed(norms / 2, {150: 0.8, 170: 0.9})
    return changed(norms, {150: 2.0, 170: 6.0}), losses


def test_examples_that_a_network_does_not_know_yet_are_no_bad_batch():
    norms, losses = learnt_by_heart()
    report = examine(rows_of(grad_norm=norms, loss=losses))
    assert report.findings == []
    (note,) = [note for note in report.notes if "That may be right" in note]
    assert "from row 150 on" in note


@pytest.mark.parametrize(
    "first_norm, norm, loss",
    [(5.0, 50.0, 0.8), (5.0, 2.0, 30.0), (INF, 50.0, 0.8)],
    ids=["norm", "loss", "overflow at the start"],
)
def test_a_batch_above_the_first_rows_is_bad_though_the_others_are_known(
    first_norm, norm, loss
):
    norms, losses = learnt_by_heart()
    norms = changed(norms, {0: first_norm, 160: norm})
    rows = rows_of(grad_norm=norms, loss=changed(losses, {160: loss}))
    assert found(rows, "bad batch") is not None


def test_rounding_errors_of_a_known_task_are_no_usual_norm():
    norms = changed(np.geomspace(1.0, 1e-30, 60), {40: 1e-12})
    assert found(rows_of(grad_norm=norms), "bad batch") is None


@pytest.mark.parametrize("rate", [0.2, 0.5, 1.0])
def test_norms_that_grow_until_they_are_nan_are_no_bad_batch(rate):
    growing = np.exp(rate * np.arange(15.0))
    norms = [*calm(40), *growing, *np.full(5, np.nan)]
    assert causes_of(rows_of(grad_norm=norms)) == [("not finite", 55)]
    # A leap in front of the same norms is one, also if they do not come back.
    norms[39] = 20.0
    norms[40:55] = 20 * growing
    finding = found(rows_of(grad_norm=norms), "bad batch")
    assert (finding.step, finding.rows) == (39, 1)


def spikes_and_nan(spikes):
    """Norms with five spikes, and NaN from row 55 on."""
    norms = changed(calm(), {row: 50.0 + row for row in spikes})
    norms[55:] = np.nan
    return norms


def test_spikes_again_and_again_and_then_nan_are_a_high_rate():
    rows = rows_of(loss=calm(), grad_norm=spikes_and_nan([10, 20, 30, 40, 50]))
    assert causes_of(rows) == [("learning rate", 10), ("not finite", 55)]
    finding, _ = diagnose(rows)
    assert finding.rows == 5


@pytest.mark.parametrize("spikes", [[50], [46, 47, 48, 49, 50]])
def test_one_spike_or_burst_before_nan_is_a_bad_batch(spikes):
    rows = rows_of(loss=calm(), grad_norm=spikes_and_nan(spikes))
    assert causes_of(rows)[0] == ("bad batch", spikes[0])


def test_a_loss_that_blows_up_at_once_is_a_high_rate_even_if_it_comes_back():
    losses = [1.0, 3.0, 9.0, 8.0, 7.0, *np.geomspace(6.0, 0.5, 55)]
    norms = changed(calm(), {2: 50.0, 30: 50.0})
    rows = rows_of(loss=losses, grad_norm=norms)
    assert causes_of(rows) == [("learning rate", 2), ("bad batch", 2)]
    # One low row of a noisy loss is no start.
    noisy_losses = np.tile([1.0, 8.0, 9.0, 8.0, 10.0, 9.0], 10)
    assert causes_of(rows_of(loss=noisy_losses, grad_norm=calm())) == []


def test_a_loss_of_three_rows_may_blow_up():
    rows = rows_of(loss=[1.0, 1e3, 1e6, np.nan], grad_norm=[1.0, 1e3, 1e6, np.nan])
    assert causes_of(rows)[0] == ("learning rate", 1)


def test_a_norm_of_gradients_that_are_never_reset_is_named():
    random = np.random.default_rng(0)
    gradients = random.normal(0.3, 1.0, size=(100, 20))
    sums = np.linalg.norm(np.cumsum(gradients, axis=0), axis=1)
    rows = rows_of(loss=np.geomspace(2, 1, 100), grad_norm=sums)
    assert causes_of(rows)[0] == ("gradients add up", 0)
    # Norms of single batches may grow as far.
    norms = sums * random.uniform(0.9, 1.1, size=100)
    rows = rows_of(loss=np.geomspace(2, 1, 100), grad_norm=norms)
    assert ("gradients add up", 0) not in causes_of(rows)


def test_a_burst_of_bad_batches_is_named():
    """Adam is thrown off for a while, so norms do not come back at once."""
    falling = np.geomspace(12.0, 1.0, 115)
    norms = np.concatenate([calm(60), 100 * calm(25), falling * noisy(115)])
    finding = found(rows_of(grad_norm=norms), "bad batch")
    assert (finding.step, finding.rows) == (60, 10)
    # Where data become harder, norms fall slowly from the first row on.
    norms = np.append(calm(60), np.geomspace(100.0, 1.0, 140) * noisy(140))
    assert found(rows_of(grad_norm=norms), "bad batch") is None
    # If they grow without end, a fall to a high level is no end of a burst.
    norms = [*calm(60), *np.geomspace(2.0, 1e9, 20), *np.full(20, 1e7)]
    assert found(rows_of(grad_norm=norms), "bad batch") is None


def test_norms_that_stay_high_are_no_bad_batch():
    norms = np.concatenate([calm(40), 30 * calm(40)])
    assert causes_of(rows_of(norm=norms)) == [("change of scale", 40)]


@pytest.mark.parametrize("last", [[], [NAN, NAN]], ids=["", "NaN"])
@pytest.mark.parametrize("rows", [12, 20])
def test_norms_that_stay_high_until_the_log_ends_are_no_bad_batch(rows, last):
    norms = np.concatenate([noisy(100), 1024 * noisy(rows, seed=1), last])
    finding, *others = diagnose(rows_of(grad_norm=norms))
    assert (finding.cause, finding.step) == ("change of scale", 100)
    assert [other.cause for other in others] == (["not finite"] if last else [])


def test_norms_whose_squares_overflow_are_judged_without_a_warning():
    norms = 1e300 * changed(calm(), {40: 50.0})
    rows = rows_of(health__norm__a=norms, health__norm__b=norms, grad_norm=norms)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert causes_of(rows) == [("bad batch", 40)]


def test_what_follows_norms_of_0_is_no_spike():
    assert found(rows_of(norm=[*np.zeros(30), *calm(10)]), "bad batch") is None


@pytest.mark.parametrize("name", ["lr", "train/learning_rate", "lr-Adam", "lr/1"])
def test_a_leap_of_the_rate_is_named_with_what_it_broke(name):
    columns = {name: np.where(np.arange(60) < 38, 1e-3, 0.3)}
    assert diagnose(rows_of(loss=calm(), grad_norm=calm(), **columns)) == []
    norms = changed(calm(), {40: 50.0})
    finding, other = diagnose(rows_of(loss=calm(), grad_norm=norms, **columns))
    assert (finding.cause, finding.step, other.step) == ("learning rate", 38, 40)
    assert finding.evidence == f"{name!r} leaps to 300 times the rows before"
    losses = changed(calm(), dict.fromkeys(range(38, 60), NAN))
    causes = causes_of(rows_of(loss=losses, **columns))
    assert causes == [("learning rate", 38), ("not finite", 38)]


def test_a_leap_of_the_rate_is_named_where_the_loss_rises_for_good():
    loss = np.append(np.geomspace(4.0, 2.0, 120), np.full(80, 2.8)) * noisy()
    (divergence,) = causes_of(rows_of(loss=loss))
    assert divergence == ("divergence", 120)
    for row, causes in ((120, [("learning rate", 120)]), (60, [])):
        rates = np.where(np.arange(200) < row, 1e-3, 1e-2)
        rows = rows_of(loss=loss, lr=rates)
        assert causes_of(rows) == [*causes, divergence]


def test_a_leap_of_the_rate_may_break_something_20_rows_later():
    norms = changed(calm(), {40: 50.0})
    for row, causes in ((20, [("learning rate", 20)]), (19, [])):
        rows = rows_of(grad_norm=norms, lr=np.where(np.arange(60) < row, 1e-3, 0.1))
        assert causes_of(rows) == [*causes, ("bad batch", 40)]


def test_a_rate_of_a_single_row_has_no_leap():
    rows = rows_of(loss=np.geomspace(4.0, 1.0, 30))
    rows[7]["lr"] = 1e-3
    assert diagnose(rows) == []


def test_other_changes_of_the_rate_are_no_cause():
    norms = changed(calm(), {4: 50.0, 40: 60.0})
    rows = np.arange(60)
    drop = np.where(rows < 38, 1e-3, 1e-4)
    early_leap = np.where(rows < 18, 1e-3, 1.0)
    for rates in (rows * 1e-5, drop, early_leap, 1e-3 * (1 + rows % 20)):
        assert causes_of(rows_of(grad_norm=norms, lr=rates)) == [("bad batch", 4)]
    rates = np.where(rows < 38, 1e-3, 0.3)
    assert found(rows_of(grad_norm=norms, lr_scale=rates), "learning rate") is None


# ---------------------------------------------------------- loss, and norms that change


def test_a_loss_that_does_not_come_back_has_diverged():
    falling = np.geomspace(4.0, 1.0, 100)
    rising = np.geomspace(1.0, 8.0, 60)
    losses = np.concatenate([falling, rising, np.full(40, 8.0)]) * noisy()
    (finding,) = diagnose(rows_of(loss=losses, grad_norm=noisy(seed=1)))
    # It is above a quarter of its rise to 8.
    row = 100 + 60 * np.log(1 + 7 / 4) / np.log(8)
    assert finding.cause == "divergence" and abs(finding.step - row) < 6
    assert finding.value == pytest.approx(8, rel=0.2)
    # A loss that comes back has not.
    losses = np.concatenate([falling, rising, falling[60:]]) * noisy()
    assert diagnose(rows_of(loss=losses, grad_norm=noisy(seed=1))) == []


def test_a_noisy_loss_has_diverged_where_it_rises_and_not_at_its_last_low_row():
    """As where a rate leaps: the loss recovers a little, and some rows are low."""
    for seed in range(20):
        recovering = np.geomspace(1.0, 0.3, 300) * noisy(300, 0.5, seed)
        recovering[::17] = 0.05
        falling = np.geomspace(2.0, 0.03, 300) * noisy(300, 0.3, seed + 50)
        finding = found(rows_of(loss=np.append(falling, recovering)), "divergence")
        assert 300 <= finding.step <= 303


def test_a_loss_above_its_first_row_has_a_note():
    """As of Adam with a high rate: the first steps raise the loss, and it falls again,
    but never to where it began.
    """
    first_rows = np.append(2.3, np.geomspace(30.0, 3.5, 50))
    loss = np.append(first_rows, 3.2 * noisy(350, 0.3))
    (note,) = examine(rows_of(loss=loss)).notes
    assert note.startswith("'loss' begins at 2.3 and ends higher, at 3.")
    assert "the rate is too high" in note
    loss[0] = 4.0
    assert examine(rows_of(loss=loss)).notes == []


@pytest.mark.parametrize("name", ["stage", "train/curriculum_phase"])
def test_a_loss_that_rises_with_its_stage_has_a_note(name):
    losses = [np.geomspace(start, 0.3 * start, 100) for start in (2.0, 4.0)]
    loss = np.concatenate(losses) * noisy(200)
    stages = np.repeat([0, 1], 100)
    report = examine(rows_of(loss=loss, **{name: stages}))
    assert report.findings == []
    first_note, *_ = report.notes
    assert first_note.startswith("'loss' rises to ")
    assert first_note.endswith(f"right: {name!r} changes there from 0 to 1.")
    # A stage that changes elsewhere, or in each row, is no reason.
    for column in (np.arange(200) >= 140, np.arange(200)):
        rows = rows_of(loss=loss, **{name: column})
        assert found(rows, "divergence").step == 100


@pytest.mark.parametrize("name", ["reward", "rollout/ep_rew_mean", "episodic_return"])
def test_a_loss_that_rises_with_its_reward_has_a_note(name):
    """As of a critic, whose returns grow as the policy gets better."""
    growing = np.linspace(1.0, 10.0, 400)
    loss = growing**2 * noisy(400)
    report = examine(rows_of(loss=loss, **{name: growing}))
    assert report.findings == []
    assert any(f"right: {name!r} rises from 2.12 to 8.88." in x for x in report.notes)
    # Not if the reward falls.
    rows = rows_of(loss=loss, **{name: growing[::-1]})
    assert found(rows, "learning rate") and found(rows, "divergence")
    # Nor does the loss of a reward model explain itself.
    assert found(rows_of(loss=loss, reward_loss=loss), "divergence")


@pytest.mark.parametrize("count", [1, 2, 3, 400])
def test_few_rewards_explain_no_loss_and_nan_hides_none(count):
    growing = np.linspace(1.0, 10.0, 400)
    rewards = np.where(np.arange(400) % 2, growing, NAN)
    rows = rows_of(loss=growing**2 * noisy(400), reward=rewards)
    rows = [
        {**row, "reward": row["reward"] if i < count else NAN}
        for i, row in enumerate(rows)
    ]
    assert bool(examine(rows).findings) == (count < 400)


def test_a_loss_that_never_falls_is_a_high_rate():
    """As of SGD: it leaps in the first rows, and stays at that of a guess."""
    first_rows = [2.6, 2.3, 2.1, 1.9, 1.7, *np.geomspace(2, 20, 15)]
    loss = np.append(first_rows, 2.32 * noisy(480, 0.01))
    norms = changed(calm(500), {26: 50.0})
    (finding,) = diagnose(rows_of(loss=loss, grad_norm=norms))
    assert (finding.cause, finding.step) == ("learning rate", 0)
    assert finding.evidence.startswith("'loss' never falls, and ends at 1.1")
    # Steps after the first row have blown it up for good.
    loss = np.append([2.3, 17.0, 71.0, 68.0, 90.0], 47 * noisy(295, 0.01))
    assert causes_of(rows_of(loss=loss)) == [("learning rate", 0)]
    # In few rows, up to NaN.
    loss = [2.7, 4.1, 315.0, *np.geomspace(1e5, 1e9, 7), NAN, NAN]
    first, second = causes_of(rows_of(loss=loss))
    assert (first, second) == (("learning rate", 0), ("not finite", 10))


def test_a_loss_that_never_falls_is_said_to_end_where_it_ends():
    finding = found(rows_of(loss=np.geomspace(1.0, 12.0, 100)), "learning rate")
    assert finding.value == pytest.approx(12.0, rel=0.2)


@pytest.mark.parametrize("size", [12, 40, 150])
def test_a_loss_that_stays_where_it_began_is_no_high_rate(size):
    for seed in range(20):
        rows = rows_of(loss=noisy(size, 0.3, seed))
        assert found(rows, "learning rate") is None
    # Nor is one that was low in between, or that leaps late.
    falling = np.geomspace(4.0, 1.0, size)
    for first_losses in (falling, np.full(2 * size, 2.0)):
        loss = np.append(first_losses, np.full(2 * size, 5.0))
        assert found(rows_of(loss=loss), "learning rate") is None


def test_a_long_log_needs_little_memory():
    """Windows of a twentieth of the log, one for each row, would be 160 MB here."""
    size = 20_000
    halves = np.repeat([1.0, 3.5], size // 2)
    rows = rows_of(loss=halves * noisy(size), grad_norm=noisy(size, seed=1))
    tracemalloc.start()
    finding = found(rows, "divergence")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert finding.step == size // 2
    assert peak < 100e6


def test_a_loss_that_leaps_and_stays_has_diverged_from_that_row_on():
    losses = np.concatenate([np.geomspace(4.0, 1.0, 120), np.full(80, 3.5)]) * noisy()
    norms = noisy(seed=1)
    (finding,) = diagnose(rows_of(loss=losses, grad_norm=norms))
    assert (finding.cause, finding.step) == ("divergence", 120)
    assert finding.advice.startswith("the loss leaps there: look first at data")
    # If it rises over many rows, the data are not to blame.
    slow_losses = losses.copy()
    slow_losses[120:] = np.minimum(np.geomspace(1.0, 8.0, 80), 3.5) * noisy(80)
    finding = found(rows_of(loss=slow_losses, grad_norm=norms), "divergence")
    assert finding.advice == "go back to a checkpoint, with a clip or a lower rate"
    # The rate comes first, if the updates became long with it.
    ratios = of_updates(np.where(np.arange(200) < 119, 0.01, 0.2))
    rows = rows_of(loss=losses, grad_norm=norms, **ratios)
    assert causes_of(rows) == [("learning rate", 119), ("divergence", 120)]
    # So does a batch.
    norms[120] = 90.0
    causes = causes_of(rows_of(loss=losses, grad_norm=norms))
    assert causes == [("bad batch", 120), ("divergence", 120)]


@pytest.mark.parametrize(("end", "causes"), [(1.8, ["divergence"]), (1.1, [])])
def test_a_loss_that_ends_higher_by_more_than_its_noise_has_diverged(end, causes):
    losses = np.concatenate([np.geomspace(4.0, 1.0, 120), np.full(80, end)]) * noisy()
    findings = diagnose(rows_of(loss=losses, grad_norm=noisy(seed=1)))
    assert [finding.cause for finding in findings] == causes


def test_losses_that_change_their_sign_are_not_judged():
    losses = np.concatenate([noisy(100) - 1.2, np.full(100, 8.0)])
    # The norm grows by a factor, and falls to nearly nothing.
    for factor in (1.0, 8.0, 1e-5):
        norms = noisy() * np.where(np.arange(200) < 100, 1.0, factor)
        report = examine(rows_of(loss=losses, grad_norm=norms))
        assert report.findings == []
        causes = ["learning rate", "change of scale", "divergence", "vanishing"]
        needs = "a loss above 0 in all rows (--loss NAME)"
        assert report.not_judged[needs] == causes
    # A NaN does not change the sign.
    losses = np.concatenate([noisy(100), [NAN], np.full(99, 8.0)])
    assert ("divergence", 101) in causes_of(rows_of(loss=losses))


@pytest.mark.parametrize("factor", [1024.0, 8.0, 0.25])
def test_a_factor_that_stays_is_a_change_of_scale(factor):
    norms = noisy(spread=0.2) * np.where(np.arange(200) < 150, 1, factor)
    losses = np.geomspace(3.0, 1.0, 200) * noisy(seed=1)
    (finding,) = diagnose(rows_of(loss=losses, grad_norm=norms))
    assert (finding.cause, finding.step) == ("change of scale", 150)
    assert finding.value == pytest.approx(max(factor, 1 / factor), rel=0.3)
    assert ("as long" if factor > 1 else "as short") in finding.evidence
    # With a loss of another factor it is another thing.
    losses[150:] *= 2.0
    assert found(rows_of(loss=losses, grad_norm=norms), "change of scale") is None


def test_a_factor_of_norm_and_loss_is_a_change_of_scale():
    factors = np.where(np.arange(200) < 150, 1.0, 8.0)
    norms = noisy(spread=0.2) * factors
    losses = noisy(seed=1) * factors
    causes = causes_of(rows_of(loss=losses, grad_norm=norms))
    assert causes == [("change of scale", 150), ("divergence", 150)]
    # So is one by which both fall.
    causes = causes_of(rows_of(loss=losses[::-1], grad_norm=norms[::-1]))
    assert causes == [("change of scale", 50)]


def test_a_spike_comes_before_the_change_of_scale_that_it_leaves():
    norms = noisy() * np.where(np.arange(200) < 100, 1.0, 3.0)
    norms[100] = 60.0
    causes = causes_of(rows_of(grad_norm=norms))
    assert causes == [("bad batch", 100), ("change of scale", 100)]


def test_a_factor_that_does_not_stay_or_is_in_the_noise_is_none():
    rows = np.arange(200)
    norms = noisy(spread=0.2) * np.where((rows >= 60) & (rows < 90), 4.0, 1.0)
    assert found(rows_of(loss=calm(200), grad_norm=norms), "change of scale") is None
    norms = noisy(spread=1.0) * np.where(rows < 100, 1.0, 4.0)
    assert found(rows_of(loss=calm(200), grad_norm=norms), "change of scale") is None


def test_norms_of_0_in_the_rows_before_have_no_scale():
    norms = np.concatenate([np.zeros(40), np.ones(10), np.full(50, 3.0)])
    assert found(rows_of(grad_norm=norms), "change of scale") is None


@pytest.mark.parametrize("zeros", [10, 15, 40])
def test_norms_of_0_in_the_rows_behind_have_no_scale(zeros):
    norms = changed(noisy(100), dict.fromkeys(range(100 - zeros, 100), 0.0))
    assert diagnose(rows_of(grad_norm=norms)) == []


def test_a_norm_that_falls_step_by_step_is_no_change_of_scale():
    for first in (20.0, 1e4):
        norms = np.geomspace(first, 1.0, 200) * noisy()
        rows = rows_of(loss=calm(200), grad_norm=norms)
        assert found(rows, "change of scale") is None
    norms = np.geomspace(20.0, 1.0, 200) * noisy()
    assert diagnose(rows_of(loss=calm(200), grad_norm=norms)) == []
    # Here the noise of row 84 alone looks like a leap.
    norms = np.geomspace(1e4, 1.0, 200) * noisy(spread=0.2, seed=47)
    rows = rows_of(loss=calm(200), grad_norm=norms)
    assert found(rows, "change of scale") is None


@pytest.mark.parametrize("last", [[], [np.nan, np.nan]], ids=["", "NaN"])
def test_a_norm_that_grows_late_is_steady_growth_even_if_it_becomes_nan(last):
    norms = np.concatenate([np.ones(200), np.geomspace(1, 60, 50), last])
    finding, *others = diagnose(rows_of(grad_norm=norms))
    assert finding.cause == "steady growth"
    # Rows are above 20 from 236 on, and so is the median of five rows from 238 on.
    assert (finding.step, finding.worst) == (238, 249)
    assert [other.cause for other in others] == (["not finite"] if last else [])


def test_no_note_says_that_all_may_be_right_beside_a_high_rate():
    """The loss blows up, and comes back to its start: nothing was learnt."""
    losses = [1.6, *np.geomspace(140.0, 1.6, 25), *1.6 * noisy(174)]
    norms = [1.0, *np.geomspace(30.0, 0.3, 25), *0.3 * noisy(174)]
    report = examine(rows_of(loss=losses, grad_norm=changed(norms, {90: 9.0})))
    assert [finding.cause for finding in report.findings] == ["learning rate"]
    assert not any("may be right" in note for note in report.notes)


def test_a_cause_that_two_rules_see_is_named_once():
    """Over the whole log as in its last rows this norm grows."""
    norms = np.exp(np.linspace(0, 3, 200) ** 2)
    causes = [finding.cause for finding in diagnose(rows_of(grad_norm=norms))]
    assert causes.count("steady growth") == 1


def test_a_growth_and_a_fall_of_scale_are_both_named():
    factors = np.repeat([1.0, 8.0, 0.5], [50, 150, 100])
    causes = causes_of(rows_of(grad_norm=factors * noisy(300)))
    assert causes == [("change of scale", 50), ("change of scale", 200)]


def test_a_norm_that_comes_back_before_the_end_is_no_steady_growth():
    norms = np.concatenate([np.ones(200), np.geomspace(1, 60, 50), np.ones(10)])
    assert found(rows_of(grad_norm=norms), "steady growth") is None


def test_a_norm_that_grows_to_the_end_is_steady_growth():
    norms = np.geomspace(1.0, 60.0, 200) * noisy()
    (finding,) = diagnose(rows_of(grad_norm=norms))
    assert finding.cause == "steady growth"
    assert "added up and never reset" in finding.advice
    # The end over the second fifth.
    assert finding.value == pytest.approx(60**0.7, rel=0.2)
    assert diagnose(rows_of(grad_norm=np.geomspace(1.0, 8.0, 200) * noisy())) == []
    # One that grows in two steps is not.
    for levels in ((1, 1, 1, 4, 14), (1, 1, 4, 14, 14), (1, 1, 4, 4, 14)):
        norms = np.repeat(levels, 40) * noisy()
        assert found(rows_of(grad_norm=norms), "steady growth") is None


def test_a_norm_that_grows_from_0_has_no_factor():
    norms = np.repeat([0.0, 0.0, 1.0, 2.0, 4.0], 40) * noisy()
    assert found(rows_of(grad_norm=norms), "steady growth") is None


def test_a_low_norm_after_norms_of_0_has_not_vanished():
    norms = np.concatenate([np.zeros(30), np.full(70, 5e-4)])
    assert found(rows_of(loss=calm(100), grad_norm=norms), "vanishing") is None


def test_a_norm_of_nearly_0_is_vanishing_unless_the_loss_is_too():
    norms = np.where(np.arange(200) < 90, 1.0, 1e-5) * noisy()
    (finding,) = [
        x
        for x in diagnose(rows_of(loss=calm(200), grad_norm=norms))
        if x.cause == "vanishing"
    ]
    assert 90 <= finding.step < 100
    # Nor is a norm that comes back.
    norms[150:] = 1.0
    assert found(rows_of(loss=calm(200), grad_norm=norms), "vanishing") is None
    losses = np.geomspace(3.0, 1e-3, 200)
    norms = np.geomspace(1.0, 1e-5, 200)
    assert diagnose(rows_of(loss=losses, grad_norm=norms)) == []


def test_without_a_loss_vanishing_is_not_judged():
    report = examine(rows_of(grad_norm=np.geomspace(1.0, 1e-5, 200)))
    assert report.findings == []
    (needs,) = [x for x, causes in report.not_judged.items() if "vanishing" in causes]
    assert needs.startswith("a loss above 0")


# ---------------------------------------------------------------------- record_health


def of_updates(ratios, size=3.0):
    return {
        "health__updates__norm__a": np.array(ratios) * size,
        "health__updates__weight_norm__a": np.full(len(ratios), size),
    }


def test_long_updates_are_a_high_rate():
    ratios = np.where(np.arange(30) < 10, 0.05, 0.08)
    finding = found(rows_of(**of_updates(ratios)), "learning rate")
    # The median of 5 is above two rows later.
    assert (finding.step, finding.rows) == (10, 20)
    assert finding.value == pytest.approx(0.08)
    assert found(rows_of(**of_updates(ratios * 0.9)), "learning rate") is None


def test_updates_right_before_nan_are_a_high_rate_after_few_steps():
    rows = rows_of(**of_updates([0.3, 2.0, 50.0, NAN, NAN]), loss=[1, 2, 3, NAN, NAN])
    assert causes_of(rows) == [("learning rate", 0), ("not finite", 3)]


def test_a_single_long_update_is_a_high_rate_if_nan_follows():
    ratios = [0.01] * 10 + [0.3, 0.01, 0.01, 0.01, 0.01]
    assert found(rows_of(**of_updates(ratios)), "learning rate") is None
    ratios[11:] = [NAN] * 4
    assert found(rows_of(**of_updates(ratios)), "learning rate").step == 10


def test_a_nan_that_the_optimizer_makes_is_named():
    """In the last row of a log the gradient does not show it yet."""
    rows = rows_of(loss=calm(40), **of_updates(np.full(40, 0.01)))
    rows = [
        row | {"health/gradients/norm/w": 1.0 + i % 3} for i, row in enumerate(rows)
    ]
    assert diagnose(rows) == []
    rows[39]["health/updates/norm/a"] = INF
    (finding,) = diagnose(rows)
    assert (finding.cause, finding.step) == ("not finite", 39)
    assert finding.evidence == "NaN or inf begins in 'health/updates'"
    # A gradient that is broken itself is named before it.
    rows[39]["health/gradients/norm/w"] = NAN
    (finding,) = diagnose(rows)
    names = "'health/gradients/w', 'health/updates'"
    assert finding.evidence == f"NaN or inf begins in {names}"


def test_weights_of_0_have_no_rate():
    columns = of_updates(np.full(30, 1.0))
    columns["health__updates__weight_norm__a"] *= 0
    assert found(rows_of(**columns), "learning rate") is None
    # Nor do they make that of the next row a long one.
    columns = of_updates([1.0] * 4 + [0.12] + [0.01] * 20)
    columns["health__updates__weight_norm__a"][:4] = 0
    assert found(rows_of(**columns), "learning rate") is None


def test_subnormals_count_among_what_is_not_0():
    columns = {
        "health__norm__a": calm(10),
        "health__zeros__a": np.full(10, 0.5),
        "health__subnormals__a": np.full(10, 0.13),
        "health__zeros__b": np.zeros(10),
        "health__subnormals__b": np.full(10, 0.2),
        "health__zeros__c": np.ones(10),
        "health__subnormals__c": np.zeros(10),
    }
    (finding,) = diagnose(rows_of(**columns))
    assert (finding.cause, finding.step) == ("underflow", 4)
    assert finding.value == pytest.approx(0.26) and " 'health/a' " in finding.evidence


def test_a_summary_takes_no_zeros_of_another_tensor_for_underflow():
    """The largest share of zeros is of one tensor, the largest of subnormals of
    another, in which 10 % of the elements are subnormal.
    """
    columns = {
        "health__norm": calm(10),
        "health__zeros": np.full(10, 0.9),
        "health__subnormals": np.full(10, 0.1),
    }
    assert diagnose(rows_of(**columns)) == []
    # More than a quarter of all elements is underflow with any zeros.
    columns["health__subnormals"] = np.full(10, 0.3)
    (finding,) = diagnose(rows_of(**columns))
    assert finding.cause == "underflow" and finding.value == pytest.approx(0.3)


def test_dead_rows_are_held_against_those_of_the_first_rows():
    shares = [NAN] * 5 + [0.4] * 5 + [0.55] * 5 + [0.7] * 5
    rows = rows_of(health__norm__a=calm(20), health__dead_rows__e=shares)
    (finding,) = diagnose(rows)
    assert (finding.cause, finding.step) == ("dead embedding", 15)
    assert finding.value == pytest.approx(0.3) and "'health/e'" in finding.evidence


def test_a_tensor_without_a_gradient_is_named_from_its_last_one_on():
    gone = np.where(np.arange(100) < 60, 1.0, 0.0)
    columns = {
        "health__norm__a": calm(100),
        "health__norm__gone": gone,
        # In turns, and only at first, as the B of LoRA.
        "health__norm__turns": np.arange(100) % 2,
        "health__norm__late": np.arange(100) >= 30,
    }
    (finding,) = diagnose(rows_of(**columns))
    assert (finding.cause, finding.step, finding.rows) == ("no gradient", 60, 40)
    assert finding.evidence.startswith("the gradient of 'health/gone' is 0 from")
    # Not yet for long.
    columns["health__norm__gone"] = np.arange(100) < 95
    assert diagnose(rows_of(**columns)) == []
    columns["health__norm__never"] = np.zeros(100)
    finding = found(rows_of(**columns), "no gradient")
    assert finding.step == 0 and "'health/never'" in finding.evidence


def test_weights_that_grow_are_named():
    lengths = 1.02 ** np.arange(300.0)
    columns = of_updates(np.full(300, 0.01))
    columns["health__updates__weight_norm__a"] = lengths
    columns["health__updates__norm__a"] = 0.01 * lengths
    finding = found(rows_of(**columns), "growing weights")
    # The median of five rows over that of rows 60 to 119, whose middle is 89.5.
    steps = np.arange(300)
    first = steps[1.02 ** (steps - 2 - 89.5) > 2][0]
    assert finding.step == first
    # The median of the last five rows.
    assert finding.value == pytest.approx(1.02 ** (297 - 89.5), rel=1e-3)
    # Those that grow by as much in each step are not.
    columns["health__updates__weight_norm__a"] = np.arange(1.0, 301.0)
    columns["health__updates__norm__a"] = np.ones(300)
    assert found(rows_of(**columns), "growing weights") is None


def test_weights_that_shrink_are_named_and_not_the_rate():
    lengths = np.append(np.full(50, 8.0), 8.0 * 0.9 ** np.arange(50))
    columns = of_updates(np.full(100, 0.01))
    columns["health__updates__weight_norm__a"] = lengths
    columns["health__updates__norm__a"] = np.full(100, 0.08)
    rows = rows_of(**columns)
    finding = found(rows, "shrinking weights")
    assert finding.step == 50 + np.argmax(0.9 ** np.arange(50) < 0.5)
    assert finding.value == pytest.approx(0.9**-49)
    # Beside such weights any update is long.
    assert np.any(0.08 / lengths > 0.075)
    assert found(rows, "learning rate") is None
    # Weight decay of usual strength.
    columns["health__updates__weight_norm__a"] = np.geomspace(8.0, 2.0, 100)
    assert found(rows_of(**columns), "shrinking weights") is None


def test_updates_that_are_rounded_away_are_named():
    columns = of_updates(np.full(40, 1e-4))
    columns["health__updates__ratio__a"] = np.full(40, 2**-12)
    columns["health__updates__ratio__b"] = np.full(40, 2**-8)
    columns["health__updates__ratio__frozen"] = np.zeros(40)
    for name in ("a", "b", "frozen"):
        columns[f"health__updates__rounding__{name}"] = np.full(40, 2**-7)
    finding = found(rows_of(**columns), "lost updates")
    assert (finding.step, finding.rows, finding.value) == (0, 40, 8)
    text = "updates of 'health/updates/a' are 8 times too small"
    assert finding.evidence.startswith(text)
    # At the end of a schedule they are always.
    columns["health__updates__ratio__a"][:11] = 2**-8
    assert found(rows_of(**columns), "lost updates") is None


def test_updates_that_are_rounded_away_are_named_where_most_steps_have_none():
    columns = of_updates(np.full(200, 1e-4))
    ratio = np.full(200, 2**-12)
    # As with optax.MultiSteps(optimizer, 4).
    ratio[np.arange(200) % 4 > 0] = 0
    columns["health__updates__ratio__a"] = ratio
    columns["health__updates__rounding__a"] = np.full(200, 2**-7)
    finding = found(rows_of(**columns), "lost updates")
    assert (finding.rows, finding.value) == (50, 8)


LOGITS = (
    "attn/max_logits attention_logits layer_3/attention/max_logit qk/Logits/max "
    "clip/logits/norm_before clip/qk/norm_before/layer record/logits/norm/layer"
)
OTHERS = (
    "data/num_logits logits/chosen max_output_logit steps_with_logits logit_scale "
    "clip/logits/limit clip/logits/factor clip/norm_after/logits max_logit "
    "attention/logits_count clip/norm_before/logits record/norm/logits "
    "clip/logits/clipped_count"
)


def test_logits_are_of_attention_by_their_name():
    row = {"loss": 1.0}
    for name in LOGITS.split():
        found_causes = causes_of([row | {name: 300.0}] * 3)
        assert found_causes == [("attention logits", 0)], name
        assert diagnose([row | {name: 100.0}] * 3) == [], name
    for name in OTHERS.split():
        assert found([row | {name: 300.0}] * 3, "attention logits") is None, name


def test_logits_of_qk_clip_are_no_norms():
    clipper = optaxclip.qk_clip(None, queries={"q": 1}, keys={"k": 1})
    optimizer = optax.named_chain(("logits", clipper))
    params = {"q": jnp.ones((1, 2)), "k": jnp.ones((1, 2))}
    state = optimizer.init(params)
    rows = []
    for logit in changed(calm(), {40: 90.0}):
        logits = jnp.full(2, logit)
        _, state = optimizer.update(params, state, params, max_logits=logits)
        rows.append(optaxclip.metrics(state, floats=True) | {"loss": 1.0})
    report = examine(rows)
    assert ["attention logits"] not in report.not_judged.values()
    assert "bad batch" in report.not_judged["a gradient norm"]
    assert len(report.looked_at) == len(set(report.looked_at))
    # Beside norms they are no second column of them.
    rows = [row | {"clip/norm_before": x} for row, x in zip(rows, calm())]
    assert diagnose(rows) == []


def test_one_step_without_an_update_hides_no_rounding():
    columns = of_updates(np.full(40, 1e-4))
    columns["health__updates__ratio__w"] = changed(np.full(40, 1e-5), {3: 0.0})
    columns["health__updates__rounding__w"] = np.full(40, 2**-7)
    assert found(rows_of(**columns), "lost updates").step == 0


def test_the_worst_value_is_said_of_its_own_column():
    columns = {
        "layer0__attn__max_logit": changed(calm(), {10: 101.0}),
        "layer5__attn__max_logit": changed(calm(), {40: 5000.0}),
    }
    finding = found(rows_of(**columns), "attention logits")
    assert (finding.step, finding.worst, finding.value) == (10, 40, 5000.0)
    assert "'layer5/attn/max_logit'" in finding.evidence
    assert "layer0" not in finding.evidence


def test_a_jump_in_the_last_rows_hides_no_change_of_scale():
    norms = noisy(spread=0.01)
    norms[100:] *= 8
    norms[-8:] *= 100
    assert ("change of scale", 100) in causes_of(rows_of(grad_norm=norms))


def test_tensors_that_are_never_logged_together_are_read():
    rows = [{"grad_norm/a": 1.0}, {"grad_norm/b": 2.0}] * 30
    assert diagnose(rows) == []
