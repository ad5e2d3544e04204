"""The example on AGC in a network without normalisation: its parts are what the papers
say, and AGC holds where no clipping fails.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("sklearn")
from examples import digits

EPS = np.finfo(np.float32).eps


pytestmark = pytest.mark.usefixtures("as_programs_run")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Some steps at the smallest and at a large rate, by method and multiple."""
    picture = tmp_path_factory.mktemp("digits") / "picture.png"
    table = digits.main(steps=30, seeds=1, multiples=(1, 16), save=picture)
    assert picture.stat().st_size > 10_000
    return {(row.method, round(row.rate / digits.BASE_RATE)): row for row in table}


def test_every_method_has_every_rate(rows):
    assert set(rows) == {
        (method, multiple)
        for method in ("none", "AGC", "global norm")
        for multiple in (1, 16)
    }


@pytest.mark.parametrize("method", ["AGC", "global norm"])
def test_clipping_holds_at_a_large_rate_where_none_fails(rows, method):
    assert rows["none", 16].accuracy < 0.3
    assert not rows["none", 16].final_loss < 2
    assert rows[method, 16].accuracy > 0.5
    assert rows[method, 16].diverged == 0


def test_clips_more_at_larger_rates_and_nothing_without_a_limit(rows):
    assert rows["none", 1].clipped_share == rows["none", 16].clipped_share == 0
    assert 0 <= rows["AGC", 1].clipped_share < rows["AGC", 16].clipped_share < 1


def test_changes_little_at_the_smallest_rate(rows):
    assert rows["AGC", 1].final_loss == pytest.approx(
        rows["none", 1].final_loss, abs=0.1
    )


def test_standardised_filters_have_mean_0_and_variance_1():
    weight = 3 + 2 * np.random.default_rng(0).normal(size=(3, 3, 5, 7)).astype(
        np.float32
    )
    standard = np.asarray(digits.standardise(jnp.asarray(weight)), np.float64)
    np.testing.assert_allclose(standard.mean((0, 1, 2)), 0, atol=45 * EPS)
    np.testing.assert_allclose(45 * standard.var((0, 1, 2)), 1, rtol=64 * EPS)
    wide = weight.astype(np.float64)
    expected = (wide - wide.mean((0, 1, 2))) / np.sqrt(45 * wide.var((0, 1, 2)))
    np.testing.assert_allclose(standard, expected, rtol=0, atol=64 * EPS)


@pytest.mark.parametrize("stride", [1, 2])
def test_convolution_is_the_one_of_lax(stride):
    random = np.random.default_rng(1)
    convolution = digits.new_convolution(random, (3, 3, 5, 7))
    convolution = {
        name: jnp.asarray(random.normal(size=leaf.shape), jnp.float32)
        for name, leaf in convolution.items()
    }
    images = jnp.asarray(random.normal(size=(2, 8, 8, 5)), jnp.float32)
    kernel = convolution["gain"] * digits.standardise(convolution["weight"])
    padding, numbers = ((1, 1), (1, 1)), ("NHWC", "HWIO", "NHWC")
    expected = (
        jax.lax.conv_general_dilated(
            images,
            kernel,
            (stride, stride),
            padding,
            dimension_numbers=numbers,
            precision="highest",
        )
        + convolution["bias"]
    )
    found = digits.convolve(convolution, images, stride)
    assert found.shape == (2, 8 // stride, 8 // stride, 7)
    # 45 products of size 1 or so to a sum.
    np.testing.assert_allclose(
        found, expected, rtol=0, atol=45 * EPS * float(jnp.abs(expected).max())
    )


def test_rectifier_keeps_variance_one():
    normal = np.random.default_rng(2).normal(size=1_000_000).astype(np.float32)
    # Four standard deviations of the variance of a million: the fourth central moment
    # of a rectified normal, scaled, is about 4.
    assert float(digits.relu(jnp.asarray(normal)).var()) == pytest.approx(1, abs=0.01)


def test_variance_stays_one_on_the_way_to_the_head(monkeypatch):
    """Of what leaves the network before the mean over the image, at its start, on
    noise: in wide layers the analytic beta is right.
    """
    monkeypatch.setattr(digits, "WIDTH", 32)
    seen = []
    rectify = digits.relu
    monkeypatch.setattr(digits, "relu", lambda x: seen.append(x) or rectify(x))
    network = digits.new_network(3)
    digits.predict(
        network,
        jnp.asarray(np.random.default_rng(3).normal(size=(64, 8, 8, 1)), jnp.float32),
    )
    # The last is the only one outside the scan. Borders are padded with zeros, which
    # costs some variance.
    assert 0.6 < float(seen[-1].var()) < 1.2


def long_gradients(network):
    """As long as 3 times the weights, but at least 3: beyond any limit here."""
    random = np.random.default_rng(4)
    return jax.tree.map(
        lambda x: jnp.asarray(
            3 * (np.abs(x) + 1) * random.normal(size=x.shape), jnp.float32
        ),
        network,
    )


def clipped_by_agc(network, gradients):
    lane = digits.Lane(
        np.float32(0.1), np.float32(digits.CLIPPING), np.float32(math.inf), np.int32(0)
    )
    optimizer = digits.new_optimizer(lane)
    updates = jax.jit(
        lambda gradients, network: optimizer.update(
            gradients, optimizer.init(network), network
        )[0]
    )(gradients, network)
    # The first step of Nesterov's momentum is the gradient times -rate * 1.9.
    return jax.tree.map(lambda x: np.asarray(x, np.float64) / (-0.1 * 1.9), updates)


def test_agc_clips_each_filter_of_each_layer_and_not_the_head():
    network = digits.new_network(5)
    gradients = long_gradients(network)
    clipped = clipped_by_agc(network, gradients)
    for name in ("weight", "bias"):
        np.testing.assert_allclose(
            clipped["head"][name], gradients["head"][name], rtol=8 * EPS
        )
    for place in (
        (clipped["stem"], network["stem"], gradients["stem"]),
        *(
            (clipped["blocks"][n], network["blocks"][n], gradients["blocks"][n])
            for n in ("first", "second")
        ),
    ):
        after, weight, before = (
            np.asarray(tree["weight"], np.float64) for tree in place
        )
        norms, limits = (
            np.sqrt(np.square(x).sum((-4, -3, -2), keepdims=True))
            for x in (before, weight)
        )
        limits = digits.CLIPPING * np.maximum(limits, 1e-3)
        assert (norms > limits).all()
        np.testing.assert_allclose(after, before * limits / norms, rtol=32 * EPS)
        # Gains and biases are one unit in each layer.
        gain, ones, before = (np.asarray(tree["gain"], np.float64) for tree in place)
        limit = digits.CLIPPING * np.linalg.norm(ones, axis=-1, keepdims=True)
        np.testing.assert_allclose(
            gain,
            before * limit / np.linalg.norm(before, axis=-1, keepdims=True),
            rtol=32 * EPS,
        )


def test_batches_go_through_every_epoch_without_repetition():
    batches = digits.shuffled_batches(0, 3 * digits.BATCH + 5, 7)
    assert batches.shape == (7, digits.BATCH)
    for epoch in (batches[:3], batches[3:6]):
        assert len(np.unique(epoch)) == 3 * digits.BATCH
    assert (batches[:3] != batches[3:6]).any()


def test_test_images_are_not_trained_on():
    data = digits.read_digits()
    assert data.images.shape == (1297, 8, 8, 1) and data.test_images.shape == (
        500,
        8,
        8,
        1,
    )
    training = {image.tobytes() for image in np.asarray(data.images)}
    assert not any(
        image.tobytes() in training for image in np.asarray(data.test_images)
    )


def outcome(last_losses, accuracy):
    losses = np.array([[3.0] * 9 + [loss] for loss in last_losses], np.float32)
    return digits.Outcome(
        losses,
        np.array(accuracy, np.float32),
        np.array([0.25, 0.75], np.float32),
        np.array([0.5, 1.0], np.float32),
    )


def test_what_diverged_is_counted():
    (row,) = digits.summary("AGC", [0.5], outcome([math.nan, 0.5], [0.1, 0.9]))
    assert row.diverged == 1 and math.isnan(row.final_loss)
    assert row.accuracy == pytest.approx(0.5) and row.accuracies == pytest.approx(
        (0.1, 0.9)
    )
    (row,) = digits.summary("AGC", [0.5], outcome([2.31, 0.5], [0.1, 0.9]))
    assert row.diverged == 1  # ln 10 is 2.303


def test_share_is_of_units_or_of_steps():
    assert digits.summary("AGC", [0.5], outcome([1, 1], [0, 0]))[0].clipped_share == 0.5
    assert (
        digits.summary("global norm", [0.5], outcome([1, 1], [0, 0]))[0].clipped_share
        == 0.75
    )
