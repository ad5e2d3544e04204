"""The examples on frameworks, on a scanned epoch and on accumulation keep, for a few
steps, what their docstrings promise.
"""

import math

import jax
import numpy as np
import optax
import pytest

import optaxclip

EPS = float(np.finfo(np.float32).eps)
# The gradient is recomputed by another compiled program, whose float32 sums over a
# batch are taken in another order.
RTOL = 64 * EPS


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("as_programs_run")]


def norm_of(tree):
    """The global norm in float64."""
    return math.sqrt(
        sum(
            np.square(np.asarray(leaf, np.float64)).sum()
            for leaf in jax.tree.leaves(tree)
        )
    )


def norms_by_name(tree):
    """The norm of each leaf in float64, under the name that the metrics give it."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): norm_of(leaf)
        for path, leaf in leaves
    }


@pytest.fixture(scope="module")
def nnx_example():
    pytest.importorskip("flax")
    pytest.importorskip("sklearn")
    from examples import flax_nnx

    with jax.numpy_rank_promotion("allow"):
        return flax_nnx, flax_nnx.main(steps=20)


def first_gradient_of_nnx(flax_nnx):
    network, _ = flax_nnx.new_network_and_optimizer()
    batch = next(flax_nnx.batches(flax_nnx.read_digits()[0], 1))
    return flax_nnx.nnx.as_pure(
        flax_nnx.nnx.state(
            flax_nnx.nnx.jit(flax_nnx.nnx.grad(flax_nnx.mean_loss))(network, batch),
            flax_nnx.nnx.Param,
        )
    )


def test_nnx_learns(nnx_example):
    _, result = nnx_example
    assert result.losses[-5:].mean() < 0.6 * result.losses[0]
    assert result.accuracy > 0.5


def test_nnx_metrics_are_the_norms_of_the_gradients(nnx_example):
    flax_nnx, result = nnx_example
    gradient = first_gradient_of_nnx(flax_nnx)
    report = result.reports[0]
    assert report["clip/all/norm_before"] == pytest.approx(norm_of(gradient), rel=RTOL)
    assert report["clip/all/norm_before"] > flax_nnx.MAX_NORM
    assert report["clip/all/norm_after"] == pytest.approx(flax_nnx.MAX_NORM, rel=1e-6)
    start = "clip/tensors/norm_before/"
    seen = {
        name.removeprefix(start): value
        for name, value in report.items()
        if name.startswith(start)
    }
    expected = norms_by_name(gradient)
    assert (
        set(seen) == set(expected) >= {"average/scale", "first/kernel", "readout/bias"}
    )
    for name, norm in expected.items():
        # The bias before batch normalisation has no gradient but roundings, which are
        # measured against the whole.
        assert seen[name] == pytest.approx(
            norm, rel=RTOL, abs=EPS * norm_of(gradient)
        ), name


def test_nnx_counts_clipped_steps(nnx_example):
    _, result = nnx_example
    clipped = [report["clip/all/clipped"] for report in result.reports]
    norms = np.array([report["clip/all/norm_before"] for report in result.reports])
    np.testing.assert_array_equal(clipped, norms > nnx_example[0].MAX_NORM)
    assert result.reports[-1]["clip/all/clipped_count"] == sum(clipped) > 0


def test_nnx_shows_the_same_numbers_in_both_of_its_states(nnx_example):
    flax_nnx, _ = nnx_example
    _, optimizer = flax_nnx.new_network_and_optimizer()
    by_name = optaxclip.metrics(optimizer.opt_state)
    by_number = optaxclip.metrics(flax_nnx.nnx.state(optimizer))
    assert len(by_name) == len(by_number) and "clip/all/norm_before" in by_name
    for name in ("norm_before", "limit", "clipped_share"):
        assert by_name[f"clip/all/{name}"] == by_number[f"clip/all/{name}"]


@pytest.fixture(scope="module")
def equinox_example():
    pytest.importorskip("equinox")
    from examples import equinox_filtered

    with pytest.MonkeyPatch.context() as patch, jax.numpy_rank_promotion("allow"):
        patch.setattr(equinox_filtered, "WARMUP", 10)
        return equinox_filtered, equinox_filtered.main(steps=30)


def first_network_of_equinox(equinox_filtered):
    text, alphabet = equinox_filtered.read_text()
    network = equinox_filtered.Network(
        len(alphabet), jax.random.key(equinox_filtered.SEED)
    )
    return network, next(equinox_filtered.batches(text, 1))


def test_equinox_learns(equinox_example):
    _, result = equinox_example
    assert result.losses[-5:].mean() < result.losses[0] - 0.3


def test_equinox_metrics_are_those_of_weights(equinox_example):
    equinox_filtered, result = equinox_example
    network, windows = first_network_of_equinox(equinox_filtered)
    gradient = equinox_filtered.eqx.filter_jit(
        equinox_filtered.eqx.filter_grad(equinox_filtered.mean_loss)
    )(network, windows)
    assert gradient.activation is gradient.times is gradient.factor is None
    start = "clip/norm_before/"
    seen = {
        name.removeprefix(start): value
        for name, value in result.reports[0].items()
        if name.startswith(start)
    }
    expected = norms_by_name(gradient)
    assert set(seen) == set(expected)
    assert "readout/bias" in seen and len(seen) == 7
    for name, norm in expected.items():
        assert seen[name] == pytest.approx(norm, rel=RTOL), name


def test_equinox_limits_are_common_first_and_then_own(equinox_example):
    _, result = equinox_example

    def factors(report):
        return np.array(
            [value for name, value in report.items() if name.startswith("clip/factor/")]
        )

    warming_up, longest = result.reports[:10], 0.0
    for report in warming_up:
        together = math.sqrt(
            sum(
                value**2
                for name, value in report.items()
                if name.startswith("clip/norm_before/")
            )
        )
        np.testing.assert_allclose(factors(report), min(1.0, 1 / together), rtol=RTOL)
        longest = max(longest, together)
    assert longest > 1.2  # so that there was something to clip
    assert any(np.ptp(factors(report)) > 0.01 for report in result.reports[10:])


def test_equinox_leaves_without_weights_stay(equinox_example):
    equinox_filtered, result = equinox_example
    before, _ = first_network_of_equinox(equinox_filtered)
    assert (result.network.activation, result.network.times, result.network.factor) == (
        before.activation,
        before.times,
        before.factor,
    )
    for new, old in zip(
        *(
            jax.tree.leaves(
                equinox_filtered.eqx.filter(tree, equinox_filtered.eqx.is_inexact_array)
            )
            for tree in (result.network, before)
        )
    ):
        assert np.any(new != old)


def test_equinox_without_the_filter_raises_at_init(equinox_example):
    network, _ = first_network_of_equinox(equinox_example[0])
    with pytest.raises(TypeError, match="activation"):
        optaxclip.adagc().init(network)


@pytest.fixture(scope="module")
def scan_example(tmp_path_factory):
    pytest.importorskip("sklearn")
    from examples import plain_scan

    log = tmp_path_factory.mktemp("scan") / "run.csv"
    with jax.numpy_rank_promotion("allow"):
        return plain_scan, plain_scan.main(steps=90, log=log), log


def test_scan_brings_out_every_step(scan_example):
    _, result, _ = scan_example
    assert {"loss", "clip/norm_before", "clip/limit", "clip/clipped_share"} <= set(
        result.history
    )
    assert all(
        column.shape == (90,) and column.dtype == np.float32
        for column in result.history.values()
    )
    assert result.history["loss"][-10:].mean() < 0.2 * result.history["loss"][0]
    assert result.accuracy > 0.8


def test_scanned_norms_are_those_of_a_plain_loop(scan_example):
    plain_scan, result, _ = scan_example
    training, _ = plain_scan.read_digits()
    optimizer, network = plain_scan.new_optimizer(), plain_scan.new_network()
    state, norms, gradient_of = (
        optimizer.init(network),
        [],
        jax.jit(jax.grad(plain_scan.mean_loss)),
    )
    order = next(plain_scan.orders(len(training.labels), 2, 45))
    for chosen in order[:5]:
        gradient = gradient_of(
            network, jax.tree.map(lambda part, chosen=chosen: part[chosen], training)
        )
        norms.append(norm_of(gradient))
        updates, state = optimizer.update(gradient, state, network)
        network = optax.apply_updates(network, updates)
    # Each step starts from the roundings of those before.
    np.testing.assert_allclose(
        result.history["clip/norm_before"][:5], norms, rtol=5 * RTOL
    )


def test_scanned_limit_is_the_quantile_of_the_norms_before(scan_example):
    _, result, _ = scan_example
    norms, limits = (
        result.history["clip/norm_before"].astype(np.float64),
        result.history["clip/limit"],
    )
    assert limits[0] == np.inf
    for step in (1, 2, 30, 89):
        assert limits[step] == pytest.approx(
            np.quantile(norms[:step], 0.9), rel=8 * EPS
        ), step
    np.testing.assert_array_equal(result.history["clip/clipped"], norms > limits)


def test_scanned_counts_add_up_to_the_state(scan_example):
    _, result, _ = scan_example
    clipped = result.history["clip/clipped"].sum()
    assert 0 < clipped < 90
    assert (
        optaxclip.metrics(result.state)["clip/clipped_count"]
        == clipped
        == result.history["clip/clipped_count"][-1]
    )


def test_log_has_the_norms_that_replay_reads(scan_example):
    _, result, log = scan_example
    np.testing.assert_array_equal(
        optaxclip.replay.read_history(log),
        result.history["clip/norm_before"].astype(np.float64),
    )


@pytest.fixture(scope="module")
def accumulation_rows():
    from examples import accumulation

    with jax.numpy_rank_promotion("allow"):
        return {row.clipping: row for row in accumulation.main(steps=20)}


def test_clip_inside_multi_steps_is_the_large_batch(accumulation_rows):
    large, inside = accumulation_rows["large batch"], accumulation_rows["inside"]
    assert inside.norm == pytest.approx(large.norm, rel=RTOL)
    assert inside.clipped_count == large.clipped_count > 0
    assert inside.apart_first < RTOL and inside.apart_last < RTOL
    assert inside.last_loss == pytest.approx(large.last_loss, rel=RTOL)
    assert large.last_loss < large.first_loss - 0.5


def test_clip_before_multi_steps_is_another_method(accumulation_rows):
    large, before = accumulation_rows["large batch"], accumulation_rows["before"]
    assert before.first_loss == pytest.approx(
        large.first_loss, rel=RTOL
    )  # the same weights and data
    assert before.apart_first > 0.05 and before.apart_last > 0.05
    assert before.norm > 1.2 * large.norm
    assert before.clipped_share > large.clipped_share


@pytest.fixture(scope="module")
def two_steps():
    """The gradients of the first two whole steps, by part, and what each order reports
    of them: the weights stay.
    """
    from examples import accumulation

    text, alphabet = accumulation.read_text()
    starts = np.random.default_rng(5).integers(
        len(text) - accumulation.CONTEXT,
        size=(2 * accumulation.PARTS, accumulation.PART, 1),
    )
    network = accumulation.new_network(len(alphabet))
    with jax.numpy_rank_promotion("allow"):
        gradient_of = jax.jit(jax.grad(accumulation.mean_loss))
        gradients = [
            gradient_of(network, text[start + np.arange(accumulation.CONTEXT + 1)])
            for start in starts
        ]
    return accumulation, network, gradients


def reported(accumulation, network, gradients, clipping):
    optimizer = accumulation.accumulating(
        optaxclip.clip_by_global_norm(accumulation.MAX_NORM), optax.sgd(0.1)
    )[clipping]
    state, reports, update = optimizer.init(network), [], jax.jit(optimizer.update)
    for gradient in gradients:
        updates, state = update(gradient, state, network)
        reports.append((norm_of(updates), optaxclip.metrics(state)))
    return reports


def test_metrics_in_multi_steps_are_of_the_last_whole_step(two_steps):
    accumulation, network, gradients = two_steps
    parts = accumulation.PARTS
    reports = reported(accumulation, network, gradients, "inside")
    for number, (moved, report) in enumerate(reports, start=1):
        whole = number // parts
        assert (moved > 0) == (number % parts == 0)
        if whole == 0:
            assert report["clip/norm_before"] == 0
            continue
        average = jax.tree.map(
            lambda *leaves: np.mean(np.asarray(leaves, np.float64), axis=0),
            *gradients[(whole - 1) * parts : whole * parts],
        )
        assert float(report["clip/norm_before"]) == pytest.approx(
            norm_of(average), rel=RTOL
        )
        assert report["clip/clipped_count"] <= whole


def test_metrics_before_multi_steps_are_those_of_the_last_part(two_steps):
    accumulation, network, gradients = two_steps
    reports = reported(accumulation, network, gradients, "before")
    for gradient, (_, report) in zip(gradients, reports):
        assert float(report["clip/norm_before"]) == pytest.approx(
            norm_of(gradient), rel=RTOL
        )
    assert reports[-1][1]["clip/clipped_count"] == len(gradients)


def test_table_of_accumulation_names_its_columns(capsys):
    from examples import accumulation

    accumulation.print_table(
        [accumulation.Row("inside", 1.5, 3, 0.25, 4.0, 2.0, 1e-7, 2e-6)]
    )
    printed = capsys.readouterr().out
    for text in (
        "norm seen",
        "clipped",
        "loss",
        "apart from the large batch",
        "1.500000",
        "3 ( 25.0%)",
        "1.0e-07",
        "2.0e-06",
    ):
        assert text in printed, text
