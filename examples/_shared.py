"""Code that some programs share: command lines, data from installed packages, a
perceptron, and pictures for light and for dark pages.
"""

import argparse
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.typing import ArrayLike

WINDOW = 65  # characters of held-out text. The network predicts all but the first

# Help texts of arguments that many programs have.
HELP = {
    "steps": "how many steps to train",
    "lr": "the learning rate",
    "seed": "the seed of all random numbers",
    "save": "draw a picture to this path",
}

File = Path | None  # None: nothing is written
Layers = list[dict[str, Array]]


def run(main: Callable[..., Any], **help_texts: str) -> None:
    """Calls `main` with the arguments of the command line.

    Args:
      main: a function whose arguments all have defaults: numbers, and None for a path.
      **help_texts: for arguments that are not in HELP.
    """
    help_texts = HELP | help_texts
    parser = argparse.ArgumentParser(
        description=main.__globals__["__doc__"],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, argument in inspect.signature(main).parameters.items():
        default = argument.default
        if default is None:
            read = Path
            metavar = "PATH"
            default_text = "nothing is written"
        else:
            lowest = 1 if name == "steps" else 0
            read = _number_from(lowest, type(default))
            metavar = name.upper()
            default_text = default
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=read,
            default=default,
            metavar=metavar,
            help=f"{help_texts[name]} (default: {default_text})",
        )
    main(**vars(parser.parse_args()))


def _number_from(lowest: int, number_type: type) -> Callable[[str], float]:
    def read(text: str) -> float:
        number = number_type(text)
        if not lowest <= number < math.inf:
            raise argparse.ArgumentTypeError(f"must be at least {lowest}, got {number}")
        return number

    read.__name__ = number_type.__name__  # argparse shows it for other texts
    return read


@contextmanager
def needed_packages() -> Iterator[None]:
    """Says how to install a missing package that is imported inside."""
    try:
        yield
    except ModuleNotFoundError as error:
        error.add_note('Install what this program needs: pip install -e ".[examples]"')
        raise


class Text(NamedTuple):
    """The English prose of Python's own help pages, as numbers."""

    alphabet: str  # the character of each number
    training: Array  # int32[characters]: the first 95 %
    validation: Array  # int32[windows, WINDOW]: the rest, never trained on


def read_text() -> Text:
    """The help pages as one line of prose. Repeated paragraphs are left out, and so are
    code, grammar and the rulers of tables.
    """
    paragraphs = dict.fromkeys("\n\n".join(topics.values()).split("\n\n"))
    words = " ".join(paragraphs).split()
    words = [word for word in words if word.isascii() and _is_word(word)]
    alphabet, numbers = np.unique(list(" ".join(words)), return_inverse=True)
    numbers = numbers.astype(np.int32)
    training, held_out = np.split(numbers, [len(numbers) * 95 // 100])
    windows = held_out[: len(held_out) // WINDOW * WINDOW].reshape(-1, WINDOW)
    return Text(
        alphabet="".join(alphabet),
        training=jnp.asarray(training),
        validation=jnp.asarray(windows),
    )


def _is_word(word: str) -> bool:
    return word.strip("().,:;").isalpha()


class Digits(NamedTuple):
    """Handwritten digits of 8 by 8 pixels."""

    images: np.ndarray  # float32[digits, 64] in [0, 1]
    labels: np.ndarray  # int32[digits]


def read_digits(held_out: int, seed: int = 0) -> tuple[Digits, Digits]:
    """The digits to train on, and the held-out digits, in a random order."""
    with needed_packages():
        from sklearn.datasets import load_digits
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    images = (images[order] / 16).astype(np.float32)
    labels = labels[order].astype(np.int32)
    training = Digits(images[held_out:], labels[held_out:])
    return training, Digits(images[:held_out], labels[:held_out])


def new_perceptron(*sizes: int, seed: int = 0) -> Layers:
    """Random weights for layers of these sizes, and biases of 0."""
    random = np.random.default_rng(seed)
    layers = []
    for inputs, outputs in pairwise(sizes):
        weights = random.normal(size=(inputs, outputs)) / inputs**0.5
        weights = jnp.asarray(weights, jnp.float32)
        layers.append({"w": weights, "b": jnp.zeros(outputs)})
    return layers


def perceptron(layers: Layers, x: ArrayLike) -> Array:
    """The outputs of the last layer. All layers before it end in tanh."""
    *hidden_layers, last = layers
    activations = jnp.asarray(x)
    for layer in hidden_layers:
        activations = jnp.tanh(activations @ layer["w"] + layer["b"])
    return activations @ last["w"] + last["b"]


def cross_entropy(logits: Array, labels: ArrayLike) -> Array:
    """The mean over all labels, in nats."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean()


class Look(NamedTuple):
    """Colours that people with any kind of colour vision can tell apart."""

    suffix: str  # of the file's name
    style: str  # of matplotlib
    background: str
    grey: str
    orange: str
    blue: str
    green: str


# Okabe and Ito's colours. On dark pages they are lighter.
LIGHT = Look(
    suffix="",
    style="default",
    background="#ffffff",
    grey="#8f8f8f",
    orange="#d55e00",
    blue="#0072b2",
    green="#007a5a",
)
DARK = Look(
    suffix="_dark",
    style="dark_background",
    background="#1e2129",
    grey="#9a9a9a",
    orange="#ff8c42",
    blue="#56b4e9",
    green="#2fc79a",
)


def draw_both(
    path: Path, panels: int, draw: Callable[[Any, Look], None], height: float = 4
) -> None:
    """Saves what `draw(axes, look)` draws into panels that share their axes to `path`,
    and for dark pages with "_dark" in its name.
    """
    with needed_packages():
        from matplotlib import rc_context, style
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    path.parent.mkdir(parents=True, exist_ok=True)
    for look in (LIGHT, DARK):
        with style.context(look.style), rc_context({"font.size": 14}):
            figure = Figure((13, height), layout="constrained")
            figure.set_facecolor(look.background)
            FigureCanvasAgg(figure)
            axes = figure.subplots(1, panels, sharex=True, sharey=True)
            for panel in axes:
                panel.set_facecolor(look.background)
                panel.spines[["top", "right"]].set_visible(False)
            draw(axes, look)
            figure.savefig(path.with_stem(path.stem + look.suffix), dpi=100)
    print(f"\nThe picture is in {path}")


def annotate(panel: Any, text: str, *, place: tuple[float, float], colour: str) -> None:
    """Writes into a panel. The place is the text's upper right corner, in [0, 1]."""
    panel.text(
        *place, text, color=colour, transform=panel.transAxes, ha="right", va="top"
    )
