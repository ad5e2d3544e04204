"""What each of two processes saves. Nothing is computed when this is imported, since a
process chooses its devices before.
"""

from pathlib import Path

import jax
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optaxclip
from optaxclip.autopsy import save

PROCESSES, DEVICES_EACH = 2, 2


def weights() -> np.ndarray:
    return np.arange(48, dtype=np.float32).reshape(8, 6)


def one_process(process: int, port: int, folder: Path) -> str:
    """Saves a step of global arrays, and one whose batch differs."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES_EACH)
    jax.distributed.initialize(f"127.0.0.1:{port}", PROCESSES, process)
    size = PROCESSES * DEVICES_EACH
    mesh = jax.make_mesh((size,), ("d",), axis_types=(AxisType.Auto,))

    def place(array: np.ndarray, spec: P) -> jax.Array:
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)

    params = {"w": place(weights(), P("d")), "b": place(weights()[0], P())}
    batch = (place(weights(), P("d")), jax.random.key(3))
    optimizer = optaxclip.skip_nonfinite(optax.adam(0.1))
    _, state = jax.jit(optimizer.update)(params, jax.jit(optimizer.init)(params))
    path = save(folder / "step.npz", params, batch, state)
    save(folder / "own.npz", params, np.float32(process), state)
    jax.distributed.shutdown()
    return path.name
