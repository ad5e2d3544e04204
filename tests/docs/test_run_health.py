"""The rollback of docs/run_health.md needs each of its essential lines."""

from contextlib import chdir

import jax
import pytest

from tests.docs.test_docs import blocks_of, names, run

PAGE = "run_health.md"
RESTORE = "                w, state = manager.restore(kept, args=target)\n"
LATER = "                batch += EVERY\n"


def printed_without(line, tmp_path):
    pytest.importorskip("orbax.checkpoint")
    first, *_, rollback = blocks_of(PAGE)
    assert line in rollback.source
    changed = rollback._replace(source=rollback.source.replace(line, ""))
    namespace = names()
    with chdir(tmp_path), jax.numpy_rank_promotion("allow"):
        run(first, PAGE, namespace)
        return run(changed, PAGE, namespace)


@pytest.mark.slow
def test_the_rollback_ends_with_a_small_loss(tmp_path):
    text = printed_without("", tmp_path)
    assert text.count("lost at batch") == 1
    assert float(text.split()[-1]) < 1


@pytest.mark.slow
def test_without_restore_the_loss_stays_large(tmp_path):
    assert float(printed_without(RESTORE, tmp_path).split()[-1]) > 1


@pytest.mark.slow
def test_without_later_batches_the_run_is_lost_again(tmp_path):
    assert printed_without(LATER, tmp_path).count("lost at batch") > 1
