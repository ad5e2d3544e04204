"""The promises that every norm clipper keeps, over the table of tests/methods.py."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from tests.core.steps import (
    apply,
    every_clipper,
    few,
    programs,
    same_bits,
    stepped,
    zeros,
)
from tests.helpers import (
    CLIPPERS,
    PAIRS,
    PURE,
    assert_scaled,
    exact,
    limits,
    random_tree,
    scaled,
    smallest,
    with_value,
)
from tests.methods import FLOATS, METHODS

every_dtype = pytest.mark.parametrize(
    ("dtype", "name"), [(dtype, name) for name, dtype in PAIRS]
)


@every_dtype
def test_longer_parts_get_their_limit_and_keep_their_direction(name, dtype):
    updates, params = random_tree(dtype, 1, 3.0), random_tree(dtype, 2, 0.5)
    clipped, _ = stepped(name, 0.125, updates, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(clipped, updates)
    assert_scaled(CLIPPERS[name], clipped, updates, 0.125, params)


@every_dtype
def test_updates_within_the_limit_are_bit_identical(name, dtype):
    updates = random_tree(dtype)
    least = smallest(updates["bias"].dtype)
    updates["bias"] = with_value(updates["bias"], 0, least)
    clipped, state = stepped(name, 1e4, updates, updates)
    same_bits(clipped, updates)
    assert all(
        (np.asarray(scale) == 1).all() for scale in jax.tree.leaves(state.factor)
    )


@every_clipper
def test_jit_gives_the_bits_that_eager_gives(name):
    (updates, *_), found = programs(name)
    same_bits(found["plain"], apply(CLIPPERS[name].build(0.125), updates))


def test_a_norm_equal_to_the_limit_is_left_alone():
    norm = jax.jit(optaxclip.global_norm)
    for seed in range(40):
        updates = random_tree("float32", seed)
        limit = norm(updates) if seed else optaxclip.global_norm(updates)
        same_bits(apply(optaxclip.clip_by_global_norm(limit), updates)[0], updates)


SIZES = [("float32", 1e38), ("float32", 3e-38), ("bfloat16", 1e38), ("bfloat16", 3e-38)]


EXTREMES = [
    (dtype, size, name)
    for dtype, size in [*SIZES, ("float16", 65504.0)]
    for name in CLIPPERS
    if dtype in ("float32", PURE[name])
]


@pytest.mark.parametrize(("dtype", "size", "name"), EXTREMES)
def test_extreme_finite_values_keep_bound_and_direction(name, dtype, size):
    case = CLIPPERS[name]
    few = jax.tree.map(lambda x: np.zeros(x.shape), random_tree(dtype))
    few["kernel"][0, 0], few["bias"][1] = 1.0, -0.5
    updates = jax.tree.map(lambda x: jnp.asarray(x * size, dtype), few)
    limit = 1.0 if size > 1 else 2.4e-38
    params = jax.tree.map(lambda x: jnp.asarray(np.ones(x.shape), dtype), few)
    clipped, state = stepped(name, limit, updates, params)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(exact(state.norm)))
    eps = float(jnp.finfo(dtype).eps)
    rtol = 8 * eps if eps < 1e-3 else eps
    trees = case.parts(exact(updates)), case.parts(exact(clipped))
    for before, after, most in zip(*trees, limits(case, limit, updates, params)):
        for x, y in zip(scaled(case, before, most), after):
            np.testing.assert_allclose(y, x, rtol=rtol, atol=1.2e-38)


@every_clipper
@pytest.mark.parametrize("dtype", ["float32", "mixed"])
def test_limit_zero_gives_zeros_for_zero_updates_too(name, dtype):
    for updates in (random_tree(dtype), zeros(random_tree(dtype))):
        clipped, _ = stepped(name, 0.0, updates, updates)
        chex.assert_trees_all_equal(clipped, zeros(updates))


# None and inf are one limit to the kernel, but arrive there on two ways: each with the
# policy that the other has with the next clipper.
UNLIMITED = [
    (nonfinite, math.inf, name)
    for nonfinite in ("propagate", "zero")
    for name in CLIPPERS
] + [
    (("propagate", "zero")[place % 2], None, name)
    for place, (name, case) in enumerate(CLIPPERS.items())
    if not (case.relative or case.numbers_only)
]


@pytest.mark.parametrize(("nonfinite", "limit", "name"), UNLIMITED)
def test_no_limit_only_measures_even_where_there_is_nan(name, limit, nonfinite):
    updates = random_tree("float32")
    updates["bias"] = with_value(updates["bias"], 2, np.nan)
    updates["kernel"] = with_value(updates["kernel"], (0, 0), np.inf)
    clipped, _ = apply(
        CLIPPERS[name].build(limit, nonfinite=nonfinite),
        updates,
        random_tree("float32"),
    )
    same_bits(clipped, updates)


@every_clipper
def test_zero_updates_stay_zero_and_count_as_unclipped(name):
    updates = zeros(random_tree("float32"))
    clipped, state = apply(CLIPPERS[name].build(1.0), updates)
    same_bits(clipped, updates)
    assert all(
        not np.any(x)
        for x in jax.tree.leaves((state.norm, state.clipped, state.nonfinite))
    )


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, method in METHODS.items()
        if method.leaves == FLOATS and method.wraps != "optimizer"
    ],
)
def test_empty_trees_and_other_leaves_pass_through(name):
    clipper = METHODS[name].make()
    assert apply(clipper, {})[0] == {}
    others = {
        "int": jnp.arange(3),
        "bool": jnp.array([True, False]),
        "none": None,
        "masked": optax.MaskedNode(),
        "empty": jnp.zeros((0, 3)),
        "float0": np.zeros(2, jax.dtypes.float0),
    }
    tree = others | {"float": jnp.array([30.0, 40.0]), "key": jax.random.key(0)}
    params = tree | {"float": jnp.array([3.0, 4.0])}
    state = clipper.init(tree)
    for _ in range(3):
        updates, state = clipper.update(tree, state, params)
        clipped = dict(updates)
        length = np.linalg.norm(clipped.pop("float"))
        assert length < 50 if METHODS[name].shrinks else np.isfinite(length)
        assert clipped.pop("key") == tree["key"]
        same_bits(clipped, others)
    if isinstance(state, optaxclip.ClipState):
        assert len(state.by_name()) == 1


DERIVED = [(name, "float32") for name in CLIPPERS]
DERIVED += [("clip_by_global_norm", "complex64")]


@pytest.mark.parametrize(("name", "dtype"), DERIVED)
def test_derivatives_are_finite_at_zero_and_elsewhere(name, dtype):
    # Singular vectors have no derivative where singular values are equal: only the way
    # by matrix products has one.
    options = {"method": "newton_schulz"} if CLIPPERS[name].clip else {}
    clipper = CLIPPERS[name].build(0.1, **options)
    params = few(name, random_tree(dtype, 5))

    @jax.jit
    def derivatives(updates):
        def clipped(tree):
            return clipper.update(tree, clipper.init(tree), params)[0]

        out, forward = jax.linearize(clipped, updates)
        ones = jax.tree.map(jnp.ones_like, updates)
        return forward(ones), jax.linear_transpose(forward, updates)(out)

    trees = [random_tree(dtype, scale=scale) for scale in (1.0, 1e-30, 1e18)]
    for updates in (zeros(random_tree(dtype)), *trees):
        found = jax.tree.leaves(derivatives(few(name, updates)))
        assert all(np.isfinite(x).all() for x in found)
