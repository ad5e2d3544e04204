"""From norm and new norm to the factor, and the multiplication by each platform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optaxclip._core import _factors
from optaxclip._core._factors import (
    factor_between,
    multiply,
    stretch,
    zero_where_zero,
)
from optaxclip._norms._in_blocks import in_blocks, norms_of_tree

pytestmark = pytest.mark.slow

EPS, TINY, MOST = (
    float(getattr(jnp.finfo("float32"), name)) for name in ("eps", "tiny", "max")
)
TREE = {
    "a": jnp.arange(1.0, 7.0).reshape(2, 3),
    "b": jnp.arange(4.0),
    "c": -jnp.arange(6.0).reshape(2, 3),
    "d": jnp.array(2.0),
}
# Roots in the form of norms: of everything, of leaves, of units, and of some leaves.
ROOTS = {
    "everything": 0.5,
    "leaves": {"a": 0.5, "b": 2.0, "c": 0.0, "d": 1.0},
    "units": {"a": [[0.5, 2.0, 3.0]], "b": 0.25, "c": [[1.0, 0.0, 4.0]], "d": 3.0},
    "one leaf": {"a": None, "b": 0.5, "c": None, "d": None},
    "groups": ({"a": 0.5, "b": 2.0}, 4.0),
}


def in_form_of(name):
    """The tree, its norms, and their roots in blocks."""
    roots = jax.tree.map(jnp.float32, ROOTS[name], is_leaf=lambda x: type(x) is list)
    tree = ({x: TREE[x] for x in "ab"}, {x: TREE[x] for x in "cd"})
    tree = tree if name == "groups" else TREE
    norms = norms_of_tree(roots, tree)
    return tree, norms, in_blocks(jax.tree.leaves(roots), norms.places)


def root_of_each_leaf(name):
    if name == "everything":
        return [0.5] * 4
    if name == "groups":
        return [0.5, 2.0, 4.0, 4.0]
    return [1.0 if x is None else np.float32(x) for x in ROOTS[name].values()]


@pytest.mark.parametrize("all_read", [_factors.ALL_READ, 1])
@pytest.mark.parametrize("name", ROOTS)
@pytest.mark.parametrize("way", ["cpu", "gpu", "tpu"])
def test_each_leaf_is_multiplied_twice_by_its_root(monkeypatch, way, name, all_read):
    def take(*operands, **ways):
        assert set(ways) == {"cpu", "gpu", "tpu"}
        return ways[way](*operands)

    monkeypatch.setattr(_factors, "per_platform", take)
    monkeypatch.setattr(_factors, "ALL_READ", all_read)
    tree, norms, roots = in_form_of(name)
    found = jax.tree.leaves(multiply(tree, norms, roots))
    for leaf, x, root in zip(found, jax.tree.leaves(tree), root_of_each_leaf(name)):
        np.testing.assert_array_equal(leaf, np.float32(x) * np.square(root))


@pytest.mark.parametrize("form", ["everything", "leaves", "vectors of units"])
def test_a_gpu_takes_roots_of_leaves_of_one_shape_together(monkeypatch, form):
    monkeypatch.setattr(_factors, "MERGED", 2)
    monkeypatch.setattr(_factors, "per_platform", lambda *x, gpu, **_: gpu(*x))
    shapes = [(3,), (2, 2), (3,), (3,), (2, 2), (3,), (3,)]
    leaves = [jnp.full(shape, 1.0 + i) for i, shape in enumerate(shapes)]
    leaves[5] = None  # no array, so that it has no root
    roots = [None if x is None else jnp.float32(i) for i, x in enumerate(leaves)]
    if form == "vectors of units":
        roots[0] = jnp.arange(3.0)
    if form == "everything":
        norms, blocks = norms_of_tree(jnp.float32(3), leaves), [jnp.float32(3)]
        roots = [None if x is None else 3.0 for x in leaves]
    else:
        norms = norms_of_tree(roots, leaves)
        blocks = norms.blocks
    found = multiply(leaves, norms, blocks)
    assert found[5] is None
    for x, leaf, root in zip(found, leaves, roots, strict=True):
        if leaf is not None:
            np.testing.assert_array_equal(x, leaf * np.square(root))
    program = str(jax.make_jaxpr(lambda x: multiply(leaves, norms, x))(blocks))
    # Four leaves of one shape fill two vectors, and the others one more.
    own = 2 if form == "vectors of units" else 3
    assert program.count("= unstack") == own
    assert program.count("= max") == own


def test_roots_that_leaves_share_elementwise_are_no_vector_of_numbers(monkeypatch):
    monkeypatch.setattr(_factors, "MERGED", 2)
    monkeypatch.setattr(_factors, "per_platform", lambda *x, gpu, **_: gpu(*x))
    leaves = [[jnp.ones(3), jnp.full(3, 2.0)]]
    norms = norms_of_tree([jnp.arange(3.0)], leaves)
    ((one, other),) = multiply(leaves, norms, norms.blocks)
    np.testing.assert_array_equal(one, [0, 1, 4])
    np.testing.assert_array_equal(other, [0, 2, 8])


@pytest.mark.parametrize("way", ["cpu", "gpu", "tpu"])
def test_each_of_many_leaves_has_its_own_root(monkeypatch, way):
    monkeypatch.setattr(_factors, "per_platform", lambda *x, **ways: ways[way](*x))
    leaves = [jnp.ones(2)] * 67
    norms = norms_of_tree([jnp.float32(i) for i in range(67)], leaves)
    found = multiply(leaves, norms, norms.blocks)
    np.testing.assert_array_equal(found, [[i * i] * 2 for i in range(67)])


def test_a_program_keeps_no_traced_norm():
    def step(leaves):
        norms = norms_of_tree([jnp.sum(x) for x in leaves], leaves)
        return multiply(leaves, norms, norms.blocks)

    with jax.checking_leaks():
        jax.jit(step).lower([jnp.ones(2), jnp.ones(3)])


@pytest.mark.parametrize("name", ROOTS)
def test_leaves_whose_factor_is_0_become_zeros(name):
    tree, norms, roots = in_form_of(name)
    tree = jax.tree.map(lambda x: x / 0, tree)  # inf, and NaN where it was 0
    found = jax.tree.leaves(zero_where_zero(tree, norms, roots))
    for leaf, x, root in zip(found, jax.tree.leaves(tree), root_of_each_leaf(name)):
        np.testing.assert_array_equal(leaf, np.where(root == 0, 0, x))


@pytest.mark.parametrize(("far", "below"), [(1.0, 3.0), (1e35, 5.0)])
def test_the_square_of_a_root_ends_a_few_eps_below(far, below):
    norm = np.random.default_rng(0).uniform(1.0, 4.0, 10_000).astype(np.float32)
    new = np.random.default_rng(1).uniform(1.0, 4.0, 10_000) / far
    new = new.astype(np.float32)
    square = np.square(np.float64(factor_between(norm, new).root))
    less = 1 - square * np.float64(norm) / np.float64(new)
    # Four roundings by at most half an eps each change the mean by little.
    np.testing.assert_allclose(np.mean(less) / EPS, below, atol=0.25)
    assert np.min(less) > 0


def test_factors_of_states_are_quotients_within_normal_numbers():
    pairs = {
        (5.0, 1.0): 0.2,
        (1.0, 5.0): 5.0,
        (5.0, 5.0): 1.0,
        (0.0, 0.0): 1.0,
        (5.0, 0.0): 0.0,
        (1e38, 1e-20): TINY,
        (1e-30, 1e30): MOST,
        (5.0, np.nan): np.nan,
    }
    norm, new = np.float32(list(pairs)).T
    found = factor_between(jnp.asarray(norm), jnp.asarray(new)).reported
    np.testing.assert_allclose(found, list(pairs.values()), 1e-6)


def test_roots_have_finite_derivatives_where_nothing_is_left():
    norm = jnp.array([0.0, 0.0, 5.0, 5.0, 1e38, 1e-20])
    new = jnp.array([0.0, 1.0, 0.0, 5.0, 1.0, 1.0])
    np.testing.assert_array_equal(factor_between(norm, new).root[2:4], [0.0, 1.0])
    slopes = jax.grad(lambda *x: factor_between(*x).root.sum(), (0, 1))(norm, new)
    assert np.all(np.isfinite(slopes))


@pytest.mark.parametrize("norm", [1.2e-38, 1e38, np.inf])
def test_the_root_of_an_equal_norm_is_1(norm):
    norm, zero = jnp.float32(norm), jnp.float32(0)
    assert factor_between(norm, norm) == (1, 1)
    assert factor_between(norm, zero) == (0, 0)
    for new in (norm, zero):
        _, changes = jax.jvp(factor_between, (norm, new), (norm, norm))
        assert changes == (0, 0)


def test_a_quotient_of_large_numbers_has_its_derivative():
    short, long = jnp.float32(6e30), jnp.float32(2e30)

    def reported(norm, new):
        return factor_between(norm, new).reported

    slopes = jax.grad(reported, (1, 0))(long, short)
    np.testing.assert_allclose(slopes, [5e-31, -1.5e-30], 1e-6)
    zero = jnp.float32(0)
    assert np.all(np.isfinite(jax.grad(reported, (0, 1))(zero, zero)))


def test_a_root_of_1_keeps_the_bits_of_subnormal_numbers():
    x = np.float32([1e-40, -0.0, np.inf, np.nan])
    found = stretch(x, jnp.float32(1))
    np.testing.assert_array_equal(np.asarray(found).view("int32"), x.view("int32"))
