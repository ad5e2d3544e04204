"""States: what fits them and what does not. A missing leaf does not rename the others,
another rule has another memory, and a rule that reads the step needs a state.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip import rules

WHOLE = {"a/b": jnp.array([3.0, 4.0]), "a": {"b": jnp.array([6.0, 8.0])}}


@pytest.mark.slow
@pytest.mark.parametrize("hole", [None, optax.MaskedNode()], ids=["None", "masked"])
def test_a_missing_leaf_does_not_rename_the_others(hole):
    # "a/b" is ambiguous in the state, and not in updates that have only one of them.
    clipper = optaxclip.clip_by_tensor_norm(rules.growth(2.0))
    _, state = clipper.update(WHOLE, clipper.init(WHOLE))
    for part in (
        {"a/b": 10 * WHOLE["a/b"], "a": {"b": hole}},
        {"a/b": hole, "a": {"b": 10 * WHOLE["a"]["b"]}},
    ):
        updates, after = clipper.update(part, state)
        known = after.by_name()
        limits = [float(known[x].limit) for x in ("['a/b']", "['a']['b']")]
        if part["a/b"] is hole:
            np.testing.assert_allclose(updates["a"]["b"], [12.0, 16.0], rtol=1e-6)
            assert limits == [np.inf, 20.0]
        else:
            np.testing.assert_allclose(updates["a/b"], [6.0, 8.0], rtol=1e-6)
            assert limits == [10.0, np.inf]


TWO_LEAVES = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([6.0, 8.0])}
OTHER_RULES = {
    "schedules": {"a": lambda step: 1.0, "b": 2.0},
    "shares": {"a": rules.share_of_params(0.1), "b": rules.share_of_params(0.2)},
    "joined": {"a": rules.minimum(1.0, 2.0), "b": 3.0},
    "growths": {"a": rules.growth(1.1), "b": rules.growth(1.2)},
}


@pytest.mark.parametrize("name", OTHER_RULES)
def test_one_part_for_rules_of_their_own_raises(name):
    # The limits of rules that are no numbers were taken for NaN.
    state = optaxclip.clip_by_tensor_norm(1.0).init(TWO_LEAVES)
    clipper = optaxclip.clip_by_tensor_norm(OTHER_RULES[name])
    with pytest.raises(
        ValueError,
        match="clip_by_tensor_norm: state has one part for norms whose limits",
    ):
        clipper.update(TWO_LEAVES, state, TWO_LEAVES)


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
