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


def before(*clippers: Optimizer) -> Method:
    """The gradient is clipped."""

    def build(optimizer: Optimizer, rate: Rate) -> Optimizer:
        return optax.chain(*clippers, optimizer, optax.scale_by_learning_rate(rate))

    return build


def after(clipper: Optimizer) -> Method:
    """What the optimizer made of the gradient is clipped, before the rate."""

    def build(optimizer: Optimizer, rate: Rate) -> Optimizer:
        return optax.chain(optimizer, clipper, optax.scale_by_learning_rate(rate))

    return build


def last(clipper: Optimizer) -> Method:
    """The update is clipped, behind the rate."""

    def build(optimizer: Optimizer, rate: Rate) -> Optimizer:
        return optax.chain(optimizer, optax.scale_by_learning_rate(rate), clipper)

    return build


def around(wrap: Callable[[Optimizer], Optimizer], method: Method) -> Method:
    """The whole optimizer is wrapped."""
    return lambda optimizer, rate: wrap(method(optimizer, rate))


def inside(clipper: Optimizer, **options: Any) -> Method:
    """The moments are reset now and then."""

    def build(optimizer: Optimizer, rate: Rate) -> Optimizer:
        return before(clipper)(oc.reset_momentum(optimizer, **options), rate)

    return build


def larc(optimizer: Optimizer, rate: Rate) -> Optimizer:
    return before(oc.larc(rate))(optimizer, rate)


def matrices_and_vectors(tree: Any) -> Any:
    return jax.tree.map(lambda x: "matrix" if jnp.ndim(x) > 1 else "vector", tree)


GLOBAL = oc.clip_by_global_norm(1.0)
SPIKES = oc.rules.log_z_score(4.0, warmup=25)

METHODS: dict[str, Method] = {
    "none": before(),
    "clip_by_global_norm(1.0)": before(GLOBAL),
    "skip_step(global)": around(oc.skip_step, before(GLOBAL)),
    "zclip()": before(oc.zclip()),
    "adagc()": before(oc.adagc(warmup=50)),
    "spam(), reset_momentum()": inside(oc.spam(every=80), every=80, warmup=20),
    "adaptive_grad_clip(0.01)": before(oc.adaptive_grad_clip(0.01)),
    "autoclip(10)": before(oc.autoclip(10, 1000)),
    "adaclip(), adagn()": before(oc.adaclip(0.99), oc.adagn()),
    "clip_by_tensor_rms(1.0)": after(oc.clip_by_tensor_rms(1.0)),
    "clip_by_global_norm(0.1)": before(oc.clip_by_global_norm(0.1)),
    "clip_by_tensor_norm(0.1)": before(oc.clip_by_tensor_norm(0.1)),
    "clip_by_value(0.1)": before(oc.clip_by_value(0.1)),
    "autoclip(90)": before(oc.autoclip(90, 1000)),
    "clip_by_unitwise_norm(0.1)": before(oc.clip_by_unitwise_norm(0.1)),
    "clip_by_group_norm(0.1)": before(oc.clip_by_group_norm(0.1, matrices_and_vectors)),
    "spam()": before(oc.spam()),
    "skip_spikes(global)": around(
        lambda optimizer: oc.skip_spikes(optimizer, SPIKES), before(GLOBAL)
    ),
    "clippy()": last(oc.clippy()),
    "larc(rate)": larc,
    "aggc()": before(oc.aggc(scope="tensor")),
    "adaclip()": before(oc.adaclip(0.99)),
    "adagn()": before(oc.adagn()),
    "carry_clipped(global)": before(oc.carry_clipped(GLOBAL)),
    "constrain(unitwise)": last(oc.constrain(oc.clip_by_unitwise_norm(2.0))),
    "clip_by_average_norm(0.001)": before(oc.clip_by_average_norm(0.001)),
    "clip_by_spectral_norm(0.1)": before(
        oc.clip_by_spectral_norm(0.1, method="newton_schulz")
    ),
}
