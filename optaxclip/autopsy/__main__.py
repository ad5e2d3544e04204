"""The command `python -m optaxclip.autopsy step.npz train:loss`."""

import argparse
import sys

from ..check import object_of
from . import why


def main(arguments: list[str] | None = None) -> None:
    """Replays a step that optaxclip.autopsy.save has written, and says what broke it:
    chip, dtype, data, layer or model.
    """
    # Before Python 3.14 argparse would call the program `__main__.py`.
    parser = argparse.ArgumentParser(
        prog="python -m optaxclip.autopsy", description=main.__doc__
    )
    add = parser.add_argument
    add("file", help="the path that was given to save")
    add("loss", type=object_of, help="module:loss, what the step differentiates")
    add("--wide", type=object_of, help="module:loss, the same loss in float32")
    add("--like", type=object_of, help="module:trees, (params, batch) as saved")
    add("--microbatch", type=int, default=1, help="examples at once (default: 1)")
    options = parser.parse_args(arguments)
    try:
        verdict = why(
            options.loss,
            options.file,
            wide=options.wide,
            like=options.like,
            microbatch=options.microbatch,
        )
    except Exception as error:
        # An error of the loss needs its traceback. A wrong file or argument does not.
        if str(error).startswith("why: "):
            sys.exit(str(error))
        raise
    print(verdict)


if __name__ == "__main__":
    main()
