"""A step in a file: weights, batch, Adam's second moments, and the metrics of a state.

A file is an archive of NumPy's arrays:

    header    JSON: metrics, the structure of the trees, and a row for each leaf
    shards    the parts of leaves that a process holds, by name of leaf and bounds

Nothing is pickled, so a file runs no code when it is read.
"""

import ast
import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from .._arguments.checks import shown
from .._metrics.metrics import metrics
from .._trees import PyTree, leaf_paths, unique_names


class Step(NamedTuple):
    """What is saved of a step."""

    params: PyTree
    batch: PyTree
    moments: dict[str, Any]  # second moments of Adam, by the name of a weight
    metrics: dict[str, float]  # in the header, because they are not arrays


def by_name(tree: PyTree) -> dict[str, Any]:
    """The leaves of a tree by their paths, as a user reads them: `blocks/0/w`."""
    names = unique_names(leaf_paths(tree))
    return dict(zip(names, jax.tree.leaves(tree)))


# ----------------------------------------------------------------------------- writing


def save(path: str | Path, params: PyTree, batch: PyTree, state: PyTree) -> Path:
    """Writes a step to a file, whole or not at all.

    A skipped step leaves weights and moments bit for bit as they were. So `why` can
    replay the step from the params and the state that come after it.

    Args:
      path: such as "step.npz". An older file of this name is replaced. With several
        processes, each must call `save`, and writes its shards to a file such as
        "step.0-of-4.npz".
      params: the weights, a pytree of arrays.
      batch: the other arguments of the loss: one argument, or a tuple of arguments.
        Random keys belong to it. An array uint32[2] counts as one key. With several
        processes, arrays must be global, or equal in all processes.
      state: the state of the optimizer, with a skip, a clipper or a recorder of
        optaxclip in it. Its metrics are kept, and the second moments of Adam.

    Returns:
      The path of the file that was written.

    Raises:
      ValueError: a state without a skip, a clipper or a recorder.
      TypeError: a leaf that is not an array or a number, or a call inside jit.
      OSError: a folder that is not there, or a full disk. An older file of this name
        then stays as it was.

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
    leaves = jax.tree.leaves((params, batch, state))
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        raise TypeError(
            "save: params, batch and state have no values inside jit. Call save "
            "outside, or by jax.debug.callback."
        )
    moments = _second_moments(state)
    step = Step(params, batch, moments, metrics={})
    rows = {}
    arrays: dict[str, Any] = {}
    for name, leaf in by_name(step).items():
        array = _as_array(name, leaf)
        random_key = None
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            random_key = str(jax.random.key_impl(array))
            array = jax.random.key_data(array)
        rows[name] = {
            "shape": array.shape,
            "dtype": array.dtype.name,
            "random_key": random_key,
        }
        for bounds, shard in _shards(array):
            arrays[json.dumps([name, bounds])] = shard
    header = {
        "metrics": metrics(state, floats=True),
        "leaves": rows,
        "moments": list(moments),
        "trees": repr(jax.tree.map(lambda _: 0, (params, batch))),
    }
    arrays["header"] = np.array(json.dumps(header))
    path = _path_of_process(Path(path))
    _write(path, arrays)
    return path


def _second_moments(state: PyTree) -> dict[str, Any]:
    """The second moments of Adam in a state, by the name of a weight."""
    moments = {}
    # `nu` is a field of Adam's state. A weight may have this name, too.
    for path, nu in optax.tree.get_all_with_path(state, "nu"):
        if isinstance(path[-1], optax.tree_utils.NamedTupleKey):
            moments |= by_name(nu)
    return moments


def _as_array(name: str, leaf: Any) -> jax.Array:
    """NumPy's arrays and Python's numbers become JAX's, as under jit."""
    try:
        return jnp.asarray(leaf)
    except TypeError:
        raise TypeError(
            f"save: {name} must be an array or a number, got {shown(leaf)}. Save the "
            "arrays only, as eqx.filter(model, eqx.is_array) returns them."
        ) from None


def _shards(array: jax.Array) -> Iterator[tuple[list[Any], np.ndarray]]:
    """The shards that this process holds, each with its bounds along all axes."""
    for shard in array.addressable_shards:
        # Copies on several devices are equal. The first one is written.
        if shard.replica_id == 0:
            bounds = [(extent.start, extent.stop) for extent in shard.index]
            # NumPy writes dtypes that are not its own as bytes, but not float8_e5m2.
            as_bytes = np.dtype((np.void, array.dtype.itemsize))
            yield bounds, np.asarray(shard.data).view(as_bytes)


def _path_of_process(path: Path) -> Path:
    """The path itself. With four processes the first one writes `step.0-of-4.npz`."""
    processes = jax.process_count()
    if processes == 1:
        return path
    ending = f".{jax.process_index()}-of-{processes}{path.suffix}"
    return path.with_name(path.stem + ending)


def _write(path: Path, arrays: dict[str, Any]) -> None:
    """Writes a file beside `path`, and gives it its name when it is complete."""
    unfinished = path.with_name(f".{path.name}.part")
    try:
        with open(unfinished, "wb") as file:
            np.savez(file, **arrays)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


# ----------------------------------------------------------------------------- reading


def load(path: str | Path, like: PyTree = None) -> Step:
    """Reads a step.

    Args:
      path: the path that was given to `save`.
      like: (params, batch) of the structure that was saved, or None.

    Raises:
      ValueError: a file that `save` did not write, files of two steps or runs, a
        missing file of a process, or another structure than the saved one.
      OSError: no such file.
    """
    path = Path(path)
    try:
        paths = _paths_of_processes(path)
        shards = _merged(paths)
    except OSError as error:
        # The loss may open files as well. "why: " tells its errors from this one.
        raise type(error)(f"why: {error}") from None
    header = json.loads(str(shards.pop("header")))
    structure = _structure(header, like)

    leaves = {}
    for name, row in header["leaves"].items():
        leaves[name] = np.empty(row["shape"], jnp.dtype(row["dtype"]))
    size = sum(leaf.size for leaf in leaves.values())
    size_of_shards = sum(shard.size for shard in shards.values())
    if size_of_shards != size:
        raise ValueError(
            f"why: {path} must have the files of all processes, got {len(paths)} with "
            f"{size_of_shards} of {size} numbers. Put them into one folder."
        )
    for key, shard in shards.items():
        name, bounds = json.loads(key)
        slices = tuple(slice(start, stop) for start, stop in bounds)
        leaf = leaves[name]
        leaf[slices] = shard.view(leaf.dtype)
    for name, row in header["leaves"].items():
        if row["random_key"]:
            leaves[name] = jax.random.wrap_key_data(
                leaves[name], impl=row["random_key"]
            )
    step = jax.tree.unflatten(structure, leaves.values())
    return step._replace(metrics=header["metrics"])


def _paths_of_processes(path: Path) -> list[Path]:
    """The files that several processes wrote for a path, or the path itself."""
    name = re.compile(rf"{re.escape(path.stem)}\.\d+-of-\d+{re.escape(path.suffix)}")
    paths = sorted(file for file in path.parent.iterdir() if name.fullmatch(file.name))
    if path.exists() and paths:
        raise ValueError(
            f"why: {path} and {paths[0].name} are of two runs. Remove the older one."
        )
    return paths or [path]


def _merged(paths: list[Path]) -> dict[str, np.ndarray]:
    """The arrays of all files of a step. All files have the same header."""
    merged: dict[str, np.ndarray] = {}
    for path in paths:
        for key, array in _arrays(path).items():
            first_copy = merged.setdefault(key, array)
            if array.tobytes() != first_copy.tobytes():
                raise ValueError(
                    f"why: {paths[0]} and {path.name} differ in {key}. Save the same "
                    "step in all processes, and global arrays."
                )
    return merged


def _arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of one file, its header among them."""
    with open(path, "rb") as file:
        try:
            arrays = dict(np.load(file))
            # A header of another program has no leaves.
            json.loads(str(arrays["header"]))["leaves"]
        except Exception:
            # NumPy, zipfile and JSON have errors of ten types for a broken file.
            raise ValueError(f"why: {path} must be a file of autopsy.save.") from None
    return arrays


def _structure(header: dict[str, Any], like: PyTree) -> Any:
    """The structure of the step that was saved."""
    if like is None:
        # The text is not a literal if it has classes in it: "Params(w=0, b=0)".
        with contextlib.suppress(SyntaxError, ValueError):
            like = ast.literal_eval(header["trees"])
    step = None
    if isinstance(like, (tuple, list)) and len(like) == 2:
        params, batch = like
        step = Step(params, batch, dict.fromkeys(header["moments"], 0), metrics={})
    # Two structures may have as many leaves. Their names tell which leaf is which.
    if list(by_name(step)) != list(header["leaves"]):
        raise ValueError(
            "why: like=(params, batch) must show the structure that was saved, unless "
            f"that is of dicts, lists and tuples: {header['trees'][:200]}"
        )
    return jax.tree.structure(step)
