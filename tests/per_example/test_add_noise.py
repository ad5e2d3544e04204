"""Noise on a sum of clipped gradients: its law, its dtype, its keys, its sharding."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from optaxclip import add_noise, clipped_grad, shrinks
from optaxclip.per_example import explain_clipped_grad
from optaxclip.per_example._grid_noise import integer_noise, random_words
from optaxclip.per_example._noise import noisy_leaf

KEY, MANY, SIGMA = jax.random.key(0), 200_000, 3.0
KINDS_OF_KEY = "threefry2x32", "rbg", "unsafe_rbg"
# Of n normal numbers, mean and deviation are within five of their own deviations.
OFF = 5 / np.sqrt(MANY)
# Noise on the grid is longer by at most 2^-10, and by ten uniforms.
LONGER = 2.0**-10 + 2e-4


def add(grads, sigma, key=KEY):
    """To a tree, whose sensitivity is 1."""
    return add_noise(grads, sigma, key, sensitivity=1.0)


def noise_of(leaf, sigma=SIGMA):
    """What was added, as float64 or complex128."""
    noisy = add({"w": leaf}, sigma)["w"]
    assert noisy.dtype == leaf.dtype and noisy.shape == leaf.shape
    wide = np.complex128 if jnp.iscomplexobj(leaf) else np.float64
    return np.asarray(noisy).astype(wide) - np.asarray(leaf).astype(wide)


def looks_normal(noise):
    assert abs(noise.mean()) < OFF * SIGMA
    assert abs(noise.std() / SIGMA - 1) < OFF + LONGER
    # A share 0.3173 is beyond one deviation, and 0.0027 beyond three.
    for count, share in ((1, 0.3173), (3, 0.0027)):
        beyond = np.mean(np.abs(noise) > count * SIGMA)
        assert abs(beyond - share) < 5 * np.sqrt(share / MANY)


def test_it_is_normal_with_the_given_deviation():
    for dtype in ("float32", "bfloat16", "float16"):
        looks_normal(noise_of(jnp.zeros(MANY, dtype)))


def test_float64_gets_noise_of_its_own_precision():
    with jax.enable_x64(True):
        noise = noise_of(jnp.zeros(MANY, np.float64))
    looks_normal(noise)
    assert np.any(noise != noise.astype(np.float32))


def test_both_parts_of_a_complex_number_have_the_deviation():
    noise = noise_of(jnp.ones(MANY, np.complex64))
    looks_normal(noise.real)
    looks_normal(noise.imag)
    assert abs(np.mean(noise.real * noise.imag)) < OFF * SIGMA**2


def test_it_is_rounded_once_to_16_bits():
    # Beside 256 bfloat16 has steps of 2 and noise of 0.1 is lost, but not beside 0.01.
    leaf = jnp.array([256.0, 0.01], jnp.bfloat16)
    assert (noise_of(leaf, 0.1) != 0).tolist() == [False, True]


def test_leaves_have_noise_of_their_own():
    noisy = add([jnp.zeros(MANY), jnp.zeros(MANY)], SIGMA)
    one, other = (np.float64(x) for x in noisy)
    assert abs(np.mean(one * other)) < OFF * SIGMA**2


MASK = jnp.array([True, True, False])


def result_of(max_norm, mask=MASK, **options):
    """The sum of two gradients."""
    grad = clipped_grad(loss, max_norm, mean=False, **options)
    return grad(PARAMS, jnp.eye(3), mask=mask)


def loss(params, x):
    return jnp.vdot(params["w"], x) + params["b"]


PARAMS = {"w": jnp.zeros(3), "b": jnp.array(0.0)}
CHANGE = explain_clipped_grad(loss)(PARAMS, jnp.eye(3)).change


@pytest.mark.parametrize("max_norm", [1.0, 1e20, jnp.array(2.0), {"w": 3, "b": 4}])
def test_of_a_result_the_noise_is_that_of_its_sensitivity(max_norm):
    result = result_of(max_norm)
    found = add_noise(result, SIGMA, KEY)
    wanted = add_noise(result.grads, SIGMA, KEY, sensitivity=result.sensitivity)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_noise_grows_with_the_sensitivity_and_the_multiplier():
    zeros = jnp.zeros(MANY)
    looks_normal(add_noise(zeros, SIGMA / 0.01, KEY, sensitivity=0.01))
    looks_normal(add_noise(zeros, SIGMA / 50, KEY, sensitivity=50))


# The bound is rounded up, by 2^-22, and for two traced limits by 2^-21 before.
def is_bound(sensitivity, limit):
    proved = limit * (1 + CHANGE)
    return proved <= np.float64(sensitivity) <= proved * (1 + 2.0**-20)


def test_a_result_carries_what_one_example_may_change():
    for limits, limit in ((2, 2.0), ({"w": 3.0, "b": jnp.array(4)}, 5.0)):
        for run in (result_of, jax.jit(result_of)):
            result = run(limits)
            assert is_bound(result.sensitivity, limit)
            # Three examples at most, each with its own rounding.
            assert 3 * limit <= result.longest < 3.0001 * limit
    # A limit below 0 counts as 0.
    assert jax.jit(result_of)(-1.0).sensitivity == 0


def test_a_sum_of_results_has_the_larger_sensitivity():
    one, other = result_of(1.0), result_of(2.0)
    for both in (one.added_to(other), other.added_to(one)):
        np.testing.assert_allclose(both.grads["w"], one.grads["w"] + other.grads["w"])
        # The addition rounds what is at most nine limits long, twice.
        more = np.float64(both.sensitivity) - np.float64(other.sensitivity)
        assert 9 * 2.0**-23 <= more < 9 * 2.0**-21
        assert 9 <= both.longest < 9.0001
    # Other examples, of which some are broken
    broken = jnp.eye(3).at[0, 0].set(jnp.nan)
    grad = clipped_grad(loss, 1.0, mean=False)
    result = grad(PARAMS, broken, mask=MASK)
    assert result.added_to(result).nonfinite == 2
    # One of both has none.
    assert one.added_to(result_of(1.0, private=False)).sensitivity is None
    assert result_of(1.0, None).added_to(one).sensitivity is None
    mean = clipped_grad(loss, 1.0)(PARAMS, broken, mask=MASK)
    with pytest.raises(ValueError, match="added_to: both results must be sums"):
        mean.added_to(mean)


def test_results_add_up_in_a_loop():
    grad = clipped_grad(loss, 1.0, mean=False)
    parts = jnp.eye(3).reshape(3, 1, 3), jnp.ones((3, 1), bool)

    def add_up(total, part):
        x, mask = part
        return grad(PARAMS, x, mask=mask).added_to(total), None

    first = jax.eval_shape(grad, PARAMS, parts[0][0], mask=parts[1][0])
    zeros = jax.tree.map(jnp.zeros_like, first)
    total, _ = jax.lax.scan(add_up, zeros, parts)
    whole = grad(PARAMS, jnp.eye(3), mask=jnp.ones(3, bool))
    for name, leaf in whole.grads.items():
        np.testing.assert_allclose(total.grads[name], leaf, rtol=1e-6)
    one = grad(PARAMS, parts[0][0], mask=parts[1][0])
    assert one.sensitivity < total.sensitivity < one.sensitivity + 1e-5


def test_the_sum_of_results_is_rounded_within_its_bound():
    """Beside 2^24 a gradient of 1 is rounded away, or counts twice."""
    grad = clipped_grad(lambda w, x: w * x, 2.0**24, mean=False)

    def of(x, mask=True):
        return grad(jnp.array(0.0), jnp.array([x]), mask=jnp.array([mask]))

    here, there = of(1.0), of(1.0, False)
    total = of(2.0**24)
    change = here.added_to(total).grads - there.added_to(total).grads
    assert change != 1
    both = here.added_to(total)
    assert both.sensitivity - here.sensitivity >= 2.0 * 2.0**-23 * 2.0**24


@pytest.mark.parametrize("check_vma", [True, False])
def test_in_shard_map_the_bound_is_of_the_sum_over_all_devices(check_vma):
    """16 examples on 8 devices, which lax.psum adds up, as on one device."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    grad = clipped_grad(loss, 2.0, mean=False)
    batch = jnp.ones((16, 3))
    mask = jnp.ones(16, bool)

    def bounds(batch, mask):
        result = grad(PARAMS, batch, mask=mask)
        return jnp.float32(result.sensitivity), jnp.float32(result.longest)

    run = jax.shard_map(
        bounds, mesh=mesh, in_specs=P(("x", "y")), out_specs=P(), check_vma=check_vma
    )
    sensitivity, longest = jax.jit(run)(batch, mask)
    # The sum of 16 gradients, in one turn, and the products: 16 + 1 + 4 roundings.
    roundings = 21 * 2.0**-24 / (1 - 21 * 2.0**-24)
    change = roundings + 2 * 15 * roundings
    assert 2 * (1 + change) <= np.float64(sensitivity) <= 2 * (1 + change) * 1.000001
    assert 16 * 2 <= longest < 16 * 2.0001


def test_in_shard_map_noise_is_for_the_sum_over_all_devices():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    grad = clipped_grad(loss, 2.0, mean=False)
    batch = jnp.tile(jnp.eye(3), (16, 1))[:16]
    mask = jnp.arange(16) < 15

    def noisy(batch, mask):
        result = grad(PARAMS, batch, mask=mask)
        grads = jax.lax.psum(result.grads, "x")
        return add_noise(result._replace(grads=grads), SIGMA, KEY)

    run = jax.shard_map(noisy, mesh=mesh, in_specs=P("x"), out_specs=P())
    found = jax.jit(run)(batch, mask)
    wanted = add_noise(jax.jit(grad)(PARAMS, batch, mask=mask), SIGMA, KEY)
    for name, leaf in wanted.items():
        np.testing.assert_allclose(found[name], leaf, rtol=1e-5)


def n_over_largest(norm, limit):
    return norm / jnp.max(norm) * limit


def dropped_out(w, x):
    """With a key of the example that is not threefry's."""
    return jnp.vdot(w, x["x"] * jax.random.bernoulli(x["key"], 0.5, (3,)))


def result_of_rbg_keys():
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 3)
    batch = {"x": jnp.eye(3), "key": keys}
    return clipped_grad(dropped_out, 1.0, mean=False)(jnp.ones(3), batch, mask=MASK)


INF = jnp.array(np.inf)
SMALL = {"w": 1.0, "b": 0.9e-5}
# What has no sensitivity, and what the error says of it.
WITHOUT_BOUND = {
    "max_norm=None": (lambda: result_of(None), "max_norm must .* got None"),
    "max_norm=inf": (lambda: result_of(np.inf), "max_norm must .* got inf"),
    "an array of inf": (lambda: result_of(INF), "max_norm must .* got .*inf"),
    "None for a part": (
        lambda: result_of({"w": 1.0, "b": None}),
        "max_norm must .* got {'b': None, 'w': 1.0}",
    ),
    "inf for another": (
        lambda: result_of({"w": np.inf, "b": 1.0}),
        "max_norm must .* got {'b': 1.0, 'w': inf}",
    ),
    "the median": (lambda: result_of(jnp.nanmedian, private=False), "private=False"),
    "private=False": (lambda: result_of(1.0, private=False), "private=False lets"),
    "no mask": (lambda: result_of(1.0, None), "the batch had no mask="),
    "too small a limit": (lambda: result_of(SMALL), "max_norm .* 1e-05 .* 9e-06, 'w"),
    "a limit whose sum may be inf": (
        lambda: result_of(2e38),
        "max_norm .* below 1.1e.38, got",
    ),
    "a shrink over the limit": (
        lambda: result_of(1.0, shrink=lambda n, c: 2 * n),
        "the shrink .*lambda.* may return more than the limit",
    ),
    "a shrink that sees all": (
        lambda: result_of(1.0, shrink=n_over_largest),
        "the shrink .*n_over_largest.* may return more than the limit",
    ),
    "normalize": (
        lambda: result_of(1.0, shrink=shrinks.normalize),
        "the shrink .*normalize.* may multiply",
    ),
    "auto_s as normalize": (
        lambda: result_of(1.0, shrink=shrinks.auto_s(0.9e-5)),
        r"the shrink auto_s\(9e-06\) may multiply",
    ),
    "psac as normalize": (
        lambda: result_of(1.0, shrink=shrinks.psac(2.4e-11)),
        r"the shrink psac\(2.4e-11\) may multiply",
    ),
    "keys of rbg": (
        result_of_rbg_keys,
        r"the loss draws .* keys other than threefry's \(.*noise.py:\d",
    ),
}


@pytest.mark.parametrize("jit", [False, True])
def test_a_result_without_a_bound_is_refused_with_its_reason(jit):
    for make, reason in WITHOUT_BOUND.values():
        result = (jax.jit(make) if jit else make)()
        text = f"^add_noise: result has no sensitivity: {reason}"
        # The reason of a sum is that of its part.
        total = result.added_to(result)
        for run in (add_noise, jax.jit(add_noise)):
            for part in (result, total):
                with pytest.raises(ValueError, match=text):
                    run(part, 1.0, KEY)


@pytest.mark.parametrize(
    "shrink",
    [
        shrinks.hard,
        shrinks.drop,
        shrinks.smooth(3),
        shrinks.auto_s,
        shrinks.auto_s(1e-5),
        shrinks.psac,
        shrinks.psac(2.6e-11),
        shrinks.psac(np.inf),
    ],
)
def test_shrinks_that_lengthen_little_have_the_bound_of_the_limit(shrink):
    assert is_bound(result_of(2.0, shrink=shrink).sensitivity, 2.0)
    factor = shrinks.factor_per_limit_of(shrinks.shrink_of(shrink, ""))
    norms = np.geomspace(1e-12, 1e3, 10_000)
    for limit in (1e-5, 2.0, 1e3):
        found = shrinks.shrink_of(shrink, "")(jnp.float32(norms), jnp.float32(limit))
        found = np.asarray(found, np.float64)
        assert np.max(found) <= limit
        # Five roundings of a norm and a new norm
        most = max(1, factor * limit) * (1 + 5 * 2.0**-24)
        assert np.max(found / np.float32(norms)) <= most


def test_a_traced_limit_that_is_too_small_lets_nothing_out():
    noisy = jax.jit(lambda limit: add_noise(result_of(limit), 1.0, KEY))
    assert np.isnan(noisy(0.9e-5)["w"]).all()
    assert np.isfinite(noisy(1.1e-5)["w"]).all()


def test_where_nothing_is_proved_there_is_no_bound():
    """2^24 additions in float32 may lose all of a sum."""
    grad = clipped_grad(lambda w, x: w * x, 1.0, mean=False, microbatch=1)
    shapes = jax.ShapeDtypeStruct((2**24,), np.float32)
    mask = jax.ShapeDtypeStruct((2**24,), bool)
    found = jax.eval_shape(lambda x, m: grad(0.0, x, mask=m), shapes, mask)
    assert found.sensitivity is None and found.longest is None
    assert "rounding" in found.obstacle


def noise_in_the_loss(w, words, impl):
    return w * jax.random.normal(jax.random.wrap_key_data(words, impl=impl))


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def noise_in_a_backward_rule(w, words, impl):
    return w


noise_in_a_backward_rule.defvjp(
    lambda w, words, impl: (w, words),
    lambda impl, words, cotangent: (noise_in_the_loss(cotangent, words, impl), None),
)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
@pytest.mark.parametrize("loss", [noise_in_the_loss, noise_in_a_backward_rule])
def test_keys_that_vmap_draws_together_prove_nothing(loss, impl):
    """The key in the first place, which is masked, is the key of all."""
    mask = np.arange(4) > 0
    keys = jax.random.split(jax.random.key(0, impl=impl), 5)
    words = jax.random.key_data(keys)

    def result_beside(words_of_first):
        grad = clipped_grad(partial(loss, impl=impl), 1.0, mean=False)
        return grad(1.0, words[:4].at[0].set(words_of_first), mask=mask)

    result = result_beside(words[0])
    is_kept = result.grads == result_beside(words[4]).grads
    assert is_kept == (impl == "threefry2x32")
    assert (result.sensitivity is not None) == is_kept


@pytest.mark.parametrize("number", [float, np.float32, jnp.float32])
def test_without_noise_nothing_goes_out(number):
    grads = {"w": jnp.ones(3), "b": jnp.ones(2, np.complex64)}
    in_jit = jax.jit(add)
    for sigma in map(number, (0.0, -0.0, 1e-39, 1e-26, -1.0, np.nan, 1e31)):
        with pytest.raises(ValueError, match=r"^add_noise: noise_multiplier"):
            add(grads, sigma)
        # There the number is not known.
        for leaf in jax.tree.leaves(in_jit(grads, sigma)):
            assert np.isnan(np.asarray(leaf)).all()


def test_too_little_noise_for_the_grid_lets_nothing_out():
    # 3 limits are 2^20 sigma.
    least = 3 * 2.0**-20
    for sigma, is_seen in ((1.1 * least, True), (0.9 * least, False)):
        noisy = jax.jit(lambda sigma: add_noise(result_of(1.0), sigma, KEY))(sigma)
        assert np.isfinite(noisy["w"]).all() == is_seen
    with pytest.raises(ValueError, match=r"2.9e-06, 2\^-20 of what the sum may be"):
        add_noise(result_of(1.0), 0.9 * least, KEY)


def test_a_multiplier_that_the_grid_cannot_hold_is_refused():
    # 2^26 / sqrt(10^4)
    text = r"^add_noise: noise_multiplier=1000000.0, .* gives noise of deviation inf"
    with pytest.raises(ValueError, match=text):
        add(jnp.zeros(10_000), 1e6)
    assert np.isnan(jax.jit(add)(jnp.zeros(10_000), 1e6)).all()
    assert np.isfinite(add(jnp.zeros(10_000), 6e5)).all()


def test_under_jit_a_limit_of_inf_lets_nothing_out():
    noisy = jax.jit(lambda limit: add_noise(result_of(limit), 1.0, KEY))
    assert np.isnan(noisy(np.inf)["w"]).all()
    assert np.isfinite(noisy(1.0)["w"]).all()


def test_the_smallest_noise_is_not_flushed_to_zero():
    looks_normal(noise_of(jnp.zeros(MANY), 1e-25) * 1e25 * SIGMA)


@pytest.mark.parametrize(("dtype", "parts"), [("float32", 1), ("complex64", 2)])
def test_sigma_is_longer_by_what_rounding_to_the_grid_adds(dtype, parts):
    """Rounding d numbers changes the sum by sqrt(d) steps of sigma / 2^26 more. With as
    much noise as here it shows. A complex number counts as two.
    """
    multiplier, size = 2000.0, 2**20
    noise = np.asarray(add(jnp.zeros(size, dtype), multiplier)).real
    # sigma = multiplier (1 + sqrt(d) sigma / 2^26)
    d = parts * size
    wanted = multiplier / (1 - multiplier * np.sqrt(d) * 2.0**-26)
    assert abs(noise.std() / wanted - 1) < 5 / np.sqrt(2 * size) + LONGER
    assert wanted / multiplier > 1.03


def test_noise_takes_the_memory_of_one_leaf():
    """`jax.random.normal` takes that of three."""
    leaf = jax.ShapeDtypeStruct((10**6,), np.float32)
    program = jax.jit(lambda leaf: add(leaf, SIGMA)).lower(leaf).compile()
    assert program.memory_analysis().temp_size_in_bytes < 1.01 * 4e6


@pytest.mark.parametrize("devices", [(1, 1), (4, 2)])
def test_all_devices_numbers_count_in_shard_map(devices):
    mesh = jax.make_mesh(devices, ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    run = jax.shard_map(
        lambda g: add(g, 2000.0), mesh=mesh, in_specs=P("x", "y"), out_specs=P("x", "y")
    )
    noisy = np.asarray(jax.jit(run)(jnp.zeros((1024, 1024))))
    wanted = 2000 / (1 - 2000 * 1024 * 2.0**-26)
    assert abs(noisy.std() / wanted - 1) < 5e-3
    assert wanted / 2000 > 1.03


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("jit", [False, True])
def test_it_is_the_same_on_a_mesh_and_stays_split(kind, jit):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind,) * 2)
    grads = {"w": jnp.zeros((8, 6)), "b": jnp.zeros(4, np.complex64)}
    wanted = add(grads, SIGMA)
    specs = {"w": P("x", "y"), "b": P(None)}
    with jax.set_mesh(mesh):
        for name, spec in specs.items():
            grads[name] = jax.device_put(grads[name], NamedSharding(mesh, spec))
        run = jax.jit(add) if jit else add
        found = run(grads, SIGMA)
        compiled = jax.jit(add).lower(grads, SIGMA).compile().as_text()
    for name, leaf in found.items():
        assert leaf.sharding.is_equivalent_to(grads[name].sharding, leaf.ndim)
        np.testing.assert_array_equal(leaf, wanted[name])
    # Each device draws what it holds.
    assert not any(name in compiled for name in ("all-gather", "all-reduce"))


def test_in_shard_map_parts_differ_and_whole_leaves_do_not():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    specs = {"split": P("x"), "whole": P()}
    grads = {"split": jnp.zeros(400), "whole": jnp.zeros(100)}

    run = jax.shard_map(
        lambda g: add(g, SIGMA), mesh=mesh, in_specs=(specs,), out_specs=specs
    )
    found = jax.jit(run)(grads)
    parts = np.asarray(found["split"]).reshape(4, 100)
    assert len(np.unique(parts)) == 400
    # out_specs check that what is whole does not vary.
    assert np.all(found["whole"] != 0)


@pytest.mark.parametrize("shape", [(2, 2), (4, 2), (2, 2, 2)])
def test_in_shard_map_each_device_has_noise_of_its_own(shape):
    names = ("x", "y", "z")[: len(shape)]
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))
    mesh_axes = {"all": names, "last": names[-1:], "none": ()}
    specs = {name: P(axes or None) for name, axes in mesh_axes.items()}

    def drawn(kind, key):
        run = jax.shard_map(
            lambda grads: add(grads, 1.0, key),
            mesh=mesh,
            in_specs=(specs,),
            out_specs=specs,
        )
        # JAX takes the kind of a key of bits from a setting, which its caches ignore.
        noisy_leaf.clear_cache()
        with jax.default_prng_impl(kind):
            return jax.jit(run)({name: jnp.zeros(32) for name in specs})

    for kind in KINDS_OF_KEY:
        key = jax.random.key(0, impl=kind)
        for noise in (drawn(kind, key), drawn(kind, jax.random.key_data(key))):
            for name, axes in mesh_axes.items():
                count = math.prod(mesh.shape[axis] for axis in axes)
                parts = noise[name].reshape(count, -1)
                assert len(np.unique(parts, axis=0)) == count
                # Nor has one a number of another.
                assert len(np.unique(parts)) == 32


@pytest.mark.parametrize("kind", KINDS_OF_KEY)
def test_no_key_that_a_user_may_hold_gives_the_noise(kind):
    key, leaf = jax.random.key(0, impl=kind), jnp.zeros(8)
    noise = np.asarray(add([leaf] * 3, 1.0, key))
    first, second = jax.random.split(key)
    folded = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(100))
    keys = [key[None], folded, jax.random.split(key, 7), jax.random.split(key, 100)]
    keys += [jax.random.split(first, 100), jax.random.split(second, 100)]

    def draws(key):
        ours = integer_noise(random_words(key, leaf)) / 2**26
        return jax.random.normal(key, leaf.shape), ours, noisy_leaf(leaf, 1.0, key)

    # Not vmap, where keys of rbg draw together.
    for drawn in jax.lax.map(draws, jnp.concatenate(keys)):
        alike = np.isclose(np.asarray(drawn)[:, None], noise).all(axis=-1)
        assert not np.any(alike)


def test_where_parts_are_not_known_it_raises():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": P("x"), "out_specs": P("x"), "check_vma": False}
    run = jax.shard_map(lambda x: add(x, 1.0), mesh=mesh, **specs)
    with pytest.raises(ValueError, match=r"^add_noise: must be called outside"):
        run(jnp.zeros(8))


def a_mean():
    return clipped_grad(lambda w, x: w * x, 1.0)(jnp.array(0.0), jnp.ones(3))


GRADS = jnp.ones(3)
WRONG = {
    "noise_multiplier must be at least 0, got -1.0": lambda: add(GRADS, -1.0),
    "noise_multiplier must not be NaN": lambda: add(GRADS, np.nan),
    "noise_multiplier must be a real number": lambda: add(GRADS, "1"),
    "sensitivity must be given with a tree": lambda: add_noise(GRADS, 1.0, KEY),
    "sensitivity must be at least 0, got -1": lambda: add_noise(
        GRADS, 1.0, KEY, sensitivity=-1
    ),
    "sensitivity is for a tree of gradients": lambda: add(result_of(1.0), 1.0),
    "gradients must be floats, got int32": lambda: add(jnp.arange(3), 1.0),
    "result must be a sum, got a mean": lambda: add_noise(a_mean(), 1.0, KEY),
}


@pytest.mark.parametrize("text", WRONG)
def test_an_error_names_the_argument(text):
    with pytest.raises((TypeError, ValueError), match=f"^add_noise: {text}"):
        WRONG[text]()


def test_a_leaf_that_counters_cannot_count_is_refused():
    leaf = jax.ShapeDtypeStruct((2**32 + 1,), np.float32)
    with pytest.raises(ValueError, match=r"^add_noise: a leaf of shape \(4294967297"):
        jax.eval_shape(lambda leaf: add(leaf, 1.0), leaf)
