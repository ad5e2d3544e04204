"""Healthy trainings that look like broken ones."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import optaxclip

from .loops import (
    STEPS,
    Params,
    Problem,
    Rows,
    clipped,
    entries,
    float32,
    from_step,
    generator,
    in_bfloat16,
    in_dtype,
    recorded,
    rows_of,
    schedule,
    train,
)
from .models import (
    SIZE,
    decoder,
    language,
    mlp,
    next_token,
    outputs,
    regression,
    squared,
    texts,
)
from .table import Way, on_both, trainings, with_each


def without(problem: Problem, *names: str) -> Problem:
    """The same model, with zeros in the weights whose names end so."""
    params = dict(problem.params)
    for name in params:
        if name.endswith(names):
            params[name] = 0 * params[name]
    return problem._replace(params=params)


def branches_of_zeros(problem: Problem) -> Rows:
    return train(without(problem, "down", "out"), optax.adam(5e-3))


def batch_ramp(problem: Problem) -> Rows:
    """Batches that double twice. Of the others examples are repeated."""
    sizes = np.repeat([8, 16, 32], STEPS // 3)
    batches = []
    for array in problem.batches:
        places = np.arange(SIZE) % sizes[:, None]
        batches.append(array[np.arange(STEPS)[:, None], places])
    return train(problem._replace(batches=tuple(batches)), optax.adam(1e-2))


def reinforce(seed: int, before: float, after: float) -> Rows:
    """A bandit with a state, whose rewards change their scale."""
    draw = generator(seed)
    x = float32(draw.normal(size=(STEPS, SIZE, 8)))
    best = np.argmax(x[..., :4], -1)
    noise = draw.gumbel(size=(STEPS, SIZE, 4))

    def loss(params, x, best, noise, size):
        logits = outputs(params, x)
        action = jnp.argmax(lax.stop_gradient(logits) + noise, -1)
        reward = size * (action == best)
        chosen = entries(jax.nn.log_softmax(logits), action)
        return -jnp.mean(chosen * (reward - jnp.mean(reward)))

    batches = x, best, noise, from_step(before, after)
    problem = Problem(loss, mlp(seed, (8, 32, 4)), batches)
    return train(problem, optax.adam(1e-2))


def gan(seed: int, rate: float) -> Rows:
    """Generator and discriminator take turns."""
    draw = generator(seed)
    real = float32(draw.normal(size=(STEPS, SIZE, 2)) * [1.0, 0.3] + [2.0, -1.0])
    noise = float32(draw.normal(size=(STEPS, SIZE, 4)))
    is_turn = np.arange(STEPS) % 2 == 0
    params = {"g": mlp(seed, (4, 32, 2)), "d": mlp(seed + 1, (2, 32, 1))}

    def loss(params, real, noise, is_turn):
        fake = outputs(params["g"], noise)
        loss_of_real = jax.nn.softplus(-outputs(params["d"], real))
        loss_of_fake = jax.nn.softplus(outputs(params["d"], fake))
        discriminator_loss = jnp.mean(loss_of_real) + jnp.mean(loss_of_fake)
        discriminator = jax.tree.map(lax.stop_gradient, params["d"])
        generator_loss = jnp.mean(jax.nn.softplus(-outputs(discriminator, fake)))
        return jnp.where(is_turn, discriminator_loss, generator_loss)

    problem = Problem(loss, params, (real, noise, is_turn))
    return train(problem, optax.adam(rate, b1=0.5))


def lora(seed: int, rank: int) -> Rows:
    problem = regression(seed)
    draw = generator(seed)
    names = "layer_0/w", "layer_1/w", "layer_2/w"
    params: Params = {}
    for name in names:
        rows, columns = problem.params[name].shape
        params[f"{name}/a"] = float32(draw.normal(size=(rows, rank)) / rows**0.5)
        params[f"{name}/b"] = np.zeros((rank, columns), np.float32)

    def loss(params, x, y):
        merged = dict(problem.params)
        for name in names:
            merged[name] += params[f"{name}/a"] @ params[f"{name}/b"]
        return squared(merged, x, y)

    return train(Problem(loss, params, problem.batches), optax.adam(1e-2))


def by_heart(seed: int, batches: int) -> Rows:
    """Few batches again and again, until the loss is nearly 0."""
    tokens = texts(seed, size=8)[np.arange(STEPS) % batches]
    problem = Problem(next_token, decoder(seed), (tokens,))
    return train(problem, optax.adam(2e-2), embeddings="embed")


def warm_restarts(problem: Problem) -> Rows:
    turns = np.arange(STEPS) % 100 / 100
    rates = 1e-2 * (0.5 + 0.5 * np.cos(np.pi * turns))
    return train(problem, optax.adam(schedule(rates)))


def experts(seed: int, count: int) -> Rows:
    """Of which each example sees one, in batches of 8."""
    draw = generator(seed)
    params: Params = {"route": float32(draw.normal(size=(8, count)))}
    for number in range(count):
        params[f"expert_{number}"] = float32(draw.normal(size=(8, 1)) / 3)

    def loss(params, x, y):
        chances = jax.nn.softmax(x @ params["route"])
        best = jnp.argmax(chances, -1)
        values = [x @ params[f"expert_{number}"] for number in range(count)]
        weighted = jnp.concatenate(values, -1) * chances
        return jnp.mean((entries(weighted, best) - y) ** 2)

    problem = Problem(loss, params, regression(seed, size=8).batches)
    return train(problem, optax.adam(1e-2))


def zipf(seed: int, power: float) -> Rows:
    draw = generator(seed)
    chances = np.arange(1, 401.0) ** -power
    tokens = draw.choice(400, p=chances / chances.sum(), size=(STEPS, 64))
    params: Params = {
        "embed": float32(draw.normal(size=(400, 8))),
        "head": float32(draw.normal(size=(8, 32)) / 8**0.5),
    }

    def loss(params, tokens):
        logits = params["embed"][tokens] @ params["head"]
        labels = (5 * tokens + 3) % 32
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.mean(losses)

    problem = Problem(loss, params, (tokens,))
    return train(problem, optax.adam(1e-2), embeddings="embed")


def curriculum(seed: int, tokens: int) -> Rows:
    """Easy texts, and then those of another source with other tokens."""
    text = texts(seed, tokens=tokens)
    text[150:] = texts(seed + 1, chain=1)[150:]
    problem = Problem(next_token, decoder(seed), (text,))
    return train(problem, optax.adam(1e-2), embeddings="embed")


def dynamic_scale(seed: int, interval: int) -> Rows:
    """float16 with a loss scale that is halved by inf, and doubled after a while."""
    problem = in_dtype(regression(seed), jnp.float16)
    optimizer = recorded(optaxclip.skip_nonfinite(optax.sgd(0.05)))

    def step(carry, batch):
        params, state, scale, good = carry

        def scaled(params):
            return scale * squared(params, *batch)

        value, grads = jax.value_and_grad(scaled)(params)
        grads = jax.tree.map(lambda x: x.astype(jnp.float32) / scale, grads)
        norm = optax.tree.norm(grads)
        updates, state = optimizer.update(grads, state, params)
        row = {"loss": value / scale, "grad_norm": norm, "loss_scale": scale}
        row |= optaxclip.metrics(state)
        params = optax.apply_updates(params, updates)
        is_good = jnp.isfinite(norm)
        is_next = good + 1 >= interval
        grown = jnp.where(is_next, 2 * scale, scale)
        scale = jnp.where(is_good, grown, scale / 2)
        good = jnp.where(is_good & ~is_next, good + 1, 0)
        return (params, state, scale, good), row

    state = optimizer.init(problem.params)
    carry = problem.params, state, jnp.float32(2.0**14), jnp.int32(0)
    return rows_of(step, carry, problem.batches)


def dropout(seed: int, share: float) -> Rows:
    problem = regression(seed)
    x = problem.batches[0]
    is_kept = generator(seed).uniform(size=x.shape) > share
    x *= is_kept
    return clipped(problem, 1.0, optax.adamw(5e-3))


def long_tails(seed: int, freedom: float) -> Rows:
    """Targets whose noise has long tails, under a clip."""
    problem = regression(seed)
    y = problem.batches[1]
    noise = generator(seed).standard_t(freedom, size=y.shape)
    y[:] = y + 0.3 * noise
    return clipped(problem, 1.0, optax.sgd(0.05))


def cosine_to_zero(problem: Problem) -> Rows:
    return train(problem, optax.adamw(optax.cosine_decay_schedule(1e-2, STEPS)))


def large_text(seed: int) -> Problem:
    return Problem(next_token, decoder(seed), (texts(seed, size=256),))


HEALTHY = trainings(
    [
        Way("cosine to zero", on_both(cosine_to_zero)),
        Way(
            "a head of zeros",
            [
                lambda seed: train(
                    without(regression(seed), "layer_2/w"), optax.adam(1e-2)
                ),
                lambda seed: train(without(language(seed), "head"), optax.adam(1e-2)),
            ],
        ),
        Way(
            "a large batch",
            [
                lambda seed: train(regression(seed, size=1024), optax.sgd(0.1)),
                lambda seed: train(large_text(seed), optax.adam(1e-2)),
            ],
        ),
        Way("a batch ramp", on_both(batch_ramp)),
        Way(
            "REINFORCE, changing rewards",
            [
                lambda seed: reinforce(seed, 1.0, 10.0),
                lambda seed: reinforce(seed, 5.0, 1.0),
            ],
        ),
        Way("a GAN in turns", with_each(gan, 2e-3, 5e-3)),
        Way("LoRA with B = 0", with_each(lora, 2, 4)),
        Way("batches learnt by heart", with_each(by_heart, 4, 40)),
        Way("warm restarts", on_both(warm_restarts)),
        Way("bfloat16 weights", on_both(lambda problem: in_bfloat16(problem, 1e-2))),
        Way(
            "Muon",
            [
                lambda seed: train(language(seed), optax.contrib.muon(0.02)),
                lambda seed: train(language(seed), optax.contrib.muon(0.01)),
            ],
        ),
        Way("Lion", on_both(lambda problem: train(problem, optax.lion(1e-3)))),
        Way(
            "residual branches of zeros",
            [
                lambda seed: branches_of_zeros(language(seed)),
                lambda seed: branches_of_zeros(language(seed, blocks=3)),
            ],
        ),
        Way("top-1 experts, batches of 8", with_each(experts, 4, 8)),
        Way("tokens by Zipf's law", with_each(zipf, 1.0, 1.3)),
        Way("a curriculum", with_each(curriculum, 20, 32)),
        Way("float16, dynamic scale", with_each(dynamic_scale, 25, 60)),
        Way(
            "SGD with momentum",
            [
                lambda seed: train(regression(seed), optax.sgd(0.02, 0.9)),
                lambda seed: train(regression(seed), optax.sgd(0.05, 0.9)),
            ],
        ),
        Way("dropout, AdamW, clip", with_each(dropout, 0.1, 0.5)),
        Way("targets with long tails", with_each(long_tails, 3.0, 2.0)),
    ],
    first_seed=10,
)
