"""Is the norm of a training step right, and does it clip as it should?

runs    runs the step with gradients whose norm is known in float64
bugs    names the bug that gives the same wrong norm or update
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .._arguments.checks import check_choice
from .bugs import MEANINGS, bug_of_norm, bug_of_update, peers_of
from .runs import DEVICES, SETTINGS, Run, Setting, Step, norm_of, runs_of


class Finding(NamedTuple):
    """One number that is wrong."""

    setting: str
    case: str  # gradients "above" or "below" the limit, or with a "nan"
    what: str  # "norm", as it is returned, or "update", for its length
    wanted: float  # with a "nan": the number of devices that should have one
    found: float  # with a "nan": the number of devices that have one
    kind: str  # the name of the bug
    meaning: str  # what is wrong, and what to do


def check_step(
    make_step: Callable[[Setting], Step],
    *,
    settings: str | list[str] | tuple[str, ...] = tuple(SETTINGS),
) -> list[Finding]:
    """Runs a training step on eight CPU devices with gradients that are known.

    Returns what is wrong with its norm and its clip by a global norm, by how much, and
    which known bug gives this number. It knows no clipper: a step with optax's, with
    ours, or one that is written by hand is checked alike. Run it in a test of a
    trainer (`optaxclip.check.assert_right`), or as a command that ends with 1 if there
    is a finding:

        python -m optaxclip.check module:make_step

    Args:
      make_step: a function of a setting that returns the step of a trainer. A setting
        has

        - `mesh`: eight devices along the axes "data" and "expert", in "small_limit"
          four,
        - `specs`: a PartitionSpec for each leaf of params, gradients and updates,
        - `batch_specs`: the same for a batch, whose first dimension is split along
          "data",
        - `max_norm`: the limit of the global norm,
        - `microbatches`: into how many a step that accumulates gradients splits its
          batch: 3 in the setting "accumulated", else 1,
        - `loss`: a function of params and batch. Its gradient is the mean of the batch
          over the first dimension,
        - `name`: one of the names below.

        The step is called as `step(params, batch)` with dicts of arrays, placed by
        these specs. A leaf of the batch holds the gradient of each example, and so has
        one dimension more than that of params. The first weight of each leaf is not 0,
        and has no gradient. The step returns a tuple: new params, updates or clipped
        gradients, with SGD of learning rate 1 as the optimizer, and the global norm
        before clipping, a scalar.
        Jit the step. Without jit it runs as many programs, whose devices may wait for
        each other on a machine of few cores until XLA ends Python.
      settings: what to run, a name or several.

        - "replicated": data parallel, gradients above the limit, below it, and with a
          NaN on one device.
        - "small_limit": as "replicated", on four devices, with a limit of 1e-6.
        - "accumulated": as "replicated", in three micro-batches.
        - "fsdp": two leaves are split along "data", one is not.
        - "experts": one leaf is split along "expert", gradients are averaged along
          "data".
        - "bfloat16", "float16": replicated, of these dtypes.

    Returns:
      A list of findings, empty where all is right. Each has the fields `setting`,
      `case` (gradients "above" or "below" the limit, or with a "nan"), `what` ("norm",
      or "update" for its length), `wanted` and `found` (with a "nan" the numbers of
      devices that have one), `kind` (the name of the bug) and `meaning`. The page
      "Wrong norms of 2026" lists the kinds.

    Raises:
      TypeError: what cannot be called with a setting, such as the step itself, or a
        step that does not return such a tuple.
      ValueError: an unknown setting, or arrays of other shapes than those of params.
      RuntimeError: fewer than eight CPU devices.

    Example:
      >>> def make_step(setting):
      ...     clipper = optax.clip_by_global_norm(setting.max_norm)
      ...     optimizer = optax.chain(clipper, optax.sgd(1.0))
      ...     @jax.jit
      ...     def step(params, batch):
      ...         grads = jax.grad(setting.loss)(params, batch)
      ...         updates, _ = optimizer.update(grads, optimizer.init(params))
      ...         norm = optax.tree.norm(updates)  # too late: it is clipped
      ...         return optax.apply_updates(params, updates), norm
      ...     return step
      >>> for row in optaxclip.check_step(make_step, settings="fsdp"):
      ...     print(row.case, row.what, round(row.wanted, 3), row.kind)
      above norm 9.25 after_clip
    """
    _check_make_step(make_step)
    names = settings if isinstance(settings, (list, tuple)) else [settings]
    if not names:
        raise ValueError(
            "check_step: settings must name at least one setting, got none."
        )
    for name in names:
        check_choice("check_step: settings", name, tuple(SETTINGS))
    count = len(jax.devices("cpu"))
    if count < DEVICES:
        raise RuntimeError(
            f"check_step: {DEVICES} CPU devices are needed, got {count}: call "
            f'jax.config.update("jax_num_cpu_devices", {DEVICES}) before anything is '
            "computed, or run python -m optaxclip.check."
        )
    runs: list[Run] = []
    for name in names:
        try:
            runs += runs_of(make_step, SETTINGS[name])
        except Exception as error:
            error.add_note(
                f"check_step: Raised in setting {name!r}. Pass settings=... without it "
                "to skip it."
            )
            raise
    peers = peers_of(runs)
    findings: list[Finding] = []
    for run in runs:
        if run.case == "nan":
            findings += _findings_of_nan(run)
        else:
            findings += _findings(run, peers)
    return findings


def _check_make_step(make_step: Any) -> None:
    """Refuses anything but a function that can be called with a setting."""
    try:
        inspect.signature(make_step).bind("setting")
    except TypeError as error:
        reason = str(error)[:200]  # Python shows a long value whole
        raise TypeError(
            f"check_step: make_step must take a setting and return a step: {reason}. "
            "Define the step inside make_step(setting), with setting.loss as its loss."
        ) from None


def _findings(run: Run, peers: Sequence[Run]) -> Iterator[Finding]:
    """Finds what is wrong with the norm of a run, and with its update."""
    norms = run.step_norms
    if not run.is_close(norms, run.norm).all():
        worst_norm = norms[np.argmax(abs(norms - run.norm))]
        bug = bug_of_norm(run, peers)
        yield _finding(run, "norm", wanted=run.norm, found=worst_norm, bug=bug)
    bug = bug_of_update(run, peers)
    if bug:
        wanted = min(run.norm, run.limit)
        length = norm_of([*run.update, *run.drift])
        yield _finding(run, "update", wanted=wanted, found=length, bug=bug)


def _findings_of_nan(run: Run) -> Iterator[Finding]:
    """Finds devices that diverge after a NaN, or a norm that hides it."""
    norms = run.step_norms
    devices = norms.size
    nan_norms = np.isnan(norms).sum()
    nan_updates = run.update_has_nan.sum()
    bug = "nan_on_one_device"
    # np.unique counts all NaN as one number. Norms may differ without a NaN, where a
    # device has put 0 in its place.
    if np.unique(norms).size > 1:
        yield _finding(run, "norm", wanted=devices, found=nan_norms, bug=bug)
    # A NaN in a leaf that is split is on one device, and rightly so. Copies that differ
    # show that devices diverge.
    if run.replicas_differ and nan_updates < devices:
        yield _finding(run, "update", wanted=devices, found=nan_updates, bug=bug)
    elif nan_updates > 0 and np.isfinite(norms).all():
        yield _finding(run, "norm", wanted=devices, found=0, bug="nan_hidden")


def _finding(run: Run, what: str, *, wanted: float, found: float, bug: str) -> Finding:
    return Finding(
        setting=run.setting.name,
        case=run.case,
        what=what,
        wanted=float(wanted),
        found=float(found),
        kind=bug,
        meaning=MEANINGS[bug],
    )
