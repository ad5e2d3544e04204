"""docs/large_models.md: its functions against float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip import rules
from tests.docs.test_docs import blocks_of, names

RATE, B1, B2, EPS, DECAY = 1e-2, 0.9, 0.95, 1e-8, 0.1
pytestmark = pytest.mark.usefixtures("as_programs_run")


def defined(name):
    """A function of the page, from the block that defines it."""
    namespace = names()
    sources = [block.source for block in blocks_of("large_models.md")]
    own = next(source for source in sources if f"def {name}(" in source)
    head = f"{own}\n\n\n".partition(f"def {name}(")[2].partition("\n\n\n")[0]
    exec(f"from functools import partial\ndef {name}({head}", namespace)
    return namespace[name]


def gradients(steps=30):
    random = np.random.default_rng(0)
    size = np.where(np.arange(steps) == 20, 30.0, 1.0)[:, None]
    return np.float32(size * random.standard_normal((steps, 7)))


def stable_adamw(weights, grads):
    """Algorithm 2 of Wortsman et al., 2023 (arXiv 2304.13013), in float64."""
    weights = weights.astype(np.float64)
    mean, square = np.zeros_like(weights), np.zeros_like(weights)
    for step, grad in enumerate(grads.astype(np.float64), start=1):
        beta1 = B1 * (1 - B1 ** (step - 1)) / (1 - B1**step)
        beta2 = B2 * (1 - B2 ** (step - 1)) / (1 - B2**step)
        mean = beta1 * mean + (1 - beta1) * grad
        square = beta2 * square + (1 - beta2) * grad**2
        rms = np.sqrt(np.mean(grad**2 / np.maximum(square, EPS**2)))
        rate = RATE / max(1, rms)
        weights = weights - rate * (DECAY * weights + mean / (np.sqrt(square) + EPS))
    return weights


@pytest.mark.slow
def test_stable_adamw_is_that_of_the_paper():
    optimizer = defined("stable_adamw")(RATE, B1, B2, EPS, DECAY)
    params = {"w": jnp.linspace(-1, 1, 7)}
    grads = gradients()
    wanted = stable_adamw(np.asarray(params["w"]), grads)
    state, factors = optimizer.init(params), []
    for grad in grads:
        updates, state = optimizer.update({"w": grad}, state, params)
        params = optax.apply_updates(params, updates)
        factors.append(float(optaxclip.metrics(state)["clip/factor/w"]))
    assert factors[20] < 0.5  # the gradient that is thirty times as long
    np.testing.assert_allclose(params["w"], wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.slow
def test_a_skipped_update_leaves_the_optimizer_as_it_was():
    optimizer = defined("skip_update_spikes")(optax.adam(0.1), rules.constant(1.0))
    state = optimizer.init(jnp.zeros(4))
    # Adam's first update is 0.1 for each element, whatever the gradient.
    updates, state = jax.jit(optimizer.update)(jnp.full(4, 1e6), state)
    assert float(optaxclip.metrics(state)["skip/norm"]) == pytest.approx(0.2, rel=1e-5)
    assert int(state[1][0].count) == 1 and bool(jnp.all(updates != 0))

    strict = defined("skip_update_spikes")(optax.adam(0.1), rules.constant(0.1))
    first = strict.init(jnp.zeros(4))
    updates, state = jax.jit(strict.update)(jnp.full(4, 1.0), first)
    assert not jnp.any(updates)
    jax.tree.map(np.testing.assert_array_equal, state[1], first[1])
