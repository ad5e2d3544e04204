"""Per-example clipping against `vmap(jax.grad)` followed by the equations in float64
NumPy.
"""

from functools import cache

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optaxclip
from optaxclip.per_example import (
    clipped_grad,
    per_example_global_norm_clip,
    per_example_layer_norm_clip,
)
from optaxclip.shrinks import auto_s, psac

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


@pytest.mark.parametrize(
    "model, microbatch, method",
    [
        *(("mlp", width, method) for width in (None, 5, 50) for method in METHODS),
        *(
            ("mlp", 1, "two_pass"),
            ("mlp", 4, "one_pass"),
            ("mlp", 5, "ghost"),
            ("convolution", None, "two_pass"),
            ("convolution", 5, "one_pass"),
            ("convolution", 5, "ghost"),
        ),
        *(
            ("embedding", None, "one_pass"),
            ("embedding", 5, "ghost"),
            ("embedding", 5, "two_pass"),
            ("rnn", None, "one_pass"),
            ("rnn", 5, "ghost"),
            ("rnn", 5, "two_pass"),
        ),
    ],
)
def test_the_mean_is_that_of_gradients_clipped_one_by_one(model, microbatch, method):
    _, params, batch = MODELS[model]
    values, leaves = examples(model)
    norms = norms_of(leaves)
    limit = float(np.median(norms))
    result = program(model, microbatch, method)(limit, params, batch)
    factors = hard_factor(norms, limit)
    close(result.grads, [leaf / SIZE for leaf in weighted(leaves, factors)], SIZE)
    np.testing.assert_allclose(result.norms, norms, rtol=64 * EPS)
    np.testing.assert_allclose(result.factors, factors, rtol=64 * EPS)
    np.testing.assert_allclose(result.values, values, rtol=64 * EPS, atol=64 * EPS)
    assert jax.tree.structure(result.grads) == jax.tree.structure(params)
    assert result.nonfinite == 0
    assert result.aux is None


@pytest.mark.slow
def test_the_sum_is_not_divided():
    """In two passes: see the devices of shard_map."""
    loss, params, batch = MODELS["mlp"]
    leaves = examples()[1]
    result = jax.jit(clipped_grad(loss, 0.5, mean=False, microbatch=5))(params, batch)
    close(result.grads, weighted(leaves, hard_factor(norms_of(leaves), 0.5)), SIZE)


FACTORS = {
    "hard": (optaxclip.shrinks.hard, hard_factor),
    "normalize": (optaxclip.shrinks.normalize, lambda n, c: c / n),
    "auto_s": (auto_s(), lambda n, c: c / (n + 0.01)),
    "auto_s(0.5)": (auto_s(0.5), lambda n, c: c / (n + 0.5)),
    "psac": (psac(), lambda n, c: c / (n + 0.1 / (n + 0.1))),
    "psac(0.3)": (psac(0.3), lambda n, c: c / (n + 0.3 / (n + 0.3))),
    "smooth": (optaxclip.shrinks.smooth(), lambda n, c: 1 / (1 + n / c)),
    "drop": (optaxclip.shrinks.drop, lambda n, c: np.where(n > c, 0.0, 1.0)),
    "a function": (
        lambda norm, limit: jnp.sqrt(norm) * limit,
        lambda n, c: c / np.sqrt(n),
    ),
}


@cache
def shrunk():
    """The results of all shrinks, in one program."""
    loss, params, batch = MODELS["mlp"]
    kinds = {
        **{(name, "one_pass"): {"method": "one_pass"} for name in FACTORS},
        **{(name, "ghost"): {"method": "ghost"} for name in FACTORS},
        ("psac", "two_pass"): {"method": "two_pass", "microbatch": 5},
    }
    return jax.jit(
        lambda *args: {
            kind: clipped_grad(loss, 0.7, shrink=FACTORS[kind[0]][0], **options)(*args)
            for kind, options in kinds.items()
        }
    )(params, batch)


@pytest.mark.parametrize(
    "name, method",
    [
        *((name, method) for name in FACTORS for method in ("one_pass", "ghost")),
        ("psac", "two_pass"),
    ],
)
@pytest.mark.slow
def test_every_shrink_gives_its_factor(name, method):
    leaves = examples()[1]
    factors = FACTORS[name][1](norms_of(leaves), 0.7)
    result = shrunk()[name, method]
    np.testing.assert_allclose(result.factors, factors, rtol=64 * EPS)
    close(result.grads, [leaf / SIZE for leaf in weighted(leaves, factors)], SIZE)


@pytest.mark.parametrize("shrink", [auto_s(), auto_s(0), psac(), psac(0.01)])
def test_automatic_shrinks_stay_within_the_limit_and_keep_zero(shrink):
    norms = np.asarray([0.0, 1e-30, 1e-6, 0.01, 1.0, 1e6, 1e30, 3e38], np.float32)
    new = np.asarray(jax.jit(shrink)(norms, np.full_like(norms, 2.0)))
    assert new[0] == 0
    assert np.all(new <= 2.0 * (1 + EPS))
    assert np.all(np.isfinite(new))


@pytest.mark.slow
def test_a_limit_for_each_part_clips_each_by_its_own_norm():
    loss, params, batch = MODELS["mlp"]
    leaves = examples()[1]  # in/b, in/w, out
    limits = {"in": 0.3, "out": 0.9}
    result = jax.jit(clipped_grad(loss, limits, microbatch=5))(params, batch)
    inner, outer = norms_of(leaves[:2]), norms_of(leaves[2:])
    np.testing.assert_allclose(result.norms["in"], inner, rtol=64 * EPS)
    np.testing.assert_allclose(
        result.factors["out"], hard_factor(outer, 0.9), rtol=64 * EPS
    )
    expected = weighted(leaves[:2], hard_factor(inner, 0.3)) + weighted(
        leaves[2:], hard_factor(outer, 0.9)
    )
    close(result.grads, [leaf / SIZE for leaf in expected], SIZE)


@pytest.mark.slow
def test_a_part_without_a_limit_is_not_clipped():
    loss, params, batch = MODELS["mlp"]
    leaves = examples()[1]
    result = jax.jit(clipped_grad(loss, {"in": None, "out": 0.1}))(params, batch)
    close(result.grads["in"], [leaf.mean(0) for leaf in leaves[:2]], SIZE)
    np.testing.assert_array_equal(result.factors["in"], np.ones(SIZE))


@cache
def plain():
    """The gradient of the mean."""
    loss, params, batch = MODELS["mlp"]
    grads = jax.jit(
        jax.grad(lambda p, batch: jnp.mean(jax.vmap(loss, (None, 0))(p, batch)))
    )(params, batch)
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(grads)]


@pytest.mark.slow
@pytest.mark.parametrize("limit", [None, np.inf, 1e9])
@pytest.mark.parametrize("method", METHODS)
def test_without_a_limit_it_is_the_gradient_of_the_mean(limit, method):
    _, params, batch = MODELS["mlp"]
    close(program(method=method)(limit, params, batch).grads, plain(), SIZE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "microbatch, method",
    [(None, "one_pass"), (5, "two_pass"), (None, "ghost"), (5, "ghost")],
)
def test_masked_examples_do_not_exist_whatever_they_hold(microbatch, method):
    _, params, (x, label) = MODELS["mlp"]
    mask = np.array(
        [1, 0, 1, 1, 0, 1, 0, 0, 1, 0, 0, 0], bool
    )  # 1, 4, 7 and 10 are a microbatch: all masked
    x = x.copy()
    x[1], x[4] = np.nan, np.inf
    result = program("mlp", microbatch, method)(0.5, params, (x, label), mask)
    leaves = [leaf[mask] for leaf in examples()[1]]
    norms = norms_of(leaves)
    close(
        result.grads,
        [leaf / 5 for leaf in weighted(leaves, hard_factor(norms, 0.5))],
        5,
    )
    np.testing.assert_allclose(result.norms[mask], norms, rtol=64 * EPS)
    np.testing.assert_array_equal(result.norms[~mask], np.zeros(7))
    np.testing.assert_array_equal(result.factors[~mask], np.zeros(7))
    assert result.nonfinite == 0


@pytest.mark.parametrize(
    "microbatch, method",
    [(None, "one_pass"), (5, "two_pass"), (None, "ghost"), (5, "ghost")],
)
def test_a_batch_that_is_all_masked_gives_zeros(microbatch, method):
    _, params, batch = MODELS["mlp"]
    assert all_zero(
        program("mlp", microbatch, method)(
            0.5, params, batch, np.zeros(SIZE, bool)
        ).grads
    )


@pytest.mark.parametrize(
    "microbatch, bad, method",
    [
        (None, np.nan, "one_pass"),
        (None, np.inf, "one_pass"),
        (None, np.inf, "two_pass"),
        (None, np.inf, "ghost"),
        (1, np.nan, "two_pass"),
        (4, -np.inf, "one_pass"),
        (5, -np.inf, "two_pass"),
        (5, np.nan, "one_pass"),
        (5, np.nan, "ghost"),
    ],
)
def test_a_broken_example_contributes_nothing_and_is_counted(microbatch, bad, method):
    _, params, (x, label) = MODELS["mlp"]
    broken = np.array([1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0], bool)
    result = program("mlp", microbatch, method)(
        0.5, params, (np.where(broken[:, None], np.float32(bad), x), label)
    )
    leaves = [leaf[~broken] for leaf in examples()[1]]
    close(
        result.grads,
        [leaf / SIZE for leaf in weighted(leaves, hard_factor(norms_of(leaves), 0.5))],
        SIZE,
    )
    assert result.nonfinite == 2
    np.testing.assert_array_equal(result.factors[broken], np.zeros(2))
    assert not np.any(np.isfinite(result.norms[broken]))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_batch_of_broken_examples_gives_zeros(method):
    _, params, (x, label) = MODELS["mlp"]
    result = program("mlp", None, method)(0.5, params, (np.full_like(x, np.nan), label))
    assert all_zero(result.grads)
    assert result.nonfinite == SIZE


def test_an_example_broken_in_one_part_contributes_to_no_part():
    def loss(p, x):
        return p["a"] * x[0] + p["b"] * x[1]

    one = np.ones((), np.float32)
    result = jax.jit(clipped_grad(loss, {"a": 1.0, "b": 1.0}))(
        {"a": one, "b": one}, np.array([[0.5, np.nan], [0.25, 0.5]], np.float32)
    )
    assert (
        float(result.grads["a"]),
        float(result.grads["b"]),
        int(result.nonfinite),
    ) == (0.125, 0.25, 1)
    np.testing.assert_array_equal(result.factors["a"], [0, 1])


def inner(p, x):
    return jnp.sum(p * x)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_zero_gradients_stay_zero(method):
    kinds = [
        (0.0, optaxclip.shrinks.hard),
        (1.0, optaxclip.shrinks.normalize),
        (1.0, auto_s(0)),
        (1.0, psac()),
    ]
    run = jax.jit(
        lambda *args: [
            clipped_grad(inner, limit, shrink=shrink, method=method)(*args).grads
            for limit, shrink in kinds
        ]
    )
    np.testing.assert_array_equal(
        run(normal(0, 3), np.zeros((4, 3), np.float32)), np.zeros((4, 3))
    )


def test_a_tiny_normalized_gradient_adds_no_nan():
    xs = np.array([[1.5e-38, 0.0], [0.0, 2.0]], np.float32)
    result = jax.jit(
        clipped_grad(inner, 10.0, shrink=optaxclip.shrinks.normalize, mean=False)
    )(np.zeros(2, np.float32), xs)
    assert np.all(np.isfinite(result.grads))
    np.testing.assert_allclose(result.grads[1], 10.0, rtol=4 * EPS)


@pytest.mark.parametrize(
    ("size", "limit", "shrink"),
    [
        (3e38, 1.0, None),
        (1e38, 1e-20, None),
        (3.3e38, 2.0**-124, None),
        (1.2e-38, 10.0, optaxclip.shrinks.normalize),
        (1.2e-38, 3e38, optaxclip.shrinks.normalize),
    ],
)
def test_an_example_far_from_its_limit_counts_as_any_other(size, limit, shrink):
    xs = np.float32([[size, 0.0], [0.0, limit], [0.0, 0.0]])
    result = jax.jit(clipped_grad(inner, limit, shrink=shrink, mean=False))(
        np.zeros(2, np.float32), xs
    )
    np.testing.assert_allclose(result.grads, [limit, limit], rtol=11 * EPS)
    assert np.all(np.asarray(result.factors) > 0)
    assert np.all(np.isfinite(result.factors)) and result.nonfinite == 0


def test_a_traced_limit_beyond_float32_counts_as_its_largest():
    with jax.enable_x64(True):
        result = jax.jit(lambda limit, *args: clipped_grad(inner, limit)(*args))(
            np.float64(1e39), np.zeros(1, np.float32), np.float32([[3e38], [1.0]])
        )
    np.testing.assert_array_equal(result.factors, [1.0, 1.0])
    assert result.nonfinite == 0


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_norms_hold_over_the_range_of_float32(size):
    xs = normal(0, 5, 4) * np.float32(size)
    result = jax.jit(lambda limit, *args: clipped_grad(inner, limit)(*args))(
        1e-3 * size, np.zeros(4, np.float32), xs
    )
    np.testing.assert_allclose(
        result.norms, np.linalg.norm(np.asarray(xs, np.float64), axis=1), rtol=4 * EPS
    )
    assert np.all(np.isfinite(result.grads))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_bfloat16_gradients_are_measured_and_summed_in_float32(method):
    """300 equal bfloat16 gradients: a sum in bfloat16 stops growing at 256 times the
    first.
    """
    xs = np.ones((300, 1000), ml_dtypes.bfloat16)

    def loss(p, x):
        return jnp.sum((p * x).astype(jnp.float32))

    result = jax.jit(clipped_grad(loss, None, mean=False, microbatch=1, method=method))(
        np.zeros(1000, ml_dtypes.bfloat16), xs
    )
    assert result.grads.dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        np.asarray(result.grads, np.float32), np.float32(jnp.bfloat16(300))
    )
    np.testing.assert_allclose(result.norms, np.sqrt(1000), rtol=4 * EPS)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_16_bit_gradients_are_rounded_once(dtype):
    rows = np.random.default_rng(0).uniform(0.5, 1.0, (4, 7))
    gradients = jnp.asarray(rows, dtype)
    found = clipped_grad(lambda w, g: jnp.sum(w * g), 0.7)(
        jnp.zeros(7, dtype), gradients
    )
    wide = np.asarray(gradients, np.float64)
    lengths = np.linalg.norm(wide, axis=1, keepdims=True)
    wanted = np.mean(wide * np.minimum(1, 0.7 / lengths), axis=0)
    half = float(jnp.finfo(dtype).eps) / 2 + 64 * 2.0**-23
    np.testing.assert_allclose(np.asarray(found.grads, np.float64), wanted, rtol=half)


@pytest.mark.slow
def test_bfloat16_parameters_of_a_network():
    loss, params, batch = MODELS["mlp"]
    params = jax.tree.map(lambda leaf: leaf.astype(ml_dtypes.bfloat16), params)
    leaves = [
        np.asarray(leaf, np.float64)
        for leaf in jax.tree.leaves(
            jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(params, batch)
        )
    ]
    norms = norms_of(leaves)
    result = program(microbatch=5)(0.5, params, batch)
    np.testing.assert_allclose(result.norms, norms, rtol=64 * EPS)
    expected = weighted(leaves, hard_factor(norms, 0.5))
    for got, want in zip(jax.tree.leaves(result.grads), expected):
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(
            np.asarray(got, np.float64), want / SIZE, rtol=2**-8, atol=64 * EPS
        )


@pytest.mark.parametrize(
    "microbatch, method",
    [
        (None, "one_pass"),
        (2, "one_pass"),
        (2, "two_pass"),
        (None, "ghost"),
        (2, "ghost"),
    ],
)
def test_aux_comes_for_each_example_in_the_order_of_the_batch(microbatch, method):
    def loss(p, x):
        return jnp.sum(p * x), {"x": x, "first": x[0] > 0}

    xs = normal(0, 5, 3)
    result = jax.jit(
        clipped_grad(loss, 1.0, has_aux=True, microbatch=microbatch, method=method)
    )(np.ones(3, np.float32), xs)
    np.testing.assert_array_equal(result.aux["x"], xs)
    np.testing.assert_array_equal(result.aux["first"], xs[:, 0] > 0)


@pytest.mark.parametrize("method", METHODS)
def test_several_arguments_and_several_batches(method):
    def loss(key, scale, w, x, b):
        return scale * jnp.sum(w * x) * b + b * jax.random.key_data(key)[1]

    words = np.array([[0, 3], [1, 5], [2, 0], [3, 2], [4, 7]], np.uint32)
    xs, w, b = normal(1, 5, 3), normal(2, 3), np.float32(1.5)
    leaves = [
        2.0 * b * np.asarray(xs, np.float64),
        2.0 * np.asarray(xs, np.float64) @ w + words[:, 1],
    ]
    run = jax.jit(
        clipped_grad(
            loss,
            1.0,
            argnums=(2, -1),
            shared_argnums=1,
            microbatch=2,
            method=method,
        )
    )
    result = run(jax.random.wrap_key_data(words), np.float32(2.0), w, xs, b)
    assert isinstance(result.grads, tuple)
    close(
        result.grads,
        [leaf / 5 for leaf in weighted(leaves, hard_factor(norms_of(leaves), 1.0))],
        5,
    )


def test_limits_may_be_traced_and_a_negative_one_counts_as_zero():
    _, params, batch = MODELS["mlp"]
    leaves = examples()[1]
    close(
        program()(0.5, params, batch).grads,
        [leaf / SIZE for leaf in weighted(leaves, hard_factor(norms_of(leaves), 0.5))],
        SIZE,
    )
    assert all_zero(program()(-1.0, params, batch).grads)


@pytest.mark.slow
def test_a_batch_split_over_devices_under_jit():
    _, params, batch = MODELS["mlp"]
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.device_put(batch, NamedSharding(mesh, P("data")))
    leaves = examples()[1]
    expected = [
        leaf / SIZE for leaf in weighted(leaves, hard_factor(norms_of(leaves), 0.5))
    ]
    for method in METHODS:
        close(program("mlp", 4, method)(0.5, params, split).grads, expected, SIZE)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.slow
def test_in_shard_map_each_device_clips_its_own_examples(check_vma, method):
    loss, params, batch = MODELS["mlp"]
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    grad = clipped_grad(loss, 0.5, mean=False, method=method)

    def local(params, batch):
        result = grad(params, batch)
        return lax.psum(result.grads, "data"), result.norms

    run = jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(P(), P("data")),
            out_specs=(P(), P("data")),
            check_vma=check_vma,
        )
    )
    grads, norms = run(params, batch)
    leaves = examples()[1]
    np.testing.assert_allclose(norms, norms_of(leaves), rtol=64 * EPS)
    close(grads, weighted(leaves, hard_factor(norms_of(leaves), 0.5)), SIZE)


@cache
def temporary(method, batch, microbatch):
    shapes = {"in": (64, 256), "mid": (256, 256), "out": (256, 10)}

    def loss(p, x):
        return jnp.sum(jnp.tanh(jnp.tanh(x @ p["in"]) @ p["mid"]) @ p["out"])

    def shaped(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    run = jax.jit(
        lambda p, xs: (
            clipped_grad(loss, 1.0, microbatch=microbatch, method=method)(p, xs).grads
        )
    )
    return (
        run.lower(
            {name: shaped(*shape) for name, shape in shapes.items()}, shaped(batch, 64)
        )
        .compile()
        .memory_analysis()
        .temp_size_in_bytes
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_memory_does_not_grow_with_the_batch(method):
    """From 16 to 1024 examples it may grow by a few numbers for each example, never by
    a gradient, which is 338 kB.
    """
    assert abs(temporary(method, 1024, 8) - temporary(method, 16, 8)) < 1024 * 64


@pytest.mark.slow
def test_memory_grows_with_the_microbatch():
    gradient = 4 * (64 * 256 + 256 * 256 + 256 * 10)
    small, large = temporary("one_pass", 1024, 8), temporary("one_pass", 1024, 32)
    assert large - small > 0.9 * 24 * gradient


@pytest.mark.slow
def test_two_passes_need_less_memory_than_one():
    assert temporary("two_pass", 1024, 8) < 0.9 * temporary("one_pass", 1024, 8)


# The functions of optax.


def batches(seed=0, dtype=np.float32):
    return {
        "w": normal(seed, 6, 4, 3).astype(dtype),
        "b": (normal(seed + 1, 6, 3) * 3).astype(dtype),
        "s": (normal(seed + 2, 6) + 1).astype(dtype),
    }


@jax.jit
def clipped_twice(grads, limit):
    """By our functions and by those of optax, in one program for every limit; the
    layers as a list.
    """
    layers = jax.tree.leaves(grads)
    return {
        "all": (
            per_example_global_norm_clip(grads, limit),
            optax.per_example_global_norm_clip(grads, limit),
        ),
        "uniform": (
            per_example_layer_norm_clip(layers, limit),
            optax.per_example_layer_norm_clip(layers, limit),
        ),
        "by size": (
            per_example_layer_norm_clip(layers, limit, False),
            optax.per_example_layer_norm_clip(layers, limit, False),
        ),
    }


@pytest.mark.slow
@pytest.mark.parametrize("limit", [0.0, 0.5, 4.0, 100.0, np.inf])
def test_healthy_gradients_give_what_optax_gives(limit):
    ours, theirs = clipped_twice(batches(), limit)["all"]
    close(
        ours[0],
        [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(theirs[0])],
        6,
    )
    assert int(ours[1]) == int(theirs[1])
    assert jax.tree.map(jnp.shape, ours) == jax.tree.map(jnp.shape, theirs)
    assert jax.tree.map(lambda leaf: leaf.dtype, ours) == jax.tree.map(
        lambda leaf: leaf.dtype, theirs
    )


@pytest.mark.parametrize("uniform", [True, False])
@pytest.mark.parametrize("limit", [0.0, 0.5, 4.0, np.inf])
@pytest.mark.slow
def test_healthy_layers_give_what_optax_gives(limit, uniform):
    ours, theirs = clipped_twice(batches(), limit)["uniform" if uniform else "by size"]
    close(ours[0], [np.asarray(leaf, np.float64) for leaf in theirs[0]], 6)
    assert list(map(int, ours[1])) == list(map(int, theirs[1]))
    assert isinstance(ours[0], list) and isinstance(ours[1], list)


def test_integers_and_bfloat16_sum_to_float32_as_in_optax():
    integers = [np.array([[0, 0, 0], [0, 3, 4], [4, 0, 3], [3, 4, 0]])]
    total, count = jax.jit(lambda grads: per_example_global_norm_clip(grads, 1.25))(
        integers
    )
    np.testing.assert_allclose(total[0], [1.75, 1.75, 1.75], rtol=4 * EPS)
    assert int(count) == 3
    sums, _ = jax.eval_shape(
        lambda grads: per_example_global_norm_clip(grads, 1.0),
        batches(dtype=ml_dtypes.bfloat16),
    )
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(sums))


@pytest.mark.parametrize(
    "size, dtype", [(60000.0, jnp.float16), (1e30, jnp.bfloat16), (1e-30, jnp.float32)]
)
def test_the_bound_holds_where_squares_leave_the_range(size, dtype):
    grads = np.full((2, 1000), size, dtype)
    total, count = jax.jit(
        lambda grads: per_example_global_norm_clip(grads, 1e-3 * size)
    )(grads)
    np.testing.assert_allclose(
        np.linalg.norm(np.asarray(total, np.float64)), 2e-3 * size, rtol=16 * EPS
    )
    assert int(count) == 2


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_broken_gradient_is_left_out_and_counted(bad):
    grads = batches()
    healthy = [np.asarray(leaf, np.float64)[1:] for leaf in jax.tree.leaves(grads)]
    norms = norms_of(healthy)
    grads["b"][0, 1] = bad
    found = clipped_twice(grads, 4.0)
    total, count = found["all"][0]
    close(total, weighted(healthy, hard_factor(norms, 4.0)), 6)
    assert int(count) == 1 + np.sum(norms > 4.0)
    sums, counts = found["uniform"][0]
    limit = 4.0 / np.sqrt(3)
    close(
        sums,
        [weighted([leaf], hard_factor(norms_of([leaf]), limit))[0] for leaf in healthy],
        6,
    )
    assert [int(n) for n in jax.tree.leaves(counts)] == [
        1 + np.sum(norms_of([leaf]) > limit) for leaf in healthy
    ]


def test_no_gradients_at_all():
    assert per_example_global_norm_clip({}, 1.0) == ({}, 0)
    assert per_example_layer_norm_clip([None], 1.0) == ([None], [None])


# Bad input.


def add(p, x):
    return p * x


WRONG = {
    "negative": (
        lambda: clipped_grad(add, -1.0),
        ValueError,
        r"clipped_grad: max_norm must be at least 0, got -1.0\.",
    ),
    "a string in a tree": (
        lambda: clipped_grad(add, {"w": "1"}),
        TypeError,
        r"clipped_grad: max_norm for 'w' must be a real number, got '1'\.",
    ),
    "an array": (
        lambda: clipped_grad(add, jnp.ones(3)),
        ValueError,
        r"clipped_grad: max_norm must be one number, got an array of shape \(3,\)\.",
    ),
    "nothing": (
        lambda: clipped_grad(add, {}),
        ValueError,
        r"clipped_grad: max_norm has no limit in it, got {}\.",
    ),
    "microbatch": (
        lambda: clipped_grad(add, 1.0, microbatch=0),
        ValueError,
        r"clipped_grad: microbatch must be a number of examples, at least 1, or None, "
        r"got 0\.",
    ),
    "two passes": (
        lambda: clipped_grad(add, {"a": 1.0, "b": 2.0}, method="two_pass"),
        ValueError,
        r"clipped_grad: method='two_pass' weighs the loss of an example, which has one "
        r"factor, but max_norm has 2 limits: use another method, or one limit\.",
    ),
    "no such part": (
        lambda: clipped_grad(lambda p, x: p["b"] * x, {"a": 1.0})(
            {"b": jnp.ones(())}, jnp.ones(2)
        ),
        ValueError,
        r"clipped_grad: max_norm has no value for the leaf 'b': it has 'a'\.",
    ),
    "mask": (
        lambda: clipped_grad(add, 1.0)(1.0, jnp.ones(3), mask=jnp.ones(2, bool)),
        ValueError,
        r"clipped_grad: mask must be bool\[3\], one for each example, got bool\[2\]\.",
    ),
    "mask of numbers": (
        lambda: clipped_grad(add, 1.0)(1.0, jnp.ones(3), mask=jnp.ones(3)),
        ValueError,
        r"must be bool\[3\], one for each example, got float32\[3\]\.",
    ),
    "gamma": (
        lambda: auto_s(-1),
        ValueError,
        r"auto_s: gamma must be at least 0, got -1\.",
    ),
    "r": (
        lambda: psac(0),
        ValueError,
        r"psac: r must be above 0, got 0: normalize is the limit for r = 0\.",
    ),
    "optax limit": (
        lambda: per_example_global_norm_clip([jnp.ones((2, 3))], -1.0),
        ValueError,
        r"per_example_global_norm_clip: l2_norm_clip must be at least 0, got -1.0\.",
    ),
    "optax layers": (
        lambda: per_example_layer_norm_clip([jnp.ones(2)], "1"),
        TypeError,
        r"per_example_layer_norm_clip: global_l2_norm_clip must be a real number, got "
        r"'1'\.",
    ),
    "optax scalar": (
        lambda: per_example_global_norm_clip([jnp.ones(())], 1.0),
        ValueError,
        r"per_example_global_norm_clip: grads must be arrays whose first axis counts "
        r"examples, of one size, got the shapes {'0': \(\)}\.",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_say_what_was_wrong(name):
    call, error, text = WRONG[name]
    with pytest.raises(error, match=text):
        call()


def test_per_example_limits_are_named_by_their_function():
    for text, call in {
        "per_example_global_norm_clip: l2_norm_clip": lambda: (
            per_example_global_norm_clip(jnp.ones((2, 3)), -1.0)
        ),
        "per_example_layer_norm_clip: global_l2_norm_clip": lambda: (
            per_example_layer_norm_clip(jnp.ones((2, 3)), -1.0)
        ),
        "clipped_grad: max_norm": lambda: optaxclip.clipped_grad(
            lambda w, x: w * x, -1.0
        ),
        "clipped_grad: max_norm for 'w'": lambda: optaxclip.clipped_grad(
            lambda w, x: w * x, {"w": -1.0}
        ),
        "auto_s: gamma": lambda: optaxclip.shrinks.auto_s(-1.0),
        "psac: r": lambda: optaxclip.shrinks.psac(-1.0),
    }.items():
        with pytest.raises(ValueError, match=rf"^{text} must be at least 0, got -1.0"):
            call()


@pytest.mark.slow
def test_factors_are_1_for_zeros_and_without_a_limit():
    batch = jnp.array([0.0, 2.0])
    for shrink in (optaxclip.shrinks.hard, optaxclip.shrinks.normalize):
        result = optaxclip.clipped_grad(lambda w, x: w * x, None, shrink=shrink)(
            jnp.ones(()), batch
        )
        np.testing.assert_array_equal(result.factors, [1.0, 1.0])
    result = optaxclip.clipped_grad(lambda w, x: w * x, 1.0)(jnp.ones(()), batch)
    np.testing.assert_array_equal(result.factors, [1.0, 0.5])


@pytest.mark.slow
def test_sums_of_sixteen_bit_gradients_keep_small_terms():
    grads = jnp.array([[1.0], [2.0**-10], [2.0**-10]], jnp.bfloat16)
    total, _ = per_example_global_norm_clip(grads, np.inf)
    assert total.dtype == jnp.float32 and total[0] == 1 + 2.0**-9
