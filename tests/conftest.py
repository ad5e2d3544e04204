"""Settings that must stand before JAX is imported: eight devices on the CPU and no
silent broadcasting of ranks.
"""

import gc
import os

import pytest

# Nearly all of the time goes into compiling, and on JAX 0.10.2 most of that into
# machine code, so it is written plainly here, without LLVM's optimisations: one program
# of each clipper takes 1.7 s in place of 9.3; on 0.12 it saves less, a tenth of the
# suite. Temporary memory and reductions were the same in five clipped steps that were
# compared; on 0.10.2 one in ten fusions is cut otherwise, on 0.12 none. FULL_CODE=1
# tests what users get, as CI does each night on the newest JAX.
PLAIN_CODE = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_parallel_codegen_split_count=1 "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)

os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8 "
    f"{'' if os.environ.get('FULL_CODE') else PLAIN_CODE}"
)
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
# Where JAX_COMPILATION_CACHE_DIR is set, all that is compiled is kept there for the
# next run. Writing takes a twentieth of a run that finds nothing, so it is not done
# unasked.
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
# Tracing makes many small objects: looking through them less often saved a tenth.
gc.set_threshold(200_000, 20, 20)


@pytest.fixture(scope="module")
def as_programs_run():
    """For the examples: ranks are broadcast, as they are for users."""
    import jax

    with jax.numpy_rank_promotion("allow"):
        yield
