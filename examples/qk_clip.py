"""Trains a small transformer with Muon until its attention logits explode, and once
more with QK-Clip after Muon.

What it shows. Each step of Muon is as long in every direction of a matrix. So query and
key weights grow from step to step, and the logits of the attention with their product.
Softmax of a logit in the hundreds is one token and nothing else: the attention stops to
learn. `qk_clip` stands behind the optimizer. The attention hands out the largest logit
of each head, which it has computed anyway, `update` takes them as `max_logits`, and the
query and key weights of a head over the limit are made shorter by the root of the
factor. The loss is asked for both with `has_aux=True`.

    muon      optax.contrib.muon
    qk_clip   optax.chain(muon, qk_clip(30.0, queries=..., keys=...))

The heads are grouped as in most language models: two query heads share a key. The
limit is 30 and not the 100 of Kimi K2, since the model is small. A limit holds for the
weights and the batch that the logits were measured on, one step ago. So the next batch
may be a little above it.

What it does not show. That the loss gets much better: what differs is the logits. Nor
that the clip is needed at a lower rate: with --lr 0.03 both runs stay below the limit.

How long it takes. About half a minute on two CPU cores, a third of it compilation.

What it prints. A line for every tenth of each run: the loss, the largest logit of any
head, and how many heads were clipped in the last step. Then the two runs side by side.

    python examples/qk_clip.py --steps 200 --lr 0.1

Reference: Kimi Team, Kimi K2: open agentic intelligence, 2025 (arXiv 2507.20534).
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optaxclip

if __package__:  # imported by the tests, and not run as a program
    from .char_rnn import count, read_text
else:
    from char_rnn import count, read_text

SEED, BATCH, LENGTH = 0, 16, 32
LAYERS, WIDTH, HEADS, KEYS, SIZE = 2, 64, 4, 2, 16
MAX_LOGIT = 30.0
# Queries are (WIDTH, HEADS * SIZE): heads and their entries share an axis.
HEADS_LAST = optaxclip.Heads(-1, width=SIZE)


class Row(NamedTuple):
    """One run."""

    run: str
    final_loss: float  # nats per character, mean over the last tenth
    first_logit: float  # the largest of any head in the first step
    largest_logit: float  # in all steps
    last_logit: float
    clipped_share: float  # of key heads and steps, in [0, 1]


class Curves(NamedTuple):
    """What was seen at every step of a run."""

    loss: jax.Array | np.ndarray  # float32[steps]
    logit: jax.Array | np.ndarray  # float32[steps]
    clipped: jax.Array | np.ndarray  # float32[steps]: key heads that were clipped


def main(steps: int = 200, *, lr: float = 0.1) -> list[Row]:
    """Trains both, prints the table and returns it."""
    text = read_text()
    rows = []
    for run, max_logit in {"muon": None, "qk_clip": MAX_LOGIT}.items():
        curves = train(run, new_optimizer(lr, max_logit), text, steps)
        rows.append(summary(run, curves))
    print_table(rows)
    return rows


def new_optimizer(lr: float, max_logit: float | None) -> Any:
    """Muon for the matrices of the layers, Adam for all else, then QK-Clip, which
    measures only where its limit is None.
    """
    muon = optax.contrib.muon(
        lr, adam_learning_rate=3e-3, muon_weight_dimension_numbers=in_layers
    )
    clip = optaxclip.qk_clip(
        max_logit, queries={"*/query": HEADS_LAST}, keys={"*/key": HEADS_LAST}
    )
    return optax.named_chain(("muon", muon), ("qk_clip", clip))


def in_layers(params: Any) -> Any:
    """Which weights are Muon's."""
    numbers = optax.contrib.MuonDimensionNumbers()
    matrices = [dict.fromkeys(layer, numbers) for layer in params["layers"]]
    return {**dict.fromkeys(params), "layers": matrices}


def train(run: str, optimizer: Any, text: Any, steps: int) -> Curves:
    """One run, in ten compiled scans."""
    params = new_model(len(text.alphabet))
    trained = params, optimizer.init(params)
    epoch = compile_epoch(optimizer)
    curves = []
    for windows in np.array_split(batches(text.training, steps), min(steps, 10)):
        trained, seen = epoch(trained, windows)
        curves.append(jax.device_get(seen))
        print(
            f"{run:8}  loss {seen.loss[-1]:6.3f}  largest logit {seen.logit[-1]:7.1f}  "
            f"heads clipped {seen.clipped[-1]:2.0f}",
            flush=True,
        )
    return Curves(*map(np.concatenate, zip(*curves)))


def compile_epoch(optimizer: Any) -> Callable[..., Any]:
    def step(trained: Any, windows: jax.Array) -> tuple[Any, Curves]:
        params, state = trained
        (value, max_logits), grads = gradient(params, windows)
        updates, state = optimizer.update(grads, state, params, max_logits=max_logits)
        most = jnp.max(jnp.stack(jax.tree.leaves(max_logits)))
        factors = jnp.stack(jax.tree.leaves(state["qk_clip"].factor))
        seen = Curves(value, most, jnp.sum(factors < 1).astype(jnp.float32))
        return (optax.apply_updates(params, updates), state), seen

    gradient = jax.value_and_grad(loss, has_aux=True)
    return jax.jit(partial(jax.lax.scan, step))


def loss(params: Any, windows: jax.Array) -> tuple[jax.Array, Any]:
    """Cross entropy of the next character, and what `max_logits` wants: a tree whose
    paths begin with those of the attentions.
    """
    x = params["embedding"][windows[:, :-1]] + params["position"]
    max_logits = []
    for layer in params["layers"]:
        seen, most = attend(layer, normed(x))
        x = x + seen
        x = x + jax.nn.relu(normed(x) @ layer["up"]) @ layer["down"]
        max_logits.append(most)
    scores = normed(x) @ params["head"]
    cost = optax.softmax_cross_entropy_with_integer_labels(scores, windows[:, 1:])
    return cost.mean(), {"layers": max_logits}


def attend(layer: dict[str, jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Causal attention, and the largest logit of each query head over the batch."""
    batch, length, _ = x.shape
    query, key, value = (
        (x @ layer[name]).reshape(batch, length, KEYS, -1, SIZE)
        for name in ("query", "key", "value")
    )
    logits = jnp.einsum("btkge,bskoe->bkgts", query, key)
    logits = logits / SIZE**0.5
    causal = np.tril(np.ones((length, length), bool))
    logits = jnp.where(causal, logits, -jnp.inf)
    seen = jnp.einsum("bkgts,bskoe->btkge", jax.nn.softmax(logits), value)
    most = jnp.max(logits, axis=(0, 3, 4)).reshape(HEADS)
    return seen.reshape(batch, length, -1) @ layer["out"], most


def normed(x: jax.Array) -> jax.Array:
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def new_model(characters: int) -> dict[str, Any]:
    random = np.random.default_rng(SEED)

    def matrix(inputs: int, outputs: int, size: float = 1.0) -> jax.Array:
        values = size * random.standard_normal((inputs, outputs)) / inputs**0.5
        return jnp.asarray(values, jnp.float32)

    def layer() -> dict[str, jax.Array]:
        return {
            "query": matrix(WIDTH, HEADS * SIZE),
            "key": matrix(WIDTH, KEYS * SIZE),
            "value": matrix(WIDTH, KEYS * SIZE),
            "out": matrix(HEADS * SIZE, WIDTH),
            "up": matrix(WIDTH, 4 * WIDTH),
            "down": matrix(4 * WIDTH, WIDTH),
        }

    return {
        "embedding": matrix(characters, WIDTH, characters**0.5),
        "position": matrix(LENGTH, WIDTH),
        "layers": [layer() for _ in range(LAYERS)],
        "head": matrix(WIDTH, characters, 0.1),
    }


def batches(characters: jax.Array, steps: int) -> np.ndarray:
    """int32[steps, BATCH, LENGTH + 1]"""
    known = np.asarray(characters)
    random = np.random.default_rng(SEED)
    starts = random.integers(len(known) - LENGTH, size=(steps, BATCH, 1))
    return known[starts + np.arange(LENGTH + 1)]


def summary(run: str, curves: Curves) -> Row:
    last = max(1, len(curves.loss) // 10)
    return Row(
        run,
        final_loss=float(curves.loss[-last:].mean()),
        first_logit=float(curves.logit[0]),
        largest_logit=float(curves.logit.max()),
        last_logit=float(curves.logit[-1]),
        clipped_share=float(curves.clipped.mean()) / (LAYERS * KEYS),
    )


def print_table(rows: list[Row]) -> None:
    print(f"\n{'run':8}  {'loss':>6}  {'largest logit':^23}  {'heads':>7}")
    print(f"{'':8}  {'':>6}  {'first':>7} {'ever':>7} {'last':>7}  {'clipped':>7}")
    for row in rows:
        print(
            f"{row.run:8}  {row.final_loss:6.3f}  {row.first_logit:7.1f} "
            f"{row.largest_logit:7.1f} {row.last_logit:7.1f}  {row.clipped_share:7.1%}"
        )


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps",
        type=count,
        default=200,
        help="how many steps to train (default: %(default)s)",
    )
    parser.add_argument(
        "--lr",
        type=float,
        default=0.1,
        help="the learning rate of Muon (default: %(default)s)",
    )
    return parser


if __name__ == "__main__":
    main(**vars(command_line().parse_args()))
