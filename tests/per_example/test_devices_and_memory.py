"""Batches that are split over devices, and memory beside the size of a batch."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from optaxclip.per_example import clipped_grad
from tests.helpers import only_by_a_cpu
from tests.per_example.batches import (
    EPS,
    METHODS,
    MODELS,
    SIZE,
    close,
    examples,
    hard_factor,
    norms_of,
    program,
    weighted,
)


@pytest.mark.slow
def test_a_batch_split_over_devices_under_jit():
    _, params, batch = MODELS["mlp"]
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.device_put(batch, NamedSharding(mesh, P("data")))
    leaves = examples()[1]
    expected = [
        leaf / SIZE for leaf in weighted(leaves, hard_factor(norms_of(leaves), 0.5))
    ]
    for method in METHODS:
        close(program("mlp", 4, method)(0.5, params, split).grads, expected, SIZE)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.slow
def test_in_shard_map_each_device_clips_its_own_examples(check_vma, method):
    loss, params, batch = MODELS["mlp"]
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    grad = clipped_grad(loss, 0.5, mean=False, method=method)

    def local(params, batch):
        result = grad(params, batch)
        return lax.psum(result.grads, "data"), result.norms

    run = jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(P(), P("data")),
            out_specs=(P(), P("data")),
            check_vma=check_vma,
        )
    )
    grads, norms = run(params, batch)
    leaves = examples()[1]
    np.testing.assert_allclose(norms, norms_of(leaves), rtol=64 * EPS)
    close(grads, weighted(leaves, hard_factor(norms_of(leaves), 0.5)), SIZE)


@cache
def temporary(method, batch, microbatch):
    shapes = {"in": (64, 256), "mid": (256, 256), "out": (256, 10)}

    def loss(p, x):
        return jnp.sum(jnp.tanh(jnp.tanh(x @ p["in"]) @ p["mid"]) @ p["out"])

    def shaped(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    run = jax.jit(
        lambda p, xs: (
            clipped_grad(loss, 1.0, microbatch=microbatch, method=method)(p, xs).grads
        )
    )
    return (
        run.lower(
            {name: shaped(*shape) for name, shape in shapes.items()}, shaped(batch, 64)
        )
        .compile()
        .memory_analysis()
        .temp_size_in_bytes
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_memory_does_not_grow_with_the_batch(method):
    """From 16 to 1024 examples it may grow by a few numbers for each example, never by
    a gradient, which is 338 kB.
    """
    assert abs(temporary(method, 1024, 8) - temporary(method, 16, 8)) < 1024 * 64


@pytest.mark.slow
def test_memory_grows_with_the_microbatch():
    gradient = 4 * (64 * 256 + 256 * 256 + 256 * 10)
    small, large = temporary("one_pass", 1024, 8), temporary("one_pass", 1024, 32)
    assert large - small > 0.9 * 24 * gradient


@only_by_a_cpu
@pytest.mark.slow
def test_two_passes_need_less_memory_than_one():
    assert temporary("two_pass", 1024, 8) < 0.9 * temporary("one_pass", 1024, 8)
