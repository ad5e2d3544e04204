"""The numbers of other frameworks: their tests, their documentation, and their code run
on explicit inputs (`cases.json`; `source` says which).

Cases of the classes `conformance` and `optax_defect` must come out as they stand there.
Of the classes that depend on a policy, those must that our policy agrees with: what is
measured together becomes NaN when its norm is not finite, and a limit of inf touches
nothing. All others are in the tables below, with the reason, and with what we give.
"""

import json
import math
import pathlib
from collections import namedtuple
from functools import cache

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import optaxclip
from tests import oracles

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

Measured = namedtuple("Measured", "norm")

# Inputs that are given in words.
WORDS = {
    "arange(1,101).reshape(10,10)": [np.arange(1, 101).reshape(10, 10)],
    "ones(10)/1000": [np.ones(10) / 1000],
    "1000 x ones(16,16)": [np.ones((16, 16))] * 1000,
    "linear_schedule(1,0.5,10)": optax.linear_schedule(1, 0.5, 10),
}
# A thousand leaves, which take long to compile: measured and shrunk by the functions
# that the clipper is made of.
IN_PIECES = {259}
# Without jit each operation on each shape would be compiled by itself.
OP_BY_OP = ("value", "cotangent_value", "drop_norm")
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


def clipper_of(case):
    args = {key: decode(value) for key, value in case["args"].items()}
    limit = (
        jnp.asarray(args["max_norm"])
        if case.get("max_norm_is_array")
        else args.get("max_norm")
    )
    options = {key: args[key] for key in ("eps",) if key in args} | (
        {"ord": args["norm_type"]} if "norm_type" in args else {}
    )
    if args.get("error_if_nonfinite"):
        options["nonfinite"] = "raise"
    makers = {
        "global_norm": lambda: optaxclip.clip_by_global_norm(limit, **options),
        "tensor_norm": lambda: optaxclip.clip_by_tensor_norm(limit, **options),
        "average_norm": lambda: optaxclip.clip_by_average_norm(limit, **options),
        "block_rms": lambda: optaxclip.clip_by_block_rms(args["threshold"]),
        "axis_norm": lambda: optaxclip.clip_by_unitwise_norm(
            limit, axis=tuple(args["axes"].tolist()), **options
        ),
        "group_norm": lambda: optaxclip.clip_by_group_norm(
            limit, {label: label for label in case["input"]}, **options
        ),
        "agc": lambda: optaxclip.adaptive_grad_clip(args["clipping"], args["eps"]),
        "value": lambda: optaxclip.clip_by_value(args["max"], args["min"]),
        "drop_norm": lambda: optax.chain(
            optaxclip.clip_by_global_norm(
                args["drop_norm"], shrink=optaxclip.shrinks.drop
            ),
            optaxclip.clip_by_global_norm(limit, **options),
        ),
        "cotangent_value": lambda: optax.stateless(
            lambda grads, _: optaxclip.clip_cotangent(grads, max_value=args["max"])
        ),
    }
    clipper = makers[case["transform"]]()
    return optax.masked(clipper, case["need_clip"]) if "need_clip" in case else clipper


@cache
def update(id):
    """(input, output, state) of one step."""
    case = CASES[id]
    with jax.enable_x64(case["dtype"] == "float64"):
        return in_pieces(case) if id in IN_PIECES else step(case)


def step(case):
    grads = given(case)
    params = given(case, "params") if "params" in case else None
    clipper = clipper_of(case)
    measured_elsewhere = (
        {"grad_norm": jnp.asarray(decode(case["args"]["use_norm"]))}
        if "use_norm" in case["args"]
        else {}
    )
    update = (
        jax.jit(clipper.update) if case["transform"] in OP_BY_OP else clipper.update
    )
    updates, state = update(grads, clipper.init(grads), params, **measured_elsewhere)
    return grads, updates, state[0] if case["transform"] == "drop_norm" else state


def in_pieces(case):
    grads = given(case)
    norm = optaxclip.global_norm(grads)
    return (
        grads,
        optaxclip.rescale(
            grads, norm, optaxclip.shrinks.hard(norm, case["args"]["max_norm"])
        ),
        Measured(norm),
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


# A tree of integers alone.
@pytest.mark.filterwarnings("ignore:.*nothing is clipped")
@pytest.mark.parametrize("id", named(SAME))
def test_updates_are_the_expected_ones(id):
    case = CASES[id]
    grads, updates, _ = update(id)
    assert dtypes(updates) == dtypes(grads)
    expected = decode_tree(case["expected"]) if case["expected"] is not None else None
    if expected is None:  # only that it does not raise, and what the norm is
        assert jax.tree.structure(updates) == jax.tree.structure(grads)
    elif isinstance(expected, dict) and "clipped_true_norm" in expected:
        np.testing.assert_allclose(
            oracles.norm(jax.tree.leaves(updates)),
            expected["clipped_true_norm"],
            case["rtol"],
        )
    elif isinstance(expected, dict) and "scale" in expected:
        assert_close(
            updates,
            jax.tree.map(lambda x: oracles.wide(x) * expected["scale"], grads),
            case["rtol"],
            case["atol"],
        )
    else:
        assert_close(updates, expected, case["rtol"], case["atol"])


@pytest.mark.parametrize(
    "id", named(id for id in SAME if CASES[id]["expected_norm"] is not None)
)
def test_norms_are_the_expected_ones(id):
    _, _, state = update(id)
    norms = [state.norm]
    if id not in IN_PIECES:
        norms = [entry.norm for entry in state.by_name().values()]
    for ours, theirs in zip(
        norms,
        jax.tree.leaves(decode_tree(CASES[id]["expected_norm"])),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, CASES[id]["rtol"], CASES[id]["atol"])


@pytest.mark.parametrize("id", named(id for id in SAME if CASES[id].get("bitwise")))
def test_short_updates_keep_their_bits(id):
    grads, updates, _ = update(id)
    assert all(map(oracles.same_bits, jax.tree.leaves(updates), jax.tree.leaves(grads)))


@pytest.mark.filterwarnings("ignore:.*nothing is clipped")
@pytest.mark.parametrize(
    "id", named(id for id in SAME if CASES[id]["dtype"] == "int32")
)
def test_integer_leaves_stay_integers(id):
    grads, updates, _ = update(id)
    expected = decode_tree(CASES[id]["expected"]) or grads
    assert all(
        oracles.same_bits(ours, jnp.asarray(theirs, "int32"))
        for ours, theirs in zip(
            jax.tree.leaves(updates), jax.tree.leaves(expected), strict=True
        )
    )


@pytest.mark.parametrize("id", named(id for id in SAME if "sgd" in CASES[id]))
def test_an_optimizer_after_the_clipper_sees_clipped_updates(id):
    case = CASES[id]
    params = given({**case, "input": case["sgd"]["params"]})
    optimizer = optax.chain(clipper_of(case), optax.sgd(case["sgd"]["lr"]))
    updates, _ = optimizer.update(given(case), optimizer.init(params), params)
    assert_close(
        optax.apply_updates(params, updates),
        decode_tree(case["sgd"]["new_params"]),
        case["rtol"],
        case["atol"],
    )


@pytest.mark.parametrize("id", named(SCHEDULES))
def test_limits_follow_a_schedule(id):
    case = CASES[id]
    args = case["args"]
    every = args.get("step_size", 1)
    clipper = optaxclip.clip_by_global_norm(
        optax.exponential_decay(
            args["base"], every, args["gamma"], staircase=args["kind"] == "step"
        )
    )
    grads = jnp.array([3.0, -4.0, 12.0])
    state = clipper.init(grads)
    for step, limit in zip(case["input"], case["expected"], strict=True):
        assert state.step == step
        updates, state = clipper.update(grads, state)
        np.testing.assert_allclose(state.limit, limit, case["rtol"])
        np.testing.assert_allclose(
            updates, np.array([3.0, -4.0, 12.0]) * limit / 13, case["rtol"]
        )


@pytest.mark.parametrize("id", named(RAISING))
def test_what_raises_there_raises_here(id):
    case = CASES[id]
    error, message = {
        "ValueError": (ValueError, "max_norm"),
        "RuntimeError": (
            FloatingPointError,
            "norm of order 2.* of the updates is not finite",
        ),
    }[case["raises"]]
    with pytest.raises(error, match=message):
        update(id)


@pytest.mark.parametrize("id", named(REFUSED))
def test_wrong_arguments_are_refused(id):
    with pytest.raises(ValueError, match=REFUSED[id][1]):
        clipper_of(CASES[id])


@pytest.mark.parametrize("id", named(DIFFERENT))
def test_where_others_err_or_decide_otherwise_our_policy_holds(id):
    case = CASES[id]
    expected = jax.tree.map(
        np.asarray,
        DIFFERENT[id][1],
        is_leaf=lambda x: isinstance(x, list) and not isinstance(x[0], list),
    )
    grads, updates, _ = update(id)
    assert dtypes(updates) == dtypes(grads)
    assert_close(updates, expected, case["rtol"], case["atol"])


@pytest.mark.slow
def test_a_clipped_cotangent_is_the_gradient_of_the_huber_loss():
    case = CASES[113]
    x = given(case)
    gradient = jax.grad(
        lambda x: sum(
            jnp.sum(0.5 * leaf**2)
            for leaf in optaxclip.clip_cotangent(x, max_value=case["args"]["max"])
        )
    )(x)
    assert_close(
        gradient, decode_tree(case["expected_grad_of_half_square"]), 1e-6, 1e-6
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
