"""What a clipper with a fixed limit must make of a tree, in float64 NumPy.

Tolerances are those of docs/numerics.md. An element may be off by 8 eps of float32,
by half an eps of its dtype, and by what the subnormal range of its dtype loses. A limit
that is itself a product adds 2 eps, the extra roundings of `smooth` 3. Gradients of
examples may be off by 64 eps, and a broken example counts as 0.

Out of contract, and not checked: norms below 1e-34, where numbers that are subnormal in
float32 count as 0 and would change the norm, and limits that are subnormal themselves.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from tests import oracles
from tests.fuzz.cases import Case
from tests.methods import ALONE, BITS, Method

EPS = 2.0**-23
LARGEST = float(np.finfo(np.float32).max)
SMALLEST = 2.0**-126
Place = tuple[str, Any]  # the leaf's name, and the index of the part in it


class Part(NamedTuple):
    """What is measured together, and what must become of it."""

    places: list[Place]
    norm: float
    limit: float
    new: float  # the norm afterwards: NaN for a broken step
    checked: bool  # within the contract?


def is_clipped(leaf: Any) -> bool:
    """Does the leaf count?"""
    if isinstance(leaf, float):
        return True
    dtype = getattr(leaf, "dtype", None)
    inexact = dtype is not None and jnp.issubdtype(dtype, jnp.inexact)
    return inexact and np.size(leaf) > 0


def places_of(method: Method, tree: dict[str, Any]) -> list[list[Place]]:
    """The parts of the tree that are measured together."""
    names = [name for name in sorted(tree) if is_clipped(tree[name])]
    if method.norm == "all":
        return [[(name, ...) for name in names]] if names else []
    if method.norm == "tensor":
        return [[(name, ...)] for name in names]
    if method.norm == "group":
        matrices = [name for name in names if np.ndim(tree[name]) > 1]
        ranks = matrices, [name for name in names if name not in matrices]
        return [[(name, ...) for name in group] for group in ranks if group]
    return [[place] for name in names for place in units(name, np.shape(tree[name]))]


def units(name: str, shape: tuple[int, ...]) -> list[Place]:
    """The units of one leaf."""
    summed = oracles.unit_axes(np.empty(shape, bool))
    kept = [1 if axis in summed else size for axis, size in enumerate(shape)]
    return [
        (name, tuple(slice(None) if a in summed else i for a, i in enumerate(index)))
        for index in np.ndindex(*kept)
    ]


def number(limit: Any) -> float:
    """The limit of the first step, in float64."""
    value = limit(0) if callable(limit) else limit
    if value is None:
        return math.inf
    wide = float(np.asarray(value).astype(np.float64))
    # A schedule may fall below 0, which counts as 0.
    return max(wide, 0.0) if callable(limit) else wide


def shrunk(case: Case, norm: float, limit: float) -> float:
    """The new norm."""
    options = case.options
    of_examples = case.kind.leaves == ALONE and BITS not in case.kind.keeps
    if of_examples and not norm <= LARGEST:
        return 0.0
    if math.isinf(limit):
        return norm
    if not math.isfinite(norm) or norm > LARGEST:
        return math.nan
    if "smooth" in options:
        return norm * limit / (limit + norm) if limit else 0.0
    if "drop" in options:
        return 0.0 if norm > limit else norm
    if "normalize" in options:
        return limit if norm else 0.0
    return min(norm, limit)


def narrowed(limit: float) -> float:
    """The limit as float32 holds it, but for one that is too large: that is kept."""
    return limit if limit > LARGEST else float(np.float32(limit))


def parts_of(case: Case, tree: dict[str, Any], limit: float) -> list[Part]:
    """Every part with what must become of it."""
    method, params, found = case.kind, case.weights(), []
    for places in places_of(method, tree):
        pieces = [values(tree, place) for place in places]
        norm = oracles.norm(pieces, method.ord)
        # float32 has no number for the modulus of some complex numbers.
        longest = oracles.norm(pieces, math.inf)
        most, ok = narrowed(limit), not LARGEST < longest < math.inf
        if method.floor is not None:
            length = oracles.norm([values(params, place) for place in places])
            most *= max(length, method.floor)
            ok = length >= 1e-37 or length < method.floor
        new = shrunk(case, norm, most)
        found.append(
            Part(places, norm, most, new, ok and in_contract(norm, most, limit, new))
        )
    return found


def in_contract(norm: float, limit: float, given: float, new: float) -> bool:
    """Is neither of them where float32 has no normal numbers, or ends?

    A quotient of norms below 2^-252 makes the updates 0, as docs/numerics.md says.
    """
    small = 0 < norm < 1e-34 or 0 < limit < SMALLEST or 0 < given < SMALLEST
    at_the_end = abs(norm / LARGEST - 1) < 1e-6 or abs(limit / LARGEST - 1) < 1e-6
    far = 0 < new < norm * 2.0**-252 * (1 + 16 * EPS)
    return not (small or at_the_end or far)


def values(tree: Any, place: Place) -> Any:
    """The part of a leaf in float64. A Python float is what float32 makes of it."""
    leaf = tree[place[0]]
    leaf = np.float32(leaf) if isinstance(leaf, float) else leaf
    return np.atleast_1d(oracles.wide(leaf)[place[1]])


def lost_in(dtype: Any) -> float:
    """What a number too small for its dtype may lose."""
    if ml_dtypes.finfo(dtype).bits < 16:
        return float(ml_dtypes.finfo(dtype).smallest_subnormal) / 2
    return oracles.floor_of(dtype)


def dtype_of(leaf: Any) -> Any:
    """The dtype of an array or a Python float."""
    return np.dtype(np.float32) if isinstance(leaf, float) else leaf.dtype


def check_part(case: Case, part: Part, before: Any, after: Any) -> None:
    """Compares one part with its equation."""
    tied = abs(part.norm - part.limit) <= 2e-6 * part.limit
    if not part.checked or (tied and "drop" in case.options):
        return
    smooth, alone = "smooth" in case.options, case.kind.leaves == ALONE
    roundings = 64 if alone else 8 + 2 * (case.kind.floor is not None) + 3 * smooth
    untouched = (part.new == part.norm and not tied) or math.isinf(part.limit)
    for place in part.places:
        dtype = dtype_of(before[place[0]])
        x, y = values(before, place), values(after, place)
        if untouched and BITS in case.kind.keeps:
            same = oracles.same_bits(x, y)
            assert same, ("bits changed: expected, got", x.tolist(), y.tolist())
            continue
        wanted = times(x, part)
        relative = roundings * EPS + oracles.eps_of(dtype) / 2
        compare(wanted, y, relative, dtype, flushed_in(part))


def flushed_in(part: Part) -> float:
    """What becomes of elements that are subnormal, where the part is lengthened."""
    lengthened = part.new > part.norm > 0
    return 2 * SMALLEST * part.new / part.norm if lengthened else 0.0


def times(x: Any, part: Part) -> Any:
    """What the equation makes of a piece of the part."""
    if math.isnan(part.new):
        return np.full_like(x, np.nan)
    if part.new == 0 or part.norm == 0:
        return np.zeros_like(x)
    return (x * (np.longdouble(part.new) / part.norm)).astype(x.dtype)


def compare(
    wanted: Any, found: Any, relative: float, dtype: Any, absolute: float = 0.0
) -> None:
    """Raises where an element is off. What the dtype cannot hold passes."""
    numbers = (dtype, "expected, got", wanted.tolist(), found.tolist())
    if np.isnan(wanted).any():
        assert np.isnan(found).all(), ("a broken part is not NaN", *numbers)
        return
    size = np.abs(wanted)
    held = size <= 0.99 * float(ml_dtypes.finfo(dtype).max)
    allowed = relative * size + lost_in(dtype) + absolute
    with np.errstate(invalid="ignore"):
        close = (np.abs(found - wanted) <= allowed) | ~held
    assert close.all(), (kind_of_miss(wanted[~close], found[~close]), *numbers)


def kind_of_miss(wanted: Any, found: Any) -> str:
    """What findings are told apart by."""
    if not np.isfinite(found).all():
        return "became NaN or inf"
    if not found.any():
        return "became 0"
    return "too large" if (np.abs(found) > np.abs(wanted)).any() else "too small"


def check_bound(case: Case, part: Part, after: Any) -> None:
    """What comes out is no longer than its limit, but for rounding to its dtype."""
    if not part.checked or not math.isfinite(part.new):
        return
    kinds = [dtype_of(after[name]) for name, _ in part.places]
    largest = min(float(ml_dtypes.finfo(kind).max) for kind in kinds)
    if part.new > max(part.norm, largest / 100):  # lengthened, and perhaps beyond that
        return
    pieces = [values(after, place) for place in part.places]
    length = oracles.norm(pieces, case.kind.ord)
    lost = sum(x.size for x in pieces) * max(map(lost_in, kinds))
    eps = max(map(oracles.eps_of, kinds))
    longest = max(part.limit, part.new) * (1 + eps) + lost
    assert length <= longest, ("longer than the limit", length, part.limit)


def between(leaf: Any, high: float, low: float) -> Any:
    """`clip_by_value` of one leaf, in float64 and rounded inwards for integers."""
    x = oracles.wide(leaf)
    if np.iscomplexobj(x):
        size = np.abs(x)
        with np.errstate(invalid="ignore", over="ignore"):
            return np.where(size > high, x * (high / np.where(size == 0, 1, size)), x)
    if jnp.issubdtype(leaf.dtype, jnp.integer):
        info = ml_dtypes.iinfo(leaf.dtype)
        high, low = math.floor(min(high, 2**70)), math.ceil(max(low, -(2**70)))
        high, low = (min(max(e, int(info.min)), int(info.max)) for e in (high, low))
    return np.where(x > high, high, np.where(x < low, low, x))


def is_key(leaf: Any) -> bool:
    """Is it an array of PRNG keys?"""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
