"""Replicas of pmap, and the mean over them before and after clipping."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optaxclip
from tests import sharded
from tests.norms.modes import mapped, norm_of, typed_or_not
from tests.sharded import (
    SHAPES,
    SPECS,
    UPDATES,
    assert_close,
    exact,
    mesh_of,
    on_each_part,
    only,
)


@pytest.mark.slow
@typed_or_not
def test_sixteen_bit_shards_are_summed_without_overflow(options):
    specs = {"brain": P(None, "x"), "full": P(None, "x"), "half": P("x")}
    wide = {
        "brain": UPDATES["layers"],
        "full": UPDATES["columns"],
        "half": 500 * np.clip(UPDATES["folded"], -9, 9),
    }
    updates = {
        name: jnp.asarray(
            x, {"half": jnp.float16, "brain": jnp.bfloat16}.get(name, jnp.float32)
        )
        for name, x in wide.items()
    }

    def body(updates):
        clipper = optaxclip.clip_by_global_norm(10.0, mesh_axes=specs)
        clipped, state = clipper.update(updates, clipper.init(updates))
        return clipped, state.norm

    clipped, norm = on_each_part(
        body, mesh_of((4,), ("x",)), (specs,), (specs, P()), **options
    )(updates)
    exactly = {name: np.asarray(x).astype(np.float64) for name, x in updates.items()}
    length = sharded.root(list(exactly.values()), None, 2)
    np.testing.assert_allclose(norm, length, rtol=2e-7)
    for name, x in exactly.items():
        assert clipped[name].dtype == updates[name].dtype
        rounding = float(jnp.finfo(updates[name].dtype).eps)
        np.testing.assert_allclose(
            np.asarray(clipped[name]).astype(np.float64),
            x * 10 / length,
            rtol=max(rounding, 1e-6),
            atol=6e-8,
        )


def replicas():
    """Gradients of four data-parallel devices, one of them an outlier."""
    grads = [sharded.random_tree(seed) for seed in range(4)]
    grads[2] = {name: 100 * x for name, x in grads[2].items()}
    mean = {
        name: np.mean([exact(tree)[name] for tree in grads], axis=0) for name in SHAPES
    }
    return (
        {name: np.stack([tree[name] for tree in grads]) for name in SHAPES},
        [exact(tree) for tree in grads],
        mean,
    )


@pytest.mark.slow
def test_in_pmap_the_mean_is_taken_before_clipping():
    local, _, mean = replicas()

    def body(grads):
        clipper = optaxclip.clip_by_global_norm(1.0)
        mean = lax.pmean(grads, "i")
        clipped, state = clipper.update(mean, clipper.init(grads))
        return mean, clipped, optaxclip.check_replicated(state, "i")

    means, clipped, same = mapped(body)(local)
    assert same.all()
    # Held against the mean as the devices have it: the summing of four numbers that
    # cancel is not the clipper's.
    first = exact({name: x[0] for name, x in means.items()})
    for row in range(4):
        assert_close(
            {name: x[row] for name, x in clipped.items()},
            {name: x / norm_of(first) for name, x in first.items()},
        )
    assert abs(norm_of(first) / norm_of(mean) - 1) < 1e-6


@pytest.mark.parametrize("mode", ["pmap", "typed", "untyped"])
def test_clipping_before_the_mean_is_another_algorithm(mode):
    local, each, mean = replicas()

    def body(grads):
        clipper = optaxclip.clip_by_global_norm(1.0, mesh_axes=None)
        grads = grads if mode == "pmap" else jax.tree.map(lambda x: x[0], grads)
        return lax.pmean(clipper.update(grads, clipper.init(grads))[0], "i")

    program = (
        mapped(body)
        if mode == "pmap"
        else on_each_part(
            body, mesh_of((4,), ("i",)), (P("i"),), P(), check_vma=mode == "typed"
        )
    )
    means = {name: x[0] if mode == "pmap" else x for name, x in program(local).items()}
    per_replica = {
        name: np.mean([tree[name] / norm_of(tree) for tree in each], axis=0)
        for name in SHAPES
    }
    for name, x in per_replica.items():
        np.testing.assert_allclose(means[name], x, rtol=1e-6, atol=1e-7)
    difference = {
        name: x - mean[name] / norm_of(mean) for name, x in exact(means).items()
    }
    assert norm_of(difference) > 0.3  # of a vector of length 1


@pytest.mark.slow
def test_stages_in_own_programs_are_clipped_by_a_common_norm():
    meshes = [
        jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=devices)
        for devices in (jax.devices()[:4], jax.devices()[4:])
    ]
    stages = [
        {"columns": UPDATES["columns"], "bias": UPDATES["bias"]},
        {"folded": UPDATES["folded"], "gain": UPDATES["gain"]},
    ]
    specs = [{name: only(("x",), SPECS)[name] for name in stage} for stage in stages]
    clipper = optaxclip.clip_by_global_norm(0.5)

    def shorten(updates, norm):
        return clipper.update(updates, clipper.init(updates), grad_norm=norm)

    norms = [
        on_each_part(optaxclip.global_norm, mesh, (spec,), P())(stage)
        for stage, spec, mesh in zip(stages, specs, meshes)
    ]
    norm = np.sqrt(sum(float(norm) ** 2 for norm in norms))
    everything = norm_of(exact({**stages[0], **stages[1]}))
    np.testing.assert_allclose(norm, everything, rtol=2e-7)
    for stage, spec, mesh in zip(stages, specs, meshes):
        clipped, state = on_each_part(shorten, mesh, (spec, P()), (spec, P()))(
            stage, np.float32(norm)
        )
        assert_close(
            clipped, {name: x * 0.5 / everything for name, x in exact(stage).items()}
        )
        assert float(state.norm) == np.float32(norm)
