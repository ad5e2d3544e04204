"""Rules of the user's own that read the step, where an update has no state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip import rules

GRADS = {"w": jnp.array([3.0, 4.0])}


class Rising(rules.Rule):
    def update(self, norm, memory, step):
        return 1.0 + step, memory


class Half(rules.Rule):
    def update(self, norm, memory, step):
        return norm / 2, memory


@pytest.mark.parametrize("state", [None, optax.EmptyState()])
@pytest.mark.parametrize("limit", [Rising(), rules.minimum(Rising(), 9.0)])
def test_a_rule_that_reads_the_step_needs_a_state(limit, state):
    clipper = optaxclip.clip_by_global_norm(limit)
    for update in (clipper.update, jax.jit(clipper.update)):
        with pytest.raises(TypeError, match="its limit depends on the step, so update"):
            update(GRADS, state)


def test_a_rule_that_does_not_read_the_step_needs_none():
    clipper = optaxclip.clip_by_global_norm(rules.minimum(Half(), 9.0))
    for update in (clipper.update, jax.jit(clipper.update)):
        updates, _ = update(GRADS, None)
        np.testing.assert_allclose(updates["w"], [1.5, 2.0], rtol=1e-6)


def test_a_rule_of_weights_needs_no_state():
    clipper = optaxclip.clip_by_global_norm(rules.share_of_params(0.5))
    updates, _ = clipper.update(GRADS, None, GRADS)
    np.testing.assert_allclose(updates["w"], [1.5, 2.0], rtol=1e-6)
