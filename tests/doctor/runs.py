"""Small runs, some of which break by construction: the rows of their logs.

    rows = log_of(BROKEN["bad batch"](0))

`loss` in a row is that of a batch which no fault touches, before the step. Runs of one
model share a compiled program, which is most of their time.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import optaxclip

STEPS = 200
VOCABULARY = 32


class Run(NamedTuple):
    """A model, what it is trained on, and how."""

    loss: Any  # (params, *batch) -> float32[]
    params: Any
    batches: Any  # arrays [STEPS, ...]
    clean: Any  # arrays of one batch
    rate: float
    momentum: float = 0.0
    decay: float = 0.0
    warmup: int = 1  # steps in which the rate grows
    adam: bool = True


def log_of(run: Run) -> list[dict[str, float]]:
    """The rows of the log of a run."""
    numbers = run.rate, run.momentum, run.decay, run.warmup
    static = run.loss, run.adam
    columns = _train(static, run.params, run.batches, run.clean, numbers)
    rows: list[dict[str, float]] = [{"step": step} for step in range(STEPS)]
    for name, values in jax.device_get(columns).items():
        for row, value in zip(rows, values):
            row[name] = float(value)
    return rows


@partial(jax.jit, static_argnums=0)
def _train(static: Any, params: Any, batches: Any, clean: Any, numbers: Any) -> Any:
    (loss, adam), (highest, momentum, decay, warmup) = static, numbers

    def rate(step: Any) -> Any:
        return highest * jnp.minimum(1.0, (step + 1) / warmup)

    core = optax.adamw(rate, weight_decay=decay) if adam else optax.sgd(rate, momentum)
    tables = [name for name in params if name == "embed"]
    record = optaxclip.record_health
    optimizer = optax.named_chain(
        ("gradients", record(embeddings=tables, patience=20)),
        ("core", core),
        ("updates", record(values=False)),
    )

    def step(carry: Any, batch: Any) -> Any:
        params, state = carry
        value = loss(params, *clean)
        grads = jax.grad(loss)(params, *batch)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        row = {"loss": value, **optaxclip.metrics(state)}
        if "attention" in params:
            row["attention/max_logit"] = jnp.max(logits_of(params, batch[0]))
        return (params, state), row

    return lax.scan(step, (params, optimizer.init(params)), batches)[1]


# ------------------------------------------------------------- a perceptron of 2 layers


@jax.custom_vjp
def activation(x: Any, broken: Any) -> Any:
    return jnp.tanh(x)


def _forward(x: Any, broken: Any) -> Any:
    return jnp.tanh(x), (x, broken)


def _backward(residuals: Any, grad: Any) -> Any:
    x, broken = residuals
    slope = (1 - jnp.tanh(x) ** 2) * grad
    return jnp.where(broken, jnp.nan, slope).astype(x.dtype), None


activation.defvjp(_forward, _backward)


def squared(params: Any, x: Any, y: Any, size: Any, broken: Any) -> Any:
    """`broken` is whether the backward of the activation makes NaN."""
    first, last = params["layer_0"], params["layer_1"]
    hidden = x.astype(first.dtype) @ first
    out = (activation(hidden, broken) @ last)[:, 0].astype(jnp.float32)
    return size * jnp.mean((out - y) ** 2)


def regression(seed: int, count: int, size: int) -> Any:
    random = np.random.default_rng(seed)
    x = random.normal(size=(count, size, 8))
    y = np.sin(x[..., 0]) + x[..., 1] + 0.1 * random.normal(size=(count, size))
    ones = np.ones(count, np.float32)
    return np.float32(x), np.float32(y), ones, np.zeros(count, bool)


def perceptron(seed: int, rate: float, **options: Any) -> Run:
    random = np.random.default_rng(seed)
    params = {
        "layer_0": np.float32(random.normal(size=(8, 16)) / 8**0.5),
        "layer_1": np.float32(random.normal(size=(16, 1)) / 4),
    }
    clean = [x[0] for x in regression(seed + 100, 1, 128)]
    batches = regression(seed, STEPS, 32)
    return Run(squared, params, batches, clean, rate, adam=False, **options)


def bad_batch(seed: int) -> Run:
    run = perceptron(seed, 0.1)
    run.batches[1][100] = 50.0
    return run


def nan_in_one_layer(seed: int) -> Run:
    run = perceptron(seed, 0.1)
    run.batches[3][120:] = True
    return run


def float16(seed: int, smallest: float) -> Run:
    """The loss is multiplied by less and less, down to `smallest`."""
    run = perceptron(seed, 0.1)
    run.batches[2][:] = np.geomspace(1.0, smallest, STEPS)
    return run._replace(params=jax.tree.map(np.float16, run.params))


# -------------------------------------------------------------------------- embeddings


def next_token(params: Any, x: Any) -> Any:
    logits = params["embed"][x] @ params["head"]
    wanted = (5 * x + 3) % VOCABULARY
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, wanted)
    return jnp.mean(losses)


def embedding(seed: int, decay: float) -> Run:
    random = np.random.default_rng(seed)
    params = {
        "embed": np.float32(random.normal(size=(VOCABULARY, 8))),
        "head": np.float32(random.normal(size=(8, VOCABULARY)) / 8**0.5),
    }
    batches = random.integers(VOCABULARY, size=(STEPS, 64))
    clean = np.arange(VOCABULARY)
    return Run(next_token, params, (batches,), (clean,), 2e-2, decay=decay)


def dead_embedding(seed: int) -> Run:
    """From step 60 on the pipeline makes one token of half of them, and weight decay
    shrinks the rows that are read no more.
    """
    run = embedding(seed, 1.0)
    late = run.batches[0][60:]
    late[late >= VOCABULARY // 2] = 0
    return run


# --------------------------------------------------------------------------- attention


def logits_of(params: Any, x: Any) -> Any:
    query, key = (x @ params["attention"][name] for name in ("query", "key"))
    return jnp.einsum("btd,bsd->bts", query, key)


def copied(params: Any, x: Any, wanted: Any) -> Any:
    out = jax.nn.softmax(logits_of(params, x)) @ x @ params["out"]
    return jnp.mean((out - wanted) ** 2)


def attention(seed: int, rate: float, to: Any, size: float = 1.0) -> Run:
    random = np.random.default_rng(seed)
    query, key, out = np.float32(random.normal(size=(3, 8, 8)) / 8**0.5)
    params = {"attention": {"query": query, "key": key}, "out": out}
    x = np.float32(size * random.normal(size=(STEPS + 1, 8, 8, 8)))
    return Run(copied, params, (x[1:], to(x[1:])), (x[0], to(x[0])), rate)


def exploding_logits(seed: int) -> Run:
    """Tokens look for themselves. Sharper attention is always better for that, so the
    logits grow without an end.
    """
    return attention(seed, 2e-2, lambda x: x, size=2.0)


# From a seed to a run.
BROKEN = {
    "learning rate": lambda seed: perceptron(seed, 1.5, warmup=STEPS),
    "bad batch": bad_batch,
    "underflow": lambda seed: float16(seed, 1e-5),
    "dead embedding": dead_embedding,
    "attention logits": exploding_logits,
    "not finite": nan_in_one_layer,
}
HEALTHY = {
    "sgd": lambda seed: perceptron(seed, 0.1),
    "momentum": lambda seed: perceptron(seed, 0.02, momentum=0.9),
    "small rate": lambda seed: perceptron(seed, 0.01),
    "float16": lambda seed: float16(seed, 1.0),
    "embedding": lambda seed: embedding(seed, 1e-2),
    "attention": lambda seed: attention(seed, 1e-2, np.sin),
}
