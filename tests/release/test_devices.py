"""Several devices: the step of one, on Auto and Explicit meshes and in shard_map."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from optaxclip import release
from tests.release.test_release import TIGHT, batches, loss, new_params
from tests.release.training import assert_close

SPECS = (
    {
        "up": P(None, None, "x"),
        "bias": P(None, "x"),
        "down": P(None, "x", None),
        "number": P(),
    },
    {"table": P(), "bias": P()},
)


def one_step(params, trainer, batch):
    state = trainer.init(params, *batch)
    params, state, value = jax.jit(trainer.step)(params, state, *batch)
    return params, state.clip.norm, value


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_weights_and_batch_that_jit_splits_give_the_same_step(kind, passes):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType[kind],) * 2)
    trainer = release(loss, optax.adam(0.1), max_norm=TIGHT, passes=passes)
    params, batch = new_params(np.float32), next(batches(np.float32))
    wanted = one_step(params, trainer, batch)

    def placed(x, spec):
        return jax.device_put(x, NamedSharding(mesh, spec))

    specs = SPECS if kind == "Auto" else jax.tree.map(lambda _: P(), params)
    with jax.set_mesh(mesh):
        params = jax.tree.map(placed, params, specs)
        batch = tuple(placed(x, P("y") if kind == "Auto" else P()) for x in batch)
        found = one_step(params, trainer, batch)
    # Adam's first step is the sign of each gradient times 0.1, so roundings count
    # where a gradient is 0 but for roundings. None is here.
    assert_close(found, wanted, 1e-4)


@pytest.mark.parametrize("passes", [1, 2])
def test_a_step_may_begin_on_an_explicit_mesh(passes):
    def loss(params, x):
        def layer(h, w):
            return h + jnp.tanh(h @ w), None

        h, _ = jax.lax.scan(layer, x @ params["in"], params["layers"])
        return jnp.mean(h**2)

    trainer = release(loss, optax.sgd(0.1), max_norm=0.1, passes=passes)
    params = {"layers": jnp.ones((3, 4, 4)), "in": jnp.ones((2, 4))}
    batch = jnp.linspace(0, 1, 16).reshape(8, 2)

    @jax.jit
    def first(params, batch):
        return trainer.step(params, trainer.init(params, batch), batch)[0]

    wanted, mesh = first(params, batch), jax.make_mesh((8,), ("data",))
    with jax.set_mesh(mesh):
        params = jax.device_put(params, NamedSharding(mesh, P()))
        batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
        assert_close(first(params, batch), wanted, 1e-6)


@pytest.mark.parametrize("passes", [1, 2])
def test_a_typed_shard_map_adds_up_gradients(passes):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))

    def mean_loss(params, *batch):
        return jax.lax.pmean(loss(params, *batch), "x")

    params, batch = new_params(np.float32), next(batches(np.float32))
    options = {"max_norm": TIGHT, "passes": passes}
    trainer = release(loss, optax.sgd(1.0), **options)
    wanted = one_step(params, trainer, batch)
    trainer = release(mean_loss, optax.sgd(1.0), **options)
    specs = {"in_specs": (P(), P("x")), "out_specs": P()}

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, **specs)
    def step(params, batch):
        # A loss with pmean is traced where "x" has a name.
        state = trainer.init(params, *batch)
        params, state, value = trainer.step(params, state, *batch)
        return params, state.clip.norm, value

    assert_close(step(params, batch), wanted, 1e-4)


def test_a_typed_shard_map_returns_what_layers_of_each_device_log():
    """The logged means have no gradient, and differ between devices."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    params, x = jnp.ones((3, 2, 2)) / 3, jnp.linspace(0, 1, 16).reshape(8, 2)

    def loss(params, x):
        def layer(h, w):
            return h + jnp.tanh(h @ w), h.mean(1)

        h, means = jax.lax.scan(layer, x, params)
        return jnp.mean(h**2), means

    def mean_loss(params, x):
        value, means = loss(params, x)
        return jax.lax.pmean(value, "x"), means

    def step_of(loss):
        trainer = release(loss, optax.sgd(1.0), max_norm=0.1)

        def step(params, x):
            params, _, (_, means) = trainer.step(params, trainer.init(params, x), x)
            return params, means

        return step

    specs = {"in_specs": (P(), P("x")), "out_specs": (P(), P(None, "x"))}
    sharded = jax.shard_map(step_of(mean_loss), mesh=mesh, **specs)
    assert_close(jax.jit(sharded)(params, x), jax.jit(step_of(loss))(params, x), 1e-6)


def test_where_gradients_would_not_be_added_up_it_raises():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    trainer = release(loss, optax.sgd(1.0))
    params, batch = new_params(np.float32), next(batches(np.float32))
    state = trainer.init(params, *batch)
    specs = {"in_specs": (P(), P(), P("x")), "out_specs": P(), "check_vma": False}
    step = jax.shard_map(
        lambda params, state, batch: trainer.step(params, state, *batch),
        mesh=mesh,
        **specs,
    )
    with pytest.raises(ValueError, match=r"mesh axes \('x',\).*check_vma=True"):
        step(params, state, batch)
    step = jax.pmap(trainer.step, axis_name="x", in_axes=(None, None, 0, 0))
    halves = [x.reshape(2, 4, *x.shape[1:]) for x in batch]
    with pytest.raises(ValueError, match=r"mesh axes \('x',\).*check_vma=True"):
        step(params, state, *halves)
