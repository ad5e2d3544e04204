"""What would a rule have done? It is run over recorded norms, without training
anything.

    python -m optaxclip.replay run.csv        a table of candidate thresholds, and
                                              run.png with norms, limits and clipped
                                              steps

What replay knows: which steps a rule would have clipped, and by how much, had the norms
come as they did. What it cannot know: the norms that would have come. A clipped step
leads elsewhere, so after the first clipped step the record is of another run; norms
recorded under clipping are those of the clipped run. Take the table as a place to
start, not as a forecast of the loss.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..adaptive import windowed_quantile, z_score
from .._core._kernel import ask
from .._core._factors import scale_of
from .._norms._types import varying_as
from ..shrinks import Shrink, hard
from .._wrappers._skip import step_rule
from ..rules._constant import Threshold, rule_of
from .history import read_history as read_history


class Replay(NamedTuple):
    """What a rule made of recorded norms: arrays of the norms' shape, one entry for
    each step.
    """

    norms: jax.Array  # float32[steps, ...]: as recorded
    limits: jax.Array  # float32[steps, ...]: what each was held against
    # float32[steps, ...]: what the updates would have been multiplied by; NaN where the
    # norm was not finite
    scales: jax.Array
    # bool[steps, ...]: the steps that would have been changed, non-finite ones left out
    clipped: jax.Array


class Suggestion(NamedTuple):
    """One candidate threshold."""

    rule: (
        str  # as it is written in a program; skip_step(...) stands around an optimizer
    )
    limit: float  # the limit at the last step
    clip_rate: float  # share of steps clipped, in [0, 1]
    # what the clipped steps would have been multiplied by, on average; 1 where none was
    mean_scale: float


def replay(rule: Any, norms: Any, *, shrink: Shrink | None = None) -> Replay:
    """Runs a rule over a history of norms, as one `lax.scan`.

    Args:
      rule: a `Threshold`, a number, a schedule, or None.
      norms: the history, [steps], or [steps, ...] for many norms side by side, each
        with a memory of its own.
      shrink: what becomes of overlong norms; None for `hard`.

    Returns:
      A `Replay`. Run many rules at once with `jax.vmap(lambda q:
      replay(windowed_quantile(q), norms))(quantiles)`.

    Raises:
      ValueError: a single number in place of a history, or no norm at all.

    Example:
      >>> import optaxclip
      >>> print(optaxclip.replay(2.0, [1.0, 4.0, 2.0]).scales)
      [1.  0.5 1. ]
    """
    norms = jnp.asarray(norms)
    norms = norms.astype(jnp.promote_types(norms.dtype, jnp.float32))
    if norms.ndim == 0 or not norms.size:
        raise ValueError(
            "replay: norms must be a history, one norm for each step, got an array of "
            f"shape {norms.shape}."
        )
    rule = rule_of(rule, "replay: rule")
    return Replay(
        norms, *_clipped(shrink or hard, norms, _scan(rule, _begin(rule, norms), norms))
    )


def suggest(norms: Any) -> list[Suggestion]:
    """Candidate thresholds for a history of norms, each with the share of steps that it
    would have clipped.

    Args:
      norms: the history, [steps]. Norms that are NaN, inf or 0 are left out.

    Returns:
      Fixed limits first, from quantiles of the norms (Pascanu et al. take half to ten
      times the usual norm), then rules that learn. See the module for what this cannot
      know.

    Raises:
      ValueError: fewer than two finite norms.
    """
    norms = np.asarray(norms, np.float64).reshape(-1)
    norms = norms[np.isfinite(norms) & (norms > 0)]
    if norms.size < 2:
        raise ValueError(
            "suggest: norms must hold at least two finite norms above 0, got "
            f"{norms.size}."
        )
    candidates, history = _candidates(norms), jnp.asarray(norms)
    rules = [rule_of(rule, "suggest: rule") for _, rule in candidates]
    found = _all([(rule, _begin(rule, history)) for rule in rules], history)
    return [
        _suggestion(name, *map(np.asarray, result))
        for (name, _), result in zip(candidates, found)
    ]


@jax.jit
def _all(
    rules: list[tuple[Threshold, Any]], norms: jax.Array
) -> list[tuple[jax.Array, jax.Array, jax.Array]]:
    """Many rules with what they remember, in one program, since compiling is what takes
    time.
    """
    return [_clipped(hard, norms, _scan(rule, memory, norms)) for rule, memory in rules]


@jax.jit
def _scan(rule: Threshold, memory: Any, norms: jax.Array) -> jax.Array:
    def step(carry: Any, norm: jax.Array) -> tuple[Any, jax.Array]:
        count, memory = carry
        limit, memory = ask(rule, norm, memory, count, argument="replay: rule")
        return (count + 1, memory), limit

    return jax.lax.scan(step, (jnp.zeros((), jnp.int32), memory), norms)[1]


def _begin(rule: Threshold, norms: jax.Array) -> Any:
    """What the rule remembers before the first norm."""
    start = jnp.zeros(norms.shape[1:], norms.dtype)
    return rule.init(varying_as(start, jax.typeof(norms)))


@partial(jax.jit, static_argnums=0)
def _clipped(
    shrink: Shrink, norms: jax.Array, limits: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(limits, scales, what was clipped)."""
    finite, off = jnp.isfinite(norms), jnp.isinf(limits)
    after = jnp.where(off, norms, shrink(norms, jnp.where(off, 1.0, limits)))
    scales = jnp.where(finite, scale_of(norms, after), jnp.nan)
    return limits, scales, finite & (after != norms)


def _candidates(norms: np.ndarray) -> list[tuple[str, Any]]:
    fixed = [float(f"{np.quantile(norms, q):.3g}") for q in (0.5, 0.9, 0.95, 0.99)]
    fixed.append(float(f"{5 * np.median(norms):.3g}"))
    rules = [
        ("autoclip(10)", windowed_quantile(0.1, 10_000, current=True)),
        (
            "clip_by_global_norm(windowed_quantile(0.9, 1000))",
            windowed_quantile(0.9, 1000),
        ),
        (
            "clip_by_global_norm(windowed_quantile(0.5, 100, factor=2.0))",
            windowed_quantile(0.5, 100, factor=2.0),
        ),
        ("zclip()", z_score()),
        ("skip_step(...)", step_rule()),
    ]
    return [
        (f"clip_by_global_norm({limit:g})", limit) for limit in sorted(set(fixed))
    ] + rules


def _suggestion(
    name: str, limits: np.ndarray, scales: np.ndarray, clipped: np.ndarray
) -> Suggestion:
    scales = scales[clipped]
    return Suggestion(
        name,
        float(limits[-1]),
        float(clipped.mean()),
        float(scales.mean()) if scales.size else 1.0,
    )
