"""Each program keeps, in a few steps, the promise of its docstring."""

import importlib
import json

import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("as_programs_run")]
EPS = float(np.finfo(np.float32).eps)


def example(name, *needs):
    """The module of a program, under its bare name as for its neighbours."""
    for package in needs:
        pytest.importorskip(package)
    importlib.import_module("examples")  # which puts its folder on the path
    return importlib.import_module(name)


# Recurrent networks.


def test_without_a_clip_the_recurrent_network_blows_up(monkeypatch):
    char_rnn = example("char_rnn")
    monkeypatch.setattr(char_rnn, "HIDDEN", 64)
    runs = char_rnn.main(steps=12, lr=2.0)
    first = runs["none"]["loss"][0]
    assert not runs["none"]["loss"][-1] <= first
    for name in ("value", "tensor norm", "global norm"):
        assert runs[name]["loss"][-1] < first, name
        assert (runs[name]["after"] < runs[name]["before"]).any(), name
    assert (runs["global norm"]["after"] <= 0.3 * (1 + 4 * EPS)).all()


@pytest.fixture(scope="module")
def broken():
    """Runs of a hundred steps with two broken batches, of a small network."""
    module, steps = example("broken_batches"), [70, 85]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.char_rnn, "HIDDEN", 48)
        patch.setattr(module, "FIRST", steps[0])
        patch.setattr(module, "EVERY", steps[1] - steps[0])
        patch.setattr(module, "RUNS", 2)
        yield module, steps


def test_broken_batches_do_harm_that_protection_prevents(broken, tmp_path):
    pytest.importorskip("matplotlib")
    module, steps = broken
    picture, table = tmp_path / "picture.png", tmp_path / "table.json"
    runs = module.main(steps=100, save=picture, table=table)
    for skipped in runs["skip_step"]["skip/step/skipped"]:
        assert np.nonzero(skipped)[0].tolist() == steps
    assert runs["global norm"]["clip/step/clipped"][:, steps].all()
    losses = {name: module.final(log) for name, log in runs.items()}
    for name in set(losses) - {"none"}:
        assert losses[name].max() < losses["none"].min(), name
    for row in json.loads(table.read_text()):
        ends = losses[row["protection"]]
        assert (row["lowest"], row["highest"]) == (ends.min(), ends.max())
    for name in ("picture.png", "picture_dark.png"):
        assert (tmp_path / name).stat().st_size > 10_000


def test_a_run_of_few_steps_is_drawn(broken, tmp_path):
    pytest.importorskip("matplotlib")
    module, _ = broken
    log = {"loss": np.linspace(4.0, 3.0, 10)[None]}
    logs = dict.fromkeys((module.CLEAN, *module.TITLES), log)
    module.draw_both(
        tmp_path / "picture.png",
        panels=2,
        draw=lambda panels, look: module.draw(panels, look, logs, lr=0.2),
    )
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_limits_that_learn_meet_the_broken_batches(broken, tmp_path):
    pytest.importorskip("matplotlib")
    adaptive, steps = example("adaptive"), broken[1]
    runs = adaptive.main(steps=100, save=tmp_path / "picture.png")
    for name in ("autoclip", "zclip"):
        assert runs[name]["clip/step/clipped"][:, steps].all(), name
    for name in ("skip_spikes", "skip_step"):
        assert runs[name]["skip/step/skipped"][:, steps].all(), name
    limits = [key for key in runs["adagc"] if key.startswith("clip/step/limit/")]
    assert len(limits) == 5  # one for each tensor
    assert (tmp_path / "picture.png").stat().st_size > 10_000


# Digits.


def test_clipping_lets_large_rates_learn(monkeypatch, tmp_path):
    digits = example("digits", "sklearn", "matplotlib")
    monkeypatch.setattr(digits, "RATES", (0.01, 0.16))
    monkeypatch.setattr(digits, "SEEDS", 1)
    accuracies = digits.main(steps=60, save=tmp_path / "picture.png")
    none, agc, global_norm = (accuracies[name][:, 0] for name in digits.METHODS)
    assert none[0] > 0.8 and none[1] < 0.2
    assert agc[1] > 0.8 and global_norm[1] > 0.8
    assert (tmp_path / "picture.png").stat().st_size > 10_000


@pytest.fixture(scope="module")
def scaled():
    return example("loss_scaling", "sklearn").main(steps=120)


def test_unscaling_before_the_clip_is_the_float32_run(scaled):
    wide, right = scaled["float32: clip, unscale"], scaled["float16: unscale, clip"]
    assert right["skipped"].sum() > 0 == wide["skipped"].sum()
    ends = [run["loss"][-20:].mean() for run in (wide, right)]
    assert ends[0] < 0.2 and ends[1] == pytest.approx(ends[0], rel=0.1)


def test_clipping_before_unscaling_leaves_next_to_nothing(scaled):
    wrong = scaled["float16: clip, unscale"]
    good = wrong["skipped"] == 0
    assert wrong["clipped"][good].all()
    arrived = (wrong["arrived"] * wrong["scale"])[good]
    limit = example("loss_scaling", "sklearn").MAX_NORM
    np.testing.assert_allclose(arrived, limit, rtol=1e-5)


@pytest.mark.parametrize("order", ["unscale, clip", "clip, unscale"])
def test_overflow_halves_the_scale(scaled, order):
    log = scaled[f"float16: {order}"]
    skipped = log["skipped"] == 1
    factors = log["scale"][1:] / log["scale"][:-1]
    np.testing.assert_array_equal(factors == 0.5, skipped[:-1])
    assert set(factors) == {0.5, 1.0, 2.0}


def test_the_loss_scale_halves_until_it_is_one():
    loss_scaling = example("loss_scaling", "sklearn")
    loss_scale = loss_scaling.LossScale(jnp.float32(4.0), jnp.int32(7))
    scales = []
    for _ in range(4):
        loss_scale = loss_scaling.adjust(loss_scale, jnp.bool(True))
        scales.append(float(loss_scale.scale))
    assert scales == [2.0, 1.0, 1.0, 1.0]


def test_no_broken_step_counts_as_good(monkeypatch):
    """`skip_nonfinite` lets the 101st in a row through."""
    loss_scaling = example("loss_scaling", "sklearn")
    images, labels = loss_scaling.load_digits(return_X_y=True)
    broken = np.full_like(images, np.nan), labels
    monkeypatch.setattr(loss_scaling, "load_digits", lambda return_X_y: broken)
    # Each good step would double the scale.
    monkeypatch.setattr(loss_scaling, "GROW_EVERY", 1)
    log = loss_scaling.train(jnp.float16, ("unscale", "clip"), steps=110)
    assert log["skipped"][99] == 1 and log["skipped"][100] == 0
    assert (np.diff(log["scale"]) <= 0).all()


@pytest.fixture(scope="module")
def private():
    module = example("private_digits", "sklearn")
    return module, module.main(steps=60)


def test_it_learns_with_noise_and_finds_wrong_labels(private):
    module, result = private
    assert result.accuracy > 0.6
    assert result.clipped[0] > result.clipped[-1] > 0
    assert result.wrong.sum() == module.WRONG
    norms, wrong = result.norms, result.wrong
    assert np.median(norms[wrong]) > 2 * np.median(norms[~wrong])
    before, after = result.noise_scales
    assert after > before > 0


def test_a_batch_without_examples_clips_none(private, monkeypatch):
    module, _ = private
    digits, _ = module.read_digits(module.HELD_OUT)
    monkeypatch.setattr(module, "BATCH", 0.01)  # so most batches have none
    params = module.new_perceptron(64, 32, 10)
    _, clipped = module.train(params, digits, steps=5, noise=1.0, seed=0)
    assert np.isfinite(clipped).all() and 0 in clipped


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    module = example(
        "checkpoint_and_metrics", "sklearn", "orbax.checkpoint", "tensorboardX"
    )
    folder = tmp_path_factory.mktemp("logs")
    return module, module.main(steps=120, folder=folder), folder


def test_a_resumed_run_ends_bit_for_bit_alike(saved):
    module, ends, _ = saved
    assert module.differing(ends["resumed"], ends["straight"]) == 0
    assert module.differing(ends["memory lost"], ends["straight"]) > 0


def test_every_step_is_a_line_with_all_metrics(saved):
    _, ends, folder = saved
    lines = (folder / "log.jsonl").read_text().splitlines()
    rows = list(map(json.loads, lines))
    assert [row["step"] for row in rows] == list(range(120))
    # The warm-up of `zclip` has no limit.
    assert rows[0]["clip/limit"] == np.inf
    assert 0 < rows[-1]["clip/limit"] < np.inf
    names = set(optaxclip.metrics(ends["straight"].opt_state))
    assert all(set(row) == {"step", "loss", *names} for row in rows)
    norms = [row["clip/norm_before"] for row in rows]
    history = optaxclip.replay.read_history(folder / "log.jsonl")
    np.testing.assert_array_equal(history, norms)
    assert list(folder.glob("events.out.tfevents*"))


def test_a_continued_log_goes_on_where_the_run_was_saved(saved, tmp_path):
    module, _, _ = saved
    for first_step in (0, 3):
        module.write_log(tmp_path, [{"loss": 1.0}] * 3, first_step)
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(6))
    assert len(list(tmp_path.glob("events.out.tfevents*"))) == 2
    # A run that begins anew does not go on in the log of an older one.
    module.write_log(tmp_path, [{"loss": 1.0}], 0)
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 1


# Frameworks.


def test_nnx_optimizer_clips_weights_and_reports_them():
    flax_nnx = example("flax_nnx", "flax", "sklearn")
    reports, _, _ = flax_nnx.main(steps=30)
    assert reports[-1]["loss"] < reports[0]["loss"]
    assert max(report["clip/all/norm_after"] for report in reports) <= 1 + 4 * EPS
    start = "record/tensors/norm/"
    weights = {name.removeprefix(start) for name in reports[0] if start in name}
    layers = ("first", "second", "readout")
    expected = {"average/scale", "average/bias"}
    for layer in layers:
        expected |= {f"{layer}/kernel", f"{layer}/bias"}
    assert weights == expected


def test_only_weights_of_an_equinox_model_are_clipped():
    losses, report, network = example("equinox_filtered", "equinox").main(steps=120)
    assert losses[-10:].mean() < losses[:10].mean()
    start = "clip/limit/"
    limits = {
        name.removeprefix(start): report[name] for name in report if start in name
    }
    expected = {"embedding"}
    for layer in ("widen", "repeated", "readout"):
        expected |= {f"{layer}/weight", f"{layer}/bias"}
    assert set(limits) == expected
    assert all(0 < float(limit) < np.inf for limit in limits.values())
    assert (network.times, network.factor) == (2, 0.5)


@pytest.fixture(scope="module")
def ppo():
    return example("ppo", "gymnasium")


def test_one_limit_measures_the_critic_and_two_leave_the_actor_alone(ppo):
    runs = ppo.main(steps=8)
    for run in runs.values():
        returns, actor, critic, _ = run.T
        assert returns[-1] > 2 * returns[0]
        assert (critic > 5 * actor).all()
    _, _, critic, factor = runs["one limit"].T
    # Medians of a quotient and of its divisor.
    np.testing.assert_allclose(factor, 0.5 / critic, rtol=0.3)
    assert (runs["two limits"][:, 3] == 1).all()


def test_advantages_are_those_of_the_equation(ppo):
    """In float64: the sum of later surprises, up to the end of the game."""
    random, steps = np.random.default_rng(0), 12
    critic = ppo.new_perceptron(4, 8, 1, seed=0)
    observations = random.normal(size=(steps + 1, 3, 4)).astype("float32")
    rewards = random.normal(size=(steps, 3)).astype("float32")
    ends = random.random((steps, 3)) < 0.2
    rollout = ppo.Rollout(observations[:-1], None, rewards, ends, observations[-1])
    advantages, returns = ppo.judge(critic, rollout)
    values = np.float64(ppo.perceptron(critic, observations)[..., 0])
    expected = np.zeros((steps, 3))
    later = np.zeros(3)
    for step in reversed(range(steps)):
        goes_on = 1 - ends[step]
        surprise = rewards[step] + 0.99 * goes_on * values[step + 1] - values[step]
        later = surprise + 0.99 * 0.95 * goes_on * later
        expected[step] = later
    np.testing.assert_allclose(advantages, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(returns, expected + values[:-1], rtol=1e-4, atol=1e-5)


# One layer at a time.


def test_a_released_step_is_the_run_of_the_usual_step():
    losses = example("release").main(steps=4)
    assert list(losses) == ["usual", "remat", "one pass", "two passes"]
    # Adam makes a step of the sign of a gradient, also where that is a rounding.
    np.testing.assert_allclose(losses["two passes"], losses["usual"], rtol=1e-4)
    np.testing.assert_allclose(losses["one pass"], losses["usual"], rtol=1e-2)
    for losses_of_trainer in losses.values():
        assert losses_of_trainer[-1] < losses_of_trainer[0]


def test_a_pipeline_never_steps_by_more_than_its_limit():
    """Its limits are those of the budget, in float64."""
    pipeline = example("pipeline")
    run = pipeline.main(steps=25)
    shares = np.full(4, 0.25)
    limit = pipeline.LIMIT
    for step, squares in enumerate(np.float64(run["squares"])):
        remaining = limit**2
        limits = np.zeros(4)
        for stage in reversed(range(4)):
            portion = remaining * shares[stage] / shares[: stage + 1].sum()
            limits[stage] = np.sqrt(portion)
            remaining -= min(squares[stage], portion)
        np.testing.assert_allclose(run["limits"][step], limits, rtol=1e-4)
        after = np.minimum(squares, np.float64(run["limits"][step]) ** 2)
        assert np.sqrt(after.sum()) <= limit * (1 + 16 * EPS)
        shares = 0.9 * shares + 0.1 * squares / squares.sum()
    assert (run["squares"].sum(1) > limit**2).mean() > 0.5
    # The broken batch did no harm.
    assert run["loss"][24] < run["loss"][0]


def test_a_frozen_first_stage_may_spend_the_rest():
    """As when its share has come down to 0 after many steps without a gradient."""
    pipeline = example("pipeline")
    random = np.random.default_rng(0)
    shares = np.array([0.0, 0.3, 0.3, 0.4])
    stages = pipeline.Stages(
        weights=jnp.asarray(random.normal(size=(4, 16, 16)) / 4, jnp.float32),
        shares=jnp.asarray(shares, jnp.float32),
        squares=jnp.zeros(4),
        totals=jnp.zeros(4),
    )
    x = jnp.asarray(random.normal(size=(32, 16)), jnp.float32)
    outputs = x
    for weights in stages.weights:
        outputs = pipeline.apply_layer(weights, outputs)
    # So near to the target nothing is clipped.
    stages, _, limits = pipeline.take_step(stages, x, outputs + 0.1)
    squares = np.float64(stages.squares)
    rest = pipeline.LIMIT**2 - squares[1:].sum()
    assert rest > 0.2
    assert limits[0] == pytest.approx(np.sqrt(rest), rel=16 * EPS)
    assert np.isfinite(stages.weights).all()


# Several devices.


def test_the_ways_to_train_on_eight_devices_are_the_same_run():
    runs = example("sharded", "sklearn").main(steps=10)
    alone = runs.pop("one_device")
    assert (alone[:, 0] > 0.25).all() and alone[-1, 1] < alone[0, 1]
    assert list(runs) == ["jit", "shard_map", "zero"]
    for name, numbers in runs.items():
        # Sums over devices are added in another order, and each step starts from the
        # roundings of those before: in ten steps, some eps.
        np.testing.assert_allclose(numbers, alone, rtol=32 * EPS, err_msg=name)


def test_two_processes_clip_alike():
    multi_process = example("multi_process")
    first, second = multi_process.main()
    assert set(first) == {"clip_in_jit", "clip_in_shard_map", "clip_in_pmap"}
    assert first == second  # digests of the clipped gradients, so bit for bit
    leaves = multi_process.new_gradients().values()
    norm = np.sqrt(sum(np.square(leaf, dtype=np.float64).sum() for leaf in leaves))
    for before, after, _ in first.values():
        assert before == pytest.approx(norm, rel=1e-6)
        assert after == pytest.approx(1.0, rel=1e-6)
