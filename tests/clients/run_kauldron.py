"""A small regression with the trainer and the checkpointer of the package."""

from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
from kauldron import kd

from .trained import Trained

STEPS, BATCH = 12, 16
LOSSES: list[float] = []


class Model(nn.Module):
    """Two layers."""

    x: kd.kontext.Key = "batch.x"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(1)(nn.tanh(nn.Dense(16)(x)))


class Writer(kd.train.metric_writer.NoopWriter):
    """Keeps the losses that the trainer writes."""

    def write_step_metrics(self, *, aux: Any, **_: Any) -> None:
        LOSSES.append(float(aux.compute(flatten=True).loss_values["losses/l2"]))


def examples() -> dict[str, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(STEPS * BATCH, 4)).astype(np.float32)
    return {"x": x, "y": np.sin(x.sum(axis=1, keepdims=True))}


def train(folder: Path) -> Trained:
    LOSSES.clear()
    trainer = kd.train.Trainer(
        seed=0,
        workdir=folder,
        train_ds=kd.data.InMemoryPipeline(loader=examples, batch_size=BATCH),
        model=Model(),
        train_losses={"l2": kd.losses.L2(preds="preds", targets="batch.y")},
        optimizer=optax.chain(
            optax.clip_by_global_norm(0.1), optax.sgd(0.5, momentum=0.9)
        ),
        num_train_steps=STEPS,  # counted from 0, and this one is run too
        log_metrics_every=1,
        writer=Writer(),
    )
    state, _ = trainer.train()
    # The trainer's own last checkpoint is that of the step before the last one.
    checkpointer = kd.ckpts.Checkpointer(save_interval_steps=1, workdir=folder)
    checkpointer.save(state, step=STEPS, force=True)
    checkpointer.wait_until_finished()
    return Trained(LOSSES, state, checkpointer.restore(trainer.init_state()))
