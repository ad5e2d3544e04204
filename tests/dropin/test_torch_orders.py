"""Norm types of torch: every order, and which differ at the ends of the range.

The numbers are those of an equation, and where torch is installed torch computes it.
"""

import itertools
import math
from functools import partial

import jax
import numpy as np
import pytest

from optaxclip.dropin import torch_style
from tests.dropin.recorded import INF, NAN, in_torch

TREES = {
    "plain": [[0.5, -3.0], [4.0]],
    "a zero": [[0.5, 0.0], [4.0]],
    "a tensor of zeros": [[0.5, -3.0], [0.0]],
    "zeros": [[0.0, 0.0], [0.0]],
    "nan": [[0.5, NAN], [4.0]],
    "nan and zero": [[0.0, NAN], [0.0]],
    "inf": [[0.5, -INF], [4.0]],
    "inf and zero": [[0.0, INF], [4.0]],
    "inf and nan": [[NAN, INF], [4.0]],
    "inf alone": [[INF, -INF], [INF]],
    "tiny": [[1e-30, -2e-30], [4e-30]],
    "huge": [[1e30, -2e30], [4e30]],
    "tiny and huge": [[1e-37, 3e38], [1.0]],
}


def trees_in_64_bits():
    """Those of PyTorch's test_clip_grad_norm_error_if_nonfinite."""
    for value in (INF, -INF, NAN, 2e22, -2e22, 2e200, -2e200):
        one = np.where(np.arange(10) == 1, value, 0.0)
        for name, leaf in ((f"{value}, all", [value] * 10), (f"{value}, one", one)):
            yield name, [leaf]
            yield f"{name} beside 1", [[1.0], leaf]


CASES = []
for name, tree in TREES.items():
    leaves = [np.float32(leaf) for leaf in tree]
    CASES += [(name, leaves, max_norm) for max_norm in (0.0, 1e-7, 0.5, INF)]
for name, tree in trees_in_64_bits():
    CASES.append((name, [np.float64(leaf) for leaf in tree], 1.0))
ORDERS = (0.5, 1, 2, 3.5, INF)
every_order = pytest.mark.parametrize("order", ORDERS)


def tolerance(order):
    """In eps: a sum of a few powers is right to 8, its root of an order below 1 is as
    much less right.
    """
    return 8 / min(1.0, order)


def torch_norm(grads, order):
    """The norm by its equation in float64."""
    sizes = np.abs(np.concatenate([grad.astype(float) for grad in grads]))
    if math.isinf(order) or np.isnan(sizes).any():
        return float(np.max(sizes))
    # The powers of 2e200 are beyond float64, so they are those of a share.
    usual = sizes[np.isfinite(sizes) & (sizes > 0)]
    unit = np.max(usual) if usual.size else 1.0
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


def in_torch_itself(torch, grads, max_norm, order):
    """The norm and the clipped gradients of torch."""
    params = in_torch(torch, grads)
    norm = torch.nn.utils.clip_grad_norm_(params, max_norm, order)
    return float(norm), [param.grad.numpy() for param in params]


def is_in_range(norm, wanted):
    """No power of an element has left the range of the dtype in torch."""
    return np.isclose(norm, wanted, 1e-4, 0, equal_nan=True)


@every_order
@pytest.mark.slow
def test_every_norm_type_has_the_numbers_of_the_equation(order):
    with jax.enable_x64(True):
        for name, grads, max_norm in CASES:
            info = np.finfo(grads[0].dtype)
            norm = torch_norm(grads, order)
            with np.errstate(over="ignore"):
                norm = float(info.dtype.type(norm))
            clipped, total_norm = torch_style.clip_grad_norm(grads, max_norm, order)
            assert total_norm.dtype == info.dtype
            pairs = [(total_norm, norm)]
            pairs += zip(clipped, torch_clipped(grads, norm, max_norm), strict=True)
            near = {"atol": float(info.tiny), "err_msg": name}  # flushed below
            for ours, promised in pairs:
                rtol = tolerance(order) * info.eps
                np.testing.assert_allclose(ours, promised, rtol, **near)


@every_order
def test_the_equation_is_what_torch_computes(torch, order):
    for name, grads, max_norm in CASES:
        info, norm = np.finfo(grads[0].dtype), torch_norm(grads, order)
        found, clipped = in_torch_itself(torch, grads, max_norm, order)
        if not is_in_range(found, norm):
            continue
        pairs = [(found, norm)]
        # A factor that is subnormal there has a few bits.
        is_short = 0 < max_norm / (norm + 1e-6) < info.tiny
        if math.isfinite(norm) and not is_short:
            pairs += zip(clipped, torch_clipped(grads, norm, max_norm), strict=True)
        # Torch rounds p and 1/p and leaves the numbers as large as they are, so that
        # (x^p)^(1/p) is x^(1 + eps).
        size = abs(math.log(norm)) if 0 < norm < INF else 0.0
        near = {"atol": float(info.tiny), "err_msg": name}
        for theirs, wanted in pairs:
            rtol = (tolerance(order) + size) * info.eps
            np.testing.assert_allclose(theirs, wanted, rtol, **near)


def test_only_powers_beyond_the_range_differ_from_torch(torch):
    different = set()
    for order, (name, grads, max_norm) in itertools.product(ORDERS, CASES):
        found, _ = in_torch_itself(torch, grads, max_norm, order)
        if not is_in_range(found, torch_norm(grads, order)):
            different.add((name.removesuffix(" beside 1"), order))
    everywhere = ("tiny", "huge", "tiny and huge", "2e+200, all", "-2e+200, all")
    beside_zeros = ("2e+200, one", "-2e+200, one")
    assert different == {*itertools.product(everywhere + beside_zeros, (2, 3.5))}


@every_order
@pytest.mark.slow
def test_error_if_nonfinite_raises_where_torch_does(torch, order):
    with jax.enable_x64(True):
        for _, grads, _ in CASES:
            norm = torch_norm(grads, order)
            tensors, raises = [torch.tensor(grad) for grad in grads], False
            try:
                theirs = torch.nn.utils.get_total_norm(tensors, order, True)
            except RuntimeError:
                raises, theirs = True, INF
            if raises and not math.isfinite(norm):
                with pytest.raises(
                    RuntimeError, match=f"the norm of order {float(order)} of the upd"
                ):
                    torch_style.get_total_norm(grads, order, True)
                continue
            # Of a norm in range torch raises only where its powers are not.
            assert math.isfinite(norm) and (not raises or theirs == INF)
            torch_style.clip_grad_norm(grads, 1.0, order, True)


def test_what_is_no_order_is_refused():
    grads = [np.ones(2, np.float32)]
    for order in (False, 0, -1, "-inf", NAN, "nan", "abc", None, 1j, [2.0]):
        for call in (
            torch_style.get_total_norm,
            partial(torch_style.clip_grad_norm, max_norm=1.0),
        ):
            with pytest.raises(ValueError, match="norm_type must be a number above 0"):
                call(grads, norm_type=order)
