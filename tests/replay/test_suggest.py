"""Suggestions are fixed limits and rules, with what each does to recorded norms."""

from inspect import signature

import numpy as np
import optax
import pytest

import optaxclip
from optaxclip.replay import _run, suggest
from tests import oracle_rules as oracle

# As many finite norms in each test, so that each rule is compiled once.
SIZE = 64
NORMS = np.asarray(oracle.histories()["broken"], np.float32)
GOOD = np.isfinite(NORMS) & (NORMS > 0)
NORMS = NORMS[: np.flatnonzero(GOOD)[SIZE]]
SKIP_STEP = "optaxclip.skip_step(optimizer, on_loss=False)"
TWO_MEDIANS = (
    "optaxclip.clip_by_global_norm("
    "optaxclip.rules.windowed_quantile(0.5, 100, factor=2.0))"
)


def test_suggestions_count_the_steps_over_each_limit():
    rows = {row.rule: row for row in suggest(NORMS)}
    good = NORMS[np.isfinite(NORMS) & (NORMS > 0)].astype(np.float64)
    fixed = [row for name, row in rows.items() if name.endswith(f"({row.limit:g})")]
    assert good.size == SIZE < NORMS.size and len(fixed) >= 4
    for row in fixed:
        assert row.clip_rate == pytest.approx(np.mean(good > np.float32(row.limit)))
    rates = [row.clip_rate for row in fixed]
    assert rates == sorted(rates, reverse=True)
    rule = oracle.windowed_quantile(0.5, 100, factor=2.0)
    over = good > np.asarray(oracle.limits(rule, good)) * (1 + 1e-6)
    found = rows[TWO_MEDIANS].clip_rate
    assert found == pytest.approx(np.mean(over), abs=0.01) and found > 0.05
    for row in rows.values():
        eval(row.rule, {"optaxclip": optaxclip, "optimizer": optax.sgd(0.1)})


def test_rules_have_the_defaults_of_the_clippers(monkeypatch):
    rules = []
    monkeypatch.setattr(
        _run, "suggestion_of", lambda _, rule, *__, **___: rules.append(rule)
    )
    _run._suggested_rules(NORMS, 1)
    _, zclip, skip = rules
    defaults = signature(optaxclip.zclip).parameters
    assert zclip.decay == defaults["decay"].default
    assert zclip.warmup == defaults["warmup"].default
    defaults = signature(optaxclip.skip_step).parameters
    assert skip.window == defaults["window"].default


def test_several_histories_at_once_are_refused():
    with pytest.raises(ValueError, match=r"as \[steps\], got 4 in .* shape \(2, 2\)"):
        suggest([[1.0, 2.0], [3.0, 4.0]])


def test_skipped_steps_are_multiplied_by_0():
    norms = [1.0 + i % 7 / 10 for i in range(SIZE)]
    norms[-1] = 50.0
    *_, skip = suggest(norms)
    assert "skip_step" in skip.rule
    assert skip.clip_rate == 1 / SIZE and skip.mean_factor == 0


def test_suggestions_are_quantiles_five_medians_and_rules():
    good = np.concatenate([np.arange(1.0, 64.0), [300.0]])
    norms = np.concatenate([good[:-1], [np.nan, 0.0, 300.0]])
    rows = {row.rule: row for row in suggest(norms)}
    fixed = [*np.quantile(good, (0.5, 0.9, 0.95, 0.99)), 5 * np.median(good)]
    fixed = sorted(float(f"{limit:.3g}") for limit in fixed)
    assert fixed == [32.5, 57.7, 60.8, 151, 162]
    found = [row.limit for row in list(rows.values())[:5]]
    assert found == np.float32(fixed).tolist()
    row = rows["optaxclip.clip_by_global_norm(162)"]
    assert (row.clip_rate, row.mean_factor) == pytest.approx((1 / 64, 162 / 300))
    last = good[:-1]
    for name, limit in {
        TWO_MEDIANS: 2 * np.median(last),
        SKIP_STEP: np.mean(last) + 6 * np.std(last, ddof=1),
    }.items():
        assert rows[name].limit == pytest.approx(limit), name
    # The 64th norm is the first that skip_step can judge.
    alone = {row.rule: row for row in suggest(np.ones(64))}[SKIP_STEP]
    assert (alone.limit, alone.mean_factor) == (1.0, 1.0)


def test_a_limit_among_the_norms_of_broken_steps_is_not_recommended():
    # 1 % of the steps are above 5000, and 6 % are broken.
    broken = 1000.0 * np.arange(1, 7)
    norms = [*np.linspace(0.5, 1.5, 94), *broken]
    (best,) = [row for row in suggest(norms) if row.is_guard]
    assert best.limit == pytest.approx(5 * np.median(norms), 1e-3)
    assert best.clip_rate == pytest.approx(6 / 100)


def test_a_limit_that_clips_many_steps_is_no_guard():
    # Two networks take turns, one step of three and two of three.
    norms = np.random.default_rng(0).uniform(0.5, 1.5, size=300)
    norms[::3] *= 1000.0
    assert not any(row.is_guard for row in suggest(norms))


def test_no_limit_is_recommended_from_fewer_than_100_norms():
    norms = np.random.default_rng(0).uniform(size=100)
    assert any(row.is_guard for row in suggest(norms))
    # Norms of 0 do not count.
    norms[0] = 0.0
    assert not any(row.is_guard for row in suggest(norms))


def test_norms_that_never_change_have_no_recommendation():
    """They may be those after a clip, or of a log that repeats its last one."""
    rows = suggest(np.ones(SIZE))
    assert not any(row.is_guard for row in rows)
    # The quantiles are one limit.
    assert [row.limit for row in rows[:2]] == [1.0, 5.0] and len(rows) == 5


def test_the_distance_of_rows_is_a_whole_number():
    for every in (0, 1.5):
        with pytest.raises(ValueError, match="suggest: every must be"):
            suggest(np.ones(SIZE), every=every)
