"""What the commands print."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def printing() -> Iterator[None]:
    """A block that prints. `| head` may close the pipe before everything is printed,
    which is no error.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
