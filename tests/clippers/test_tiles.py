"""Spectral clipping of many matrices in one program, as on a TPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from optaxclip._clippers import _newton_schulz, _piles
from tests import oracles

TALL = [(2500, 24), (30, 24), (3, 40, 24), (1100, 24), (24, 24), (50, 7)]
SHAPES = [*TALL, (24, 90), (2, 24, 40)]


def way_of_tpu(*operands, tpu, **_):
    return tpu(*operands)


@pytest.fixture
def in_tiles(monkeypatch):
    """Takes the way of a TPU."""
    monkeypatch.setattr(_piles, "per_platform", way_of_tpu)


def matrices(dtype="float32"):
    random = np.random.default_rng(0)
    found = [random.standard_normal(shape) for shape in SHAPES]
    if dtype.startswith("complex"):
        found = [x + 1j * random.standard_normal(x.shape) for x in found]
    return [jnp.asarray(x, dtype) for x in found]


def clipped(leaves, is_hard=True):
    """The largest singular values, and the matrices clipped to 0.7 of them."""
    found = _newton_schulz.largest(leaves)
    norms, bounds = [list(each) for each in zip(*found)]
    limits = [0.7 * norm for norm in norms]
    new = _newton_schulz.shrunk(leaves, limits, bounds, steps=24, is_hard=is_hard)
    return norms, new


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
@pytest.mark.parametrize("is_hard", [True, False])
def test_joined_matrices_are_clipped_as_by_decomposition(in_tiles, dtype, is_hard):
    leaves = matrices(dtype)
    norms, new = jax.jit(lambda leaves: clipped(leaves, is_hard))(leaves)
    for x, norm, have in zip(leaves, norms, new):
        u, s, v = np.linalg.svd(oracles.wide(x), full_matrices=False)
        limit = 0.7 * s[..., :1]
        short = np.minimum(s, limit) if is_hard else s / np.sqrt(1 + (s / limit) ** 2)
        np.testing.assert_allclose(norm[..., 0], s[..., :1], 4e-6)
        error = oracles.wide(have) - (u * short[..., None, :]) @ v
        assert (np.linalg.norm(error, 2, (-2, -1)) <= 4e-6 * limit[..., 0]).all()


@pytest.mark.slow
def test_leaves_of_several_dtypes_are_not_joined(in_tiles):
    with jax.enable_x64(True):
        singles, doubles = matrices(), matrices("float64")
        norms, new = jax.jit(clipped)([*singles, *doubles])
    kinds = [x.dtype for x in new]
    assert kinds == [jnp.float32] * 8 + [jnp.float64] * 8
    for x, norm in zip(doubles, norms[8:]):
        longest = np.linalg.norm(np.asarray(x), 2, (-2, -1))
        np.testing.assert_allclose(norm[..., 0, 0], longest, 2e-5)


@pytest.mark.slow
def test_joined_matrices_have_the_derivatives_of_separate_ones(monkeypatch):
    def total(leaves):
        return sum(jnp.sum(jnp.sin(3 * x)) for x in clipped(leaves, is_hard=False)[1])

    def derivatives(leaves):
        ones = [jnp.ones_like(x) for x in leaves]
        return jax.grad(total)(leaves), jax.jvp(total, (leaves,), (ones,))[1]

    with jax.enable_x64(True):
        leaves = matrices("float64")[1:4]
        want, want_forward = jax.jit(derivatives)(leaves)
        monkeypatch.setattr(_piles, "per_platform", way_of_tpu)
        have, forward = jax.jit(lambda leaves: derivatives(leaves))(leaves)
        # Both derivatives are of separate leaves, so the values of joined ones decide.
        values = jax.jit(lambda step: total([x + step for x in leaves]))
        difference = (values(1e-5) - values(-1e-5)) / 2e-5
    np.testing.assert_allclose(forward, want_forward, 1e-9)
    np.testing.assert_allclose(forward, difference, 1e-6)
    for x, y in zip(have, want):
        np.testing.assert_allclose(x, y, 0, 1e-9 * np.max(np.abs(y)))


@pytest.mark.slow
def test_joined_matrices_may_have_examples(in_tiles):
    leaves = [jnp.stack([x, 2 * x]) for x in matrices()]
    _, have = jax.jit(jax.vmap(clipped))(leaves)
    for x, pair in zip(clipped(matrices())[1], have):
        np.testing.assert_allclose(pair, np.stack([x, 2 * x]), 0, 2e-5)


def test_the_program_has_few_products_for_many_matrices(in_tiles):
    leaves = [jnp.ones((24 + 100 * n, 24)) for n in range(20)]
    text = jax.jit(clipped).lower(leaves).as_text()
    assert text.count("dot_general") <= 13


@pytest.mark.slow
def test_gram_matrices_of_one_matrix_at_a_time_are_in_memory(in_tiles):
    def memory(count):
        leaves = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * count
        program = jax.jit(clipped).lower(leaves).compile()
        return program.memory_analysis().temp_size_in_bytes

    # Each further matrix takes its place in the pile, and one in the result.
    assert memory(12) - memory(4) <= 8 * 2.1 * 64 * 64 * 4


def test_limits_may_differ_between_devices_that_share_a_matrix(in_tiles):
    x = jnp.asarray(np.random.default_rng(2).standard_normal((30, 24)), "float32")

    def on_each(x, limit):
        _, bound = _newton_schulz.largest([x])[0]
        limits = [limit]
        return _newton_schulz.shrunk([x], limits, [bound], steps=24, is_hard=True)[0]

    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.shard_map(on_each, mesh=mesh, in_specs=(P(), P("x")), out_specs=P("x"))
    have = jax.jit(split)(x, jnp.asarray([[1.0], [2.0]]))
    u, s, v = np.linalg.svd(oracles.wide(x), full_matrices=False)
    want = [(u * np.minimum(s, limit)) @ v for limit in (1, 2)]
    np.testing.assert_allclose(have, np.concatenate(want), 0, 4e-6)
