"""`metrics` finds every clipper at any depth and says what it did."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip

GRADS = {"a": jnp.array([3.0, 4.0]), "b": {"c": jnp.array([0.3, 0.4])}}


def after(optimizer, *grads):
    state = optimizer.init(GRADS)
    for each in grads:
        _, state = optimizer.update(each, state, GRADS)
    return state


def test_numbers_of_a_global_clip_over_several_steps():
    small = jax.tree.map(lambda x: x / 100, GRADS)
    bad = jax.tree.map(lambda x: x * jnp.nan, GRADS)
    state = after(optax.chain(optaxclip.clip_by_global_norm(1.0), optax.scale(-1.0)), GRADS, bad, small, GRADS)
    numbers = {key: float(value) for key, value in optaxclip.metrics(state).items()}
    norm = np.sqrt(25.25)
    assert numbers == pytest.approx(
        {
            "clip/norm_before": norm,
            "clip/limit": 1.0,
            "clip/scale": 1 / norm,
            "clip/norm_after": 1.0,
            "clip/clipped": 1.0,
            "clip/clipped_share": 0.5,
            "clip/clipped_count": 2.0,
            "clip/nonfinite_count": 1.0,
        }
    )
    assert all(value.dtype == jnp.float32 and value.shape == () for value in optaxclip.metrics(state).values())


@pytest.mark.parametrize("broken", [np.nan, np.inf])
@pytest.mark.parametrize("nonfinite", ["propagate", "zero"])
def test_a_broken_step_is_counted_as_broken_and_not_as_clipped(nonfinite, broken):
    clipper = optaxclip.clip_by_global_norm(1.0, nonfinite=nonfinite)
    _, state = clipper.update(jnp.array([3.0, 4.0]), clipper.init(jnp.zeros(2)))
    _, state = clipper.update(jnp.array([3.0, broken]), state)
    found = optaxclip.metrics(state)
    assert (found["clip/clipped"], found["clip/clipped_count"], found["clip/nonfinite_count"]) == (0, 1, 1)
    np.testing.assert_array_equal(found["clip/norm_after"], np.nan if nonfinite == "propagate" else 0.0)


def test_tensor_clippers_are_told_by_leaf_path():
    numbers = optaxclip.metrics(after(optaxclip.clip_by_tensor_norm({"a": 1.0, "b": 2.0}), GRADS))
    assert float(numbers["clip/norm_before/a"]) == pytest.approx(5.0) and float(numbers["clip/norm_before/b/c"]) == pytest.approx(0.5)
    assert float(numbers["clip/limit/b/c"]) == 2.0 and float(numbers["clip/clipped_count/b/c"]) == 0


def test_of_units_the_one_furthest_over_its_limit_is_shown():
    kernel = jnp.array([[3.0, 0.1, 30.0], [4.0, 0.2, 40.0]])
    clipper = optaxclip.clip_by_unit_norm(jnp.array([[1.0, 1.0, 100.0]]))
    numbers = optaxclip.metrics(clipper.update(kernel, clipper.init(kernel))[1])
    assert float(numbers["clip/norm_before"]) == pytest.approx(5.0)
    assert float(numbers["clip/clipped_share"]) == pytest.approx(1 / 3)


def test_several_clippers_are_told_apart():
    chain = optax.chain(optaxclip.clip_by_tensor_norm(4.0), optaxclip.clip_by_global_norm(1.0))
    assert {key.split("/")[0] for key in optaxclip.metrics(after(chain, GRADS))} == {"clip_0", "clip_1"}
    named = optax.named_chain(("inner", optaxclip.clip_by_global_norm(4.0)), ("outer", optaxclip.clip_by_global_norm(1.0)))
    assert {key.rsplit("/", 1)[0] for key in optaxclip.metrics(after(named, GRADS))} == {"clip/inner", "clip/outer"}


def test_found_at_any_depth_and_in_traced_states():
    clipper = optaxclip.clip_by_global_norm
    inside = optax.chain(optax.masked(clipper(1.0), {"a": True, "b": False}), optax.scale(1.0))
    deep = optax.MultiSteps(optax.apply_if_finite(optax.partition({"x": inside}, {"a": "x", "b": "x"}), 2), 1)
    numbers = jax.jit(lambda state: optaxclip.metrics(state))(after(deep, GRADS))
    assert float(numbers["clip/x/norm_before"]) == pytest.approx(5.0)
    injected = optax.inject_hyperparams(clipper)(max_norm=optax.linear_schedule(2.0, 1.0, 10))
    assert float(optaxclip.metrics(after(injected, GRADS))["clip/limit"]) == pytest.approx(2.0)


def test_an_optimizer_without_clippers_has_no_metrics():
    assert optaxclip.metrics(optax.adam(1e-3).init(GRADS)) == {}
