"""The promises that every norm clipper keeps, over the table of all of them, eagerly and under jit."""

import math
import pickle
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import checkify

import optaxclip
from tests.clippers import CLIPPERS, DTYPES, exact, limits, random_tree, scaled

every_clipper = pytest.mark.parametrize("name", CLIPPERS)
every_clipper_with_rules = pytest.mark.parametrize("name", [name for name, case in CLIPPERS.items() if not case.numbers_only])
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture(autouse=True)
def _float64_where_it_is_tested(request):
    wanted = getattr(request.node, "callspec", None) and request.node.callspec.params.get("dtype") == "float64"
    with jax.enable_x64(bool(wanted)):
        yield


def apply(clipper, updates, params=None, **extra):
    return clipper.update(updates, clipper.init(updates), updates if params is None else params, **extra)


def rounding_of(case, part, eps):
    """What a decomposition in this precision may be wrong by in every element: 16 eps of the longest, as LAPACK's."""
    return 16 * eps * case.norm(part) if case.clip else 0.0


def same_bits(one, other):
    chex.assert_trees_all_equal_structs(one, other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other)):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@every_clipper
@every_dtype
def test_longer_parts_get_exactly_their_limit_and_keep_their_direction(name, dtype):
    case = CLIPPERS[name]
    updates, params = random_tree(dtype, 1, 3.0), random_tree(dtype, 2, 0.5)
    clipped, _ = apply(case.build(0.125), updates, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(clipped, updates)
    # 16-bit leaves are rounded to their dtype; the rest carries the kernel's own small bias of a few float32 eps.
    eps = max(float(jnp.finfo(leaf.dtype).eps) for leaf in jax.tree.leaves(updates))
    for before, after, limit in zip(case.parts(exact(updates)), case.parts(exact(clipped)), limits(case, 0.125, updates, params)):
        wanted = scaled(case, before, limit)
        tiny = 6e-8 if dtype in ("float16", "mixed") else 0.0  # the spacing of float16 near 0
        for x, y in zip(wanted, after):
            np.testing.assert_allclose(y, x, rtol=8 * eps if eps < 1e-3 else eps, atol=tiny + rounding_of(case, before, eps))
        most = 25 if case.clip else 1  # in eps; a decomposition's as documented
        assert case.norm(after) <= limit * (1 + most * eps) + tiny * math.sqrt(sum(x.size for x in after))


@every_clipper
@every_dtype
def test_updates_within_the_limit_are_bit_identical(name, dtype):
    updates = random_tree(dtype)
    updates["bias"] = updates["bias"].at[0].set(jnp.finfo(updates["bias"].dtype).smallest_subnormal)
    clipped, state = apply(CLIPPERS[name].build(1e4), updates)
    same_bits(clipped, updates)
    assert all(float(scale) == 1 for leaf in jax.tree.leaves(state.scale) for scale in leaf.reshape(-1))


@every_clipper
def test_jit_gives_the_bits_that_eager_gives(name):
    updates, params = random_tree("mixed", 1, 3.0), random_tree("float32", 2)
    clipper = CLIPPERS[name].build(0.125)
    same_bits(jax.jit(clipper.update)(updates, clipper.init(updates), params), apply(clipper, updates, params))


def test_a_norm_equal_to_the_limit_is_left_alone():
    for seed in range(40):
        updates = random_tree("float32", seed)
        clipped, _ = apply(optaxclip.clip_by_global_norm(optaxclip.global_norm(updates)), updates)
        same_bits(clipped, updates)


def test_clipping_twice_changes_nothing_more():
    for seed in range(40):
        once, _ = apply(optaxclip.clip_by_global_norm(0.3), random_tree("float32", seed))
        twice, _ = apply(optaxclip.clip_by_global_norm(0.3), once)
        same_bits(once, twice)


@every_clipper
@pytest.mark.parametrize(("dtype", "size"), [("float32", 1e38), ("float32", 3e-38), ("bfloat16", 1e38), ("bfloat16", 3e-38), ("float16", 65504.0)])
def test_the_largest_and_smallest_finite_values_keep_bound_and_direction(name, dtype, size):
    case = CLIPPERS[name]
    shape = jax.tree.map(lambda x: x.shape, random_tree(dtype))
    few = jax.tree.map(lambda s: np.zeros(s), shape, is_leaf=lambda x: isinstance(x, tuple))
    few["kernel"][0, 0], few["bias"][1] = 1.0, -0.5
    updates = jax.tree.map(lambda x: jnp.asarray(x * size, dtype), few)
    limit = 1.0 if size > 1 else 2.4e-38
    params = jax.tree.map(jnp.ones_like, updates)
    clipped, state = apply(case.build(limit), updates, params)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(exact(state.norm)))
    eps = float(jnp.finfo(dtype).eps)
    for before, after, most in zip(case.parts(exact(updates)), case.parts(exact(clipped)), limits(case, limit, updates, params)):
        for x, y in zip(scaled(case, before, most), after):
            np.testing.assert_allclose(y, x, rtol=8 * eps if eps < 1e-3 else eps, atol=1.2e-38)


@every_clipper
@pytest.mark.parametrize("dtype", ["float32", "mixed"])
def test_limit_zero_gives_zeros_for_zero_updates_too(name, dtype):
    for updates in (random_tree(dtype), jax.tree.map(jnp.zeros_like, random_tree(dtype))):
        clipped, _ = apply(CLIPPERS[name].build(0.0), updates)
        chex.assert_trees_all_equal(clipped, jax.tree.map(jnp.zeros_like, updates))


@every_clipper
@pytest.mark.parametrize("limit", [None, math.inf])
@pytest.mark.parametrize("nonfinite", ["propagate", "zero"])
def test_no_limit_only_measures_even_where_there_is_nan(name, limit, nonfinite):
    if limit is None and (CLIPPERS[name].relative or CLIPPERS[name].numbers_only):
        limit = math.inf
    updates = random_tree("float32")
    updates["bias"] = updates["bias"].at[2].set(jnp.nan)
    updates["kernel"] = updates["kernel"].at[0, 0].set(jnp.inf)
    clipped, _ = apply(CLIPPERS[name].build(limit, nonfinite=nonfinite), updates, random_tree("float32"))
    same_bits(clipped, updates)


@every_clipper
def test_zero_updates_stay_zero_and_count_as_unclipped(name):
    updates = jax.tree.map(jnp.zeros_like, random_tree("float32"))
    clipped, state = apply(CLIPPERS[name].build(1.0), updates)
    same_bits(clipped, updates)
    assert all(not x.any() for x in jax.tree.leaves((state.norm, state.clipped, state.nonfinite)))


@pytest.mark.parametrize("name", [name for name in CLIPPERS if "group" not in name])
def test_an_empty_tree_and_leaves_that_cannot_be_clipped_pass_through(name):
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
    assert len(jax.tree.leaves(state.norm)) == 1
    same_bits({key: value for key, value in clipped.items() if key != "float"}, {key: value for key, value in updates.items() if key != "float"})
    assert float(jnp.linalg.norm(clipped["float"])) < 5


@pytest.mark.parametrize(("name", "dtype"), [*((name, "float32") for name in CLIPPERS), ("clip_by_global_norm", "complex64")])
def test_derivatives_are_finite_at_zero_and_elsewhere(name, dtype):
    # Singular vectors have no derivative where singular values are equal: only the way by matrix products has one.
    options = {"method": "newton_schulz"} if CLIPPERS[name].clip else {}
    clipper, params = CLIPPERS[name].build(0.1, **options), random_tree(dtype, 5)

    @jax.jit
    def derivatives(updates):
        def clipped(tree):
            return clipper.update(tree, clipper.init(tree), params)[0]

        out, transpose = jax.vjp(clipped, updates)
        forward = jax.jvp(clipped, (updates,), (jax.tree.map(jnp.ones_like, updates),))[1]
        return forward, transpose(out)

    for updates in (jax.tree.map(jnp.zeros_like, random_tree(dtype)), *(random_tree(dtype, scale=scale) for scale in (1.0, 1e-30, 1e18))):
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(derivatives(updates)))


LIMITS = [
    0.5,
    np.float32(0.5),
    np.float64(0.5),
    np.asarray(0.5),
    jnp.float32(0.5),
    jnp.bfloat16(0.5),
    jnp.float16(0.5),
    lambda step: 0.5 - 0.25 * step,
    optax.constant_schedule(0.5),
]


@pytest.mark.parametrize("name", ["clip_by_global_norm", "clip_by_unit_norm", "adaptive_grad_clip per tensor"])
@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: str(getattr(limit, "dtype", type(limit).__name__)))
def test_a_limit_of_any_kind_gives_the_same_updates(name, limit):
    updates, params = random_tree("mixed", scale=10.0), random_tree("float32", 3)
    wanted, _ = apply(CLIPPERS[name].build(0.5), updates, params)
    clipped, _ = apply(CLIPPERS[name].build(limit), updates, params)
    same_bits(clipped, wanted)


@every_clipper_with_rules
def test_a_schedule_follows_the_steps(name):
    updates, params = random_tree("float32", scale=10.0), random_tree("float32", 3)
    clipper = CLIPPERS[name].build(lambda step: 0.5 / (1 + step))
    state = clipper.init(updates)
    for step in range(3):
        clipped, state = clipper.update(updates, state, params)
        wanted, _ = apply(CLIPPERS[name].build(0.5 / (1 + step)), updates, params)
        chex.assert_trees_all_close(clipped, wanted, rtol=1e-6)


@every_clipper_with_rules
def test_a_traced_negative_limit_counts_as_zero(name):
    updates = random_tree("float32")
    clipped, _ = apply(CLIPPERS[name].build(lambda step: jnp.float32(-1.0)), updates)
    chex.assert_trees_all_equal(clipped, jax.tree.map(jnp.zeros_like, updates))


@every_clipper
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_nonfinite_norm_makes_the_measured_part_nan(name, bad):
    updates = random_tree("mixed")
    updates["bias"] = updates["bias"].at[1].set(bad)
    clipped, state = apply(CLIPPERS[name].build(0.5), updates, random_tree("float32"))
    parts = CLIPPERS[name].parts(exact(clipped))
    hit = [all(np.isnan(x).all() for x in part) for part in parts]
    whole = [all(np.isfinite(x).all() for x in part) for part in parts]
    assert sum(hit) == 1 and sum(whole) == len(parts) - 1
    assert sum(int(np.sum(x)) for x in jax.tree.leaves(state.nonfinite)) == 1


@every_clipper
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_the_zero_policy_makes_the_measured_part_zero(name, bad):
    updates = random_tree("float32")
    updates["bias"] = updates["bias"].at[1].set(bad)
    clipped, state = apply(CLIPPERS[name].build(0.5, nonfinite="zero"), updates, random_tree("float32"))
    good, _ = apply(CLIPPERS[name].build(0.5), random_tree("float32"))
    assert not np.asarray(clipped["bias"]).any()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(clipped))
    if "global" not in name:
        chex.assert_trees_all_equal(clipped["kernel"], good["kernel"])
    assert sum(int(np.sum(x)) for x in jax.tree.leaves(state.nonfinite)) == 1


@every_clipper
def test_the_raise_policy_names_order_and_leaves(name):
    clipper = CLIPPERS[name].build(0.5, nonfinite="raise")
    updates = random_tree("float32")
    apply(clipper, updates)
    updates["block"]["conv"] = updates["block"]["conv"].at[0, 0, :2].set(jnp.nan)
    with pytest.raises(FloatingPointError, match=r"the norm of order \w+ of the updates is not finite.*block/conv': 2 of 24 values are NaN or inf"):
        apply(clipper, updates)
    with pytest.raises(FloatingPointError):
        apply(CLIPPERS[name].build(math.inf, nonfinite="raise"), updates)
    checked, params = checkify.checkify(jax.jit(clipper.update)), random_tree("float32", 2)
    assert "not finite" in checked(updates, clipper.init(updates), params)[0].get()
    assert checked(random_tree("float32"), clipper.init(updates), params)[0].get() is None


@pytest.mark.parametrize("norm", [optaxclip.global_norm, optaxclip.tensor_norm, optaxclip.unit_norm])
def test_a_nonfinite_step_leaves_no_trace_in_the_memory(norm):
    rule = optaxclip.Threshold(lambda norm: norm, lambda norm, memory, step, params_norm: (0.5 + memory, norm))
    clipper = optaxclip.clip_by(norm, rule)
    updates = random_tree("float32")
    state = clipper.update(updates, clipper.init(updates))[1]
    same_bits(state.memory, state.norm)
    bad = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), updates)
    same_bits(clipper.update(bad, state)[1].memory, state.memory)


@every_clipper
@pytest.mark.parametrize("dtype", ["float32", "mixed", "float64"])
def test_the_state_keeps_its_structure_shapes_and_dtypes(name, dtype):
    clipper, updates = CLIPPERS[name].build(0.5), random_tree(dtype)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), updates)
    first = clipper.init(updates)
    same_bits(first, clipper.init(abstract))
    _, second = clipper.update(updates, first, updates)
    chex.assert_trees_all_equal_shapes_and_dtypes(first, second)
    chex.assert_trees_all_equal_shapes_and_dtypes(first, jax.eval_shape(clipper.update, updates, first, updates)[1])
    wide = np.float64 if dtype == "float64" else np.float32
    assert {x.dtype for x in jax.tree.leaves((second.norm, second.limit, second.scale))} == {np.dtype(wide)}
    same_bits(second, pickle.loads(pickle.dumps(second)))


@every_clipper
def test_works_inside_every_wrapper_of_optax(name):
    case, updates, params = CLIPPERS[name], random_tree("bfloat16", scale=4.0), random_tree("float32", 3)
    wanted, _ = apply(case.build(0.5), updates, params)
    wrapped = {
        "chain": optax.chain(case.build(0.5), optax.identity()),
        "inject_hyperparams": optax.inject_hyperparams(case.build)(optax.constant_schedule(0.5)),
        "apply_if_finite": optax.apply_if_finite(case.build(0.5), 3),
        "named_chain": optax.named_chain(("clip", case.build(0.5))),
    }
    if name != "clip_by_global_norm":  # the others come from the same kernel
        wrapped = {"inject_hyperparams": wrapped["inject_hyperparams"]}
    for wrapper, optimizer in wrapped.items():
        state = optimizer.init(params)
        clipped, new_state = jax.jit(optimizer.update)(updates, state, params)
        chex.assert_trees_all_equal_shapes_and_dtypes(clipped, updates)
        chex.assert_trees_all_equal_shapes_and_dtypes(new_state, state)
        same_bits(clipped, wanted)
        assert any(key.endswith("norm_before") or "norm_before/" in key for key in optaxclip.metrics(new_state)), wrapper


@every_clipper
def test_multi_steps_clips_the_mean_and_counts_real_steps(name):
    case, params = CLIPPERS[name], random_tree("float32", 3)
    first, second = random_tree("float32", 1, 4.0), random_tree("float32", 2, 4.0)
    optimizer = optax.MultiSteps(case.build(0.5), 2)
    state = optimizer.init(params)
    _, state = jax.jit(optimizer.update)(first, state, params)
    clipped, state = jax.jit(optimizer.update)(second, state, params)
    wanted, _ = apply(case.build(0.5), jax.tree.map(lambda a, b: (a + b) / 2, first, second), params)
    chex.assert_trees_all_close(clipped, wanted, rtol=1e-5, atol=1e-6 if case.clip else 0)
    assert int(state.inner_opt_state.step) == 1


@pytest.mark.parametrize("name", [name for name in CLIPPERS if "group" not in name])
def test_masked_leaves_are_neither_counted_nor_touched(name):
    case, updates, params = CLIPPERS[name], random_tree("float32", scale=4.0), random_tree("float32", 3)
    optimizer = optax.masked(case.build(0.5), {"kernel": True, "bias": False, "block": False})
    clipped, _state = jax.jit(optimizer.update)(updates, optimizer.init(params), params)
    wanted, _ = apply(case.build(0.5), {"kernel": updates["kernel"]}, {"kernel": params["kernel"]})
    chex.assert_trees_all_close(clipped["kernel"], wanted["kernel"], rtol=1e-6)
    same_bits([clipped["bias"], clipped["block"]], [updates["bias"], updates["block"]])


@pytest.mark.parametrize("name", [name for name in CLIPPERS if "group" not in name])
def test_partition_clips_each_part_by_itself(name):
    case, updates, params = CLIPPERS[name], random_tree("float32", scale=4.0), random_tree("float32", 3)
    labels = {"kernel": "one", "bias": "two", "block": "two"}
    optimizer = optax.partition({"one": case.build(0.5), "two": case.build(0.25)}, labels)
    clipped, state = jax.jit(optimizer.update)(updates, optimizer.init(params), params)
    wanted, _ = apply(case.build(0.5), {"kernel": updates["kernel"]}, {"kernel": params["kernel"]})
    chex.assert_trees_all_close(clipped["kernel"], wanted["kernel"], rtol=1e-6)
    assert any(key.startswith("clip/one/norm_before") for key in optaxclip.metrics(state))


@every_clipper
def test_scan_vmap_and_donation(name):
    case, params = CLIPPERS[name], random_tree("float32", 3)
    clipper = case.build(0.5)
    many = jax.tree.map(lambda *x: jnp.stack(x), *(random_tree("float32", seed, 4.0) for seed in range(4)))
    each = [apply(clipper, random_tree("float32", seed, 4.0), params)[0] for seed in range(4)]
    wanted = jax.tree.map(lambda *x: jnp.stack(x), *each)

    def step(state, updates):
        clipped, state = clipper.update(updates, state, params)
        return state, clipped

    state, scanned = jax.lax.scan(step, clipper.init(params), many)
    chex.assert_trees_all_close(scanned, wanted, rtol=1e-6)
    assert int(state.step) == 4
    mapped = jax.vmap(lambda updates: clipper.update(updates, clipper.init(params), params)[0])(many)
    chex.assert_trees_all_close(mapped, wanted, rtol=1e-6)
    donated = jax.jit(lambda updates, state: clipper.update(updates, state, params), donate_argnums=(0, 1))
    chex.assert_trees_all_close(donated(random_tree("float32", 0, 4.0), clipper.init(params))[0], each[0], rtol=1e-6)


def test_weak_type_is_kept():
    clipper = optaxclip.clip_by_global_norm(1.0)
    for value in (jnp.asarray(3.0), jnp.asarray(0.5), jnp.float32(3.0)):
        clipped, _ = apply(clipper, value)
        assert clipped.weak_type == value.weak_type and clipped.dtype == value.dtype


@pytest.mark.parametrize("clip", [optaxclip.clip_by_unit_norm, optaxclip.clip_by_tensor_norm])
def test_weak_type_is_kept_where_units_have_their_own_factors(clip):
    weak = jnp.full((3, 2), 2.0)
    assert weak.weak_type
    clipped, _ = apply(clip(1.0), weak)
    assert clipped.weak_type and clipped.dtype == jnp.float32
    np.testing.assert_allclose(clipped, np.full((3, 2), 1 / np.sqrt(3 if clip is optaxclip.clip_by_unit_norm else 6)), rtol=1e-6)


@every_clipper
def test_works_under_strict_dtype_promotion(name):
    with jax.numpy_dtype_promotion("strict"):
        apply(CLIPPERS[name].build(0.5), random_tree("mixed"), random_tree("float32", 3))


@pytest.mark.parametrize("name", [name for name, case in CLIPPERS.items() if not (case.numbers_only or case.clip)])
def test_a_norm_measured_elsewhere_is_used(name):
    case, updates, params = CLIPPERS[name], random_tree("float32", scale=10.0), random_tree("float32", 3)
    clipper = case.build(0.5)
    wanted, state = apply(clipper, updates, params)
    clipped, _ = apply(clipper, updates, params, grad_norm=state.norm)
    chex.assert_trees_all_close(clipped, wanted, rtol=1e-6)
    halved, _ = apply(clipper, updates, params, grad_norm=jax.tree.map(lambda norm: norm * 2, state.norm))
    chex.assert_trees_all_close(halved["bias"], wanted["bias"] / 2, rtol=1e-5)
    with pytest.raises(ValueError, match="grad_norm must have the structure and shapes"):
        apply(clipper, updates, params, grad_norm={"nowhere": 1.0})


def compiled_step(clipper, dtype=jnp.float32, leaves=6, then=None):
    """Temporary bytes of a donated Adam step, as a share of the gradients' bytes."""
    optimizer = optax.chain(clipper, optax.adam(1e-3) if then is None else then)
    params = {f"w{i:02}": jnp.ones((2048, 96 + i), jnp.float32) for i in range(leaves)}
    grads = jax.tree.map(lambda x: x.astype(dtype), params)

    @partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, grads

    compiled = step.lower(params, optimizer.init(params), grads).compile()
    return compiled.memory_analysis().temp_size_in_bytes / sum(x.nbytes for x in jax.tree.leaves(grads))


# Decompositions need room, and clippy still holds copies of what it compares (see its docstring).
WITHOUT_GROUP = [name for name, case in CLIPPERS.items() if "group" not in name and not case.clip and name != "clippy"]


@pytest.mark.parametrize("name", WITHOUT_GROUP)
def test_a_train_step_holds_no_copy_of_the_gradients(name):
    case = CLIPPERS[name]
    assert compiled_step(case.build(0.5)) <= 0.01


def test_an_inf_norm_makes_no_copy_either():
    assert compiled_step(optaxclip.clip_by_global_norm(0.5, ord=math.inf)) <= 0.01


def test_the_measure_of_copies_sees_the_copy_that_optax_makes():
    assert compiled_step(optax.clip_by_global_norm(0.5)) > 0.9


def test_sixteen_bit_gradients_are_copied_at_most_once():
    assert compiled_step(optaxclip.clip_by_global_norm(0.5), jnp.bfloat16) <= 1.01


def test_measuring_tensors_beside_a_global_clip_costs_no_second_read():
    grads = {f"w{i}": jnp.ones((64, 32 + i)) for i in range(5)}

    def reductions(*clippers):
        chain = optax.chain(*clippers)
        text = jax.jit(chain.update).lower(grads, chain.init(grads), grads).compile().as_text()
        return text.count(" reduce(")

    alone = reductions(optaxclip.clip_by_global_norm(1.0))
    assert reductions(optaxclip.measure(optaxclip.tensor_norm), optaxclip.clip_by_global_norm(1.0)) == alone > 0


@pytest.mark.parametrize("name", [name for name in CLIPPERS if name != "clippy"])  # whose limits are compiled anew under inject_hyperparams
def test_the_second_eager_step_compiles_nothing(name):
    updates, params = random_tree("float32"), random_tree("float32", 3)
    injected = optax.inject_hyperparams(CLIPPERS[name].build)(lambda step: 0.5 / (1 + step))
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
