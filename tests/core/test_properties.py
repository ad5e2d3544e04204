"""What holds for every tree: random ones of mixed dtypes over the whole range of
float32, and ones that are built to break the bound.

Tolerances: float32 arithmetic takes at most 8 eps off a result (5 of them on purpose,
see `root_between`, the rest for norm, limit, roots and products), 2 more where the
limit is itself a product; rounding to the leaf's dtype changes it by half an eps of
that dtype, or by what its subnormal range loses (`oracles.floor_of`).
"""

import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import optaxclip
from tests import oracles

LABELS = ("even", "odd")
DTYPES = ("float32", "bfloat16", "float16", "complex64")
LARGEST = {
    "float16": 14
}  # exponents that a dtype holds, sums of squares of them included; 118 for all others
SMALLEST = {"float16": -24}  # -126 for all others
PARTS = {"complex64": 2}

properties = settings(deadline=None, max_examples=30, derandomize=True, database=None)


# Few trees of (dtype, shape), since each is compiled for each clipper: float32 alone,
# no float32 at all, and all dtypes beside a leaf without elements.
ONLY_FLOAT32 = [
    ("float32", (5, 3)),
    ("float32", ()),
    ("float32", (2, 1, 3, 2)),
    ("float32", (7,)),
]
ALL_DTYPES = [
    ("float32", ()),
    ("bfloat16", (7,)),
    ("float16", (2, 3, 4)),
    ("complex64", (1,)),
    ("float32", (0, 3)),
]
STRUCTURES = [ONLY_FLOAT32, ALL_DTYPES, [("bfloat16", (3, 1)), ("complex64", (5, 3))]]


def values(random, shape, middle, spread, lowest, highest):
    exponents = np.clip(middle + spread * random.uniform(-1, 1, shape), lowest, highest)
    return (
        random.choice([-1, 1], shape)
        * random.uniform(1, 2, shape)
        * 2.0 ** np.floor(exponents)
    )


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


def units_of(leaves):
    """[(leaf number, index)] for each unit."""
    for i, leaf in enumerate(leaves):
        axes = oracles.unit_axes(leaf)
        kept = [size if axis not in axes else 1 for axis, size in enumerate(leaf.shape)]
        for index in np.ndindex(*kept):
            yield (
                i,
                tuple(
                    slice(None) if axis in axes else at for axis, at in enumerate(index)
                ),
            )


def everything(leaves):
    return [[(i, ...) for i in range(len(leaves))]]


def each(leaves):
    return [[(i, ...)] for i in range(len(leaves))]


def by_label(leaves):
    return [[(i, ...) for i in range(start, len(leaves), 2)] for start in (0, 1)]


def unit(leaves):
    return [[place] for place in units_of(leaves)]


def labels(leaves):
    return [LABELS[i % 2] for i in range(len(leaves))]


CLIPPERS = {
    "global": (
        lambda limit, _: optaxclip.clip_by_global_norm(limit),
        everything,
        lambda leaves, limit, _: oracles.clip_global(leaves, limit),
    ),
    "tensor": (
        lambda limit, _: optaxclip.clip_by_tensor_norm(limit),
        each,
        lambda leaves, limit, _: oracles.clip_tensors(leaves, limit),
    ),
    "unit": (
        lambda limit, _: optaxclip.clip_by_unitwise_norm(limit),
        unit,
        lambda leaves, limit, _: oracles.clip_units(leaves, limit),
    ),
    "group": (
        lambda limit, leaves: optaxclip.clip_by_group_norm(limit, labels(leaves)),
        by_label,
        lambda leaves, limit, _: oracles.clip_groups(leaves, labels(leaves), limit),
    ),
    "rms": (
        lambda limit, _: optaxclip.clip_by_tensor_rms(limit),
        each,
        lambda leaves, limit, _: oracles.clip_rms(leaves, limit),
    ),
    "agc": (
        lambda limit, _: optaxclip.adaptive_grad_clip(limit, 1e-3),
        unit,
        lambda leaves, limit, params: oracles.clip_adaptively(leaves, params, limit),
    ),
}
every_clipper = pytest.mark.parametrize("name", CLIPPERS)


def order(name):
    return "rms" if name == "rms" else 2


def parts(name, leaves):
    """The parts of the tree that are measured together, each a list of float64 arrays
    with its leaf's dtype beside it.
    """
    return [
        [
            (oracles.wide(leaves[i])[index], leaves[i].dtype)
            for i, index in part
            if leaves[i].size
        ]
        for part in CLIPPERS[name][1](leaves)
    ]


def lengths(name, leaves):
    return [
        oracles.norm([x for x, _ in part], order(name)) for part in parts(name, leaves)
    ]


def weights(leaves, name):
    """Weights of moderate size, some shorter than the least that counts."""
    random = np.random.default_rng(1)
    return (
        [
            jnp.asarray(
                random.standard_normal(leaf.shape) * 10.0 ** random.uniform(-4, 1),
                leaf.dtype,
            )
            for leaf in leaves
        ]
        if name == "agc"
        else None
    )


def limits(name, leaves, limit, params):
    """What each part is held against."""
    if name != "agc":
        return [limit] * len(parts(name, leaves))
    return [limit * max(length, 1e-3) for length in lengths(name, params)]


def limit_at(share, name, leaves):
    """A limit that float32 holds, so many times the largest norm; of AGC a share of the
    weights that makes about as much.
    """
    largest = max(lengths(name, leaves), default=0) or 1.0
    return float(np.float32(np.clip(largest * 2.0**share, 2.0**-100, 2.0**127)))


def clip(name, leaves, limit, params=None):
    clipper = CLIPPERS[name][0](limit, leaves)
    return clipper.update(
        leaves,
        first_state(name, tuple((leaf.dtype, leaf.shape) for leaf in leaves)),
        params,
    )


@cache
def first_state(name, structure):
    leaves = [jax.ShapeDtypeStruct(shape, dtype) for dtype, shape in structure]
    return CLIPPERS[name][0](1.0, leaves).init(leaves)


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


def assert_bound(name, leaves, clipped, limit, params):
    for _before, after, most in zip(
        parts(name, leaves),
        parts(name, clipped),
        limits(name, leaves, limit, params),
        strict=True,
    ):
        eps = max((oracles.eps_of(dtype) for _, dtype in after), default=0)
        count = sum(x.size for x, _ in after)
        lost = (
            math.sqrt(
                sum(x.size * oracles.floor_of(dtype) ** 2 for x, dtype in after)
                / (count if name == "rms" else 1)
            )
            if count
            else 0
        )
        assert (
            oracles.norm([x for x, _ in after], order(name)) <= most * (1 + eps) + lost
        )


@every_clipper
@pytest.mark.slow
def test_clipped_updates_are_no_longer_than_the_limit(name):
    @properties
    @given(trees(), shares)
    def check(leaves, share):
        params, limit = weights(leaves, name), limit_at(share, name, leaves)
        assert_bound(name, leaves, clip(name, leaves, limit, params)[0], limit, params)

    check()


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


# built to break the bound


@pytest.mark.slow
@every_clipper
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("limit", [1.0, 0.3, 1e-2])
def test_equal_values_that_all_round_up_stay_within_the_bound(limit, dtype, name):
    leaves = [jnp.asarray(np.full((64, 3), value), dtype) for value in (1.0, 1.1, 7.77)]
    params = weights(leaves, name)
    assert_bound(name, leaves, clip(name, leaves, limit, params)[0], limit, params)


@every_clipper
def test_one_huge_leaf_among_tiny_ones_stays_within_the_bound(name):
    values = (3e38, [1e-38, 2e-38], [1.5, 2e-7], 1e-20j, 0)  # over and over
    leaves = [
        jnp.asarray(np.resize(x, shape), dtype)
        for x, (dtype, shape) in zip(values, ALL_DTYPES, strict=True)
    ]
    for limit in (1e30, 1.0, 1e-3, 1e-30):
        params = weights(leaves, name)
        assert_bound(name, leaves, clip(name, leaves, limit, params)[0], limit, params)


@pytest.mark.slow
def test_2000_bfloat16_leaves_of_ones_stay_within_the_bound():
    leaves = [jnp.ones((3,), jnp.bfloat16)] * 2000
    # What the clipper does, op by op: compiling two thousand leaves is not what is
    # tested.
    norm = optaxclip.global_norm(leaves)
    np.testing.assert_allclose(norm, math.sqrt(6000), 1e-6)
    clipped = optaxclip.rescale(leaves, norm, jnp.minimum(norm, 1.0))
    assert oracles.norm(clipped) <= 1 + oracles.eps_of("bfloat16")
    assert oracles.norm(clipped) >= 1 - oracles.eps_of("bfloat16")


@pytest.mark.parametrize("count", [1, 10, 100, 10_000])
@pytest.mark.slow
def test_any_number_of_leaves_stays_within_the_bound(count):
    random = np.random.default_rng(count)
    kinds = [
        jnp.asarray(random.standard_normal(shape), dtype)
        for shape in ((), (3,), (2, 2))
        for dtype in DTYPES
    ]
    leaves = [kinds[i] for i in random.integers(0, len(kinds), count)]
    norm = optaxclip.global_norm(leaves)
    clipped = optaxclip.rescale(leaves, norm, jnp.minimum(norm, 0.5))
    np.testing.assert_allclose(norm, oracles.norm(leaves), 1e-6)
    lost = math.sqrt(count * 4) * 2.0**-25
    assert oracles.norm(clipped) <= 0.5 * (1 + oracles.eps_of("bfloat16")) + lost


# float64


@pytest.mark.slow
@every_clipper
def test_64_bit_updates_up_to_1e200_are_those_of_the_equation(name):
    eps = oracles.eps_of("float64")

    @properties
    @given(
        st.integers(0, 2**32 - 1),
        st.integers(-660, 660),
        st.sampled_from([0, 10, 600]),
        st.floats(-60, 2),
    )
    def check(seed, middle, spread, share):
        random = np.random.default_rng(seed)
        leaves = [
            jnp.asarray(values(random, shape, middle, spread, -660, 660))
            for shape in ((5, 3), ())
        ]
        leaves.append(
            jnp.asarray(
                values(random, (7,), middle, spread, -660, 660)
                + 1j * values(random, (7,), middle, spread, -660, 660)
            )
        )
        params = weights(leaves, name)
        limit = max(lengths(name, leaves)) * 2.0**share
        clipped, _ = clip(name, leaves, limit, params)
        for ours, expected, leaf in zip(
            clipped, CLIPPERS[name][2](leaves, limit, params), leaves, strict=True
        ):
            assert ours.dtype == leaf.dtype
            # The sum of 23 squares adds 12 eps to the norm of the weights and of the
            # gradient, each.
            assert (
                np.abs(oracles.wide(ours) - expected) <= 36 * eps * np.abs(expected)
            ).all()
        assert_bound_64(leaves, clipped, limit, params)

    def assert_bound_64(leaves, clipped, limit, params):
        for after, most in zip(
            parts(name, clipped), limits(name, leaves, limit, params), strict=True
        ):
            assert oracles.norm([x for x, _ in after], order(name)) <= most * (1 + eps)

    with jax.enable_x64(True):
        check()
