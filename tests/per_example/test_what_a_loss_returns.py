"""A loss returns one real number, with every method. Otherwise the error names the line
of the loss.
"""

import jax.numpy as jnp
import pytest

from optaxclip import clipped_grad
from optaxclip.per_example import explain_clipped_grad

W, X = jnp.ones((3, 2)), jnp.ones((4, 3))

WRONG = {
    "one for each output": (
        lambda w, x: x @ w,
        r"got float32\[2\] \(.*returns.py:\d+\)",
    ),
    "an array of one": (
        lambda w, x: jnp.sum(x @ w)[None],
        r"got float32\[1\] \(.*returns.py:\d+\)",
    ),
    "an integer": (
        lambda w, x: jnp.sum(x @ w).astype(int),
        r"got int32\[\] \(.*:\d+\)",
    ),
    "complex": (lambda w, x: jnp.sum(x @ w) * 1j, r"got complex64\[\] \(.*:\d+\)"),
    "nothing": (lambda w, x: None, r"got None\.$"),
    "a pair": (lambda w, x: (jnp.sum(x @ w), x), r"got \(float32\[\], float32\[3\]\)"),
}


@pytest.mark.parametrize("method", ["auto", "ghost", "one_pass"])
@pytest.mark.parametrize("loss, text", WRONG.values(), ids=WRONG.keys())
def test_what_is_no_real_number_raises(loss, text, method):
    start = r"^clipped_grad: the loss of one example must return one real number"
    with pytest.raises(TypeError, match=f"{start}.* {text}"):
        clipped_grad(loss, 1.0, method=method)(W, X)


@pytest.mark.parametrize("method", ["auto", "ghost", "one_pass"])
def test_has_aux_without_aux_raises(method):
    def loss(w, x):
        return jnp.sum(x @ w)

    grad = clipped_grad(loss, 1.0, method=method, has_aux=True)
    text = r"^clipped_grad: .*\(value, aux\).* got float32\[\] \(.*returns.py:\d+\)"
    with pytest.raises(TypeError, match=text):
        grad(W, X)


def test_explain_refuses_it_too():
    with pytest.raises(TypeError, match=r"explain_clipped_grad: .* complex64"):
        explain_clipped_grad(WRONG["complex"][0])(W, X)


@pytest.mark.parametrize("method", ["auto", "ghost", "one_pass"])
@pytest.mark.parametrize("value", [3.0, jnp.bfloat16(3.0)])
@pytest.mark.slow
def test_a_constant_is_a_loss(value, method):
    found = clipped_grad(lambda w, x: value, 1.0, method=method)(W, X)
    assert found.values.tolist() == [3.0] * 4 and not found.grads.any()
