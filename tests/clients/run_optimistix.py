"""The Rosenbrock function, minimised inside a compiled loop."""

from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import optimistix as optx

from .trained import Trained

STEPS = (1, 2, 5, 10, 20, 50)


def rosenbrock(y: jax.Array, _: None) -> jax.Array:
    return jnp.sum(100.0 * (y[1:] - y[:-1] ** 2) ** 2 + (1.0 - y[:-1]) ** 2)


def train(folder: Path) -> Trained:
    optimizer = optax.chain(optax.clip_by_global_norm(100.0), optax.sgd(1e-3))
    solver = optx.OptaxMinimiser(optimizer, rtol=1e-6, atol=1e-6)
    start, losses, saved = jnp.array([-1.0, 2.0, 1.0]), [], None
    for steps in STEPS:
        # No more steps than these, which is no error here.
        found = optx.minimise(rosenbrock, solver, start, max_steps=steps, throw=False)
        losses.append(float(rosenbrock(found.value, None)))
        saved = found.state
    eqx.tree_serialise_leaves(folder / "state.eqx", saved)
    return Trained(
        losses, saved, eqx.tree_deserialise_leaves(folder / "state.eqx", saved)
    )
