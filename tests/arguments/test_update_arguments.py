"""Arguments of `update` that a chain would hand on without a word."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from tests.methods import METHODS

GRADS = jnp.array([3.0, 4.0])
BY_NORM = [name for name in METHODS if name.startswith("clip_by_")]
BY_NORM.remove("clip_by_value")  # has no limit for one step


def updated(optimizer, **given):
    return optimizer.update(GRADS, optimizer.init(GRADS), GRADS, **given)


@pytest.mark.parametrize("method", BY_NORM)
def test_every_clipper_by_norm_knows_the_wrong_names(method):
    with pytest.raises(TypeError, match=f"{method}: update has no argument 'max_norm'"):
        updated(METHODS[method].make(), max_norm=0.3)


@pytest.mark.parametrize("name", METHODS)
def test_arguments_of_other_transformations_pass(name):
    # Such as those of a line search, and of a transformation of one's own.
    given = {"value": 0.5, "grad": GRADS, "value_fn": jnp.sum, "step_size": 0.1}
    tree = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
    # `clip` takes none, as optax's.
    optimizer = optax.with_extra_args_support(METHODS[name].make())
    plain = optimizer.update(tree, optimizer.init(tree), tree)
    updates, _ = optimizer.update(tree, optimizer.init(tree), tree, **given)
    assert jax.tree.structure(updates) == jax.tree.structure(plain[0])


@pytest.mark.parametrize("name", ["larc", "clippy"])
def test_a_link_that_computes_norm_and_limit_takes_none_of_the_chain(name):
    own = METHODS[name].make()
    chain = optax.chain(optaxclip.clip_by_global_norm(9.0), own)
    updates, state = updated(chain, limit=0.5, grad_norm=50.0)
    first = optaxclip.clip_by_global_norm(9.0)
    clipped, _ = updated(first, limit=0.5, grad_norm=50.0)
    wanted, wanted_state = own.update(clipped, own.init(GRADS), GRADS)
    np.testing.assert_array_equal(updates, wanted)
    assert state[0].limit == 0.5 and state[1].limit == wanted_state.limit
    assert state[1].norm == wanted_state.norm


def test_a_line_search_behind_a_clipper_gets_its_arguments():
    optimizer = optax.chain(
        optaxclip.clip_by_global_norm(1.0),
        optax.scale_by_backtracking_linesearch(max_backtracking_steps=3),
    )

    def loss(x):
        return jnp.sum(x * x)

    updates, _ = updated(optimizer, value=loss(GRADS), grad=2 * GRADS, value_fn=loss)
    assert jnp.all(jnp.isfinite(updates))
