"""The option mesh_axes: names and specs, for norms, derivatives and broken values."""

import itertools
import math
from functools import partial

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optaxclip
from tests import sharded
from tests.norms.modes import FULL, norm_of, typed_or_not
from tests.sharded import (
    CASES,
    LABELS,
    SHAPES,
    SPECS,
    STACKED,
    UPDATES,
    assert_close,
    exact,
    mesh_of,
    on_each_part,
    place,
    replicas_agree,
)


@pytest.mark.slow
@typed_or_not
def test_names_of_axes_say_that_every_leaf_is_split_over_them(options):
    updates = {name: UPDATES[name] for name in FULL}
    spellings = ["x", ("x",), P("x"), {"columns": "x", "folded": P("x")}]

    def body(updates):
        clippers = [
            optaxclip.clip_by_global_norm(0.5, mesh_axes=axes) for axes in spellings
        ] + [optax.clip_by_global_norm(0.5)]
        return [
            clipper.update(updates, clipper.init(updates))[0] for clipper in clippers
        ]

    norm = norm_of(exact(updates))
    want = {name: x * (0.5 / norm) for name, x in exact(updates).items()}
    *ours, theirs = on_each_part(
        body, mesh_of((4,), ("x",)), (FULL,), [FULL] * (len(spellings) + 1), **options
    )(updates)
    for have in ours:
        assert_close(have, want)
    # The comparison sees the error of a norm that forgets other devices.
    assert (
        norm_of({name: x - want[name] for name, x in exact(theirs).items()}) > 0.4
    )  # of a vector of length 0.5


STAGED = {"attention": (4, 10, 14), "experts": (4, 6, 10, 14), "router": (10, 6)}
STAGED_SPECS = {"attention": P("stage"), "experts": P("stage", "expert"), "router": P()}
STAGED_AXES = {
    "attention": ((1, 2), (1,)),
    "experts": ((2, 3), (2,)),
    "router": (None, (0,)),
}  # of one tensor, of one unit


@typed_or_not
@pytest.mark.slow
def test_stage_and_expert_axes_are_mesh_axes_like_others(options):
    updates, params = sharded.random_tree(3, STAGED), sharded.random_tree(4, STAGED)
    stacked = {"attention": 1, "experts": 2, "router": 0}
    auto = "auto" if not options else STAGED_SPECS
    clippers = {
        "global": optaxclip.clip_by_global_norm(0.5, mesh_axes=auto),
        "whole": optaxclip.clip_by_tensor_norm(0.5, mesh_axes=auto),
        "tensor": optaxclip.clip_by_tensor_norm(
            0.5, stacked=stacked, mesh_axes=STAGED_SPECS
        ),
        "unit": optaxclip.clip_by_unitwise_norm(
            0.5, stacked=stacked, mesh_axes=STAGED_SPECS
        ),
        "weights": optaxclip.adaptive_grad_clip(
            0.5, stacked=stacked, mesh_axes=STAGED_SPECS
        ),
    }

    def body(updates, params):
        return {
            name: clipper.update(updates, clipper.init(params), params)[0]
            for name, clipper in clippers.items()
        }

    mesh = mesh_of((2, 2, 2), ("data", "stage", "expert"))
    clipped = on_each_part(
        body,
        mesh,
        (STAGED_SPECS, STAGED_SPECS),
        dict.fromkeys(clippers, STAGED_SPECS),
        **options,
    )(updates, params)
    grads, weights = exact(updates), exact(params)
    everything = sharded.root(list(grads.values()), None, 2)
    for leaf, x in grads.items():
        of_tensor, of_unit = (sharded.root([x], dims, 2) for dims in STAGED_AXES[leaf])
        most = 0.5 * np.maximum(
            sharded.root([weights[leaf]], STAGED_AXES[leaf][1], 2), 1e-3
        )
        limits = {
            "global": 0.5 / everything,
            "whole": 0.5 / sharded.root([x], None, 2),
            "tensor": 0.5 / of_tensor,
            "unit": 0.5 / of_unit,
            "weights": most / of_unit,
        }
        for name, share in limits.items():
            assert_close(
                {leaf: clipped[name][leaf]}, {leaf: x * np.minimum(1.0, share)}
            )


def places(spec, leaf):
    """The spec of a leaf's norms over the dimensions that `unit_of_layer` sums."""
    over = sharded.unit_of_layer(leaf, len(SHAPES[leaf]))
    return (
        P()
        if over is None
        else P(*(None if dim in over else entry for dim, entry in enumerate(spec)))
    )


@pytest.mark.slow
@typed_or_not
def test_norms_and_record_norm_take_mesh_axes(options):
    units = {leaf: places(spec, leaf) for leaf, spec in SPECS.items()}

    def body(tree):
        unitwise_norm = partial(
            optaxclip.unitwise_norm, stacked=STACKED, mesh_axes=SPECS
        )
        measure = optaxclip.record_norm(partial(optaxclip.tensor_norm, mesh_axes=SPECS))
        updates, state = measure.update(tree, measure.init(tree))
        return (
            optaxclip.global_norm(tree, mesh_axes=SPECS),
            updates,
            {name: entry.norm for name, entry in state.by_name().items()},
            unitwise_norm(tree),
            optaxclip.group_norm(tree, LABELS, mesh_axes=SPECS),
        )

    out_specs = P(), SPECS, P(), units, P()
    everything, updates, tensors, unit, groups = on_each_part(
        body, mesh_of((3, 2)), (SPECS,), out_specs, **options
    )(UPDATES)
    tree = exact(UPDATES)
    np.testing.assert_allclose(
        everything, CASES["clip_by_global_norm"].norms(tree)["bias"], rtol=2e-7
    )
    assert all(np.array_equal(updates[leaf], UPDATES[leaf]) for leaf in UPDATES)
    assert_close(tensors, CASES["clip_by_tensor_norm"].norms(tree), 2e-7)
    assert_close(unit, CASES["clip_by_unitwise_norm stacked"].norms(tree), 2e-7)
    of_group = CASES["clip_by_group_norm"].norms(tree)
    assert_close(groups, {"body": of_group["grid"], "head": of_group["bias"]}, 2e-7)


@pytest.mark.slow
def test_the_derivative_of_a_sharded_norm_is_the_direction():
    def body(tree):
        return jax.grad(lambda x: optaxclip.global_norm(x))(tree)

    norm = CASES["clip_by_global_norm"].norms(exact(UPDATES))["bias"]
    assert_close(
        on_each_part(body, mesh_of((3, 2)), (SPECS,), SPECS)(UPDATES),
        {name: x / norm for name, x in exact(UPDATES).items()},
    )


BROKEN_SPECS = {"bias": P(), "folded": P(("x", "y"))}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["jit", "typed", "untyped"])
def test_one_bad_value_on_any_device_is_seen_by_all(mode):
    builds = {
        "two": partial(optaxclip.clip_by_global_norm, 0.5),
        "largest": partial(optaxclip.clip_by_global_norm, 0.5, ord=math.inf),
        "zeroed": partial(
            optaxclip.clip_by_global_norm, 0.5, ord=math.inf, nonfinite="zero"
        ),
        "tensor": partial(optaxclip.clip_by_tensor_norm, 0.5, ord=math.inf),
        "unit": partial(optaxclip.clip_by_unitwise_norm, 0.5, ord=math.inf),
    }

    def body(updates):
        clippers = {
            name: build(mesh_axes=BROKEN_SPECS) for name, build in builds.items()
        }
        results = {
            name: clipper.update(updates, clipper.init(updates))
            for name, clipper in clippers.items()
        }
        return {name: clipped for name, (clipped, _) in results.items()}, {
            name: results[name][1].norm for name in ("two", "largest", "tensor")
        }

    out_specs = dict.fromkeys(builds, BROKEN_SPECS), P()
    mesh = mesh_of((2, 4))
    program = (
        jax.jit(body)
        if mode == "jit"
        else on_each_part(
            body, mesh, (BROKEN_SPECS,), out_specs, check_vma=mode == "typed"
        )
    )
    for row, bad in itertools.product(
        range(0, 24, 3), (math.nan, math.inf)
    ):  # each device has three rows
        updates = {name: UPDATES[name].copy() for name in BROKEN_SPECS}
        updates["folded"][row + row // 3 % 3, 1] = bad
        clipped, norms = program(place(updates, mesh, BROKEN_SPECS))
        for name in ("two", "largest"):
            assert np.isnan(norms[name]) if math.isnan(bad) else np.isinf(norms[name])
            assert all(np.isnan(x).all() for x in clipped[name].values())
        assert not any(np.any(x) for x in clipped["zeroed"].values())
        for name in ("tensor", "unit"):
            assert np.isfinite(clipped[name]["bias"]).all()
        assert np.isnan(clipped["tensor"]["folded"]).all()
        assert np.isnan(clipped["unit"]["folded"]).all(0).tolist() == [
            False,
            True,
            False,
        ]
        assert np.isfinite(clipped["unit"]["folded"]).all(0).tolist() == [
            True,
            False,
            True,
        ]
        assert all(replicas_agree(x) for x in jax.tree.leaves((clipped, norms)))
