"""The numbers of other frameworks: their tests, their documentation, and their code run
on explicit inputs (`cases.json`; `source` says which).

Cases of the classes `conformance` and `optax_defect` must come out as they stand there.
Of the classes that depend on a policy, those must that our policy agrees with: what is
measured together becomes NaN when its norm is not finite, and a limit of inf touches
nothing. All others are in the tables of `cases.py`, with the reason, and with what we
give.
"""

from collections import namedtuple
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from tests import oracles
from tests.core.cases import (
    CASES,
    DIFFERENT,
    RAISING,
    REFUSED,
    SAME,
    SCHEDULES,
    assert_close,
    decode,
    decode_tree,
    dtypes,
    given,
    named,
)

Measured = namedtuple("Measured", "norm")
# A thousand leaves, which take long to compile: measured and shrunk by the functions
# that the clipper is made of.
IN_PIECES = {259}
# Without jit each operation on each shape would be compiled by itself.
OP_BY_OP = ("value", "cotangent_value", "drop_norm")


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
