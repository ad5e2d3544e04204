"""The limit at another batch size, against norms that were measured there and against
tr(Sigma) and |G|^2 of all data.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optaxclip.per_example import noise_share
from optaxclip.replay import suggest
from optaxclip.replay._batch import norm_ratio

EXAMPLES, FEATURES, BATCH, PARTS = 2048, 12, 16, 8
OTHER_BATCHES = (2, 4, 8, 32, 64, 128)
BATCHES = 400  # of each size


def perceptron(params, x):
    return jnp.tanh(x @ params["first"]) @ params["last"]


def recurrent(params, x):
    def turn(state, entry):
        return jnp.tanh(state @ params["state"] + entry * params["input"]), None

    state, _ = jax.lax.scan(turn, jnp.zeros(8), x)
    return state @ params["last"]


SHAPES = {
    perceptron: {"first": (FEATURES, 16), "last": (16,)},
    recurrent: {"state": (8, 8), "input": (8,), "last": (8,)},
}


def gradients_of(model):
    """The gradients of all examples, float64[examples, parameters], after some training
    on them.
    """
    random = np.random.default_rng(1)
    params = {}
    for name, shape in SHAPES[model].items():
        params[name] = jnp.float32(random.normal(size=shape) / np.sqrt(shape[0]))
    x = np.float32(random.normal(size=(EXAMPLES, FEATURES)))
    y = np.float32(1 + np.sin(x[:, :3].sum(axis=1)))

    def loss(params, x, y):
        return (model(params, x) - y) ** 2

    of_each = jax.vmap(jax.grad(loss), in_axes=(None, 0, 0))

    @jax.jit
    def step(params):
        mean = jax.tree.map(lambda x: x.mean(axis=0), of_each(params, x, y))
        return jax.tree.map(lambda w, g: w - 0.05 * g, params, mean)

    for _ in range(3):
        params = step(params)
    grads = of_each(params, x, y)
    flat = [np.float64(leaf).reshape(EXAMPLES, -1) for leaf in jax.tree.leaves(grads)]
    return np.concatenate(flat, axis=1)


def batches_of(gradients, size, seed):
    """Gradients of batches, drawn with replacement: [batches, size, parameters]."""
    random = np.random.default_rng(seed)
    return gradients[random.integers(EXAMPLES, size=(BATCHES, size))]


def log_of(gradients):
    """Norms and noise shares of steps of batch size 16, in 8 parts."""
    norms, shares = [], []
    for batch in batches_of(gradients, BATCH, 0):
        parts = batch.reshape(PARTS, BATCH // PARTS, -1).mean(axis=1)
        norms.append(np.linalg.norm(parts.mean(axis=0)))
        norms_of_parts = np.float32(np.linalg.norm(parts, axis=1))
        shares.append(float(noise_share(norms_of_parts, norms[-1])))
    return np.array(norms), np.array(shares)


def root_mean_square(gradients, size, seed):
    """Of the norms of batches, and its standard error."""
    means = batches_of(gradients, size, seed).mean(axis=1)
    squares = np.sum(means**2, axis=1)
    root = np.sqrt(squares.mean())
    return root, squares.std() / np.sqrt(BATCHES) / (2 * root)


def errors_of(model):
    """Of each batch size the norm that is predicted over the one that is measured, and
    what chance makes of this at most, in three standard errors.
    """
    gradients = gradients_of(model)
    norms, shares = log_of(gradients)
    root, error = root_mean_square(gradients, BATCH, 0)
    rows = {}
    for size in OTHER_BATCHES:
        measured, error_there = root_mean_square(gradients, size, size)
        predicted = root * norm_ratio(norms, shares, BATCH, size)
        chance = 3 * (error / root + error_there / measured)
        rows[size] = predicted / measured, chance, root / measured
    return rows


@pytest.mark.parametrize("model", SHAPES)
def test_norms_at_six_batch_sizes_are_as_measured(model):
    for size, (ratio, chance, unchanged) in errors_of(model).items():
        assert abs(ratio - 1) < chance, size
        # The norm at 16 would be wrong, and so would one over the root of the size.
        if size == 128:
            assert abs(unchanged - 1) > 3 * chance
            assert abs(unchanged * np.sqrt(BATCH / size) - 1) > 2 * chance


@pytest.mark.parametrize("model", SHAPES)
def test_the_noise_scale_is_that_of_all_data(model):
    gradients = gradients_of(model)
    norms, shares = log_of(gradients)
    share = np.average(shares, weights=norms**2)
    mean = gradients.mean(axis=0)
    # McCandlish et al., 2018: tr(Sigma) / |G|^2. Of 400 batches the noise has an error
    # of a few per cent, and the signal is a difference.
    scale = np.sum((gradients - mean) ** 2) / EXAMPLES / np.sum(mean**2)
    assert share / (1 - share) * BATCH == pytest.approx(scale, rel=0.15)


def test_the_same_batch_size_changes_nothing():
    assert norm_ratio([1.0, 2.0], [0.3, 0.9], 16, 16) == 1


def test_noise_alone_goes_with_the_root_of_the_batch():
    assert norm_ratio([1.0, 2.0], [1.0, 1.5], 16, 64) == 0.5
    assert norm_ratio([1.0, 2.0], [0.0, 0.0], 16, 64) == 1


def test_a_step_counts_by_its_squared_norm():
    # s^2 is 1 and 0, and |g|^2 is 1 and 9.
    ratio = norm_ratio([1.0, 3.0], [1.0, 0.0], 4, 1)
    assert ratio == pytest.approx(np.sqrt(0.9 + 0.1 * 4))


def test_broken_steps_are_left_out():
    ratio = norm_ratio([1.0, np.nan, 2.0, np.inf], [0.5, 0.1, np.nan, 0.5], 1, 4)
    assert ratio == np.sqrt(0.5 + 0.5 / 4)


def write(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_the_command_says_the_limit_at_the_other_size(tmp_path, command):
    norms = np.exp(np.random.default_rng(0).normal(size=200))
    (best,) = [row for row in suggest(norms) if row.is_guard]
    # Noise alone made the norms that the limit clips, which do not count.
    shares = np.where(norms > best.limit, 1.0, 0.6)
    rows = [
        {"grad_norm": norm, "noise_share": share}
        for norm, share in zip(norms, shares.tolist())
    ]
    path = write(tmp_path / "run.jsonl", rows)
    text = command(path, "--batch", "32", "--to", "512")
    ratio = np.sqrt(0.4 + 0.6 / 16)
    assert (
        f"At batch size 512 norms are {ratio:.3g} times as long as at 32: start with "
        f"clip_by_global_norm({ratio * best.limit:.3g})." in text
    )


def test_the_command_scales_the_limit_that_it_says_to_take(tmp_path, command):
    # 1.0 clips a quarter of the steps.
    norms = np.exp(np.random.default_rng(0).normal(size=200)) / 2
    rows = [{"grad_norm": norm, "noise_share": 0.6} for norm in norms]
    text = command(write(tmp_path / "run.jsonl", rows), "--batch=32", "--to=512")
    assert "Take 1.0" in text
    assert f"start with clip_by_global_norm({np.sqrt(0.4 + 0.6 / 16):.3g})." in text


@pytest.mark.parametrize("name", ["train/noise_share", "sun-7 - noise_share"])
def test_a_noise_share_may_have_groups_in_front(tmp_path, command, name):
    norms = np.exp(np.random.default_rng(0).normal(size=200))
    rows = [{"grad_norm": norm, name: 0.6} for norm in norms]
    text = command(write(tmp_path / "run.jsonl", rows), "--batch=32", "--to=512")
    assert f"norms are {np.sqrt(0.4 + 0.6 / 16):.3g} times as long as at 32" in text


def test_where_norms_fall_far_the_command_scales_the_cap(tmp_path, command):
    norms = 50 * np.exp(-0.03 * np.arange(200))
    rows = [{"grad_norm": norm, "noise_share": 0.6} for norm in norms]
    text = command(write(tmp_path / "run.jsonl", rows), "--batch=32", "--to=512")
    assert "Take optaxclip.zclip(cap=" in text and "clip_by_global_norm(" in text
    ratio = np.sqrt(0.4 + 0.6 / 16)
    assert text.endswith(f"as long as at 32: multiply the cap by {ratio:.3g}.\n")


def test_the_command_names_what_is_missing(tmp_path, command, capsys):
    path = write(tmp_path / "run.jsonl", [{"grad_norm": 1.0 + i} for i in range(200)])
    with pytest.raises(SystemExit, match=r"log optaxclip\.per_example\.noise_share"):
        command(path, "--batch", "32", "--to", "512")
    # Before the file is read.
    for sizes in (["--to=512"], ["--batch=32", "--to=0"], ["--batch=-1", "--to=32"]):
        with pytest.raises(SystemExit):
            command(path.parent / "none", *sizes)
        error = "--batch and --to go together, and must be at least 1"
        assert error in capsys.readouterr().err
