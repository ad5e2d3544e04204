"""Replay: a rule over recorded norms does what it would do in a run; logs are read; the command prints its table and draws its picture."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from matplotlib.figure import Figure

import optaxclip
from optaxclip.replay.__main__ import main
from optaxclip.replay.plot import plot_history
from tests import oracle_rules as oracle

NORMS = np.asarray(oracle.histories()["broken"][:150], np.float32)


@pytest.mark.parametrize("shrink", [None, optaxclip.smooth(2.0), optaxclip.drop, optaxclip.normalize])
@pytest.mark.parametrize("rule", [optaxclip.z_score(1.0), 0.9, None], ids=["z-score", "fixed", "none"])
def test_a_replay_is_what_the_clipper_does_in_a_run(rule, shrink):
    clipper = optaxclip.clip_by_global_norm(rule, shrink=shrink)

    @jax.jit
    def both(norms):
        _, states = jax.lax.scan(lambda state, grad: (clipper.update(grad, state)[1],) * 2, clipper.init(norms[:1]), norms[:, None])
        return states, optaxclip.replay(rule, norms, shrink=shrink)

    states, result = both(NORMS)
    finite = np.isfinite(NORMS)
    # Two programs, which XLA may round differently: within four spacings of float32, where one rule takes about as many roundings in a step.
    np.testing.assert_allclose(result.limits, states.limit, rtol=4 * np.finfo(np.float32).eps)
    np.testing.assert_allclose(np.asarray(result.scales)[finite], states.scale[finite], rtol=1e-6)
    np.testing.assert_array_equal(np.cumsum(result.clipped), states.clipped)
    assert np.isnan(np.asarray(result.scales)[~finite]).all()


def test_a_thousand_rules_at_once():
    quantiles = np.linspace(0, 1, 1000, dtype=np.float32)

    def rate(quantile):
        return optaxclip.replay(optaxclip.windowed_quantile(quantile, 50), NORMS).clipped.mean()

    rates = np.asarray(jax.jit(jax.vmap(rate))(quantiles))
    alone = [float(jax.jit(rate)(quantile)) for quantile in quantiles[[0, 500, 999]]]
    np.testing.assert_allclose(rates[np.array([0, 500, 999])], alone, rtol=1e-6)
    assert np.all(np.diff(rates) <= 0) and rates[0] > 0.5


def test_the_norms_of_a_real_run_can_be_replayed():
    """metrics() of every step, written as JSON lines: what a fixed limit would have done to a run that was not clipped is what it did where nothing depends on it."""
    optimizer = optax.chain(optaxclip.clip_by_global_norm(1.0), optax.sgd(0.0))
    grads = jnp.asarray(NORMS[np.isfinite(NORMS)])[:, None]
    _, history = jax.lax.scan(lambda state, grad: (lambda s: (s, optaxclip.metrics(s)))(optimizer.update(grad, state)[1]), optimizer.init(grads[0]), grads)
    np.testing.assert_array_equal(optaxclip.replay(1.0, history["clip/norm_before"]).clipped, np.diff(history["clip/clipped_count"], prepend=0) > 0)


def test_suggestions_count_the_steps_over_each_limit():
    rows = {row.rule: row for row in optaxclip.suggest(NORMS)}
    good = NORMS[np.isfinite(NORMS) & (NORMS > 0)].astype(np.float64)
    fixed = [row for name, row in rows.items() if name.startswith("clip_by_global_norm(") and "window" not in name]
    assert len(fixed) >= 4
    for row in fixed:
        assert f"{row.limit:g}" in row.rule
        assert row.clip_rate == pytest.approx(np.mean(good > np.float32(row.limit)))
    assert [row.clip_rate for row in fixed] == sorted((row.clip_rate for row in fixed), reverse=True)
    limits = np.asarray(oracle.limits(oracle.windowed_quantile(float(np.float32(0.1)), 10_000, current=True), good))
    assert rows["autoclip(10)"].clip_rate == pytest.approx(np.mean(good > limits * (1 + 1e-6)), abs=0.01)
    for row in rows.values():
        eval(row.rule.replace("skip_step(...)", "skip_step(optax.sgd(0.1))"), {"optax": optax, **vars(optaxclip)})


def write_csv(path, column="clip/norm_before", norms=NORMS):
    path.write_text("\n".join([f"step,{column},loss", *(f"{step},{norm},1.0" for step, norm in enumerate(norms))]) + "\n")
    return path


def write_lines(path):
    rows = [{"step": 0, "loss": 2.0}, *({"step": step, "grad_norm": float(norm)} for step, norm in enumerate(NORMS))]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    return path


def test_logs_are_read_whatever_they_are(tmp_path):
    for path in (write_csv(tmp_path / "a.csv"), write_csv(tmp_path / "b.csv", "clip_0/norm_before"), write_lines(tmp_path / "c.jsonl")):
        column = "clip_0/norm_before" if path.stem == "b" else None
        np.testing.assert_allclose(optaxclip.read_history(path, column), NORMS, rtol=1e-6)


def test_a_log_that_cannot_be_read_says_why(tmp_path):
    with pytest.raises(ValueError, match=r"read_history: column='norms' is not in .*a\.csv, which has 'step', 'clip/norm_before', 'loss'"):
        optaxclip.read_history(write_csv(tmp_path / "a.csv"), "norms")
    with pytest.raises(ValueError, match=r"column=None is not in .* Name the column of the gradient norm"):
        optaxclip.read_history(write_csv(tmp_path / "b.csv", "unknown"))
    (tmp_path / "c.jsonl").write_text('{"norm": 1.0}\nnorm 2\n')
    with pytest.raises(ValueError, match=r"line 2 of .*c\.jsonl must be a JSON object"):
        optaxclip.read_history(tmp_path / "c.jsonl")
    (tmp_path / "d.csv").write_text("norm\n1.0\nhigh\n")
    with pytest.raises(ValueError, match=r"the column 'norm' of .*d\.csv must hold numbers: could not convert string to float: 'high'"):
        optaxclip.read_history(tmp_path / "d.csv")
    with pytest.raises(ValueError, match="suggest: norms must hold at least two finite norms above 0, got 1"):
        optaxclip.suggest([1.0, np.nan])
    for norms, shape in ((1.0, r"\(\)"), ([], r"\(0,\)")):
        with pytest.raises(ValueError, match=f"replay: norms must be a history, one norm for each step, got an array of shape {shape}"):
            optaxclip.replay(1.0, norms)


def test_the_command_prints_a_table_and_draws_a_picture(tmp_path, capsys):
    main([str(write_csv(tmp_path / "run.csv"))])
    printed = capsys.readouterr().out
    assert f"150 steps, {np.sum(~np.isfinite(NORMS))} of them NaN or inf" in printed
    assert "steps clipped" in printed and "zclip()" in printed and "can not say" in printed
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit, match=r"nowhere\.csv"):
        main([str(tmp_path / "nowhere.csv")])


def test_the_command_runs_without_a_warning(tmp_path):
    done = subprocess.run([sys.executable, "-W", "error", "-m", "optaxclip.replay", write_csv(tmp_path / "run.csv")], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_the_picture_has_norms_limits_and_clipped_steps():
    result = optaxclip.replay(optaxclip.z_score(1.0), NORMS)
    axis = plot_history(result)
    labels = [line.get_label() for line in axis.lines]
    assert labels[:2] == ["norm before clipping", "limit"] and labels[3] == "NaN or inf"
    assert len(axis.lines[2].get_xdata()) == int(result.clipped.sum())
    own = Figure().add_subplot()
    assert plot_history(NORMS, axis=own) is own
    with pytest.raises(ValueError, match=r"must be \[steps\] of one length"):
        plot_history(NORMS, NORMS[:3])
