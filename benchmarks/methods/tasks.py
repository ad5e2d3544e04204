"""What is trained: six tasks of a CPU's size, none of them made for clipping.

A text is Python's own help pages, digits are scikit-learn's, all else is drawn.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax, random

from benchmarks import networks
from examples._shared import (
    cross_entropy,
    new_perceptron,
    perceptron,
    read_digits,
    read_text,
)
from examples.ppo import GAMES, Rollout, Samples, samples_of
from examples.ppo import loss as ppo_loss

Params = Any
Batch = Any  # a tree of arrays, in a draw with one more axis in front

ROUND = 16  # batches of a draw
SHORT, LONG = 16, 32  # characters that a transformer and a recurrent network predict
CONTEXT = 8  # characters from which the next one is predicted in 4 bits
LENGTH = 32  # steps of a game in a round
WIDTH = 32
INPUTS = 20  # of the regression

TEXT = read_text()
CHARACTERS = len(TEXT.alphabet)
TRAINING_DIGITS, DIGITS = read_digits(held_out=500)


class Task(NamedTuple):
    """A model, its data, and what is broken in a broken batch."""

    start: Callable[..., Params]  # weights for `seed=`
    # (weights, state of the games, key) to ROUND batches, and the state after them
    draw: Callable[[Params, Any, jax.Array], tuple[Batch, Any]]
    spoil: Callable[[jax.Array, Batch], Batch]  # (key, batch) to the broken batch
    loss: Callable[[Params, Batch], jax.Array]
    cost: Callable[[Params], jax.Array]  # of data that were never trained on
    optimizer: optax.GradientTransformation  # without a learning rate
    rate: float  # the middle of the rates
    rounds: int = 12


# Texts ----------------------------------------------------------------------


def draw_texts(length: int, size: int, _: Params, games: Any, key: jax.Array) -> Any:
    """Pieces of the text."""
    last = len(TEXT.training) - length
    starts = random.randint(key, (ROUND, size, 1), 0, last)
    places = starts + jnp.arange(length + 1)
    return (TEXT.training[places],), games


def random_characters(key: jax.Array, batch: Batch) -> Batch:
    """A page in no language."""
    return (random.randint(key, batch[0].shape, 0, CHARACTERS),)


TRANSFORMER = networks.decoder(
    networks.Sizes(
        layers=1, width=WIDTH, heads=2, length=SHORT, words=CHARACTERS, batch=4
    )
)


def transformer_loss(params: Params, batch: Batch) -> jax.Array:
    """The cross entropy of a decoder of one layer."""
    return TRANSFORMER.loss(params, *batch)


def new_recurrent(seed: int) -> Params:
    """An embedding, an orthogonal recurrence and a readout."""
    embedding, recurrence, readout = new_perceptron(
        CHARACTERS, WIDTH, WIDTH, CHARACTERS, seed=seed
    )
    recurrence["w"] = jnp.linalg.qr(recurrence["w"]).Q
    return {"in": embedding["w"], "recurrence": recurrence, "readout": readout}


def recurrent_loss(params: Params, batch: Batch) -> jax.Array:
    """The cross entropy of an Elman network."""
    texts = batch[0].T

    def read(hidden: jax.Array, characters: jax.Array) -> Any:
        carried = hidden @ params["recurrence"]["w"] + params["recurrence"]["b"]
        hidden = jnp.tanh(params["in"][characters] + carried)
        return hidden, hidden

    first = jnp.zeros((texts.shape[1], WIDTH))
    _, hidden = lax.scan(read, first, texts[:-1])
    return cross_entropy(perceptron([params["readout"]], hidden), texts[1:])


# Low precision --------------------------------------------------------------


def in_4_bits(x: jax.Array) -> jax.Array:
    """The nearest of 15 numbers. Its derivative is 1, as if nothing were rounded."""
    spacing = lax.stop_gradient(jnp.max(jnp.abs(x))) / 7
    rounded = jnp.round(x / spacing) * spacing
    return x + lax.stop_gradient(rounded - x)


def low_precision_loss(params: Params, batch: Batch) -> jax.Array:
    """The cross entropy of a perceptron with weights and activations of 4 bits."""
    (texts,) = batch
    table = in_4_bits(params[0]["w"]).reshape(CONTEXT, CHARACTERS, WIDTH)
    inputs = table[jnp.arange(CONTEXT), texts[:, :CONTEXT]].sum(axis=1)
    hidden = in_4_bits(jnp.tanh(inputs + params[0]["b"]))
    logits = hidden @ in_4_bits(params[1]["w"]) + params[1]["b"]
    return cross_entropy(logits, texts[:, CONTEXT])


# Digits ---------------------------------------------------------------------


def draw_digits(params: Params, games: Any, key: jax.Array) -> Any:
    images = jnp.asarray(TRAINING_DIGITS.images)
    labels = jnp.asarray(TRAINING_DIGITS.labels)
    chosen = random.randint(key, (ROUND, 32), 0, len(labels))
    return (images[chosen], labels[chosen]), games


def unscaled_and_mislabelled(key: jax.Array, batch: Batch) -> Batch:
    """Pixels up to 16 in place of 1, and labels of other digits."""
    images, labels = batch
    return 16 * images, jnp.roll(labels, 1)


def logits_of_digits(params: Params, images: Any) -> jax.Array:
    """A residual network without normalisation."""
    first, *blocks, last = params
    x = images @ first["w"]
    for block in blocks:
        x = x + jax.nn.relu(x @ block["w"] + block["b"])
    return x @ last["w"] + last["b"]


def digits_loss(params: Params, batch: Batch) -> jax.Array:
    images, labels = batch
    return cross_entropy(logits_of_digits(params, images), labels)


def share_of_wrong_digits(params: Params) -> jax.Array:
    guesses = logits_of_digits(params, DIGITS.images).argmax(-1)
    return jnp.mean(guesses != DIGITS.labels)


# Regression -----------------------------------------------------------------


def draw_points(params: Params, games: Any, key: jax.Array) -> Any:
    """Targets are the sum of the inputs, and noise without a variance."""
    inputs_key, noise_key = random.split(key)
    inputs = random.normal(inputs_key, (ROUND, 16, INPUTS))
    noise = random.t(noise_key, df=1.5, shape=(ROUND, 16))
    return (inputs, inputs.sum(-1) + noise), games


def wrong_unit(key: jax.Array, batch: Batch) -> Batch:
    """Targets are 100 times as large."""
    inputs, targets = batch
    return inputs, 100 * targets


def squared_error(params: Params, batch: Batch) -> jax.Array:
    inputs, targets = batch
    predictions = inputs @ params["w"] + params["b"]
    return jnp.mean((predictions - targets) ** 2)


def distance_from_the_truth(params: Params) -> jax.Array:
    return jnp.mean((params["w"] - 1) ** 2)


# A pole ---------------------------------------------------------------------


def new_actor_and_critic(seed: int) -> Params:
    actor = new_perceptron(4, 16, 16, 2, seed=seed)
    return {"actor": actor, "critic": new_perceptron(4, 16, 16, 1, seed=seed)}


def pushed(games: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The cart 0.02 seconds later, and whether the pole fell (Barto 1983)."""
    place, speed, angle, spin = games.T
    cos = jnp.cos(angle)
    sin = jnp.sin(angle)
    push = jnp.where(action == 1, 10.0, -10.0)
    force = (push + 0.05 * spin**2 * sin) / 1.1
    inertia = 0.5 * (4 / 3 - 0.1 * cos**2 / 1.1)
    turn = (9.8 * sin - cos * force) / inertia
    acceleration = force - 0.05 * turn * cos / 1.1
    change = jnp.stack([speed, acceleration, spin, turn], axis=-1)
    fell = (jnp.abs(place) > 2.4) | (jnp.abs(angle) > 0.2095)
    return games + 0.02 * change, fell


def new_games(key: jax.Array) -> jax.Array:
    return random.uniform(key, (GAMES, 4), minval=-0.05, maxval=0.05)


def play(params: Params, games: jax.Array, key: jax.Array) -> tuple[Samples, jax.Array]:
    """LENGTH steps of all games, in batches."""

    def step(games: jax.Array, key: jax.Array) -> Any:
        scores = perceptron(params["actor"], games)
        action = random.categorical(key, scores)
        after, fell = pushed(games, action)
        row = games, action, jnp.ones(GAMES), fell
        return jnp.where(fell[:, None], new_games(key), after), row

    games, rollout = lax.scan(step, games, random.split(key, LENGTH))
    observations, actions, rewards, ends = rollout
    rollout = Rollout(observations, actions, rewards, ends, last=games)
    samples = samples_of(params, rollout)
    chosen = random.randint(key, (ROUND, 64), 0, LENGTH * GAMES)
    return jax.tree.map(lambda leaf: leaf[chosen], samples), games


def wrong_returns(key: jax.Array, batch: Samples) -> Samples:
    return batch._replace(
        advantages=100 * batch.advantages, returns=100 * batch.returns
    )


def share_of_time_fallen(params: Params) -> jax.Array:
    """In games of 500 steps, which the actor plays without chance."""

    def step(carry: Any, _: None) -> Any:
        games, stands = carry
        action = perceptron(params["actor"], games).argmax(-1)
        games, fell = pushed(games, action)
        return (games, stands & ~fell), stands

    start = new_games(random.key(1)), jnp.ones(GAMES, bool)
    _, stood = lax.scan(step, start, length=500)
    return 1 - jnp.mean(stood)


ADAM = optax.scale_by_adam()
MOMENTUM = optax.trace(0.9)

TASKS = {
    "digits": Task(
        start=partial(new_perceptron, 64, *[WIDTH] * 7, 10),
        draw=draw_digits,
        spoil=unscaled_and_mislabelled,
        loss=digits_loss,
        cost=share_of_wrong_digits,
        optimizer=MOMENTUM,
        rate=0.06,
    ),
    "transformer": Task(
        start=partial(networks.started, TRANSFORMER.params),
        draw=partial(draw_texts, SHORT, 4),
        spoil=random_characters,
        loss=transformer_loss,
        cost=partial(transformer_loss, batch=(TEXT.validation[:, : SHORT + 1],)),
        optimizer=ADAM,
        rate=8e-3,
    ),
    "recurrent": Task(
        start=new_recurrent,
        draw=partial(draw_texts, LONG, 8),
        spoil=random_characters,
        loss=recurrent_loss,
        cost=partial(recurrent_loss, batch=(TEXT.validation[:, : LONG + 1],)),
        optimizer=MOMENTUM,
        rate=0.3,
    ),
    "4 bits": Task(
        start=partial(new_perceptron, CONTEXT * CHARACTERS, WIDTH, CHARACTERS),
        draw=partial(draw_texts, CONTEXT, 32),
        spoil=random_characters,
        loss=low_precision_loss,
        cost=partial(low_precision_loss, batch=(TEXT.validation,)),
        optimizer=ADAM,
        rate=3e-2,
    ),
    "regression": Task(
        start=lambda seed: {"w": jnp.zeros(INPUTS), "b": jnp.zeros(())},
        draw=draw_points,
        spoil=wrong_unit,
        loss=squared_error,
        cost=distance_from_the_truth,
        optimizer=MOMENTUM,
        rate=0.01,
    ),
    "pole": Task(
        start=new_actor_and_critic,
        draw=play,
        spoil=wrong_returns,
        loss=ppo_loss,
        cost=share_of_time_fallen,
        optimizer=ADAM,
        rate=1e-2,
        rounds=24,
    ),
}
