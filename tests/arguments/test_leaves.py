"""A leaf that JAX cannot hold is refused by name, where it would pass unclipped."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip import dropin
from tests.methods import ALONE, METHODS

# From json, pandas and pickles. NumPy makes them of numbers of different kinds too.
ARRAYS = {
    "objects": np.array([3.0, 4.0], object),
    "strings": np.array(["3", "4"]),
    "bytes": np.array([b"3", b"4"]),
    "times": np.array(["2020-01-01", "2020-01-02"], "datetime64[D]"),
    "durations": np.array([3, 4], "timedelta64[s]"),
}
OTHERS = {"b": jnp.array([1.0, 2.0])}
WEIGHTS = {"w": jnp.ones(2), **OTHERS}
TAKEN = {
    name: (method.function.__name__, method.make)
    for name, method in METHODS.items()
    if method.leaves != ALONE and name != "clip_grads"
}


def says(call, array):
    # A wrapper of clippers leaves `init` to the one that it wraps.
    if call in ("carry_clipped", "constrain"):
        call = f"{call}|clip_by_global_norm"
    got = re.escape(repr(array))
    return (
        rf"^({call}): the leaf 'w' must be an array or a number, got {got}: hand over"
    )


@pytest.mark.parametrize("kind", ARRAYS)
@pytest.mark.parametrize("method", TAKEN)
def test_updates_that_jax_cannot_hold_are_refused(method, kind):
    call, make = TAKEN[method]
    made, array = make(), ARRAYS[kind]
    state = made.init(WEIGHTS)
    with pytest.raises(TypeError, match=says(call, array)):
        made.update({"w": array, **OTHERS}, state, WEIGHTS)


# Neither bounds of elements nor a reset of moments ask what the weights are.
FREE = ("clip_by_value", "clip", "reset_momentum")


@pytest.mark.parametrize("method", [name for name in TAKEN if name not in FREE])
def test_weights_that_jax_cannot_hold_are_refused(method):
    call, make = TAKEN[method]
    array = ARRAYS["objects"]
    with pytest.raises(TypeError, match=says(call, array)):
        make().init({"w": array, **OTHERS})


ONCE = {
    "global_norm": optaxclip.global_norm,
    "tensor_norm": optaxclip.tensor_norm,
    "unitwise_norm": optaxclip.unitwise_norm,
    "group_norm": lambda tree: optaxclip.group_norm(tree, "all"),
    "spectral_norm": optaxclip.spectral_norm,
    "clip_grads": lambda tree: optaxclip.clip_grads(tree, 1.0),
    "clip_cotangent": lambda tree: optaxclip.clip_cotangent(tree, max_norm=1.0),
    "scale_cotangent": lambda tree: optaxclip.scale_cotangent(tree, 1.0),
    "rescale": lambda tree: optaxclip.rescale(tree, 1.0, 1.0),
    "clip_grad_norm": lambda tree: dropin.torch_style.clip_grad_norm(tree, 1.0),
    "clip_grad_value": lambda tree: dropin.torch_style.clip_grad_value(tree, 1.0),
    "clip_by_norm": lambda tree: dropin.tensorflow_style.clip_by_norm(tree["w"], 1.0),
    "clipped_grad": lambda tree: optaxclip.clipped_grad(
        lambda tree, x: jnp.sum(tree["b"] * x), 1.0
    )(tree, jnp.ones(3)),
}


@pytest.mark.parametrize("function", ONCE)
def test_trees_that_jax_cannot_hold_are_refused(function):
    with pytest.raises(TypeError) as caught:
        ONCE[function]({"w": ARRAYS["objects"], **OTHERS})
    assert str(caught.value).startswith(f"{function}: the leaf ")


# What configurations hold beside weights. JAX reads each as the dtype float32.
DTYPES = ["float32", np.dtype("float32"), jnp.float32, float]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_among_arrays_are_refused(dtype):
    tree = {"dtype": dtype, **OTHERS}
    clipper = optaxclip.clip_by_global_norm(1.0)
    calls = {
        "global_norm": lambda: optaxclip.global_norm(tree),
        "clip_grads": lambda: optaxclip.clip_grads(tree, 1.0),
        "clip_by_global_norm": lambda: clipper.init(tree),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=rf"^{name}: the leaf 'dtype' must be an"):
            call()


def test_a_dtype_of_a_model_is_no_weight_of_a_skipping_optimizer():
    params = {"dtype": jnp.float32, **OTHERS}
    optimizer = optaxclip.skip_nonfinite(optax.sgd(0.1))
    updates, _ = optimizer.update(OTHERS, optimizer.init(OTHERS), params)
    np.testing.assert_allclose(updates["b"], [-0.1, -0.2], rtol=1e-6)


PASSES = {
    "float0": np.zeros(2, jax.dtypes.float0),
    "a key": jax.random.key(0),
    "bool": np.array([True, False]),
    "int64": np.array([3, 4]),
    "bfloat16": jnp.ones(2, jnp.bfloat16),
    "int4": jnp.ones(2, jnp.int4),
    "no numbers": np.array([]),
}


@pytest.mark.parametrize("kind", PASSES)
def test_leaves_that_do_not_count_pass(kind):
    tree = {"w": PASSES[kind], **OTHERS}
    clipped, _ = optaxclip.clip_grads(tree, 100.0)
    assert clipped["w"].dtype == PASSES[kind].dtype
    optaxclip.skip_nonfinite(optax.identity()).init(tree)


CLIPPERS = {
    "clip_by_global_norm": optaxclip.clip_by_global_norm(1.0),
    "record_norm": optaxclip.record_norm(),
}


@pytest.mark.parametrize("call", CLIPPERS)
def test_a_clipper_warns_of_integers_alone(call):
    """Also one that only measures: its norm would be 0."""
    clipper = CLIPPERS[call]
    updates = {"a": None, "w": jnp.array([3, 4])}
    text = f"^{call}: no leaf counts, .* The leaf 'w' is int32: make it float32"
    with pytest.warns(UserWarning, match=text):
        clipper.update(updates, clipper.init(updates))
