"""A model, its examples, and the gradients of one example after another."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from optaxclip.per_example import clipped_grad

EPS = float(np.finfo(np.float32).eps)
METHODS = ("one_pass", "ghost")
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


MLP = mlp()


@cache
def examples():
    """The loss of each example, and its gradient as float64 leaves."""
    loss, params, batch = MLP
    values, grads = jax.jit(jax.vmap(jax.value_and_grad(loss), (None, 0)))(
        params, batch
    )
    return values, [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(grads)]


@cache
def program(microbatch=None, method="one_pass"):
    """clipped_grad of a limit that is traced, so that one program serves every
    limit.
    """
    loss = MLP[0]
    return jax.jit(
        lambda limit, params, batch, mask=None: clipped_grad(
            loss, limit, microbatch=microbatch, method=method
        )(params, batch, mask=mask)
    )


def norms_of(grads):
    """The norm of the gradient of each example."""
    squares = [leaf.reshape(len(leaf), -1) ** 2 for leaf in jax.tree.leaves(grads)]
    return np.sqrt(sum(each.sum(1) for each in squares))


def hard_factor(norm, limit):
    return np.where(norm > limit, limit / np.where(norm > 0, norm, 1), 1.0)


def weighted(leaves, factors):
    return [np.einsum("i,i...->...", factors, leaf) for leaf in leaves]


def mean_of_clipped(grads, limit):
    """(1 / B) sum_i g_i min(1, C / |g_i|)."""
    factors = hard_factor(norms_of(grads), limit) / len(jax.tree.leaves(grads)[0])
    return jax.tree.map(lambda leaf: np.einsum("i,i...->...", factors, leaf), grads)


def near(found, expected, tolerance=1e-6):
    """Every leaf within a millionth of its norm."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for got, want in pairs:
        error = np.linalg.norm(np.asarray(got, np.float64) - want)
        assert error <= tolerance * np.linalg.norm(want)


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
