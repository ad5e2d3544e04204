"""Batches by Poisson sampling: who joins, and at which place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from optaxclip.per_example import draw

EXAMPLES, SHARE, PLACES, TIMES = 20, 0.3, 18, 20_000


@pytest.fixture(scope="module")
def drawn():
    """Many batches: for each example whether it joined, and at which place."""

    def one(key):
        chosen, mask = draw(key, SHARE, examples=EXAMPLES, places=PLACES)
        places = jnp.full(EXAMPLES, -1).at[chosen].set(jnp.arange(PLACES))
        joined = jnp.zeros(EXAMPLES, bool).at[chosen].set(mask)
        return joined, jnp.where(joined, places, -1)

    keys = jax.random.split(jax.random.key(0), TIMES)
    return [np.asarray(x) for x in jax.jit(jax.vmap(one))(keys)]


def test_each_example_joins_with_the_share(drawn):
    counts = drawn[0].sum(axis=0)
    law = stats.binom(TIMES, SHARE)
    assert np.all((law.ppf(1e-6) < counts) & (counts < law.isf(1e-6)))


def test_examples_join_whoever_else_does(drawn):
    correlations = np.corrcoef(drawn[0].T) - np.eye(EXAMPLES)
    assert np.max(np.abs(correlations)) < 5 / np.sqrt(TIMES)
    sizes = np.bincount(drawn[0].sum(axis=1), minlength=EXAMPLES + 1)
    expected = stats.binom(EXAMPLES, SHARE).pmf(np.arange(EXAMPLES + 1)) * TIMES
    many = expected > 20
    wanted = expected[many] / expected[many].sum() * sizes[many].sum()
    assert stats.chisquare(sizes[many], wanted).pvalue > 1e-4


def test_each_example_gets_every_place_alike(drawn):
    joined, places = drawn
    for example in range(EXAMPLES):
        own = places[joined[:, example], example]
        counts = np.bincount(own, minlength=PLACES)
        assert stats.chisquare(counts).pvalue > 1e-5


def test_a_place_tells_nothing_of_who_else_is_there(drawn):
    """So that a batch is the batch with one more, of which the mask leaves one out."""
    joined, places = drawn
    has_first = joined[:, 0] & joined[:, 5]
    has_not = ~joined[:, 0] & joined[:, 5]
    table = [np.bincount(places[x, 5], minlength=PLACES) for x in (has_first, has_not)]
    assert stats.chi2_contingency(table).pvalue > 1e-4


def test_no_example_comes_twice(drawn):
    for joined, places in zip(*drawn):
        own = places[joined]
        assert len(np.unique(own)) == own.size


def test_more_than_there_are_places_are_left_out():
    drawn = [
        draw(jax.random.key(seed), 0.35, examples=20, places=7) for seed in range(9)
    ]
    # 7 are expected, so that more are drawn in some of these batches.
    assert any(mask.all() for _, mask in drawn)
    for chosen, _ in drawn:
        assert len(np.unique(chosen)) == 7


def test_with_a_share_of_zero_nobody_joins():
    chosen, mask = draw(jax.random.key(0), 0.0, examples=20, places=20)
    assert not mask.any() and len(np.unique(chosen)) == 20


def test_a_share_is_never_exceeded():
    # Of 23 bits, as in `jax.random.bernoulli`, 1e-8 would be 0 or 1.2e-7.
    _, mask = jax.jit(lambda key: draw(key, 1e-6, examples=10**7, places=64))(
        jax.random.key(1)
    )
    assert stats.poisson(10).ppf(1e-6) <= mask.sum() <= stats.poisson(10).isf(1e-6)


@pytest.mark.parametrize("number", [np.float16, np.float32, jnp.float32, jnp.int32])
def test_numbers_of_every_type_draw_the_same(number):
    share = number(1) / number(1)
    found = draw(jax.random.key(0), share, examples=number(20), places=number(20))
    wanted = draw(jax.random.key(0), 1.0, examples=20, places=20)
    np.testing.assert_array_equal(found.chosen, wanted.chosen)
    np.testing.assert_array_equal(found.mask, wanted.mask)


WRONG = {
    "draw: share must be at most 1, got 1.5": (1.5, 20, 7),
    "draw: share must be at least 0, got -0.1": (-0.1, 20, 7),
    "draw: examples must be a whole number": (0.1, 2.5, 2),
    "draw: places for 2 expected examples must be at most 20, got 21": (0.1, 20, 21),
    "draw: places for 10 expected examples must be at least 10, got 9": (0.5, 20, 9),
    "draw: places must be at least 1, got 0": (0.1, 20, 0),
    "draw: places must be a whole number": (0.1, 20, 2.5),
}


@pytest.mark.parametrize("text", WRONG)
def test_an_error_names_the_argument(text):
    share, examples, places = WRONG[text]
    with pytest.raises((TypeError, ValueError), match=f"^{text}"):
        draw(jax.random.key(0), share, examples=examples, places=places)
