"""Errors of functions of other frameworks name what the user wrote."""

import jax.numpy as jnp
import numpy as np
import pytest

from optaxclip.dropin import keras, tensorflow_style, torch_style
from tests.dropin.recorded import NAN, tree

GRADS = {"w": jnp.array([3.0, 4.0]), "b": jnp.array([12.0])}
MATRIX = jnp.ones((2, 3))


def clip_with_norm(limit):
    return torch_style.clip_grads_with_norm(tree(), limit, 1.0)


CLIPS = {
    "clip_grad_norm: max_norm": torch_style.clip_grad_norm,
    "clip_grad_value: clip_value": torch_style.clip_grad_value,
    "clip_by_norm: clip_norm": tensorflow_style.clip_by_norm,
    "clip_by_average_norm: clip_norm": tensorflow_style.clip_by_average_norm,
    "clip_by_global_norm: clip_norm": tensorflow_style.clip_by_global_norm,
    "clip_grads_with_norm: max_norm": lambda tree, limit: clip_with_norm(limit),
}
BAD = [
    (-1.0, ValueError, "must be at least 0, got -1.0"),
    (NAN, ValueError, "must not be NaN"),
    ("1", TypeError, "must be a real number, got '1'"),
    (None, TypeError, "must be a real number, got None"),
]


@pytest.mark.parametrize(("limit", "error", "text"), BAD, ids=repr)
@pytest.mark.parametrize("argument", CLIPS)
def test_bad_limits_are_named(argument, limit, error, text):
    with pytest.raises(error, match=f"^{argument} {text}"):
        CLIPS[argument](tree(), limit)


KNOWN = {
    "clip_grads_with_norm: total_norm": torch_style.clip_grads_with_norm,
    "clip_by_global_norm: use_norm": tensorflow_style.clip_by_global_norm,
}


@pytest.mark.parametrize("argument", KNOWN)
def test_a_known_norm_is_one_real_number(argument):
    clip = KNOWN[argument]
    for wrong in ("13", True, 1j, object(), [13.0], {"w": 13.0}):
        with pytest.raises(TypeError, match=f"^{argument} must be a real number"):
            clip(GRADS, 1.0, wrong)
    for wrong in (jnp.ones(2), np.ones((1, 1))):
        with pytest.raises(ValueError, match=f"^{argument} must be a scalar, got an"):
            clip(GRADS, 1.0, wrong)


@pytest.mark.parametrize("axes", ["0", 0.5, [0.0], 2, -3, [0, 2], (0, 0), [0, -2]])
def test_axes_that_a_leaf_lacks_are_named_axes(axes):
    text = "^clip_by_norm: axes=.* the leaf 'w', a tensor of rank 2"
    with pytest.raises(ValueError, match=text):
        tensorflow_style.clip_by_norm({"w": MATRIX}, 1.0, axes)


@pytest.mark.parametrize("name", ["clipnorm", "clipvalue", "global_clipnorm"])
def test_errors_of_keras_name_its_arguments(name):
    begin = f"^clip_gradients: {name} must be"
    for value in (-1.0, 0, np.float32(0)):
        text = f"{begin} above 0, got .*: Keras does not clip then; leave it out"
        with pytest.raises(ValueError, match=text):
            keras.clip_gradients(**{name: value})
    with pytest.raises(TypeError, match=f"{begin} a real number, got '1'"):
        keras.clip_gradients(**{name: "1"})
    with pytest.raises(ValueError, match=f"{begin} a scalar, got an array of shape"):
        keras.clip_gradients(**{name: np.ones(2)})
    clipper = keras.clip_gradients(**{name: lambda step: jnp.ones(5)})
    with pytest.raises(ValueError, match=r"^clip_gradients: "):
        clipper.update(GRADS, clipper.init(GRADS))


@pytest.mark.parametrize("norm_type", [NAN, "abc", "rms", None, True, 10**400])
def test_orders_that_are_no_number_are_refused(norm_type):
    text = r"norm_type must be a number, or a text of one such as \"inf\", got"
    with pytest.raises(ValueError, match=f"^get_total_norm: {text}"):
        torch_style.get_total_norm(GRADS, norm_type)
    with pytest.raises(ValueError, match=f"^clip_grad_norm: {text}"):
        torch_style.clip_grad_norm(GRADS, 1.0, norm_type)
