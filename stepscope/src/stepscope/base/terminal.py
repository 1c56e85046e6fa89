"""What a terminal shows and a file does not: colours, and progress."""

import os
import sys
from contextlib import suppress
from typing import IO, TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from tqdm import tqdm

BOLD, GREEN, PLAIN = "\x1b[1m", "\x1b[32m", "\x1b[0m"


def colours(stream: IO[str] | None) -> bool:
    """Return whether a stream shows colours: a terminal does, unless NO_COLOR is set (https://no-color.org)."""
    return shows(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def shows(stream: IO[str] | None) -> bool:
    """Return whether a stream is an open terminal."""
    with suppress(ValueError, OSError, AttributeError):  # it is closed, or only something that can be written to
        return stream is not None and stream.isatty()
    return False


def progress(stream: IO[str] | None, text: str) -> None:
    """Replace the line of progress on a terminal; a file receives nothing."""
    if stream is not None and shows(stream):
        with suppress(OSError, ValueError):
            print(f"\r{text}\x1b[K", end="", file=stream, flush=True)


def bar(title: str, unit: str, total: int | None = None, delay: float = 0) -> "tqdm[NoReturn]":
    """Return a bar of `total` units for a ``with`` block, which appears after `delay` seconds.

    It appears on a terminal and in a notebook only: a log file would get a line for each of its states.
    """
    from tqdm import tqdm  # here, because `stepscope run` needs none

    stream = sys.stdout
    notebook = type(stream).__module__.startswith(("ipykernel.", "google.colab."))
    hidden = not (notebook or shows(stream))
    return tqdm(desc=title, unit=unit, total=total, delay=delay, file=stream, mininterval=0.5, disable=hidden)
