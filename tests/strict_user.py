# pyright: strict, reportMissingTypeStubs=false, reportUnnecessaryTypeIgnoreComment=true
"""A program under a strict type checker, which CI runs over it: all that a user calls
is typed. `jax.grad` is not, and is given its type here.
"""

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

import optaxclip
from optaxclip.dropin import keras, tensorflow_style, torch_style

Params = dict[str, jax.Array]

optimizer = optaxclip.skip_spikes(
    optax.chain(
        optaxclip.clip_by_global_norm(1.0, nonfinite="zero"),
        optaxclip.clip_by_tensor_norm(
            optaxclip.rules.windowed_quantile(0.9, 100),
            shrink=optaxclip.shrinks.smooth(2),
        ),
        optaxclip.clip_by_group_norm({"a": 1.0, "b": None}, {"w": "a", "b": "b"}),
        optaxclip.adaptive_grad_clip(
            0.01, stacked=lambda path, leaf: path.startswith("blocks")
        ),
        optaxclip.clip_by_unitwise_norm(1.0, axis=lambda path, leaf: 0),
        optaxclip.zclip(),
        optax.adamw(optax.constant_schedule(1e-3)),
    ),
    optaxclip.rules.log_z_score(),
)


def loss(params: Params, x: jax.Array) -> jax.Array:
    hidden = optaxclip.clip_cotangent(x @ params["w"], max_norm=1.0)
    return jnp.mean((hidden + params["b"]) ** 2)


gradient: Callable[[Params, jax.Array], Params] = cast(Any, jax).grad(loss)


def step(
    params: Params, state: optax.OptState, x: jax.Array
) -> tuple[optax.Updates, optax.OptState, dict[str, jax.Array]]:
    updates, state = optimizer.update(gradient(params, x), state, params)
    return updates, state, optaxclip.metrics(state)


def others(params: Params, x: jax.Array) -> None:
    # What goes in comes back with its type, which a checker refuses to lose.
    grads: Params
    grads, total = torch_style.clip_grad_norm(params, 1.0, error_if_nonfinite=True)
    grads, total = optaxclip.clip_grads(grads, 1.0, nonfinite="zero")
    grads = optaxclip.scale_cotangent(torch_style.clip_grad_value(grads, 1.0), 0.5)
    # An option that is a word is one of the known ones.
    optaxclip.zclip(nonfinite="skip")  # pyright: ignore[reportArgumentType]
    optaxclip.zclip(target="mode")  # pyright: ignore[reportArgumentType]
    optaxclip.clip_by_tensor_norm(1.0, ord="sum")  # pyright: ignore[reportArgumentType]
    clipper: optax.GradientTransformation = keras.clip_gradients(clipnorm=1.0)
    norm: jax.Array = optaxclip.global_norm(params, ord="rms")
    per_example = optaxclip.clipped_grad(loss, 1.0)
    print(
        grads,
        total,
        clipper,
        norm,
        per_example(params, x),
        tensorflow_style.clip_by_norm(x, 1.0),
    )
    limits: optaxclip.rules.Rule = optaxclip.rules.minimum(
        optaxclip.rules.constant(1.0), optaxclip.rules.growth(1.5)
    )
    own = optaxclip.clip_by(
        optaxclip.global_norm, limits, shrink=optaxclip.shrinks.hard
    )
    state = own.init(params)
    print(own.update(params, state, grad_norm=norm))
    # Modules that are loaded when they are asked for.
    findings: list[optaxclip.doctor.Finding] = optaxclip.doctor.diagnose("log.jsonl")
    optaxclip.check.main(["trainer:make_step"])
    print(findings, optaxclip.docter)  # pyright: ignore
