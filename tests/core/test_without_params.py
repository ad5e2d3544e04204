"""Norms of gradients alone do not look at params."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from tests.helpers import random_tree
from tests.methods import METHODS, WEIGHTS

pytestmark = pytest.mark.slow

PARAMS, GRADS = random_tree("float32", 0), random_tree("float32", 1)
SUPERSET = {**PARAMS, "head": jnp.ones(2)}
WRAPPED = {"clip_cotangent", "clip_grads", "clipped_grad"}
WITHOUT = [
    name
    for name, method in METHODS.items()
    if method.needs != WEIGHTS and not method.wraps and name not in WRAPPED
]


def frozen():
    return pytest.importorskip("flax.core").freeze(PARAMS)


@pytest.mark.parametrize("name", WITHOUT)
def test_params_of_another_tree_change_nothing(name):
    clipper = METHODS[name].make()
    state = clipper.init(GRADS)
    wanted = clipper.update(GRADS, state)
    for params in (frozen(), SUPERSET, {"else": jnp.ones(2)}, [1.0], "none"):
        found = clipper.update(GRADS, state, params)
        jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.parametrize(
    "name", [name for name in METHODS if METHODS[name].needs == WEIGHTS]
)
def test_weights_are_found_by_their_paths(name):
    clipper = METHODS[name].make()
    state = clipper.init(GRADS)
    wanted = clipper.update(GRADS, state, PARAMS)
    for params in (frozen(), SUPERSET):
        found = clipper.update(GRADS, state, params)
        jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.parametrize("name", [n for n in METHODS if n not in WRAPPED])
@pytest.mark.parametrize("state", [None, optax.EmptyState()], ids=["none", "empty"])
def test_a_state_is_needed_only_by_what_learns(name, state):
    method = METHODS[name]
    clipper = method.make()
    if method.learns or method.wraps == "optimizer":
        with pytest.raises(TypeError, match=r"[Bb]egin with (a new one: )?state = "):
            clipper.update(GRADS, state, PARAMS)
        return
    found = clipper.update(GRADS, state, PARAMS)
    wanted = clipper.update(GRADS, clipper.init(GRADS), PARAMS)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_a_state_restored_from_optax_goes_on():
    theirs = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
    ours = optax.chain(optaxclip.clip_by_global_norm(1.0), optax.adam(0.1))
    state = theirs.update(GRADS, theirs.init(PARAMS))[1]
    wanted, _ = theirs.update(GRADS, state)
    found, state = ours.update(GRADS, state)
    # The clipped gradients differ by 4 eps, which Adam passes on.
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted)):
        np.testing.assert_allclose(one, other, rtol=8 * np.finfo(np.float32).eps)
    assert optaxclip.metrics(state)["clip/clipped_count"] == 1
    ours.update(GRADS, state)
