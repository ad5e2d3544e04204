"""Norms and clips of healthy gradients under `jax_debug_infs`, without jit too. One of
three sums of squares overflows by design, and a state begins with a limit of inf.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip
from optaxclip.dropin import tensorflow_style, torch_style

ROWS = np.array([[3.0, 4.0], [6.0, 8.0]])


def whole(rows):
    return np.sqrt(np.sum(rows**2))


def of_rows(rows):
    return np.sqrt(np.sum(rows**2, axis=1, keepdims=True))


def clipped(rows):
    return rows * min(1.0, 1 / whole(rows))


def clipped_rows(rows):
    return rows * np.minimum(1.0, 1 / of_rows(rows))


def cotangent(rows, **options):
    """What comes back through `clip_cotangent`."""
    _, pull = jax.vjp(lambda x: optaxclip.clip_cotangent(x, **options), rows)
    return pull(rows)[0]


# name: (call, its result in float64 NumPy), limits are 1
CALLS = {
    "global_norm": (optaxclip.global_norm, whole),
    "global_norm, order 3": (
        lambda x: optaxclip.global_norm(x, ord=3),
        lambda rows: np.sum(rows**3) ** (1 / 3),
    ),
    "global_norm, order inf": (lambda x: optaxclip.global_norm(x, ord=np.inf), np.max),
    "global_norm, rms": (
        lambda x: optaxclip.global_norm(x, ord="rms"),
        lambda rows: whole(rows) / 2,
    ),
    "tensor_norm": (optaxclip.tensor_norm, whole),
    "tensor_norm, stacked": (lambda x: optaxclip.tensor_norm(x, stacked=1), of_rows),
    "unitwise_norm": (optaxclip.unitwise_norm, lambda rows: of_rows(rows.T).T),
    "group_norm": (lambda x: optaxclip.group_norm(x, "all")["all"], whole),
    "spectral_norm": (optaxclip.spectral_norm, lambda rows: np.linalg.norm(rows, 2)),
    "clip_grads": (lambda x: optaxclip.clip_grads(x, 1.0)[0], clipped),
    "clip_grads, no limit": (lambda x: optaxclip.clip_grads(x, None)[1], whole),
    "clip_cotangent": (lambda x: cotangent(x, max_norm=1.0), clipped),
    "clip_cotangent, rows": (
        lambda x: cotangent(x, max_norm=1.0, axis=-1),
        clipped_rows,
    ),
    "clip_cotangent, value": (
        lambda x: cotangent(x, max_value=1.0),
        lambda rows: np.minimum(rows, 1.0),
    ),
    "clip_grad_norm": (lambda x: torch_style.clip_grad_norm(x, 1.0)[1], whole),
    "get_total_norm": (torch_style.get_total_norm, whole),
    "clip_by_norm": (lambda x: tensorflow_style.clip_by_norm(x, 1.0), clipped),
    "clip_by_global_norm": (
        lambda x: tensorflow_style.clip_by_global_norm(x, 1.0)[0],
        clipped,
    ),
    "clipped_grad": (
        lambda x: optaxclip.clipped_grad(jnp.vdot, 1.0)(jnp.ones(2), x).grads,
        lambda rows: np.mean(clipped_rows(rows), axis=0),
    ),
}


# At 1e30 squares overflow, at 1e-25 they underflow.
@pytest.mark.parametrize("scale", [1.0, 1e30, 1e-25])
@pytest.mark.parametrize("name", CALLS)
def test_healthy_gradients_raise_nothing(name, scale):
    call, expected = CALLS[name]
    rows = (ROWS * scale).astype(np.float32)
    with jax.debug_infs(True):
        found = call(jnp.asarray(rows))
    np.testing.assert_allclose(found, expected(rows.astype(np.float64)), rtol=1e-5)


def test_a_norm_beyond_its_dtype_raises():
    with jax.debug_infs(True), pytest.raises(FloatingPointError):
        optaxclip.global_norm(jnp.full(4, 3e38))
