"""`only=` and `floats=` of `metrics`."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip

GRADS = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([jnp.nan])}


@pytest.fixture(scope="module")
def state():
    clipper = optaxclip.clip_by_tensor_norm({"a": 1.0, "b": None})
    return clipper.update(GRADS, clipper.init(GRADS))[1]


@pytest.mark.parametrize("only", ["limit", ("limit",), ["limit"], {"limit"}])
def test_only_takes_a_name_or_several(state, only):
    assert list(optaxclip.metrics(state, only=only)) == ["clip/limit/a", "clip/limit/b"]


def test_only_takes_the_numbers_that_all_have(state):
    every = optaxclip.metrics(state)
    found = optaxclip.metrics(state, only=("clipped", "norm_after"))
    assert len(found) == 4
    for name, value in found.items():
        np.testing.assert_array_equal(value, every[name])


def test_only_is_the_same_under_jit(state):
    wanted = optaxclip.metrics(state, only=("limit", "factor"))
    found = jax.jit(lambda s: optaxclip.metrics(s, only=("limit", "factor")))(state)
    assert found == wanted


def test_only_names_what_there_is(state):
    with pytest.raises(
        ValueError, match=r"^metrics: only .*'norm_before'.*got 'norms'"
    ):
        optaxclip.metrics(state, only="norms")
    for wrong in (3, [["limit"]]):
        with pytest.raises(ValueError, match=r"^metrics: only must be among"):
            optaxclip.metrics(state, only=wrong)


def test_only_of_what_this_state_lacks_raises(state):
    with pytest.raises(ValueError, match=r"'worst_ratio' .* with summary=True"):
        optaxclip.metrics(state, only="worst_ratio")


def test_floats_are_what_strict_json_takes(state):
    found = optaxclip.metrics(state, floats=True)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert {type(value) for value in found.values()} == {float}


def test_floats_leave_out_what_is_not_finite(state):
    left = optaxclip.metrics(state).keys() - optaxclip.metrics(state, floats=True)
    assert left == {"clip/limit/b", "clip/norm_before/b", "clip/norm_after/b"}


def test_floats_keep_the_order_of_the_numbers(state):
    found = list(optaxclip.metrics(state, floats=True))
    assert found[:2] == ["clip/norm_before/a", "clip/limit/a"]


def test_floats_are_not_known_under_jit(state):
    with pytest.raises(TypeError, match=r"^metrics: floats must be False under jit"):
        jax.jit(lambda s: optaxclip.metrics(s, floats=True))(state)
