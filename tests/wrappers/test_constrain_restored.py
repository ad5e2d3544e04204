"""A constrained chain whose restored state has EmptyState where a clipper is now."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip

pytestmark = pytest.mark.slow


def test_constrain_goes_on_from_a_state_of_optax():
    links = optaxclip.clip_by_tensor_norm(2.0), optaxclip.clip_by_unitwise_norm(1.0)
    constrained = optaxclip.constrain(optax.chain(*links))
    weights = jnp.diag(jnp.array([3.0, 4.0]))
    new = constrained.init(weights)
    given = 0 * weights, (optax.EmptyState(), new[1]), weights
    updates, state = constrained.update(*given)
    # Of norm 2, and then of units: [1.2, 1.6] becomes [1, 1].
    np.testing.assert_allclose(weights + updates, np.eye(2), rtol=2e-6)
    assert isinstance(state[0], optaxclip.ClipState)
