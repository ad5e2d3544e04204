"""A step in a file: weights, batch, Adam's second moments, and the numbers of a state.

    header    JSON: numbers, structure, and the shape and dtype of each leaf
    shards    arrays that this process holds, once each, by leaf index and bounds

Nothing is pickled, so a file runs no code when it is read.
"""

import ast
import json
import re
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._metrics import metrics

PyTree = Any


class Step(NamedTuple):
    """What the files of a step hold."""

    params: PyTree
    batch: PyTree
    moments: dict[str, np.ndarray]  # second moments of Adam, by the name of a weight
    numbers: dict[str, float]  # of `metrics`


def by_name(tree: PyTree) -> dict[str, Any]:
    """The leaves of a tree by their paths, as a user reads them: `blocks/0/w`."""
    leaves = {}
    for keys, leaf in jax.tree.leaves_with_path(tree):
        name = jax.tree_util.keystr(keys, simple=True, separator="/")
        if name in leaves:
            # A key with a slash: {"a": {"b": 1}, "a/b": 2}.
            name = jax.tree_util.keystr(keys)
        leaves[name] = leaf
    return leaves


def save(path: str | Path, params: PyTree, batch: PyTree, state: PyTree) -> Path:
    """Writes a step to a file, whole or not at all.

    A skipped step leaves weights and moments bit for bit as they were. So params and
    state after it are those before it, and `why` can replay it.

    Args:
      path: such as "step.npz". A file that is there is replaced. Of several processes
        each must call this, and writes what it holds to a file of its own, such as
        "step.0-of-4.npz".
      params: the weights, a pytree of arrays.
      batch: what the loss takes beside them: one argument, or a tuple of arguments.
        Random keys belong to it. An array uint32[2] counts as one key. Of several
        processes these are global arrays, or arrays that are the same on all.
      state: the state of the optimizer, with a skip, a clipper or a recorder of
        optaxclip in it. Its norms and limits are kept, and the second moments of Adam.

    Returns:
      The path of the file that was written.

    Raises:
      ValueError: a state without a skip, a clipper or a recorder.
      TypeError: a leaf that is not an array or a number.
      OSError: a folder that is not there, or a full disk. The file that was there
        before is then as it was.

    Example:
      >>> import pathlib, tempfile
      >>> optimizer = optaxclip.skip_nonfinite(optax.adam(1e-3))
      >>> params, grads = {"w": jnp.ones(3)}, {"w": jnp.full(3, jnp.nan)}
      >>> _, state = optimizer.update(grads, optimizer.init(params), params)
      >>> path = pathlib.Path(tempfile.mkdtemp(), "step.npz")
      >>> if optaxclip.metrics(state)["skip/skipped"]:
      ...     path = optaxclip.autopsy.save(path, params, jnp.ones((4, 3)), state)
      >>> path.name
      'step.npz'
    """
    path = Path(path)
    processes = jax.process_count()
    if processes > 1:
        suffix = f".{jax.process_index()}-of-{processes}{path.suffix}"
        path = path.with_name(path.stem + suffix)
    moments = {}
    # `nu` of Adam, in any wrapper.
    for _, nu in optax.tree.get_all_with_path(state, "nu"):
        moments |= by_name(nu)
    trees = (params, batch, moments)
    leaves, structure = jax.tree.flatten(trees)
    header = {
        "numbers": metrics(state, floats=True),
        "processes": processes,
        "tree": repr(jax.tree.unflatten(structure, range(len(leaves)))),
        "names": list(by_name(trees)),
        "moments": list(moments),
        "leaves": [],
        "keys": [],
    }
    arrays: dict[str, Any] = {}
    for leaf_index, leaf in enumerate(leaves):
        # NumPy's arrays and Python's numbers become JAX's, as under jit.
        array = jnp.asarray(leaf)
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            header["keys"].append([leaf_index, str(jax.random.key_impl(array))])
            array = jax.random.key_data(array)
        header["leaves"].append([array.shape, array.dtype.name])
        for shard in array.addressable_shards:
            # Of copies on several devices the first one.
            if shard.replica_id == 0:
                bounds = [(extent.start, extent.stop) for extent in shard.index]
                arrays[json.dumps([leaf_index, bounds])] = np.asarray(shard.data)
    arrays["header"] = np.array(json.dumps(header))
    part = path.with_name(f".{path.name}.part")
    try:
        with open(part, "wb") as file:
            np.savez(file, **arrays)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path


def load(path: str | Path, like: PyTree = None) -> Step:
    """Reads a step.

    Args:
      path: as it was given to `save`.
      like: (params, batch) with the structure of these, or None.

    Raises:
      ValueError: a file that `save` did not write, files of other steps or runs, or of
        some processes only, a structure that is not that of the file.
      OSError: no such file.
    """
    path = Path(path)
    pattern = rf"{re.escape(path.stem)}\.\d+-of-\d+{re.escape(path.suffix)}"
    siblings = sorted(path.parent.iterdir())
    paths = [file for file in siblings if re.fullmatch(pattern, file.name)]
    if path.exists() and paths:
        raise ValueError(
            f"why: {path} and {paths[0].name} are of two runs. Remove the older one."
        )
    paths = paths or [path]
    arrays: dict[str, np.ndarray] = {}
    for file in paths:
        for key, array in _arrays(file).items():
            # What several processes hold is the same, as are their headers.
            if arrays.setdefault(key, array).tobytes() != array.tobytes():
                raise ValueError(
                    f"why: {paths[0]} and {file.name} differ in "
                    f"{_place(key, arrays['header'])}. Save the same step in all "
                    "processes, and global arrays."
                )
    header = json.loads(str(arrays.pop("header")))
    structure = _structure(header, like)
    leaves = [np.empty(shape, jnp.dtype(dtype)) for shape, dtype in header["leaves"]]
    size = sum(leaf.size for leaf in leaves)
    saved_size = sum(shard.size for shard in arrays.values())
    if saved_size != size:
        raise ValueError(
            f"why: {path} must have the files of {header['processes']} processes, got "
            f"{len(paths)} with {saved_size} of {size} numbers. Put them into one "
            "folder."
        )
    for key, shard in arrays.items():
        leaf_index, bounds = json.loads(key)
        slices = tuple(slice(*start_and_stop) for start_and_stop in bounds)
        # NumPy reads bfloat16 as bytes.
        leaves[leaf_index][slices] = shard.view(leaves[leaf_index].dtype)
    for leaf_index, impl in header["keys"]:
        leaves[leaf_index] = jax.random.wrap_key_data(leaves[leaf_index], impl=impl)
    params, batch, moments = jax.tree.unflatten(structure, leaves)
    return Step(params=params, batch=batch, moments=moments, numbers=header["numbers"])


def _arrays(path: Path) -> dict[str, np.ndarray]:
    """Returns all arrays of a file, with the header."""
    with open(path, "rb") as file:
        try:
            arrays = dict(np.load(file))
            json.loads(str(arrays["header"]))
        except (EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile):
            raise ValueError(f"why: {path} must be a file of autopsy.save.") from None
    return arrays


def _place(key: str, header: np.ndarray) -> str:
    """Names what a file holds under a key: the header, or a shard of a leaf."""
    if key == "header":
        return "header"
    leaf_index, _ = json.loads(key)
    name = json.loads(str(header))["names"][leaf_index]
    return f"leaf {name} of (params, batch, moments)"


def _structure(header: dict[str, Any], like: PyTree) -> Any:
    """Returns the structure of (params, batch, moments) that was saved."""
    try:
        if like is None:
            # The text of dicts, lists and tuples, with the numbers of leaves in them.
            tree = ast.literal_eval(header["tree"])
        else:
            tree = (*like, dict.fromkeys(header["moments"], 0))
    except (SyntaxError, ValueError):
        tree = None
    # Of two structures with as many leaves, names tell which leaf is which.
    if list(by_name(tree)) != header["names"]:
        raise ValueError(
            "why: like=(params, batch) must show the structure that was saved, unless "
            f"that is of dicts, lists and tuples: {header['tree'][:200]}"
        )
    return jax.tree.structure(tree)
