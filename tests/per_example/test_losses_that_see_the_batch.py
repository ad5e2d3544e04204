"""A loss of one example that `jax.vmap` shows the whole batch has no bound of what one
example can do: refused by name, wherever it stands in the program.
"""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental import io_callback
from jax.experimental.buffer_callback import buffer_callback

from optaxclip.dropin import jax_privacy
from optaxclip.per_example import clipped_grad, explain_clipped_grad
from tests.per_example.batches import mean_of_clipped, near, norms_of

W = np.float32([[0.5, -0.3], [0.2, 0.7], [-0.4, 0.1]])
XS = np.float32([[1, 2, 3], [0.5, -1, 2], [-2, 1, 0], [0.1, 0.2, 0.3]])


@custom_vmap
def normalized(x):
    return x


@normalized.def_vmap
def _normalized_batch(size, batched, x):
    return (x - jnp.mean(x, 0)) / (jnp.std(x, 0) + 1e-6), True


def type_of(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def called(x, vmap_method):
    return jax.pure_callback(np.tanh, type_of(x), x, vmap_method=vmap_method)


def of_a_library(x):
    # The loss is never run, so nothing needs to be registered.
    return jax.ffi.ffi_call("kernel", type_of(x), vmap_method="broadcast_all")(x)


def on_buffers(x):
    return buffer_callback(print, type_of(x), vmap_method="expand_dims")(x)


# What sees the batch, and how the error calls it.
KINDS = {
    "custom_vmap": (normalized, "custom_vmap_call"),
    "broadcast_all": (
        partial(called, vmap_method="broadcast_all"),
        "pure_callback with vmap_method='broadcast_all'",
    ),
    "expand_dims": (
        partial(called, vmap_method="expand_dims"),
        "pure_callback with vmap_method='expand_dims'",
    ),
    "legacy": (
        partial(called, vmap_method="legacy_vectorized"),
        "pure_callback with vmap_method='legacy_vectorized'",
    ),
    "ffi_call": (of_a_library, "ffi_call with vmap_method='broadcast_all'"),
    "buffer_callback": (on_buffers, "buffer_callback with vmap_method='expand_dims'"),
}


# Where it stands. Each is a function of one example: (seen, h) -> something like h.


def in_scan(seen, h):
    return lax.scan(lambda total, x: (total + seen(x), None), h, jnp.stack([h, h]))[0]


def in_while(seen, h):
    return lax.while_loop(lambda x: jnp.all(x < 5), lambda x: seen(x) + 5, h)


def in_condition(seen, h):
    return lax.while_loop(lambda x: jnp.all(seen(x) > 5), lambda x: x - 1, h)


def in_branch(seen, h):
    return lax.cond(jnp.sum(h) > 0, seen, jnp.cos, h)


def in_custom_jvp(seen, h):
    run = jax.custom_jvp(seen)
    run.defjvp(lambda primals, tangents: (primals[0], tangents[0]))
    return run(h)


def in_custom_vjp(seen, h):
    run = jax.custom_vjp(seen)
    run.defvjp(lambda x: (x, None), lambda kept, cotangent: (cotangent,))
    return run(h)


def in_several(seen, h):
    body = jax.checkpoint(lambda x: in_custom_vjp(seen, x))
    return jax.jit(lambda x: lax.map(body, x[None])[0])(h)


def in_vmap(seen, h):
    return jax.vmap(seen)(h[None])[0]


BEFORE_A_DERIVATIVE = {
    "by itself": lambda seen, h: seen(h),
    "jit": lambda seen, h: jax.jit(seen)(h),
    "checkpoint": lambda seen, h: jax.checkpoint(seen)(h),
    "scan": in_scan,
    "while": in_while,
    "condition": in_condition,
    "cond": in_branch,
    "custom_jvp": in_custom_jvp,
    "custom_vjp": in_custom_vjp,
    "several": in_several,
    "vmap": in_vmap,
}


def in_jvp_rule(seen, h):
    run = jax.custom_jvp(jnp.sin)
    run.defjvp(lambda primals, tangents: (seen(primals[0]), tangents[0]))
    return run(h)


def in_forward_rule(seen, h):
    run = jax.custom_vjp(jnp.sin)
    run.defvjp(lambda x: (seen(x), None), lambda kept, cotangent: (cotangent,))
    return run(h)


def in_backward_rule(seen, h):
    run = jax.custom_vjp(jnp.sin)
    run.defvjp(lambda x: (jnp.sin(x), x), lambda x, cotangent: (cotangent * seen(x),))
    return run(h)


def in_rule_of_a_scan(seen, h):
    def turn(x, _):
        return jax.checkpoint(partial(in_backward_rule, seen))(x), None

    return jax.jit(lambda x: lax.scan(turn, x, None, 2)[0])(h)


# Rules are functions, and no programs before a derivative is taken.
RULES = {
    "jvp rule": in_jvp_rule,
    "forward rule": in_forward_rule,
    "backward rule": in_backward_rule,
    "rule of a scan": in_rule_of_a_scan,
}


def loss_with(place, seen):
    """A loss in which the place has a derivative if it is a rule."""

    def loss(w, x):
        if place in RULES:
            return jnp.sum(RULES[place](seen, x @ w) ** 2)
        shown = BEFORE_A_DERIVATIVE[place](seen, lax.stop_gradient(x))
        return jnp.sum(jnp.tanh(shown @ w) ** 2)

    return loss


PLACES = [*BEFORE_A_DERIVATIVE, *RULES]
PAIRS = [(place, kind) for kind in KINDS for place in PLACES]
# The rule of custom_vmap gets the axis of the inner vmap, which is of one example.
PAIRS.remove(("vmap", "custom_vmap"))


def test_what_sees_the_batch_is_refused_by_name():
    for place, kind in PAIRS:
        seen, name = KINDS[kind]
        grad = clipped_grad(loss_with(place, seen), 1.0)
        text = f"^clipped_grad: .* has a {name}"
        if place == "by itself":
            # In a derivative JAX may not know the line of the user's code.
            text += rf".*{Path(__file__).name}:\d+\), which sees the whole batch"
        with pytest.raises(ValueError, match=text):
            jax.eval_shape(grad, W, XS)


CALLS = {
    method: partial(clipped_grad, max_norm=1.0, method=method)
    for method in ("auto", "ghost", "one_pass")
}
CALLS["explain_clipped_grad"] = explain_clipped_grad
CALLS["dropin"] = partial(jax_privacy.clipped_grad, l2_clip_norm=1.0)


@pytest.mark.parametrize("place", ["by itself", "backward rule"])
@pytest.mark.parametrize("name", CALLS)
def test_every_function_that_takes_a_loss_refuses_it(name, place):
    of_batch = CALLS[name](loss_with(place, normalized))
    call = "explain_clipped_grad" if name.startswith("explain") else "clipped_grad"
    with pytest.raises(ValueError, match=f"^{call}: .* has a custom_vmap_call"):
        of_batch(W, XS)


def printed(x):
    jax.debug.print("{}", x)
    jax.debug.callback(np.tanh, x)
    return jnp.tanh(x)


def impure(x):
    return io_callback(np.tanh, type_of(x), x)


APART = {
    "sequential": partial(called, vmap_method="sequential"),
    "sequential_unrolled": partial(called, vmap_method="sequential_unrolled"),
    "debug": printed,
    "io_callback": impure,
}


@pytest.mark.parametrize("place", ["by itself", "several", *RULES])
@pytest.mark.parametrize("kind", APART)
def test_what_sees_one_example_at_a_time_is_as_tanh(kind, place):
    found = clipped_grad(loss_with(place, APART[kind]), 0.5)(W, XS)
    wanted = clipped_grad(loss_with(place, jnp.tanh), 0.5)(W, XS)
    np.testing.assert_allclose(found.norms, wanted.norms, rtol=1e-6)
    near(found.grads, np.asarray(wanted.grads))


def test_statistics_over_an_inner_axis_are_of_one_example():
    def loss(w, x):
        h = jax.vmap(normalized)(lax.stop_gradient(x))
        return jnp.sum(jnp.tanh(h @ w) ** 2)

    each = np.stack([jax.grad(loss)(W, x) for x in XS]).astype(np.float64)
    result = clipped_grad(loss, 0.5)(W, XS)
    np.testing.assert_allclose(result.norms, norms_of(each), rtol=1e-6)
    near(result.grads, mean_of_clipped(each, 0.5))


@pytest.mark.parametrize("mesh_axes", ["auto", None])
def test_a_loss_that_joins_the_batches_of_an_outer_vmap_is_refused(mesh_axes):
    def loss(w, x):
        h = x @ w
        return jnp.sum(jnp.tanh(h - lax.pmean(h, "batches")) ** 2)

    grad = clipped_grad(loss, 1.0, mesh_axes=mesh_axes)
    of_batches = jax.vmap(grad, (None, 0), axis_name="batches")
    with pytest.raises(ValueError, match=r"has a psum over 'batches' .*test_losses"):
        of_batches(W, np.stack([XS, XS]))


def test_a_callback_of_what_all_share_stays():
    """Without a `vmap_method`, as in `equinox.error_if`, JAX refuses examples."""

    def loss(w, x, scale):
        return jnp.sum((x @ w) ** 2) * called(scale, None)

    grad = clipped_grad(loss, 1.0, shared_argnums=2)
    assert np.isfinite(grad(W, XS, jnp.float32(2)).norms).all()
