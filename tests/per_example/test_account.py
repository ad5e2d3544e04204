"""The account that docs/private_training.md makes is that of what a result carries, by
dp-accounting.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optaxclip import add_noise, clipped_grad, sensitivity
from optaxclip.per_example import draw, epsilon, noise_multiplier

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


def delta_of_a_gaussian(noise, epsilon):
    """Balle, Wang, Improving the Gaussian mechanism for differential privacy, 2018
    (arXiv 1805.06530), theorem 8, for a sensitivity of 1.
    """
    cdf = pytest.importorskip("scipy.stats").norm.cdf
    upper = cdf(1 / (2 * noise) - epsilon * noise)
    return upper - np.exp(epsilon) * cdf(-1 / (2 * noise) - epsilon * noise)


@pytest.mark.parametrize("steps", [1, 9])
def test_epsilon_of_whole_batches_is_that_of_one_gaussian(steps):
    """So many steps with all examples are one with less noise, by the root."""
    pytest.importorskip("dp_accounting")
    found = epsilon(2.0, 1.0, steps=steps, delta=1e-5)
    noise = 2.0 / np.sqrt(steps)
    # From above, within the steps of 1e-4 that privacy losses are rounded to
    assert delta_of_a_gaussian(noise, found) <= 1e-5
    assert delta_of_a_gaussian(noise, found - 1e-4 * steps) > 1e-5


def test_epsilon_is_that_of_dp_accounting():
    """By its events, as in `epsilon_of`."""
    pytest.importorskip("dp_accounting")
    assert epsilon(NOISE, 0.1, steps=300, delta=1e-4) == epsilon_of(NOISE)
    assert epsilon(NOISE, 0.02, steps=50, delta=1e-6) == epsilon_of(
        NOISE, delta=1e-6, share=0.02, steps=50
    )


@pytest.mark.parametrize("number", [np.float32, np.int32, jnp.float32])
def test_epsilon_takes_numbers_of_every_type(number):
    pytest.importorskip("dp_accounting")
    found = epsilon(number(2), number(1), steps=number(9), delta=1e-5)
    assert found == epsilon(2.0, 1.0, steps=9, delta=1e-5)


def test_noise_multiplier_is_the_inverse_of_epsilon():
    pytest.importorskip("dp_accounting")
    training = {"share": 0.1, "steps": 30, "delta": 1e-5}
    noise = noise_multiplier(0.5, **training)
    assert epsilon(noise, **training) <= 0.5 < epsilon(0.999 * noise, **training)


def test_an_infinite_epsilon_and_a_delta_of_1_need_no_noise():
    assert noise_multiplier(np.inf, 0.1, steps=30, delta=1e-5) == 0.0
    assert noise_multiplier(1.0, 0.1, steps=30, delta=1.0) == 0.0


@pytest.mark.parametrize("noise", [np.inf, jnp.float32(np.inf)])
def test_infinite_noise_is_worth_an_epsilon_of_0(noise):
    assert epsilon(noise, 0.1, steps=30, delta=1e-5) == 0.0


@pytest.mark.parametrize("name", ["epsilon", "share", "delta"])
def test_a_number_of_0_is_refused(name):
    numbers = {"epsilon": 1.0, "share": 0.1, "delta": 1e-5} | {name: 0.0}
    with pytest.raises(ValueError, match=rf"^noise_multiplier: {name} must be above 0"):
        noise_multiplier(**numbers, steps=10)


def test_a_negative_epsilon_is_refused():
    with pytest.raises(
        ValueError, match=r"^noise_multiplier: epsilon must be at least"
    ):
        noise_multiplier(-1.0, 0.1, steps=10, delta=1e-5)


@pytest.mark.parametrize(
    ("name", "value"), [("delta", 1e5), ("delta", np.nan), ("share", 1.5)]
)
@pytest.mark.parametrize("account", [epsilon, noise_multiplier])
def test_a_probability_outside_0_and_1_is_refused(account, name, value):
    """dp-accounting would return an epsilon of 0 for a delta of 1e5."""
    training = {"share": 0.1, "steps": 1, "delta": 1e-5} | {name: value}
    with pytest.raises(ValueError, match=f"^{account.__name__}: {name} must"):
        account(3.0, **training)


def test_a_noise_multiplier_that_is_nan_is_refused():
    with pytest.raises(ValueError, match=r"^epsilon: noise_multiplier must not be NaN"):
        epsilon(np.nan, 0.1, steps=1, delta=1e-5)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ImportError, match="run pip install dp-accounting"):
        epsilon(1.0, 0.01, steps=1000, delta=1e-5)
