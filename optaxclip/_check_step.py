"""Is the norm of a training step right, and does it clip as it should?

settings    who holds which part of weights and batch, and the limit
case        gradients above the limit, below it, or with a NaN. Their mean is known in
            float64, so norm and factor are known
step        the user's own. It is run on CPU devices. Each run is a probe
bugs        norms, or gradients, that each known bug would have given instead. The first
            of MEANINGS whose norm agrees with that of the step is named
"""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from numpy.typing import ArrayLike

from ._checks import check_choice, check_scalar, shown

Tree = dict[str, Any]
Step = Callable[..., Any]

CALL = "check_step:"
DEVICES = 8
# How each setting differs from "replicated".
SETTINGS: dict[str, dict[str, Any]] = {
    "replicated": {},
    # So small that 1e-8 beside the norm shows. Four devices here, so that a factor of 8
    # (a loss scale) is not mistaken for the device count.
    "small_limit": {"max_norm": 1e-6, "mesh_shape": (4, 1)},
    "accumulated": {"microbatches": 3},
    "fsdp": {"specs": {"experts": P(None, None, "data"), "matrix": P("data")}},
    "experts": {
        "mesh_shape": (4, 2),
        "specs": {"experts": P("expert")},
        "batch_specs": {"experts": P("data", "expert")},
    },
    "bfloat16": {"dtype": jnp.bfloat16},
    # So large that clipped gradients do not underflow.
    "float16": {"dtype": jnp.float16, "max_norm": 64.0},
}
SHAPES = {"bias": (8,), "experts": (4, 8, 8), "matrix": (16, 8)}
# Of 16 bits. Squares of many leaves are added one after the other.
MANY = ["large", *(f"small_{number}" for number in range(64))]
# norm / limit for each case. 37 is no usual scale and no number of devices, and
# with it some elements are above the limit. A loss scale of 2^16 does not bring the
# norm below to the limit.
NORM_OVER_LIMIT = {"above": 37.0, "below": 1e-6, "nan": 37.0}
# What each bug means, and what to do. Bugs of norms are looked for in this order.
MEANINGS = {
    "nan_on_one_device": "a NaN is seen by some devices only: replicas part",
    "nan_hidden": "the update has a NaN and the norm has none: let the norm be NaN",
    "zero_norm": "the norm is 0: it is of a state before its update, or of no gradient",
    "after_clip": "the norm that is returned is that of clipped gradients",
    "norm_of_weights": "the norm is that of the weights: pass the gradients",
    "clipped_below_limit": "gradients below the limit are changed",
    "weights_added": "weights are in the update: leave weight decay and penalties out",
    "low_precision_sum": "squares are added in bfloat16: add them in float32",
    "squares_overflow": "squares in float16 are inf: convert to float32 first",
    "microbatches_apart": "micro-batches are clipped or measured one by one: average "
    "all of them first",
    "local_norm": "each device uses the gradient of its own batch: average first",
    "own_shard": "squares of split leaves are not added (lax.psum)",
    "averaged_norms": "norms or squares of shards are averaged: add squares",
    "leaves_left_out": "only some leaves count, such as those that are split",
    "once_per_replica": "each replica counts: do not add squares of equal gradients",
    "whole_leaves_repeated": "leaves that all devices hold count once for each",
    "split_leaves_repeated": "split leaves (experts) count once for each copy",
    "all_leaves_repeated": "leaves count once for each device with the same part",
    "sum_of_norms": "norms of leaves are added: add their squares, then take the root",
    "largest_element": "it is the largest element: take the root of the sum of squares",
    "rms": "squares are averaged: add them",
    "squared": "the root of the sum of squares is missing",
    "clipped_twice": "the factor of one norm multiplies twice",
    "eps": "the limit is divided by norm + eps: updates are below the limit",
    "gradients_summed": "gradients of devices are added: average them (lax.pmean)",
    "accumulation_summed": "gradients of micro-batches are added: average them",
    "averaged_twice": "averaged gradients are divided by a number of parts again",
    "scaled": "gradients carry a scale, as of a loss: divide by it before the clip",
    "own_factor": "each device clips by a factor of its own: replicas part",
    "groups_apart": "leaves have different factors: clip all of them together",
    "clipped_by_value": "elements are clipped, and not the norm",
    "other_direction": "the gradient is changed before the clip, or not by one factor",
    "not_clipped": "gradients above the limit are not clipped",
    "other_limit": "the norm of updates is held at another limit",
    "other_rate": "updates are multiplied: is the optimizer optax.sgd(1.0), run once?",
    "unknown": "no known bug gives this number",
}
# Bugs whose ratio is constant, so a constant ratio does not prove a loss scale.
CONSTANT_RATIO_BUGS = ("zero_norm", "rms", "clipped_twice")


class Setting(NamedTuple):
    """What `make_step` is told."""

    name: str
    mesh: Mesh  # axes "data" and "expert"
    specs: Tree  # of params, gradients and updates
    batch_specs: Tree  # of gradients of examples, their first dimension
    # Not 1: a square of the norm is divided by the limit, or not.
    max_norm: float = 0.25
    microbatches: int = 1  # parts of a batch that are accumulated
    dtype: DTypeLike = jnp.float32

    @staticmethod
    def loss(params: Tree, batch: Tree) -> jax.Array:
        """A loss whose gradient is the mean over the examples of `batch`."""
        means = jax.tree.map(lambda w, x: jnp.sum(w[None] * x) / len(x), params, batch)
        return sum(jax.tree.leaves(means), jnp.zeros(()))


class Finding(NamedTuple):
    """One number that is wrong."""

    setting: str
    case: str  # gradients "above" or "below" the limit, or with a "nan"
    what: str  # "norm": what is returned. "update": the length of the update
    wanted: float
    # With a "nan": the number of devices that have one.
    found: float
    kind: str
    meaning: str  # of the kind, and what to do


def check_step(
    make_step: Callable[[Any], Step], *, settings: str | Sequence[str] = tuple(SETTINGS)
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
      settings: what to run, a name or several.

        - "replicated": data parallel, gradients above the limit, below it, and with a
          NaN on one device.
        - "small_limit": as before, on four devices, with a limit of 1e-6.
        - "accumulated": as "replicated", in three micro-batches.
        - "fsdp": two leaves are split along "data", one is not.
        - "experts": one leaf is split along "expert", gradients are averaged along
          "data".
        - "bfloat16", "float16": replicated, of these dtypes.

    Returns:
      A list of findings, empty where all is right. Each has the fields `setting`,
      `case` (gradients "above" or "below" the limit, or with a "nan"), `what` ("norm",
      or "update" for its length), `wanted` and `found` (with a "nan" the numbers of
      devices that have one), `kind` and `meaning`. The page "Wrong norms of 2026" lists
      the kinds.

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
    names = (settings,) if isinstance(settings, str) else tuple(settings)
    if not names:
        raise ValueError(f"{CALL} settings must name at least one setting, got none.")
    for name in names:
        check_choice(f"{CALL} settings", name, tuple(SETTINGS))
    count = len(jax.devices("cpu"))
    if count < DEVICES:
        raise RuntimeError(
            f"{CALL} {DEVICES} CPU devices are needed, got {count}: call "
            f'jax.config.update("jax_num_cpu_devices", {DEVICES}) before anything is '
            "computed, or run python -m optaxclip.check."
        )
    runs = []
    for name in names:
        try:
            runs += _runs(make_step, _setting(name))
        except Exception as error:
            note = f"This was in the setting {name!r}. settings=... leaves it out."
            error.add_note(f"{CALL} {note}")
            raise
    # Runs to compare with: a ratio that all of them have is no number of devices.
    peers = [
        run for run in runs if run.case != "nan" and run.setting.dtype == jnp.float32
    ]
    findings = []
    for run in runs:
        findings += _findings(run, peers)
    return findings


def _check_make_step(make_step: Any) -> None:
    """Refuses anything but a function that can be called with a setting."""
    if not callable(make_step):
        raise TypeError(f"{CALL} make_step must be a function, got {shown(make_step)}.")
    signature = inspect.signature(make_step)
    try:
        signature.bind("setting")
    except TypeError:
        raise TypeError(
            f"{CALL} make_step must take a setting and return a step, got a function "
            f"of {signature}. Define the step inside make_step(setting), with "
            "setting.loss as its loss."
        ) from None


# --------------------------------------------------------------- settings and gradients


def _setting(name: str) -> Setting:
    changes = dict(SETTINGS[name])
    mesh_shape = changes.pop("mesh_shape", (DEVICES, 1))
    devices = np.array(jax.devices("cpu")[: math.prod(mesh_shape)])
    mesh = Mesh(devices.reshape(mesh_shape), ("data", "expert"))
    leaves = MANY if "dtype" in changes else SHAPES
    specs = dict.fromkeys(leaves, P()) | changes.pop("specs", {})
    batch_specs = dict.fromkeys(leaves, P("data")) | changes.pop("batch_specs", {})
    return Setting(name, mesh, specs, batch_specs, **changes)


def _batch(setting: Setting, case: str) -> Tree:
    """Gradients of examples. All are alike but the first, so that any parts of a batch
    have the same means. The first number of each leaf is 0.
    """
    count = setting.mesh.shape["data"] * setting.microbatches
    if setting.dtype == jnp.float32:
        # Other numbers in each run: what agrees in all of them agrees by no chance.
        random = np.random.default_rng([*f"{setting.name} {case}".encode()])
        batch: Tree = {
            name: random.normal(0.5, 1.0, (count, *shape))
            for name, shape in SHAPES.items()
        }
    else:
        # 16 bits hold these numbers and their means, which are twice as large (below).
        # The squares of 16 means of 8 add to 1024, and bfloat16 has no number between
        # it and 1032. A mean of 600 has a square beyond float16.
        large = 4.0 if setting.dtype == jnp.bfloat16 else 300.0
        small = np.array([0.0, 0.5, 0.5, 0.25])
        batch = {name: np.tile(small, (count, 1)) for name in MANY}
        batch["large"] = np.full((count, 17), large)
    for leaf in batch.values():
        leaf.reshape(count, -1)[:, 0] = 0.0
        leaf[1:] = leaf[-1]
        # The first is 9 times the rest, so the mean of eight is (9 + 7) / 8 = 2 times.
        leaf[0] *= 9.0
    if setting.dtype == jnp.float32:
        norm = _norm(_flat(_mean(batch)))
        scale = NORM_OVER_LIMIT[case] * setting.max_norm / norm
        batch = {name: np.float32(leaf * scale) for name, leaf in batch.items()}
    if case == "nan":
        batch["experts"][-1, -1, -1, -1] = np.nan
    return batch


def _mean(batch: Tree) -> Tree:
    return {name: leaf.mean(0, np.float64) for name, leaf in batch.items()}


def _flat(tree: Tree) -> np.ndarray:
    """All numbers of a tree, sorted by names."""
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def _norm(row: ArrayLike) -> float:
    return float(np.linalg.norm(row))


def _norms(rows: np.ndarray) -> np.ndarray:
    return np.linalg.norm(rows, axis=1)


def _placed(setting: Setting, specs: Tree, tree: Tree) -> Tree:
    shardings = jax.tree.map(partial(NamedSharding, setting.mesh), specs)
    # Leaves what is there already, so that differing copies stay as they are.
    return jax.device_put(tree, shardings)


def _per_device(setting: Setting, specs: Tree, tree: Tree) -> list[np.ndarray]:
    """For each leaf, sorted by names, [devices, numbers]: what each device holds."""
    leaves = []
    for leaf in jax.tree.leaves(_placed(setting, specs, tree)):
        shards = {shard.device: shard.data for shard in leaf.addressable_shards}
        parts = [np.float64(shards[device]) for device in setting.mesh.devices.flat]
        leaves.append(np.reshape(parts, (len(parts), -1)))
    return leaves


# ------------------------------------------------------------------------ runs of steps


class _Run(NamedTuple):
    """What a step returned for gradients that are known. Rows are sorted by names."""

    setting: Setting
    case: str  # gradients "above" or "below" the limit, or with a "nan"
    batch: Tree  # gradients of examples
    mean: Tree  # of the examples, in float64
    norm: float  # of the mean
    norms: np.ndarray  # [devices]: what was returned
    # [numbers]: 0 in place of those that have no gradient, and so may be weights.
    update: np.ndarray
    factors: np.ndarray  # [leaves, devices]: update over gradient. NaN if no number is
    drift: np.ndarray  # [leaves]: change of weights that have no gradient
    has_nan: np.ndarray  # [devices]
    replicas_differ: bool  # devices hold different copies of new params or updates

    def finding(self, what: str, wanted: float, found: float, bug: str) -> Finding:
        return Finding(
            setting=self.setting.name,
            case=self.case,
            what=what,
            wanted=float(wanted),
            found=float(found),
            kind=bug,
            meaning=MEANINGS[bug],
        )

    def ratio(self) -> float:
        """Norm found / norm wanted. NaN if devices differ."""
        return self.same_or_nan(self.norms) / self.norm

    def gain(self) -> float:
        """Factor found / factor wanted, min(1, limit / norm). NaN if leaves differ."""
        wanted = min(1.0, self.setting.max_norm / self.norm)
        return self.same_or_nan(self.factors) / wanted

    def same_or_nan(self, numbers: np.ndarray) -> float:
        """The finite number that all of them are, or NaN."""
        first = numbers.flat[0]
        is_same = np.isfinite(first) and self.close(numbers, first).all()
        return first if is_same else math.nan

    def close(self, found: ArrayLike, wanted: ArrayLike) -> np.ndarray:
        # Rounding of float32 sums of at most 400 numbers. In 16 bits update, factor and
        # norm are rounded once or twice each.
        tolerance = 3e-5 if self.setting.dtype == jnp.float32 else 2.0**-6
        return np.isclose(found, wanted, rtol=tolerance, atol=0)


def _runs(make_step: Callable[[Any], Any], setting: Setting) -> Iterator[_Run]:
    step = make_step(setting)
    if not callable(step):
        raise TypeError(f"{CALL} make_step must return a step, got {shown(step)}.")
    for case in NORM_OVER_LIMIT if setting.dtype == jnp.float32 else ["above"]:
        yield _run(step, setting, case)


def _run(step: Step, setting: Setting, case: str) -> _Run:
    batch = _batch(setting, case)
    mean = _mean(batch)
    # The first weight of each leaf is the limit. It has no gradient.
    weight = np.float32(setting.max_norm)
    params = {name: np.where(leaf, 0.0, weight) for name, leaf in mean.items()}
    output, norm = _call_step(step, setting, params, batch)
    copy = jax.tree.map(np.float64, output)
    gradient = _flat(mean)
    values = _flat(copy)
    # The first numbers of leaves: weights in new params, 0 in an update.
    firsts = values[gradient == 0.0]
    old_firsts = weight * np.round(firsts.mean() / weight)
    outputs = _per_device(setting, setting.specs, output)
    copies = _per_device(setting, setting.specs, copy)
    means = _per_device(setting, setting.specs, mean)
    factors = np.array(jax.tree.map(_factors, outputs, means))
    is_equal = partial(np.array_equal, equal_nan=True)
    equal_leaves = map(is_equal, outputs, copies)
    return _Run(
        setting,
        case,
        batch,
        mean,
        norm=_norm(gradient),
        norms=_per_device(setting, {"norm": P()}, {"norm": norm})[0][:, 0],
        update=np.where(gradient, values, 0.0),
        # New params have negative factors. A leaf of the other sign stays negative.
        factors=factors * np.copysign(1.0, factors[0, 0]),
        drift=firsts - old_firsts,
        has_nan=np.isnan(_norms(np.hstack(outputs))),
        replicas_differ=not all(equal_leaves),
    )


def _call_step(
    step: Step, setting: Setting, params: Tree, batch: Tree
) -> tuple[Tree, jax.Array]:
    """The new params, or updates, and the norm that the step returns."""
    cast = partial(jnp.asarray, dtype=setting.dtype)
    weights, examples = jax.tree.map(cast, (params, batch))
    result = step(
        _placed(setting, setting.specs, weights),
        _placed(setting, setting.batch_specs, examples),
    )
    must = f"{CALL} the step must return (new params or updates, norm)"
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(f"{must}, got {shown(result)}.")
    output, norm = result
    check_scalar(f"{CALL} the norm", norm)
    shapes, output_shapes = jax.tree.map(jnp.shape, (params, output))
    if output_shapes != shapes:
        raise ValueError(
            f"{must}, the first in the shapes of params, {shapes}, got "
            f"{shown(output_shapes)}."
        )
    return output, norm


# inf - inf is NaN: no factor.
@np.errstate(invalid="ignore")
def _factors(updates: np.ndarray, gradients: np.ndarray) -> np.ndarray:
    """The factor from each row of gradients to that of updates. NaN if no number is."""
    # Where there is no gradient there may be a weight.
    updates = np.where(gradients, updates, 0.0)
    factors = np.sum(updates * gradients, 1) / np.sum(gradients**2, 1)
    differences = _norms(updates - factors[:, None] * gradients)
    # Rounding is below a hundredth.
    is_along = differences <= 0.01 * _norms(updates)
    return np.where(is_along, factors, math.nan)


# ------------------------------------------------------------------------ what is wrong


def _findings(run: _Run, peers: list[_Run]) -> Iterator[Finding]:
    """What is wrong with the norm and the update of a run. `peers`: all runs in float32
    in which nothing is NaN.
    """
    norms = run.norms
    if run.case == "nan":
        # Devices part after a NaN that one of them has, or the norm hides it.
        bug = "nan_on_one_device"
        if np.unique(norms).size > 1:
            yield run.finding("norm", norms.size, np.isnan(norms).sum(), bug)
        is_hidden = run.has_nan.any() and np.isfinite(norms).all()
        if is_hidden and run.has_nan.all():
            yield run.finding("norm", norms.size, 0, "nan_hidden")
        elif is_hidden or run.replicas_differ:
            yield run.finding("update", norms.size, run.has_nan.sum(), bug)
        return
    if not run.close(norms, run.norm).all():
        worst = norms[np.argmax(abs(norms - run.norm))]
        bug = _bug_of_norms(run, norms, peers, _Run.ratio)
        yield run.finding("norm", run.norm, worst, bug)
    bug = _bug_of_update(run, peers)
    if bug:
        wanted = min(run.norm, run.setting.max_norm)
        found = _norm([*run.update, *run.drift])
        yield run.finding("update", wanted, found, bug)


def _bug_of_norms(
    run: _Run, norms: np.ndarray, peers: list[_Run], ratio: Callable[[_Run], float]
) -> str:
    """The first bug that gives the norms of devices. Without one it is a scale, if all
    peers have the same ratio of found to wanted numbers.
    """
    ratios = [ratio(peer) for peer in peers]
    is_scale = len(peers) > 1 and run.close(ratios, ratio(run)).all()
    # Equal ratios on meshes of 4 and 8 cannot be a device count.
    sizes = {peer.setting.mesh.size for peer in peers}
    is_sure = is_scale and len(sizes) > 1
    norms_of_bugs = _norms_of_bugs(run)
    for bug in MEANINGS:
        is_coincidence = is_sure and bug not in CONSTANT_RATIO_BUGS
        is_equal = run.close(norms[:, None], norms_of_bugs.get(bug, []))
        if is_equal.any(1).all() and not is_coincidence:
            return bug
    return "scaled" if is_scale else "unknown"


# The norm of a factor of 0 is inf.
@np.errstate(divide="ignore")
def _bug_of_update(run: _Run, peers: list[_Run]) -> str:
    """The bug that gives the update. Empty where it is right."""
    if not np.isfinite(run.update).all():
        return "unknown"
    gain = run.gain()
    if math.isnan(gain):
        return _bug_of_direction(run)
    limit = run.setting.max_norm
    factor = run.factors[0, 0]
    gains = [peer.gain() for peer in peers]
    is_above = run.case == "above"
    if run.drift.any():
        return "weights_added"
    if run.close(gain, 1.0):
        return ""
    if peers and run.close(gains, gain).all():
        return "other_rate"
    if is_above and run.close(factor, 1.0):
        return "not_clipped"
    # A gradient that is not clipped is as long as the update.
    norm = run.norm * factor
    if is_above and factor < 1.0:
        # factor = limit / norm, so the step clipped by the norm limit / factor.
        norm = limit / factor
    if run.close(run.norms, norm).all():
        return _bug_of_norms(run, run.norms, peers, _Run.ratio)
    alike = [peer for peer in peers if peer.case == run.case]
    bug = _bug_of_norms(run, np.array([norm]), alike, _Run.gain)
    # Above the limit a constant scale cancels, so only another limit remains.
    if is_above and bug in ("scaled", "averaged_twice"):
        return "other_limit"
    return bug


def _bug_of_direction(run: _Run) -> str:
    """The bug that gives an update that is no multiple of the gradient."""
    is_along = np.isfinite(run.factors).all()
    if run.replicas_differ:
        return "own_factor" if is_along else "local_norm"
    for bug, gradients in _gradients_of_bugs(run).items():
        factors = _factors(run.update[None], gradients)
        if run.close(abs(factors), 1.0).any():
            return bug
    # Each leaf by itself may be a multiple.
    return "groups_apart" if is_along else "other_direction"


def _norms_of_bugs(run: _Run) -> dict[str, ArrayLike]:
    """The norms that each bug gives in place of the right one."""
    setting = run.setting
    mean = run.mean
    norm = run.norm
    limit = setting.max_norm
    data, experts = setting.mesh.devices.shape
    roots = np.sqrt([data, experts, data * experts])
    shards = _norms(np.hstack(_per_device(setting, setting.specs, mean)))
    norm_of_shards = _norm(shards)
    # Each device holds as many examples as there are micro-batches.
    shape = (shards.size, setting.microbatches, -1)
    batches = _per_device(setting, setting.batch_specs, run.batch)
    means = [np.reshape(leaf, shape).mean(1) for leaf in batches]
    norms_of_batches = _norms(np.hstack(means))
    leaves = np.array([_norm(leaf) for leaf in mean.values()])
    # The norms of the leaves that are split over devices, and of all other leaves.
    is_split = [any(setting.specs[name]) for name in mean]
    split = _norm(leaves[is_split])
    unsplit = math.sqrt(norm**2 - split**2)
    norm_of_weights = limit * math.sqrt(leaves.size)
    length = min(norm, limit)
    lengths_after_clip = [length]
    if norm > limit:
        lengths_after_clip.append(_norm(run.update))
    lengths = {bug: _norms(rows) for bug, rows in _gradients_of_bugs(run).items()}
    # Of one large and many small squares some are lost, or all.
    in_bfloat16 = np.linspace(leaves.max(), norm)
    return {
        "zero_norm": 0.0,
        "after_clip": lengths_after_clip,
        "norm_of_weights": [norm_of_weights, math.hypot(norm_of_weights, length)],
        "clipped_below_limit": limit,
        "weights_added": math.hypot(norm, _norm(run.drift)),
        "low_precision_sum": in_bfloat16 if setting.dtype == jnp.bfloat16 else [],
        "squares_overflow": math.inf if setting.dtype == jnp.float16 else [],
        "microbatches_apart": lengths["microbatches_apart"],
        "local_norm": [
            *norms_of_batches,
            norms_of_batches.mean(),
            *lengths["local_norm"],
        ],
        "own_shard": shards,
        "averaged_norms": [shards.mean(), norm_of_shards / math.sqrt(shards.size)],
        "leaves_left_out": [*leaves, *np.sqrt(norm**2 - leaves**2)],
        "once_per_replica": norm * roots,
        "whole_leaves_repeated": np.hypot(unsplit * roots, split),
        "split_leaves_repeated": np.hypot(unsplit, split * roots),
        "all_leaves_repeated": norm_of_shards,
        "sum_of_norms": leaves.sum(),
        "largest_element": abs(_flat(mean)).max(),
        "rms": norm / math.sqrt(run.update.size),
        "squared": norm**2,
        "clipped_twice": norm**2 / limit,
        "eps": norm + 10.0 ** -np.arange(5, 10),
        "gradients_summed": norm * data,
        "accumulation_summed": norm * setting.microbatches,
        "averaged_twice": [norm / data, norm / setting.microbatches],
    }


def _gradients_of_bugs(run: _Run) -> dict[str, np.ndarray]:
    """[gradients, numbers]: what each bug gives in place of the right gradient."""
    limit = run.setting.max_norm
    return {
        "clipped_by_value": np.clip(_flat(run.mean), -limit, limit)[None],
        "local_norm": _gradients_of_parts(run, run.setting.mesh.shape["data"]),
        "microbatches_apart": _gradients_of_parts(run, run.setting.microbatches),
    }


def _gradients_of_parts(run: _Run, count: int) -> np.ndarray:
    """[gradients, numbers]: what steps give that take parts of a batch one by one.

    The first row clips each part by its own norm. The second is as long as the parts
    are on average. The others are the parts.
    """
    mean = _flat(run.mean)
    last = _flat({name: leaf[-1] for name, leaf in run.batch.items()})
    # The first example is in the first part. All others are alike.
    parts = np.tile(np.float64(last), (count, 1))
    parts[0] += count * (mean - last)
    norms = _norms(parts)
    clipped = parts.T * np.minimum(1.0, run.setting.max_norm / norms)
    mean_norm = mean * norms.mean() / run.norm
    return np.vstack([clipped.mean(1), mean_norm, parts])
