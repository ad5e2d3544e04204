"""Rules without a memory, where an update has no state."""

import jax
import jax.numpy as jnp
import numpy as np

import optaxclip
from optaxclip import rules

GRADS = {"w": jnp.array([3.0, 4.0])}


class Half(rules.Rule):
    def update(self, norm, memory, step):
        return norm / 2, memory


def test_a_rule_of_the_users_without_a_memory_needs_none():
    clipper = optaxclip.clip_by_global_norm(rules.minimum(Half(), 9.0))
    for update in (clipper.update, jax.jit(clipper.update)):
        updates, _ = update(GRADS, None)
        np.testing.assert_allclose(updates["w"], [1.5, 2.0], rtol=1e-6)


def test_a_rule_of_weights_needs_no_state():
    clipper = optaxclip.clip_by_global_norm(rules.share_of_params(0.5))
    updates, _ = clipper.update(GRADS, None, GRADS)
    np.testing.assert_allclose(updates["w"], [1.5, 2.0], rtol=1e-6)
