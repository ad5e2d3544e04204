"""The drop-in functions for TensorFlow and Keras, beside what those returned."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip.dropin import tensorflow_style, torch_style
from tests.dropin.recorded import INF, NAN, REFERENCES, close, limit_of, name, run, tree
from tests.references.record_tensorflow import decoded

RECORDED = json.loads((REFERENCES / "tensorflow.json").read_text())["cases"]


def arrays(x):
    return [leaf for leaf in jax.tree.leaves(x) if isinstance(leaf, np.ndarray)]


def difference(case):
    """Which row of the tables says that we differ; None where we do not."""
    function, limit = case["function"], limit_of(case)
    inputs = arrays(decoded(case["args"][0]))
    if "error" in case and function.endswith("norm") and "axes" not in case["options"]:
        return "refused there"
    if function == "clip_by_value":
        lower, upper = decoded(case["args"])[1:]
        crossed = np.ndim(lower) == 0 and lower > upper
        return "no room between the bounds" if crossed else None
    if limit is not None and not (limit > 0 or (limit == 0 and function != "keras")):
        return "limit refused here"
    if limit == INF:
        return None if "clipvalue" in str(case["args"][1]) else "limit inf"
    alone = function in ("clip_by_norm", "clip_by_average_norm")
    if alone or "'clipnorm'" in str(case["args"][1:]):
        if any(np.isinf(x).any() for x in inputs):
            return "inf in one tensor"
        if limit == 0 and not np.any(inputs[0]):
            return "0 / 0 there"
    for x in inputs:
        if x.dtype.kind == "f" and np.isfinite(x).all():
            root = math.sqrt(float(np.finfo(x.dtype).max))
            if float(np.max(np.abs(x), initial=0)) > root:
                return "overflow there"
    return None


DIFFERENT = [case for case in RECORDED if difference(case)]
SAME = [case for case in RECORDED if not difference(case)]


@pytest.mark.parametrize("case", SAME, ids=name)
def test_numbers_are_those_of_tensorflow(case):
    if "error" in case:
        with pytest.raises((TypeError, ValueError)):
            run(case)
        return
    ours, theirs = run(case), decoded(case["output"])
    is_none = {"is_leaf": lambda x: x is None}
    assert jax.tree.structure(
        ours if not isinstance(ours, tuple) else list(ours), **is_none
    ) == jax.tree.structure(theirs, **is_none)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs)):
        close(a, b, b.dtype if b.dtype.kind == "f" else np.float32)


def test_all_rows_of_the_tables_were_recorded():
    assert set(map(difference, DIFFERENT)) == {
        "refused there",
        "no room between the bounds",
        "limit refused here",
        "limit inf",
        "inf in one tensor",
        "0 / 0 there",
        "overflow there",
    }
    assert len(SAME) > 50


def expected_here(case, row, x, inputs):
    """What we make of one of the inputs."""
    function = case["function"]
    if row == "limit inf" or x.dtype.kind == "i":
        return x
    if row == "inf in one tensor":
        return np.full_like(x, NAN) if np.isinf(x).any() else x
    if row == "0 / 0 there":
        return np.zeros_like(x)
    if row == "overflow there":
        return np.full(x.shape, 1 / math.sqrt(x.size))
    together = inputs if function == "clip_by_global_norm" else [x]
    wide = [np.asarray(y, np.complex128) for y in together]
    norm = math.sqrt(sum(float(np.sum(np.abs(y) ** 2)) for y in wide))
    norm = norm / (x.size if function == "clip_by_average_norm" else 1)
    return x * min(1.0, limit_of(case) / norm)


@pytest.mark.filterwarnings("ignore:.*no leaf counts")
@pytest.mark.parametrize("case", DIFFERENT, ids=name)
def test_differences_from_tensorflow_are_those_in_the_table(case):
    row = difference(case)
    if row in ("limit refused here", "no room between the bounds"):
        text = r"must be (at least 0|above 0|at most clip_value_max)|must not be NaN"
        with pytest.raises(ValueError, match=text):
            run(case)
        return
    inputs, ours = jax.tree.leaves(decoded(case["args"][0])), run(case)
    leaves = jax.tree.leaves(ours[0] if isinstance(ours, tuple) else ours)
    if "output" in case:
        theirs = decoded(case["output"])
        if case["function"] == "clip_by_global_norm":
            theirs = theirs[0]
        pairs = zip(leaves, jax.tree.leaves(theirs))
        assert not all(np.allclose(a, b, 1e-2, equal_nan=True) for a, b in pairs)
    for x, leaf in zip(inputs, leaves, strict=True):
        assert leaf.dtype == x.dtype
        rtol = 8 * float(np.finfo(x.dtype).eps) if x.dtype.kind != "i" else 0
        np.testing.assert_allclose(leaf, expected_here(case, row, x, inputs), rtol)


@pytest.mark.parametrize(
    "function",
    [
        lambda t, limit: torch_style.clip_grad_norm(t, limit, "inf"),
        torch_style.clip_grad_value,
        lambda t, limit: torch_style.clip_grads_with_norm(t, limit, 7.0),
        lambda t, limit: torch_style.get_total_norm(t) * limit,
        lambda t, limit: tensorflow_style.clip_by_value(t, -limit, limit),
        tensorflow_style.clip_by_norm,
        lambda t, limit: tensorflow_style.clip_by_norm(t["a"], limit, axes=[-1]),
        tensorflow_style.clip_by_average_norm,
        tensorflow_style.clip_by_global_norm,
        lambda t, limit: tensorflow_style.global_norm(t) * limit,
    ],
)
def test_under_jit_with_a_traced_limit_the_numbers_are_the_same(function):
    direct, jitted = function(tree(), 0.5), jax.jit(function)(tree(), 0.5)
    for a, b in zip(jax.tree.leaves(direct), jax.tree.leaves(jitted)):
        close(a, b)


@pytest.mark.parametrize("axes", [range(1, 3), np.arange(1, 3)])
def test_axes_may_be_a_range_or_an_array(axes):
    t = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    norms = np.sqrt(np.sum(t.astype(np.float64) ** 2, (1, 2), keepdims=True))
    found = tensorflow_style.clip_by_norm(t, 2.0, axes=axes)
    close(found, t * np.minimum(1, 2 / norms))


def test_one_axis_may_be_an_array():
    t = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    norms = np.sqrt(np.sum(t.astype(np.float64) ** 2, 1, keepdims=True))
    found = tensorflow_style.clip_by_norm(t, 2.0, axes=np.array(1))
    close(found, t * np.minimum(1, 2 / norms))


def test_clip_gradients_by_norm_clips_before_the_optimizer():
    grads, params = tree(), jax.tree.map(jnp.zeros_like, tree())
    optimizer = tensorflow_style.clip_gradients_by_norm(optax.sgd(0.5), 1.0)
    updates, state = optimizer.update(grads, optimizer.init(params), params)
    norm = math.sqrt(sum(float(np.sum(x.astype(float) ** 2)) for x in grads.values()))
    for update, grad in zip(updates.values(), grads.values()):
        close(update, -0.5 * grad / norm)
    close(optaxclip.metrics(state)["clip/norm_before"], norm)
    with pytest.raises(
        ValueError,
        match=r"clip_gradients_by_norm: clip_norm must be at least 0, got -1.0",
    ):
        tensorflow_style.clip_gradients_by_norm(optax.sgd(0.5), -1.0)


def test_bounds_may_be_equal_or_below_zero():
    t = jnp.array([-5.0, -2.0, 5.0])
    for low, high, wanted in ((-3, -1, [-3, -2, -1]), (1, 1, [1, 1, 1])):
        found = tensorflow_style.clip_by_value(t, low, high)
        np.testing.assert_array_equal(found, wanted)


def test_the_lower_bound_wins_where_traced_bounds_cross():
    clip = jax.jit(tensorflow_style.clip_by_value)
    np.testing.assert_array_equal(clip(jnp.array([-3.0, 1.5, 9.0]), 2.0, 1.0), 2.0)
    np.testing.assert_array_equal(clip(jnp.array([-3.0, 1.5]), 1.0, 2.0), [1.0, 1.5])
