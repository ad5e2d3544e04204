"""A program that takes and gives a state can be stored, and read by another process."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.methods import METHODS

pytestmark = pytest.mark.slow

pytest.importorskip("flatbuffers")

# optax leaves it to users to name its states.
for state in (optax.EmptyState, optax.ScaleByAdamState):
    jax.export.register_namedtuple_serialization(
        state, serialized_name=f"optax.{state.__name__}"
    )
TREE = {"w": jnp.full((2, 3), 2.0), "b": jnp.full(3, 2.0)}


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
