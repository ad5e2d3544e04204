"""`metrics` finds every clipper at any depth, says what it did, and keeps its keys when
another one is added.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from tests.core.steps import count_compilations

GRADS = {"a": jnp.array([3.0, 4.0]), "b": {"c": jnp.array([0.3, 0.4])}}


def after(optimizer, *grads):
    state = optimizer.init(GRADS)
    for each in grads:
        _, state = optimizer.update(each, state, GRADS)
    return state


def test_numbers_of_a_global_clip_over_several_steps():
    small = jax.tree.map(lambda x: x / 100, GRADS)
    bad = jax.tree.map(lambda x: x * jnp.nan, GRADS)
    state = after(
        optax.chain(optaxclip.clip_by_global_norm(1.0), optax.scale(-1.0)),
        GRADS,
        bad,
        small,
        GRADS,
    )
    numbers = {key: float(value) for key, value in optaxclip.metrics(state).items()}
    norm = np.sqrt(25.25)
    assert numbers == pytest.approx(
        {
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
    )
    assert all(
        value.dtype == jnp.float32 and value.shape == ()
        for value in optaxclip.metrics(state).values()
    )


@pytest.mark.parametrize("broken", [np.nan, np.inf])
@pytest.mark.parametrize("nonfinite", ["propagate", "zero"])
def test_a_broken_step_is_counted_as_broken_and_not_as_clipped(nonfinite, broken):
    clipper = optaxclip.clip_by_global_norm(1.0, nonfinite=nonfinite)
    _, state = clipper.update(jnp.array([3.0, 4.0]), clipper.init(jnp.zeros(2)))
    _, state = clipper.update(jnp.array([3.0, broken]), state)
    found = optaxclip.metrics(state)
    assert (
        found["clip/clipped"],
        found["clip/clipped_count"],
        found["clip/nonfinite_count"],
    ) == (0, 1, 1)
    np.testing.assert_array_equal(
        found["clip/norm_after"], np.nan if nonfinite == "propagate" else 0.0
    )


@pytest.mark.parametrize(
    ("norm", "limit", "shrink"),
    [
        (3e38, 1.0, None),
        (3e38, 1.0, optaxclip.shrinks.smooth(2)),
        (3.3e38, 1.2e-38, None),
        (1.2e-38, 10.0, optaxclip.shrinks.normalize),
        (1e38, 2.0, None),
        (3e38, 1.0, optaxclip.shrinks.drop),
    ],
)
def test_the_norm_after_clipping_is_right_at_any_distance(norm, limit, shrink):
    grads = jnp.array([norm, 0.0])
    clipper = optaxclip.clip_by_global_norm(limit, shrink=shrink)
    found = optaxclip.metrics(clipper.update(grads, clipper.init(grads))[1])
    assert found["clip/clipped"] == 1
    if shrink is optaxclip.shrinks.drop:
        assert found["clip/norm_after"] == 0 and found["clip/factor"] == 0
        return
    np.testing.assert_allclose(found["clip/norm_after"], limit, rtol=1e-6)
    assert 0 < found["clip/factor"] < np.inf


def test_64_bit_norms_are_right_after_clipping_as_well():
    with jax.enable_x64(True):
        grads = np.array([1e300, 0.0])
        clipper = optaxclip.clip_by_global_norm(3.0)
        found = optaxclip.metrics(clipper.update(grads, clipper.init(grads))[1])
    np.testing.assert_allclose(found["clip/norm_after"], 3.0, rtol=1e-6)
    np.testing.assert_allclose(found["clip/norm_before"], 1e300, rtol=1e-6)
    assert float(found["clip/factor"]) > 0


def test_tensor_clippers_are_told_by_leaf_path():
    numbers = optaxclip.metrics(
        after(optaxclip.clip_by_tensor_norm({"a": 1.0, "b": 2.0}), GRADS)
    )
    assert float(numbers["clip/norm_before/a"]) == pytest.approx(5.0) and float(
        numbers["clip/norm_before/b/c"]
    ) == pytest.approx(0.5)
    assert (
        float(numbers["clip/limit/b/c"]) == 2.0
        and float(numbers["clip/clipped_count/b/c"]) == 0
    )


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
    inside = optax.chain(
        optax.masked(clipper(1.0), {"a": True, "b": False}), optax.scale(1.0)
    )
    deep = optax.MultiSteps(
        optax.apply_if_finite(optax.partition({"x": inside}, {"a": "x", "b": "x"}), 2),
        1,
    )
    numbers = jax.jit(lambda state: optaxclip.metrics(state))(after(deep, GRADS))
    assert float(numbers["clip/x/norm_before"]) == pytest.approx(5.0)
    injected = optax.inject_hyperparams(clipper)(
        max_norm=optax.linear_schedule(2.0, 1.0, 10)
    )
    assert float(
        optaxclip.metrics(after(injected, GRADS))["clip/limit"]
    ) == pytest.approx(2.0)


def test_metrics_number_clippers_within_each_title():
    twice = optax.chain(
        optaxclip.clip_by_global_norm(1.0), optaxclip.clip_by_global_norm(2.0)
    )
    state = optax.partition({"a": twice, "b": twice}, {"x": "a", "y": "b"}).init(
        {"x": jnp.ones(2), "y": jnp.ones(2)}
    )
    assert {name for name in optaxclip.metrics(state) if "limit" in name} == {
        f"{prefix}/{title}/limit" for prefix in ("clip", "clip_2") for title in "ab"
    }


def test_metrics_name_the_whole_way_through_a_skipping_optimizer():
    clipper = optaxclip.clip_by_global_norm(1.0)
    inner = optax.named_chain(("inner", clipper), ("sgd", optax.sgd(1.0)))
    state = optax.named_chain(("outer", optaxclip.skip_nonfinite(inner))).init(
        jnp.ones(2)
    )
    assert {"skip/outer/norm", "clip/outer/inner/norm_before"} <= optaxclip.metrics(
        state
    ).keys()
    twice = optax.named_chain(
        (
            "first",
            optaxclip.skip_nonfinite(
                optax.named_chain(("second", optaxclip.skip_nonfinite(inner)))
            ),
        )
    )
    assert "clip/first/second/inner/norm_before" in optaxclip.metrics(
        twice.init(jnp.ones(2))
    )


def test_two_places_that_read_alike_have_two_rows():
    state = optaxclip.clip_by_tensor_norm(1.0).init(
        {"a/b": jnp.ones(2), "a": {"b": jnp.ones(2)}, "c": jnp.ones(2)}
    )
    assert {name for name in optaxclip.metrics(state) if "limit" in name} == {
        "clip/limit/['a/b']",
        "clip/limit/['a']['b']",
        "clip/limit/c",
    }


@pytest.mark.slow
def test_the_numbers_of_a_norm_without_jit_are_one_program():
    grads = {"w": jnp.full((7, 13), 3.0), "v": jnp.full((5, 13), 3.0)}
    clipper = optaxclip.clip_by_unitwise_norm(1.0)
    _, state = clipper.update(grads, clipper.init(grads))
    with count_compilations() as compiled:
        found = optaxclip.metrics(state)
    assert len(compiled) <= 1  # none where another test had the same shapes
    assert [name.split("/")[1] for name in found][:4] == [
        "norm_before",
        "limit",
        "factor",
        "norm_after",
    ]


@pytest.mark.parametrize(
    "optimizer",
    [
        optaxclip.clip_by_global_norm(1.0),
        optaxclip.clip_by_unitwise_norm(optaxclip.rules.z_score()),
        optaxclip.skip_spikes(
            optax.chain(optaxclip.clip_by_global_norm(1.0), optax.sgd(1.0)), 10.0
        ),
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
    clipper = optaxclip.clip_by_tensor_norm(limits, stacked=stacked)
    _, state = clipper.update(grads, clipper.init(grads))
    eager = optaxclip.metrics(state, **options)
    jitted = jax.jit(lambda state: optaxclip.metrics(state, **options))(state)
    assert eager.keys() == jitted.keys()
    for name, value in eager.items():
        assert jitted[name].dtype == jnp.float32 and jitted[name].shape == ()
        np.testing.assert_array_equal(jitted[name], value, err_msg=name)


CLIPPER = optaxclip.clip_by_global_norm(1.0)


def keys(optimizer, name="limit"):
    found = optaxclip.metrics(optimizer.init({"w": jnp.ones(2)}), only=name)
    return list(found)


def test_the_first_keeps_its_keys_when_a_second_is_added():
    assert keys(optax.chain(CLIPPER)) == ["clip/limit"]
    assert keys(optax.chain(CLIPPER, optax.sgd(0.1), CLIPPER)) == [
        "clip/limit",
        "clip_2/limit",
    ]


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
    clipper = optaxclip.clip_by_tensor_norm(1.0, stacked=stacked)
    return clipper.update(STACKED, clipper.init(STACKED))[1]


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
    clipper = optaxclip.clip_by_tensor_norm(1.0, stacked={"w": 1, "w/0": None})
    _, state = clipper.update(grads, clipper.init(grads))
    assert len(state.by_name()) == 2
    for read in (state.by_name, lambda **options: optaxclip.metrics(state, **options)):
        with pytest.raises(ValueError, match=r"layers=True: a leaf of .* 'w/0'"):
            read(layers=True)
