"""What people get wrong: `mistakes.txt` has each program, and below it the error."""

import re
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.sparse import BCOO
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import optaxclip
from optaxclip import clip_by_global_norm, rules
from optaxclip._arguments.other_names import FUNCTIONS
from tests.helpers import apply

GRADS = {"w": jnp.array([3.0, 4.0]), "b": jnp.array([1.0])}
LABELS = {"w": "matrix", "b": "vector"}
ATTENTION = {"q": jnp.ones((4, 2, 3)), "k": jnp.ones((4, 2, 3))}
AT = {"queries": {"*q": 1}, "keys": {"*k": 1}}
TWICE = BCOO((jnp.array([3.0, 4.0]), jnp.array([[1], [1]])), shape=(5,))
LAYERS = {
    "layers": {"up": jnp.ones((4, 6, 6)), "bias": jnp.ones((4, 6))},
    "bias": jnp.ones(6),
}


def update(clipper: Any, state: Any = None, params: Any = None) -> Any:
    return clipper.update(GRADS, state, params)


def scanned(params: Any, x: Any) -> Any:
    """The loss of a model that scans its layers."""

    def layer(x: Any, own: Any) -> Any:
        return jnp.tanh(x @ own["up"] + own["bias"]), None

    x, _ = jax.lax.scan(layer, x, params["layers"])
    return jnp.sum(x * params["bias"])


def inside(clipper: Any, name: str = "x") -> Any:
    """The first update inside shard_map over the mesh axis "x"."""
    mesh = Mesh(jax.devices()[:2], ("x",))

    def first(grads: Any) -> Any:
        return apply(clipper, grads)[0]

    run = jax.shard_map(first, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    return run(jnp.ones(4))


def in_pmap(clipper: Any) -> Any:
    def first(grads: Any) -> Any:
        return apply(clipper, grads)[0]

    return jax.pmap(first, axis_name="devices")(jnp.ones((1, 2)))


def table() -> dict[str, str]:
    """From code to the text of its error, "..." for anything."""
    found: dict[str, str] = {}
    code = ""
    for line in Path(__file__).with_name("mistakes.txt").read_text().splitlines():
        if line.startswith(" "):
            found[code] = f"{found.get(code, '')} {line.strip()}".strip()
        elif line and not line.startswith("#"):
            code = line
    return found


MISTAKES = table()
PUBLIC = {name: getattr(optaxclip, name) for name in optaxclip.__all__}
NAMES = {**vars(optaxclip), **PUBLIC, **globals(), "np": np}


def error_of(code: str) -> str:
    """The first line of the error that the code raises."""
    try:
        eval(code, NAMES)
    except (AttributeError, TypeError, ValueError) as error:
        first = str(error).partition("\n")[0]
        return f"{type(error).__name__}: {first}"
    return "no error"


def test_every_error_says_what_to_do():
    other = {}
    for code, text in MISTAKES.items():
        # "..." stands for anything before a space, a colon or the end.
        pattern = re.sub(r"(\\\.){3}(?=\\ |:|$)", ".*", re.escape(text))
        error = error_of(code)
        if not re.fullmatch(pattern, error):
            other[code] = error
    assert not other


def test_every_function_of_others_is_among_the_mistakes():
    tried = {code.removeprefix("optaxclip.").lower() for code in MISTAKES}
    for name in FUNCTIONS:
        assert {name, f"{name}_"} & tried, name


@pytest.mark.parametrize(
    "module",
    ["", "rules", "shrinks", "replay", "per_example", "dropin.keras", "dropin"],
)
def test_completion_offers_public_names_alone(module):
    found = import_module(f"optaxclip.{module}".rstrip("."))
    assert dir(found) == sorted(found.__all__)


SILENT = {
    "only integers": (
        lambda: clip_by_global_norm(1.0).update({"w": jnp.array([3, 4])}, None),
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


def test_an_optimizer_without_a_state_is_no_mistake(recwarn):
    sgd = optax.GradientTransformation(lambda p: (), optax.sgd(1.0).update)
    optaxclip.skip_nonfinite(optax.chain(clip_by_global_norm(1.0), sgd)).init(GRADS)
    assert not recwarn


def test_skip_step_does_without_a_loss_unless_told():
    optimizer = optaxclip.skip_step(optax.sgd(1.0), window=4)
    state = optimizer.init(jnp.zeros(1))
    for grad in (1.0, 2.0, 9.0):
        updates, state = optimizer.update(jnp.array([grad]), state)
    assert (float(updates[0]), int(state.skipped)) == (0.0, 1)
