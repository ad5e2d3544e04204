"""The promises that every norm clipper keeps, over the table of all of them, eagerly
and under jit.
"""

import itertools
import math
import pickle
from functools import cache, partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import checkify

import optaxclip
from tests.helpers import (
    CLIPPERS,
    PAIRS,
    PURE,
    assert_scaled,
    exact,
    limits,
    only_by_a_cpu,
    own_rule,
    random_tree,
    scaled,
    with_value,
)

every_clipper = pytest.mark.parametrize("name", CLIPPERS)
every_clipper_with_rules = pytest.mark.parametrize(
    "name", [name for name, case in CLIPPERS.items() if not case.numbers_only]
)
every_dtype = pytest.mark.parametrize(
    ("dtype", "name"), [(dtype, name) for name, dtype in PAIRS]
)


@pytest.fixture(autouse=True)
def _float64_where_it_is_tested(request):
    wanted = (
        getattr(request.node, "callspec", None)
        and request.node.callspec.params.get("dtype") == "float64"
    )
    with jax.enable_x64(bool(wanted)):
        yield


def apply(clipper, updates, params=None, **extra):
    return clipper.update(
        updates, clipper.init(updates), updates if params is None else params, **extra
    )


def stepped(name, limit, updates, params):
    """The first step: without jit, which compiles the kernel as one call; but under jit
    what is made of several calls, except in float32.
    """
    numbers_only = CLIPPERS[name].numbers_only and any(
        x.dtype != jnp.float32 for x in jax.tree.leaves(updates)
    )
    return (
        compiled(name)(limit, updates, params)
        if numbers_only
        else apply(CLIPPERS[name].build(limit), updates, params)
    )


@cache
def compiled(name):
    return jax.jit(
        lambda limit, updates, params: apply(
            CLIPPERS[name].build(limit), updates, params
        )
    )


def few(name, tree):
    """The kernel and the bias alone, where what is promised of a tree is promised of
    any.
    """
    return tree if "group" in name else {"kernel": tree["kernel"], "bias": tree["bias"]}


def same_bits(one, other):
    chex.assert_trees_all_equal_structs(one, other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other)):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@every_dtype
def test_longer_parts_get_their_limit_and_keep_their_direction(name, dtype):
    updates, params = random_tree(dtype, 1, 3.0), random_tree(dtype, 2, 0.5)
    clipped, _ = stepped(name, 0.125, updates, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(clipped, updates)
    assert_scaled(CLIPPERS[name], clipped, updates, 0.125, params)


@every_dtype
def test_updates_within_the_limit_are_bit_identical(name, dtype):
    updates = random_tree(dtype)
    updates["bias"] = with_value(
        updates["bias"], 0, float(jnp.finfo(updates["bias"].dtype).smallest_subnormal)
    )
    clipped, state = stepped(name, 1e4, updates, updates)
    same_bits(clipped, updates)
    assert all(
        (np.asarray(scale) == 1).all() for scale in jax.tree.leaves(state.factor)
    )


@cache
def programs(name):
    """What a clipper does under jit, plain and inside wrappers of optax, compiled in
    one go: {wrapper: what it gave}.
    """
    case = CLIPPERS[name]
    mean, one, two = (
        partial(optax.MultiSteps, every_k_schedule=2),
        case.build(0.5),
        case.build(0.25),
    )

    def plain(optimizer, updates, params):
        state = optimizer.init(params)
        clipped, new_state = optimizer.update(updates, state, params)
        return clipped, state, new_state

    @jax.jit
    def run(mixed, half, first, second, params):
        found = {"plain": apply(case.build(0.125), mixed, mixed)}
        injected = optax.inject_hyperparams(case.build)(optax.constant_schedule(0.125))
        found["inject_hyperparams"] = plain(injected, half, half)
        optimizer = mean(one)
        _, state = optimizer.update(first, optimizer.init(params), params)
        found["multi_steps"] = optimizer.update(second, state, params)
        if "group" not in name:
            found["masked"] = plain(
                optax.masked(one, {"kernel": True, "bias": False}), first, params
            )
            found["partition"] = plain(
                optax.partition(
                    {"one": one, "two": two}, {"kernel": "one", "bias": "two"}
                ),
                first,
                params,
            )
        return found

    half = random_tree("float32" if PURE[name] == "complex64" else PURE[name], 3, 40.0)
    plain_trees = (
        few(name, random_tree("float32", seed, scale))
        for seed, scale in ((1, 4.0), (2, 4.0), (3, 1.0))
    )
    given = (random_tree("mixed", 1, 30.0), half, *plain_trees)
    return given, run(*given)


@every_clipper
def test_jit_gives_the_bits_that_eager_gives(name):
    (updates, *_), found = programs(name)
    same_bits(found["plain"], apply(CLIPPERS[name].build(0.125), updates))


def test_a_norm_equal_to_the_limit_is_left_alone():
    norm = jax.jit(optaxclip.global_norm)
    for seed in range(40):
        updates = random_tree("float32", seed)
        clipped, _ = apply(
            optaxclip.clip_by_global_norm(
                norm(updates) if seed else optaxclip.global_norm(updates)
            ),
            updates,
        )
        same_bits(clipped, updates)


def test_clipping_twice_changes_nothing_more():
    clipper = optaxclip.clip_by_global_norm(0.3)
    start = clipper.init(random_tree("float32"))
    for seed in range(40):
        updates = random_tree("float32", seed)
        once, _ = clipper.update(updates, start, updates)
        twice, _ = clipper.update(once, start, once)
        same_bits(once, twice)


EXTREMES = [
    *(
        (dtype, size, name)
        for dtype, size, name in itertools.product(
            ["float32", "bfloat16"], [1e38, 3e-38], CLIPPERS
        )
        if dtype in ("float32", PURE[name])
    ),
    *(("float16", 65504.0, name) for name in CLIPPERS if PURE[name] == "float16"),
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
    for before, after, most in zip(
        case.parts(exact(updates)),
        case.parts(exact(clipped)),
        limits(case, limit, updates, params),
    ):
        for x, y in zip(scaled(case, before, most), after):
            np.testing.assert_allclose(
                y, x, rtol=8 * eps if eps < 1e-3 else eps, atol=1.2e-38
            )


def zeros(tree):
    return jax.tree.map(lambda x: jax.device_put(np.zeros_like(x)), tree)


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


@pytest.mark.parametrize("name", [name for name in CLIPPERS if "group" not in name])
def test_empty_trees_and_other_leaves_pass_through(name):
    clipper = CLIPPERS[name].build(0.5)
    assert apply(clipper, {})[0] == {}
    updates = {
        "float": jnp.array([3.0, 4.0]),
        "int": jnp.arange(3),
        "bool": jnp.array([True, False]),
        "none": None,
        "masked": optax.MaskedNode(),
        "empty": jnp.zeros((0, 3)),
    }
    updates["float0"] = np.zeros(2, jax.dtypes.float0)
    clipped, state = apply(clipper, updates)
    assert len(state.by_name()) == 1
    same_bits(
        {key: value for key, value in clipped.items() if key != "float"},
        {key: value for key, value in updates.items() if key != "float"},
    )
    assert np.linalg.norm(clipped["float"]) < 5


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "float32") for name in CLIPPERS), ("clip_by_global_norm", "complex64")],
)
def test_derivatives_are_finite_at_zero_and_elsewhere(name, dtype):
    # Singular vectors have no derivative where singular values are equal: only the way
    # by matrix products has one.
    options = {"method": "newton_schulz"} if CLIPPERS[name].clip else {}
    clipper, params = (
        CLIPPERS[name].build(0.1, **options),
        few(name, random_tree(dtype, 5)),
    )

    @jax.jit
    def derivatives(updates):
        def clipped(tree):
            return clipper.update(tree, clipper.init(tree), params)[0]

        out, forward = jax.linearize(clipped, updates)
        return forward(jax.tree.map(jnp.ones_like, updates)), jax.linear_transpose(
            forward, updates
        )(out)

    for updates in (
        zeros(random_tree(dtype)),
        *(random_tree(dtype, scale=scale) for scale in (1.0, 1e-30, 1e18)),
    ):
        assert all(
            np.isfinite(x).all()
            for x in jax.tree.leaves(derivatives(few(name, updates)))
        )


def falling(step):
    return 0.5 - 0.125 * step


LIMITS = [
    0.5,
    np.float32(0.5),
    np.float64(0.5),
    np.asarray(0.5),
    jnp.float32(0.5),
    jnp.bfloat16(0.5),
    jnp.float16(0.5),
    falling,
    optax.constant_schedule(0.5),
]
# Each with two clippers at least: the global one, and one of those that measure several
# parts.
KINDS = [
    (limit, name)
    for name, some in (
        ("clip_by_global_norm", LIMITS),
        ("clip_by_unitwise_norm", LIMITS[1::2]),
        ("adaptive_grad_clip per tensor", LIMITS[0::2]),
    )
    for limit in some
]


@pytest.mark.parametrize(
    ("limit", "name"),
    KINDS,
    ids=lambda given: (
        given
        if isinstance(given, str)
        else str(getattr(given, "dtype", type(given).__name__))
    ),
)
def test_a_limit_of_any_kind_gives_the_same_updates(name, limit):
    updates, params = random_tree("mixed", scale=10.0), random_tree("mixed", 3)
    wanted, _ = apply(CLIPPERS[name].build(0.5), updates, params)
    clipped, _ = apply(CLIPPERS[name].build(limit), updates, params)
    same_bits(clipped, wanted)


@every_clipper_with_rules
def test_a_schedule_follows_the_steps(name):
    updates, params = random_tree("float32", scale=10.0), random_tree("float32", 3)
    clipper = CLIPPERS[name].build(falling)
    state = clipper.init(updates)
    for step in range(3):
        clipped, state = clipper.update(updates, state, params)
        wanted, _ = apply(CLIPPERS[name].build(falling(step)), updates, params)
        chex.assert_trees_all_close(clipped, wanted, rtol=1e-6)


@every_clipper_with_rules
def test_a_traced_negative_limit_counts_as_zero(name):
    clipper, updates = CLIPPERS[name].build(falling), random_tree("float32")
    state = clipper.init(updates)
    for step in (5, 12):
        clipped, new_state = clipper.update(
            updates, state._replace(step=jnp.asarray(step, jnp.int32)), updates
        )
        assert falling(step) < 0 and not any(
            np.any(limit) for limit in jax.tree.leaves(new_state.limit)
        )
        chex.assert_trees_all_equal(clipped, zeros(updates))


@every_clipper
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_nonfinite_norm_makes_the_measured_part_nan(name, bad):
    updates = random_tree("mixed")
    updates["bias"] = with_value(updates["bias"], 1, bad)
    clipped, state = apply(CLIPPERS[name].build(0.5), updates, random_tree("mixed"))
    parts = CLIPPERS[name].parts(exact(clipped))
    hit = [all(np.isnan(x).all() for x in part) for part in parts]
    whole = [all(np.isfinite(x).all() for x in part) for part in parts]
    assert sum(hit) == 1 and sum(whole) == len(parts) - 1
    assert sum(int(np.sum(x)) for x in jax.tree.leaves(state.nonfinite)) == 1


@every_clipper
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_the_zero_policy_makes_the_measured_part_zero(name, bad):
    updates = random_tree("float32")
    updates["bias"] = with_value(updates["bias"], 1, bad)
    clipped, state = apply(
        CLIPPERS[name].build(0.5, nonfinite="zero"), updates, random_tree("float32")
    )
    good, _ = apply(CLIPPERS[name].build(0.5), random_tree("float32"))
    assert not np.asarray(clipped["bias"]).any()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(clipped))
    if "global" not in name:
        chex.assert_trees_all_equal(clipped["kernel"], good["kernel"])
    assert sum(int(np.sum(x)) for x in jax.tree.leaves(state.nonfinite)) == 1


@every_clipper
def test_the_raise_policy_names_order_and_leaves(name):
    keys = ("bias", "block", "kernel")[: 3 if "group" in name else 2]
    good, params = (
        {key: tree[key] for key in keys}
        for tree in (random_tree("float32"), random_tree("float32", 2))
    )
    clipper = CLIPPERS[name].build(0.5, nonfinite="raise")
    apply(clipper, good, params)
    bad = {
        **good,
        "block": {
            **good["block"],
            "conv": with_value(good["block"]["conv"], (0, 0, slice(2)), np.nan),
        },
    }
    with pytest.raises(
        FloatingPointError,
        match=(
            r"the norm of order \w+ of the updates is not finite.*block/conv': 2 of 24 "
            r"values are NaN or inf"
        ),
    ):
        apply(clipper, bad, params)
    with pytest.raises(FloatingPointError):
        apply(CLIPPERS[name].build(math.inf, nonfinite="raise"), bad, params)
    checked = checkify.checkify(jax.jit(clipper.update))
    good, bad, params = (
        tree if "group" in name else {"block": tree["block"]}
        for tree in (good, bad, params)
    )
    start = clipper.init(good)
    assert "not finite" in checked(bad, start, params)[0].get()
    assert checked(good, start, params)[0].get() is None


@pytest.mark.parametrize(
    "norm", [optaxclip.global_norm, optaxclip.tensor_norm, optaxclip.unitwise_norm]
)
def test_a_nonfinite_step_leaves_no_trace_in_the_memory(norm):
    rule = own_rule(lambda norm: norm, lambda norm, memory, step: (0.5 + memory, norm))
    clipper = optaxclip.clip_by(norm, rule)
    updates = random_tree("float32")
    state = clipper.update(updates, clipper.init(updates))[1]
    same_bits(state.memory, state.norm)
    bad = jax.tree.map(lambda x: jnp.asarray(np.full_like(x, np.nan)), updates)
    same_bits(clipper.update(bad, state)[1].memory, state.memory)


@every_clipper
@pytest.mark.parametrize("dtype", ["float32", "mixed", "float64"])
def test_the_state_keeps_its_structure_shapes_and_dtypes(name, dtype):
    clipper, updates = CLIPPERS[name].build(0.5), random_tree(dtype)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), updates)
    first = clipper.init(updates)
    same_bits(first, clipper.init(abstract))
    second = jax.eval_shape(clipper.update, updates, first, updates)[1]
    if (
        dtype != "float64"
    ):  # what is executed there has the types that were traced; here they are compared
        _, second = clipper.update(updates, first, updates)
    chex.assert_trees_all_equal_shapes_and_dtypes(first, second)
    chex.assert_trees_all_equal_shapes_and_dtypes(
        first, jax.eval_shape(clipper.update, updates, first, updates)[1]
    )
    wide = np.float64 if dtype == "float64" else np.float32
    assert {
        x.dtype for x in jax.tree.leaves((second.norm, second.limit, second.factor))
    } == {np.dtype(wide)}
    saved = first if dtype == "float64" else second
    same_bits(saved, pickle.loads(pickle.dumps(saved)))


@every_clipper
@pytest.mark.slow
def test_works_inside_every_wrapper_of_optax(name):
    (_, updates, *_), found = programs(name)
    wrapped = {"inject_hyperparams": found["inject_hyperparams"]}
    if name == "clip_by_global_norm":  # the others come from the same kernel
        wrapped |= wrapped_in_others(updates, random_tree("float32", 3))
    wanted, _ = stepped(name, 0.125, updates, updates)
    for wrapper, (clipped, state, new_state) in wrapped.items():
        chex.assert_trees_all_equal_shapes_and_dtypes(clipped, updates)
        chex.assert_trees_all_equal_shapes_and_dtypes(new_state, state)
        same_bits(clipped, wanted)
        assert any(
            key.endswith("norm_before") or "norm_before/" in key
            for key in optaxclip.metrics(new_state)
        ), wrapper


def wrapped_in_others(updates, params):
    build = optaxclip.clip_by_global_norm
    others = {
        "chain": optax.chain(build(0.125), optax.identity()),
        "inject_hyperparams beside float32 weights": optax.inject_hyperparams(build)(
            optax.constant_schedule(0.125)
        ),
        "apply_if_finite": optax.apply_if_finite(build(0.125), 3),
        "named_chain": optax.named_chain(("clip", build(0.125))),
    }
    states = {wrapper: optimizer.init(params) for wrapper, optimizer in others.items()}
    steps = jax.jit(
        lambda updates, params: {
            wrapper: optimizer.update(updates, states[wrapper], params)
            for wrapper, optimizer in others.items()
        }
    )
    return {
        wrapper: (clipped, states[wrapper], state)
        for wrapper, (clipped, state) in steps(updates, params).items()
    }


@every_clipper
def test_multi_steps_clips_the_mean_and_counts_real_steps(name):
    (_, _, first, second, params), found = programs(name)
    clipped, state = found["multi_steps"]
    mean = jax.tree.map(lambda a, b: (np.asarray(a) + np.asarray(b)) / 2, first, second)
    assert_scaled(CLIPPERS[name], clipped, mean, 0.5, params)
    assert int(state.inner_opt_state.step) == 1


@pytest.mark.parametrize("name", [name for name in CLIPPERS if "group" not in name])
def test_masked_leaves_are_neither_counted_nor_touched(name):
    (_, _, updates, _, params), found = programs(name)
    clipped = found["masked"][0]
    assert_scaled(
        CLIPPERS[name],
        {"kernel": clipped["kernel"]},
        {"kernel": updates["kernel"]},
        0.5,
        {"kernel": params["kernel"]},
    )
    same_bits(clipped["bias"], updates["bias"])


@pytest.mark.parametrize("name", [name for name in CLIPPERS if "group" not in name])
def test_partition_clips_each_part_by_itself(name):
    (_, _, updates, _, params), found = programs(name)
    clipped, _, state = found["partition"]
    for limit, key in ((0.5, "kernel"), (0.25, "bias")):
        assert_scaled(
            CLIPPERS[name],
            {key: clipped[key]},
            {key: updates[key]},
            limit,
            {key: params[key]},
        )
    assert any(
        key.startswith("clip/one/norm_before") for key in optaxclip.metrics(state)
    )


@every_clipper
def test_scan_vmap_and_donation(name):
    """All three in one program: two runs side by side, of two steps each, into the
    memory of their gradients and first states.
    """
    clipper, params = CLIPPERS[name].build(0.5), few(name, random_tree("float32", 3))
    trees = [few(name, random_tree("float32", seed, 4.0)) for seed in range(4)]
    many = jax.tree.map(
        lambda *x: jax.device_put(np.stack(x).reshape(2, 2, *x[0].shape)), *trees
    )
    starts = jax.tree.map(
        lambda x: jax.device_put(np.stack([x, x])), clipper.init(params)
    )

    @partial(jax.jit, donate_argnums=(0, 1))
    @jax.vmap
    def run(state, updates):
        return jax.lax.scan(
            lambda state, each: clipper.update(each, state, params)[::-1],
            state,
            updates,
        )

    state, clipped = run(starts, many)
    assert all(x.is_deleted() for x in jax.tree.leaves((many, starts.norm)))
    np.testing.assert_array_equal(state.step, [2, 2])
    for place, updates in enumerate(trees):
        assert_scaled(
            CLIPPERS[name],
            jax.tree.map(partial(step_of, place), clipped),
            updates,
            0.5,
            params,
        )


def step_of(place, leaf):
    return np.asarray(leaf)[divmod(place, 2)]


def test_weak_type_is_kept():
    clipper = optaxclip.clip_by_global_norm(1.0)
    for value in (jnp.asarray(3.0), jnp.asarray(0.5), jnp.float32(3.0)):
        clipped, _ = apply(clipper, value)
        assert clipped.weak_type == value.weak_type and clipped.dtype == value.dtype


@pytest.mark.parametrize(
    "clip", [optaxclip.clip_by_unitwise_norm, optaxclip.clip_by_tensor_norm]
)
def test_weak_type_is_kept_where_units_have_their_own_factors(clip):
    weak = jnp.full((3, 2), 2.0)
    assert weak.weak_type
    clipped, _ = apply(clip(1.0), weak)
    assert clipped.weak_type and clipped.dtype == jnp.float32
    np.testing.assert_allclose(
        clipped,
        np.full(
            (3, 2), 1 / np.sqrt(3 if clip is optaxclip.clip_by_unitwise_norm else 6)
        ),
        rtol=1e-6,
    )


@every_clipper
def test_works_under_strict_dtype_promotion(name):
    with jax.numpy_dtype_promotion(
        "strict"
    ):  # which is judged while the program is traced
        clipped, _ = jax.eval_shape(
            partial(apply, CLIPPERS[name].build(0.5)),
            random_tree("mixed"),
            random_tree("float32", 3),
        )
    chex.assert_trees_all_equal_shapes_and_dtypes(clipped, random_tree("mixed"))


def norms_of(state):
    """The norms in the structure that norm functions return."""
    known = state.by_name()
    if set(known) == {""}:
        return known[""].norm
    found = {}
    for name, entry in known.items():
        *path, last = name.split("/")
        inner = found
        for key in path:
            inner = inner.setdefault(key, {})
        inner[last] = entry.norm
    return found


@pytest.mark.parametrize(
    "name",
    [name for name, case in CLIPPERS.items() if not (case.numbers_only or case.clip)],
)
def test_a_norm_measured_elsewhere_is_used(name):
    case, updates, params = (
        CLIPPERS[name],
        random_tree("float32", scale=10.0),
        random_tree("float32", 3),
    )
    clipper = case.build(0.5)
    wanted, state = apply(clipper, updates, params)
    norms = norms_of(state)
    clipped, _ = apply(clipper, updates, params, grad_norm=norms)
    chex.assert_trees_all_close(clipped, wanted, rtol=1e-6)
    halved, _ = apply(
        clipper,
        updates,
        params,
        grad_norm=jax.tree.map(lambda norm: np.asarray(norm) * 2, norms),
    )
    chex.assert_trees_all_close(
        halved["bias"], np.asarray(wanted["bias"]) / 2, rtol=1e-5
    )
    with pytest.raises(
        ValueError, match="grad_norm must have the structure and shapes"
    ):
        apply(clipper, updates, params, grad_norm={"nowhere": 1.0})


def compiled_step(clipper, dtype=jnp.float32, leaves=3, then=None):
    """Temporary bytes of a donated Adam step, as a share of the gradients' bytes."""
    optimizer = optax.chain(clipper, optax.adam(1e-3) if then is None else then)
    params = {
        f"w{i:02}": jax.ShapeDtypeStruct((2048, 96 + i), jnp.float32)
        for i in range(leaves)
    }
    grads = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), params)

    @partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, grads

    compiled = step.lower(
        params, jax.eval_shape(optimizer.init, params), grads
    ).compile()
    return compiled.memory_analysis().temp_size_in_bytes / sum(
        x.size * x.dtype.itemsize for x in jax.tree.leaves(grads)
    )


# Decompositions need room, and clippy still holds copies of what it compares (see its
# docstring).
WITHOUT_GROUP = [
    name
    for name, case in CLIPPERS.items()
    if "group" not in name and not case.clip and name != "clippy"
]


@only_by_a_cpu
@pytest.mark.parametrize("name", WITHOUT_GROUP)
def test_a_train_step_holds_no_copy_of_the_gradients(name):
    case = CLIPPERS[name]
    assert compiled_step(case.build(0.5)) <= 0.01


@only_by_a_cpu
def test_an_inf_norm_makes_no_copy_either():
    assert compiled_step(optaxclip.clip_by_global_norm(0.5, ord=math.inf)) <= 0.01


def test_the_measure_of_copies_sees_the_copy_that_optax_makes():
    assert compiled_step(optax.clip_by_global_norm(0.5)) > 0.9


@only_by_a_cpu
def test_sixteen_bit_gradients_are_copied_at_most_once():
    assert compiled_step(optaxclip.clip_by_global_norm(0.5), jnp.bfloat16) <= 1.01


@only_by_a_cpu
def test_measuring_beside_a_global_clip_costs_no_second_read():
    grads = {f"w{i}": np.ones((64, 32 + i), np.float32) for i in range(3)}

    def reductions(*clippers):
        chain = optax.chain(*clippers)
        text = (
            jax.jit(chain.update)
            .lower(grads, chain.init(grads), grads)
            .compile()
            .as_text()
        )
        return text.count(" reduce(")

    alone = reductions(optaxclip.clip_by_global_norm(1.0))
    assert (
        reductions(
            optaxclip.record_norm(optaxclip.tensor_norm),
            optaxclip.clip_by_global_norm(1.0),
        )
        == alone
        > 0
    )


@every_clipper
def test_the_second_eager_step_compiles_nothing(name):
    updates, params = random_tree("float32"), random_tree("float32", 3)
    injected = optax.inject_hyperparams(CLIPPERS[name].build)(
        lambda step: 0.5 / (1 + step)
    )
    for clipper in (CLIPPERS[name].build(0.5), injected):
        state = clipper.init(params)
        for _ in range(2):
            _, state = clipper.update(updates, state, params)
        with count_compilations() as compiled:
            clipper.update(updates, state, params)
        assert compiled == []


class count_compilations:
    """The names of what is compiled inside the block."""

    def __enter__(self):
        self.events = []
        jax.monitoring.register_event_duration_secs_listener(self.listen)
        return self.events

    def listen(self, event, duration, **_):
        if event.endswith("backend_compile_duration"):
            self.events.append(event)

    def __exit__(self, *_):
        self.listen = lambda *args, **kwargs: None
