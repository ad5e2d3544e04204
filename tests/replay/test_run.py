"""A replay is what the clipper does in a run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip
from tests import oracle_rules as oracle
from tests.helpers import apply

NORMS = np.asarray(oracle.histories()["broken"][:150], np.float32)


SHRINKS = (
    None,
    optaxclip.shrinks.smooth(2.0),
    optaxclip.shrinks.drop,
    optaxclip.shrinks.normalize,
)
RULES = {"z-score": optaxclip.rules.z_score(1.0), "fixed": 0.9, "none": None}


@pytest.mark.parametrize("name", RULES)
def test_a_replay_is_what_the_clipper_does_in_a_run(name):
    rule = RULES[name]

    def both(norms, shrink):
        clipper = optaxclip.clip_by_global_norm(rule, shrink=shrink)
        _, states = jax.lax.scan(
            lambda state, grad: (clipper.update(grad, state)[1],) * 2,
            clipper.init(norms[:1]),
            norms[:, None],
        )
        return states, optaxclip.replay.run(rule, norms, shrink=shrink)

    found = jax.jit(lambda norms: [both(norms, shrink) for shrink in SHRINKS])(NORMS)
    finite = np.isfinite(NORMS)
    for states, result in found:
        # Two programs, which XLA may round differently: within four spacings of
        # float32, where one rule takes about as many roundings in a step.
        np.testing.assert_allclose(
            result.limits, states.limit, rtol=4 * np.finfo(np.float32).eps
        )
        np.testing.assert_allclose(
            np.asarray(result.factors)[finite], states.factor[finite], rtol=1e-6
        )
        np.testing.assert_array_equal(np.cumsum(result.clipped), states.clipped)
        assert np.isnan(np.asarray(result.factors)[~finite]).all()


def test_a_norm_that_is_lengthened_counts_as_clipped():
    found = optaxclip.replay.run(2.0, [1.0, 2.0], shrink=optaxclip.shrinks.normalize)
    assert found.factors.tolist() == [2.0, 1.0]
    assert found.clipped.tolist() == [True, False]


def test_no_factor_of_a_replay_is_0_or_inf_beside_a_limit():
    cases = [(3e38, 1.0, None), (1.2e-38, 10.0, optaxclip.shrinks.normalize)]
    for norm, limit, shrink in cases:
        (factor,) = optaxclip.replay.run(limit, [norm], shrink=shrink).factors
        clipper = optaxclip.clip_by_global_norm(limit, shrink=shrink)
        _, state = apply(clipper, jnp.array([norm]))
        assert 0 < factor < np.inf and factor == state.factor


def test_wide_integers_are_norms():
    # Without jax_enable_x64 an int64 of 2^40 would become the int32 0.
    found = optaxclip.replay.run(2.0, np.array([2**40, 1]))
    np.testing.assert_array_equal(found.norms, np.float32([2.0**40, 1.0]))
    np.testing.assert_array_equal(found.factors, np.float32([2.0**-39, 1.0]))


def test_many_norms_have_memories_of_their_own():
    norms = np.stack([NORMS, NORMS[::-1]], axis=1)
    rule = optaxclip.rules.z_score(1.0)
    together = optaxclip.replay.run(rule, norms)
    for column, own in enumerate(norms.T):
        alone = optaxclip.replay.run(rule, own)
        np.testing.assert_allclose(together.limits[:, column], alone.limits, 1e-6)
        np.testing.assert_array_equal(together.clipped[:, column], alone.clipped)


def test_a_step_with_the_limit_nan_is_not_clipped():
    def limit(step):
        return jnp.where(step == 1, jnp.nan, 2.0)

    norms = [1.0, 4.0, 4.0]
    found = optaxclip.replay.run(limit, norms)
    assert found.clipped.tolist() == [False, False, True]
    np.testing.assert_array_equal(found.factors, [1.0, np.nan, 0.5])
    # As the clipper counts.
    clipper = optaxclip.clip_by_global_norm(limit)
    state = clipper.init(jnp.float32(0.0))
    for norm in norms:
        _, state = clipper.update(jnp.float32(norm), state)
    assert state.clipped == 1


def test_replay_keeps_64_bits():
    with jax.enable_x64(True):
        for dtype, kept in ((np.float64, jnp.float64), (np.float16, jnp.float32)):
            found = optaxclip.replay.run(1.0, np.array([1.0, 2.0], dtype))
            assert found.limits.dtype == kept
