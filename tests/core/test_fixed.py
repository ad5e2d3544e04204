"""Every argument of the clippers by norm and by value reaches what it is for."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip
from tests.helpers import apply

# name: (clipper, what is left of 3, -4 in two rows by 6, 8 when the limit is 1)
OPTIONS = {
    "tensor, order 1": (
        lambda: optaxclip.clip_by_tensor_norm(1.0, ord=1),
        lambda x: x / 21,
    ),
    "tensor, zero": (
        lambda: optaxclip.clip_by_tensor_norm(1.0, nonfinite="zero"),
        lambda x: x / np.sqrt(125),
    ),
    "tensor, drop": (
        lambda: optaxclip.clip_by_tensor_norm(1.0, shrink=optaxclip.shrinks.drop),
        lambda x: 0 * x,
    ),
    "tensor, eps": (
        lambda: optaxclip.clip_by_tensor_norm(1.0, eps=1.0),
        lambda x: x / (1 + np.sqrt(125)),
    ),
    "tensor, stacked": (
        lambda: optaxclip.clip_by_tensor_norm(1.0, stacked=1),
        lambda x: x / np.array([[5], [10]]),
    ),
    "tensor, stacked by name": (
        lambda: optaxclip.clip_by_tensor_norm(
            1.0, stacked=lambda path, leaf: len(path)
        ),
        lambda x: x / np.array([[5], [10]]),
    ),
    "rms, stacked": (
        lambda: optaxclip.clip_by_tensor_rms(1.0, stacked=1),
        lambda x: x / (np.array([[5], [10]]) / np.sqrt(2)),
    ),
    "average, stacked": (
        lambda: optaxclip.clip_by_average_norm(1.0, stacked=1),
        lambda x: x / np.array([[2.5], [5]]),
    ),
    "unit, axis": (
        lambda: optaxclip.clip_by_unitwise_norm(1.0, axis=1),
        lambda x: x / np.array([[5], [10]]),
    ),
    "unit, axis by name": (
        lambda: optaxclip.clip_by_unitwise_norm(1.0, axis=lambda path, leaf: len(path)),
        lambda x: x / np.array([[5], [10]]),
    ),
    "unit, order": (
        lambda: optaxclip.clip_by_unitwise_norm(1.0, ord=1),
        lambda x: x / np.array([[9, 12]]),
    ),
    "unit, stacked": (
        lambda: optaxclip.clip_by_unitwise_norm(1.0, stacked=1),
        lambda x: x / np.array([[5], [10]]),
    ),
    "group, eps": (
        lambda: optaxclip.clip_by_group_norm(1.0, "all", eps=1.0),
        lambda x: x / (1 + np.sqrt(125)),
    ),
    "group, order 1": (
        lambda: optaxclip.clip_by_group_norm(1.0, "all", ord=1),
        lambda x: x / 21,
    ),
    "global, drop": (
        lambda: optaxclip.clip_by_global_norm(1.0, shrink=optaxclip.shrinks.drop),
        lambda x: 0 * x,
    ),
    "block rms": (
        lambda: optaxclip.clip_by_block_rms(1.0),
        lambda x: x / np.sqrt(125 / 4),
    ),
    "agc, stacked": (
        lambda: optaxclip.adaptive_grad_clip(1.0, stacked=1),
        lambda x: x / np.array([[5], [10]]),
    ),
    "agc, axis": (
        lambda: optaxclip.adaptive_grad_clip(1.0, axis=1),
        lambda x: x / np.array([[5], [10]]),
    ),
    "agc, per tensor": (
        lambda: optaxclip.adaptive_grad_clip(1.0, per_tensor=True),
        lambda x: x * np.sqrt(2 / 125),
    ),
    "agc, per tensor, stacked": (
        lambda: optaxclip.adaptive_grad_clip(1.0, per_tensor=True, stacked=1),
        lambda x: x / np.array([[5], [10]]),
    ),
    "agc, eps": (
        lambda: optaxclip.adaptive_grad_clip(1.0, 10.0, ord=1, per_tensor=True),
        lambda x: x * 10 / 21,
    ),
}
ROWS = np.array([[3.0, -4.0], [6.0, 8.0]])


@cache
def clipped_with_options():
    """{name: clipped updates}, by one program."""
    weights = {"w": np.float32([[0.6, -0.8], [0.6, 0.8]])}
    return jax.jit(
        lambda grads: {
            name: apply(build(), grads, weights)[0]["w"]
            for name, (build, _) in OPTIONS.items()
        }
    )({"w": np.float32(ROWS)})


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_arguments_reach_what_they_are_for(name):
    np.testing.assert_allclose(
        clipped_with_options()[name], OPTIONS[name][1](ROWS), rtol=1e-6
    )


@pytest.mark.parametrize(
    ("labels", "text"),
    [
        ({"a": 1, "b": "1"}, "'1' and 1"),
        ({"a": None, "b": "x"}, "'x' and None"),
        (lambda tree: {"a": 1, "b": "1"}, "'1' and 1"),
    ],
    ids=["int and text", "None and text", "function"],
)
def test_group_labels_of_mixed_kinds_are_named(labels, text):
    grads = {"a": jnp.ones(2), "b": jnp.ones(3)}
    with pytest.raises(
        TypeError,
        match=(
            rf"^clip_by_group_norm: labels must be of one kind, which sorts, got {text}"
        ),
    ):
        apply(optaxclip.clip_by_group_norm(1.0, labels), grads)
    with pytest.raises(TypeError, match=rf"^group_norm: labels must be .* got {text}"):
        optaxclip.group_norm(grads, labels)


def test_limits_for_labels_of_mixed_kinds_are_named():
    with pytest.raises(
        TypeError,
        match=(
            r"^clip_by_group_norm: max_norm must have labels of one kind, which sorts, "
            r"got 'a' and 1"
        ),
    ):
        optaxclip.clip_by_group_norm({1: 1.0, "a": 2.0}, {"a": 1, "b": "a"})


def test_each_of_many_leaves_has_its_own_bound():
    most, least = (
        {f"layer{place}": sign * 1.0 for place in range(2000)} for sign in (1, -1)
    )
    optaxclip.clip_by_value(most, least)
    with pytest.raises(
        ValueError,
        match=(
            r"min_value must be at most max_value, got min_value=3.0 and max_value=1.0"
        ),
    ):
        optaxclip.clip_by_value(most, least | {"layer1999": 3.0})
