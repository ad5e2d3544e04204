"""Histories of wide integers, and limits that are NaN."""

import jax.numpy as jnp
import numpy as np
import pytest

from optaxclip import clip_by_global_norm, replay


def test_wide_integers_are_norms():
    # Without jax_enable_x64 an int64 of 2^40 would become the int32 0.
    found = replay.run(2.0, np.array([2**40, 1]))
    np.testing.assert_array_equal(found.norms, np.float32([2.0**40, 1.0]))
    np.testing.assert_array_equal(found.factors, np.float32([2.0**-39, 1.0]))


@pytest.mark.parametrize("norms", ["run.csv", {"norm": [1.0]}, [[1.0], [1.0, 2.0]]])
def test_what_has_no_numbers_is_no_history(norms):
    for call in (lambda: replay.run(2.0, norms), lambda: replay.suggest(norms)):
        with pytest.raises(TypeError, match="norms must be an array of numbers, got"):
            call()


def test_a_shrink_returns_a_new_norm():
    with pytest.raises(TypeError, match=r"replay.run: shrink must return .* got None"):
        replay.run(2.0, [1.0, 4.0], shrink=lambda norm, limit: None)


def test_a_step_with_the_limit_nan_is_not_clipped():
    def limit(step):
        return jnp.where(step == 1, jnp.nan, 2.0)

    norms = [1.0, 4.0, 4.0]
    found = replay.run(limit, norms)
    assert found.clipped.tolist() == [False, False, True]
    np.testing.assert_array_equal(found.factors, [1.0, np.nan, 0.5])
    # As the clipper counts.
    clipper = clip_by_global_norm(limit)
    state = clipper.init(jnp.float32(0.0))
    for norm in norms:
        _, state = clipper.update(jnp.float32(norm), state)
    assert state.clipped == 1
