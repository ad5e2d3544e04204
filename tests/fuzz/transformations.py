"""What users do with a clipper: each function is the same clipper in another way.

`compare` holds the updates of some steps against those without it. Functions stand
alone but for `plain`, since a finding prints their source.
"""

import pickle
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optaxclip


def plain(clipper: Any, steps: list[Any], params: Any) -> list[Any]:
    """The updates of some steps."""
    state, found = clipper.init(params), []
    for updates in steps:
        updates, state = clipper.update(updates, state, params)
        found.append(updates)
    return found


def jitted(clipper: Any) -> Any:
    return clipper._replace(update=jax.jit(clipper.update))


def scanned(clipper: Any) -> Any:
    @jax.jit
    def update(updates, state, params):
        def step(state, each):
            return clipper.update(each, state, params)[::-1]

        one = jax.tree.map(lambda x: x[None], updates)
        state, found = jax.lax.scan(step, state, one)
        return jax.tree.map(lambda x: x[0], found), state

    return clipper._replace(update=update)


def vmapped(clipper: Any) -> Any:
    def two(tree):
        return jax.tree.map(lambda x: jnp.stack([x, x / 2]), tree)

    @jax.jit
    def update(updates, state, params):
        many = jax.vmap(clipper.update, in_axes=(0, 0, None))
        found, state = many(two(updates), state, params)
        return jax.tree.map(lambda x: x[0], found), state

    def init(params):
        return jax.vmap(clipper.init)(two(params))

    return optax.GradientTransformation(init, update)


def exported(clipper: Any) -> Any:
    @cache
    def program(treedef, shapes):
        shapes = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
        return jax.export.export(jax.jit(clipper.update))(*treedef.unflatten(shapes))

    def update(*args):
        leaves, treedef = jax.tree.flatten(args)
        return program(treedef, tuple((x.shape, x.dtype) for x in leaves)).call(*args)

    return clipper._replace(update=update)


def exported_for_any_size(clipper: Any) -> Any:
    @cache
    def program():
        def step(tree, params):
            return clipper.update(tree, clipper.init(tree), params)[0]

        (size,) = jax.export.symbolic_shape("size")
        trees = {name: jax.ShapeDtypeStruct((size,), jnp.float32) for name in "ab"}
        return jax.export.export(jax.jit(step))(trees, trees)

    def update(updates, state, params):
        return program().call(updates, params), state

    return clipper._replace(update=update)


def in_multi_steps(clipper: Any) -> Any:
    return jitted(optax.MultiSteps(clipper, 1).gradient_transformation())


def masked(clipper: Any) -> Any:
    def mask(tree):
        return jax.tree.map(lambda _: True, tree)

    return jitted(optax.masked(clipper, mask))


def partitioned(clipper: Any) -> Any:
    def labels(tree):
        return jax.tree.map(lambda _: "all", tree)

    return jitted(optax.partition({"all": clipper}, labels))


def chained(clipper: Any) -> Any:
    return optax.named_chain(("clip", clipper), ("rest", optax.identity()))


def in_skip_nonfinite(clipper: Any) -> Any:
    optimizer = optax.chain(clipper, optax.identity())
    return jitted(optaxclip.skip_nonfinite(optimizer))


def pickled(clipper: Any) -> Any:
    def update(updates, state, params):
        saved = pickle.dumps(jax.tree.map(np.asarray, state))
        return clipper.update(updates, pickle.loads(saved), params)

    return clipper._replace(update=update)


def from_numpy(clipper: Any) -> Any:
    def update(updates, state, params):
        return clipper.update(*jax.tree.map(np.asarray, (updates, state, params)))

    return clipper._replace(update=update)


def on_mesh(clipper: Any, kind: AxisType) -> Any:
    """All leaves split over a mesh of eight devices, each step in a scan."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind,) * 2)

    def split(x):
        spec = P("x", "y") if x.ndim == 2 else P(("x", "y"))
        return jax.device_put(x, NamedSharding(mesh, spec))

    def init(params):
        with jax.set_mesh(mesh):
            return jax.jit(clipper.init)(jax.tree.map(split, params))

    @jax.jit
    def one_step(updates, state, params):
        def step(state, _):
            return clipper.update(updates, state, params)[::-1]

        state, found = jax.lax.scan(step, state, length=1)
        return jax.tree.map(lambda x: x[0], found), state

    def update(updates, state, params):
        with jax.set_mesh(mesh):
            updates, params = jax.tree.map(split, (updates, params))
            return one_step(updates, state, params)

    return optax.GradientTransformation(init, update)


def on_explicit_mesh(clipper: Any) -> Any:
    return on_mesh(clipper, AxisType.Explicit)


def on_auto_mesh(clipper: Any) -> Any:
    return on_mesh(clipper, AxisType.Auto)


def in_shard_map(clipper: Any) -> Any:
    """One step of gradients that eight devices share. The state starts anew."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    def step(updates, params):
        return clipper.update(updates, clipper.init(updates), params)[0]

    def update(updates, state, params):
        return step(updates, params), state

    return clipper._replace(update=update)


ANY_METHOD = [jitted, scanned, vmapped, exported, in_multi_steps, masked, partitioned]
ANY_METHOD += [chained, in_skip_nonfinite, pickled, from_numpy]
ON_DEVICES = [on_explicit_mesh, on_auto_mesh]
FIRST_STEP = [in_shard_map, exported_for_any_size]
