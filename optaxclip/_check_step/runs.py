"""Runs of a training step, with gradients that are known.

    setting    how weights and batch are split over devices, and the limit
    case       gradients above the limit, below it, or with a NaN
    run        what the step gave for a setting and a case, beside the right numbers

`runs_of` makes the runs of a setting. All weights are 0, but for the first weight of
each leaf. It is the marker, and has no gradient. So a step that changes the marker has
added weights to the gradient, as weight decay does.
"""

import math
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from numpy.typing import ArrayLike

from .._arguments.checks import check_scalar, shown

Step = Callable[..., Any]
PyTree = Any
Arrays = dict[str, np.ndarray]
Specs = dict[str, P]

DEVICES = 8

# ----------------------------------------------------------------------------- settings

SHAPES = {"bias": (8,), "experts": (4, 8, 8), "matrix": (16, 8)}
REPLICATED = dict.fromkeys(SHAPES, P())
SPLIT_BATCH = dict.fromkeys(SHAPES, P("data"))
# The leaves of settings in 16 bits. A sum over so many squares shows its rounding.
MANY_LEAVES = ["large", *(f"small_{number}" for number in range(64))]


class Setting(NamedTuple):
    """The argument of `make_step`."""

    name: str
    mesh_shape: tuple[int, int] = (DEVICES, 1)
    specs: Specs = REPLICATED  # of params, gradients and updates
    batch_specs: Specs = SPLIT_BATCH  # of the batch
    # Not 1, so that norm**2 and norm**2 / limit can be told apart.
    max_norm: float = 0.25
    microbatches: int = 1  # parts of a batch that are accumulated
    dtype: DTypeLike = jnp.float32

    @property
    def mesh(self) -> Mesh:
        """CPU devices along "data" and "expert"."""
        count = math.prod(self.mesh_shape)
        devices = np.array(jax.devices("cpu")[:count])
        return Mesh(devices.reshape(self.mesh_shape), ("data", "expert"))

    @staticmethod
    def loss(params: PyTree, batch: PyTree) -> jax.Array:
        """A loss whose gradient is the mean over the examples of `batch`."""
        means = jax.tree.map(lambda x: x.mean(axis=0), batch)
        products = jax.tree.map(lambda w, x: jnp.sum(w * x), params, means)
        return jnp.asarray(optax.tree.sum(products))


def setting_in_16_bits(dtype: DTypeLike) -> Setting:
    return Setting(
        name=jnp.dtype(dtype).name,
        specs=dict.fromkeys(MANY_LEAVES, P()),
        batch_specs=dict.fromkeys(MANY_LEAVES, P("data")),
        # So large that clipped gradients do not underflow in float16.
        max_norm=64.0,
        dtype=dtype,
    )


SETTINGS = {
    "replicated": Setting("replicated"),
    # So small a limit that an eps of 1e-8 added to the norm shows. Four devices, so
    # that a factor of 8 (a loss scale) is not mistaken for the number of devices.
    "small_limit": Setting("small_limit", mesh_shape=(4, 1), max_norm=1e-6),
    "accumulated": Setting("accumulated", microbatches=3),
    "fsdp": Setting(
        name="fsdp",
        specs={"bias": P(), "experts": P(None, None, "data"), "matrix": P("data")},
    ),
    "experts": Setting(
        name="experts",
        mesh_shape=(4, 2),
        specs=REPLICATED | {"experts": P("expert")},
        batch_specs=SPLIT_BATCH | {"experts": P("data", "expert")},
    ),
    "bfloat16": setting_in_16_bits(jnp.bfloat16),
    "float16": setting_in_16_bits(jnp.float16),
}

# ---------------------------------------------------------------------------- gradients

# norm / limit of each case. 37 is not a usual scale, nor a number of devices. It brings
# some elements above the limit. In the case "below" a loss scale of 2^16 still leaves
# the norm below the limit.
CASES = {"above": 37.0, "below": 1e-6, "nan": 37.0}


def batch_of(setting: Setting, case: str) -> Arrays:
    """The gradients of examples: [examples, ...] for each leaf.

    All examples but the first are equal. So one part of a batch has another mean than
    all other parts, whichever way a step splits the batch.
    """
    count = setting.mesh_shape[0] * setting.microbatches
    batch = {}
    for name, (first, other) in _two_examples(setting, case).items():
        # In 16 bits `first` and `other` are equal, so the mean of eight examples is
        # exactly (9 + 7) / 8 = 2 times one of them.
        leaf = np.stack([9.0 * first] + [other] * (count - 1))
        # The marker has no gradient. `reshape` returns a view of the leaf.
        leaf.reshape(count, -1)[:, 0] = 0.0
        batch[name] = leaf
    if setting.dtype != jnp.float32:
        return batch
    norm = norm_of(_flat(_mean(batch)))
    scale = CASES[case] * setting.max_norm / norm
    for name, leaf in batch.items():
        batch[name] = np.float32(scale * leaf)
    if case == "nan":
        batch["experts"][-1, -1, -1, -1] = np.nan
    return batch


def _two_examples(setting: Setting, case: str) -> Arrays:
    """The first example, and the example that is repeated: [2, ...] for each leaf."""
    if setting.dtype == jnp.float32:
        # The name of a run is its seed, so that runs do not agree by chance.
        seed = [*f"{setting.name} {case}".encode()]
        random = np.random.default_rng(seed)
        examples = {}
        for name, shape in SHAPES.items():
            examples[name] = random.normal(0.5, 1.0, (2, *shape))
        return examples
    # The means are twice these numbers, and 16 bits hold both. In bfloat16 a sum of
    # squares loses the small leaves: the squares of 16 means of 512 add to 2^22, the
    # next number is 2^22 + 2^15, and the squares of a small leaf add to 9216. In
    # float16 the square of 512 is inf.
    examples = {}
    for name in MANY_LEAVES:
        examples[name] = np.tile([0.0, 32.0, 32.0, 16.0], (2, 1))
    examples["large"] = np.full((2, 17), 256.0)
    return examples


def _mean(batch: Arrays) -> Arrays:
    """The mean of the examples."""
    return jax.tree.map(lambda leaf: leaf.mean(0, np.float64), batch)


def _flat(tree: PyTree) -> np.ndarray:
    """[numbers]: all numbers of a tree, with its leaves sorted by name."""
    leaves = jax.tree.leaves(tree)
    return np.concatenate([np.ravel(leaf) for leaf in leaves])


def norm_of(row: ArrayLike) -> float:
    """The norm of all numbers of a row."""
    return float(np.linalg.norm(row))


def norms_of(rows: np.ndarray) -> np.ndarray:
    """The norm of each row."""
    return np.linalg.norm(rows, axis=-1)


# --------------------------------------------------------------------------------- runs


class Run(NamedTuple):
    """A step that was run for a setting and a case. Leaves are sorted by name."""

    setting: Setting
    case: str  # gradients "above" or "below" the limit, or with a "nan"
    rounding: float  # relative, of a norm, a factor or an update

    # Right numbers, in float64.
    batch: np.ndarray  # [examples, numbers]: gradients of the examples
    gradient: np.ndarray  # [numbers]: their mean
    leaf_norms: np.ndarray  # [leaves]: norms of the gradient
    shards: np.ndarray  # [devices, numbers]: the gradient that a device holds

    # What the step gave.
    step_norms: np.ndarray  # [devices]: the norm that it returned
    update: np.ndarray  # [numbers]: of the first copy, 0 for the markers
    step_factors: np.ndarray  # [devices, leaves]: update over gradient, or NaN
    drift: np.ndarray  # [leaves]: change of the markers
    update_has_nan: np.ndarray  # [devices]: a NaN is in the update
    replicas_differ: bool  # devices hold different copies of new params or updates

    @property
    def limit(self) -> float:
        return self.setting.max_norm

    @property
    def norm(self) -> float:
        """The right norm."""
        return norm_of(self.gradient)

    def factor_ratio(self) -> float:
        """Factor of the step / right factor. NaN if leaves or devices differ."""
        factor = min(1.0, self.limit / self.norm)
        return self.same_or_nan(self.step_factors) / factor

    def same_or_nan(self, numbers: np.ndarray) -> float:
        """The finite number that all are equal to, else NaN."""
        first = numbers.flat[0]
        if np.isfinite(first) and self.is_close(numbers, first).all():
            return first
        return math.nan

    def is_close(self, numbers: ArrayLike, others: ArrayLike) -> np.ndarray:
        """Whether numbers are equal but for rounding."""
        return np.isclose(numbers, others, rtol=self.rounding, atol=0)


def runs_of(make_step: Callable[[Setting], Step], setting: Setting) -> list[Run]:
    """Runs the step of a setting, in 16 bits with gradients above the limit only."""
    # A trainer may write into its specs.
    step = make_step(deepcopy(setting))
    if not callable(step):
        raise TypeError(f"check_step: make_step must return a step, got {shown(step)}.")
    if setting.dtype != jnp.float32:
        return [_run(step, setting, "above")]
    return [_run(step, setting, case) for case in CASES]


def _run(step: Step, setting: Setting, case: str) -> Run:
    """Runs the step once, and reads its norm, update and factors from all devices."""
    # A float32 sum has at most 400 numbers. In 16 bits update, factor and norm are
    # rounded once or twice each.
    rounding = 3e-5 if setting.dtype == jnp.float32 else 2.0**-6

    batch = batch_of(setting, case)
    examples = [leaf.reshape(len(leaf), -1) for leaf in jax.tree.leaves(batch)]
    mean = _mean(batch)
    gradient = _flat(mean)
    shards = _per_device(setting, setting.specs, mean)

    # A marker stands where the gradient is 0.
    marker = np.float32(setting.max_norm)
    params = {}
    for name, leaf in mean.items():
        params[name] = np.where(leaf, 0.0, marker)
    output, norm = _call_step(step, setting, params, batch)
    # A norm is a tree of one leaf. P(): each device holds a number of its own.
    (step_norms,) = _per_device(setting, P(), norm)
    outputs = _per_device(setting, setting.specs, output)
    # NumPy reads the first copy of each number. Where replicas differ, some device
    # holds other numbers.
    first_copy = jax.tree.map(np.float64, output)
    right_copies = _per_device(setting, setting.specs, first_copy)
    replicas_are_equal = np.array_equal(
        np.hstack(outputs), np.hstack(right_copies), equal_nan=True
    )
    flat_output = _flat(first_copy)
    drift = flat_output[gradient == 0.0]
    # New params hold the markers, updates hold 0.
    if drift.mean() > marker / 2:
        drift = drift - marker
    return Run(
        setting=setting,
        case=case,
        rounding=rounding,
        batch=np.hstack(examples),
        gradient=gradient,
        leaf_norms=np.array([norm_of(leaf) for leaf in jax.tree.leaves(mean)]),
        shards=np.hstack(shards),
        step_norms=step_norms[:, 0],
        update=np.where(gradient, flat_output, 0.0),
        step_factors=_step_factors(outputs, shards, rounding),
        drift=drift,
        update_has_nan=np.isnan(norms_of(np.hstack(outputs))),
        replicas_differ=not replicas_are_equal,
    )


def _step_factors(
    outputs: list[np.ndarray], shards: list[np.ndarray], rounding: float
) -> np.ndarray:
    """[devices, leaves]: update over gradient, or NaN."""
    factors = []
    for leaf_outputs, leaf_shards in zip(outputs, shards):
        factors.append(factors_of(leaf_outputs, leaf_shards, rounding))
    step_factors = np.stack(factors, axis=1)
    # New params and updates of SGD have a negative factor, clipped gradients a positive
    # one. So all factors are multiplied by the sign of the first: a leaf of the other
    # sign stays negative.
    return step_factors * np.copysign(1.0, step_factors[0, 0])


def _call_step(
    step: Step, setting: Setting, params: Arrays, batch: Arrays
) -> tuple[Arrays, ArrayLike]:
    """Returns what the step returns: new params or updates, and the norm."""
    cast = partial(jnp.asarray, dtype=setting.dtype)
    weights, examples = jax.tree.map(cast, (params, batch))
    result = step(
        _placed(setting, setting.specs, weights),
        _placed(setting, setting.batch_specs, examples),
    )
    expected = "check_step: the step must return (new params or updates, norm)"
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(f"{expected}, got {shown(result)}.")
    output, norm = result
    check_scalar("check_step: the norm", norm)
    shapes = jax.tree.map(jnp.shape, params)
    output_shapes = jax.tree.map(jnp.shape, output)
    # A FrozenDict is equal to a dict.
    if type(output) is not dict or output_shapes != shapes:
        raise ValueError(
            f"{expected}, the first in the shapes of params, {shapes}, got "
            f"{shown(output_shapes)}."
        )
    return output, norm


def _placed(setting: Setting, specs: PyTree, tree: PyTree) -> PyTree:
    """The tree on the devices of a setting."""
    shardings = jax.tree.map(partial(NamedSharding, setting.mesh), specs)
    # device_put leaves an array that already has its sharding as it is. So copies that
    # differ stay different.
    return jax.device_put(tree, shardings)


def _per_device(setting: Setting, specs: PyTree, tree: PyTree) -> list[np.ndarray]:
    """The shards of each leaf: [devices, numbers]."""
    leaves = []
    for leaf in jax.tree.leaves(_placed(setting, specs, tree)):
        shards = {}
        for shard in leaf.addressable_shards:
            shards[shard.device] = np.ravel(np.float64(shard.data))
        in_order = [shards[device] for device in setting.mesh.devices.flat]
        leaves.append(np.stack(in_order))
    return leaves


# inf - inf is NaN: no factor.
@np.errstate(invalid="ignore")
def factors_of(
    updates: np.ndarray, gradients: np.ndarray, rounding: float
) -> np.ndarray:
    """[...]: update over gradient, both [..., numbers]. NaN where one is not a
    multiple of the other.
    """
    # The markers are left out.
    updates = np.where(gradients, updates, 0.0)
    products = np.sum(updates * gradients, axis=-1)
    squares = np.sum(gradients**2, axis=-1)
    factors = products / squares
    differences = norms_of(updates - factors[..., None] * gradients)
    is_multiple = differences <= rounding * norms_of(updates)
    return np.where(is_multiple, factors, math.nan)
