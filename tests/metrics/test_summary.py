"""`summary=True`: one row for all norms of a clipper."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip
from tests.helpers import after

GRADS = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([0.3]), "c": jnp.array([8.0])}


def summary(state, **options):
    return optaxclip.metrics(state, summary=True, floats=True, **options)


def test_a_clipper_of_tensors_has_one_row():
    limits = {"a": 1.0, "b": 1.0, "c": 4.0}
    state = after(optaxclip.clip_by_tensor_norm(limits), GRADS)
    wanted = {
        "clip/norm_before": 5.0,
        "clip/limit": 1.0,
        "clip/factor": 0.2,
        "clip/norm_after": 1.0,
        "clip/clipped": 1.0,
        "clip/clipped_share": 2 / 3,
        "clip/clipped_share_recent": 2 / 3,
        "clip/clipped_count": 1.0,
        "clip/nonfinite_count": 0.0,
        "clip/norms_clipped": 2 / 3,
        "clip/worst_ratio": 5.0,
        "clip/worst_index": 0.0,
        "clip/worst_name": "a",
    }
    assert summary(state) == pytest.approx(wanted)


def test_shares_are_means_over_all_tensors():
    calm = jax.tree.map(lambda x: x / 100, GRADS)
    found = summary(after(optaxclip.clip_by_tensor_norm(1.0), GRADS, calm, calm, calm))
    shares = [found[f"clip/clipped_share{end}"] for end in ("", "_recent")]
    np.testing.assert_allclose(shares, 2 / 3 / 4, rtol=1e-6)
    assert found["clip/norms_clipped"] == 0


def test_a_tensor_that_is_not_finite_is_the_worst():
    for broken in (np.nan, np.inf):
        grads = GRADS | {"b": jnp.array([broken])}
        found = summary(after(optaxclip.clip_by_tensor_norm(1.0), grads))
        assert found["clip/worst_name"] == "b" and found["clip/nonfinite_count"] == 1
        assert found["clip/norms_clipped"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("norms", [*itertools.permutations([np.inf, np.nan, 5.0])])
def test_top_names_the_same_tensor_as_a_summary(norms):
    grads = {name: jnp.array([norm]) for name, norm in zip("abc", norms)}
    state = after(optaxclip.clip_by_tensor_norm(1.0), grads)
    (path,) = optaxclip.metrics(state, only="limit", top=1)
    assert path == f"clip/limit/{summary(state)['clip/worst_name']}"


def test_tensors_with_limits_of_their_own_are_compared():
    clipper = optaxclip.clip_by_tensor_norm({"a": 1.0, "b": lambda _: 0.6, "c": 1.0})
    spike = jax.tree.map(lambda x: x / 10, GRADS) | {"b": jnp.array([600.0])}
    state = after(clipper, GRADS, GRADS, spike)
    found = summary(state)
    assert found["clip/worst_name"] == "b"
    assert list(state.by_name())[int(found["clip/worst_index"])] == "b"
    np.testing.assert_allclose(found["clip/worst_ratio"], 1000, rtol=1e-5)


def test_units_name_the_tensor_of_the_worst_unit():
    grads = {"a": jnp.ones((2, 5)), "b": jnp.ones((3, 4)).at[0, 1].set(50.0)}
    found = summary(after(optaxclip.clip_by_unitwise_norm(2.0), grads))
    assert found["clip/worst_name"] == "b"
    # None of the units of a, and one of the four of b.
    assert found["clip/norms_clipped"] == pytest.approx(1 / 8)


def test_the_share_of_clipped_units_is_a_mean_over_tensors():
    # One of four units is clipped, and all three.
    grads = {"a": jnp.ones((2, 4)).at[0, 0].set(50.0), "b": jnp.full((2, 3), 9.0)}
    found = summary(after(optaxclip.clip_by_unitwise_norm(2.0), grads))
    assert found["clip/worst_name"] == "a"
    assert found["clip/units_clipped"] == pytest.approx((1 / 4 + 1) / 2)


@pytest.mark.parametrize("scale", [1e-18, 1e-30, 1.0])
def test_the_worst_is_right_under_the_smallest_limits(scale):
    grads = {"a": jnp.array([np.float32(scale)]), "b": jnp.array([2.0])}
    clipper = optaxclip.clip_by_tensor_norm({"a": scale / 100, "b": 1.0})
    found = summary(after(clipper, grads))
    assert found["clip/worst_name"] == "a"
    assert found["clip/worst_ratio"] == pytest.approx(100, rel=1e-5)


def test_a_limit_of_0_is_the_furthest_and_the_longest_norm_counts():
    grads = {name: jnp.array([norm]) for name, norm in zip("abc", (9.0, 1e30, 9.0))}
    clipper = optaxclip.clip_by_tensor_norm({"a": 0.0, "b": 0.0, "c": 1e-9})
    assert summary(after(clipper, grads))["clip/worst_name"] == "b"


def test_a_broken_norm_is_worse_than_any_norm_over_a_limit_of_0():
    grads = {"a": jnp.array([3e38]), "b": jnp.array([np.inf])}
    clipper = optaxclip.clip_by_tensor_norm({"a": 0.0, "b": 1.0})
    assert summary(after(clipper, grads))["clip/worst_name"] == "b"


def test_without_a_limit_the_longest_norm_is_shown():
    found = summary(after(optaxclip.record_norm(optaxclip.tensor_norm), GRADS))
    assert found["record/worst_name"] == "c" and found["record/norm"] == 8
    found = summary(after(optaxclip.clip_by_tensor_norm(None), GRADS))
    assert found["clip/worst_name"] == "c" and found["clip/norm_before"] == 8
    assert found["clip/worst_ratio"] == 0 and found["clip/limit"] == np.inf


def test_zero_over_a_limit_of_zero_is_zero():
    zeros = jax.tree.map(jnp.zeros_like, GRADS)
    found = summary(after(optaxclip.clip_by_tensor_norm(0.0), zeros))
    assert found["clip/worst_ratio"] == 0


def test_zero_over_a_limit_of_nan_is_nan():
    zeros = jax.tree.map(jnp.zeros_like, GRADS)
    clipper = optaxclip.clip_by_tensor_norm(lambda step: jnp.nan)
    found = summary(after(clipper, zeros))
    assert np.isnan(found["clip/worst_ratio"])


def test_one_norm_has_the_same_numbers():
    found = summary(after(optaxclip.clip_by_global_norm(1.0), GRADS))
    norm = np.sqrt(25 + 0.09 + 64)
    assert found["clip/norms_clipped"] == 1 and found["clip/worst_name"] == ""
    np.testing.assert_allclose(found["clip/worst_ratio"], norm, rtol=1e-6)


def test_an_empty_tree_has_no_row():
    assert optaxclip.metrics(after(optaxclip.clip_by_tensor_norm(1.0), {})) == {}
    assert summary(after(optaxclip.clip_by_tensor_norm(1.0), {})) == {}


def test_a_norm_without_a_limit_is_not_the_worst_beside_others():
    grads = {"a": jnp.array([5.0]), "b": jnp.array([1e20])}
    state = after(optaxclip.clip_by_tensor_norm({"a": 1.0, "b": None}), grads)
    found = summary(state)
    assert (found["clip/worst_name"], found["clip/worst_ratio"]) == ("a", 5.0)
    state = after(optaxclip.clip_by_tensor_norm(None), grads)
    assert summary(state)["clip/worst_name"] == "b"
