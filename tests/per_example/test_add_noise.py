"""Noise on a sum of clipped gradients: its law, its dtype, its keys, its sharding."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from scipy import stats

from optaxclip import add_noise, clipped_grad
from optaxclip.per_example._noise import (
    noisy_leaf,
    normal_of_bits,
    standard_normal,
    threefry,
)

KEY, MANY, SIGMA = jax.random.key(0), 200_000, 3.0
KINDS_OF_KEY = "threefry2x32", "rbg", "unsafe_rbg"
# Of n normal numbers, mean and deviation are within five of their own deviations.
OFF = 5 / np.sqrt(MANY)


def noise_of(leaf, sigma=SIGMA):
    """What was added, as float64 or complex128."""
    noisy = add_noise({"w": leaf}, sigma, KEY)["w"]
    assert noisy.dtype == leaf.dtype and noisy.shape == leaf.shape
    wide = np.complex128 if jnp.iscomplexobj(leaf) else np.float64
    return np.asarray(noisy).astype(wide) - np.asarray(leaf).astype(wide)


def looks_normal(noise):
    assert abs(noise.mean()) < OFF * SIGMA
    assert abs(noise.std() / SIGMA - 1) < OFF
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


def test_float32_needs_no_float64():
    # GPUs are slow in it, and TPUs have none.
    with jax.enable_x64(True):
        draw = jax.make_jaxpr(standard_normal, static_argnums=(1, 2))
        assert "f64" not in str(draw(KEY, (3,), np.dtype("float32")))


# Key, counters and words, from kat_vectors of Random123.
KNOWN_WORDS = [
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((2**32 - 1,) * 2, (2**32 - 1,) * 2, (0x1CB996FC, 0xBB002BE7)),
    ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
]


def test_words_are_those_of_threefry():
    for key, counters, words in KNOWN_WORDS:
        found = threefry(jnp.array(key, np.uint32), *map(np.uint32, counters))
        assert tuple(map(int, found)) == words


def test_every_number_of_a_leaf_has_noise_of_its_own():
    for shape in ((), (0,), (60,), (12, 5), (3, 4, 5), (1, 5, 2, 2, 3)):
        noise = noise_of(jnp.zeros(shape))
        assert len(np.unique(noise)) == noise.size


@pytest.fixture(scope="module")
def standard():
    """Two times 10^7 numbers of float32, as a step of DP-SGD adds them."""
    return np.asarray(jax.jit(add_noise)(jnp.zeros(20_000_000), 1.0, KEY))


def has_the_tails(numbers, deviations, share=1.0):
    """As many of the longest `share` of all numbers lie beyond as the normal law says,
    on both sides.
    """
    expected = stats.binom(numbers.size, stats.norm.sf(deviations) / share)
    for side in (numbers, -numbers):
        assert expected.ppf(1e-5) <= np.sum(side > deviations) <= expected.isf(1e-5)


def test_as_many_lie_beyond_as_the_normal_law_says(standard):
    # Beyond 4.5 of 2e7 are 68 on each side, beyond 5.3 one or two.
    for deviations in (1.0, 3.0, 4.5, 5.0, 5.3):
        has_the_tails(standard, deviations)


def test_its_law_is_that_of_scipy(standard):
    assert stats.kstest(np.float64(standard[:1_000_000]), "norm").pvalue > 1e-3
    with jax.enable_x64(True):
        wide = np.asarray(add_noise(jnp.zeros(1_000_000, np.float64), 1.0, KEY))
    assert stats.kstest(wide, "norm").pvalue > 1e-3


def test_it_has_as_many_values_as_float32_has_for_the_law(standard):
    numbers = standard[:4_000_000]
    wide = np.random.default_rng(0).standard_normal(numbers.size)
    rounded = len(np.unique(np.float32(wide)))
    # 23 random bits have 0.79 of them.
    assert abs(len(np.unique(numbers)) / rounded - 1) < 1e-3


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_ends_are_beyond_nine_deviations_and_alike(dtype):
    with jax.enable_x64(dtype == "float64"):
        words = np.array([0, 1, 2**31, 2**32 - 2, 2**32 - 1], np.uint32)
        high, low, turn = np.meshgrid(words, words, words)
        noise = np.asarray(normal_of_bits(high, low, turn, np.dtype(dtype)))
        other = np.asarray(normal_of_bits(high, low, turn ^ 1, np.dtype(dtype)))
    assert noise.dtype == dtype
    np.testing.assert_array_equal(noise, -other)
    assert noise.max() == -noise.min()
    # The radius of a share 2^-65.
    np.testing.assert_allclose(noise.max(), np.sqrt(130 * np.log(2)), rtol=1e-6)
    # No number goes out without noise.
    assert np.all(noise != 0)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_far_tail_has_the_mass_of_the_normal_law(dtype):
    random = np.random.default_rng(0)
    for deviations in (5.3, 7.0, 9.0):
        # A number this long has a length in the plane of at least as much, with a share
        # of exp(-r^2 / 2), so that its first bits are 0. The others are drawn.
        zeros = int(deviations**2 / 2 / np.log(2))
        bits = random.integers(2 ** (64 - zeros), size=1_000_000, dtype=np.uint64)
        high, low = np.uint32(bits >> 32), np.uint32(bits & (2**32 - 1))
        turn = random.integers(2**32, size=bits.size, dtype=np.uint32)
        with jax.enable_x64(dtype == "float64"):
            noise = np.asarray(normal_of_bits(high, low, turn, np.dtype(dtype)))
        has_the_tails(noise, deviations, share=2.0**-zeros)


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
    noisy = add_noise([jnp.zeros(MANY), jnp.zeros(MANY)], SIGMA, KEY)
    one, other = (np.float64(x) for x in noisy)
    assert abs(np.mean(one * other)) < OFF * SIGMA**2


def result_of(max_norm, **options):
    """The sum of three gradients."""
    grad = clipped_grad(loss, max_norm, mean=False, **options)
    return grad({"w": jnp.zeros(3), "b": jnp.array(0.0)}, jnp.eye(3))


def loss(params, x):
    return jnp.vdot(params["w"], x) + params["b"]


@pytest.mark.parametrize("max_norm", [1.0, 0, 1e38, jnp.array(2.0), {"w": 3, "b": 4}])
def test_of_a_result_it_returns_the_gradients(max_norm):
    result = result_of(max_norm)
    found, wanted = (add_noise(x, SIGMA, KEY) for x in (result, result.grads))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_a_result_knows_the_longest_share_of_an_example():
    for limits, longest in ((2, 2.0), ({"w": 3.0, "b": jnp.array(4)}, 5.0)):
        result = jax.jit(result_of)(limits)
        assert result.limit == result_of(limits).limit == longest
    # An example may be in both batches.
    assert jax.tree.map(jnp.add, result, result).limit == 10
    # A limit below 0 counts as 0.
    assert jax.jit(result_of)(-1.0).limit == 0


INF = jnp.array(np.inf)
WITHOUT_LIMIT = {
    "max_norm=None": lambda: result_of(None),
    "max_norm=inf": lambda: result_of(np.inf),
    "an array of inf": lambda: result_of(INF),
    "None for a part": lambda: result_of({"w": 1.0, "b": None}),
    "inf for another": lambda: result_of({"w": np.inf, "b": 1.0}),
    "the median": lambda: result_of(jnp.nanmedian, private=False),
    "private=False": lambda: result_of(1.0, private=False),
}


@pytest.mark.parametrize("jit", [False, True])
def test_a_result_without_a_limit_is_refused(jit):
    for make in WITHOUT_LIMIT.values():
        result = (jax.jit(make) if jit else make)()
        for run in (add_noise, jax.jit(add_noise)):
            with pytest.raises(ValueError, match=r"^add_noise: result has no limit"):
                run(result, 1.0, KEY)


@pytest.mark.parametrize("number", [float, np.float32, jnp.float32])
def test_without_noise_nothing_goes_out(number):
    grads = {"w": jnp.ones(3), "b": jnp.ones(2, np.complex64)}
    in_jit = jax.jit(add_noise)
    for sigma in map(number, (0.0, -0.0, 1e-39, 1e-31, -1.0, np.nan)):
        with pytest.raises(ValueError, match=r"^add_noise: sigma must "):
            add_noise(grads, sigma, KEY)
        # There the number is not known.
        for leaf in jax.tree.leaves(in_jit(grads, sigma, KEY)):
            assert np.isnan(np.asarray(leaf)).all()


def test_under_jit_a_limit_of_inf_lets_nothing_out():
    noisy = jax.jit(lambda limit: add_noise(result_of(limit), 1.0, KEY))
    assert np.isnan(noisy(np.inf)["w"]).all()
    assert np.isfinite(noisy(1.0)["w"]).all()


def test_the_smallest_noise_is_not_flushed_to_zero():
    looks_normal(noise_of(jnp.zeros(MANY), 1e-30) * 1e30 * SIGMA)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("jit", [False, True])
def test_it_is_the_same_on_a_mesh_and_stays_split(kind, jit):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind,) * 2)
    grads = {"w": jnp.zeros((8, 6)), "b": jnp.zeros(4, np.complex64)}
    wanted = add_noise(grads, SIGMA, KEY)
    specs = {"w": P("x", "y"), "b": P(None)}
    with jax.set_mesh(mesh):
        for name, spec in specs.items():
            grads[name] = jax.device_put(grads[name], NamedSharding(mesh, spec))
        run = jax.jit(add_noise) if jit else add_noise
        found = run(grads, SIGMA, KEY)
        compiled = jax.jit(add_noise).lower(grads, SIGMA, KEY).compile().as_text()
    for name, leaf in found.items():
        assert leaf.sharding.is_equivalent_to(grads[name].sharding, leaf.ndim)
        # The logarithm and roots in normal numbers are vectorised by XLA.
        np.testing.assert_allclose(leaf, wanted[name], rtol=1e-5, atol=1e-5)
    # Each device draws what it holds.
    assert not any(name in compiled for name in ("all-gather", "all-reduce"))


def test_in_shard_map_parts_differ_and_whole_leaves_do_not():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    specs = {"split": P("x"), "whole": P()}
    grads = {"split": jnp.zeros(400), "whole": jnp.zeros(100)}

    def add(grads):
        return add_noise(grads, SIGMA, KEY)

    run = jax.shard_map(add, mesh=mesh, in_specs=(specs,), out_specs=specs)
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
        def add(grads):
            return add_noise(grads, 1.0, key)

        run = jax.shard_map(add, mesh=mesh, in_specs=(specs,), out_specs=specs)
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
    noise = np.asarray(add_noise([leaf] * 3, 1.0, key))
    first, second = jax.random.split(key)
    folded = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(100))
    keys = [key[None], folded, jax.random.split(key, 7), jax.random.split(key, 100)]
    keys += [jax.random.split(first, 100), jax.random.split(second, 100)]

    def draws(key):
        ours = standard_normal(key, leaf.shape, leaf.dtype)
        return jax.random.normal(key, leaf.shape), ours, noisy_leaf(leaf, 1.0, key)

    # Not vmap, where keys of rbg draw together.
    for drawn in jax.lax.map(draws, jnp.concatenate(keys)):
        alike = np.isclose(np.asarray(drawn)[:, None], noise).all(axis=-1)
        assert not np.any(alike)


def test_where_parts_are_not_known_it_raises():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": P("x"), "out_specs": P("x"), "check_vma": False}
    run = jax.shard_map(lambda x: add_noise(x, 1.0, KEY), mesh=mesh, **specs)
    with pytest.raises(ValueError, match=r"^add_noise: must be called outside"):
        run(jnp.zeros(8))


def a_mean():
    return clipped_grad(lambda w, x: w * x, 1.0)(jnp.array(0.0), jnp.ones(3))


WRONG = {
    "add_noise: sigma must be at least 1e-30, got -1.0": lambda: (jnp.ones(3), -1.0),
    "add_noise: sigma must not be NaN": lambda: (jnp.ones(3), np.nan),
    "add_noise: gradients must be floats, got int32": lambda: (jnp.arange(3), 1.0),
    "add_noise: result must be a sum, got a mean": lambda: (a_mean(), 1.0),
}


@pytest.mark.parametrize("text", WRONG)
def test_an_error_names_the_argument(text):
    with pytest.raises((TypeError, ValueError), match=f"^{text}"):
        add_noise(*WRONG[text](), KEY)
