"""Bad input is refused with the call, the argument and the value."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip.dropin import keras, torch_style
from tests.methods import METHODS

MAX_NORM = {
    "clip_by_global_norm": optaxclip.clip_by_global_norm,
    "clip_by_tensor_norm": optaxclip.clip_by_tensor_norm,
    "clip_by_average_norm": optaxclip.clip_by_average_norm,
    "clip_by_unitwise_norm": optaxclip.clip_by_unitwise_norm,
    "clip_by_group_norm": lambda limit: optaxclip.clip_by_group_norm(limit, "all"),
}


@pytest.mark.parametrize("name", MAX_NORM)
def test_a_limit_that_float32_cannot_hold_is_refused(name):
    # One norm takes one limit, and no array of them.
    array = np.array(1e39) if name == "clip_by_global_norm" else np.array([1e39])
    for value in (1e39, np.float64(1e39), array):
        text = (
            f"{name}: max_norm must be at most 3.40282e+38 in size, the largest number "
            f"of float32, or inf for no limit, got {value!r}."
        )
        with pytest.raises(ValueError, match=re.escape(text)):
            MAX_NORM[name](value)
        with jax.enable_x64(True):
            MAX_NORM[name](value)


def test_a_bound_below_all_of_float32_is_refused():
    text = "clip_by_value: min_value must be at most 3.40282e+38 in size, "
    with pytest.raises(ValueError, match=re.escape(text)):
        optaxclip.clip_by_value(1.0, -1e39)
    optaxclip.clip_by_value(1.0, -np.inf)


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


def test_what_limits_are_made_of_is_refused_beyond_float32():
    for argument, build in BEYOND.items():
        text = f"{argument} must be at most 3.40282e+38 in size, "
        with pytest.raises(ValueError, match=re.escape(text)):
            build(1e39)
        build(np.inf)


def test_a_number_beyond_its_range_and_float32_is_told_of_its_range():
    with pytest.raises(ValueError, match=r"^spam: decay must be at most 1, got"):
        optaxclip.spam(decay=1e39)


def test_an_order_that_is_traced_says_what_to_do():
    make = optax.inject_hyperparams(optaxclip.clip_by_global_norm)
    injected, tree = make(max_norm=1.0, ord=1.0), {"w": jnp.ones((2, 3))}
    state = injected.init(tree)
    with pytest.raises(TypeError, match="name it in static_args"):
        jax.jit(injected.update)(tree, state, tree)


@pytest.mark.parametrize(
    "make",
    [
        lambda flag: optaxclip.clip_by_value(1.0, count=flag),
        lambda flag: optaxclip.adaptive_grad_clip(1.0, per_tensor=flag),
    ],
)
def test_a_flag_that_is_traced_says_what_to_do(make):
    with pytest.raises(TypeError, match="name it in static_args"):
        jax.eval_shape(make, True)


def test_an_order_may_be_an_array_of_one_number():
    for order in (np.array(3), np.float32(3.0), jnp.array(3.0)):
        norm = optaxclip.global_norm(jnp.ones(4), ord=order)
        np.testing.assert_allclose(norm, 4 ** (1 / 3), 1e-6)


@pytest.mark.parametrize(
    "order",
    [
        np.array([1, 2]),
        np.array([2.0]),
        np.array("rms"),
        np.array(0),
        np.array(True),
        jnp.array(True),
        True,
        "max",
    ],
)
def test_an_order_that_is_no_number_above_0_is_refused(order):
    text = (
        f"^global_norm: ord must be a number above 0, .* got {re.escape(repr(order))}"
    )
    with pytest.raises(ValueError, match=text):
        optaxclip.global_norm(jnp.ones(4), ord=order)


def test_true_and_false_are_no_numbers_of_axes():
    builders = {
        "stacked": partial(optaxclip.clip_by_tensor_norm, 1.0),
        "axis": partial(optaxclip.clip_by_unitwise_norm, 1.0),
        "columns": partial(optaxclip.clip_by_spectral_norm, 1.0),
    }
    for option, build in builders.items():
        for value in (True, False):
            text = f"{option} must be whole numbers, not bools, got {value}"
            with pytest.raises(TypeError, match=text):
                build(**{option: value})


LEAF = jnp.ones((2, 3, 4))
AXES = {
    "tensor_norm: stacked": lambda x: optaxclip.tensor_norm(LEAF, stacked=x),
    "unitwise_norm: stacked": lambda x: optaxclip.unitwise_norm(LEAF, stacked=x),
    "unitwise_norm: axis": lambda x: optaxclip.unitwise_norm(LEAF, axis=x),
    "spectral_norm: stacked": lambda x: optaxclip.spectral_norm(LEAF, stacked=x),
    "spectral_norm: columns": lambda x: optaxclip.spectral_norm(LEAF, columns=x),
}


def one(path, leaf):
    return True


def none(path, leaf):
    return False


@pytest.mark.parametrize("value", [True, (True,), [True], jnp.array(1), np.array(1)])
@pytest.mark.parametrize("argument", AXES)
def test_norms_refuse_bools_and_arrays_as_axes(argument, value):
    with pytest.raises(TypeError, match=f"^{argument} must be "):
        AXES[argument](value)


@pytest.mark.parametrize("function", [one, none])
@pytest.mark.parametrize("argument", ["unitwise_norm: axis", "spectral_norm: columns"])
def test_functions_of_axes_may_return_no_bool(argument, function):
    with pytest.raises(TypeError, match=f"^{argument} must be "):
        AXES[argument](function)


def test_a_function_may_say_whether_a_leaf_is_stacked():
    tree = {"blocks": jnp.ones((3, 4)), "embed": jnp.ones(4)}
    norms = optaxclip.tensor_norm(
        tree, stacked=lambda path, leaf: path.startswith("blocks")
    )
    np.testing.assert_allclose(norms["blocks"], [[2.0]] * 3)
    np.testing.assert_allclose(norms["embed"], 2.0)


def test_a_tuple_of_axes_may_not_hold_a_bool():
    text = r"stacked must be whole numbers, not bools, got \(True,\)\."
    with pytest.raises(TypeError, match=text):
        optaxclip.clip_by_tensor_norm(1.0, stacked=(True,))


def test_an_axis_may_be_a_number_of_numpy_after_a_tuple_of_axes():
    grads = jnp.array([[3.0, 4.0], [0.3, 0.4]])
    for axis in ((0, 1), np.int64(1)):
        clipper = optaxclip.clip_by_unitwise_norm(1.0, axis=axis)
        clipped, _ = clipper.update(grads, clipper.init(grads))
    np.testing.assert_allclose(clipped, [[0.6, 0.8], [0.3, 0.4]], rtol=1e-6)


# Arrays made here are known inside jit too, though what is done with them is traced.
YES, TWO, THREE = jnp.array(True), jnp.float32(2.0), jnp.int32(3)
OF_KNOWN_ARRAYS = {
    "corrected": lambda: optaxclip.rules.ema_ratio(corrected=YES),
    "current": lambda: optaxclip.rules.windowed_mean(2.0, 4, current=np.bool_(1)),
    "raise_small": lambda: optaxclip.rules.ema_band(raise_small=1),
    "window": lambda: optaxclip.rules.windowed_quantile(0.5, THREE),
    "shrink": lambda: optaxclip.clip_by_global_norm(
        1.0, shrink=optaxclip.shrinks.smooth(TWO)
    ),
    "mean": lambda: optaxclip.clipped_grad(lambda w, x: w * x, 1.0, mean=YES)(
        jnp.float32(1.0), jnp.ones(3)
    ),
}


def test_options_may_be_arrays_that_are_known():
    @jax.jit
    def number(x):
        for build in OF_KNOWN_ARRAYS.values():
            build()
        return x

    assert number(1.0) == 1


def test_large_ints_are_limits_and_those_beyond_float32_are_named():
    x = jnp.array([3e20, 4e20])
    clipper = optaxclip.clip_by_global_norm(10**20)
    updates, state = clipper.update(x, clipper.init(x))
    assert state.limit == np.float32(1e20)
    np.testing.assert_allclose(updates, np.float32([6e19, 8e19]), rtol=1e-6)
    clipper = optaxclip.clip_by_value(10**20, -(10**20))
    updates, _ = clipper.update(-x, clipper.init(x))
    np.testing.assert_array_equal(updates, np.float32([-1e20, -1e20]))
    with pytest.raises(ValueError, match=r"^clip_by_value: min_value must .* got -258"):
        optaxclip.clip_by_value(1.0, -(2**400))
    with jax.enable_x64(True):
        optaxclip.clip_by_value(2**400)


OF_GRADIENTS = {
    "grads": lambda grads: 0.1 * optaxclip.global_norm(grads),
    "updates": lambda updates: 0.1 * optaxclip.global_norm(updates),
    "gradients": lambda gradients: 0.1 * optaxclip.global_norm(gradients),
    "params": lambda params: 0.1 * optaxclip.global_norm(params),
    "tree": optaxclip.global_norm,
    "norm": lambda norm: 2.0 * norm,
}
TAKES_SCHEDULES = {
    name: method.make
    for name, method in METHODS.items()
    if method.limit is not None and method.schedules and not name.startswith("per_ex")
}
TAKES_SCHEDULES |= {
    "clip_by_tensor_norm of a tree": lambda x: optaxclip.clip_by_tensor_norm({"w": x}),
    "clip_by_value below": lambda x: optaxclip.clip_by_value(1.0, x),
    "clip_by": lambda x: optaxclip.clip_by(optaxclip.global_norm, x),
    "clip_gradients": lambda x: keras.clip_gradients(clipnorm=x),
    "growth": optaxclip.rules.growth,
    "minimum": lambda x: optaxclip.rules.minimum(1.0, x),
    "skip_spikes": lambda x: optaxclip.skip_spikes(optax.sgd(0.1), x),
    "skip_step": lambda x: optaxclip.skip_step(optax.sgd(0.1), x),
    "zclip": optaxclip.zclip,
}


@pytest.mark.parametrize("parameter", OF_GRADIENTS)
@pytest.mark.parametrize("name", TAKES_SCHEDULES)
def test_a_function_of_gradients_is_no_schedule(name, parameter):
    text = f"a schedule takes the step, and not {parameter}, got .* optaxclip.clip_by"
    with pytest.raises(TypeError, match=text):
        TAKES_SCHEDULES[name](OF_GRADIENTS[parameter])


STEPS = {
    "step": lambda step: 1.0,
    "count": optax.linear_schedule(1.0, 2.0, 9),
    "t": lambda t, scale=1.0: scale,
    "no name": lambda *args: 1.0,
    "of C": np.sqrt,
    "jitted": jax.jit(lambda step: 1.0 + step),
}


@pytest.mark.parametrize("parameter", STEPS)
@pytest.mark.parametrize("name", TAKES_SCHEDULES)
def test_functions_of_steps_are_schedules(name, parameter):
    TAKES_SCHEDULES[name](STEPS[parameter])


ONE_LIMIT = {
    "clip_by_global_norm: max_norm": optaxclip.clip_by_global_norm,
    "clip_grads: max_norm": lambda x: optaxclip.clip_grads({"w": jnp.ones(2)}, x),
    "clip_gradients: global_clipnorm": lambda x: keras.clip_gradients(
        global_clipnorm=x
    ),
}
SEVERAL = {
    "a dict": ({"w": 1.0, "b": None}, "a real number, got {'w': 1.0, "),
    "a list": ([1.0, 2.0], "a real number, got [1.0, 2.0]"),
}


@pytest.mark.parametrize("kind", SEVERAL)
@pytest.mark.parametrize("argument", ONE_LIMIT)
def test_one_norm_takes_no_tree_of_limits(argument, kind):
    limit, text = SEVERAL[kind]
    with pytest.raises(TypeError) as caught:
        ONE_LIMIT[argument](limit)
    assert str(caught.value).startswith(f"{argument} must be {text}")
