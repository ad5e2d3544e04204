"""What holds for every tree: random ones of all dtypes and sizes, from the cases of
`tests/fuzz`, and trees that were built to break it.

Tolerances are those of `tests/fuzz/expected.py`.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import optaxclip
from tests import oracles
from tests.fuzz import expected
from tests.fuzz.cases import Case, cases
from tests.helpers import apply
from tests.norms.leaves import not_in_turn

EPS = oracles.eps_of("float32")
NORMAL = (-126, 118)  # powers of 2 whose squares may be summed
CLIPPERS = [
    "clip_by_global_norm",
    "clip_by_tensor_norm",
    "clip_by_unitwise_norm",
    "clip_by_group_norm",
    "clip_by_tensor_rms",
    "adaptive_grad_clip",
]
every_clipper = pytest.mark.parametrize("name", CLIPPERS)
properties = settings(deadline=None, max_examples=30, derandomize=True, database=None)
# Few structures, since each is compiled for each clipper.
KINDS = ("float32", "sixteen", "complex", "mixed")
shares = st.one_of(st.floats(-3, 1), st.floats(-200, 2))


def drawn(name, kinds=KINDS):
    return st.sampled_from(kinds).flatmap(
        lambda kind: cases(name, kind, powers=NORMAL, limit="1.0", options="")
    )


def parts_at(case, tree, share):
    """(limit, parts): so many times the longest norm; of AGC a share of the weights
    that makes about as much.
    """
    parts = expected.parts_of(case, tree, 1.0)
    longest = max((part.norm / part.limit for part in parts), default=0) or 1.0
    limit = float(np.float32(np.clip(longest * 2.0**share, 2.0**-100, 2.0**127)))
    return limit, expected.parts_of(case, tree, limit)


def clipped_at(case, limit, tree):
    """(updates, state) of the first step."""
    return apply(case.kind.make(limit), tree, case.weights())


def assert_right(case, tree, limit, parts):
    """Every part is what the equation makes of it, and no longer than its limit."""
    updates, _ = clipped_at(case, limit, tree)
    for part in parts:
        expected.check_part(case, part, tree, updates)
        expected.check_bound(case, part, updates)


@every_clipper
@pytest.mark.slow
def test_updates_are_those_of_the_equation(name):
    """And are no longer than the limit."""

    @properties
    @given(drawn(name), shares)
    def check(case, share):
        (tree,) = case.updates()
        assert_right(case, tree, *parts_at(case, tree, share))

    check()


@pytest.mark.slow
@every_clipper
def test_direction_is_kept(name):
    @properties
    @given(drawn(name), shares)
    def check(case, share):
        (tree,) = case.updates()
        limit, parts = parts_at(case, tree, share)
        updates, _ = clipped_at(case, limit, tree)
        for part in parts:
            x, y = (joined(tree, part, expected.values) for tree in (tree, updates))
            slack = joined(updates, part, rounding_of)
            if not np.abs(x).any():
                assert not np.abs(y).any()
                continue
            # The factor that the most precise element tells. All others must have been
            # multiplied by it.
            size = np.maximum(np.abs(x), 1e-300)
            best = np.argmin(np.where(x != 0, slack / size, np.inf))
            factor, unsure = y[best] / x[best], slack[best] / size[best]
            assert abs(factor.imag) <= unsure and factor.real >= 0
            assert (np.abs(y - factor.real * x) <= slack + unsure * size).all()

    check()


def joined(tree, part, values):
    return np.concatenate([np.ravel(values(tree, place)) for place in part.places])


def rounding_of(tree, place):
    """What rounding may have changed each element by: half an eps of its dtype, and 2
    of float32's products.
    """
    dtype = expected.dtype_of(tree[place[0]])
    relative = oracles.eps_of(dtype) / 2 + 2 * EPS
    return np.abs(expected.values(tree, place)) * relative + oracles.floor_of(dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", [CLIPPERS[0], CLIPPERS[1], CLIPPERS[4]])
def test_updates_exactly_at_the_limit_keep_their_bits(name):
    @properties
    @given(drawn(name))
    def check(case):
        (tree,) = case.updates()
        known = clipped_at(case, math.inf, tree)[1].by_name()
        norms = {key: entry.norm for key, entry in known.items()}
        # A leaf that is not measured has no limit.
        limit = norms[""] if "" in norms else {key: norms.get(key) for key in tree}
        updates, state = clipped_at(case, limit, tree)
        assert all(map(oracles.same_bits, *map(jax.tree.leaves, (updates, tree))))
        assert not any(map(np.any, jax.tree.leaves(state.clipped)))

    check()


@pytest.mark.slow
@every_clipper
def test_clipping_twice_is_clipping_once(name):
    @properties
    @given(drawn(name, ["float32"]), shares)
    def check(case, share):
        (tree,) = case.updates()
        limit, _ = parts_at(case, tree, share)
        once, _ = clipped_at(case, limit, tree)
        twice, state = clipped_at(case, limit, once)
        assert all(map(oracles.same_bits, *map(jax.tree.leaves, (twice, once))))
        assert not any(map(np.any, jax.tree.leaves(state.clipped)))

    check()


# Trees that were built to break the bound.


def case_of(name, tree):
    """A case around a tree that is not drawn, with weights of moderate size."""
    random = np.random.default_rng(1)
    weights = {}
    for key, leaf in tree.items():
        size = 10.0 ** random.uniform(-4, 1)
        weights[key] = jnp.asarray(size * random.normal(size=leaf.shape), leaf.dtype)

    class Given(Case):
        def weights(self):
            return weights

    return Given(name, (), "")


@pytest.mark.slow
@every_clipper
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("limit", [1.0, 0.3, 1e-2])
def test_equal_values_that_all_round_up_stay_within_the_bound(limit, dtype, name):
    tree = {f"{x}": jnp.asarray(np.full((64, 3), x), dtype) for x in (1.0, 1.1, 7.77)}
    case = case_of(name, tree)
    assert_right(case, tree, limit, expected.parts_of(case, tree, limit))


@every_clipper
def test_one_huge_leaf_among_tiny_ones_stays_within_the_bound(name):
    kinds = ("float32", ()), ("bfloat16", 7), ("float16", (2, 3, 4)), ("complex64", 1)
    values = (3e38, [1e-38, 2e-38], [1.5, 2e-7], 1e-20j)  # over and over
    tree = {}
    for (dtype, shape), x in zip(kinds, values, strict=True):
        tree[dtype] = jnp.asarray(np.resize(x, shape), dtype)
    case = case_of(name, tree)
    for limit in (1e30, 1.0, 1e-3, 1e-30):
        updates, _ = clipped_at(case, limit, tree)
        for part in expected.parts_of(case, tree, limit):
            expected.check_bound(case, part._replace(checked=True), updates)


@pytest.mark.parametrize("count", [1, 10, 100, pytest.param(10_000, marks=not_in_turn)])
@pytest.mark.slow
def test_any_number_of_leaves_stays_within_the_bound(count):
    # What the clipper does, op by op: compiling thousands of leaves is not what is
    # tested.
    random = np.random.default_rng(count)
    kinds = [
        jnp.asarray(random.standard_normal(shape), dtype)
        for shape in ((), (3,), (2, 2))
        for dtype in ("float32", "bfloat16", "float16", "complex64")
    ]
    leaves = [kinds[i] for i in random.integers(0, len(kinds), count)]
    norm = optaxclip.global_norm(leaves)
    clipped = optaxclip.rescale(leaves, norm, jnp.minimum(norm, 0.5))
    np.testing.assert_allclose(norm, oracles.norm(leaves), 1e-6)
    lost = math.sqrt(count * 4) * 2.0**-25
    assert oracles.norm(clipped) <= 0.5 * (1 + oracles.eps_of("bfloat16")) + lost


@pytest.mark.slow
@every_clipper
def test_64_bit_updates_up_to_1e200_are_those_of_the_equation(name):
    eps = oracles.eps_of("float64")

    @properties
    @given(cases(name, "float64", powers=(-660, 660), limit="1.0", options=""), shares)
    def check(case, share):
        (tree,) = case.updates()
        for part in expected.parts_of(case, tree, 1.0):
            limit = (part.norm or 1.0) * 2.0 ** max(share, -60) / part.limit
            updates, _ = clipped_at(case, limit, tree)
            most = limit * part.limit
            factor = min(1.0, most / part.norm) if part.norm else 1.0
            x, y = (joined(tree, part, expected.values) for tree in (tree, updates))
            # The sum of squares adds 12 eps to the norm of the weights and of the
            # gradient, each.
            assert (np.abs(y - x * factor) <= 36 * eps * np.abs(x * factor)).all()
            assert oracles.norm([y], case.kind.ord) <= most * (1 + eps)

    with jax.enable_x64(True):
        check()
