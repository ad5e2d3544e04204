"""The benchmark of methods: its faults, tasks and scores, and what its page says."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks import pages
from benchmarks.methods import claims, picture, scores
from tests.methods import METHODS as REGISTRY


@pytest.fixture(scope="module")
def benchmark(as_programs_run):
    """The modules that read data and import gymnasium."""
    pytest.importorskip("gymnasium")
    pytest.importorskip("sklearn")
    from benchmarks.methods import clippers, tasks, training

    return clippers, tasks, training


GRADS = {"a": jnp.ones((100, 100)), "b": jnp.ones(50)}


def test_a_share_of_elements_spikes(benchmark):
    *_, training = benchmark
    keys = jax.random.split(jax.random.key(0), 50)
    spiked = jax.vmap(lambda key: training.with_spikes(GRADS, -1, 1e-3, key))(keys)
    count = np.sum(spiked["a"] == 1000)
    # A Poisson number of mean 500, within five deviations.
    assert abs(count - 500) < 5 * 500**0.5
    assert count + np.sum(spiked["a"] == 1) == spiked["a"].size


@pytest.mark.parametrize(
    ("place", "sizes"), [(2, (1000, 1)), (3, (1, 1000)), (-1, (1, 1))]
)
def test_tensors_spike_in_turn(benchmark, place, sizes):
    *_, training = benchmark
    spiked = training.with_spikes(GRADS, place, 0.0, jax.random.key(0))
    assert np.all(spiked["a"] == sizes[0]) and np.all(spiked["b"] == sizes[1])


def test_the_pole_falls_as_that_of_gymnasium(benchmark):
    import gymnasium

    _, tasks, _ = benchmark
    game = gymnasium.make("CartPole-v1").unwrapped
    game.reset(seed=0)
    terminated = False
    while not terminated:
        state = jnp.asarray(game.state)[None]
        after, fell = tasks.pushed(state, jnp.array([1]))
        expected, _, terminated, *_ = game.step(1)
        np.testing.assert_allclose(after[0], expected, rtol=1e-5, atol=1e-6)
        assert not fell[0]
    # The fall is seen in the next step.
    fallen = jnp.asarray(game.state)[None]
    assert tasks.pushed(fallen, jnp.array([1]))[1][0]


def test_four_bits_have_fifteen_numbers_and_a_slope_of_one(benchmark):
    _, tasks, _ = benchmark
    x = jnp.linspace(-2.0, 2.0, 1000)  # without ties
    rounded = np.asarray(tasks.in_4_bits(x), np.float64)
    spacing = np.max(np.abs(np.float64(x))) / 7
    expected = np.rint(np.float64(x) / spacing) * spacing
    np.testing.assert_allclose(rounded, expected, rtol=1e-5, atol=1e-6)
    assert len(np.unique(np.rint(rounded / spacing))) == 15
    np.testing.assert_array_equal(jax.grad(lambda x: tasks.in_4_bits(x).sum())(x), 1.0)


TASKS = ["digits", "transformer", "recurrent", "4 bits", "regression", "pole"]


@pytest.mark.parametrize("name", TASKS)
def test_a_task_has_gradients_of_good_and_of_broken_batches(benchmark, name):
    _, tasks, _ = benchmark
    task = tasks.TASKS[name]

    @jax.jit
    def norms_and_cost(params, key):
        games = jnp.zeros((tasks.GAMES, 4))
        batches, _ = task.draw(params, games, key)
        batch = jax.tree.map(lambda leaf: leaf[0], batches)
        norms = []
        for faulty_batch in (batch, task.spoil(key, batch)):
            grads = jax.grad(task.loss)(params, faulty_batch)
            norms.append(optax.tree.norm(grads))
        return norms, task.cost(params)

    params = task.start(seed=0)
    (good, broken), cost = norms_and_cost(params, jax.random.key(0))
    assert 0 < good < np.inf and 0 < broken < np.inf
    assert abs(good - broken) > 1e-3 * good and cost > 0


def test_all_tasks_are_tested(benchmark):
    _, tasks, _ = benchmark
    assert list(tasks.TASKS) == TASKS


def test_advantages_of_the_pole_are_those_of_the_equation(benchmark):
    """The value after the last step is that of the observation after it."""
    _, tasks, _ = benchmark
    params = tasks.TASKS["pole"].start(seed=0)
    games = jnp.zeros((tasks.GAMES, 4))
    key = jax.random.key(0)
    batches, _ = tasks.play(params, games, key)
    # The same games, step by step.
    values = []
    ends = []

    @jax.jit
    def move(games, move_key):
        value = tasks.perceptron(params["critic"], games)[:, 0]
        logits = tasks.perceptron(params["actor"], games)
        action = jax.random.categorical(move_key, logits)
        after, fell = tasks.pushed(games, action)
        return value, fell, jnp.where(fell[:, None], tasks.new_games(move_key), after)

    for move_key in jax.random.split(key, tasks.LENGTH):
        value, fell, games = move(games, move_key)
        values.append(np.float64(value))
        ends.append(np.asarray(fell))
    value_after, _, _ = move(games, key)
    values.append(np.float64(value_after))
    advantages = np.zeros((tasks.LENGTH, tasks.GAMES))
    later = np.zeros(tasks.GAMES)
    for step in reversed(range(tasks.LENGTH)):
        goes_on = 1 - ends[step]
        surprise = 1 + 0.99 * goes_on * values[step + 1] - values[step]
        later = surprise + 0.99 * 0.95 * goes_on * later
        advantages[step] = later
    chosen = jax.random.randint(key, (tasks.ROUND, 64), 0, tasks.LENGTH * tasks.GAMES)
    np.testing.assert_allclose(
        batches.advantages, advantages.reshape(-1)[chosen], rtol=1e-4, atol=1e-5
    )


def test_costs_are_in_the_order_of_methods_faults_rates_and_seeds(benchmark):
    clippers, tasks, training = benchmark
    task = tasks.TASKS["regression"]._replace(rounds=6)
    methods = [clippers.METHODS[name] for name in ("none", "clip_by_global_norm(1.0)")]
    rates = [0.001, 0.01]
    ends = training.costs(task, methods, rates, seeds=2)
    assert ends.shape == (2, 4, 2, 2)
    fault = training.Fault(elements=True)
    start = task.start(seed=1)
    alone = training.train(task, methods[::-1], fault, rates[0], start, seed=1)
    np.testing.assert_allclose(ends[:, 2, 0, 1], alone[::-1], rtol=1e-3)
    without_clip, with_clip = ends.mean(axis=(2, 3))
    assert without_clip[0] < 1 < without_clip[1] and without_clip[3] > 1
    assert np.all(with_clip < 1)


# Scores of made-up runs, whose numbers are those of the definition.

RATES = [1.0, 4.0, 16.0]
ROW = {
    "rates": RATES,
    "untrained": [4.0, 4.0],
    "costs": {
        "none": [[[3.0, 3.2], [2.0, 2.0], [None, 2.1]]],
        "other": [[[2.0, 2.0], [1.98, 2.0], [3.0, 5.0]]],
    },
}


def test_a_score_is_the_way_from_untrained_over_that_of_none():
    of_none, of_other = scores.scores_of(ROW).values()
    np.testing.assert_allclose(of_none[0], [[0.5, 0.4], [1, 1], [0, 0.95]])
    np.testing.assert_allclose(of_other[0, 2], [0.5, 0.0])


def test_the_best_rate_has_the_highest_mean_and_a_width():
    of_none, of_other = scores.scores_of(ROW).values()
    best = scores.best(of_none, RATES)
    assert (best.place, best.width) == (1, 1)
    np.testing.assert_allclose(best.at_neighbours, (0.45 + 0.475) / 2)
    assert scores.best(of_other, RATES).width == 4


def test_where_nothing_is_learnt_no_other_rate_is_as_good():
    assert scores.best(np.full((4, 3, 2), 0.004), RATES).width == 1


@pytest.mark.parametrize(
    ("won", "verdict"),
    [([True, True], "appears"), ([True, False], "in part"), ([False], "does not")],
)
def test_a_claim_appears_where_all_its_duels_are_won(won, verdict):
    assert claims.verdict(won) == verdict


def test_a_duel_is_won_by_more_than_two_errors():
    duel = claims.Duel("digits", "other", "none")
    row = {"tasks": {"digits": ROW}, "private": {}}
    mean, error = claims.difference(row, duel)
    np.testing.assert_allclose([mean, error], [0.005, 0.005], atol=1e-9)
    assert not claims.wins(duel, 1.9 * error, error)
    assert claims.wins(duel._replace(may_be_equal=True), mean, error)
    assert claims.wins(duel, 2.1 * error, error)


# The page.

ROWS = {row["method"]: row for row in scores.rows(pages.results("methods"))}
FAULTS = "broken batches", "elements x 1000", "a layer x 1000"
NONE, GLOBAL = ROWS["none"], ROWS["clip_by_global_norm(1.0)"]
SUMMARIES = scores.summaries(pages.results("methods"))
QUIET = [task for task in SUMMARIES[0].tasks if task != scores.NOISY]
PAGE = (pages.ROOT / "docs/which_clip_helps.md").read_text()


def test_every_method_was_run_or_the_page_says_why_not():
    ran = " ".join(ROWS)
    left_out = PAGE.partition("## What was left out")[2]
    for method in REGISTRY.values():
        name = method.function.__name__
        assert name in ran or f"`{name}`" in left_out, name


def test_without_a_fault_most_methods_equal_none_and_the_rate_matters():
    close = [abs(row["no fault"] - 1) < 0.05 for row in ROWS.values()]
    assert sum(close) >= 0.8 * len(close)
    assert abs(GLOBAL["no fault"] - 1) < 0.02
    assert NONE["beside"] < 0.85 < 0.9 < GLOBAL["beside"]


@pytest.mark.parametrize("fault", FAULTS)
def test_with_a_fault_a_clip_of_the_norm_saves_the_run(fault):
    assert NONE[fault] < 0.95 < 0.98 < GLOBAL[fault]
    skip = ROWS["skip_step(global)"][fault]
    assert abs(skip - GLOBAL[fault]) < 0.02


def test_the_lead_of_adagn_comes_from_one_task():
    adagn = ROWS["adagn()"]
    lead = {task: adagn[task] - GLOBAL[task] for task in QUIET}
    assert lead.pop("recurrent") > 0.1
    assert max(map(abs, lead.values())) < 0.02


def without_and_with_a_clip(optimizer):
    """The scores of the tasks with an optimizer: float[tasks, faults] twice."""
    unclipped, clipped = (
        next(row for row in SUMMARIES if row.method == method)
        for method in ("none", scores.GLOBAL)
    )
    names = scores.OPTIMIZERS[optimizer]
    for row in (unclipped, clipped):
        yield np.array([row.tasks[name].scores.mean(-1) for name in names])


def test_with_adam_a_fault_costs_at_most_what_the_pages_say():
    unclipped, clipped = without_and_with_a_clip("Adam")
    assert f"{unclipped.min():.2f}" == "0.89" and f"{clipped.min():.2f}" == "0.98"


def test_with_momentum_a_fault_costs_what_the_pages_say():
    unclipped, clipped = without_and_with_a_clip("SGD with momentum")
    with_fault = unclipped[:, 1:]
    assert f"{with_fault.min():.2f}" == "0.00" and f"{with_fault.max():.2f}" == "0.98"
    assert f"{clipped.min():.2f}" == "0.98"


def test_only_with_momentum_the_clip_widens_the_range_of_rates():
    lines = scores.optimizers_table(pages.results("methods")).splitlines()[2:]
    beside = [line.split("|")[-2].strip() for line in lines]
    assert beside == ["0.74", "0.96", "0.90", "0.90"]


def test_tables_begin_with_no_clip_and_then_the_highest_mean():
    first, *others = scores.ranked(pages.results("methods"))
    means = [row.scores.mean() for row in others]
    assert first.method == "none" and means == sorted(means, reverse=True)


def test_the_picture_shows_the_groups_that_the_page_names():
    _, *clips = scores.ranked(pages.results("methods"))
    names = [clip.method for clip in clips]
    groups = picture.grouped(clips).values()
    good, *others = ([clip.method for clip in group] for group in groups)
    assert good == names[:15] and good[-1] == "autoclip(90)"
    assert list(map(len, others)) == [5, 5]


def test_what_rounds_to_no_difference_is_not_called_worse():
    table = scores.worse_table(pages.results("methods"))
    assert "-0.01" in table and "-0.00" not in table


def test_every_task_has_one_optimizer(benchmark):
    _, tasks, _ = benchmark
    named = {"SGD with momentum": tasks.MOMENTUM, "Adam": tasks.ADAM}
    for optimizer, names in scores.OPTIMIZERS.items():
        assert all(tasks.TASKS[name].optimizer is named[optimizer] for name in names)
    assert sorted(sum(scores.OPTIMIZERS.values(), ())) == sorted(QUIET)


def test_methods_that_the_page_warns_of_are_worse():
    agc = ROWS["adaptive_grad_clip(0.01)"]
    assert agc["regression"] < 0.01
    assert agc["transformer"] == max(row["transformer"] for row in ROWS.values())
    assert ROWS["clippy()"]["no fault"] < 0.2
    for name in (
        "aggc()",
        "carry_clipped(global)",
        "clip_by_tensor_rms(1.0)",
        "spam(), reset_momentum()",
    ):
        assert ROWS[name]["a layer x 1000"] < GLOBAL["a layer x 1000"] - 0.1


@pytest.mark.parametrize("fault", [0, 1])
@pytest.mark.parametrize("method", ["skip_step(global)", scores.GLOBAL])
def test_the_page_of_rl_has_the_scores_of_the_pole(method, fault):
    text = (pages.ROOT / "docs/reinforcement_learning.md").read_text()
    summary = next(row for row in SUMMARIES if row.method == method)
    assert scores.shown(summary.tasks["pole"].scores[fault]) in text
