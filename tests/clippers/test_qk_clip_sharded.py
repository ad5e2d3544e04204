"""`qk_clip` gives the same bits on several devices, and goes through `lax.scan`."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from optaxclip import Heads, qk_clip
from tests import attention

PARAMS = attention.weights(8, 4)
DENSE = {"kernel": P("data", "heads"), "bias": P("heads")}
SPECS = {"query": DENSE, "key": DENSE, "value": P(None, "heads")}
# Split over heads alone, as tensor parallelism does.
WHOLE = {
    "query": {"kernel": P(None, "heads"), "bias": P("heads")},
    "key": {"kernel": P(None, "heads"), "bias": P("heads")},
    "value": P(None, "heads"),
}
LOGITS = np.float32([5, 50, 20, 10, 90, 30, 20, 21])
CLIPPER = qk_clip(20.0, **attention.PATTERNS)


def mesh_of(kind):
    return jax.make_mesh((2, 4), ("data", "heads"), axis_types=(kind,) * 2)


def steps(params, state, max_logits, count=3):
    """Some steps of halving the weights, in a scan."""

    def step(carried, _):
        params, state = carried
        updates = jax.tree.map(lambda w: -0.5 * w, params)
        given = {"max_logits": max_logits}
        updates, state = CLIPPER.update(updates, state, params, **given)
        return (optax.apply_updates(params, updates), state), state.factor

    return lax.scan(step, (params, state), length=count)[0]


def test_a_scan_takes_its_state():
    params, state = jax.jit(steps)(PARAMS, CLIPPER.init(PARAMS), LOGITS)
    np.testing.assert_array_equal(state.step, 3)
    np.testing.assert_array_equal(state.clipped, [3, 0, 3, 3])
    factor = np.minimum(1, 20 / LOGITS.astype(np.float64)).reshape(4, 2).min(1)
    wanted = PARAMS["key"]["bias"] * (0.5 * np.sqrt(factor)[:, None]) ** 3
    np.testing.assert_allclose(params["key"]["bias"], wanted, rtol=2e-6)


@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit))
def test_split_weights_get_the_same_steps(kind):
    wanted = jax.jit(steps)(PARAMS, CLIPPER.init(PARAMS), LOGITS)
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        shardings = jax.tree.map(partial(NamedSharding, mesh), SPECS)
        params = jax.device_put(PARAMS, shardings)
        max_logits = jax.device_put(LOGITS, NamedSharding(mesh, P("heads")))
        found = jax.jit(steps)(params, CLIPPER.init(params), max_logits)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), found, wanted)
    spec = found[0]["query"]["kernel"].sharding.spec
    assert tuple(spec[:2]) == ("data", "heads")


def test_each_device_clips_its_own_heads():
    wanted = jax.jit(steps)(PARAMS, CLIPPER.init(PARAMS), LOGITS)

    def on_devices(params, max_logits):
        return steps(params, CLIPPER.init(params), max_logits)

    state_specs = jax.tree.map(
        lambda x: P("heads") if x.ndim else P(), CLIPPER.init(PARAMS)
    )
    split = jax.shard_map(
        on_devices,
        mesh=mesh_of(AxisType.Auto),
        in_specs=(WHOLE, P("heads")),
        out_specs=(WHOLE, state_specs),
    )
    found = jax.jit(split)(PARAMS, LOGITS)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), found, wanted)


def test_no_collective_is_needed_where_heads_are_split():
    split = jax.shard_map(
        lambda params, logits: steps(params, CLIPPER.init(params), logits)[0],
        mesh=mesh_of(AxisType.Auto),
        in_specs=(WHOLE, P("heads")),
        out_specs=WHOLE,
    )
    text = jax.jit(split).lower(PARAMS, LOGITS).compile().as_text()
    assert "all-reduce" not in text and "all-gather" not in text


@pytest.mark.slow
def test_layers_in_a_scanned_model_are_split_too():
    # MaxText's layout: layers on axis 1, heads split over devices.
    params = {"q": jnp.ones((8, 3, 4, 2)), "k": jnp.ones((8, 3, 4, 2))}
    where = Heads((1, 2))
    clipper = qk_clip(20.0, queries={"q": where}, keys={"k": where})
    max_logits = jnp.linspace(1, 90, 12).reshape(3, 4)
    zero = jax.tree.map(jnp.zeros_like, params)
    given = {"max_logits": max_logits}
    wanted, _ = clipper.update(zero, clipper.init(params), params, **given)
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, P("data", None, "heads"))
        params, zero = jax.device_put((params, zero), sharding)
        found, _ = clipper.update(zero, clipper.init(params), params, **given)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), found, wanted)
    assert tuple(found["q"].sharding.spec[:3]) == ("data", None, "heads")


@pytest.mark.slow
def test_vmap_over_runs_gives_each_its_own():
    runs = jnp.stack([LOGITS, LOGITS / 10])
    state, zero = CLIPPER.init(PARAMS), jax.tree.map(jnp.zeros_like, PARAMS)

    def one(max_logits):
        return CLIPPER.update(zero, state, PARAMS, max_logits=max_logits)[0]

    found = jax.vmap(one)(runs)
    wanted = one(runs[0])["key"]["kernel"]
    np.testing.assert_allclose(found["key"]["kernel"][0], wanted, rtol=1e-6)
    np.testing.assert_array_equal(found["key"]["kernel"][1], zero["key"]["kernel"])
