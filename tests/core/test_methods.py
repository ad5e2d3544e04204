"""The registry has every public method, and what it says of them is so."""

import inspect
import math
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import optaxclip
from tests.methods import ALONE, METHODS, WEIGHTS

# What is public and has "clip" or "norm" in its work, but is no method of the registry.
OTHERS = {
    "clip_by",  # makes them
    "explain_clipped_grad",  # tells how one would run
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


def first_step(clipper, updates):
    """(updates, state) of a step whose weights are all 1."""
    params = jax.tree.map(jnp.ones_like, updates)
    return clipper.update(updates, clipper.init(updates), params)


def methods_with(option):
    """The methods of trees that have an option, each with its name."""
    for name, method in METHODS.items():
        parameters = inspect.signature(method.function).parameters
        if option in parameters and method.leaves != ALONE:
            yield name, method


def test_nonfinite_reaches_every_clipper_that_takes_it():
    # With "raise" a traced step has a `checkify.check`.
    for name, method in methods_with("nonfinite"):
        step = partial(first_step, method.make(nonfinite="raise"))
        assert "check[" in str(jax.make_jaxpr(step)(TREE)), name


def test_mesh_axes_reach_every_method_that_takes_them():
    for name, method in methods_with("mesh_axes"):
        step = partial(first_step, method.make(mesh_axes="nowhere"))
        with pytest.raises(ValueError, match="'nowhere'"):
            jax.eval_shape(step, TREE)
            pytest.fail(name)


def test_stacked_reaches_every_clipper_that_takes_it():
    grads = {"w": jnp.ones((3, 4, 5))}
    for name, method in methods_with("stacked"):
        if name == "record_health":
            continue
        parameters = inspect.signature(method.function).parameters
        options = {"scope": "tensor"} if "scope" in parameters else {}
        clipper = method.make(stacked=1, **options)
        if method.norm == "unit":
            # Of 4 ones in a layer, where 3 are on the axis of layers.
            assert first_step(clipper, grads)[1].norm == 2, name
        else:
            assert clipper.init(grads).norm.size == 3, name


def test_order_eps_and_shrink_reach_every_clipper_that_takes_them():
    grads = {"w": jnp.float32([[3.0, 1.0], [4.0, 2.0]])}

    def first_element(method, **options):
        return float(first_step(method.make(1.0, **options), grads)[0]["w"][0, 0])

    for name, method in methods_with("shrink"):
        if method.ord != "spectral":
            assert first_element(method, shrink=optaxclip.shrinks.drop) == 0, name
    for name, method in methods_with("ord"):
        assert first_element(method, ord=math.inf) == pytest.approx(3 / 4), name
    for name, method in methods_with("eps"):
        if method.ord in (2, "rms", "average") and method.limit and not method.needs:
            norm = 3 / first_element(method)
            wanted = pytest.approx(3 / (norm + 2), rel=1e-5)
            assert first_element(method, eps=2.0) == wanted, name
