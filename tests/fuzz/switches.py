"""JAX's switches, under which a clipper does what it does without."""

from functools import partial
from typing import Any

import jax
import numpy as np

import optaxclip
from tests import oracles
from tests.fuzz.cases import Case
from tests.methods import ALONE, BITS, Method

# Without debug_infs: no limit is written as inf, as docs/sharp_edges.md says.
SWITCHES = {
    "x64": partial(jax.enable_x64, True),
    "strict promotion": partial(jax.numpy_dtype_promotion, "strict"),
    "debug_nans": partial(jax.debug_nans, True),
    "disable_jit": jax.disable_jit,
    "tracer leaks": jax.checking_leaks,
    "rank promotion": partial(jax.numpy_rank_promotion, "raise"),
}


def plain(clipper: Any, steps: list[Any], params: Any) -> list[Any]:
    """The updates of some steps."""
    state, found = clipper.init(params), []
    for updates in steps:
        updates, state = clipper.update(updates, state, params)
        found.append(updates)
    return found


def jitted(clipper: Any) -> Any:
    return clipper._replace(update=jax.jit(clipper.update))


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
    return float(2 * 16 * 2.0**-23 * max(sizes, default=0.0))


def same(found: list[Any], wanted: list[Any], off: float = 0.0) -> None:
    """Equal to 8 eps of float32 and one of the leaf: norms may round differently."""
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert x.dtype == y.dtype, ("dtype", x.dtype, "instead of", y.dtype)
        eps = 8 * 2.0**-23 + oracles.eps_of(y.dtype)
        smallest = oracles.floor_of(y.dtype) * 2 + off
        x, y = oracles.wide(x), oracles.wide(y)
        np.testing.assert_allclose(x, y, rtol=eps, atol=smallest)
