"""The example on differential privacy draws, adds noise and finds what it says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("sklearn")
from examples import private_digits

pytestmark = pytest.mark.usefixtures("as_programs_run")


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    picture = tmp_path_factory.mktemp("private") / "picture.png"
    result = private_digits.main(steps=60, save=picture)
    assert picture.stat().st_size > 10_000
    return result


def test_it_learns_with_noise(noisy):
    assert noisy.accuracy > 0.6


def test_wrong_labels_have_longer_gradients_at_the_end(noisy):
    norms, wrong = noisy.after.norms, noisy.wrong
    assert wrong.sum() == private_digits.WRONG
    assert np.median(norms[wrong]) > 2 * np.median(norms[~wrong])


def test_fewer_are_clipped_and_noise_grows_as_it_learns(noisy):
    assert noisy.clipped[0] > noisy.clipped[-1] > 0
    assert noisy.after.noise.scale > noisy.before.noise.scale > 0


def test_what_it_prints_are_its_numbers(noisy, capsys):
    training = private_digits.read_digits(0)[0]
    private_digits.print_result(noisy, training)
    printed = capsys.readouterr().out
    assert f"{noisy.accuracy:.1%} of 497" in printed
    assert f"{noisy.clipped.mean():.1%} of all" in printed
    assert f"= {float(noisy.after.noise.scale):.3g}" in printed
    assert f"{noisy.after.norms.max():6.2f}" in printed


def test_noise_has_the_deviation_that_is_asked_for():
    tree = {"a": jnp.full((100, 100), 3.0), "b": jnp.zeros((100, 100))}
    noisy = private_digits.with_noise(tree, jax.random.key(0), 2.0)
    found = {name: np.asarray(leaf, np.float64) for name, leaf in noisy.items()}
    # Four standard errors of 10,000 draws.
    for name, mean in (("a", 3), ("b", 0)):
        assert found[name].mean() == pytest.approx(mean, abs=4 * 2 / 100)
        assert found[name].std() == pytest.approx(2, rel=4 / np.sqrt(20_000))
    assert abs(np.corrcoef(found["a"].ravel(), found["b"].ravel())[0, 1]) < 0.04


def test_every_image_joins_by_chance_and_once():
    chosen, is_real = private_digits.batches(1300, 400, 0)
    sizes = is_real.sum(1)
    mean, deviation = private_digits.BATCH, np.sqrt(130 * 0.9)
    assert sizes.mean() == pytest.approx(mean, abs=4 * deviation / 20)
    assert sizes.std() == pytest.approx(deviation, rel=4 / np.sqrt(800))
    for indices, real in zip(chosen[:9], is_real):
        assert len(np.unique(indices[real])) == real.sum()


def test_no_held_out_image_has_a_wrong_label():
    training, held_out, wrong = private_digits.read_digits(0)
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    true = {image.tobytes(): label for image, label in zip(images / 16, labels)}
    for digits, lies in ((training, wrong), (held_out, np.zeros(497, bool))):
        known = [true[image.astype(float).tobytes()] for image in digits.images]
        np.testing.assert_array_equal(digits.labels != known, lies)
