"""A second moment from elsewhere, in other dtypes than spam's own."""

import collections
import re

import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_spam_takes_a_second_moment_in_16_bits(dtype):
    clipper = optaxclip.spam(5000.0, warmup=0, count=True)
    grads = jnp.array([70.5, 70.9, -70.9])
    given = grads, clipper.init(grads)
    updates, _ = clipper.update(*given, second_moment=jnp.ones(3, dtype))
    limit = np.sqrt(5000.0)  # 70.711
    np.testing.assert_allclose(updates, np.clip(grads, -limit, limit), rtol=2e-7)


@pytest.mark.slow
def test_an_infinite_float16_becomes_the_largest_number():
    # The limit, sqrt(5000) * 1000, is beyond float16.
    clipper = optaxclip.spam(5000.0, warmup=0, count=True)
    grads = jnp.array([np.inf, 1000.0], jnp.float16)
    usual = jnp.full(2, 1e6, jnp.float32)
    updates, state = clipper.update(grads, clipper.init(grads), second_moment=usual)
    np.testing.assert_array_equal(updates, [65504, 1000])
    assert state.elements.last == 0.5


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"w": jnp.ones((4, 1, 1))}, "has the shape (4, 1, 1) for the leaf 'w'"),
        ({"w": jnp.ones((2, 1))}, "has the shape (2, 1) for the leaf 'w'"),
        ({"v": jnp.ones((2, 3))}, "has no value for the leaf 'w'"),
    ],
)
def test_a_second_moment_must_fit(wrong, text):
    clipper, grads = optaxclip.spam(), {"w": jnp.ones((2, 3))}
    with pytest.raises(ValueError, match=f"spam: second_moment {re.escape(text)}"):
        clipper.update(grads, clipper.init(grads), second_moment=wrong)


def test_a_second_moment_may_be_in_another_mapping():
    clipper, grads = optaxclip.spam(1.0, warmup=0), {"w": jnp.full(2, 3.0)}
    other = collections.OrderedDict(a=jnp.ones(5), w=jnp.ones(2))
    updates, _ = clipper.update(grads, clipper.init(grads), second_moment=other)
    np.testing.assert_array_equal(updates["w"], [1.0, 1.0])
