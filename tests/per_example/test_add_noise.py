"""Noise on a sum of clipped gradients: its size, its dtype, its sharding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from optaxclip import add_noise, clipped_grad

KEY, MANY, SIGMA = jax.random.key(0), 200_000, 3.0
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_it_is_normal_with_the_given_deviation(dtype):
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
    noisy = add_noise([jnp.zeros(MANY), jnp.zeros(MANY)], SIGMA, KEY)
    one, other = (np.float64(x) for x in noisy)
    assert abs(np.mean(one * other)) < OFF * SIGMA**2


def test_of_a_result_it_returns_the_gradients():
    grad = clipped_grad(lambda w, x: jnp.sum(w * x), 1.0, mean=False)
    result = grad(jnp.zeros(3), jnp.eye(3))
    np.testing.assert_array_equal(add_noise(result, 0.0, KEY), result.grads)


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


def test_where_parts_are_not_known_it_raises():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": P("x"), "out_specs": P("x"), "check_vma": False}
    run = jax.shard_map(lambda x: add_noise(x, 1.0, KEY), mesh=mesh, **specs)
    with pytest.raises(ValueError, match=r"^add_noise: must be called outside"):
        run(jnp.zeros(8))


def a_mean():
    return clipped_grad(lambda w, x: w * x, 1.0)(jnp.array(0.0), jnp.ones(3))


WRONG = {
    "add_noise: sigma must be at least 0, got -1.0": lambda: (jnp.ones(3), -1.0),
    "add_noise: sigma must not be NaN": lambda: (jnp.ones(3), np.nan),
    "add_noise: gradients must be floats, got int32": lambda: (jnp.arange(3), 1.0),
    "add_noise: result must be a sum, got a mean": lambda: (a_mean(), 1.0),
}


@pytest.mark.parametrize("text", WRONG)
def test_an_error_names_the_argument(text):
    with pytest.raises((TypeError, ValueError), match=f"^{text}"):
        add_noise(*WRONG[text](), KEY)
