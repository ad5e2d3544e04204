"""The entries of a vector as scalars, in the ways of all platforms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optaxclip._metrics import _unstack
from optaxclip._metrics._unstack import MERGED, unstacked

# Functions are written anew for each case: JAX keeps the program of a function.


@pytest.mark.parametrize("size", [1, MERGED, 2 * MERGED + 3])
@pytest.mark.parametrize("way", ["cpu", "gpu", "tpu"])
def test_all_entries_come_back_as_they_are(monkeypatch, way, size):
    monkeypatch.setattr(_unstack, "per_platform", lambda x, **ways: ways[way](x))
    values = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    found = jax.jit(lambda x: unstacked(x))(values)
    assert [x.shape for x in found] == [()] * size
    np.testing.assert_array_equal(found, values)


@pytest.mark.parametrize("way", ["gpu", "tpu"])
def test_special_values_come_back_as_they_are(monkeypatch, way):
    monkeypatch.setattr(_unstack, "per_platform", lambda x, **ways: ways[way](x))
    values = np.float32([np.nan, np.inf, -np.inf, -0.0, 3e38, -1.2e-38])
    found = np.stack(jax.jit(lambda x: unstacked(x))(values))
    np.testing.assert_array_equal(found, values)
    np.testing.assert_array_equal(np.signbit(found[1:]), np.signbit(values[1:]))


def test_a_gpu_takes_all_entries_in_few_parts(monkeypatch):
    monkeypatch.setattr(_unstack, "per_platform", lambda x, *, gpu, **_: gpu(x))
    program = str(jax.make_jaxpr(lambda x: unstacked(x))(jnp.ones(65)))
    # One for all numbers, and one for each 32 of them.
    assert program.count("optimization_barrier") == 1 + 3
