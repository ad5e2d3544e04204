"""Clipped elements are counted in exported programs for arrays of any size."""

import jax
import jax.numpy as jnp
import pytest

import optaxclip

CLIPPERS = {
    "clip_by_value": optaxclip.clip_by_value(1.0, count=True),
    "spam": optaxclip.spam(count=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CLIPPERS)
def test_elements_are_counted_for_any_size(name):
    (size,) = jax.export.symbolic_shape("size")
    shape = jax.ShapeDtypeStruct((3, size), jnp.float32)
    clipper = CLIPPERS[name]

    def share(grads):
        _, state = clipper.update(grads, clipper.init(grads))
        return optaxclip.metrics(state)["clip/elements_clipped"]

    program = jax.export.export(jax.jit(share))(shape)
    grads = jnp.array([[0.5, 2.0], [0.5, 0.5], [3.0, 0.5]])
    assert program.call(grads) == share(grads)
