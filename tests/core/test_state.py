"""What a clipper keeps: vectors of norms, summaries of units, counters, and names. A
missing leaf does not rename the others, and another rule has another memory.
"""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optaxclip
from optaxclip import rules
from tests import sharded
from tests.helpers import after, apply, with_rows
from tests.methods import ALONE, METHODS
from tests.sharded import mesh_of

LAST = 2**31 - 1
SHAPES = {"a": (2, 3), "b": (2, 4), "c": (5, 3), "d": (6,), "e": ()}


def tree(seed):
    random = np.random.default_rng(seed)
    return {
        name: jnp.asarray(random.standard_normal(shape), jnp.float32)
        for name, shape in SHAPES.items()
    }


def units(x):
    """The norm of each unit in float64 NumPy."""
    x = np.asarray(x, np.float64)
    axes = tuple(range(max(x.ndim - 1, 1))) if x.ndim else ()
    return np.sqrt(np.sum(x**2, axes))


@pytest.mark.parametrize("name", METHODS)
def test_a_state_has_two_arrays_and_windows(name):
    state = METHODS[name].make().init(tree(0))
    if not hasattr(state, "windows"):
        return
    windows = {"windows", "loss_windows"}.intersection(state._fields)
    apart = {"inner_state"}.intersection(state._fields) | windows
    assert len(jax.tree.leaves(state._replace(**dict.fromkeys(apart, ())))) == 2
    for field in windows:
        for window in jax.tree.leaves(getattr(state, field)):
            # More than one number for each norm.
            assert window.ndim > state.norm.ndim


def test_units_have_a_summary_for_each_leaf():
    grads = tree(1)
    limits = {"a": 0.5, "b": 1.0, "c": jnp.array([[0.1, 1.0, 9.0]]), "d": 1.0, "e": 2.0}
    clipper, eps = optaxclip.clip_by_unitwise_norm(limits, eps=0.25), 0.25
    updates, state = apply(clipper, grads)
    _, second = clipper.update(jax.tree.map(jnp.zeros_like, grads), state)
    assert set(state.by_name()) == set(SHAPES) and state.norm.shape == (5,)
    for name, entry in state.by_name().items():
        norm = units(grads[name])
        limit = np.broadcast_to(np.squeeze(limits[name]), norm.shape)
        factors = np.minimum(1, limit / (norm + eps))
        expected = np.asarray(grads[name]) * factors
        np.testing.assert_allclose(updates[name], expected, rtol=1e-6)
        furthest = np.argmax(norm / limit)
        found = entry.norm, entry.limit, entry.factor
        wanted = [numbers.flat[furthest] for numbers in (norm, limit, factors)]
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
        share = np.mean(factors < 1)
        np.testing.assert_allclose(entry.units_clipped, share, rtol=1e-6)
        assert entry.clipped == (share > 0)
        np.testing.assert_allclose(entry.clipped_recently, share, rtol=1e-6)
        later = second.by_name()[name]
        np.testing.assert_allclose(later.clipped_recently, share / 2, rtol=1e-6)
        assert later.units_clipped == 0 and later.clipped == (share > 0)


# Columns of norms 50, 1 and 0, and limits of 0.5, 0.1 and 0.2.
UNITS = jnp.array([[30.0, 0.6, 0.0], [40.0, 0.8, 0.0]])
WEIGHTS = jnp.array([[3.0, 1.0, 2.0], [4.0, 0.0, 0.0]])
OF_UNITS = {
    "share of weights": (optaxclip.adaptive_grad_clip(0.1), (50, 0.5, 0.01, 1)),
    "no share": (optaxclip.adaptive_grad_clip(None), (50, np.inf, 1, 0)),
    "nothing is left": (optaxclip.adaptive_grad_clip(0.0), (50, 0, 0, 1)),
    "a shrink that is not a quotient": (
        optaxclip.adaptive_grad_clip(0.1, shrink=optaxclip.shrinks.auto_s(1.0)),
        (50, 0.5, 0.5 / 51, 1),
    ),
    "the furthest is not changed": (
        optaxclip.clip_by_unitwise_norm(50.0, shrink=optaxclip.shrinks.normalize),
        (50, 50, 1, 1),
    ),
    "a limit beyond all norms": (
        optaxclip.clip_by_unitwise_norm(3e38),
        (50, 3e38, 1, 0),
    ),
}


@pytest.mark.parametrize("name", OF_UNITS)
def test_the_summary_of_units_is_that_of_the_furthest(name):
    clipper, (norm, limit, factor, clipped) = OF_UNITS[name]
    _, state = clipper.update(UNITS, clipper.init(UNITS), WEIGHTS)
    found = state.norm, state.limit, state.factor, state.clipped
    np.testing.assert_allclose(found, (norm, limit, factor, clipped), rtol=1e-6)


def test_units_without_limits_show_the_longest():
    grads = jnp.array([[3.0, 5.0, 4.0]])
    state = after(optaxclip.clip_by_unitwise_norm(None, axis=0), grads)
    assert (state.norm, state.limit, state.clipped) == (5, np.inf, 0)
    state = after(optaxclip.clip_by_unitwise_norm(None, axis=0), 0 * grads)
    assert (state.norm, state.limit, state.factor) == (0, np.inf, 1)


def test_each_norm_has_its_own_limit():
    grads = {name: tree(6)["a"] * (number + 1) for number, name in enumerate("abcd")}
    clipper = optaxclip.clip_by_tensor_norm(
        {"a": lambda step: 0.5 + step, "b": 1.0, "c": None, "d": jnp.array(2.0)}
    )
    state = after(clipper, grads, jax.tree.map(lambda x: 10 * x, grads))
    limits = {"a": 1.5, "b": 1.0, "c": np.inf, "d": 2.0}
    for name, entry in state.by_name().items():
        norm = 10 * np.linalg.norm(np.float64(grads[name]))
        np.testing.assert_allclose(entry.norm, norm, rtol=1e-6)
        np.testing.assert_allclose(entry.limit, limits[name], rtol=1e-6)


def test_each_norm_has_its_own_memory():
    steps = [{name: tree(seed)[name] for name in "abcde"} for seed in (6, 7, 8)]
    rule = rules.z_score(0.5, 0.5, warmup=2)
    together = after(optaxclip.clip_by_tensor_norm(rule), *steps)
    for name, entry in together.by_name().items():
        alone = after(optaxclip.clip_by_global_norm(rule), *[x[name] for x in steps])
        pair = entry, alone.by_name()[""]
        for one, other in zip(*map(jax.tree.leaves, pair), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)


def test_rules_that_learn_are_refused_in_a_tree_of_limits():
    text = re.escape(
        "clip_by_tensor_norm: max_norm must be one rule for all norms, or a tree of "
        "numbers and schedules, got growth(rate=2.0, floor=0.0, cap=None) for 'a/b': a "
        "rule that learns is for all norms of a clipper. optax.partition gives parts "
        "of a model their own clippers: optax.partition({'a': clipper_a, 'b': "
        "clipper_b}, labels)."
    )
    for growth in (rules.growth(2.0), rules.minimum(rules.growth(2.0), 1.0)):
        with pytest.raises(TypeError) as error:
            optaxclip.clip_by_tensor_norm({"a": {"b": growth}, "c": 1.0})
        assert repr(growth) in str(error.value)
    with pytest.raises(TypeError, match=f"^{text}$"):
        optaxclip.clip_by_tensor_norm({"a": {"b": rules.growth(2.0)}, "c": 1.0})
    # What the text says.
    parts = {
        "a": optaxclip.clip_by_tensor_norm(rules.growth(2.0)),
        "c": optaxclip.clip_by_tensor_norm(1.0),
    }
    clipper = optax.partition(parts, {"a": "a", "c": "c"})
    grads = {"a": {"b": jnp.array([3.0, 4.0])}, "c": jnp.array([3.0, 4.0])}
    updates, _ = apply(clipper, grads)
    np.testing.assert_allclose(updates["a"]["b"], [3.0, 4.0])
    np.testing.assert_allclose(updates["c"], [0.6, 0.8], rtol=1e-6)


def test_units_keep_their_entries_beside_those_of_other_leaves():
    rule = rules.growth(1.5)
    steps = [{name: tree(seed)[name] for name in "abc"} for seed in (8, 9)]
    together = after(optaxclip.clip_by_unitwise_norm(rule), *steps)
    for name, entry in together.by_name().items():
        alone = optaxclip.clip_by_unitwise_norm(rule)
        wanted = after(alone, *[{name: step[name]} for step in steps])
        pair = entry, wanted.by_name()[name]
        for one, other in zip(*map(jax.tree.leaves, pair), strict=True):
            np.testing.assert_array_equal(one, other)


def test_units_remember_what_each_of_them_was():
    steps = [{name: tree(seed)[name] for name in "abde"} for seed in (8, 9, 10)]
    clipper = optaxclip.clip_by_unitwise_norm(rules.growth(1.5))
    state, last = clipper.init(steps[0]), dict.fromkeys("abde", np.inf)
    for grads in steps:
        updates, state = clipper.update(grads, state)
        for name in grads:
            norm, limit = units(grads[name]), 1.5 * last[name]
            wanted = np.float64(grads[name]) * np.minimum(1, limit / norm)
            np.testing.assert_allclose(updates[name], wanted, rtol=1e-6)
            last[name] = np.minimum(norm, limit)


def test_leaves_are_found_by_name_in_another_kind_of_mapping():
    frozen = pytest.importorskip("flax.core").freeze
    clipper = optaxclip.clip_by_tensor_norm(rules.growth(2.0))
    grads = {"b": jnp.ones(3), "a": jnp.full(2, 4.0)}
    state = after(clipper, grads)
    _, found = clipper.update(frozen(grads), state)
    np.testing.assert_allclose(
        found.by_name()["a"].limit, 2 * found.by_name()["a"].norm
    )


def test_layers_of_a_leaf_have_entries_of_their_own():
    # Layers on axis 0, and experts on axis 1.
    grads = {"w": jnp.arange(1.0, 25.0).reshape(2, 3, 4), "b": jnp.ones(2)}
    rule, stacked = rules.windowed_mean(1.0, 4), {"w": 2, "b": None}
    state = after(optaxclip.clip_by_tensor_norm(rule, stacked=stacked), grads)
    norms = np.linalg.norm(np.float64(grads["w"]), axis=-1)
    np.testing.assert_allclose(state.by_name()["w"].norm, norms.ravel(), rtol=1e-6)
    found = state.by_name(layers=True)
    assert set(found) == {"b", *(f"w/{i}/{j}" for i in range(2) for j in range(3))}
    np.testing.assert_allclose(found["w/1/2"].norm, norms[1, 2], rtol=1e-6)
    assert found["w/1/2"].memory.past.shape == (4,)


@pytest.mark.parametrize("shape", [(1, 3, 4, 4), (3, 1, 4, 4), (1, 1, 4, 4)])
@pytest.mark.parametrize(
    "make", [optaxclip.clip_by_tensor_norm, optaxclip.clip_by_spectral_norm]
)
def test_a_single_layer_and_a_single_expert_have_their_number(make, shape):
    state = make(1.0, stacked=2).init({"w": jnp.ones(shape)})
    layers, experts = shape[:2]
    wanted = [f"w/{i}/{j}" for i in range(layers) for j in range(experts)]
    assert list(state.by_name(layers=True)) == wanted


SINGLE = [
    (optaxclip.clip_by_tensor_norm(1.0), [3.0], ()),
    (optaxclip.clip_by_tensor_norm(1.0, stacked=1), [[3.0]], (1,)),
    (optaxclip.clip_by_unitwise_norm(1.0), [[3.0], [4.0]], ()),
]


@pytest.mark.parametrize(("clipper", "grads", "shape"), SINGLE)
def test_a_single_norm_keeps_its_shape(clipper, grads, shape):
    grads = {"w": jnp.array(grads)}
    first, state = clipper.init(grads), after(clipper, grads)
    assert state.by_name()["w"].norm.shape == shape
    assert jax.tree.map(jnp.shape, first) == jax.tree.map(jnp.shape, state)


def test_a_step_counts_what_it_changed_and_what_was_broken():
    norm = jnp.array([5.0, 1.0, np.nan, 3.0])
    limit = jnp.array([2.0, 2.0, 2.0, np.nan])
    grads, limits = (dict(zip("abcd", x)) for x in (norm, limit))
    clipper = optaxclip.clip_by_tensor_norm(1.0)
    state = with_rows(clipper.init(grads), step=3, clipped=5, nonfinite=2)
    _, state = clipper.update(grads, state, limit=limits)
    np.testing.assert_array_equal(state.norm, norm)
    np.testing.assert_array_equal(state.limit, limit)
    np.testing.assert_allclose(state.factor, [0.4, 1.0, np.nan, np.nan], 1e-6)
    np.testing.assert_array_equal(state.clipped, [6, 5, 5, 5])
    np.testing.assert_array_equal(state.clipped_recently, [0.25, 0, 0, 0])
    np.testing.assert_array_equal(state.nonfinite, [2, 2, 3, 3])


WARMED_UP = [
    rules.z_score(warmup=3),
    rules.log_z_score(warmup=3),
    rules.ema_ratio(warmup=3),
    rules.windowed_mean(window=3),
    rules.windowed_quantile(window=3),
    rules.warm_up(2, None, 1.0),
]


def at_its_end(tree):
    """The tree with its counters at their last number."""
    return jax.tree.map(
        lambda x: jnp.full_like(x, LAST) if x.dtype == jnp.int32 else x, tree
    )


@pytest.mark.parametrize("name", METHODS)
def test_no_counter_wraps_or_returns_to_its_warm_up(name):
    grads = jax.tree.map(lambda x: 10 * x, tree(8))
    clipper = METHODS[name].make()
    _, state = clipper.update(grads, clipper.init(grads), grads)
    last = at_its_end(state)
    for _ in range(2):
        _, last = clipper.update(grads, last, grads)
    counters = {
        jax.tree_util.keystr(path): x
        for path, x in jax.tree_util.tree_leaves_with_path(last)
        if x.dtype == jnp.int32 and path
    }
    # Rows of the states of skips and spikes have names.
    if hasattr(last, "ROWS"):
        (counts,) = {".skip_counts", ".spike_counts"} & {*counters}
        del counters[counts]
        counters |= {row: getattr(last, row) for row in last.ROWS.counts}
    for named, x in counters.items():
        is_flag = any(word in named for word in ("consecutive", "since", "spiked"))
        assert is_flag or np.all(x > 2**29), named
    if jax.tree.leaves(last) and name != "reset_momentum":  # has no metrics
        for key, value in optaxclip.metrics(last, floats=True).items():
            assert "share" not in key or 0 <= value <= 1, key


@pytest.mark.parametrize("rule", WARMED_UP, ids=lambda rule: type(rule).__name__)
def test_a_rule_keeps_its_limit_after_2_to_the_31_steps(rule):
    clipper = optaxclip.clip_by_global_norm(rule)
    state = after(clipper, *[jnp.array([1.0 + i / 10]) for i in range(5)])
    count_rows = state.counts.at[3:].set(LAST)
    state = state._replace(counts=count_rows, windows=at_its_end(state.windows))
    for norm in (1.0, 1.1, 1.2, 1.3):
        _, state = clipper.update(jnp.array([norm]), state)
        assert np.isfinite(state.limit)


def test_a_gradient_of_0_is_not_counted_as_clipped():
    normalize, grads = optaxclip.shrinks.normalize, jnp.zeros(2)
    for clipper in (
        optaxclip.clip_by_global_norm(1.0, shrink=normalize),
        optaxclip.clip_by_global_norm(1.0, shrink=normalize, eps=1e-6),
        optaxclip.clip_by_global_norm(0.0, eps=1e-6),
        # A shrink of the user's, which gives it a length, where no eps is added.
        optaxclip.adaptive_grad_clip(1.0, shrink=lambda norm, limit: limit),
        # Its weights decay, and so does no gradient of 0.
        optaxclip.larc(0.1, 0.001, weight_decay=0.05),
    ):
        _, state = clipper.update(grads, clipper.init(grads), jnp.ones(2))
        assert (state.factor, state.clipped) == (1, 0)


def test_one_jitted_function_reads_states_of_other_layers():
    """Of as many norms, so that only the names of layers tell them apart."""
    log = jax.jit(
        lambda state: (optaxclip.metrics(state, layers=True), state.by_name())
    )
    for enc, dec, stacked in (
        (2, 3, {"enc": 1, "dec": 1}),
        (3, 2, {"enc": 1, "dec": 1}),
        (4, 1, {"enc": 1, "dec": None}),
        (1, 4, {"enc": None, "dec": 1}),
    ):
        grads = {"enc": jnp.arange(1.0, enc + 1)[:, None], "dec": jnp.ones((dec, 1))}
        state = apply(optaxclip.clip_by_tensor_norm(9.0, stacked=stacked), grads)[1]
        found, entries = log(state)
        assert found == optaxclip.metrics(state, layers=True)
        np.testing.assert_array_equal(
            entries["enc"].norm.reshape(-1), np.arange(1, enc + 1)
        )


def test_a_state_of_other_layers_is_refused_whatever_ran_before():
    clipper = optaxclip.clip_by_tensor_norm(
        rules.growth(1.01), stacked={"a": 1, "b": 1}
    )
    one, other = ({"a": jnp.ones((n, 1)), "b": jnp.ones((5 - n, 1))} for n in (2, 3))
    clipper.update(one, clipper.init(one))
    with pytest.raises(ValueError, match="state was made for 3 norms in 'a', but the"):
        clipper.update(one, clipper.init(other))


@pytest.mark.parametrize("units", [(1, 10), (10, 12), (10, 1)])
@pytest.mark.parametrize("rule", [rules.growth(), rules.windowed_mean(window=4)])
def test_a_state_of_other_units_is_refused(units, rule):
    clipper = optaxclip.clip_by_unitwise_norm(rule)
    old, new = (jnp.ones((3, n)) for n in units)
    with pytest.raises(ValueError, match=r"^clip_by_unitwise_norm: state was made for"):
        clipper.update(new, clipper.init(old))


@pytest.mark.parametrize("name", ["clip_by_value", "spam"])
def test_a_step_may_be_set_to_a_number(name):
    clipper = METHODS[name].make()
    grads = {"w": jnp.ones(3)}
    state = optax.tree.set(clipper.init(grads), step=5)
    _, state = clipper.update(grads, state, grads)
    assert optax.tree.get(state, "step") == 6


def test_an_update_refuses_the_joined_rows_of_several_devices():
    clipper = optaxclip.clip_by_tensor_norm(1.0, stacked={"w": 1, "b": None})
    grads = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
    rows = jax.tree.map(lambda x: jnp.tile(x, 2), clipper.init(grads))
    text = "^clip_by_tensor_norm: the state must have one entry for each norm, but "
    with pytest.raises(ValueError, match=text):
        clipper.update(grads, rows)


def test_by_name_refuses_the_state_of_several_models():
    clipper = optaxclip.clip_by_tensor_norm(1.0)
    grads = {"actor": jnp.ones((3, 2)), "critic": jnp.ones((3, 4))}
    states = jax.vmap(clipper.init)(grads)
    text = r"by_name: the state must be of one model, .* has the shape \(3,\)"
    with pytest.raises(ValueError, match=text):
        states.by_name()
    mapped = jax.vmap(optaxclip.ClipState.by_name)(states)
    assert mapped["critic"].norm.shape == (3,)


# Units that lie on one axis of a mesh, on both, and on all devices.
OF_UNITS_ON_DEVICES = {"a": P(None, ("x", "y")), "b": P("y", "x"), "c": P()}
UNITS_ON_DEVICES = sharded.random_tree(4, {"a": (3, 16), "b": (8, 6), "c": (5,)})


def test_units_on_several_devices_have_one_summary():
    specs, grads = OF_UNITS_ON_DEVICES, UNITS_ON_DEVICES
    norms = {name: units(x) for name, x in grads.items()}
    # Below more than half of the norms.
    limits = {name: float(np.quantile(norm, 0.45)) for name, norm in norms.items()}
    clipper = optaxclip.clip_by_unitwise_norm(limits)
    split = optaxclip.clip_by_unitwise_norm(limits, mesh_axes=specs)
    mesh, start, both = mesh_of((2, 4)), clipper.init(grads), (specs, P())
    placed = sharded.place(grads, mesh, specs)
    steps = [jax.jit(clipper.update)]
    for typed in (True, False):
        step = sharded.on_each_part(split.update, mesh, both, both, check_vma=typed)
        steps.append(step)
    for step in steps:
        updates, state = step(placed, start)
        assert all(map(sharded.replicas_agree, jax.tree.leaves(state)))
        for name, entry in state.by_name().items():
            norm, limit = norms[name], limits[name]
            wanted = np.float64(grads[name]) * np.minimum(1, limit / norm)
            np.testing.assert_allclose(updates[name], wanted, rtol=1e-6)
            most, share = np.max(norm), np.mean(norm > limit)
            of_one = entry.norm, entry.limit, entry.factor
            np.testing.assert_allclose(
                of_one, (most, limit, min(1, limit / most)), 1e-6
            )
            shares = entry.units_clipped, entry.clipped_recently
            np.testing.assert_allclose(shares, (share, share), rtol=1e-6)
            assert entry.clipped == (share > 0)


def test_leaves_with_units_have_one_order_in_and_outside_shard_map():
    """A checkpoint of one state may be restored into the other."""
    # Of "a" a device has fewer units than of "b", and all devices have more.
    specs = {"a": P(None, "x"), "b": P()}
    params = {"a": jnp.ones((2, 6)), "b": jnp.ones((2, 4))}
    clipper = optaxclip.clip_by_unitwise_norm(1.0, mesh_axes=specs)
    inside = sharded.on_two_devices(clipper.init, (specs,), P(), params)
    outside = clipper.init(params)
    assert [*inside.by_name()] == [*outside.by_name()]


class ShareOfAll(rules.Rule):
    """A tenth of the norm of all gradients."""

    needs_total = True

    def update(self, norm, memory, step, total):
        return jnp.full_like(norm, total / 10), memory


@pytest.mark.parametrize("typed", [True, False], ids=["typed", "untyped"])
def test_the_norm_of_all_is_that_of_units_on_all_devices(typed):
    specs, grads = OF_UNITS_ON_DEVICES, UNITS_ON_DEVICES
    limit = np.sqrt(sum(np.sum(units(x) ** 2) for x in grads.values())) / 10
    clipper = optaxclip.clip_by_unitwise_norm(ShareOfAll(), mesh_axes=specs)

    def step(grads):
        return apply(clipper, grads)[0]

    mesh = mesh_of((2, 4))
    updates = sharded.on_each_part(step, mesh, (specs,), specs, check_vma=typed)(grads)
    for name, x in grads.items():
        wanted = np.float64(x) * np.minimum(1, limit / units(x))
        np.testing.assert_allclose(updates[name], wanted, rtol=1e-6)


SHARED_RULES = {
    "schedule": lambda step: 1.0 + step,
    "learns": rules.growth(1.25),
    "window": rules.windowed_mean(1.5, window=2),
}
SPECS = {"own": P("x"), "all": P(), "late": P("x")}


def of_device(tree, device):
    """What a device has of a tree that is split as SPECS says."""
    rows = slice(device, device + 1)
    return {name: x[rows] if SPECS[name] else x for name, x in tree.items()}


@pytest.mark.parametrize("name", SHARED_RULES)
def test_norms_of_each_device_stand_beside_those_of_all(name):
    """In typed shard_map a vector of both is one that differs, and "all" must not."""
    random = np.random.default_rng(0)
    shapes = {"own": (2, 3), "all": (3,), "late": (2, 4)}
    steps = []
    for step in range(4):
        grads = {
            key: np.float32(random.standard_normal(shape)) * (step + 1)
            for key, shape in shapes.items()
        }
        if step % 2:
            grads.pop("late")
        steps.append(grads)

    def norms(tree):
        return jax.tree.map(jnp.linalg.norm, tree)

    def run(*steps):
        clipper = optaxclip.clip_by(norms, SHARED_RULES[name])
        state = clipper.init(steps[0])
        clipped = []
        for grads in steps:
            updates, state = clipper.update({"late": None} | grads, state)
            clipped.append({key: updates[key] for key in grads})
        return clipped

    specs = [{key: SPECS[key] for key in grads} for grads in steps]
    mesh = mesh_of((2,), ("x",))
    together = sharded.on_each_part(run, mesh, tuple(specs), specs)(*steps)
    run_alone = jax.jit(run)
    for device in range(2):
        alone = run_alone(*[of_device(grads, device) for grads in steps])
        parts = [of_device(grads, device) for grads in together]
        chex.assert_trees_all_close(parts, alone, rtol=1e-6)


STACKS = {"a": jnp.arange(1.0, 7)[:, None], "b": jnp.arange(11.0, 15)[:, None]}


def norms_on_devices(names, mesh_axes, of_state, is_new_inside):
    """The state of stacks after a step on two devices, which split their layers."""
    grads = {name: STACKS[name] for name in names}
    specs = dict.fromkeys(names, P("x"))
    stacked = dict.fromkeys(names, 1)
    clipper = optaxclip.clip_by_tensor_norm(
        9.0, stacked=stacked, mesh_axes=specs if mesh_axes else None
    )

    def run(grads, state=None):
        state = clipper.init(grads) if state is None else state
        return clipper.update(grads, state)[1]

    arguments = (grads,) if is_new_inside else (grads, clipper.init(grads))
    in_specs = (specs,) if is_new_inside else (specs, of_state)
    mesh = mesh_of((2,), ("x",))
    return sharded.on_each_part(run, mesh, in_specs, of_state)(*arguments)


@pytest.mark.parametrize("is_new_inside", [True, False])
def test_joined_rows_of_several_devices_are_refused(is_new_inside):
    state = norms_on_devices("ab", None, P(None, "x"), is_new_inside)
    joined = [1, 2, 3, 11, 12, 4, 5, 6, 13, 14]
    np.testing.assert_array_equal(state.norm, joined)
    text = r"joins the rows of several devices: 10 entries for 5 norms"
    with pytest.raises(ValueError, match=f"by_name: the state.*{text}"):
        state.by_name()
    with pytest.raises(ValueError, match=f"metrics: the state.*{text}"):
        optaxclip.metrics(state)


@pytest.mark.parametrize("is_new_inside", [True, False])
def test_layers_by_their_specs_and_of_one_leaf_are_in_order(is_new_inside):
    cases = [("ab", True, P()), ("a", None, P(None, "x"))]
    for names, mesh_axes, of_state in cases:
        state = norms_on_devices(names, mesh_axes, of_state, is_new_inside)
        for name in names:
            norms = STACKS[name][:, 0]
            np.testing.assert_array_equal(state.by_name()[name].norm, norms)


def test_a_state_that_was_restored_without_a_target_is_refused():
    # As msgpack and Orbax do.
    clipper = optaxclip.clip_by_global_norm(1.0)
    old = {"step": 1, "norm": 5.0, "limit": 1.0}
    with pytest.raises(TypeError, match="must be the ClipState that its init") as error:
        clipper.update(GRADS, old)
    assert "moments" in str(error.value)


@pytest.mark.parametrize(
    "clip", [optaxclip.clip_by_tensor_norm, optaxclip.clip_by_unitwise_norm]
)
def test_a_step_without_leaves_clips_nothing(clip):
    clipper = clip(rules.minimum(rules.ema(0.9), 1.0))
    grads = {"w": jnp.full((2, 3), 2.0), "b": jnp.full(3, 2.0)}
    _, old = clipper.update(grads, clipper.init(grads))
    updates, state = clipper.update({"w": None, "b": None}, old)
    assert updates == {"w": None, "b": None} and state.step == 2
    np.testing.assert_allclose(old.clipped_recently, 1.0)
    np.testing.assert_allclose(state.clipped_recently, 0.5)
    for name in ("norm", "limit", "factor", "clipped", "memory"):
        jax.tree.map(
            np.testing.assert_array_equal, getattr(state, name), getattr(old, name)
        )


def test_limits_stay_with_their_leaves_where_one_is_missing():
    clipper = optaxclip.clip_by_tensor_norm({"a": 0.5, "b": 1.0, "c": 2.0})
    grads = {name: tree(7)[name] for name in "abc"}
    updates, state = clipper.update({**grads, "b": None}, clipper.init(grads))
    for name, limit in {"a": 0.5, "c": 2.0}.items():
        np.testing.assert_allclose(np.linalg.norm(updates[name]), limit, rtol=1e-6)
    np.testing.assert_array_equal(state.limit, [0.5, np.inf, 2.0])


def test_a_tree_of_one_array_of_units_may_be_missing():
    clipper = optaxclip.clip_by_unitwise_norm(0.5)
    state = after(clipper, jnp.ones((2, 3)))
    _, without = clipper.update(None, state)
    assert (without.step, without.units_clipped, without.clipped_recently) == (
        2,
        1,
        0.5,
    )
    assert jax.tree.map(jnp.shape, without) == jax.tree.map(jnp.shape, state)


def test_the_summary_of_units_is_that_of_a_broken_one():
    for broken in (np.nan, np.inf):
        grads = jnp.array([[3.0, 1.0, broken]])
        state = after(optaxclip.clip_by_unitwise_norm(1.0, axis=0), grads)
        np.testing.assert_array_equal(state.norm, broken)
        assert (state.nonfinite, state.clipped) == (1, 0)


def test_limits_may_have_any_dtype():
    limits = {"a": 10**12, "b": jnp.bfloat16(2), "c": np.float64(0.5)}
    clipper = optaxclip.clip_by_tensor_norm(limits)
    grads = {name: tree(5)[name] for name in limits}
    with jax.numpy_dtype_promotion("strict"):
        state = after(clipper, grads)
    np.testing.assert_array_equal(state.limit, np.float32([1e12, 2, 0.5]))
    with jax.enable_x64(True):
        # Of a limit that the dtype of norms does not hold, its largest number remains.
        state = after(optaxclip.clip_by_tensor_norm({**limits, "a": 1e39}), grads)
    largest = np.finfo(np.float32).max
    np.testing.assert_array_equal(state.limit, np.float32([largest, 2, 0.5]))


def test_the_name_of_a_norm_is_one_line():
    grads = {"a\nb": jnp.ones(2), "c": jnp.ones(2)}
    state = after(optaxclip.clip_by_tensor_norm(1.0), grads)
    assert list(state.by_name()) == [r"a\nb", "c"]


GRADS = {"w": jnp.array([3.0, 4.0])}


class Half(rules.Rule):
    def update(self, norm, memory, step):
        return norm / 2, memory


def test_a_rule_of_the_users_without_a_memory_needs_none():
    clipper = optaxclip.clip_by_global_norm(rules.minimum(Half(), 9.0))
    for update in (clipper.update, jax.jit(clipper.update)):
        updates, _ = update(GRADS, None)
        np.testing.assert_allclose(updates["w"], [1.5, 2.0], rtol=1e-6)


STATEFUL = {
    name: method
    for name, method in METHODS.items()
    if method.leaves != ALONE and name != "clip_grads"
}


@pytest.mark.parametrize("several", ["vmap", "pmap"])
@pytest.mark.parametrize("name", STATEFUL)
def test_a_state_of_several_models_is_told(name, several):
    tree = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
    made = STATEFUL[name].make()
    run = {"vmap": jax.vmap, "pmap": jax.pmap}[several]
    state = run(lambda _: made.init(tree))(jnp.arange(4))
    call = STATEFUL[name].function.__name__
    # `constrain` leaves the state to its clipper.
    call = "clip_by_global_norm" if call == "constrain" else call
    text = (
        f"{call}: state must be of one model, but its counter of steps has the shape "
        "(4,), as under jax.vmap or jax.pmap. Map over them, "
        "jax.vmap(optimizer.update)(grads, opt_state, params), or take one, "
        "jax.tree.map(lambda x: x[0], opt_state)."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        made.update(tree, state, tree)
    # What the text says.
    stacked = jax.tree.map(lambda x: jnp.stack([x] * 4), tree)
    updates, _ = run(made.update)(stacked, state, stacked)
    one, _ = made.update(tree, jax.tree.map(lambda x: x[0], state), tree)
    for several_leaves, leaf in zip(jax.tree.leaves(updates), jax.tree.leaves(one)):
        np.testing.assert_allclose(several_leaves[0], leaf, rtol=1e-5)


def test_a_key_that_reads_as_a_long_name_has_a_name_of_its_own():
    tree = {
        "a/b": jnp.array([3.0]),
        "a": {"b": jnp.array([4.0])},
        "['a/b']": jnp.array([100.0]),
    }
    updates, state = apply(optaxclip.clip_by_tensor_norm(1.0), tree)
    jax.tree.map(lambda x: np.testing.assert_allclose(x, [1.0], rtol=1e-6), updates)
    norms = {name: float(entry.norm) for name, entry in state.by_name().items()}
    assert sorted(norms.values()) == [3.0, 4.0, 100.0]
    assert norms["['a/b']"] == 3.0
