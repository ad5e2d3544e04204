"""`only=` and `floats=` of `metrics`."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from tests.helpers import apply, with_rows

GRADS = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([jnp.nan])}


@pytest.fixture(scope="module")
def state():
    return apply(optaxclip.clip_by_tensor_norm({"a": 1.0, "b": None}), GRADS)[1]


@pytest.mark.parametrize("only", ["limit", ("limit",), ["limit"], {"limit"}])
def test_only_takes_a_name_or_several(state, only):
    assert list(optaxclip.metrics(state, only=only)) == ["clip/limit/a", "clip/limit/b"]


def test_only_takes_the_numbers_that_all_have(state):
    every = optaxclip.metrics(state)
    found = optaxclip.metrics(state, only=("clipped", "norm_after"))
    assert len(found) == 4
    for name, value in found.items():
        np.testing.assert_array_equal(value, every[name])


def test_floats_are_floats_of_python_with_nan_and_inf(state):
    found = optaxclip.metrics(state, floats=True)
    assert found.keys() == optaxclip.metrics(state).keys()
    assert {type(value) for value in found.values()} == {float}
    assert math.isnan(found["clip/norm_before/b"])
    assert found["clip/limit/b"] == math.inf


def test_json_has_none_for_what_is_not_finite(state):
    found = optaxclip.metrics(state, json=True)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    nothing = {name for name, value in found.items() if value is None}
    assert nothing == {"clip/limit/b", "clip/norm_before/b", "clip/norm_after/b"}


def test_top_names_the_tensors_that_are_furthest_above_their_limits():
    norms = {"a": 5.0, "b": 50.0, "c": 0.5, "d": 500.0}
    limits = {"a": 1.0, "b": 1.0, "c": 1.0, "d": 1000.0}
    grads = {name: jnp.array([norm]) for name, norm in norms.items()}
    _, state = apply(optaxclip.clip_by_tensor_norm(limits), grads)
    found = optaxclip.metrics(state, only="norm_before", top=2.0, floats=True)
    assert found == {"clip/norm_before/b": 50.0, "clip/norm_before/a": 5.0}
    with pytest.raises(ValueError, match=r"^metrics: top must be at least 1, got 0"):
        optaxclip.metrics(state, top=0)
    with pytest.raises(TypeError, match=r"^metrics: floats, json and top must"):
        jax.jit(lambda s: optaxclip.metrics(s, top=1))(state)


def test_top_ranks_a_stack_by_its_furthest_layer():
    grads = {"w": jnp.array([[0.5], [50.0], [1.0]]), "b": jnp.array([5.0])}
    clipper = optaxclip.clip_by_tensor_norm(1.0, stacked={"w": 1, "b": None})
    found = optaxclip.metrics(apply(clipper, grads)[1], top=1, floats=True)
    assert found["clip/norm_before/w"] == 50.0 and "clip/norm_before/b" not in found


def test_quantiles_are_those_of_numpy():
    norms = np.random.default_rng(0).exponential(size=37)
    grads = {str(i): jnp.array([norm]) for i, norm in enumerate(norms)}
    _, state = apply(optaxclip.clip_by_tensor_norm(1.0), grads)
    for read in (
        optaxclip.metrics,
        jax.jit(optaxclip.metrics, static_argnames="quantiles"),
    ):
        found = read(state, quantiles=(0.5, 0.9)) | read(state, quantiles=0.1)
        for share in (0.1, 0.5, 0.9):
            wanted = np.quantile(np.float32(norms), share)
            np.testing.assert_allclose(
                found[f"clip/norm_quantile/{share}"], wanted, rtol=1e-6
            )
    # An infinite norm takes part as the largest number.
    state = with_rows(state, norm=state.norm.at[3].set(jnp.inf))
    found = optaxclip.metrics(state, quantiles=(0.5, 1.0))
    norms[3] = np.finfo(np.float32).max
    for share in (0.5, 1.0):
        wanted = np.quantile(np.float32(norms), share)
        np.testing.assert_allclose(found[f"clip/norm_quantile/{share:g}"], wanted)
    with pytest.raises(ValueError, match=r"^metrics: quantiles must be at most 1"):
        optaxclip.metrics(state, quantiles=(50,))


def test_close_quantiles_have_a_key_each():
    _, state = apply(optaxclip.clip_by_global_norm(1.0), GRADS["a"])
    shares = (0.9999999, 1.0, 1, 0.5)
    found = optaxclip.metrics(state, only="norm_quantile", quantiles=shares)
    keys = [f"clip/norm_quantile/{share}" for share in ("0.9999999", "1", "0.5")]
    assert list(found) == keys
    (key,) = optaxclip.metrics(state, only="norm_quantile", quantiles=np.float32([0.9]))
    assert key == "clip/norm_quantile/0.9"


def test_quantiles_may_be_whole_numbers(state):
    found = optaxclip.metrics(state, only="norm_quantile", quantiles=[0, 1])
    assert found == {"clip/norm_quantile/0": 5.0, "clip/norm_quantile/1": 5.0}


def test_quantiles_are_left_out_by_only_as_all_numbers_are(state):
    found = optaxclip.metrics(state, only="limit", quantiles=0.5)
    assert list(found) == ["clip/limit/a", "clip/limit/b"]
    found = optaxclip.metrics(state, only="norm_quantile", quantiles=0.5)
    assert list(found) == ["clip/norm_quantile/0.5"]
    for only in ("skipped", "norm_quantile"):
        quantiles = 0.5 if only == "skipped" else ()
        with pytest.raises(ValueError, match=f"only='{only}' must name numbers that"):
            optaxclip.metrics(state, only=only, quantiles=quantiles)


def test_tensors_equally_far_above_their_limits_keep_their_order():
    grads = {f"{i:02}": jnp.array([2.0 + (i == 30)]) for i in range(40)}
    grads |= {"broken": jnp.array([jnp.nan]), "infinite": jnp.array([jnp.inf])}
    _, state = apply(optaxclip.clip_by_tensor_norm(1.0), grads)
    found = optaxclip.metrics(state, only="norm_before", top=6)
    names = [key.removeprefix("clip/norm_before/") for key in found]
    assert names == ["broken", "infinite", "30", "00", "01", "02"]


def test_names_of_the_worst_tensors_take_one_wait(state, monkeypatch):
    def wait(array):
        raise AssertionError("int waits for the device")

    monkeypatch.setattr(type(state.norm), "__int__", wait)
    monkeypatch.setattr(type(state.norm), "__index__", wait)
    found = optaxclip.metrics((state, state), summary=True, floats=True)
    assert found["clip/worst_name"] == found["clip_2/worst_name"] == "b"
    assert optaxclip.metrics(state, summary=True, only="limit", json=True)


def test_only_takes_every_number_that_there_is():
    optimizer = optax.chain(
        optaxclip.clip_by_unitwise_norm(1.0),
        optaxclip.clip_by_value(1.0, count=True),
        optaxclip.record_norm(),
        optaxclip.record_spikes(),
        optaxclip.record_health(embeddings="w"),
        optaxclip.skip_step(optax.adam(0.1)),
    )
    state = optimizer.init({"w": jnp.ones((2, 3))})
    options = {"summary": True, "quantiles": 0.5, "floats": True}
    report = optaxclip.metrics(state, **options)
    for metric in {key.split("/")[1] for key in report}:
        assert optaxclip.metrics(state, only=metric, **options)


def test_only_refuses_an_unknown_name_beside_known_ones(state):
    with pytest.raises(ValueError, match=r"only=\('limit', 'lmit'\) must name numbers"):
        optaxclip.metrics(state, only=("limit", "lmit"))
