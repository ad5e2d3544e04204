"""The registry has every public method, and what it says of them is so."""

import inspect

import jax
import jax.numpy as jnp
import pytest

import optaxclip
from tests.methods import METHODS, WEIGHTS

# What is public and has "clip" or "norm" in its work, but is no method of the registry.
OTHERS = {
    "clip_by",  # makes them
    "explain_clipped_grad",  # tells how one would run
    "per_example_layer_norm_clip",  # one limit, shared out among the leaves
    "qk_clip",  # is told logits, which no tree of gradients has
    "scale_cotangent",  # multiplies and clips nothing
}
TREE = {"w": jnp.full((2, 3), 2.0), "b": jnp.full(3, 2.0)}


def public_methods():
    """The public functions that make a transformation, by their annotation."""
    public = {**vars(optaxclip), **vars(optaxclip.per_example)}
    for name, function in public.items():
        if inspect.isfunction(function):
            returned = str(inspect.signature(function).return_annotation)
            if "GradientTransformation" in returned or "clip" in name:
                yield name


def test_every_public_method_is_in_the_registry():
    known = {method.function.__name__ for method in METHODS.values()} | OTHERS
    assert known == set(public_methods()) | OTHERS


def test_names_and_numbers_are_those_of_the_function():
    for name, method in METHODS.items():
        assert name.startswith(method.function.__name__)
        parameters = inspect.signature(method.function).parameters
        defaults = {key: parameters[key].default for key in method.defaults}
        assert defaults == method.defaults, name
        assert set(method.numbers) <= set(parameters), name
        is_other = method.wraps or name in ("clip_cotangent", "clipped_grad")
        assert is_other or ("mesh_axes" in parameters) == method.mesh_axes, name
        assert is_other or ("shrink" in parameters) == method.shrinks, name


@pytest.mark.parametrize("name", METHODS)
def test_each_can_be_built_and_run_as_registered(name):
    method = METHODS[name]
    clipper = method.make()
    state = clipper.init(TREE)
    if method.needs == WEIGHTS:
        with pytest.raises(ValueError, match="with weights"):
            clipper.update(TREE, state)
    updates = TREE
    for _ in range(3):
        updates, state = clipper.update(TREE, state, TREE)
    assert jax.tree.structure(updates) == jax.tree.structure(TREE)
    assert bool(jax.tree.leaves(getattr(state, "memory", ()))) <= method.learns
