"""Checks of a case. Each raises AssertionError, or what the library raises."""

import math
from typing import Any

import jax
import numpy as np

import optaxclip
from tests import oracles
from tests.fuzz import expected
from tests.fuzz.cases import Case
from tests.methods import BOUND, LENGTH, METHODS, ORDERED

EQUATIONS = [
    name
    for name, method in METHODS.items()
    if method.limit is not None
    and method.norm != "element"
    and method.ord != "spectral"
    and method.wraps is None
]


def numbers_of(case: Case) -> list[float]:
    """The limits of the case in float64, None as inf."""
    return [expected.number(limit) for limit in case.limits()]


def first_step(case: Case) -> tuple[Any, Any, Any] | None:
    """(updates, clipped, state), or None where the limit is rightly refused."""
    if max(numbers_of(case), default=0.0) > expected.LARGEST:
        try:
            clipper = case.clipper()
        except ValueError:  # float32 has no such number
            return None
    clipper, tree, params = case.clipper(), case.updates()[0], case.weights()
    clipped, state = clipper.update(tree, clipper.init(tree), params)
    return tree, clipped, state


def equation(case: Case) -> None:
    """One eager step is what the equation says."""
    step = first_step(case)
    if step is None:
        return
    tree, clipped, state = step
    assert_kept(case, tree, clipped)
    parts = expected.parts_of(case, tree, numbers_of(case)[0])
    for part in parts:
        expected.check_part(case, part, tree, clipped)
        expected.check_bound(case, part, clipped)
    if isinstance(state, optaxclip.ClipState) and case.kind.norm == "all" and parts:
        assert_metrics(parts[0], optaxclip.metrics(state))


def assert_metrics(part: expected.Part, found: dict[str, Any]) -> None:
    """`metrics` says what was done: norms to 2e-6, as documented."""
    if not part.checked or not math.isfinite(part.norm) or part.norm > expected.LARGEST:
        return
    told = {key: float(value) for key, value in found.items()}
    wanted = {"clip/norm_before": part.norm, "clip/norm_after": part.new}
    for key, value in wanted.items():
        close = math.isclose(told[key], value, rel_tol=2e-6, abs_tol=expected.SMALLEST)
        assert close, (key, "expected", value, "got", told[key])
    tied = abs(part.norm - part.limit) <= 2e-6 * part.limit
    tied |= 0 < abs(part.new - part.norm) <= 2e-6 * part.norm  # of `smooth`, far below
    clipped = float(part.new != part.norm)
    assert tied or told["clip/clipped"] == clipped, ("clip/clipped is not", clipped)


def by_value(case: Case) -> None:
    """`clip_by_value` lies between its bounds, and keeps what does."""
    limits = numbers_of(case)
    lowest = -math.inf if len(limits) < 2 else limits[1]
    high, low = limits[0], lowest if lowest > -math.inf else -limits[0]
    if len(limits) > 1 and case.limits()[1] is None:
        low = -high
    tree, clipped, _ = first_step(case) or ({}, {}, None)
    assert_kept(case, tree, clipped)
    for name, leaf in tree.items():
        if leaf is None or expected.is_key(leaf) or leaf.dtype == bool:
            continue
        if leaf.dtype == jax.dtypes.float0 or 0 < abs(high) < expected.SMALLEST:
            continue
        wanted = expected.between(leaf, high, low)
        eps = oracles.eps_of(leaf.dtype) if expected.is_clipped(leaf) else 0.0
        if eps:
            finite = np.where(np.isfinite(wanted), wanted, 0)
            got = np.where(np.isfinite(wanted), oracles.wide(clipped[name]), 0)
            relative = eps / 2 + 4 * expected.EPS * np.iscomplexobj(wanted)
            expected.compare(finite, got, relative, leaf.dtype)
        else:
            same = np.array_equal(wanted, oracles.wide(clipped[name]))
            numbers = (wanted.tolist(), clipped[name].tolist())
            assert same, ("an integer is not: expected, got", *numbers)


def assert_kept(case: Case, before: Any, after: Any) -> None:
    """Structure, dtypes and shapes are kept, and bits of all that is not clipped."""
    assert jax.tree.structure(before) == jax.tree.structure(after), "other structure"
    for name, leaf in before.items():
        if leaf is None or isinstance(leaf, float):
            continue
        new = after[name]
        assert (new.dtype, new.shape) == (leaf.dtype, leaf.shape), (name, new.dtype)
        if expected.is_clipped(leaf) or case.kind.leaves == ORDERED:
            continue
        if not expected.is_key(leaf):
            numbers = (leaf.tolist(), new.tolist())
            assert oracles.same_bits(new, leaf), ("changed: expected, got", *numbers)


def invariants(case: Case) -> None:
    """Some steps keep the form of the state, and what the method promises to keep."""
    clipper, params = case.clipper(), case.weights()
    state = clipper.init(params)
    form = jax.tree.map(jax.typeof, state)
    for tree in case.updates():
        old, (clipped, state) = state, clipper.update(tree, state, params)
        now = jax.tree.map(jax.typeof, state)
        assert now == form, ("the state was, and is", form, now)
        if is_skipped(old, state):
            assert not any(np.any(oracles.wide(u)) for u in numbers_in(clipped))
            continue
        assert_kept(case, tree, clipped)
        assert_no_longer(case, tree, clipped)
    if isinstance(state, optaxclip.ClipState | optaxclip.SkipState):
        optaxclip.metrics(state)


def is_skipped(old: Any, new: Any) -> bool:
    """Did a wrapper skip the step between two of its states?"""
    wrapped = isinstance(new, optaxclip.SkipState)
    return wrapped and int(new.skipped) > int(old.skipped)


def numbers_in(tree: Any) -> list[Any]:
    """The leaves that hold numbers: no keys, no float0."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if not expected.is_key(leaf)]
    return [x for x in leaves if getattr(x, "dtype", None) != jax.dtypes.float0]


def assert_no_longer(case: Case, before: Any, after: Any) -> None:
    """Finite stays finite, and no leaf comes out longer than it came."""
    for name, leaf in before.items():
        if not expected.is_clipped(leaf):
            continue
        x, y = (expected.values(tree, (name, ...)) for tree in (before, after))
        whole = [
            expected.values(before, (n, ...)) for n in before if is_float(before[n])
        ]
        if not oracles.norm(whole) <= expected.LARGEST:
            return
        if case.kind.keeps & {LENGTH, BOUND}:
            assert np.isfinite(y).all(), ("finite became", y.tolist())
        if LENGTH in case.kind.keeps and not case.options:
            dtype = expected.dtype_of(leaf)
            slack = oracles.norm([x]) * oracles.eps_of(dtype)
            lost = expected.lost_in(dtype) * x.size + slack
            assert oracles.norm([y]) <= oracles.norm([x]) + lost, ("longer", y.tolist())


def is_float(leaf: Any) -> bool:
    """Does the leaf count in a norm?"""
    return leaf is not None and expected.is_clipped(leaf)
