"""A loss returns one real number, with every method. Otherwise JAX's error has a note
with what the loss gets, and must return.
"""

import jax.numpy as jnp
import pytest

from optaxclip import clipped_grad
from optaxclip.per_example import explain_clipped_grad

W, X = jnp.ones((3, 2)), jnp.ones((4, 3))

WRONG = {
    "one for each output": (lambda w, x: x @ w, r"Output had shape: \(2,\)"),
    "an array of one": (lambda w, x: jnp.sum(x @ w)[None], r"had shape: \(1,\)"),
    "an integer": (lambda w, x: jnp.sum(x @ w).astype(int), "got int32"),
    "complex": (lambda w, x: jnp.sum(x @ w) * 1j, "got complex64"),
    "nothing": (lambda w, x: None, "Output was None"),
    "a pair": (lambda w, x: (jnp.sum(x @ w), x), "Output was .*float32"),
}
NOTE = (
    "gets one example, without the batch axis: arrays of shape [3]. It must return one "
    "real number, or (value, aux) with has_aux=True."
)


@pytest.mark.parametrize("method", ["auto", "ghost", "one_pass"])
@pytest.mark.parametrize("loss, text", WRONG.values(), ids=WRONG.keys())
def test_what_is_no_real_number_raises(loss, text, method):
    with pytest.raises(TypeError, match=text) as caught:
        clipped_grad(loss, 1.0, method=method)(W, X)
    assert f"clipped_grad: <lambda> {NOTE}" in caught.value.__notes__


@pytest.mark.parametrize("method", ["auto", "ghost", "one_pass"])
def test_has_aux_without_aux_raises(method):
    def loss(w, x):
        return jnp.sum(x @ w)

    grad = clipped_grad(loss, 1.0, method=method, has_aux=True)
    with pytest.raises(TypeError, match="aux output") as caught:
        grad(W, X)
    assert f"clipped_grad: loss {NOTE}" in caught.value.__notes__


def test_explain_refuses_it_too():
    with pytest.raises(TypeError, match="complex64") as caught:
        explain_clipped_grad(WRONG["complex"][0])(W, X)
    assert f"explain_clipped_grad: <lambda> {NOTE}" in caught.value.__notes__


@pytest.mark.parametrize("method", ["auto", "ghost", "one_pass"])
@pytest.mark.parametrize("value", [3.0, jnp.bfloat16(3.0)])
@pytest.mark.slow
def test_a_constant_is_a_loss(value, method):
    found = clipped_grad(lambda w, x: value, 1.0, method=method)(W, X)
    assert found.values.tolist() == [3.0] * 4 and not found.grads.any()
