"""Versions, devices and where to go on, as `python -m optaxclip` prints them."""

import platform

import jax
import optax

from . import __version__

WHERE = """
python -m optaxclip.replay log.jsonl         what a limit does to logged norms
python -m optaxclip.doctor log.jsonl         why a run breaks
python -m optaxclip.autopsy step.npz train:loss
                                             what broke a skipped step
python -m optaxclip.check module:make_step   what is wrong in a training step
OPTAXCLIP_PLATFORM=plain                     plain jnp, if a new JAX breaks something"""


def main() -> None:
    """Prints versions, devices and the commands to go on with."""
    libraries = f"jax {jax.__version__}, optax {optax.__version__}"
    print(f"optaxclip {__version__}, {libraries}")
    print(f"Python {platform.python_version()} on {platform.platform()}")
    devices = jax.devices()
    print(f"{len(devices)} x {devices[0].device_kind}, {jax.default_backend()}")
    print(WHERE)


if __name__ == "__main__":
    main()
