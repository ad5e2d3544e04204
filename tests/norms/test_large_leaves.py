"""Leaves that a CPU sums in float32 first: right at every size, in one read."""

import math
import re

import jax
import numpy as np
import pytest

import optaxclip
from tests import oracles
from tests.helpers import only_by_a_cpu
from tests.norms.leaves import module_for


def large(*shape):
    return (
        np.random.default_rng(26)
        .uniform(0.5, 1, shape or (260, 257))
        .astype(np.float32)
    )


@pytest.mark.parametrize(
    "scale", [2e-37, 1e-30, 3e-19, 1e-15, 1.0, 1e16, 1e18, 1e30, 1e36]
)
def test_large_leaves_are_within_1e_6_at_every_size(scale):
    leaf = large() * np.float32(scale)
    np.testing.assert_allclose(
        optaxclip.global_norm([leaf]), oracles.norm([leaf]), 1e-6
    )
    np.testing.assert_allclose(
        optaxclip.unitwise_norm([leaf])[0], oracles.unitwise_norm(leaf), 1e-6
    )


@pytest.mark.parametrize(
    "shape",
    [(768, 2304), (50257, 16), (3, 3, 64, 128), (24, 33000), (70000, 1)],
    ids=str,
)
def test_units_of_large_leaves_are_within_1e_6(shape):
    leaf = large(*shape)
    np.testing.assert_allclose(
        jax.jit(optaxclip.unitwise_norm)([leaf])[0], oracles.unitwise_norm(leaf), 1e-6
    )


def test_units_of_all_sizes_in_one_large_leaf_are_right():
    leaf = large() * np.geomspace(2e-37, 1e36, 257).astype(np.float32)
    np.testing.assert_allclose(
        optaxclip.unitwise_norm([leaf])[0], oracles.unitwise_norm(leaf), 1e-6
    )


@pytest.mark.parametrize(
    ("most", "largest"), [(1e-20, 1e-18), (1e-19, 1e-15), (1e-19, 1e-12)]
)
def test_what_is_too_small_to_be_squared_in_float32_still_counts(most, largest):
    leaf = np.full((260, 257), most, np.float32)
    leaf[3, 5] = largest
    np.testing.assert_allclose(
        optaxclip.global_norm([leaf]), oracles.norm([leaf]), 1e-6
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_broken_number_in_a_large_leaf_stays_in_its_unit(
    value,
):
    leaf = large()
    leaf[100, 7] = value
    assert not np.isfinite(optaxclip.global_norm([leaf]))
    units = np.asarray(optaxclip.unitwise_norm([leaf])[0])[0]
    assert [place for place, norm in enumerate(units) if not np.isfinite(norm)] == [7]
    np.testing.assert_allclose(
        np.delete(units, 7), np.delete(oracles.unitwise_norm(large())[0], 7), 1e-6
    )


def test_large_leaves_of_zeros_have_norm_0_and_no_derivative():
    zeros = np.zeros((260, 257), np.float32)
    norm, slope = jax.value_and_grad(optaxclip.global_norm)(zeros)
    assert norm == 0 and not np.any(slope)


def sums_in(function, *arguments):
    return module_for("cpu", function, *arguments).count("applies stablehlo.add")


@only_by_a_cpu
def test_examples_of_a_large_leaf_are_summed_once_each():
    leaves = large() * np.array([1.0, 1e30, 1e-30], np.float32)[:, None, None]
    assert sums_in(jax.vmap(optaxclip.global_norm), leaves) == 1
    np.testing.assert_allclose(
        jax.vmap(optaxclip.global_norm)(leaves),
        [oracles.norm([leaf]) for leaf in leaves],
        1e-6,
    )


@only_by_a_cpu
def test_factors_of_units_are_computed_once_for_each_unit():
    leaf, clipper = large(), optaxclip.clip_by_unitwise_norm(0.5)
    text = jax.jit(clipper.update).lower(leaf, clipper.init(leaf)).compile().as_text()
    operands = re.findall(
        r"= f32\[260,257\]\S* fusion\((.*?)\)", text[text.index("ENTRY") :]
    )
    assert [each.count("%") for each in operands] == [
        2
    ]  # the leaf and one factor for each unit


def alike():
    """Leaves of one type: of usual size, too small and too large for squares, zero."""
    scales = (1.0, 1e-30, 1e30, 0.0)
    return {f"{scale}": large() * np.float32(scale) for scale in scales}


@pytest.mark.parametrize("call", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_leaves_that_share_a_branch_are_all_right(call):
    leaves = alike()
    found = call(optaxclip.tensor_norm)(leaves), call(optaxclip.unitwise_norm)(leaves)
    for name, leaf in leaves.items():
        np.testing.assert_allclose(found[0][name], oracles.norm([leaf]), 1e-6)
        np.testing.assert_allclose(found[1][name], oracles.unitwise_norm(leaf), 1e-6)


def test_a_broken_leaf_leaves_those_of_its_branch_alone():
    leaves = alike() | {"broken": large() * np.float32(math.nan)}
    found = optaxclip.tensor_norm(leaves)
    assert np.isnan(found.pop("broken"))
    for name, norm in found.items():
        np.testing.assert_allclose(norm, oracles.norm([leaves[name]]), 1e-6)


def test_examples_may_have_leaves_that_they_share():
    leaves = alike()
    leaves["1.0"] = np.stack([leaves["1.0"], 2 * leaves["1.0"]])
    axes = dict.fromkeys(leaves) | {"1.0": 0}
    found = jax.vmap(optaxclip.tensor_norm, (axes,))(leaves)
    for name, leaf in leaves.items():
        each = leaf if axes[name] == 0 else [leaf, leaf]
        np.testing.assert_allclose(found[name], [oracles.norm([x]) for x in each], 1e-6)
