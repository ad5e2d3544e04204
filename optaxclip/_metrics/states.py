"""The states that `metrics` reports: which there are, and where they are found."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax.tree_util import DictKey

from .._arguments.checks import check_one_model, shown
from .._clippers.by_value import ClipByValueState
from .._clippers.health import HealthState
from .._clippers.recorders import SpikeState
from .._clippers.spam import SpamState
from .._state.state import ClipState, RecordState
from .._trees import PyTree, unboxed
from .._wrappers.skipping import SkipState
from .rows import (
    Options,
    ReportRow,
    clip_rows,
    element_rows,
    health_rows,
    skip_rows,
    spike_rows,
)


class StateReport(NamedTuple):
    """How states of one type are reported."""

    first_word: str  # of their keys: "clip"
    rows_of: Callable[[Any, Options], Iterator[ReportRow]]


REPORT_OF_TYPE = {
    ClipState: StateReport("clip", clip_rows),
    RecordState: StateReport("record", clip_rows),
    ClipByValueState: StateReport("clip", element_rows),
    SpamState: StateReport("clip", element_rows),
    SkipState: StateReport("skip", skip_rows),
    SpikeState: StateReport("spike", spike_rows),
    HealthState: StateReport("health", health_rows),
}
Scope = tuple[Any, ...]  # the keys of the mappings on the way to a state


def reported_rows(
    opt_state: PyTree, options: Options
) -> Iterator[tuple[str, ReportRow]]:
    """The rows of all states that are reported, each with the beginning of its key:
    "clip", or "clip_2/inner" for the second clipper of the scope "inner".

    Raises:
      ValueError: there is none, or one has an axis for the members of an ensemble.
    """
    states = list(_states_in(unboxed(opt_state)))
    if not states:
        # `nnx.state` turns a state into mappings of flax, without its types and names.
        raise ValueError(
            "metrics: opt_state must be the state of an optimizer with a clipper of "
            f"optaxclip in it, got {shown(opt_state)}: hand over what init and update "
            "return, or the nnx.Optimizer of flax NNX itself. The clippers of optax "
            "keep no state, but optaxclip's do."
        )
    counts = Counter[tuple[str, str]]()
    for scope, state in states:
        mapped = "jax.vmap(optaxclip.metrics)(opt_state)"
        check_one_model("metrics: opt_state", state, mapped)
        first_word, rows_of = REPORT_OF_TYPE[type(state)]
        # A clipper named "clip" has keys "clip/...", not "clip/clip/...".
        path = "/".join(str(name) for name in scope if name != first_word)
        # "clip/a" and "clip/b" are counted separately: neither becomes "clip_2".
        counts[first_word, path] += 1
        count = counts[first_word, path]
        # The first keeps its name when a second one is added.
        prefix = first_word if count == 1 else f"{first_word}_{count}"
        if path:
            prefix = f"{prefix}/{path}"
        for row in rows_of(state, options):
            yield prefix, row


def _states_in(tree: PyTree, scope: Scope = ()) -> Iterator[tuple[Scope, Any]]:
    """The scope and the state, for each reported state of a tree. `scope` is that of
    the tree.
    """
    leaves = jax.tree.leaves_with_path(
        tree, is_leaf=lambda x: type(x) in REPORT_OF_TYPE
    )
    for path, leaf in leaves:
        if type(leaf) not in REPORT_OF_TYPE:
            continue
        # Keys of mappings are names. Fields, such as `inner_states`, and places in
        # tuples are not.
        names = [key.key for key in path if isinstance(key, DictKey)]
        scope_of_state = (*scope, *names)
        yield scope_of_state, leaf
        # A `SkipState` holds a whole optimizer, whose states are reported too. The
        # `ClipState` in a `HealthState` is not, since `health_rows` reads it.
        if isinstance(leaf, SkipState):
            yield from _states_in(leaf.inner_state, scope_of_state)
