"""Checks that draw cases of their own: groups labelled by ints, tokens of few bits."""

from typing import Any

import numpy as np
from hypothesis import strategies as st

import optaxclip
from tests import oracles
from tests.fuzz import expected, trees
from tests.fuzz.cases import Case
from tests.fuzz.trees import evaluate

LABELS = (-1, 0, 1, 2, 9, 10, 100)  # sorted as numbers, they are not as texts
TOKENS = ("uint8", "int8", "uint16", "int16", "int32")


@st.composite
def groups(draw: Any, structure: str) -> Case:
    """A label for each leaf, and a limit for each label."""
    leaves = trees.STRUCTURES[structure]
    labels = {name: draw(st.sampled_from(LABELS)) for name in leaves}
    used = draw(st.permutations(sorted(set(labels.values()))))
    limits = {label: 2.0 ** draw(st.integers(-20, 20)) for label in used}
    tree = draw(trees.trees(leaves, (-100, 100), False))
    return Case("clip_by_group_norm", (tree,), "{}", repr(limits), repr(labels))


def by_group(case: Case) -> None:
    """Each group is held against the limit of its own label."""
    (tree,), labels = case.updates(), evaluate(case.options)
    limits = evaluate(str(case.limit))
    clipper = optaxclip.clip_by_group_norm(limits, labels)
    clipped, state = clipper.update(tree, clipper.init(tree))
    plain = case._replace(options="")
    for label, limit in limits.items():
        names = [name for name in labels if labels[name] == label]
        places = [(name, ...) for name in names if expected.is_clipped(tree[name])]
        norm = oracles.norm([expected.values(tree, place) for place in places])
        known = expected.in_contract(norm, limit, limit, min(norm, limit))
        part = expected.Part(places, norm, limit, min(norm, limit), known)
        expected.check_part(plain, part, tree, clipped)
        if places:
            assert state.by_name()[str(label)].limit == limit, (
                label,
                "has another limit",
            )


@st.composite
def lookups(draw: Any) -> Case:
    """Tokens of two examples, and how many rows the table has."""
    dtype, rows = draw(st.sampled_from(TOKENS)), draw(st.sampled_from((5, 127, 300)))
    most = int(np.iinfo(dtype).max)
    # JAX refuses signed tokens whose type cannot hold the number of rows.
    rows = rows if dtype.startswith("u") else min(rows, most)
    last = min(rows - 1, most)
    token = st.one_of(st.integers(0, last), st.just(last), st.just(0))
    tokens = draw(st.lists(token, min_size=6, max_size=6))
    text = f"jnp.asarray(np.array({tokens}, '{dtype}').reshape(2, 3))"
    method = draw(st.sampled_from(("auto", "ghost", "two_pass", "one_pass")))
    return Case("clipped_grad", (text,), f"jnp.zeros(({rows}, 2))", options=method)


def by_token(case: Case) -> None:
    """The gradient of a sum over looked up rows, clipped for each example."""
    table, (tokens,) = case.weights(), case.updates()

    def loss(table: Any, tokens: Any) -> Any:
        return table[tokens].sum()

    found = optaxclip.clipped_grad(loss, 1.0, method=case.options)(table, tokens)
    wanted, norms = np.zeros(table.shape), []
    for own in np.asarray(tokens, int):
        grad = np.zeros(table.shape)
        np.add.at(grad, own, 1.0)
        norms.append(np.linalg.norm(grad))
        wanted += grad * min(1.0, 1 / norms[-1]) / 2
    np.testing.assert_allclose(found.norms, norms, rtol=64 * expected.EPS)
    np.testing.assert_allclose(found.grads, wanted, rtol=64 * expected.EPS)
