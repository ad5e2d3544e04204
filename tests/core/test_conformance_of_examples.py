"""Per-example cases of other frameworks, and which cases are left out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip
from tests.core.cases import (
    CASES,
    DIFFERENT,
    PER_EXAMPLE,
    RAISING,
    REFUSED,
    SAME,
    SCHEDULES,
    assert_close,
    decode,
    decode_tree,
    given,
    named,
)


def test_every_case_runs_or_has_a_reason():
    tables = [*REFUSED, *DIFFERENT, *SCHEDULES, *RAISING, *PER_EXAMPLE, *SAME]
    assert len(CASES) == 149
    assert sorted(tables) == sorted(CASES)


def test_only_refused_orders_and_limits_leave_cases_out():
    assert {
        id
        for id in (*REFUSED, *DIFFERENT)
        if CASES[id]["class"] in ("conformance", "optax_defect")
    } == {144, 231}


@pytest.mark.parametrize("id", named(PER_EXAMPLE))
def test_per_example_sums_are_the_expected_ones(id):
    """Where 1e-6 is added to the norm there, ours differ by less than the tolerance."""
    case = CASES[id]
    args = case["args"] | {"max_norm": decode(case["args"]["max_norm"])}
    if isinstance(
        case["input"], dict
    ):  # in words: example i of eight has all gradients equal to i
        grads = {
            name: jnp.asarray(
                np.arange(8.0, dtype=np.float32).reshape(8, *[1] * len(shape))
                * np.ones((1, *shape), np.float32)
            )
            for name, shape in {"a": (2, 3, 4), "b": (), "c": (6, 7)}.items()
        }
    else:
        grads = given(case)
    clip = optaxclip.per_example.per_example_global_norm_clip
    total, clipped = jax.jit(lambda grads: clip(grads, args["max_norm"]))(grads)
    divisor = (8 if args["reduce"] == "mean" else 1) * (
        args["max_norm"] if args.get("rescale_to_unit_norm") else 1
    )
    result = jax.tree.map(
        lambda leaf: (np.asarray(leaf) / divisor).astype(leaf.dtype), total
    )
    every = (
        case["expected"].get("every element")
        if isinstance(case["expected"], dict)
        else None
    )
    expected = (
        decode_tree(case["expected"])
        if every is None
        else jax.tree.map(lambda leaf: np.full(leaf.shape, every), result)
    )
    assert_close(result, expected, case["rtol"], case["atol"])
    if "num_clipped" in case:
        assert int(clipped) == case["num_clipped"]
