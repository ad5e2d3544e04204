"""Weights that are integers, where their updates are floats, and the reverse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip
from optaxclip import rules

FLOATS = jnp.array([[3.0, 4.0], [1.0, 2.0]])
INTS = jnp.array([[3, 4], [1, 2]])
WITH_PARAMS = {
    "clip_by_tensor_norm": lambda: optaxclip.clip_by_tensor_norm(
        rules.share_of_params(0.1)
    ),
    "clip_by_global_norm": lambda: optaxclip.clip_by_global_norm(
        rules.share_of_params(0.1)
    ),
    "adaptive_grad_clip": lambda: optaxclip.adaptive_grad_clip(0.1),
    "larc": lambda: optaxclip.larc(0.1, weight_decay=0.1),
    "clippy": optaxclip.clippy,
    "constrain": lambda: optaxclip.constrain(optaxclip.clip_by_global_norm(1.0)),
}
WITH_MEMORY = {
    "carry_clipped": lambda: optaxclip.carry_clipped(
        optaxclip.clip_by_global_norm(1.0)
    ),
    "spam": optaxclip.spam,
}


@pytest.mark.parametrize("name", WITH_PARAMS)
@pytest.mark.parametrize("weights", [INTS, INTS > 1, np.asarray(INTS)])
def test_integer_weights_of_a_float_update_are_named(name, weights):
    clipper = WITH_PARAMS[name]()
    params, grads = {"w": FLOATS, "n": weights}, {"w": FLOATS, "n": FLOATS}
    text = (
        rf"^{name}: params must have a float or complex dtype for the leaf 'n', whose "
    )
    for update in (clipper.update, jax.jit(clipper.update)):
        with pytest.raises(TypeError, match=text):
            update(grads, clipper.init(params), params)


@pytest.mark.parametrize("name", WITH_MEMORY)
def test_a_float_update_without_a_memory_is_named(name):
    clipper = WITH_MEMORY[name]()
    params, grads = {"w": FLOATS, "n": INTS}, {"w": FLOATS, "n": FLOATS}
    with pytest.raises(
        ValueError, match=f"^{name}: the update of the leaf 'n' is float32"
    ):
        clipper.update(grads, clipper.init(params), params)


@pytest.mark.parametrize("name", [*WITH_PARAMS, *WITH_MEMORY])
@pytest.mark.parametrize("weights", [FLOATS, INTS])
def test_an_integer_update_passes(name, weights):
    clipper = {**WITH_PARAMS, **WITH_MEMORY}[name]()
    params, grads = {"w": FLOATS, "n": weights}, {"w": FLOATS, "n": INTS}
    updates, _ = clipper.update(grads, clipper.init(params), params)
    np.testing.assert_array_equal(updates["n"], INTS)
    assert updates["n"].dtype == INTS.dtype
