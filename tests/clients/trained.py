"""What a run hands back, and the packages that are run."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple


class Trained(NamedTuple):
    """One run of a package's own trainer."""

    losses: list[float]  # as the package reports them
    state: Any  # the train state, or what the package keeps in its place
    restored: Any  # the same, out of a checkpoint


class Client(NamedTuple):
    """A package whose trainer is run."""

    install: str  # what pip installs
    module: str  # the file beside this one that runs it
    trainer: str  # what of the package trains
    checkpoint: str  # what saves and restores

    def train(self, folder: Path) -> Trained:
        """Trains a few steps. The module is imported here, since that imports the
        package, which may look up `optax.clip_by_global_norm` right then.
        """
        run: Callable[[Path], Trained] = import_module(
            f"{__package__}.{self.module}"
        ).train
        return run(folder)


CLIENTS = {
    "sbx": Client("sbx-rl", "run_sbx", "PPO on CartPole", "`PPO.save`, `PPO.load`"),
    "numpyro": Client("numpyro", "run_numpyro", "SVI, AutoNormal", "Orbax"),
    "optimistix": Client(
        "optimistix",
        "run_optimistix",
        "OptaxMinimiser in `minimise`",
        "`eqx.tree_serialise_leaves`",
    ),
    "tunix": Client("google-tunix", "run_tunix", "PeftTrainer", "its own, Orbax"),
    "kauldron": Client("kauldron", "run_kauldron", "Trainer", "its own, Orbax"),
}
