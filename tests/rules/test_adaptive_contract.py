"""The promises of every clipper, for those that learn: what is tested for fixed limits
in tests/core/test_contract.py holds with a memory too.
"""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.core.steps import same_bits
from tests.helpers import exact
from tests.rules.learning import CLIPPERS, built, history, run, times

every_clipper = pytest.mark.parametrize("name", CLIPPERS)
OF_GROUPS = ["zclip of groups", "aggc"]  # of a tree that has all labels
KEPT_WHOLE = [
    name for name in CLIPPERS if name not in ("adaclip", "deviation, smooth")
]  # the norm of what comes out is the limit or the norm that came


def filled(tree, value):
    return jax.tree.map(lambda x: jax.device_put(np.full_like(x, value)), tree)


@every_clipper
@pytest.mark.parametrize("dtype", ["mixed", "float32"])
def test_updates_and_state_keep_kinds_and_norms_their_limit(name, dtype):
    shortens = CLIPPERS[name][1]
    grads = history(dtype, name=name)
    clipper, _ = built(name)
    first = clipper.init(grads[0])
    chex.assert_trees_all_equal_structs(
        first,
        clipper.init(
            jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), grads[0])
        ),
    )
    touched = 0
    for before, (after, state) in zip(grads, run(name, grads)):
        chex.assert_trees_all_equal_shapes_and_dtypes(after, before)
        chex.assert_trees_all_equal_shapes_and_dtypes(state, first)
        one, other = exact(before), exact(after)
        for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other)):
            assert np.isfinite(y).all()
            assert not shortens or np.linalg.norm(y) <= np.linalg.norm(x) * (1 + 1e-6)
        touched += sum(
            not np.array_equal(x, y)
            for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other))
        )
        norms, limits, factors = (
            np.concatenate([np.ravel(x) for x in jax.tree.leaves(field)])
            for field in (state.norm, state.limit, state.factor)
        )
        if name in KEPT_WHOLE:
            assert np.all(norms * factors <= limits * (1 + 1e-6))
    assert touched > 0


@every_clipper
@pytest.mark.parametrize("nonfinite", ["propagate", "zero"])
def test_a_broken_or_zero_step_keeps_the_bits_of_the_memory(name, nonfinite):
    grads = history("float32", 5, name)
    broken = [filled(grads[0], bad) for bad in (math.nan, math.inf, 0.0)]
    alone = run(name, grads, nonfinite=nonfinite)
    steps = [*broken, *grads[:2], *broken, *grads[2:]]
    mixed = run(name, steps, nonfinite=nonfinite)
    for place, (updates, state) in zip((3, 4, 8, 9, 10), alone):
        same_bits(mixed[place][0], updates)
        same_bits(mixed[place][1].memory, state.memory)
    for place in (0, 1, 5, 6):
        wanted = np.isnan if nonfinite == "propagate" else lambda x: np.asarray(x) == 0
        assert all(wanted(leaf).all() for leaf in jax.tree.leaves(mixed[place][0]))
    for place in (2, 7):
        same_bits(mixed[place][0], broken[2])
    assert all(
        (np.asarray(count) == 4).all()
        for count in jax.tree.leaves(mixed[-1][1].nonfinite)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [name for name in CLIPPERS if name not in (*OF_GROUPS, "ratio, drop")],
)
@pytest.mark.parametrize("size", [1e38, 1e-30])
def test_extreme_numbers_are_learned_from_like_others(name, size):
    """The norms of ten steps, multiplied by 1e38 or 1e-30: nothing becomes NaN, inf or
    0, in the memory neither.
    """
    factors = [0.5, 0.7, 0.4, 1.0, 0.6, 0.8, 0.5, 0.9, 0.3, 1.0]
    shape = {"w": np.asarray([[1.0, 0.0], [0.5, 0.0]]), "b": np.asarray([0.0, 1.0])}
    for updates, state in run(
        name, [times(factor * size, shape) for factor in factors]
    ):
        for leaf, pattern in zip(jax.tree.leaves(updates), jax.tree.leaves(shape)):
            assert np.isfinite(leaf).all() and np.array_equal(
                np.asarray(leaf) != 0, np.asarray(pattern) != 0
            )
        assert not any(np.isnan(x).any() for x in jax.tree.leaves(state))


# Each dtype with clippers of a global norm, of single tensors and of elements; together
# they are in the mixed tree above.
@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        *(("bfloat16", name) for name in ("autoclip", "adagc")),
        *(("float16", name) for name in ("zclip", "adaclip")),
        *(("complex64", name) for name in ("tracker under a cap", "adagc", "adaclip")),
    ],
)
def test_within_the_limit_bits_are_kept_and_above_it_the_bound(name, dtype):
    grads = history(dtype, name=name)
    for before, (after, state) in zip(grads, run(name, grads)):
        eps = float(jnp.finfo(dtype).eps)
        factors = [entry.factor for entry in state.by_name().values()]
        leaves, clipped = jax.tree.leaves(before), jax.tree.leaves(after)
        if len(factors) == 1:
            factors *= len(leaves)
        for x, y, factor in zip(leaves, clipped, factors, strict=True):
            if float(factor) == 1:
                same_bits(x, y)
            elif name != "adaclip":
                np.testing.assert_allclose(
                    np.asarray(y, complex),
                    np.asarray(x, complex) * float(factor),
                    rtol=8 * eps if eps < 1e-3 else eps,
                    atol=6e-8 if dtype == "float16" else 0,
                )
