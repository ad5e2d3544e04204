"""The account that docs/private_training.md makes is that of what a result carries, by
dp-accounting.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optaxclip import add_noise, clipped_grad, sensitivity
from optaxclip.per_example import draw

NOISE, LIMIT, SIZE, D = 1.0, 0.7, 16, 1200
X = np.random.default_rng(0).standard_normal((SIZE, D)).astype(np.float32)


def loss(w, x):
    return jnp.sum(jnp.sin(w * x))


grad = jax.jit(clipped_grad(loss, LIMIT, mean=False))


def epsilon_of(noise, delta=1e-4, share=0.1, steps=300):
    dp_accounting = pytest.importorskip("dp_accounting")
    pld = pytest.importorskip("dp_accounting.pld")
    step = dp_accounting.GaussianDpEvent(noise)
    step = dp_accounting.PoissonSampledDpEvent(share, step)
    training = dp_accounting.SelfComposedDpEvent(step, steps)
    return pld.PLDAccountant().compose(training).get_epsilon(delta)


def test_the_account_is_that_of_what_a_result_carries():
    """Both from the outside: the worst change that the audit finds, and the deviation
    of the noise that was added.
    """
    result = grad(jnp.ones(D), X, mask=jnp.ones(SIZE, bool))
    change = sensitivity(grad, jnp.ones(D), X, limit=LIMIT).change
    assert 0.99 * LIMIT < change <= result.sensitivity
    keys = jax.random.split(jax.random.key(1), 500)
    add = jax.jit(jax.vmap(lambda key: add_noise(result, NOISE, key)))
    noise = np.asarray(add(keys), np.float64) - np.asarray(result.grads)
    # Of the grid, of which rounding adds sqrt(d) steps to the change
    sigma = np.std(noise)
    lost = np.sqrt(D) * sigma / 2**26
    off = 5 / np.sqrt(2 * noise.size)
    measured = sigma / (change + lost)
    assert measured > NOISE * (1 - off)
    promised = epsilon_of(NOISE)
    # The page's number.
    assert promised == pytest.approx(10.81, abs=0.01)
    assert epsilon_of(measured / (1 - off)) <= promised
    # Nor is there much more noise than the account needs: by 2^-10, and by rounding.
    assert measured < NOISE * (1 + off + 2.0**-9)


def test_too_many_for_the_places_are_as_rare_as_the_page_says():
    stats = pytest.importorskip("scipy.stats")
    # Small, so that it is seen: 6 of 20 are drawn on average, and 9 have places.
    keys = jax.random.split(jax.random.key(2), 20_000)

    def others_fill_all(key):
        return jnp.all(draw(key, 0.3, examples=19, places=9).mask)

    count = np.sum(jax.jit(jax.vmap(others_fill_all))(keys))
    law = stats.binom(20_000, stats.binom(19, 0.3).sf(9 - 1))
    assert law.ppf(1e-5) <= count <= law.isf(1e-5)
