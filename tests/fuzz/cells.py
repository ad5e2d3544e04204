"""The cells of the search: a check of one method on one structure of trees each.

A cell keeps what it compiles, so the search stays in one for some cases.
"""

import random
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import zip_longest
from typing import Any, NamedTuple

import optax
from hypothesis import strategies as st

from tests.fuzz import checks, switches, transformations, trees
from tests.fuzz import own_cases as own
from tests.fuzz.cases import Case, cases
from tests.fuzz.transformations import plain
from tests.methods import ALONE, METHODS, ORDERED, Method

OTHERS = ("mixed", "key", "float0", "python")
FINITE = (-100, 100)  # powers of 2 whose norms are finite, and whose halves are normal
LIMITS = ("1.0", "1e-20", "lambda step: 0.5 + step", "lambda step: 1.0 - step")


class Cell(NamedTuple):
    """One check, where it draws its cases from, and how many at a time."""

    name: str
    method: str
    check: Callable[[Case], None]
    drawn: Any  # a strategy of cases
    examples: int = 30


def limit_for(method: Method, limit: str) -> str | None:
    """The limit, where the method takes one and may do without."""
    if method.limit is None:
        return None
    return limit if method.schedules or limit[0].isdigit() else "1.0"


def equations(dice: random.Random) -> Iterator[Cell]:
    """Against float64 NumPy."""
    for name in checks.EQUATIONS:
        alone = METHODS[name].leaves == ALONE
        for kind in trees.PLAIN + (() if alone else ("mixed", "python", *trees.NARROW)):
            count = 40 if kind == "float32" else 15
            yield Cell(
                f"equation, {kind}", name, checks.equation, cases(name, kind), count
            )
    for name in ("clip_by_value", "clip"):
        for kind in ("float32", "sixteen", "key", "float0", *trees.INTEGERS):
            yield Cell(f"value, {kind}", name, checks.by_value, cases(name, kind), 40)


def forms(dice: random.Random) -> Iterator[Cell]:
    """What every method keeps, over leaves of all kinds, two of the many at a time."""
    for name, method in METHODS.items():
        others = (*OTHERS, dice.choice(trees.NARROW), dice.choice(trees.INTEGERS))
        for kind in trees.PLAIN + (() if method.leaves == ALONE else others):
            limit = st.sampled_from(LIMITS).map(partial(limit_for, method))
            drawn = limit.flatmap(partial(history, name, kind))
            yield Cell(f"form, {kind}", name, checks.invariants, drawn, 8)


def history(
    name: str, kind: str, limit: str | None, steps: int = 3, **more: Any
) -> Any:
    """Cases of some steps with one limit and the usual shrink."""
    return cases(name, kind, steps, limit=limit, options="", **more)


def own_cases(dice: random.Random) -> Iterator[Cell]:
    """Groups labelled by ints, and tokens of few bits."""
    for kind in ("float32", "mixed", "sixteen"):
        drawn = own.groups(kind)
        yield Cell(f"int labels, {kind}", "clip_by_group_norm", own.by_group, drawn, 20)
    yield Cell("tokens", "clipped_grad", own.by_token, own.lookups(), 15)


def derivatives(dice: random.Random) -> Iterator[Cell]:
    """Second derivatives."""
    for name in ("clip_by_global_norm", "clip_by_tensor_norm", "clip_by_unitwise_norm"):
        drawn = st.sampled_from(("1.0", "1e-3", "1e-20")).flatmap(
            partial(history, name, "vectors", steps=1, powers=(-100, 100))
        )
        yield Cell("second derivative", name, checks.hessian, drawn, 20)


def skips(dice: random.Random) -> Iterator[Cell]:
    """Optimizers whose steps are skipped."""
    for name in checks.OPTIMIZERS:
        check = partial(checks.skipping, optimizer=name)
        drawn = history("skip_nonfinite", "float32", None)
        yield Cell(f"skip {name}", "skip_nonfinite", check, drawn, 8)


@cache
def pair(way: Any, name: str, limit: str | None) -> tuple[Any, Any]:
    """(the clipper, the same in another way), built once, with what they compiled."""
    clipper = Case(name, (), "", limit).clipper()
    return clipper, way(clipper)


def same_in_another_way(case: Case, way: Any) -> None:
    """A transformation changes nothing."""
    clipper, other = pair(way, case.method, case.limit)
    steps, params = case.updates(), case.weights()
    first = way in transformations.FIRST_STEP
    wanted = plain(clipper, steps[:1] if first else steps, params)
    found = plain(other, steps[:1] if first else steps, params)
    switches.same(found, wanted, case.kind.ord == "spectral")


def injected(case: Case) -> None:
    """`optax.inject_hyperparams` changes nothing."""
    limit, steps, params = checks.limits_of(case)[0], case.updates(), case.weights()
    wanted = plain(case.clipper(), steps, params)
    other = optax.inject_hyperparams(case.kind.function)(limit)
    switches.same(plain(other, steps, params), wanted)


def ways(method: Method, dice: random.Random) -> Iterator[tuple[Any, str]]:
    """The transformations that a method is documented to work in, with a structure."""
    for way in transformations.ANY_METHOD:
        yield way, dice.choice(("float32", "float32", "sixteen"))
    for way in transformations.ON_DEVICES:
        yield way, "sharded"
    if method.norm != "unit" and (method.mesh_axes or method.norm == "element"):
        yield transformations.in_shard_map, "sharded"
    if method.ord != "spectral":
        yield transformations.exported_for_any_size, "vectors"


def transformed(dice: random.Random) -> Iterator[Cell]:
    """Against the same without the transformation."""
    for name, method in METHODS.items():
        for way, kind in ways(method, dice):
            limit = st.sampled_from(LIMITS[:2]).map(partial(limit_for, method))
            drawn = limit.flatmap(
                partial(history, name, kind, powers=FINITE),
            )
            check = partial(same_in_another_way, way=way)
            yield Cell(f"{way.__name__}, {kind}", name, check, drawn, 10)
        by_function = method.build is method.function and not method.quick
        if method.limit is not None and by_function:
            drawn = history(name, "float32", "0.5", 2, powers=FINITE)
            yield Cell("inject_hyperparams", name, injected, drawn, 6)


def switched(dice: random.Random) -> Iterator[Cell]:
    """Under JAX's switches."""
    for name, method in METHODS.items():
        for switch in switches.SWITCHES:
            kind = "float32" if method.leaves in (ALONE, ORDERED) else "sixteen"
            limit = limit_for(method, "0.5")
            drawn = history(name, kind, limit, 2, powers=FINITE)
            check = partial(switches.under, switch=switch)
            yield Cell(switch, name, check, drawn, 3)


def all_cells(seed: int) -> list[Cell]:
    """All cells in a random order, in which each kind has its turns."""
    kinds = (equations, forms, own_cases, derivatives, skips, transformed, switched)
    dice = random.Random(seed)
    shuffled = [list(kind(dice)) for kind in kinds]
    for cells in shuffled:
        dice.shuffle(cells)
    turns = zip_longest(*shuffled)
    return [cell for turn in turns for cell in turn if cell is not None]
