"""Limits and bounds that the originals refuse, and those that they take."""

import jax.numpy as jnp
import numpy as np
import pytest

from optaxclip.dropin import keras, tensorflow_style, torch_style
from tests.dropin.recorded import NAN, tree

BAD = [
    (-1.0, ValueError, "must be at least 0, got -1.0"),
    (NAN, ValueError, "must not be NaN"),
    ("1", TypeError, "must be a real number, got '1'"),
    (None, TypeError, "got None"),
]
LIMITS = {
    "clip_grad_norm: max_norm": lambda limit: torch_style.clip_grad_norm(tree(), limit),
    "clip_grads_with_norm: max_norm": lambda limit: torch_style.clip_grads_with_norm(
        tree(), limit, 1.0
    ),
    "clip_grad_value: clip_value": lambda limit: torch_style.clip_grad_value(
        tree(), limit
    ),
    "clip_by_norm: clip_norm": lambda limit: tensorflow_style.clip_by_norm(
        tree(), limit
    ),
    "clip_by_average_norm: clip_norm": lambda limit: (
        tensorflow_style.clip_by_average_norm(tree(), limit)
    ),
    "clip_by_global_norm: clip_norm": lambda limit: (
        tensorflow_style.clip_by_global_norm(tree(), limit)
    ),
}


@pytest.mark.parametrize(
    ("limit", "error", "text"), BAD, ids=[str(limit) for limit, *_ in BAD]
)
@pytest.mark.parametrize("argument", LIMITS)
def test_bad_limits_are_named(argument, limit, error, text):
    with pytest.raises(
        error,
        match=f"{argument} {text}"
        if text[:3] != "got"
        else f"{argument} must be a real number, {text}",
    ):
        LIMITS[argument](limit)


def test_a_bound_that_is_no_scalar_is_refused():
    with pytest.raises(
        ValueError,
        match=(
            r"clip_grad_value: clip_value must be a scalar, got an array of shape "
            r"\(3,\)"
        ),
    ):
        torch_style.clip_grad_value(jnp.ones(3), jnp.ones(3))
    with pytest.raises(
        ValueError,
        match="clip_grads_with_norm: total_norm must be a scalar, got an array",
    ):
        torch_style.clip_grads_with_norm(jnp.ones(3), 1.0, jnp.ones(2))


def test_bounds_without_room_name_the_arguments_of_tensorflow():
    with pytest.raises(
        ValueError,
        match=(
            r"clip_by_value: clip_value_min must be at most clip_value_max, got "
            r"clip_value_min=2.0 and clip_value_max=1.0"
        ),
    ):
        tensorflow_style.clip_by_value(jnp.ones(2), 2.0, 1.0)


def test_keras_says_of_a_negative_limit_what_keras_would_do():
    for name in ("clipnorm", "clipvalue", "global_clipnorm"):
        for value in (-1.0, 0, np.float32(0)):
            with pytest.raises(
                ValueError,
                match=(
                    rf"^clip_gradients: {name} must be above 0, got .*: Keras does not "
                    rf"clip then"
                ),
            ):
                keras.clip_gradients(**{name: value})


def test_tensorflow_bounds_may_be_equal_or_below_zero():
    t = jnp.array([-5.0, -2.0, 5.0])
    np.testing.assert_array_equal(
        tensorflow_style.clip_by_value(t, -3, -1), [-3, -2, -1]
    )
    np.testing.assert_array_equal(tensorflow_style.clip_by_value(t, 1, 1), [1, 1, 1])
    clipped = tensorflow_style.clip_by_norm(
        [jnp.array([3.0, 4.0]), jnp.array([6.0, 8.0])], 1.0
    )
    np.testing.assert_allclose(clipped, [[0.6, 0.8], [0.6, 0.8]], rtol=1e-6)
