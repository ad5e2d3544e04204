"""Clippers of elements report the share of elements that they clipped."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optaxclip
from tests.helpers import after, scanned
from tests.sharded import on_each_part

KEYS = "clip/elements_clipped", "clip/elements_clipped_mean"
RECENT = "clip/elements_clipped_recent"
COUNTING = {
    "clip_by_value": optaxclip.clip_by_value(1.0, count=True),
    "spam": optaxclip.spam(16.0, decay=0.75, warmup=0, count=True),
}


def shares(clipper, *grads):
    """The last share, the mean and the moving average."""
    found = optaxclip.metrics(after(clipper, *grads))
    assert set(found) == {*KEYS, RECENT}
    return [float(found[key]) for key in (*KEYS, RECENT)]


def test_nothing_is_counted_unless_asked():
    for clipper in (optaxclip.clip_by_value(1.0), optaxclip.clip(1.0)):
        state = after(clipper, jnp.ones(2))
        assert state.elements == () and optaxclip.metrics(state) == {}
        with pytest.raises(ValueError, match="count=True"):
            optaxclip.metrics(state, only="elements_clipped")


def test_values_beyond_their_bounds_are_counted():
    clipper = COUNTING["clip_by_value"]
    first = {"a": jnp.array([2.0, 0.5, -3.0]), "b": jnp.array([[0.1], [1.0]])}
    second = jax.tree.map(lambda x: x / 10, first)
    assert shares(clipper, first, second) == pytest.approx([0.0, 0.2, 0.2])


def test_what_keeps_its_value_is_not_counted():
    for values, clipped in (
        ([np.nan, 0.5], 0.0),
        ([np.inf, 0.5], 0.5),
        ([3 + 4j, 0.5j], 0.5),
        ([3, 0, 0, 0], 0.25),
    ):
        share, *_ = shares(COUNTING["clip_by_value"], jnp.array(values))
        assert share == clipped, values


def test_no_elements_have_a_share_of_0():
    for tree in ({}, {"a": None}, {"a": jnp.zeros((0, 3))}):
        assert shares(optaxclip.clip_by_value(1.0, count=True), tree) == [0, 0, 0]


def test_leaves_without_numbers_are_no_elements():
    tree = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([True, True])}
    assert shares(optaxclip.clip_by_value(1.0, count=True), tree)[0] == 0.5


def test_spikes_of_spam_are_counted():
    clipper = COUNTING["spam"]
    calm, spike = jnp.ones(4), jnp.array([9.0, 1.0, 1.0, 1.0])
    assert shares(clipper, calm, calm, spike) == pytest.approx([0.25, 1 / 12, 1 / 12])


def test_more_elements_than_float32_can_count_are_counted():
    # A float32 sum of ones stops at 2^24, and here 2^24 + 2 are clipped.
    grads = jnp.full(2**24 + 2, 2.0, jnp.bfloat16)
    assert shares(optaxclip.clip_by_value(1.0, count=True), grads)[0] == 1.0


def test_the_moving_average_forgets_what_is_long_ago():
    grads = jnp.where(jnp.arange(400) < 200, 2.0, 0.0)[:, None]
    found = optaxclip.metrics(scanned(COUNTING["clip_by_value"], grads)[0])
    np.testing.assert_allclose(found[KEYS[1]], 0.5, rtol=1e-5)
    np.testing.assert_allclose(found[RECENT], 0.99**200, rtol=1e-4)


@pytest.mark.parametrize("kind", COUNTING)
def test_the_share_is_that_of_all_devices_in_shard_map(kind):
    clipper = COUNTING[kind]
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    specs = {"split": P("x"), "whole": P()}
    grads = {"split": jnp.full(8, 0.5), "whole": jnp.full(2, 0.5)}
    spike = {"split": jnp.full(8, 0.5).at[3].set(99.0), "whole": jnp.array([0.5, 99.0])}

    def share(one, other):
        return optaxclip.metrics(after(clipper, one, other))[KEYS[0]]

    share_of_all = on_each_part(share, mesh, (specs, specs), P())
    assert float(share_of_all(grads, spike)) == pytest.approx(0.2)


@pytest.mark.slow
@pytest.mark.parametrize("name", COUNTING)
def test_elements_are_counted_in_programs_for_any_size(name):
    (size,) = jax.export.symbolic_shape("size")
    shape = jax.ShapeDtypeStruct((3, size), jnp.float32)

    def share(grads):
        return optaxclip.metrics(after(COUNTING[name], grads))[KEYS[0]]

    program = jax.export.export(jax.jit(share))(shape)
    grads = jnp.array([[0.5, 2.0], [0.5, 0.5], [3.0, 0.5]])
    assert program.call(grads) == share(grads)
    # Any size may be above 2^32, where uint32 ends.
    assert "tensor<ui32>" not in program.mlir_module()
