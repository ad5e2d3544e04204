"""Every argument of the clippers with fixed limits reaches what it is for."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip
from tests.clippers import apply

OPTIONS = {  # name: (clipper, what is left of 3, -4 in two rows by 6, 8 when the limit is 1)
    "tensor, order 1": (lambda: optaxclip.clip_by_tensor_norm(1.0, ord=1), lambda x: x / 21),
    "tensor, zero": (lambda: optaxclip.clip_by_tensor_norm(1.0, nonfinite="zero"), lambda x: x / np.sqrt(125)),
    "tensor, drop": (lambda: optaxclip.clip_by_tensor_norm(1.0, shrink=optaxclip.drop), lambda x: 0 * x),
    "tensor, eps": (lambda: optaxclip.clip_by_tensor_norm(1.0, eps=1.0), lambda x: x / (1 + np.sqrt(125))),
    "tensor, stacked": (lambda: optaxclip.clip_by_tensor_norm(1.0, stacked=1), lambda x: x / np.array([[5], [10]])),
    "rms, stacked": (lambda: optaxclip.clip_by_tensor_rms(1.0, stacked=1), lambda x: x / (np.array([[5], [10]]) / np.sqrt(2))),
    "average, stacked": (lambda: optaxclip.clip_by_average_norm(1.0, stacked=1), lambda x: x / np.array([[2.5], [5]])),
    "unit, axis": (lambda: optaxclip.clip_by_unit_norm(1.0, axis=1), lambda x: x / np.array([[5], [10]])),
    "unit, order": (lambda: optaxclip.clip_by_unit_norm(1.0, ord=1), lambda x: x / np.array([[9, 12]])),
    "unit, stacked": (lambda: optaxclip.clip_by_unit_norm(1.0, stacked=1), lambda x: x / np.array([[5], [10]])),
    "group, eps": (lambda: optaxclip.clip_by_group_norm(1.0, "all", eps=1.0), lambda x: x / (1 + np.sqrt(125))),
    "group, order 1": (lambda: optaxclip.clip_by_group_norm(1.0, "all", ord=1), lambda x: x / 21),
    "global, drop": (lambda: optaxclip.clip_by_global_norm(1.0, shrink=optaxclip.drop), lambda x: 0 * x),
    "block rms": (lambda: optaxclip.clip_by_block_rms(1.0), lambda x: x / np.sqrt(125 / 4)),
    "agc, stacked": (lambda: optaxclip.adaptive_grad_clip(1.0, stacked=1), lambda x: x / np.array([[5], [10]])),
    "agc, axis": (lambda: optaxclip.adaptive_grad_clip(1.0, axis=1), lambda x: x / np.array([[5], [10]])),
    "agc, per tensor": (lambda: optaxclip.adaptive_grad_clip(1.0, per_tensor=True), lambda x: x * np.sqrt(2 / 125)),
    "agc, per tensor, stacked": (lambda: optaxclip.adaptive_grad_clip(1.0, per_tensor=True, stacked=1), lambda x: x / np.array([[5], [10]])),
    "agc, eps": (lambda: optaxclip.adaptive_grad_clip(1.0, 10.0, ord=1, per_tensor=True), lambda x: x * 10 / 21),
}


ROWS = np.array([[3.0, -4.0], [6.0, 8.0]])


@cache
def clipped_with_options():
    """{name: clipped updates}, by one program."""
    weights = {"w": np.float32([[0.6, -0.8], [0.6, 0.8]])}
    return jax.jit(lambda grads: {name: apply(build(), grads, weights)[0]["w"] for name, (build, _) in OPTIONS.items()})({"w": np.float32(ROWS)})


@pytest.mark.parametrize("name", OPTIONS)
def test_arguments_reach_what_they_are_for(name):
    np.testing.assert_allclose(clipped_with_options()[name], OPTIONS[name][1](ROWS), rtol=1e-6)


def test_the_zero_policy_reaches_tensor_clippers_and_leaves_other_tensors():
    updates, _ = apply(optaxclip.clip_by_tensor_norm(1.0, nonfinite="zero"), {"a": jnp.array([jnp.inf, 1.0]), "b": jnp.array([0.3, 0.4])})
    np.testing.assert_array_equal(updates["a"], [0.0, 0.0])
    np.testing.assert_array_equal(updates["b"], jnp.array([0.3, 0.4]))


def test_measure_keeps_the_norms_that_it_is_given():
    grads = {"a": jnp.array([3.0, 4.0]), "b": jnp.ones(4)}
    updates, state = apply(optaxclip.measure(optaxclip.tensor_norm), grads)
    assert state.norm == {"a": 5.0, "b": 2.0} and updates["a"][0] == 3.0


def test_both_bounds_of_a_clip_by_value_follow_schedules_from_step_0():
    clipper = optaxclip.clip_by_value(lambda step: 1.0 + step, lambda step: -3.0 - step)
    grads = jnp.array([-9.0, 9.0])
    state = clipper.init(grads)
    for step in range(3):
        updates, state = clipper.update(grads, state)
        np.testing.assert_array_equal(updates, [-3.0 - step, 1.0 + step])
        assert state.step == step + 1


def test_clip_by_value_rounds_bounds_of_integers_inwards_and_keeps_their_range():
    whole = jnp.array([-128, -3, -2, 2, 3, 127], jnp.int8)
    for bounds, wanted in (((2.5,), [-2, -2, -2, 2, 2, 2]), ((2.5, -3.5), [-3, -3, -2, 2, 2, 2]), ((1e9,), [-128, -3, -2, 2, 3, 127])):
        updates, _ = apply(optaxclip.clip_by_value(*bounds), whole)
        assert updates.dtype == jnp.int8
        np.testing.assert_array_equal(updates, wanted)


def test_clip_by_value_leaves_bools_alone_and_takes_bounds_of_one_point():
    flags = np.array([True, False])
    updates, _ = apply(optaxclip.clip_by_value(0.5, 0.5), {"flags": flags, "x": jnp.array([0.1, 0.9])})
    assert updates["flags"] is flags
    np.testing.assert_array_equal(updates["x"], [0.5, 0.5])


def test_clip_by_value_limits_complex_numbers_by_modulus_in_their_precision():
    with jax.enable_x64(True):
        z = np.array([3 + 4j, 0.3 - 0.4j, 0j])
        updates, _ = apply(optaxclip.clip_by_value(1.0 / 3.0), jnp.asarray(z))
        np.testing.assert_allclose(updates, [(3 + 4j) / 15, (0.3 - 0.4j) / 1.5, 0], rtol=1e-15)
        np.testing.assert_array_equal(apply(optaxclip.clip_by_value(2.0), jnp.asarray(z))[0][1:], z[1:])
