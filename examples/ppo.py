"""Learns to balance a pole with PPO, clipped as everybody's PPO is, and with a limit
each for actor and critic.

What it shows. PPO implementations agree on `clip_by_global_norm(0.5)`. The critic has
to learn returns of up to a hundred, so its gradient is many times as long as the
actor's, and one norm over both measures the critic: what the actor may do depends on
how wrong the critic is. `clip_by_group_norm` gives each a limit of its own. The same
agent learns CartPole-v1 of gymnasium twice, from the same seed: a run that balances for
ever gets 500, one that does nothing about 20.

    one limit     clip_by_global_norm(0.5)
    two limits    clip_by_group_norm(0.5, {"actor": "actor", "critic": "critic"})

What it does not show. That one of the two learns faster: both learn, and the seed
decides more than the clip (--seed). Adam divides by the size of its gradients, so a
constant factor on the actor's would change nothing. What changes is how evenly its
steps count.

How long it takes. Half a minute on two CPU cores, a third of it compilation.

What it prints. A line now and then while it learns, and a table: mean return of the
episodes that ended in each quarter of a run, the share of steps that were clipped, the
norms, and what the actor's gradient was multiplied by.

    python examples/ppo.py --steps 80 --seed 1

Reference: Schulman et al., Proximal policy optimization algorithms, 2017 (arXiv
1707.06347). Andrychowicz et al., What matters in on-policy reinforcement learning?,
2020 (arXiv 2006.05990).
"""

import argparse
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optaxclip

try:
    import gymnasium
except ModuleNotFoundError as error:
    error.add_note('Install what this program needs: pip install -e ".[examples]"')
    raise

ENVIRONMENTS, LENGTH = 16, 128  # one rollout
EPOCHS, MINIBATCHES = 4, 8  # steps of the optimizer for each rollout: their product
HIDDEN, LEARNING_RATE, MAX_NORM = 64, 1e-3, 0.5
DISCOUNT, TRACE, RATIO, ENTROPY, CRITIC = 0.99, 0.95, 0.2, 0.01, 0.5
PARTS = {"actor": "actor", "critic": "critic"}


class Rollout(NamedTuple):
    """What the agent did and what came of it."""

    observations: np.ndarray  # float32[LENGTH + 1, ENVIRONMENTS, 4]
    actions: np.ndarray  # int32[LENGTH, ENVIRONMENTS]
    rewards: np.ndarray  # float32[LENGTH, ENVIRONMENTS]
    terminated: (
        np.ndarray
    )  # bool[LENGTH, ENVIRONMENTS]: the pole fell, there is nothing more to come
    truncated: (
        np.ndarray
    )  # bool[LENGTH, ENVIRONMENTS]: 500 steps are over, though more would have come
    # bool[LENGTH, ENVIRONMENTS]: False where the environment was only reset, and did
    # not look at the action
    played: np.ndarray


class Samples(NamedTuple):
    """What the agent learns from: one entry for each action."""

    observation: jax.Array | np.ndarray  # float32[actions, 4]
    action: jax.Array | np.ndarray  # int32[actions]
    log_probability: jax.Array | np.ndarray  # float32[actions]: when it was taken
    advantage: jax.Array | np.ndarray  # float32[actions]
    goal: (
        jax.Array | np.ndarray
    )  # float32[actions]: the return that the critic should have foretold
    played: jax.Array | np.ndarray  # bool[actions]


class Clipping(NamedTuple):
    """What one step of the optimizer saw and did."""

    actor_norm: jax.Array  # float32[]: before clipping
    critic_norm: jax.Array  # float32[]
    actor_factor: jax.Array  # float32[]: what the actor's gradient was multiplied by
    critic_factor: jax.Array  # float32[]: and the critic's


class Row(NamedTuple):
    """One line of the table."""

    run: str
    environment_steps: int  # at the end of this part of the run
    mean_return: float  # of the episodes that ended in it, NaN if none did
    # share of the optimizer's steps in which the actor's gradient was shortened, in [0,
    # 1]
    actor_clipped: float
    critic_clipped: float
    actor_norm: float  # medians
    critic_norm: float
    actor_factor: float


def main(steps: int = 32, *, seed: int = 0) -> list[Row]:
    """Learns twice, for `steps` rollouts each, prints the table and returns it."""
    clippers = {
        "one limit": optaxclip.clip_by_global_norm(MAX_NORM),
        "two limits": optaxclip.clip_by_group_norm(MAX_NORM, PARTS),
    }
    rows = [
        row
        for run, clipper in clippers.items()
        for row in learn(run, clipper, steps, seed)
    ]
    print_table(rows)
    return rows


def learn(run: str, clipper: Any, steps: int, seed: int) -> list[Row]:
    """One run."""
    began = time.perf_counter()
    optimizer = new_optimizer(clipper, steps)
    params = new_agent(seed)
    state = optimizer.init(params)
    update = compile_update(optimizer)
    environments = gymnasium.make_vec(
        "CartPole-v1", num_envs=ENVIRONMENTS, vectorization_mode="vector_entry_point"
    )
    start = environments.reset(seed=seed)[0], np.zeros(ENVIRONMENTS, bool)
    score, returns, clippings = np.zeros(ENVIRONMENTS), [], []
    for number in range(steps):
        play, learning = jax.random.split(
            jax.random.fold_in(jax.random.key(seed), number)
        )
        rollout, start = roll_out(params, environments, start, play)
        params, state, clipping = update(params, state, rollout, learning)
        returns.append(finished_returns(rollout, score))
        clippings.append(jax.device_get(clipping))
        if (number + 1) % max(1, steps // 6) == 0:
            seen = np.concatenate(returns[-max(1, steps // 6) :])
            print(
                f"{run:10} rollout {number + 1:4}  mean return {mean(seen):6.1f}  "
                f"{time.perf_counter() - began:5.1f} s",
                flush=True,
            )
    environments.close()
    return [
        summary(run, part, returns, clippings)
        for part in np.array_split(np.arange(steps), min(4, steps))
    ]


def new_optimizer(clipper: Any, steps: int) -> optax.GradientTransformationExtraArgs:
    """Adam with a falling rate. The first part has no limits: it only measures the two
    norms before anything is clipped.
    """
    rate = optax.linear_schedule(LEARNING_RATE, 0.0, steps * EPOCHS * MINIBATCHES)
    parts = optaxclip.clip_by_group_norm(None, PARTS)
    return optax.named_chain(
        ("parts", parts), ("clipper", clipper), ("adam", optax.adam(rate, eps=1e-5))
    )


def roll_out(
    params: Any, environments: Any, start: tuple[np.ndarray, np.ndarray], key: jax.Array
) -> tuple[Rollout, tuple[np.ndarray, np.ndarray]]:
    """Plays on from where the last rollout ended."""
    observation, over = start
    observations, rest = [observation], []
    for number in range(LENGTH):
        action = np.asarray(act(params, observation, key, number))
        # In the step after an episode's end the environment is reset, and the action
        # goes nowhere.
        played = ~over
        observation, reward, terminated, truncated, _ = environments.step(action)
        over = terminated | truncated
        observations.append(observation)
        rest.append((action, reward, terminated, truncated, played))
    return Rollout(np.stack(observations), *map(np.stack, zip(*rest))), (
        observation,
        over,
    )


@jax.jit
def act(
    params: Any, observation: jax.Array, key: jax.Array, number: jax.Array
) -> jax.Array:
    return jax.random.categorical(
        jax.random.fold_in(key, number), network(params["actor"], observation)
    )


def compile_update(optimizer: Any) -> Callable[..., Any]:
    """A jitted function: agent, optimizer state, rollout and key become the next agent
    and state, and the `Clipping` of every step on the way.
    """

    def step(trained: Any, samples: Samples) -> tuple[Any, Clipping]:
        params, state = trained
        updates, state = optimizer.update(
            jax.grad(loss)(params, samples), state, params
        )
        return (optax.apply_updates(params, updates), state), what_happened(
            optaxclip.metrics(state)
        )

    def update(
        params: Any, state: Any, rollout: Rollout, key: jax.Array
    ) -> tuple[Any, Any, Clipping]:
        samples = judge(params, rollout)

        def epoch(trained: Any, key: jax.Array) -> tuple[Any, Clipping]:
            order = jax.random.permutation(key, LENGTH * ENVIRONMENTS).reshape(
                MINIBATCHES, -1
            )
            return jax.lax.scan(
                step, trained, jax.tree.map(lambda x: x[order], samples)
            )

        (params, state), clipping = jax.lax.scan(
            epoch, (params, state), jax.random.split(key, EPOCHS)
        )
        return params, state, clipping

    return jax.jit(update, donate_argnums=(0, 1))


def judge(params: Any, rollout: Rollout) -> Samples:
    """How much better each action was than the critic expected (generalised advantage
    estimation).
    """
    values = network(params["critic"], rollout.observations)[..., 0]

    def backwards(advantage: jax.Array, now: Any) -> tuple[jax.Array, jax.Array]:
        reward, terminated, truncated, value, next_value = now
        surprise = reward + DISCOUNT * jnp.where(terminated, 0.0, next_value) - value
        advantage = surprise + DISCOUNT * TRACE * jnp.where(
            terminated | truncated, 0.0, advantage
        )
        return advantage, advantage

    history = (
        rollout.rewards,
        rollout.terminated,
        rollout.truncated,
        values[:-1],
        values[1:],
    )
    advantages = jax.lax.scan(
        backwards, jnp.zeros(ENVIRONMENTS), history, reverse=True
    )[1]
    seen = rollout.observations[:-1]
    log_probabilities = log_probability(params, seen, rollout.actions)[0]
    samples = Samples(
        seen,
        rollout.actions,
        log_probabilities,
        advantages,
        advantages + values[:-1],
        rollout.played,
    )
    return jax.tree.map(
        lambda x: x.reshape(LENGTH * ENVIRONMENTS, *x.shape[2:]), samples
    )


def loss(params: Any, samples: Samples) -> jax.Array:
    """PPO's clipped objective (a clip of probability ratios, not of gradients), the
    critic's squared error, and a reward for not being certain.
    """

    def average(x: jax.Array | np.ndarray) -> jax.Array:
        return jnp.mean(x, where=samples.played)

    log_probabilities, entropy = log_probability(
        params, samples.observation, samples.action
    )
    ratio = jnp.exp(log_probabilities - samples.log_probability)
    centred = samples.advantage - average(samples.advantage)
    advantage = centred / jnp.sqrt(average(centred**2) + 1e-8)
    gain = jnp.minimum(
        ratio * advantage, jnp.clip(ratio, 1 - RATIO, 1 + RATIO) * advantage
    )
    error = (network(params["critic"], samples.observation)[..., 0] - samples.goal) ** 2
    return -average(gain) + CRITIC * average(error) / 2 - ENTROPY * average(entropy)


def log_probability(
    params: Any,
    observations: jax.Array | np.ndarray,
    actions: jax.Array | np.ndarray,
) -> tuple[jax.Array, jax.Array]:
    """Of each action that was taken, and the entropy of the choice."""
    log_probabilities = jax.nn.log_softmax(network(params["actor"], observations))
    entropy = -jnp.sum(jnp.exp(log_probabilities) * log_probabilities, axis=-1)
    return jnp.take_along_axis(log_probabilities, actions[..., None], axis=-1)[
        ..., 0
    ], entropy


def new_agent(seed: int) -> dict[str, list[dict[str, jax.Array]]]:
    """Two networks. The actor's last layer is small: at first every action is as likely
    as the other.
    """
    random = np.random.default_rng(seed)

    def layers(outputs: int, last: float) -> list[dict[str, jax.Array]]:
        sizes, gains = [4, HIDDEN, HIDDEN, outputs], [2.0**0.5, 2.0**0.5, last]
        return [
            {
                "w": jnp.asarray(
                    gain * random.normal(size=size) / size[0] ** 0.5, jnp.float32
                ),
                "b": jnp.zeros(size[1]),
            }
            for gain, size in zip(gains, pairwise(sizes))
        ]

    return {"actor": layers(2, 0.01), "critic": layers(1, 1.0)}


def network(layers: list[dict[str, jax.Array]], x: jax.Array | np.ndarray) -> jax.Array:
    first, *others = layers
    x = jnp.asarray(x) @ first["w"] + first["b"]
    for layer in others:
        x = jnp.tanh(x) @ layer["w"] + layer["b"]
    return x


def what_happened(report: dict[str, jax.Array]) -> Clipping:
    one = "clip/clipper/factor"  # for both, or each its own
    factors = [report[one if one in report else f"{one}/{part}"] for part in PARTS]
    return Clipping(
        report["clip/parts/norm_before/actor"],
        report["clip/parts/norm_before/critic"],
        *factors,
    )


def finished_returns(rollout: Rollout, score: np.ndarray) -> np.ndarray:
    """The returns of the episodes that ended in this rollout. `score` holds what
    unfinished ones have so far, and is kept up.
    """
    finished = []
    for reward, over in zip(rollout.rewards, rollout.terminated | rollout.truncated):
        score += reward
        finished.extend(score[over])
        score[over] = 0
    return np.array(finished)


def mean(values: np.ndarray) -> float:
    return float(values.mean()) if values.size else float("nan")


def summary(
    run: str, part: np.ndarray, returns: list[np.ndarray], clippings: list[Clipping]
) -> Row:
    seen = jax.tree.map(
        lambda *rollouts: np.concatenate(rollouts),
        *(clippings[number] for number in part),
    )
    clipped = [
        float(np.mean(factor < 1)) for factor in (seen.actor_factor, seen.critic_factor)
    ]
    medians = [
        float(np.median(x))
        for x in (seen.actor_norm, seen.critic_norm, seen.actor_factor)
    ]
    environment_steps = int(part[-1] + 1) * LENGTH * ENVIRONMENTS
    return Row(
        run,
        environment_steps,
        mean(np.concatenate([returns[number] for number in part])),
        *clipped,
        *medians,
    )


def print_table(rows: list[Row]) -> None:
    print(
        f"\n{'':10}  {'steps in the':>12}  {'mean':>6}  {'steps clipped':^15}  "
        f"{'norm':^15}  {'actor':>7}"
    )
    print(
        f"{'run':10}  {'environment':>12}  {'return':>6}  {'actor':>7} {'critic':>7}  "
        f"{'actor':>7} {'critic':>7}  {'factor':>7}"
    )
    for row in rows:
        numbers = (
            f"{row.actor_clipped:7.1%} {row.critic_clipped:7.1%}  "
            f"{row.actor_norm:7.3g} {row.critic_norm:7.3g}  {row.actor_factor:7.3g}"
        )
        print(
            f"{row.run:10}  {row.environment_steps:12}  {row.mean_return:6.1f}  "
            f"{numbers}"
        )
    print(
        "\nNorms are those before clipping, and like the factor medians over the steps "
        "of the optimizer."
    )


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=32,
        help=f"rollouts of {LENGTH} steps in {ENVIRONMENTS} environments "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="the seed of everything (default: %(default)s)",
    )
    return parser


if __name__ == "__main__":
    main(**vars(command_line().parse_args()))
