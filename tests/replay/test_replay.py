"""A replay is what the clipper does in a run, and suggestions are drawn from it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from tests import oracle_rules as oracle
from tests.helpers import apply
from tests.replay.logs import NORMS


@pytest.mark.parametrize(
    "shrink",
    [
        None,
        optaxclip.shrinks.smooth(2.0),
        optaxclip.shrinks.drop,
        optaxclip.shrinks.normalize,
    ],
)
@pytest.mark.parametrize(
    "rule", [optaxclip.rules.z_score(1.0), 0.9, None], ids=["z-score", "fixed", "none"]
)
def test_a_replay_is_what_the_clipper_does_in_a_run(rule, shrink):
    clipper = optaxclip.clip_by_global_norm(rule, shrink=shrink)

    @jax.jit
    def both(norms):
        _, states = jax.lax.scan(
            lambda state, grad: (clipper.update(grad, state)[1],) * 2,
            clipper.init(norms[:1]),
            norms[:, None],
        )
        return states, optaxclip.replay.run(rule, norms, shrink=shrink)

    states, result = both(NORMS)
    finite = np.isfinite(NORMS)
    # Two programs, which XLA may round differently: within four spacings of float32,
    # where one rule takes about as many roundings in a step.
    np.testing.assert_allclose(
        result.limits, states.limit, rtol=4 * np.finfo(np.float32).eps
    )
    np.testing.assert_allclose(
        np.asarray(result.factors)[finite], states.factor[finite], rtol=1e-6
    )
    np.testing.assert_array_equal(np.cumsum(result.clipped), states.clipped)
    assert np.isnan(np.asarray(result.factors)[~finite]).all()


@pytest.mark.parametrize(
    ("norm", "limit", "shrink"),
    [(3e38, 1.0, None), (1.2e-38, 10.0, optaxclip.shrinks.normalize)],
)
def test_no_factor_of_a_replay_is_0_or_inf_beside_a_limit(norm, limit, shrink):
    (factor,) = optaxclip.replay.run(limit, [norm], shrink=shrink).factors
    _, state = apply(
        optaxclip.clip_by_global_norm(limit, shrink=shrink), jnp.array([norm])
    )
    assert 0 < factor < np.inf and factor == state.factor


@pytest.mark.slow
def test_a_thousand_rules_at_once():
    quantiles = np.linspace(0, 1, 1000, dtype=np.float32)

    def rate(quantile):
        return optaxclip.replay.run(
            optaxclip.rules.windowed_quantile(quantile, 50), NORMS
        ).clipped.mean()

    rates = np.asarray(jax.jit(jax.vmap(rate))(quantiles))
    alone = [float(jax.jit(rate)(quantile)) for quantile in quantiles[[0, 500, 999]]]
    np.testing.assert_allclose(rates[np.array([0, 500, 999])], alone, rtol=1e-6)
    assert np.all(np.diff(rates) <= 0) and rates[0] > 0.5


@pytest.mark.slow
def test_the_norms_of_a_real_run_can_be_replayed():
    """metrics() of every step, written as JSON lines: what a fixed limit would have
    done to a run that was not clipped is what it did where nothing depends on it.
    """
    optimizer = optax.chain(optaxclip.clip_by_global_norm(1.0), optax.sgd(0.0))
    grads = jnp.asarray(NORMS[np.isfinite(NORMS)])[:, None]
    _, history = jax.lax.scan(
        lambda state, grad: (lambda s: (s, optaxclip.metrics(s)))(
            optimizer.update(grad, state)[1]
        ),
        optimizer.init(grads[0]),
        grads,
    )
    np.testing.assert_array_equal(
        optaxclip.replay.run(1.0, history["clip/norm_before"]).clipped,
        np.diff(history["clip/clipped_count"], prepend=0) > 0,
    )


@pytest.mark.slow
def test_suggestions_count_the_steps_over_each_limit():
    rows = {row.rule: row for row in optaxclip.replay.suggest(NORMS)}
    good = NORMS[np.isfinite(NORMS) & (NORMS > 0)].astype(np.float64)
    fixed = [
        row
        for name, row in rows.items()
        if name.startswith("optaxclip.clip_by_global_norm(") and "window" not in name
    ]
    assert len(fixed) >= 4
    for row in fixed:
        assert f"{row.limit:g}" in row.rule
        assert row.clip_rate == pytest.approx(np.mean(good > np.float32(row.limit)))
    assert [row.clip_rate for row in fixed] == sorted(
        (row.clip_rate for row in fixed), reverse=True
    )
    limits = np.asarray(
        oracle.limits(
            oracle.windowed_quantile(float(np.float32(0.1)), 10_000, current=True), good
        )
    )
    assert rows["optaxclip.autoclip(10)"].clip_rate == pytest.approx(
        np.mean(good > limits * (1 + 1e-6)), abs=0.01
    )
    for row in rows.values():
        eval(row.rule, {"optaxclip": optaxclip, "optimizer": optax.sgd(0.1)})


def test_skipped_steps_are_multiplied_by_0():
    norms = [1.0 + i % 7 / 10 for i in range(300)]
    norms[200] = 50.0
    *_, skip = optaxclip.replay.suggest(norms)
    assert "skip_step" in skip.rule
    assert skip.clip_rate > 0 and skip.mean_factor == 0


def test_replay_keeps_64_bits_and_names_its_rule():
    with jax.enable_x64(True):
        assert (
            optaxclip.replay.run(1.0, np.array([1.0, 2.0])).limits.dtype == jnp.float64
        )
        assert (
            optaxclip.replay.run(1.0, np.array([1.0, 2.0], np.float16)).limits.dtype
            == jnp.float32
        )
    with pytest.raises(
        ValueError, match=r"^replay.run: rule must be at least 0, got -1.0"
    ):
        optaxclip.replay.run(-1.0, [1.0])
    with pytest.raises(
        ValueError,
        match=r"^suggest: norms must hold at least two finite norms above 0, got 1",
    ):
        optaxclip.replay.suggest([1.0, 0.0, np.nan, np.inf])


SKIP_STEP = "optaxclip.skip_step(optimizer, on_loss=False)"


@pytest.mark.slow
def test_suggestions_are_quantiles_five_medians_and_rules():
    good = np.concatenate([np.arange(1.0, 64.0), [300.0]])
    rows = {
        row.rule: row
        for row in optaxclip.replay.suggest(
            np.concatenate([good[:-1], [np.nan, 0.0, 300.0]])
        )
    }
    fixed = sorted(
        {
            float(f"{limit:.3g}")
            for limit in (
                *np.quantile(good, (0.5, 0.9, 0.95, 0.99)),
                5 * np.median(good),
            )
        }
    )
    assert fixed == [32.5, 57.7, 60.8, 151, 162]
    assert [row.limit for row in list(rows.values())[: len(fixed)]] == np.float32(
        fixed
    ).tolist()
    assert rows["optaxclip.clip_by_global_norm(162)"].clip_rate == pytest.approx(1 / 64)
    assert rows["optaxclip.clip_by_global_norm(162)"].mean_factor == pytest.approx(
        162 / 300
    )
    assert rows["optaxclip.autoclip(10)"].limit == pytest.approx(np.quantile(good, 0.1))
    assert rows[
        "optaxclip.clip_by_global_norm(optaxclip.rules.windowed_quantile(0.9, 1000))"
    ].limit == pytest.approx(np.quantile(good[:-1], 0.9))
    assert rows[SKIP_STEP].limit == pytest.approx(
        np.mean(good[:-1]) + 6 * np.std(good[:-1], ddof=1)
    )
    alone = optaxclip.replay.suggest(
        np.ones(64)
    )  # the 64th norm is the first that skip_step can judge
    by_name = {row.rule: row for row in alone}
    assert by_name[SKIP_STEP].limit == 1.0 and by_name[SKIP_STEP].mean_factor == 1.0
