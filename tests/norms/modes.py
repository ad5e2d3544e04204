"""One step of a clipper in every mode of sharding, on eight devices."""

import jax
import pytest
from jax.sharding import PartitionSpec as P

from tests import sharded

NO_TYPES = {"check_vma": False}
typed_or_not = pytest.mark.parametrize(
    "options", [{}, NO_TYPES], ids=["typed", "untyped"]
)


def norm_of(tree):
    return float(sharded.root(list(tree.values()), None, 2))


# Fully sharded: no leaf is replicated.
FULL = {"columns": P(None, "x"), "folded": P("x", None)}


def mapped(body):
    """A pmap over four devices."""
    program = jax.pmap(body, axis_name="i", devices=jax.devices()[:4])
    return lambda x: program.lower(x).compile()(x)
