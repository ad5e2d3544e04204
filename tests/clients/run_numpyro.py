"""Stochastic variational inference of a regression."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import optax
import orbax.checkpoint as ocp
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.optim import optax_to_numpyro

from .trained import Trained

STEPS = 20


def model(x: jax.Array, y: jax.Array) -> None:
    weight = numpyro.sample("weight", dist.Normal(jnp.zeros(3), 1.0).to_event(1))
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(x @ weight, scale), obs=y)


def train(folder: Path) -> Trained:
    x = jax.random.normal(jax.random.key(0), (32, 3))
    y = x @ jnp.array([1.0, -2.0, 0.5])
    optimizer = optax.chain(optax.clip_by_global_norm(10.0), optax.sgd(0.01))
    svi = SVI(model, AutoNormal(model), optax_to_numpyro(optimizer), Trace_ELBO())
    state, losses = svi.init(jax.random.PRNGKey(1), x, y), []
    update = jax.jit(svi.update)
    for _ in range(STEPS):
        state, loss = update(state, x, y)
        losses.append(float(loss))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "svi", state)
        checkpointer.wait_until_finished()
        return Trained(losses, state, checkpointer.restore(folder / "svi", state))
