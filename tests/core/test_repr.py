"""What a notebook and a shell show: states, rules, shrinks, `python -m optaxclip`."""

import jax
import jax.numpy as jnp
import optax
import pytest

import optaxclip
from optaxclip import rules, shrinks
from optaxclip.__main__ import main
from tests.methods import METHODS

WIDE = {
    f"layer{i}": {"kernel": jnp.ones((4, 3)), "bias": jnp.ones(3)} for i in range(3)
}


@pytest.mark.parametrize("name", METHODS)
def test_a_state_is_shown_in_200_characters(name):
    method = METHODS[name].make()
    state = method.init(WIDE)
    _, later = method.update(WIDE, state, WIDE)
    assert max(len(repr(state)), len(repr(later))) <= 200


def test_a_state_shows_its_numbers_inside_a_chain():
    grads = jnp.array([3.0, 4.0])
    optimizer = optax.chain(optaxclip.clip_by_global_norm(1.0), optax.sgd(0.1))
    _, state = optimizer.update(grads, optimizer.init(grads))
    counts = "step=1, clipped=1, nonfinite=0"
    numbers = "norm=5, limit=1, factor=0.2, clipped_recently=1"
    assert f"(ClipState({counts}, {numbers}, names=['']), " in repr(state)


def test_a_window_and_weights_are_shown_by_their_shape():
    optimizer = optaxclip.skip_step(optax.adam(0.1), window=64)
    shown = repr(optimizer.init(WIDE))
    counts = "step=0, skipped=0, nonfinite=0, consecutive=0"
    assert shown.startswith(f"SkipState({counts}, norm=0, limit=inf, loss=-inf,")
    assert "past=float32[64]" in shown
    state = optaxclip.clip_by_tensor_norm(1.0).init(WIDE)
    assert "clipped=int32[6]" in repr(state)


def test_a_traced_and_a_donated_state_are_shown():
    clipper = optaxclip.clip_by_global_norm(1.0)
    grads, shown = jnp.ones(3), []

    def step(state):
        shown.append(repr(state))
        return clipper.update(grads, state)[1]

    state = clipper.init(grads)
    jax.jit(step, donate_argnums=0)(state)
    shapes = jax.eval_shape(clipper.init, grads)
    for text in (*shown, repr(state), repr(shapes)):
        assert text == "ClipState(counts=int32[3], numbers=float32[4], names=[''])"


class Median(rules.Rule):
    factor: float = 2.0


RULES = [
    (rules.ema(0.9), "ema(decay=0.9)"),
    (rules.constant(jnp.array([1.0, 2.0])), "constant(limit=[1, 2])"),
    (rules.constant(jnp.array([1.0, 2.0, 3.0])), "constant(limit=[1, 2, 3])"),
    (rules.constant(jnp.ones(4)), "constant(limit=float32[4])"),
    (rules.growth(optax.linear_schedule(1.0, 2.0, 9)), "growth(rate=schedule, "),
    (rules.maximum(rules.ema(0.9), 1.0), "maximum(rules=(ema(decay=0.9), con"),
    (Median(), "Median(factor=2.0)"),
    (rules.constant(jnp.ones((40, 8))), "constant(limit=float32[40, 8])"),
    (rules.constant(jnp.bfloat16(2)), "constant(limit=2)"),
]


def test_a_rule_is_shown_as_its_call():
    for rule, shown in RULES:
        assert repr(rule).startswith(shown)


CLIP = optaxclip.clip_by_global_norm(2.0, eps=0.1)
CALLS = [
    ("clip_by_global_norm", (1.0,), {}, "clip_by_global_norm(max_norm=1.0)"),
    ("zclip", (), {"z": 3.0}, "zclip(z=3.0)"),
    ("clip_by_tensor_norm", (WIDE,), {}, "clip_by_tensor_norm(max_norm={'layer0': "),
    ("carry_clipped", (CLIP,), {}, "carry_clipped(clipper=clip_by_global_norm("),
    ("clip_by_value", (1.0,), {}, "clip_by_value(max_value=1.0)"),
    ("clip", (0.5,), {}, "clip(max_delta=0.5)"),
    ("skip_step", (optax.sgd(0.1),), {}, "skip_step(inner=chain(...))"),
]


def test_a_clipper_is_shown_as_its_call():
    for name, args, named, shown in CALLS:
        clipper = getattr(optaxclip, name)(*args, **named)
        assert repr(clipper).startswith(shown)
        assert len(repr(clipper)) <= 200
        assert isinstance(clipper, optax.GradientTransformationExtraArgs)


def test_a_long_call_is_cut_to_200_characters():
    limits = {f"layer {number}": 1.0 for number in range(50)}
    shown = repr(optaxclip.clip_by_tensor_norm(limits))
    # A field is cut to 60.
    assert len(shown) == len("clip_by_tensor_norm(max_norm=)") + 60
    options = {"eps": 0.125, "ord": 3, "nonfinite": "zero", "allow_missing": True}
    options["mesh_axes"] = "x" * 30, "y" * 30
    shown = repr(optaxclip.clip_by_group_norm(limits, "label" * 60, **options))
    assert len(shown) == 200 and shown.endswith("...)")


def test_shrinks_are_shown_with_their_number():
    assert "smooth(2)" in repr(shrinks.smooth(2.0))
    assert "auto_s(0.01)" in repr(shrinks.auto_s())
    assert "psac(0.5)" in repr(shrinks.psac(0.5))


def test_a_rule_in_a_call_shows_its_schedules_and_its_shrink():
    rule = rules.growth(optax.linear_schedule(1.0, 2.0, 3))
    assert "rate=schedule" in repr(optaxclip.clip_by_global_norm(rule))
    assert "rate=schedule" in repr(rules.minimum(rule))
    clipper = optaxclip.clip_by_global_norm(1.0, shrink=shrinks.smooth(3.0))
    assert "shrink=smooth(3)" in repr(clipper)


def test_python_m_optaxclip_says_what_runs_here(capsys):
    main()
    printed = capsys.readouterr().out
    for word in (optaxclip.__version__, jax.__version__, optax.__version__, "cpu"):
        assert word in printed
    assert "python -m optaxclip.doctor" in printed
