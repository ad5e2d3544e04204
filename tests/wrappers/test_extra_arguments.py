"""Every extra argument of `update` reaches what is inside a wrapper."""

import functools
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import GradientTransformation, GradientTransformationExtraArgs

import optaxclip
from tests.methods import ALONE, METHODS

PARAMS = {"w": jnp.array([[1.0, -2.0], [0.5, 0.25]]), "b": jnp.array([0.5, 1.0])}
GRADS = {"w": jnp.array([[3.0, 1.0], [-2.0, 1.0]]), "b": jnp.array([0.0, 1.0])}
# The norm of GRADS is 4.
EXTRA = {"value": 0.5, "grad_norm": 8.0, "limit": 0.25, "max_logits": 3.0, "loss": 1.0}


def mask(tree):
    return jax.tree.map(lambda _: True, tree)


def labels(tree):
    return jax.tree.map(lambda _: "all", tree)


def injected(inner):
    # A step size that is a number, and the inner transformation as a constant.
    def build(scale):
        return optax.chain(inner, optax.scale(scale))

    return optax.inject_hyperparams(build)(scale=1.0)


def bound(kind, inner):
    steps = optax.MultiSteps(inner, 1)
    return kind(steps.init, steps.update)


# Those of optax that hand on what they get, so that what is lost is lost by ours.
OF_OPTAX = {
    "chain": lambda inner: optax.chain(optax.identity(), inner),
    "named_chain": lambda inner: optax.named_chain(("inner", inner)),
    "masked": lambda inner: optax.masked(inner, mask),
    "partition": lambda inner: optax.partition({"all": inner}, labels),
    "inject_hyperparams": injected,
    "apply_if_finite": lambda inner: optax.apply_if_finite(inner, 3),
    "MultiSteps, marked": functools.partial(bound, GradientTransformationExtraArgs),
}
# optax itself drops extra arguments of these, as sharp_edges.md says.
SPELLINGS = {
    "MultiSteps": lambda inner: optax.MultiSteps(inner, 1),
    "MultiSteps, converted": lambda inner: optax.MultiSteps(
        inner, 1
    ).gradient_transformation(),
    "MultiSteps, bound": functools.partial(bound, GradientTransformation),
}
OURS = {
    "skip_nonfinite": optaxclip.skip_nonfinite,
    "skip_step": optaxclip.skip_step,
    "skip_spikes": lambda inner: optaxclip.skip_spikes(inner, 100.0, 100.0),
    "reset_momentum": optaxclip.reset_momentum,
    "carry_clipped": optaxclip.carry_clipped,
    "constrain": optaxclip.constrain,
    "clip_gradients_by_norm": lambda inner: (
        optaxclip.dropin.tensorflow_style.clip_gradients_by_norm(inner, 100.0)
    ),
}
WRAPPERS = OURS | OF_OPTAX | SPELLINGS
# They say of these that they are about something else than what they clip.
KEPT_BACK = {"carry_clipped": {"grad_norm"}, "constrain": {"grad_norm", "limit"}}


def probe(seen):
    """Writes down the names of the extra arguments that it is given."""

    def update(updates, state, params=None, **extra):
        seen.append({name for name, value in extra.items() if value is not None})
        return updates, state

    return GradientTransformationExtraArgs(optax.init_empty_state, update)


def run(optimizer, **extra):
    state = optimizer.init(PARAMS)
    return optimizer.update(GRADS, state, PARAMS, **extra)


# Two of ours, and ours around or inside one of optax.
PAIRS = [*product(OURS, WRAPPERS), *product(OF_OPTAX | SPELLINGS, OURS)]


# `skip_step(carry_clipped(...))` without an optimizer warns, as it should.
@pytest.mark.filterwarnings("ignore:.*inner has only a CarryState:UserWarning")
@pytest.mark.parametrize(("outer", "inner"), PAIRS)
def test_extra_arguments_reach_what_two_wrappers_hold(outer, inner):
    kept_back = KEPT_BACK.get(outer, set()) | KEPT_BACK.get(inner, set())
    given = dict(EXTRA)
    if "carry_clipped" in (outer, inner):
        given.pop("grad_norm")
    seen = []
    run(WRAPPERS[outer](WRAPPERS[inner](probe(seen))), **given)
    # Tracing for types may call it more than once.
    assert seen and all(each == set(given) - kept_back for each in seen)


CLIPPERS = [
    name
    for name, method in METHODS.items()
    if method.leaves != ALONE and method.wraps is None and name != "clip_grads"
]
# Around these a first step is that of what they hold.
TRANSPARENT = ("skip_nonfinite", "skip_step", "skip_spikes", "reset_momentum")


def outcome(optimizer, extra):
    """The updates, or the text of the error."""
    try:
        updates, _ = run(optimizer, **extra)
    except (TypeError, ValueError) as error:
        return str(error)
    return jax.tree.map(np.asarray, updates)


@pytest.mark.parametrize("name", CLIPPERS)
def test_a_method_does_the_same_inside_each_wrapper(name):
    clipper = optax.with_extra_args_support(METHODS[name].make())
    for extra in ({"grad_norm": 8.0}, {"limit": 0.25}, {}):
        extra["value"] = 0.5
        wanted = outcome(clipper, extra)
        for wrapper in TRANSPARENT:
            found = outcome(OURS[wrapper](optax.MultiSteps(clipper, 1)), extra)
            if isinstance(wanted, str):
                assert found == wanted
            else:
                jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_logits_reach_qk_clip_inside_accumulation():
    params = {"query": jnp.full((2, 4), 3.0), "key": jnp.full((2, 4), 3.0)}
    zero = jax.tree.map(jnp.zeros_like, params)
    clip = optaxclip.qk_clip(1.0, queries={"query": -2}, keys={"key": -2})
    steps = optax.MultiSteps(optax.chain(optax.sgd(0.1), clip), 1)
    optimizer = optaxclip.skip_nonfinite(steps.gradient_transformation())
    state = optimizer.init(params)
    logits = jnp.array([4.0, 1.0])
    updates, _ = optimizer.update(zero, state, params, max_logits=logits)
    # Each of both weights of the first head is multiplied by sqrt(1 / 4).
    wanted = [[-1.5] * 4, [0.0] * 4]
    for name in params:
        np.testing.assert_allclose(updates[name], wanted, rtol=1e-6)


def test_optax_drops_them_before_accumulation_that_is_not_marked():
    """The day this fails, sharp_edges.md may say less."""
    seen = []
    chain = optax.chain(optax.MultiSteps(probe(seen), 1).gradient_transformation())
    run(chain, value=0.5)
    assert seen and not any(seen)
