"""Norms of groups by each way of arithmetic, called directly on this CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optaxclip._norms._collectives import Split
from optaxclip._norms._groups import Group, layout_of
from optaxclip._norms._in_blocks import entry_at
from tests.ways import ON_ACCELERATORS, WAYS, norm

pytestmark = pytest.mark.slow

every_way = pytest.mark.parametrize("way", WAYS)


def leaf(seed, *shape):
    values = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(values, "float32")


# Several leaves, one leaf twice in one size, none, and units of which two are alike.
GROUPS = [
    ([leaf(1, 3, 2), leaf(2, 4), leaf(3)], None),
    ([leaf(4, 2, 3)], None),
    ([leaf(5, 6)], None),
    ([], None),
    ([leaf(6, 5, 3)], (0,)),
    ([leaf(7, 2, 4, 3)], (0, 1)),
    ([leaf(8, 9, 3)], (0,)),
]


def groups_of(cases):
    return [Group(leaves, dims, [Split()] * len(leaves)) for leaves, dims in cases]


def norms_by(way, groups, counts=None):
    layout = layout_of(groups)
    leaves = [group.leaves for group in groups]
    blocks = jax.jit(lambda x: WAYS[way].norms(layout, x, counts))(leaves)
    return blocks, [part.place for part in layout]


@every_way
def test_groups_of_every_kind_have_their_own_norms(way):
    blocks, places = norms_by(way, groups_of(GROUPS))
    # Two arrays of one shape are one block. The numbers are another.
    assert [block.shape for block in blocks] == [(4,), (2, 1, 3), (1, 1, 3)]
    for (leaves, dims), place in zip(GROUPS, places):
        found = entry_at(blocks, place)
        np.testing.assert_allclose(found, norm(WAYS[way].ord, leaves, dims), 1e-6)


@every_way
def test_the_norm_of_everything_is_one_number(way):
    groups = groups_of(GROUPS[:1])
    (found,), _ = norms_by(way, groups)
    assert found.shape == ()
    np.testing.assert_allclose(found, norm(WAYS[way].ord, *GROUPS[0]), 1e-6)


@pytest.mark.parametrize("way", [name for name in WAYS if WAYS[name].ord == 2])
def test_sums_are_divided_by_their_counts_before_the_root(way):
    counts = [jnp.array([4.0, 9.0])]
    (norms,), _ = norms_by(way, groups_of(GROUPS[1:3]), counts)
    expected = [norm(WAYS[way].ord, *case) for case in GROUPS[1:3]]
    np.testing.assert_allclose(norms, expected / np.array([2.0, 3.0]), 1e-6)


@pytest.mark.parametrize("way", ON_ACCELERATORS)
def test_groups_without_leaves_bring_no_float64(way):
    layout, leaves = layout_of(groups_of(GROUPS)), [leaves for leaves, _ in GROUPS]
    norms = jax.jit(lambda x: WAYS[way].norms(layout, x, None))
    assert "f64" not in norms.lower(leaves).as_text()


# Groups whose small leaves are read together, and by how many reductions.
TOGETHER = {
    "leaves of one norm": ("gpu", [([leaf(1, 3, 2), leaf(2, 4)], None)], 1),
    "norms of one size": ("gpu", [([leaf(1, 6)], None), ([leaf(2, 2, 3)], None)], 1),
    "leaves of one shape": ("tpu", [([leaf(1, 6)], None), ([leaf(2, 6)], None)], 1),
    "leaves with units": ("gpu", [([leaf(1, 6)], (0,)), ([leaf(2, 6)], (0,))], 2),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_small_leaves_are_read_together(name):
    way, cases, count = TOGETHER[name]
    layout, leaves = layout_of(groups_of(cases)), [leaves for leaves, _ in cases]
    # Inlined: a text of a program has a function that it calls twice only once.
    with jax.disable_jit():
        program = jax.make_jaxpr(lambda x: WAYS[way].norms(layout, x, None))(leaves)
    assert str(program).count("= reduce") == count
