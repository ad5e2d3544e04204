"""Derivatives by the numbers of clippers that learn, forward and reverse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip
from optaxclip import clip_by_global_norm, rules

NORMS = (1.0, 2.0, 1.5, 4.0, 3.0, 9.0, 1.0, 2.0)
MAKERS = {
    "adagc ratio": (lambda x: optaxclip.adagc(x, 0.9, warmup=2), 1.05),
    "adagc decay": (lambda x: optaxclip.adagc(1.05, x, warmup=2), 0.9),
    "zclip z": (lambda x: optaxclip.zclip(x, 0.9, warmup=3), 1.0),
    "zclip decay": (lambda x: optaxclip.zclip(1.0, x, warmup=3), 0.9),
    "adagn decay": (lambda x: optaxclip.adagn(0.7, x), 0.9),
    "spam decay": (lambda x: optaxclip.spam(2.0, decay=x, warmup=1), 0.9),
    "log_z_score decay": (
        lambda x: clip_by_global_norm(rules.log_z_score(1.0, x, warmup=2)),
        0.9,
    ),
    "quantile": (lambda x: clip_by_global_norm(rules.windowed_quantile(x, 4)), 0.4),
    "factor": (
        lambda x: clip_by_global_norm(rules.windowed_quantile(0.5, 4, factor=x)),
        1.1,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_derivatives_are_those_of_differences(name):
    make, number = MAKERS[name]

    def moved(x):
        """The first coordinate after some steps. The gradient of the other is 0."""
        clipper, grads = make(x), jnp.array([1.0, 0.0])
        state, total = clipper.init(grads), 0.0
        for norm in NORMS:
            updates, state = clipper.update(norm * grads, state)
            total += updates[0]
        return total

    with jax.enable_x64(True):
        x, step = jnp.float64(number), 1e-4
        wanted = (moved(x + step) - moved(x - step)) / (2 * step)
        found = jax.grad(moved)(x), jax.jacfwd(moved)(x)
    np.testing.assert_allclose(found, (wanted, wanted), rtol=2e-3)


@pytest.mark.slow
def test_spam_has_derivatives_where_a_coordinate_is_0():
    def total(w):
        clipper = optaxclip.spam(100.0, warmup=0)
        state, total = clipper.init(w), 0.0
        for _ in range(2):
            updates, state = clipper.update(w * jnp.array([1.0, 0.0]), state)
            total += jnp.sum(updates)
        return total

    w = jnp.array([1.0, 2.0])
    found = jax.grad(total)(w)
    np.testing.assert_allclose(found, jax.jacfwd(total)(w), rtol=1e-5)
    assert found[1] == 0
