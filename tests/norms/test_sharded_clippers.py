"""Clippers of values, groups and weights over devices, and the check of replicas."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import optaxclip
from tests import sharded
from tests.norms.modes import NO_TYPES, mapped
from tests.sharded import (
    PARAMS,
    SPECS,
    UPDATES,
    mesh_of,
    on_each_part,
    on_two_devices,
    replicas_agree,
)


@pytest.mark.parametrize("mode", ["pmap", "typed", "untyped"])
def test_check_replicated_sees_one_bit_on_one_device(mode):
    same = {
        "brain": jnp.bfloat16(1.5),
        "complex": jnp.complex64(1 - 2j),
        "flag": jnp.array(True),
        "float": jnp.float32(0.1),
        "int": jnp.int32(-3),
        "nan": jnp.float32(jnp.nan),
    }

    def body(index):
        index = index if mode == "pmap" else index[0]
        alone = index == 2
        changed = {
            "brain": jnp.where(alone, jnp.bfloat16(1.5078125), same["brain"]),
            "complex": jnp.where(alone, jnp.complex64(1 + 2j), same["complex"]),
            "flag": ~alone,
            "float": jnp.where(
                alone, jnp.nextafter(same["float"], jnp.float32(1)), same["float"]
            ),
            "int": jnp.where(alone, jnp.int32(-4), same["int"]),
            "nan": jnp.where(alone, jnp.float32(1), same["nan"]),
        }
        answers = [
            optaxclip.check_replicated(same, "i"),
            optaxclip.check_replicated({}, "i"),
        ]
        answers += [
            optaxclip.check_replicated({**same, name: x}, "i")
            for name, x in changed.items()
        ]
        assert all(answer.shape == () and answer.dtype == bool for answer in answers)
        return jnp.stack(answers)

    index = np.arange(4, dtype=np.int32)
    if mode == "pmap":
        answers = mapped(body)(index)
        assert all(np.array_equal(row, answers[0]) for row in answers)
        answers = answers[0]
    else:
        answers = on_each_part(
            body, mesh_of((4,), ("i",)), (P("i"),), P(), check_vma=mode == "typed"
        )(index)
        assert replicas_agree(answers)
    assert answers.tolist() == [True, True] + [False] * len(same)


def test_check_replicated_looks_along_the_axes_that_are_named():
    def body(x):
        return jnp.stack(
            [optaxclip.check_replicated(x, axes) for axes in ("x", "y", ("x", "y"))]
        )

    along = on_each_part(body, mesh_of((2, 3)), (P("y"),), P(), check_vma=False)
    assert along(np.arange(3.0, dtype=np.float32)).tolist() == [True, False, False]
    assert along(np.ones(3, np.float32)).tolist() == [True, True, True]


@pytest.mark.parametrize(
    "name", ["clip_by_global_norm", "clip_by_unitwise_norm stacked"]
)
@pytest.mark.slow
def test_specs_change_nothing_outside_shard_map(name):
    programs = [
        jax.jit(partial(sharded.clip, name, axes)).lower(UPDATES, PARAMS).as_text()
        for axes in (SPECS, "auto", None)
    ]
    assert programs[0] == programs[1] == programs[2]


@pytest.mark.slow
def test_clip_by_value_needs_no_axes():
    clipper = optaxclip.clip_by_value(0.25)
    for options in ({}, NO_TYPES):
        clipped, state = on_each_part(
            clipper.update, mesh_of((3, 2)), (SPECS, P()), (SPECS, P()), **options
        )(UPDATES, clipper.init(UPDATES))
        assert all(
            np.array_equal(clipped[name], np.clip(x, -0.25, 0.25))
            for name, x in UPDATES.items()
        )
        assert int(state.step) == 1


@pytest.mark.parametrize("ord", ["rms", "average"])
def test_a_mean_over_devices_counts_the_elements_of_all(ord):
    x = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    length = np.linalg.norm(np.asarray(x, np.float64))
    norm = on_two_devices(lambda x: optaxclip.global_norm(x, ord=ord), P("x"), P(), x)
    np.testing.assert_allclose(
        norm, length / (np.sqrt(12) if ord == "rms" else 12), rtol=1e-6
    )


@pytest.mark.parametrize(
    "options", [{}, {"check_vma": False}], ids=["typed", "untyped"]
)
def test_a_group_over_devices_has_one_norm(options):
    specs = {"a": P("x"), "b": P(), "c": P("x")}
    grads = {"a": np.float32([3, 0]), "b": np.float32([4]), "c": np.float32([6, 8])}
    clipper = optaxclip.clip_by_group_norm(
        1.0, {"a": "z", "b": "z", "c": "y"}, mesh_axes=specs if options else "auto"
    )
    updates = on_two_devices(
        lambda g: clipper.update(g, clipper.init(g))[0],
        (specs,),
        specs,
        grads,
        **options,
    )
    for name, share in (("a", [0.6, 0]), ("b", [0.8]), ("c", [0.6, 0.8])):
        np.testing.assert_allclose(updates[name], share, rtol=1e-6)


# a tensor of two elements, one on each device: the clipper, and what becomes of its
# updates 1 and 4 beside weights of 2
OVER_TWO_DEVICES = {
    "clippy": (partial(optaxclip.clippy, 0.5, 0.0), [0.25, 1.0]),
    "larc": (
        partial(optaxclip.larc, 1.0, 0.25, eps=0.0),
        [0.5**0.5 / 17**0.5, 4 * 0.5**0.5 / 17**0.5],
    ),
}


@pytest.mark.parametrize(
    "options", [{}, {"check_vma": False}], ids=["typed", "untyped"]
)
@pytest.mark.parametrize("name", OVER_TWO_DEVICES)
def test_clippers_by_weights_scale_all_of_a_split_tensor_alike(name, options):
    build, clipped = OVER_TWO_DEVICES[name]
    clipper = build(mesh_axes=P("x") if options else "auto")
    grads, params = np.float32([1.0, 4.0]), np.float32([2.0, 2.0])
    updates = on_two_devices(
        lambda g, p: clipper.update(g, clipper.init(g), p)[0],
        (P("x"), P("x")),
        P("x"),
        grads,
        params,
        **options,
    )
    np.testing.assert_allclose(updates, clipped, rtol=1e-6)


def test_without_axes_each_device_measures_what_it_has():
    norms = on_two_devices(
        lambda x: optaxclip.global_norm(x, mesh_axes=None)[None],
        P("x"),
        P("x"),
        np.float32([3.0, 4.0]),
    )
    np.testing.assert_array_equal(norms, [3.0, 4.0])


@pytest.mark.parametrize(
    ("axes", "text"),
    [
        (("x", "model"), "mesh_axes='model': there is no such axis here"),
        (("x", "x"), r"mesh_axes=\('x', 'x'\) names a mesh axis twice"),
    ],
    ids=["absent", "twice"],
)
def test_each_of_several_axes_is_looked_at(axes, text):
    with pytest.raises(ValueError, match=text):
        on_two_devices(
            lambda x: optaxclip.global_norm(x, mesh_axes=axes),
            P("x"),
            P(),
            np.ones(2, np.float32),
            check_vma=False,
        )
