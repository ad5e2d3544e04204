"""States among those of optax, whose tools find what is theirs. `optax.tree_map_params`
makes of every state a tree of the same structure.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optaxclip
from optaxclip import rules
from tests.helpers import apply, random_tree
from tests.methods import METHODS

PARAMS = {"w": jnp.array([1.0, 2.0]), "b": jnp.array(3.0)}


@pytest.mark.parametrize("name", METHODS)
def test_tree_set_finds_hyperparameters_beside_a_clipper(name):
    adam = optax.inject_hyperparams(optax.adam)(learning_rate=0.1)
    _, state = apply(optax.chain(METHODS[name].make(), adam), PARAMS, PARAMS)
    changed = optax.tree.set(state, learning_rate=jnp.float32(0.5))
    assert optax.tree.get(changed, "learning_rate") == 0.5
    assert jax.tree.structure(changed) == jax.tree.structure(state)
    # All that the clipper knows stays where it was.
    jax.tree.map(np.testing.assert_array_equal, changed[0], state[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrap",
    [
        optaxclip.skip_nonfinite,
        optaxclip.skip_step,
        lambda inner: optax.chain(optaxclip.record_spikes(), inner),
        lambda inner: optax.chain(optaxclip.adagc(), inner),
        lambda inner: optax.chain(
            optaxclip.clip_by_global_norm(rules.ema_ratio()), inner
        ),
    ],
    ids=["skip_nonfinite", "skip_step", "record_spikes", "adagc", "ema_ratio"],
)
def test_a_solver_finds_its_own_value_in_the_state(wrap):
    def loss(w):
        return jnp.sum((w - 2) ** 2)

    w = jnp.ones(2)
    optimizer = wrap(optax.lbfgs())
    state = optimizer.init(w)
    for _ in range(2):
        value, grad = optax.value_and_grad_from_state(loss)(w, state=state)
        assert value == loss(w)
        extra = {"value": value, "grad": grad, "value_fn": loss}
        updates, state = optimizer.update(grad, state, w, **extra)
        w = optax.apply_updates(w, updates)


def test_a_default_window_may_be_injected_under_jit():
    optimizer = optax.inject_hyperparams(optaxclip.skip_step)(optax.sgd(0.1))
    state = optimizer.init(PARAMS)
    updates, _ = jax.jit(optimizer.update)(PARAMS, state, PARAMS)
    np.testing.assert_allclose(updates["w"], [-0.1, -0.2])


def test_two_bounds_are_numbers_without_jit_too():
    clipper = optaxclip.clip_by_value(0.5, -0.2)
    with jax.disable_jit():
        updates, _ = clipper.update(jnp.array([1.0, -1.0]), clipper.init(PARAMS))
    np.testing.assert_array_equal(updates, np.float32([0.5, -0.2]))


@pytest.mark.slow
def test_metrics_of_float64_under_strict_promotion():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        grads = jnp.array([3.0, 4.0], jnp.float64)
        _, state = apply(optaxclip.clip_by_global_norm(1.0), grads)
        assert optaxclip.metrics(state)["clip/norm_before"] == 5


def test_the_limit_of_a_chain_clips_nothing_in_a_recorder():
    clip = optaxclip.clip_by_global_norm(1.0)
    record = optaxclip.record_norm(optaxclip.tensor_norm)
    optimizer = optax.chain(clip, optax.sgd(1e3), record)
    state = optimizer.init(PARAMS)
    updates, _ = optimizer.update(PARAMS, state, PARAMS, limit=0.3)
    np.testing.assert_allclose(optaxclip.global_norm(updates), 300, rtol=1e-5)


def test_a_donating_optimizer_is_skipped_without_jit():
    adam = optax.adam(0.1)
    donating = jax.jit(adam.update, donate_argnums=1)
    inner = optax.GradientTransformation(adam.init, donating)
    updates, _ = apply(optaxclip.skip_nonfinite(inner), PARAMS, PARAMS)
    np.testing.assert_allclose(updates["w"], [-0.1, -0.1], rtol=1e-5)


WEIGHTS = random_tree("float32")
SPECS = jax.tree.map(lambda x: P("data"), WEIGHTS)
MAPPED = {
    **{name: method.make() for name, method in METHODS.items()},
    "windows": optaxclip.clip_by_tensor_norm(rules.windowed_mean(window=4)),
    "stacked": optaxclip.clip_by_tensor_norm(
        rules.ema(0.9), stacked={"kernel": 1, "bias": 0, "block": 0}
    ),
    "units that learn": optaxclip.clip_by_unitwise_norm(rules.ema(0.9)),
    "own norm": optaxclip.clip_by(optaxclip.unitwise_norm, 1.0),
}


def around(clipper):
    """Optimizers as people build them around a clipper."""
    optimizer = optax.chain(clipper, optax.adam(1e-3))
    everything = jax.tree.map(lambda x: True, WEIGHTS)
    return (
        optimizer,
        optax.masked(optimizer, everything),
        optax.MultiSteps(optimizer, 2),
        optax.multi_transform({"all": optimizer}, lambda tree: "all"),
    )


@pytest.mark.parametrize("name", MAPPED)
def test_specs_have_the_structure_of_the_state(name):
    check_specs(*around(MAPPED[name]))


def test_specs_of_windows_layers_and_units_have_their_structure():
    for name in ("windows", "stacked", "units that learn"):
        check_specs(optax.chain(MAPPED[name], optax.adam(1e-3)))


def check_specs(*optimizers):
    for optimizer in optimizers:
        state = optimizer.init(WEIGHTS)
        specs = optax.tree_map_params(
            optimizer,
            lambda _, spec: spec,
            state,
            SPECS,
            transform_non_params=lambda _: P(),
        )
        assert jax.tree.structure(specs) == jax.tree.structure(state)
        found = jax.tree.leaves(jax.tree.map(lambda _, spec: spec, state, specs))
        assert set(found) == {P(), P("data")}


@pytest.mark.parametrize("name", ["clip_by_tensor_norm", "clip_by_group_norm", "adagc"])
def test_norms_and_counters_take_no_specs_of_weights(name):
    clipper = MAPPED[name]
    specs = optax.tree_map_params(
        clipper,
        lambda _, spec: spec,
        clipper.init(WEIGHTS),
        SPECS,
        transform_non_params=lambda _: P(),
    )
    assert set(jax.tree.leaves(specs)) == {P()}


@pytest.mark.parametrize("name", MAPPED)
def test_a_state_that_is_mapped_by_nothing_is_itself(name):
    optimizer = optax.chain(MAPPED[name], optax.adam(1e-3))
    state = optimizer.init(WEIGHTS)
    found = optax.tree_map_params(optimizer, lambda x: x, state)
    assert jax.tree.structure(found) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, found, state)


def test_states_of_other_layers_are_other_trees():
    """Where devices hold a share of the layers, the tree is the same."""
    clipper = optaxclip.clip_by_tensor_norm(1.0, stacked=1)
    six, four, three = (clipper.init({"w": jnp.ones((n, 2))}) for n in (6, 4, 3))
    assert jax.tree.structure(six) == jax.tree.structure(three)
    assert jax.tree.structure(three) == jax.tree.structure(six)
    for one, other in ((six, four), (four, six), (four, three)):
        assert jax.tree.structure(one) != jax.tree.structure(other)
    other = clipper.init({"v": jnp.ones((6, 2))})
    assert jax.tree.structure(six) != jax.tree.structure(other)


def test_states_are_other_trees_where_each_has_more_layers_of_one_stack():
    """Both have six entries, but their rows mean other leaves."""
    clipper = optaxclip.clip_by_tensor_norm(1.0, stacked={"a": 1, "b": 1})

    def state_of(layers_of_a, layers_of_b):
        shapes = {"a": (layers_of_a, 3), "b": (layers_of_b, 3)}
        grads = {name: jnp.ones(shape) for name, shape in shapes.items()}
        return clipper.init(grads)

    structure = jax.tree.structure(state_of(2, 4))
    assert structure != jax.tree.structure(state_of(4, 2))
    # A device may hold a share of both stacks.
    assert structure == jax.tree.structure(state_of(4, 8))
    assert structure == jax.tree.structure(state_of(1, 2))


def test_a_state_of_sums_is_shown_without_rows():
    state = optaxclip.clip_by_global_norm(1.0).init(jnp.ones(3))
    assert repr(jax.tree.map(jnp.sum, state)).startswith("ClipState(counts=0, numbers=")


def test_a_jitted_report_names_the_layers_of_each_state():
    """As many layers, counted along one axis and along two."""

    @jax.jit
    def report(state):
        return optaxclip.metrics(state, layers=True, only="limit")

    for count, shape, last in ((1, (6, 2), "5"), (2, (2, 3, 2), "1/2")):
        clipper = optaxclip.clip_by_tensor_norm(1.0, stacked=count)
        assert list(report(clipper.init({"w": jnp.ones(shape)})))[-1] == (
            f"clip/limit/w/{last}"
        )
