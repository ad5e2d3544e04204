"""The loss is a function of the user's, which may be slow to trace."""

import jax
import jax.numpy as jnp
import pytest

from optaxclip import clipped_grad
from optaxclip.dropin import jax_privacy

W, X = jnp.ones((3, 4)), jnp.ones((5, 3))


def counted(calls):
    def loss(w, x):
        calls.append(x.shape)
        return jnp.sum(jnp.tanh(x @ w) ** 2)

    return loss


def absolute(grads):
    return jax.tree.map(jnp.abs, grads)


MAKERS = {
    "ghost": lambda loss: clipped_grad(loss, 1.0, method="ghost"),
    "one pass": lambda loss: clipped_grad(loss, 1.0, method="one_pass", microbatch=2),
    "auto": lambda loss: clipped_grad(loss, 1.0),
    "jax_privacy": lambda loss: jax_privacy.clipped_grad(loss, l2_clip_norm=1.0),
    "jax_privacy, transformed": lambda loss: jax_privacy.clipped_grad(
        loss, l2_clip_norm=1.0, pre_clipping_transform=absolute
    ),
}


@pytest.mark.parametrize("name", MAKERS)
def test_each_compilation_calls_the_loss_once(name):
    calls = []
    grad = jax.jit(MAKERS[name](counted(calls)))
    for size in (5, 5, 4):
        grad(W, X[:size])
    assert len(calls) == 2
