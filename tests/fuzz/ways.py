"""What users do with a clipper: each function is the same clipper in another way. And
JAX's switches, under which a clipper does what it does without.
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
from tests import oracles
from tests.fuzz.cases import Case
from tests.methods import ALONE, BITS, Method


def plain(clipper: Any, steps: list[Any], params: Any) -> list[Any]:
    """The updates of some steps."""
    state, found = clipper.init(params), []
    for updates in steps:
        updates, state = clipper.update(updates, state, params)
        found.append(updates)
    return found


def jitted(clipper: Any) -> Any:
    return clipper._replace(update=jax.jit(clipper.update))


def in_scan(clipper: Any) -> Any:
    def update(updates, state, params):
        def step(state, _):
            return clipper.update(updates, state, params)[::-1]

        state, found = jax.lax.scan(step, state, length=1)
        return jax.tree.map(lambda x: x[0], found), state

    return clipper._replace(update=jax.jit(update))


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


def exported_for_any_size(clipper: Any) -> Any:
    """The first step, of leaves whose size only a run knows."""

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


def inside_optax(clipper: Any) -> Any:
    """Wrappers of optax around each other, and `skip_nonfinite` around all of them."""
    optimizer = optax.named_chain(("clip", clipper), ("rest", optax.identity()))
    optimizer = optax.masked(optimizer, lambda tree: jax.tree.map(lambda _: True, tree))
    labels = partial(jax.tree.map, lambda _: "all")
    optimizer = optax.partition({"all": optimizer}, labels)
    optimizer = optax.MultiSteps(optimizer, 1).gradient_transformation()
    return jitted(optaxclip.skip_nonfinite(optax.chain(optimizer, optax.identity())))


def pickled_as_numpy(clipper: Any) -> Any:
    def update(*trees):
        saved = pickle.dumps(jax.tree.map(np.asarray, trees))
        return clipper.update(*pickle.loads(saved))

    return clipper._replace(update=update)


def on_mesh(clipper: Any, kind: AxisType) -> Any:
    """All leaves split over a mesh of eight devices, each step in a scan."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind,) * 2)
    one_step = in_scan(clipper).update

    def split(x):
        spec = P("x", "y") if x.ndim == 2 else P(("x", "y"))
        return jax.device_put(x, NamedSharding(mesh, spec))

    def init(params):
        with jax.set_mesh(mesh):
            return jax.jit(clipper.init)(jax.tree.map(split, params))

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


ANY_METHOD = [jitted, in_scan, vmapped, inside_optax, pickled_as_numpy]
ON_DEVICES = [on_explicit_mesh, on_auto_mesh]
FIRST_STEP = [in_shard_map, exported_for_any_size]

# Without debug_infs: no limit is written as inf, as docs/sharp_edges.md says.
SWITCHES = {
    "x64": partial(jax.enable_x64, True),
    "strict promotion": partial(jax.numpy_dtype_promotion, "strict"),
    "debug_nans": partial(jax.debug_nans, True),
    "disable_jit": jax.disable_jit,
    "tracer leaks": jax.checking_leaks,
    "rank promotion": partial(jax.numpy_rank_promotion, "raise"),
}


@cache
def pair(way: Any, name: str, limit: str | None) -> tuple[Any, Any]:
    """(the clipper, the same in another way), built once, with what they compiled."""
    clipper = Case(name, (), "", limit).clipper()
    return clipper, way(clipper)


def same_in_another_way(case: Case, way: Any) -> None:
    """A transformation changes nothing."""
    clipper, other = pair(way, case.method, case.limit)
    steps, params = case.updates(), case.weights()
    steps = steps[:1] if way in FIRST_STEP else steps
    wanted, found = plain(clipper, steps, params), plain(other, steps, params)
    same(found, wanted, off_by_a_decomposition(case))


def under(case: Case, switch: str) -> None:
    """Eager, under jit and differentiated, and `metrics` of the state."""
    steps, params = case.updates(), case.weights()
    wanted = plain(case.clipper(), steps, params)
    with SWITCHES[switch]():
        clipper = case.clipper()
        for way in (clipper, jitted(clipper)):
            same(plain(way, steps, params), wanted, off_by_a_decomposition(case))
        _, state = clipper.update(steps[0], clipper.init(params), params)
        if isinstance(state, optaxclip.ClipState | optaxclip.SkipState):
            optaxclip.metrics(state)
        if has_derivative(case.kind):
            out, pull = jax.vjp(lambda tree: plain(clipper, [tree], params), steps[0])
            for leaf in jax.tree.leaves(pull(out)):
                assert np.isfinite(np.asarray(leaf)).all(), "no finite derivative"


def has_derivative(method: Method) -> bool:
    """Is it finite everywhere? Singular values that are equal have none."""
    of_gradients = method.leaves != ALONE and not method.wraps
    return BITS in method.keeps and of_gradients and method.ord != "spectral"


def off_by_a_decomposition(case: Case) -> float:
    """How far two decompositions may be apart: each is off by 16 eps of the longest
    singular value, as the docstring of `clip_by_spectral_norm` says.
    """
    if case.kind.ord != "spectral":
        return 0.0
    leaves = [oracles.wide(leaf) for leaf in jax.tree.leaves(case.updates())]
    sizes = [np.linalg.norm(leaf[np.isfinite(leaf)]) for leaf in leaves]
    return 2 * 16 * 2.0**-23 * max(sizes, default=0.0)


def same(found: list[Any], wanted: list[Any], off: float = 0.0) -> None:
    """Equal to 8 eps of float32 and one of the leaf: norms may round differently."""
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert x.dtype == y.dtype, ("dtype", x.dtype, "instead of", y.dtype)
        eps = 8 * 2.0**-23 + oracles.eps_of(y.dtype)
        smallest = oracles.floor_of(y.dtype) * 2 + off
        x, y = oracles.wide(x), oracles.wide(y)
        np.testing.assert_allclose(x, y, rtol=eps, atol=smallest)
