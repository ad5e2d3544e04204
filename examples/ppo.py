"""Learns to balance a pole with PPO, clipped as everybody's PPO is, and with a limit
each for actor and critic.

What it shows. Everybody's PPO clips actor and critic together by a global norm of 0.5.
The critic has to learn returns of up to a hundred, so its gradient is many times as
long as the actor's. It alone decides how much the actor's gradient is shortened.
`clip_by_group_norm` has a limit for each. Which run learns faster depends on the seed.

What it prints. Now and then the mean return of the last episodes (at most 500), and
medians of the norms and of the factor that the actor's gradient was multiplied by.

    python examples/ppo.py --steps 80

Reference: Andrychowicz et al., What matters in on-policy RL?, 2020 (arXiv 2006.05990).
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _shared import new_perceptron, packages, perceptron, run

import optaxclip

with packages():
    import gymnasium

GAMES, LENGTH, UPDATES, BATCH = 16, 128, 32, 256
PARTS = {"actor": "actor", "critic": "critic"}
RUNS = {
    "one limit": optaxclip.clip_by_global_norm(0.5),
    "two limits": optaxclip.clip_by_group_norm(0.5, PARTS),
}
logits, draw = jax.jit(perceptron), jax.jit(jax.random.categorical)


def main(steps: int = 32, seed: int = 0) -> dict[str, np.ndarray]:
    """Learns twice. Returns float[steps, 4]: the table, a line for each rollout."""
    print("            rollout  return  actor norm  critic norm  actor factor")
    return {name: learn(name, clipper, steps, seed) for name, clipper in RUNS.items()}


def learn(name: str, clipper: Any, steps: int, seed: int) -> np.ndarray:
    """One run. A game that is over begins anew."""
    before = optaxclip.clip_by_group_norm(None, PARTS)  # only measures
    adam = optax.adam(1e-3, eps=1e-5)
    optimizer = optax.named_chain(("all", before), ("limit", clipper), ("adam", adam))
    sizes = {"actor": (4, 64, 64, 2), "critic": (4, 64, 64, 1)}
    params = {part: new_perceptron(*sizes[part], seed=seed) for part in PARTS}
    state = optimizer.init(params)
    update = jax.jit(partial(improve, optimizer))
    options = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}
    games = gymnasium.make_vec("CartPole-v1", GAMES, "sync", vector_kwargs=options)
    games = gymnasium.wrappers.vector.RecordEpisodeStatistics(games)
    observation, _ = games.reset(seed=seed)
    table = np.zeros((steps, 4))
    for number, key in enumerate(jax.random.split(jax.random.key(seed), steps)):
        play_key, batch_key = jax.random.split(key)
        rollout = play(params, games, observation, play_key)
        observation = rollout.last
        params, state, report = update(params, state, rollout, batch_key)
        norms = [report[f"clip/all/norm_before/{part}"] for part in PARTS]
        factor = report.get("clip/limit/factor", report.get("clip/limit/factor/actor"))
        medians = np.median([*norms, factor], axis=1)
        table[number] = np.mean(games.return_queue), *medians
        if number % max(1, steps // 8) == 0:
            shown = "{:6.1f}  {:10.3f}  {:11.2f}  {:12.3f}".format(*table[number])
            print(f"{name:10}  {number:7}  {shown}", flush=True)
    return table


class Rollout(NamedTuple):
    """LENGTH steps of all games."""

    observations: Any  # float32[LENGTH, GAMES, 4]
    actions: Any  # int[LENGTH, GAMES]
    rewards: Any  # float32[LENGTH, GAMES]
    ends: Any  # bool[LENGTH, GAMES]: the step ended the game
    last: Any  # float32[GAMES, 4]: the observations after the last step


def play(params: Any, games: Any, observation: Any, key: jax.Array) -> Rollout:
    rows = []
    for move_key in jax.random.split(key, LENGTH):
        action = np.asarray(draw(move_key, logits(params["actor"], observation)))
        after, reward, fell, lasted, _ = games.step(action)
        rows.append((observation, action, reward.astype(np.float32), fell | lasted))
        observation = after
    observations, actions, rewards, ends = map(np.stack, zip(*rows))
    return Rollout(observations, actions, rewards, ends, observation)


def improve(optimizer: Any, params: Any, state: Any, rollout: Any, key: Any) -> Any:
    """Takes UPDATES steps. Returns weights, state and the metrics of each step."""
    old = log_probabilities(params, rollout.observations, rollout.actions)
    advantages, returns = judge(params["critic"], rollout)
    samples = rollout.observations, rollout.actions, old, advantages, returns
    samples = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), samples)

    def step(trained: Any, chosen: jax.Array) -> Any:
        params, state = trained
        batch = jax.tree.map(lambda x: x[chosen], samples)
        grads = jax.grad(loss)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), optaxclip.metrics(state)

    batches = jax.random.choice(key, LENGTH * GAMES, (UPDATES, BATCH))
    (params, state), report = jax.lax.scan(step, (params, state), batches)
    return params, state, report


def judge(critic: Any, rollout: Rollout) -> tuple[jax.Array, jax.Array]:
    """Generalised advantages, and the returns that the critic should have expected."""
    values = perceptron(critic, rollout.observations)[..., 0]
    last_value = perceptron(critic, rollout.last)[..., 0]

    def backwards(later: Any, now: Any) -> Any:
        advantage, next_value = later
        reward, end, value = now
        surprise = reward + 0.99 * jnp.where(end, 0, next_value) - value
        advantage = surprise + 0.99 * 0.95 * jnp.where(end, 0, advantage)
        return (advantage, value), advantage

    start = jnp.zeros_like(last_value), last_value
    history = rollout.rewards, rollout.ends, values
    _, advantages = jax.lax.scan(backwards, start, history, reverse=True)
    return advantages, advantages + values


def log_probabilities(params: Any, observations: Any, actions: Any) -> jax.Array:
    scores = jax.nn.log_softmax(perceptron(params["actor"], observations))
    return jnp.take_along_axis(scores, actions[..., None], axis=-1)[..., 0]


def loss(params: Any, samples: Any) -> jax.Array:
    """PPO's loss, which clips ratios of probabilities, plus the critic's error."""
    observations, actions, old, advantages, returns = samples
    ratio = jnp.exp(log_probabilities(params, observations, actions) - old)
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    near_one = jnp.clip(ratio, 0.8, 1.2)
    gain = jnp.minimum(ratio * advantages, near_one * advantages)
    error = (perceptron(params["critic"], observations)[..., 0] - returns) ** 2
    return 0.25 * error.mean() - gain.mean()


if __name__ == "__main__":
    run(main)
