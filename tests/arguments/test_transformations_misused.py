"""A transformation or its factory that is used wrongly answers in the user's words."""

import inspect
import re

import jax.numpy as jnp
import optax
import pytest

import optaxclip
from optaxclip import dropin
from tests.methods import ALONE, METHODS

GRADS = {"w": jnp.array([3.0, 4.0]), "b": jnp.array([1.0])}
# Every public function that makes a transformation, and one that it made.
MADE = {
    method.function: method.make()
    for name, method in METHODS.items()
    if method.leaves != ALONE and name != "clip_grads"
}
MADE[optaxclip.clip_by] = optaxclip.clip_by(optaxclip.global_norm, 1.0)
MADE[optaxclip.qk_clip] = optaxclip.qk_clip(100.0, queries={"q": 1}, keys={"k": 1})
MADE[dropin.keras.clip_gradients] = dropin.keras.clip_gradients(clipnorm=1.0)
MADE[dropin.tensorflow_style.clip_gradients_by_norm] = (
    dropin.tensorflow_style.clip_gradients_by_norm(optax.sgd(0.1), 1.0)
)


def name_of(function):
    return function.__name__


def test_every_function_that_makes_a_transformation_is_here():
    modules = optaxclip, dropin.keras, dropin.tensorflow_style, dropin.torch_style
    found = set()
    for module in modules:
        for function in map(vars(module).get, module.__all__):
            if "GradientTransformation" in str(
                getattr(function, "__annotations__", {}).get("return")
            ):
                found.add(function)
    assert found == MADE.keys()


@pytest.mark.parametrize("function", MADE, ids=name_of)
def test_a_transformation_is_not_called(function):
    text = "with init and update (for one tree: optaxclip.clip_grads)' object is not"
    with pytest.raises(TypeError, match=re.escape(text)):
        MADE[function](GRADS)
    # optax.inject_hyperparams takes what can be called for a schedule.
    assert not callable(MADE[function])


@pytest.mark.parametrize("function", MADE, ids=name_of)
def test_wrappers_refuse_a_function_at_once(function):
    name = function.__name__
    text = f"a transformation with init and update, got the function {name}: call it"
    with pytest.raises(TypeError, match=text):
        optaxclip.skip_nonfinite(function)


@pytest.mark.parametrize("function", MADE, ids=name_of)
def test_update_keeps_its_signature(function):
    names = list(inspect.signature(MADE[function].update).parameters)
    assert names[:3] == ["updates", "state", "params"]


SKIPPING = optaxclip.skip_step(optaxclip.clip_by_global_norm(1.0))
WARNING = {
    "update": lambda: optaxclip.clip_by_global_norm(1.0).update(jnp.arange(3), None),
    "init": lambda: SKIPPING.init(GRADS),
    "init of a chain": lambda: optax.chain(SKIPPING, optax.sgd(0.1)).init(GRADS),
}


@pytest.mark.parametrize("method", WARNING)
def test_a_warning_is_about_the_line_that_called(method):
    with pytest.warns(UserWarning) as caught:
        WARNING[method]()
    assert [warning.filename for warning in caught] == [__file__]


def test_an_error_within_an_update_stays_as_it_is():
    clipper = optaxclip.clip_by_global_norm(1.0)
    with pytest.raises(TypeError, match=r"^clip_by_global_norm: the leaf 'f' must be"):
        clipper.update({"f": print}, clipper.init(GRADS))
