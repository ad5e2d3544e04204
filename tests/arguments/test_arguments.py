"""Bad input is refused with the call, the argument and the value."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip import clip_by, rules
from optaxclip.dropin import torch_style
from optaxclip.rules import constant
from tests.arguments.refusals import TREE, refused

MAX_NORM = {
    "clip_by_global_norm": optaxclip.clip_by_global_norm,
    "clip_by_tensor_norm": optaxclip.clip_by_tensor_norm,
    "clip_by_average_norm": optaxclip.clip_by_average_norm,
    "clip_by_unitwise_norm": optaxclip.clip_by_unitwise_norm,
    "clip_by_group_norm": lambda limit: optaxclip.clip_by_group_norm(limit, "all"),
}


@pytest.mark.parametrize("name", MAX_NORM)
@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (-1.0, ValueError, "must be at least 0, got -1.0."),
        (np.float32(-2), ValueError, "must be at least 0, got "),
        (jnp.float32(-2), ValueError, "must be at least 0, got "),
        (math.nan, ValueError, "must not be NaN, got nan."),
        (True, TypeError, "must be a real number, got True."),
        ("1.0", TypeError, "must be a real number, got '1.0'."),
        (1j, TypeError, "must be a real number, got 1j."),
    ],
)
def test_a_limit_that_can_not_be(name, value, error, text):
    with pytest.raises(error, match=re.escape(f"{name}: max_norm {text}")):
        MAX_NORM[name](value)


@pytest.mark.parametrize("value", [1e39, np.float64(1e39), np.array([1e39])])
@pytest.mark.parametrize("name", MAX_NORM)
def test_a_limit_that_float32_cannot_hold_is_refused(name, value):
    text = (
        f"{name}: max_norm must be at most 3.40282e+38 in size, the largest number of "
        f"float32, or inf for no limit, got {value!r}."
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        MAX_NORM[name](value)
    with jax.enable_x64(True):
        MAX_NORM[name](value)


BEYOND = {
    "clip_by_group_norm: max_norm": lambda x: optaxclip.clip_by_group_norm(
        {"a": x, "b": 1.0}, lambda tree: {"w": "a", "b": "b"}
    ),
    "adaptive_grad_clip: clipping": optaxclip.adaptive_grad_clip,
    "share_of_params: floor": lambda x: optaxclip.rules.share_of_params(1.0, x),
    "minimum: rules[1]": lambda x: optaxclip.rules.minimum(1.0, x),
    "warm_up: before": lambda x: optaxclip.rules.warm_up(3, x, 1.0),
    "growth: rate": optaxclip.rules.growth,
    "adagc: max_norm": lambda x: optaxclip.adagc(max_norm=x),
    "clippy: absolute": lambda x: optaxclip.clippy(absolute=x),
    "larc: trust": lambda x: optaxclip.larc(0.1, trust=x),
    "clipped_grad: max_norm": lambda x: optaxclip.clipped_grad(jnp.vdot, x),
    "clip_cotangent: max_norm": lambda x: optaxclip.clip_cotangent(1.0, max_norm=x),
    "clip_grad_norm: max_norm": lambda x: torch_style.clip_grad_norm(jnp.ones(2), x),
}


@pytest.mark.parametrize("argument", BEYOND)
def test_what_limits_are_made_of_is_refused_beyond_float32(argument):
    text = f"{argument} must be at most 3.40282e+38 in size, "
    with pytest.raises(ValueError, match=re.escape(text)):
        BEYOND[argument](1e39)
    BEYOND[argument](np.inf)


def update(clipper, tree=TREE, params=None):
    return clipper.update(tree, clipper.init(tree), params)


def test_other_limits_are_named_as_their_call_names_them():
    refused(
        ValueError,
        "clip_by_tensor_rms: max_rms must be at least 0, got -1.",
        lambda: optaxclip.clip_by_tensor_rms(-1),
    )
    refused(
        ValueError,
        "clip_by_block_rms: threshold must be at least 0, got -1.",
        lambda: optaxclip.clip_by_block_rms(-1),
    )
    refused(
        ValueError,
        "adaptive_grad_clip: clipping must be at least 0, got -1.",
        lambda: optaxclip.adaptive_grad_clip(-1),
    )
    refused(
        TypeError,
        "adaptive_grad_clip: clipping must be a real number, got 'x'.",
        lambda: optaxclip.adaptive_grad_clip("x"),
    )
    text = "^clip_by_value: max_value must be a real number, got growth"
    for rule in (rules.growth(1.01), {"w": rules.growth(1.01)}):
        with pytest.raises(TypeError, match=text):
            optaxclip.clip_by_value(rule)
    refused(
        ValueError,
        "adaptive_grad_clip: eps must be at least 0, got -1.",
        lambda: optaxclip.adaptive_grad_clip(0.1, -1),
    )
    refused(
        ValueError,
        "clip_by_global_norm: eps must be at least 0, got -1.",
        lambda: optaxclip.clip_by_global_norm(1.0, eps=-1),
    )
    refused(
        ValueError,
        "clip_by_global_norm: eps must be a scalar, got an array of shape (3,).",
        lambda: optaxclip.clip_by_global_norm(1.0, eps=jnp.ones(3)),
    )
    for mesh_axes in (np.ones(2), {"w": np.ones(2)}):
        refused(
            TypeError,
            "clip_by_global_norm: mesh_axes must be 'auto', None, names of mesh axes, "
            "or a tree of PartitionSpecs, got array([1., 1.]).",
            lambda axes=mesh_axes: optaxclip.clip_by_global_norm(1.0, mesh_axes=axes),
        )
    refused(
        ValueError,
        "clip_by_value: max_value must be at least 0, got -1.",
        lambda: optaxclip.clip_by_value(-1),
    )
    refused(
        ValueError,
        "clip_by_value: min_value must not be NaN, got nan.",
        lambda: optaxclip.clip_by_value(1, math.nan),
    )
    refused(
        ValueError,
        "clip_by_value: min_value must be at most max_value, got min_value=2 and "
        "max_value=1.",
        lambda: optaxclip.clip_by_value(1, 2),
    )


@pytest.mark.parametrize("ord", [0, -1, math.nan, "l2", True])
def test_an_order_that_can_not_be(ord):
    text = f"ord must be a number above 0, math.inf, 'rms' or 'average', got {ord!r}."
    refused(
        ValueError,
        f"clip_by_global_norm: {text}",
        lambda: optaxclip.clip_by_global_norm(1.0, ord=ord),
    )
    refused(
        ValueError, f"global_norm: {text}", lambda: optaxclip.global_norm(TREE, ord=ord)
    )


def test_an_unknown_policy():
    text = (
        "clip_by_global_norm: nonfinite must be one of 'propagate', 'zero', 'raise', "
        "got 'skip'."
    )
    refused(
        ValueError, text, lambda: optaxclip.clip_by_global_norm(1.0, nonfinite="skip")
    )


def test_agc_without_params():
    text = (
        "adaptive_grad_clip compares gradients with weights: call update(grads, state, "
        "params)."
    )
    refused(ValueError, text, lambda: update(optaxclip.adaptive_grad_clip(0.1)))


def test_agc_over_axes_with_per_tensor():
    refused(
        ValueError,
        "adaptive_grad_clip: axis=0 is for units, and per_tensor=True has none",
        lambda: optaxclip.adaptive_grad_clip(0.1, axis=0, per_tensor=True),
    )


def test_labels_that_miss_a_leaf():
    refused(
        ValueError,
        "clip_by_group_norm: labels has no value for the leaf 'b': it has 'w'.",
        lambda: update(optaxclip.clip_by_group_norm(1.0, {"w": "x"})),
    )


def test_a_group_without_a_limit():
    clipper = optaxclip.clip_by_group_norm({"x": 1.0}, {"w": "x", "b": "y"})
    refused(
        ValueError,
        "clip_by_group_norm: max_norm has no value for the label 'y': it has 'x'.",
        lambda: update(clipper),
    )


def test_limits_that_do_not_fit_the_tree():
    refused(
        ValueError,
        "clip_by_tensor_norm: max_norm has no value for the leaf 'b': it has 'w'.",
        lambda: update(optaxclip.clip_by_tensor_norm({"w": 1.0})),
    )
    wrong = {"w": 1.0, "b": 1.0, "typo": 2.0}
    refused(
        ValueError,
        "clip_by_tensor_norm: max_norm has a value for 'typo', but the updates have no "
        "such part: they have 'b', 'w'.",
        lambda: update(optaxclip.clip_by_tensor_norm(wrong)),
    )
    refused(
        ValueError,
        "clip_by_tensor_norm: max_norm has no value for the leaf 'b'",
        lambda: update(optaxclip.clip_by_tensor_norm({"w": 1.0, "b": {"c": 1.0}})),
    )


def test_a_limit_whose_shape_does_not_fit():
    text = (
        "clip_by_global_norm: max_norm must be a number for each norm: its shape (2,) "
        "does not fit norms of shape ()."
    )
    refused(
        ValueError,
        text,
        lambda: update(optaxclip.clip_by_global_norm(np.array([1.0, 2.0]))),
    )


def test_axes_and_stacked_layers_that_a_leaf_does_not_have():
    refused(
        ValueError,
        "unitwise_norm: axis=1 does not fit the leaf 'b', a tensor of rank 1",
        lambda: optaxclip.unitwise_norm(TREE, axis=1),
    )
    refused(
        ValueError,
        "unitwise_norm: axis must be given for the leaf 'x' of rank 6",
        lambda: optaxclip.unitwise_norm({"x": jnp.ones((2, 2, 1, 1, 1, 1))}),
    )
    refused(
        ValueError,
        "tensor_norm: stacked must be a number of leading axes, from 0 to 1 for the "
        "leaf 'b' of shape (3,), or a tuple of its axes, got 2.",
        lambda: optaxclip.tensor_norm(TREE, stacked=2),
    )
    refused(
        ValueError,
        "tensor_norm: stacked has no value for the leaf 'b'",
        lambda: optaxclip.tensor_norm(TREE, stacked={"w": 1}),
    )


def test_value_bounds_that_do_not_fit():
    refused(
        ValueError,
        "clip_by_value: a bound of shape (2,) does not fit the leaf 'b' of shape (3,).",
        lambda: update(optaxclip.clip_by_value(np.array([1.0, 2.0]))),
    )
    refused(
        TypeError,
        "the leaf 'z' is complex and has no order: give one bound, for its modulus.",
        lambda: update(optaxclip.clip_by_value(1.0, -2.0), {"z": jnp.array([1j])}),
    )


def test_an_order_that_is_traced_says_what_to_do():
    injected = optax.inject_hyperparams(optaxclip.clip_by_global_norm)(
        max_norm=1.0, ord=1.0
    )
    state = injected.init(TREE)

    with pytest.raises(TypeError, match="name it in static_args"):
        jax.jit(injected.update)(TREE, state, TREE)


@pytest.mark.parametrize(
    ("build", "argument"),
    [
        (
            partial(optaxclip.clip_by_tensor_norm, 1.0, stacked=jnp.asarray(1)),
            "clip_by_tensor_norm: stacked",
        ),
        (
            partial(optaxclip.clip_by_unitwise_norm, 1.0, axis=jnp.asarray(0)),
            "clip_by_unitwise_norm: axis",
        ),
        (
            partial(
                optaxclip.adaptive_grad_clip, 1.0, stacked={"w": jnp.asarray(0), "b": 0}
            ),
            "adaptive_grad_clip: stacked",
        ),
        (
            partial(optaxclip.clip_by_spectral_norm, 1.0, columns=jnp.asarray(1)),
            "clip_by_spectral_norm: columns",
        ),
    ],
)
def test_numbers_of_axes_are_no_arrays(build, argument):
    refused(
        TypeError,
        f"{argument} must be known when the clipper is built, got Array(",
        build,
    )


def test_an_order_may_be_an_array_that_is_known():
    for order in (jnp.float32(1.0), np.float32(1.0)):
        assert np.isclose(
            update(optaxclip.clip_by_global_norm(1.0, ord=order))[1].norm,
            optaxclip.global_norm(TREE, ord=1),
        )


# Arrays made here are known inside jit too, though what is done with them is traced.
YES, TWO, THREE = jnp.array(True), jnp.float32(2.0), jnp.int32(3)
OF_KNOWN_ARRAYS = {
    "corrected": lambda: optaxclip.rules.ema_ratio(corrected=YES),
    "current": lambda: optaxclip.rules.windowed_mean(2.0, 4, current=YES),
    "raise_small": lambda: optaxclip.rules.ema_band(raise_small=YES),
    "window": lambda: optaxclip.rules.windowed_quantile(0.5, THREE),
    "shrink": lambda: optaxclip.clip_by_global_norm(
        1.0, shrink=optaxclip.shrinks.smooth(TWO)
    ),
    "mean": lambda: optaxclip.clipped_grad(lambda w, x: w * x, 1.0, mean=YES)(
        jnp.float32(1.0), jnp.ones(3)
    ),
}


@pytest.mark.parametrize("argument", OF_KNOWN_ARRAYS)
def test_options_may_be_arrays_that_are_known(argument):
    @jax.jit
    def number(x):
        OF_KNOWN_ARRAYS[argument]()
        return x

    assert number(1.0) == 1


def test_a_share_of_the_weights_is_named_as_the_call_names_it():
    for text, build in {
        "adaptive_grad_clip: clipping": lambda: optaxclip.adaptive_grad_clip(-1.0),
        "adaptive_grad_clip: eps": lambda: optaxclip.adaptive_grad_clip(0.1, -1.0),
        "constant: limit": lambda: constant(-1.0),
        "share_of_params: share": lambda: optaxclip.rules.share_of_params(-1.0),
        "share_of_params: floor": lambda: optaxclip.rules.share_of_params(
            lambda step: 1.0, -1.0
        ),
        "maximum: rules[1]": lambda: optaxclip.rules.maximum(1.0, -1.0),
        "warm_up: after": lambda: optaxclip.rules.warm_up(1, 1.0, -1.0),
        "clip_by_tensor_rms: max_rms": lambda: optaxclip.clip_by_tensor_rms(-1.0),
        "clip_by_block_rms: threshold": lambda: optaxclip.clip_by_block_rms(-1.0),
        "clip_by: eps": lambda: clip_by(optaxclip.global_norm, constant(1.0), eps=-1.0),
    }.items():
        text = re.escape(f"{text} must be at least 0, got -1.0")
        with pytest.raises(ValueError, match=f"^{text}"):
            build()


def test_errors_of_a_limit_name_it_as_the_call_does():
    tree = {"w": jnp.ones(2)}
    for text, clipper in {
        "clip_by_tensor_rms: max_rms has a value for 'v'": optaxclip.clip_by_tensor_rms(
            {"w": 1.0, "v": 1.0}
        ),
        "clip_by_block_rms: threshold has a value for 'v'": optaxclip.clip_by_block_rms(
            {"w": 1.0, "v": 1.0}
        ),
        "adaptive_grad_clip: clipping must be a number for each norm": (
            optaxclip.adaptive_grad_clip(jnp.ones(3))
        ),
        "clip_by_group_norm: max_norm has no value": optaxclip.clip_by_group_norm(
            {"x": 1.0}, "y"
        ),
    }.items():
        with pytest.raises(ValueError, match=rf"^{text}"):
            clipper.update(tree, clipper.init(tree), tree)


def test_bad_options_of_groups_are_refused_before_the_first_step():
    for text, options in {
        "max_norm must be at least 0": {"max_norm": -1.0},
        "ord must be a number": {"ord": -1},
        "nonfinite must be one of": {"nonfinite": "x"},
    }.items():
        with pytest.raises(ValueError, match=rf"^clip_by_group_norm: {text}"):
            optaxclip.clip_by_group_norm(**{"max_norm": 1.0, "labels": "all"} | options)


@pytest.mark.slow
def test_a_long_tree_of_limits_is_looked_up_in_linear_time():
    tree = {f"layer{place}": {"w": jnp.ones(()), "hole": None} for place in range(500)}
    count = 0

    class Key(str):
        def __eq__(self, other):
            nonlocal count
            count += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    limits = {Key(layer): {"w": 1.0, "hole": 2.0} for layer in tree}
    state = optaxclip.clip_by_tensor_norm(limits).init(tree)
    assert state.norm.shape == (500,)
    # Of each limit with each leaf it would be 250,000.
    assert count < 100 * 500


@pytest.mark.parametrize(
    "build",
    [optaxclip.clip_by_global_norm, lambda limit: optaxclip.zclip(cap=limit)],
    ids=["global", "cap"],
)
def test_one_norm_takes_one_limit(build):
    with pytest.raises(TypeError, match=r"must be a real number, got \{'w': 1.0\}"):
        build({"w": 1.0})


def test_large_ints_are_limits_and_those_beyond_float32_are_named():
    x = jnp.array([3e20, 4e20])
    clipper = optaxclip.clip_by_global_norm(10**20)
    updates, state = clipper.update(x, clipper.init(x))
    assert state.limit == np.float32(1e20)
    np.testing.assert_allclose(updates, np.float32([6e19, 8e19]), rtol=1e-6)
    clipper = optaxclip.clip_by_value(10**20, -(10**20))
    updates, _ = clipper.update(-x, clipper.init(x))
    np.testing.assert_array_equal(updates, np.float32([-1e20, -1e20]))
    for name, build in {
        "clip_by_global_norm: max_norm": optaxclip.clip_by_global_norm,
        "clip_by_tensor_norm: max_norm": optaxclip.clip_by_tensor_norm,
        "clip_by_value: max_value": optaxclip.clip_by_value,
    }.items():
        with pytest.raises(ValueError, match=rf"^{name} must be at most 3.40282e\+38"):
            build(2**400)
    with pytest.raises(ValueError, match=r"^clip_by_value: min_value must .* got -258"):
        optaxclip.clip_by_value(1.0, -(2**400))
    with jax.enable_x64(True):
        optaxclip.clip_by_value(2**400)
