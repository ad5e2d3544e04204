"""Is the norm of a training step right, and does it clip as it should?

    settings    who holds which part of weights and batch, and the limit
    gradients   their mean is known in float64, so norm and factor are known
    step        the user's own. It is run on eight CPU devices
    kinds       what the known bugs would have given instead, as numbers. The first that
                agrees with what the step gave is named
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ._checks import check_choice, check_scalar, shown

Tree = dict[str, Any]
Specs = dict[str, PartitionSpec]

DEVICES = 8
KINDS = {
    "local_norm": "Each device has the norm of its own batch. Average the gradients over "
    "the data axis (lax.pmean) before the norm is taken.",
    "clip_before_average": "Each device clips its own gradient, then they are averaged. "
    "Average first.",
    "gradients_summed": "Gradients are added over the data axis, not averaged. Use "
    "lax.pmean, or divide by the number of devices.",
    "once_per_replica": "Squares are added over devices that hold the same gradients, so "
    "each replica counts once more. Take the norm without this sum.",
    "whole_leaves_repeated": "Leaves that every device holds count once for each device. "
    "Add squares only over the mesh axes that a leaf is split over.",
    "split_leaves_repeated": "Split leaves, such as experts, count once for each device "
    "that holds the same part. Add their squares only over their own mesh axes.",
    "all_leaves_repeated": "All leaves count more than once, each as often as devices "
    "hold the same part. Add squares only over the mesh axes of each leaf.",
    "own_shard": "Split leaves are not summed: each device has the norm of its own shard. "
    "Add their squares over their mesh axes (lax.psum).",
    "leaves_left_out": "The norm leaves out the leaves that are split, or those that are "
    "not.",
    "averaged_norms": "Norms, or sums of squares, of shards are averaged over devices. "
    "Add the squares of the shards.",
    "accumulation_summed": "Gradients of micro-batches are added, not averaged. Divide by "
    "their number.",
    "after_clip": "The norm that is returned is that of the clipped gradients.",
    "scaled": "Gradients carry a power of two, as of loss scaling. Divide by it before "
    "the norm is taken.",
    "low_precision_sum": "Squares are added in bfloat16, where small ones no longer "
    "change the sum. Add them in float32.",
    "squares_overflow": "Squares of float16 numbers above 256 are inf. Convert to float32 "
    "before squaring.",
    "nan_on_one_device": "A NaN that one device holds is not seen by others. Take the "
    "decision from the norm over all devices.",
    "own_factor": "Each device clips by its own factor, so that replicas part and shards "
    "no longer fit together. Clip by the norm over all devices.",
    "groups_apart": "Leaves are clipped by different factors. For a global norm, clip "
    "around optax.multi_transform, not inside it.",
    "eps": "A small number is added to the norm before the limit is divided by it, so "
    "gradients are clipped below the limit. Divide by the norm alone.",
    "clipped_below_limit": "Gradients that are below the limit are changed.",
    "not_clipped": "Gradients above the limit are not clipped.",
    "unknown": "No known bug gives this number.",
}


class Setting(NamedTuple):
    """What `make_step` is told."""

    name: str
    mesh: Mesh  # with an axis "data", and "experts" has an axis "expert" too
    specs: Specs  # of params, gradients and updates
    batch_specs: Specs  # of the gradients of examples: the first dimension is theirs
    max_norm: float
    microbatches: int  # into so many a step that accumulates splits its examples

    @staticmethod
    def loss(params: Tree, batch: Tree) -> jax.Array:
        """A loss whose gradient is the mean over the examples of `batch`."""
        total: Any = 0.0
        for name, leaf in batch.items():
            total += jnp.sum(params[name][None] * leaf) / leaf.shape[0]
        return total


class Finding(NamedTuple):
    """One number that is wrong."""

    setting: str
    gradients: str  # "above" or "below" the limit, or with a "nan"
    what: str  # "norm": what is returned. "update": the length of the update
    wanted: float
    found: float
    kind: str

    @property
    def meaning(self) -> str:
        """What the kind means, and what to do."""
        return KINDS[self.kind]


# ------------------------------------------------------------------------- settings


class Case(NamedTuple):
    """A setting and its gradients."""

    specs: Specs
    experts: int = 1  # devices along the axis of experts
    max_norm: float = 1.0
    microbatches: int = 1
    gradients: tuple[str, ...] = ("above", "below", "nan")
    dtype: Any = jnp.float32
    # Rounding of float32 sums of at most 400 numbers.
    tolerance: float = 3e-5


SHAPES = {"bias": (8,), "experts": (4, 8, 8), "matrix": (16, 8)}
WHOLE = dict.fromkeys(SHAPES, PartitionSpec())
FSDP = {
    "bias": PartitionSpec(),
    "experts": PartitionSpec(None, None, "data"),
    "matrix": PartitionSpec("data"),
}
SMALL = [f"small_{number:02}" for number in range(64)]
CASES = {
    "replicated": Case(WHOLE),
    # A limit so small that 1e-8 beside the norm shows.
    "small_limit": Case(WHOLE, max_norm=1e-5, gradients=("above",)),
    "accumulated": Case(WHOLE, microbatches=3, gradients=("above", "below")),
    "fsdp": Case(FSDP),
    "experts": Case(WHOLE | {"experts": PartitionSpec("expert")}, experts=2),
    # Tolerances: an update, its factor and the norm are rounded once or twice each.
    "bfloat16": Case(
        dict.fromkeys(["large", *SMALL], PartitionSpec()),
        gradients=("above",),
        dtype=jnp.bfloat16,
        tolerance=2.0**-6,
    ),
    "float16": Case(
        {"bias": PartitionSpec()},
        gradients=("above",),
        dtype=jnp.float16,
        tolerance=2.0**-8,
    ),
}
SETTINGS = tuple(CASES)


def _setting(name: str) -> Setting:
    case = CASES[name]
    devices = np.array(jax.devices("cpu")[:DEVICES])
    mesh = Mesh(devices.reshape(-1, case.experts), ("data", "expert"))
    batch_specs = {}
    for leaf, spec in case.specs.items():
        # A leaf that data parallel devices split is whole in their gradients.
        own = () if "data" in spec else spec
        batch_specs[leaf] = PartitionSpec("data", *own)
    return Setting(
        name, mesh, case.specs, batch_specs, case.max_norm, case.microbatches
    )


def _batch(case: Case, kind: str) -> Tree:
    """Gradients of examples. The norm of their mean is four limits where it is above,
    and a twelfth of the limit where it is below.
    """
    examples = DEVICES * case.microbatches
    # Numbers that 16 bits hold, also the mean of equal examples. The sum of squares of
    # the large leaf is 256: bfloat16 has no number between it and 258.
    if case.dtype == jnp.float16:
        return {"bias": np.full((examples, 4), 300.0)}
    if case.dtype == jnp.bfloat16:
        small = {leaf: np.full((examples, 3), 0.5) for leaf in SMALL}
        return {"large": np.full((examples, 16), 4.0)} | small
    random = np.random.default_rng(0)
    batch = {}
    for name, shape in SHAPES.items():
        batch[name] = random.normal(0.5, 1.0, (examples, *shape))
    wanted = 4.0 * case.max_norm if kind != "below" else case.max_norm / 12
    scale = wanted / _norm(_mean(batch))
    for name, leaf in batch.items():
        batch[name] = np.float32(leaf * scale)
    if kind == "nan":
        batch["experts"][-1, -1, -1, -1] = np.nan
    return batch


def _mean(batch: Tree) -> Tree:
    return {name: leaf.mean(0, np.float64) for name, leaf in batch.items()}


def _norm(tree: Tree) -> float:
    return math.sqrt(sum(np.sum(leaf**2) for leaf in tree.values()))


def _parts(setting: Setting, specs: Specs, tree: Tree) -> list[Tree]:
    """The index of each device's part of each leaf."""
    parts = [{} for _ in range(DEVICES)]
    for name, leaf in tree.items():
        sharding = NamedSharding(setting.mesh, specs[name])
        indices = sharding.devices_indices_map(leaf.shape)
        for part, device in zip(parts, setting.mesh.devices.flat):
            part[name] = indices[device]
    return parts


# ------------------------------------------------------------------------- the step


def check_step(
    make_step: Callable[[Any], Callable[..., Any]],
    *,
    settings: str | Sequence[str] = SETTINGS,
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
      "update" for its length), `wanted`, `found`, `kind` and `meaning`. The page
      "Wrong norms of 2026" lists the kinds.

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
        raise TypeError(
            "check_step: make_step must be a function of a setting that returns a "
            f"step, got {shown(make_step)}."
        )
    names = (settings,) if isinstance(settings, str) else settings
    if not names:
        raise ValueError(
            f"check_step: settings must name at least one of {', '.join(SETTINGS)}, "
            f"got {shown(settings)}."
        )
    for name in names:
        check_choice("check_step: settings", name, SETTINGS)
    count = len(jax.devices("cpu"))
    if count < DEVICES:
        raise RuntimeError(
            f"check_step: {DEVICES} CPU devices are needed, got {count}: call "
            f'jax.config.update("jax_num_cpu_devices", {DEVICES}) before anything is '
            "computed, or run python -m optaxclip.check."
        )
    findings = []
    for name in names:
        try:
            findings += _check_setting(make_step, _setting(name))
        except Exception as error:
            error.add_note(
                f"check_step ran the step in the setting {name!r}. A step that is not "
                "made for it is checked without it: settings=(...)."
            )
            raise
    return findings


def _check_setting(make_step: Any, setting: Setting) -> list[Finding]:
    step = make_step(setting)
    if not callable(step):
        raise TypeError(
            "check_step: make_step must return a step, a function of params and "
            f"batch, got {shown(step)}."
        )
    findings = []
    case = CASES[setting.name]
    for kind in case.gradients:
        batch = _batch(case, kind)
        norms, updates = _run(step, setting, batch)
        judged = _Judged(setting, kind, batch, _mean(batch), norms, updates)
        findings += judged.nan() if kind == "nan" else judged.findings()
    return findings


def _run(step: Any, setting: Setting, batch: Tree) -> tuple[np.ndarray, Any]:
    """Returns the norm of each device, and the update as arrays on devices."""
    dtype = CASES[setting.name].dtype
    params, placed = {}, {}
    for name, leaf in batch.items():
        sharding = NamedSharding(setting.mesh, setting.specs[name])
        # Weights of zero, so that new weights are the update.
        params[name] = jax.device_put(jnp.zeros(leaf.shape[1:], dtype), sharding)
        sharding = NamedSharding(setting.mesh, setting.batch_specs[name])
        placed[name] = jax.device_put(jnp.asarray(leaf, dtype), sharding)
    shapes = {name: leaf.shape for name, leaf in params.items()}
    answer = step(params, placed)
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise TypeError(
            "check_step: the step must return (new params or updates, norm), got "
            f"{shown(answer)}."
        )
    updates, norm = answer
    check_scalar("check_step: the norm", norm)
    if not isinstance(updates, dict) or set(updates) != set(shapes):
        raise ValueError(
            "check_step: new params or updates must have the structure of params, "
            f"got {shown(updates)}."
        )
    for name, leaf in updates.items():
        if jnp.shape(leaf) != shapes[name]:
            raise ValueError(
                f"check_step: new params or updates: {name!r} must have the shape "
                f"{shapes[name]}, got {jnp.shape(leaf)}."
            )
    norms = [shard.data for shard in _shards(jnp.asarray(norm))]
    return np.array(norms, np.float64), jax.tree.map(jnp.asarray, updates)


def _shards(array: jax.Array) -> list[Any]:
    return sorted(array.addressable_shards, key=lambda shard: shard.device.id)


# ------------------------------------------------------------------------ judgement


class _Judged(NamedTuple):
    """What a step made of gradients that are known."""

    setting: Setting
    gradients: str
    batch: Tree
    mean: Tree
    norms: np.ndarray  # float64[devices], or [1] for an array of one device
    updates: dict[str, jax.Array]

    @property
    def norm(self) -> float:
        return _norm(self.mean)

    def finding(self, what: str, wanted: float, found: Any, kind: str) -> Finding:
        return Finding(
            self.setting.name, self.gradients, what, wanted, float(found), kind
        )

    def close(self, found: Any, wanted: Any) -> np.ndarray:
        tolerance = CASES[self.setting.name].tolerance
        return np.isclose(found, wanted, rtol=tolerance, atol=0)

    def findings(self) -> list[Finding]:
        rows = []
        if not self.close(self.norms, self.norm).all():
            worst = self.norms[np.argmax(abs(self.norms - self.norm))]
            kind = self.kind_of_norm(self.norms)
            rows.append(self.finding("norm", self.norm, worst, kind))
        kind = self.kind_of_update()
        if kind:
            found = _norm({n: np.float64(x) for n, x in self.updates.items()})
            length = min(self.norm, self.setting.max_norm)
            rows.append(self.finding("update", length, found, kind))
        return rows

    def kind_of_norm(self, found: np.ndarray) -> str:
        """The bug that gives the norms of devices, or a norm."""
        if not np.isfinite(found).all():
            return "squares_overflow"
        is_one = len(set(found)) == 1
        for kind, norms in self.wrong_norms():
            close = self.close(found, norms)
            # A norm that is everywhere the same may be that of any device.
            if close.any() if is_one else close.all():
                return kind
        power = math.log2(found[0] / self.norm) if found[0] > 0 else 0.0
        if abs(power) > 3.5 and abs(power - round(power)) < 1e-4:
            return "scaled"
        case = CASES[self.setting.name]
        if case.dtype != jnp.float32 and (found < self.norm).all():
            return "low_precision_sum"
        is_small = self.setting.name == "small_limit"
        return "eps" if is_small and (found > self.norm).all() else "unknown"

    def wrong_norms(self) -> Iterator[tuple[str, Any]]:
        """The norms that known bugs give: one, or one for each device."""
        setting, norm = self.setting, self.norm
        whole = {n: x for n, x in self.mean.items() if not any(setting.specs[n])}
        split = {n: x for n, x in self.mean.items() if n not in whole}
        local, shard = [], []
        for part in _parts(setting, setting.batch_specs, self.batch):
            own = {n: x[part[n]] for n, x in self.batch.items()}
            local.append(_norm(_mean(own)))
        for part in _parts(setting, setting.specs, self.mean):
            shard.append(_norm({n: x[part[n]] for n, x in self.mean.items()}))
        yield "after_clip", min(norm, setting.max_norm)
        yield "local_norm", local
        yield "local_norm", np.mean(local)
        yield "own_shard", shard
        yield "averaged_norms", np.mean(shard)
        yield "averaged_norms", np.sqrt(np.mean(np.square(shard)))
        yield "leaves_left_out", _norm(whole)
        yield "leaves_left_out", _norm(split)
        data, experts = setting.mesh.devices.shape
        copies = sorted({1, data, experts, DEVICES})
        for times in copies[1:]:
            yield "once_per_replica", norm * math.sqrt(times)
        squares = _norm(whole) ** 2, _norm(split) ** 2
        for pair in product(copies, copies):
            kind = "all_leaves_repeated"
            if 1 in pair:
                kind = "whole_leaves_repeated"
                if pair[0] == 1:
                    kind = "split_leaves_repeated"
            yield kind, math.sqrt(np.dot(pair, squares))
        yield "gradients_summed", norm * data
        yield "accumulation_summed", norm * setting.microbatches

    def kind_of_update(self) -> str:
        """The bug that gives the update. Empty if it is right."""
        setting, limit = self.setting, self.setting.max_norm
        pairs = [self.ratios(name, [self.mean] * DEVICES) for name in self.mean]
        factors = [factors for factors, _ in pairs]
        if not all(self.is_small(rest) for _, rest in pairs):
            return self.kind_of_direction()
        by_leaf = np.array([factors[0] for factors in factors])
        factor = by_leaf[0]
        if not all(self.close(each, each[0]).all() for each in factors):
            return "own_factor"
        data = setting.mesh.shape["data"]
        if not self.close(by_leaf, factor).all():
            is_summed = self.close(by_leaf.max(), data * by_leaf.min())
            return "gradients_summed" if is_summed else "groups_apart"
        if self.close(factor, min(1.0, limit / self.norm)):
            return ""
        if self.close(factor, 1.0):
            return "not_clipped"
        if factor < 1.0:
            # The norm by which it was clipped.
            norm = limit / factor if factor else math.inf
            kind = self.kind_of_norm(np.array([norm]))
        else:
            kind = self.kind_of_norm(np.array([factor * self.norm]))
        is_below = kind == "unknown" and self.norm < limit
        return "clipped_below_limit" if is_below else kind

    def kind_of_direction(self) -> str:
        """The bug that gives an update along another direction than the gradient."""
        own, average = [], dict.fromkeys(self.mean, 0.0)
        for part in _parts(self.setting, self.setting.batch_specs, self.batch):
            # The examples of a device, with the whole of their gradients.
            examples = {n: x[part[n][0]] for n, x in self.batch.items()}
            own.append(_mean(examples))
            norm = _norm({n: x[part[n][1:]] for n, x in own[-1].items()})
            for name, leaf in own[-1].items():
                average[name] += leaf * min(1.0, self.setting.max_norm / norm) / DEVICES
        names = list(self.mean)
        if all(self.is_small(self.ratios(name, own)[1]) for name in names):
            return "local_norm"
        pairs = [self.ratios(name, [average] * DEVICES) for name in names]
        is_average = all(self.is_small(rest) for _, rest in pairs)
        return "clip_before_average" if is_average else "unknown"

    def ratios(self, name: str, gradients: list[Tree]) -> tuple[np.ndarray, np.ndarray]:
        """By what each device has multiplied its part of a leaf of its gradient, and how
        far its update is from that, relative to it.
        """
        factors, rests = [], []
        devices = list(self.setting.mesh.devices.flat)
        for shard in _shards(self.updates[name]):
            place = devices.index(shard.device)
            wanted = gradients[place][name][shard.index]
            found = np.asarray(shard.data, np.float64)
            factor = np.vdot(wanted, found) / np.vdot(wanted, wanted)
            rest = np.linalg.norm(found - factor * wanted)
            length = np.linalg.norm(found)
            # Of new weights the factor is negative.
            factors.append(abs(factor))
            rests.append(rest / length if length else 0.0)
        return np.array(factors), np.array(rests)

    def is_small(self, rest: np.ndarray) -> bool:
        # NaN is not.
        return bool((rest <= CASES[self.setting.name].tolerance).all())

    def nan(self) -> list[Finding]:
        """What devices make of a NaN that one of them holds."""
        rows, kind = [], "nan_on_one_device"
        same = np.full_like(self.norms, self.norms[0])
        if not np.array_equal(self.norms, same, equal_nan=True):
            found = np.nanmin(self.norms)
            rows.append(self.finding("norm", math.nan, found, kind))
        leaves = {n: np.float64(leaf) for n, leaf in self.updates.items()}
        flat = np.concatenate([leaf.ravel() for leaf in leaves.values()])
        is_mixed = np.isnan(flat).any() and np.nansum(abs(flat)) > 0
        # A step may clip nothing where the norm is NaN: that is seen everywhere.
        is_hidden = is_mixed and np.isfinite(self.norms).all()
        if is_hidden or any(map(_has_parted, self.updates.values())):
            found = _norm(leaves)
            rows.append(self.finding("update", math.nan, found, kind))
        return rows


def _has_parted(array: jax.Array) -> bool:
    """Whether devices that should hold the same part of an array do not."""
    copies: dict[str, np.ndarray] = {}
    for shard in _shards(array):
        own = np.asarray(shard.data)
        first = copies.setdefault(str(shard.index), own)
        if not np.array_equal(own, first, equal_nan=True):
            return True
    return False
