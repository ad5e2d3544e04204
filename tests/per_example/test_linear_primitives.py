"""Operations of JAX that are linear in an operand, by each operand in turn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from optaxclip.per_example import clipped_grad
from tests.per_example.batches import normal

ROWS = np.array([[2], [0], [2]])
SCATTER = lax.ScatterDimensionNumbers((1,), (0,), (0,))
GATHER = lax.GatherDimensionNumbers((1,), (0,), (0,))
WINDOW = {
    "window_dimensions": (2, 2),
    "window_strides": (1, 1),
    "padding": ((0, 0), (0, 0)),
}
PADDING = [(1, 0, 1), (0, 2, 0)]
HALF = np.array([[True, False, True, False]] * 3)


def scatter(kind):
    def run(x, y):
        return getattr(lax, kind)(x, ROWS, y, SCATTER, unique_indices=False)

    return run


def once(x, y):
    return lax.scatter(x, ROWS[:2], y, SCATTER, unique_indices=True)


def lower(x):
    return jnp.tril(x[:, :3]) + 3 * jnp.eye(3)


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
    "dynamic_update_slice": lambda x, y: lax.dynamic_update_slice(x, y[:2, :3], (1, 1)),
    "pad": lambda x, y: lax.pad(x, y[1, 2], PADDING),
    "pad of a sum": lambda x, y: lax.pad(x, y.sum(), PADDING),
    "scatter": lambda x, y: once(x, y[:2]),
    "scatter_add": scatter("scatter_add"),
    "scatter_sub": scatter("scatter_sub"),
    "select_n": lambda x, y: lax.select_n(HALF, x, y),
    "triangular_solve": lambda x, y: lax.linalg.triangular_solve(
        lower(lax.stop_gradient(x)), y, left_side=True, lower=True
    ),
}
# Operations with one operand, to which the other is added or by which it is scaled.
OF_ONE = {
    "broadcast_in_dim": lambda x: jnp.broadcast_to(x[None], (2, 3, 4)),
    "complex": lambda x: lax.complex(x, 2 * x).real,
    "cumsum": lambda x: jnp.cumsum(x, 1),
    "cumsum, reversed": lambda x: lax.cumsum(x, 0, reverse=True),
    "dynamic_slice": lambda x: lax.dynamic_slice(x, (1, 1), (2, 2)),
    "fft": lambda x: jnp.fft.rfft(x).imag,
    "gather": lambda x: lax.gather(x, ROWS, GATHER, (1, 4)),
    "imag": lambda x: (x * (1 + 2j)).imag,
    "neg": jnp.negative,
    "reduce_sum": lambda x: x.sum(1),
    "reduce_precision": lambda x: lax.reduce_precision(x, 8, 23),
    "reduce_window_sum": lambda x: lax.reduce_window(x, 0.0, lax.add, **WINDOW),
    "reshape": lambda x: x.reshape(2, 6),
    "rev": lambda x: lax.rev(x, (1,)),
    "slice": lambda x: x[::2, 1:],
    "sort": lambda x: lax.sort_key_val(jnp.array([2, 0, 1]), x[:, 0])[1],
    "split": lambda x: jnp.split(x, [1, 3], 1)[1],
    "squeeze": lambda x: lax.squeeze(x[:, :1], (1,)),
    "transpose": lambda x: x.T,
    "while": lambda x: lax.fori_loop(0, 3, lambda _, y: 2 * y, x),
    "cond": lambda x: lax.cond(True, lambda y: 2 * y, lambda y: y, x),
}
CASES = {}
for name, run in OF_TWO.items():
    CASES[f"{name}, first"] = run
    CASES[f"{name}, second"] = lambda p, x, run=run: run(x, p)
for name, run in OF_ONE.items():
    CASES[name] = lambda p, x, run=run: run(p) * run(x)
    CASES[f"{name}, of a product"] = lambda p, x, run=run: run(p * x)
# By these operands it is not a function of the parameter, or JAX has no derivative.
del CASES["triangular_solve, first"]


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
