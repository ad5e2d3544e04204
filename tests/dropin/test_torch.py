"""The drop-in functions for torch, beside torch where it is installed."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from optaxclip.dropin import torch_style
from tests.dropin.recorded import INF, NAN, close, in_torch, tree

ORDERS = [0.5, 1, 1.5, 2.0, 3, 4, INF, "inf", "2"]


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


GIVEN = [(0, 0), (1e-7, 0), (2, 5), (2, 1), (0, 1), (2, 0), (2, NAN)]


@pytest.mark.parametrize(("max_norm", "total_norm"), GIVEN)
def test_clip_grads_with_norm_is_that_of_torch(torch, max_norm, total_norm):
    params, norm = in_torch(torch, tree().values()), float(total_norm)
    torch.nn.utils.clip_grads_with_norm_(params, max_norm, torch.tensor(norm))
    clipped = torch_style.clip_grads_with_norm(tree(), max_norm, norm)
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


NOTHING = {"empty": [], "None": [None], "no elements": [np.zeros((0, 2), np.float32)]}


@pytest.mark.parametrize("name", NOTHING)
def test_nothing_has_norm_zero_in_torch_and_here(torch, name):
    theirs = torch.nn.utils.clip_grad_norm_(in_torch(torch, NOTHING[name]), 1.0)
    assert torch_style.clip_grad_norm(NOTHING[name], 1.0)[1] == float(theirs) == 0


def test_a_norm_of_integers_alone_is_warned_of():
    """torch refuses them."""
    with pytest.warns(UserWarning, match=r"^get_total_norm: .* is int32: make it floa"):
        assert torch_style.get_total_norm([jnp.array([3, 4])]) == 0


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_error_if_nonfinite_raises_as_torch_does(torch, bad):
    grads = [np.array([1.0, bad], np.float32), np.ones(3, np.float32)]
    params, on = in_torch(torch, grads), {"error_if_nonfinite": True}
    with pytest.raises(RuntimeError, match=r"total norm of order 2.0 .* is non-finite"):
        torch.nn.utils.clip_grad_norm_(params, 1.0, **on)
    text = (
        r"^clip_grad_norm: the norm of order 2.0 of the updates is not finite. '0': 1 "
        r"of 2 values are NaN or inf. With error_if_nonfinite=False"
    )
    with pytest.raises(RuntimeError, match=text):
        torch_style.clip_grad_norm(grads, 1.0, **on)
    with pytest.raises(
        RuntimeError, match=r"^get_total_norm: the norm of order inf of"
    ):
        torch_style.get_total_norm(grads, INF, **on)


def test_error_if_nonfinite_is_a_check_under_jit():
    clip = partial(torch_style.clip_grad_norm, max_norm=1.0, error_if_nonfinite=True)
    checked = checkify.checkify(jax.jit(clip))
    checked(jnp.ones(2))[0].throw()
    with pytest.raises(
        checkify.JaxRuntimeError, match=r"the norm of order 2.0 of the u"
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


def test_a_given_norm_of_0_counts_as_in_torch():
    # torch divides by 0 + 1e-6, whatever the gradients are.
    for limit, wanted in (0.0, 0.0), (1e-7, 0.05), (1.0, 0.5):
        clipped = torch_style.clip_grads_with_norm(jnp.array([0.5]), limit, 0.0)
        np.testing.assert_allclose(clipped, [wanted], rtol=1e-5)
