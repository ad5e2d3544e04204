"""States of other transformations are refused, in every method."""

import jax
import jax.numpy as jnp
import optax
import pytest

import optaxclip
from tests.arguments.refusals import TREE, refused

# a transformation, a state that is not its own, and what is said of it
OTHERS_STATES = {
    "optax": (
        optaxclip.clip_by_global_norm(1.0),
        optax.sgd(1.0, 0.9).init(TREE)[0],
        "clip_by_global_norm: state must be the ClipState that its init returned, got "
        "TraceState",
    ),
    "chain": (
        optaxclip.clip_by_tensor_norm(1.0),
        (optax.EmptyState(),),
        "clip_by_tensor_norm: state must be the ClipState that its init returned, got "
        "tuple",
    ),
    "value": (
        optaxclip.clip_by_value(1.0),
        optax.sgd(1.0, 0.9).init(TREE)[0],
        "clip_by_value: state must be the ClipByValueState that its init returned, got "
        "TraceState",
    ),
    "adagc": (
        optaxclip.adagc(),
        optax.EmptyState(),
        "adagc: its limit learns from earlier norms, so update needs the state of the "
        "step before, got EmptyState(). Begin with state = clipper.init(params)",
    ),
    "spam": (
        optaxclip.spam(),
        optax.EmptyState(),
        "spam: state must be the SpamState that its init returned, got EmptyState(): "
        "begin with state = optimizer.init(params)",
    ),
    "reset": (
        optaxclip.reset_momentum(optax.sgd(1.0)),
        (),
        "reset_momentum: state must be the ResetState that its init returned, got "
        "tuple",
    ),
    "skip": (
        optaxclip.skip_spikes(optax.sgd(1.0), 1.0),
        (),
        "skip_spikes: state must be the SkipState that its init returned, got tuple",
    ),
    "carry": (
        optaxclip.carry_clipped(optaxclip.clip_by_global_norm(1.0)),
        (),
        "carry_clipped: state must be the CarryState that its init returned, got tuple",
    ),
    "no memory": (
        optaxclip.clip_by_global_norm(optaxclip.rules.z_score()),
        optaxclip.clip_by_global_norm(1.0).init(TREE),
        "clip_by_global_norm: state was made with another rule. z_score remembers "
        "ZScoreMemory(seen='int32[]', mean='float32[]', deviation='float32[]'), and "
        "the state has nothing. Begin with a new one: state = optimizer.init(params).",
    ),
    "memory": (
        optaxclip.clip_by_global_norm(1.0),
        optaxclip.clip_by_global_norm(optaxclip.rules.growth()).init(TREE),
        "clip_by_global_norm: state was made with another rule. constant remembers "
        "nothing, "
        "and the state has float32[]. Begin with a new one",
    ),
    "one norm": (
        optaxclip.clip_by_tensor_norm(1.0),
        optaxclip.clip_by_global_norm(1.0).init(TREE),
        "clip_by_tensor_norm: state was made for norms of everything, but the updates "
        "have norms of 'b', 'w'.",
    ),
    "no groups": (
        optaxclip.clip_by_group_norm(1.0, {"w": "x", "b": "y"}),
        optaxclip.clip_by_global_norm(1.0).init(TREE),
        "clip_by_group_norm: state was made for norms of everything, but the updates "
        "have norms of 'x', 'y'.",
    ),
    "layers": (
        optaxclip.clip_by_tensor_norm(1.0, stacked={"w": 1, "b": None}),
        optaxclip.clip_by_tensor_norm(1.0).init(TREE),
        "clip_by_tensor_norm: state was made for 1 norms in 'w', but the updates have "
        "2.",
    ),
    "leaves of spam": (
        optaxclip.spam(),
        optaxclip.spam().init({"w": jnp.ones((2, 3))}),
        "spam: state was made for the leaves 'w', but the updates have 'b', 'w'. Begin "
        "with a new one: state = optimizer.init(params).",
    ),
    "shape of spam": (
        optaxclip.spam(),
        optaxclip.spam().init({**TREE, "w": jnp.ones((2, 4))}),
        "spam: state was made for the leaf 'w' of shape (2, 4), but its update has "
        "(2, 3).",
    ),
    "leaves of carry": (
        optaxclip.carry_clipped(optaxclip.clip_by_global_norm(1.0)),
        optaxclip.carry_clipped(optaxclip.clip_by_global_norm(1.0)).init([1.0]),
        "carry_clipped: state was made for the leaves '0', but the updates have "
        "'b', 'w'.",
    ),
    "new leaf": (
        optaxclip.clip_by_tensor_norm(1.0),
        optaxclip.clip_by_tensor_norm(1.0).init({**TREE, "b": None}),
        "clip_by_tensor_norm: state was made for norms of 'w', but the updates have "
        "norms of 'b', 'w'.",
    ),
}


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", OTHERS_STATES)
def test_a_state_of_something_else_is_refused(name, jit):
    clipper, state, text = OTHERS_STATES[name]
    refused(
        (TypeError, ValueError),
        text,
        lambda: (jax.jit(clipper.update) if jit else clipper.update)(TREE, state, TREE),
    )


def test_clippers_of_papers_refuse_a_state_under_their_own_names():
    for name in ("autoclip", "zclip", "adagn"):
        for scope in ("global", "tensor", lambda tree: "all"):
            with pytest.raises(
                TypeError, match=rf"^{name}: its limit learns from earlier norms"
            ):
                getattr(optaxclip, name)(scope=scope).update(TREE, optax.EmptyState())
