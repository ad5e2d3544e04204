"""States come back as they were from every way to store or copy one."""

import copy
import pickle

import jax
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip import rules
from tests.helpers import random_tree

pytestmark = pytest.mark.slow

PARAMS, GRADS = random_tree("float32", 0), random_tree("float32", 1)
LIMITS = {"kernel": 1.0, "bias": rules.z_score(), "block": rules.growth()}
CLIPPERS = {
    "global": optaxclip.clip_by_global_norm(1.0),
    "tensors": optaxclip.clip_by_tensor_norm(1.0),
    "units": optaxclip.adaptive_grad_clip(),
    "learns": optaxclip.zclip(),
    "several rules": optaxclip.clip_by_tensor_norm(LIMITS),
}


def by_flax(state, empty, folder):
    serialization = pytest.importorskip("flax.serialization")
    return serialization.from_bytes(empty, serialization.to_bytes(state))


def by_orbax(state, empty, folder):
    checkpoint = pytest.importorskip("orbax.checkpoint")
    with checkpoint.StandardCheckpointer() as store:
        store.save(folder / "state", state)
        store.wait_until_finished()
        return store.restore(folder / "state", empty)


def by_leaves(state, empty, folder):
    return jax.tree.unflatten(jax.tree.structure(empty), jax.tree.leaves(state))


WAYS = {
    "pickle": lambda state, empty, folder: pickle.loads(pickle.dumps(state)),
    "deepcopy": lambda state, empty, folder: copy.deepcopy(state),
    "device_get": lambda state, empty, folder: jax.device_get(state),
    "leaves": by_leaves,
    "flax": by_flax,
    "orbax": by_orbax,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CLIPPERS)
def test_a_stored_state_comes_back(name, way, tmp_path):
    optimizer = optax.chain(CLIPPERS[name], optax.adam(0.1))
    empty = optimizer.init(PARAMS)
    _, state = optimizer.update(GRADS, empty, PARAMS)
    found = WAYS[way](state, empty, tmp_path)
    assert jax.tree.structure(found) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, found, state)
    assert optaxclip.metrics(found) == optaxclip.metrics(state)
    optimizer.update(GRADS, found, PARAMS)
