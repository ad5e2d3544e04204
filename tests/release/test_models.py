"""Models as trainers write them: a released run is the usual one, in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from optaxclip import release
from tests.release.models import MODELS, linen, plain
from tests.release.training import (
    assert_close,
    norm,
    parted,
    released_run,
    shortened,
    usual_run,
)

STEPS = 8
TIGHT = 0.05  # which the norm of every step exceeds
ADAMW = optax.adamw(optax.cosine_decay_schedule(1e-2, 20), weight_decay=0.1)


def model_of(name):
    if name in ("linen", "nnx"):
        pytest.importorskip("flax")
    if name == "equinox":
        pytest.importorskip("equinox")
    return MODELS[name]()


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("name", MODELS)
def test_two_passes_are_the_run_of_the_global_clip(name):
    model = model_of(name)
    wanted, state, values, gradients = usual_run(
        model, ADAMW, lambda grads: shortened(grads, TIGHT), STEPS
    )
    params, states, outputs = released_run(
        model, ADAMW, STEPS, max_norm=TIGHT, passes=2
    )
    assert min(map(norm, gradients)) > TIGHT
    assert_close(params, wanted, 1e-12)
    assert_close(states[-1].optimizer, state, 1e-12)
    assert_close(outputs, values, 1e-12)
    norms = [state.clip.norm for state in states]
    np.testing.assert_allclose(norms, [norm(grads) for grads in gradients], 1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_one_pass_steps_by_the_limit_at_most(name):
    """The step of SGD is as long as what was let through."""
    loss, params, batch_of = model_of(name)
    trainer = release(loss, optax.sgd(1.0), max_norm=TIGHT)
    state, step = trainer.init(params, *batch_of(0)), jax.jit(trainer.step)
    for seed in range(STEPS):
        new, state, _ = step(params, state, *batch_of(seed))
        moved = norm(jax.tree.map(lambda x, y: x - y, new, params))
        assert 0.5 < moved / TIGHT < 1 + 1e-9
        np.testing.assert_allclose(moved, state.clip.norm * state.clip.factor, 1e-9)
        params = new


@pytest.mark.parametrize("name", MODELS)
def test_one_pass_below_the_limit_is_the_usual_run(name):
    model = model_of(name)
    wanted, state, values, _ = usual_run(model, ADAMW, lambda grads: grads, STEPS)
    params, states, outputs = released_run(model, ADAMW, STEPS, max_norm=1e3)
    assert_close(params, wanted, 1e-12)
    assert_close(states[-1].optimizer, state, 1e-12)
    assert_close(outputs, values, 1e-12)


def matrices(tree):
    return jax.tree.map(lambda leaf: leaf.ndim > 2, tree)


def labels(tree):
    return jax.tree.map_with_path(
        lambda path, _: "frozen" if "qkv" in jax.tree_util.keystr(path) else "trained",
        tree,
    )


OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(optax.linear_schedule(0.1, 0.0, 20), momentum=0.9),
    "nesterov": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": optax.adam(1e-2),
    "adamw": optax.adamw(1e-2, mask=matrices),
    "amsgrad": optax.amsgrad(1e-2),
    "adamax": optax.adamax(1e-2),
    "adabelief": optax.adabelief(1e-2),
    "adadelta": optax.adadelta(1e-1),
    "adagrad": optax.adagrad(1e-1),
    "adan": optax.adan(1e-2),
    "lion": optax.lion(1e-3),
    "nadamw": optax.nadamw(1e-2),
    "radam": optax.radam(1e-2),
    "rmsprop": optax.rmsprop(1e-2, centered=True, momentum=0.9),
    "rprop": optax.rprop(1e-3),
    "yogi": optax.yogi(1e-2),
    "signum": optax.sign_sgd(1e-3),
    "ademamix": optax.contrib.ademamix(1e-2),
    "schedule_free": optax.contrib.schedule_free_adamw(1e-2),
    "optimistic": optax.optimistic_gradient_descent(0.1),
    "hyperparams": optax.inject_hyperparams(optax.adamw)(
        optax.cosine_decay_schedule(1e-2, 20)
    ),
    "partition": optax.partition(
        {"frozen": optax.set_to_zero(), "trained": optax.adam(1e-2)}, labels
    ),
    "bf16 moments": optax.adam(1e-2, mu_dtype=jnp.bfloat16),
    "conditional": optax.conditionally_mask(
        optax.adam(1e-2), lambda step, *_: step % 2 == 0
    ),
    "multi_steps": optax.MultiSteps(
        optax.adam(1e-2), every_k_schedule=3
    ).gradient_transformation(),
    "apply_every": optax.chain(optax.apply_every(2), optax.sgd(0.1)),
    "values": optax.chain(optax.clip(1e-4), optax.adam(1e-2)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_passes_are_the_usual_run_of_every_optimizer(name):
    model, optimizer = plain(), OPTIMIZERS[name]
    wanted, state, _, _ = usual_run(
        model, optimizer, lambda grads: shortened(grads, TIGHT), STEPS
    )
    params, states, _ = released_run(model, optimizer, STEPS, max_norm=TIGHT, passes=2)
    assert_close(params, wanted, 1e-12)
    # A moment in bfloat16 may be rounded to the other side.
    rtol = 2.0**-7 if name == "bf16 moments" else 1e-12
    assert_close(states[-1].optimizer, state, rtol)


def test_bfloat16_compute_leaves_float32_masters():
    with jax.enable_x64(False):
        model = plain(jnp.float32, jnp.bfloat16)
        sgd = optax.sgd(0.1, momentum=0.9)
        wanted, _, values, _ = usual_run(
            model, sgd, lambda grads: shortened(grads, TIGHT), STEPS
        )
        params, _, outputs = released_run(model, sgd, STEPS, max_norm=TIGHT, passes=2)
    # Eight steps of 0.1 * 0.05, in which a gradient may be rounded to the other side.
    assert_close(params, wanted, 0.04 * 2.0**-8)
    losses = [value for value, _ in outputs]
    np.testing.assert_allclose(losses, [value for value, _ in values], 1e-3)


def split(mesh, leaf):
    """FSDP: along the last axis that the devices divide, of layers never the first."""
    axes = [None] * leaf.ndim
    for axis in range(1, leaf.ndim):
        if leaf.shape[axis] % 8 == 0:
            axes = [None] * leaf.ndim
            axes[axis] = "devices"
    return jax.device_put(leaf, NamedSharding(mesh, P(*axes)))


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("build", [plain, partial(linen, 0)], ids=["plain", "linen"])
def test_split_over_eight_devices_it_is_the_same_run(build, passes):
    if build is not plain:
        pytest.importorskip("flax")
    loss, params, batch_of = build()
    options = {"max_norm": TIGHT, "passes": passes}
    wanted, states, outputs = released_run(
        (loss, params, batch_of), ADAMW, STEPS, **options
    )
    mesh = jax.make_mesh((8,), ("devices",), axis_types=(AxisType.Auto,))
    split_params = jax.tree.map(partial(split, mesh), params)

    def split_batch_of(seed):
        tokens, key = batch_of(seed)
        return jax.device_put(tokens, NamedSharding(mesh, P("devices"))), key

    split_model = loss, split_params, split_batch_of
    found, split_states, split_outputs = released_run(
        split_model, ADAMW, STEPS, **options
    )
    assert_close(found, wanted, 1e-12)
    assert_close(split_states[-1].optimizer, states[-1].optimizer, 1e-12)
    assert_close(split_outputs, outputs, 1e-12)
    # Weights and moments are split in the end as they were at first.
    trained, _ = parted(split_params)
    (moments,) = (x.mu for x in split_states[-1].optimizer if hasattr(x, "mu"))
    for tree in (parted(found)[0], moments):
        for one, other in zip(jax.tree.leaves(tree), jax.tree.leaves(trained)):
            if other.size > 100:
                assert one.sharding.is_equivalent_to(other.sharding, one.ndim)
