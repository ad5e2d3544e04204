"""Errors of functions of other frameworks name what the user wrote."""

import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip.dropin import keras, tensorflow_style, torch_style

GRADS = {"w": jnp.array([3.0, 4.0]), "b": jnp.array([12.0])}
MATRIX = jnp.ones((2, 3))
KNOWN = {
    "clip_grads_with_norm: total_norm": lambda x: torch_style.clip_grads_with_norm(
        GRADS, 1.0, x
    ),
    "clip_by_global_norm: use_norm": lambda x: tensorflow_style.clip_by_global_norm(
        GRADS, 1.0, x
    ),
}


@pytest.mark.parametrize("argument", KNOWN)
def test_a_known_norm_is_one_real_number(argument):
    clip = KNOWN[argument]
    for wrong in ("13", True, 1j, object(), [13.0], {"w": 13.0}):
        with pytest.raises(TypeError, match=f"^{argument} must be a real number"):
            clip(wrong)
    for wrong in (jnp.ones(2), np.ones((1, 1))):
        with pytest.raises(ValueError, match=f"^{argument} must be a scalar"):
            clip(wrong)


def test_clip_grads_with_norm_needs_its_norm():
    with pytest.raises(TypeError, match="total_norm must be a real number, got None"):
        torch_style.clip_grads_with_norm(GRADS, 1.0, None)


@pytest.mark.parametrize("axes", ["0", True, 0.5, [0.0], {"w": 0}, lambda x: 0])
def test_axes_that_are_no_ints_are_named_axes(axes):
    text = "^clip_by_norm: axes must be an int, or a list or tuple of ints, got "
    with pytest.raises(TypeError, match=text):
        tensorflow_style.clip_by_norm(MATRIX, 1.0, axes)


@pytest.mark.parametrize("axes", [2, -3, [0, 2], (0, 0), [0, -2]])
def test_axes_that_a_leaf_lacks_are_named_axes(axes):
    text = (
        "^clip_by_norm: axes must be different axes of the leaf 'w', a tensor of rank 2"
    )
    with pytest.raises(ValueError, match=text):
        tensorflow_style.clip_by_norm({"w": MATRIX}, 1.0, axes)


@pytest.mark.parametrize("name", ["clipnorm", "clipvalue", "global_clipnorm"])
def test_errors_of_keras_name_its_arguments(name):
    text = f"^clip_gradients: {name} must be a scalar, got an array of shape"
    with pytest.raises(ValueError, match=text):
        keras.clip_gradients(**{name: np.ones(2)})
    clipper = keras.clip_gradients(**{name: lambda step: jnp.ones(5)})
    with pytest.raises(ValueError, match=r"^clip_gradients: "):
        clipper.update(GRADS, clipper.init(GRADS))


@pytest.mark.parametrize(
    ("call", "clip"),
    [
        ("clip_by_value", lambda tree: tensorflow_style.clip_by_value(tree, 0.0, 1.0)),
        ("clip_grad_value", lambda tree: torch_style.clip_grad_value(tree, 1.0)),
    ],
)
def test_a_leaf_that_is_no_array_is_named(call, clip):
    with pytest.raises(TypeError, match=f"^{call}: the leaf 'w' must be an array"):
        clip({"w": "text"})


def test_an_order_beyond_floats_is_named():
    for function in (torch_style.clip_grad_norm, torch_style.get_total_norm):
        with pytest.raises(ValueError, match="norm_type must be a number"):
            function(GRADS, norm_type=10**400, **_limit(function))


def _limit(function):
    return {"max_norm": 1.0} if function is torch_style.clip_grad_norm else {}


@pytest.mark.parametrize("optimizer", [optax.sgd, None, 1.0])
def test_what_is_no_optimizer_is_refused_at_once(optimizer):
    text = (
        "^clip_gradients_by_norm: optimizer must be an optimizer with init and update"
    )
    with pytest.raises(TypeError, match=text):
        tensorflow_style.clip_gradients_by_norm(optimizer, 1.0)


def test_a_known_norm_may_be_nan():
    clipped = torch_style.clip_grads_with_norm(GRADS, 1.0, math.nan)
    assert np.isnan(clipped["w"]).all()


def test_clip_names_its_own_argument():
    for wrong in (-1.0, math.nan):
        with pytest.raises(ValueError, match=r"^clip: max_delta must"):
            optaxclip.clip(wrong)
    clipper = optaxclip.clip({"w": 1.0})
    with pytest.raises(ValueError, match=r"^clip: max_delta has no value"):
        clipper.update(GRADS, clipper.init(GRADS))


def test_zclip_names_its_cap():
    with pytest.raises(ValueError, match=r"^zclip: cap must be at least 0, got -1.0"):
        optaxclip.zclip(cap=-1.0)


@pytest.mark.parametrize("order", [10**400, jnp.ones(2), True])
def test_an_order_that_is_no_number_is_named(order):
    with pytest.raises(ValueError, match=r"^clip_by_global_norm: ord must be a number"):
        optaxclip.clip_by_global_norm(1.0, ord=order)
