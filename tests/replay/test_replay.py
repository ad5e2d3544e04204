"""Replay: a rule over recorded norms does what it would do in a run; logs are read; the
command prints its table and draws its picture.
"""

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
from optaxclip.replay import plot_history
from optaxclip.replay.__main__ import main
from tests import oracle_rules as oracle
from tests.helpers import apply

NORMS = np.asarray(oracle.histories()["broken"][:150], np.float32)


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


def write_csv(path, column="clip/norm_before", norms=NORMS):
    path.write_text(
        "\n".join(
            [
                f"step,{column},loss",
                *(f"{step},{norm},1.0" for step, norm in enumerate(norms)),
            ]
        )
        + "\n"
    )
    return path


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


@pytest.mark.slow
def test_the_command_prints_a_table_and_draws_a_picture(tmp_path, capsys):
    main([str(write_csv(tmp_path / "run.csv"))])
    printed = capsys.readouterr().out
    assert f"150 steps, {np.sum(~np.isfinite(NORMS))} of them NaN or inf" in printed
    assert (
        "steps clipped" in printed and "zclip()" in printed and "estimates" in printed
    )
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit, match=r"nowhere\.csv"):
        main([str(tmp_path / "nowhere.csv")])


@pytest.mark.slow
def test_the_command_runs_without_a_warning(tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "error",
            "-m",
            "optaxclip.replay",
            write_csv(tmp_path / "run.csv"),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_the_picture_has_norms_limits_and_clipped_steps():
    result = optaxclip.replay.run(optaxclip.rules.z_score(1.0), NORMS)
    axis = plot_history(result)
    labels = [line.get_label() for line in axis.lines]
    assert labels[:2] == ["norm before clipping", "limit"] and labels[3] == "NaN or inf"
    assert len(axis.lines[2].get_xdata()) == int(result.clipped.sum())
    own = Figure().add_subplot()
    assert plot_history(NORMS, axis=own) is own
    with pytest.raises(ValueError, match=r"must be \[steps\] of one length"):
        plot_history(NORMS, NORMS[:3])


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


def log_of(path, norms, column="norm"):
    path.write_text(
        "\n".join(
            [f"step,{column}", *(f"{step},{norm}" for step, norm in enumerate(norms))]
        )
        + "\n"
    )
    return path


@pytest.mark.slow
def test_the_command_takes_a_column_and_a_picture(tmp_path, capsys):
    norms = [*np.linspace(1, 9, 9), 1000.0, np.nan, np.inf]
    log, picture = (
        log_of(tmp_path / "run.csv", norms, "length of the gradient"),
        tmp_path / "drawn.png",
    )
    main(["--column", "length of the gradient", "--picture", str(picture), str(log)])
    printed = capsys.readouterr().out
    assert "12 steps, 2 of them NaN or inf. Norms from 1 to 1000, median 5.5" in printed
    row = next(
        line
        for line in printed.splitlines()
        if line.endswith("optaxclip.clip_by_global_norm(5.5)")
    )
    assert row.split()[:2] == ["5.5", "50.0%"]
    assert (
        picture.exists()
        and not (tmp_path / "run.png").exists()
        and f"Picture: {picture}" in printed
    )


def test_the_command_ends_with_one_line_where_a_log_is_of_no_use(tmp_path):
    with pytest.raises(SystemExit, match=r"read_history: no column of"):
        main([str(log_of(tmp_path / "run.csv", [1.0, 2.0], "loss"))])
    with pytest.raises(SystemExit, match=r"suggest: norms must hold at least two"):
        main([str(log_of(tmp_path / "run.csv", [1.0]))])


@pytest.mark.slow
def test_the_command_does_without_matplotlib(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    main([str(log_of(tmp_path / "run.csv", [*range(1, 11), np.nan, np.inf]))])
    assert "No picture: matplotlib is not installed" in capsys.readouterr().out
    assert not (tmp_path / "run.png").exists()


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


def lines_of(axis):
    return {
        str(line.get_label()): (
            np.asarray(line.get_xdata(), float),
            np.asarray(line.get_ydata(), float),
        )
        for line in axis.lines
    }


def test_a_picture_of_bare_norms_marks_those_above_their_limits():
    norms = [1.0, 5.0, np.nan, 2.0]
    drawn = lines_of(plot_history(norms, [2.0, 2.0, 2.0, np.inf], word="skipped"))
    np.testing.assert_array_equal(drawn["norm before clipping"][1], [1, 5, np.nan, 2])
    np.testing.assert_array_equal(drawn["limit"][1], [2, 2, 2, np.nan])
    np.testing.assert_array_equal(drawn["skipped (25.0%)"], [[1], [5]])
    np.testing.assert_array_equal(drawn["NaN or inf"], [[2], [1]])
    assert np.isnan(lines_of(plot_history([1.0, np.inf]))["norm before clipping"][1][1])
    assert lines_of(plot_history([1.0, 2.0]))["clipped (0.0%)"][0].size == 0
    assert "clipped (0.0%)" in lines_of(plot_history([]))


def test_a_replay_picture_takes_other_limits_and_marks():
    axis = plot_history(
        optaxclip.replay.run(2.0, [1.0, 3.0]), [4.0, 5.0], [True, False]
    )
    drawn = lines_of(axis)
    np.testing.assert_array_equal(drawn["limit"][1], [4, 5])
    np.testing.assert_array_equal(drawn["clipped (50.0%)"], [[0], [1]])
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("step", "gradient norm")


@pytest.mark.parametrize(
    "wrong",
    [(np.ones((2, 2)),), (np.ones(2), np.ones(3)), (np.ones(2), np.ones(2), [True])],
    ids=["norms", "limits", "marks"],
)
def test_a_picture_wants_norms_limits_and_marks_of_one_length(wrong):
    with pytest.raises(
        ValueError,
        match=(
            r"plot_history: norms, limits and clipped must be \[steps\] of one length"
        ),
    ):
        plot_history(*wrong)
