"""The audit finds what is not clipped, or rounding that is not measured, and passes
what clips.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from optaxclip import clipped_grad, sensitivity

SIZE, TIMES, LIMIT = 6, 16, 1.0
# Rounding, of which 0.5 % is proved for six examples of 16 terms.
MOST = 1.01 * LIMIT
random = np.random.default_rng(0)
PARAMS = {
    "w": random.standard_normal((4, 4)).astype(np.float32),
    "b": np.zeros(4, np.float32),
    "table": random.standard_normal((20, 4)).astype(np.float32),
}
BATCH = {
    "x": random.standard_normal((SIZE, TIMES, 4)).astype(np.float32),
    "words": random.integers(0, 20, (SIZE, TIMES), dtype=np.int32),
    "slope": random.standard_normal((SIZE, TIMES)).astype(np.float32),
}


def loss(params, example):
    hidden = example["x"] @ params["w"] + params["table"][example["words"]]
    return jnp.sum(example["slope"][:, None] * (hidden + params["b"][None]))


def audit(grad, batch=BATCH, limit=LIMIT):
    return sensitivity(jax.jit(grad), PARAMS, batch, limit=limit)


@pytest.mark.parametrize("method", ["ghost", "one_pass"])
def test_what_clips_passes(method):
    found = audit(clipped_grad(loss, LIMIT, mean=False, method=method))
    assert 0.9 * LIMIT < found.change <= MOST


def not_clipped(params, batch):
    return jax.grad(lambda p: jnp.sum(jax.vmap(loss, (None, 0))(p, batch)))(params)


def one_leaf_missed(params, batch):
    limits = {"w": LIMIT, "b": None, "table": LIMIT}
    return clipped_grad(loss, limits, mean=False)(params, batch)


def each_clipped(params, batch):
    """By hand, with norms that are rounded like any sum."""
    each = jax.vmap(jax.grad(loss), (None, 0))(params, batch)
    norms = jnp.sqrt(
        sum(jnp.sum(x**2, range(1, x.ndim)) for x in jax.tree.leaves(each))
    )
    factors = jnp.minimum(1, LIMIT / jnp.maximum(norms, 1e-12))
    return jax.tree.map(lambda x: jnp.tensordot(factors, x, 1), each)


def limit_of_the_batch(params, batch):
    grad = clipped_grad(loss, jnp.nanmedian, mean=False, private=False)
    return grad(params, batch)


FAULTS = [not_clipped, one_leaf_missed, each_clipped, limit_of_the_batch]


@pytest.mark.parametrize("grad", FAULTS)
def test_a_planted_fault_is_found(grad):
    found = audit(grad)
    assert found.change > 2 * LIMIT
    assert found.limit == LIMIT


def test_change_and_pattern_are_those_of_the_worst_example():
    # Of the batch 3, 4, 5, and of what is tried between -100 and 100, or within 7.
    batch = np.array([3.0, 4.0, 5.0], np.float32)

    def left_out(params, x):
        return jnp.sum(jnp.where(jnp.abs(x) < 100, x, 0))

    def held(params, x):
        return jnp.sum(jnp.clip(jnp.nan_to_num(x), -7, 7))

    assert sensitivity(left_out, None, batch, limit=2) == (
        3.0,
        "all positions alike",
        2,
    )
    assert sensitivity(held, None, batch, limit=2).change == 7.0
    # The norm of all leaves together.
    both = sensitivity(
        lambda _, x: (3 * held(_, x), 4 * held(_, x)), None, batch, limit=2
    )
    assert both.change == 35.0


def test_a_batch_may_be_split_over_devices():
    mesh = jax.make_mesh((2,), ("data",))
    batch = jax.device_put(BATCH, NamedSharding(mesh, P("data")))
    found = audit(clipped_grad(loss, LIMIT, mean=False), batch)
    assert 0.9 * LIMIT < found.change <= MOST


def test_keys_booleans_and_words_stay_what_they_are():
    batch = {
        "words": BATCH["words"],
        "key": jax.random.split(jax.random.key(0), SIZE),
        "is_used": np.arange(SIZE) % 2 == 0,
    }

    def of_words(params, example):
        kept = jax.random.bernoulli(example["key"], 0.5, (TIMES, 1))
        rows = jnp.where(kept, params["table"][example["words"]], 0)
        return jnp.where(example["is_used"], jnp.sum(rows**2), 0.0)

    found = audit(clipped_grad(of_words, LIMIT, mean=False), batch)
    assert 0.9 * LIMIT < found.change <= MOST


def test_a_mean_is_refused():
    with pytest.raises(ValueError, match=r"^sensitivity: result must be a sum"):
        audit(clipped_grad(loss, LIMIT))
