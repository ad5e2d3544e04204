"""Settings that must stand before JAX is imported: eight devices on the CPU, and no silent broadcasting of ranks."""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
