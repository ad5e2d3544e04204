"""What holds for every tree: random ones of all structures, dtypes and sizes."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests import oracles
from tests.core.random_trees import (
    ALL_DTYPES,
    CLIPPERS,
    assert_bound,
    clip,
    every_clipper,
    lengths,
    limits,
    parts,
    properties,
    values,
    weights,
)

LARGEST = {
    "float16": 14
}  # exponents that a dtype holds, sums of squares of them included; 118 for all others
SMALLEST = {"float16": -24}  # -126 for all others
PARTS = {"complex64": 2}
# Few trees of (dtype, shape), since each is compiled for each clipper: float32 alone,
# no float32 at all, and all dtypes beside a leaf without elements.
ONLY_FLOAT32 = [
    ("float32", (5, 3)),
    ("float32", ()),
    ("float32", (2, 1, 3, 2)),
    ("float32", (7,)),
]
STRUCTURES = [ONLY_FLOAT32, ALL_DTYPES, [("bfloat16", (3, 1)), ("complex64", (5, 3))]]


def tree_of(structure, random, middle, spread, zeros):
    leaves = []
    for dtype, shape in structure:
        lowest, highest = SMALLEST.get(dtype, -126), LARGEST.get(dtype, 118)
        x = sum(
            values(random, shape, middle, spread, lowest, highest) * unit
            for unit in (1, 1j)[: PARTS.get(dtype, 1)]
        )
        leaves.append(jnp.asarray(np.where(random.random(shape) < zeros, 0, x), dtype))
    return leaves


@st.composite
def trees(draw, structures=STRUCTURES):
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    middle, spread = (
        draw(st.integers(-126, 118)),
        draw(st.sampled_from([0, 3, 40, 250])),
    )
    return tree_of(
        draw(st.sampled_from(structures)),
        random,
        middle,
        spread,
        draw(st.sampled_from([0, 0, 0.3, 1])),
    )


def limit_at(share, name, leaves):
    """A limit that float32 holds, so many times the largest norm; of AGC a share of the
    weights that makes about as much.
    """
    largest = max(lengths(name, leaves), default=0) or 1.0
    return float(np.float32(np.clip(largest * 2.0**share, 2.0**-100, 2.0**127)))


shares = st.one_of(st.floats(-3, 1), st.floats(-200, 2))
EPS = oracles.eps_of("float32")


@every_clipper
@pytest.mark.slow
def test_updates_are_those_of_the_equation(name):
    @properties
    @given(trees(), shares)
    def check(leaves, share):
        params, limit = weights(leaves, name), limit_at(share, name, leaves)
        clipped, _ = clip(name, leaves, limit, params)
        for ours, expected, leaf in zip(
            clipped, CLIPPERS[name][2](leaves, limit, params), leaves, strict=True
        ):
            assert ours.dtype == leaf.dtype and ours.shape == leaf.shape
            relative = (10 if name == "agc" else 8) * EPS + oracles.eps_of(
                leaf.dtype
            ) / 2
            assert (
                np.abs(oracles.wide(ours) - expected)
                <= relative * np.abs(expected) + oracles.floor_of(leaf.dtype)
            ).all(), (ours, expected)

    check()


@pytest.mark.slow
@every_clipper
def test_direction_is_kept(name):
    @properties
    @given(trees(), shares)
    def check(leaves, share):
        params, limit = weights(leaves, name), limit_at(share, name, leaves)
        clipped, _ = clip(name, leaves, limit, params)
        for before, after in zip(
            parts(name, leaves), parts(name, clipped), strict=True
        ):
            if not before:
                continue
            x, y = (
                np.concatenate([np.ravel(values) for values, _ in part])
                for part in (before, after)
            )
            # What rounding may have changed each element by, half an eps of its dtype
            # and 2 of float32's products.
            slack = np.concatenate(
                [
                    np.ravel(
                        np.abs(y) * (oracles.eps_of(dtype) / 2 + 2 * EPS)
                        + oracles.floor_of(dtype)
                    )
                    for y, dtype in after
                ]
            )
            if not np.abs(x).any():
                assert not np.abs(y).any()
                continue
            # The factor that the most precise element tells. All others must have been
            # multiplied by it.
            best = np.argmin(
                np.where(x != 0, slack / np.maximum(np.abs(x), 1e-300), np.inf)
            )
            factor = y[best] / x[best]
            assert (
                abs(factor.imag) <= slack[best] / np.abs(x[best]) and factor.real >= 0
            )
            assert (
                np.abs(y - factor.real * x)
                <= slack + slack[best] / np.abs(x[best]) * np.abs(x)
            ).all()

    check()


@every_clipper
@pytest.mark.slow
def test_clipped_updates_are_no_longer_than_the_limit(name):
    @properties
    @given(trees(), shares)
    def check(leaves, share):
        params, limit = weights(leaves, name), limit_at(share, name, leaves)
        assert_bound(name, leaves, clip(name, leaves, limit, params)[0], limit, params)

    check()


@pytest.mark.slow
@every_clipper
def test_updates_below_the_limit_keep_their_bits(name):
    @properties
    @given(trees(), st.floats(1e-6, 4))
    def check(leaves, above):
        params = weights(leaves, name)
        limit = limit_at(above, name, leaves)
        if (
            name == "agc"
        ):  # the weights' share at which the shortest limit is long enough
            limit = (
                max(lengths(name, leaves), default=1)
                / min(limits(name, leaves, 1.0, params), default=1)
                * 2.0**above
            )
            assume(limit < 2.0**127)
        clipped, _ = clip(name, leaves, limit, params)
        assert all(map(oracles.same_bits, clipped, leaves))

    check()


def per_leaf(norms, leaves):
    """Norms by name as a list. A leaf without elements has none."""
    return [norms.get(str(i)) for i in range(len(leaves))]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["global", "tensor", "rms"])
def test_updates_exactly_at_the_limit_keep_their_bits(name):
    @properties
    @given(trees())
    def check(leaves):
        known = clip(name, leaves, math.inf)[1].by_name()
        norms = {key: entry.norm for key, entry in known.items()}
        limit = norms[""] if name == "global" else per_leaf(norms, leaves)
        clipped, state = clip(name, leaves, limit)
        assert all(map(oracles.same_bits, clipped, leaves))
        assert not any(map(np.any, jax.tree.leaves(state.clipped)))

    check()


@pytest.mark.slow
@every_clipper
def test_clipping_twice_is_clipping_once(name):
    @properties
    @given(trees([ONLY_FLOAT32]), shares)
    def check(leaves, share):
        params, limit = weights(leaves, name), limit_at(share, name, leaves)
        once, _ = clip(name, leaves, limit, params)
        twice, state = clip(name, once, limit, params)
        assert all(map(oracles.same_bits, twice, once))
        assert not any(np.any(count) for count in jax.tree.leaves(state.clipped))

    check()
