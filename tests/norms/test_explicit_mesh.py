"""Explicit meshes, whose types carry the sharding of every array: each clipper and
wrapper keeps the sharding of its updates and of its state.
"""

from functools import cache, partial

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optaxclip
from optaxclip import rules, shrinks
from tests import sharded
from tests.methods import ALONE, METHODS

SHAPES = {"bias": (4,), "gain": (), "layers": (2, 4, 6), "matrix": (4, 6)}
SPECS = {
    "bias": P("x"),
    "gain": P(),
    "layers": P("x", None, "y"),
    "matrix": P("x", "y"),
}
LABELS = {"bias": "bias", "gain": "bias", "layers": "kernel", "matrix": "kernel"}
STACKED = {"bias": 0, "gain": 0, "layers": 1, "matrix": 0}
MASK = {"bias": False, "gain": True, "layers": True, "matrix": True}
TABLES = {"labels": LABELS, "stacked": STACKED}
STEPS = 3


def for_these_leaves(build, *args, **options):
    """The clipper of a table, with the labels and stacks of the tree of this file."""
    kept = {name: TABLES.get(name, value) for name, value in options.items()}
    return build(*args, **kept)


def fixed(name):
    build = sharded.CASES[name].build
    if name.endswith(" masked"):
        return optax.masked(getattr(optaxclip, name.split()[0])(0.5), MASK)
    if isinstance(build, partial):
        return for_these_leaves(build.func, 0.5, **build.keywords)
    return build(0.5)


by_unit = optaxclip.clip_by_unitwise_norm
spectral = partial(optaxclip.clip_by_spectral_norm, 0.5)
adam = optax.adam(0.1)
BUILDS = {
    name: method.make for name, method in METHODS.items() if method.leaves != ALONE
}
BUILDS |= {name: partial(fixed, name) for name in sharded.CASES}
RULES = {
    "windows": rules.windowed_quantile(0.5, 4),
    "ema": rules.ema(0.9),
    # With the default `down` all units of a step are equally far above their limits.
    "band": rules.ema_band(down=0.1),
    "moments": rules.moments_ratio(),
    "scores": rules.warm_up(1, None, rules.z_score(1.0, warmup=1)),
    "trackers": rules.minimum(rules.quantile_tracker(), rules.ema_ratio()),
    "logarithms": rules.log_z_score(),
}
BUILDS |= {f"{name} of units": partial(by_unit, rule) for name, rule in RULES.items()}
BUILDS |= {
    "windows of layers": lambda: optaxclip.clip_by_tensor_norm(
        rules.windowed_mean(1.0, 4), stacked=STACKED
    ),
    "clippy": lambda: optaxclip.clippy(0.1, 0.1, stacked=STACKED),
    "larc": lambda: optaxclip.larc(0.1, weight_decay=0.1, stacked=STACKED),
    "reset_momentum": lambda: optaxclip.reset_momentum(optax.scale_by_adam(), 2, 1),
    "skip_spikes": lambda: optaxclip.skip_spikes(optax.chain(by_unit(0.5), adam), 15.0),
    "spectral": lambda: spectral(method="svd", stacked=STACKED),
    "spectral, all to the limit": lambda: spectral(shrink=shrinks.normalize),
    "spectral, newton_schulz": lambda: spectral(method="newton_schulz"),
    "spectral, smooth layers": lambda: spectral(
        method="newton_schulz", shrink=shrinks.smooth(2), stacked=STACKED
    ),
    "spectral, adaptive": lambda: optaxclip.clip_by_spectral_norm(
        rules.ema(0.9), stacked=STACKED
    ),
}
# On a mesh with an axis of each kind.
MIXED = [
    *("adaptive_grad_clip stacked", "windows of units", "clippy", "larc", "spam"),
    *("carry_clipped", "skip_spikes", "spectral", "spectral, smooth layers"),
]
EXPLICIT = AxisType.Explicit
CASES = [(name, (EXPLICIT, EXPLICIT)) for name in BUILDS]
CASES += [(name, (AxisType.Auto, EXPLICIT)) for name in MIXED]


def random_tree(seed, *steps):
    random = np.random.default_rng(seed)
    drawn = {name: random.normal(size=(*steps, *SHAPES[name])) for name in SHAPES}
    return {name: np.float32(x) for name, x in drawn.items()}


PARAMS, GRADS = random_tree(1), random_tree(2, STEPS)


def scanned(clipper, params, state, grads):
    """(updates of all steps, the last state) of steps with these weights."""

    def step(state, grad):
        return clipper.update(grad, state, params)[::-1]

    state, updates = jax.lax.scan(step, state, grads)
    return updates, state


@cache
def on_one_device(name):
    clipper = BUILDS[name]()
    return scanned(clipper, PARAMS, clipper.init(PARAMS), GRADS)


def of_steps(specs):
    return {name: P(None, *spec) for name, spec in specs.items()}


def types(tree):
    return jax.tree.map(jax.typeof, tree)


def assert_same_values(have, want):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), have, want)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kinds"), CASES)
def test_explicit_mesh_keeps_shardings_and_values(name, kinds):
    check_shardings_and_values(name, kinds)


@pytest.mark.parametrize("kinds", [(EXPLICIT, EXPLICIT), (AxisType.Auto, EXPLICIT)])
def test_layers_and_units_of_an_explicit_mesh_keep_their_shardings(kinds):
    # The norms of each layer are split as the leaf is, and so is their memory.
    for name in ("windows of layers", "adaptive_grad_clip stacked"):
        check_shardings_and_values(name, kinds)


def check_shardings_and_values(name, kinds):
    mesh = jax.make_mesh((2, 2), ("x", "y"), kinds, devices=jax.devices()[:4])
    clipper = BUILDS[name]()
    with jax.set_mesh(mesh):
        params = sharded.place(PARAMS, mesh, SPECS)
        grads = sharded.place(GRADS, mesh, of_steps(SPECS))
        state = clipper.init(params)
        assert types(state) == types(jax.jit(clipper.init)(params))
        have = jax.jit(partial(scanned, clipper))(params, state, grads)
        assert types(have) == (types(grads), types(state))
    assert_same_values(have, on_one_device(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILDS)
def test_without_set_mesh_all_clip(name):
    check_without_set_mesh(name)


@pytest.mark.parametrize("name", ["windows of layers", "windows of units"])
def test_without_set_mesh_layers_and_units_are_clipped(name):
    check_without_set_mesh(name)


def check_without_set_mesh(name):
    mesh = jax.make_mesh((2, 2), ("x", "y"), devices=jax.devices()[:4])
    clipper = BUILDS[name]()
    params = sharded.place(PARAMS, mesh, SPECS)
    grads = sharded.place(GRADS, mesh, of_steps(SPECS))
    state = clipper.init(params)
    updates, _ = jax.jit(partial(scanned, clipper))(params, state, grads)
    assert types(updates) == types(grads)
    assert_same_values(updates, on_one_device(name)[0])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["svd", "newton_schulz"])
def test_without_set_mesh_a_split_matrix_is_clipped(method):
    mesh = sharded.mesh_of((2, 2), kind=EXPLICIT)
    clipper = spectral(method=method)
    grads = sharded.place(PARAMS, mesh, SPECS)
    updates, _ = clipper.update(grads, clipper.init(grads))
    assert types(updates) == types(grads)
    assert_same_values(updates, clipper.update(PARAMS, clipper.init(PARAMS))[0])


ROWS = {"bias": P("x"), "gain": P(), "layers": P("x"), "matrix": P("x")}
PARTLY = {
    "adaptive_grad_clip": lambda **axes: optaxclip.adaptive_grad_clip(0.5, **axes),
    "windows of layers": lambda **axes: optaxclip.clip_by_tensor_norm(
        rules.windowed_mean(1.0, 4), stacked=STACKED, **axes
    ),
    "larc": lambda **axes: optaxclip.larc(0.1, stacked=STACKED, **axes),
    "skip_spikes": lambda **axes: optaxclip.skip_spikes(
        optax.chain(by_unit(0.5, **axes), adam), 15.0, **axes
    ),
}


@pytest.mark.parametrize("name", PARTLY)
def test_partly_manual_shard_map_of_an_explicit_mesh(name):
    mesh = sharded.mesh_of((2, 2), kind=EXPLICIT)
    specs = of_steps(ROWS)

    def run(params, grads, **axes):
        clipper = PARTLY[name](**axes)
        return scanned(clipper, params, clipper.init(params), grads)[0]

    with jax.set_mesh(mesh):
        params = sharded.place(PARAMS, mesh, SPECS)
        grads = sharded.place(GRADS, mesh, of_steps(SPECS))
        body = partial(run, mesh_axes=ROWS)
        specs = {"in_specs": (ROWS, specs), "out_specs": specs}
        have = jax.jit(jax.shard_map(body, **specs, axis_names={"x"}))(params, grads)
        assert types(have) == types(grads)
    assert_same_values(have, run(PARAMS, GRADS))
