"""Every argument of the clippers by norm and by value reaches what it is for. Weights
that are integers, where their updates are floats, and the reverse.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip
from optaxclip import rules
from tests.helpers import apply

OF_ROWS = np.array([[5], [10]])


def by_name(path, leaf):
    return len(path)


by_tensor, by_unit = optaxclip.clip_by_tensor_norm, optaxclip.clip_by_unitwise_norm
by_global, agc = optaxclip.clip_by_global_norm, optaxclip.adaptive_grad_clip
by_group = partial(optaxclip.clip_by_group_norm, labels="all")
drop, whole = optaxclip.shrinks.drop, np.sqrt(125)
ROWS = np.array([[3.0, -4.0], [6.0, 8.0]])


# name: (clipper, options, what the rows above are divided by when the limit is 1)
OPTIONS = {
    "tensor, order 1": (by_tensor, {"ord": 1}, 21),
    "tensor, zero": (by_tensor, {"nonfinite": "zero"}, whole),
    "tensor, drop": (by_tensor, {"shrink": drop}, np.inf),
    "tensor, eps": (by_tensor, {"eps": 1.0}, 1 + whole),
    "tensor, stacked": (by_tensor, {"stacked": 1}, OF_ROWS),
    "tensor, stacked, NumPy": (by_tensor, {"stacked": (np.int64(0),)}, OF_ROWS),
    "tensor, stacked by name": (by_tensor, {"stacked": by_name}, OF_ROWS),
    "rms, stacked": (optaxclip.clip_by_tensor_rms, {"stacked": 1}, OF_ROWS / 2**0.5),
    "average, stacked": (optaxclip.clip_by_average_norm, {"stacked": 1}, OF_ROWS / 2),
    "unit, axis": (by_unit, {"axis": 1}, OF_ROWS),
    "unit, axis, NumPy": (by_unit, {"axis": (np.int64(1),)}, OF_ROWS),
    "unit, axis by name": (by_unit, {"axis": by_name}, OF_ROWS),
    "unit, order": (by_unit, {"ord": 1}, np.array([[9, 12]])),
    "unit, stacked": (by_unit, {"stacked": 1}, OF_ROWS),
    "group, eps": (by_group, {"eps": 1.0}, 1 + whole),
    "group, order 1": (by_group, {"ord": 1}, 21),
    "global, drop": (by_global, {"shrink": drop}, np.inf),
    "block rms": (optaxclip.clip_by_block_rms, {}, np.sqrt(125 / 4)),
    "agc, stacked": (agc, {"stacked": 1}, OF_ROWS),
    "agc, axis": (agc, {"axis": 1}, OF_ROWS),
    "agc, per tensor": (agc, {"per_tensor": True}, whole / np.sqrt(2)),
    "agc, stacked tensors": (agc, {"per_tensor": True, "stacked": 1}, OF_ROWS),
    "agc, eps": (agc, {"eps": 10.0, "ord": 1, "per_tensor": True}, 21 / 10),
}


@cache
def clipped_with_options():
    """{name: clipped updates}, by one program."""
    weights = {"w": np.float32([[0.6, -0.8], [0.6, 0.8]])}

    def clipped(grads):
        return {
            name: apply(build(1.0, **options), grads, weights)[0]["w"]
            for name, (build, options, _) in OPTIONS.items()
        }

    return jax.jit(clipped)({"w": np.float32(ROWS)})


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_arguments_reach_what_they_are_for(name):
    found, wanted = clipped_with_options()[name], ROWS / OPTIONS[name][2]
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


FLOATS = jnp.array([[3.0, 4.0], [1.0, 2.0]])
INTS = jnp.array([[3, 4], [1, 2]])
WITH_PARAMS = {
    "clip_by_tensor_norm": lambda: optaxclip.clip_by_tensor_norm(
        rules.share_of_params(0.1)
    ),
    "clip_by_global_norm": lambda: optaxclip.clip_by_global_norm(
        rules.share_of_params(0.1)
    ),
    "adaptive_grad_clip": lambda: optaxclip.adaptive_grad_clip(0.1),
    "larc": lambda: optaxclip.larc(0.1, weight_decay=0.1),
    "clippy": optaxclip.clippy,
    "constrain": lambda: optaxclip.constrain(optaxclip.clip_by_global_norm(1.0)),
}
WITH_MEMORY = {
    "carry_clipped": lambda: optaxclip.carry_clipped(
        optaxclip.clip_by_global_norm(1.0)
    ),
    "spam": optaxclip.spam,
}


@pytest.mark.parametrize("name", WITH_PARAMS)
@pytest.mark.parametrize("weights", [INTS, INTS > 1, np.asarray(INTS)])
def test_integer_weights_of_a_float_update_are_named(name, weights):
    clipper = WITH_PARAMS[name]()
    params, grads = {"w": FLOATS, "n": weights}, {"w": FLOATS, "n": FLOATS}
    text = (
        rf"^{name}: params must have a float or complex dtype for the leaf 'n', whose "
    )
    for update in (clipper.update, jax.jit(clipper.update)):
        with pytest.raises(TypeError, match=text):
            update(grads, clipper.init(params), params)


@pytest.mark.parametrize("name", WITH_MEMORY)
def test_a_float_update_without_a_memory_is_named(name):
    clipper = WITH_MEMORY[name]()
    params, grads = {"w": FLOATS, "n": INTS}, {"w": FLOATS, "n": FLOATS}
    with pytest.raises(
        ValueError, match=f"^{name}: the update of the leaf 'n' is float32"
    ):
        clipper.update(grads, clipper.init(params), params)


@pytest.mark.parametrize("name", [*WITH_PARAMS, *WITH_MEMORY])
@pytest.mark.parametrize("weights", [FLOATS, INTS])
def test_an_integer_update_passes(name, weights):
    params, grads = {"w": FLOATS, "n": weights}, {"w": FLOATS, "n": INTS}
    updates, _ = apply({**WITH_PARAMS, **WITH_MEMORY}[name](), grads, params)
    np.testing.assert_array_equal(updates["n"], INTS)
    assert updates["n"].dtype == INTS.dtype
