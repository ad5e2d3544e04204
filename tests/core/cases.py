"""Cases from other frameworks, and our clippers for them."""

import json
import math
import pathlib

import jax
import ml_dtypes
import numpy as np
import optax
import pytest

TABLE = pathlib.Path(__file__).parents[1] / "references" / "cases.json"
CASES = {case["id"]: case for case in json.loads(TABLE.read_text())}
NAN, INF = math.nan, math.inf
# The call itself is refused, with what the message says.
REFUSED = {
    119: (
        "a negative limit, which flips the sign there",
        "max_norm must be at least 0, got -1.0",
    ),
    192: (
        "a negative limit, which counts as no limit there",
        "max_norm must be at least 0, got -1.0",
    ),
    231: (
        "a negative limit, which flips the sign in optax",
        "max_norm must be at least 0, got -1.0",
    ),
    159: (
        "no room between the bounds",
        "min_value must be at most max_value, got min_value=1.0 and max_value=-1.0",
    ),
    244: (
        "no room between the bounds",
        "min_value must be at most max_value, got min_value=1.0 and max_value=-1.0",
    ),
    144: (
        "order -inf, the smallest modulus, is no norm",
        "ord must be a number above 0",
    ),
    145: (
        "order 0, a count of elements or leaves, is no norm",
        "ord must be a number above 0",
    ),
    162: ("order 0 is no norm", "ord must be a number above 0"),
    168: ("order -1 is no norm", "ord must be a number above 0"),
    174: ("order -2 is no norm", "ord must be a number above 0"),
}
# We give something else, and this.
DIFFERENT = {
    88: (
        "an infinite norm makes NaN of all that was measured together, not of the "
        "infinite element alone",
        {"alpha": None, "gamma": [NAN, NAN, NAN]},
    ),
    201: (
        "an infinite norm makes NaN of all that was measured together, not of the "
        "infinite element alone",
        [[NAN, NAN]],
    ),
    237: (
        "an infinite norm makes NaN of all that was measured together, not of the "
        "infinite element alone",
        [[NAN, NAN], [NAN, NAN]],
    ),
    171: (
        "squares of 2e200 overflow there; here the norm is right and nothing is raised",
        [[1 / math.sqrt(10)] * 10],
    ),
    190: ("0 * inf there; zero updates stay zero", [[0.0, 0.0]]),
    193: ("squares of float16 overflow there; the norm is 600", [[0.5, 0.5, 0.5, 0.5]]),
    198: ("inf / inf there; a limit of inf touches nothing", [[3.0, 4.0]]),
    199: ("0 / 0 there; zero updates stay zero", [[0.0, 0.0]]),
    272: ("inf / inf there; a limit of inf touches nothing", [[3.0, 4.0]]),
}
SCHEDULES = [id for id, case in CASES.items() if case["transform"] == "schedule"]
PER_EXAMPLE = [id for id, case in CASES.items() if case["transform"] == "per_example"]
RAISING = [
    id
    for id, case in CASES.items()
    if "raises" in case and id not in {**REFUSED, **DIFFERENT}
]
SAME = [
    id
    for id in CASES
    if id
    not in {**REFUSED, **DIFFERENT, **dict.fromkeys(SCHEDULES + RAISING + PER_EXAMPLE)}
]
# Inputs that are given in words.
WORDS = {
    "arange(1,101).reshape(10,10)": [np.arange(1, 101).reshape(10, 10)],
    "ones(10)/1000": [np.ones(10) / 1000],
    "1000 x ones(16,16)": [np.ones((16, 16))] * 1000,
    "linear_schedule(1,0.5,10)": optax.linear_schedule(1, 0.5, 10),
}
# Whole numbers of a framework that computes with floats. Integer leaves are no
# gradients here and pass through, so that they are given as floats.
DTYPES = {"int32 input -> float32 out": "float32"}


def decode(value):
    """Numbers, words and arrays; lists are arrays."""
    if isinstance(value, dict) and set(value) == {"re", "im"}:
        return complex(value["re"], value["im"])
    if isinstance(value, dict):
        return {key: decode(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return np.asarray([decode(inner) for inner in value])
    if value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    return WORDS[value] if isinstance(value, str) else value


def decode_tree(value):
    """A list at the top is a list of leaves."""
    return (
        [decode(leaf) for leaf in value] if isinstance(value, list) else decode(value)
    )


def given(case, key="input"):
    """The tree of arrays, in the dtypes of the case."""
    tree = decode_tree(case[key])
    leaves, treedef = jax.tree.flatten(tree)
    dtypes = (
        case["dtype"]
        if isinstance(case["dtype"], list)
        else [DTYPES.get(case["dtype"], case["dtype"])] * len(leaves)
    )
    return jax.tree.unflatten(
        treedef,
        [
            jax.device_put(
                np.asarray(leaf).astype(jax.dtypes.canonicalize_dtype(dtype))
            )
            for leaf, dtype in zip(leaves, dtypes, strict=True)
        ],
    )


def assert_close(actual, expected, rtol, atol):
    """Within the case's tolerances, or one unit in the last place of 16 bits, and of
    the same structure.
    """
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(expected)):
        ours, theirs = np.asarray(ours), np.asarray(theirs)
        assert ours.shape == theirs.shape
        if ours.dtype.itemsize == 2:
            rounded = theirs.astype(ours.dtype).astype(np.float64)
            info = ml_dtypes.finfo(ours.dtype)
            exponent = np.frexp(np.maximum(np.abs(rounded), float(info.tiny)))[1] - 1
            assert (
                np.abs(ours.astype(np.float64) - rounded)
                <= float(info.eps) * 2.0**exponent
            ).all(), (ours, theirs)
        else:
            np.testing.assert_allclose(ours, theirs, rtol, atol)


def dtypes(tree):
    return [leaf.dtype for leaf in jax.tree.leaves(tree)]


def named(ids):
    return [
        pytest.param(id, id=f"{id}-{CASES[id]['transform']}-{CASES[id]['name']}"[:60])
        for id in ids
    ]
