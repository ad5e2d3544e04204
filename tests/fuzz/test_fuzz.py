"""The short run of the fuzz: some cells, with the same cases in every run."""

import contextlib
import io
import math

import optax
import pytest

import optaxclip
from tests.fuzz import cells, checks, report, search
from tests.fuzz.cases import cases
from tests.methods import METHODS

SEED = 0
SHORT = [
    ("equation, float32", "clip_by_global_norm"),
    ("equation, float32", "clip_by_unitwise_norm"),
    ("equation, sixteen", "clip_by_tensor_norm"),
    ("value, float32", "clip_by_value"),
    ("value, int32", "clip_by_value"),
    ("form, mixed", "clip_by_group_norm"),
    ("form, python", "spam"),
    ("form, key", "clip_by_value"),
    ("second derivative", "clip_by_global_norm"),
    ("skip optimistic", "skip_nonfinite"),
    ("on_explicit_mesh", "clip_by_tensor_norm"),
    ("exported_for_any_size", "clip_by_global_norm"),
    ("strict promotion", "clip_by_global_norm"),
]


def found_in(name, method):
    """The finding in the cell of this name, or None."""
    for cell in cells.all_cells(SEED):
        if cell.method == method and cell.name.startswith(name):
            return search.search_cell(cell, SEED, math.inf)
    raise LookupError((name, method))


@pytest.mark.parametrize(("name", "method"), SHORT)
@pytest.mark.slow
def test_no_finding_in(name, method):
    finding = found_in(name, method)
    assert finding is None, f"\n{finding.text}"


def too_long(limit, **options):
    """A clipper with a fault: what it clips is an eighth too long."""
    return optax.chain(optaxclip.clip_by_tensor_norm(limit), optax.scale(1.125))


@pytest.mark.slow
def test_a_fault_is_found_shrunk_and_printed(monkeypatch):
    faulty = METHODS["clip_by_tensor_norm"]._replace(build=too_long, shrinks=False)
    monkeypatch.setitem(METHODS, "clip_by_tensor_norm", faulty)
    drawn = cases("clip_by_tensor_norm", "vectors")
    cell = cells.Cell("equation", "clip_by_tensor_norm", checks.equation, drawn)
    finding = search.search_cell(cell, SEED, math.inf)
    assert finding is not None and len(finding.text.splitlines()) <= 12
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(finding.text, {})
    assert "Array(" in printed.getvalue()


@pytest.mark.parametrize("name", ["scanned", "rank promotion", "second", "skip adam"])
@pytest.mark.slow
def test_the_program_of_every_check_runs(name):
    cell = next(c for c in cells.all_cells(SEED) if c.name.startswith(name))
    source = []
    search.seeded(SEED)(
        search.settings(max_examples=1, database=None, deadline=None)(
            search.given(cell.drawn)(lambda case: source.append(case))
        )
    )()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(report.program(cell, source[0]), {})
    assert printed.getvalue()


def test_a_search_ends_when_its_time_is_over():
    count = []
    assert list(search.search(SEED, 0.0, (0, 1), lambda: count.append(1))) == []
    assert not count
