"""What the doctor says of 40 trainings broken on purpose, and of 40 healthy ones.

    python -m benchmarks.doctor                 the half that limits were set on
    python -m benchmarks.doctor --half aside    the half that was kept aside
    python -m benchmarks.doctor --only GAN      those whose names have this in them

Each is a few hundred steps of a small model. Its log has the loss, the norm of the
gradient and all of `record_health`. A second verdict is of loss and norm alone, which
is what most logs have. Of a broken training the first cause must be one of those listed
beside it, which were written down before any limit was set. Which half a training
belongs to was drawn by a seed before that, too.
"""

import argparse
import random
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import optaxclip
from optaxclip.doctor import Finding, diagnose

STEPS = 300
AT = 180  # the step at which most faults begin
SIZE = 32  # examples in a batch
TOKENS, LENGTH, WIDTH = 32, 12, 16
OFFSET = 0  # of all seeds
Rows = list[dict[str, float]]
Tree = Any


class Training(NamedTuple):
    """One training, and what is wrong with it."""

    name: str
    rows: Callable[[], Rows]
    causes: tuple[str, ...] = ()  # of which one must come first. None if healthy


# ------------------------------------------------------------------------------ loops


def recorded(core: Any, embeddings: Any = (), weights: bool = True) -> Any:
    """An optimizer between two recorders, as docs/doctor.md has it."""
    record = optaxclip.record_health
    return optax.named_chain(
        ("gradients", record(embeddings=embeddings, patience=20, weights=False)),
        ("core", core),
        ("updates", record(values=False, weights=weights)),
    )


def rows_of(step: Callable[..., Any], carry: Tree, inputs: Tree) -> Rows:
    """The rows of a step that returns what it logs."""
    _, columns = jax.jit(lambda carry, inputs: lax.scan(step, carry, inputs))(
        carry, inputs
    )
    columns = jax.device_get(columns)
    steps = len(next(iter(columns.values())))
    return [
        {"step": row, **{name: float(column[row]) for name, column in columns.items()}}
        for row in range(steps)
    ]


def train(
    loss: Callable[..., Any],
    params: Tree,
    batches: Tree,
    core: Any,
    *,
    scale: Any = 1.0,
    embeddings: Any = (),
    logged: Callable[..., Any] | None = None,
) -> Rows:
    """A plain loop. `scale` [steps] is what gradients are multiplied by, and `logged`
    adds columns.
    """
    optimizer = recorded(core, embeddings)
    params = jax.tree.map(jnp.asarray, params)

    def step(carry: Tree, inputs: Tree) -> Tree:
        params, state = carry
        batch, factor = inputs
        value, grads = jax.value_and_grad(loss)(params, *batch)
        grads = jax.tree.map(lambda x: x * factor.astype(x.dtype), grads)
        updates, state = optimizer.update(grads, state, params)
        row = {"loss": value, "grad_norm": optax.tree.norm(grads)}
        row |= optaxclip.metrics(state)
        if logged is not None:
            row |= logged(params, *batch)
        return (optax.apply_updates(params, updates), state), row

    factors = np.broadcast_to(float32(scale), STEPS)
    return rows_of(step, (params, optimizer.init(params)), (batches, factors))


def float32(numbers: Any) -> np.ndarray:
    return np.asarray(numbers, np.float32)


def generator(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed + OFFSET)


def from_step(before: Any, after: Any, at: int = AT) -> np.ndarray:
    """[steps]: one number before a step, and another one from it on."""
    return np.where(np.arange(STEPS) < at, before, after).astype(np.float32)


def schedule(rates: np.ndarray) -> Callable[[Any], Any]:
    return lambda count: jnp.asarray(rates, jnp.float32)[count]


# -------------------------------------------------------------------------- regression


def mlp(seed: int, widths: tuple[int, ...] = (8, 32, 32, 1)) -> dict[str, np.ndarray]:
    draw = generator(seed)
    params = {}
    for number, (fan_in, fan_out) in enumerate(pairwise(widths)):
        weights = draw.normal(size=(fan_in, fan_out)) / fan_in**0.5
        params[f"layer_{number}/w"] = float32(weights)
        params[f"layer_{number}/b"] = np.zeros(fan_out, np.float32)
    return params


def outputs(params: Tree, x: Any, activation: Any = jnp.tanh) -> Any:
    layers = len(params) // 2
    for number in range(layers):
        x = x.astype(params[f"layer_{number}/w"].dtype)
        x = x @ params[f"layer_{number}/w"] + params[f"layer_{number}/b"]
        x = activation(x) if number < layers - 1 else x
    return x.astype(jnp.float32)


def squared(params: Tree, x: Any, y: Any) -> Any:
    return jnp.mean((outputs(params, x)[:, 0] - y) ** 2)


def points(seed: int, size: int = SIZE, noise: float = 0.3) -> tuple[Any, Any]:
    draw = generator(seed + 1000)
    x = draw.normal(size=(STEPS, size, 8))
    y = np.sin(2 * x[..., 0]) + x[..., 1] * x[..., 2]
    y += noise * draw.normal(size=(STEPS, size))
    return float32(x), float32(y)


# --------------------------------------------------------------------------- next token


def decoder(seed: int, blocks: int = 2) -> dict[str, np.ndarray]:
    draw = generator(seed)

    def matrix(*shape: int) -> np.ndarray:
        return float32(draw.normal(size=shape) / shape[-2] ** 0.5)

    params = {"embed": float32(0.5 * draw.normal(size=(TOKENS, WIDTH)))}
    params["place"] = float32(0.1 * draw.normal(size=(LENGTH, WIDTH)))
    for block in range(blocks):
        for name in ("query", "key", "value", "out"):
            params[f"block_{block}/attention/{name}"] = matrix(WIDTH, WIDTH)
        params[f"block_{block}/up"] = matrix(WIDTH, 2 * WIDTH)
        params[f"block_{block}/down"] = matrix(2 * WIDTH, WIDTH)
    return params | {"head": matrix(WIDTH, TOKENS)}


def normed(x: Any) -> Any:
    return x / jnp.sqrt(jnp.mean(x.astype(jnp.float32) ** 2, -1, keepdims=True) + 1e-5)


def attention_scores(params: Tree, x: Any, block: int, normal: bool = True) -> Any:
    x = normed(x) if normal else x
    query = x @ params[f"block_{block}/attention/query"]
    key = x @ params[f"block_{block}/attention/key"]
    return jnp.einsum("btd,bsd->bts", query, key) / WIDTH**0.5


def next_token(params: Tree, tokens: Any, frozen: int = -1) -> Any:
    """The cross entropy of a decoder without biases. `frozen`: a block that gets no
    gradient.
    """
    tokens = tokens.astype(jnp.int32)
    x = params["embed"][tokens[:, :-1]] + params["place"]
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    blocks = sum(name.endswith("/up") for name in params)
    for block in range(blocks):
        own = params
        if block == frozen:
            own = jax.tree.map(lax.stop_gradient, params)
        scores = jnp.where(mask, attention_scores(own, x, block), -1e9)
        mixed = jax.nn.softmax(scores) @ normed(x)
        x += (
            mixed
            @ own[f"block_{block}/attention/value"]
            @ own[f"block_{block}/attention/out"]
        )
        hidden = jax.nn.gelu(normed(x) @ own[f"block_{block}/up"])
        x += hidden @ own[f"block_{block}/down"]
    logits = (normed(x) @ params["head"]).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return jnp.mean(losses)


def texts(seed: int, size: int = SIZE, tokens: int = TOKENS, chain: int = 0) -> Any:
    """Tokens of a Markov chain, in which four tokens follow each."""
    draw = generator(seed + 2000)
    followers = np.random.default_rng(chain).integers(tokens, size=(TOKENS, 4))
    text = np.zeros((STEPS, size, LENGTH + 1), np.int32)
    text[..., 0] = draw.integers(tokens, size=(STEPS, size))
    for place in range(LENGTH):
        choice = draw.choice(4, p=[0.7, 0.2, 0.05, 0.05], size=(STEPS, size))
        text[..., place + 1] = followers[text[..., place], choice]
    return text


# ------------------------------------------------------------------------------- broken


def rate_leaps(seed: int, text: bool) -> Rows:
    rates = from_step(3e-3, 0.3)
    core = optax.adam(schedule(rates))
    if text:
        return train(next_token, decoder(seed), (texts(seed),), core)
    return train(squared, mlp(seed), points(seed), core)


def rate_too_high(seed: int, rate: float) -> Rows:
    return train(squared, mlp(seed), points(seed), optax.sgd(rate))


def rate_grows(seed: int, text: bool) -> Rows:
    if text:
        core = optax.adam(schedule(np.geomspace(1e-3, 0.3, STEPS)))
        return train(next_token, decoder(seed), (texts(seed),), core)
    core = optax.sgd(schedule(np.linspace(0.0, 2.0, STEPS)), 0.9)
    return train(squared, mlp(seed), points(seed), core)


def bad_targets(seed: int, value: float) -> Rows:
    x, y = points(seed)
    y[AT : AT + 2] = value
    return train(squared, mlp(seed), (x, y), optax.adam(3e-3))


def one_token(seed: int) -> Rows:
    text = texts(seed)
    text[AT] = 5
    return train(next_token, decoder(seed), (text,), optax.sgd(0.3, 0.9))


def nan_in_an_input(seed: int, text: bool) -> Rows:
    x, y = points(seed)
    x[AT, 3, 2] = np.nan
    core = optax.adam(3e-3)
    if text:
        # Skipped, so that the run goes on.
        core = optaxclip.skip_nonfinite(core)
    return train(squared, mlp(seed), (x, y), core)


def masked_mean(seed: int) -> Rows:
    """A batch in which nothing is left by the mask: 0 / 0."""
    x, y = points(seed)
    mask = float32(generator(seed).uniform(size=y.shape) < 0.5)
    mask[AT] = 0

    def loss(params: Tree, x: Any, y: Any, mask: Any) -> Any:
        errors = (outputs(params, x)[:, 0] - y) ** 2
        return jnp.sum(errors * mask) / jnp.sum(mask)

    return train(loss, mlp(seed), (x, y, mask), optax.adam(3e-3))


def nan_in_the_backward(seed: int) -> Rows:
    """A length has no slope at 0: in two examples of each batch all inputs are."""
    x, y = points(seed)
    x[AT:, :2] = 0

    def loss(params: Tree, x: Any, y: Any) -> Any:
        lengths = jnp.linalg.norm(x @ params["layer_0/w"], axis=-1)
        return squared(params, x, y) + 0.01 * jnp.mean(lengths)

    # Skipped, so that the loss stays finite.
    core = optaxclip.skip_nonfinite(optax.adam(3e-3))
    return train(loss, mlp(seed), (x, y), core)


def factor_from_a_step(seed: int, text: bool, factor: float, at: int = AT) -> Rows:
    scale = from_step(1.0, factor, at)
    core = optax.adam(3e-3)
    if text:
        return train(next_token, decoder(seed), (texts(seed),), core, scale=scale)
    return train(squared, mlp(seed), points(seed), core, scale=scale)


def labels_shuffled(seed: int, text: bool) -> Rows:
    draw = generator(seed)
    if text:
        tokens = texts(seed)
        # Each text is of tokens in any order from there on.
        tokens[AT:] = draw.permuted(tokens[AT:].reshape(-1)).reshape(tokens[AT:].shape)
        return train(next_token, decoder(seed), (tokens,), optax.adam(1e-2))
    x, y = points(seed, noise=0.1)
    y[AT:] = draw.permuted(y[AT:], axis=1)
    return train(squared, mlp(seed), (x, y), optax.adam(1e-2))


def inputs_not_scaled(seed: int, factor: float) -> Rows:
    x, y = points(seed)
    x[AT:] *= factor
    return train(squared, mlp(seed), (x, y), optax.sgd(0.05))


def decay_of_wrong_sign(seed: int, text: bool) -> Rows:
    core = optax.chain(
        optax.scale_by_adam(), optax.add_decayed_weights(-5.0), optax.scale(-3e-3)
    )
    if text:
        return train(next_token, decoder(seed), (texts(seed),), core)
    return train(squared, mlp(seed), points(seed), core)


def block_without_gradient(seed: int, block: int) -> Rows:
    def loss(params: Tree, tokens: Any) -> Any:
        return next_token(params, tokens, frozen=block)

    return train(loss, decoder(seed), (texts(seed),), optax.adam(1e-2))


def dead_units(seed: int, deep: bool) -> Rows:
    """After one broken batch no unit of a ReLU layer is above 0 any more."""
    x, y = points(seed)
    y[60 : 60 + 3] = -1e4
    widths = (8, 16, 16, 16, 1) if deep else (8, 16, 1)

    def loss(params: Tree, x: Any, y: Any) -> Any:
        out = outputs(params, x, jax.nn.relu)[:, 0]
        return jnp.mean((out - y) ** 2)

    return train(loss, mlp(seed, widths), (x, y), optax.sgd(0.1))


def updates_lost(seed: int, text: bool) -> Rows:
    core = optax.adam(1e-4)
    if text:
        params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), decoder(seed))
        return train(next_token, params, (texts(seed),), core)
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), mlp(seed))
    return train(squared, params, points(seed), core)


def underflows(seed: int, smallest: float) -> Rows:
    """The loss is divided by more and more, in float16."""
    scale = np.geomspace(1.0, smallest, STEPS, dtype=np.float32)
    x, y = points(seed)

    def loss(params: Tree, x: Any, y: Any, scale: Any) -> Any:
        return scale * squared(params, x, y)

    params = jax.tree.map(np.float16, mlp(seed))
    return train(loss, params, (x, y, scale), optax.sgd(0.05))


def static_scale(seed: int) -> Rows:
    def loss(params: Tree, x: Any, y: Any) -> Any:
        return 2.0**18 * squared(params, x, y)

    params = jax.tree.map(np.float16, mlp(seed))
    core = optax.chain(optax.scale(2.0**-18), optaxclip.skip_nonfinite(optax.sgd(0.05)))
    return train(loss, params, points(seed), core)


def tokens_vanish(seed: int, at: int) -> Rows:
    """The pipeline makes one token of half of them."""
    tokens = texts(seed)
    tokens[at:] = np.where(tokens[at:] >= TOKENS // 2, 0, tokens[at:])
    core = optax.adamw(1e-2, weight_decay=0.1)
    return train(next_token, decoder(seed), (tokens,), core, embeddings="embed")


def logits_explode(seed: int, rate: float) -> Rows:
    """Tokens look for themselves, so sharper attention is always better."""
    draw = generator(seed)
    x = float32(3 * draw.normal(size=(STEPS, 8, 8, WIDTH)))
    keys = ("block_0/attention/query", "block_0/attention/key")
    params = {name: decoder(seed)[name] for name in keys}

    def loss(params: Tree, x: Any) -> Any:
        weights = jax.nn.softmax(attention_scores(params, x, 0, normal=False))
        return jnp.mean((weights @ x - x) ** 2)

    def logged(params: Tree, x: Any) -> Any:
        scores = attention_scores(params, x, 0, normal=False)
        return {"attention/max_logit": jnp.max(scores)}

    return train(loss, params, (x,), optax.adam(rate), logged=logged)


def skip_behind(seed: int) -> Rows:
    clip = optaxclip.clip_by_global_norm(0.5)
    core = optax.chain(clip, optaxclip.skip_step(optax.sgd(0.05)))
    return train(squared, mlp(seed), points(seed), core)


def limit_too_small(seed: int, text: bool) -> Rows:
    core = optax.chain(optaxclip.clip_by_global_norm(1e-3), optax.sgd(0.1))
    if text:
        return train(next_token, decoder(seed), (texts(seed),), core)
    return train(squared, mlp(seed), points(seed), core)


def logged_after_the_clip(seed: int) -> Rows:
    """The log has the norms behind a clip, of which a third is at its limit."""
    rows = train(squared, mlp(seed), points(seed), optax.sgd(0.02))
    limit = np.quantile([row["grad_norm"] for row in rows], 0.7)
    names = ("step", "loss", "grad_norm")
    rows = [{name: row[name] for name in names} for row in rows]
    return [row | {"grad_norm": min(row["grad_norm"], limit)} for row in rows]


def moments_lost(seed: int) -> Rows:
    """A run is resumed without the state of Adam, at a high rate."""
    params, (x, y) = mlp(seed), points(seed)
    adam = optax.scale_by_adam(b2=0.999, eps_root=0.0)

    def update(updates: Tree, state: Tree, params: Tree = None) -> Tree:
        count, inner = state
        fresh = adam.init(updates)
        inner = jax.tree.map(lambda a, b: jnp.where(count == AT, a, b), fresh, inner)
        updates, inner = adam.update(updates, inner, params)
        return updates, (count + 1, inner)

    def init(params: Tree) -> Tree:
        return jnp.zeros((), jnp.int32), adam.init(params)

    forgetful = optax.GradientTransformation(init, update)
    return train(squared, params, (x, y), optax.chain(forgetful, optax.scale(-1e-2)))


def q_learning(seed: int, discount: float) -> Rows:
    """Without a target network, and with a maximum over actions far from the data."""
    draw = generator(seed)
    x, y = (float32(draw.normal(size=(STEPS, SIZE, 8))) for _ in range(2))
    rewards = float32(draw.normal(size=(STEPS, SIZE)))
    actions = draw.integers(4, size=(STEPS, SIZE))

    def loss(params: Tree, x: Any, y: Any, reward: Any, action: Any) -> Any:
        values = jnp.take_along_axis(outputs(params, x), action[:, None], 1)[:, 0]
        target = reward + discount * jnp.max(outputs(params, 3 * y), -1)
        return jnp.mean((values - target) ** 2)

    params = mlp(seed, (8, 32, 4))
    core = optax.sgd(0.3)

    def activated(params: Tree, *batch: Any) -> Any:
        return loss(params, *batch)

    return train(activated, params, (x, y, rewards, actions), core)


BROKEN = [
    Training(f"{name} ({number})", rows, causes)
    for name, causes, variants in (
        (
            "Adam's rate x 100",
            ("learning rate", "divergence"),
            (lambda: rate_leaps(0, False), lambda: rate_leaps(1, True)),
        ),
        (
            "SGD's rate too high from the start",
            ("learning rate",),
            (lambda: rate_too_high(0, 2.0), lambda: rate_too_high(1, 8.0)),
        ),
        (
            "a rate that never stops growing",
            ("learning rate", "divergence"),
            (lambda: rate_grows(0, False), lambda: rate_grows(1, True)),
        ),
        (
            "targets of -500 in two batches",
            ("bad batch",),
            (lambda: bad_targets(0, -500.0), lambda: bad_targets(1, 100.0)),
        ),
        ("one batch of one token", ("bad batch",), (lambda: one_token(0),)),
        (
            "NaN in an input",
            ("not finite",),
            (lambda: nan_in_an_input(0, False), lambda: nan_in_an_input(1, True)),
        ),
        ("0/0 in a masked mean", ("not finite",), (lambda: masked_mean(0),)),
        (
            "NaN in the backward pass alone",
            ("not finite",),
            (lambda: nan_in_the_backward(0),),
        ),
        (
            "loss scale x 1024 not undone",
            ("change of scale",),
            (
                lambda: factor_from_a_step(0, False, 1024.0),
                lambda: factor_from_a_step(1, True, 1024.0, 90),
            ),
        ),
        (
            "sum of 8 devices in place of the mean",
            ("change of scale",),
            (
                lambda: factor_from_a_step(2, True, 8.0),
                lambda: factor_from_a_step(3, False, 8.0, 120),
            ),
        ),
        (
            "half of the replicas missing",
            ("change of scale",),
            (lambda: factor_from_a_step(4, True, 0.5),),
        ),
        (
            "labels shuffled from a step on",
            ("change of data", "divergence"),
            (lambda: labels_shuffled(0, False), lambda: labels_shuffled(1, True)),
        ),
        (
            "inputs not scaled from a step on",
            ("change of data", "divergence"),
            (lambda: inputs_not_scaled(0, 20.0),),
        ),
        (
            "weight decay with the wrong sign",
            ("growing weights",),
            (
                lambda: decay_of_wrong_sign(0, False),
                lambda: decay_of_wrong_sign(1, True),
            ),
        ),
        (
            "a block without a gradient",
            ("no gradient",),
            (
                lambda: block_without_gradient(0, 0),
                lambda: block_without_gradient(1, 1),
            ),
        ),
        (
            "units that die in a bad batch",
            ("bad batch", "no gradient", "vanishing"),
            (lambda: dead_units(1, True),),
        ),
        (
            "updates below the rounding of bfloat16",
            ("lost updates",),
            (lambda: updates_lost(0, False), lambda: updates_lost(1, True)),
        ),
        (
            "a loss that underflows in float16",
            ("underflow",),
            (lambda: underflows(0, 1e-5),),
        ),
        ("a static loss scale too large", ("not finite",), (lambda: static_scale(0),)),
        (
            "half of the tokens vanish",
            ("dead embedding",),
            (lambda: tokens_vanish(0, AT), lambda: tokens_vanish(1, 100)),
        ),
        (
            "attention logits explode",
            ("attention logits",),
            (lambda: logits_explode(0, 2e-2), lambda: logits_explode(1, 2e-2)),
        ),
        ("skip_step behind a clip", ("skip behind clip",), (lambda: skip_behind(0),)),
        (
            "a limit 1,000 times too small",
            ("clipped always",),
            (lambda: limit_too_small(0, False),),
        ),
        (
            "norms after the clip",
            ("norm after clip",),
            (lambda: logged_after_the_clip(0),),
        ),
        (
            "Adam's moments lost at a resume",
            ("learning rate", "divergence"),
            (lambda: moments_lost(0),),
        ),
        (
            "Q-learning without a target network",
            ("divergence", "steady growth", "learning rate", "growing weights"),
            (lambda: q_learning(0, 0.99), lambda: q_learning(1, 1.2)),
        ),
    )
    for number, rows in enumerate(variants, 1)
]


# ------------------------------------------------------------------------------ healthy


def cosine_to_zero(seed: int, text: bool) -> Rows:
    core = optax.adamw(optax.cosine_decay_schedule(1e-2, STEPS))
    if text:
        return train(next_token, decoder(seed), (texts(seed),), core)
    return train(squared, mlp(seed), points(seed), core)


def head_of_zeros(seed: int, text: bool) -> Rows:
    if text:
        params = decoder(seed)
        params["head"] *= 0
        return train(next_token, params, (texts(seed),), optax.adam(1e-2))
    params = mlp(seed)
    params["layer_2/w"] *= 0
    return train(squared, params, points(seed), optax.adam(1e-2))


def large_batch(seed: int, text: bool) -> Rows:
    if text:
        return train(next_token, decoder(seed), (texts(seed, 256),), optax.adam(1e-2))
    return train(squared, mlp(seed), points(seed, 1024), optax.sgd(0.1))


def batch_ramp(seed: int, text: bool) -> Rows:
    """Batches that double twice. Of the others examples are repeated."""
    sizes = np.repeat([8, 16, 32], STEPS // 3)
    places = np.arange(SIZE)[None] % sizes[:, None]
    if text:
        tokens = np.take_along_axis(texts(seed), places[..., None], 1)
        return train(next_token, decoder(seed), (tokens,), optax.adam(1e-2))
    x, y = points(seed)
    x = np.take_along_axis(x, places[..., None], 1)
    y = np.take_along_axis(y, places, 1)
    return train(squared, mlp(seed), (x, y), optax.adam(1e-2))


def reinforce(seed: int, rewards: tuple[float, float]) -> Rows:
    """A bandit with a state, whose rewards change their scale."""
    draw = generator(seed)
    x = float32(draw.normal(size=(STEPS, SIZE, 8)))
    best = np.argmax(x[..., :4], -1)
    noise = draw.gumbel(size=(STEPS, SIZE, 4))
    size = from_step(*rewards)

    def loss(params: Tree, x: Any, best: Any, noise: Any, size: Any) -> Any:
        logits = outputs(params, x)
        action = jnp.argmax(lax.stop_gradient(logits) + noise, -1)
        reward = size * (action == best)
        chances = jax.nn.log_softmax(logits)
        chosen = jnp.take_along_axis(chances, action[:, None], 1)[:, 0]
        return -jnp.mean(chosen * (reward - jnp.mean(reward)))

    params = mlp(seed, (8, 32, 4))
    return train(loss, params, (x, best, noise, size), optax.adam(1e-2))


def gan(seed: int, rate: float) -> Rows:
    """Generator and discriminator take turns."""
    draw = generator(seed)
    real = float32(draw.normal(size=(STEPS, SIZE, 2)) * [1.0, 0.3] + [2.0, -1.0])
    noise = float32(draw.normal(size=(STEPS, SIZE, 4)))
    is_turn = np.arange(STEPS) % 2 == 0
    params = {"g": mlp(seed, (4, 32, 2)), "d": mlp(seed + 1, (2, 32, 1))}

    def loss(params: Tree, real: Any, noise: Any, is_turn: Any) -> Any:
        fake = outputs(params["g"], noise)
        of_real, of_fake = outputs(params["d"], real), outputs(params["d"], fake)
        judge = jnp.mean(jax.nn.softplus(-of_real) + jax.nn.softplus(of_fake))
        held = jax.tree.map(lax.stop_gradient, params["d"])
        maker = jnp.mean(jax.nn.softplus(-outputs(held, fake)))
        fake = lax.stop_gradient(fake)
        judge = jnp.mean(jax.nn.softplus(-of_real)) + jnp.mean(
            jax.nn.softplus(outputs(params["d"], fake))
        )
        return jnp.where(is_turn, judge, maker)

    return train(loss, params, (real, noise, is_turn), optax.adam(rate, b1=0.5))


def lora(seed: int, rank: int) -> Rows:
    base, draw = mlp(seed), generator(seed)
    params = {}
    for name in ("layer_0/w", "layer_1/w", "layer_2/w"):
        rows, columns = base[name].shape
        params[f"{name}/a"] = float32(draw.normal(size=(rows, rank)) / rows**0.5)
        params[f"{name}/b"] = np.zeros((rank, columns), np.float32)

    def loss(params: Tree, x: Any, y: Any) -> Any:
        whole = dict(base)
        for name in ("layer_0/w", "layer_1/w", "layer_2/w"):
            whole[name] = base[name] + params[f"{name}/a"] @ params[f"{name}/b"]
        return squared(whole, x, y)

    return train(loss, params, points(seed), optax.adam(1e-2))


def by_heart(seed: int, batches: int) -> Rows:
    """Few batches again and again, until the loss is nearly 0."""
    places = np.arange(STEPS) % batches
    tokens = texts(seed, 8)[places]
    core = optax.adam(2e-2)
    return train(next_token, decoder(seed), (tokens,), core, embeddings="embed")


def warm_restarts(seed: int, text: bool) -> Rows:
    rates = 1e-2 * (0.5 + 0.5 * np.cos(np.pi * (np.arange(STEPS) % 100) / 100))
    core = optax.adam(schedule(rates))
    if text:
        return train(next_token, decoder(seed), (texts(seed),), core)
    return train(squared, mlp(seed), points(seed), core)


def bfloat16(seed: int, text: bool) -> Rows:
    if text:
        params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), decoder(seed))
        return train(next_token, params, (texts(seed),), optax.adam(1e-2))
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), mlp(seed))
    return train(squared, params, points(seed), optax.adam(1e-2))


def muon(seed: int, rate: float) -> Rows:
    core = optax.contrib.muon(rate)
    return train(next_token, decoder(seed), (texts(seed),), core)


def lion(seed: int, text: bool) -> Rows:
    core = optax.lion(1e-3)
    if text:
        return train(next_token, decoder(seed), (texts(seed),), core)
    return train(squared, mlp(seed), points(seed), core)


def residuals_of_zeros(seed: int, blocks: int) -> Rows:
    params = decoder(seed, blocks)
    for name in params:
        if name.endswith(("down", "out")):
            params[name] = 0 * params[name]
    return train(next_token, params, (texts(seed),), optax.adam(5e-3))


def experts(seed: int, count: int) -> Rows:
    """Of which each example sees one, in batches of 8."""
    draw = generator(seed)
    params = {"route": float32(draw.normal(size=(8, count)))}
    for number in range(count):
        params[f"expert_{number}"] = float32(draw.normal(size=(8, 1)) / 3)

    def loss(params: Tree, x: Any, y: Any) -> Any:
        chances = jax.nn.softmax(x @ params["route"])
        best = jnp.argmax(chances, -1)
        values = jnp.concatenate(
            [x @ params[f"expert_{number}"] for number in range(count)], -1
        )
        chosen = jnp.take_along_axis(values * chances, best[:, None], 1)[:, 0]
        return jnp.mean((chosen - y) ** 2)

    return train(loss, params, points(seed, 8), optax.adam(1e-2))


def zipf(seed: int, power: float) -> Rows:
    draw = generator(seed)
    chances = np.arange(1, 401.0) ** -power
    tokens = draw.choice(400, p=chances / chances.sum(), size=(STEPS, 64))
    params = {
        "embed": float32(draw.normal(size=(400, 8))),
        "head": float32(draw.normal(size=(8, 32)) / 8**0.5),
    }

    def loss(params: Tree, tokens: Any) -> Any:
        logits = params["embed"][tokens] @ params["head"]
        labels = (5 * tokens + 3) % 32
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.mean(losses)

    return train(loss, params, (tokens,), optax.adam(1e-2), embeddings="embed")


def curriculum(seed: int, tokens: int) -> Rows:
    """Easy texts, and then those of another source with other tokens."""
    text = texts(seed, tokens=tokens)
    text[150:] = texts(seed + 1, chain=1)[150:]
    core = optax.adam(1e-2)
    return train(next_token, decoder(seed), (text,), core, embeddings="embed")


def dynamic_scale(seed: int, interval: int) -> Rows:
    """float16 with a loss scale that is halved by inf, and doubled after a while."""
    params = jax.tree.map(jnp.float16, mlp(seed))
    optimizer = recorded(optaxclip.skip_nonfinite(optax.sgd(0.05)))

    def step(carry: Tree, batch: Tree) -> Tree:
        params, state, scale, good = carry

        def scaled(params: Tree) -> Any:
            return scale * squared(params, *batch)

        value, grads = jax.value_and_grad(scaled)(params)
        grads = jax.tree.map(lambda x: x.astype(jnp.float32) / scale, grads)
        norm = optax.tree.norm(grads)
        updates, state = optimizer.update(grads, state, params)
        is_good = jnp.isfinite(norm)
        is_next = good + 1 >= interval
        grown = jnp.where(is_next, 2 * scale, scale)
        new_scale = jnp.where(is_good, grown, scale / 2)
        good = jnp.where(is_good & ~is_next, good + 1, 0)
        row = {"loss": value / scale, "grad_norm": norm, "loss_scale": scale}
        row |= optaxclip.metrics(state)
        params = optax.apply_updates(params, updates)
        return (params, state, new_scale, good), row

    carry = params, optimizer.init(params), jnp.float32(2.0**14), jnp.int32(0)
    return rows_of(step, carry, points(seed))


def momentum(seed: int, rate: float) -> Rows:
    core = optax.sgd(rate, 0.9)
    return train(squared, mlp(seed), points(seed), core)


def dropout(seed: int, share: float) -> Rows:
    x, y = points(seed)
    keep = generator(seed).uniform(size=x.shape) > share
    core = optax.chain(optaxclip.clip_by_global_norm(1.0), optax.adamw(5e-3))
    return train(squared, mlp(seed), (x * keep, y), core)


def long_tails(seed: int, freedom: float) -> Rows:
    """Targets whose noise has long tails, under a clip."""
    x, y = points(seed)
    noise = generator(seed).standard_t(freedom, size=y.shape)
    core = optax.chain(optaxclip.clip_by_global_norm(1.0), optax.sgd(0.05))
    return train(squared, mlp(seed), (x, float32(y + 0.3 * noise)), core)


HEALTHY = [
    Training(f"{name} ({number})", rows)
    for name, variants in (
        (
            "cosine to zero",
            (lambda: cosine_to_zero(10, False), lambda: cosine_to_zero(11, True)),
        ),
        (
            "a head of zeros",
            (lambda: head_of_zeros(10, False), lambda: head_of_zeros(11, True)),
        ),
        (
            "a large batch",
            (lambda: large_batch(10, False), lambda: large_batch(11, True)),
        ),
        ("a batch ramp", (lambda: batch_ramp(10, False), lambda: batch_ramp(11, True))),
        (
            "REINFORCE, changing rewards",
            (lambda: reinforce(10, (1.0, 10.0)), lambda: reinforce(11, (5.0, 1.0))),
        ),
        ("a GAN in turns", (lambda: gan(10, 2e-3), lambda: gan(11, 5e-3))),
        ("LoRA with B = 0", (lambda: lora(10, 2), lambda: lora(11, 4))),
        (
            "batches learnt by heart",
            (lambda: by_heart(10, 4), lambda: by_heart(11, 40)),
        ),
        (
            "warm restarts",
            (lambda: warm_restarts(10, False), lambda: warm_restarts(11, True)),
        ),
        ("bfloat16 weights", (lambda: bfloat16(10, False), lambda: bfloat16(11, True))),
        ("Muon", (lambda: muon(10, 0.02), lambda: muon(11, 0.01))),
        ("Lion", (lambda: lion(10, False), lambda: lion(11, True))),
        (
            "residual branches of zeros",
            (lambda: residuals_of_zeros(10, 2), lambda: residuals_of_zeros(11, 3)),
        ),
        (
            "top-1 experts, batches of 8",
            (lambda: experts(10, 4), lambda: experts(11, 8)),
        ),
        ("tokens by Zipf's law", (lambda: zipf(10, 1.0), lambda: zipf(11, 1.3))),
        ("a curriculum", (lambda: curriculum(10, 20), lambda: curriculum(11, 32))),
        (
            "float16, dynamic scale",
            (lambda: dynamic_scale(10, 25), lambda: dynamic_scale(11, 60)),
        ),
        ("SGD with momentum", (lambda: momentum(10, 0.02), lambda: momentum(11, 0.05))),
        ("dropout, AdamW, clip", (lambda: dropout(10, 0.1), lambda: dropout(11, 0.5))),
        (
            "targets with long tails",
            (lambda: long_tails(10, 3.0), lambda: long_tails(11, 2.0)),
        ),
    )
    for number, rows in enumerate(variants, 1)
]


# ------------------------------------------------------------------------------- report


def half_of(trainings: list[Training], half: str) -> list[Training]:
    """The half that limits are set on ("set"), or the other ("aside")."""
    names = sorted(training.name for training in trainings)
    drawn = set(random.Random(75).sample(names, len(names) // 2))
    return [
        training
        for training in trainings
        if half == "all" or (training.name in drawn) == (half == "set")
    ]


def first_cause(findings: list[Finding]) -> str:
    return f"{findings[0].cause} {findings[0].step}" if findings else "nothing"


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.doctor", None, __doc__)
    parser.add_argument("--half", choices=("set", "aside", "all"), default="set")
    parser.add_argument("--only", default="")
    parser.add_argument("--offset", type=int, default=0, help="of all seeds")
    options = parser.parse_args()
    global OFFSET
    OFFSET = options.offset
    for title, trainings in (("broken", BROKEN), ("healthy", HEALTHY)):
        chosen = [
            training
            for training in half_of(trainings, options.half)
            if options.only in training.name
        ]
        right = {"all columns": 0, "loss and norm": 0}
        print(
            f"\n| {title} | all columns | loss and norm | ends at |\n|---|---|---|---|"
        )
        for training in chosen:
            start = time.perf_counter()
            rows = training.rows()
            names = ("step", "loss", "grad_norm")
            plain = [{name: row[name] for name in names} for row in rows]
            cells = []
            for column, log in (("all columns", rows), ("loss and norm", plain)):
                findings = diagnose(log)
                cause = findings[0].cause if findings else ""
                is_right = cause in training.causes if training.causes else not cause
                right[column] += is_right
                text = ", ".join(f"{x.cause} {x.step}" for x in findings) or "nothing"
                cells.append(f"{'' if is_right else '**wrong** '}{text}")
            losses = [row["loss"] for row in rows]
            best = np.nanmin(losses)
            ends = f"loss {losses[0]:.3g} to {losses[-1]:.3g}, best {best:.3g}"
            seconds = time.perf_counter() - start
            print(
                f"| {training.name} | {' | '.join(cells)} | {ends}, {seconds:.1f} s |",
                flush=True,
            )
        print(f"{title}: right of {len(chosen)}: {right}")


if __name__ == "__main__":
    main()
