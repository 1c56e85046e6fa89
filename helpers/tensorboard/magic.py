"""The magic ``%tensorboard`` of a notebook, with the profiler tab corrected: ``%load_ext helpers.tensorboard``."""

from __future__ import annotations

import argparse
import shlex
from typing import NoReturn

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from helpers import tensorboard, traces


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. {self.format_usage()}")  # instead of the end of the kernel


_parser = _Parser(prog="%tensorboard", add_help=False)
_place = _parser.add_mutually_exclusive_group(required=True)
_place.add_argument("folder", nargs="?", metavar="LOGDIR")
_place.add_argument("--logdir")
_parser.add_argument("--height", type=int, default=800)


def register(shell: InteractiveShell) -> None:
    """Let `shell` know the magic; it takes the place of TensorBoard's own of that name."""
    shell.register_magic_function(show, "line", "tensorboard")


def show(line: str) -> None:
    """Show a folder's traces: ``%tensorboard LOGDIR`` or, as TensorBoard's own, ``%tensorboard --logdir LOGDIR``."""
    options = _parser.parse_args(shlex.split(line))
    try:
        tensorboard.show(options.folder or options.logdir, height=options.height)
    except (traces.NoTraces, tensorboard.TensorBoardFailed) as error:
        raise UsageError(str(error)) from None
