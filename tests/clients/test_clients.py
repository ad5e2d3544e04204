"""The comparison of two runs of a package sees what is wrong between them."""

import json
from importlib.metadata import PackageNotFoundError, version

import numpy as np
import pytest

from tests.clients.__main__ import main
from tests.clients.compare import Row, compare, row_of
from tests.clients.trained import CLIENTS
from tests.clients.worker import same

GOOD = {
    "theirs": {"losses": [4.0, 2.0], "metrics": {}, "restored": True},
    "ours": {
        "losses": [4.0, 2.000002],
        "metrics": {"clip_0/clipped_count": 2.0, "clip_1/clipped_count": 1.0},
        "restored": True,
    },
    "none": {"losses": [4.0, 3.0], "metrics": {}, "restored": True},
}


def problems(**changed):
    runs = {whose: run | changed.get(whose, {}) for whose, run in GOOD.items()}
    return compare("numpyro", "1.0", runs).problems


def test_runs_that_agree_have_no_problem():
    row = compare("numpyro", "1.0", GOOD)
    assert row.problems == () and row.clipped == 3 and row.restored
    assert row.difference == pytest.approx(2e-6 / 3)
    assert row.without == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"ours": {"losses": [4.0, 2.1]}}, "losses differ by 3.3e-02"),
        ({"ours": {"losses": [4.0, float("nan")]}}, "losses differ by inf"),
        ({"ours": {"losses": [4.0]}}, "losses differ by inf"),
        ({"none": {"losses": [4.0, 2.0]}}, "losses without a clip differ by 0.0e"),
        ({"ours": {"metrics": {}}}, "metrics found no clipped step"),
        ({"ours": {"restored": False}}, "the restored state is not the saved one"),
        ({"theirs": {"restored": False}}, "optax's restored state is not"),
    ],
)
def test_each_way_to_differ_is_a_problem(changed, text):
    assert any(
        problem.startswith(f"numpyro: {text}") for problem in problems(**changed)
    )


def test_a_package_that_is_not_installed_is_no_failure(monkeypatch, capsys):
    absent = CLIENTS["numpyro"]._replace(install="not-installed-at-all")
    monkeypatch.setitem(CLIENTS, "numpyro", absent)
    assert main(["numpyro"]) == 0
    printed = capsys.readouterr()
    assert "not installed: `pip install not-installed-at-all`" in printed.out
    assert "numpyro (1 of 1) ..." in printed.err


def test_an_unknown_package_is_named(capsys):
    with pytest.raises(SystemExit):
        main(["keras"])
    assert "no such package: keras" in capsys.readouterr().err


@pytest.mark.slow
def test_a_checkpoint_with_other_bits_is_seen():
    saved = [np.float32(0.0)]
    assert same(saved, [np.float32(0.0)])
    assert not same(saved, [np.float32(-0.0)]) and not same(saved, (saved[0],))


@pytest.mark.parametrize("name", CLIENTS)
def test_an_installed_client_trains_alike(name):
    try:
        version(CLIENTS[name].install)
    except PackageNotFoundError:
        pytest.skip(f"{CLIENTS[name].install} is not installed")
    row = row_of(name)
    assert isinstance(row, Row) and row.problems == (), json.dumps(row)
