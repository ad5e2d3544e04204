"""`metrics` finds every clipper at any depth, says what it did, and keeps its keys when
another one is added.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from tests.core.steps import count_compilations
from tests.helpers import after, apply

CLIPPER = optaxclip.clip_by_global_norm(1.0)
GRADS = {"a": jnp.array([3.0, 4.0]), "b": {"c": jnp.array([0.3, 0.4])}}


def test_numbers_of_a_global_clip_over_several_steps():
    small = jax.tree.map(lambda x: x / 100, GRADS)
    bad = jax.tree.map(lambda x: x * jnp.nan, GRADS)
    optimizer = optax.chain(optaxclip.clip_by_global_norm(1.0), optax.scale(-1.0))
    state = after(optimizer, GRADS, bad, small, GRADS)
    norm = np.sqrt(25.25)
    wanted = {
        "clip/norm_before": norm,
        "clip/limit": 1.0,
        "clip/factor": 1 / norm,
        "clip/norm_after": 1.0,
        "clip/clipped": 1.0,
        "clip/clipped_share": 0.5,
        "clip/clipped_share_recent": 0.5,
        "clip/clipped_count": 2.0,
        "clip/nonfinite_count": 1.0,
    }
    assert optaxclip.metrics(state, floats=True) == pytest.approx(wanted)
    for value in optaxclip.metrics(state).values():
        assert value.dtype == jnp.float32 and value.shape == ()


def test_a_broken_step_is_counted_as_broken_and_not_as_clipped():
    for nonfinite, norm_after in (("propagate", np.nan), ("zero", 0.0)):
        clipper = optaxclip.clip_by_global_norm(1.0, nonfinite=nonfinite)
        for broken in (np.nan, np.inf):
            state = after(clipper, jnp.array([3.0, 4.0]), jnp.array([3.0, broken]))
            found = optaxclip.metrics(state)
            counts = [found[f"clip/{x}"] for x in ("clipped", "clipped_count")]
            assert (*counts, found["clip/nonfinite_count"]) == (0, 1, 1)
            np.testing.assert_array_equal(found["clip/norm_after"], norm_after)


def test_a_limit_of_nan_breaks_a_step_as_a_norm_of_nan_does():
    grads = jnp.array([3.0, 4.0])
    for nonfinite, norm_after in (("propagate", np.nan), ("zero", 0.0)):
        clipper = optaxclip.clip_by_global_norm(1.0, nonfinite=nonfinite)
        _, state = clipper.update(grads, clipper.init(grads), limit=jnp.float32("nan"))
        for summary in (False, True):
            found = optaxclip.metrics(state, summary=summary)
            counts = [found[f"clip/{x}"] for x in ("clipped", "clipped_count")]
            assert (*counts, found["clip/nonfinite_count"]) == (0, 0, 1)
            np.testing.assert_array_equal(found["clip/norm_after"], norm_after)


def test_a_step_that_the_shrink_breaks_is_not_reported_as_clipped():
    def shrink(norm, limit):
        return jnp.sqrt(limit - norm)

    clipper = optaxclip.clip_by_global_norm(1.0, shrink=shrink)
    found = optaxclip.metrics(after(clipper, jnp.array([3.0, 4.0])))
    counts = [found[f"clip/{x}"] for x in ("clipped", "clipped_count")]
    assert (*counts, found["clip/nonfinite_count"]) == (0, 0, 1)


def test_a_unit_that_is_made_longer_counts_as_clipped():
    """The other unit, which is furthest above its limit, has the length of it."""
    kernel = jnp.array([[0.5, 1.0], [0.0, 0.0]])
    normalize = optaxclip.shrinks.normalize
    clipper = optaxclip.clip_by_unitwise_norm(1.0, shrink=normalize)
    found = optaxclip.metrics(after(clipper, kernel))
    assert found["clip/norm_before"] == found["clip/factor"] == 1
    assert found["clip/units_clipped"] == 0.5
    assert found["clip/clipped"] == found["clip/clipped_count"] == 1


def test_layers_without_limits_show_the_longest_beside_others():
    limits = {"w": None, "b": 1.0}
    clipper = optaxclip.clip_by_tensor_norm(limits, stacked={"w": (1,), "b": None})
    found = optaxclip.metrics(after(clipper, STACKED))
    np.testing.assert_allclose(found["clip/norm_before/w"], 10.0, 1e-6)


FAR_FROM_THE_LIMIT = [
    (3e38, 1.0, None),
    (3e38, 1.0, optaxclip.shrinks.smooth(2)),
    (3.3e38, 1.2e-38, None),
    (1.2e-38, 10.0, optaxclip.shrinks.normalize),
    (1e38, 2.0, None),
]


def test_the_norm_after_clipping_is_right_at_any_distance():
    for norm, limit, shrink in FAR_FROM_THE_LIMIT:
        grads = jnp.array([norm, 0.0])
        clipper = optaxclip.clip_by_global_norm(limit, shrink=shrink)
        found = optaxclip.metrics(clipper.update(grads, clipper.init(grads))[1])
        assert found["clip/clipped"] == 1
        np.testing.assert_allclose(found["clip/norm_after"], limit, rtol=1e-6)
        assert 0 < found["clip/factor"] < np.inf


def test_a_norm_that_is_dropped_is_0_afterwards():
    clipper = optaxclip.clip_by_global_norm(1.0, shrink=optaxclip.shrinks.drop)
    found = optaxclip.metrics(after(clipper, jnp.array([3e38, 0.0])))
    numbers = [found[f"clip/{x}"] for x in ("clipped", "norm_after", "factor")]
    assert numbers == [1, 0, 0]


def test_64_bit_norms_are_right_after_clipping_as_well():
    with jax.enable_x64(True):
        grads = np.array([1e300, 0.0])
        clipper = optaxclip.clip_by_global_norm(3.0)
        found = optaxclip.metrics(clipper.update(grads, clipper.init(grads))[1])
    np.testing.assert_allclose(found["clip/norm_after"], 3.0, rtol=1e-6)
    np.testing.assert_allclose(found["clip/norm_before"], 1e300, rtol=1e-6)
    assert float(found["clip/factor"]) > 0


def test_tensor_clippers_are_told_by_leaf_path():
    clipper = optaxclip.clip_by_tensor_norm({"a": 1.0, "b": 2.0})
    numbers = optaxclip.metrics(after(clipper, GRADS), floats=True)
    assert numbers["clip/norm_before/a"] == pytest.approx(5.0)
    assert numbers["clip/norm_before/b/c"] == pytest.approx(0.5)
    assert numbers["clip/limit/b/c"] == 2.0
    assert numbers["clip/clipped_count/b/c"] == 0


def test_of_units_the_one_furthest_over_its_limit_is_shown():
    kernel = jnp.array([[3.0, 0.1, 30.0], [4.0, 0.2, 40.0]])
    clipper = optaxclip.clip_by_unitwise_norm(jnp.array([[1.0, 1.0, 100.0]]))
    numbers = optaxclip.metrics(clipper.update(kernel, clipper.init(kernel))[1])
    assert float(numbers["clip/norm_before"]) == pytest.approx(5.0)
    assert float(numbers["clip/units_clipped"]) == pytest.approx(1 / 3)
    assert numbers["clip/clipped_share"] == 1


@pytest.mark.slow
def test_found_at_any_depth_and_in_traced_states():
    clipper = optaxclip.clip_by_global_norm
    masked = optax.masked(clipper(1.0), {"a": True, "b": False})
    inside = optax.chain(masked, optax.scale(1.0))
    parted = optax.partition({"x": inside}, {"a": "x", "b": "x"})
    deep = optax.MultiSteps(optax.apply_if_finite(parted, 2), 1)
    numbers = jax.jit(lambda state: optaxclip.metrics(state))(after(deep, GRADS))
    assert float(numbers["clip/x/norm_before"]) == pytest.approx(5.0)
    schedule = optax.linear_schedule(2.0, 1.0, 10)
    injected = optax.inject_hyperparams(clipper)(max_norm=schedule)
    numbers = optaxclip.metrics(after(injected, GRADS))
    assert float(numbers["clip/limit"]) == pytest.approx(2.0)


def test_metrics_number_clippers_within_each_title():
    twice = optax.chain(CLIPPER, optaxclip.clip_by_global_norm(2.0))
    parted = optax.partition({"a": twice, "b": twice}, {"x": "a", "y": "b"})
    state = parted.init({"x": jnp.ones(2), "y": jnp.ones(2)})
    wanted = {
        f"{place}/limit" for place in ("clip/a", "clip/b", "clip_2/a", "clip_2/b")
    }
    assert set(optaxclip.metrics(state, only="limit")) == wanted


def test_metrics_name_the_whole_way_through_a_skipping_optimizer():
    inner = optax.named_chain(("inner", CLIPPER), ("sgd", optax.sgd(1.0)))
    one = optax.named_chain(("outer", optaxclip.skip_nonfinite(inner)))
    found = optaxclip.metrics(one.init(jnp.ones(2)))
    assert {"skip/outer/norm", "clip/outer/inner/norm_before"} <= found.keys()
    second = optax.named_chain(("second", optaxclip.skip_nonfinite(inner)))
    twice = optax.named_chain(("first", optaxclip.skip_nonfinite(second)))
    found = optaxclip.metrics(twice.init(jnp.ones(2)))
    assert "clip/first/second/inner/norm_before" in found


def test_two_places_that_read_alike_have_two_rows():
    tree = {"a/b": jnp.ones(2), "a": {"b": jnp.ones(2)}, "c": jnp.ones(2)}
    state = optaxclip.clip_by_tensor_norm(1.0).init(tree)
    wanted = {f"clip/limit/{name}" for name in ("['a/b']", "['a']['b']", "['c']")}
    assert set(optaxclip.metrics(state, only="limit")) == wanted


@pytest.mark.slow
def test_the_numbers_of_a_norm_without_jit_are_one_program():
    grads = {"w": jnp.full((7, 13), 3.0), "v": jnp.full((5, 13), 3.0)}
    _, state = apply(optaxclip.clip_by_unitwise_norm(1.0), grads)
    with count_compilations() as compiled:
        found = optaxclip.metrics(state)
    assert len(compiled) <= 1  # none where another test had the same shapes
    first = [name.split("/")[1] for name in found][:4]
    assert first == ["norm_before", "limit", "factor", "norm_after"]


@pytest.mark.parametrize(
    "optimizer",
    [
        CLIPPER,
        optaxclip.clip_by_unitwise_norm(optaxclip.rules.z_score()),
        optaxclip.skip_spikes(optax.chain(CLIPPER, optax.sgd(1.0)), 10.0),
    ],
    ids=["one norm", "units", "skipping"],
)
def test_metrics_are_the_same_under_strict_promotion(optimizer):
    state = after(optimizer, GRADS)
    wanted = optaxclip.metrics(state)
    with jax.numpy_dtype_promotion("strict"):
        found = optaxclip.metrics(state)
    np.testing.assert_equal(found, wanted)
    assert len(found) > 4


OPTIONS = [{}, {"summary": True}, {"layers": True}, {"only": ("limit", "factor")}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_metrics_of_many_tensors_are_the_same_under_jit(options):
    """Also beside layers, a tensor that is NaN and one without a limit."""
    grads = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([jnp.nan]), "c": jnp.ones(2)}
    grads["layers"] = jnp.array([[3.0, 6.0, 0.3], [4.0, 8.0, 0.4]])
    limits = dict.fromkeys(grads, 1.0) | {"c": None}
    stacked = dict.fromkeys(grads) | {"layers": (1,)}
    _, state = apply(optaxclip.clip_by_tensor_norm(limits, stacked=stacked), grads)
    eager = optaxclip.metrics(state, **options)
    jitted = jax.jit(lambda state: optaxclip.metrics(state, **options))(state)
    assert eager.keys() == jitted.keys()
    for name, value in eager.items():
        assert jitted[name].dtype == jnp.float32 and jitted[name].shape == ()
        np.testing.assert_array_equal(jitted[name], value, err_msg=name)


def keys(optimizer, name="limit"):
    found = optaxclip.metrics(optimizer.init({"w": jnp.ones(2)}), only=name)
    return list(found)


def test_the_first_keeps_its_keys_when_a_second_is_added():
    assert keys(optax.chain(CLIPPER)) == ["clip/limit"]
    twice = optax.chain(CLIPPER, optax.sgd(0.1), CLIPPER)
    assert keys(twice) == ["clip/limit", "clip_2/limit"]


def test_a_clipper_of_elements_counts_as_one_more():
    chain = optax.chain(optaxclip.clip_by_value(1.0, count=True), CLIPPER)
    assert keys(chain) == ["clip_2/limit"]
    assert keys(chain, "elements_clipped") == ["clip/elements_clipped"]


def test_a_named_clipper_keeps_its_keys_wherever_another_is_added():
    named = ("inner", CLIPPER)
    for others in ([named], [("first", CLIPPER), named], [named, ("last", CLIPPER)]):
        assert "clip/inner/limit" in keys(optax.named_chain(*others))


def test_a_clipper_named_clip_has_that_name_once():
    named = optax.named_chain(("clip", CLIPPER), ("adam", optax.adam(0.1)))
    assert keys(named) == ["clip/limit"]


def test_a_skipping_optimizer_has_a_name_of_its_own():
    inner = optax.chain(CLIPPER, optax.sgd(0.1))
    chain = optax.chain(CLIPPER, optaxclip.skip_nonfinite(inner))
    assert keys(chain) == ["clip/limit", "skip/limit", "clip_2/limit"]


# Layers on axis 1: norms 5, 10 and 0.5.
STACKED = {"w": jnp.array([[3.0, 6.0, 0.3], [4.0, 8.0, 0.4]]), "b": jnp.array([0.5])}


def state_after_a_step(stacked):
    return apply(optaxclip.clip_by_tensor_norm(1.0, stacked=stacked), STACKED)[1]


def test_each_layer_has_a_row_on_request():
    found = optaxclip.metrics(state_after_a_step({"w": (1,), "b": None}), layers=True)
    norms = {name: x for name, x in found.items() if "norm_before" in name}
    want = {"clip/norm_before/b": 0.5}
    want |= {f"clip/norm_before/w/{i}": x for i, x in enumerate([5.0, 10.0, 0.5])}
    assert norms.keys() == want.keys()
    for name, norm in want.items():
        np.testing.assert_allclose(norms[name], norm, 1e-6)
    assert found["clip/clipped/w/1"] == 1 and found["clip/clipped/w/2"] == 0


def test_without_layers_the_furthest_one_is_shown():
    found = optaxclip.metrics(state_after_a_step({"w": (1,), "b": None}))
    np.testing.assert_allclose(found["clip/norm_before/w"], 10.0, 1e-6)
    assert "clip/norm_before/w/1" not in found


def test_states_without_layers_have_the_same_rows():
    state = state_after_a_step(None)
    found = optaxclip.metrics(state)
    assert optaxclip.metrics(state, layers=True).keys() == found.keys()


def test_a_leaf_with_the_name_of_a_layer_is_refused():
    grads = {"w": jnp.ones((3, 4)), "w/0": jnp.ones(2)}
    # Of one limit, and of a limit each.
    for limits in (1.0, {"w": 1.0, "w/0": lambda step: 2.0}):
        clipper = optaxclip.clip_by_tensor_norm(limits, stacked={"w": 1, "w/0": None})
        _, state = clipper.update(grads, clipper.init(grads))
        assert len(state.by_name()) == 2
        for read in (state.by_name, partial(optaxclip.metrics, state)):
            with pytest.raises(ValueError, match=r"layers=True: a leaf of .*'w/0' has"):
                read(layers=True)


def test_weights_with_names_of_fields_are_no_states():
    params = {"step": jnp.ones((3, 2)), "norms": {"w": jnp.ones(2)}}
    optimizer = optax.chain(optaxclip.clip_by_global_norm(1.0), optax.adam(0.1))
    _, state = apply(optimizer, params, params)
    alone = apply(optaxclip.clip_by_global_norm(1.0), params)[1]
    assert optaxclip.metrics(state) == optaxclip.metrics(alone)
    with pytest.raises(ValueError, match=r"^metrics: opt_state must be the state of"):
        optaxclip.metrics(optax.adam(0.1).init({"step": jnp.float32(1.0)}))


def test_the_error_about_another_state_shows_the_shapes_of_its_arrays():
    state = optax.adam(0.1).init({"w": jnp.ones((300, 300))})
    text = r"got \(ScaleByAdamState\(count=0, mu=\{'w': float32\[300, 300\]\}, "
    with pytest.raises(ValueError, match=text):
        optaxclip.metrics(state)


# Names of fields of the states of clip_by_value, record_health and the clippers.
WEIGHTS_LIKE_STATES = {
    "step": {"step": jnp.ones((3, 2))},
    "norms": {"norms": jnp.ones(2)},
    "counts": {"counts": jnp.ones((3, 2)), "numbers": jnp.ones((4, 2))},
}


@pytest.mark.parametrize("name", WEIGHTS_LIKE_STATES)
def test_weights_in_a_mapping_of_states_are_no_states(name):
    params = WEIGHTS_LIKE_STATES[name]
    adam = ("adam", optax.adam(0.1))
    state = optax.named_chain(("clip", CLIPPER), adam).init(params)
    wanted = optaxclip.metrics(CLIPPER.init(params))
    assert optaxclip.metrics(state) == wanted
    beside_weights = {"adam": state, "params": params}
    keys = optaxclip.metrics(beside_weights, only="limit").keys()
    assert keys == {"clip/adam/limit"}
    with pytest.raises(ValueError, match=r"^metrics: opt_state must be the state of"):
        optaxclip.metrics(optax.named_chain(adam).init(params))
