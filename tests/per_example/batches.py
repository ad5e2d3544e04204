"""Models, their examples, and the gradients of one example after another."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optaxclip.per_example import clipped_grad

EPS = float(np.finfo(np.float32).eps)
METHODS = ("one_pass", "two_pass", "ghost")
SIZE = 12  # examples in a batch: one size, so that most tests run the same few programs


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def mlp():
    params = {"in": {"w": normal(0, 5, 7), "b": normal(1, 7)}, "out": normal(2, 7, 3)}

    def loss(p, example):
        x, label = example
        return -jax.nn.log_softmax(
            jnp.tanh(x @ p["in"]["w"] + p["in"]["b"]) @ p["out"]
        )[label]

    return (
        loss,
        params,
        (
            normal(3, SIZE, 5) * np.linspace(0.1, 3, SIZE, dtype=np.float32)[:, None],
            np.arange(SIZE, dtype=np.int32) % 3,
        ),
    )


def convolution():
    params = [normal(0, 3, 2, 1, 4), normal(1, 4, 3)]

    def loss(p, example):
        image, target = example
        seen = lax.conv_general_dilated(
            image[None],
            p[0],
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return jnp.sum((jnp.mean(jax.nn.relu(seen), (0, 1, 2)) @ p[1] - target) ** 2)

    return loss, params, (normal(2, SIZE, 6, 5, 1), normal(3, SIZE, 3))


def embedding():
    params = {"table": normal(0, 11, 4), "out": normal(1, 4)}

    def loss(p, example):
        return jnp.sum(
            (p["table"][example["words"]] @ p["out"] - example["target"]) ** 2
        )

    words = np.random.default_rng(2).integers(0, 11, (SIZE, 6), dtype=np.int32)
    return loss, params, {"words": words, "target": normal(3, SIZE, 6)}


def rnn():
    params = (normal(0, 4, 4) / 2, normal(1, 3, 4), normal(2, 4))

    def loss(p, sequence):
        recur, feed, out = p
        state, _ = lax.scan(
            lambda h, x: (jnp.tanh(h @ recur + x @ feed), None), jnp.zeros(4), sequence
        )
        return (state @ out - 1.0) ** 2

    return loss, params, normal(3, SIZE, 5, 3)


MODELS = {
    "mlp": mlp(),
    "convolution": convolution(),
    "embedding": embedding(),
    "rnn": rnn(),
}


@cache
def examples(model="mlp"):
    """The loss of each example, and its gradient as float64 leaves."""
    loss, params, batch = MODELS[model]
    values, grads = jax.jit(jax.vmap(jax.value_and_grad(loss), (None, 0)))(
        params, batch
    )
    return values, [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(grads)]


@cache
def program(model="mlp", microbatch=None, method="one_pass"):
    """clipped_grad of a limit that is traced, so that one program serves every
    limit.
    """
    loss = MODELS[model][0]
    return jax.jit(
        lambda limit, params, batch, mask=None: clipped_grad(
            loss, limit, microbatch=microbatch, method=method
        )(params, batch, mask=mask)
    )


def norms_of(leaves):
    return np.sqrt(sum((leaf.reshape(len(leaf), -1) ** 2).sum(1) for leaf in leaves))


def hard_factor(norm, limit):
    return np.where(norm > limit, limit / np.where(norm > 0, norm, 1), 1.0)


def weighted(leaves, factors):
    return [np.einsum("i,i...->...", factors, leaf) for leaf in leaves]


def close(found, expected, examples, eps=EPS, depth=64):
    """Every number within the rounding of the longest sum: `depth` operations for each
    of the examples, on numbers of the size of the largest.
    """
    for got, want in zip(
        jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(
            np.asarray(got, np.float64),
            want,
            rtol=0,
            atol=depth * eps * max(np.max(np.abs(want)), 1e-30) * np.sqrt(examples),
        )


def all_zero(tree):
    return all(np.all(np.asarray(leaf) == 0) for leaf in jax.tree.leaves(tree))


def inner(p, x):
    return jnp.sum(p * x)
