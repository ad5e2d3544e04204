"""Shares of zeros and of subnormal numbers that `record_norm(count=True)` counts."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

import optaxclip

TINY = {
    "float32": [1e-39, -1e-45, 1.2e-38, 0.0, -0.0, 1.0, 2.0, 3.0],
    "bfloat16": [1e-39, -9.2e-41, 1.2e-38, 0.0, -0.0, 1.0, 2.0, 3.0],
    "float16": [6e-8, -6e-5, 6.2e-5, 0.0, -0.0, 1.0, 2.0, 3.0],
}


def grads_of(dtype):
    """NumPy keeps subnormal numbers, which XLA on a CPU may make zeros."""
    return np.asarray(TINY[dtype], jnp.dtype(dtype))


def record(grads, **options):
    recorder = optaxclip.record_norm(count=True, **options)
    return jax.jit(recorder.update)(grads, recorder.init(grads))


@pytest.mark.parametrize("dtype", TINY)
def test_zeros_and_subnormal_numbers_are_counted_in_each_dtype(dtype):
    grads = {"w": grads_of(dtype), "b": np.ones(3, np.float32)}
    _, state = record(grads)
    found = optaxclip.metrics(state, floats=True)
    # Two of eight are below the smallest normal number, and two are zeros.
    assert found["clip/zeros/w"] == 2 / 8
    assert found["clip/subnormals/w"] == 2 / 8
    assert found["clip/zeros/b"] == found["clip/subnormals/b"] == 0
    assert found["clip/norm_before"] > 0


def test_counting_leaves_updates_and_norms_as_they_are():
    grads = {"w": jnp.array([3.0, 0.0]), "i": jnp.arange(3), "none": None}
    updates, state = record(grads, norm=optaxclip.tensor_norm)
    assert updates["w"] is not None and updates["none"] is None
    np.testing.assert_array_equal(updates["w"], grads["w"])
    np.testing.assert_array_equal(updates["i"], grads["i"])
    found = optaxclip.metrics(state, floats=True)
    assert found["clip/norm_before/w"] == 3
    assert {key for key in found if "zeros" in key} == {"clip/zeros/w"}


def test_parts_of_complex_numbers_are_counted():
    _, state = record({"w": np.array([1 + 0j, 1e-39 + 2j, 0j], np.complex64)})
    found = optaxclip.metrics(state, floats=True)
    np.testing.assert_allclose(found["clip/zeros/w"], 3 / 6, rtol=1e-6)
    np.testing.assert_allclose(found["clip/subnormals/w"], 1 / 6, rtol=1e-6)


def test_metrics_of_counts_take_only_summary_and_top():
    grads = {"a": np.float32([0, 0, 1]), "b": np.float32([0, 1, 1])}
    _, state = record(grads)
    only = optaxclip.metrics(state, only="zeros", floats=True)
    assert only.keys() == {"clip/zeros/a", "clip/zeros/b"}
    summary = optaxclip.metrics(state, only="zeros", summary=True, floats=True)
    np.testing.assert_allclose(list(summary.values()), [2 / 3], rtol=1e-6)
    top = optaxclip.metrics(state, only="zeros", top=1, floats=True)
    assert top.keys() == {"clip/zeros/a"}


def test_counts_are_over_all_devices_of_shard_map():
    grads = np.float32([0, 0, 0, 1e-39] + [1] * 12)
    recorder = optaxclip.record_norm(count=True)
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    spec = PartitionSpec("x")
    state = recorder.init(grads)
    run = jax.shard_map(
        recorder.update,
        mesh=mesh,
        in_specs=(spec, PartitionSpec()),
        out_specs=(spec, PartitionSpec()),
    )
    _, state = jax.jit(run)(grads, state)
    found = optaxclip.metrics(state, only=("zeros", "subnormals"), floats=True)
    assert found == {"clip/zeros": 3 / 16, "clip/subnormals": 1 / 16}


def test_a_counting_state_goes_where_states_go():
    grads = {"w": jnp.array([3.0, 0.0])}
    recorder = optaxclip.record_norm(count=True)
    optimizer = optax.chain(recorder, optax.sgd(0.1))
    state = optimizer.init(grads)
    _, after = optimizer.update(grads, state)
    assert jax.tree.structure(state) == jax.tree.structure(after)
    mapped = optax.tree_map_params(optimizer, lambda x: x, after)
    assert jax.tree.structure(mapped) == jax.tree.structure(after)
    found = optaxclip.metrics(after, floats=True)
    assert found["clip/zeros/w"] == 0.5


def test_count_is_true_or_false():
    with pytest.raises(TypeError, match="record_norm: count must be True or False"):
        optaxclip.record_norm(count="zeros")
