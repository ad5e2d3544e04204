"""Fine-tuning of a small flax NNX model, with the checkpoints of the trainer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax import nnx
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

from .trained import Trained

STEPS, VOCABULARY = 12, 16


class Model(nnx.Module):
    """Guesses each token from the one before it."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embedding = nnx.Embed(VOCABULARY, 8, rngs=rngs)
        self.readout = nnx.Linear(8, VOCABULARY, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.readout(jnp.tanh(self.embedding(tokens)))


class Trainer(PeftTrainer):
    """The trainer of the package, which keeps its losses."""

    losses: tuple[float, ...] = ()

    def _train_step(self, model: Any, optimizer: Any, inputs: Any) -> Any:
        found = super()._train_step(model, optimizer, inputs)
        jax.debug.callback(self.keep, found[0], ordered=True)
        return found

    def keep(self, loss: jax.Array) -> None:
        self.losses = (*self.losses, float(loss))


def loss(model: Model, tokens: jax.Array) -> jax.Array:
    each = optax.softmax_cross_entropy_with_integer_labels
    return each(model(tokens[:, :-1]), tokens[:, 1:]).mean()


def batches() -> Iterator[dict[str, jax.Array]]:
    for key in jax.random.split(jax.random.key(1), STEPS):
        yield {"tokens": jax.random.randint(key, (4, 9), 0, VOCABULARY)}


def new_trainer(folder: Path) -> Trainer:
    """A trainer, which restores what it finds in the folder."""
    optimizer = optax.chain(
        optax.clip_by_global_norm(0.2), optax.sgd(0.5, momentum=0.9)
    )
    every_step = ocp.CheckpointManagerOptions(save_interval_steps=1)
    config = TrainingConfig(
        eval_every_n_steps=STEPS,
        max_steps=STEPS,
        checkpoint_root_directory=str(folder),
        checkpointing_options=every_step,
    )
    return Trainer(Model(nnx.Rngs(0)), optimizer, config).with_loss_fn(loss)


def train(folder: Path) -> Trained:
    trainer = new_trainer(folder)
    trainer.train(list(batches()))
    restored = new_trainer(folder)
    return Trained(list(trainer.losses), state_of(trainer), state_of(restored))


def state_of(trainer: Trainer) -> Any:
    """Weights and optimizer, as plain arrays."""
    states = nnx.state(trainer.model), nnx.state(trainer.optimizer)
    return [nnx.as_pure(state) for state in states]
