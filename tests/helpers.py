"""What tests share: the clippers by norm with their equations in float64 NumPy, random
trees, and comparisons.
"""

import itertools
import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial

import optaxclip
from tests import oracles
from tests.methods import ALONE, METHODS, Method

LABELS = {"kernel": "matrix", "bias": "vector", "block": "matrix"}
SHAPES = {"kernel": (5, 3), "bias": (7,), "block": {"conv": (2, 3, 4), "gain": ()}}

# Which form of sums all tests take, where they are told so.
FORCED = os.environ.get("OPTAXCLIP_PLATFORM")
only_by_a_cpu = pytest.mark.skipif(
    FORCED in ("gpu", "plain"), reason="looks at what is compiled for a CPU"
)


def with_rows(state, **rows):
    """A state with other numbers in some of its rows."""
    if isinstance(state, optaxclip.ClipState):
        fields = {
            "counts": ("step", "clipped", "nonfinite"),
            "numbers": ("norm", "limit", "factor", "clipped_recently"),
        }
    else:
        # The first two fields hold the rows.
        fields = dict(zip(state._fields, state.ROWS))
    for field, names in fields.items():
        array = getattr(state, field)
        for index, name in enumerate(names):
            if name in rows:
                array = array.at[index].set(rows[name])
        state = state._replace(**{field: array})
    for name, value in rows.items():
        assert np.all(getattr(state, name) == value), name
    return state


def length(part):
    return float(np.sqrt(sum(np.sum(np.abs(x) ** 2) for x in part)))


class Case(NamedTuple):
    """A clipper and its equation."""

    build: Callable[..., Any]  # (limit, **options) -> clipper
    # From a tree in NumPy to what is measured together, each a list of arrays.
    parts: Callable[[Any], list[Any]]
    norm: Callable[[list[Any]], float] = length
    relative: bool = False  # is the limit a share of the weights' norm?
    floor: float = 1e-3  # ... which counts as at least this
    # (part, limit) -> part, where it does more than scale, by a decomposition.
    clip: Callable[[list[Any], float], list[Any]] | None = None
    # The limit is no None and no schedule, and norms are not taken from elsewhere.
    numbers_only: bool = False


def smallest(dtype):
    """The smallest number of a dtype that is kept where nothing is clipped.

    A GPU keeps all of them. On a CPU its way flushes subnormal ones.
    """
    info = jnp.finfo(dtype)
    least = info.tiny if FORCED == "gpu" else info.smallest_subnormal
    return float(least)


def everything(tree):
    return [jax.tree.leaves(tree)]


def leaves(tree):
    return [[leaf] for leaf in jax.tree.leaves(tree)]


def units(tree):
    def of(x):
        if x.ndim <= 1:
            return [x]
        return [x[(slice(None), *index)] for index in np.ndindex(x.shape[1:])]

    return [[unit] for leaf in jax.tree.leaves(tree) for unit in of(leaf)]


def groups(tree):
    """Matrices, and all else, as `labels_by_rank` has it."""
    return [
        [tree["block"]["conv"], tree["kernel"]],
        [tree["bias"], tree["block"]["gain"]],
    ]


def rms(part):
    return float(np.sqrt(np.mean(np.abs(part[0]) ** 2)))


def average(part):
    return float(np.sqrt(np.sum(np.abs(part[0]) ** 2)) / part[0].size)


def largest(part):
    return float(np.max(np.abs(part[0])))


def matrix(x):
    return x.reshape(-1, x.shape[-1]) if x.ndim > 1 else x.reshape(1, -1)


def largest_singular_value(part):
    return float(np.linalg.norm(matrix(part[0]), 2))


def singular_values_clipped(part, limit):
    u, s, vh = np.linalg.svd(matrix(part[0]), full_matrices=False)
    return [((u * np.minimum(s, limit)) @ vh).reshape(part[0].shape)]


PARTS = {"all": everything, "tensor": leaves, "unit": units, "group": groups}
NORMS = {2: length, "rms": rms, "average": average, "spectral": largest_singular_value}


def case_of(method: Method) -> Case:
    """The equation of a clipper of the registry."""
    return Case(
        partial(method.build, **method.quick) if method.quick else method.build,
        PARTS[method.norm],
        NORMS[method.ord],
        relative=method.floor is not None,
        clip=singular_values_clipped if method.ord == "spectral" else None,
    )


CLIPPERS = {
    name: case_of(method)
    for name, method in METHODS.items()
    if method.shrinks and method.leaves != ALONE
}
# Their limits are numbers of each element and of each tensor.
CLIPPERS["clippy"] = Case(
    partial(optaxclip.clippy, 0.0), leaves, largest, numbers_only=True
)
CLIPPERS["larc"] = Case(
    partial(optaxclip.larc, 1.0, eps=0.0),
    leaves,
    relative=True,
    floor=0.0,
    numbers_only=True,
)

# A clipper meets float32 and all dtypes in one tree; a tree of 16-bit or complex
# numbers alone meets every third clipper, and 64 bits those that test_properties does
# not have.
PURE = dict(zip(CLIPPERS, itertools.cycle(("bfloat16", "float16", "complex64"))))
IN_64_BITS = (
    "clip_by_global_norm",
    "clip_by_average_norm",
    "adaptive_grad_clip per tensor",
    "clip_by_spectral_norm",
    "clippy",
    "larc",
)
PAIRS = [
    (name, dtype)
    for name in CLIPPERS
    for dtype in ("float32", PURE[name], "mixed", "float64")
    if dtype != "float64" or name in IN_64_BITS
]


def random_tree(dtype: str, seed: int = 0, scale: float = 1.0) -> Any:
    """Random, non-square, non-uniform. "mixed" gives every leaf a dtype of its own."""
    random = np.random.default_rng(seed)
    mixed = iter(("bfloat16", "float32", "complex64", "float16"))

    def leaf(shape):
        kind = next(mixed) if dtype == "mixed" else dtype
        values = random.standard_normal(shape) * np.exp(random.standard_normal(shape))
        values = values * scale
        if kind == "complex64":
            values = values + 1j * random.standard_normal(shape) * scale
        # jnp.asarray compiles a program for each shape.
        return jax.device_put(values.astype(jnp.dtype(kind)))

    return jax.tree.map(leaf, SHAPES, is_leaf=lambda x: isinstance(x, tuple))


def with_value(leaf: Any, index: Any, value: Any) -> Any:
    """The array with another value in one place."""
    changed = np.array(leaf)
    changed[index] = value
    return jax.device_put(changed)


def exact(tree: Any) -> Any:
    """The same tree in 64-bit NumPy."""
    return jax.tree.map(oracles.wide, tree)


def scaled(case: Case, part: list[Any], limit: float) -> list[Any]:
    """What the paper's equation makes of a part that may be as long as `limit`."""
    if case.clip:
        return case.clip(part, limit)
    length = case.norm(part)
    return [x * min(1.0, limit / length) if length else x for x in part]


def limits(case: Case, limit: float, tree: Any, params: Any) -> list[float]:
    """The limit of each part, in float64."""
    if not case.relative:
        return [limit] * len(case.parts(exact(tree)))
    lengths = map(case.norm, case.parts(exact(params)))
    return [limit * max(length, case.floor) for length in lengths]


def assert_scaled(
    case: Case, clipped: Any, updates: Any, limit: float, params: Any
) -> None:
    """That every part is what the equation makes of it, and no longer than its limit,
    in the precision of each leaf.

    16-bit leaves are rounded to their dtype; the rest carries the kernel's own small
    bias of a few float32 eps. A decomposition may be wrong by 16 eps of the longest in
    every element, as LAPACK's.
    """

    def filled(number):
        return jax.tree.map(lambda x: np.full(np.shape(x), number(x.dtype)), updates)

    # Of float16 also the spacing near 0.
    precision = filled(lambda dtype: float(jnp.finfo(dtype).eps))
    spacing = filled(lambda dtype: 6e-8 if dtype == jnp.float16 else 0.0)
    trees = exact(updates), exact(clipped), precision, spacing
    most_of = limits(case, limit, updates, params)
    for *part, most in zip(*map(case.parts, trees), most_of, strict=True):
        before, after, epses, tinies = part
        wanted = scaled(case, before, most)
        for x, y, eps, tiny in zip(wanted, after, epses, tinies, strict=True):
            eps, atol = np.max(eps), np.max(tiny)
            atol = atol + (16 * eps * case.norm(before) if case.clip else 0.0)
            rtol = 8 * eps if eps < 1e-3 else eps
            np.testing.assert_allclose(y, x, rtol=rtol, atol=atol)
        eps, tiny = (max(map(np.max, numbers)) for numbers in (epses, tinies))
        eps = eps * (25 if case.clip else 1)  # a decomposition's as documented
        lost = tiny * np.sqrt(sum(x.size for x in after))
        assert case.norm(after) <= most * (1 + eps) + lost


def scanned(transformation: Any, grads: Any) -> tuple[Any, Any]:
    """(the last state, the updates of all steps) of a run over gradients with a leading
    axis of steps.
    """
    start = transformation.init(jax.tree.map(lambda x: x[0], grads))
    return jax.lax.scan(
        lambda state, each: transformation.update(each, state)[::-1], start, grads
    )


class OwnRule(optaxclip.rules.Rule):
    """A rule of two functions, `begin(norm)` and `judge(norm, memory, step)`."""

    begin: Any
    judge: Any

    def init(self, norm):
        return self.begin(norm)

    def update(self, norm, memory, step):
        return self.judge(norm, memory, step)


def own_rule(begin, judge):
    return OwnRule(Partial(begin), Partial(judge))


def apply(clipper, updates, params=None, **extra):
    """(updates, state) of the first step."""
    return clipper.update(updates, clipper.init(updates), params, **extra)


def run_of(clipper, *grads, params=None):
    """[(updates, state) of each step]."""
    state, found = clipper.init(grads[0]), []
    for each in grads:
        updates, state = clipper.update(each, state, params)
        found.append((updates, state))
    return found


def after(clipper, *grads, params=None):
    """The state after steps with these gradients."""
    return run_of(clipper, *grads, params=params)[-1][1]


FEW_STEPS = 9


def limits_of(rule, norms):
    """The limits of a rule over a short history, which goes on as it ends: replays of
    one length share what they compile around their scan.
    """
    longer = np.pad(np.float32(norms), (0, FEW_STEPS - len(norms)), mode="edge")
    return np.asarray(optaxclip.replay.run(rule, longer).limits)[: len(norms)]


# Every float of 8 or 4 bits. JAX promotes none of them by itself.
SMALL_FLOATS = (
    "float4_e2m1fn",
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)
