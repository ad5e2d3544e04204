"""Wrappers whose restored state has EmptyState where a clipper is now."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip

GRADS = jnp.array([3.0, 4.0, 12.0])
BROKEN = GRADS * jnp.nan


def optimizers():
    clip, adam = optaxclip.clip_by_global_norm(1.0), optax.scale_by_adam()
    return {"before": (clip, adam), "after": (adam, clip)}


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("history", [[GRADS], [BROKEN], [GRADS, BROKEN, GRADS]])
def test_a_state_of_optax_goes_on_as_a_new_one(place, history):
    links = optimizers()[place]
    optimizer = optaxclip.skip_nonfinite(optax.chain(*links))
    new = optimizer.init(GRADS)
    empty = tuple(
        optax.EmptyState() if isinstance(each, optaxclip.ClipState) else each
        for each in new.inner_state
    )
    old = new._replace(inner_state=empty)
    update = jax.jit(optimizer.update)
    for grads in history:
        expected, new = update(grads, new)
        found, old = update(grads, old)
        np.testing.assert_array_equal(found, expected)
    shapes = [jax.tree.map(jnp.shape, state) for state in (old, new)]
    assert shapes[0] == shapes[1]
    # The optimizer's moments, and the clipper's counts and numbers.
    jax.tree.map(np.testing.assert_array_equal, old.inner_state, new.inner_state)


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
