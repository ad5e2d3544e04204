"""Keys with a slash in them, some of whose leaves are missing in a step."""

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
