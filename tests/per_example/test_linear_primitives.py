"""Operations of JAX that sum, keep or move the numbers of an operand, by each operand.

All others are one use of a parameter as a whole, as in test_unusual_losses.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from optaxclip.per_example import clipped_grad
from tests.per_example.batches import normal

ROWS = np.array([[2], [0], [2]])
SCATTER = lax.ScatterDimensionNumbers((1,), (0,), (0,))
PADDING = [(1, 0, 1), (0, 2, 0)]
HALF = np.array([[True, False, True, False]] * 3)


def scatter(kind):
    def run(x, y):
        return getattr(lax, kind)(x, ROWS, y, SCATTER, unique_indices=False)

    return run


def once(x, y):
    return lax.scatter(x, ROWS[:2], y, SCATTER, unique_indices=True)


def convolved(x, y):
    return lax.conv_general_dilated(x[None, None], y[None, None], (1, 1), "SAME")


# Operations with two operands of 3 x 4, linear in each.
OF_TWO = {
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": jnp.multiply,
    "concatenate": lambda x, y: jnp.concatenate([x, y], 1),
    "conv_general_dilated": convolved,
    "dot_general": lambda x, y: x @ y.T,
    "pad": lambda x, y: lax.pad(x, y[1, 2], PADDING),
    "scatter": lambda x, y: once(x, y[:2]),
    "scatter_add": scatter("scatter_add"),
    "select_n": lambda x, y: lax.select_n(HALF, x, y),
}
# Operations with one operand, to which the other is added or by which it is scaled.
OF_ONE = {
    "broadcast_in_dim": lambda x: jnp.broadcast_to(x[None], (2, 3, 4)),
    "neg": jnp.negative,
    "reduce_sum": lambda x: x.sum(1),
    "reshape": lambda x: x.reshape(2, 6),
    "rev": lambda x: lax.rev(x, (1,)),
    "squeeze": lambda x: lax.squeeze(x[:, :1], (1,)),
    "transpose": lambda x: x.T,
}
CASES = {}
for name, run in OF_TWO.items():
    CASES[f"{name}, first"] = run
    CASES[f"{name}, second"] = lambda p, x, run=run: run(x, p)
for name, run in OF_ONE.items():
    CASES[name] = lambda p, x, run=run: run(p) * run(x)
    CASES[f"{name}, of a product"] = lambda p, x, run=run: run(p * x)


@pytest.mark.parametrize("name", CASES)
def test_a_linear_operation_by_each_operand(name):
    def loss(p, x):
        out = CASES[name](p, x)
        return jnp.sum(out * jnp.cos(jnp.arange(out.size)).reshape(out.shape))

    p, x = normal(0, 3, 4), normal(1, 5, 3, 4)

    def numbers(x):
        # It is linear: its gradient is what it makes of each unit vector.
        units = jnp.eye(12).reshape(12, 3, 4)
        return jax.vmap(loss, (0, None))(units, x) - loss(jnp.zeros((3, 4)), x)

    grads = np.asarray(jax.vmap(numbers)(x), np.float64)
    norms = np.linalg.norm(grads, axis=1)
    factors = np.minimum(1, 1 / np.maximum(norms, 1e-30))
    result = jax.jit(clipped_grad(loss, 1.0, mean=False, method="ghost"))(p, x)
    np.testing.assert_allclose(result.norms, norms, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        result.grads, (factors @ grads).reshape(3, 4), rtol=0, atol=1e-5
    )
