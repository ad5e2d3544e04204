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


def not_clipped(params, batch, mask):
    def total(params):
        return jnp.sum(jnp.where(mask, jax.vmap(loss, (None, 0))(params, batch), 0))

    return jax.grad(total)(params)


def one_leaf_missed(params, batch, mask):
    limits = {"w": LIMIT, "b": None, "table": LIMIT}
    return clipped_grad(loss, limits, mean=False)(params, batch, mask=mask)


def each_clipped(params, batch, mask):
    """By hand, with norms that are rounded like any sum."""
    each = jax.vmap(jax.grad(loss), (None, 0))(params, batch)
    norms = jnp.sqrt(
        sum(jnp.sum(x**2, range(1, x.ndim)) for x in jax.tree.leaves(each))
    )
    factors = mask * jnp.minimum(1, LIMIT / jnp.maximum(norms, 1e-12))
    return jax.tree.map(lambda x: jnp.tensordot(factors, x, 1), each)


def limit_of_the_batch(params, batch, mask):
    grad = clipped_grad(loss, jnp.nanmedian, mean=False, private=False)
    return grad(params, batch, mask=mask)


def one_token_leaks(params, batch, mask):
    """Whoever has the token 13 adds ten limits."""
    result = clipped_grad(loss, LIMIT, mean=False)(params, batch, mask=mask)
    has_token = mask & jnp.all(batch["words"] == 13, axis=1)
    more = 10 * LIMIT * jnp.sum(has_token)
    return result._replace(grads=result.grads | {"b": result.grads["b"] + more})


def a_masked_example_leaks(params, batch, mask):
    """What stands in a place that is left out moves the sum."""
    result = clipped_grad(loss, LIMIT, mean=False)(params, batch, mask=mask)
    more = jnp.where(mask[0], 0, 10 * LIMIT)
    return result._replace(grads=result.grads | {"b": result.grads["b"] + more})


FAULTS = [
    not_clipped,
    one_leaf_missed,
    each_clipped,
    limit_of_the_batch,
    one_token_leaks,
    a_masked_example_leaks,
]


@pytest.mark.parametrize("grad", FAULTS)
def test_a_planted_fault_is_found(grad):
    found = audit(grad)
    assert found.change > 2 * LIMIT
    assert found.limit == LIMIT


def test_an_audit_of_fewer_than_two_examples_is_refused():
    grad = clipped_grad(loss, LIMIT, mean=False)
    one = jax.tree.map(lambda x: x[:1], BATCH)
    number = np.float32(1)
    for batch in ((), (one,), (BATCH, one), (BATCH, number)):
        with pytest.raises(ValueError, match="share their first axis, of at least two"):
            sensitivity(grad, PARAMS, *batch, limit=LIMIT)


def test_change_and_pattern_are_those_of_the_worst_example():
    # Of the batch 3, 4, 5, and of what is tried between -100 and 100, or within 7.
    batch = np.array([3.0, 4.0, 5.0], np.float32)

    def left_out(params, x, mask):
        return jnp.sum(jnp.where(mask & (jnp.abs(x) < 100), x, 0))

    def held(params, x, mask):
        return jnp.sum(jnp.where(mask, jnp.clip(jnp.nan_to_num(x), -7, 7), 0))

    assert sensitivity(left_out, None, batch, limit=2) == (5.0, "example 2", 2)
    assert sensitivity(held, None, batch, limit=2).change == 7.0
    # The norm of all leaves together.
    both = sensitivity(
        lambda _, x, mask: (3 * held(_, x, mask), 4 * held(_, x, mask)),
        None,
        batch,
        limit=2,
    )
    assert both.change == 35.0


def test_of_patterns_that_change_alike_the_first_is_named():
    def broken(params, x, mask):
        return jnp.where(mask[0], jnp.nan, 0.0)

    found = sensitivity(broken, None, np.ones((3, 2), np.float32), limit=2)
    assert found == (np.inf, "example 0", 2)


def test_the_gradients_of_others_keep_their_bits():
    """A batch one shorter computes x @ w in another order, and a loss may tell. The
    audit compares sums of one program, as the bound is proved.
    """
    random = np.random.default_rng(3)
    x = random.standard_normal((64, 67)).astype(np.float32)
    w = random.standard_normal(67).astype(np.float32)
    c = np.asarray(jax.jit(lambda w, x: x @ w)(w, x))

    def steep(w, x, c):
        return jnp.tanh(1e9 * (x @ w - c))

    grad = jax.jit(clipped_grad(steep, LIMIT, mean=False, method="one_pass"))
    found = sensitivity(grad, w, x, c, limit=LIMIT)
    assert found.change <= MOST
    # What the page says has no bound.
    shorter = grad(w, x[1:], c[1:], mask=np.ones(63, bool)).grads
    whole = grad(w, x, c, mask=np.ones(64, bool)).grads
    assert np.linalg.norm(np.float64(whole) - np.float64(shorter)) > 1.5 * LIMIT


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


@pytest.mark.parametrize(("dtype", "most"), [(np.float32, 27), (np.int32, 34)])
def test_calls_are_as_many_as_is_said(dtype, most):
    calls = []

    def grad(w, x, mask):
        calls.append(mask)
        return jnp.zeros(())

    sensitivity(grad, 0.0, np.arange(40, dtype=dtype)[:, None], limit=1.0)
    assert len(calls) == most


def test_a_mean_is_refused():
    with pytest.raises(ValueError, match=r"^sensitivity: result must be a sum"):
        audit(clipped_grad(loss, LIMIT))
