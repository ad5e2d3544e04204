"""What the measured costs of clipping each example must show."""

from benchmarks import pages
from benchmarks.per_example import rows

ROWS = pages.rows_of("per_example", "per_example")


def test_all_ways_compute_the_same_gradient():
    clipped = [row for row in ROWS if "not clipped" not in row["gradient"]]
    assert clipped and all(row["difference"] <= rows.SAME for row in clipped)


def test_ghost_clipping_takes_at_most_half_more_memory():
    ghost = [row for row in ROWS if row["gradient"] == "optaxclip, ghost"]
    assert ghost and all(row["temporary memory"] <= 1.5 for row in ghost)
