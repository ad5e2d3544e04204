"""The trainings that are broken on purpose. One of their causes must come first."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optaxclip

from .loops import (
    BREAK_STEP,
    STEPS,
    Problem,
    Rows,
    clipped,
    entries,
    float32,
    from_step,
    generator,
    in_bfloat16,
    in_dtype,
    loss_and_norm,
    recorded,
    rows_of,
    schedule,
    train,
)
from .models import (
    SIZE,
    TOKENS,
    WIDTH,
    attention_scores,
    decoder,
    language,
    mlp,
    next_token,
    outputs,
    regression,
    squared,
)
from .table import Way, on_both, trainings, with_each


def rate_leaps(problem: Problem) -> Rows:
    return train(problem, optax.adam(schedule(from_step(3e-3, 0.3))))


def rate_grows(problem: Problem) -> Rows:
    if problem.loss is next_token:
        rates = np.geomspace(1e-3, 0.3, STEPS)
        return train(problem, optax.adam(schedule(rates)))
    rates = np.linspace(0.0, 2.0, STEPS)
    return train(problem, optax.sgd(schedule(rates), 0.9))


def bad_targets(seed: int, value: float) -> Rows:
    problem = regression(seed)
    problem.batches[1][BREAK_STEP : BREAK_STEP + 2] = value
    return train(problem, optax.adam(3e-3))


def one_token(seed: int) -> Rows:
    problem = language(seed)
    problem.batches[0][BREAK_STEP] = 5
    return train(problem, optax.sgd(0.3, 0.9))


def nan_in_an_input(seed: int, core: Any) -> Rows:
    problem = regression(seed)
    problem.batches[0][BREAK_STEP, 3, 2] = np.nan
    return train(problem, core)


def masked_mean(seed: int) -> Rows:
    """A batch in which nothing is left by the mask: 0 / 0."""
    problem = regression(seed)
    x, y = problem.batches
    mask = float32(generator(seed).uniform(size=y.shape) < 0.5)
    mask[BREAK_STEP] = 0

    def loss(params, x, y, mask):
        squares = (outputs(params, x)[:, 0] - y) ** 2
        return jnp.sum(squares * mask) / jnp.sum(mask)

    problem = Problem(loss, problem.params, (x, y, mask))
    return train(problem, optax.adam(3e-3))


def nan_in_the_backward(seed: int) -> Rows:
    """A length has no slope at 0: in two examples of each batch all inputs are."""
    problem = regression(seed)
    problem.batches[0][BREAK_STEP:, :2] = 0

    def loss(params, x, y):
        lengths = jnp.linalg.norm(x @ params["layer_0/w"], axis=-1)
        return squared(params, x, y) + 0.01 * jnp.mean(lengths)

    # Skipped, so that the loss stays finite.
    core = optaxclip.skip_nonfinite(optax.adam(3e-3))
    return train(problem._replace(loss=loss), core)


def factor_from_a_step(problem: Problem, factor: float, at: int = BREAK_STEP) -> Rows:
    return train(problem, optax.adam(3e-3), scale=from_step(1.0, factor, at))


def labels_shuffled(seed: int) -> Rows:
    problem = regression(seed, noise=0.1)
    y = problem.batches[1]
    y[BREAK_STEP:] = generator(seed).permuted(y[BREAK_STEP:], axis=1)
    return train(problem, optax.adam(1e-2))


def tokens_shuffled(seed: int) -> Rows:
    problem = language(seed)
    late = problem.batches[0][BREAK_STEP:]
    shuffled = generator(seed).permuted(late.reshape(-1))
    late[:] = shuffled.reshape(late.shape)
    return train(problem, optax.adam(1e-2))


def inputs_not_scaled(seed: int) -> Rows:
    problem = regression(seed)
    problem.batches[0][BREAK_STEP:] *= 20
    return train(problem, optax.sgd(0.05))


def decay_of_wrong_sign(problem: Problem) -> Rows:
    core = optax.chain(
        optax.scale_by_adam(), optax.add_decayed_weights(-5.0), optax.scale(-3e-3)
    )
    return train(problem, core)


def decay_too_strong(problem: Problem) -> Rows:
    return train(problem, optax.adamw(1e-3, weight_decay=30.0))


def never_reset(problem: Problem) -> Rows:
    """Each step has the sum of all gradients so far."""
    optimizer = recorded(optax.adam(3e-3))

    def step(carry, batch):
        params, state, total = carry
        value, grads = jax.value_and_grad(problem.loss)(params, *batch)
        total = optax.tree.add(total, grads)
        updates, state = optimizer.update(total, state, params)
        row = {"loss": value, "grad_norm": optax.tree.norm(total)}
        row |= optaxclip.metrics(state)
        return (optax.apply_updates(params, updates), state, total), row

    params = jax.tree.map(jnp.asarray, problem.params)
    carry = params, optimizer.init(params), optax.tree.zeros_like(params)
    return rows_of(step, carry, problem.batches)


def block_without_gradient(seed: int, block: int) -> Rows:
    def loss(params, tokens):
        return next_token(params, tokens, frozen=block)

    return train(language(seed)._replace(loss=loss), optax.adam(1e-2))


def dead_units(seed: int) -> Rows:
    """After one broken batch no unit of a ReLU layer is above 0 any more."""
    problem = regression(seed)
    problem.batches[1][60:63] = -1e4

    params = mlp(seed, (8, 16, 16, 16, 1))
    loss = partial(squared, activation=jax.nn.relu)
    return train(Problem(loss, params, problem.batches), optax.sgd(0.1))


def underflows(seed: int) -> Rows:
    """The loss is divided by more and more, in float16."""
    problem = in_dtype(regression(seed), jnp.float16)
    factors = np.geomspace(1.0, 1e-5, STEPS, dtype=np.float32)

    def loss(params, x, y, factor):
        return factor * squared(params, x, y)

    batches = *problem.batches, factors
    return train(Problem(loss, problem.params, batches), optax.sgd(0.05))


def static_scale(seed: int) -> Rows:
    def loss(params, x, y):
        return 2.0**18 * squared(params, x, y)

    problem = in_dtype(regression(seed), jnp.float16)._replace(loss=loss)
    skip = optaxclip.skip_nonfinite(optax.sgd(0.05))
    return train(problem, optax.chain(optax.scale(2.0**-18), skip))


def tokens_vanish(seed: int, at: int) -> Rows:
    """The pipeline makes one token of half of them."""
    problem = language(seed)
    late = problem.batches[0][at:]
    late[late >= TOKENS // 2] = 0
    return train(problem, optax.adamw(1e-2, weight_decay=0.1), embeddings="embed")


def logits_explode(seed: int) -> Rows:
    """Tokens look for themselves, so sharper attention is always better."""
    x = float32(3 * generator(seed).normal(size=(STEPS, 8, 8, WIDTH)))
    params = decoder(seed)
    query = "block_0/attention/query"
    key = "block_0/attention/key"
    params = {query: params[query], key: params[key]}

    def loss(params, x):
        weights = jax.nn.softmax(attention_scores(params, x, 0))
        return jnp.mean((weights @ x - x) ** 2)

    def logged(params, x):
        return {"attention/max_logit": jnp.max(attention_scores(params, x, 0))}

    return train(Problem(loss, params, (x,)), optax.adam(2e-2), logged=logged)


def logged_after_the_clip(seed: int) -> Rows:
    """The log has the norms behind a clip, of which a third is at its limit."""
    rows = loss_and_norm(train(regression(seed), optax.sgd(0.02)))
    limit = np.quantile([row["grad_norm"] for row in rows], 0.7)
    return [row | {"grad_norm": min(row["grad_norm"], limit)} for row in rows]


def moments_lost(seed: int) -> Rows:
    """A run is resumed without the state of Adam, at a high rate."""
    adam = optax.scale_by_adam()

    def init(params):
        return jnp.zeros((), jnp.int32), adam.init(params)

    def update(updates, state, params=None):
        step, moments = state

        def reset(old, new):
            return jnp.where(step == BREAK_STEP, new, old)

        moments = jax.tree.map(reset, moments, adam.init(updates))
        updates, moments = adam.update(updates, moments, params)
        return updates, (step + 1, moments)

    forgetful = optax.GradientTransformation(init, update)
    return train(regression(seed), optax.chain(forgetful, optax.scale(-1e-2)))


def q_learning(seed: int, discount: float) -> Rows:
    """Without a target network, and with a maximum over actions far from the data."""
    draw = generator(seed)
    x = float32(draw.normal(size=(STEPS, SIZE, 8)))
    next_x = float32(draw.normal(size=(STEPS, SIZE, 8)))
    rewards = float32(draw.normal(size=(STEPS, SIZE)))
    actions = draw.integers(4, size=(STEPS, SIZE))

    def loss(params, x, next_x, reward, action):
        values = entries(outputs(params, x), action)
        next_values = jnp.max(outputs(params, 3 * next_x), -1)
        target = reward + discount * next_values
        return jnp.mean((values - target) ** 2)

    batches = x, next_x, rewards, actions
    problem = Problem(loss, mlp(seed, (8, 32, 4)), batches)
    return train(problem, optax.sgd(0.3))


BROKEN = trainings(
    [
        Way(
            "Adam's rate x 100",
            on_both(rate_leaps),
            causes=("learning rate", "divergence"),
        ),
        Way(
            "SGD's rate too high from the start",
            [
                lambda seed: train(regression(seed), optax.sgd(2.0)),
                lambda seed: train(regression(seed), optax.sgd(8.0)),
            ],
            causes=("learning rate",),
        ),
        Way(
            "a rate that never stops growing",
            on_both(rate_grows),
            causes=("learning rate", "divergence"),
        ),
        Way(
            "targets of -500 in two batches",
            with_each(bad_targets, -500.0, 100.0),
            causes=("bad batch",),
        ),
        Way("one batch of one token", [one_token], causes=("bad batch",)),
        Way(
            "NaN in an input",
            [
                lambda seed: nan_in_an_input(seed, optax.adam(3e-3)),
                # Skipped, so that the run goes on.
                lambda seed: nan_in_an_input(
                    seed, optaxclip.skip_nonfinite(optax.adam(3e-3))
                ),
            ],
            causes=("not finite",),
        ),
        Way("0/0 in a masked mean", [masked_mean], causes=("not finite",)),
        Way(
            "NaN in the backward pass alone",
            [nan_in_the_backward],
            causes=("not finite",),
        ),
        Way(
            "loss scale x 1024 not undone",
            [
                lambda seed: factor_from_a_step(regression(seed), 1024.0),
                lambda seed: factor_from_a_step(language(seed), 1024.0, at=90),
            ],
            causes=("change of scale",),
        ),
        Way(
            "sum of 8 devices in place of the mean",
            [
                lambda seed: factor_from_a_step(language(seed + 2), 8.0),
                lambda seed: factor_from_a_step(regression(seed + 2), 8.0, at=120),
            ],
            causes=("change of scale",),
        ),
        Way(
            "half of the replicas missing",
            [lambda seed: factor_from_a_step(language(seed + 4), 0.5)],
            causes=("change of scale",),
        ),
        Way(
            "labels shuffled from a step on",
            [labels_shuffled, tokens_shuffled],
            causes=("divergence",),
        ),
        Way(
            "inputs not scaled from a step on",
            [inputs_not_scaled],
            causes=("divergence",),
        ),
        Way(
            "weight decay with the wrong sign",
            on_both(decay_of_wrong_sign),
            causes=("growing weights",),
        ),
        Way(
            "a block without a gradient",
            with_each(block_without_gradient, 0, 1),
            causes=("no gradient",),
        ),
        Way(
            "units that die in a bad batch",
            [lambda seed: dead_units(seed + 1)],
            causes=("bad batch", "no gradient", "vanishing"),
        ),
        Way(
            "updates below the rounding of bfloat16",
            on_both(lambda problem: in_bfloat16(problem, 1e-4)),
            causes=("lost updates",),
        ),
        Way("a loss that underflows in float16", [underflows], causes=("underflow",)),
        Way("a static loss scale too large", [static_scale], causes=("not finite",)),
        Way(
            "half of the tokens vanish",
            with_each(tokens_vanish, BREAK_STEP, 100),
            causes=("dead embedding",),
        ),
        Way(
            "attention logits explode",
            [logits_explode, logits_explode],
            causes=("attention logits",),
        ),
        Way(
            "skip_step behind a clip",
            [
                lambda seed: clipped(
                    regression(seed), 0.5, optaxclip.skip_step(optax.sgd(0.05))
                )
            ],
            causes=("skip behind clip",),
        ),
        Way(
            "a limit 1,000 times too small",
            [lambda seed: clipped(regression(seed), 1e-3, optax.sgd(0.1))],
            causes=("clipped always",),
        ),
        Way(
            "norms after the clip", [logged_after_the_clip], causes=("norm after clip",)
        ),
        Way(
            "Adam's moments lost at a resume",
            [moments_lost],
            causes=("learning rate", "divergence"),
        ),
        Way(
            "Q-learning without a target network",
            with_each(q_learning, 0.99, 1.2),
            causes=("divergence", "steady growth", "learning rate", "growing weights"),
        ),
    ],
    first_seed=0,
)

# Their causes were added after the halves of BROKEN had been drawn, and limits set.
BROKEN_LATER = trainings(
    [
        Way(
            "gradients that are never reset",
            on_both(never_reset),
            causes=("gradients add up",),
        ),
        Way(
            "weight decay far too strong",
            on_both(decay_too_strong),
            causes=("shrinking weights",),
        ),
    ],
    first_seed=0,
)
