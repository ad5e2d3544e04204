"""The main job, the examples on several devices and the benchmarks run, for a few
steps.
"""

import json

import numpy as np
import pytest

import benchmarks
from examples import char_rnn, multi_process, sharded

pytestmark = pytest.mark.usefixtures("as_programs_run")


@pytest.mark.slow
def test_char_rnn_trains_all_four_and_draws(tmp_path, monkeypatch):
    monkeypatch.setattr(char_rnn, "LENGTH", 16)
    rows = char_rnn.main(steps=4, save=tmp_path / "picture.png")
    assert len(rows) == 4
    assert (tmp_path / "picture.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_ways_to_train_on_eight_devices_are_the_same_run(monkeypatch):
    monkeypatch.setattr(sharded, "BLOCKS", 1)  # compiling is what takes time
    alone, *spread = sharded.main(steps=10)
    assert [row.mode for row in spread] == ["jit", "shard_map", "pmap", "pmap, ZeRO"]
    assert alone.losses[-1] < alone.losses[0] and (alone.norms > sharded.MAX_NORM).all()
    for row in spread:
        # Sums over devices are added in another order, and each step starts from the
        # roundings of those before: in ten steps, some eps.
        np.testing.assert_allclose(
            row.losses,
            alone.losses,
            rtol=32 * np.finfo(np.float32).eps,
            err_msg=row.mode,
        )
        np.testing.assert_allclose(
            row.norms, alone.norms, rtol=32 * np.finfo(np.float32).eps, err_msg=row.mode
        )
        assert row.clipped_norm == pytest.approx(sharded.MAX_NORM, rel=1e-6)


@pytest.mark.slow
def test_two_processes_clip_alike():
    first, second = multi_process.main()
    assert set(first) == {"jit", "shard_map", "pmap"}
    assert first == second  # digests of the clipped gradients, so bit for bit
    gradients, _ = multi_process.new_gradients()
    norm = np.sqrt(
        sum(np.square(leaf, dtype=np.float64).sum() for leaf in gradients.values())
    )
    for seen in first.values():
        assert seen["norm_before"] == pytest.approx(norm, rel=1e-6)
        assert seen["norm_after"] == pytest.approx(multi_process.MAX_NORM, rel=1e-6)


@pytest.mark.slow
def test_benchmarks_print_tables_progress_and_json(tmp_path, capsys):
    benchmarks.main(
        ["--quick", "--only", "eager", "--json", str(tmp_path / "results.json")]
    )  # CI runs the other tables
    printed = capsys.readouterr()
    assert "| " in printed.out
    assert "eager (1 of 1) ..." in printed.err and "  round 2 of 2" in printed.err
    assert set(json.loads((tmp_path / "results.json").read_text())["tables"]) == {
        "eager"
    }
