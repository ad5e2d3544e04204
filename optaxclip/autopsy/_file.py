"""A step in a file: weights, batch, state of the optimizer, and its numbers.

    header    JSON: the numbers of `metrics`, versions and devices, and of each tree its
              structure and its leaves
    arrays    the pieces of each leaf that this process holds, each of them once

Nothing is pickled, so a file runs no code when it is read.
"""

import ast
import json
import os
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import shown
from .._metrics import metrics

PyTree = Any
# The header of a file, and its arrays.
Archive = tuple[dict[str, Any], Mapping[str, np.ndarray]]


class Step(NamedTuple):
    """What the files of a step hold."""

    params: PyTree
    batch: PyTree
    moments: dict[str, np.ndarray]  # second moments of Adam, by the name of a weight
    numbers: dict[str, float]  # of `metrics`
    machine: dict[str, Any]  # versions and devices


def machine() -> dict[str, Any]:
    """What compiles programs, and for what."""
    device = jax.devices()[0].device_kind
    return {"jax": jax.__version__, "device": device, "devices": jax.device_count()}


def name_of(keys: Any) -> str:
    """A key path as a user reads it: `blocks/0/w`."""
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def save(path: str | Path, params: PyTree, batch: PyTree, state: PyTree) -> Path:
    """Writes a step to a file, whole or not at all.

    A skipped step leaves weights and moments bit for bit as they were. So all that made
    its gradient is still there behind it, and `why` can replay it.

    Args:
      path: such as "step.npz". A file that is there is replaced. Of several processes
        each must call this, and writes what it holds to a file of its own, such as
        "step.0-of-4.npz".
      params: the weights, a pytree of arrays.
      batch: what the loss takes beside them: one argument, or a tuple of arguments.
        Random keys belong to it. Of several processes these are global arrays, or
        arrays that are the same on all.
      state: the state of the optimizer, with a skip, a clipper or a recorder of
        optaxclip in it.

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
    count = jax.process_count()
    if count > 1:
        process = f"{jax.process_index()}-of-{count}"
        path = path.with_name(f"{path.stem}.{process}{path.suffix}")
    try:
        numbers = metrics(state, floats=True)
    except ValueError:
        raise ValueError(
            "save: state must have a skip, a clipper or a recorder of optaxclip in it, "
            f"got {shown(state)}."
        ) from None
    header: dict[str, Any] = {"numbers": numbers, "machine": machine(), "files": count}
    arrays: dict[str, np.ndarray] = {}
    for tree_name, tree in {"params": params, "batch": batch, "state": state}.items():
        entries, structure = jax.tree.flatten_with_path(tree)
        leaves = []
        for number, (keys, leaf) in enumerate(entries):
            name = name_of(keys)
            description: dict[str, Any] = {"name": name, "begins": [], "key": ""}
            # A JAX array of a leaf that is none, as jit makes it.
            leaf = jnp.asarray(leaf)
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                description["key"] = str(jax.random.key_impl(leaf))
                leaf = jax.random.key_data(leaf)
            for shard in leaf.addressable_shards:
                # Of copies on several devices the first one.
                if shard.replica_id == 0:
                    key = f"{tree_name}.{number}.{len(description['begins'])}"
                    arrays[key] = np.asarray(shard.data)
                    description["begins"].append([x.start or 0 for x in shard.index])
            description["shape"] = leaf.shape
            description["dtype"] = leaf.dtype.name
            # Such as a Python number, which takes the dtype of what it meets.
            description["is_weak"] = leaf.weak_type
            leaves.append(description)
        shape_of_tree = repr(jax.tree.unflatten(structure, range(len(entries))))
        header[tree_name] = {"structure": shape_of_tree, "leaves": leaves}
    arrays["header"] = np.array(json.dumps(header))
    _write(path, arrays)
    return path


def _write(path: Path, arrays: dict[str, Any]) -> None:
    """A file is written beside its place, and takes it when it is whole."""
    number, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(number, "wb") as file:
            np.savez(file, **arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def load(path: str | Path, like: PyTree = None) -> Step:
    """Reads a step.

    Args:
      path: as it was given to `save`.
      like: (params, batch) with the structure of these, or None.

    Raises:
      ValueError: a file that `save` did not write, files of other steps or of some
        processes only, a structure that is not that of the file.
      OSError: no such file.
    """
    path = Path(path)
    paths = [path]
    if not path.exists():
        pattern = f"{path.stem}.*-of-*{path.suffix}"
        paths = sorted(path.parent.glob(pattern)) or paths
    archives = [_opened(each_path) for each_path in paths]
    header = archives[0][0]
    if len(archives) != header["files"]:
        names = ", ".join(each_path.name for each_path in paths)
        raise ValueError(
            f"why: {path} must have the files of {header['files']} processes, got "
            f"{names}."
        )
    for other, _ in archives:
        # As text, in which NaN is equal to NaN.
        if str(other["numbers"]) != str(header["numbers"]):
            raise ValueError(f"why: {path} must be of one step in all processes.")
    params_like, batch_like = like if like is not None else (None, None)
    leaves = header["state"]["leaves"]
    moments = {}
    for number, description in enumerate(leaves):
        # `nu` of Adam, in any wrapper.
        _, separator, name = f"/{description['name']}/".rpartition("/nu/")
        if separator:
            moments[name.rstrip("/")] = _leaf(archives, "state", number)
    return Step(
        params=_tree(archives, "params", params_like),
        batch=_tree(archives, "batch", batch_like),
        moments=moments,
        numbers=header["numbers"],
        machine=header["machine"],
    )


def _opened(path: Path) -> Archive:
    with open(path, "rb") as file:
        try:
            arrays = dict(np.load(file))
            return json.loads(str(arrays["header"])), arrays
        except (EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile):
            raise ValueError(f"why: {path} must be a file of autopsy.save.") from None


def _tree(archives: list[Archive], name: str, like: PyTree) -> PyTree:
    header, _ = archives[0]
    descriptions = header[name]["leaves"]
    leaves = [_leaf(archives, name, number) for number in range(len(descriptions))]
    if like is not None:
        structure = jax.tree.structure(like)
        if structure.num_leaves != len(leaves):
            raise ValueError(
                f"why: like must have {len(leaves)} leaves in {name}, got "
                f"{structure.num_leaves}."
            )
        return jax.tree.unflatten(structure, leaves)
    try:
        # Dicts, lists, tuples and None, with the numbers of leaves in them.
        numbers = ast.literal_eval(header[name]["structure"])
    except (SyntaxError, ValueError):
        raise ValueError(
            f"why: like=(params, batch) must show the structure of {name}, which is "
            f"not made of dicts, lists and tuples: {header[name]['structure'][:60]}"
        ) from None
    return jax.tree.map(lambda number: leaves[number], numbers)


def _leaf(archives: list[Archive], tree: str, number: int) -> Any:
    """One leaf, put together from the pieces of all processes."""
    pieces: dict[tuple[int, ...], np.ndarray] = {}
    description: dict[str, Any] = {}
    for header, arrays in archives:
        description = header[tree]["leaves"][number]
        for place, begin in enumerate(description["begins"]):
            piece = arrays[f"{tree}.{number}.{place}"]
            known = pieces.setdefault(tuple(begin), piece)
            if known.tobytes() != piece.tobytes():
                raise ValueError(
                    f"why: {tree}: {description['name']} differs between processes. "
                    "Save a global array."
                )
    dtype = jnp.dtype(description["dtype"])
    array = np.empty(description["shape"], dtype)
    if sum(piece.size for piece in pieces.values()) != array.size:
        raise ValueError(f"why: {tree}: {description['name']} lacks pieces.")
    for begin, piece in pieces.items():
        slices = [slice(first, first + size) for first, size in zip(begin, piece.shape)]
        # NumPy reads bfloat16 as bytes.
        array[tuple(slices)] = piece.view(dtype)
    if description["is_weak"]:
        return array.item()
    if description["key"]:
        return jax.random.wrap_key_data(jnp.asarray(array), impl=description["key"])
    return array
