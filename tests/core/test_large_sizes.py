"""Models of more elements than int32 counts: no size of theirs becomes an int32."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

import optaxclip
from tests.methods import METHODS

BFLOAT16 = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
SIZES = {
    "3 leaves of 2^30": {name: BFLOAT16((2**15, 2**15)) for name in "abc"},
    "a leaf of 2^33": {"a": BFLOAT16((2**16, 2**17))},
}
every_size = pytest.mark.parametrize("tree", SIZES.values(), ids=SIZES)
COUNTING = {
    "clip_by_value that counts": optaxclip.clip_by_value(1.0, count=True),
    "clip_by_global_norm of order inf": optaxclip.clip_by_global_norm(1.0, ord=jnp.inf),
}
CLIPPERS = {name: method.make for name, method in METHODS.items()}
CLIPPERS |= {name: lambda made=made: made for name, made in COUNTING.items()}


@every_size
@pytest.mark.parametrize("name", CLIPPERS)
def test_clippers_take_more_elements_than_int32_counts(name, tree):
    clipper = CLIPPERS[name]()
    state = jax.eval_shape(clipper.init, tree)
    updates, new = jax.eval_shape(clipper.update, tree, state, tree)
    assert updates == tree
    assert jax.tree.structure(new) == jax.tree.structure(state)


def sums_of_flags(jaxpr):
    """The dtypes in which what was True or False is added up."""
    found = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "reduce_sum":
            found.add(str(eqn.outvars[0].aval.dtype))
        for inner in jaxprs_in_params(eqn.params):
            found |= sums_of_flags(inner)
    return found


def test_elements_are_counted_in_integers_that_hold_their_number():
    # float32 counts to 2^24. An array of this size is too large for a test to count.
    for rows, dtype in ((2**16 - 1, "uint32"), (2**16, "int64"), (2**17, "int64")):
        grads = BFLOAT16((rows, 2**16))
        clipper = optaxclip.clip_by_value(1.0, count=True)
        state = jax.eval_shape(clipper.init, grads)
        program = jax.make_jaxpr(clipper.update)(grads, state)
        assert sums_of_flags(program.jaxpr) == {dtype}


@pytest.mark.parametrize("ord", ["rms", "average"])
def test_means_are_over_all_elements_of_a_large_leaf(ord):
    def mean():
        leaf = jnp.full((2**16, 2**17), 2.0, jnp.bfloat16)
        return optaxclip.tensor_norm(leaf, ord=ord)

    wanted = {"rms": 2.0, "average": 2.0 / 2**16.5}
    np.testing.assert_allclose(jax.jit(mean)(), wanted[ord], 1e-6)


def test_all_of_many_units_are_counted():
    # float32 counts to 2^24. A scanned stack without `stacked=` has more units.
    grads = jnp.full((1, 2**24 + 2**22), 2.0, jnp.bfloat16)
    clipper = optaxclip.clip_by_unitwise_norm(1.0, axis=0)
    _, state = jax.jit(clipper.update)(grads, jax.jit(clipper.init)(grads))
    assert state.units_clipped == 1
