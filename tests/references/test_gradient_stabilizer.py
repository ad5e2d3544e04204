"""GradientStabilizer is `adagn(0.6, 0.999, eps=1e-12)`.

    mean <- 0.6 mean + 0.4 n                both divided by 1 - decay^t, where t counts
    square <- 0.999 square + 0.001 n^2      the norms that entered
    g <- g (mean / (sqrt(square) + eps)) / max(n, eps)

Huang et al., ICML 2026 (arXiv 2502.17055, from its third version on). The equations are
those of its public code too, TianjinYellow/GradientStabilizer at d77016f, in which a
norm that is 0, NaN or inf enters nothing and does not count.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optaxclip import adagn

pytestmark = pytest.mark.slow

GAMMA1, GAMMA2, EPS = 0.6, 0.999, 1e-12
SHAPES = {"matrix": (5, 3), "vector": (7,)}


def gradients(steps=60):
    """Float32 gradients whose size wanders, with spikes, steps of 0, and NaN."""
    random = np.random.default_rng(0)
    found = []
    for step in range(steps):
        size = 10.0 ** random.uniform(-2, 1) * (1e4 if step in (17, 40) else 1.0)
        size *= 0.0 if step in (5, 30) else 1.0
        normal = {name: random.standard_normal(SHAPES[name]) for name in SHAPES}
        tree = {name: np.float32(size * x) for name, x in normal.items()}
        if step == 22:
            tree["matrix"][1, 1] = np.nan
        found.append(tree)
    return found


def stabilized(grads):
    """Float64 NumPy, one tensor: what each gradient becomes."""
    mean, square, count, found = 0.0, 0.0, 0, []
    for grad in grads:
        grad = grad.astype(np.float64)
        norm = np.sqrt(np.sum(grad**2))
        if norm > 0 and np.isfinite(norm):
            count += 1
            mean = GAMMA1 * mean + (1 - GAMMA1) * norm
            square = GAMMA2 * square + (1 - GAMMA2) * norm**2
            root = np.sqrt(square / (1 - GAMMA2**count))
            target = mean / (1 - GAMMA1**count) / (root + EPS)
            grad = grad * target / max(norm, EPS)
        found.append(grad)
    return found


def run(stream, **options):
    clipper = adagn(GAMMA1, GAMMA2, eps=EPS, **options)
    state, found = clipper.init(stream[0]), []
    update = jax.jit(clipper.update)
    for grads in stream:
        updates, state = update(jax.tree.map(jnp.asarray, grads), state)
        found.append(updates)
    return found


def test_every_step_is_that_of_the_equations():
    stream = gradients()
    found = run(stream)
    for name in SHAPES:
        wanted = stabilized([grads[name] for grads in stream])
        for step, (updates, expected) in enumerate(zip(found, wanted)):
            if np.isnan(expected).any():
                continue
            np.testing.assert_allclose(
                updates[name], expected, rtol=2e-6, err_msg=f"{name}, step {step}"
            )


def test_a_broken_step_is_nan_here_and_passes_there():
    stream = gradients()
    assert np.isnan(run(stream)[22]["matrix"]).all()
    there = stabilized([grads["matrix"] for grads in stream])[22]
    assert np.isnan(there).sum() == 1
    zero = run(stream, nonfinite="zero")
    np.testing.assert_array_equal(zero[22]["matrix"], np.zeros(SHAPES["matrix"]))
