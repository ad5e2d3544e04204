"""Errors show the value that they got, and of a large one the beginning."""

import inspect
import warnings

import jax
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip import dropin, per_example, replay, rules, shrinks

LONGEST = 1200


class Model:
    """As of flax or equinox: a function whose `repr` has all of its layers."""

    def __call__(self, x, *, train):
        return x

    def __repr__(self):
        return "Model(\n" + "    Dense(features=64),\n" * 100 + ")"


LARGE = {
    "a tree": {f"layer {i}": np.ones((20, 20)) for i in range(20)},
    "a string": "limit " * 400,
    "a model": Model(),
}
MODULES = [optaxclip, rules, shrinks, per_example, replay]
MODULES += [dropin.keras, dropin.torch_style, dropin.tensorflow_style]
MODULES += [dropin.jax_privacy]
# What a parameter without a default is given, where it is not the one in question.
USUAL = {
    "inner": optax.sgd(0.1),
    "clipper": optaxclip.clip_by_global_norm(1.0),
    "norm": optaxclip.global_norm,
    "labels": "all",
    "fun": lambda x: x,
    "loss": lambda x: x,
    "rule": rules.growth(),
    "norms": [1.0, 2.0],
    "name": "step",
}
GRADS = {"w": np.ones(2, np.float32)}
CALLS = []
for module in MODULES:
    for own in module.__all__:
        function = getattr(module, own)
        if callable(function) and not issubclass(type(function), type(optaxclip)):
            for name, parameter in inspect.signature(function).parameters.items():
                if parameter.kind is not parameter.VAR_POSITIONAL:
                    CALLS.append((f"{module.__name__}.{own}", function, name))


def given(function, name, value):
    """The arguments of a call, with a value for one of them."""
    wanted = inspect.signature(function).parameters.values()
    names = [each.name for each in wanted if each.default is each.empty]
    names = [each for each in names if each not in ("args", "kwargs")]
    return {each: USUAL.get(each, 1.0) for each in names} | {name: value}


@pytest.mark.parametrize("kind", LARGE)
@pytest.mark.parametrize(
    ("call", "function", "name"), CALLS, ids=[f"{case[0]} {case[2]}" for case in CALLS]
)
def test_an_error_shows_the_beginning_of_a_large_value(call, function, name, kind):
    arguments = given(function, name, LARGE[kind])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            made = function(**arguments)
            if hasattr(made, "init"):
                state = made.init(GRADS)
                jax.eval_shape(made.update, GRADS, state)
        except Exception as error:
            # Ours name the function. Those of NumPy and JAX say what they want.
            is_ours = call.rpartition(".")[2] in str(error)
            assert len(str(error)) < LONGEST or not is_ours, str(error)[:300]


class Tensor:
    """Has a dtype that NumPy does not know, as a tensor of torch."""

    dtype = "torch.float32"
    shape = ()

    def __repr__(self):
        return "tensor(\n" + "1.0, " * 100


@pytest.mark.parametrize("value", [Tensor(), {1: np.ones((30, 30)), "a": 1.0}])
def test_a_large_value_that_jax_cannot_read_is_named_all_the_same(value):
    with pytest.raises(TypeError, match=r"^clip_by_global_norm: max_norm must be a"):
        optaxclip.clip_by_global_norm(value)
