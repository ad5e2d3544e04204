"""The examples on limits that learn and on the claims of papers run, for a few steps,
and keep what their docstrings promise.
"""

import math
from contextlib import redirect_stdout
from io import StringIO

import jax
import numpy as np
import pytest

import optaxclip
from examples import adaptive, headlines
from optaxclip.replay import __main__ as replay

BROKEN = [70, 85]
STARTS = (10.0, 14.0)


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("as_programs_run")]


def short_runs(folder, *only):
    """A hundred steps of some runs of a small network, with two broken batches, by
    name.
    """
    files = {"save": folder / "picture.png", "log": folder / "run.csv"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adaptive.char_rnn, "HIDDEN", 48)
        return {
            row.protection: row
            for row in adaptive.main(
                steps=100,
                first=BROKEN[0],
                every=BROKEN[1] - BROKEN[0],
                only=only,
                **files,
            )
        }


@pytest.fixture(scope="module")
def unprotected(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unprotected")
    return short_runs(folder, adaptive.CLEAN, "none"), folder


def test_broken_batches_do_harm_and_are_the_spikes(unprotected):
    rows, folder = unprotected
    assert list(rows) == [adaptive.CLEAN, "none"]
    assert rows["none"].final_loss > rows[adaptive.CLEAN].final_loss
    assert rows[adaptive.CLEAN].norm_spikes == 0
    assert (
        rows["none"].norm_spikes >= 1 / 50
    )  # the first for certain: it then is in the window of the second
    assert all(row.clip_rate == row.skipped == 0 for row in rows.values())
    assert (folder / "picture.png").stat().st_size > 10_000


def test_log_is_what_replay_reads(unprotected, capsys):
    log = unprotected[1] / "run.csv"
    norms = optaxclip.replay.read_history(log)
    assert norms.shape == (100,)
    assert set(BROKEN) < set(np.argsort(norms)[-10:])
    replay.main([str(log)])
    assert "zclip()" in capsys.readouterr().out


CLIPPERS = ["autoclip", "adagc"]
SKIPPERS = ["skip_spikes", "skip_step"]


@pytest.fixture(scope="module")
def protected(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            adaptive, "draw_both", lambda *args, **options: None
        )  # all is drawn; the runs without protection are made a picture of
        return short_runs(tmp_path_factory.mktemp("protected"), *CLIPPERS, *SKIPPERS)


@pytest.mark.parametrize("clipper", CLIPPERS)
def test_clippers_clip_and_skip_nothing(clipper, protected):
    row = protected[clipper]
    assert row.clip_rate >= len(BROKEN) / 100
    assert row.skipped == 0
    assert math.isfinite(row.final_loss) and math.isfinite(row.validation_loss)


@pytest.mark.parametrize("optimizer", SKIPPERS)
def test_broken_steps_are_skipped(optimizer, protected):
    row = protected[optimizer]
    assert row.broken_skipped == len(BROKEN)
    assert row.clip_rate == 0
    assert optimizer == "skip_spikes" or row.skipped == len(BROKEN)


def test_table_names_its_columns(capsys):
    adaptive.print_table(
        [adaptive.Row("zclip", 1.5, 1.6, 0.01, 0.02, 0.0, 0.03, 0.25, 12, 10)]
    )
    printed = capsys.readouterr().out
    for text in (
        "final loss",
        "validation",
        "spike score",
        "on clean steps",
        "clipped",
        "skipped",
        "1.00%",
        "2.00%",
        "3.00%",
        "25.0%",
        "12 (10)",
    ):
        assert text in printed, text


def test_spike_score_counts_what_is_seven_deviations_off():
    values = np.tile([1.0, -1.0], 150)  # mean 0, deviation 1 in any even window
    values[[200, 250]] = 7.5, -6.5
    assert adaptive.spike_score(values) == 1 / (300 - adaptive.WINDOW)


def test_spike_score_counts_nan():
    values = np.tile([1.0, -1.0], 150)
    values[-1] = np.nan
    assert adaptive.spike_score(values) == 1 / (300 - adaptive.WINDOW)


@pytest.fixture(scope="module")
def claims(tmp_path_factory):
    """Fewer runs, shorter ones, and fewer starts: (tails by noise and method, descents,
    what was printed, the picture).
    """
    picture, out = tmp_path_factory.mktemp("headlines") / "picture.png", StringIO()
    with redirect_stdout(out):
        tails, descents = headlines.main(
            seeds=8, steps=4000, starts=STARTS, save=picture
        )
    return (
        {(row.noise, row.method): row for row in tails},
        descents,
        out.getvalue(),
        picture,
    )


def test_headlines_prints_both_tables_and_draws(claims):
    tails, descents, printed, picture = claims
    assert list(tails) == [
        (noise, method)
        for noise in ("normal", "Weibull", "Burr")
        for method in ("SGD", "clipped SGD")
    ]
    assert tuple(row.start for row in descents) == STARTS
    assert "largest / median" in printed and "fixed / clipped" in printed
    assert picture.stat().st_size > 10_000


@pytest.mark.parametrize("noise", ["Weibull", "Burr"])
def test_clipping_shortens_heavy_tails(noise, claims):
    sgd, clipped = (claims[0][noise, method] for method in headlines.METHODS)
    assert sgd.jumps > clipped.jumps == 0
    assert sgd.largest / sgd.median > 2 > clipped.largest / clipped.median
    assert sgd.clipped_share == 0 < clipped.clipped_share < 0.002


def test_clipping_leaves_normal_noise_alone(claims):
    sgd, clipped = (claims[0]["normal", method] for method in headlines.METHODS)
    np.testing.assert_array_equal(sgd.distances, clipped.distances)
    assert sgd.largest < 1.5 * sgd.median


@pytest.mark.parametrize(
    ("noise", "quantile", "mean", "square"),
    [
        (
            headlines.weibull,
            lambda p: (-np.log1p(-p)) ** 5,
            math.gamma(6),
            math.gamma(11),
        ),
        (headlines.burr, lambda p: (1 - p) ** (-1 / 2.3) - 1, 1 / 1.3, 2 / (1.3 * 0.3)),
    ],
    ids=["Weibull", "Burr"],
)
def test_noise_has_its_distribution(noise, quantile, mean, square):
    drawn = np.asarray(noise(jax.random.key(1), (1_000_000,)), np.float64)
    # From the median on: what lies far below a mean of 120 is lost to float32, and is
    # next to nothing.
    shares = np.array([0.5, 0.9, 0.99, 0.9999])
    edges = (quantile(shares) - mean) / math.sqrt(square - mean**2)
    found = np.array([(drawn <= edge).mean() for edge in edges])
    # Five standard deviations of a share of a million.
    np.testing.assert_array_less(
        np.abs(found - shares), 5 * np.sqrt(shares * (1 - shares) / drawn.size)
    )


def test_clipped_descent_needs_far_fewer_steps(claims):
    descents = claims[1]
    for row in descents:
        # 1 / x^2 grows by 8 * step in a step, and the step may be 1 / (2 x0^2), hence
        # x0^2 / (4 x^2) steps to where 4 x^3 is small enough.
        expected = row.start**2 / 4 / (headlines.GRADIENT / 4) ** (2 / 3)
        assert expected <= row.fixed <= 1.05 * expected
        assert row.fixed / row.clipped > 100
        assert row.clipped <= row.kept <= row.clipped * row.start / descents[0].start


def test_reported_settings_arrive_as_reported(claims):
    for row in claims[1]:
        for step, limit, steps in (
            (row.fixed_step, np.inf, row.fixed),
            (row.clipped_step, row.limit, row.clipped),
        ):
            x, count = (
                np.append(
                    row.start
                    * np.random.default_rng(0).uniform(size=headlines.LANES - 1),
                    row.start,
                ),
                0,
            )
            arrived = np.zeros(x.shape, bool)
            while not arrived.all():
                slope = 4 * x**3
                x = x - step * slope * np.minimum(1, limit / np.abs(slope))
                arrived |= np.abs(4 * x**3) <= headlines.GRADIENT
                count += 1
            assert abs(count - steps) <= 1  # float32 there, float64 here
