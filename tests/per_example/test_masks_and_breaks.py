"""Examples that are masked, broken, zero or tiny."""

from itertools import product

import jax
import numpy as np
import pytest

import optaxclip
from optaxclip.per_example import clipped_grad
from optaxclip.shrinks import auto_s, psac
from tests.per_example.batches import (
    EPS,
    METHODS,
    MLP,
    SIZE,
    all_zero,
    close,
    examples,
    hard_factor,
    inner,
    normal,
    norms_of,
    program,
    weighted,
)

FORMS = list(product((None, 5), METHODS))
every_form = pytest.mark.parametrize(("microbatch", "method"), FORMS)


@pytest.mark.slow
@every_form
def test_masked_examples_do_not_exist_whatever_they_hold(microbatch, method):
    _, params, (x, label) = MLP
    # 1, 4, 7 and 10 are a microbatch: all masked.
    mask = np.array([1, 0, 1, 1, 0, 1, 0, 0, 1, 0, 0, 0], bool)
    x = x.copy()
    x[1], x[4] = np.nan, np.inf
    result = program(microbatch, method)(0.5, params, (x, label), mask)
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


@every_form
def test_a_batch_that_is_all_masked_gives_zeros(microbatch, method):
    _, params, batch = MLP
    assert all_zero(
        program(microbatch, method)(0.5, params, batch, np.zeros(SIZE, bool)).grads
    )


@every_form
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_broken_example_contributes_nothing_and_is_counted(microbatch, bad, method):
    _, params, (x, label) = MLP
    broken = np.array([1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0], bool)
    result = program(microbatch, method)(
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
    _, params, (x, label) = MLP
    result = program(None, method)(0.5, params, (np.full_like(x, np.nan), label))
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
