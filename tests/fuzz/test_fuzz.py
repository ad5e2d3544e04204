"""The short run of the fuzz: some cells, with the same cases in every run."""

import math

import optax
import pytest

import optaxclip
from tests.fuzz import checks, search
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
    ("form, float32", "skip_nonfinite"),
    ("form, sixteen", "zclip"),
    ("strict promotion", "clip_by_global_norm"),
]


@pytest.mark.parametrize(("name", "method"), SHORT)
@pytest.mark.slow
def test_no_finding_in(name, method):
    cell = search.cell_of(name, method, SEED)
    finding = search.search_cell(cell, SEED, math.inf)
    assert finding is None, f"\n{finding.text}"


def too_long(limit, **options):
    """A clipper with a fault: what it clips is an eighth too long."""
    return optax.chain(optaxclip.clip_by_tensor_norm(limit), optax.scale(1.125))


@pytest.mark.slow
def test_a_fault_is_found_shrunk_and_printed(monkeypatch):
    faulty = METHODS["clip_by_tensor_norm"]._replace(build=too_long, shrinks=False)
    monkeypatch.setitem(METHODS, "clip_by_tensor_norm", faulty)
    drawn = cases("clip_by_tensor_norm", "float32")
    cell = search.Cell("equation", "clip_by_tensor_norm", checks.equation, drawn)
    finding = search.search_cell(cell, SEED, math.inf)
    assert finding is not None and finding.signature.startswith("equation: Assert")
    with pytest.raises(AssertionError):
        exec(finding.text, {})


def test_a_search_ends_when_its_time_is_over():
    assert list(search.search(SEED, 0.0)) == []
