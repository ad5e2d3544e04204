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
    dtypes = {x.dtype for x in jax.tree.leaves(updates)}
    if CLIPPERS[name].numbers_only and dtypes != {np.dtype(np.float32)}:
        return compiled(name)(limit, updates, params)
    return apply(CLIPPERS[name].build(limit), updates, params)


@cache
def compiled(name):
    def step(limit, updates, params):
        return apply(CLIPPERS[name].build(limit), updates, params)

    return jax.jit(step)


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
    one, two = case.build(0.5), case.build(0.25)
    injected = optax.inject_hyperparams(case.build)(optax.constant_schedule(0.125))
    mean = optax.MultiSteps(one, every_k_schedule=2)
    masked = optax.masked(one, {"kernel": True, "bias": False})
    labels = {"kernel": "one", "bias": "two"}
    partition = optax.partition({"one": one, "two": two}, labels)

    def plain(optimizer, updates, params):
        state = optimizer.init(params)
        clipped, new_state = optimizer.update(updates, state, params)
        return clipped, state, new_state

    @jax.jit
    def run(mixed, half, first, second, params):
        _, state = mean.update(first, mean.init(params), params)
        found = {
            "plain": apply(case.build(0.125), mixed, mixed),
            "inject_hyperparams": plain(injected, half, half),
            "multi_steps": mean.update(second, state, params),
        }
        if "group" not in name:
            found["masked"] = plain(masked, first, params)
            found["partition"] = plain(partition, first, params)
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


def compiled_step(clipper, dtype=jnp.float32, then=None):
    """Temporary bytes of a donated Adam step, as a share of the gradients' bytes."""
    optimizer = optax.chain(clipper, then or optax.adam(1e-3))
    shapes = {f"w{i:02}": (2048, 96 + i) for i in range(3)}
    params, grads = (
        {name: jax.ShapeDtypeStruct(shape, kind) for name, shape in shapes.items()}
        for kind in (jnp.float32, dtype)
    )

    @partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, grads

    state = jax.eval_shape(optimizer.init, params)
    memory = step.lower(params, state, grads).compile().memory_analysis()
    size = sum(x.size * x.dtype.itemsize for x in grads.values())
    return memory.temp_size_in_bytes / size


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
