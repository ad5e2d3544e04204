"""States come back as they were from every way to store, copy or export one."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip import rules
from tests.helpers import random_tree
from tests.methods import METHODS

PARAMS, GRADS = random_tree("float32", 0), random_tree("float32", 1)
LIMITS = {"kernel": 1.0, "bias": lambda step: 2.0 + step, "block": None}
CLIPPERS = {
    "global": optaxclip.clip_by_global_norm(1.0),
    "tensors": optaxclip.clip_by_tensor_norm(1.0),
    "units": optaxclip.adaptive_grad_clip(),
    "learns": optaxclip.zclip(),
    "several limits": optaxclip.clip_by_tensor_norm(LIMITS),
    "windows": optaxclip.clip_by_tensor_norm(rules.windowed_mean(window=4)),
    "units that learn": optaxclip.clip_by_unitwise_norm(rules.z_score()),
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


@pytest.mark.slow
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


pytest.importorskip("flatbuffers")

# optax leaves it to users to name its states.
for state in (optax.EmptyState, optax.ScaleByAdamState):
    jax.export.register_namedtuple_serialization(
        state, serialized_name=f"optax.{state.__name__}"
    )
TREE = {"w": jnp.full((2, 3), 2.0), "b": jnp.full(3, 2.0)}


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_an_exported_update_does_the_same(name):
    clipper = METHODS[name].make()
    start = clipper.init(TREE)
    wanted = clipper.update(TREE, start, TREE)
    program = jax.export.export(jax.jit(clipper.update))(TREE, start, TREE)
    found = jax.export.deserialize(program.serialize()).call(TREE, start, TREE)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted)):
        np.testing.assert_allclose(one, other, 4 * 2.0**-23)


def test_windows_of_an_exported_state_stay_where_optax_maps_it():
    clipper = optaxclip.clip_by_tensor_norm(rules.windowed_mean(window=4))
    state = clipper.update(TREE, clipper.init(TREE))[1]
    program = jax.export.export(jax.jit(lambda x: x))(state).serialize()
    found = jax.export.deserialize(program).call(state)
    mapped = optax.tree_map_params(clipper, lambda x: x, found)
    jax.tree.map(np.testing.assert_array_equal, mapped, state)
    clipper.update(TREE, mapped)


def test_one_sharding_for_all_windows_of_an_exported_state_is_kept():
    clipper = optaxclip.clip_by_tensor_norm(rules.windowed_mean(window=4))
    program = jax.export.export(jax.jit(lambda x: x))(clipper.init(TREE)).serialize()
    state = jax.export.deserialize(program).call(clipper.init(TREE))
    shardings = optax.tree_map_params(
        clipper, lambda x: x, state, transform_non_params=lambda _: "sharding"
    )
    assert shardings.windows == "sharding"


def test_every_state_is_read_back_by_its_name():
    """States alone, all of them in one program."""
    states = {name: method.make().init(TREE) for name, method in METHODS.items()}
    text = jax.export.export(jax.jit(lambda x: x))(states).serialize()
    found = jax.export.deserialize(text).call(states)
    assert jax.tree.structure(found) == jax.tree.structure(states)
    assert found["clip_by_tensor_norm"].by_name().keys() == TREE.keys()
