"""The drop-in functions beside the originals: torch is run here, and torch 2.13 was run
by `references/record_torch.py`, TensorFlow 2.21 and Keras 3.15 by
`references/record_tensorflow.py`.

Where the tables in the modules say "the same", the numbers are the same to 8 eps:
`rescale` takes 3 off on purpose, the rest is rounding here and there. Every other row
has a test that shows both sides.
"""

import itertools
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import checkify

import optaxclip
from optaxclip.dropin import keras, tensorflow_style, torch_style

NAN, INF = math.nan, math.inf
ORDERS = [0.5, 1, 1.5, 2.0, 3, 4, INF, "inf", "2"]


def tree(seed=0, dtype=np.float32, size=3.0):
    random = np.random.default_rng(seed)
    return {
        name: (size * random.standard_normal(shape)).astype(dtype)
        for name, shape in {"a": (2, 3), "b": (4,), "c": ()}.items()
    }


def close(ours, theirs, dtype=np.float32):
    np.testing.assert_allclose(
        np.asarray(ours, np.float64),
        np.asarray(theirs, np.float64),
        8 * float(jnp.finfo(dtype).eps),
        equal_nan=True,
    )


# torch


def in_torch(torch, grads):
    """Parameters with these gradients; None makes one without."""
    params = [
        torch.zeros(
            np.shape(grad) if grad is not None else 1,
            dtype=torch.tensor(grad).dtype if grad is not None else None,
        )
        for grad in grads
    ]
    for param, grad in zip(params, grads):
        param.grad = None if grad is None else torch.tensor(grad)
    return params


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


@pytest.mark.parametrize("max_norm", [0.0, 0.01, 2.0, 1e4, INF])
@pytest.mark.parametrize("norm_type", ORDERS)
def test_clip_grad_norm_is_that_of_torch(torch, norm_type, max_norm):
    grads = [*tree().values(), None]
    params = in_torch(torch, grads)
    theirs = torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)
    clipped, total_norm = torch_style.clip_grad_norm(grads, max_norm, norm_type)
    close(total_norm, theirs)
    for ours, param in zip(clipped[:-1], params):
        close(ours, param.grad)
    assert clipped[-1] is None and params[-1].grad is None


@pytest.mark.parametrize("norm_type", ORDERS)
def test_get_total_norm_is_that_of_torch(torch, norm_type):
    grads = list(tree(1).values())
    close(
        torch_style.get_total_norm(grads, norm_type),
        torch.nn.utils.get_total_norm(
            [torch.tensor(grad) for grad in grads], norm_type
        ),
    )


@pytest.mark.parametrize(
    ("max_norm", "total_norm"),
    [(2.0, 5.0), (2.0, 1.0), (0.0, 1.0), (2.0, 0.0), (2.0, NAN)],
)
def test_clip_grads_with_norm_is_that_of_torch(torch, max_norm, total_norm):
    params = in_torch(torch, tree().values())
    torch.nn.utils.clip_grads_with_norm_(params, max_norm, torch.tensor(total_norm))
    clipped = torch_style.clip_grads_with_norm(tree(), max_norm, total_norm)
    for ours, param in zip(clipped.values(), params):
        close(ours, param.grad)


@pytest.mark.parametrize("clip_value", [0, 0.5, 2, INF])
def test_clip_grad_value_is_that_of_torch(torch, clip_value):
    grads = [*tree().values(), np.array([NAN, INF, -INF], np.float32), None]
    params = in_torch(torch, grads)
    torch.nn.utils.clip_grad_value_(params, clip_value)
    for ours, param in zip(torch_style.clip_grad_value(grads, clip_value)[:-1], params):
        np.testing.assert_array_equal(ours, param.grad)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_torch_in_other_precisions(torch, dtype):
    grads = [np.asarray(grad, np.float64) for grad in tree().values()]
    params = in_torch(torch, grads)
    for param in params:
        rounded = param.grad.to(getattr(torch, dtype))
        param.data, param.grad = param.data.to(rounded.dtype), rounded
    with jax.enable_x64(dtype == "float64"):
        clipped, total_norm = torch_style.clip_grad_norm(
            [jnp.asarray(grad, dtype) for grad in grads], 2.0
        )
        close(total_norm, torch.nn.utils.clip_grad_norm_(params, 2.0).double(), dtype)
        for ours, param in zip(clipped, params):
            assert ours.dtype == dtype
            close(ours, param.grad.double(), dtype)


def test_a_single_array_is_a_tree(torch):
    param = in_torch(torch, [tree()["a"]])
    clipped, total_norm = torch_style.clip_grad_norm(tree()["a"], 1.0)
    close(total_norm, torch.nn.utils.clip_grad_norm_(param[0], 1.0))
    close(clipped, param[0].grad)


@pytest.mark.parametrize(
    "grads",
    [[], [None], [np.zeros((0, 2), np.float32)]],
    ids=["empty", "None", "no elements"],
)
def test_nothing_has_norm_zero_in_torch_and_here(torch, grads):
    assert (
        float(torch_style.clip_grad_norm(grads, 1.0)[1])
        == float(torch.nn.utils.clip_grad_norm_(in_torch(torch, grads), 1.0))
        == 0
    )


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_error_if_nonfinite_raises_as_torch_does(torch, bad):
    grads = [np.array([1.0, bad], np.float32), np.ones(3, np.float32)]
    with pytest.raises(RuntimeError, match=r"total norm of order 2.0 .* is non-finite"):
        torch.nn.utils.clip_grad_norm_(
            in_torch(torch, grads), 1.0, error_if_nonfinite=True
        )
    with pytest.raises(
        RuntimeError,
        match=(
            r"clip_grad_norm: the norm of order 2.0 of the updates is not finite. '0': "
            r"1 of 2 values are NaN or inf. With error_if_nonfinite=False"
        ),
    ):
        torch_style.clip_grad_norm(grads, 1.0, error_if_nonfinite=True)
    with pytest.raises(
        RuntimeError,
        match="get_total_norm: the norm of order inf of the updates is not finite",
    ):
        torch_style.get_total_norm(grads, INF, error_if_nonfinite=True)


def test_error_if_nonfinite_is_a_check_under_jit():
    checked = checkify.checkify(
        jax.jit(
            lambda grads: torch_style.clip_grad_norm(
                grads, 1.0, error_if_nonfinite=True
            )
        )
    )
    checked(jnp.ones(2))[0].throw()
    with pytest.raises(
        checkify.JaxRuntimeError,
        match=r"the norm of order 2.0 of the updates is not finite",
    ):
        checked(jnp.array([1.0, NAN]))[0].throw()


def test_inf_makes_all_nan_where_torch_makes_zeros(torch):
    grads = [np.array([1.0, INF], np.float32), np.ones(2, np.float32)]
    params = in_torch(torch, grads)
    torch.nn.utils.clip_grad_norm_(params, 1.0)
    np.testing.assert_array_equal([*params[0].grad, *params[1].grad], [0, NAN, 0, 0])
    clipped, total_norm = torch_style.clip_grad_norm(grads, 1.0)
    assert np.isnan(clipped).all() and total_norm == INF


def test_without_a_limit_nothing_changes_where_torch_makes_nan(torch):
    grads = [np.array([1.0, INF], np.float32)]
    params = in_torch(torch, grads)
    torch.nn.utils.clip_grad_norm_(params, INF)
    assert params[0].grad.isnan().all()
    np.testing.assert_array_equal(torch_style.clip_grad_norm(grads, INF)[0], grads)


def test_large_gradients_are_clipped_where_torch_makes_zeros(torch):
    grads = [np.full(2, 1e20, np.float32)]
    params = in_torch(torch, grads)
    assert (
        torch.nn.utils.clip_grad_norm_(params, 1.0).isinf() and not params[0].grad.any()
    )
    clipped, total_norm = torch_style.clip_grad_norm(grads, 1.0)
    close(clipped, [np.full(2, 1 / math.sqrt(2))])
    close(total_norm, math.sqrt(2) * 1e20)


REFERENCES = Path(__file__).parents[1] / "references"
TORCH = json.loads((REFERENCES / "torch.json").read_text())
TORCH_ORDERS = sorted({float(case["norm_type"]) for case in TORCH["cases"]})


def tolerance(order):
    """In eps: a sum of a few powers is right to 8, its root of an order below 1 is as
    much less right.
    """
    return 8 / min(1.0, abs(order) or 1.0)


def tolerance_of_torch(order, norm):
    """Torch rounds p and 1/p and leaves the numbers as large as they are, so that
    (x^p)^(1/p) is x^(1 + eps).
    """
    size = abs(math.log(norm)) if 0 < norm < INF else 0.0
    return tolerance(order) + size


def torch_cases(order):
    """The recorded cases of an order: (case, its dtype, its gradients)."""
    for case in TORCH["cases"]:
        if float(case["norm_type"]) == order:
            recorded = TORCH["trees"][case["tree"]]
            grads = [
                np.asarray(np.array(leaf, float), recorded["dtype"])
                for leaf in recorded["leaves"]
            ]
            yield case, np.finfo(recorded["dtype"]), grads


def torch_norm(grads, order):
    """The norm by its equation in float64; for order 0 how many tensors are not 0."""
    if order == 0:
        return float(sum(np.any(grad != 0) for grad in grads))
    sizes = np.abs(np.concatenate([grad.astype(float) for grad in grads]))
    if math.isinf(order) or np.isnan(sizes).any():
        return float(np.max(sizes) if order > 0 else np.min(sizes))
    # The powers of 2e200 are beyond float64, so they are those of a share.
    usual = sizes[np.isfinite(sizes) & (sizes > 0)]
    unit = np.max(usual, initial=0) if order > 0 else np.min(usual, initial=INF)
    unit = unit if usual.size else 1.0
    with np.errstate(divide="ignore"):
        return float(unit * np.sum((sizes / unit) ** order) ** (1 / order))


def torch_clipped(grads, norm, max_norm):
    """What `clip_grad_norm` of this module promises of a norm."""
    if max_norm == INF:
        return grads
    if not math.isfinite(norm):
        return [np.full(grad.shape, NAN) for grad in grads]
    factor = min(1.0, max_norm / (norm + 1e-6))
    with np.errstate(invalid="ignore"):
        return [grad.astype(float) * factor for grad in grads]


def norm_is_right_in_torch(case, norm):
    """No power of an element has left the range of the dtype there."""
    return np.isclose(float(case["norm"]), norm, 1e-4, 0, equal_nan=True)


def factor_is_right_in_torch(case, info, norm):
    """It is not subnormal there, which would leave it a few bits."""
    return not 0 < float(case["max_norm"]) / (norm + 1e-6) < info.tiny


@pytest.mark.parametrize("order", TORCH_ORDERS)
@pytest.mark.slow
def test_every_norm_type_has_the_numbers_of_torch(order):
    with jax.enable_x64(True):
        for case, info, grads in torch_cases(order):
            norm, max_norm = torch_norm(grads, order), float(case["max_norm"])
            with np.errstate(over="ignore"):
                norm = float(info.dtype.type(norm))
            clipped, total_norm = torch_style.clip_grad_norm(grads, max_norm, order)
            assert total_norm.dtype == info.dtype
            close_to = {
                "rtol": tolerance(order) * info.eps,
                "atol": float(info.tiny),  # what is smaller, hardware flushes
                "err_msg": str(case),
            }
            np.testing.assert_allclose(total_norm, norm, **close_to)
            wanted = torch_clipped(grads, norm, max_norm)
            for ours, promised in zip(clipped, wanted, strict=True):
                np.testing.assert_allclose(ours, promised, **close_to)
            if not norm_is_right_in_torch(case, norm):
                continue
            close_to["rtol"] = tolerance_of_torch(order, norm) * info.eps
            np.testing.assert_allclose(total_norm, float(case["norm"]), **close_to)
            if not case["raises"] and factor_is_right_in_torch(case, info, norm):
                for ours, theirs in zip(clipped, case["clipped"], strict=True):
                    np.testing.assert_allclose(
                        ours, np.array(theirs, float), **close_to
                    )


@pytest.mark.parametrize("order", TORCH_ORDERS)
@pytest.mark.slow
def test_error_if_nonfinite_raises_where_torch_does(order):
    with jax.enable_x64(True):
        for case, _, grads in torch_cases(order):
            norm = torch_norm(grads, order)
            if not norm_is_right_in_torch(case, norm):
                assert math.isfinite(norm)
                torch_style.clip_grad_norm(grads, 1.0, order, True)
            elif case["raises"]:
                with pytest.raises(
                    RuntimeError, match=f"the norm of order {order} of the updates is"
                ):
                    torch_style.get_total_norm(grads, order, True)
            else:
                torch_style.get_total_norm(grads, order, True)


def test_only_powers_beyond_the_range_differ_from_torch():
    different = {
        (case["tree"].partition(" of")[0], order)
        for order in TORCH_ORDERS
        for case, _, grads in torch_cases(order)
        if not norm_is_right_in_torch(case, torch_norm(grads, order))
    }
    everywhere = ("tiny", "huge", "tiny and huge", "2e+200, 10", "-2e+200, 10")
    beside_zeros = ("2e+200, 1", "-2e+200, 1")  # where norm_type < 0 gives 0
    assert different == {
        *itertools.product(everywhere, (-3.5, -2.0, 2.0, 3.5)),
        *itertools.product(beside_zeros, (2.0, 3.5)),
    }


@pytest.mark.parametrize("order", TORCH_ORDERS)
def test_the_record_is_what_torch_computes(torch, order):
    for case, info, grads in torch_cases(order):
        params = in_torch(torch, grads)
        norm = torch.nn.utils.clip_grad_norm_(params, float(case["max_norm"]), order)
        rtol = tolerance_of_torch(order, float(case["norm"])) * info.eps
        np.testing.assert_allclose(norm, float(case["norm"]), rtol)
        for param, recorded in zip(params, case["clipped"], strict=True):
            np.testing.assert_allclose(param.grad, np.array(recorded, float), rtol)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["-inf", "-2", "0", -1])
def test_norm_types_up_to_0_run_under_jit_and_know_no_empty_tree(order):
    grads = {"a": jnp.array([3.0, -4.0]), "b": None, "c": jnp.array([5.0 + 12.0j])}
    sizes = [np.array([3.0, 4.0]), np.array([13.0])]
    norm = torch_norm(sizes, float(order))
    for run in (
        torch_style.clip_grad_norm,
        jax.jit(torch_style.clip_grad_norm, static_argnums=2),
    ):
        clipped, total_norm = run(grads, 0.5, order)
        close(total_norm, norm)
        close(clipped["a"], np.array([3.0, -4.0]) * 0.5 / (norm + 1e-6))
        assert clipped["b"] is None and clipped["c"].dtype == "complex64"
    for nothing in ([], [None], {"i": jnp.arange(3)}, [jnp.zeros((0, 2))]):
        assert torch_style.get_total_norm(nothing, order) == 0


@pytest.mark.parametrize("order", [-INF, -2, -1, 0])
@pytest.mark.parametrize("grads", [[3.0, -4.0], [0.0, 1.0], [1e-30, 1e30]])
def test_norm_types_up_to_0_count_as_constants_in_derivatives(grads, order):
    grads = jnp.array(grads)
    factor = 0.25 / (torch_norm([np.asarray(grads)], order) + 1e-6)
    slope = jax.grad(lambda x: jnp.sum(torch_style.clip_grad_norm(x, 0.25, order)[0]))(
        grads
    )
    np.testing.assert_allclose(slope, np.full(2, min(1.0, factor)), 1e-5)


@pytest.mark.parametrize("norm_type", [NAN, "abc", "rms", None, True])
def test_orders_that_are_no_number_are_refused(norm_type):
    for function in (
        torch_style.get_total_norm,
        lambda grads, order: torch_style.clip_grad_norm(grads, 1.0, order),
    ):
        with pytest.raises(
            ValueError,
            match=r"norm_type must be a number, or a text of one such as \"inf\", got",
        ):
            function(tree(), norm_type)


BAD = [
    (-1.0, ValueError, "must be at least 0, got -1.0"),
    (NAN, ValueError, "must not be NaN"),
    ("1", TypeError, "must be a real number, got '1'"),
    (None, TypeError, "got None"),
]
LIMITS = {
    "clip_grad_norm: max_norm": lambda limit: torch_style.clip_grad_norm(tree(), limit),
    "clip_grads_with_norm: max_norm": lambda limit: torch_style.clip_grads_with_norm(
        tree(), limit, 1.0
    ),
    "clip_grad_value: clip_value": lambda limit: torch_style.clip_grad_value(
        tree(), limit
    ),
    "clip_by_norm: clip_norm": lambda limit: tensorflow_style.clip_by_norm(
        tree(), limit
    ),
    "clip_by_average_norm: clip_norm": lambda limit: (
        tensorflow_style.clip_by_average_norm(tree(), limit)
    ),
    "clip_by_global_norm: clip_norm": lambda limit: (
        tensorflow_style.clip_by_global_norm(tree(), limit)
    ),
}


@pytest.mark.parametrize(
    ("limit", "error", "text"), BAD, ids=[str(limit) for limit, *_ in BAD]
)
@pytest.mark.parametrize("argument", LIMITS)
def test_bad_limits_are_named(argument, limit, error, text):
    with pytest.raises(
        error,
        match=f"{argument} {text}"
        if text[:3] != "got"
        else f"{argument} must be a real number, {text}",
    ):
        LIMITS[argument](limit)


def test_a_bound_that_is_no_scalar_is_refused():
    with pytest.raises(
        ValueError,
        match=(
            r"clip_grad_value: clip_value must be a scalar, got an array of shape "
            r"\(3,\)"
        ),
    ):
        torch_style.clip_grad_value(jnp.ones(3), jnp.ones(3))
    with pytest.raises(
        ValueError,
        match="clip_grads_with_norm: total_norm must be a scalar, got an array",
    ):
        torch_style.clip_grads_with_norm(jnp.ones(3), 1.0, jnp.ones(2))


# TensorFlow and Keras

RECORDED = json.loads((REFERENCES / "tensorflow.json").read_text())["cases"]
FUNCTIONS = {
    "clip_by_value": tensorflow_style.clip_by_value,
    "clip_by_norm": tensorflow_style.clip_by_norm,
    "clip_by_average_norm": tensorflow_style.clip_by_average_norm,
    "clip_by_global_norm": tensorflow_style.clip_by_global_norm,
    "global_norm": tensorflow_style.global_norm,
    "keras": lambda grads, settings: optaxclip_of_keras(grads, **settings),
}


def optaxclip_of_keras(grads, **settings):
    clipper = keras.clip_gradients(**settings)
    return clipper.update(grads, clipper.init(grads))[0]


def decode(x):
    if isinstance(x, dict) and "dtype" in x:
        return (
            np.asarray(x["values"], float).astype(x["dtype"])
            if "values" in x
            else np.asarray(x["real"], x["dtype"])
            + 1j * np.asarray(x["imag"], x["dtype"])
        )
    if isinstance(x, dict):
        return {key: decode(value) for key, value in x.items()}
    return (
        [decode(value) for value in x]
        if isinstance(x, list)
        else float(x)
        if x in ("nan", "inf")
        else x
    )


def arrays(x):
    return [leaf for leaf in jax.tree.leaves(x) if isinstance(leaf, np.ndarray)]


def limit_of(case):
    """The limit of a norm or of Keras; None where there are two bounds or none."""
    limit = decode(case["args"])[1] if len(case["args"]) == 2 else None
    return (
        next(iter(limit.values()), None)
        if isinstance(limit, dict)
        else limit
        if isinstance(limit, float)
        else None
    )


def difference(case):
    """Which row of the tables says that we differ; None where we do not."""
    function, limit, inputs = (
        case["function"],
        limit_of(case),
        arrays(decode(case["args"][0])),
    )
    if "error" in case and function.endswith("norm") and "axes" not in case["options"]:
        return "refused there"
    if function == "clip_by_value":
        lower, upper = decode(case["args"])[1:]
        return (
            "no room between the bounds"
            if np.ndim(lower) == 0 and lower > upper
            else None
        )
    if limit is not None and (
        math.isnan(limit) or limit < 0 or (limit == 0 and function == "keras")
    ):
        return "limit refused here"
    if limit == INF:
        return None if "clipvalue" in str(case["args"][1]) else "limit inf"
    if function in ("clip_by_norm", "clip_by_average_norm") or "'clipnorm'" in str(
        case["args"][1:]
    ):
        if any(np.isinf(x).any() for x in inputs):
            return "inf in one tensor"
        if limit == 0 and not np.any(inputs[0]):
            return "0 / 0 there"
    if any(
        np.isfinite(x).all()
        and float(np.max(np.abs(x), initial=0))
        > math.sqrt(float(np.finfo(x.dtype).max))
        for x in inputs
        if x.dtype.kind == "f"
    ):
        return "overflow there"
    return None


DIFFERENT = [case for case in RECORDED if difference(case)]
SAME = [case for case in RECORDED if not difference(case)]


def run(case):
    with jax.enable_x64("float64" in json.dumps(case)):
        return FUNCTIONS[case["function"]](
            *decode(case["args"]), **decode(case["options"])
        )


def name(case):
    return f"{case['function']}-{limit_of(case)}"


@pytest.mark.parametrize("case", SAME, ids=name)
def test_numbers_are_those_of_tensorflow(case):
    if "error" in case:
        with pytest.raises((TypeError, ValueError)):
            run(case)
        return
    ours, theirs = run(case), decode(case["output"])
    is_none = {"is_leaf": lambda x: x is None}
    assert jax.tree.structure(
        ours if not isinstance(ours, tuple) else list(ours), **is_none
    ) == jax.tree.structure(theirs, **is_none)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs)):
        close(a, b, b.dtype if b.dtype.kind == "f" else np.float32)


def test_all_rows_of_the_tables_were_recorded():
    counts = {
        row: sum(difference(case) == row for case in DIFFERENT)
        for row in map(difference, DIFFERENT)
    }
    assert set(counts) == {
        "refused there",
        "no room between the bounds",
        "limit refused here",
        "limit inf",
        "inf in one tensor",
        "0 / 0 there",
        "overflow there",
    }
    assert len(SAME) > 50


@pytest.mark.filterwarnings("ignore:.*no leaf of the updates has a float")
@pytest.mark.parametrize("case", DIFFERENT, ids=name)
def test_differences_from_tensorflow_are_those_in_the_table(case):
    row = difference(case)
    if row in ("limit refused here", "no room between the bounds"):
        with pytest.raises(
            ValueError,
            match=(
                r"must be (at least 0|above 0|at most clip_value_max)|must not be NaN"
            ),
        ):
            run(case)
        return
    inputs = jax.tree.leaves(decode(case["args"][0]))
    ours = run(case)
    leaves = jax.tree.leaves(ours[0] if isinstance(ours, tuple) else ours)
    assert [leaf.dtype for leaf in leaves] == [x.dtype for x in inputs]
    if "output" in case:
        theirs = decode(case["output"])
        there = jax.tree.leaves(
            theirs[0] if case["function"] == "clip_by_global_norm" else theirs
        )
        assert not all(
            np.allclose(
                np.asarray(a, float), np.asarray(b, float), 1e-2, equal_nan=True
            )
            for a, b in zip(leaves, there)
        )
    for x, leaf in zip(inputs, leaves):
        if row == "limit inf" or x.dtype.kind == "i":
            np.testing.assert_array_equal(leaf, x)
        elif row == "inf in one tensor":
            assert np.isnan(leaf).all() if np.isinf(x).any() else (leaf == x).all()
        elif row == "0 / 0 there":
            assert not np.any(leaf)
        elif row == "overflow there":
            close(leaf, np.full(x.shape, 1 / math.sqrt(x.size)), x.dtype)
        else:
            wide = [
                np.asarray(y, np.complex128)
                for y in (inputs if case["function"] == "clip_by_global_norm" else [x])
            ]
            norm = math.sqrt(sum(float(np.sum(np.abs(y) ** 2)) for y in wide)) / (
                x.size if case["function"] == "clip_by_average_norm" else 1
            )
            np.testing.assert_allclose(
                leaf,
                x * min(1.0, limit_of(case) / norm),
                8 * float(np.finfo(x.dtype).eps),
            )


def test_mixed_precisions_keep_theirs():
    grads = [
        jnp.full(3, 3, jnp.bfloat16),
        None,
        jnp.full(2, 4, jnp.float16),
        np.int32(7),
        jnp.ones((1, 2)),
    ]
    clipped, norm = tensorflow_style.clip_by_global_norm(grads, 1.0)
    assert [leaf.dtype for leaf in jax.tree.leaves(clipped)] == [
        "bfloat16",
        "float16",
        "int32",
        "float32",
    ]
    assert clipped[1] is None and clipped[3] == 7
    close(norm, math.sqrt(27 + 32 + 2))
    close(clipped[4], np.full((1, 2), 1 / math.sqrt(61)))


@pytest.mark.parametrize(
    "function",
    [
        lambda t, limit: torch_style.clip_grad_norm(t, limit, "inf"),
        torch_style.clip_grad_value,
        lambda t, limit: torch_style.clip_grads_with_norm(t, limit, 7.0),
        lambda t, limit: torch_style.get_total_norm(t) * limit,
        lambda t, limit: tensorflow_style.clip_by_value(t, -limit, limit),
        tensorflow_style.clip_by_norm,
        lambda t, limit: tensorflow_style.clip_by_norm(t["a"], limit, axes=[-1]),
        tensorflow_style.clip_by_average_norm,
        tensorflow_style.clip_by_global_norm,
        lambda t, limit: tensorflow_style.global_norm(t) * limit,
    ],
)
def test_under_jit_with_a_traced_limit_the_numbers_are_the_same(function):
    direct, jitted = function(tree(), 0.5), jax.jit(function)(tree(), 0.5)
    for a, b in zip(jax.tree.leaves(direct), jax.tree.leaves(jitted)):
        close(a, b)


@pytest.mark.slow
def test_what_is_within_the_limit_stays_bit_for_bit():
    grads = tree()
    norm = optaxclip.global_norm(grads)
    for same in (
        torch_style.clip_grad_norm(grads, norm + 2e-6)[0],
        tensorflow_style.clip_by_global_norm(grads, norm)[0],
        tensorflow_style.clip_by_norm(grads, norm),
        optaxclip_of_keras(grads, global_clipnorm=norm),
    ):
        jax.tree.map(np.testing.assert_array_equal, same, grads)


def test_clip_gradients_by_norm_clips_before_the_optimizer():
    grads, params = tree(), jax.tree.map(jnp.zeros_like, tree())
    optimizer = tensorflow_style.clip_gradients_by_norm(optax.sgd(0.5), 1.0)
    updates, state = optimizer.update(grads, optimizer.init(params), params)
    norm = math.sqrt(sum(float(np.sum(x.astype(float) ** 2)) for x in grads.values()))
    for update, grad in zip(updates.values(), grads.values()):
        close(update, -0.5 * grad / norm)
    close(optaxclip.metrics(state)["clip/norm_before"], norm)
    with pytest.raises(
        ValueError,
        match=r"clip_gradients_by_norm: clip_norm must be at least 0, got -1.0",
    ):
        tensorflow_style.clip_gradients_by_norm(optax.sgd(0.5), -1.0)


def test_keras_takes_one_of_the_three():
    with pytest.raises(
        ValueError,
        match=(
            r"only one of clipnorm, clipvalue and global_clipnorm can be set, got "
            r"clipnorm=1.0, global_clipnorm=2.0"
        ),
    ):
        keras.clip_gradients(clipnorm=1.0, global_clipnorm=2.0)
    with pytest.raises(
        ValueError,
        match=(
            r"clip_gradients: clipvalue must be above 0, got 0: Keras does not clip "
            r"then; leave it out for that"
        ),
    ):
        keras.clip_gradients(clipvalue=0)
    with pytest.raises(
        TypeError, match=r"clip_gradients: clipnorm must be a real number, got '1'"
    ):
        keras.clip_gradients(clipnorm="1")
    assert keras.clip_gradients().init(tree()) == optax.identity().init(tree())


def test_bounds_without_room_name_the_arguments_of_tensorflow():
    with pytest.raises(
        ValueError,
        match=(
            r"clip_by_value: clip_value_min must be at most clip_value_max, got "
            r"clip_value_min=2.0 and clip_value_max=1.0"
        ),
    ):
        tensorflow_style.clip_by_value(jnp.ones(2), 2.0, 1.0)


def test_what_torch_adds_to_the_norm_counts_for_short_gradients():
    grads, factor = jnp.array([3e-7, 4e-7]), 1e-7 / (5e-7 + 1e-6)
    for clipped in (
        torch_style.clip_grad_norm(grads, 1e-7)[0],
        torch_style.clip_grads_with_norm(grads, 1e-7, 5e-7),
    ):
        np.testing.assert_allclose(clipped, factor * np.array([3e-7, 4e-7]), rtol=1e-5)


def test_keras_says_of_a_negative_limit_what_keras_would_do():
    for name in ("clipnorm", "clipvalue", "global_clipnorm"):
        for value in (-1.0, 0, np.float32(0)):
            with pytest.raises(
                ValueError,
                match=(
                    rf"^clip_gradients: {name} must be above 0, got .*: Keras does not "
                    rf"clip then"
                ),
            ):
                keras.clip_gradients(**{name: value})


def test_tensorflow_bounds_may_be_equal_or_below_zero():
    t = jnp.array([-5.0, -2.0, 5.0])
    np.testing.assert_array_equal(
        tensorflow_style.clip_by_value(t, -3, -1), [-3, -2, -1]
    )
    np.testing.assert_array_equal(tensorflow_style.clip_by_value(t, 1, 1), [1, 1, 1])
    clipped = tensorflow_style.clip_by_norm(
        [jnp.array([3.0, 4.0]), jnp.array([6.0, 8.0])], 1.0
    )
    np.testing.assert_allclose(clipped, [[0.6, 0.8], [0.6, 0.8]], rtol=1e-6)
