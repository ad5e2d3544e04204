"""Norms of groups whose leaves are split over two devices, by each platform's way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from optaxclip._norms._collectives import Split
from optaxclip._norms._groups import Group, layout_of
from optaxclip._norms._in_blocks import entry_at
from tests.sharded import mesh_of, on_two_devices
from tests.ways import WAYS, norm

LEAVES = {
    name: np.random.default_rng(seed).standard_normal((4, 6)).astype(np.float32)
    for seed, name in enumerate("abcdef")
}
ROWS, COLUMNS, WHOLE = P("x", None), P(None, "x"), P()
SPECS = {"a": ROWS, "b": WHOLE, "c": ROWS, "d": COLUMNS, "e": COLUMNS, "f": WHOLE}
# The leaves of each group, what is summed, and how its norm is split.
SUMMED = [
    ("ab", None, P()),
    ("bfa", None, P()),
    ("c", None, P()),
    ("b", None, P()),
    ("c", (0,), P()),
]
KEPT = [("a", None, P()), ("b", None, P()), ("d", (0,), COLUMNS), ("e", (0,), COLUMNS)]


def split(spec, dims):
    """How a leaf of this spec is split, seen from a norm over these dimensions."""
    names = ("x",) if "x" in spec else ()
    if dims is None:
        return Split(names)
    summed = names if spec == ROWS else ()
    return Split(summed, () if summed else names, spec)


@pytest.mark.parametrize(
    "options", [{}, {"check_vma": False}], ids=["typed", "untyped"]
)
@pytest.mark.parametrize("groups", [SUMMED, KEPT], ids=["summed", "kept"])
@pytest.mark.parametrize("way", WAYS)
def test_a_norm_over_devices_is_that_of_whole_leaves(way, groups, options):
    def norms(leaves):
        own = [
            Group(
                [leaves[x] for x in names], dims, [split(SPECS[x], dims) for x in names]
            )
            for names, dims, _ in groups
        ]
        layout = layout_of(own)
        blocks = WAYS[way].norms(layout, [group.leaves for group in own], None)
        return [entry_at(blocks, part.place) for part in layout]

    specs = [spec for _, _, spec in groups]
    found = on_two_devices(norms, (SPECS,), specs, LEAVES, **options)
    for each, (names, dims, _) in zip(found, groups):
        expected = norm(WAYS[way].ord, [LEAVES[name] for name in names], dims)
        np.testing.assert_allclose(each, expected, 1e-6)


def test_units_split_in_other_ways_are_in_other_blocks():
    leaf = jnp.asarray(LEAVES["a"])
    splits = [split(spec, (0,)) for spec in (ROWS, COLUMNS, ROWS)]
    layout = layout_of([Group([leaf], (0,), [each]) for each in splits])
    assert [part.place for part in layout] == [(0, 0), (1, None), (0, 1)]


def test_norms_of_one_shape_are_one_block_whatever_is_summed():
    column, row = jnp.ones((5, 1)), jnp.ones((1, 5))
    groups = [Group([column], (0,), [Split()]), Group([row], (1,), [Split()])]
    assert [part.place for part in layout_of(groups)] == [(0, 0), (0, 1)]


def test_units_that_an_explicit_mesh_splits_alike_are_one_block():
    mesh = mesh_of((2,), ("x",), kind=AxisType.Explicit)
    groups = []
    for spec in (COLUMNS, ROWS, P(None, None), COLUMNS):
        leaf = jax.device_put(LEAVES["a"], jax.NamedSharding(mesh, spec))
        groups.append(Group([leaf], (0,), [Split()]))
    places = [part.place for part in layout_of(groups)]
    assert places == [(0, 0), (1, 0), (1, 1), (0, 1)]
