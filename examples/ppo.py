"""Learns to balance a pole with PPO, clipped as everybody's PPO is, and with a limit
each for actor and critic.

What it shows. Everybody's PPO clips actor and critic together by a global norm of 0.5.
The critic has to learn returns of up to a hundred, so its gradient is many times as
long as the actor's. It alone decides how much the actor's gradient is shortened, in
nearly every step. So this limit is no guard, but sets the length of steps, as a
learning rate does. `clip_by_group_norm` has a limit for each. The actor's norm is below
its 0.5, so its factor is 1, and only the critic is clipped. Adam cancels most of both,
and no run learns faster with every seed.

What it prints. Now and then the mean return of the last episodes (at most 500), and
medians of the norms and of the factor that the actor's gradient was multiplied by.

    pip install gymnasium
    python examples/ppo.py

Reference: Andrychowicz et al., What matters in on-policy RL?, 2020 (arXiv 2006.05990).
"""

import argparse
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.typing import ArrayLike

import optaxclip

try:
    import gymnasium
except ModuleNotFoundError as error:
    error.add_note("Install what this program needs: pip install gymnasium")
    raise

STEPS = 32  # how many rollouts
GAMES = 16
LENGTH = 128  # steps of a rollout
UPDATES = 32  # from each rollout
BATCH = 256
MAX_NORM = 0.5
DISCOUNT = 0.99
DECAY = 0.95  # of later surprises, often called lambda
LABELS = {"actor": "actor", "critic": "critic"}
CLIPPERS = {
    "one limit": optaxclip.clip_by_global_norm(MAX_NORM),
    "two limits": optaxclip.clip_by_group_norm(MAX_NORM, LABELS),
}
draw = jax.jit(jax.random.categorical)

Layers = list[dict[str, Array]]
Params = dict[str, Layers]  # of "actor" and "critic"


def main(steps: int = STEPS, seed: int = 0) -> dict[str, np.ndarray]:
    """Learns twice. Returns float[steps, 4]: the table, a line for each rollout."""
    print("            rollout  return  actor norm  critic norm  actor factor")
    tables = {}
    for name, clipper in CLIPPERS.items():
        tables[name] = learn(name, clipper, steps, seed)
    one_factor = np.median(tables["one limit"][:, 3])
    two_factor = np.median(tables["two limits"][:, 3])
    print(
        f"\nThe actor's gradient was multiplied by {one_factor:.2f} with one limit, "
        f"which the critic's\nlong gradient decides, and by {two_factor:.2f} with a "
        "limit of its own. A limit that clips\nnearly every step acts as a learning "
        "rate. With Adam it does little harm: keep it.\n"
        "See docs/reinforcement_learning.md."
    )
    return tables


def learn(
    name: str, clipper: optax.GradientTransformation, steps: int, seed: int
) -> np.ndarray:
    """One run. A game that is over begins anew."""
    optimizer = optax.named_chain(
        ("all", optaxclip.clip_by_group_norm(None, LABELS)),  # only measures
        ("limit", clipper),
        ("adam", optax.adam(1e-3, eps=1e-5)),
    )
    params = {
        "actor": new_perceptron(4, 64, 64, 2, seed=seed),
        "critic": new_perceptron(4, 64, 64, 1, seed=seed),
    }
    state = optimizer.init(params)
    update = jax.jit(partial(improve, optimizer))
    games = new_games()
    observation, _ = games.reset(seed=seed)
    table = np.zeros((steps, 4))
    eighth = max(1, steps // 8)
    keys = jax.random.split(jax.random.key(seed), steps)
    for number, key in enumerate(keys):
        play_key, batch_key = jax.random.split(key)
        rollout = play(params["actor"], games, observation, play_key)
        observation = rollout.last
        params, state, report = update(params, state, rollout, batch_key)
        # One limit has one factor, and two have one for each label.
        factor_name = "clip/limit/factor"
        if factor_name not in report:
            factor_name = "clip/limit/factor/actor"
        table[number] = (
            np.mean(games.return_queue),
            np.median(report["clip/all/norm_before/actor"]),
            np.median(report["clip/all/norm_before/critic"]),
            np.median(report[factor_name]),
        )
        if number % eighth == 0:
            line = "{:6.1f}  {:10.3f}  {:11.2f}  {:12.3f}".format(*table[number])
            print(f"{name:10}  {number:7}  {line}", flush=True)
    return table


def new_perceptron(*sizes: int, seed: int) -> Layers:
    """Random weights for layers of these sizes, and biases of 0."""
    random = np.random.default_rng(seed)
    layers = []
    for inputs, outputs in pairwise(sizes):
        weights = random.normal(size=(inputs, outputs)) / inputs**0.5
        weights = jnp.asarray(weights, jnp.float32)
        layers.append({"w": weights, "b": jnp.zeros(outputs)})
    return layers


@jax.jit
def perceptron(layers: Layers, x: ArrayLike) -> Array:
    """The outputs of the last layer. All layers before it end in tanh."""
    *hidden_layers, last = layers
    activations = jnp.asarray(x)
    for layer in hidden_layers:
        activations = jnp.tanh(activations @ layer["w"] + layer["b"])
    return activations @ last["w"] + last["b"]


def new_games() -> Any:
    same_step = gymnasium.vector.AutoresetMode.SAME_STEP
    options = {"autoreset_mode": same_step}
    games = gymnasium.make_vec("CartPole-v1", GAMES, "sync", vector_kwargs=options)
    return gymnasium.wrappers.vector.RecordEpisodeStatistics(games)


class Rollout(NamedTuple):
    """LENGTH steps of all games."""

    observations: Any  # float32[LENGTH, GAMES, 4]
    actions: Any  # int[LENGTH, GAMES]
    rewards: Any  # float32[LENGTH, GAMES]
    ends: Any  # bool[LENGTH, GAMES]: the step ended the game
    last: Any  # float32[GAMES, 4]: the observations after the last step


class Samples(NamedTuple):
    """Steps of games, from which a batch is drawn."""

    observations: Array  # float32[samples, 4]
    actions: Array  # int[samples]
    log_probabilities: Array  # float32[samples]: when the actions were drawn
    advantages: Array  # float32[samples]
    returns: Array  # float32[samples]


def play(actor: Layers, games: Any, observation: Any, key: Array) -> Rollout:
    rows = []
    for move_key in jax.random.split(key, LENGTH):
        logits = perceptron(actor, observation)
        action = np.asarray(draw(move_key, logits))
        # As in many PPOs, a game that is cut off at 500 steps counts as lost. To judge
        # how it would go on, take its last observation from the info that is left out.
        after, reward, fell, lasted, _ = games.step(action)
        reward = reward.astype(np.float32)
        end = fell | lasted
        rows.append((observation, action, reward, end))
        observation = after
    observations, actions, rewards, ends = map(np.stack, zip(*rows))
    return Rollout(observations, actions, rewards, ends, last=observation)


def improve(
    optimizer: optax.GradientTransformation,
    params: Params,
    state: Any,
    rollout: Rollout,
    key: Array,
) -> tuple[Params, Any, dict[str, Array]]:
    """Takes UPDATES steps. Returns weights, state and the metrics of each step."""
    samples = samples_of(params, rollout)

    def step(trained: tuple[Params, Any], chosen: Array) -> Any:
        params, state = trained
        batch = jax.tree.map(lambda leaf: leaf[chosen], samples)
        grads = jax.grad(loss)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        report = optaxclip.metrics(state)
        return (params, state), report

    shape = UPDATES, BATCH
    batches = jax.random.choice(key, LENGTH * GAMES, shape)
    start = params, state
    (params, state), report = jax.lax.scan(step, start, batches)
    return params, state, report


def samples_of(params: Params, rollout: Rollout) -> Samples:
    """The steps of all games in one row, judged by the critic."""
    observations = rollout.observations
    actions = rollout.actions
    advantages, returns = judge(params["critic"], rollout)
    samples = Samples(
        observations=observations,
        actions=actions,
        log_probabilities=log_probabilities(params["actor"], observations, actions),
        advantages=advantages,
        returns=returns,
    )

    def in_one_row(leaf: Array) -> Array:
        steps, games, *shape = leaf.shape
        return leaf.reshape(steps * games, *shape)

    return jax.tree.map(in_one_row, samples)


def judge(critic: Layers, rollout: Rollout) -> tuple[Array, Array]:
    """Generalised advantages, and the returns that the critic should have expected."""
    values = perceptron(critic, rollout.observations)[..., 0]
    last_values = perceptron(critic, rollout.last)[..., 0]

    def backwards(later: Any, now: Any) -> Any:
        advantage, next_value = later
        reward, end, value = now
        later_value = jnp.where(end, 0, next_value)
        surprise = reward + DISCOUNT * later_value - value
        later_advantage = jnp.where(end, 0, advantage)
        advantage = surprise + DISCOUNT * DECAY * later_advantage
        return (advantage, value), advantage

    start = jnp.zeros_like(last_values), last_values
    history = rollout.rewards, rollout.ends, values
    _, advantages = jax.lax.scan(backwards, start, history, reverse=True)
    return advantages, advantages + values


def log_probabilities(actor: Layers, observations: Any, actions: Any) -> Array:
    logits = perceptron(actor, observations)
    scores = jax.nn.log_softmax(logits)
    index = actions[..., None]
    scores = jnp.take_along_axis(scores, index, axis=-1)
    return scores[..., 0]


def loss(params: Params, batch: Samples) -> Array:
    """PPO's loss, which clips ratios of probabilities, plus the critic's error."""
    observations = batch.observations
    new = log_probabilities(params["actor"], observations, batch.actions)
    ratio = jnp.exp(new - batch.log_probabilities)
    advantages = batch.advantages
    deviation = advantages.std() + 1e-8
    advantages = (advantages - advantages.mean()) / deviation
    ratio_near_one = jnp.clip(ratio, 0.8, 1.2)
    gain = jnp.minimum(ratio * advantages, ratio_near_one * advantages)
    values = perceptron(params["critic"], observations)[..., 0]
    squared_error = (values - batch.returns) ** 2
    return 0.25 * squared_error.mean() - gain.mean()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=STEPS, help=f"(default: {STEPS})")
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    main(**vars(parser.parse_args()))
