"""What it costs to clip each example's gradient, beside the plain gradient of the mean.

rows      time, memory and compile time on a CPU: ours, optax, jax_privacy, Opacus
devices   bytes moved and temporary bytes, compiled for a GPU and a TPU
"""

from . import devices as devices
from . import losses as losses
from . import rows as rows
from . import unseen as unseen
