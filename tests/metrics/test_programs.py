"""What `metrics` costs in the compiled step."""

import jax
import jax.numpy as jnp
import optax
import pytest

import optaxclip
from tests.helpers import only_by_a_cpu

SHAPES = [(256, 512), (512, 128), (128, 640), (300, 200)]
SIZE = 4 * sum(rows * columns for rows, columns in SHAPES)  # bytes of the gradients
CLIPPING = optax.chain(optaxclip.clip_by_global_norm(1.0), optax.adam(0.1))


def bytes_of_a_step(optimizer, *, report, **options):
    """What a compiled step reads and writes, in units of the gradients."""

    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        numbers = optaxclip.metrics(state, **options) if report else {}
        return optax.apply_updates(params, updates), state, numbers

    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in SHAPES]
    state = jax.eval_shape(optimizer.init, params)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, params)
    return compiled.compile().cost_analysis()["bytes accessed"] / SIZE


@pytest.fixture(scope="module")
def clipped():
    return bytes_of_a_step(CLIPPING, report=False)


@pytest.mark.slow
def test_reading_metrics_reads_no_gradient(clipped):
    assert bytes_of_a_step(CLIPPING, report=True) < clipped + 0.01


@only_by_a_cpu
@pytest.mark.parametrize("summary", [False, True])
def test_norms_of_tensors_beside_a_global_clip_are_no_second_read(clipped, summary):
    recorder = optaxclip.record_norm(optaxclip.tensor_norm)
    optimizer = optax.chain(recorder, CLIPPING)
    found = bytes_of_a_step(optimizer, report=True, summary=summary)
    assert found < clipped + 0.01


@pytest.mark.slow
def test_spikes_beside_a_global_clip_are_no_second_read(clipped):
    optimizer = optax.chain(optaxclip.record_spikes(), CLIPPING)
    assert bytes_of_a_step(optimizer, report=True) < clipped + 0.01


@only_by_a_cpu
@pytest.mark.slow
def test_health_reads_more_only_when_asked(clipped):
    for asked, most in (("", 0.01), ("weights", 5.01), ("values", 9.01)):
        options = {name: name == asked for name in ("weights", "values")}
        recorder = optaxclip.record_health(**options)
        optimizer = optax.chain(recorder, CLIPPING)
        # docs/doctor.md has these numbers.
        assert bytes_of_a_step(optimizer, report=True) < clipped + most


@pytest.mark.slow
def test_a_second_read_would_be_seen(clipped):
    """The median of absolute values shares no sum with the clipper."""
    recorder = optaxclip.record_norm(lambda tree: jax.tree.map(jnp.median, tree))
    optimizer = optax.chain(recorder, CLIPPING)
    assert bytes_of_a_step(optimizer, report=True) > clipped + 0.9


def lines_of_report(tensors):
    """Lines of the program of `metrics`, and how many numbers it returns."""
    clipper = optaxclip.clip_by_tensor_norm(1.0)
    tree = [jnp.ones(2)] * tensors
    lowered = jax.jit(optaxclip.metrics).lower(clipper.init(tree))
    return lowered.as_text().count("\n"), len(lowered.out_info)


def test_numbers_of_tensors_are_computed_as_vectors():
    few_lines, few_numbers = lines_of_report(10)
    many_lines, many_numbers = lines_of_report(20)
    # A slice of a vector and a reshape for each number, and no arithmetic.
    assert many_lines - few_lines <= 2 * (many_numbers - few_numbers)
