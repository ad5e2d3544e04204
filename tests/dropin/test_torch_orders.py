"""Norm types of torch: every order, and which differ at the ends of the range."""

import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optaxclip.dropin import torch_style
from tests.dropin.recorded import (
    INF,
    NAN,
    REFERENCES,
    close,
    in_torch,
)

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
            pairs = [(total_norm, norm)]
            pairs += zip(clipped, torch_clipped(grads, norm, max_norm), strict=True)
            near = {"atol": float(info.tiny), "err_msg": str(case)}  # flushed below
            for ours, promised in pairs:
                rtol = tolerance(order) * info.eps
                np.testing.assert_allclose(ours, promised, rtol, **near)
            if not norm_is_right_in_torch(case, norm):
                continue
            pairs = [(total_norm, case["norm"])]
            # A factor that is subnormal there has a few bits.
            is_short = 0 < max_norm / (norm + 1e-6) < info.tiny
            if not case["raises"] and not is_short:
                pairs += zip(clipped, case["clipped"], strict=True)
            for ours, theirs in pairs:
                rtol = tolerance_of_torch(order, norm) * info.eps
                np.testing.assert_allclose(ours, np.array(theirs, float), rtol, **near)
