"""What is compared: how each method stands in a chain with the optimizer.

A limit is the usual one, or a round number near the norms of these tasks. Memories and
waits that are made for runs of thousands of steps are shortened to these hundreds.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optaxclip as oc

Optimizer = optax.GradientTransformation
Rate = Callable[[Any], Any]  # a schedule
# (optimizer without a rate, rate) to the whole optimizer
Method = Callable[[Optimizer, Rate], Optimizer]

NOTHING = optax.identity()
GLOBAL = oc.clip_by_global_norm(1.0)


def chained(
    *clippers: Optimizer, direction: Optimizer = NOTHING, update: Optimizer = NOTHING
) -> Method:
    """Clips the gradient, the direction that the optimizer takes, or the update."""

    def build(optimizer: Optimizer, rate: Rate) -> Optimizer:
        descend = optax.scale_by_learning_rate(rate)
        return optax.chain(*clippers, optimizer, direction, descend, update)

    return build


def spam_with_resets(optimizer: Optimizer, rate: Rate) -> Optimizer:
    momentum = oc.reset_momentum(optimizer, every=80, warmup=20)
    return chained(oc.spam(every=80))(momentum, rate)


def larc(optimizer: Optimizer, rate: Rate) -> Optimizer:
    return chained(oc.larc(rate))(optimizer, rate)


def skip_step(optimizer: Optimizer, rate: Rate) -> Optimizer:
    return oc.skip_step(chained(GLOBAL)(optimizer, rate))


def skip_spikes(optimizer: Optimizer, rate: Rate) -> Optimizer:
    rule = oc.rules.log_z_score(4.0, warmup=25)
    return oc.skip_spikes(chained(GLOBAL)(optimizer, rate), rule)


def matrices_and_vectors(tree: Any) -> Any:
    return jax.tree.map(lambda x: "matrix" if jnp.ndim(x) > 1 else "vector", tree)


BY_RANK = oc.clip_by_group_norm(0.1, matrices_and_vectors)

METHODS: dict[str, Method] = {
    "none": chained(),
    "clip_by_global_norm(1.0)": chained(GLOBAL),
    "skip_step(global)": skip_step,
    "zclip()": chained(oc.zclip()),
    "adagc()": chained(oc.adagc(warmup=50)),
    "spam(), reset_momentum()": spam_with_resets,
    "adaptive_grad_clip(0.01)": chained(oc.adaptive_grad_clip(0.01)),
    "autoclip(10)": chained(oc.autoclip(10, 1000)),
    "adaclip(), adagn()": chained(oc.adaclip(0.99), oc.adagn()),
    "clip_by_tensor_rms(1.0)": chained(direction=oc.clip_by_tensor_rms(1.0)),
    "clip_by_global_norm(0.1)": chained(oc.clip_by_global_norm(0.1)),
    "clip_by_tensor_norm(0.1)": chained(oc.clip_by_tensor_norm(0.1)),
    "clip_by_value(0.1)": chained(oc.clip_by_value(0.1)),
    "autoclip(90)": chained(oc.autoclip(90, 1000)),
    "clip_by_unitwise_norm(0.1)": chained(oc.clip_by_unitwise_norm(0.1)),
    "clip_by_group_norm(0.1)": chained(BY_RANK),
    "spam()": chained(oc.spam()),
    "skip_spikes(global)": skip_spikes,
    "clippy()": chained(update=oc.clippy()),
    "larc(rate)": larc,
    "aggc()": chained(oc.aggc(scope="tensor")),
    "adaclip()": chained(oc.adaclip(0.99)),
    "adagn()": chained(oc.adagn()),
    "carry_clipped(global)": chained(oc.carry_clipped(GLOBAL)),
    "constrain(unitwise)": chained(update=oc.constrain(oc.clip_by_unitwise_norm(2.0))),
    "clip_by_average_norm(0.001)": chained(oc.clip_by_average_norm(0.001)),
}
