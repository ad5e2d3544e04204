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


def text_of(error: Exception, call: str) -> str:
    """What an error that ends a command prints. For a file that cannot be opened
    Python's own text begins with a number, "[Errno 2]". This one begins with the
    command, as others do.
    """
    if isinstance(error, OSError) and error.filename is not None:
        return f"{call}: {error.filename}: {error.strerror}"
    return str(error)
