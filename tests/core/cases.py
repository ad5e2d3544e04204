"""Cases from other frameworks (`cases.json`), and where we decide otherwise on purpose
(`decisions.json`): the call is refused, or we give something else.
"""

import json
import pathlib

import jax
import ml_dtypes
import numpy as np
import optax
import pytest

REFERENCES = pathlib.Path(__file__).parents[1] / "references"


def read(name):
    return json.loads((REFERENCES / name).read_text())


CASES = {case["id"]: case for case in read("cases.json")}
DECISIONS = read("decisions.json")
REFUSED = {int(id): found for id, found in DECISIONS["refused"].items()}
DIFFERENT = {int(id): found for id, found in DECISIONS["different"].items()}


def of_transform(name):
    return [id for id, case in CASES.items() if case["transform"] == name]


SCHEDULES, PER_EXAMPLE = of_transform("schedule"), of_transform("per_example")
DECIDED = {*REFUSED, *DIFFERENT}
RAISING = [id for id, case in CASES.items() if "raises" in case and id not in DECIDED]
SAME = [id for id in CASES if id not in {*DECIDED, *SCHEDULES, *PER_EXAMPLE, *RAISING}]
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
    return list(map(decode, value)) if isinstance(value, list) else decode(value)


def given(case, key="input"):
    """The tree of arrays, in the dtypes of the case."""
    leaves, treedef = jax.tree.flatten(decode_tree(case[key]))
    dtypes = case["dtype"]
    if not isinstance(dtypes, list):
        dtypes = [DTYPES.get(dtypes, dtypes)] * len(leaves)
    arrays = []
    for leaf, dtype in zip(leaves, dtypes, strict=True):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
        arrays.append(jax.device_put(np.asarray(leaf).astype(dtype)))
    return treedef.unflatten(arrays)


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
            last_place = float(info.eps) * 2.0**exponent
            error = np.abs(ours.astype(np.float64) - rounded)
            assert (error <= last_place).all(), (ours, theirs)
        else:
            np.testing.assert_allclose(ours, theirs, rtol, atol)


def dtypes(tree):
    return [leaf.dtype for leaf in jax.tree.leaves(tree)]


def named(ids):
    """The cases as parameters."""
    names = {id: f"{id}-{CASES[id]['transform']}-{CASES[id]['name']}" for id in ids}
    return [pytest.param(id, id=name[:60]) for id, name in names.items()]
