"""`optax.tree_map_params` makes of every state a tree of the same structure."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optaxclip
from optaxclip import rules
from tests.helpers import random_tree
from tests.methods import METHODS

PARAMS = random_tree("float32")
SPECS = jax.tree.map(lambda x: P("data"), PARAMS)
# Each has several blocks, with memories of several forms.
SEVERAL = {
    "rules": {"kernel": 1.0, "bias": rules.z_score(), "block": rules.growth()},
    "one rule": rules.ema(0.9),
}
CLIPPERS = {
    **{name: method.make() for name, method in METHODS.items()},
    "several rules": optaxclip.clip_by_tensor_norm(SEVERAL["rules"]),
    "stacked": optaxclip.clip_by_tensor_norm(
        SEVERAL["one rule"], stacked={"kernel": 1, "bias": 0, "block": 0}
    ),
    "units that learn": optaxclip.clip_by_unitwise_norm(SEVERAL["one rule"]),
    "own norm": optaxclip.clip_by(optaxclip.unitwise_norm, 1.0),
}


def around(clipper):
    """Optimizers as people build them around a clipper."""
    optimizer = optax.chain(clipper, optax.adam(1e-3))
    everything = jax.tree.map(lambda x: True, PARAMS)
    return (
        optimizer,
        optax.masked(optimizer, everything),
        optax.MultiSteps(optimizer, 2),
        optax.multi_transform({"all": optimizer}, lambda tree: "all"),
    )


@pytest.mark.parametrize("name", CLIPPERS)
def test_specs_have_the_structure_of_the_state(name):
    for optimizer in around(CLIPPERS[name]):
        state = optimizer.init(PARAMS)
        specs = optax.tree_map_params(
            optimizer,
            lambda _, spec: spec,
            state,
            SPECS,
            transform_non_params=lambda _: P(),
        )
        assert jax.tree.structure(specs) == jax.tree.structure(state)
        found = jax.tree.leaves(jax.tree.map(lambda _, spec: spec, state, specs))
        assert set(found) == {P(), P("data")}


@pytest.mark.parametrize("name", ["clip_by_tensor_norm", "clip_by_group_norm", "adagc"])
def test_norms_and_counters_take_no_specs_of_weights(name):
    clipper = CLIPPERS[name]
    specs = optax.tree_map_params(
        clipper,
        lambda _, spec: spec,
        clipper.init(PARAMS),
        SPECS,
        transform_non_params=lambda _: P(),
    )
    assert set(jax.tree.leaves(specs)) == {P()}


@pytest.mark.parametrize("name", CLIPPERS)
def test_a_state_that_is_mapped_by_nothing_is_itself(name):
    optimizer = optax.chain(CLIPPERS[name], optax.adam(1e-3))
    state = optimizer.init(PARAMS)
    found = optax.tree_map_params(optimizer, lambda x: x, state)
    assert jax.tree.structure(found) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, found, state)
