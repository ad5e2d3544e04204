"""`record_norm` is reported as a recorder: norms and broken steps, and nothing about
clipping. The clippers beside it keep their keys.
"""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip import metrics, record_norm, tensor_norm
from tests.helpers import after

GRADS = {"a": jnp.array([3.0, 4.0]), "b": {"c": jnp.array([0.3, 0.4])}}
NAN = {"a": jnp.array([3.0, 4.0]), "b": {"c": jnp.array([jnp.nan, 0.4])}}
CLIP = optaxclip.clip_by_global_norm(1.0)
NORM = np.sqrt(9 + 16 + 0.09 + 0.16)


def test_one_norm_and_the_broken_steps_are_all_that_is_reported():
    found = metrics(after(record_norm(), GRADS, NAN, GRADS), floats=True)
    wanted = {"record/norm": NORM, "record/nonfinite_count": 1.0}
    assert found == pytest.approx(wanted)


def test_each_tensor_has_its_norm_and_its_broken_steps():
    found = metrics(after(record_norm(tensor_norm), NAN, GRADS), floats=True)
    wanted = {
        "record/norm/a": 5.0,
        "record/nonfinite_count/a": 0.0,
        "record/norm/b/c": 0.5,
        "record/nonfinite_count/b/c": 1.0,
    }
    assert found == pytest.approx(wanted)


def test_a_summary_names_the_tensor_with_the_largest_norm():
    state = after(record_norm(tensor_norm), GRADS)
    wanted = {"record/norm": 5.0, "record/nonfinite_count": 0.0}
    wanted |= {"record/worst_index": 0.0, "record/worst_name": "a"}
    assert metrics(state, summary=True, floats=True) == wanted
    broken = metrics(after(record_norm(tensor_norm), NAN), summary=True, floats=True)
    assert broken["record/worst_name"] == "b/c"
    assert broken["record/nonfinite_count"] == 1


def test_layers_top_and_quantiles_are_of_norms():
    norms = np.array([5.0, 10.0, 0.5])
    rows = jnp.array(norms[:, None] * [0.6, 0.8], jnp.float32)
    state = after(record_norm(lambda tree: tensor_norm(tree, stacked=1)), {"w": rows})
    found = metrics(state, layers=True, only="norm", floats=True)
    wanted = {f"record/norm/w/{layer}": norm for layer, norm in enumerate(norms)}
    assert found == pytest.approx(wanted)
    found = metrics(state, layers=True, only="norm", top=1, floats=True)
    assert found == pytest.approx({"record/norm/w/1": 10.0})
    found = metrics(state, only="norm_quantile", quantiles=0.5, floats=True)
    assert found == pytest.approx({"record/norm_quantile/0.5": 5.0})


def test_a_clipper_keeps_its_keys_beside_a_recorder():
    alone = metrics(after(optax.chain(CLIP, optax.sgd(0.1)), GRADS))
    for links in ((record_norm(), CLIP), (CLIP, record_norm())):
        found = metrics(after(optax.chain(*links, optax.sgd(0.1)), GRADS))
        assert alone.items() <= found.items()
        others = found.keys() - alone.keys()
        assert others == {"record/norm", "record/nonfinite_count"}


def test_several_recorders_have_numbers_or_names():
    twice = optax.chain(record_norm(), CLIP, record_norm())
    found = metrics(after(twice, GRADS), only="norm", floats=True)
    assert found == pytest.approx({"record/norm": NORM, "record_2/norm": 1.0})
    named = optax.named_chain(("a", record_norm()), ("clip", CLIP))
    assert list(metrics(after(named, GRADS), only="norm")) == ["record/a/norm"]


STORED = {
    "pickle": lambda state: pickle.loads(pickle.dumps(state)),
    "deepcopy": copy.deepcopy,
    "device_get": jax.device_get,
    "tree.map": lambda state: jax.tree.map(lambda x: x, state),
    "jit": jax.jit(lambda state: state),
    "tree_map_params": lambda state: optax.tree_map_params(
        record_norm(tensor_norm), lambda x: x, state
    ),
}


@pytest.mark.parametrize("way", STORED)
def test_a_stored_recorder_is_one(way):
    state = after(record_norm(tensor_norm), GRADS)
    found = STORED[way](state)
    assert jax.tree.structure(found) == jax.tree.structure(state)
    assert metrics(found) == metrics(state)


def test_a_recorder_that_begins_without_a_state_is_one():
    _, state = record_norm().update(GRADS, None)
    assert "record/norm" in metrics(state)


def test_members_of_an_ensemble_are_read_one_by_one():
    recorder = record_norm(tensor_norm)

    def norm_of_one(scale):
        grads = jax.tree.map(lambda x: scale * x, GRADS)
        return metrics(recorder.update(grads, recorder.init(grads))[1])

    found = jax.vmap(norm_of_one)(jnp.array([1.0, 2.0]))
    np.testing.assert_allclose(found["record/norm/a"], [5.0, 10.0], rtol=1e-6)


def test_in_a_scan_a_recorder_stays_one():
    recorder = record_norm()

    def step(state, scale):
        _, state = recorder.update(jnp.array([3.0, 4.0]) * scale, state)
        return state, metrics(state)

    first = recorder.init(jnp.zeros(2))
    _, found = jax.lax.scan(step, first, jnp.array([1.0, 2.0, jnp.nan]))
    np.testing.assert_allclose(found["record/norm"], [5, 10, np.nan], rtol=1e-6)
    np.testing.assert_array_equal(found["record/nonfinite_count"], [0, 0, 1])


def test_jax_tells_a_recorder_from_a_clipper_of_equal_norms():
    """A jitted function that takes both would run the program of one for the other."""
    for norm in (optaxclip.global_norm, tensor_norm):
        recorder = record_norm(norm).init(GRADS)
        clipper = optaxclip.clip_by(norm, None).init(GRADS)
        assert type(recorder) is not type(clipper)
        assert recorder.names == clipper.names
        assert jax.tree.structure(recorder) != jax.tree.structure(clipper)
