"""`optax.clip...` replaced by `optaxclip.clip...` in programs as people write them.

Each program runs once with optax's clippers and once with ours, which come by the name
`clippers`. Weights and other results agree to 8 eps of float32.
"""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from tests.helpers import random_tree

EPS = float(np.finfo(np.float32).eps)
PARAMS = random_tree("float32")
GRADS = [random_tree("float32", seed) for seed in (1, 2, 3)]

NAMES = (
    "adaptive_grad_clip",
    "clip",
    "clip_by_block_rms",
    "clip_by_global_norm",
    "global_norm",
)
OURS = SimpleNamespace(**{name: getattr(optaxclip, name) for name in NAMES})
THEIRS = SimpleNamespace(
    global_norm=optax.tree.norm,
    **{name: getattr(optax, name) for name in NAMES if name != "global_norm"},
)


def trained(optimizer, params=PARAMS):
    """The weights after three steps."""
    state, step = optimizer.init(params), jax.jit(optimizer.update)
    for grads in GRADS:
        updates, state = step(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


def ppo(clippers):
    clip = clippers.clip_by_global_norm(0.5)
    return trained(optax.chain(clip, optax.adam(1e-2, eps=1e-5)))


def by_name(clippers):
    """scenic's config: the name of a clipper and its limit."""
    limits = {"clip": 0.5, "clip_by_global_norm": 1.0, "adaptive_grad_clip": 0.01}
    chain = [getattr(clippers, name)(limit) for name, limit in limits.items()]
    return trained(optax.chain(*chain))


def snapshot(clippers):
    clip = clippers.clip_by_global_norm(1.0)
    optimizer = optax.chain(clip, optax.snapshot("length", clippers.global_norm))
    state = optimizer.init(PARAMS)
    _, state = optimizer.update(GRADS[0], state)
    return optax.tree.get(state, "length")


def skipping_by_our_name(clippers):
    """optax's `apply_if_finite(optimizer, n)` is our `skip_nonfinite(optimizer, n)`."""
    ours = clippers is OURS
    skipping = optaxclip.skip_nonfinite if ours else optax.apply_if_finite
    clip = clippers.clip_by_global_norm(1.0)
    optimizer = skipping(optax.chain(clip, optax.adam(0.1)), 10)
    state, moved = optimizer.init(PARAMS), []
    for factor in (1.0, jnp.nan, 1.0):
        grads = optax.tree.scale(factor, GRADS[0])
        updates, state = optimizer.update(grads, state, PARAMS)
        moved.append(updates)
    return moved


def linen_train_state(clippers):
    train_state = pytest.importorskip("flax.training.train_state")
    serialization = pytest.importorskip("flax.serialization")
    optimizer = optax.chain(clippers.clip_by_global_norm(1.0), optax.adam(0.1))
    create = functools.partial(train_state.TrainState.create, apply_fn=None)
    state = create(params=PARAMS, tx=optimizer)
    for grads in GRADS[:2]:
        state = state.apply_gradients(grads=grads)
    stored = serialization.to_bytes(state)
    restored = serialization.from_bytes(create(params=PARAMS, tx=optimizer), stored)
    return restored.apply_gradients(grads=GRADS[2]).params


def nnx_optimizer(clippers):
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    clip = optax.chain(clippers.clip_by_global_norm(0.1), clippers.clip_by_block_rms(1))
    optimizer = nnx.Optimizer(
        model, optax.chain(clip, optax.adam(0.1), optax.ema(0.9)), wrt=nnx.Param
    )

    @nnx.jit
    def step(model, optimizer):
        grads = nnx.grad(lambda model: jnp.sum(model(jnp.ones((1, 3))) ** 2))(model)
        optimizer.update(model, grads)

    for _ in range(3):
        step(model, optimizer)
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def equinox_step(clippers):
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0))
    optimizer = optax.chain(clippers.clip_by_global_norm(0.1), optax.adam(0.1))
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, state):
        grads = eqx.filter_grad(lambda model: jnp.sum(model(jnp.ones(3)) ** 2))(model)
        updates, state = optimizer.update(grads, state)
        return eqx.apply_updates(model, updates), state

    for _ in range(3):
        model, state = step(model, state)
    return jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))


PROGRAMS = (
    ppo,
    by_name,
    snapshot,
    skipping_by_our_name,
    linen_train_state,
    nnx_optimizer,
    equinox_step,
)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.slow
def test_the_program_does_what_it_did(program):
    found, wanted = program(OURS), program(THEIRS)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted)):
        largest = float(np.max(np.abs(other)))
        np.testing.assert_allclose(one, other, rtol=8 * EPS, atol=8 * EPS * largest)
