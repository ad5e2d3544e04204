"""What people get wrong, one row each: the code, and what the error must name."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import optaxclip
from optaxclip import clip_by_global_norm, rules
from tests.helpers import apply

GRADS = {"w": jnp.array([3.0, 4.0]), "b": jnp.array([1.0])}
LABELS = {"w": "matrix", "b": "vector"}


class Mistake(NamedTuple):
    """A wrong program, and what its error must say."""

    code: Callable[[], Any]
    kind: type[Exception]
    says: tuple[str, ...]


def update(clipper: Any, state: Any = None, params: Any = None) -> Any:
    return clipper.update(GRADS, state, params)


def inside(clipper: Any, name: str = "x") -> Any:
    """The first update inside shard_map over the mesh axis "x"."""
    mesh = Mesh(jax.devices()[:2], ("x",))

    def first(grads: Any) -> Any:
        return apply(clipper, grads)[0]

    return jax.shard_map(first, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(
        jnp.ones(4)
    )


def in_pmap(clipper: Any) -> Any:
    def first(grads: Any) -> Any:
        return apply(clipper, grads)[0]

    return jax.pmap(first, axis_name="devices")(jnp.ones((1, 2)))


def wrong(
    call: str, code: Callable[[], Any], kind: type[Exception], *says: str
) -> Mistake:
    """A mistake whose error begins with the name of the call."""
    return Mistake(code, kind, (call, *says))


GLOBAL = "clip_by_global_norm: "
GROUP = "clip_by_group_norm: "
global_norm = partial(wrong, GLOBAL)

ARGUMENTS = {
    "axis_name": global_norm(
        lambda: clip_by_global_norm(1.0, axis_name="batch"), TypeError, "mesh_axes"
    ),
    "norm_type": global_norm(
        lambda: clip_by_global_norm(1.0, norm_type=2), TypeError, "Here it is ord."
    ),
    "clip_norm": global_norm(
        lambda: clip_by_global_norm(clip_norm=1.0), TypeError, "max_norm"
    ),
    "threshold": global_norm(
        lambda: clip_by_global_norm(threshold=1.0), TypeError, "max_norm"
    ),
    "error_if_nonfinite": global_norm(
        lambda: clip_by_global_norm(1.0, error_if_nonfinite=True),
        TypeError,
        'nonfinite="raise"',
    ),
    "a typo": global_norm(
        lambda: clip_by_global_norm(max_nrom=1.0), TypeError, "max_norm"
    ),
    "mask": global_norm(
        lambda: clip_by_global_norm(1.0, mask=True), TypeError, "optax.masked("
    ),
    "unlike any": global_norm(
        lambda: clip_by_global_norm(1.0, foo=1), TypeError, "It takes max_norm, ord,"
    ),
    "l2_clip_norm of clipped_grad": wrong(
        "clipped_grad: ",
        lambda: optaxclip.clipped_grad(sum, l2_clip_norm=1.0),
        TypeError,
        "max_norm",
    ),
    "max_norm of zclip": wrong(
        "zclip: ", lambda: optaxclip.zclip(max_norm=1.0), TypeError, "cap"
    ),
    "max_norm of clip_by_value": wrong(
        "clip_by_value: ",
        lambda: optaxclip.clip_by_value(max_norm=1.0),
        TypeError,
        "max_value",
    ),
    "tf's clip_value_min": wrong(
        "clip_by_value: ",
        lambda: optaxclip.clip_by_value(clip_value_min=-1.0, max_value=1.0),
        TypeError,
        "min_value",
    ),
    "max_consecutive_errors": wrong(
        "skip_nonfinite: ",
        lambda: optaxclip.skip_nonfinite(optax.sgd(1.0), max_consecutive_errors=3),
        TypeError,
        "max_consecutive",
    ),
    "gradients where a clipper is built": global_norm(
        lambda: clip_by_global_norm(GRADS, 1.0),
        TypeError,
        "2 positional arguments",
        "optaxclip.clip_grads(grads, max_norm)",
    ),
}

LIMITS = {
    "both bounds in a tuple": wrong(
        "clip_by_value: ",
        lambda: optaxclip.clip_by_value((-1, 1)),
        ValueError,
        "clip_by_value(1, -1)",
    ),
    "a clipper as limit": global_norm(
        lambda: clip_by_global_norm(optaxclip.zclip()),
        TypeError,
        "a transformation",
        "optaxclip.rules.z_score()",
    ),
    "a rule that needs numbers, without them": global_norm(
        lambda: clip_by_global_norm(rules.share_of_params),
        TypeError,
        "max_norm",
        "share_of_params(share",
    ),
    "a function that joins rules, without them": global_norm(
        lambda: clip_by_global_norm(rules.minimum), TypeError, "minimum(...)"
    ),
    "a rule as text": global_norm(
        lambda: clip_by_global_norm("z_score"), TypeError, "optaxclip.rules.z_score()"
    ),
    "a shrink as text": global_norm(
        lambda: clip_by_global_norm(1.0, shrink="smooth"),
        TypeError,
        "shrink=optaxclip.shrinks.smooth",
    ),
    "a schedule that returns text": global_norm(
        lambda: apply(clip_by_global_norm(lambda step: "1.0"), GRADS),
        TypeError,
        "max_norm",
        "schedule",
        "'1.0'",
    ),
    "a label without a limit": wrong(
        GROUP,
        lambda: apply(
            optaxclip.clip_by_group_norm({"matrix": 1.0}, LABELS), GRADS, GRADS
        ),
        ValueError,
        "no value for the label 'vector'",
        "'matrix'",
    ),
    "a limit for no label": wrong(
        GROUP,
        lambda: apply(
            optaxclip.clip_by_group_norm(
                {"matrix": 1.0, "vector": 1.0, "bias": 1.0}, LABELS
            ),
            GRADS,
        ),
        ValueError,
        "'bias'",
        "no such label",
        "'matrix', 'vector'",
    ),
    "stacked as a bool": wrong(
        "clip_by_tensor_norm: ",
        lambda: optaxclip.clip_by_tensor_norm(1.0, stacked=True),
        TypeError,
        "stacked",
        "stacked=1",
    ),
    "a window of autoclip": wrong(
        "autoclip: ",
        lambda: optaxclip.autoclip(10, window=0),
        ValueError,
        "window must be at least 1",
    ),
    "a window of skip_step": wrong(
        "skip_step: ",
        lambda: optaxclip.skip_step(optax.sgd(1.0), window=2.5),
        ValueError,
        "window must be a whole number",
    ),
    "sigmas of skip_step": wrong(
        "skip_step: ",
        lambda: optaxclip.skip_step(optax.sgd(1.0), -1.0),
        ValueError,
        "sigmas must be at least 0",
    ),
    "z of zclip": wrong(
        "zclip: ", lambda: optaxclip.zclip(-1.0), ValueError, "z must be at least 0"
    ),
    "ratio of adagc": wrong(
        "adagc: ", lambda: optaxclip.adagc(-1.0), ValueError, "ratio must be"
    ),
    "low of aggc": wrong(
        "aggc: ",
        lambda: optaxclip.aggc(-1.0, scope="tensor"),
        ValueError,
        "low must be",
    ),
    "decay1 of adagn": wrong(
        "adagn: ", lambda: optaxclip.adagn(2.0), ValueError, "decay1 must be"
    ),
    "decay of adaclip": wrong(
        "adaclip: ", lambda: optaxclip.adaclip(2.0), ValueError, "decay must be"
    ),
    "trust of larc": wrong(
        "larc: ", lambda: optaxclip.larc(-0.1), ValueError, "learning_rate must be"
    ),
}

STATES = {
    "no state for a clipper that learns": wrong(
        "zclip: ",
        lambda: update(optaxclip.zclip()),
        TypeError,
        "learns",
        "None",
        "clipper.init(params)",
        "optaxclip.clip_grads",
    ),
    "optax's state for a clipper that learns": wrong(
        "zclip: ",
        lambda: update(optaxclip.zclip(), optax.EmptyState()),
        TypeError,
        "learns",
        "EmptyState",
        "clipper.init(params)",
    ),
    "no state for a schedule": global_norm(
        lambda: update(clip_by_global_norm(lambda step: 1.0)),
        TypeError,
        "schedule",
        "clipper.init(params)",
    ),
    "no state for a wrapper": wrong(
        "skip_step: ",
        lambda: update(optaxclip.skip_step(optax.sgd(1.0))),
        TypeError,
        "SkipState",
        "init(params)",
    ),
    "adam's state": global_norm(
        lambda: update(clip_by_global_norm(1.0), optax.adam(1.0).init(GRADS)[0]),
        TypeError,
        "ScaleByAdamState",
    ),
    "the state of another scope": wrong(
        "clip_by_tensor_norm: ",
        lambda: update(
            optaxclip.clip_by_tensor_norm(1.0), clip_by_global_norm(1.0).init(GRADS)
        ),
        ValueError,
        "norms of everything",
        "'b', 'w'",
        "init(params)",
    ),
    "the state of another rule": global_norm(
        lambda: update(
            clip_by_global_norm(rules.growth()),
            clip_by_global_norm(rules.z_score()).init(GRADS),
        ),
        ValueError,
        "another rule",
        "growth",
        "init(params)",
    ),
    "the state of a rule for a fixed limit": global_norm(
        lambda: update(
            clip_by_global_norm(1.0), clip_by_global_norm(rules.z_score()).init(GRADS)
        ),
        ValueError,
        "another rule",
        "constant",
        "init(params)",
    ),
}

TREES = {
    "(loss, grads) for grads": global_norm(
        lambda: clip_by_global_norm(1.0).update((1.0, GRADS), None, GRADS),
        TypeError,
        "value_and_grad",
        "updates[1]",
    ),
    "(grads, aux) for grads": global_norm(
        lambda: clip_by_global_norm(1.0).update((GRADS, 1.0), None, GRADS),
        TypeError,
        "updates[0]",
    ),
    "a function in the tree": global_norm(
        lambda: clip_by_global_norm(1.0).init({"w": jnp.ones(2), "act": jax.nn.relu}),
        TypeError,
        "'act'",
        "eqx.filter",
    ),
    "a text in the tree": global_norm(
        lambda: (
            update(clip_by_global_norm(1.0), None)
            and clip_by_global_norm(1.0).update({"w": "x"}, None)
        ),
        TypeError,
        "'w'",
        "'x'",
    ),
    "weights of another tree under AGC": wrong(
        "adaptive_grad_clip: ",
        lambda: update(optaxclip.adaptive_grad_clip(), None, {"w": GRADS["w"]}),
        ValueError,
        "params",
        "'b'",
        "'w'",
    ),
    "weights of another shape under AGC": wrong(
        "adaptive_grad_clip: ",
        lambda: update(optaxclip.adaptive_grad_clip(), None, {**GRADS, "b": 1.0}),
        ValueError,
        "params",
        "'b'",
        "(1,)",
    ),
    "a leaf without a label": wrong(
        GROUP,
        lambda: apply(optaxclip.clip_by_group_norm(1.0, {"w": "matrix"}), GRADS),
        ValueError,
        "'b'",
    ),
}

MESH_AXES = {
    "a mesh axis that is not bound": global_norm(
        lambda: inside(clip_by_global_norm(1.0, mesh_axes="batch")),
        ValueError,
        "mesh_axes='batch'",
        "'x'",
    ),
    "a mesh axis outside shard_map": global_norm(
        lambda: apply(clip_by_global_norm(1.0, mesh_axes="x"), GRADS),
        ValueError,
        "mesh_axes='x'",
        "Outside shard_map",
    ),
    "a mesh axis that pmap does not have": global_norm(
        lambda: in_pmap(clip_by_global_norm(1.0, mesh_axes="batch")),
        ValueError,
        "mesh_axes='batch'",
        "'devices'",
    ),
    "mesh axes in a list": global_norm(
        lambda: clip_by_global_norm(1.0, mesh_axes=["x", "y"]),
        TypeError,
        "mesh_axes",
        "('x', 'y')",
    ),
}

WRAPPERS = {
    "a number for an optimizer": wrong(
        "skip_nonfinite: ",
        lambda: optaxclip.skip_nonfinite(10),
        TypeError,
        "inner must be an optimizer",
        "got 10",
    ),
    "an optimizer that was not called": wrong(
        "skip_nonfinite: ",
        lambda: optaxclip.skip_nonfinite(optax.adam),
        TypeError,
        "adam(...)",
    ),
    "a number for an optimizer of skip_step": wrong(
        "skip_step: ", lambda: optaxclip.skip_step(10), TypeError, "inner"
    ),
    "a number for an optimizer of reset_momentum": wrong(
        "reset_momentum: ", lambda: optaxclip.reset_momentum(10), TypeError, "inner"
    ),
    "a limit for a clipper": wrong(
        "carry_clipped: ",
        lambda: optaxclip.carry_clipped(1.0),
        TypeError,
        "clipper must be",
        "got 1.0",
    ),
    "a loss that skip_step was not given": wrong(
        "skip_step: ",
        lambda: apply(optaxclip.skip_step(optax.sgd(1.0), on_loss=True), GRADS),
        ValueError,
        "value=loss",
        "on_loss",
    ),
    "a loss that skip_spikes was not given": wrong(
        "skip_spikes: ",
        lambda: apply(optaxclip.skip_spikes(optax.sgd(1.0), 1.0, 1.0), GRADS),
        ValueError,
        "value=loss",
        "loss_rule",
    ),
}

ALL = {**ARGUMENTS, **LIMITS, **STATES, **TREES, **MESH_AXES, **WRAPPERS}


@pytest.mark.parametrize("name", ALL)
def test_the_error_says_what_to_do(name):
    mistake = ALL[name]
    with pytest.raises(mistake.kind) as caught:
        mistake.code()
    text = str(caught.value)
    assert text.startswith(mistake.says[0]), text
    assert [part for part in mistake.says if part not in text] == [], text


ATTRIBUTES = {
    "clip_grad_norm_": "clip_grads(grads, max_norm)",
    "clip_grad_norm": "clip_grads(grads, max_norm)",
    "clip_grad_value_": "clip_by_value",
    "clip_by_norm": "clip_by_tensor_norm",
    "clip_by_unit_norm": "clip_by_unitwise_norm",
    "apply_if_finite": "skip_nonfinite",
    "agc": "adaptive_grad_clip",
    "z_score": "rules.z_score",
    "smooth": "shrinks.smooth",
    "suggest": "replay.suggest",
    "per_example_layer_norm_clip": "per_example.per_example_layer_norm_clip",
    "clip_by_globalnorm": "clip_by_global_norm",
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_attribute_of_another_name_names_ours(name):
    with pytest.raises(AttributeError) as caught:
        getattr(optaxclip, name)
    assert f"Use optaxclip.{ATTRIBUTES[name]}" in str(caught.value)
    assert name not in dir(optaxclip)


def test_an_attribute_like_no_other_is_refused_plainly():
    with pytest.raises(AttributeError, match=r"no attribute 'transformer'\.$"):
        optaxclip.__getattr__("transformer")
    assert not hasattr(optaxclip, "__path_of_nothing__")


SILENT = {
    "only integers": (
        lambda: (
            update(clip_by_global_norm(1.0))
            and clip_by_global_norm(1.0).update({"w": jnp.array([3, 4])}, None)
        ),
        ("clip_by_global_norm", "'w'", "int32"),
    ),
    "a percentile that is a share": (
        lambda: optaxclip.autoclip(0.1),
        ("autoclip", "percentile=0.1", "percentile=10"),
    ),
    "only a clipper under skip_nonfinite": (
        lambda: optaxclip.skip_nonfinite(clip_by_global_norm(1.0)).init(GRADS),
        ("skip_nonfinite", "ClipState", "optax.chain(clipper, optimizer)"),
    ),
}


@pytest.mark.parametrize("name", SILENT)
def test_what_runs_but_is_not_meant_warns(name):
    code, says = SILENT[name]
    with pytest.warns(UserWarning) as caught:
        code()
    (text,) = {str(each.message) for each in caught}
    assert [part for part in says if part not in text] == [], text


def test_rules_without_parentheses_are_rules():
    def limits(limit):
        clipper = clip_by_global_norm(limit)
        state = clipper.init(GRADS)
        for _ in range(3):
            _, state = clipper.update(GRADS, state)
        return state

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert limits(rules.growth).limit == limits(rules.growth()).limit < jnp.inf


def test_labels_may_be_a_function_of_path_and_leaf():
    def labels(path, leaf):
        return "matrix" if leaf.size > 1 and path == "w" else "vector"

    clipper = optaxclip.clip_by_group_norm(1.0, labels)
    _, state = apply(clipper, GRADS)
    assert {k: float(v.norm) for k, v in state.by_name().items()} == {
        "matrix": 5.0,
        "vector": 1.0,
    }


def test_a_loss_of_three_arguments_takes_both_batches():
    def loss(w, x, y):
        return (w * x - y) ** 2

    x, y = jnp.array([1.0, 2.0]), jnp.array([3.0, 4.0])
    found = optaxclip.clipped_grad(loss, None)(jnp.array(0.5), x, y)
    # mean of 2 (w x - y) x over both examples
    assert found.grads == (2 * (0.5 - 3) * 1 + 2 * (1 - 4) * 2) / 2


def test_skip_step_does_without_a_loss_unless_told():
    optimizer = optaxclip.skip_step(optax.sgd(1.0), window=4)
    state = optimizer.init(jnp.zeros(1))
    for grad in (1.0, 2.0, 9.0):
        updates, state = optimizer.update(jnp.array([grad]), state)
    assert (float(updates[0]), int(state.skipped)) == (0.0, 1)


def test_skip_step_looks_at_a_loss_that_is_given():
    optimizer = optaxclip.skip_step(optax.sgd(1.0), window=4)
    state = optimizer.init(jnp.zeros(1))
    for loss in (1.0, 1.1, 90.0):
        updates, state = optimizer.update(jnp.ones(1), state, value=jnp.float32(loss))
    assert (float(updates[0]), int(state.skipped)) == (0.0, 1)
