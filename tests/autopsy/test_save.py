"""A saved step comes back bit for bit, is never half a file, and runs no code."""

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optaxclip
from optaxclip.autopsy import save
from optaxclip.autopsy._file import load
from tests.autopsy.processes import PROCESSES, one_process, weights

BITS = np.array([np.nan, -0.0, np.inf, 1e-40, 3.0], np.float32)
PARAMS = {
    "narrow": jnp.asarray(BITS, jnp.bfloat16).reshape(5, 1),
    "half": jnp.asarray(BITS, jnp.float16),
    "eighth": jnp.asarray(BITS, jnp.float8_e5m2),
    "layers": [jnp.asarray(BITS), None, (jnp.ones((2, 3)), jnp.zeros((0, 3)))],
}


def new_state(params=PARAMS):
    chain = optax.chain(optaxclip.clip_by_global_norm(1.0), optax.adam(1e-3))
    optimizer = optaxclip.skip_nonfinite(chain)
    grads = jax.tree.map(jnp.ones_like, params)
    state = jax.jit(optimizer.init)(params)
    return jax.jit(optimizer.update)(grads, state, params)[1]


STATE = new_state()


def bits(tree):
    """Shapes, dtypes and bytes of all leaves."""
    rows = []
    for leaf in jax.tree.leaves(tree):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.asarray(leaf)
        rows.append((array.shape, array.dtype.name, array.tobytes()))
    return rows


def test_weights_and_batch_come_back_bit_for_bit(tmp_path):
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 4)
    batch = {"x": np.arange(4), "keys": keys, "raw": jax.random.PRNGKey(1)}
    path = save(tmp_path / "step.npz", PARAMS, batch, STATE)
    step = load(path)
    for tree, saved in ((PARAMS, step.params), (batch, step.batch)):
        assert jax.tree.structure(saved) == jax.tree.structure(tree)
        assert bits(saved) == bits(jax.tree.map(jnp.asarray, tree))
    assert step.batch["keys"].dtype == keys.dtype
    assert step.metrics["clip/limit"] == 1


def test_second_moments_have_the_names_of_weights(tmp_path):
    step = load(save(tmp_path / "step.npz", PARAMS, (), STATE))
    assert set(step.moments) == {
        "narrow",
        "half",
        "eighth",
        "layers/0",
        "layers/2/0",
        "layers/2/1",
    }
    wanted = STATE.inner_state[1][0].nu["layers"][2][0]
    assert bits(step.moments["layers/2/0"]) == bits(wanted)
    w = jnp.ones(3)
    step = load(save(tmp_path / "step.npz", w, (), new_state(w)))
    assert list(step.moments) == [""]


def test_weights_called_nu_are_no_second_moments(tmp_path):
    """`mu` of Adam has a leaf of this name, too."""
    params = {"nu": {"w": jnp.ones(2)}, "w": jnp.ones(3)}
    state = new_state(params)
    step = load(save(tmp_path / "step.npz", params, (), state))
    wanted = state.inner_state[1][0].nu
    assert list(step.moments) == ["nu/w", "w"]
    assert bits(step.moments) == bits(wanted)


def test_two_weights_never_share_a_name(tmp_path):
    params = {"a": {"b": jnp.ones(2)}, "a/b": jnp.ones(3)}
    step = load(save(tmp_path / "step.npz", params, (), new_state(params)))
    sizes = {name: moments.size for name, moments in step.moments.items()}
    assert sizes == {"['a']['b']": 2, "['a/b']": 3}


def test_another_structure_needs_to_be_shown(tmp_path):
    params = optax.EmaState(jnp.int32(1), jnp.ones(3))
    path = save(tmp_path / "step.npz", params, (jnp.ones(2),), STATE)
    trees = r"\(EmaState\(count=0, ema=0\), \(0,\)\)"
    with pytest.raises(ValueError, match=rf"like=.* show the structure .*: {trees}$"):
        load(path)
    assert bits(load(path, like=(params, (0,))).params) == bits(params)
    # In another order weights would be swapped.
    swapped = {"trace": 0, "count": 0}
    for other in ((1, (0,)), (params, (0,), 0), (swapped, (0,))):
        with pytest.raises(ValueError, match=r"like=.* must show the structure"):
            load(path, like=other)


def test_shards_of_eight_devices_are_written_once(tmp_path):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    array = jnp.arange(64 * 512.0).reshape(64, 512)
    for spec in (P("a", "b"), P(None, "b"), P(("b", "a")), P()):
        params = {"w": jax.device_put(array, NamedSharding(mesh, spec))}
        path = save(tmp_path / "step.npz", params, (), STATE)
        assert bits(load(path).params) == bits({"w": array})
        assert path.stat().st_size < 1.1 * array.nbytes + 20_000


def test_a_file_that_fails_leaves_the_old_one(tmp_path, monkeypatch):
    path = save(tmp_path / "step.npz", PARAMS, (), STATE)
    old = path.read_bytes()

    def half(file, **_):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez", half)
    with pytest.raises(OSError, match="disk full"):
        save(path, PARAMS, (), STATE)
    assert os.listdir(tmp_path) == ["step.npz"] and path.read_bytes() == old


def test_the_old_file_is_replaced_and_not_rewritten(tmp_path):
    path = save(tmp_path / "step.npz", PARAMS, (), STATE)
    data = path.read_bytes()
    with open(path, "rb") as old_file:
        save(path, PARAMS, jnp.ones(3), STATE)
        assert old_file.read() == data != path.read_bytes()


KILLED = """
import sys
import jax.numpy as jnp, optax, optaxclip
from optaxclip.autopsy import save
optimizer = optaxclip.skip_nonfinite(optax.sgd(0.1))
w = jnp.ones(3_000_000)
state = optimizer.init(jnp.ones(1))
while True:
    save(sys.argv[1], w, (), state)
    print("saved", flush=True)
"""


@pytest.mark.slow
def test_a_run_that_is_killed_leaves_a_whole_file(tmp_path):
    path = tmp_path / "step.npz"
    command = [sys.executable, "-c", KILLED, path]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"saved\n"
        deadline = time.monotonic() + 30
        # Killed while the second file is written beside the first.
        while len(os.listdir(tmp_path)) < 2 and time.monotonic() < deadline:
            pass
        process.send_signal(signal.SIGKILL)
    assert len(os.listdir(tmp_path)) == 2
    assert load(path).params.sum() == 3_000_000


def test_nothing_is_pickled(tmp_path):
    path = save(tmp_path / "step.npz", PARAMS, (), STATE)
    arrays = np.load(path, allow_pickle=False)
    assert all(arrays[name].dtype != object for name in arrays)
    assert json.loads(str(arrays["header"]))["metrics"]["clip/limit"] == 1


def test_a_leaf_that_is_no_array_is_named(tmp_path):
    """Modules of equinox hold functions beside their arrays."""
    wrong = {"f": jnp.tanh}
    for trees, name in (((wrong, ()), "params/f"), (((), (wrong, "a")), "batch/0/f")):
        with pytest.raises(TypeError, match=f"save: {name} must be an array or a num"):
            save(tmp_path / "step.npz", *trees, STATE)
    assert os.listdir(tmp_path) == []


def test_in_jit_it_says_how_to_call_it(tmp_path):
    path = tmp_path / "step.npz"
    with pytest.raises(TypeError, match=r"save: .* inside jit.* jax\.debug\.callback"):
        jax.jit(lambda state: save(path, PARAMS, (), state).name)(STATE)
    with pytest.raises(TypeError, match=r"save: .* inside jit.* jax\.debug\.callback"):
        jax.jit(lambda w: save(path, {"w": w}, (), STATE).name)(jnp.ones(2))


def test_a_state_without_a_clipper_is_refused(tmp_path):
    path = tmp_path / "step.npz"
    state = optax.sgd(0.1).init(PARAMS)
    with pytest.raises(ValueError, match=r"opt_state must be .* a clipper"):
        save(path, PARAMS, (), state)
    with pytest.raises(ValueError, match="opt_state must be"):
        save(path, PARAMS, (), optaxclip.skip_nonfinite(optax.sgd(0.1)))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("data", [b"", b"step,loss\n1,2", b"\x80\x04N.", b"PK\x05\x06"])
def test_another_file_is_refused(tmp_path, data):
    path = tmp_path / "log.npz"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"why: .*log\.npz must be a file of autopsy"):
        load(path)
    np.save(tmp_path / "a.npy", np.ones(3))
    for header in ("[1]", "{}", "1"):
        np.savez(tmp_path / f"{header}.npz", header=np.array(header))
    np.savez(path, a=np.ones(3))
    for other in tmp_path.iterdir():
        with pytest.raises(ValueError, match="must be a file of autopsy"):
            load(other)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "nothing.npz")


# ----------------------------------------------------------------- several processes


@pytest.fixture(scope="module")
def folder_of_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(PROCESSES, context) as pool:
        tasks = [
            pool.submit(one_process, process, port, folder)
            for process in range(PROCESSES)
        ]
        names = [task.result() for task in tasks]
    assert names == ["step.0-of-2.npz", "step.1-of-2.npz"]
    return folder


def test_each_process_saves_its_shards(folder_of_processes):
    step = load(folder_of_processes / "step.npz")
    assert bits(step.params) == bits({"b": weights()[0], "w": weights()})
    assert bits(step.batch) == bits((weights(), jax.random.key(3)))
    # Neither of the files has all shards of "w", and only one has the copies of "b".
    sizes = {"params/b": [], "params/w": []}
    for process in range(PROCESSES):
        arrays = np.load(folder_of_processes / f"step.{process}-of-2.npz")
        for leaf, leaf_sizes in sizes.items():
            prefix = f'["{leaf}", '
            shards = [arrays[key] for key in arrays if key.startswith(prefix)]
            leaf_sizes.append(sum(shard.size for shard in shards))
    assert sizes == {"params/b": [6, 0], "params/w": [24, 24]}
    np.testing.assert_allclose(step.moments["w"], 0.001 * weights() ** 2, rtol=1e-5)


def test_what_differs_between_processes_is_named(folder_of_processes):
    message = r"0-of-2\.npz and own\.1-of-2\.npz differ in .*batch"
    with pytest.raises(ValueError, match=message):
        load(folder_of_processes / "own.npz")


def test_a_missing_process_is_named(folder_of_processes, tmp_path):
    name = "step.1-of-2.npz"
    (tmp_path / name).write_bytes((folder_of_processes / name).read_bytes())
    for path in (tmp_path / "step.npz", tmp_path / name):
        with pytest.raises(ValueError, match="files of all processes, got 1"):
            load(path)


def test_a_file_in_two_copies_does_not_stand_for_another(folder_of_processes, tmp_path):
    data = (folder_of_processes / "step.1-of-2.npz").read_bytes()
    for process in range(PROCESSES):
        (tmp_path / f"step.{process}-of-2.npz").write_bytes(data)
    with pytest.raises(ValueError, match=r"got 2 with \d+ of \d+ numbers"):
        load(tmp_path / "step.npz")


def test_an_older_file_of_one_process_is_not_taken(folder_of_processes, tmp_path):
    path = save(tmp_path / "step.npz", PARAMS, (), STATE)
    for process in range(PROCESSES):
        name = f"step.{process}-of-2.npz"
        (tmp_path / name).write_bytes((folder_of_processes / name).read_bytes())
    with pytest.raises(ValueError, match=r"step\.0-of-2\.npz are of two runs"):
        load(path)


def test_a_step_whose_name_begins_alike_is_another(folder_of_processes, tmp_path):
    path = save(tmp_path / "step.npz", PARAMS, (), STATE)
    for process in range(PROCESSES):
        data = (folder_of_processes / f"step.{process}-of-2.npz").read_bytes()
        (tmp_path / f"step.100.{process}-of-2.npz").write_bytes(data)
    assert bits(load(path).params) == bits(PARAMS)
    other = load(tmp_path / "step.100.npz")
    assert bits(other.params) == bits({"b": weights()[0], "w": weights()})


def test_a_name_may_have_brackets(folder_of_processes, tmp_path):
    for process in range(PROCESSES):
        data = (folder_of_processes / f"step.{process}-of-2.npz").read_bytes()
        (tmp_path / f"run[1].{process}-of-2.npz").write_bytes(data)
    step = load(tmp_path / "run[1].npz")
    assert bits(step.params) == bits({"b": weights()[0], "w": weights()})


def test_files_of_two_steps_are_refused(folder_of_processes, tmp_path):
    for process in range(PROCESSES):
        name = f"step.{process}-of-2.npz"
        arrays = dict(np.load(folder_of_processes / name))
        header = json.loads(str(arrays["header"]))
        header["metrics"]["skip/norm"] += process
        arrays["header"] = np.array(json.dumps(header))
        np.savez(tmp_path / name, **arrays)
    with pytest.raises(ValueError, match=r"step\.1-of-2\.npz differ in header"):
        load(tmp_path / "step.npz")


def test_the_folder_of_the_file_must_be_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        save(Path(tmp_path, "missing", "step.npz"), PARAMS, (), STATE)
