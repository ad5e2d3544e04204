"""Every example and the benchmarks run, for a few steps."""

import json

import jax
import pytest

import benchmarks
from examples import char_rnn


@pytest.fixture(autouse=True)
def _as_users_have_it():
    with jax.numpy_rank_promotion("allow"):
        yield


def test_char_rnn_trains_all_four_and_draws(tmp_path):
    rows = char_rnn.main(steps=4, picture=tmp_path / "picture.png")
    assert len(rows) == 4
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_benchmarks_print_tables_and_write_json(tmp_path, capsys):
    benchmarks.main(["--quick", "--only", "step", "--only", "eager", "--json", str(tmp_path / "results.json")])
    assert "| " in capsys.readouterr().out
    assert set(json.loads((tmp_path / "results.json").read_text())["tables"]) == {"step", "eager"}
