"""Devices that are only described, and the environments that compile for them."""

import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

Place = Callable[[tuple[int, ...]], jax.sharding.Sharding]

ROOT = Path(__file__).parent.parent.parent
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84929347584
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 7 }
runtime_version { major: 12 minor: 8 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


class Environment(NamedTuple):
    """What compiles for one kind of device."""

    name: str
    platform: str  # as JAX calls it
    module: str  # is there where the packages are
    packages: str
    variables: dict[str, str]

    def python(self) -> str | None:
        """The interpreter that has the packages, if there is one."""
        if find_spec(self.module):
            return sys.executable
        python = ROOT / f".venv-{self.name}" / "bin" / "python"
        return str(python) if python.exists() else None

    def how_to_make(self) -> str:
        """A line for the shell."""
        packages = self.packages.format(jax=version("jax"))
        packages += f" 'optax=={version('optax')}'"
        folder = f".venv-{self.name}"
        return f"python -m venv {folder} && {folder}/bin/pip install {packages}"


GPU = Environment(
    "gpu",
    "cuda",
    "jax_cuda12_plugin",
    "'jax[cuda12-local]=={jax}' nvidia-cuda-nvcc-cu12",
    # Kernels are not tried out: there is no device to try them on.
    {"XLA_FLAGS": "--xla_gpu_autotune_level=0"},
)
TPU = Environment(
    "tpu",
    "tpu",
    "libtpu",
    "'jax[tpu]=={jax}'",
    {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-16",
        # libtpu locks the TPU of a machine, also where there is none.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    },
)


def environment_of(target: str) -> Environment:
    """The environment that compiles for "h100", "v5e" or "v5e:4x4"."""
    return TPU if target.startswith("v5e") else GPU


@cache
def devices_of(target: str) -> list[Any]:
    """The devices of a target, as a compiler sees them. Cached, since two descriptions
    of one device are not equal.
    """
    _, _, form = target.partition(":")
    if environment_of(target) is TPU:
        topology = topologies.get_topology_desc(f"v5e:{form or '2x2'}", "tpu")
    else:
        options = {"target_config": H100, "topology": f"1x1x{form or 1}"}
        topology = topologies.get_topology_desc(platform="cuda", **options)
    return topology.devices


def placement(
    target: str, *, is_stacked: bool = False, splits_vectors: bool = False
) -> Place:
    """Where an array of a shape is: on the first device, or split over a mesh.

    On a mesh matrices are split over both mesh axes, if told so also those that are
    stacked on one more axis, and vectors over one. Every device holds the rest.
    """

    def spec(shape: tuple[int, ...]) -> P:
        if splits_vectors and len(shape) == 1 and shape[0] > 64:
            return P("model")
        stacked = [None] * (len(shape) - 2)
        if len(shape) < 2 or min(shape[-2:]) <= 64 or len(stacked) > is_stacked:
            return P()
        return P(*stacked, "data", "model")

    return _placed(target, spec)


def placement_of_batch(target: str) -> Place:
    """The same for a batch, which is split over the first mesh axis."""
    return _placed(target, lambda shape: P("data"))


def _placed(target: str, spec: Callable[[tuple[int, ...]], P]) -> Place:
    devices = devices_of(target)
    if ":" not in target:
        return lambda shape: SingleDeviceSharding(devices[0])
    grid = np.array(devices).reshape(-1, 4)
    mesh = Mesh(grid, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    return lambda shape: NamedSharding(mesh, spec(shape))
