"""The states that `metrics` reports: which there are, and where they are found."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax.tree_util import DictKey

from ._checks import check_one_model, shown
from ._clippers._by_value import ClipByValueState
from ._clippers._recorders import SpikeState
from ._clippers._spam import SpamState
from ._health import HealthState
from ._metric_rows import (
    Options,
    Row,
    clip_rows,
    element_rows,
    health_rows,
    skip_rows,
    spike_rows,
)
from ._state import ClipState, RecordState
from ._trees import PyTree, unboxed
from ._wrappers._skipping import SkipState


class Kind(NamedTuple):
    """How a kind of state is reported."""

    prefix: str  # of its keys
    rows: Callable[[Any, Options], Iterator[Row]]


KINDS = {
    ClipState: Kind("clip", clip_rows),
    RecordState: Kind("record", clip_rows),
    ClipByValueState: Kind("clip", element_rows),
    SpamState: Kind("clip", element_rows),
    SkipState: Kind("skip", skip_rows),
    SpikeState: Kind("spike", spike_rows),
    HealthState: Kind("health", health_rows),
}
Scope = tuple[Any, ...]  # the names of mappings on the way to a state


def reported_states(opt_state: PyTree) -> Iterator[tuple[str, Any]]:
    """Every state that is reported, and how its keys begin: "clip", or "clip_2/inner"
    for the second clipper of the scope "inner".

    Raises:
      ValueError: there is none, or one has an axis for the members of an ensemble.
    """
    tree = unboxed(opt_state)
    states = list(_states_in(tree))
    if not states:
        hint = ""
        # `nnx.state` makes mappings of flax of a state, without its types and names.
        if type(opt_state).__module__.startswith("flax."):
            hint = (
                " With flax NNX hand over the nnx.Optimizer itself, and not its "
                "nnx.state, which has lost the types. nnx.update(optimizer, state) "
                "puts a stored one back."
            )
        raise ValueError(
            "metrics: opt_state must be the state of an optimizer with a clipper of "
            f"optaxclip in it, got {shown(opt_state)}: hand over what init and update "
            f"return. The clippers of optax keep no state, but optaxclip's do.{hint}"
        )
    counts = Counter[tuple[str, str]]()
    for scope, state in states:
        mapped = "jax.vmap(optaxclip.metrics)(opt_state)"
        check_one_model("metrics: opt_state", state, mapped)
        prefix = KINDS[type(state)].prefix
        path = "/".join(str(name) for name in scope if name != prefix)
        # "clip/a" and "clip/b" are counted separately: neither becomes "clip_2".
        counts[prefix, path] += 1
        number = counts[prefix, path]
        # The first keeps its name when a second one is added.
        if number > 1:
            prefix = f"{prefix}_{number}"
        yield f"{prefix}/{path}" if path else prefix, state


def _states_in(tree: PyTree, scope: Scope = ()) -> Iterator[tuple[Scope, Any]]:
    """Every reported state of a tree, with its scope.

    `scope` is the scope of the tree itself. Those of its states begin with it.
    """
    leaves = jax.tree.leaves_with_path(tree, is_leaf=lambda x: type(x) in KINDS)
    for path, leaf in leaves:
        if type(leaf) not in KINDS:
            continue
        # Only a key of a mapping is a name. Places in a tuple and fields have keys of
        # other types: of inner_states, "a", 0 only "a" stays.
        names = [key.key for key in path if isinstance(key, DictKey)]
        scope_of_state = (*scope, *names)
        yield scope_of_state, leaf
        # A `SkipState` holds a whole optimizer. The `ClipState` in a `HealthState` is
        # reported with it, and not by itself.
        if isinstance(leaf, SkipState):
            yield from _states_in(leaf.inner_state, scope_of_state)
