"""Steps of a clipper, eager and compiled, and what is counted in them."""

from functools import cache, partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.helpers import CLIPPERS, PURE, random_tree

every_clipper = pytest.mark.parametrize("name", CLIPPERS)


def apply(clipper, updates, params=None, **extra):
    return clipper.update(
        updates, clipper.init(updates), updates if params is None else params, **extra
    )


def stepped(name, limit, updates, params):
    """The first step: without jit, which compiles the kernel as one call; but under jit
    what is made of several calls, except in float32.
    """
    numbers_only = CLIPPERS[name].numbers_only and any(
        x.dtype != jnp.float32 for x in jax.tree.leaves(updates)
    )
    return (
        compiled(name)(limit, updates, params)
        if numbers_only
        else apply(CLIPPERS[name].build(limit), updates, params)
    )


@cache
def compiled(name):
    return jax.jit(
        lambda limit, updates, params: apply(
            CLIPPERS[name].build(limit), updates, params
        )
    )


def few(name, tree):
    """The kernel and the bias alone, where what is promised of a tree is promised of
    any.
    """
    return tree if "group" in name else {"kernel": tree["kernel"], "bias": tree["bias"]}


def same_bits(one, other):
    chex.assert_trees_all_equal_structs(one, other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other)):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@cache
def programs(name):
    """What a clipper does under jit, plain and inside wrappers of optax, compiled in
    one go: {wrapper: what it gave}.
    """
    case = CLIPPERS[name]
    mean, one, two = (
        partial(optax.MultiSteps, every_k_schedule=2),
        case.build(0.5),
        case.build(0.25),
    )

    def plain(optimizer, updates, params):
        state = optimizer.init(params)
        clipped, new_state = optimizer.update(updates, state, params)
        return clipped, state, new_state

    @jax.jit
    def run(mixed, half, first, second, params):
        found = {"plain": apply(case.build(0.125), mixed, mixed)}
        injected = optax.inject_hyperparams(case.build)(optax.constant_schedule(0.125))
        found["inject_hyperparams"] = plain(injected, half, half)
        optimizer = mean(one)
        _, state = optimizer.update(first, optimizer.init(params), params)
        found["multi_steps"] = optimizer.update(second, state, params)
        if "group" not in name:
            found["masked"] = plain(
                optax.masked(one, {"kernel": True, "bias": False}), first, params
            )
            found["partition"] = plain(
                optax.partition(
                    {"one": one, "two": two}, {"kernel": "one", "bias": "two"}
                ),
                first,
                params,
            )
        return found

    half = random_tree("float32" if PURE[name] == "complex64" else PURE[name], 3, 40.0)
    plain_trees = (
        few(name, random_tree("float32", seed, scale))
        for seed, scale in ((1, 4.0), (2, 4.0), (3, 1.0))
    )
    given = (random_tree("mixed", 1, 30.0), half, *plain_trees)
    return given, run(*given)


def zeros(tree):
    return jax.tree.map(lambda x: jax.device_put(np.zeros_like(x)), tree)


def compiled_step(clipper, dtype=jnp.float32, leaves=3, then=None):
    """Temporary bytes of a donated Adam step, as a share of the gradients' bytes."""
    optimizer = optax.chain(clipper, optax.adam(1e-3) if then is None else then)
    params = {
        f"w{i:02}": jax.ShapeDtypeStruct((2048, 96 + i), jnp.float32)
        for i in range(leaves)
    }
    grads = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), params)

    @partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, grads

    compiled = step.lower(
        params, jax.eval_shape(optimizer.init, params), grads
    ).compile()
    return compiled.memory_analysis().temp_size_in_bytes / sum(
        x.size * x.dtype.itemsize for x in jax.tree.leaves(grads)
    )


class count_compilations:
    """The names of what is compiled inside the block."""

    def __enter__(self):
        self.events = []
        jax.monitoring.register_event_duration_secs_listener(self.listen)
        return self.events

    def listen(self, event, duration, **_):
        if event.endswith("backend_compile_duration"):
            self.events.append(event)

    def __exit__(self, *_):
        self.listen = lambda *args, **kwargs: None
