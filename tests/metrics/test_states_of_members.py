"""States with an axis for the members of an ensemble, or for devices."""

import jax
import jax.numpy as jnp
import optax
import pytest

from optaxclip import (
    clip_by_global_norm,
    clip_by_tensor_norm,
    clip_by_value,
    metrics,
    skip_nonfinite,
)

pytestmark = pytest.mark.slow

# Two members, with norms 5 and 50 of "a", and 1 and 2 of "b".
GRADS = {
    "a": jnp.array([[3.0, 4.0], [30.0, 40.0]]),
    "b": jnp.array([[1.0, 0.0], [2.0, 0.0]]),
}
CLIPPERS = {
    "tensors": clip_by_tensor_norm(1.0),
    "all": clip_by_global_norm(1.0),
    "elements": clip_by_value(1.0),
    "skipping": skip_nonfinite(optax.sgd(1.0)),
}


def state_of(clipper):
    return jax.vmap(clipper.update)(GRADS, jax.vmap(clipper.init)(GRADS))[1]


@pytest.mark.parametrize("clipper", CLIPPERS.values(), ids=CLIPPERS.keys())
@pytest.mark.parametrize("summary", [False, True])
def test_states_of_several_members_raise(clipper, summary):
    # Norms [members, tensors] were read as [tensors, members]: "b" had the norm 50.
    with pytest.raises(ValueError, match=r"metrics: opt_state .*\(2,\).*jax\.vmap"):
        metrics(state_of(clipper), summary=summary)


def test_mapped_each_member_has_its_numbers():
    found = jax.vmap(metrics)(state_of(CLIPPERS["tensors"]))
    assert found["clip/norm_before/a"].tolist() == [5.0, 50.0]
    assert found["clip/norm_before/b"].tolist() == [1.0, 2.0]


def test_one_member_has_its_numbers():
    state = jax.tree.map(lambda x: x[1], state_of(CLIPPERS["tensors"]))
    found = metrics(state, only="norm_before", floats=True)
    assert found == {"clip/norm_before/a": 50.0, "clip/norm_before/b": 2.0}
