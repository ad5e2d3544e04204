"""The numbers of other frameworks: their tests, their documentation, and their code run
on explicit inputs (`cases.json`; `source` says which).

Cases of the classes `conformance` and `optax_defect` must come out as they stand there.
Of the classes that depend on a policy, those must that our policy agrees with: what is
measured together becomes NaN when its norm is not finite, and a limit of inf touches
nothing. All others are in `decisions.json`, with the reason, and with what we
give.
"""

from collections import namedtuple
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from tests import oracles
from tests.core.cases import (
    CASES,
    DECIDED,
    DIFFERENT,
    PER_EXAMPLE,
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
IN_PIECES = {259}


def clipper_of(case):
    args = {key: decode(value) for key, value in case["args"].items()}
    limit = args.get("max_norm")
    if case.get("max_norm_is_array"):
        limit = jnp.asarray(limit)
    options = {key: args[key] for key in ("eps",) if key in args}
    if "norm_type" in args:
        options["ord"] = args["norm_type"]
    if args.get("error_if_nonfinite"):
        options["nonfinite"] = "raise"
    by_norm = partial(optaxclip.clip_by_global_norm, **options)
    makers = {
        "global_norm": lambda: by_norm(limit),
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
            by_norm(limit),
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
    clipper, extra = clipper_of(case), {}
    if "use_norm" in case["args"]:
        extra["grad_norm"] = jnp.asarray(decode(case["args"]["use_norm"]))
    # Without jit each operation on each shape would be compiled by itself.
    jitted = case["transform"] in ("value", "cotangent_value", "drop_norm")
    update = jax.jit(clipper.update) if jitted else clipper.update
    updates, state = update(grads, clipper.init(grads), params, **extra)
    return grads, updates, state[0] if case["transform"] == "drop_norm" else state


def in_pieces(case):
    """A thousand leaves, which take long to compile: measured and shrunk by the
    functions that the clipper is made of.
    """
    grads = given(case)
    norm = optaxclip.global_norm(grads)
    new_norm = optaxclip.shrinks.hard(norm, case["args"]["max_norm"])
    return grads, optaxclip.rescale(grads, norm, new_norm), Measured(norm)


# A tree of integers alone.
@pytest.mark.filterwarnings("ignore:.*no leaf counts")
@pytest.mark.parametrize("id", named(SAME))
def test_updates_are_the_expected_ones(id):
    case = CASES[id]
    tolerances = case["rtol"], case["atol"]
    grads, updates, state = update(id)
    assert dtypes(updates) == dtypes(grads)
    if case.get("bitwise") or case["dtype"] == "int32":
        expected = case["expected"] and decode_tree(case["expected"])
        for ours, theirs, grad in zip(
            *map(jax.tree.leaves, (updates, expected or grads, grads)), strict=True
        ):
            assert oracles.same_bits(ours, jnp.asarray(theirs, grad.dtype))
    expected = decode_tree(case["expected"]) if case["expected"] is not None else None
    if expected is None:  # only that it does not raise, and what the norm is
        assert jax.tree.structure(updates) == jax.tree.structure(grads)
    elif isinstance(expected, dict) and "clipped_true_norm" in expected:
        norm = oracles.norm(jax.tree.leaves(updates))
        np.testing.assert_allclose(norm, expected["clipped_true_norm"], case["rtol"])
    elif isinstance(expected, dict) and "scale" in expected:
        scaled = jax.tree.map(lambda x: oracles.wide(x) * expected["scale"], grads)
        assert_close(updates, scaled, *tolerances)
    else:
        assert_close(updates, expected, *tolerances)
    if case["expected_norm"] is not None:
        norms = [state.norm]
        if id not in IN_PIECES:
            norms = [entry.norm for entry in state.by_name().values()]
        theirs = jax.tree.leaves(decode_tree(case["expected_norm"]))
        np.testing.assert_allclose(norms, theirs, *tolerances)


@pytest.mark.parametrize("id", named(id for id in SAME if "sgd" in CASES[id]))
def test_an_optimizer_after_the_clipper_sees_clipped_updates(id):
    case = CASES[id]
    params = given({**case, "input": case["sgd"]["params"]})
    optimizer = optax.chain(clipper_of(case), optax.sgd(case["sgd"]["lr"]))
    updates, _ = optimizer.update(given(case), optimizer.init(params), params)
    found, wanted = optax.apply_updates(params, updates), case["sgd"]["new_params"]
    assert_close(found, decode_tree(wanted), case["rtol"], case["atol"])


@pytest.mark.parametrize("id", named(SCHEDULES))
def test_limits_follow_a_schedule(id):
    case = CASES[id]
    args = case["args"]
    every, staircase = args.get("step_size", 1), args["kind"] == "step"
    schedule = optax.exponential_decay(
        args["base"], every, args["gamma"], staircase=staircase
    )
    clipper = optaxclip.clip_by_global_norm(schedule)
    grads = jnp.array([3.0, -4.0, 12.0])
    state = clipper.init(grads)
    for step, limit in zip(case["input"], case["expected"], strict=True):
        assert state.step == step
        updates, state = clipper.update(grads, state)
        np.testing.assert_allclose(state.limit, limit, case["rtol"])
        wanted = np.array([3.0, -4.0, 12.0]) * limit / 13
        np.testing.assert_allclose(updates, wanted, case["rtol"])


RAISED = {
    "ValueError": (ValueError, "max_norm"),
    "RuntimeError": (FloatingPointError, "norm of order 2.* of the updates is not fin"),
}


@pytest.mark.parametrize("id", named(RAISING))
def test_what_raises_there_raises_here(id):
    error, message = RAISED[CASES[id]["raises"]]
    with pytest.raises(error, match=message):
        update(id)


@pytest.mark.parametrize("id", named(REFUSED))
def test_wrong_arguments_are_refused(id):
    with pytest.raises(ValueError, match=REFUSED[id]["error"]):
        clipper_of(CASES[id])


@pytest.mark.parametrize("id", named(DIFFERENT))
def test_where_others_err_or_decide_otherwise_our_policy_holds(id):
    case = CASES[id]
    grads, updates, _ = update(id)
    assert dtypes(updates) == dtypes(grads)
    ours = decode_tree(DIFFERENT[id]["ours"])
    assert_close(updates, ours, case["rtol"], case["atol"])


@pytest.mark.slow
def test_a_clipped_cotangent_is_the_gradient_of_the_huber_loss():
    case = CASES[113]
    x, most = given(case), case["args"]["max"]

    def half_square(x):
        held = optaxclip.clip_cotangent(x, max_value=most)
        return sum(jnp.sum(0.5 * leaf**2) for leaf in held)

    wanted = decode_tree(case["expected_grad_of_half_square"])
    assert_close(jax.grad(half_square)(x), wanted, 1e-6, 1e-6)


def test_every_case_runs_or_has_a_reason():
    tables = [*REFUSED, *DIFFERENT, *SCHEDULES, *RAISING, *PER_EXAMPLE, *SAME]
    assert len(CASES) == 149
    assert sorted(tables) == sorted(CASES)
    # Only refused orders and limits leave cases out.
    fixed = ("conformance", "optax_defect")
    assert {id for id in DECIDED if CASES[id]["class"] in fixed} == {144, 231}


@pytest.mark.parametrize("id", named(PER_EXAMPLE))
def test_per_example_sums_are_the_expected_ones(id):
    """Where 1e-6 is added to the norm there, ours differ by less than the tolerance."""
    case = CASES[id]
    limit, args = decode(case["args"]["max_norm"]), case["args"]
    # In words: example i of eight has all gradients equal to i.
    shapes = {"a": (2, 3, 4), "b": (), "c": (6, 7)}
    grads = {}
    if isinstance(case["input"], dict):
        for name, shape in shapes.items():
            grads[name] = np.stack([np.full(shape, i, np.float32) for i in range(8)])
    else:
        grads = given(case)

    def product(params, grads):
        """Whose gradient by the parameters is that of the example."""
        pairs = zip(jax.tree.leaves(params), jax.tree.leaves(grads))
        return sum(jnp.vdot(param, grad) for param, grad in pairs)

    params = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), grads)
    clip = jax.jit(optaxclip.clipped_grad(product, limit, mean=False))
    found = clip(params, grads)
    total, clipped = found.grads, np.sum(found.factors < 1)
    divisor = 8 if args["reduce"] == "mean" else 1
    if args.get("rescale_to_unit_norm"):
        divisor = divisor * limit
    result = jax.tree.map(lambda x: (np.asarray(x) / divisor).astype(x.dtype), total)
    expected = case["expected"]
    if isinstance(expected, dict) and "every element" in expected:
        every = expected["every element"]
        expected = jax.tree.map(lambda leaf: np.full(leaf.shape, every), result)
    else:
        expected = decode_tree(expected)
    assert_close(result, expected, case["rtol"], case["atol"])
    if "num_clipped" in case:
        assert int(clipped) == case["num_clipped"]
