"""What the doctor says of logs: causes, steps, numbers, and its command."""

import json
import re
import subprocess
import sys
from functools import partial
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip.doctor import CAUSES, diagnose, main

DOCS = Path(__file__).parents[2] / "docs"


def rows_of(**columns):
    """Rows of columns whose names have two underscores for a slash."""
    named = {name.replace("__", "/"): x for name, x in columns.items()}
    return [dict(zip(named, line)) for line in zip(*named.values())]


def calm(size=60):
    return 1.0 + 0.1 * np.arange(size) % 0.3


def test_a_leap_of_the_norm_is_a_bad_batch():
    norms, others = calm(), calm()
    norms[40] = 9.0
    rows = rows_of(health__norm__a=norms, health__norm__b=others)
    (found,) = diagnose(rows)
    total = np.hypot(norms, others)
    assert (found.cause, found.step, found.limit) == ("bad batch", 40, 5)
    assert found.value == pytest.approx(total[40] / total[20:40].max())
    # At the limit itself there is none.
    norms = np.ones(60)
    norms[40] = 5.0
    assert diagnose(rows_of(health__norm=norms)) == []


def test_a_leap_is_held_against_the_largest_of_20_norms():
    for before, row in ((20, 40), (21, 40), (10, 10), (9, 9)):
        norms = np.ones(60)
        norms[row] = 9.0
        norms[row - before] = 3.0 if row == 40 else 1.0
        found = [
            (x.cause, x.step, x.value) for x in diagnose(rows_of(health__norm=norms))
        ]
        # After 10 norms the first is judged. One that was 20 steps before counts, and
        # one before that does not.
        is_leap = before in (21, 10)
        assert found == [("bad batch", row, 9.0)] * is_leap


def test_two_rows_of_a_step_are_one_run():
    """As of loggers that write a row for each recorder."""
    rows = []
    for step, norm in enumerate([*np.ones(12), 9.0, *np.ones(7)]):
        rows.append({"step": step, "health/norm/w": norm})
        rows.append({"step": step, "loss": 1.0})
    assert [(x.cause, x.step) for x in diagnose(rows)] == [("bad batch", 12)]


def test_causes_of_a_resumed_run_are_in_the_order_of_the_log():
    steps = [*range(40), *range(30, 50)]
    rows = [{"step": step, "health/norm/w": 1.0} for step in steps]
    rows[35]["health/norm/w"], rows[42]["health/norm/w"] = 9.0, np.nan
    found = [(x.cause, x.step) for x in diagnose(rows)]
    assert found == [("bad batch", 35), ("not finite", 32)]


def test_a_norm_that_stays_in_the_new_place_is_one_finding():
    norms = np.ones(60)
    norms[30:] = 6.0
    (found,) = diagnose(rows_of(health__norm__a=norms))
    assert (found.step, found.value) == (30, 6)


def test_updates_of_a_tenth_of_the_weights_are_a_high_rate():
    lengths = np.full(30, 0.3)
    lengths[10:] = 0.6
    columns = {
        "health__updates__norm__a": lengths,
        "health__updates__norm__b": 0 * lengths,
        "health__updates__weight_norm__a": np.full(30, 3.0),
        "health__updates__weight_norm__b": np.full(30, 4.0),
    }
    (found,) = diagnose(rows_of(**columns))
    # The median of 5 is above in the third step.
    assert (found.cause, found.step) == ("learning rate", 12)
    assert found.value == pytest.approx(0.6 / 5)


def test_subnormals_count_among_what_is_not_0():
    columns = {
        "health__norm__a": np.ones(10),
        "health__zeros__a": np.full(10, 0.5),
        "health__subnormals__a": np.full(10, 0.13),
        "health__zeros__b": np.zeros(10),
        "health__subnormals__b": np.full(10, 0.2),
        "health__zeros__c": np.ones(10),
        "health__subnormals__c": np.zeros(10),
    }
    (found,) = diagnose(rows_of(**columns))
    assert (found.cause, found.step) == ("underflow", 4)
    assert found.value == pytest.approx(0.26) and found.evidence.endswith(" 'a'")


def test_rows_and_logits_have_their_own_limits():
    dead = [0.1] * 5 + [0.2] * 5
    logits = [100.0] * 8 + [101.0] * 2
    rows = rows_of(
        health__norm__a=np.ones(10), health__dead_rows__e=dead, max_logit=logits
    )
    found = [(each.cause, each.step, each.value) for each in diagnose(rows)]
    assert found == [("dead embedding", 5, 0.2), ("attention logits", 8, 101)]
    limits = rows_of(health__norm__a=np.ones(3), clip__logits__limit=[1e3] * 3)
    assert diagnose(limits) == []


def test_a_nan_is_bracketed_by_what_is_finite():
    layers = [f"blocks/{number}/w" for number in range(12)]
    rows = []
    for step in range(20):
        broken = step >= 15
        counts = {
            f"health/nonfinite/{name}": 3.0 * (broken and 2 <= number <= 10)
            for number, name in enumerate(layers)
        }
        norms = {f"health/norm/{name}": 1.0 for name in layers}
        rows.append({"step": 10 * step, **norms, **counts})
    (found,) = diagnose(rows)
    assert (found.cause, found.step, found.value) == ("not finite", 150, 3)
    # By number, not by letter: 1 and 11 are beside 2 and 10.
    assert found.evidence.endswith("beside them: 'blocks/1/w', 'blocks/11/w'")
    assert "'blocks/9/w', 'blocks/10/w';" in found.evidence


def test_a_norm_that_json_cannot_hold_is_not_finite(tmp_path):
    # W&B adds the extremes of each number.
    names = "health/norm/a", "health/norm/b", "health/norm/b__MIN", "health/norm/b__MAX"
    path = tmp_path / "run.jsonl"
    for broken in (float("nan"), float("inf"), None):
        rows = [dict.fromkeys(names, 1.0) for _ in range(9)]
        rows[7]["health/norm/b"] = broken
        path.write_text("\n".join(map(json.dumps, rows)))
        (found,) = diagnose(path)
        assert (found.step, found.cause) == (7, "not finite")
        assert found.evidence.endswith("elements of 'b'; finite beside them: 'a'")


def test_a_summary_does_not_tell_what_is_finite():
    (found,) = diagnose(rows_of(health__norm=[1] * 9, health__nonfinite=[0] * 8 + [3]))
    assert found.evidence.endswith("finite beside them: not known from a summary")


def test_steps_without_a_record_are_not_broken():
    # A summary in each step, and tensors in some.
    rows = rows_of(step=range(40), loss=calm(40), health__norm=np.ones(40))
    for row in rows[::10]:
        row["health/norm/a"] = 1.0
    # As pandas writes what is missing.
    for row in rows[1::10]:
        row["health/norm/a"] = None
    assert diagnose(rows) == []


def test_tensors_that_are_logged_now_and_then_hide_no_leap():
    rows = []
    for step, norm in enumerate(calm()):
        rows.append({"health/norm": norm, "health/nonfinite": 0.0})
        if step % 7 == 0:
            rows[-1] |= {"health/norm/a": norm, "health/nonfinite/a": 0.0}
    # A head of another name, after a while.
    rows += [{"health/norm/b": 1.0}] * 20
    assert diagnose(rows) == []
    rows[42]["health/norm"] = 50.0
    assert [(x.cause, x.step) for x in diagnose(rows)] == [("bad batch", 42)]


def test_weights_that_are_logged_now_and_then_are_held_against_their_steps():
    rows = [{"health/updates/norm/a": 1.0 + (n == 12)} for n in range(30)]
    for n in range(0, 30, 2):
        rows[n]["health/updates/weight_norm/a"] = 1.0 if n < 16 else 12.0
    found = diagnose(rows)
    assert [(x.cause, x.step, x.value) for x in found] == [("learning rate", 8, 1)]
    assert diagnose(rows[18:]) == []


def test_a_run_that_goes_on_from_a_checkpoint_does_not_hide_what_broke():
    first = [{"step": n, "health/norm/w": 1.0} for n in range(40)]
    first[35]["health/norm/w"] = 900.0
    for row in first[36:]:
        row |= {"health/norm/w": None, "health/nonfinite/w": 4}
    again = [{"step": n, "health/norm/w": 1.0} for n in range(30, 80)]
    wanted = [("bad batch", 35), ("not finite", 36)]
    for rows in (first, first + again):
        assert [(x.cause, x.step) for x in diagnose(rows)] == wanted


def test_a_leap_right_after_a_broken_step_is_seen():
    for broken in (None, float("nan"), float("inf")):
        norms = [*calm(30), broken, 9.0, *calm(29)]
        found = [(x.cause, x.step) for x in diagnose(rows_of(health__norm__w=norms))]
        # That of inf over the largest is no number.
        first = [] if broken is None else [("not finite", 30)]
        assert found == [*first, ("bad batch", 31)]


def test_updates_have_no_bad_batch_and_no_underflow():
    columns = {
        "health__norm": np.ones(40),
        "health__updates__norm": [*np.ones(30), 99.0, *np.ones(9)],
        "health__updates__zeros": np.zeros(40),
        "health__updates__subnormals": np.ones(40),
    }
    assert diagnose(rows_of(**columns)) == []


def test_a_column_of_logits_that_holds_something_else_is_left():
    row = {"health/norm": 1.0}
    for name in (
        "clip/logits/limit",
        "clip/logits/factor",
        "clip/logits/clipped_count",
        "logit_factor",
        "clip/norm_after/logits",
    ):
        assert diagnose([row | {name: 300.0}] * 10) == [], name
    for name in ("max_logit", "qk/Logits/max", "clip/logits/norm_before"):
        assert [x.cause for x in diagnose([row | {name: 300.0}])] == [
            "attention logits"
        ], name


def test_what_follows_norms_of_0_is_no_leap():
    norms = [*np.zeros(30), 1.0, 2.0]
    columns = {
        "health__norm": norms,
        "health__updates__norm": np.ones(32),
        "health__updates__weight_norm": np.zeros(32),
    }
    assert diagnose(rows_of(**columns)) == []


def test_groups_in_front_of_a_name_are_read():
    rows = rows_of(health__norm__w=[*np.ones(30), 9.0], loss=np.ones(31))
    run = "lively-sun-7 - "
    for front in ("train/", "a/b/", "train.", "ppo_update/", run, f"{run}train/"):
        renamed = [{front + name: x for name, x in row.items()} for row in rows]
        (found,) = diagnose(renamed)
        assert (found.cause, found.step) == ("bad batch", 30)
    (found,) = diagnose([{"train": row} for row in rows])
    assert found.step == 30


@pytest.mark.parametrize("order", ["step", "key"])
def test_long_tables_are_read(tmp_path, order):
    """A line for each metric, in the order of steps or of metrics, as MLflow writes."""
    names = ("health/norm/a", "health/norm/b")
    lines = [{"key": x, "value": 1.0, "step": n} for n in range(60) for x in names]
    lines[101]["value"] = 9.0
    # Some that come first, and are logged now and then.
    lines += [{"key": "eval", "value": 1.0, "step": n} for n in (0, 25, 50)]
    path = tmp_path / "log"
    path.write_text(json.dumps({"metrics": sorted(lines, key=lambda x: x[order])}))
    (found,) = diagnose(path)
    assert (found.cause, found.step) == ("bad batch", 50)


def test_rows_without_a_step_hide_nothing():
    norms = calm()
    norms[40] = 9.0
    rows = rows_of(step=10 * np.arange(60), health__norm__a=norms)
    for place in range(50, 0, -4):
        rows.insert(place, {"eval/loss": 1.0})
    assert [found.step for found in diagnose(rows)] == [400]


def test_layers_may_be_called_as_what_is_read():
    row = {
        "health/gradients/norm/block/norm/bias": 1.0,
        # Of a bias that starts at 0.
        "health/gradients/ratio/block/norm/bias": None,
        "health/gradients/ratio/logits": 300.0,
        "clip/clipped_count/logits": 300.0,
        "clip/norm_before/logits": 300.0,
        "record/norm/logits": 300.0,
        "clip/logits/limit/layer": 300.0,
    }
    assert diagnose([row] * 10) == []
    for column in ("clip/logits/norm_before/layer", "record/logits/norm/layer"):
        (found,) = diagnose([row | {column: 300.0}])
        assert found.cause == "attention logits"


def test_steps_that_are_no_numbers_are_counted():
    rows = rows_of(health__norm=[*np.ones(30), 9.0])
    for wrong in (float("nan"), [1], "epoch 1", None):
        (found,) = diagnose([row | {"step": wrong} for row in rows])
        assert found.step == 30


def test_subnormals_without_zeros_have_no_verdict():
    assert diagnose(rows_of(health__subnormals__a=np.ones(30))) == []


def test_what_metrics_write_is_read(tmp_path):
    recorder = optaxclip.record_health()
    grads = {"w": jnp.array([1.0, jnp.inf]), "b": jnp.ones(1)}
    state, lines = recorder.init(grads), []
    for own in (jnp.ones(2), grads["w"]):
        _, state = recorder.update(
            grads | {"w": own}, state, grads | {"w": jnp.ones(2)}
        )
        lines.append(json.dumps(optaxclip.metrics(state, json=True)))
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join(lines))
    (found,) = diagnose(path)
    assert (found.step, found.value) == (1, 1)


@partial(jax.jit, static_argnums=0)
def columns_of(optimizer, norms, losses):
    """What `metrics` shows of a run whose gradients have these norms."""
    params = {"a": jnp.float32(1), "b": jnp.float32(1)}

    def step(state, numbers):
        norm, loss = numbers
        grads = {"a": 0.6 * norm, "b": 0.8 * norm}
        _, state = optimizer.update(grads, state, params, value=loss)
        return state, optaxclip.metrics(state)

    return jax.lax.scan(step, optimizer.init(params), (norms, losses))[1]


def skip_log(optimizer, norms, losses=None):
    losses = np.zeros(len(norms)) if losses is None else losses
    columns = columns_of(optimizer, np.float32(norms), np.float32(losses))
    found = {name: np.float64(x).tolist() for name, x in columns.items()}
    return [dict(zip(found, line)) for line in zip(*found.values())]


def spiky(size=200):
    """Norms of about 0.8, of which a few are above 1. Two are broken batches."""
    norms = 0.8 * np.exp(0.1 * np.random.default_rng(0).normal(size=size))
    norms[[90, 150]] = 1000.0, 300.0
    norms[[99, 104]] = 2.0, 1.0
    return norms


CLIP, DESCENT = optaxclip.clip_by_global_norm(1.0), optax.sgd(0.1)
SKIP = optaxclip.skip_step(DESCENT)
CLIP_FIRST = {
    "skip_step": optax.chain(CLIP, SKIP),
    "skip_spikes": optax.chain(CLIP, optaxclip.skip_spikes(DESCENT, 20.0)),
    "record_spikes": optax.chain(CLIP, optaxclip.record_spikes(window=16), DESCENT),
    "names": optax.named_chain(("limit", CLIP), ("skip", optax.chain(SKIP))),
    "two clips": optax.chain(optaxclip.clip_by_tensor_norm(2e3), CLIP, SKIP),
}
SKIP_FIRST = {
    "around": optaxclip.skip_step(optax.chain(CLIP, DESCENT)),
    "behind": optax.chain(optaxclip.record_spikes(window=16), CLIP, DESCENT),
    # NaN and inf are seen behind a clip too.
    "nonfinite": optax.chain(CLIP, optaxclip.skip_nonfinite(DESCENT)),
    # A skip that works, since its limit is below that of the clip.
    "lower": optax.chain(
        optaxclip.clip_by_global_norm(100.0), optaxclip.skip_spikes(DESCENT, 10.0)
    ),
    # Another clipper, of other leaves.
    "two groups": optax.partition(
        {
            "a": optax.chain(optax.clip(0.5), optaxclip.skip_step(DESCENT)),
            "b": optax.chain(CLIP, DESCENT),
        },
        {"a": "a", "b": "b"},
    ),
}


@pytest.mark.parametrize("name", CLIP_FIRST)
def test_a_skip_that_sees_clipped_norms_is_named(name):
    norms = spiky()
    rows = skip_log(CLIP_FIRST[name], norms)
    (found,) = diagnose(rows)
    # No limit is known before, and of the rule of skip_step not for half a window.
    start = {"skip_spikes": 0, "record_spikes": 16}.get(name, 63)
    step = start + np.flatnonzero(norms[start:] > 1.01)[0]
    assert (found.cause, found.step) == ("skip behind clip", step)
    assert found.value == pytest.approx(norms[step], rel=1e-5) and found.limit == 1
    assert ("'spike" if name == "record_spikes" else "'skip") in found.evidence
    named = [{f"train/{key}": x for key, x in row.items()} for row in rows]
    assert [each.step for each in diagnose(named)] == [found.step]
    # A hundred steps are needed, and one that was clipped.
    assert diagnose(rows[:99]) == []
    assert [each.step for each in diagnose(rows[:100])] == [found.step]
    assert diagnose(skip_log(CLIP_FIRST[name], np.minimum(norms, 0.99))) == []


def test_a_skip_that_sees_raw_norms_is_not_named():
    losses = np.zeros(200)
    # Steps that are skipped by the loss, in which a clipper keeps its last numbers. The
    # norm of one of them is the limit.
    losses[100:110] = np.nan
    # With the broken batches, which are skipped by their norm, and without them.
    histories = product((spiky(), np.minimum(spiky(), 1.2)), (np.zeros(200), losses))
    for norms, given in histories:
        for name, optimizer in SKIP_FIRST.items():
            assert diagnose(skip_log(optimizer, norms, given)) == [], name


def test_a_log_without_health_is_refused(tmp_path):
    path = tmp_path / "run.csv"
    path.write_text("step,loss\n1,2.0\n")
    with pytest.raises(ValueError, match=r"diagnose: .*run.csv: .*'loss'.*log metrics"):
        diagnose(path)
    with pytest.raises(SystemExit, match=r"doctor: .*run.csv"):
        main([str(path)])


@pytest.fixture
def log(tmp_path):
    norms = calm()
    norms[40] = 50.0
    lines = [f"{10 * n},{norm},{1 / (n + 1)}" for n, norm in enumerate(norms)]
    path = tmp_path / "run.csv"
    path.write_text("\n".join(["Step,health/norm/w,train/loss", *lines]))
    return path


def test_the_command_prints_a_table_and_draws(log, capsys):
    main([str(log)])
    text = capsys.readouterr().out
    ratio = 50 / calm().max()
    line = f"step    400  bad batch         norm {ratio:.3g} times the largest"
    assert text.startswith(line) and "run_health.md#rollback" in text
    picture = log.with_name("own.png")
    main([str(log), "--picture", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_command_says_whether_it_saw_updates(tmp_path, capsys):
    path = tmp_path / "run.csv"
    for who in ("ppo_update/health", "a/health/update_health"):
        path.write_text(f"{who}/norm/w,{who}/weight_norm/w\n1,100\n")
        main([str(path)])
        is_judged = "Learning rate not judged" not in capsys.readouterr().out
        assert is_judged == (who == "a/health/update_health")


def test_json_is_what_diagnose_returns(log, capsys):
    main([str(log), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found == [each._asdict() for each in diagnose(log)]
    log.write_text("health/norm/w,max_logit\n1,inf\n")
    main([str(log), "--json"])
    assert json.loads(capsys.readouterr().out)[0]["value"] == "inf"


def test_json_and_a_picture_may_be_asked_for_together(log, capsys):
    main([str(log), "--json", "--picture", str(log.with_name("own.png"))])
    assert json.loads(capsys.readouterr().out) and log.with_name("own.png").exists()


def test_a_picture_that_cannot_be_drawn_is_one_line(log, monkeypatch, capsys):
    for name in ("missing/run.png", "run.xyz", "run.png"):
        if name == "run.png":
            monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(SystemExit, match="No picture: "):
            main([str(log), "--picture", str(log.parent / name)])
        assert "bad batch" in capsys.readouterr().out


@pytest.mark.slow
def test_python_runs_it_as_a_module(log):
    command = [sys.executable, "-W", "error", "-m", "optaxclip.doctor", str(log)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "bad batch" in run.stdout and not run.stderr


def test_the_pages_that_it_recommends_exist():
    columns = {
        "health__norm__a": [*np.ones(20), 9.0, np.nan, *np.ones(8)],
        "health__zeros__a": np.zeros(30),
        "health__subnormals__a": np.ones(30),
        "health__dead_rows__a": np.ones(30),
        "health__updates__norm__a": np.ones(30),
        "health__updates__weight_norm__a": np.ones(30),
        "logit": np.full(30, 200.0),
    }
    found = diagnose(rows_of(**columns))
    found += diagnose(skip_log(CLIP_FIRST["skip_spikes"], spiky()))
    assert len({each.cause for each in found}) == len(CAUSES)
    for each in found:
        page, _, anchor = each.page.partition("#")
        titles = re.findall("^#+ (.*)$", (DOCS / page).read_text(), re.MULTILINE)
        anchors = [re.sub(r"[^\w -]", "", x).lower().replace(" ", "-") for x in titles]
        assert not anchor or anchor in anchors
        # The page of the doctor has a row with each cause and its limit.
        assert f"| {each.cause} |" in (DOCS / "doctor.md").read_text()
