"""`skip_nonfinite` around every optimizer of optax and optax.contrib."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import optaxclip
from tests.core.steps import same_bits

# optax warns of its own old names, and lets ranks be broadcast.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning"),
    pytest.mark.usefixtures("as_programs_run"),
]
PARAMS = {"w": jnp.array([[1.0, -2.0], [0.5, 0.3], [0.1, -1.0]]), "b": jnp.ones(3)}
GRADS = {"w": jnp.array([[0.3, 0.2], [-0.5, 0.1], [-0.7, 1.0]]), "b": -jnp.ones(3)}
MASK = {"w": True, "b": False}
LABELS = {"w": "a", "b": "a"}
KEY = jax.random.key(0)


def loss(params, *_):
    return sum(jnp.sum((x - 1) ** 2) for x in jax.tree.leaves(params))


def size(updates, **_):
    return optax.tree.norm(updates)


def is_even(step, *_, **__):
    return step % 2 == 0


EXTRA = {"value": jnp.float32(3), "grad": GRADS, "value_fn": loss}


class Case(NamedTuple):
    """How to build an optimizer, and what it is called with."""

    build: Callable[..., Any]
    params: Any = PARAMS
    grads: Any = GRADS
    extra: Any = EXTRA


# What needs more than a learning rate.
CASES = {
    "adaptive_grad_clip": Case(lambda f: f(0.1)),
    "add_noise": Case(lambda f: f(0.1, 0.5, KEY)),
    "apply_if_finite": Case(lambda f: f(optax.adam(0.1), 3)),
    "chain": Case(lambda f: f(optax.trace(0.9), optax.scale(-0.1))),
    "clip": Case(lambda f: f(0.5)),
    "clip_by_block_rms": Case(lambda f: f(0.5)),
    "clip_by_global_norm": Case(lambda f: f(0.5)),
    "conditionally_mask": Case(lambda f: f(optax.adam(0.1), is_even)),
    "conditionally_transform": Case(lambda f: f(optax.adam(0.1), is_even)),
    "differentially_private_aggregate": Case(lambda f: f(1.0, 0.1, KEY)),
    "dpsgd": Case(lambda f: f(0.1, 1.0, 0.1, seed=0)),
    "ema": Case(lambda f: f(0.9)),
    "flatten": Case(lambda f: f(optax.adam(0.1))),
    "freeze": Case(lambda f: f(MASK)),
    "inject_hyperparams": Case(lambda f: f(optax.adam)(learning_rate=0.1)),
    "inject_stateful_hyperparams": Case(lambda f: f(optax.adam)(learning_rate=0.1)),
    "lookahead": Case(
        lambda f: f(optax.adam(0.1), 2, 0.5), optax.LookaheadParams.init_synced(PARAMS)
    ),
    "masked": Case(lambda f: f(optax.adam(0.1), MASK)),
    "measure_with_ema": Case(lambda f: f(size, 0.9)),
    "mechanize": Case(lambda f: f(optax.adam(0.1))),
    "multi_transform": Case(lambda f: f({"a": optax.adam(0.1)}, LABELS)),
    "named_chain": Case(lambda f: f(("first", optax.adam(0.1)))),
    "noisy_sgd": Case(lambda f: f(0.1, key=KEY)),
    "partition": Case(lambda f: f({"a": optax.adam(0.1)}, LABELS)),
    "sam": Case(lambda f: f(optax.sgd(0.1), optax.sgd(0.05)), extra={}),
    "scale": Case(lambda f: f(-0.1)),
    "scale_by_backtracking_linesearch": Case(lambda f: f(5)),
    "scale_by_learning_rate": Case(lambda f: f(0.1)),
    "scale_by_muon": Case(lambda f: f(), PARAMS["w"], GRADS["w"]),
    "scale_by_schedule": Case(lambda f: f(optax.linear_schedule(1.0, 0.0, 10))),
    "scale_by_zoom_linesearch": Case(lambda f: f(5)),
    "schedule_free": Case(lambda f: f(optax.sgd(0.1), 0.1)),
    "selective_transform": Case(lambda f: f(optax.adam(0.1), freeze_mask=MASK)),
    "snapshot": Case(lambda f: f("norm", size)),
    "sophia": Case(lambda f: f(0.1), extra={"obj_fn": loss}),
    "split_real_and_imaginary": Case(lambda f: f(optax.adam(0.1))),
    "stateless": Case(lambda f: f(lambda updates, params: updates)),
    "stateless_with_tree_map": Case(lambda f: f(lambda update, param: update)),
    "trace": Case(lambda f: f(0.9)),
    "with_extra_args_support": Case(lambda f: f(optax.adam(0.1))),
}
# optax does not say what these return.
UNANNOTATED = ("scale_by_factored_rms", "dog", "dowg")


def makers():
    """Every function of optax and optax.contrib that makes an optimizer."""
    for module in (optax, optax.contrib):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            returned = str(inspect.signature(function).return_annotation)
            known = name in UNANNOTATED or "GradientTransformation" in returned
            if known and not name.startswith("_"):
                yield name, function


MAKERS = dict(makers())
# Compiling all of them would take minutes. These have unusual states: new leaves that
# are constants, branches.
COMPILED = (
    "conditionally_mask",
    "dog",
    "optimistic_gradient_descent",
    "reduce_on_plateau",
)


def by_default(function):
    first = next(iter(inspect.signature(function).parameters.values()), None)
    needs_rate = first is not None and first.default is inspect.Parameter.empty
    return function(0.1) if needs_rate else function()


def raw(tree):
    """The tree with the bits of typed keys, which NumPy can compare."""

    def of_leaf(x):
        is_key = jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x)

    return jax.tree.map(of_leaf, tree)


def updates_of(optimizer, case, name):
    """Its update as a function of gradients and state, compiled where that is cheap."""

    def update(grads, state):
        return optimizer.update(grads, state, case.params, **case.extra)

    return jax.jit(update) if name in COMPILED else update


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.slow
def test_any_optimizer_of_optax_can_be_skipped(name):
    case = CASES.get(name, Case(by_default))
    bare = optax.with_extra_args_support(case.build(MAKERS[name]))
    skipping = optaxclip.skip_nonfinite(bare)
    state = skipping.init(case.params)
    update = updates_of(skipping, case, name)
    broken = jax.tree.map(lambda x: x * jnp.nan, case.grads)

    updates, after = update(case.grads, state)
    wanted = updates_of(bare, case, name)(case.grads, state.inner_state)
    # Compiled, the bits are equal. Unjitted, the bare optimizer calls functions that
    # XLA fuses, whose last bit differs.
    ulps = {"rtol": 0.0} if name in COMPILED else {"rtol": 1e-6, "atol": 1e-7}
    chex.assert_trees_all_close(raw((updates, after.inner_state)), raw(wanted), **ulps)

    zeros, kept = update(broken, after)
    assert not any(np.any(x) for x in jax.tree.leaves(zeros))
    assert (kept.skipped, after.skipped) == (1, 0)
    same_bits(raw(kept.inner_state), raw(after.inner_state))
