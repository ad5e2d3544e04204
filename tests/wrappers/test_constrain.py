"""Weights stay where a clipper holds them, to one rounding of their dtype."""

import math
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip import constrain

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def eps_of(dtype):
    return float(jnp.finfo(dtype).eps)


def drawn(shape, dtype=np.float32, seed=0, size=1.0):
    return np.asarray(size * np.random.default_rng(seed).standard_normal(shape), dtype)


def apply(constrained, updates, params):
    """(steps, state) of the first step from these weights."""
    return constrained.update(updates, constrained.init(params), params)


def stepped(clipper, params, updates):
    """The weights after a step of these updates."""
    steps, _ = apply(constrain(clipper), updates, params)
    return optax.apply_updates(params, steps)


def unit_norms(x):
    return np.sqrt(np.sum(np.float64(x) ** 2, 0, keepdims=True))


def max_norm(x, limit):
    """keras.constraints.MaxNorm(limit, axis=0), with an epsilon of 0."""
    norms = unit_norms(x)
    return x * np.clip(norms, 0, limit) / norms


def min_max_norm(x, low, high, rate):
    """keras.constraints.MinMaxNorm(low, high, rate, axis=0)."""
    norms = unit_norms(x)
    desired = rate * np.clip(norms, low, high) + (1 - rate) * norms
    return x * desired / norms


def shrink_to_range(norm, limit):
    return 0.7 * jnp.clip(norm, 0.5, limit) + 0.3 * norm


normalize = optaxclip.shrinks.normalize
units = optaxclip.clip_by_unitwise_norm
# name: (clipper, the constraint of Keras, TensorFlow or the paper in float64)
CONSTRAINTS = {
    "MaxNorm": (lambda: units(2.0), lambda x: max_norm(x, 2.0)),
    "UnitNorm": (lambda: units(1.0, shrink=normalize), lambda x: x / unit_norms(x)),
    "MinMaxNorm": (
        lambda: units(2.0, shrink=shrink_to_range),
        lambda x: min_max_norm(x, 0.5, 2.0, 0.7),
    ),
    "NonNeg": (lambda: optaxclip.clip_by_value(math.inf, 0.0), lambda x: x * (x >= 0)),
    "WGAN": (lambda: optaxclip.clip_by_value(0.3), lambda x: np.clip(x, -0.3, 0.3)),
    "TF VariableClipping": (lambda: units(2.0, axis=1), lambda x: max_norm(x.T, 2.0).T),
    "sphere": (
        lambda: optaxclip.clip_by_tensor_norm(3.0, shrink=normalize),
        lambda x: 3.0 * x / np.linalg.norm(x),
    ),
    "global norm": (
        lambda: optaxclip.clip_by_global_norm(3.0),
        lambda x: x * min(1, 3.0 / np.linalg.norm(x)),
    ),
}


def test_weights_after_a_step_are_those_of_the_equation():
    weights, updates = drawn((9, 7)), drawn((9, 7), seed=1)
    for name, (build, constraint) in CONSTRAINTS.items():
        want = constraint(np.float64(weights + updates))
        have = stepped(build(), weights, updates)
        np.testing.assert_allclose(have, want, 8 * eps_of(np.float32), 1e-7, True, name)


@every_dtype
@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0])
def test_a_step_is_exact_to_one_rounding_of_the_weights(dtype, size):
    """From weights of about the limit's size, whatever the size of the update."""
    weights, updates = drawn(1000, dtype), drawn(1000, dtype, 1, size)
    have = stepped(optaxclip.clip_by_value(1.0), weights, updates)
    moved = np.float32(weights) + np.float32(updates)
    want = np.clip(moved, -1.0, 1.0).astype(dtype)
    # The update is rounded as well. It is at most 2 + size / 1000 long.
    error = np.abs(np.float64(have) - np.float64(want))
    step = np.abs(np.float64(want) - np.float64(weights))
    assert (error <= eps_of(dtype) * step).all()
    near = step <= np.abs(np.float64(weights)) / 2
    np.testing.assert_array_equal(np.asarray(have)[near], want[near])


def test_no_weight_is_beyond_its_limit_from_however_far():
    random = np.random.default_rng(0)
    sizes = 2.0 ** random.integers(-8, 8, (2, 4000))
    numbers = random.standard_normal(sizes.shape) * sizes
    for dtype in DTYPES.values():
        weights, updates = np.asarray(numbers, dtype)
        for limit in (0.011, 0.3, 1.2, 7.7):
            limit = float(np.asarray(limit, dtype))
            have = stepped(optaxclip.clip_by_value(limit), weights, updates)
            assert np.max(np.abs(np.float64(have))) <= limit


def test_updates_keep_their_bits_where_weights_are_within():
    for dtype in DTYPES.values():
        # Sums are rounded, and large weights would swallow such updates.
        weights, updates = drawn(50, dtype), drawn(50, dtype, 1, 1e-3)
        steps, _ = apply(constrain(optaxclip.clip_by_value(100.0)), updates, weights)
        assert steps.dtype == dtype
        np.testing.assert_array_equal(steps, updates)


def trained(clipper, params, steps=100):
    """The weights after each step of AdamW on a loss that pulls them outward."""
    optimizer = optax.chain(optax.adamw(0.1), constrain(clipper))
    target = jax.tree.map(lambda x: 30 * jnp.sign(x), params)

    def loss(params):
        apart = jax.tree.map(lambda x, y: jnp.sum((x - y) ** 2), params, target)
        return sum(jax.tree.leaves(apart))

    def step(carry, _):
        params, state = carry
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    start = params, optimizer.init(params)
    return jax.jit(lambda: jax.lax.scan(step, start, length=steps)[1])()


# name: (clipper, norms of weights [steps, 6, 5], limit)
HELD = {
    "units": (partial(units, 2.0), lambda x: np.linalg.norm(x, axis=1), 2.0),
    "values": (partial(optaxclip.clip_by_value, 0.7), np.abs, 0.7),
    "sphere": (
        partial(optaxclip.clip_by_tensor_norm, 3.0, shrink=normalize),
        lambda x: np.linalg.norm(x, axis=(1, 2)),
        3.0,
    ),
    "spectral": (
        partial(optaxclip.clip_by_spectral_norm, 2.0),
        lambda x: np.linalg.norm(x, 2, axis=(1, 2)),
        2.0,
    ),
}


@every_dtype
@pytest.mark.parametrize("name", HELD)
def test_weights_stay_within_the_limit_over_adamw(name, dtype):
    build, norms_of, limit = HELD[name]
    weights = np.float64(trained(build(), drawn((6, 5), dtype, size=10)))
    norms = norms_of(weights)
    eps = eps_of(dtype)
    if name == "spectral":
        # Its own error, and what rounding elements adds to a singular value.
        eps = 3e-6 + eps / 2 * np.sqrt(5)
    assert norms.max() <= limit * (1 + eps)
    # It is the constraint that holds them, from the second step on.
    # Factors are 4 eps of float32 below the quotient, which is made of rounded numbers.
    least = limit * (1 - eps_of(dtype) - 6 * eps_of(np.float32))
    assert norms[1:].max() >= least
    if name == "sphere":
        assert norms[1:].min() >= least


def test_without_the_constraint_adamw_leaves_the_limit():
    weights = np.float64(trained(optax.identity(), drawn((6, 5))))
    assert np.linalg.norm(weights, axis=1).max() > 4


def test_complex_weights_are_held_by_modulus():
    weights = drawn((6, 5)) + 1j * drawn((6, 5), seed=1)
    updates = np.complex64(weights[::-1])
    have = stepped(units(1.0), np.complex64(weights), updates)
    moved = np.complex128(np.complex64(weights) + updates)
    norms = np.sqrt(np.sum(np.abs(moved) ** 2, 0, keepdims=True))
    np.testing.assert_allclose(have, moved * np.minimum(1, 1 / norms), 1e-6, 1e-7)


def test_weights_and_updates_may_be_numbers_of_python():
    step, _ = apply(constrain(optaxclip.clip_by_value(1.0)), 0.5, 0.75)
    assert step == 0.25


@pytest.mark.slow
@every_dtype
def test_it_works_under_strict_dtype_promotion(dtype):
    clipper = constrain(optaxclip.clip_by_global_norm(0.5))
    weights = jnp.ones(4, dtype)
    with jax.numpy_dtype_promotion("strict"):
        steps, _ = clipper.update(weights, clipper.init(weights), weights)
    assert steps.dtype == dtype


def test_a_tensor_that_another_one_breaks_leaves_its_weights():
    """In the warm-up of AdaGC one broken norm makes the limits of all others NaN."""
    params = {"a": jnp.array([0.3, 0.4]), "b": jnp.array([0.5])}
    broken = {"a": jnp.array([jnp.nan, 0.0]), "b": jnp.array([0.1])}
    clear = constrain(optaxclip.adagc(warmup=5, nonfinite="zero"))
    steps, state = apply(clear, broken, params)
    assert np.isnan(state.by_name()["b"].limit)
    assert not any(np.any(step) for step in jax.tree.leaves(steps))


def test_a_broken_step_that_is_cleared_leaves_the_weights():
    params = {"a": jnp.array([0.3, 0.4]), "b": jnp.array([0.5])}
    broken = {"a": jnp.array([jnp.nan, 0.0]), "b": jnp.array([0.1])}
    clear = constrain(optaxclip.clip_by_global_norm(5.0, nonfinite="zero"))
    steps, state = clear.update(broken, clear.init(params), params)
    assert not any(np.any(step) for step in jax.tree.leaves(steps))
    # The counter stands at 1 from now on, and only new ones count.
    steps, _ = clear.update(jax.tree.map(jnp.negative, params), state, params)
    np.testing.assert_array_equal(steps["b"], [-0.5])


def test_a_shrink_that_breaks_a_step_leaves_the_weights():
    clipper = optaxclip.clip_by_tensor_norm(
        1.0, shrink=lambda norm, limit: jnp.sqrt(limit - norm), nonfinite="zero"
    )
    params = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([0.5])}
    zero = jax.tree.map(jnp.zeros_like, params)
    clear = constrain(clipper)
    # Without a state it begins anew.
    for state in (clear.init(params), None):
        steps, state = clear.update(zero, state, params)
        assert list(state.nonfinite) == [1, 0]
        np.testing.assert_array_equal(steps["a"], [0, 0])
        assert steps["b"] > 0


def test_weights_of_8_bits_use_the_whole_range_of_their_dtype():
    # 448 is the largest float8_e4m3fn. That of an IEEE format of its bits is 240.
    weights = jnp.array([448.0, -448.0, 2.0**-9], jnp.float8_e4m3fn)
    updates = jnp.array([-32.0, 0.0, 0.0], jnp.float8_e4m3fn)
    have = stepped(optaxclip.clip_by_value(320.0), weights, updates)
    np.testing.assert_array_equal(np.float32(have), [320.0, -320.0, 2.0**-9])


def test_a_broken_step_is_nan_as_in_any_clipper():
    params = {"a": jnp.array([0.3, 0.4]), "b": jnp.array([0.5])}
    broken = {"a": jnp.array([jnp.nan, 0.0]), "b": jnp.array([0.1])}
    steps, _ = apply(constrain(optaxclip.clip_by_tensor_norm(5.0)), broken, params)
    assert np.isnan(steps["a"]).all()
    np.testing.assert_array_equal(steps["b"], broken["b"])


def test_a_clipper_is_given_the_weights_before_the_step():
    params = jnp.array([3.0, 4.0])
    steps, _ = apply(constrain(optaxclip.adaptive_grad_clip(1.0)), params, params)
    # [6, 8] may be as long as [3, 4].
    np.testing.assert_allclose(params + steps, [3.0, 4.0], 1e-6)


def test_a_clipper_that_takes_no_other_arguments_gets_none():
    clipper = optax.stateless(lambda updates, _: jnp.clip(updates, -1.0, 1.0))
    params = jnp.array([0.5, 2.0])
    steps, _ = constrain(clipper).update(params, optax.EmptyState(), params, value=0.25)
    np.testing.assert_array_equal(params + steps, [1.0, 1.0])


def test_what_a_chain_is_told_of_gradients_is_not_about_weights():
    params, updates = jnp.array([3.0, 4.0]), jnp.array([0.3, 0.4])
    constrained = constrain(optaxclip.clip_by_global_norm(1.0))
    state = constrained.init(params)
    wanted, _ = constrained.update(updates, state, params)
    for given in ({"grad_norm": jnp.float32(0.5)}, {"limit": 0.1}, {"limit": 9.0}):
        steps, new = constrained.update(updates, state, params, **given)
        np.testing.assert_array_equal(steps, wanted)
        np.testing.assert_allclose((new.norm, new.limit), (5.5, 1.0), rtol=1e-6)


def test_metrics_show_the_norm_of_the_weights():
    params = jnp.array([3.0, 4.0])
    constrained = constrain(optaxclip.clip_by_global_norm(1.0))
    _, state = apply(optax.chain(optax.sgd(0.1), constrained), jnp.zeros(2), params)
    assert optaxclip.metrics(state)["clip/norm_before"] == 5.0


@pytest.mark.parametrize("sign", [1, -1], ids=["not_below_0", "not_above_0"])
def test_a_bound_on_one_side_holds_in_any_two_dtypes(sign):
    for dtype, update_dtype in product(DTYPES.values(), DTYPES.values()):
        assert_bound_on_one_side(sign, dtype, update_dtype)


def assert_bound_on_one_side(sign, dtype, update_dtype):
    weights = jnp.asarray(sign * np.abs(drawn(1000, dtype)), dtype)
    updates = jnp.asarray(drawn(1000, update_dtype, 1))
    bounds = {1: (math.inf, 0.0), -1: (0.0, -math.inf)}[sign]
    steps, _ = apply(constrain(optaxclip.clip_by_value(*bounds)), updates, weights)
    assert steps.dtype == update_dtype
    arrived = sign * np.float64(optax.apply_updates(weights, steps))
    assert (arrived >= 0).all()
    # About a fourth of the weights would have crossed 0, and is beside it instead.
    near = arrived <= 2 * eps_of(update_dtype) * np.abs(np.float64(weights))
    assert near.sum() > 100


def test_subnormal_steps_of_float16_stay_within_bounds():
    """Steps below 6e-5, which float16 has in units of 6e-8."""
    weights = jnp.asarray(np.random.default_rng(0).uniform(0, 6e-5, 1000), jnp.float32)
    for bounds, update in product(((1e-5, -1e-5), (math.inf, 0.0)), (1e-4, -1.0)):
        constraint = constrain(optaxclip.clip_by_value(*bounds))
        updates = jnp.full(1000, update, jnp.float16)
        steps, _ = constraint.update(updates, constraint.init(weights), weights)
        arrived = np.float64(optax.apply_updates(weights, steps))
        # The bounds themselves are rounded to float32.
        assert np.all(arrived <= bounds[0] * (1 + 2.0**-24))
        assert np.all(arrived >= bounds[1] * (1 + 2.0**-24))


def test_a_rounded_step_leaves_no_longer_weight_than_another():
    """A weight of 364.9 takes -364 to 0.9, and -366, the next in bfloat16, to -1.1."""
    weight, update = jnp.float32([364.9]), jnp.zeros(1, jnp.bfloat16)
    step, _ = apply(constrain(optaxclip.clip_by_value(0.3)), update, weight)
    assert step == -364


def test_in_a_broken_step_weights_stay_where_an_update_would_make_them_0():
    clipper = optaxclip.clip_by_global_norm(1.0, nonfinite="zero")
    weights = jnp.array([0.5, 1.0])
    step, _ = apply(constrain(clipper), jnp.array([-0.5, jnp.nan]), weights)
    np.testing.assert_array_equal(step, [0, 0])


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float8_e4m3fn])
def test_a_step_beyond_a_narrower_dtype_is_its_largest_number(dtype):
    """Weights of 1e5 lie further from their limit of 1 than float16 reaches."""
    weights, updates = jnp.array([1e5, -1e5]), jnp.zeros(2, dtype)
    steps, _ = apply(constrain(optaxclip.clip_by_value(1.0)), updates, weights)
    largest = float(jnp.finfo(dtype).max)
    np.testing.assert_array_equal(np.float32(steps), [-largest, largest])
