"""`metrics` finds every clipper at any depth and says what it did."""

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
    ],
)
def test_the_norm_after_clipping_is_right_at_any_distance(norm, limit, shrink):
    grads = jnp.array([norm, 0.0])
    clipper = optaxclip.clip_by_global_norm(limit, shrink=shrink)
    found = optaxclip.metrics(clipper.update(grads, clipper.init(grads))[1])
    np.testing.assert_allclose(found["clip/norm_after"], limit, rtol=1e-6)
    assert 0 < found["clip/factor"] < np.inf and found["clip/clipped"] == 1


def test_a_norm_that_a_drop_made_0_far_from_its_limit_is_0_after():
    grads = jnp.array([3e38, 0.0])
    clipper = optaxclip.clip_by_global_norm(1.0, shrink=optaxclip.shrinks.drop)
    found = optaxclip.metrics(clipper.update(grads, clipper.init(grads))[1])
    assert found["clip/norm_after"] == 0 and found["clip/factor"] == 0


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


def test_several_clippers_are_told_apart():
    chain = optax.chain(
        optaxclip.clip_by_tensor_norm(4.0), optaxclip.clip_by_global_norm(1.0)
    )
    assert {key.split("/")[0] for key in optaxclip.metrics(after(chain, GRADS))} == {
        "clip",
        "clip_2",
    }
    named = optax.named_chain(
        ("inner", optaxclip.clip_by_global_norm(4.0)),
        ("outer", optaxclip.clip_by_global_norm(1.0)),
    )
    assert {
        key.rsplit("/", 1)[0] for key in optaxclip.metrics(after(named, GRADS))
    } == {"clip/inner", "clip/outer"}


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


@pytest.mark.parametrize("consecutive", [0, 7])
def test_metrics_show_each_number_of_a_skipping_optimizer(consecutive):
    state = optaxclip.SkipState(
        *(jnp.float32(x) for x in (10, 1, 2, 3, 4, 5, 0.25, 6, consecutive)),
        *((), (), ()),
    )
    wanted = {
        "norm": 1,
        "limit": 2,
        "loss": 3,
        "loss_limit": 4,
        "skipped": int(consecutive > 0),
        "skipped_share": 0.5,
        "skipped_share_recent": 0.25,
        "skipped_count": 5,
    }
    wanted |= {"consecutive_count": consecutive, "nonfinite_count": 6}
    assert {name: float(value) for name, value in optaxclip.metrics(state).items()} == {
        f"skip/{name}": value for name, value in wanted.items()
    }


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


def test_metrics_of_many_tensors_are_the_same_under_jit():
    """Also beside a tensor that is NaN and one without a limit."""
    grads = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([jnp.nan]), "c": jnp.ones(2)}
    clipper = optaxclip.clip_by_tensor_norm({"a": 1.0, "b": 1.0, "c": None})
    _, state = clipper.update(grads, clipper.init(grads))
    eager, jitted = optaxclip.metrics(state), jax.jit(optaxclip.metrics)(state)
    assert eager.keys() == jitted.keys()
    for name, value in eager.items():
        np.testing.assert_array_equal(jitted[name], value, err_msg=name)
