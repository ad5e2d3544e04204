"""Groups that have no leaves in one step, where labels come from a function."""

import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip
from optaxclip import rules

WHOLE = {"w": 3 * jnp.ones((2, 2)), "b": jnp.array([3.0, 4.0])}  # norms 6 and 5


def by_rank(path, leaf):
    return "matrix" if leaf.ndim == 2 else "vector"


@pytest.mark.parametrize("limit", [0.5, rules.growth(2.0)], ids=["number", "rule"])
def test_a_group_may_be_missing_in_a_step(limit):
    limits = {"matrix": 3.0, "vector": limit}
    clipper = optaxclip.clip_by_group_norm(limits, by_rank)
    state = clipper.init(WHOLE)
    updates, after = clipper.update({"w": WHOLE["w"], "b": None}, state)
    np.testing.assert_allclose(updates["w"], np.full((2, 2), 1.5), rtol=1e-6)
    assert updates["b"] is None
    assert float(after.by_name()["vector"].norm) == 0
    updates, _ = clipper.update(WHOLE, after)
    np.testing.assert_allclose(updates["w"], np.full((2, 2), 1.5), rtol=1e-6)


def test_a_limit_for_a_label_that_no_step_had_raises():
    clipper = optaxclip.clip_by_group_norm({"matrix": 3.0, "vectro": 0.5}, by_rank)
    with pytest.raises(ValueError, match="max_norm has a value for 'vectro'"):
        clipper.init({"w": WHOLE["w"]})
    state = optaxclip.clip_by_group_norm(1.0, by_rank).init(WHOLE)
    with pytest.raises(ValueError, match="max_norm has a value for 'vectro'"):
        clipper.update({"w": WHOLE["w"], "b": None}, state)
