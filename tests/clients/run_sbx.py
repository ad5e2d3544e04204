"""PPO on CartPole, whose optimizer the package builds itself, in its policy."""

from pathlib import Path
from typing import Any

import optax
from sbx import PPO
from stable_baselines3.common.logger import KVWriter, Logger

from .trained import Trained

STEPS, ROLLOUT, BATCH = 256, 64, 32


class Losses(KVWriter):
    """Keeps the losses that the trainer logs."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def write(self, key_values: dict[str, Any], *_: Any, **__: Any) -> None:
        names = ("train/pg_loss", "train/value_loss")
        self.losses += [float(key_values[name]) for name in names if name in key_values]

    def close(self) -> None:
        """Nothing is open."""


def train(folder: Path) -> Trained:
    model = PPO(
        "MlpPolicy",
        "CartPole-v1",
        n_steps=ROLLOUT,
        batch_size=BATCH,
        n_epochs=2,
        learning_rate=0.01,
        max_grad_norm=0.1,
        seed=0,
        device="cpu",
        # Adam divides by the size of its gradients, and would hide much of a clip.
        policy_kwargs={"net_arch": [16], "optimizer_class": optax.sgd},
    )
    seen = Losses()
    model.set_logger(Logger(None, [seen]))
    model.learn(STEPS, log_interval=1)
    model.save(folder / "ppo.zip")
    restored = PPO.load(folder / "ppo.zip", device="cpu")
    # The last update is logged when the next rollout is, which does not come.
    model.logger.dump(STEPS)
    return Trained(seen.losses, states_of(model), states_of(restored))


def states_of(model: PPO) -> Any:
    """Weights and optimizers of actor and critic."""
    policy = model.policy
    return [
        (state.params, state.opt_state)
        for state in (policy.actor_state, policy.vf_state)
    ]
