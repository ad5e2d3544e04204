"""Trees of updates: which leaves count, and what they are called."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.tree_util import KeyPath

from ._arguments.checks import shown

Shape = tuple[Any, ...]  # a size may be a symbol of `jax.export`
PyTree = Any  # JAX has no type for trees of arrays
Tree = TypeVar("Tree")  # a tree that is returned with the same structure

# ---------------------------------------------------------------- leaves that count


def leaves_to_clip(tree: PyTree, call: str) -> PyTree:
    """The tree of the leaves that count, with None in the place of all others.
    `call` is the function that the user called, as errors name it.

    A leaf counts if it has a float or complex dtype and at least one element.

    Raises:
      TypeError: a leaf that is neither an array nor a number.
      ValueError: a sparse array that may hold an index twice.
    """
    check_sparse(call, tree)
    try:
        return jax.tree.map(_leaf_to_clip, tree, is_leaf=is_box)
    except TypeError:
        # Paths take time, so they are made only for the error.
        check_leaves(call, tree)
        raise


def _leaf_to_clip(leaf: Any) -> Any:
    """The leaf, or the content of a box. None for a leaf that does not count."""
    if is_box(leaf):
        content = unbox(leaf)
        # `put_back` pairs the leaves of two trees by their order. An empty box that is
        # a leaf to JAX is a leaf there too, so None stands for it. A box that is a
        # node, such as a variable of NNX, has no leaf when it is empty, and stays.
        if is_hole(content):
            return content if is_hole(leaf) else None
        return jax.tree.map(_leaf_to_clip, content, is_leaf=is_box)
    if not is_array(leaf):
        raise TypeError("neither an array nor a number")
    # A Python number has no dtype. Neither random keys nor float0 are inexact.
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    is_inexact = jnp.issubdtype(dtype, jnp.inexact)
    is_clippable = is_inexact and 0 not in jnp.shape(leaf)
    return leaf if is_clippable else None


def check_leaves(call: str, tree: PyTree) -> None:
    """Raises TypeError for a leaf that is neither an array nor a number, such as a
    function in a model.
    """
    for path, leaf in jax.tree.leaves_with_path(tree):
        try:
            _leaf_to_clip(leaf)
        except TypeError:
            raise TypeError(
                f"{call}: the leaf {path_name(path)!r} must be an array or a "
                f"number, got {shown(leaf)}: hand over arrays of numbers only, with "
                "None for everything else. In equinox that is eqx.filter(model, "
                "eqx.is_inexact_array)."
            ) from None


def check_sparse(call: str, tree: PyTree) -> None:
    """Raises ValueError for a sparse array that may hold an index twice: the norm of
    its data is not the norm of the array.
    """
    # Not imported here, since that takes time. Without it there are no such arrays.
    sparse = sys.modules.get("jax.experimental.sparse")
    if sparse is None:
        return

    def is_sparse(x: object) -> bool:
        return isinstance(x, sparse.JAXSparse)

    if not any(map(is_sparse, jax.tree.leaves(tree, is_leaf=is_sparse))):
        return
    # Paths take time, so they are made only for the error.
    for path, leaf in jax.tree.leaves_with_path(tree, is_leaf=is_sparse):
        if is_sparse(leaf) and not getattr(leaf, "unique_indices", False):
            raise ValueError(
                f"{call}: the leaf {path_name(path)!r} is a {type(leaf).__name__} that "
                "may hold an index twice, so that the norm of its data is not its "
                "norm. Hand over x.todense(), or for a BCOO "
                "x.sum_duplicates(nse=x.nse)."
            )


def put_back(changed: PyTree, tree: PyTree) -> PyTree:
    """The tree with the leaves of `changed`, or its own where `changed` has None."""
    old_leaves, treedef = jax.tree.flatten(tree, is_leaf=is_none)
    leaves = []
    for old, new in zip(old_leaves, jax.tree.leaves(changed, is_leaf=is_none)):
        leaves.append(old if new is None else new)
    return treedef.unflatten(leaves)


# ----------------------------------------------------------------- boxes and holes


def is_box(x: object) -> bool:
    """Whether it is an object that holds one array, by JAX's own protocol.

    To JAX a box is a leaf, or a node with one child, such as a variable of flax NNX or
    an array of haliax. A node with more children, such as a LoRA weight with two
    factors, is opened like any other.
    """
    return callable(getattr(x, "__jax_array__", None)) and len(_children(x)) == 1


def unbox(x: Any) -> Any:
    """What a box holds. Anything else is returned as it is."""
    if not is_box(x):
        return x
    (child,) = _children(x)
    if child is x:
        return x.__jax_array__()
    # `__jax_array__` of a node may compute another array, such as tanh of its leaf, or
    # raise, as haliax's does. Gradients and updates are always those of the leaf.
    return child


def _children(x: object) -> list[Any]:
    """The children of a node, None among them. A leaf has itself."""
    return jax.tree.leaves(x, is_leaf=lambda y: y is not x)


def unboxed(tree: PyTree) -> PyTree:
    """The tree with arrays in the place of boxes, such as the variables of flax NNX."""

    def content(x: Any) -> Any:
        return unboxed(unbox(x)) if is_box(x) else x

    return jax.tree.map(content, tree, is_leaf=is_box)


def is_array(x: Any) -> bool:
    """Whether it is an array of JAX or NumPy, or a number, and not a dtype such as
    `jnp.float32`, which has a dtype as well.
    """
    if isinstance(x, (int, float, complex)):
        return True
    if isinstance(x, type) or not hasattr(x, "dtype"):
        return False
    # NumPy's objects, strings and times. JAX would refuse them in jit, and outside of
    # jit they would pass unclipped. The dtype of a random key has no kind.
    return getattr(x.dtype, "kind", None) not in ("O", "S", "U", "M", "m")


def arrays_of(model: PyTree) -> PyTree:
    """The model, with None in the place of all leaves that are not arrays or numbers,
    such as functions.
    """
    return jax.tree.map(lambda x: x if is_array(x) else None, model)


def is_none(x: object) -> bool:
    """Whether it is None. As `is_leaf` it makes `jax.tree.map` visit None."""
    return x is None


def is_hole(x: object) -> bool:
    """Whether it is a node without leaves: None, or one like `optax.MaskedNode`."""
    return not jax.tree.leaves(x)


def holes_of(tree: PyTree) -> tuple[KeyPath, ...]:
    """The key paths of all holes in a tree."""
    entries = jax.tree.leaves_with_path(tree, is_leaf=is_hole)
    return tuple(path for path, leaf in entries if is_hole(leaf))


# ---------------------------------------------------------------------------- names


def path_name(path: KeyPath) -> str:
    """A key path as a user reads it: `blocks/0/w`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def unique_names(paths: Sequence[KeyPath]) -> list[str]:
    """The names of all key paths of a tree, no two alike, without line breaks."""
    names = [path_name(path).replace("\n", "\\n") for path in paths]
    # {"a/b": x} and {"a": {"b": x}} both read a/b. All leaves of such a tree get their
    # long names, as Python writes them.
    if len(set(names)) < len(names):
        return [jax.tree_util.keystr(path) for path in paths]
    return names


def listed_paths(paths: Iterable[KeyPath]) -> str:
    """Key paths as errors list them."""
    return listed(map(path_name, paths)) or "none at all"


def listed(names: Iterable[Any]) -> str:
    """The names in alphabetical order, at most eight of them: "'b', 'w'"."""
    ordered = sorted(map(str, names))
    text = ", ".join(map(repr, ordered[:8]))
    return text if len(ordered) <= 8 else f"{text} and {len(ordered) - 8} more"


def leaf_paths(tree: PyTree) -> list[KeyPath]:
    """The key paths of all leaves."""
    return [path for path, _ in jax.tree.leaves_with_path(tree)]
