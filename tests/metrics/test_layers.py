"""`metrics(state, layers=True)` has a row for each layer."""

import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip

# Layers on axis 1: norms 5, 10 and 0.5.
GRADS = {"w": jnp.array([[3.0, 6.0, 0.3], [4.0, 8.0, 0.4]]), "b": jnp.array([0.5])}


def state_after_a_step(stacked):
    clipper = optaxclip.clip_by_tensor_norm(1.0, stacked=stacked)
    return clipper.update(GRADS, clipper.init(GRADS))[1]


def test_each_layer_has_a_row_on_request():
    found = optaxclip.metrics(state_after_a_step({"w": (1,), "b": None}), layers=True)
    norms = {name: x for name, x in found.items() if "norm_before" in name}
    want = {"clip/norm_before/b": 0.5}
    want |= {f"clip/norm_before/w/{i}": x for i, x in enumerate([5.0, 10.0, 0.5])}
    assert norms.keys() == want.keys()
    for name, norm in want.items():
        np.testing.assert_allclose(norms[name], norm, 1e-6)
    assert found["clip/clipped/w/1"] == 1 and found["clip/clipped/w/2"] == 0


def test_without_layers_the_furthest_one_is_shown():
    found = optaxclip.metrics(state_after_a_step({"w": (1,), "b": None}))
    np.testing.assert_allclose(found["clip/norm_before/w"], 10.0, 1e-6)
    assert "clip/norm_before/w/1" not in found


def test_states_without_layers_have_the_same_rows():
    state = state_after_a_step(None)
    found = optaxclip.metrics(state)
    assert optaxclip.metrics(state, layers=True).keys() == found.keys()


def test_a_leaf_with_the_name_of_a_layer_is_refused():
    grads = {"w": jnp.ones((3, 4)), "w/0": jnp.ones(2)}
    clipper = optaxclip.clip_by_tensor_norm(1.0, stacked={"w": 1, "w/0": None})
    _, state = clipper.update(grads, clipper.init(grads))
    assert len(state.by_name()) == 2
    for read in (state.by_name, lambda **options: optaxclip.metrics(state, **options)):
        with pytest.raises(ValueError, match=r"layers=True: a leaf of .* 'w/0'"):
            read(layers=True)
