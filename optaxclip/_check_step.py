"""Is the norm of a training step right, and does it clip as it should?

settings    who holds which part of weights and batch, and the limit
gradients   their mean is known in float64, so norm and factor are known
step        the user's own. It is run on eight CPU devices
kinds       what the known bugs would have given instead, as numbers. The first that
            agrees with what the step gave is named
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ._checks import check_choice, check_scalar, shown

Tree = dict[str, Any]

CALL = "check_step:"
DEVICES = 8
# How each setting differs from "replicated".
SETTINGS: dict[str, dict[str, Any]] = {
    "replicated": {},
    # So small that 1e-8 beside the norm shows.
    "small_limit": {"max_norm": 1e-5},
    "accumulated": {"microbatches": 3},
    "fsdp": {"specs": {"experts": P(None, None, "data"), "matrix": P("data")}},
    "experts": {
        "specs": {"experts": P("expert")},
        "batch_specs": {"experts": P("data", "expert")},
    },
    "bfloat16": {"dtype": jnp.bfloat16},
    "float16": {"dtype": jnp.float16},
}
SHAPES = {"bias": (8,), "experts": (4, 8, 8), "matrix": (16, 8)}
# Of 16 bits. Squares of many leaves are added one after the other.
MANY = ["large", *(f"small_{number}" for number in range(64))]
# What each kind of bug means, and what to do.
KINDS = {
    "local_norm": "each device uses the gradient of its own batch: average first",
    "gradients_summed": "gradients of devices are added: average them (lax.pmean)",
    "once_per_replica": "each replica counts: do not add squares of equal gradients",
    "whole_leaves_repeated": "leaves that all devices hold count once for each",
    "split_leaves_repeated": "split leaves (experts) count once for each copy",
    "all_leaves_repeated": "leaves count once for each device with the same part",
    "own_shard": "squares of split leaves are not added (lax.psum)",
    "leaves_left_out": "only split leaves count, or only those that are whole",
    "averaged_norms": "norms or squares of shards are averaged: add squares",
    "accumulation_summed": "gradients of micro-batches are added: average them",
    "after_clip": "the norm that is returned is that of clipped gradients",
    "scaled": "gradients carry a power of two, as of a scaled loss",
    "low_precision_sum": "squares are added in bfloat16: add them in float32",
    "squares_overflow": "squares in float16 are inf: convert to float32 first",
    "nan_on_one_device": "a NaN is seen by some devices only: replicas part",
    "own_factor": "each device clips by a factor of its own: replicas part",
    "groups_apart": "leaves have different factors: clip all of them together",
    "eps": "the limit is divided by norm + eps: updates are below the limit",
    "clipped_below_limit": "gradients below the limit are changed",
    "not_clipped": "gradients above the limit are not clipped",
    "other_direction": "clipped before the average, or not by the global norm",
    "unknown": "no known bug gives this number",
}
# What another norm is, in one setting only, and whether it is above the right one.
GUESSES = {
    "small_limit": ("eps", True),
    "bfloat16": ("low_precision_sum", False),
    "float16": ("squares_overflow", True),
}


class Setting(NamedTuple):
    """What `make_step` is told."""

    name: str
    mesh: Mesh  # axes "data" and "expert"
    specs: Tree  # of params, gradients and updates
    batch_specs: Tree  # of gradients of examples, their first dimension
    max_norm: float = 1.0
    microbatches: int = 1  # parts of a batch that are accumulated
    dtype: Any = jnp.float32

    @staticmethod
    def loss(params: Tree, batch: Tree) -> jax.Array:
        """A loss whose gradient is the mean over the examples of `batch`."""
        means = jax.tree.map(lambda w, x: jnp.sum(w[None] * x) / len(x), params, batch)
        return sum(jax.tree.leaves(means), jnp.zeros(()))


class Finding(NamedTuple):
    """One number that is wrong."""

    setting: str
    gradients: str  # "above" or "below" the limit, or with a "nan"
    what: str  # "norm": what is returned. "update": the length of the update
    wanted: float
    # With a "nan": the number of devices that have one.
    found: float
    kind: str
    meaning: str  # of the kind, and what to do


def check_step(
    make_step: Callable[[Any], Callable[..., Any]],
    *,
    settings: str | Sequence[str] = tuple(SETTINGS),
) -> list[Finding]:
    """Runs a training step on eight CPU devices with gradients that are known.

    Returns what is wrong with its norm and its clip by a global norm, by how much, and
    which known bug gives this number. It knows no clipper: a step with optax's, with
    ours, or one that is written by hand is checked alike. Run it in a test of a
    trainer, or as a command that ends with 1 if there is a finding:

        python -m optaxclip.check module:make_step

    Args:
      make_step: a function of a setting that returns the step of a trainer. A setting
        has

        - `mesh`: eight devices along the axes "data" and "expert",
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
        one dimension more than that of params. The step returns a tuple: new params,
        updates or clipped gradients, with SGD of learning rate 1 as the optimizer, and
        the global norm before clipping, a scalar.
      settings: what to run, a name or several.

        - "replicated": data parallel, gradients above the limit, below it, and with a
          NaN on one device.
        - "small_limit": as before, with a limit of 1e-5.
        - "accumulated": as before, in three micro-batches.
        - "fsdp": two leaves are split along "data", one is not.
        - "experts": one leaf is split along "expert", gradients are averaged along
          "data".
        - "bfloat16", "float16": replicated, of these dtypes.

    Returns:
      A list of findings, empty where all is right. Each has the fields `setting`,
      `gradients` ("above" or "below" the limit, or with a "nan"), `what` ("norm", or
      "update" for its length), `wanted` and `found` (with a "nan" the numbers of
      devices that have one), `kind` and `meaning`. The page "Wrong norms of 2026" lists
      the kinds.

    Raises:
      TypeError: what cannot be called, or a step that does not return such a tuple.
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
      ...     print(row.gradients, row.what, round(row.wanted, 3), row.kind)
      above norm 4.0 after_clip
    """
    if not callable(make_step):
        raise TypeError(f"{CALL} make_step must be a function, got {shown(make_step)}.")
    names = (settings,) if isinstance(settings, str) else tuple(settings)
    for name in names or [settings]:
        check_choice(f"{CALL} settings", name, tuple(SETTINGS))
    count = len(jax.devices("cpu"))
    if count < DEVICES:
        raise RuntimeError(
            f"{CALL} {DEVICES} CPU devices are needed, got {count}: call "
            f'jax.config.update("jax_num_cpu_devices", {DEVICES}) before anything is '
            "computed, or run python -m optaxclip.check."
        )
    findings = []
    for name in names:
        try:
            findings += _check_setting(make_step, _setting(name))
        except Exception as error:
            note = f"This was in the setting {name!r}. settings=... leaves it out."
            error.add_note(f"{CALL} {note}")
            raise
    return findings


def _check_setting(make_step: Any, setting: Setting) -> Iterator[Finding]:
    step = make_step(setting)
    if not callable(step):
        raise TypeError(f"{CALL} make_step must return a step, got {shown(step)}.")
    is_float32 = setting.dtype == jnp.float32
    for gradients in ("above", "below", "nan") if is_float32 else ("above",):
        batch = _batch(setting, gradients)
        mean = _mean(batch)
        reference = _Reference(setting, batch, mean, _norm(mean))
        norms, updates = _run(step, reference)
        if gradients == "nan":
            mistakes = _mistakes_with_nan(reference, norms, updates)
        else:
            mistakes = _mistakes(reference, norms, updates)
        for mistake in mistakes:
            yield Finding(
                setting.name,
                gradients,
                mistake.what,
                float(mistake.right),
                float(mistake.actual),
                mistake.kind,
                KINDS[mistake.kind],
            )


# ------------------------------------------------------------ settings and gradients


class _Reference(NamedTuple):
    """Gradients of examples, their mean and its norm, in float64."""

    setting: Setting
    batch: Tree
    mean: Tree
    norm: float

    def close(self, actual: Any, right: Any) -> np.ndarray:
        # Rounding of float32 sums of at most 400 numbers. In 16 bits update, factor and
        # norm are rounded once or twice each.
        tolerance = 3e-5 if self.setting.dtype == jnp.float32 else 2.0**-6
        return np.isclose(actual, right, rtol=tolerance, atol=0)


class _Mistake(NamedTuple):
    """A norm, or the length of an update, that is not right."""

    what: str  # "norm" or "update"
    right: float
    actual: float
    kind: str  # of the bug


def _setting(name: str) -> Setting:
    changes = dict(SETTINGS[name])
    devices = np.array(jax.devices("cpu")[:DEVICES])
    experts = 2 if name == "experts" else 1
    mesh = Mesh(devices.reshape(-1, experts), ("data", "expert"))
    leaves = MANY if "dtype" in changes else SHAPES
    specs = dict.fromkeys(leaves, P()) | changes.pop("specs", {})
    batch_specs = dict.fromkeys(leaves, P("data")) | changes.pop("batch_specs", {})
    return Setting(name, mesh, specs, batch_specs, **changes)


def _batch(setting: Setting, gradients: str) -> Tree:
    """Gradients of examples. The norm of their mean is four limits where it is above,
    and a twelfth of the limit where it is below.
    """
    examples = DEVICES * setting.microbatches
    if setting.dtype != jnp.float32:
        # 16 bits hold these numbers and their mean. The squares of 4 add to 256, and
        # bfloat16 has no number between it and 258. 300 * 300 is beyond float16.
        large = 4.0 if setting.dtype == jnp.bfloat16 else 300.0
        batch = dict.fromkeys(MANY, np.full((examples, 3), 0.5))
        return batch | {"large": np.full((examples, 16), large)}
    draw = partial(np.random.default_rng(0).normal, 0.5, 1.0)
    batch: Tree = {name: draw((examples, *shape)) for name, shape in SHAPES.items()}
    limits = 1 / 12 if gradients == "below" else 4.0
    scale = limits * setting.max_norm / _norm(_mean(batch))
    batch = {name: np.float32(leaf * scale) for name, leaf in batch.items()}
    if gradients == "nan":
        batch["experts"][-1, -1, -1, -1] = np.nan
    return batch


def _mean(batch: Tree) -> Tree:
    return {name: leaf.mean(0, np.float64) for name, leaf in batch.items()}


def _norm(tree: Tree) -> float:
    return math.sqrt(sum(np.sum(np.float64(leaf) ** 2) for leaf in tree.values()))


def _run(step: Any, reference: _Reference) -> tuple[np.ndarray, Tree]:
    """Returns the norm of each device, and the update."""
    setting = reference.setting
    batch = jax.tree.map(partial(jnp.asarray, dtype=setting.dtype), reference.batch)
    # Weights of zero, so that new weights are the update.
    params = jax.tree.map(lambda leaf: jnp.zeros_like(leaf[0]), batch)
    weights = _placed(setting, setting.specs, params)
    answer = step(weights, _placed(setting, setting.batch_specs, batch))
    must = f"{CALL} the step must return (new params or updates, norm)"
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise TypeError(f"{must}, got {shown(answer)}.")
    updates, norm = answer
    check_scalar(f"{CALL} the norm", norm)
    shapes, update_shapes = jax.tree.map(jnp.shape, (params, updates))
    if update_shapes != shapes:
        raise ValueError(
            f"{must}, the first in the shapes of params, {shapes}, got "
            f"{shown(update_shapes)}."
        )
    parts = _parts(setting, {"norm": P()}, {"norm": norm})
    return np.array([part["norm"] for part in parts]), updates


def _placed(setting: Setting, specs: Tree, tree: Tree) -> Tree:
    shardings = jax.tree.map(partial(NamedSharding, setting.mesh), specs)
    # Leaves what is there already, so that differing copies stay as they are.
    return jax.device_put(tree, shardings)


def _parts(setting: Setting, specs: Tree, tree: Tree) -> list[Tree]:
    """What each device holds of a tree, in float64."""
    parts = [{} for _ in range(DEVICES)]
    for name, leaf in _placed(setting, specs, tree).items():
        places = {shard.device: shard.data for shard in leaf.addressable_shards}
        for part, device in zip(parts, setting.mesh.devices.flat):
            part[name] = np.float64(places[device])
    return parts


# ------------------------------------------------------------------- what is wrong


def _mistakes(
    reference: _Reference, norms: np.ndarray, updates: Tree
) -> Iterator[_Mistake]:
    """The mistakes in the norms of devices, and in the update."""
    if not reference.close(norms, reference.norm).all():
        worst = norms[np.argmax(abs(norms - reference.norm))]
        kind = _kind_of_norm(reference, norms)
        yield _Mistake("norm", reference.norm, worst, kind)
    kind = _kind_of_update(reference, updates)
    if kind:
        length = min(reference.norm, reference.setting.max_norm)
        yield _Mistake("update", length, _norm(updates), kind)


def _mistakes_with_nan(
    reference: _Reference, norms: np.ndarray, updates: Tree
) -> Iterator[_Mistake]:
    """Whether devices part after a NaN that one of them has, or the norm hides it.
    The numbers count devices that have a NaN.
    """
    setting = reference.setting
    kind = "nan_on_one_device"
    if np.unique(norms).size > 1:
        yield _Mistake("norm", DEVICES, sum(np.isnan(norms)), kind)
    parts = _parts(setting, setting.specs, updates)
    count = sum(np.isnan(_norm(part)) for part in parts)
    is_hidden = count and np.isfinite(norms).all()
    if is_hidden or _have_parted(setting, updates):
        yield _Mistake("update", DEVICES, count, kind)


def _have_parted(setting: Setting, updates: Tree) -> bool:
    """Whether devices that should hold the same part of an array do not."""
    parts = _parts(setting, setting.specs, updates)
    # Made of one copy of each part.
    one_copy = jax.tree.map(np.asarray, updates)
    parts_of_one_copy = _parts(setting, setting.specs, one_copy)
    is_equal = partial(np.array_equal, equal_nan=True)
    return not jax.tree.all(jax.tree.map(is_equal, parts, parts_of_one_copy))


def _kind_of_norm(reference: _Reference, norms: np.ndarray) -> str:
    """The bug that gives the norms of devices, or a norm that all of them have."""
    setting, norm, mean = reference.setting, reference.norm, reference.mean
    batches = _parts(setting, setting.batch_specs, reference.batch)
    shards = _parts(setting, setting.specs, mean)
    norms_of_batches = [_norm(_mean(batch)) for batch in batches]
    norms_of_shards = [_norm(shard) for shard in shards]
    if len(set(norms)) > 1:
        if reference.close(norms, norms_of_batches).all():
            return "local_norm"
        if reference.close(norms, norms_of_shards).all():
            return "own_shard"
        return "unknown"
    # The norms of the leaves that are split over devices, and of all other leaves.
    split = _norm({n: x for n, x in mean.items() if any(setting.specs[n])})
    unsplit = math.sqrt(norm**2 - split**2)
    data, experts = setting.mesh.devices.shape
    roots = np.sqrt([data, experts, DEVICES])
    # Losses are scaled by 16 at least.
    scales = 2.0 ** np.array([*range(-24, -3), *range(4, 25)])
    norm_of_all_shards = np.linalg.norm(norms_of_shards)
    # The norms that each bug gives.
    norms_of_bugs = {
        "after_clip": min(norm, setting.max_norm),
        "local_norm": [*norms_of_batches, np.mean(norms_of_batches)],
        "own_shard": norms_of_shards,
        "averaged_norms": [
            np.mean(norms_of_shards),
            norm_of_all_shards / math.sqrt(DEVICES),
        ],
        "leaves_left_out": [unsplit, split],
        "once_per_replica": norm * roots,
        "whole_leaves_repeated": np.hypot(unsplit * roots, split),
        "split_leaves_repeated": np.hypot(unsplit, split * roots),
        "all_leaves_repeated": norm_of_all_shards,
        "gradients_summed": norm * data,
        "accumulation_summed": norm * setting.microbatches,
        "scaled": norm * scales,
    }
    actual_norm = norms[0]
    for kind, norms_of_bug in norms_of_bugs.items():
        if reference.close(actual_norm, norms_of_bug).any():
            return kind
    kind, is_above = GUESSES.get(setting.name, ("unknown", True))
    return kind if (actual_norm > norm) == is_above else "unknown"


def _factor(update: np.ndarray, gradient: np.ndarray) -> float:
    """The factor from a gradient to its update. NaN if no number is."""
    factor = np.vdot(update, gradient) / np.vdot(gradient, gradient)
    difference = np.linalg.norm(update - factor * gradient)
    # Rounding is below a hundredth. The factor of new weights is negative.
    is_along = difference <= 0.01 * np.linalg.norm(update)
    return abs(factor) if is_along else math.nan


def _kind_of_update(reference: _Reference, updates: Tree) -> str:
    """The bug that gives the update. Empty where it is right."""
    setting = reference.setting
    if not np.isfinite(_norm(updates)):
        return "unknown"
    gradients = _parts(setting, setting.specs, reference.mean)
    parts = _parts(setting, setting.specs, updates)
    # [devices, leaves]: the factor of each device's part of each leaf.
    numbers = jax.tree.leaves(jax.tree.map(_factor, parts, gradients))
    factors = np.reshape(numbers, (DEVICES, -1))
    if np.isnan(factors).any():
        has_parted = _have_parted(setting, updates)
        return "local_norm" if has_parted else "other_direction"
    factor, limit = factors[0, 0], setting.max_norm
    if not reference.close(factors, factors[0]).all():
        return "own_factor"
    if not reference.close(factors, factor).all():
        return "groups_apart"
    if reference.close(factor, min(1.0, limit / reference.norm)):
        return ""
    if reference.close(factor, 1.0):
        return "not_clipped"
    if factor < 1.0:
        # The norm that the update was clipped by.
        norm = limit / factor if factor else math.inf
    else:
        norm = reference.norm * factor
    kind = _kind_of_norm(reference, np.array([norm]))
    is_below = reference.norm < limit and kind in ("unknown", "eps")
    return "clipped_below_limit" if is_below else kind
