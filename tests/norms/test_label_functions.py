"""Functions of path and leaf that take them by position only."""

import jax.numpy as jnp

import optaxclip


def by_rank(path, leaf, /):
    return "matrix" if leaf.ndim == 2 else "vector"


def whole_tree(tree, /):
    return {"w": "matrix", "b": "vector"}


def test_label_functions_may_take_arguments_by_position_only():
    tree = {"w": 3 * jnp.ones((2, 2)), "b": jnp.array([3.0, 4.0])}
    for labels in (by_rank, whole_tree):
        norms = optaxclip.group_norm(tree, labels)
        assert {key: float(x) for key, x in norms.items()} == {"matrix": 6, "vector": 5}
