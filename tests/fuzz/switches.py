"""JAX's switches: a clipper under each does what it does without."""

from typing import Any

import jax
import numpy as np

import optaxclip
from tests import oracles
from tests.fuzz.cases import Case
from tests.fuzz.transformations import jitted, plain
from tests.fuzz.trees import evaluate
from tests.methods import ALONE, BITS, Method

# Without debug_infs: no limit is written as inf, as docs/sharp_edges.md says.
SWITCHES: dict[str, str] = {
    "x64": "jax.enable_x64(True)",
    "strict promotion": "jax.numpy_dtype_promotion('strict')",
    "debug_nans": "jax.debug_nans(True)",
    "disable_jit": "jax.disable_jit()",
    "tracer leaks": "jax.checking_leaks()",
    "rank promotion": "jax.numpy_rank_promotion('raise')",
}


def under(case: Case, switch: str) -> None:
    """Eager, under jit and differentiated, and `metrics` of the state."""
    steps, params = case.updates(), case.weights()
    wanted = plain(case.clipper(), steps, params)
    with evaluate(SWITCHES[switch]):
        clipper = case.clipper()
        for way in (clipper, jitted(clipper)):
            same(plain(way, steps, params), wanted, case.kind.ord == "spectral")
        _, state = clipper.update(steps[0], clipper.init(params), params)
        if isinstance(state, optaxclip.ClipState | optaxclip.SkipState):
            optaxclip.metrics(state)
        if has_derivative(case.kind):
            differentiated(clipper, steps[0], params)


def has_derivative(method: Method) -> bool:
    """Is it finite everywhere? Singular values that are equal have none."""
    of_gradients = method.leaves != ALONE and not method.wraps
    return BITS in method.keeps and of_gradients and method.ord != "spectral"


def differentiated(clipper: Any, updates: Any, params: Any) -> None:
    """The derivative of what comes out is finite."""

    def step(tree):
        return clipper.update(tree, clipper.init(params), params)[0]

    out, pull = jax.vjp(step, updates)
    for leaf in jax.tree.leaves(pull(out)):
        assert np.isfinite(np.asarray(leaf)).all(), "the derivative is not finite"


def same(found: list[Any], wanted: list[Any], spectral: bool = False) -> None:
    """Equal to 8 eps of float32 and one of the leaf: norms may round differently.

    A decomposition may be off by 5e-6 of the longest, as docs/numerics.md says.
    """
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert x.dtype == y.dtype, ("dtype", x.dtype, "instead of", y.dtype)
        eps = 8 * 2.0**-23 + oracles.eps_of(y.dtype)
        smallest = oracles.floor_of(y.dtype) * 2
        x, y = oracles.wide(x), oracles.wide(y)
        if spectral and np.isfinite(y).all():
            smallest += 2 * 5e-6 * np.linalg.norm(y)
        np.testing.assert_allclose(x, y, rtol=eps, atol=smallest)
