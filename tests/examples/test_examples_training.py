"""The examples that train with other libraries (loss scaling, gymnasium, Orbax,
TensorBoard) do in a few steps what their docstrings say.
"""

import importlib
import json
import struct
from contextlib import redirect_stdout
from io import StringIO
from itertools import pairwise
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip.replay.__main__ import main as replay_command
from optaxclip.replay.__main__ import table

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("as_programs_run")]


def example(name, *needs):
    for package in needs:
        pytest.importorskip(package)
    return importlib.import_module(f"examples.{name}")


# Loss scaling.


@pytest.fixture(scope="module")
def loss_scaling():
    return example("loss_scaling", "sklearn")


@pytest.fixture(scope="module")
def scaled_runs(loss_scaling):
    return {row.run: row for row in loss_scaling.main(steps=120)}


def test_unscaling_before_the_clip_is_the_float32_run(scaled_runs):
    wide, right = scaled_runs["float32"], scaled_runs["unscale, clip"]
    assert right.skipped > 0 == wide.skipped
    assert (
        right.final_loss == pytest.approx(wide.final_loss, rel=0.1)
        and right.final_loss < 0.2
    )
    assert (
        right.accuracy == pytest.approx(wide.accuracy, abs=0.02)
        and right.accuracy > 0.85
    )
    assert right.arrived == pytest.approx(wide.arrived, rel=0.1)
    assert 0 < right.clipped_share < 0.5


def test_clipping_before_unscaling_leaves_next_to_nothing(loss_scaling, scaled_runs):
    wrong = scaled_runs["clip, unscale"]
    assert wrong.clipped_share == 1
    # The scale is a power of 2, and the clip keeps the norm within a few roundings of
    # the limit.
    assert wrong.arrived * np.median(wrong.scales) == pytest.approx(
        loss_scaling.MAX_NORM, rel=1e-5
    )
    assert wrong.final_loss > 10 * scaled_runs["unscale, clip"].final_loss


@pytest.mark.parametrize("run", ["unscale, clip", "clip, unscale"])
def test_overflow_moves_no_bit(scaled_runs, run):
    assert scaled_runs[run].unmoved == scaled_runs[run].skipped > 0


def test_one_bit_is_a_move(loss_scaling):
    assert loss_scaling.same_bits([jnp.zeros(2)], [jnp.zeros(2)])
    assert not loss_scaling.same_bits([jnp.zeros(2)], [-jnp.zeros(2)])


@pytest.mark.parametrize("run", ["unscale, clip", "clip, unscale"])
def test_scale_halves_on_overflow_and_doubles_after_good_steps(
    loss_scaling, scaled_runs, run
):
    scales = scaled_runs[run].scales
    assert scales[0] == loss_scaling.FIRST_SCALE
    changes = [
        (step, after / before)
        for step, (before, after) in enumerate(pairwise(scales))
        if after != before
    ]
    assert [factor for _, factor in changes].count(0.5) == scaled_runs[run].skipped
    assert [factor for _, factor in changes].count(2.0) > 0
    for (before, _), (step, factor) in zip([(-1, 0), *changes], changes):
        assert (
            step - before == loss_scaling.GROW_EVERY if factor == 2 else factor == 0.5
        )


def test_scale_is_that_of_flax(loss_scaling):
    dynamic_scale = pytest.importorskip("flax.training.dynamic_scale")
    theirs = dynamic_scale.DynamicScale(
        growth_interval=loss_scaling.GROW_EVERY - 1, scale=2.0**10
    )  # there the step after the last of the interval grows
    ours = loss_scaling.LossScale(jnp.float32(2**10), jnp.int32(0))

    @jax.jit
    def step(theirs, ours, overflow):
        found = theirs.value_and_grad(lambda x: x * jnp.where(overflow, jnp.inf, 1.0))(
            1.0
        )
        return found.dynamic_scale, loss_scaling.adjust(ours, overflow)

    seen = set()
    for overflow in np.random.default_rng(0).random(400) < 0.01:
        theirs, ours = step(theirs, ours, overflow)
        assert ours.scale == theirs.scale
        seen.add(float(ours.scale))
    assert {2.0**9, 2.0**10, 2.0**11} <= seen


# PPO.


@pytest.fixture(scope="module")
def ppo():
    return example("ppo", "gymnasium")


@pytest.fixture(scope="module")
def agents(ppo):
    rows = ppo.main(steps=12)
    return {
        run: [row for row in rows if row.run == run]
        for run in ("one limit", "two limits")
    }


@pytest.mark.parametrize("run", ["one limit", "two limits"])
def test_agent_learns(ppo, agents, run):
    rows = agents[run]
    assert len(rows) == 4
    assert rows[-1].environment_steps == 12 * ppo.LENGTH * ppo.ENVIRONMENTS
    assert rows[0].mean_return < 40
    assert rows[-1].mean_return > 80


def test_one_limit_measures_the_critic(ppo, agents):
    for row in agents["one limit"]:
        assert row.actor_clipped == row.critic_clipped > 0.9
        assert row.critic_norm > 10 * row.actor_norm
        # Medians of a quotient and of its divisor: near each other where the norms do
        # not differ by much.
        assert row.actor_factor == pytest.approx(
            ppo.MAX_NORM / row.critic_norm, rel=0.3
        )


def test_two_limits_leave_the_actor_alone(agents):
    for row in agents["two limits"]:
        assert row.actor_factor == 1
        assert row.actor_clipped < 0.5 < 0.9 < row.critic_clipped


def hand_made_rollout(ppo):
    random = np.random.default_rng(1)
    shape = ppo.LENGTH, ppo.ENVIRONMENTS
    terminated, truncated = random.random(shape) < 0.05, random.random(shape) < 0.05
    played = np.concatenate(
        [np.ones((1, ppo.ENVIRONMENTS), bool), ~(terminated | truncated)[:-1]]
    )
    observations = random.normal(size=(ppo.LENGTH + 1, ppo.ENVIRONMENTS, 4)).astype(
        np.float32
    )
    actions, rewards = (
        random.integers(2, size=shape).astype(np.int32),
        random.random(shape).astype(np.float32),
    )
    return ppo.Rollout(observations, actions, rewards, terminated, truncated, played)


def test_advantages_are_those_of_the_definition(ppo):
    rollout, params = hand_made_rollout(ppo), ppo.new_agent(0)
    samples = ppo.judge(params, rollout)
    values = np.asarray(
        ppo.network(params["critic"], rollout.observations)[..., 0], np.float64
    )
    surprise = (
        rollout.rewards + ppo.DISCOUNT * values[1:] * ~rollout.terminated - values[:-1]
    )
    expected = np.zeros((ppo.LENGTH, ppo.ENVIRONMENTS))
    for start in range(
        ppo.LENGTH
    ):  # the sum itself: discounted surprises up to the end of the episode
        factor = np.ones(ppo.ENVIRONMENTS)
        for now in range(start, ppo.LENGTH):
            expected[start] += factor * surprise[now]
            factor *= (
                ppo.DISCOUNT
                * ppo.TRACE
                * ~(rollout.terminated | rollout.truncated)[now]
            )
    np.testing.assert_allclose(
        samples.advantage, expected.reshape(-1), rtol=1e-4, atol=1e-4
    )
    np.testing.assert_allclose(
        samples.goal, (expected + values[:-1]).reshape(-1), rtol=1e-4, atol=1e-4
    )


def test_steps_that_only_reset_teach_nothing(ppo):
    params = ppo.new_agent(0)
    samples = ppo.judge(params, hand_made_rollout(ppo))
    assert 0 < np.sum(~samples.played) < samples.played.size / 4
    spoilt = samples._replace(
        advantage=jnp.where(samples.played, samples.advantage, 1e3),
        goal=jnp.where(samples.played, samples.goal, 1e3),
    )
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.grad(ppo.loss)(params, samples),
        jax.grad(ppo.loss)(params, spoilt),
    )


def test_returns_are_whole_episodes_across_rollouts(ppo):
    nothing = np.zeros((3, 2), bool)
    over = np.array([[False, False], [True, False], [False, False]])
    rewards = np.array([[1.0, 1.0], [1.0, 1.0], [0.0, 1.0]])
    score = np.array([5.0, 7.0])
    assert ppo.finished_returns(
        ppo.Rollout(None, None, rewards, over, nothing, None), score
    ).tolist() == [7.0]
    assert score.tolist() == [0.0, 10.0]


# Checkpoints.


@pytest.fixture(scope="module")
def checkpoint():
    return example("checkpoint", "sklearn", "orbax.checkpoint")


@pytest.fixture(scope="module")
def saved(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    return {row.run: row for row in checkpoint.main(steps=300, folder=folder)}, folder


def test_resumed_run_ends_bit_for_bit_alike(saved):
    straight, resumed = saved[0]["straight"], saved[0]["resumed"]
    assert resumed.restored == resumed.ended == resumed.leaves == straight.leaves
    assert resumed.difference == 0
    assert resumed.final_loss == straight.final_loss < 1


def test_a_clip_without_its_memory_goes_another_way(saved):
    row = saved[0]["without the memory"]
    assert row.restored < row.leaves and row.ended < row.leaves
    assert row.difference > 0


def test_adams_moments_are_the_very_ones(checkpoint, saved):
    rows, folder = saved
    adam = optax.adam(optax.cosine_decay_schedule(checkpoint.LEARNING_RATE, 300))
    old = checkpoint.restore(
        folder / "optax",
        optax.chain(optax.clip_by_global_norm(checkpoint.MAX_NORM), adam),
    ).opt_state
    new = optax.chain(optaxclip.clip_by_global_norm(checkpoint.MAX_NORM), adam)
    fresh = new.init(checkpoint.new_training(new).params)
    moved = checkpoint.take_over(old, fresh)
    assert isinstance(old[0], optax.EmptyState) and isinstance(
        moved[0], optaxclip.ClipState
    )
    assert all(
        kept is leaf
        for kept, leaf in zip(
            jax.tree.leaves(moved[1]), jax.tree.leaves(old[1]), strict=True
        )
    )
    assert moved[1][0].count == 150 and all(
        jnp.any(moment != 0) for moment in jax.tree.leaves(moved[1][0].mu)
    )
    assert jax.tree.structure(moved) == jax.tree.structure(fresh)
    assert (
        rows["taken over"].restored
        == rows["optax, continued"].leaves
        == len(jax.tree.leaves(old))
    )
    # Only the factor of the clip is rounded differently; Adam carries that for 150
    # steps of at most 3e-3.
    assert rows["taken over"].difference < 1e-5


def test_old_checkpoint_does_not_fit_the_new_optimizer(checkpoint, saved):
    new = optax.chain(
        optaxclip.clip_by_global_norm(1.0),
        optax.adam(optax.cosine_decay_schedule(checkpoint.LEARNING_RATE, 300)),
    )
    with pytest.raises(ValueError, match="structure"):
        checkpoint.restore(saved[1] / "optax", new)


def test_take_over_reaches_nested_clips(checkpoint):
    params = {"w": jnp.ones(3)}

    def nested(clip):
        return optax.apply_if_finite(
            optax.named_chain(("clip", clip), ("adam", optax.adam(0.1))), 3
        )

    old, new = (
        nested(optax.clip_by_global_norm(1.0)),
        nested(optaxclip.clip_by_global_norm(1.0)),
    )
    _, state = old.update({"w": jnp.arange(3.0)}, old.init(params), params)
    moved = checkpoint.take_over(state, new.init(params))
    assert isinstance(moved.inner_state["clip"], optaxclip.ClipState)
    assert moved.inner_state["adam"][0].mu["w"] is state.inner_state["adam"][0].mu["w"]
    updates, _ = new.update({"w": jnp.ones(3)}, moved, params)
    np.testing.assert_allclose(
        updates["w"], old.update({"w": jnp.ones(3)}, state, params)[0]["w"], rtol=1e-6
    )


# Logs.


@pytest.fixture(scope="module")
def logging_metrics():
    return example("logging_metrics")


@pytest.fixture(scope="module")
def logs(logging_metrics, tmp_path_factory):
    folder = tmp_path_factory.mktemp("logs")

    def run_here(
        command, **_
    ):  # what the command does in a process of its own is seen in test_replay
        with redirect_stdout(StringIO()) as printed:
            replay_command(command[3:])
        return SimpleNamespace(stdout=printed.getvalue())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging_metrics.subprocess, "run", run_here)
        return logging_metrics.main(steps=120, folder=folder), folder


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_step_is_a_line_with_all_metrics(logs):
    rows = read_lines(logs[1] / "loose.jsonl")
    clip = optaxclip.clip_by_global_norm(1.0)
    assert [row["step"] for row in rows] == list(range(120))
    assert all(
        set(row) == {"step", "loss", *optaxclip.metrics(clip.init(jnp.zeros(2)))}
        for row in rows
    )
    assert np.mean([row["loss"] for row in rows[-10:]]) < 0.9 * np.mean(
        [row["loss"] for row in rows[:10]]
    )


def test_replay_foretells_from_the_log(logging_metrics, logs):
    (loose, suggested), folder = logs[0].rows, logs[1]
    norms = np.array(
        [row["clip/norm_before"] for row in read_lines(folder / "loose.jsonl")]
    )
    assert loose.clipped == 0 and norms.max() < logging_metrics.LOOSE
    assert suggested.foretold == pytest.approx(
        np.mean(norms > suggested.limit), abs=1e-6
    )
    assert abs(suggested.foretold - logging_metrics.WANTED) < 0.05
    factors = [row["clip/factor"] for row in read_lines(folder / "suggested.jsonl")]
    assert suggested.clipped == pytest.approx(np.mean(np.array(factors) < 1), abs=1e-6)
    assert suggested.clipped > 0
    np.testing.assert_array_equal(
        optaxclip.replay.read_history(folder / "loose.jsonl"), norms
    )


def test_command_prints_the_same_suggestions_and_draws(logs):
    pytest.importorskip("matplotlib")
    result, folder = logs
    printed = table(
        optaxclip.replay.read_history(folder / "loose.jsonl"), result.suggestions
    )
    assert printed in result.table
    assert (folder / "loose.png").stat().st_size > 10_000


def test_event_file_has_the_same_numbers(logs):
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    (path,) = (logs[1] / "loose").glob("events.out.tfevents*")
    record, found = path.read_bytes(), {}
    while (
        record
    ):  # each record: its length, a checksum of that, an event, a checksum of that
        (length,) = struct.unpack("<Q", record[:8])
        event = event_pb2.Event.FromString(record[12 : 12 + length])
        record = record[16 + length :]
        found.update(
            {
                (event.step, value.tag): value.simple_value
                for value in event.summary.value
            }
        )
    lines = {
        (row["step"], name): value
        for row in read_lines(logs[1] / "loose.jsonl")
        for name, value in row.items()
        if name != "step"
    }
    assert found == lines  # both float32, so the very same


def test_without_tensorboard_the_lines_are_written(
    logging_metrics, tmp_path, monkeypatch
):
    monkeypatch.setattr(logging_metrics, "SummaryWriter", None)
    with logging_metrics.open_log("run", tmp_path) as log:
        log(0, {"loss": 1.5})
    assert read_lines(tmp_path / "run.jsonl") == [{"step": 0, "loss": 1.5}]
    assert not (tmp_path / "run").exists()
