"""One model, the ways to spread it over devices, and what every clipper must make of
it, written out in float64 NumPy.
"""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optaxclip

# Every kind of leaf: whole, split on the first, the last and two dimensions, over one
# axis and over both, a stack of layers, a scalar.
SHAPES = {
    "bias": (7,),
    "columns": (5, 24),
    "folded": (24, 3),
    "gain": (),
    "grid": (24, 48),
    "layers": (3, 24, 24),
}
SPECS = {
    "bias": P(),
    "columns": P(None, "x"),
    "folded": P(("x", "y")),
    "gain": P(),
    "grid": P("y", "x"),
    "layers": P(None, "y", "x"),
}
STACKED = {name: int(name == "layers") for name in SHAPES}
LABELS = {
    name: "head" if name in ("bias", "folded", "gain") else "body" for name in SHAPES
}
MASK = {name: name not in ("bias", "grid") for name in SHAPES}

# Devices along x and y: 4 (an axis of size 1), 6 and 8 devices.
SIZES = [(4, 1), (3, 2), (2, 4)]


class Case(NamedTuple):
    build: Callable[..., Any]  # (limit, mesh_axes=...) -> clipper
    # float64 NumPy tree -> for each clipped leaf its norms, which broadcast to the leaf
    norms: Callable[[Any], Any]
    # does a norm keep dimensions of a leaf, so that the names of axes alone do not do?
    keeps: bool = False
    relative: bool = False  # is the limit a share of the weights' norm?


def root(arrays: list[Any], over: Any, ord: Any) -> Any:
    """The norm of several arrays over the dimensions `over` (None: all)."""
    sizes, keep = [np.abs(x) for x in arrays], over is not None
    if ord == math.inf:
        return np.max([np.max(x, over, keepdims=keep) for x in sizes], axis=0)
    p = 2 if isinstance(ord, str) else ord
    norm = sum(np.sum(x**p, over, keepdims=keep) for x in sizes) ** (1 / p)
    count = sum(x.size for x in sizes) / np.size(norm)
    return norm / {"rms": math.sqrt(count), "average": count}.get(ord, 1)


def together(
    ord: Any = 2, label: Callable[[str], Any] = lambda name: "all"
) -> Callable[[Any], Any]:
    """One norm for all leaves of a label; a leaf with the label None has none."""

    def norms(tree):
        groups = {}
        for name, x in tree.items():
            groups.setdefault(label(name), []).append(x)
        groups.pop(None, None)
        known = {key: root(leaves, None, ord) for key, leaves in groups.items()}
        return {name: known[label(name)] for name in tree if label(name) in known}

    return norms


def each(dims: Callable[[str, int], Any], ord: Any = 2) -> Callable[[Any], Any]:
    """Norms of each leaf over the dimensions that `dims` names."""
    return lambda tree: {
        name: root([x], dims(name, x.ndim), ord) for name, x in tree.items()
    }


def whole(name, rank):
    return None


def layer(name, rank):
    return tuple(range(1, rank)) if name == "layers" else None


def unit(name, rank):
    return {2: (0,), 3: (0,), 4: (0, 1, 2)}.get(rank)


def unit_of_layer(name, rank):
    return (1,) if name == "layers" else unit(name, rank)


def masked(clip: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **options: optax.masked(clip(*args, **options), MASK)


by_norm, by_tensor = optaxclip.clip_by_global_norm, optaxclip.clip_by_tensor_norm
by_rms, by_unit = optaxclip.clip_by_tensor_rms, optaxclip.clip_by_unitwise_norm
agc, by_group = optaxclip.adaptive_grad_clip, optaxclip.clip_by_group_norm
stacked = {"stacked": STACKED}
KEPT, SHARE = {"keeps": True}, {"keeps": True, "relative": True}


def clipped_alone(tree: Any) -> Any:
    """The norms of units of the leaves that the mask has."""
    return each(unit)({name: x for name, x in tree.items() if MASK[name]})


CASES = {
    "clip_by_global_norm": Case(by_norm, together()),
    "clip_by_global_norm ord=1": Case(partial(by_norm, ord=1), together(1)),
    "clip_by_global_norm ord=3": Case(partial(by_norm, ord=3), together(3)),
    "clip_by_global_norm ord=inf": Case(
        partial(by_norm, ord=math.inf), together(math.inf)
    ),
    "clip_by_global_norm ord=rms": Case(partial(by_norm, ord="rms"), together("rms")),
    "clip_by_global_norm masked": Case(
        masked(by_norm), together(label=lambda name: MASK[name] or None)
    ),
    "clip_by_group_norm": Case(
        partial(by_group, labels=LABELS), together(label=LABELS.get)
    ),
    "clip_by_tensor_norm": Case(by_tensor, each(whole)),
    "clip_by_tensor_norm ord=inf": Case(
        partial(by_tensor, ord=math.inf), each(whole, math.inf)
    ),
    "clip_by_tensor_norm stacked": Case(
        partial(by_tensor, **stacked), each(layer), **KEPT
    ),
    "clip_by_tensor_rms": Case(by_rms, each(whole, "rms")),
    "clip_by_tensor_rms stacked": Case(
        partial(by_rms, **stacked), each(layer, "rms"), **KEPT
    ),
    "clip_by_average_norm": Case(
        optaxclip.clip_by_average_norm, each(whole, "average")
    ),
    "clip_by_unitwise_norm": Case(by_unit, each(unit), **KEPT),
    "clip_by_unitwise_norm ord=inf": Case(
        partial(by_unit, ord=math.inf), each(unit, math.inf), **KEPT
    ),
    "clip_by_unitwise_norm stacked": Case(
        partial(by_unit, **stacked), each(unit_of_layer), **KEPT
    ),
    "adaptive_grad_clip": Case(agc, each(unit), **SHARE),
    "adaptive_grad_clip stacked": Case(
        partial(agc, **stacked), each(unit_of_layer), **SHARE
    ),
    "adaptive_grad_clip masked": Case(masked(agc), clipped_alone, **SHARE),
    "adaptive_grad_clip per tensor": Case(
        partial(agc, per_tensor=True), each(whole), relative=True
    ),
}

# Each public clipper once, for what takes time: the leaves that are stacked make its
# way the longest.
CLIPPERS = [
    "clip_by_global_norm",
    "clip_by_unitwise_norm stacked",
    "clip_by_average_norm",
    "clip_by_tensor_rms",
    "clip_by_group_norm",
]
CLIPPERS += [
    "adaptive_grad_clip stacked",
    "clip_by_tensor_norm stacked",
    "adaptive_grad_clip per tensor",
]


def random_tree(seed: int, shapes: Any = SHAPES) -> dict[str, Any]:
    """Float32 values that differ widely between elements and between leaves."""
    random = np.random.default_rng(seed)
    size = {name: math.exp(random.standard_normal()) for name in shapes}
    return {
        name: np.float32(
            random.standard_normal(s) * np.exp(random.standard_normal(s)) * size[name]
        )
        for name, s in shapes.items()
    }


UPDATES, PARAMS = random_tree(1), random_tree(2)


def exact(tree: Any) -> Any:
    return {name: np.asarray(x, np.float64) for name, x in tree.items()}


@cache
def limit(name: str) -> float:
    """So small that more than half of the norms are clipped."""
    case = CASES[name]
    norms, weights = case.norms(exact(UPDATES)), case.norms(exact(PARAMS))
    if case.relative:
        norms = {leaf: x / np.maximum(weights[leaf], 1e-3) for leaf, x in norms.items()}
    every = np.concatenate([np.ravel(norm) for norm in norms.values()])
    return float(0.7 * np.median(every))


def wanted(name: str, updates: Any = UPDATES, params: Any = PARAMS) -> dict[str, Any]:
    """What the clipper makes of the whole tree: g * min(1, limit / |g|)."""
    case, updates = CASES[name], exact(updates)
    norms, weights = case.norms(updates), case.norms(exact(params))
    limits = {
        leaf: limit(name) * (np.maximum(weights[leaf], 1e-3) if case.relative else 1.0)
        for leaf in norms
    }
    return {
        leaf: x * np.minimum(1.0, limits[leaf] / norms[leaf]) if leaf in norms else x
        for leaf, x in updates.items()
    }


def clip(name: str, mesh_axes: Any, updates: Any, params: Any) -> tuple[Any, Any]:
    """One step of a clipper of the table."""
    clipper = CASES[name].build(limit(name), mesh_axes=mesh_axes)
    return clipper.update(updates, clipper.init(params), params)


def mesh_of(
    sizes: tuple[int, ...],
    names: tuple[str, ...] = ("x", "y"),
    kind: AxisType = AxisType.Auto,
) -> Mesh:
    kinds, devices = (kind,) * len(sizes), jax.devices()[: math.prod(sizes)]
    return jax.make_mesh(sizes, names, axis_types=kinds, devices=devices)


def only(names: tuple[str, ...], specs: Any) -> Any:
    """The specs without the axes that are not named."""

    def entry(group):
        group = group if isinstance(group, tuple) else (group,)
        kept = tuple(name for name in group if name in names)
        return kept[0] if len(kept) == 1 else kept or None

    return {name: P(*map(entry, spec)) for name, spec in specs.items()}


def place(tree: Any, mesh: Mesh, specs: Any) -> Any:
    return {
        name: jax.device_put(x, NamedSharding(mesh, specs[name]))
        for name, x in tree.items()
    }


def parts(tree: Any, specs: Any, count: int) -> Any:
    """For pmap: the devices' parts of each leaf along the axis "x", stacked on a new
    first dimension.
    """

    def of(x, spec):
        dims = [dim for dim, entry in enumerate(spec) if entry is not None]
        return np.stack(np.split(x, count, dims[0]) if dims else [x] * count)

    return {name: of(x, specs[name]) for name, x in tree.items()}


def joined(tree: Any, specs: Any) -> Any:
    """The inverse of `parts`; of what every device holds, the first one's."""

    def of(x, spec):
        dims = [dim for dim, entry in enumerate(spec) if entry is not None]
        return np.concatenate(list(np.asarray(x)), dims[0]) if dims else x[0]

    return {name: of(x, specs[name]) for name, x in tree.items()}


def replicas_agree(array: jax.Array) -> bool:
    """Do all devices that hold the same part of an array hold the same bits?"""
    held: dict[str, set[bytes]] = {}
    for shard in array.addressable_shards:
        held.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
    return all(len(bits) == 1 for bits in held.values())


def assert_close(have: Any, want: Any, rtol: float = 1e-6) -> None:
    """Relative error of each element; `want` is float64."""
    assert have.keys() == want.keys()
    for name in want:
        wide = np.asarray(have[name], np.float64)
        np.testing.assert_allclose(wide, want[name], rtol, atol=0, err_msg=name)


def on_each_part(
    body: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any, **options: Any
) -> jax.stages.Wrapped:
    """A jitted shard_map."""
    specs = {"mesh": mesh, "in_specs": in_specs, "out_specs": out_specs}
    return jax.jit(jax.shard_map(body, **specs, **options))


def on_two_devices(function, in_specs, out_specs, *args, **options):
    """What the function gives in `shard_map` over an axis x of two devices."""
    mesh = mesh_of((2,), ("x",))
    return on_each_part(function, mesh, in_specs, out_specs, **options)(*args)


def on_four_devices(function, in_specs, out_specs):
    """The function in `shard_map` over axes x and y of two devices each."""
    return on_each_part(function, mesh_of((2, 2)), in_specs, out_specs)
