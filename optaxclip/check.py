"""Functions and the command around `check_step`.

assert_right       raises in a test of a trainer
of_train_state     makes `make_step` of a step from train state to train state

python -m optaxclip.check module:make_step
"""

import argparse
import pkgutil
import sys
import traceback
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.typing import ArrayLike

from ._check_step import Finding, check_step
from ._check_step.runs import DEVICES, SETTINGS, Setting, Step

__all__ = ["assert_right", "of_train_state"]


def assert_right(
    make_step: Callable[[Setting], Step],
    *,
    settings: str | list[str] | tuple[str, ...] = tuple(SETTINGS),
) -> None:
    """Raises an AssertionError with a table of what `check_step` finds.

    Call it in a test of a trainer:

        def test_norm_and_clip():
            optaxclip.check.assert_right(make_step)

    Args:
      make_step: a function of a setting that returns the step of a trainer, as
        `check_step` takes it.
      settings: the names of the settings to run, or one name.

    Raises:
      AssertionError: a norm or a clip is wrong.
      TypeError, ValueError, RuntimeError: as `check_step` raises them.

    Example:
      >>> def make_step(setting):
      ...     @jax.jit
      ...     def step(params, batch):
      ...         grads = jax.grad(setting.loss)(params, batch)
      ...         return grads, optax.tree.norm(grads)  # it does not clip
      ...     return step
      >>> optaxclip.check.assert_right(make_step, settings="replicated")
      Traceback (most recent call last):
      AssertionError: check_step found what is wrong:
      setting      case   what      wanted     found  kind
      replicated   above  update      0.25      9.25  not_clipped
      not_clipped: gradients above the limit are not clipped
    """
    findings = check_step(make_step, settings=settings)
    if findings:
        raise AssertionError(f"check_step found what is wrong:\n{_table(findings)}")


def of_train_state(
    train_step: Callable[[Any, Any, Any], tuple[Any, Any]],
    create: Callable[..., Any],
    clip: Callable[[float], optax.GradientTransformation],
    norm: Callable[[Any], ArrayLike],
) -> Callable[[Setting], Step]:
    """Returns `make_step` for a step from a train state to the next, as in flax and
    MaxText.

    The step runs under `jax.jit`, with the loss as a constant.

    `train_step` is not told of a setting's mesh, specs and micro-batches. In
    "accumulated" nothing is accumulated unless `train_step` splits batches by itself.

    Args:
      train_step: called as `train_step(state, batch, loss)`. It returns the next state,
        which has `params`, and metrics.
      create: `TrainState.create` of flax, or a function that is called the same way,
        with `apply_fn`, `params` and `tx`. `apply_fn` is the loss.
      clip: makes the clipper of a limit, such as `optax.clip_by_global_norm`. `tx` is
        this clipper before `optax.sgd(1.0)`.
      norm: a function from metrics to the global norm before clipping.

    Returns:
      A function for `check_step`, `assert_right` and the command.

    Example:
      >>> import collections
      >>> State = collections.namedtuple("State", "apply_fn params tx")
      >>> def train_step(state, batch, loss):
      ...     grads = jax.grad(loss)(state.params, batch)
      ...     updates, _ = state.tx.update(grads, state.tx.init(grads))
      ...     params = optax.apply_updates(state.params, updates)
      ...     return state._replace(params=params), {"norm": optax.tree.norm(updates)}
      >>> make_step = optaxclip.check.of_train_state(
      ...     train_step, State, optax.clip_by_global_norm, lambda log: log["norm"]
      ... )
      >>> for row in optaxclip.check_step(make_step, settings="replicated"):
      ...     print(row.case, row.what, row.kind)
      above norm after_clip
    """

    def make_step(setting: Setting) -> Step:
        optimizer = optax.chain(clip(setting.max_norm), optax.sgd(1.0))

        @jax.jit
        def step(params: Any, batch: Any) -> tuple[Any, ArrayLike]:
            state = create(apply_fn=setting.loss, params=params, tx=optimizer)
            state, metrics = train_step(state, batch, setting.loss)
            return state.params, norm(metrics)

        return step

    return make_step


def _table(findings: list[Finding]) -> str:
    """A line for each finding, and a line for the meaning of each kind."""
    lines = ["setting      case   what      wanted     found  kind"]
    meanings = {}
    for finding in findings:
        place = f"{finding.setting:12} {finding.case:6} {finding.what:6}"
        numbers = f"{finding.wanted:9.4g} {finding.found:9.4g}"
        lines.append(f"{place} {numbers}  {finding.kind}")
        meanings[finding.kind] = finding.meaning
    lines += [f"{kind}: {meaning}" for kind, meaning in meanings.items()]
    return "\n".join(lines)


def object_of(name: str) -> Any:
    """The object of a name `module:name`, which stands on a command line."""
    try:
        return pkgutil.resolve_name(name)
    except Exception as error:
        # The traceback shows an error of the module itself. That of a name that leads
        # nowhere ends in Python's own lines, and would say nothing more.
        *_, last_line = traceback.extract_tb(error.__traceback__)
        leads_nowhere = last_line.filename.startswith((pkgutil.__file__, "<frozen"))
        if not leads_nowhere or isinstance(error, SyntaxError):
            traceback.print_exc()
        raise argparse.ArgumentTypeError(f"cannot import {name!r}: {error}.") from None


def main(arguments: list[str] | None = None) -> None:
    """Checks norm and clip of a training step on eight CPU devices. Ends with 1 if
    something is wrong, and with 2 if there is no such step or it raises an error.
    """
    # Before the module of the step computes anything.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    parser = argparse.ArgumentParser(
        prog="python -m optaxclip.check",
        description=main.__doc__,
        # In front of the step --settings would take it for the name of a setting.
        usage="%(prog)s [-h] module:make_step [--settings NAME ...]",
    )
    parser.add_argument(
        "make_step",
        type=object_of,
        metavar="module:make_step",
        help="see help(optaxclip.check_step)",
    )
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=[*SETTINGS])
    options = parser.parse_args(arguments)
    try:
        findings = check_step(options.make_step, settings=options.settings)
    except Exception:
        traceback.print_exc()
        sys.exit(2)
    if findings:
        print(_table(findings))
    wrong = {finding.setting for finding in findings}
    right = [name for name in options.settings if name not in wrong]
    print(f"right: {', '.join(right) or 'none'}")
    sys.exit(1 if findings else 0)


if __name__ == "__main__":
    main()
